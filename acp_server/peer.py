"""One JSON-RPC peer: requests we serve, requests we make, and their order on the wire.

Knows nothing of ACP and nothing of bytes on a file descriptor. The rules:

- `receive` is synchronous and never waits, so a cancel is always read. A request is registered, and
  the synchronous part of its handler has taken effect, before the next line is looked at.
- Notifications are handled inline, in wire order.
- Every request gets exactly one answer, behind everything that was sent before it.
- What an exception says stays here; the peer sees a code, one sentence, and an id for the log.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import UNSET, Raw, Struct

from acp_server import _jsonrpc
from acp_server.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    REQUEST_CANCELLED,
    PeerClosed,
    RemoteError,
    RpcError,
)
from acp_server.message import (
    BadMessage,
    Message,
    Notification,
    Request,
    RequestId,
    Response,
    error_of,
    parse,
)
from agent_core.cancellation import AbortSignal
from agent_core.logs import get_logger
from agent_core.text import replace_surrogates

__all__ = ["InFlight", "Late", "Method", "Outbox", "Peer"]

log = get_logger(__name__)

Late = Callable[[bytes | None], None]
"""What is told of a request that nobody waits for any more; see `Peer.call`."""


class Outbox(Protocol):
    """Where messages go: a transport's ordered queue of whole lines."""

    @property
    def is_congested(self) -> bool:
        """Whether the peer reads so slowly that producers should wait for `drained`."""
        ...

    def send(self, message: bytes) -> None:
        """Queue one encoded message without its newline. Never blocks, never refuses."""
        ...

    async def drained(self) -> None:
        """Wait until the queue is short again, or the peer is gone.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        ...


class InFlight:
    """A request that is being served.

    Attributes:
        id: The peer's id for it.
        cancel: What ``$/cancel_request`` does; a handler may set its own. By default the handler's
            scope is cancelled and the answer is -32800.
        after: Called in order once the answer has been sent.
    """

    def __init__(self, request_id: RequestId) -> None:
        self.id = request_id
        self.scope = anyio.CancelScope()
        self.cancel: Callable[[], None] = self.scope.cancel
        self.after: list[Callable[[], None]] = []


class Method:
    """One method we serve: the type of its params, and its handler.

    `handle(params, in_flight)` is called while the line is being received and returns a coroutine.
    An ``async def`` does nothing until that is awaited; a plain function takes effect at once,
    before the next line is read, and returns the coroutine that waits for the rest.
    """

    def __init__(
        self, params: Any, handle: Callable[[Any, InFlight], Coroutine[Any, Any, Any]]
    ) -> None:
        self.handle = handle
        self._params = params

    def decode(self, raw: bytes | None) -> Any:
        """Decode params.

        Raises:
            RpcError: INVALID_PARAMS, with what is wrong and where.
        """
        try:
            return msgspec.json.decode(raw or b"{}", type=self._params)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": str(exc)}) from None


async def ready(result: object) -> object:
    """Answer with what is known already. For handlers that take effect at once."""
    return result


class _Pending:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.response: Response | None = None


class Peer:
    """A connection's two directions."""

    def __init__(
        self,
        outbox: Outbox,
        tasks: TaskGroup,
        methods: Mapping[str, Method],
        notifications: Mapping[str, Callable[[bytes | None], None]],
        admit: Callable[[str], None],
    ) -> None:
        """Make a peer.

        Args:
            outbox: Where messages go.
            tasks: Where requests are served.
            methods: What we serve.
            notifications: Synchronous handlers; unknown notifications are ignored.
            admit: Called with the method of every request; raises `RpcError` to refuse it.
        """
        self.outbox = outbox
        self._tasks = tasks
        self._methods = methods
        self._notifications = notifications
        self._admit = admit
        self._in_flight: dict[tuple[type, RequestId], InFlight] = {}
        self._pending: dict[int, _Pending] = {}
        self._late: dict[int, Late] = {}
        self._last_id = 0
        self._is_closed = False
        self._quiet: anyio.Event | None = None  # there while somebody waits for it

    # --- what comes in -----------------------------------------------------------------------

    def receive(self, line: bytes | None) -> None:
        """Take one line; `None` stands for one that was too long."""
        if line is None:
            self._answer(None, error=RpcError(INVALID_REQUEST, "The message is too long"))
        else:
            self.handle(parse(line))

    def handle(self, message: Message | None) -> None:
        """Take one parsed line."""
        match message:
            case Request() as request:
                self._begin(request)
            case Notification() as notification:
                self._notice(notification)
            case Response() as response:
                self._settle(response)
            case BadMessage(code, reason, request_id):
                self._answer(request_id, error=RpcError(code, _sentence(code), {"reason": reason}))
            case None:
                pass

    def _begin(self, request: Request) -> None:
        key = _key(request.id)
        if key in self._in_flight:
            reason = {"reason": "a request with this id is being served"}
            error = RpcError(INVALID_REQUEST, "Invalid request", reason)
            self._answer(request.id, error=error)
            return
        in_flight = InFlight(request.id)
        work = None  # an unknown method: the dispatcher has the answer to that
        try:
            self._admit(request.method)
            if (method := self._methods.get(request.method)) is not None:
                work = method.handle(method.decode(request.params), in_flight)
        except RpcError as exc:
            self._answer(request.id, error=exc)
            return
        except Exception as exc:
            self._answer(request.id, error=self._internal(request.method, exc))
            return
        self._in_flight[key] = in_flight
        self._tasks.start_soon(self._serve, request, in_flight, work, name=request.method)

    async def _serve(
        self, request: Request, in_flight: InFlight, work: Coroutine[Any, Any, Any] | None
    ) -> None:
        result: Any = None
        error: tuple[int, str, Any] | None = (REQUEST_CANCELLED, "Request cancelled", None)
        try:
            with in_flight.scope:
                table = {} if work is None else {request.method: _SERVED}
                result, error = await _jsonrpc.dispatch(
                    table, request.method, (self, request.method, work), request.id
                )
        finally:
            if work is not None:
                work.close()
            del self._in_flight[_key(request.id)]
        if error is None:
            self._answer(request.id, result=result)
        else:
            code, message, data = error
            if code == METHOD_NOT_FOUND:
                data = {"method": request.method}
            self._answer(request.id, error=RpcError(code, message, data))
        for callback in in_flight.after:
            callback()
        if not self._in_flight and self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    def _notice(self, notification: Notification) -> None:
        try:
            if notification.method == "$/cancel_request":
                self._cancel_request(notification.params)
            elif (handle := self._notifications.get(notification.method)) is not None:
                handle(notification.params)
            else:
                log.debug("notification_ignored", method=notification.method)
        except Exception:
            log.exception("notification_failed", method=notification.method)

    def _cancel_request(self, params: bytes | None) -> None:
        try:
            request_id = msgspec.json.decode(params or b"{}", type=_CancelRequest).request_id
        except msgspec.MsgspecError:
            log.info("cancel_request_malformed")
            return
        in_flight = self._in_flight.get(_key(request_id))
        if in_flight is not None:
            in_flight.cancel()

    def _internal(self, method: str, exc: BaseException) -> RpcError:
        reference = os.urandom(4).hex()
        log.error("request_failed", method=method, reference=reference, exc_info=exc)
        return RpcError(INTERNAL_ERROR, "Internal error", {"reference": reference})

    # --- what goes out -----------------------------------------------------------------------

    def _answer(
        self, request_id: RequestId, *, result: Any = UNSET, error: RpcError | None = None
    ) -> None:
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id}
        if error is None:
            message["result"] = result
        else:
            body: dict[str, Any] = {"code": error.code, "message": error.message}
            if error.data is not None:
                body["data"] = error.data
            message["error"] = body
        self.send(_to_line(message))

    def send(self, message: bytes) -> None:
        """Send one encoded message behind all that was sent before. Never blocks."""
        if not self._is_closed:
            self.outbox.send(message)

    @property
    def is_congested(self) -> bool:
        """Whether the peer reads too slowly; see `drained`."""
        return self.outbox.is_congested

    async def drained(self) -> None:
        """Wait until the peer has read most of what was sent, or is gone.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        await self.outbox.drained()

    def notify(self, method: str, params: object) -> None:
        """Send a notification."""
        self.send(_to_line({"jsonrpc": "2.0", "method": method, "params": params}))

    def post(self, method: str, params: object) -> None:
        """Send a request whose response is of no use to anybody; it is dropped when it comes."""
        self._last_id += 1
        self.send(_request_line(self._last_id, method, params))

    async def call(
        self,
        method: str,
        params: object,
        *,
        signal: AbortSignal | None = None,
        late: Late | None = None,
    ) -> bytes:
        """Send a request and wait for its response.

        Cancellation: safe. When `signal` fires or the task is cancelled, the peer is told by
        ``$/cancel_request`` and a late response is dropped.
        Concurrency: any number of tasks; requests go out in call order.

        Args:
            method: Of the request.
            params: Of the request, anything that can be JSON.
            signal: Ends the wait.
            late: Called once it is known what became of a request that nobody waits for any more:
                with the result, for what the peer has made by then and somebody has to undo, or
                with `None` for an error or the end of the connection.

        Returns:
            The undecoded result, UTF-8 JSON; ``b"null"`` if it is null or missing.

        Raises:
            RemoteError: The peer answered with an error.
            PeerClosed: The connection ended first.
            TurnAborted: The signal fired.
        """
        if self._is_closed:
            raise PeerClosed
        if signal is not None:
            signal.raise_if_aborted()
        self._last_id += 1
        request_id, pending = self._last_id, _Pending()
        self._pending[request_id] = pending
        self.send(_request_line(request_id, method, params))
        try:
            async with nullcontext() if signal is None else signal.scope():
                await pending.done.wait()
        except BaseException:
            if self._pending.pop(request_id, None) is not None:
                self.notify("$/cancel_request", {"requestId": request_id})
                if late is not None:
                    self._late[request_id] = late
            elif late is not None and pending.response is not None:
                _tell_late(late, pending.response)  # it came, but the abort was first to be seen
            raise
        if pending.response is None:
            raise PeerClosed
        if pending.response.error is not None:
            raise RemoteError(*error_of(pending.response))
        return pending.response.result or b"null"

    def _settle(self, response: Response) -> None:
        pending = None
        if type(response.id) is int:
            pending = self._pending.pop(response.id, None)
        if pending is None:
            log.debug("response_dropped", id=str(response.id))
            if type(response.id) is int and (late := self._late.pop(response.id, None)) is not None:
                _tell_late(late, response)
            return
        pending.response = response
        pending.done.set()

    @property
    def n_in_flight(self) -> int:
        """How many requests of the peer's are being served."""
        return len(self._in_flight)

    async def answered(self) -> None:
        """Wait until every request that has come so far has its answer, or the peer is closed.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        if self._in_flight and not self._is_closed:
            self._quiet = self._quiet or anyio.Event()
            await self._quiet.wait()

    def close(self) -> None:
        """Send nothing more, and wake everybody who waits for the peer. Idempotent."""
        self._is_closed = True
        while self._late:
            self._late.popitem()[1](None)
        while self._pending:
            self._pending.popitem()[1].done.set()
        if self._quiet is not None:
            self._quiet.set()
            self._quiet = None


class _CancelRequest(Struct, rename="camel"):
    request_id: RequestId


async def _await_work(_context: object, payload: tuple[Peer, str, Awaitable[Any]]) -> Any:
    peer, method, work = payload
    try:
        return _jsonrpc.success(await work)
    except RpcError as exc:
        return _jsonrpc.failure(exc.code, exc.message, exc.data)
    except Exception as exc:
        hidden = peer._internal(method, exc)
        return _jsonrpc.failure(hidden.code, hidden.message, hidden.data)


_SERVED = _jsonrpc.method(_await_work)
_encode = msgspec.json.Encoder().encode


def _to_line(message: dict[str, Any]) -> bytes:
    try:
        return _encode(message)
    except UnicodeEncodeError:  # such as in a file name that is not UTF-8
        return _encode(replace_surrogates(msgspec.to_builtins(message, builtin_types=(Raw,))))


def _request_line(request_id: int, method: str, params: object) -> bytes:
    return _to_line({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def _tell_late(late: Late, response: Response) -> None:
    late(None if response.error is not None else response.result or b"null")


def _key(request_id: RequestId) -> tuple[type, RequestId]:
    return type(request_id), request_id


def _sentence(code: int) -> str:
    return "Invalid request" if code == INVALID_REQUEST else "Parse error"
