"""Subagents that are reached by their address. What holds for processes, too, is tested there."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from network_rig import TOKEN, listening
from remoting import (
    LIMIT_S,
    group_of,
    on_socket,
    outcome_of,
    received,
    recorded,
    start,
    until,
)
from serve_rig import served, settle_cancelled, tool_calls, tool_update

from acp_server.remote import RemoteProvider
from agent_core.agent import Agent
from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.errors import AgentError
from agent_core.models.keys import Key
from agent_core.subagents import SubagentResult
from agent_core.testing import rehearsal_agent
from conformance.client import Client

SCRIPTED = [sys.executable, str(Path(__file__).with_name("scripted_agent.py"))]


def key(token: str | None = None, *, command: tuple[str, ...] = ()) -> Key:
    return Key(token, command=command, advice="set it")


def use(parent: Agent, url: str, **options: Any) -> None:
    provider = RemoteProvider(parent._runtime, "remote", url=url, **options)
    parent._runtime.subagents.register(provider)


async def refused(parent: Agent) -> str:
    with anyio.fail_after(LIMIT_S), pytest.raises(AgentError) as caught:
        await start(parent, "x")
    assert parent._runtime._stops == {}
    return str(caught.value)


async def test_an_agent_that_dies_is_a_failed_run_that_says_so(tmp_path: Path) -> None:
    async with on_socket(SCRIPTED) as url, rehearsal_agent(str(tmp_path)) as parent:
        use(parent, url)
        result = await outcome_of(parent, "die")
        after = await outcome_of(parent, "count 1")

    assert result.message == ("The subagent 'remote' failed: the connection to the agent was lost")
    assert after == SubagentResult("completed", "1 ")


async def test_an_agent_that_ignores_the_stop_is_hung_up_on(tmp_path: Path) -> None:
    controller, wire = AbortController(), tmp_path / "wire"
    async with (
        on_socket(recorded(wire, SCRIPTED)) as url,
        rehearsal_agent(str(tmp_path)) as parent,
    ):
        use(parent, url, cancel_grace_s=0.05)
        run = await start(parent, "deaf", signal=controller.signal)
        await until(lambda: wire.exists() and b"session/prompt" in wire.read_bytes())
        controller.abort(USER)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []
    assert result == SubagentResult("aborted", "")
    assert [m["method"] for m in received(wire)][-1] == "session/cancel"


async def test_an_agent_that_is_nowhere_is_said(tmp_path: Path) -> None:
    async with rehearsal_agent(str(tmp_path)) as parent:
        use(parent, "ws://127.0.0.1:9/acp")
        assert await refused(parent) == (
            "The subagent 'remote' could not be reached: "
            "cannot connect to ws://127.0.0.1:9/acp: Connection refused."
        )


@pytest.mark.parametrize(
    ("token", "said"),
    [(None, "it asks for a token"), (key(), "it asks for a token"), (key("no"), "not accept")],
)
async def test_a_token_that_is_missing_or_wrong_is_said(
    tmp_path: Path, token: Key | None, said: str
) -> None:
    async with on_socket(SCRIPTED, TOKEN) as url, rehearsal_agent(str(tmp_path)) as parent:
        use(parent, url, token=token)

        assert said in await refused(parent)


async def test_a_command_that_prints_the_token_is_asked_again_when_it_was_refused(
    tmp_path: Path,
) -> None:
    script = f"echo run >> runs; if [ -e old ]; then rm old; echo old; else echo {TOKEN}; fi"
    (tmp_path / "old").touch()
    command = ("sh", "-c", f"cd {tmp_path}; {script}")
    async with on_socket(SCRIPTED, TOKEN) as url, rehearsal_agent(str(tmp_path)) as parent:
        use(parent, url, token=key(command=command))

        assert await outcome_of(parent, "count 1") == SubagentResult("completed", "1 ")
        assert await outcome_of(parent, "count 1") == SubagentResult("completed", "1 ")
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


async def test_a_command_that_prints_wrong_tokens_is_not_asked_for_ever(tmp_path: Path) -> None:
    command = ("sh", "-c", f"echo run >> {tmp_path}/runs; echo wrong")
    async with on_socket(SCRIPTED, TOKEN) as url, rehearsal_agent(str(tmp_path)) as parent:
        use(parent, url, token=key(command=command))

        assert "it does not accept the token" in await refused(parent)
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


async def test_a_command_that_has_no_token_is_said(tmp_path: Path) -> None:
    async with rehearsal_agent(str(tmp_path)) as parent:
        use(parent, "ws://127.0.0.1:9/", token=key(command=("false",)))

        assert "the key's command 'false' failed, it ended with status 1; set it" in await refused(
            parent
        )


@pytest.mark.race
@pytest.mark.parametrize("waits_for", ["the server", "the token"])
async def test_a_stop_while_it_is_being_reached_ends_that_at_once(
    tmp_path: Path, waits_for: str
) -> None:
    """A server that never says a word, or a command that never prints one."""
    waiting, over = anyio.Event(), anyio.Event()

    async def accept(_reader: Any, writer: asyncio.StreamWriter) -> None:
        waiting.set()
        await over.wait()
        writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    controller = AbortController()
    token = key(command=("sleep", "60")) if waits_for == "the token" else None
    async with listener, rehearsal_agent(str(tmp_path)) as parent:
        use(parent, f"ws://127.0.0.1:{port}/", token=token)
        before = asyncio.all_tasks()
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:

                async def stop() -> None:
                    if waits_for == "the server":
                        await waiting.wait()
                    else:
                        await anyio.wait_all_tasks_blocked()
                    controller.abort(USER)

                tasks.start_soon(stop)
                with pytest.raises(TurnAborted):
                    await start(parent, "x", signal=controller.signal)
        over.set()
        await until(lambda: len(asyncio.all_tasks() - before) <= 1)  # the server's own

        assert parent._runtime._stops == {}


@pytest.mark.parametrize("waits_for", ["the server", "the token"])
async def test_a_caller_that_is_cancelled_while_it_is_being_reached_leaves_nothing(
    tmp_path: Path, waits_for: str
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # which accepts nobody
    url = f"ws://127.0.0.1:{listener.getsockname()[1]}/"
    token = key(command=("sleep", "60")) if waits_for == "the token" else None
    with listener:
        async with rehearsal_agent(str(tmp_path)) as parent:
            use(parent, url, token=token)
            before = asyncio.all_tasks()
            with anyio.fail_after(LIMIT_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(start, parent, "x")
                    await anyio.wait_all_tasks_blocked()
                    tasks.cancel_scope.cancel()
                await until(lambda: asyncio.all_tasks() == before)

            assert parent._runtime._stops == {}


async def test_its_session_is_opened_in_a_directory_of_its_own_computer(tmp_path: Path) -> None:
    wire = tmp_path / "wire"
    async with (
        on_socket(recorded(wire, SCRIPTED)) as url,
        rehearsal_agent(str(tmp_path)) as parent,
    ):
        use(parent, url, cwd="/over/there")
        await outcome_of(parent, "count 1")

    assert received(wire)[1]["params"]["cwd"] == "/over/there"


def test_an_agent_has_a_command_or_an_address() -> None:
    for command, url in (((), None), (("a",), "ws://h")):
        with pytest.raises(ValueError, match="a command or a url"):
            RemoteProvider(None, "r", command, url=url)  # type: ignore[arg-type]


# --- as the configuration has it -------------------------------------------------------------


@asynccontextmanager
async def with_another(tmp_path: Path, *flags: str) -> AsyncIterator[tuple[Client, str]]:
    """A session of an agent that has another one, which is shown a token."""
    async with listening(tmp_path, *flags, env={"ACP_AGENT_TOKEN": TOKEN}) as server:
        config = tmp_path / "agent.toml"
        config.write_text(f'[subagents.far]\nurl = "{server.ws}"\ntoken_variable = "FAR"\n')
        async with served(tmp_path, f"--config={config}", env={"FAR": TOKEN}) as client:
            yield client, await client.new_session(tmp_path)


@pytest.mark.requirement("R71")
async def test_a_stop_reaches_a_command_of_an_agent_at_another_address(tmp_path: Path) -> None:
    async with with_another(tmp_path, "--mode=bypass") as (client, session):
        task = "run echo $$ > pid; sleep 60"
        prompt = client.prompt(session, f"delegate to far: {task}")
        await tool_update(client, session, "Run: echo")
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())

        client.cancel(session)

        await settle_cancelled(client, session, prompt)
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_commands_do_not_see_the_token_of_another_agent(tmp_path: Path) -> None:
    async with with_another(tmp_path) as (client, session):
        for text in ("run env", "delegate to far: say from far away"):
            assert await client.stop_reason(client.prompt(session, text)) == "end_turn"

        shown = json.dumps(tool_calls(client, session))
        assert "from far away" in shown
        assert "PATH=" in shown
        assert TOKEN not in json.dumps(client.wire.received)
