"""JSON-RPC on stdin and stdout: lines in, lines out, requests both ways. Knows nothing of ACP."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import Any, Final, NoReturn

from conformance.selftest.agent.loop import READ, WRITE, Future, Loop

__all__ = [
    "INTERNAL_ERROR",
    "INVALID_PARAMS",
    "INVALID_REQUEST",
    "METHOD_NOT_FOUND",
    "Connection",
    "Message",
    "Request",
    "RpcError",
]

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
LINE_LIMIT_BYTES: Final = 64 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024
WRITE_BYTES: Final = 4096  # a pipe that can be written at all takes so much without blocking
OUTBOX_BYTES: Final = 256 * 1024
FLUSH_LIMIT_S: Final = 0.5

Message = dict[str, Any]


class RpcError(Exception):
    """An error that the peer is told, or that it told us."""

    def __init__(self, code: int, message: str, data: Message | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def body(self) -> Message:
        """Return the error object."""
        body: Message = {"code": self.code, "message": self.message}
        return body if self.data is None else {**body, "data": self.data}


class Request:
    """A request of the peer's, to be answered once; what comes after the first is dropped."""

    def __init__(self, connection: Connection, key: object, method: str, params: Any) -> None:
        self.key: Final = (type(key), key)
        self.method: Final = method
        self.params: Final = params
        self.is_answered = False
        self._connection = connection

    def answer(self, result: Message) -> None:
        """Send the result."""
        self._settle({"result": result})

    def fail(self, error: RpcError) -> None:
        """Send an error."""
        self._settle({"error": error.body()})

    def _settle(self, body: Message) -> None:
        if self.is_answered:
            return
        self.is_answered = True
        self._connection.inflight.pop(self.key, None)
        self._connection.send({"jsonrpc": "2.0", "id": self.key[1], **body})


