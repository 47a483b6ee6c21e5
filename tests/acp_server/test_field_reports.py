"""What went wrong in other agents, tried on this one.

The reports whose trial is a cancel at some moment (B006, B011, B029, B035, B037, B061, B072) are
proved in `test_cancel_matrix`; their marks are there.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dialects
import pytest
from network_rig import editor, listening
from serve_rig import (
    cancel_message,
    chunk_of,
    follow_up,
    prompt_message,
    send_together,
    served,
    settle_cancelled,
    texts,
    tool_calls,
    tool_update,
    write_script,
)

from agent_core.events import Aborted, Completed, TurnEnd, UserMessage
from agent_core.sessions.sqlite import SqliteStore
from conformance.client import Client
from conformance.providers.server import Reply, provider_double
from conformance.wire import Message

NOISY_AGENT = """
import os, subprocess, sys, warnings
from agent_core.tools.plan import Plan

run = Plan.run

async def noisy(self, args, context):
    print("printed")
    os.write(1, b"written\\n")
    sys.stdout.flush()
    warnings.warn("warned", stacklevel=1)
    subprocess.run(["echo", "spawned"], check=True)
    return await run(self, args, context)

Plan.run = noisy
from acp_server.cli import main
sys.exit(main())
"""


def load_message(session: str, cwd: Path) -> Message:
    params = {"sessionId": session, "cwd": str(cwd), "mcpServers": []}
    return {"jsonrpc": "2.0", "id": "load", "method": "session/load", "params": params}


async def load(client: Client, session: str, cwd: Path) -> None:
    message = load_message(session, cwd)
    await client.result(client.wire.request("session/load", message["params"]))


async def stored(state: Path, session: str, kind: type[Any]) -> list[Any]:
    """Return the events of one kind that the session's log has on disk."""
    store = SqliteStore(state / "sessions.sqlite3")
    _header, events = await store.load(session)
    await store.aclose()
    return [event.data for event in events if isinstance(event.data, kind)]


# --- cancels in every phase, on every way in ------------------------------------------------

PHASES = {
    "think hm then stall": '"agent_thought_chunk"',
    "say one then stall": '"agent_message_chunk"',
    "stall": '"session_info_update"',
    "run echo ready; sleep 300": r'"text": "ready\n',
    "write never.txt: x": '"session/request_permission"',
}
"""What to prompt, and what is said when the phase is reached."""


def has_reached(prompt: str, session: str) -> Callable[[Message], bool]:
    mark = PHASES[prompt]
    return lambda message: mark in (text := json.dumps(message)) and session in text


def alike(messages: list[Message]) -> list[str]:
    """Return messages byte for byte, without what differs from one session to the next."""
    own = r"sess_\w+|turn-\w+|\d{4}-\d\d-\d\dT[^\"]+"
    return [re.sub(rf'"({own})"|"id": \d+|"requestId": \d+', "…", json.dumps(m)) for m in messages]


async def cancelled_on_stdio(cwd: Path) -> list[list[Message]]:
    async with served(cwd, permission="never") as client:
        said = []
        for prompt in PHASES:
            before = len(client.wire.received)
            session = await client.new_session(cwd)
            client.permission = "allow" if prompt.startswith("run") else "never"
            request_id = client.prompt(session, prompt)
            await client.wire.receive(has_reached(prompt, session))
            client.cancel(session)
            assert await client.stop_reason(request_id) == "cancelled"
            said.append(client.wire.received[before:])
        return said


async def cancelled_on_a_websocket(cwd: Path) -> list[list[Message]]:
    async with listening(cwd) as server, editor(server) as client:
        said = []
        for prompt in PHASES:
            before = len(client.received)
            session = await client.new_session(cwd)
            request_id = await client.prompt(session, prompt)
            if prompt.startswith("run"):
                await client.choose(await client.question(), "allow-once")
            reached = has_reached(prompt, session)
            await client.until(lambda reached=reached: any(map(reached, client.received)))
            await client.note("session/cancel", sessionId=session)
            assert await client.stop_reason(request_id) == "cancelled"
            said.append(client.received[before:])
        return said


@pytest.mark.requirement("B002", "B003", "ACP-007")
async def test_a_cancel_in_any_phase_is_answered_alike_on_stdio_and_on_a_websocket(
    tmp_path: Path,
) -> None:
    on_stdio = await cancelled_on_stdio(tmp_path)
    on_a_websocket = await cancelled_on_a_websocket(tmp_path)

    for prompt, one, other in zip(PHASES, on_stdio, on_a_websocket, strict=True):
        assert alike(one) == alike(other), prompt
    assert not (tmp_path / "never.txt").exists()


