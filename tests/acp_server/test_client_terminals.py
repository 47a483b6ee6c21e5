"""Commands in the client's terminals: every one is let go of, whatever client and turn do."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import acp
import anyio
import pytest
from acp import schema
from lending import NEVER, TERMINAL, Fails, Lender, lending
from msgspec import UNSET
from serving import SERVE, assert_pure
from test_python_sdk import Editor as SdkClient
from test_python_sdk import prompt

from acp_server import client_calls, client_terminals
from acp_server import types as wire
from acp_server.updates import updates_for
from agent_core.agent import Agent
from agent_core.cancellation import AbortController
from agent_core.content import Terminal
from agent_core.errors import ToolError
from agent_core.events import Event, ToolProgress, ToolResult
from agent_core.testing import abort_at_every_await
from agent_core.tools.tool import CommandAborted, CommandResult
from conformance.client import Client
from conformance.editor import CAPABILITIES, Editor
from conformance.wire import Wire

CREATE, WAIT, OUTPUT = "terminal/create", "terminal/wait_for_exit", "terminal/output"
KILL, RELEASE = "terminal/kill", "terminal/release"
EMBEDDED = [{"type": "terminal", "terminalId": "t1"}]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_terminals, "EXIT_LIMIT_S", 0.05)
    monkeypatch.setattr(client_terminals, "LAST_OUTPUT_LIMIT_S", 0.02)


def assert_released(lender: Lender, *terminal_ids: str) -> None:
    """Each terminal was released once, after anything else that was asked about it."""
    by_terminal = [
        (request["method"], request["params"].get("terminalId")) for request in lender.asked
    ]
    for terminal_id in terminal_ids or ("t1",):
        about = [method for method, named in by_terminal if named == terminal_id]
        assert about.count(RELEASE) == 1, by_terminal
        assert about[-1] == RELEASE


def agent_of(lender: Lender) -> Agent:
    agent = lender.at.connection.sessions[lender.session].agent
    assert agent is not None
    return agent


def result_text(lender: Lender, at: int = -1) -> str:
    """What the model was told of a call, from the log."""
    events = agent_of(lender).session.events
    return [event.data for event in events if isinstance(event.data, ToolResult)][at].output


# --- a command that runs to its end ---------------------------------------------------------


@pytest.mark.requirement("ACP-123", "ACP-131", "ACP-133", "B166")
async def test_a_command_runs_in_a_terminal_that_is_embedded_at_once(tmp_path: Path) -> None:
    async with lending(tmp_path, {**TERMINAL, WAIT: NEVER}, terminals=True) as lender:
        prompt = lender.at.prompt(lender.session, "run echo 'a b'")
        waiting = await lender.until_asked(WAIT)

        create = lender.requests(CREATE)[0]
        assert create["params"] == {
            "sessionId": lender.session,
            "command": "/bin/sh",
            "args": ["-c", "echo 'a b'"],
            "cwd": str(tmp_path / "work"),
            "outputByteLimit": 32768,
        }
        (call,) = lender.calls()
        assert (call["status"], call["content"]) == ("in_progress", EMBEDDED)
        lender.answer(waiting, {"exitCode": 0})
        assert (await lender.at.result(prompt))["stopReason"] == "end_turn"

        (call,) = lender.calls()
        assert (call["status"], call["content"]) == ("completed", EMBEDDED)
        assert lender.methods == ["create", "wait_for_exit", "output", "release"]
        assert_released(lender)
        assert result_text(lender) == "printed"


@pytest.mark.requirement("ACP-131")
async def test_a_client_without_terminals_is_asked_for_none(tmp_path: Path) -> None:
    async with lending(tmp_path, {}, reads=True, writes=True) as lender:
        assert await lender.prompt("run echo here") == "end_turn"

        assert lender.asked == []
        assert result_text(lender) == "here"


@pytest.mark.parametrize(
    ("exit_status", "status", "note"),
    [
        ({"exitCode": 0, "signal": None}, "completed", ""),
        ({"exitCode": 3}, "failed", "[exit code 3]"),
        ({"exitCode": None, "signal": "SIGTERM"}, "failed", "[ended by signal SIGTERM]"),
        ({"exitCode": 143, "signal": "TERM"}, "failed", "[ended by signal SIGTERM]"),
        ({"signal": "Killed"}, "failed", "[ended by signal SIGKILL]"),
        ({"signal": "9"}, "failed", "[ended by signal SIGKILL]"),
        ({"exitCode": 1, "signal": "a strange one"}, "failed", "[exit code 1]"),
        ({"signal": "a strange one"}, "completed", "[how it ended is not known]"),
        ({"exitCode": "0", "signal": 9}, "completed", "[how it ended is not known]"),
        ({"exitCode": True}, "completed", "[how it ended is not known]"),
        ({}, "completed", "[how it ended is not known]"),
        (None, "completed", "[how it ended is not known]"),
    ],
)
async def test_the_model_is_told_how_the_command_ended(
    tmp_path: Path, exit_status: Any, status: str, note: str
) -> None:
    async with lending(tmp_path, {**TERMINAL, WAIT: exit_status}, terminals=True) as lender:
        await lender.prompt("run x")

        (call,) = lender.calls()
        assert (call["status"], call["content"]) == (status, EMBEDDED)
        assert result_text(lender) == "\n".join(filter(None, ["printed", note]))
        assert KILL not in {request["method"] for request in lender.asked}
        assert_released(lender)


async def test_output_is_bounded_and_says_what_is_missing(tmp_path: Path) -> None:
    output = {"output": "ä" * 40_000 + "\r\nend\r\n", "truncated": True}
    async with lending(tmp_path, {**TERMINAL, OUTPUT: output}, terminals=True) as lender:
        await lender.prompt("run x")

        text = result_text(lender)
        assert text.startswith("[… the beginning was left out …]\nää")
        assert "bytes left out" in text
        assert text.endswith("ä\nend")
        assert len(text.encode()) < 33_000


@pytest.mark.parametrize(
    "answer", [Fails(-32002, "no such\nterminal"), None, "text", {"output": 7}, {}]
)
async def test_a_command_whose_output_cannot_be_had_has_run_all_the_same(
    tmp_path: Path, answer: Any
) -> None:
    async with lending(tmp_path, {**TERMINAL, OUTPUT: answer}, terminals=True) as lender:
        await lender.prompt("run x")

        assert lender.calls()[0]["status"] == "completed"
        assert result_text(lender).startswith("[its output is not known: the client")
        assert_released(lender)


# --- clients that fail ----------------------------------------------------------------------


@pytest.mark.parametrize("answer", [Fails(), Fails(-32601), None, {}, "t1", {"terminalId": 7}])
async def test_a_terminal_that_is_not_made_fails_the_tool(tmp_path: Path, answer: Any) -> None:
    async with lending(tmp_path, {**TERMINAL, CREATE: answer}, terminals=True) as lender:
        assert await lender.prompt("run x") == "end_turn"

        (call,) = lender.calls()
        assert call["status"] == "failed"
        assert "terminal/create" in call["content"][0]["content"]["text"]
        assert lender.methods == ["create"]


@pytest.mark.requirement("ACP-133")
@pytest.mark.parametrize("answer", [Fails(-32002), "done", [], 0])
async def test_a_command_whose_end_cannot_be_waited_for_is_killed(
    tmp_path: Path, answer: Any
) -> None:
    async with lending(tmp_path, {**TERMINAL, WAIT: answer}, terminals=True) as lender:
        assert await lender.prompt("run x") == "end_turn"

        assert lender.calls()[0]["status"] == "failed"
        assert "how the command ended is not known" in result_text(lender)
        assert "printed" in result_text(lender)
        assert lender.methods == ["create", "wait_for_exit", "output", "kill", "release"]
        assert_released(lender)


@pytest.mark.requirement("ACP-133", "QUIRK-13")
@pytest.mark.parametrize("method", [KILL, RELEASE])
@pytest.mark.parametrize("answer", [NEVER, Fails(), None, "x"])
async def test_what_a_client_says_of_killing_and_releasing_holds_nothing_up(
    tmp_path: Path, method: str, answer: Any
) -> None:
    async with lending(
        tmp_path, {**TERMINAL, WAIT: NEVER, method: answer}, terminals=True
    ) as lender:
        prompt = lender.at.prompt(lender.session, "run x")
        waiting = await lender.until_asked(WAIT)
        lender.at.cancel(lender.session)
        await lender.until_asked(KILL)
        lender.answer(waiting, {"signal": "SIGKILL"})

        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert_released(lender)
        assert await lender.prompt("say ok") == "end_turn"


async def test_a_client_that_never_makes_the_terminal_fails_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_calls, "ANSWER_LIMIT_S", 0.05)
    async with lending(tmp_path, {**TERMINAL, CREATE: NEVER}, terminals=True) as lender:
        assert await lender.prompt("run x") == "end_turn"

        assert "did not answer terminal/create" in result_text(lender)
        (create,) = lender.asked
        assert lender.withdrawn() == [create["id"]]
        lender.answer(create, {"terminalId": "t1"})
        await lender.until_asked(RELEASE)
        assert lender.methods == ["create", "kill", "release"]


@pytest.mark.requirement("ACP-133")
async def test_a_command_that_takes_too_long_is_killed_and_its_output_told(
    tmp_path: Path,
) -> None:
    answers = {**TERMINAL, WAIT: NEVER}
    async with lending(tmp_path, answers, terminals=True) as lender:
        commands = agent_of(lender).commands
        shown: list[Any] = []

        def answer_the_wait(request: dict[str, Any]) -> None:
            if request["method"] == KILL:
                lender.answer(lender.requests(WAIT)[0], {"signal": "SIGKILL"})

        lender.before = answer_the_wait
        with pytest.raises(ToolError) as raised, anyio.fail_after(5):
            await commands.run(
                "x", cwd="/", signal=AbortController().signal, timeout_s=0.02, show=shown.append
            )

        assert raised.value.code == "TOOL_TIMEOUT"
        assert raised.value.message.endswith("than 0.02 s; its output until then:\nprinted\n")
        await lender.until_asked(RELEASE)
        assert lender.methods == ["create", "wait_for_exit", "kill", "output", "release"]
        assert shown == [(Terminal("t1"),)]


@pytest.mark.usefixtures("short_limits")
async def test_a_command_that_outlives_its_time_and_its_kill_is_said_to(tmp_path: Path) -> None:
    async with lending(tmp_path, {**TERMINAL, WAIT: NEVER}, terminals=True) as lender:
        with pytest.raises(ToolError) as raised, anyio.fail_after(5):
            await agent_of(lender).commands.run(
                "x", cwd="/", signal=AbortController().signal, timeout_s=0.02, show=lambda _: None
            )

        assert "did not say that the command has ended" in raised.value.message
        await lender.until_asked(RELEASE)
        assert_released(lender)


@pytest.mark.parametrize("at", [CREATE, WAIT, OUTPUT])
async def test_a_client_that_goes_away_fails_the_tool(tmp_path: Path, at: str) -> None:
    async with lending(tmp_path, {**TERMINAL, at: NEVER}, terminals=True) as lender:
        agent = agent_of(lender)
        lender.at.prompt(lender.session, "run x")
        await lender.until_asked(at)

        lender.at.connection.peer.close()

        with anyio.fail_after(5):
            await agent.when_idle()
        assert "went away" in result_text(lender)


# --- cancels --------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-093", "ACP-133", "B102", "R73")
async def test_a_cancel_kills_the_command_waits_for_its_end_and_releases(tmp_path: Path) -> None:
    async with lending(tmp_path, {**TERMINAL, WAIT: NEVER}, terminals=True) as lender:
        prompt = lender.at.prompt(lender.session, "run x")
        waiting = await lender.until_asked(WAIT)

        lender.at.cancel(lender.session)
        await lender.until_asked(KILL)
        assert lender.at.lines.responses(prompt) == []
        lender.answer(waiting, {"signal": "SIGKILL"})

        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert lender.methods == ["create", "wait_for_exit", "kill", "output", "release"]
        (call,) = lender.calls()
        assert (call["status"], call["content"]) == ("failed", EMBEDDED)
        assert result_text(lender) == "printed\n[stopped before it was done]"
        assert lender.withdrawn() == []


@pytest.mark.usefixtures("short_limits")
@pytest.mark.requirement("ACP-133", "R73")
async def test_a_command_that_does_not_end_is_not_said_to_have_ended(tmp_path: Path) -> None:
    answers = {**TERMINAL, WAIT: NEVER, OUTPUT: NEVER}
    async with lending(tmp_path, answers, terminals=True) as lender:
        prompt = lender.at.prompt(lender.session, "run x")
        waiting = await lender.until_asked(WAIT)

        lender.at.cancel(lender.session)

        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert "did not say that the command has ended" in result_text(lender)
        assert_released(lender)
        output = lender.requests(OUTPUT)[0]
        assert lender.withdrawn() == [waiting["id"], output["id"]]


@pytest.mark.requirement("ACP-110", "ACP-133", "R73")
@pytest.mark.parametrize(
    "late", [{"terminalId": "t1"}, Fails(-32800), None, {"terminalId": 1}, "x"]
)
async def test_a_terminal_that_is_made_after_the_cancel_is_killed_and_released(
    tmp_path: Path, late: Any
) -> None:
    async with lending(tmp_path, {**TERMINAL, CREATE: NEVER}, terminals=True) as lender:
        prompt = lender.at.prompt(lender.session, "run x")
        create = await lender.until_asked(CREATE)

        lender.at.cancel(lender.session)

        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert lender.withdrawn() == [create["id"]]
        lender.answer(create, late)
        lender.answer(create, late)  # a second answer is nobody's
        if late == {"terminalId": "t1"}:
            await lender.until_asked(RELEASE)
            assert lender.methods == ["create", "kill", "release"]
        await anyio.wait_all_tasks_blocked()
        assert lender.methods[1:] in ([], ["kill", "release"])
        assert lender.at.connection.peer._late == {}
        assert await lender.prompt("say ok") == "end_turn"


@pytest.mark.requirement("ACP-133")
async def test_an_answer_that_comes_with_the_abort_is_not_lost(tmp_path: Path) -> None:
    async with lending(tmp_path, {**TERMINAL, CREATE: NEVER}, terminals=True) as lender:
        prompt = lender.at.prompt(lender.session, "run x")
        create = await lender.until_asked(CREATE)

        lender.answer(create, {"terminalId": "t1"})
        lender.at.cancel(lender.session)  # before the waiting task has seen the answer

        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert lender.methods == ["create", "wait_for_exit", "kill", "output", "release"]
        assert lender.withdrawn() == []


@pytest.mark.requirement("ACP-084", "ACP-133", "R73")
async def test_a_terminal_that_was_being_made_at_the_cancel_is_released_before_the_answer(
    tmp_path: Path,
) -> None:
    async with lending(tmp_path, {**TERMINAL, CREATE: NEVER}, terminals=True) as lender:
        prompt = lender.at.prompt(lender.session, "run x")
        create = await lender.until_asked(CREATE)

        lender.at.cancel(lender.session)
        with anyio.fail_after(5):
            while not lender.withdrawn():
                await anyio.wait_all_tasks_blocked()
        lender.answer(create, {"terminalId": "t1"})

        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert lender.methods == ["create", "wait_for_exit", "kill", "output", "release"]


@pytest.mark.requirement("ACP-133")
async def test_a_cancel_while_the_output_is_asked_for_still_says_how_it_ended(
    tmp_path: Path,
) -> None:
    answers = {**TERMINAL, WAIT: {"exitCode": 3}, OUTPUT: NEVER}
    async with lending(tmp_path, answers, terminals=True) as lender:
        prompt = lender.at.prompt(lender.session, "run x")
        await lender.until_asked(OUTPUT)

        lender.at.cancel(lender.session)

        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert result_text(lender) == "[its output was not waited for]\n[exit code 3]"
        assert_released(lender)


@pytest.mark.requirement("ACP-133")
async def test_closing_the_session_ends_its_commands(tmp_path: Path) -> None:
    async with lending(tmp_path, {**TERMINAL, WAIT: NEVER}, terminals=True) as lender:
        prompt = lender.at.prompt(lender.session, "run x")
        waiting = await lender.until_asked(WAIT)

        close = lender.at.say("session/close", sessionId=lender.session)
        await lender.until_asked(KILL)
        lender.answer(waiting, {"signal": "SIGKILL"})

        await lender.at.result(close)
        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert_released(lender)


@pytest.mark.usefixtures("short_limits")
@pytest.mark.requirement("ACP-096", "ACP-133", "R73")
@pytest.mark.parametrize("is_first", [True, False], ids=["cancel-first", "answer-first"])
@pytest.mark.parametrize("answer", ["well", "never", "error", "late"])
@pytest.mark.parametrize("method", [CREATE, WAIT, KILL, OUTPUT, RELEASE])
async def test_a_cancel_at_any_request_leaves_no_terminal(
    tmp_path: Path, method: str, answer: str, is_first: bool
) -> None:
    answers = {**TERMINAL}
    if method == KILL:
        answers[WAIT] = NEVER
    if answer != "well":
        answers[method] = Fails() if answer == "error" else NEVER
    async with lending(tmp_path, answers, terminals=True) as lender:
        is_cancelled = False

        def cancel(request: dict[str, Any]) -> None:
            nonlocal is_cancelled
            first = WAIT if method == KILL else method
            if request["method"] == first and not is_cancelled:
                is_cancelled = True
                if not is_first and answer == "well":
                    lender.answer(request, answers[first])
                lender.at.cancel(lender.session)

        lender.before = cancel
        prompt = lender.at.prompt(lender.session, "run x")
        response = await lender.at.response(prompt)
        updates = len(lender.at.lines.updates())
        with anyio.fail_after(5):
            while RELEASE not in {r["method"] for r in lender.asked} and method != CREATE:
                await lender._has_asked.wait()

        if answer == "late":
            for request in lender.requests(method):
                lender.answer(request, TERMINAL[method])
        await anyio.wait_all_tasks_blocked()

        reasons = {"cancelled", "end_turn"} if method == RELEASE else {"cancelled"}
        assert response["result"]["stopReason"] in reasons
        if method != CREATE or answer in ("well", "late"):
            assert_released(lender)
        assert len(lender.at.lines.updates()) == updates
        assert lender.calls()[0]["status"] in ("failed", "completed")
        assert await lender.prompt("say ok") == "end_turn"


@pytest.mark.requirement("ACP-133", "R73")
@pytest.mark.race
async def test_cancels_at_any_moment_leave_no_terminal(tmp_path: Path) -> None:
    made, stops = Counter[str](), Counter[str]()

    def create(_params: object) -> dict[str, Any]:
        made["t"] += 1
        return {"terminalId": f"t{made['t']}"}

    async with lending(tmp_path, {**TERMINAL, CREATE: create}, terminals=True) as lender:
        for n_checkpoints in range(40):
            prompt = lender.at.prompt(lender.session, "run x")
            await lender.until_asked(CREATE, len(lender.requests(CREATE)) + 1)
            for _ in range(n_checkpoints):
                await anyio.lowlevel.checkpoint()
            lender.at.cancel(lender.session)
            stops[(await lender.at.result(prompt))["stopReason"]] += 1
        with anyio.fail_after(5):
            while len(lender.requests(RELEASE)) < made["t"]:
                await lender._has_asked.wait()

        assert stops["cancelled"] > 4
        assert made["t"] == len(lender.requests(CREATE)) == 40
        assert_released(lender, *(f"t{n}" for n in range(1, made["t"] + 1)))
        behind_the_last = lender.at.lines.sent.index(lender.at.lines.responses(prompt)[0]) + 1
        assert lender.at.lines.sent[behind_the_last:] == []


@pytest.mark.requirement("ACP-133", "R73")
async def test_an_abort_at_every_await_leaves_no_terminal_and_no_task(tmp_path: Path) -> None:
    made = Counter[str]()

    def create(_params: object) -> dict[str, Any]:
        made["t"] += 1
        return {"terminalId": f"t{made['t']}"}

    async with lending(tmp_path, {**TERMINAL, CREATE: create}, terminals=True) as lender:
        commands = agent_of(lender).commands

        runs = await abort_at_every_await(
            lambda signal: commands.run(
                "x", cwd="/", signal=signal, timeout_s=None, show=lambda _: None
            )
        )

        await anyio.wait_all_tasks_blocked()
        assert len(runs) > 3
        for run in runs:
            assert isinstance(run.result, CommandResult) or isinstance(run.error, CommandAborted)
        assert_released(lender, *(f"t{n}" for n in range(1, made["t"] + 1)))


@pytest.mark.requirement("ACP-123")
async def test_a_terminal_is_made_only_when_the_client_has_seen_all_before_it(
    tmp_path: Path,
) -> None:
    async with lending(tmp_path, TERMINAL, terminals=True) as lender:
        lines, agent = lender.at.lines, agent_of(lender)
        runs = anyio.Event()

        async def run(_execution: object, next_: Any) -> Any:
            runs.set()
            return await next_()

        agent.hooks.on("tools/execute", run)
        await lender.prompt("count 300")
        n_shown, lines.is_congested = len(lines.updates()), True
        params = {"sessionId": lender.session, "cwd": str(tmp_path / "work"), "mcpServers": []}
        load = lender.at.say("session/load", **params)
        await lines.until(lambda: len(lines.updates()) > n_shown + 100)
        await anyio.wait_all_tasks_blocked()
        lines.is_congested = False  # but the replay still waits for this client to read

        prompt = lender.at.prompt(lender.session, "run x")
        with anyio.fail_after(5):
            await runs.wait()
        await anyio.wait_all_tasks_blocked()
        assert lender.asked == []
        lines.low.set()

        await lender.at.result(load)
        await lender.at.result(prompt)
        said = [
            message["params"].get("update", {}).get("sessionUpdate") or message["method"]
            for message in lines.sent
            if "method" in message
        ]
        assert said[said.index("tool_call") :][:4] == [
            "tool_call",
            "tool_call_update",
            CREATE,
            "tool_call_update",
        ]


# --- the log --------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-135")
async def test_a_loaded_session_shows_the_text_of_terminals_that_are_no_more(
    tmp_path: Path,
) -> None:
    async with lending(tmp_path, TERMINAL, terminals=True) as lender:
        await lender.prompt("run x")
        assert lender.calls()[0]["content"] == EMBEDDED
        n_shown = len(lender.at.lines.updates())
        params = {"sessionId": lender.session, "cwd": str(tmp_path / "work"), "mcpServers": []}

        await lender.at.result(lender.at.say("session/load", **params))

        replayed = lender.at.lines.updates()[n_shown:]
        assert "terminalId" not in json.dumps(replayed)
        finished = [u for u in replayed if u.get("status") == "completed"]
        assert finished[0]["content"][0]["content"]["text"] == "printed"


async def test_what_a_client_does_not_know_as_its_terminal_is_shown_as_text() -> None:
    content = (Terminal("t1"),)
    progress, title = ToolProgress("c", content=content), ToolProgress("c", "Waiting", content)
    result = ToolResult(1, 1, "c", "printed", content=content)

    def shown(data: ToolProgress | ToolResult, *terminals: str) -> Any:
        return [
            getattr(u, "content", u) for u in updates_for(Event(1, 1, data), terminals=terminals)
        ]

    embedded = (wire.ToolContentTerminal("t1"),)
    text = (wire.ToolContentBlock(wire.TextContent("printed")),)
    assert [shown(data, "t1") for data in (progress, title, result)] == [[embedded]] * 3
    assert [shown(data, "t2") for data in (progress, title, result)] == [[], [UNSET], [text]]


# --- whole programs -------------------------------------------------------------------------


@pytest.mark.requirement("ACP-123", "ACP-130", "ACP-131", "ACP-133")
async def test_an_editor_lends_the_real_agent_its_files_and_terminals(tmp_path: Path) -> None:
    async with (
        Wire.spawn([*SERVE, "--mode", "bypass"], cwd=tmp_path) as wire_,
        Editor.beside(wire_) as editor,
    ):
        client = Client(wire_)
        await client.initialize(CAPABILITIES)
        session = await client.new_session(tmp_path)
        (tmp_path / "a").write_text("saved\n")
        editor.buffers[str(tmp_path / "a")] = "unsaved\n"

        text = "edit a: unsaved => changed then write b/c: new then run cat a b/c; exit 4"
        assert await client.stop_reason(client.prompt(session, text)) == "end_turn"

        assert (tmp_path / "a").read_text() == "changed\n"
        assert (tmp_path / "b" / "c").read_text() == "new"
        assert editor.terminals == {}
        results = [u for u in wire_.updates(session) if u.get("status") in ("completed", "failed")]
        assert [u["status"] for u in results] == ["completed", "completed", "failed"]
        assert results[-1]["content"] == [{"type": "terminal", "terminalId": "terminal-1"}]
        assert "changed\nnew\n[exit code 4]" in client.text(session)
        assert_pure(wire_)


@pytest.mark.requirement("ACP-093", "ACP-133", "B102", "R73")
async def test_a_cancel_ends_the_processes_of_a_real_terminal(tmp_path: Path) -> None:
    async with (
        Wire.spawn([*SERVE, "--mode", "bypass"], cwd=tmp_path) as wire_,
        Editor.beside(wire_) as editor,
    ):
        client = Client(wire_)
        await client.initialize(CAPABILITIES)
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, "run trap '' TERM; echo ready; sleep 1000 & wait")
        await wire_.receive(lambda m: m.get("method") == WAIT)
        (terminal,) = editor.terminals.values()

        client.cancel(session)

        assert await client.stop_reason(prompt) == "cancelled"
        assert not terminal.is_running
        assert await wire_.silence() == []
        assert editor.terminals == {}
        assert editor.asked[-1] == RELEASE
        assert await client.stop_reason(client.prompt(session, "say ok")) == "end_turn"
        assert_pure(wire_)


class SdkEditor(SdkClient):
    """A client on the official SDK, with a file buffer and a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    async def read_text_file(
        self, session_id: str, path: str, **kwargs: Any
    ) -> schema.ReadTextFileResponse:
        self.done.append("read")
        return schema.ReadTextFileResponse(content="buffer\n")

    async def write_text_file(
        self, session_id: str, path: str, content: str, **kwargs: Any
    ) -> None:
        self.done.append(f"write {content!r}")

    async def create_terminal(
        self, session_id: str, command: str, args: list[str] | None = None, **kwargs: Any
    ) -> schema.CreateTerminalResponse:
        self.done.append(" ".join([command, *(args or ())]))
        return schema.CreateTerminalResponse(terminal_id="sdk")

    async def wait_for_terminal_exit(
        self, session_id: str, terminal_id: str, **kwargs: Any
    ) -> schema.WaitForTerminalExitResponse:
        return schema.WaitForTerminalExitResponse(exit_code=0)

    async def terminal_output(
        self, session_id: str, terminal_id: str, **kwargs: Any
    ) -> schema.TerminalOutputResponse:
        return schema.TerminalOutputResponse(output="from the editor", truncated=False)

    async def release_terminal(self, session_id: str, terminal_id: str, **kwargs: Any) -> None:
        self.done.append("release")


