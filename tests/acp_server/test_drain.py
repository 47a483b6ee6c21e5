"""A server that is told to go: what runs has its time, and nothing that was seen is lost."""

from __future__ import annotations

import json
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from network_rig import LIMIT_S, Editor, Server, editor, listening
from websockets.exceptions import InvalidStatus

from acp_server import types as wire
from acp_server.updates import updates_for
from agent_core.events import TurnEnd
from agent_core.outcomes import kind_of
from agent_core.sessions.sqlite import SqliteStore

GATED = "run echo begun; while [ ! -e go ]; do sleep 0.02; done"
INFO = ("--mode", "bypass", "--log-level", "info")
SHOWN = ("agent_message_chunk", "tool_call", "tool_call_update")
STOP_REASONS = {"completed": "end_turn", "aborted": "cancelled"}


async def exit_code(server: Server) -> int:
    with anyio.fail_after(LIMIT_S):
        return await server.process.wait()


async def begun(client: Editor, place: Path, said: str = GATED) -> tuple[str, int]:
    """A session whose turn has got to its command, and the prompt's id."""
    session = await client.new_session(place)
    answer = await client.prompt(session, said)
    await client.until(
        lambda: [
            each
            for each in client.updates(session, "tool_call_update")
            if "begun" in str(each.get("content"))
        ]
    )
    return session, answer


async def draining(server: Server) -> None:
    """Tell the server to go, and wait until it says so."""
    server.process.terminate()
    await server.until_said("drain_began")
    async with httpx2.AsyncClient() as http:
        assert (await http.get(f"{server.http}/readyz")).status_code == 503
        assert (await http.get(f"{server.http}/healthz")).status_code == 200


async def logged(server: Server, session_id: str) -> tuple[list[dict[str, Any]], str]:
    """What the log of a session shows to a client that was there, and how its turn ended."""
    store = SqliteStore(server.state / "sessions.sqlite3")
    try:
        _header, events = await store.load(session_id)
    finally:
        await store.aclose()
    messages = [
        json.loads(wire.encode_update(session_id, update))["params"]["update"]
        for event in events
        for update in updates_for(event)
    ]
    assert isinstance(events[-1].data, TurnEnd)
    return [each for each in messages if each["sessionUpdate"] in SHOWN], kind_of(
        events[-1].data.outcome
    )


async def test_a_drain_under_load_loses_no_event_that_a_client_saw(tmp_path: Path) -> None:
    kinds = ("count 25 slowly", "count 2000 slowly", "run sleep 300", "count 1000000", "stall")
    flags = ("--mode", "bypass", "--drain", "2")
    async with listening(tmp_path, *flags, must_end_well=False) as server, AsyncExitStack() as all:
        clients = [await all.enter_async_context(editor(server)) for _ in range(10)]
        prompts: list[tuple[Editor, str, int]] = []
        for client in clients:
            for kind in kinds:
                session = await client.new_session(tmp_path)
                prompts.append((client, session, await client.prompt(session, kind)))
        for number, (client, session, _) in enumerate(prompts):
            if kinds[number % len(kinds)] != "stall":
                await client.until(lambda c=client, s=session: shown(c, s))

        server.process.terminate()
        reasons = [await client.stop_reason(answer) for client, _, answer in prompts]
        assert await exit_code(server) == 0, server.said
        for client in clients:
            await client.until(lambda c=client: c.close_code)
            assert client.close_code == 1001

        for (client, session, _), reason in zip(prompts, reasons, strict=True):
            updates, outcome = await logged(server, session)
            assert shown(client, session) == updates
            assert STOP_REASONS[outcome] == reason
        assert Counter(reasons) == {"end_turn": 10, "cancelled": 40}
        assert "Traceback" not in server.said


def shown(client: Editor, session_id: str) -> list[dict[str, Any]]:
    return [each for each in client.updates(session_id) if each["sessionUpdate"] in SHOWN]


