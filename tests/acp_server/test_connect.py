"""``acp-agent connect``: an editor on stdio, an agent elsewhere, and a network between them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from network_rig import TOKEN, Server, listening
from serve_rig import ask_for_permission, chunk_of, tool_update, violations
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from conformance.client import Client, PermissionPolicy
from conformance.processes import rss_bytes
from conformance.wire import Wire

LIMIT_S = 20
CONNECT = [sys.executable, "-m", "acp_server", "connect"]
LOST = "No answer will come: the connection to the agent was lost"


@asynccontextmanager
async def editor(
    url: str, *flags: str, permission: PermissionPolicy = "allow", token: str | None = None
) -> AsyncIterator[Client]:
    """An editor that starts the relay; it has said nothing yet."""
    env = {**os.environ, **({} if token is None else {"ACP_AGENT_TOKEN": token})}
    async with Wire.spawn([*CONNECT, *flags, url], env=env) as wire:
        yield Client(wire, permission=permission)


async def leaves(client: Client, code: int = 0, stderr: str = "") -> None:
    """End the input, and check how the relay ends."""
    wire = client.wire
    await wire.close_stdin()
    assert await wire.exited() == code, wire.transcript()
    assert wire.stderr == stderr
    assert wire.noise == []


class Network:
    """What stands between the relay and the agent; it can be cut."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.is_down = False
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/acp"

    def cut(self) -> None:
        """Break every connection, without a word."""
        for writer in self._writers:
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            writer.transport.abort()
            return
        further, onward = await asyncio.open_connection("127.0.0.1", self.target_port)
        self._writers |= {writer, onward}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_copy, reader, onward)
            await _copy(further, writer)
            tasks.cancel_scope.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def network(server: Server) -> AsyncIterator[Network]:
    between = Network(server.port)
    listener = await asyncio.start_server(between.carry, "127.0.0.1", 0)
    between.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield between
        between.cut()


# --- a connection that holds -----------------------------------------------------------------


async def test_an_editor_on_stdio_uses_an_agent_on_the_network(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}) as server,
        editor(server.ws, token=TOKEN) as client,
    ):
        await client.initialize()
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, "write a.txt: x then count 3")

        assert await client.stop_reason(prompt) == "end_turn"
        assert client.text(session).endswith("1 2 3 ")
        assert (tmp_path / "a.txt").read_text() == "x"
        assert violations(client.wire) == []
        await leaves(client)


async def test_a_token_from_a_file_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    async with (
        listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}) as server,
        editor(server.ws, f"--token-file={file}") as client,
    ):
        assert (await client.initialize())["agentInfo"]["name"] == "acp-agent"
        await leaves(client)


async def test_all_that_is_said_before_the_end_of_the_input_is_answered(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server.ws) as client:
        first = client.wire.request("initialize", {"protocolVersion": 1})
        second = client.wire.request("_vendor/unknown", {})
        await client.wire.close_stdin()

        assert "result" in await client.wire.response(first)
        assert (await client.wire.response(second))["error"]["code"] == -32601
        assert await client.wire.exited() == 0


@pytest.mark.parametrize("end", ["end of input", "SIGTERM", "SIGINT"])
async def test_the_end_stops_the_turn_that_runs_and_its_commands(tmp_path: Path, end: str) -> None:
    async with listening(tmp_path) as server, editor(server.ws) as client:
        await client.initialize()
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, "run echo $$ > pid; echo ready; sleep 60")
        await tool_update(client, session, "ready")

        if end == "end of input":
            await client.wire.close_stdin()
        else:
            os.kill(client.wire.pid, getattr(signal, end))

        assert await client.stop_reason(prompt) == "cancelled"
        assert await client.wire.exited() == 0
        assert client.wire.stderr == ""
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_an_editor_that_is_gone_ends_the_relay(tmp_path: Path) -> None:
    async with listening(tmp_path) as server:
        with started(server.ws) as process:
            process.stdout.close()
            hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
            process.stdin.write(json.dumps(hello).encode() + b"\n")
            process.stdin.flush()
            assert await anyio.to_thread.run_sync(process.wait, LIMIT_S) == 0


def started(url: str) -> Any:
    return subprocess.Popen([*CONNECT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# --- no connection ---------------------------------------------------------------------------


async def test_a_wrong_token_is_said_to_the_editor_and_never_shown(tmp_path: Path) -> None:
    wrong = "this-is-not-the-token"
    async with (
        listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}) as server,
        editor(server.ws, token=wrong) as client,
    ):
        for _time in range(3):
            response = await client.wire.response(client.wire.request("initialize", {}))
            said = f"{server.ws} refused the connection: it does not accept the token (HTTP 401)"
            assert response["error"] == {
                "code": -32603,
                "message": f"No connection to the agent: {said}",
            }
        await leaves(client, 1, f"acp-agent: {said}\n")
        assert server.said.count("wrong_token_refused") == 1
        assert wrong not in server.said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("http://127.0.0.1:1/acp",), "the address of an agent begins with ws:// or wss://"),
        (("--token-file", "/none", "ws://h/"), "the token file /none cannot be read"),
    ],
)
async def test_what_cannot_work_ends_it_at_once(arguments: tuple[str, ...], said: str) -> None:
    async with Wire.spawn([*CONNECT, *arguments]) as wire:
        assert await wire.exited() == 2
        assert wire.stderr == f"acp-agent: {said}\n"


