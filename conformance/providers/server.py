"""A real HTTP/1.1 server on loopback that speaks what model providers speak.

It plays a script: one `Reply` per request, in the order in which requests arrive, each a list of
steps (bytes to send, gates to wait at, ways to fail). It records what it was asked, judges every
request's history as strict providers do, and knows when a client has hung up. What is said and
demanded is the business of `chat`, `responses` and `messages`.

```python
gate = Gate()
async with provider_double([answer(text("Hel"), gate, text("lo"))]) as double:
    model = a_model(double.url)
```
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.abc import SocketAttribute, SocketStream, TaskGroup

from conformance.providers import chat, messages, responses
from conformance.providers.chat import (
    DONE,
    chunk,
    comment,
    error_event,
    finish,
    history_violations,
    reasoning,
    text,
    tool_call,
    usage,
)

__all__ = [
    "DONE",
    "Drip",
    "Drop",
    "Gate",
    "ProviderDouble",
    "Repeat",
    "Reply",
    "Script",
    "Sleep",
    "Stall",
    "Step",
    "answer",
    "chunk",
    "comment",
    "error_event",
    "finish",
    "history_violations",
    "provider_double",
    "reasoning",
    "status",
    "text",
    "tool_call",
    "usage",
]

_PHRASES: Final = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 429: "Too Many Requests"}


# --- the steps of a reply -------------------------------------------------------------------


class Gate:
    """A step that waits until the test opens it; `reached` tells the test that it was reached."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self.opened = anyio.Event()


@dataclass(frozen=True)
class Stall:
    """A step that never ends: only the client's hanging up does."""


@dataclass(frozen=True)
class Drop:
    """A step that drops the connection: reset, or closed as if the network had ended it."""

    reset: bool = False


@dataclass(frozen=True)
class Drip:
    """A step that sends `data` one byte at a time, each in a packet of its own."""

    data: bytes


@dataclass(frozen=True)
class Repeat:
    """A step that sends `data` again and again, for ever."""

    data: bytes
    every_s: float


@dataclass(frozen=True)
class Sleep:
    """A step that lets time pass."""

    seconds: float


Step = bytes | Gate | Stall | Drop | Drip | Repeat | Sleep


@dataclass(frozen=True)
class Reply:
    """One response. `before` runs before the headers, `body` after them.

    `unread` runs when the first byte of the request is there, and none of it has been read; `after`
    when the response is over, and its connection could carry another request. The body is sent
    chunked, one HTTP chunk for each step.
    """

    body: Sequence[Step] = ()
    before: Sequence[Step] = ()
    unread: Sequence[Step] = ()
    after: Sequence[Step] = ()
    code: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "text/event-stream"


Script = Sequence[Reply] | Callable[[str, Mapping[str, Any], int], Reply]


def answer(*steps: Step, before: Sequence[Step] = (), reason: str | None = "stop") -> Reply:
    """Return a reply that streams `steps`, then the finish reason (unless `None`) and the end."""
    end = [] if reason is None else [finish(reason), DONE]
    return Reply([*steps, *end], before)


def status(code: int, error: object = None, *, headers: Mapping[str, str] | None = None) -> Reply:
    """Return an error: `error` becomes the body's ``error``, bytes become the whole body."""
    raw = error if isinstance(error, bytes) else json.dumps({"error": error}).encode()
    return Reply([raw], code=code, headers=headers or {}, content_type="application/json")


# --- what strict providers refuse -----------------------------------------------------------


def violations(path: str, request: Mapping[str, Any]) -> list[str]:
    """Return what a strict provider of the dialect that `path` belongs to would refuse."""
    if path.endswith("/messages"):
        return messages.violations(request)
    if path.endswith("/responses"):
        return responses.violations(request)
    return chat.violations(request)


# --- the server -----------------------------------------------------------------------------


