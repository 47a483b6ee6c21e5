"""A real HTTP/1.1 server on loopback that speaks streaming OpenAI chat completions.

It plays a script: one `Reply` per request, in the order in which requests arrive, each a list of
steps (bytes to send, gates to wait at, ways to fail). It records what it was asked, judges every
request's history as strict providers do, and knows when a client has hung up.

```python
gate = Gate()
async with provider_double([answer(text("Hel"), gate, text("lo"))]) as double:
    model = OpenAIModel("any", api_key="key", base_url=double.url)
```
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.abc import SocketAttribute, SocketStream, TaskGroup

__all__ = [
    "DONE",
    "Drip",
    "Drop",
    "Gate",
    "ProviderDouble",
    "Reply",
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

DONE: Final = b"data: [DONE]\n\n"
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


Step = bytes | Gate | Stall | Drop | Drip


@dataclass(frozen=True)
class Reply:
    """One response. `before` runs before the headers, `body` after them.

    A reply without `length` is sent chunked, one HTTP chunk for each step.
    """

    body: Sequence[Step] = ()
    before: Sequence[Step] = ()
    code: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "text/event-stream"


def answer(*steps: Step, before: Sequence[Step] = (), reason: str | None = "stop") -> Reply:
    """Return a reply that streams `steps`, then the finish reason (unless `None`) and the end."""
    end = [] if reason is None else [finish(reason), DONE]
    return Reply([*steps, *end], before)


def status(code: int, error: object = None, *, headers: Mapping[str, str] | None = None) -> Reply:
    """Return an error: `error` becomes the body's ``error``, bytes become the whole body."""
    raw = error if isinstance(error, bytes) else json.dumps({"error": error}).encode()
    return Reply([raw], code=code, headers=headers or {}, content_type="application/json")


def chunk(
    delta: Mapping[str, Any] | None = None, *, reason: str | None = None, **extra: Any
) -> bytes:
    """Return one event of a stream with `delta`; `extra` goes beside its choices."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    body = {
        "id": "chatcmpl-double",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "double",
        "choices": choices,
    }
    return b"data: " + json.dumps(body | extra, ensure_ascii=False).encode() + b"\n\n"


def text(value: str) -> bytes:
    """Return an event with more text."""
    return chunk({"content": value})


def reasoning(value: str, *, key: str = "reasoning_content") -> bytes:
    """Return an event with more thinking, in the field an endpoint uses for it."""
    return chunk({key: value})


def tool_call(
    index: int | None = 0, id: str | None = None, name: str | None = None, arguments: str = ""
) -> bytes:
    """Return an event with a fragment of a tool call; what is `None` is left out."""
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    call: dict[str, Any] = {"function": function, "type": "function"}
    call |= {} if index is None else {"index": index}
    call |= {} if id is None else {"id": id}
    return chunk({"tool_calls": [call]})


def finish(reason: str) -> bytes:
    """Return the event that says why the model ended."""
    return chunk({}, reason=reason)


def usage(prompt: int, completion: int, *, cached: int = 0, thought: int = 0) -> bytes:
    """Return the event that counts tokens."""
    return chunk(
        usage={
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }
    )


def error_event(**error: Any) -> bytes:
    """Return an error in the midst of a stream."""
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def comment(words: str = "keep-alive") -> bytes:
    """Return what keeps a connection busy without saying anything."""
    return f": {words}\n\n".encode()


# --- what strict providers refuse -----------------------------------------------------------


def history_violations(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a strict provider would refuse in `messages`, as sentences."""
    found: list[str] = []
    owed: list[str] = []
    for at, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            call_id = message.get("tool_call_id")
            if call_id not in owed:
                found.append(f"message {at}: a result for {call_id!r}, which nobody owes")
            else:
                owed.remove(call_id)
            continue
        if owed:
            found.append(f"message {at}: {role} while results are owed for {owed}")
            owed = []
        if role == "assistant":
            owed = [call.get("id") for call in message.get("tool_calls") or ()]
            found += [f"message {at}: {wrong}" for wrong in _assistant_violations(message)]
        elif role == "system":
            found += [f"message {at}: system after others"] if at else []
        elif role != "user":
            found.append(f"message {at}: role {role!r}")
        elif not message.get("content"):
            found.append(f"message {at}: an empty user message")
    found += [f"results are owed for {owed}"] if owed else []
    if not messages or messages[-1].get("role") not in ("user", "tool"):
        found.append("the last message is neither a user's nor a tool's")
    return found


def _assistant_violations(message: Mapping[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    found = ["an empty list of tool calls"] if calls == [] else []
    if not message.get("content") and not calls:
        found.append("an empty assistant message")
    ids = [call.get("id") for call in calls or ()]
    if len(set(ids)) != len(ids) or not all(isinstance(id, str) and id for id in ids):
        found.append(f"tool call ids {ids}")
    for call in calls or ():
        function = call.get("function", {})
        if call.get("type") != "function" or not function.get("name"):
            found.append(f"a malformed tool call {call}")
        elif not _is_json_object(function.get("arguments")):
            found.append(f"arguments {function.get('arguments')!r}")
    return found


def _is_json_object(value: object) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False


# --- the server -----------------------------------------------------------------------------


class ProviderDouble:
    """What a test sees of the server. Requests count from 0.

    Attributes:
        url: The base URL to configure.
        requests: The decoded body of each request.
        headers: The headers of each request, names in lower case.
        violations: What strict providers would have refused so far.
        open_connections: Sockets that are open now.
    """

    def __init__(self, script: Sequence[Reply], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.violations: list[str] = []
        self.open_connections = 0
        self._script = list(script)
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

    def record(self, headers: dict[str, str], body: bytes) -> tuple[int, Reply]:
        """Take note of a request; return its number and what to reply."""
        n = len(self.requests)
        request = json.loads(body)
        self.requests.append(request)
        self.headers.append(headers)
        self.violations += [
            f"request {n}: {what}" for what in history_violations(request.get("messages", ()))
        ]
        self.note_change()
        if n >= len(self._script):
            self.violations.append(f"request {n} is not in the script")
            return n, status(500, {"message": "the script is over"})
        return n, self._script[n]

    async def serve(self, stream: SocketStream) -> None:
        """Serve one connection to its end."""
        connection = _Connection(stream)
        carried: list[int] = []
        self.open_connections += 1
        try:
            while (request := await connection.read_request()) is not None:
                n, reply = self.record(*request)
                carried.append(n)
                if not await connection.play(reply):
                    break
        finally:
            await anyio.aclose_forcefully(stream)
            self.open_connections -= 1
            self._disconnected.update(carried)
            self.note_change()


class _Connection:
    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._buffer = b""
        self._is_over = False
        # Without it the kernel would join what a test sends apart.
        raw: socket.socket = stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = raw

    async def read_request(self) -> tuple[dict[str, str], bytes] | None:
        while b"\r\n\r\n" not in self._buffer:
            if not await self._receive():
                return None
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        pairs = (line.split(": ", 1) for line in head.decode("latin-1").split("\r\n")[1:])
        headers = {name.lower(): value for name, value in pairs}
        length = int(headers["content-length"])
        while len(self._buffer) < length:
            if not await self._receive():
                return None
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return headers, body

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
async def provider_double(script: Sequence[Reply]) -> AsyncIterator[ProviderDouble]:
    """Serve `script` on a free port of the loopback interface while the block runs."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    double = ProviderDouble(script, listener.extra(SocketAttribute.local_port))
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, double.serve)
        try:
            yield double
        finally:
            tasks.cancel_scope.cancel()