@pytest.mark.transports
@pytest.mark.requirement("B014", "B149")
async def test_an_answer_without_a_word_wedges_nothing_cancelled_or_not(tmp_path: Path) -> None:
    wordless = [{"reasoning": "hm"}, {"stall": True}]
    script = write_script(tmp_path, wordless, [], *[[{"text": "ok"}]] * 2)
    async with served(tmp_path, script) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "one")
        await chunk_of(client, session, "hm", is_thought=True)
        client.cancel(session)
        await settle_cancelled(client, session, request_id)

        assert await client.stop_reason(client.prompt(session, "two")) == "end_turn"
        assert client.text(session) == "ok"  # the empty answer was tried again
        await follow_up(client, session)


@pytest.mark.transports
@pytest.mark.requirement("B017", "ACP-111")
async def test_taking_back_a_prompt_leaves_the_process_and_what_was_allowed(tmp_path: Path) -> None:
    def always(params: Message) -> Message:
        option = next(each for each in params["options"] if each["kind"] == "allow_always")
        return {"outcome": {"outcome": "selected", "optionId": option["optionId"]}}

    async with served(tmp_path, permission=always) as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "write a.txt: x"))
        request_id = client.prompt(session, "count 100000 slowly")
        await chunk_of(client, session, "2 ")

        client.wire.notify("$/cancel_request", {"requestId": request_id})

        await settle_cancelled(client, session, request_id)
        client.permission = "never"
        assert await client.stop_reason(client.prompt(session, "write b.txt: x")) == "end_turn"
        assert (tmp_path / "b.txt").read_text() == "x"


