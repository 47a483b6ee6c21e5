"""Streamable HTTP: messages come in as POSTs, and go out on streams of server-sent events.

``initialize`` is answered in the response to its POST, with the connection's id in a header.
Everything else is answered on a stream, see `acp_server.network.streams`. What is said before its
stream is open waits for it. What was lost with a stream is not repeated: such a client initializes
anew, and loads or resumes its sessions.

Source: the RFD on remote transports for ACP v1.
"""

from __future__ import annotations

from typing import Final

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import Struct

from acp_server.message import BadMessage, Message, Notification, Request, Response, parse
from acp_server.network.asgi import (
    BodyProblem,
    Headers,
    Receive,
    Scope,
    Send,
    answer,
    headers_of,
    read_body,
    refuse,
)
from acp_server.network.hub import Hub, NetworkClient
from acp_server.network.security import Principal
from acp_server.network.streams import SESSION_METHODS, Stream, Streams
from agent_core.logs import get_logger

__all__ = ["Http"]

KEEP_ALIVE_S: Final = 15.0
"""A stream says something at least this often, or proxies would take it for dead."""
INITIALIZE_S: Final = 30.0
_JSON: Final = b"application/json"
_EVENTS: Final = b"text/event-stream"

log = get_logger(__name__)


class _About(Struct, rename="camel"):
    session_id: str | None = None