class Connection:
    """The peer at the other end of stdin and stdout.

    Args:
        loop: What it runs on.
        on_request: Takes a request; must see to it that it is answered.
        on_notification: Takes a notification's method and params.
        on_end: Called when the peer is gone: no more input, or nobody reads our output.

    Attributes:
        inflight: The peer's requests that are not answered yet, by JSON type and value of the id.
    """

    def __init__(
        self,
        loop: Loop,
        on_request: Callable[[Request], None],
        on_notification: Callable[[str, Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self.inflight: Final[dict[tuple[type, object], Request]] = {}
        self._loop = loop
        self._on_request = on_request
        self._on_notification = on_notification
        self._on_end = on_end
        self._pending: dict[int, Future] = {}
        self._last_id = 0
        self._is_over = False
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._outbox = bytearray()
        self._is_writing = False
        self._drained = Future()
        # What anything in this process prints by mistake must not get between the messages.
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._writable = select.poll()
        self._writable.register(self._out, select.POLLOUT)
        loop.watch(0, READ, self._read)

    # --- out ------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message after those before it. Never blocks; what is not read is kept."""
        line = json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self._outbox += line.encode("utf-8", "replace") + b"\n"  # lone surrogates are no UTF-8
        self._write()

    def notify(self, method: str, params: Message) -> None:
        """Send a notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def request(self, method: str, params: Message) -> Future:
        """Send a request; the future is its result, or an `RpcError`."""
        reply = Future()
        if self._is_over:
            reply.fail(RpcError(INTERNAL_ERROR, "the client is gone"))
            return reply
        self._last_id += 1
        self._pending[self._last_id] = reply
        self.send({"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params})
        return reply

    def abandon(self, reply: Future) -> None:
        """Wait no more for a request of ours, and tell the peer so. An answer will be dropped."""
        for request_id, pending in list(self._pending.items()):
            if pending is reply:
                del self._pending[request_id]
                self.notify("$/cancel_request", {"requestId": request_id})

    async def drained(self) -> None:
        """Wait until the peer has read most of what was sent, and let others have a turn."""
        await self._loop.sleep(0)
        if len(self._outbox) > OUTBOX_BYTES and not self._is_over:
            self._drained = Future()
            await self._drained

    def flush(self) -> None:
        """Write what is left, as far as the peer reads it within half a second."""
        while self._outbox and self._writable.poll(FLUSH_LIMIT_S * 1000):
            self._write()

    def end(self) -> None:
        """Take the peer for gone: nothing is read any more, and what we asked fails."""
        if self._is_over:
            return
        self._is_over = True
        self._loop.unwatch(0)
        pending, self._pending = self._pending, {}
        for reply in pending.values():
            reply.fail(RpcError(INTERNAL_ERROR, "the client is gone"))
        self._drained.set()
        self._on_end()

    def _write(self) -> None:
        try:
            while self._outbox and self._writable.poll(0):
                del self._outbox[: os.write(self._out, self._outbox[:WRITE_BYTES])]
        except OSError:  # nobody reads it any more
            self._outbox.clear()
            self._loop.soon(self.end)
        if len(self._outbox) <= OUTBOX_BYTES:
            self._drained.set()
        if bool(self._outbox) != self._is_writing:
            self._is_writing = bool(self._outbox)
            if self._is_writing:
                self._loop.watch(self._out, WRITE, self._write)
            else:
                self._loop.unwatch(self._out)

    # --- in -------------------------------------------------------------------------------------

    def _read(self) -> None:
        chunk = os.read(0, READ_BYTES)
        if not chunk:
            self._take_line()  # the last line may have no end
            return self.end()
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._keep(line)
            self._take_line()
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        self._line_bytes += len(part)
        if self._line_bytes <= LINE_LIMIT_BYTES:
            self._line.append(part)
        else:
            self._line.clear()

    def _take_line(self) -> None:
        line, n_bytes = b"".join(self._line), self._line_bytes
        self._line.clear()
        self._line_bytes = 0
        try:
            if n_bytes > LINE_LIMIT_BYTES:
                raise RpcError(INVALID_REQUEST, "the message is too long")
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if line:
                self._take(_parsed(line))
        except RpcError as error:
            self.send({"jsonrpc": "2.0", "id": None, "error": error.body()})

    def _take(self, message: object) -> None:
        if not isinstance(message, dict):
            raise RpcError(INVALID_REQUEST, "a message is one JSON object")
        if "method" not in message and ("result" in message or "error" in message):
            return self._take_response(message)
        key, has_id = message.get("id"), "id" in message
        if isinstance(key, bool) or not isinstance(key, int | str | None):
            raise RpcError(INVALID_REQUEST, "an id is a string or an integer")
        method = message.get("method")
        if message.get("jsonrpc") != "2.0" or not isinstance(method, str) or "result" in message:
            if has_id:
                error = RpcError(INVALID_REQUEST, "this is no JSON-RPC 2.0 message")
                return self.send({"jsonrpc": "2.0", "id": key, "error": error.body()})
            raise RpcError(INVALID_REQUEST, "this is no JSON-RPC 2.0 message")
        params = message.get("params")
        if not has_id:
            return self._on_notification(method, params)
        request = Request(self, key, method, params)
        if request.key in self.inflight:
            error = RpcError(INVALID_REQUEST, "this id is in use")
            return self.send({"jsonrpc": "2.0", "id": key, "error": error.body()})
        self.inflight[request.key] = request
        self._on_request(request)

    def _take_response(self, message: Message) -> None:
        key = message.get("id")
        reply = self._pending.pop(key, None) if type(key) is int else None
        if reply is None:
            return  # an answer that we wait for no more, or never did
        if "error" in message:
            reply.fail(_told(message["error"]))
        else:
            reply.set(message["result"])


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise RpcError(PARSE_ERROR, "the line is no JSON") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError("the number is too big")
    return number


def _told(error: object) -> RpcError:
    fields = error if isinstance(error, dict) else {}
    code, message = fields.get("code"), fields.get("message")
    return RpcError(
        code if type(code) is int else INTERNAL_ERROR,
        message if isinstance(message, str) else "the client gave no reason",
    )