async def test_a_request_waits_for_an_agent_that_comes_in_time_and_for_no_other(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as server, network(server) as between:
        between.is_down = True
        async with editor(between.url, "--wait=0.2") as client:
            with pytest.raises(Exception, match="No connection to the agent"):
                await client.initialize()
            assert between.is_down
        async with editor(between.url, "--wait=60") as client:
            request = client.wire.request("initialize", {"protocolVersion": 1})
            between.is_down = False
            assert "result" in await client.wire.response(request)
            await leaves(client)


# --- a connection that is lost ---------------------------------------------------------------


async def lost(client: Client, request_id: int) -> None:
    response = await client.wire.response(request_id)
    assert response["error"]["message"] == LOST


async def test_a_turn_that_was_lost_is_answered_and_the_session_goes_on(tmp_path: Path) -> None:
    async with (
        listening(tmp_path) as server,
        network(server) as between,
        editor(between.url) as client,
    ):
        await client.initialize()
        session = await client.new_session(tmp_path)
        assert await client.stop_reason(client.prompt(session, "say before")) == "end_turn"
        prompt = client.prompt(session, "count 100000 slowly")
        await chunk_of(client, session, "2 ")

        between.cut()
        await lost(client, prompt)
        after = len(client.text(session))

        assert await client.stop_reason(client.prompt(session, "say after")) == "end_turn"
        assert client.text(session)[after:] == "after"
        assert client.text(session).count("before") == 1
        await leaves(client)


async def test_a_turn_that_is_kept_goes_on_where_the_editor_left_it(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, "--on-disconnect=keep") as server,
        network(server) as between,
        editor(between.url) as client,
    ):
        await client.initialize()
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, "count 12 slowly")
        await chunk_of(client, session, "3 ")

        between.cut()
        await lost(client, prompt)
        await chunk_of(client, session, "12 ")

        assert client.text(session) == "".join(f"{number} " for number in range(1, 13))
        await leaves(client)


async def test_a_server_that_was_killed_in_a_turn_and_started_again_has_the_session(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, must_end_well=False) as server,
        network(server) as between,
        editor(between.url, "--wait=30") as client,
    ):
        await client.initialize()
        session = await client.new_session(tmp_path)
        assert await client.stop_reason(client.prompt(session, "say before")) == "end_turn"
        prompt = client.prompt(session, "count 100000 slowly")
        await chunk_of(client, session, "2 ")

        between.is_down = True
        server.process.kill()
        await lost(client, prompt)
        queued = client.prompt(session, "say after")
        async with listening(tmp_path) as another:
            between.target_port, between.is_down = another.port, False

            assert await client.stop_reason(queued) == "end_turn"
            assert client.text(session).endswith("after")
            assert client.text(session).count("before") == 1
            await leaves(client)


@pytest.mark.requirement("B035")
async def test_an_approval_for_a_lost_question_approves_nothing(tmp_path: Path) -> None:
    async with (
        listening(tmp_path) as server,
        network(server) as between,
        editor(between.url, permission="never") as client,
    ):
        await client.initialize()
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, "write old.txt: x")
        old = await ask_for_permission(client, session)

        between.cut()
        await lost(client, prompt)
        (withdrawn,) = [m for m in client.wire.received if m.get("method") == "$/cancel_request"]
        assert withdrawn["params"] == {"requestId": old["id"]}
        prompt = client.prompt(session, "write new.txt: x")
        new = await ask_for_permission(client, session)
        yes = {"outcome": {"outcome": "selected", "optionId": "allow-once"}}
        client.wire.reply(old["id"], yes)
        assert await client.wire.silence() == []
        no = {"outcome": {"outcome": "selected", "optionId": "reject-once"}}
        client.wire.reply(new["id"], no)

        assert await client.stop_reason(prompt) == "end_turn"
        assert not (tmp_path / "old.txt").exists()
        assert not (tmp_path / "new.txt").exists()
        await leaves(client)


async def test_a_stop_that_is_pressed_without_a_connection_reaches_the_turn_that_was_kept(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, "--on-disconnect=keep") as server,
        network(server) as between,
        editor(between.url, "--wait=0.2") as client,
    ):
        await client.initialize()
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, "run touch started; sleep 60")
        await tool_update(client, session, "in_progress")
        between.is_down = True
        between.cut()
        await lost(client, prompt)

        client.cancel(session)
        # It is turned away, as late as the cancel before it.
        turned_away = await client.wire.response(client.prompt(session, "say never"))
        assert "No connection" in turned_away["error"]["message"]
        between.is_down = False

        assert await client.stop_reason(client.prompt(session, "say ok"), 30) == "end_turn"
        assert client.text(session).endswith("ok")
        await leaves(client)


