"""The client's end of an ACP connection: a child process and the messages over its stdio.

Knows JSON-RPC and processes, nothing of sessions or screens. Updates and answers are handed on in
the order in which the agent wrote them, so whatever the agent said before an answer has been shown
when the answer arrives.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import anyio.abc
import msgspec

from agent_core.logs import get_logger

__all__ = ["METHOD_NOT_FOUND", "AgentConnection", "AgentGone", "RequestFailed", "open_agent"]

METHOD_NOT_FOUND: Final = -32601
REQUEST_CANCELLED: Final = -32800
STDERR_LINES: Final = 20
STDERR_LINE_BYTES: Final = 2_000
TERMINATE_LIMIT_S: Final = 2.0

Message = dict[str, Any]
OnNotification = Callable[[str, Message], None]
OnRequest = Callable[[str, Message], Awaitable[Message]]
OnStderr = Callable[[str], None]

log = get_logger(__name__)


class AgentGone(Exception):
    """The agent could not be started, ended, or closed its output. The message says which."""


class RequestFailed(Exception):
    """An error answer: one the agent gave to us, or one we give to the agent."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@asynccontextmanager
async def open_agent(
    command: Sequence[str],
    *,
    cwd: str,
    on_notification: OnNotification,
    on_request: OnRequest,
    on_stderr: OnStderr | None = None,
    grace_s: float = 5.0,
) -> AsyncIterator[AgentConnection]:
    """Start the agent in a session of its own and connect to it; end it when the block ends.

    A Ctrl-C in our terminal does not reach the agent. Ending it means: end of its input, then
    `grace_s` later SIGTERM, then SIGKILL, each to its process group.
    Cancellation: safe; the agent is ended first.

    Args:
        command: Program and arguments.
        cwd: Where the agent's process starts, an absolute path.
        on_notification: Called with method and params, in the agent's order; must not block.
        on_request: Awaited with method and params, each call in a task of its own, which is
            cancelled when the agent withdraws the request. Raises `RequestFailed` to refuse.
        on_stderr: Called with each line the agent logs, without its end of line.
        grace_s: Seconds the agent has to leave by itself.

    Raises:
        AgentGone: The agent could not be started.
    """
    try:
        process = await anyio.open_process(command, cwd=cwd, start_new_session=True)
    except OSError as error:
        raise AgentGone(f"cannot start {error.filename or command[0]}: {error.strerror}") from error
    async with anyio.create_task_group() as tasks:
        connection = AgentConnection(process, tasks, on_notification, on_request, on_stderr)
        try:
            connection._start()
            yield connection
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process, grace_s)
            tasks.cancel_scope.cancel()


