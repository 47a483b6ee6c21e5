"""What went wrong in other agents over time, tried on this one: processes, memory, connections."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from mcp_double import Double
from network_rig import editor, listening
from serve_rig import SERVE, follow_up, served, tool_calls

from conformance import processes
from conformance.client import Client

LIMIT_S = 20


async def until(condition: Callable[[], object]) -> None:
    """Wait for what other processes do; there is nothing to wait on."""
    with anyio.fail_after(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def with_servers(
    client: Client, method: str, cwd: Path, *servers: object, **more: object
) -> str:
    """Open a session with MCP servers; return its id."""
    params = {"cwd": str(cwd), "mcpServers": servers, **more}
    result = await client.result(client.wire.request(method, params))
    session = more.get("sessionId") or result["sessionId"]
    return str(session)


# --- clients that vanish --------------------------------------------------------------------


@pytest.mark.requirement("B015")
async def test_a_client_that_vanishes_at_its_last_words_costs_nobody_else(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server) as other:
        whole = await other.new_session(tmp_path)
        running = await other.prompt(whole, "count 20 slowly")
        async with editor(server) as client:
            session = await client.new_session(tmp_path)
            await client.prompt(session, "count 5 slowly")
            await client.until(lambda: "4 " in client.text(session))
            client.vanish()

        assert await other.stop_reason(running) == "end_turn"
        assert other.text(whole) == "".join(f"{number} " for number in range(1, 21))
        await other.load(session, tmp_path)
        assert await other.stop_reason(await other.prompt(session, "say on")) == "end_turn"


@pytest.mark.requirement("B049")
async def test_subagents_end_with_the_connection_that_is_lost(tmp_path: Path) -> None:
    async with listening(tmp_path, "--mode=bypass") as server:

        def running() -> set[int]:
            pid = server.process.pid
            return processes.living_family({pid}, f"{processes.MARKER}=") - {pid}

        async with editor(server) as client:
            session = await client.new_session(tmp_path)
            command = f"run touch {tmp_path}/runs; sleep 300"
            await client.prompt(session, f"delegate delegate {command} in the background")
            await client.prompt(session, f"delegate delegate {command}2")
            await until(lambda: (tmp_path / "runs").exists() and len(running()) >= 4)
            client.vanish()

        await until(lambda: not running())
        async with editor(server) as client:
            await client.load(session, tmp_path)
            assert await client.stop_reason(await client.prompt(session, "say on")) == "end_turn"


@pytest.mark.requirement("B111")
async def test_messages_of_any_size_pass_on_a_websocket_both_ways(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server) as client:
        for size in (65_535, 65_536, 65_537, 2**20 + 1, 8 * 2**20):
            session = await client.new_session(tmp_path)
            said = "x" * size
            request_id = await client.prompt(session, f"say {said}")

            assert await client.stop_reason(request_id) == "end_turn"

            await client.load(session, tmp_path)
            assert client.text(session) == said * 2
            prompted = client.updates(session, "user_message_chunk")
            assert "".join(update["content"]["text"] for update in prompted) == f"say {said}"


# --- processes ------------------------------------------------------------------------------

PARENT = """
import json, os, signal, subprocess, sys

def ask(agent, number, method, **params):
    message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    agent.stdin.write(json.dumps(message).encode() + b"\\n")
    agent.stdin.flush()

def answer(agent, number):
    while (message := json.loads(agent.stdout.readline())).get("id") != number:
        pass
    return message["result"]