class ProviderDouble:
    """What a test sees of the server. Requests count from 0.

    Attributes:
        url: The base URL to configure.
        requests: The decoded body of each request.
        paths: The path of each request.
        headers: The headers of each request, names in lower case.
        violations: What strict providers would have refused so far.
        open_connections: Sockets that are open now.
        script: The replies that are still to be given, in order.
    """

    def __init__(self, script: Script, port: int, *, is_strict: bool = True) -> None:
        self._is_strict = is_strict
        self.url = f"http://127.0.0.1:{port}/v1"
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.violations: list[str] = []
        self.open_connections = 0
        self.script = [] if callable(script) else list(script)
        self._reply_to = script if callable(script) else None
        self._changed = anyio.Event()
        self._disconnected: set[int] = set()

    async def requested(self, n: int) -> None:
        """Wait until request `n` has arrived."""
        while len(self.requests) <= n:
            await self._changed.wait()

    async def disconnected(self, n: int) -> None:
        """Wait until the socket that carried request `n` is closed."""
        while n not in self._disconnected:
            await self._changed.wait()

    async def no_connection(self) -> None:
        """Wait until no client is connected."""
        while self.open_connections:
            await self._changed.wait()

    def note_change(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    def record(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Take note of a request; return its number."""
        n = len(self.requests)
        request = json.loads(body) if self._is_strict else _readable(body)
        self.requests.append(request)
        self.paths.append(path.partition("?")[0])
        self.headers.append(headers)
        if self._is_strict:
            found = violations(self.paths[-1], request)
            self.violations += [f"request {n}: {what}" for what in found]
        self.note_change()
        return n

    async def serve(self, stream: SocketStream) -> None:
        """Serve one connection to its end."""
        connection = _Connection(stream)
        carried: list[int] = []
        self.open_connections += 1
        try:
            while await connection.is_asked():
                reply = self.script.pop(0) if self.script else None
                if reply is not None and not await connection.run(reply.unread):
                    break
                if (request := await connection.read_request()) is None:
                    break
                carried.append(self.record(*request))
                if self._reply_to is not None:
                    reply = self._reply_to(self.paths[-1], self.requests[-1], carried[-1])
                if reply is None:
                    self.violations.append(f"request {carried[-1]} is not in the script")
                    reply = status(500, {"message": "the script is over"})
                if not await connection.play(reply) or not await connection.run(reply.after):
                    break
        finally:
            await anyio.aclose_forcefully(stream)
            self.open_connections -= 1
            self._disconnected.update(carried)
            self.note_change()


def _readable(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body or b"{}")
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {}


class _Connection:
    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._buffer = b""
        self._is_over = False
        # Without it the kernel would join what a test sends apart.
        raw: socket.socket = stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = raw

    async def is_asked(self) -> bool:
        """Wait for the first byte of a request; `False`: the client has hung up instead."""
        return bool(self._buffer) or await self._receive()

    async def run(self, steps: Sequence[Step]) -> bool:
        """Run steps outside of a response; return whether the connection is still there."""
        try:
            for step in steps:
                await self._step(step, is_chunked=False)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        return True

    async def read_request(self) -> tuple[str, dict[str, str], bytes] | None:
        while b"\r\n\r\n" not in self._buffer:
            if not await self._receive():
                return None
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        pairs = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = await self._read_chunks()
        else:
            body = await self._read(int(headers.get("content-length", "0")))
        if body is None:
            return None
        return head.split(b" ", 2)[1].decode("latin-1"), headers, body

    async def _read(self, n_bytes: int) -> bytes | None:
        while len(self._buffer) < n_bytes:
            if not await self._receive():
                return None
        found, self._buffer = self._buffer[:n_bytes], self._buffer[n_bytes:]
        return found

    async def _read_chunks(self) -> bytes | None:
        body = b""
        while True:
            while b"\r\n" not in self._buffer:
                if not await self._receive():
                    return None
            size, self._buffer = self._buffer.split(b"\r\n", 1)
            n_bytes = int(size.partition(b";")[0], 16)
            if (chunk := await self._read(n_bytes + 2)) is None:
                return None
            if not n_bytes:
                return body
            body += chunk[:-2]

    async def play(self, reply: Reply) -> bool:
        """Send `reply`; return whether the connection can carry another request."""
        self._is_over = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, tasks)
            try:
                await self._send(reply)
                self._is_over = False
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # the client, or a `Drop`, closed the socket
            tasks.cancel_scope.cancel()
        return not self._is_over

    async def _watch(self, tasks: TaskGroup) -> None:
        if not await self._receive():
            self._is_over = True
            tasks.cancel_scope.cancel()

    async def _receive(self) -> bool:
        try:
            self._buffer += await self._stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        return True

    async def _send(self, reply: Reply) -> None:
        for step in reply.before:
            await self._step(step, is_chunked=False)
        head = f"HTTP/1.1 {reply.code} {_PHRASES.get(reply.code, 'Whatever')}\r\n"
        headers = {"Content-Type": reply.content_type, "Transfer-Encoding": "chunked"}
        for name, value in (headers | dict(reply.headers)).items():
            head += f"{name}: {value}\r\n"
        await self._stream.send(f"{head}\r\n".encode())
        for step in reply.body:
            await self._step(step, is_chunked=True)
        await self._stream.send(b"0\r\n\r\n")

    async def _step(self, step: Step, *, is_chunked: bool) -> None:
        if isinstance(step, bytes):
            await self._stream.send(b"%x\r\n%s\r\n" % (len(step), step) if is_chunked else step)
        elif isinstance(step, Drip):
            for at in range(len(step.data)):
                await self._step(step.data[at : at + 1], is_chunked=is_chunked)
        elif isinstance(step, Gate):
            step.reached.set()
            await step.opened.wait()
        elif isinstance(step, Repeat):
            while True:
                await self._step(step.data, is_chunked=is_chunked)
                await anyio.sleep(step.every_s)
        elif isinstance(step, Sleep):
            await anyio.sleep(step.seconds)
        elif isinstance(step, Stall):
            await anyio.sleep_forever()
        else:
            if step.reset:
                self._socket.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            await self._stream.aclose()
            raise anyio.ClosedResourceError


@asynccontextmanager
async def provider_double(
    script: Script, *, port: int = 0, is_strict: bool = True
) -> AsyncIterator[ProviderDouble]:
    """Serve `script` on the loopback interface while the block runs, by default on a free port.

    A script is a list of replies, or a function from a request's path, body and number to one.
    A strict one notes what providers would refuse, and fails on what is no request of a model; one
    that is not takes an unreadable body for an empty object.
    """
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    there = listener.extra(SocketAttribute.local_port)
    double = ProviderDouble(script, there, is_strict=is_strict)
    failure: Exception | None = None
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, double.serve)
        try:
            yield double
        except Exception as error:
            failure = error  # raised outside the group, which would wrap it
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
