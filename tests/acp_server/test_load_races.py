"""Loads that overlap: with each other, with prompts and questions, with another process."""

from __future__ import annotations

import sys
from typing import Any

import anyio
import pytest
from serving import error_of, serving
from talking import CWD, Talk, said_by_agent, talk

from acp_server.backend import Backend
from acp_server.connection import STEER_KEY
from acp_server.session import REPLAY_BATCH
from agent_core.errors import StoreError
from agent_core.events import PermissionAsked, SteeringMessage, TurnEnd
from agent_core.inbox import MAX_QUEUED
from conformance.client import Client

# --- a replay that is held up -----------------------------------------------------------------


async def long_session(at: Talk) -> str:
    """Make a session whose replay is longer than one batch."""
    session = await at.new_session()
    await at.result(at.prompt(session, f"count {3 * REPLAY_BATCH}"))
    return session


def hold_replays(at: Talk) -> anyio.Event:
    """Let no replay go on until the event that is returned is set; all else does."""
    gate = anyio.Event()
    at.lines.drained = gate.wait  # type: ignore[method-assign]
    return gate


def log_of(backend: Backend, session: str, kind: type[Any]) -> list[Any]:
    events = backend.runtime.agents[session].session.events
    return [event.data for event in events if isinstance(event.data, kind)]


async def logged(backend: Backend, session: str, kind: type[Any], count: int = 1) -> None:
    """Wait until `count` events of `kind` are in the log, and nothing more happens."""
    with anyio.fail_after(5):
        while len(log_of(backend, session, kind)) < count:
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()


async def turn_over(backend: Backend, session: str) -> None:
    """Wait until the session's second turn is over, flushed, and everybody was told."""
    await logged(backend, session, TurnEnd, 2)
    with anyio.fail_after(5):
        await backend.runtime.agents[session].when_idle()
        await anyio.wait_all_tasks_blocked()


async def held_in_a_turn(
    at: Talk, backend: Backend, said: str
) -> tuple[str, int, int, anyio.Event]:
    """Begin a turn that will say `said`, and a load whose replay is held; return their ids."""
    session = await long_session(at)
    gate = anyio.Event()

    async def wait(*_args: Any) -> None:
        await gate.wait()

    agent = backend.runtime.agents[session]
    stop = agent.hooks.on("agent/pre-step", wait)
    prompt = at.prompt(session, said)
    await anyio.wait_all_tasks_blocked()
    held = hold_replays(at)
    load = at.load(session)
    await anyio.wait_all_tasks_blocked()
    stop()
    gate.set()
    return session, prompt, load, held