agents = []
for number in range(5):
    agents.append(subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    ask(agents[-1], 1, "initialize", protocolVersion=1)
    answer(agents[-1], 1)
    ask(agents[-1], 2, "session/new", cwd=os.getcwd(), mcpServers=[])
    session = answer(agents[-1], 2)["sessionId"]
    text = {"type": "text", "text": f"run (sleep 300; true) & touch runs-{number}; wait"}
    ask(agents[-1], 3, "session/prompt", sessionId=session, prompt=[text])
signal.pause()
"""


@pytest.mark.requirement("B091")
async def test_agents_and_their_commands_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    env = {**os.environ, processes.MARKER: token}
    command = [sys.executable, "-c", PARENT, *SERVE, "--mode=bypass"]
    parent = await anyio.open_process(command, cwd=tmp_path, env=env)

    def family() -> set[int]:
        return processes.living_family({parent.pid}, f"{processes.MARKER}={token}")

    async with parent:
        try:
            await until(lambda: len(list(tmp_path.glob("runs-*"))) == 5)
            assert len(family()) >= 1 + 5 + 5

            parent.kill()

            await until(lambda: not family())
        finally:
            processes.kill(family())


async def test_a_session_that_another_process_went_on_with_is_refused_before_a_word(
    tmp_path: Path,
) -> None:
    state = f"--state-dir={tmp_path / 'state'}"
    async with served(tmp_path, state) as one, served(tmp_path, state) as other:
        session = await one.new_session(tmp_path)
        await follow_up(one, session)
        await with_servers(other, "session/load", tmp_path, sessionId=session)
        assert await other.stop_reason(other.prompt(session, "say theirs")) == "end_turn"

        refused = await one.wire.response(one.prompt(session, "write never.txt: x"))

        assert "written by another process; load it again" in refused["error"]["message"]
        assert one.text(session) == "ok"
        assert tool_calls(one, session) == {}
        assert "File " not in one.wire.stderr
        await with_servers(one, "session/load", tmp_path, sessionId=session)
        assert await one.stop_reason(one.prompt(session, "say ours")) == "end_turn"
        assert one.text(session).endswith("ok" + "theirs" + "ours")


@pytest.mark.requirement("B085", "B140")
async def test_a_load_with_a_server_that_is_no_more_is_tried_once_and_says_so(
    tmp_path: Path,
) -> None:
    gone = Double(tmp_path, "gone", die_at="initialize")
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        await follow_up(client, session)
    async with served(tmp_path) as client:
        await with_servers(client, "session/load", tmp_path, gone.wire(), sessionId=session)
        for _ in range(2):
            assert await client.stop_reason(client.prompt(session, "say on"), 30) == "end_turn"

        assert len(gone.pids) == 1
        assert client.text(session) == "okonon"
        told = [u for u in client.wire.updates(session) if "'gone' is not available" in str(u)]
        assert len(told) == 1


@pytest.mark.requirement("B092", "B095")
async def test_closing_sessions_one_by_one_ends_the_servers_of_each_and_no_others(
    tmp_path: Path,
) -> None:
    doubles = [Double(tmp_path, f"s{number}", has_child=True) for number in range(6)]
    async with served(tmp_path, "--mode=bypass") as client:
        sessions = []
        for double in doubles:
            sessions.append(await with_servers(client, "session/new", tmp_path, double.wire()))
            prompt = client.prompt(sessions[-1], "run sleep 0 & true")
            assert await client.stop_reason(prompt, 30) == "end_turn"
        assert [len(double.alive) for double in doubles] == [2] * 6

        for number, session in enumerate(sessions, 1):
            await client.result(client.wire.request("session/close", {"sessionId": session}))

            alive = [len(double.alive) for double in doubles]
            assert alive == [0] * number + [2] * (6 - number)
        assert client.wire.descendants() == set()


# --- memory ---------------------------------------------------------------------------------


@pytest.mark.requirement("B165")
async def test_sessions_that_are_over_take_no_memory(tmp_path: Path) -> None:
    async with served(tmp_path, "--mode=bypass") as client:

        async def use(number: int) -> None:
            for _ in range(number):
                session = await client.new_session(tmp_path)
                prompt = client.prompt(session, "run head -c 1000000 /dev/zero | tr '\\0' x")
                assert await client.stop_reason(prompt) == "end_turn"
                await client.result(client.wire.request("session/close", {"sessionId": session}))

        await use(30)  # what is loaded at first, and what an allocator keeps
        before = client.wire.rss_bytes()
        await use(60)

        assert client.wire.rss_bytes() < 1.1 * before
