"""Sessions that nobody uses are unloaded; their client notices nothing when it comes back."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from mcp_double import Double
from serving import serving
from talking import CWD, Lines, Talk, said_by_agent, talk

from acp_server.backend import Backend
from acp_server.connection import Connection
from acp_server.unloading import Unloading
from agent_core.errors import StoreError
from agent_core.events import TurnEnd

BUSY = "count 100000"


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def later(steps: int) -> None:
    for _ in range(steps):
        await anyio.lowlevel.checkpoint()


async def unload(backend: Backend) -> None:
    await Unloading(backend, 0).unload_unused()


async def unloaded_session(at: Talk, backend: Backend, said: str = "say before") -> str:
    session = await at.new_session()
    await at.result(at.prompt(session, said))
    await unload(backend)
    assert backend.runtime.agents == {}
    return session


async def being_loaded(
    at: Talk, backend: Backend, said: str, is_loaded: bool, steps: int
) -> tuple[str, int]:
    """A session that a prompt has loaded again, or not quite yet; also the prompt's id."""
    session = await unloaded_session(at, backend)
    prompt = at.prompt(session, said)
    if is_loaded:
        await until(lambda: backend.runtime.agents)
    await later(steps)
    return session, prompt


def told(at: Talk, kind: str) -> int:
    return sum(update["sessionUpdate"] == kind for update in at.lines.updates())


# --- what is unloaded, and what is not ------------------------------------------------------


@pytest.mark.requirement("B093")
async def test_many_sessions_left_open_are_unloaded_and_each_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    async with talk(tmp_path, unload_after_s=0.05) as (at, backend):
        sessions = [await at.new_session() for _ in range(200)]
        for session in sessions[::20]:
            await at.result(at.prompt(session, f"say I am {session}"))
        await until(lambda: not backend.runtime.agents)
        for session in sessions[::10]:
            n_before = len(at.lines.updates())
            result = await at.result(at.prompt(session, "say still here"))
            assert result["stopReason"] == "end_turn"
            assert said_by_agent(at.lines.updates()[n_before:]) == "still here"


async def test_nothing_keeps_the_agent_in_memory(tmp_path: Path) -> None:
    double = Double(tmp_path)
    async with talk(tmp_path) as (at, backend):
        made = await at.result(at.say("session/new", cwd=CWD, mcpServers=[double.wire()]))
        await at.result(at.prompt(made["sessionId"], "say hello"))
        agent = weakref.ref(backend.runtime.agents[made["sessionId"]])
        await unload(backend)
        # Until the store has written. A sleep of the loop's would not do: cancelled timers that are
        # due behind it keep what they were made in.
        await anyio.to_thread.run_sync(time.sleep, 0.1)
        gc.collect()
        assert agent() is None


@pytest.mark.parametrize("going_on", [BUSY, "run sleep 300"])
async def test_a_session_in_which_something_goes_on_stays(tmp_path: Path, going_on: str) -> None:
    async with talk(tmp_path, mode="bypass") as (at, backend):
        session = await at.new_session()
        prompt = at.prompt(session, going_on)
        await anyio.wait_all_tasks_blocked()
        await unload(backend)
        assert session in backend.runtime.agents
        at.cancel(session)
        assert (await at.result(prompt))["stopReason"] == "cancelled"


async def test_a_session_with_a_subagent_in_the_background_stays(tmp_path: Path) -> None:
    async with talk(tmp_path, mode="bypass") as (at, backend):
        session = await at.new_session()
        await at.result(at.prompt(session, "delegate run sleep 300 in the background"))
        await unload(backend)
        assert session in backend.runtime.agents
        at.cancel(session)


async def test_a_session_whose_person_is_being_asked_stays(tmp_path: Path) -> None:
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        prompt = at.prompt(session, "run echo hi")
        asked = partial(_sent, at, "session/request_permission")
        await at.lines.until(asked)
        await unload(backend)
        at.answer(asked()[0], {"outcome": {"outcome": "selected", "optionId": "allow-once"}})
        assert (await at.result(prompt))["stopReason"] == "end_turn"


def _sent(at: Talk, method: str) -> list[dict[str, Any]]:
    return [message for message in at.lines.sent if message.get("method") == method]


async def test_context_that_waits_for_the_next_turn_keeps_the_session(tmp_path: Path) -> None:
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        backend.runtime.agents[session].inject("the build has failed", source="ci")
        await unload(backend)
        assert session in backend.runtime.agents