class AgentConnection:
    """Requests and notifications to one agent process. Made by `open_agent`."""

    def __init__(
        self,
        process: anyio.abc.Process,
        tasks: anyio.abc.TaskGroup,
        on_notification: OnNotification,
        on_request: OnRequest,
        on_stderr: OnStderr | None,
    ) -> None:
        self.ended: Final = anyio.Event()
        """Set once nothing more can come from the agent."""
        self._process = process
        self._tasks = tasks
        self._on_notification = on_notification
        self._on_request = on_request
        self._on_stderr = on_stderr
        self._last_id = 0
        self._pending: dict[int, _Pending] = {}
        self._in_flight: dict[int | str, anyio.CancelScope] = {}
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._stderr_closed = anyio.Event()

    @property
    def pid(self) -> int:
        """The agent's process id, which is also its process group's."""
        return self._process.pid

    @property
    def last_words(self) -> list[str]:
        """The newest lines the agent logged, and those on its stdout that were no messages."""
        return list(self._stderr)

    async def request(self, method: str, params: Message) -> Message:
        """Send a request and wait for its answer, without a limit.

        Cancellation: safe; a late answer is dropped. Concurrency: any number of tasks.

        Returns:
            The ``result`` member; ``{}`` if it is not an object.

        Raises:
            RequestFailed: The agent answered with an error.
            AgentGone: The agent ended first.
        """
        if self.ended.is_set():
            raise self.why_gone()
        self._last_id += 1
        request_id = self._last_id
        pending = self._pending[request_id] = _Pending()
        try:
            await self._send({"id": request_id, "method": method, "params": params})
            await pending.settled.wait()
        finally:
            del self._pending[request_id]
        if pending.message is None:
            raise self.why_gone()
        error = pending.message.get("error")
        if error is not None:
            raise _to_failure(error)
        result = pending.message.get("result")
        return result if isinstance(result, dict) else {}

    async def notify(self, method: str, params: Message) -> None:
        """Send a notification. Nothing happens if the agent is gone.

        Cancellation: safe; the notification may have been sent. Concurrency: any number of tasks.
        """
        await self._send({"method": method, "params": params})

    def why_gone(self) -> AgentGone:
        """Say how the agent ended; meant for after `ended`."""
        code = self._process.returncode
        if code is None:
            return AgentGone("the agent closed its output")
        if code < 0:
            return AgentGone(f"the agent was ended by {_signal_name(-code)}")
        return AgentGone(f"the agent ended with exit code {code}")

    def _start(self) -> None:
        self._tasks.start_soon(self._read_stdout)
        self._tasks.start_soon(self._read_stderr)
        self._tasks.start_soon(self._watch_exit)

    async def _send(self, message: Message) -> None:
        assert self._process.stdin is not None
        line = msgspec.json.encode({"jsonrpc": "2.0", **message}) + b"\n"
        try:
            await self._process.stdin.send(line)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            # Whoever waits for an answer hears of it from `ended`, together with the exit code.
            log.debug("message_not_sent", error=str(error))

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        async for line in _lines(self._process.stdout):
            self._receive(line)
        # An agent that ends closes its output first; its exit code is worth a short wait.
        with anyio.move_on_after(TERMINATE_LIMIT_S):
            await self._process.wait()
            await self._stderr_closed.wait()
        self._settle_all()

    async def _watch_exit(self) -> None:
        await self._process.wait()
        # A child of the agent may hold its stdout open for ever, so its end is not waited for.
        with anyio.move_on_after(TERMINATE_LIMIT_S):
            await self.ended.wait()
        self._settle_all()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        async for line in _lines(self._process.stderr):
            self._keep(line.decode("utf-8", "replace"))
        self._stderr_closed.set()

    def _keep(self, line: str) -> None:
        line = line[:STDERR_LINE_BYTES].rstrip()
        self._stderr.append(line)
        if self._on_stderr is not None:
            self._on_stderr(line)

    def _settle_all(self) -> None:
        self.ended.set()
        for pending in self._pending.values():
            pending.settled.set()

    def _receive(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            message = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = None
        if not isinstance(message, dict):
            self._keep(f"not a message: {line[:STDERR_LINE_BYTES].decode('utf-8', 'replace')}")
            return
        method, message_id = message.get("method"), message.get("id")
        if not isinstance(method, str):
            self._settle(message_id, message)
            return
        raw = message.get("params")
        params = raw if isinstance(raw, dict) else {}
        if isinstance(message_id, int | str):
            # Known before its task runs: a withdrawal may be the very next line.
            scope = self._in_flight[message_id] = anyio.CancelScope()
            self._tasks.start_soon(self._answer, scope, message_id, method, params)
        elif method == "$/cancel_request":
            self._withdraw(params.get("requestId"))
        else:
            self._on_notification(method, params)

    def _settle(self, message_id: object, message: Message) -> None:
        pending = self._pending.get(message_id) if type(message_id) is int else None
        if pending is not None:
            pending.message = message
            pending.settled.set()

    def _withdraw(self, message_id: object) -> None:
        scope = self._in_flight.get(message_id) if isinstance(message_id, int | str) else None
        if scope is not None:
            scope.cancel()

    async def _answer(
        self, scope: anyio.CancelScope, message_id: int | str, method: str, params: Message
    ) -> None:
        reply = _to_error(RequestFailed(REQUEST_CANCELLED, "Request cancelled"))
        try:
            with scope:
                reply = {"result": await self._on_request(method, params)}
        except RequestFailed as failure:
            reply = _to_error(failure)
        self._in_flight.pop(message_id, None)
        await self._send({"id": message_id, **reply})


class _Pending:
    """A request of ours that has no answer yet."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.message: Message | None = None


class _LineSplitter:
    """Cuts a byte stream into lines of any length."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*self._rest, line])
            self._rest.clear()
        self._rest.append(rest)

    def flush(self) -> bytes:
        return b"".join(self._rest)


async def _lines(stream: anyio.abc.ByteReceiveStream) -> AsyncIterator[bytes]:
    splitter = _LineSplitter()
    try:
        async for chunk in stream:
            for line in splitter.feed(chunk):
                yield line
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return
    if last := splitter.flush():
        yield last


async def _end(process: anyio.abc.Process, grace_s: float) -> None:
    assert process.stdin is not None
    await process.stdin.aclose()
    for number, limit_s in ((None, grace_s), (signal.SIGTERM, TERMINATE_LIMIT_S)):
        if number is not None:
            _signal_group(process.pid, number)
        with anyio.move_on_after(limit_s):
            await process.wait()
            break
    else:
        _signal_group(process.pid, signal.SIGKILL)
    await process.aclose()


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError) as error:
        # Gone meanwhile; macOS says "not permitted" of a group that holds only zombies.
        log.debug("process_group_gone", error=str(error))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _to_error(failure: RequestFailed) -> Message:
    return {"error": {"code": failure.code, "message": failure.message}}


def _to_failure(error: object) -> RequestFailed:
    if not isinstance(error, dict):
        return RequestFailed(0, str(error))
    code = error.get("code")
    return RequestFailed(code if type(code) is int else 0, str(error.get("message", "no message")))