async def test_a_prompt_is_answered_behind_what_a_running_replay_still_owes(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session, prompt, load, held = await held_in_a_turn(at, backend, "say finished")
        await turn_over(backend, session)
        assert at.lines.responses(prompt) == at.lines.responses(load) == []

        held.set()

        assert (await at.result(prompt))["stopReason"] == "end_turn"
        await at.result(load)
        before = at.lines.sent[: at.lines.sent.index(at.lines.responses(prompt)[0])]
        shown = [m["params"]["update"] for m in before if m.get("method") == "session/update"]
        assert said_by_agent(shown).endswith("finished")
        assert said_by_agent(at.lines.updates()).count("finished") == 1


async def test_a_question_comes_behind_the_announcement_of_its_call_also_in_a_replay(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session, prompt, load, held = await held_in_a_turn(at, backend, "run true")

        def questions() -> list[dict[str, Any]]:
            return [m for m in at.lines.sent if m.get("method") == "session/request_permission"]

        await logged(backend, session, PermissionAsked)
        assert questions() == []

        held.set()
        await at.lines.until(questions)
        (question,) = questions()
        called = question["params"]["toolCall"]["toolCallId"]
        before = at.lines.sent[: at.lines.sent.index(question)]
        announced = [
            m["params"]["update"]["toolCallId"]
            for m in before
            if m.get("method") == "session/update"
            and m["params"]["update"]["sessionUpdate"] == "tool_call"
        ]
        assert announced == [called]
        at.cancel(session)
        assert (await at.result(prompt))["stopReason"] == "cancelled"
        await at.result(load)


async def test_a_cancel_is_heard_while_a_question_waits_for_a_replay(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session, prompt, load, held = await held_in_a_turn(at, backend, "run true")
        await logged(backend, session, PermissionAsked)

        at.cancel(session)
        await turn_over(backend, session)
        held.set()

        assert (await at.result(prompt))["stopReason"] == "cancelled"
        await at.result(load)
        assert not any(m.get("method") == "session/request_permission" for m in at.lines.sent)


async def test_a_replay_that_is_broken_off_takes_nothing_with_it_that_is_new(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session, prompt, load, held = await held_in_a_turn(at, backend, "say finished")
        await turn_over(backend, session)

        at.note("$/cancel_request", requestId=load)

        assert (await at.response(load))["error"]["code"] == -32800
        assert (await at.result(prompt))["stopReason"] == "end_turn"
        assert said_by_agent(at.lines.updates()).count("finished") == 1
        held.set()
        after = at.prompt(session, "say after")
        assert (await at.result(after))["stopReason"] == "end_turn"
        assert said_by_agent(at.lines.updates()).endswith("after")


# --- loads of one id that end differently -----------------------------------------------------


async def stored_session(tmp_path: Any) -> str:
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        await at.result(at.prompt(session, "say before"))
        return session


@pytest.mark.parametrize("bad_first", [True, False])
@pytest.mark.parametrize("how", ["wrong cwd", "cancelled"])
async def test_a_load_that_fails_does_not_take_the_session_from_one_that_succeeds(
    how, bad_first, tmp_path
):
    session = await stored_session(tmp_path)
    async with talk(tmp_path, is_open=False) as (at, backend):

        def bad_load() -> int:
            if how == "cancelled":
                return at.load(session)
            return at.say("session/load", sessionId=session, cwd="/tmp", mcpServers=[])

        first = bad_load() if bad_first else at.load(session)
        prompt = at.prompt(session, "say between")
        second = at.load(session) if bad_first else bad_load()
        bad, good = (first, second) if bad_first else (second, first)
        if how == "cancelled":
            at.note("$/cancel_request", requestId=bad)
            await at.response(bad)
        at.connection.open(backend)

        await at.result(good)
        code = (await at.response(bad))["error"]["code"]
        assert code == (-32800 if how == "cancelled" else -32602)
        assert (await at.result(prompt))["stopReason"] == "end_turn"
        after = at.prompt(session, "say after")
        assert (await at.result(after))["stopReason"] == "end_turn"
        assert said_by_agent(at.lines.updates()).endswith("betweenafter")


async def test_when_every_load_fails_the_session_is_unknown_and_what_waited_is_told(tmp_path):
    async with talk(tmp_path, is_open=False) as (at, backend):
        loads = [at.load("sess_none") for _ in range(3)]
        prompt = at.prompt("sess_none", "say x")
        at.connection.open(backend)

        for request in (*loads, prompt):
            assert (await at.response(request))["error"]["code"] == -32002
        assert (await at.response(at.prompt("sess_none", "say x")))["error"]["code"] == -32002


async def test_what_waited_for_a_load_that_the_store_failed_is_told_the_same(tmp_path, monkeypatch):
    session = await stored_session(tmp_path)
    async with talk(tmp_path, is_open=False) as (at, backend):

        async def fail(_session_id: str) -> None:
            raise StoreError("the session database is locked by another process")

        load, prompt = at.load(session), at.prompt(session, "say x")
        with monkeypatch.context() as patch:
            patch.setattr(backend.store, "load", fail)
            at.connection.open(backend)
            for request in (load, prompt):
                error = (await at.response(request))["error"]
                assert error["code"] == -32603
                assert "locked" in error["message"]

        await at.result(at.load(session))
        assert (await at.result(at.prompt(session, "say x")))["stopReason"] == "end_turn"


async def test_no_more_prompts_wait_for_a_load_than_for_an_agent(tmp_path):
    async with talk(tmp_path, is_open=False) as (at, backend):
        load = at.load("sess_none")
        prompts = [at.prompt("sess_none", "say x") for _ in range(MAX_QUEUED + 3)]
        at.connection.open(backend)

        await at.response(load)
        codes = [(await at.response(prompt))["error"]["code"] for prompt in prompts]
        assert codes == [-32002] * MAX_QUEUED + [-32600] * 3


async def test_a_mode_set_right_behind_a_load_waits_for_it(tmp_path):
    session = await stored_session(tmp_path)
    async with talk(tmp_path, is_open=False) as (at, backend):
        load = at.load(session)
        mode = at.say("session/set_mode", sessionId=session, modeId="read-only")
        lost = at.load("sess_none")
        nowhere = at.say("session/set_mode", sessionId="sess_none", modeId="read-only")
        await anyio.wait_all_tasks_blocked()
        assert at.lines.responses(mode) == []
        at.connection.open(backend)

        await at.result(load)
        assert await at.result(mode) == {}
        assert backend.runtime.agents[session].mode == "read-only"
        await at.response(lost)
        assert (await at.response(nowhere))["error"]["code"] == -32002


@pytest.mark.requirement("B121")
async def test_steering_is_answered_with_its_turn_and_not_behind_what_is_queued(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        agent = backend.runtime.agents[session]
        entered, gate = anyio.Event(), anyio.Event()

        async def wait(*_args: Any) -> None:
            entered.set()
            await gate.wait()

        stop = agent.hooks.on("agent/pre-step", wait)
        first = at.prompt(session, "plan x")
        with anyio.fail_after(5):
            await entered.wait()
        stop()
        queued = at.prompt(session, "stall")
        steered = at.prompt(session, "say steered", _meta={STEER_KEY: True})
        gate.set()

        assert (await at.result(first))["stopReason"] == "end_turn"
        assert (await at.result(steered))["stopReason"] == "end_turn"
        assert at.lines.responses(queued) == []
        assert [data.turn for data in log_of(backend, session, SteeringMessage)] == [1]
        at.cancel(session)
        assert (await at.result(queued))["stopReason"] == "cancelled"


# --- an agent that is let go of ---------------------------------------------------------------


@pytest.mark.race
async def test_a_load_gets_no_agent_that_was_let_go_of_while_the_log_was_looked_at(
    tmp_path, monkeypatch
):
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        await at.result(at.prompt(session, "say first"))
        agent, look, gate = backend.runtime.agents[session], backend.store.load, anyio.Event()

        async def held(session_id: str) -> Any:
            found = await look(session_id)
            await gate.wait()
            return found

        monkeypatch.setattr(backend.store, "load", held)
        load = at.load(session)
        await anyio.wait_all_tasks_blocked()
        agent.dispose()  # as for a client that was lost, when what it left behind is over
        gate.set()

        assert "error" not in await at.response(load)
        assert (await at.result(at.prompt(session, "say second")))["stopReason"] == "end_turn"
        assert backend.runtime.agents[session] is not agent


# --- another process --------------------------------------------------------------------------


async def load(client: Client, session: str) -> dict[str, Any]:
    params = {"sessionId": session, "cwd": CWD, "mcpServers": []}
    return await client.wire.response(client.wire.request("session/load", params))


@pytest.mark.transports
@pytest.mark.parametrize("tried_before", [False, True])
async def test_a_session_that_another_process_went_on_with_is_read_again_by_a_load(tried_before):
    async with serving() as one:
        session = await one.new_session(CWD)
        assert await one.stop_reason(one.prompt(session, "say first")) == "end_turn"
        async with serving() as two:
            assert "result" in await load(two, session)
            assert await two.stop_reason(two.prompt(session, "say second")) == "end_turn"
        if tried_before:  # what was said meanwhile is not overwritten but refused
            answer = await one.wire.response(one.prompt(session, "say lost"))
            assert answer["error"]["code"] == -32603
        seen = len(one.text(session))

        assert "result" in await load(one, session)

        assert one.text(session)[seen:] == "firstsecond"
        assert await one.stop_reason(one.prompt(session, "say third")) == "end_turn"
        async with serving() as three:
            assert "result" in await load(three, session)
            assert three.text(session) == "firstsecondthird"


@pytest.mark.only_over("stdio", "ws", why="a status says so")
async def test_a_session_that_another_process_deleted_is_unknown_from_the_next_load_on():
    async with serving() as one:
        session = await one.new_session(CWD)
        assert await one.stop_reason(one.prompt(session, "say first")) == "end_turn"
        await delete(session)

        answer = await load(one, session)

        assert answer["error"]["code"] == -32002
        assert (await one.wire.response(one.prompt(session, "say x")))["error"]["code"] == -32002
        again = await one.new_session(CWD)
        assert await one.stop_reason(one.prompt(again, "say x")) == "end_turn"


async def delete(session: str) -> None:
    command = [sys.executable, "-m", "acp_server", "sessions", "delete", session]
    with anyio.fail_after(30):
        await anyio.run_process(command)


async def test_a_file_is_no_directory_to_work_in(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    async with serving() as client:
        session = await client.new_session(tmp_path)
        for method, more in (("session/new", {}), ("session/load", {"sessionId": session})):
            error = await error_of(client, method, {"cwd": str(file), "mcpServers": [], **more})
            assert error["code"] == -32602
            assert "not a directory" in error["data"]["reason"]