async def test_a_log_that_cannot_be_written_keeps_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_args: object) -> None:
        raise StoreError("the disk is full")

    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        with monkeypatch.context() as broken:
            broken.setattr(backend.store, "flush", fail)
            await unload(backend)
        assert session in backend.runtime.agents


# --- coming back ----------------------------------------------------------------------------


async def test_what_was_said_chosen_and_allowed_for_ever_is_still_so(tmp_path: Path) -> None:
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        prompt = at.prompt(session, "run echo hi")
        await at.lines.until(lambda: _sent(at, "session/request_permission"))
        (asked,) = _sent(at, "session/request_permission")
        at.answer(asked, {"outcome": {"outcome": "selected", "optionId": "allow-always"}})
        await at.result(prompt)
        await unload(backend)
        assert (await at.result(at.prompt(session, "run echo hi")))["stopReason"] == "end_turn"
        assert len(_sent(at, "session/request_permission")) == 1
        history = backend.runtime.agents[session].session.messages
        assert str(history).count("run echo hi") == 2

        await at.result(at.say("session/set_mode", sessionId=session, modeId="read-only"))
        await unload(backend)
        await at.result(at.prompt(session, "say hello"))
        assert backend.runtime.agents[session].mode == "read-only"


async def test_a_mode_chosen_while_it_is_unloaded_holds_for_the_prompt_on_the_next_line(
    tmp_path: Path,
) -> None:
    async with talk(tmp_path) as (at, backend):
        session = await unloaded_session(at, backend)
        chosen = at.say("session/set_mode", sessionId=session, modeId="bypass")
        prompt = at.prompt(session, "run echo hi")
        await at.result(chosen)
        assert (await at.result(prompt))["stopReason"] == "end_turn"
        assert _sent(at, "session/request_permission") == []


async def test_the_client_is_told_nothing_that_it_knows(tmp_path: Path) -> None:
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        await at.result(at.prompt(session, "say before"))
        kinds = ("available_commands_update", "session_info_update", "user_message_chunk")
        before = [told(at, kind) for kind in kinds]
        await unload(backend)
        await at.result(at.prompt(session, "say behind"))
        # The prompt is shown as every prompt is, and nothing else.
        assert [told(at, kind) for kind in kinds[:2]] == before[:2]
        assert said_by_agent(at.lines.updates()) == "beforebehind"


async def test_its_servers_end_with_it_and_are_there_again_when_it_is_used(
    tmp_path: Path,
) -> None:
    double = Double(tmp_path)
    async with talk(tmp_path, mode="bypass") as (at, backend):
        made = await at.result(at.say("session/new", cwd=CWD, mcpServers=[double.wire()]))
        session = made["sessionId"]
        await at.result(at.prompt(session, "say hello"))
        assert len(double.alive) == 1
        await unload(backend)
        assert double.alive == []
        await at.result(at.prompt(session, "say hello"))
        assert len(double.alive) == 1
        assert "mcp__double__echo" in backend.runtime.agents[session].tools


