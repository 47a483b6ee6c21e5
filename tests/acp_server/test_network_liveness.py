"""A connection lives as long as both ends do: through silence, busy tools, and proxies."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream
from http_rig import http_editor
from network_rig import LIMIT_S, TOKEN, Server, editor, listening
from raw_rig import UPGRADE, frame, said_to
from serve_rig import write_script
from websockets.frames import Opcode

QUIET_S = 1.5
WAITING = "run while [ ! -e go ]; do sleep 0.02; done"


class Proxy:
    """Stands in front of a server, and cuts connections on which nothing is said for `QUIET_S`."""

    def __init__(self, server: Server) -> None:
        self.server = copy.copy(server)  # as it looks from outside
        self.port = server.port
        self.n_cut = 0
        self.n_relayed = 0
        self._relayed = anyio.Event()

    async def relay(self, outside: SocketStream) -> None:
        async with outside, await anyio.connect_tcp("127.0.0.1", self.port) as inside:
            with anyio.move_on_after(QUIET_S) as quiet:
                async with anyio.create_task_group() as tasks:
                    for one, other in ((outside, inside), (inside, outside)):
                        tasks.start_soon(self._pump, one, other, quiet, tasks.cancel_scope)
            self.n_cut += quiet.cancelled_caught

    async def _pump(
        self,
        one: SocketStream,
        other: SocketStream,
        quiet: anyio.CancelScope,
        both: anyio.CancelScope,
    ) -> None:
        try:
            async for data in one:
                await other.send(data)
                quiet.deadline = anyio.current_time() + QUIET_S
                self.n_relayed += 1
                self._relayed.set()
                self._relayed = anyio.Event()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        both.cancel()

    async def until_relayed(self, n_more: int) -> None:
        enough = self.n_relayed + n_more
        with anyio.fail_after(LIMIT_S):
            while self.n_relayed < enough:
                await self._relayed.wait()


@asynccontextmanager
async def behind_a_proxy(server: Server) -> AsyncIterator[Proxy]:
    proxy = Proxy(server)
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        proxy.server.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        tasks.start_soon(listener.serve, proxy.relay)
        yield proxy
        tasks.cancel_scope.cancel()


@pytest.mark.requirement("B154", "B156")
async def test_a_proxy_that_cuts_quiet_connections_does_not_cut_one_whose_tool_is_silent(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, "--mode", "bypass", network="ping_s = 0.2\nidle_s = 0.5") as server,
        behind_a_proxy(server) as proxy,
        editor(proxy.server) as client,
    ):
        session = await client.new_session(tmp_path)
        answer = await client.prompt(session, WAITING)
        await proxy.until_relayed(40)  # pings and pongs, for longer than the proxy has patience
        (tmp_path / "go").touch()
        assert await client.stop_reason(answer) == "end_turn"
        assert (proxy.n_cut, client.close_code) == (0, None)


@pytest.mark.requirement("B154")
async def test_a_proxy_that_cuts_quiet_connections_does_not_cut_a_quiet_stream(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, "--mode", "bypass", network="ping_s = 0.2") as server,
        behind_a_proxy(server) as proxy,
        http_editor(proxy.server) as client,
    ):
        session = await client.new_session(tmp_path)
        await client.open(session)
        answer = await client.prompt(session, WAITING)
        await proxy.until_relayed(40)
        (tmp_path / "go").touch()
        stream, response = await client.answer(answer)
        assert (stream, response["result"]["stopReason"]) == (session, "end_turn")


@pytest.mark.requirement("B154", "B155")
async def test_a_connection_that_a_proxy_did_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    flags = ("--mode", "bypass", "--on-disconnect", "keep", "--log-level", "info")
    async with listening(tmp_path, *flags, network="ping_s = 100") as server:
        async with behind_a_proxy(server) as proxy, editor(proxy.server) as client:
            session = await client.new_session(tmp_path)
            await client.prompt(session, WAITING)
            await client.until(lambda: client.close_code)
            assert proxy.n_cut == 1
        await server.until_said("client_disconnected")
        (tmp_path / "go").touch()
        async with editor(server) as client:
            await client.load(session, tmp_path)
            await client.until(
                lambda: [u for u in client.updates(session) if u.get("status") == "completed"]
            )
            assert await client.stop_reason(await client.prompt(session, "say on")) == "end_turn"


@pytest.mark.requirement("B157")
async def test_a_tool_that_takes_all_of_a_core_delays_no_ping_and_no_other_session(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("a" * 200)
    arguments = {"pattern": "(a+)+$b", "regex": True, "path": "."}
    script = write_script(tmp_path, [{"tool": "search", "arguments": arguments}])
    options = {"ping_interval": 0.2, "ping_timeout": 5}
    async with (
        listening(tmp_path, script, network="ping_s = 0.5") as server,
        editor(server, **options) as busy,
        editor(server, **options) as other,
    ):
        session = await busy.new_session(tmp_path)
        answer = await busy.prompt(session, "search")
        await busy.until(lambda: busy.updates(session, "tool_call"))
        for _ in range(20):
            with anyio.fail_after(5):
                await (await busy.socket.ping())
            await other.result("session/list")
            await anyio.sleep(0.1)  # so that the regex is at it all the while
        assert [m for m in busy.received if m.get("id") == answer] == []
        await busy.note("session/cancel", sessionId=session)
        assert await busy.stop_reason(answer) == "cancelled"
        assert (busy.close_code, other.close_code) == (None, None)


@pytest.mark.requirement("B159")
async def test_what_comes_in_one_packet_with_a_bad_token_is_not_looked_at(tmp_path: Path) -> None:
    flags = ("--log-level", "debug")
    env = {"ACP_AGENT_TOKEN": TOKEN}
    hasty = b"".join(
        frame(Opcode.TEXT, message)
        for message in (
            b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}',
            b'{"jsonrpc":"2.0","id":2,"method":"session/new","params":{"cwd":"/","mcpServers":[]}}',
        )
    )
    async with listening(tmp_path, *flags, env=env) as server:
        for shown in ("", "Authorization: Bearer wrong-token-wrong\r\n"):
            peer = await said_to(server, f"{UPGRADE}{shown}\r\n".encode() + hasty)
            assert peer.status == 401
            assert b"jsonrpc" not in peer.received
    assert "client_connected" not in server.said
    with closing(sqlite3.connect(server.state / "sessions.sqlite3")) as store:
        assert store.execute("select count(*) from sessions").fetchone() == (0,)
