"""Subagents as a client sees them: over the wire, and with the Stop button."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import Entry, Hang
from delegating import LIMIT_S, alone, calls, client, delegates, runs
from serving import serving
from talking import said_by_agent

from agent_core.events import Aborted, TurnEnd
from agent_core.sessions.sqlite import SqliteStore

CANCELLED = {"outcome": {"outcome": "cancelled"}}


def selected(option: str) -> dict[str, Any]:
    return {"outcome": {"outcome": "selected", "optionId": option}}


TWO_DOWN: dict[str, Sequence[Entry]] = {
    "go": [delegates("mid")],
    "mid": [delegates("low")],
    "low": [runs("echo hi")],
}


# --- questions from below --------------------------------------------------------------------


@pytest.mark.requirement("B030", "B045", "B052", "B053", "B059")
@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_question_two_levels_down_is_asked_on_the_root_session_with_the_names(
    tmp_path: Path, is_allowed: bool
) -> None:
    async with client(tmp_path, TWO_DOWN) as at:
        prompt = at.prompt("go")
        question = await at.asked()
        (call_id,) = at.call_ids()
        asked = question["params"]["toolCall"]

        assert question["params"]["sessionId"] == at.id
        assert (asked["toolCallId"], asked["status"]) == (call_id, "in_progress")
        assert asked["title"] == "mid › low › Run: echo hi"
        assert (asked["kind"], asked["rawInput"]) == ("execute", {"command": "echo hi"})

        at.answer(question, selected("allow-once" if is_allowed else "reject-once"))
        assert await at.stop_reason(prompt) == "end_turn"

        told = [str(request.messages) for request in at.model.requests]
        assert any("the user said no" in each for each in told) != is_allowed
        assert at.calls_of(call_id)[-1]["status"] == "completed"
        titles = [u["title"] for u in at.calls_of(call_id) if "title" in u]
        assert titles == ["mid: mid", "mid: mid"]  # the question had given it another one
        assert len(at.questions) == 1
        assert alone(at)


@pytest.mark.race
@pytest.mark.requirement("B035", "B036", "B051")
@pytest.mark.parametrize("answers", ["never", "before", "after"])
async def test_a_cancel_withdraws_the_question_two_levels_down(
    tmp_path: Path, answers: str
) -> None:
    async with client(tmp_path, TWO_DOWN) as at:
        prompt = at.prompt("go")
        question = await at.asked()
        if answers == "before":
            at.answer(question, CANCELLED)
        at.cancel()
        if answers == "after":
            at.answer(question, CANCELLED)

        assert await at.stop_reason(prompt) == "cancelled"
        assert alone(at)
        assert not at.at.connection.peer._pending
        (call_id,) = at.call_ids()
        assert at.calls_of(call_id)[-1]["status"] == "failed"
        at.answer(question, selected("allow-once"))  # late, and nobody cares
        n_requests = len(at.model.requests)
        await at.say("more")
        assert len(at.model.requests) == n_requests + 1
        assert "hi" not in str(at.model.requests[-1].messages)


@pytest.mark.requirement("B041")
async def test_dismissing_the_question_two_levels_down_stops_the_turn(tmp_path: Path) -> None:
    async with client(tmp_path, TWO_DOWN) as at:
        prompt = at.prompt("go")
        at.answer(await at.asked(), CANCELLED)

        assert await at.stop_reason(prompt) == "cancelled"
        assert alone(at)
        assert len(at.model.requests) == 3


@pytest.mark.race
@pytest.mark.requirement("B037", "B038")
async def test_thirty_questions_two_levels_down_are_all_withdrawn(tmp_path: Path) -> None:
    script: dict[str, Sequence[Entry]] = {
        "go": [delegates(*(f"m{n}" for n in range(6)))],
        **{f"m{n}": [delegates(*(f"l{n}-{k}" for k in range(5)))] for n in range(6)},
        **{f"l{n}-{k}": [runs()] for n in range(6) for k in range(5)},
    }
    async with client(tmp_path, script) as at:
        prompt = at.prompt("go")
        await at.asked(30)
        at.cancel()

        assert await at.stop_reason(prompt) == "cancelled"
        assert alone(at)
        assert not at.at.connection.peer._pending
        withdrawn = [m for m in at.at.lines.sent if m.get("method") == "$/cancel_request"]
        asked = {question["id"] for question in at.questions}
        assert {message["params"]["requestId"] for message in withdrawn} == asked
        for call_id in at.call_ids():
            assert at.calls_of(call_id)[-1]["status"] == "failed"
        assert (await at.say("more"))[-1]["sessionUpdate"] == "agent_message_chunk"


@pytest.mark.requirement("B053")
async def test_an_always_from_one_child_holds_for_all_of_them(tmp_path: Path) -> None:
    names = [f"c{n}" for n in range(4)]
    script = {
        "one": [delegates("c0")],
        "rest": [delegates(*names[1:])],
        **{name: [runs("true")] for name in names},
    }
    async with client(tmp_path, script) as at:
        prompt = at.prompt("one")
        at.answer(await at.asked(), selected("allow-always"))
        await at.at.result(prompt)
        await at.say("rest")

        assert len(at.questions) == 1


# --- a Stop ----------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("B048", "B049", "R68")
@pytest.mark.parametrize("how", ["cancel", "end of input"])
async def test_a_stop_over_the_wire_reaches_the_shell_two_levels_down(
    tmp_path: Path, how: str
) -> None:
    pid = tmp_path / "pid"
    async with serving("--state-dir", str(tmp_path / "state"), permission="allow") as at:
        session = await at.new_session(tmp_path)
        request = at.prompt(session, f"delegate delegate run echo $$ > {pid}; sleep 60")
        with anyio.fail_after(LIMIT_S):
            while not (pid.exists() and pid.read_text().strip()):  # noqa: ASYNC110
                await anyio.sleep(0.005)
            if how == "cancel":
                at.cancel(session)
                assert await at.stop_reason(request) == "cancelled"
                assert not is_alive(int(pid.read_text()))
            await at.wire.close_stdin()
            await at.wire.exited()
        assert not is_alive(int(pid.read_text()))
    store = SqliteStore(tmp_path / "state" / "sessions.sqlite3")
    levels = []
    with sqlite3.connect(tmp_path / "state" / "sessions.sqlite3") as connection:
        ids = [row[0] for row in connection.execute("select id from sessions order by depth")]
    connection.close()
    for session_id in ids:
        _header, events = await store.load(session_id)
        levels.append(events[-1].data)
    await store.aclose()
    assert len(levels) == 3
    if how == "cancel":
        assert levels == [TurnEnd(1, Aborted())] * 3
    written = (tmp_path / "state" / "sessions.sqlite3").read_bytes()
    assert not re.search(rb'"kind": ?"(user|parent)"', written)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.race
@pytest.mark.requirement("B049", "B060")
async def test_the_end_of_input_ends_a_command_in_the_background(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with serving("--state-dir", str(tmp_path / "state"), permission="allow") as at:
        session = await at.new_session(tmp_path)
        command = f"run echo $$ > {pid}; sleep 60"
        request = at.prompt(session, f"delegate delegate {command} in the background")
        assert await at.stop_reason(request) == "end_turn"
        with anyio.fail_after(LIMIT_S):
            while not (pid.exists() and pid.read_text().strip()):  # noqa: ASYNC110
                await anyio.sleep(0.005)
            await at.wire.close_stdin()
            await at.wire.exited()
        assert not is_alive(int(pid.read_text()))


@pytest.mark.requirement("B057")
async def test_progress_is_shown_on_the_call_that_it_belongs_to(tmp_path: Path) -> None:
    script = {
        "go": [delegates("left", "right")],
        "left": [runs("echo left")],
        "right": [runs("echo right")],
    }
    async with client(tmp_path, script, mode="bypass") as at:
        await at.say("go")

        for name, call_id in zip(("left", "right"), at.call_ids(), strict=True):
            shown = str([u.get("content") for u in at.calls_of(call_id)])
            assert f"echo {name}" in shown
            other = "right" if name == "left" else "left"
            assert f"echo {other}" not in shown


# --- what it takes ---------------------------------------------------------------------------


@pytest.mark.requirement("B151", "B153")
async def test_the_answer_says_what_all_levels_took_and_the_context_is_the_roots_own(
    tmp_path: Path,
) -> None:
    script = {
        "go": [calls("delegate", {"task": "mid"}, tokens=1)],
        "mid": [calls("delegate", {"task": "low"}, tokens=20)],
        "low": [calls("list", {}, tokens=300)],
    }
    async with client(tmp_path, script, mode="bypass") as at:
        result = await at.at.result(at.prompt("go"))

        assert result["usage"]["inputTokens"] == 321
        told = [u for u in at.updates if u["sessionUpdate"] == "usage_update"]
        assert [(u["used"], u["cost"]["amount"]) for u in told] == [(1, 1.0), (1, 321.0)]


# --- in the background -----------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("B047", "R74")
async def test_the_answer_to_a_cancelled_prompt_waits_for_those_in_the_background(
    tmp_path: Path,
) -> None:
    front, behind = Hang(), Hang(is_slow=True)
    script = {
        "go": [delegates("behind", background=True), delegates("front")],
        "front": [front],
        "behind": [behind],
    }
    async with client(tmp_path, script) as at:
        prompt = at.prompt("go")
        await front.hanging.wait()
        await behind.hanging.wait()
        at.cancel()
        await behind.noticed.wait()
        await at.agent._loop.when_idle()  # its turn is over
        await anyio.wait_all_tasks_blocked()

        assert at.at.lines.responses(prompt) == []

        behind.gate.set()
        assert await at.stop_reason(prompt) == "cancelled"
        assert alone(at)


@pytest.mark.race
@pytest.mark.requirement("B047", "B055", "B058", "B123")
async def test_a_cancel_without_a_prompt_stops_the_background_and_nothing_is_said(
    tmp_path: Path,
) -> None:
    hang = Hang()
    script = {"go": [delegates("behind", background=True)], "behind": [hang]}
    async with client(tmp_path, script) as at:
        await at.say("go")
        await hang.hanging.wait()
        await at.say("another")  # stops none
        assert not alone(at)
        before = len(at.at.lines.sent)

        at.cancel()
        await at.agent.when_idle()

        assert alone(at)
        assert at.at.lines.sent[before:] == []
        updates = await at.say("more")
        assert [u["sessionUpdate"] for u in updates] == ["agent_message_chunk"]


@pytest.mark.requirement("B059", "B123")
async def test_the_end_is_shown_in_the_next_turn_as_a_call_of_its_own(tmp_path: Path) -> None:
    script = {"go": [delegates("ann", background=True)]}
    async with client(tmp_path, script) as at:
        await at.say("go")
        (started,) = at.call_ids()
        child = at.agent.background.get("ann")
        assert child is not None
        await child.over.wait()
        await anyio.wait_all_tasks_blocked()
        assert at.calls_of(started)[-1]["status"] == "completed"
        n_shown = len(at.calls_of(started))

        updates = await at.say("more")

        assert updates[0]["sessionUpdate"] == "tool_call"
        assert (updates[0]["title"], updates[0]["status"]) == (
            "The subagent ann has finished.",
            "completed",
        )
        assert len(at.calls_of(started)) == n_shown


@pytest.mark.requirement("B052", "B123")
@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_question_from_the_background_has_a_call_of_its_own(
    tmp_path: Path, is_allowed: bool
) -> None:
    script = {
        "go": [delegates("behind", background=True)],
        "behind": [delegates("low")],
        "low": [runs("echo hi")],
    }
    async with client(tmp_path, script) as at:
        await at.say("go")
        (started,) = at.call_ids()
        n_shown = len(at.calls_of(started))
        question = await at.asked()
        _started, own = at.call_ids()

        asked = question["params"]["toolCall"]
        assert asked["toolCallId"] == own
        assert asked["title"] == "behind › low › Run: echo hi"
        assert at.calls_of(own)[0]["title"] == asked["title"]

        at.answer(question, selected("allow-once" if is_allowed else "reject-once"))
        child = at.agent.background.get("behind")
        assert child is not None
        await child.over.wait()

        assert at.calls_of(own)[-1]["status"] == ("completed" if is_allowed else "failed")
        assert len(at.calls_of(started)) == n_shown


@pytest.mark.race
@pytest.mark.requirement("B044", "B051")
async def test_a_question_from_the_background_is_withdrawn_by_a_cancel_without_a_prompt(
    tmp_path: Path,
) -> None:
    script = {"go": [delegates("behind", background=True)], "behind": [runs()]}
    async with client(tmp_path, script) as at:
        await at.say("go")
        await at.asked()
        await at.say("another")  # is not held up by it
        at.cancel()
        await at.agent.when_idle()

        assert alone(at)
        assert not at.at.connection.peer._pending
        assert at.calls_of(at.call_ids()[1])[-1]["status"] == "failed"


@pytest.mark.requirement("B057")
async def test_the_person_lists_and_stops_one_of_them(tmp_path: Path) -> None:
    ann, bob = Hang(), Hang()
    script = {"go": [delegates("ann", "bob", background=True)], "ann": [ann], "bob": [bob]}
    async with client(tmp_path, script) as at:

        async def told(text: str) -> str:
            return said_by_agent(await at.say(text))

        assert await told("/agents") == "There are no subagents in the background."
        await at.say("go")
        await ann.hanging.wait()
        await bob.hanging.wait()
        assert [line.split(":")[0] for line in (await told("/agents")).splitlines()] == [
            "- ann",
            "- bob",
        ]
        assert "There are `ann`, `bob`" in await told("/stop")
        assert await told("/stop ann") == "`ann` has been stopped."
        assert await told("/stop ann") == "`ann` has been stopped."
        assert (await told("/agents")).startswith("- ann: stopped: ann\n- bob: running")
        assert len(at.agent._runtime.agents) == 2


@pytest.mark.race
@pytest.mark.requirement("B060")
@pytest.mark.parametrize("method", ["session/close", "session/delete"])
async def test_closing_or_deleting_the_session_ends_those_in_the_background(
    tmp_path: Path, method: str
) -> None:
    hang = Hang()
    script = {"go": [delegates("behind", background=True)], "behind": [hang]}
    async with client(tmp_path, script) as at:
        await at.say("go")
        await hang.hanging.wait()

        await at.at.result(at.at.say(method, sessionId=at.id))

        assert at.agent._runtime.agents == {}
        assert hang.noticed.is_set()


@pytest.mark.requirement("R74", "B047")
async def test_one_in_the_background_that_ignores_a_stop_without_a_prompt_is_named_until_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_core.background.SLOW_AFTER_S", 0)
    deaf = Hang(is_slow=True)
    script = {"go": [delegates("deaf", background=True)], "deaf": [deaf]}
    async with client(tmp_path, script) as at:
        await at.say("go")
        await deaf.hanging.wait()
        at.cancel()
        await at.at.lines.until(lambda: at.calls_of("stopping-deaf"))
        deaf.gate.set()
        await at.at.lines.until(lambda: len(at.calls_of("stopping-deaf")) == 2)

        begun, over = at.calls_of("stopping-deaf")
        assert (begun["title"], begun["status"]) == ("Waiting for deaf to stop", "in_progress")
        assert (over["title"], over["status"]) == ("deaf has stopped", "completed")
        await at.agent.when_idle()
        assert alone(at)


async def test_one_in_the_background_that_heeds_a_stop_is_not_spoken_of(tmp_path: Path) -> None:
    hang = Hang()
    script = {"go": [delegates("good", background=True)], "good": [hang]}
    async with client(tmp_path, script) as at:
        await at.say("go")
        await hang.hanging.wait()
        before = len(at.updates)
        at.cancel()
        await at.agent.when_idle()

        assert len(at.updates) == before
