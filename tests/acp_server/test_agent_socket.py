"""An agent somewhere else, as its client sees it: reached, refused, silent, gone."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import anyio
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from acp_server.agent_socket import AgentSocket, TokenRefused, reach_agent
from acp_server.client import AgentGone
from acp_server.framing import MAX_LINE_BYTES
from acp_server.transports import websocket
from acp_server.transports.websocket import open_socket, shown_url

LIMIT_S = 15
TLS = Path(__file__).parents[1] / "agent_core" / "tls"
Peer = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def server(peer: Peer, **options: Any) -> AsyncIterator[str]:
    """Serve each connection by `peer`; yield the address."""
    with anyio.fail_after(LIMIT_S):
        async with serve(
            peer, "127.0.0.1", 0, compression=None, close_timeout=0.1, **options
        ) as at:
            where = "wss://localhost" if options.get("ssl") else "ws://127.0.0.1"
            yield f"{where}:{at.sockets[0].getsockname()[1]}/acp"


@asynccontextmanager
async def reached(
    url: str, updates: list[Any] | None = None, **options: Any
) -> AsyncIterator[AgentSocket]:
    def update(params: bytes | None) -> None:
        if updates is not None:
            updates.append(json.loads(params or b"null"))

    failure: Exception | None = None
    async with reach_agent(
        url, methods={}, notifications={"session/update": update}, **options
    ) as agent:
        try:
            yield agent
        except Exception as error:
            failure = error  # raised outside the group, which would wrap it
    if failure is not None:
        raise failure


def message(**parts: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", **parts})


async def echo(socket: ServerConnection) -> None:
    async for text in socket:
        request = json.loads(text)
        await socket.send(message(id=request["id"], result=request["params"]))


async def test_a_request_is_answered_over_text_frames_and_the_goodbye_is_said() -> None:
    codes: list[object] = []

    async def peer(socket: ServerConnection) -> None:
        await echo(socket)
        codes.append(socket.close_code)

    async with server(peer) as url:
        async with reached(url) as agent:
            assert await agent.request("x", {"said": "żółw"}) == {"said": "żółw"}

        assert codes == [1000]


async def test_what_is_no_message_is_kept_and_skipped_and_binary_frames_are_passed_over() -> None:
    async def peer(socket: ServerConnection) -> None:
        await socket.send("hello")
        await socket.send(b'{"jsonrpc": "2.0", "id": 1, "result": {"wrong": true}}')
        await echo(socket)

    async with server(peer) as url, reached(url) as agent:
        assert await agent.request("x", {"right": True}) == {"right": True}
        assert agent.last_words == ["not a message: hello"]


async def test_the_token_is_shown_as_a_bearer_and_nowhere_else() -> None:
    seen: list[Any] = []

    async def peer(socket: ServerConnection) -> None:
        assert socket.request is not None
        seen.append((socket.request.headers.get("authorization"), socket.request.path))
        await echo(socket)

    async with server(peer) as url, reached(url, token="secret-0123456789") as agent:
        await agent.request("x", {})

    assert seen == [("Bearer secret-0123456789", "/acp")]


@pytest.mark.parametrize(
    ("status", "body", "token", "error", "said"),
    [
        (401, "A token.", None, TokenRefused, "it asks for a token (HTTP 401)"),
        (401, "No.", "wrong-token", TokenRefused, "it does not accept the token (HTTP 401)"),
        (
            403,
            "Not by\x1b[2J that name.\nx",
            "t0ken",
            AgentGone,
            "Not by [2J that name (HTTP 403)",
        ),
        (404, "?", "t0ken", AgentGone, "there is no agent at this path (HTTP 404)"),
        (
            429,
            "?",
            "t0ken",
            AgentGone,
            "too many wrong tokens came from here; try again in a minute",
        ),
        (503, "Full.", "t0ken", AgentGone, "Full (HTTP 503)"),
        (200, "", "t0ken", AgentGone, "it does not say why (HTTP 200)"),
    ],
)
async def test_a_refusal_is_said_in_words_without_the_token(
    status: int, body: str, token: str | None, error: type[Exception], said: str
) -> None:
    def refuse(socket: ServerConnection, _request: object) -> Any:
        return socket.respond(HTTPStatus(status), body)

    async with server(echo, process_request=refuse) as url:
        with pytest.raises(error) as caught:
            async with reached(f"{url}?key=hidden", token=token):
                pass

    assert str(caught.value).startswith(f"{url} refused the connection: ")
    assert said in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert token is None or token not in str(caught.value)


async def test_a_redirect_is_not_followed_and_the_token_goes_nowhere_else() -> None:
    asked: list[object] = []

    def note(_socket: ServerConnection, request: object) -> None:
        asked.append(request)

    async with server(echo, process_request=note) as elsewhere:

        def redirect(socket: ServerConnection, _request: object) -> Any:
            response = socket.respond(HTTPStatus.FOUND, "")
            response.headers["Location"] = elsewhere
            return response

        async with server(echo, process_request=redirect) as url:
            with pytest.raises(AgentGone, match="it points to another address"):
                async with reached(url, token="secret"):
                    pass

    assert asked == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ws://127.0.0.1:9/acp", "cannot connect to ws://127.0.0.1:9/acp: Connection refused"),
        ("ws://no-such-host.invalid/", "cannot connect to ws://no-such-host.invalid/: "),
        ("http://127.0.0.1:9/acp", "http://127.0.0.1:9/acp is no ws:// or wss:// address"),
        ("ws://127.0.0.1:x/", "ws://127.0.0.1:x/ is no ws:// or wss:// address"),
        ("nonsense", "is no ws:// or wss:// address"),
        ("ws://me:secret@127.0.0.1:9/acp", "an address holds no password here"),
    ],
)
async def test_an_address_that_leads_nowhere_is_said(url: str, said: str) -> None:
    with anyio.fail_after(LIMIT_S), pytest.raises(AgentGone) as caught:
        async with reached(url):
            pass

    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_token_that_no_header_can_hold_is_refused_here() -> None:
    with pytest.raises(TokenRefused, match="characters that no token has") as caught:
        async with reached("ws://127.0.0.1:9/", token="bad\r\nX: y"):
            pass

    assert "bad" not in str(caught.value)


async def test_a_server_that_is_no_websocket_is_said() -> None:
    async def answer(_reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with anyio.fail_after(LIMIT_S), pytest.raises(AgentGone, match="not answer as a WebSocket"):
            async with reached(f"ws://127.0.0.1:{port}/acp"):
                pass


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """A server that accepts, and says nothing at all."""
    over = asyncio.Event()

    async def accept(_reader: Any, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with listener:
        yield f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}/acp"
        over.set()


async def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "OPEN_LIMIT_S", 0.05)
    async with silent() as url:
        with anyio.fail_after(LIMIT_S), pytest.raises(AgentGone, match="did not answer within"):
            async with reached(url):
                pass


async def test_connecting_can_be_given_up_before_there_is_a_connection() -> None:
    connecting = anyio.CancelScope()
    async with silent() as url:
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:

                async def give_up() -> None:
                    await anyio.wait_all_tasks_blocked()
                    connecting.cancel()

                tasks.start_soon(give_up)
                with pytest.raises(AgentGone, match="given up"):
                    async with reached(url, connecting=connecting):
                        pass


# --- over while something waits --------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        (1000, "bye", "the agent closed the connection"),
        (1001, "shutdown", "the agent's server is shutting down"),
        (1008, "revoked", "the agent's server ended the connection: revoked"),
        (1009, "", "the agent takes no message as long as the one it was sent"),
        (1011, "\x1b[31moops", "the agent's server failed:  [31moops"),
        (4000, "", "the connection was closed with code 4000"),
    ],
)
async def test_who_waits_is_told_why_the_connection_is_over(
    code: int, reason: str, said: str
) -> None:
    async def peer(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.close(code, reason)

    async with server(peer) as url, reached(url) as agent:
        with pytest.raises(AgentGone) as caught:
            await agent.request("x", {})

        assert str(caught.value) == said
        assert agent.ended.is_set()


async def test_a_connection_that_breaks_is_said_to_be_lost() -> None:
    async def peer(socket: ServerConnection) -> None:
        await socket.recv()
        socket.transport.abort()

    async with server(peer) as url, reached(url) as agent:
        with pytest.raises(AgentGone, match="the connection to the agent was lost"):
            await agent.request("x", {})


async def test_what_was_said_before_the_end_is_heard_before_it() -> None:
    updates: list[Any] = []

    async def peer(socket: ServerConnection) -> None:
        await socket.recv()
        for number in range(200):
            await socket.send(message(method="session/update", params=number))
        await socket.close()

    async with server(peer) as url, reached(url, updates) as agent:
        with pytest.raises(AgentGone):
            await agent.request("x", {})

        assert updates == list(range(200))


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"\x81\x02\xff\xfe", "the agent sent what no WebSocket may"),
        (b"\xc1\x01x", "the agent sent what no WebSocket may"),
        (b"\x81\x7e\x07\xd0" + b"x" * 2000, "the agent sent a message of over"),
    ],
    ids=["no UTF-8", "a reserved bit", "too long"],
)
async def test_a_frame_that_may_not_be_ends_the_connection_and_says_so(
    frame: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "MAX_LINE_BYTES", 1000)

    async def peer(socket: ServerConnection) -> None:
        await socket.recv()
        socket.transport.write(frame)
        await socket.wait_closed()

    async with server(peer) as url, reached(url) as agent:
        with pytest.raises(AgentGone, match=said):
            await agent.request("x", {})


async def test_a_long_message_passes_in_both_directions() -> None:
    assert MAX_LINE_BYTES > 20_000_000
    async with server(echo, max_size=None) as url, reached(url) as agent:
        long = "ü" * 5_000_000

        assert await agent.request("x", {"said": long}) == {"said": long}


async def test_who_answers_no_ping_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_S", 0.05)
    monkeypatch.setattr(websocket, "PONG_LIMIT_S", 0.05)

    async def peer(socket: ServerConnection) -> None:
        socket.transport.pause_reading()
        await socket.wait_closed()

    async with server(peer, ping_interval=None) as url, reached(url) as agent:
        with pytest.raises(AgentGone, match="does not answer any more"):
            await agent.request("x", {})


async def test_who_answers_pings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_S", 0.001)
    pinged = anyio.Event()

    async def peer(socket: ServerConnection) -> None:
        ping, n_pings = socket.protocol.recv_frame, 0

        def count(frame: Frame) -> None:
            nonlocal n_pings
            n_pings += frame.opcode is Opcode.PING
            if n_pings == 5:
                pinged.set()
            ping(frame)

        socket.protocol.recv_frame = count  # type: ignore[method-assign]
        await echo(socket)

    async with server(peer) as url, reached(url) as agent:
        await pinged.wait()

        assert await agent.request("x", {"still": "there"}) == {"still": "there"}


async def test_who_is_not_read_for_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_S", 0.01)
    monkeypatch.setattr(websocket, "PONG_LIMIT_S", 0.01)
    go_on, read, n_pings = anyio.Event(), [], 0

    async def peer(socket: ServerConnection) -> None:
        socket.protocol.recv_frame = lambda _frame: None  # type: ignore[method-assign]
        for number in range(3):
            await socket.send(str(number))
        await socket.wait_closed()

    async def count_ping(*_arguments: object) -> Any:
        nonlocal n_pings
        n_pings += 1
        if n_pings == 5:
            go_on.set()
        await anyio.sleep_forever()

    async with server(peer) as url, open_socket(url) as socket:
        monkeypatch.setattr(socket._connection, "ping", count_ping)
        socket.listen(read.append, go_on.wait)
        await go_on.wait()
        was_left = socket._connection.transport.is_closing()
        await socket.ended.wait()

    assert not was_left  # four answers had not come by then
    assert str(socket.problem) == "the agent's server does not answer any more"


async def test_an_end_does_not_wait_for_a_server_that_floods_and_never_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket, "CLOSE_LIMIT_S", 0.1)
    monkeypatch.setattr(websocket, "LAST_WORDS_S", 0.1)
    updates: list[Any] = []
    flooded = anyio.Event()

    async def peer(socket: ServerConnection) -> None:
        socket.transport.pause_reading()
        with suppress(ConnectionClosed):
            while True:
                await socket.send(message(method="session/update", params="x" * 10_000))
                flooded.set()

    async with server(peer) as url:
        async with reached(url, updates) as agent:
            agent.notify("x", {"said": "y" * 20_000_000})
            await flooded.wait()

        assert agent.ended.is_set()


# --- TLS -------------------------------------------------------------------------------------


def certified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem")
    return context


async def test_a_certificate_that_nobody_vouches_for_is_refused() -> None:
    async with server(echo, ssl=certified()) as url:
        with pytest.raises(AgentGone, match="its certificate is not trusted"):
            async with reached(url):
                pass


async def test_a_certificate_of_ones_own_authority_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    async with server(echo, ssl=certified()) as url, reached(url) as agent:
        assert await agent.request("x", {"safe": True}) == {"safe": True}


def test_what_may_be_secret_in_an_address_is_not_shown() -> None:
    shown = shown_url("wss://me:secret@host:1/acp?token=secret#secret")

    assert shown == "wss://host:1/acp"
