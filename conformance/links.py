"""How bytes travel to an agent and back: a process's pipes, a WebSocket, Streamable HTTP.

All of them carry lines. On the network a line is a text frame, or a POST of its own, and what comes
back is a line again, so that everything above knows lines only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import anyio.abc
import msgspec

from conformance.trace import Message, WireError, decode

if TYPE_CHECKING:
    import httpx2
    from websockets.asyncio.client import ClientConnection

__all__ = ["Link", "PipeLink", "network_link"]

OPEN_LIMIT_S: Final = 10.0
SESSION_IS_OPENED_BY: Final = ("session/load", "session/resume")
INVALID_REQUEST: Final = -32600
STATUSES: Final = {400: -32602, 401: -32000, 403: -32000, 404: -32002}
"""What a status comes to in codes of the protocol, where it is not an invalid request."""
CONNECTION: Final = "Acp-Connection-Id"
SESSION: Final = "Acp-Session-Id"


class Link(Protocol):
    """A way to one agent."""

    async def send(self, raw: bytes) -> None:
        """Send bytes.

        Raises:
            OSError: Nobody takes them any more.
        """
        ...

    async def close(self) -> None:
        """Say that nothing more will be sent."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield what comes, until nothing can come any more."""
        ...


class PipeLink:
    """The standard input and output of a process."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process

    async def send(self, raw: bytes) -> None:
        """Send bytes.

        Raises:
            OSError: The process closed its input, or ended.
        """
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(raw)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            raise BrokenPipeError from exc

    async def close(self) -> None:
        """Close the process's input."""
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, OSError):  # it may be gone by now
            await self._process.stdin.aclose()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what the process writes to its output."""
        assert self._process.stdout is not None
        with suppress(anyio.ClosedResourceError):  # we ended the agent, a child holds the pipe
            async for chunk in self._process.stdout:
                yield chunk


@asynccontextmanager
async def network_link(url: str, token: str) -> AsyncIterator[Link]:
    """Connect to an agent on the network while the block runs.

    Cancellation: safe.

    Args:
        url: ``ws://``, ``wss://``, ``http://`` or ``https://``.
        token: Sent as a bearer token, unless empty.

    Raises:
        WireError: It cannot be reached, or does not let us in.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if url.startswith("ws"):
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidURI

        try:
            socket = await connect(
                url, additional_headers=headers, compression=None, max_size=None, proxy=None
            )
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as exc:
            raise WireError(f"{url} cannot be reached: {exc}") from exc
        try:
            yield _SocketLink(socket)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(OPEN_LIMIT_S):
                await socket.close()
        return

    import httpx2

    limits = httpx2.Timeout(OPEN_LIMIT_S, read=None)
    pool = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=limits, limits=pool, trust_env=False) as http,
        anyio.create_task_group() as tasks,
    ):
        link = _HttpLink(http, url, tasks)
        try:
            yield link
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(OPEN_LIMIT_S):
                await link.close()
            tasks.cancel_scope.cancel()


class _Lines:
    """Makes lines of bytes that are sent in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, raw: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + raw).split(b"\n")
        return [line for line in lines if line.strip()]


class _SocketLink:
    """A WebSocket: a line is a text frame."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._lines = _Lines()

    async def send(self, raw: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            for line in self._lines.add(raw):
                await self._socket.send(line, text=True)
        except ConnectionClosed as exc:
            raise BrokenPipeError(str(exc)) from exc

    async def close(self) -> None:
        await self._socket.close()

    async def chunks(self) -> AsyncIterator[bytes]:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):
            while True:
                yield await self._socket.recv(decode=False) + b"\n"


def _refusal(answer: httpx2.Response, request_id: object) -> Message:
    """Return the JSON-RPC error that a status says, since the protocol has no other for it."""
    error = {
        "code": STATUSES.get(answer.status_code, INVALID_REQUEST),
        "message": f"HTTP {answer.status_code}: {answer.text.strip()[:200]}",
        "data": {"status": answer.status_code},
    }
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


class _HttpLink:
    """Streamable HTTP: a line is a POST, what comes back is on one stream or several.

    A session's stream is opened as soon as the session is heard of, as SDKs do.
    """

    def __init__(self, http: httpx2.AsyncClient, url: str, tasks: anyio.abc.TaskGroup) -> None:
        self._http = http
        self._url = url
        self._tasks = tasks
        self._lines = _Lines()
        self._connection = ""
        self._streams: set[str] = set()
        self._come, self._coming = anyio.create_memory_object_stream[bytes](float("inf"))

    async def send(self, raw: bytes) -> None:
        import httpx2

        for line in self._lines.add(raw):
            try:
                await self._post(line, decode(line) or {})
            except httpx2.HTTPError as exc:
                raise BrokenPipeError(str(exc)) from exc

    async def close(self) -> None:
        import httpx2

        connection, self._connection = self._connection, ""
        if connection:
            with suppress(httpx2.HTTPError):  # the server may be gone
                await self._http.delete(self._url, headers={CONNECTION: connection})
        self._come.close()

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._coming:
            yield chunk

    async def _post(self, line: bytes, message: Message) -> None:
        params = message.get("params")
        session = params.get("sessionId") if isinstance(params, dict) else None
        session = session if isinstance(session, str) else ""
        if message.get("method") in SESSION_IS_OPENED_BY and session:
            await self._open(session)
        answer = await self._http.post(
            self._url,
            content=line,
            headers={"Content-Type": "application/json", **self._headers(session)},
        )
        if answer.status_code == 200:
            self._connection = answer.headers.get(CONNECTION, "")
            await self._open("")
        if answer.is_success or decode(answer.content) is not None:
            if answer.content.strip():
                self._hear(answer.content)
        elif message.get("id") is not None and "method" in message:
            self._hear(msgspec.json.encode(_refusal(answer, message["id"])))

    async def _open(self, session: str) -> None:
        if session not in self._streams and self._connection:
            self._streams.add(session)
            await self._tasks.start(self._read, session)

    async def _read(self, session: str, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        import httpx2

        headers = {"Accept": "text/event-stream", **self._headers(session)}
        is_started = False
        try:
            async with self._http.stream("GET", self._url, headers=headers) as stream:
                task_status.started()
                is_started = True
                async for line in stream.aiter_lines():
                    if stream.status_code == 200 and line.startswith("data:"):
                        message = line[5:].strip().encode()
                        await self._open_named(message)
                        self._hear(message)
        except httpx2.HTTPError:
            if not is_started:
                task_status.started()
        if not session:  # the connection's own stream: nothing can come any more
            self._come.close()

    async def _open_named(self, message: bytes) -> None:
        """Open the stream of a session that is named for the first time."""
        if b'"sessionId"' not in message:
            return
        told = decode(message) or {}
        for part in (told.get("result"), told.get("params")):
            session = part.get("sessionId") if isinstance(part, dict) else None
            if isinstance(session, str):
                await self._open(session)

    def _hear(self, message: bytes) -> None:
        with suppress(anyio.ClosedResourceError):  # it came behind the end
            self._come.send_nowait(message + b"\n")

    def _headers(self, session: str) -> dict[str, str]:
        headers = {CONNECTION: self._connection} if self._connection else {}
        if session.isascii() and session.isprintable() and session:
            headers[SESSION] = session
        return headers