@pytest.mark.requirement("ACP-130", "ACP-131", "ACP-133")
async def test_a_client_on_the_python_sdk_lends_its_tools(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("saved\n")
    editor = SdkEditor()
    serve = [*SERVE, "--mode", "bypass"]
    with anyio.fail_after(20):
        async with acp.spawn_agent_process(
            editor, serve[0], *serve[1:], env=dict(os.environ), cwd=tmp_path
        ) as (connection, process):
            await connection.initialize(
                protocol_version=acp.PROTOCOL_VERSION,
                client_capabilities=schema.ClientCapabilities(
                    fs=schema.FileSystemCapabilities(read_text_file=True, write_text_file=True),
                    terminal=True,
                ),
            )
            made = await connection.new_session(cwd=str(tmp_path), mcp_servers=[])
            text = "edit a: buffer => changed then run make it"
            assert await prompt(connection, made.session_id, text) == "end_turn"
        assert process.returncode == 0

    assert [said for said in editor.done if said != "read"] == [
        "write 'changed\\n'",
        "/bin/sh -c make it",
        "release",
    ]
    finished = [u for u in editor.updates if getattr(u, "status", None) == "completed"]
    assert finished[-1].content == [
        schema.TerminalToolCallContent(type="terminal", terminal_id="sdk")
    ]