# --- agents of any kind ----------------------------------------------------------------------

Peer = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def agent_that(peer: Peer) -> AsyncIterator[str]:
    async with serve(peer, "127.0.0.1", 0, max_size=None, compression=None) as at:
        yield f"ws://127.0.0.1:{at.sockets[0].getsockname()[1]}/acp"


async def test_an_agent_that_can_only_load_is_asked_to_and_its_history_is_told_once(
    tmp_path: Path,
) -> None:
    hellos: list[str] = []

    async def peer(socket: ServerConnection) -> None:
        async for text in socket:
            request = json.loads(text)
            session, kind = {"sessionId": "s"}, "agent_message_chunk"
            said = {"sessionUpdate": kind, "content": {"type": "text", "text": "history"}}
            update = {"jsonrpc": "2.0", "method": "session/update"}
            result: Any = {}
            match request["method"]:
                case "initialize":
                    hellos.append(json.dumps(request["params"]))
                    result = {"protocolVersion": 1, "agentCapabilities": {"loadSession": True}}
                case "session/new":
                    result = session
                case "session/load":
                    assert request["params"] == {"cwd": str(tmp_path), "mcpServers": [], **session}
                    await socket.send(json.dumps({**update, "params": {**session, "update": said}}))
                case "session/prompt":
                    if len(hellos) == 1:
                        socket.transport.abort()
                        return
                    await socket.send(json.dumps({**update, "params": {**session, "update": said}}))
                    result = {"stopReason": "end_turn"}
            answer = {"jsonrpc": "2.0", "id": request["id"], "result": result}
            await socket.send(json.dumps(answer, indent=1))  # several lines

    async with agent_that(peer) as url, editor(url) as client:
        await client.initialize({"_own": True})
        session = await client.new_session(tmp_path)
        await lost(client, client.prompt(session, "x"))

        assert await client.stop_reason(client.prompt(session, "x")) == "end_turn"
        assert client.text(session) == "history"
        assert len(hellos) == 2
        assert hellos[0] == hellos[1]
        assert '"_own": true' in hellos[0]
        await leaves(client)


def numbered(number: int) -> str:
    params = {"number": number, "chunk": "x" * 100_000}
    return json.dumps({"jsonrpc": "2.0", "method": "x", "params": params})


async def standing(count: Callable[[], int]) -> int:
    """Wait until a count has begun and does not grow any more; nobody tells when that is."""
    seen = [0]
    with anyio.fail_after(LIMIT_S):
        while not seen[-1] or seen[-4:] != [seen[-1]] * 4:
            seen.append(count())
            await anyio.sleep(0.3)
    return seen[-1]


async def test_an_editor_that_does_not_read_holds_the_agent_back_and_misses_nothing() -> None:
    n_sent = 0

    async def peer(socket: ServerConnection) -> None:
        nonlocal n_sent
        await socket.recv()
        with suppress(ConnectionClosed):
            for number in range(600):
                await socket.send(numbered(number))
                n_sent += 1
            await socket.wait_closed()

    async with agent_that(peer) as url, await anyio.open_process([*CONNECT, url]) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send(b'{"jsonrpc":"2.0","method":"go"}\n')
        assert await standing(lambda: n_sent) < 400
        assert rss_bytes(process.pid) < 90 * 2**20

        received, n_lines = [b""], 0
        with anyio.fail_after(LIMIT_S):
            while n_lines < 600:
                received.append(await process.stdout.receive(2**20))
                n_lines += received[-1].count(b"\n")
        numbers = [json.loads(line)["params"]["number"] for line in b"".join(received).splitlines()]
        assert numbers == list(range(600))
        await process.stdin.aclose()
        with anyio.fail_after(LIMIT_S):
            assert await process.wait() == 0


async def test_an_agent_that_does_not_read_holds_the_editor_back_and_misses_nothing() -> None:
    n_written, numbers = 0, []
    connected, go_on, all_read = anyio.Event(), anyio.Event(), anyio.Event()

    async def peer(socket: ServerConnection) -> None:
        socket.transport.pause_reading()
        connected.set()
        await go_on.wait()
        socket.transport.resume_reading()
        async for text in socket:
            numbers.append(json.loads(text)["params"]["number"])
            if len(numbers) == 600:
                all_read.set()

    async with agent_that(peer) as url, await anyio.open_process([*CONNECT, url]) as process:

        async def write() -> None:
            nonlocal n_written
            assert process.stdin is not None
            for number in range(600):
                await process.stdin.send(numbered(number).encode() + b"\n")
                n_written += 1

        async with anyio.create_task_group() as tasks:
            await connected.wait()
            tasks.start_soon(write)
            assert await standing(lambda: n_written) < 400
            assert rss_bytes(process.pid) < 90 * 2**20
            go_on.set()
        with anyio.fail_after(LIMIT_S):
            await all_read.wait()
            assert process.stdin is not None
            await process.stdin.aclose()
            assert await process.wait() == 0
        assert numbers == list(range(600))