@pytest.mark.transports
@pytest.mark.requirement("B022")
async def test_a_cancel_behind_the_last_word_leaves_log_and_answer_in_agreement(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    answered = []
    async with served(tmp_path, f"--state-dir={state}") as client:
        session = await client.new_session(tmp_path)
        for _ in range(20):
            request_id = client.prompt(session, "say all of it")
            await chunk_of(client, session, "it")
            client.cancel(session)
            answered.append(await client.stop_reason(request_id))
    async with served(tmp_path, f"--state-dir={state}") as client:
        await load(client, session, tmp_path)

        assert client.text(session) == "all of it" * 20
    outcomes = {"end_turn": Completed(), "cancelled": Aborted()}
    ends = await stored(state, session, TurnEnd)
    assert [end.outcome for end in ends] == [outcomes[reason] for reason in answered]


@pytest.mark.requirement("B027")
@pytest.mark.only_over("stdio", why="a client there may have so many prompts only")
async def test_a_storm_of_cancels_holds_nothing_up(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        one, other = await client.new_session(tmp_path), await client.new_session(tmp_path)
        running = client.prompt(other, "count 30 slowly")
        await chunk_of(client, other, "1 ")
        for number in range(100):
            prompt = prompt_message(f"p{number}", one, "count 100000 slowly")
            listing = {"jsonrpc": "2.0", "id": f"l{number}", "method": "session/list"}
            send_together(client, prompt, *[cancel_message(one)] * 5, listing)

        for number in range(100):
            assert "result" in await client.wire.response(f"l{number}")
            assert await client.stop_reason(f"p{number}") == "cancelled"
        assert await client.stop_reason(running) == "end_turn"
        assert client.text(other) == "".join(f"{number} " for number in range(1, 31))


@pytest.mark.requirement("R42", "R43", "ACP-061")
@pytest.mark.only_over("stdio", why="two messages may come apart there")
async def test_what_is_cancelled_before_its_turn_was_never_said(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with served(tmp_path, f"--state-dir={state}") as client:
        session = await client.new_session(tmp_path)
        await follow_up(client, session)
        prompt = prompt_message("at once", session, "say at once")
        send_together(client, prompt, cancel_message(session))
        assert await client.stop_reason("at once") == "cancelled"
        running = client.prompt(session, "count 100000 slowly")
        queued = client.prompt(session, "say queued")
        await chunk_of(client, session, "1 ")
        client.cancel(session)
        for request_id in (running, queued):
            assert await client.stop_reason(request_id) == "cancelled"
    async with served(tmp_path, f"--state-dir={state}") as client:
        await load(client, session, tmp_path)

        updates = client.wire.updates(session)
        shown = [u for u in updates if u["sessionUpdate"] == "user_message_chunk"]
        said = ["say ok", "count 100000 slowly"]
        assert [update["content"]["text"] for update in shown] == said
    told = await stored(state, session, UserMessage)  # which is what a model is told
    assert [message.content[0].text for message in told] == said


# --- cancels at odd moments -----------------------------------------------------------------


@pytest.mark.transports
@pytest.mark.requirement("B007", "R42")
async def test_a_cancel_while_the_session_is_being_loaded_stops_the_prompt_behind_it(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say before"))
    async with served(tmp_path) as client:
        send_together(
            client,
            load_message(session, tmp_path),
            prompt_message("p", session, "write never.txt: x"),
            cancel_message(session),
        )

        assert await client.stop_reason("p") == "cancelled"

        await client.wire.response("load")
        await client.wire.silence()
        assert client.text(session) == "before"  # which is the replay
        assert not (tmp_path / "never.txt").exists()
        await follow_up(client, session)


@pytest.mark.transports
@pytest.mark.requirement("B009", "R45", "ACP-098", "B010")
async def test_a_cancel_while_idle_does_not_reach_the_next_prompt(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        for number in range(10):
            client.cancel(session)
            prompt = prompt_message(f"p{number}", session, "say hi")
            send_together(client, cancel_message(session), prompt)
            assert await client.stop_reason(f"p{number}") == "end_turn"
            client.cancel(session)
        assert client.text(session) == "hi" * 10
        assert await client.wire.silence() == []


@pytest.mark.requirement("B012", "B087")
@pytest.mark.parametrize("prompt", ["stall", "count 100000 slowly", "run echo ready; sleep 300"])
@pytest.mark.only_over("stdio", why="who has left hears no answer there")
async def test_a_client_that_leaves_in_the_middle_finds_a_whole_session_later(
    tmp_path: Path, prompt: str
) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, prompt)
        if prompt.startswith("run"):
            await tool_update(client, session, "ready")
        elif prompt != "stall":
            await chunk_of(client, session, "2 ")

        await client.wire.close_stdin()

        assert await client.wire.exited() == 0
        assert client.wire.descendants() == set()
        assert await client.stop_reason(request_id) == "cancelled"
    async with served(tmp_path) as client:
        await load(client, session, tmp_path)
        assert all(call["status"] == "failed" for call in tool_calls(client, session).values())
        await follow_up(client, session)


@pytest.mark.requirement("B087")
async def test_an_idle_agent_leaves_when_its_input_ends(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        await follow_up(client, session)

        await client.wire.close_stdin()

        assert await client.wire.exited() == 0


@pytest.mark.transports
@pytest.mark.requirement("B013", "B019", "B018", "B020", "R73")
async def test_a_model_that_ignores_the_cancel_is_waited_for_and_nothing_overtakes_it(
    tmp_path: Path,
) -> None:
    stubborn = [{"text": "one "}, {"ignore_cancel_s": 1.5}, *[{"text": "never"}] * 50]
    script = write_script(tmp_path, stubborn, [{"text": "two"}], [{"text": "ok"}])
    async with served(tmp_path, script) as client:
        session = await client.new_session(tmp_path)
        first = client.prompt(session, "first")
        await chunk_of(client, session, "one")
        client.cancel(session)
        second = client.prompt(session, "second")

        assert await client.wire.silence() == []  # it still runs, and we do not pretend otherwise
        assert client.wire.responses(first) == []

        assert await client.stop_reason(first) == "cancelled"
        assert await client.stop_reason(second) == "end_turn"
        assert texts(client, session, [first, second]) == ["one ", "two", ""]
        await follow_up(client, session)


@pytest.mark.transports
@pytest.mark.requirement("B013", "B018", "ACP-081")
async def test_a_prompt_right_behind_a_cancelled_answer_gets_an_answer_of_its_own(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        ids = []
        for number in range(10):
            ids.append(client.prompt(session, "run sleep 300"))
            await tool_update(client, session, "in_progress")
            client.cancel(session)
            assert await client.stop_reason(ids[-1]) == "cancelled"
            before = client.text(session)
            ids.append(client.prompt(session, f"say {number}"))
            assert await client.stop_reason(ids[-1]) == "end_turn"
            assert client.text(session) == f"{before}{number}"
        assert [len(client.wire.responses(request_id)) for request_id in ids] == [1] * 20


@pytest.mark.transports
@pytest.mark.requirement("B018", "ACP-084")
async def test_queued_prompts_speak_only_after_the_answers_before_them(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        prompts = ("say alpha", "/mode", "plan beta", "say gamma", "/mode", "say omega")

        ids = [client.prompt(session, prompt) for prompt in prompts]

        await client.stop_reason(ids[-1])
        said = texts(client, session, ids)
        words = ("alpha", "mode", "plan", "gamma", "mode", "omega")
        assert all(word in text for word, text in zip(words, said, strict=False)), said
        assert said[0] == "alpha"
        assert said[6:] == [""]


@pytest.mark.transports
@pytest.mark.requirement("B026")
async def test_everything_else_is_answered_while_a_prompt_runs(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        await follow_up(client, session)
        request_id = client.prompt(session, "stall")

        listed = await client.result(client.wire.request("session/list", {}))
        unknown = await client.wire.response(client.wire.request("session/nothing", {}))
        other = await client.new_session(tmp_path)
        await follow_up(client, other)

        assert [entry["sessionId"] for entry in listed["sessions"]] == [session]
        assert unknown["error"]["code"] == -32601
        assert client.wire.responses(request_id) == []
        client.cancel(session)
        await settle_cancelled(client, session, request_id)


@pytest.mark.transports
@pytest.mark.requirement("B030", "R73")
async def test_a_tool_call_that_a_model_makes_after_the_cancel_is_not_made(tmp_path: Path) -> None:
    write = {"tool": "write", "arguments": {"path": "never.txt", "content": "x"}}
    late = [{"text": "wait"}, {"ignore_cancel_s": 0.3}, write]
    script = write_script(tmp_path, late, [{"text": "ok"}])
    async with served(tmp_path, script) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "go")
        await chunk_of(client, session, "wait")

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        assert tool_calls(client, session) == {}
        assert not (tmp_path / "never.txt").exists()
        await follow_up(client, session)


# --- the wire -------------------------------------------------------------------------------


@pytest.mark.requirement("B103")
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 2**20])
async def test_a_line_of_any_size_is_read(tmp_path: Path, size: int) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        bare = len(json.dumps(prompt_message("p", session, "say ")))
        word = "x" * (size - bare)

        send_together(client, prompt_message("p", session, f"say {word}"))

        assert await client.stop_reason("p") == "end_turn"
        assert client.text(session) == word
        await follow_up(client, session)


@pytest.mark.requirement("B103")
async def test_a_line_may_come_byte_by_byte_or_hold_twenty_megabytes(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        image = base64.b64encode(bytes(15 * 2**20)).decode()
        prompt = prompt_message("big", session, "say seen")
        prompt["params"]["prompt"].append({"type": "image", "data": image, "mimeType": "image/png"})
        send_together(client, prompt)
        assert await client.stop_reason("big", timeout_s=30) == "end_turn"

        for byte in json.dumps(prompt_message("slow", session, "say slow")).encode() + b"\r\n":
            client.wire.send_bytes(bytes([byte]))

        assert await client.stop_reason("slow") == "end_turn"
        assert client.text(session) == "seenslow"


@pytest.mark.requirement("B109")
async def test_nothing_but_messages_reaches_stdout_whatever_a_tool_prints(tmp_path: Path) -> None:
    noisy = [sys.executable, "-c", NOISY_AGENT, "serve"]
    async with served(tmp_path, command=noisy) as client:
        session = await client.new_session(tmp_path)

        assert await client.stop_reason(client.prompt(session, "plan a; b")) == "end_turn"

        assert client.wire.noise == []
        for word in ("printed", "written", "spawned"):
            assert word in client.wire.stderr


@pytest.mark.transports
@pytest.mark.requirement("B122", "ACP-084", "B124")
async def test_the_last_words_of_a_long_answer_come_before_its_end(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        for _ in range(3):
            before = len(client.text(session))
            request_id = client.prompt(session, "count 1000")

            assert await client.stop_reason(request_id) == "end_turn"

            expected = "".join(f"{number} " for number in range(1, 1001))
            assert client.text(session)[before:] == expected
            assert await client.wire.silence() == []


@pytest.mark.requirement("B138")
async def test_five_hundred_calls_and_five_thousand_updates_fit_into_one_turn(
    tmp_path: Path,
) -> None:
    entries = [{"content": "a", "status": "pending", "priority": "low"}]
    call = {"tool": "plan", "arguments": {"entries": entries}}
    script = write_script(
        tmp_path, *[[*[{"text": "x"}] * 50, *[call] * 5] for _ in range(100)], [{"text": "ok"}]
    )
    async with served(tmp_path, script) as client:
        session = await client.new_session(tmp_path)

        assert await client.stop_reason(client.prompt(session, "go"), 50) == "end_turn"

        calls = tool_calls(client, session)
        assert [call["status"] for call in calls.values()] == ["completed"] * 500
        assert client.text(session) == "x" * 5000 + "ok"


@pytest.mark.requirement("B079")
@pytest.mark.parametrize("api", dialects.APIS)
async def test_calls_have_ids_of_their_own_also_where_a_provider_repeats_its_own(
    tmp_path: Path, api: Any
) -> None:
    (tmp_path / "a.txt").write_text("text")
    same = [Reply(dialects.call_read(api, "a.txt")), Reply(dialects.last_words(api))]
    async with provider_double(same * 3) as double:
        flags, env = dialects.flags_for(api, double, tmp_path)
        async with served(tmp_path, *flags, env=env) as client:
            session = await client.new_session(tmp_path)
            for _ in range(3):
                await client.stop_reason(client.prompt(session, "read it"), 30)  # loads a library
            live = tool_calls(client, session)
        async with served(tmp_path, *flags, env=env) as client:
            await load(client, session, tmp_path)

            assert list(tool_calls(client, session)) == list(live)
        assert [call["status"] for call in live.values()] == ["completed"] * 3
        assert double.violations == []


# --- what the session is afterwards ---------------------------------------------------------


@pytest.mark.transports
@pytest.mark.requirement("B001", "B008", "B073")
async def test_the_first_prompt_can_be_stopped_at_once_and_twice(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        slow = prompt_message("p", session, "count 100000 slowly")

        send_together(client, slow, cancel_message(session), cancel_message(session))

        await settle_cancelled(client, session, "p")
        await follow_up(client, session)


@pytest.mark.transports
@pytest.mark.requirement("B016", "B065")
async def test_a_stopped_turn_stays_in_the_history_of_its_session(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "count 100000 slowly")
        await chunk_of(client, session, "3 ")
        client.cancel(session)
        await settle_cancelled(client, session, request_id)
        await follow_up(client, session)
        live = client.text(session)
    async with served(tmp_path) as client:
        await load(client, session, tmp_path)

        users = [
            update["content"]["text"]
            for update in client.wire.updates(session)
            if update["sessionUpdate"] == "user_message_chunk"
        ]
        assert users == ["count 100000 slowly", "say ok"]
        assert client.text(session) == live


@pytest.mark.transports
@pytest.mark.requirement("B031", "B041")
async def test_a_cancel_in_the_first_of_three_calls_starts_no_other(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        prompt = "run sleep 300 then write never.txt: x then say never"
        request_id = client.prompt(session, prompt)
        await tool_update(client, session, "in_progress")

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        assert len(tool_calls(client, session)) == 1
        assert not (tmp_path / "never.txt").exists()
        await follow_up(client, session)


@pytest.mark.requirement("B033")
async def test_every_prompt_of_a_long_session_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        for number in range(100):
            assert await client.stop_reason(client.prompt(session, f"say {number}")) == "end_turn"
        assert client.text(session) == "".join(str(number) for number in range(100))


@pytest.mark.requirement("B042", "B043", "B046")
@pytest.mark.parametrize("kind", ["allow_once", "allow_always", "reject_once", "reject_always"])
async def test_after_any_answer_to_a_question_the_turn_goes_on(tmp_path: Path, kind: str) -> None:
    def choose(params: Message) -> Message:
        option = next(option for option in params["options"] if option["kind"] == kind)
        return {"outcome": {"outcome": "selected", "optionId": option["optionId"]}}

    async with served(tmp_path, permission=choose) as client:
        session = await client.new_session(tmp_path)

        reason = await client.stop_reason(client.prompt(session, "write it.txt: x"))

        assert reason == "end_turn"
        assert client.text(session) != ""
        assert (tmp_path / "it.txt").exists() == kind.startswith("allow")


@pytest.mark.requirement("B162", "B161")
async def test_a_mode_chosen_in_one_session_leaves_the_other_alone(tmp_path: Path) -> None:
    async with served(tmp_path, permission="reject") as client:
        one, other = await client.new_session(tmp_path), await client.new_session(tmp_path)
        running = client.prompt(other, "count 30 slowly")
        await chunk_of(client, other, "2 ")
        mode = {"sessionId": one, "modeId": "bypass"}

        await client.result(client.wire.request("session/set_mode", mode))

        assert await client.stop_reason(running) == "end_turn"
        await client.stop_reason(client.prompt(one, "write one.txt: x"))
        await client.stop_reason(client.prompt(other, "write other.txt: x"))
        assert (tmp_path / "one.txt").exists()
        assert not (tmp_path / "other.txt").exists()