async def test_further_directories_are_kept(tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    async with talk(tmp_path) as (at, backend):
        made = await at.result(
            at.say("session/new", cwd=CWD, mcpServers=[], additionalDirectories=[str(extra)])
        )
        await unload(backend)
        await at.result(at.prompt(made["sessionId"], "say hello"))
        assert backend.runtime.agents[made["sessionId"]].roots.additional == (str(extra),)


# --- at the worst moment --------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("is_unloaded", [False, True])
async def test_a_prompt_at_any_moment_of_the_unloading_runs_once(
    tmp_path: Path, is_unloaded: bool, steps: int
) -> None:
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        await at.result(at.prompt(session, "say before"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unload, backend)
            if is_unloaded:  # its former agent is being disposed
                await until(lambda: at.connection.sessions[session].agent is None)
            await later(steps)
            first, second = at.prompt(session, "say one"), at.prompt(session, "say two")
            assert (await at.result(first))["stopReason"] == "end_turn"
            assert (await at.result(second))["stopReason"] == "end_turn"
        assert said_by_agent(at.lines.updates()) == "beforeonetwo"
        events = backend.runtime.agents[session].session.events
        assert sum(isinstance(event.data, TurnEnd) for event in events) == 3


@pytest.mark.race
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("is_loaded", [False, True])
async def test_a_stop_right_behind_the_prompt_that_loads_it_again_is_heard(
    tmp_path: Path, is_loaded: bool, steps: int
) -> None:
    async with talk(tmp_path) as (at, backend):
        session, prompt = await being_loaded(at, backend, BUSY, is_loaded, steps)
        at.cancel(session)
        assert (await at.result(prompt))["stopReason"] == "cancelled"
        assert (await at.result(at.prompt(session, "say hello")))["stopReason"] == "end_turn"


@pytest.mark.race
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("method", ["session/close", "session/delete"])
@pytest.mark.parametrize("is_loaded", [False, True])
async def test_closing_it_while_it_is_loaded_again_leaves_nothing(
    tmp_path: Path, method: str, is_loaded: bool, steps: int
) -> None:
    async with talk(tmp_path) as (at, backend):
        session, prompt = await being_loaded(at, backend, BUSY, is_loaded, steps)
        await at.result(at.say(method, sessionId=session))
        assert (await at.result(prompt))["stopReason"] == "cancelled"
        await until(lambda: not backend.runtime.agents)
        assert backend.holders.sessions == ()
        assert (await at.response(at.prompt(session, "say hello")))["error"]["code"] == -32002


@pytest.mark.race
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("is_loaded", [False, True])
async def test_a_load_of_the_same_client_and_a_prompt_share_one_agent(
    tmp_path: Path, is_loaded: bool, steps: int
) -> None:
    async with talk(tmp_path) as (at, backend):
        session, prompt = await being_loaded(at, backend, "say one", is_loaded, steps)
        load = at.load(session)
        await at.result(load)
        assert (await at.result(prompt))["stopReason"] == "end_turn"
        assert (await at.result(at.prompt(session, "say two")))["stopReason"] == "end_turn"
        assert list(backend.runtime.agents) == [session]


@pytest.mark.race
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("is_loaded", [False, True])
async def test_another_client_may_take_it_at_any_moment(
    tmp_path: Path, is_loaded: bool, steps: int
) -> None:
    """Whoever comes last has it, with its own directories; both prompts have an answer."""
    async with anyio.create_task_group() as tasks, talk(tmp_path) as (at, backend):
        other = Talk(Connection(lines := Lines(), tasks), lines)
        other.connection.open(backend)
        await other.result(other.say("initialize", protocolVersion=1))
        session, prompt = await being_loaded(at, backend, "say one", is_loaded, steps)
        more = {"additionalDirectories": [str(tmp_path)], "mcpServers": []}
        await other.result(other.say("session/resume", sessionId=session, cwd=CWD, **more))
        answer = await at.response(prompt)
        assert answer.get("error", {}).get("code", -32002) == -32002
        assert (await other.result(other.prompt(session, "say two")))["stopReason"] == "end_turn"
        agent = backend.runtime.agents[session]
        assert agent.roots.additional == (str(tmp_path),)
        assert backend.holders.holds(other.connection.sessions[session])
        assert (await at.response(at.prompt(session, "say three")))["error"]["code"] == -32002
        other.connection.peer.close()
        tasks.cancel_scope.cancel()


# --- it cannot be loaded --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["session/prompt", "session/set_mode"])
async def test_a_store_that_fails_is_said_and_the_next_use_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def fail(*_args: object) -> None:
        raise StoreError("the disk is on fire")

    async with talk(tmp_path) as (at, backend):
        session = await unloaded_session(at, backend)
        use: Callable[[], int] = partial(at.prompt, session, "say hello")
        if method == "session/set_mode":
            use = partial(at.say, method, sessionId=session, modeId="bypass")
        with monkeypatch.context() as broken:
            broken.setattr(backend.store, "load", fail)
            error = (await at.response(use()))["error"]
            assert (error["code"], error["message"]) == (-32603, "the disk is on fire")
        await at.result(use())


async def test_what_another_process_did_meanwhile_is_not_talked_over(tmp_path: Path) -> None:
    async with talk(tmp_path) as (at, backend):
        session = await unloaded_session(at, backend)
        async with serving("--state-dir", str(tmp_path)) as other:
            resumed = {"sessionId": session, "cwd": CWD, "mcpServers": []}
            await other.result(other.wire.request("session/resume", resumed))
            await other.stop_reason(other.prompt(session, "say I was here"))
        error = (await at.response(at.prompt(session, "say hello")))["error"]
        assert error["code"] == -32603
        assert "another process" in error["message"]
        await at.result(at.load(session))
        assert "I was here" in said_by_agent(at.lines.updates())
        assert (await at.result(at.prompt(session, "say hello")))["stopReason"] == "end_turn"