class _Refused(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _HttpClient(NetworkClient):
    transport = "http"

    def __init__(self, hub: Hub, principal: Principal) -> None:
        super().__init__(hub, principal)
        self.outbox = self.streams = Streams(
            hub.limits.max_unread_bytes, lambda: self.end("flooded")
        )
        self.has_begun = anyio.Event()

    async def serve(self, absent_s: float) -> None:
        def begin(tasks: TaskGroup) -> None:
            tasks.start_soon(self._watch_absence, absent_s, name="absence")
            self.has_begun.set()

        try:
            await self.run(begin)
        except Exception:  # a mistake of ours ends this connection and no other
            log.exception("connection_failed", connection=self.number)
        finally:
            self.streams.lose()

    async def _watch_absence(self, absent_s: float) -> None:
        await self.streams.is_initialized.wait()  # until then a request of it is being answered
        while not self.over.is_set():
            is_reading = any(stream.is_open for stream in self.streams.all())
            if not is_reading and self.quiet_s >= absent_s:
                self.end("left")
            await anyio.sleep(absent_s / 4)


class Http:
    """The endpoint of all connections by HTTP."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._clients: dict[str, _HttpClient] = {}

    async def serve(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of somebody who was let in.

        Cancellation: safe. Concurrency: any number of requests.
        """
        headers = headers_of(scope)
        try:
            match scope["method"]:
                case "POST":
                    await self._post(principal, headers, receive, send)
                case "GET":
                    await self._get(principal, headers, receive, send)
                case "DELETE":
                    self._client(principal, headers).end("left")
                    await answer(send, 202)
                case _:
                    allow = (b"allow", b"GET, POST, DELETE")
                    await refuse(scope, send, 405, "There is no such method here.", (allow,))
        except (BodyProblem, _Refused) as exc:
            # Of a body that is too long the rest is read and dropped: one who still sends hears us.
            is_over = isinstance(exc, BodyProblem) and exc.status != 413
            await refuse(
                scope, send, exc.status, str(exc), ((b"connection", b"close"),) if is_over else ()
            )

    def _client(self, principal: Principal, headers: Headers) -> _HttpClient:
        connection_id = headers.get(b"acp-connection-id", b"").decode("latin-1")
        if not connection_id:
            raise _Refused(400, "The header Acp-Connection-Id is missing.")
        client = self._clients.get(connection_id)
        if client is None or client.over.is_set() or client.principal.name != principal.name:
            raise _Refused(404, "There is no such connection.")
        return client

    # --- POST --------------------------------------------------------------------------------

    async def _post(
        self, principal: Principal, headers: Headers, receive: Receive, send: Send
    ) -> None:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != _JSON:
            raise _Refused(415, "The content type has to be application/json.")
        limits = self._hub.limits
        body = await read_body(receive, headers, limits.max_message_bytes, limits.body_s)
        self._hub.traffic["http"].received += len(body)
        if body.lstrip()[:1] == b"[":
            raise _Refused(501, "Batches are not supported.")
        message = parse(body)
        if message is None or isinstance(message, BadMessage):
            raise _Refused(400, message.reason if message else "There is no message.")
        if not isinstance(message, Response) and message.method == "initialize":
            await self._initialize(principal, headers, message, send)
            return
        client = self._client(principal, headers)
        self._take(client, headers, message)
        await answer(send, 202)

    def _take(self, client: _HttpClient, headers: Headers, message: Message) -> None:
        named = headers.get(b"acp-session-id", b"").decode("latin-1")
        if isinstance(message, Response):
            client.streams.settle(message)
        elif isinstance(message, Request | Notification):
            session_id = _session_of(message)
            self._check_session(client, named, session_id, message.method)
            if isinstance(message, Request):
                client.streams.expect(message, session_id, is_announced=bool(named))
        client.hear(message)

    def _check_session(
        self, client: _HttpClient, named: str, session_id: str | None, method: str
    ) -> None:
        if named and session_id is not None and named != session_id:
            raise _Refused(400, "The header Acp-Session-Id names another session.")
        if method not in SESSION_METHODS:
            return
        if not named:
            raise _Refused(400, "The header Acp-Session-Id is missing.")
        if named not in client.connection.sessions:
            raise _Refused(404, "There is no such session.")

    async def _initialize(
        self, principal: Principal, headers: Headers, message: Request | Notification, send: Send
    ) -> None:
        if headers.get(b"acp-connection-id"):
            raise _Refused(400, "The connection is initialized already.")
        if not isinstance(message, Request):
            raise _Refused(400, "initialize has to be a request.")
        if (refusal := self._hub.turned_away()) is not None:
            raise _Refused(refusal.status, refusal.sentence)
        client = _HttpClient(self._hub, principal)
        self._clients[client.id] = client
        self._hub.tasks.start_soon(self._serve, client)
        with anyio.move_on_after(INITIALIZE_S):
            await client.has_begun.wait()
            client.hear(message)
            await client.streams.is_initialized.wait()
            if not client.streams.initialized:
                raise _Refused(503, "The connection ended before the agent answered.")
            about = (b"acp-connection-id", client.id.encode())
            is_good = client.connection.is_initialized
            if not is_good:
                client.end("refused")
            body = client.streams.initialized
            await answer(send, 200, body, kind=_JSON, headers=(about,) if is_good else ())
            client.traffic.sent += len(body)
            return
        client.end("refused")
        raise _Refused(504, "The agent did not answer in time.")

    async def _serve(self, client: _HttpClient) -> None:
        try:
            await client.serve(self._hub.limits.absent_s)
        finally:
            self._clients.pop(client.id, None)

    # --- GET ---------------------------------------------------------------------------------

    async def _get(
        self, principal: Principal, headers: Headers, receive: Receive, send: Send
    ) -> None:
        if _EVENTS not in headers.get(b"accept", b"").lower():
            raise _Refused(406, "What there is to get is text/event-stream.")
        client = self._client(principal, headers)
        stream = self._stream(client, headers.get(b"acp-session-id", b"").decode("latin-1"))
        if stream.is_open:
            raise _Refused(409, "Somebody reads this stream already.")
        stream.is_open = True
        try:
            idle_s = min(KEEP_ALIVE_S, self._hub.limits.ping_s)
            await _send_events(client, stream, receive, send, idle_s)
        finally:
            stream.closed()
            client.touch()

    def _stream(self, client: _HttpClient, session_id: str) -> Stream:
        if not session_id:
            return client.streams.of_connection
        sessions = client.connection.sessions
        if not client.streams.knows(session_id) and session_id not in sessions:
            # Perhaps it will be loaded in a moment; but nobody makes streams without end.
            client.streams.forget(sessions.__contains__)
            if len(client.streams.all()) > 2 * self._hub.limits.max_sessions:
                raise _Refused(404, "There is no such session.")
        return client.streams.of_session(session_id)


async def _send_events(
    client: NetworkClient, stream: Stream, receive: Receive, send: Send, idle_s: float
) -> None:
    head = [
        (b"content-type", _EVENTS),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(batch: list[bytes]) -> None:
        body = b"".join(b"data: %b\n\n" % message for message in batch) or b": alive\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
        client.traffic.sent += sum(map(len, batch))

    async with anyio.create_task_group() as tasks:

        async def until_over() -> None:
            await client.over.wait()
            tasks.cancel_scope.cancel()

        async def until_left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(until_over)
        tasks.start_soon(until_left)
        await write([])  # the client sees that it is open
        await stream.run(write, idle_s=idle_s)
    await send({"type": "http.response.body", "body": b""})


def _session_of(message: Request | Notification) -> str | None:
    try:
        return msgspec.json.decode(message.params or b"{}", type=_About).session_id
    except msgspec.MsgspecError:
        return None