async def test_a_server_that_is_told_to_go_takes_no_work_and_lets_what_runs_finish(
    tmp_path: Path,
) -> None:
    flags = (*INFO, "--drain", "300")
    async with (
        listening(tmp_path, *flags, must_end_well=False) as server,
        editor(server) as client,
        editor(server) as other,
    ):
        session, answer = await begun(client, tmp_path)
        idle = await other.new_session(tmp_path)
        await draining(server)

        where = {"cwd": str(tmp_path), "mcpServers": []}
        refused = (
            await other.error("session/new", **where),
            await other.error("session/load", sessionId=session, **where),
            await other.error("session/prompt", sessionId=idle, prompt=[]),
        )
        for error in refused:
            assert error["code"] == -32603
            assert "shutting down" in error["message"]
        with pytest.raises(InvalidStatus, match="503"):
            async with editor(server):
                pass
        async with httpx2.AsyncClient() as http:
            body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
            assert (await http.post(f"{server.http}/acp", json=body)).status_code == 503
        assert "sessions" in await other.result("session/list")

        (tmp_path / "go").touch()
        assert await client.stop_reason(answer) == "end_turn"
        assert await exit_code(server) == 0, server.said


async def test_a_command_that_ignores_its_end_is_waited_for_and_its_turn_answered(
    tmp_path: Path,
) -> None:
    flags = ("--mode", "bypass", "--drain", "0")
    async with (
        listening(tmp_path, *flags, must_end_well=False) as server,
        editor(server) as client,
    ):
        session, answer = await begun(
            client, tmp_path, "run trap '' TERM; echo begun; sleep 300; sleep 300"
        )
        server.process.terminate()
        assert await client.stop_reason(answer) == "cancelled"
        assert await exit_code(server) == 0, server.said
        updates, outcome = await logged(server, session)
        assert outcome == "aborted"
        assert shown(client, session) == updates
        assert updates[-1]["status"] == "failed"


async def test_a_kept_turn_whose_client_is_lost_has_its_time_too(tmp_path: Path) -> None:
    flags = (*INFO, "--drain", "300", "--on-disconnect", "keep")
    async with listening(tmp_path, *flags, must_end_well=False) as server:
        async with editor(server) as client:
            session, _ = await begun(client, tmp_path)
            client.vanish()
        await server.until_said("client_disconnected")
        await draining(server)
        (tmp_path / "go").touch()
        assert await exit_code(server) == 0, server.said
        updates, outcome = await logged(server, session)
        assert outcome == "completed"
        assert updates[-1]["sessionUpdate"] == "agent_message_chunk"


@pytest.mark.parametrize("drain_s", ["0", "300"])
@pytest.mark.parametrize("leave", ["before", "with"])
async def test_a_client_that_leaves_meanwhile_holds_the_end_up_no_longer(
    tmp_path: Path, drain_s: str, leave: str
) -> None:
    """With its requests nobody waits for their answers; the grace time would end with 1."""
    flags = (*INFO, "--drain", drain_s, "--shutdown-grace", "15")
    async with listening(tmp_path, *flags, must_end_well=False) as server:
        async with editor(server) as client:
            # What ends only by force leaves the client some time to go while it is being stopped.
            await begun(client, tmp_path, "run trap '' TERM; echo begun; sleep 300 & wait; wait")
            if leave == "before":
                await draining(server)
            else:
                server.process.terminate()
        assert await exit_code(server) == 0, server.said


async def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    flags = (*INFO, "--drain", "300")
    async with (
        listening(tmp_path, *flags, must_end_well=False) as server,
        editor(server) as client,
    ):
        await begun(client, tmp_path)
        await draining(server)
        server.process.send_signal(signal.SIGINT)
        assert await exit_code(server) == 128 + signal.SIGINT


async def test_what_does_not_stop_is_ended_with_the_grace_time(tmp_path: Path) -> None:
    plugin = tmp_path / "stubborn.py"
    plugin.write_text(
        "import anyio\n"
        "def load(runtime):\n"
        "    async def hold(_agent, content, _source, _signal, next_):\n"
        "        if 'hold' in str(content):\n"
        "            await anyio.sleep_forever()\n"
        "        return await next_()\n"
        "    runtime.hooks.on('agent/prompt-submit', hold)\n"
    )
    flags = ("--drain", "0", "--shutdown-grace", "1", "--plugin", "stubborn:load")
    env = {"PYTHONPATH": str(tmp_path)}
    async with (
        listening(tmp_path, *flags, env=env, must_end_well=False) as server,
        editor(server) as client,
    ):
        session = await client.new_session(tmp_path)
        await client.prompt(session, "hold")
        await client.result("session/list")
        server.process.terminate()
        assert await exit_code(server) == 1


async def test_an_idle_server_does_not_wait_for_the_time_it_could_give(tmp_path: Path) -> None:
    async with listening(tmp_path, "--drain", "300") as server, editor(server) as client:
        await client.new_session(tmp_path)
