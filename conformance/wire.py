"""A raw wire to an agent: bytes in, bytes out, everything recorded.

Knows JSON-RPC lines and processes, nothing of ACP. It sends what it is told, right or wrong, and
never judges; the tests do, and when a wait ends badly the error shows the last lines of the trace.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, Literal, NamedTuple, TypeGuard, TypeVar

import anyio
import anyio.abc
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from conformance import processes
from conformance.links import Link, PipeLink, network_link
from conformance.trace import Entry, Message, Tail, WireError, decode, transcript

__all__ = ["DEFAULT_TIMEOUT_S", "Body", "Entry", "Message", "Wire", "WireError"]

DEFAULT_TIMEOUT_S: Final = 10.0
LEAVE_LIMIT_S: Final = 1.0
DRAIN_LIMIT_S: Final = 1.0
MOST_LOST: Final = 3.0
LEAST_WAIT_S: Final = 0.02
KILL_LIMIT_S: Final = 10.0
STDERR_BYTES: Final = 256 * 1024
MOST_BYTES: Final = 64 * 1024 * 1024
MOST_LINES: Final = 200_000
"""How much of an agent's output is read; one that writes more is not read any further."""
KEPT_LINES: Final = 1000
KEPT_LINE_BYTES: Final = 64 * 1024
"""What is kept then, from the beginning."""
METHOD_NOT_FOUND: Final = {"code": -32601, "message": "Method not found"}


class Body(NamedTuple):
    """An answer as it is sent, for what is no plain result: an error, null, or nonsense."""

    members: Message
    """What stands beside ``jsonrpc`` and the id."""
    n_times: int = 1


Answer = Callable[[Message], Message | Body | None]
T = TypeVar("T")


class Wire:
    """One agent and everything that was said. Made by `spawn` or `connect`.

    Sending never waits: what the agent does not read is queued. Not thread-safe.

    Attributes:
        trace: All lines in both directions, in order.
        answer: What to reply to the agent's requests, by method: a function from the request's
            params to the result, to a `Body`, or to `None` for no answer ever. Methods not in the
            table get -32601.
        unanswered: The agent's requests that got no answer, by id; see `reply`.
        key: Tells it from others in a report.
        left_behind: Ids of the agent's processes that could not be ended: another user's.
    """

    def __init__(
        self,
        link: Link,
        outbox: MemoryObjectSendStream[bytes],
        process: anyio.abc.Process | None = None,
        marker: str = "",
    ) -> None:
        self.trace: Final[list[Entry]] = []
        self.answer: Final[dict[str, Answer]] = {}
        self.unanswered: Final[dict[int | str, Message]] = {}
        self.key = ""
        self.left_behind: Final[set[int]] = set()
        self._link = link
        self._process_or_none = process
        self._marker = marker
        self._outbox = outbox
        self._started_s = time.monotonic()
        self._last_id = 0
        self._received: list[Message] = []
        self._taken: set[int] = set()  # indices into _received
        self._responses: dict[tuple[type, object], list[Message]] = {}
        self._changed = anyio.Event()
        self._is_over = False
        self._flood = ""
        self._is_closed = False
        self._was_signalled = False
        self._sent_parts: list[bytes] = []
        self._input_closed = anyio.Event()
        self._output_closed = anyio.Event()
        self._stderr = Tail(STDERR_BYTES)
        self._may_read = {"stdout": _opened(), "stderr": _opened()}

    @classmethod
    @asynccontextmanager
    async def spawn(
        cls,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Wire]:
        """Start an agent in a session of its own; leave nothing of it behind when the block ends.

        At the end the agent's input is closed; a second later it and every process that it
        started, found by the process tree and by a marker in their environment, are killed.
        Cancellation: safe; the processes are killed first.

        Args:
            command: Program and arguments.
            cwd: Where it starts; our own directory by default.
            env: Its environment; our own by default. The marker is added.
        """
        token = secrets.token_hex(8)
        process = await anyio.open_process(
            list(command),
            cwd=cwd,
            env={**(os.environ if env is None else env), processes.MARKER: token},
            start_new_session=True,
        )
        outbox, queued = anyio.create_memory_object_stream[bytes](max_buffer_size=float("inf"))
        wire = cls(PipeLink(process), outbox, process, f"{processes.MARKER}={token}")
        async with wire._running(queued, wire._read_stderr, wire._watch_exit):
            yield wire

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, token: str = "") -> AsyncIterator[Wire]:
        """Connect to an agent on the network; the connection is closed when the block ends.

        What is about a process of ours is not to be had of such a wire.
        Cancellation: safe.

        Args:
            url: ``ws://``, ``wss://``, ``http://`` or ``https://``.
            token: Sent as a bearer token, unless empty.

        Raises:
            WireError: It cannot be reached, or does not let us in.
        """
        outbox, queued = anyio.create_memory_object_stream[bytes](max_buffer_size=float("inf"))
        async with network_link(url, token) as link:
            wire = cls(link, outbox)
            async with wire._running(queued):
                yield wire

    @asynccontextmanager
    async def _running(
        self,
        queued: MemoryObjectReceiveStream[bytes],
        *others: Callable[[], Coroutine[Any, Any, None]],
    ) -> AsyncIterator[None]:
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, queued)
            tasks.start_soon(self._read)
            for other in others:
                tasks.start_soon(other)
            try:
                yield
            except Exception as error:
                failure = error  # raised outside the group, which would wrap it
            finally:
                with anyio.CancelScope(shield=True):
                    await self._end()
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def send_bytes(self, raw: bytes) -> None:
        """Send exactly these bytes; no end of line is added."""
        *lines, rest = raw.split(b"\n")
        for part in lines:
            self._note_sent(part, is_part=False)
        if rest:
            self._note_sent(rest, is_part=True)
        self._outbox.send_nowait(raw)

    def send(self, message: object) -> None:
        """Send anything that can be JSON, on a line of its own."""
        self.send_bytes(msgspec.json.encode(message) + b"\n")

    def send_together(self, messages: Sequence[Message]) -> None:
        """Send several messages in one write; the trace has each by itself."""
        self.send_bytes(b"".join(msgspec.json.encode(message) + b"\n" for message in messages))

    def new_id(self) -> int:
        """Return an id for a request that is sent by other means than `request`."""
        self._last_id += 1
        return self._last_id

    def request(self, method: str, params: object) -> int:
        """Send a request and return its id, without waiting for the response."""
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        self.send(message)
        return self._last_id

    def notify(self, method: str, params: object) -> None:
        """Send a notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def reply(self, request_id: int | str, result: object) -> None:
        """Answer a request of the agent's by hand."""
        self.unanswered.pop(request_id, None)
        self.send({"jsonrpc": "2.0", "id": request_id, "result": result})

    async def close_stdin(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Close the agent's input once everything queued was written.

        Cancellation: safe; the input is closed later. Concurrency: any number of tasks.

        Raises:
            WireError: The agent does not read what was queued.
        """
        self._close_outbox()
        if not await self._in_time(self._input_closed.wait, timeout_s):
            raise self._error(f"the agent did not read its input within {timeout_s} s")

    @contextmanager
    def unread(self, stream: Literal["stdout", "stderr"]) -> Iterator[None]:
        """Leave one of the agent's streams unread while the block runs, so that its pipe fills."""
        may_read = self._may_read[stream] = anyio.Event()
        try:
            yield
        finally:
            may_read.set()

    # Waiting. All of it may be cancelled, and called by any number of tasks at once.

    async def receive(
        self, predicate: Callable[[Message], bool], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Message:
        """Return the oldest message that fits and was not returned here before.

        Messages that came before the call count, and so do the agent's answered requests.

        Raises:
            WireError: None came in time, or none can come any more.
        """
        index = 0

        def look() -> Message | None:
            nonlocal index
            while index < len(self._received):
                message = self._received[index]
                if index not in self._taken and predicate(message):
                    self._taken.add(index)
                    return message
                index += 1
            return None

        return await self._wait_for(look, timeout_s, "a message that fits")

    def skip(self) -> None:
        """Have `receive` return none of the messages that came so far."""
        self._taken.update(range(len(self._received)))

    async def response(
        self, request_id: int | str, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Message:
        """Return the response to a request of ours, again and again if asked.

        Returns:
            The whole message, with its ``result`` or ``error``.

        Raises:
            WireError: It did not come in time, or cannot come any more.
        """

        def look() -> Message | None:
            responses = self.responses(request_id)
            return responses[0] if responses else None

        return await self._wait_for(look, timeout_s, f"the response to {request_id!r}")

    async def silence(
        self, method: str = "_wire/barrier", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Message]:
        """Return what the agent still says before it answers a request that it cannot know.

        A barrier rather than a sleep: what was on its way when this was called is in the list.
        Work that the agent does beside its reading may still speak later.

        Raises:
            WireError: Not even that request was answered.
        """
        start = len(self._received)
        answer = await self.response(self.request(method, {}), timeout_s)
        end = next(i for i, message in enumerate(self._received) if message is answer)
        return self._received[start:end]

    async def exited(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Wait for the agent's process to end; return its exit code, negative for a signal.

        Raises:
            WireError: It still runs.
        """
        process = self._process
        if not await self._in_time(process.wait, timeout_s) or process.returncode is None:
            raise self._error(f"the agent still runs after {timeout_s} s")
        return process.returncode

    @property
    def received(self) -> list[Message]:
        """All messages from the agent, oldest first."""
        return list(self._received)

    @property
    def noise(self) -> list[bytes]:
        """The lines on the agent's stdout that are no JSON object; empty lines are no noise."""
        return [
            entry.raw
            for entry in self.trace
            if entry.direction == "received" and entry.message is None and entry.raw.strip()
        ]

    @property
    def stderr(self) -> str:
        """What the agent wrote to stderr, at least the last `STDERR_BYTES` of it."""
        return self._stderr.text()

    def responses(self, request_id: int | str | None) -> list[Message]:
        """Return all responses so far that bear this id, by value and JSON type."""
        return list(self._responses.get((type(request_id), request_id), ()))

    def has_open_requests(self, since: int = 0) -> bool:
        """Say whether a request of either side waits for its answer.

        Args:
            since: The index in the trace from which on our requests count.
        """
        return bool(self.unanswered) or any(
            "method" in entry.message and not self.responses(entry.message["id"])
            for entry in self.trace[since:]
            if entry.direction == "sent" and entry.message and _is_id(entry.message.get("id"))
        )

    def updates(self, session_id: str) -> list[Message]:
        """Return the ``update`` of every ``session/update`` for the session so far."""
        return [
            message["params"]["update"]
            for message in self._received
            if message.get("method") == "session/update"
            and message["params"]["sessionId"] == session_id
        ]

    def transcript(self) -> str:
        """Return the end of the trace and of stderr, for people."""
        return transcript(self.trace, self.exit_code, self.stderr)

    @property
    def has_died(self) -> bool:
        """Whether the agent's output ended while nobody had ended the agent."""
        is_ended = self._is_closed or self._was_signalled or self._flood
        return self._is_over and not is_ended

    @property
    def exit_code(self) -> int | None:
        """How the agent's process ended, negative for a signal; `None` while it runs.

        Also `None` for an agent that is no process of ours.
        """
        return None if self._process_or_none is None else self._process_or_none.returncode

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM to the agent alone."""
        self._was_signalled = True
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the agent alone."""
        self._was_signalled = True
        self._process.kill()

    def descendants(self) -> set[int]:
        """Return the ids of the living processes that the agent started, and theirs.

        Those that left the tree (`setsid`, double fork) are found by the marker in their
        environment, where there is a ``/proc``.
        """
        return processes.living_family({self.pid}, self._marker) - {self.pid}

    def cpu_s(self) -> float:
        """Return the seconds of processor time the agent itself used. Needs ``/proc``."""
        return processes.cpu_s(self.pid)

    def rss_bytes(self) -> int:
        """Return the resident memory of the agent itself. Needs ``/proc``."""
        return processes.rss_bytes(self.pid)

    async def _write(self, queued: MemoryObjectReceiveStream[bytes]) -> None:
        can_write = True
        async with queued:
            async for raw in queued:
                if can_write:
                    try:
                        await self._link.send(raw)
                    except OSError:
                        can_write = False  # the agent closed its input; the trace goes on
        await self._link.close()
        self._input_closed.set()

    async def _read(self) -> None:
        rest: list[bytes] = []
        n_bytes, n_lines = 0, 0
        async for chunk in self._link.chunks():
            await self._may_read["stdout"].wait()
            *lines, last = chunk.split(b"\n")
            n_bytes, n_lines = n_bytes + len(chunk), n_lines + len(lines)
            if n_bytes > MOST_BYTES or n_lines > MOST_LINES:
                self._give_up(b"".join([*rest, chunk])[:KEPT_LINE_BYTES], n_bytes, n_lines)
                return
            for line in lines:
                self._take(b"".join([*rest, line]))
                rest.clear()
            rest.append(last)
        if last := b"".join(rest):
            self._take(last)
        self._output_closed.set()
        self._finish()

    def _give_up(self, last: bytes, n_bytes: int, n_lines: int) -> None:
        """Stop reading an agent that writes without end, and keep little of what it wrote."""
        mebibytes = n_bytes // (1024 * 1024)
        self._flood = f"the agent has written {mebibytes} MiB in {n_lines} lines, and goes on"
        received = [at for at, each in enumerate(self.trace) if each.direction == "received"]
        dropped = set(received[KEPT_LINES:])
        self.trace[:] = [each for at, each in enumerate(self.trace) if at not in dropped]
        self.trace.append(Entry(self._now_s(), "received", last, None))
        del self._received[KEPT_LINES:]
        self._finish()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with suppress(anyio.ClosedResourceError):
            async for chunk in self._process.stderr:
                await self._may_read["stderr"].wait()
                self._stderr.append(chunk)

    async def _watch_exit(self) -> None:
        await self._process.wait()
        # What it wrote last may still be in the pipe; a child of it may hold the pipe for ever.
        with anyio.move_on_after(DRAIN_LIMIT_S):
            await self._output_closed.wait()
        self._finish()

    async def _end(self) -> None:
        if self._process_or_none is None:
            self._close_outbox()
            with anyio.move_on_after(LEAVE_LIMIT_S):
                await self._input_closed.wait()
            return
        # Whoever has left both the marker and the tree is known only while the agent lives.
        family = {self.pid, *self.descendants()}
        self._close_outbox()
        with anyio.move_on_after(LEAVE_LIMIT_S):
            await self._process.wait()
        with anyio.move_on_after(KILL_LIMIT_S):
            while family := processes.living_family(family, self._marker):
                processes.kill(family)
                await anyio.sleep(0.01)  # the dead need a moment to go; what they forked is next
        self.left_behind.update(family)
        with anyio.move_on_after(KILL_LIMIT_S):  # it waits for the process
            await self._process.aclose()

    @property
    def _process(self) -> anyio.abc.Process:
        if self._process_or_none is None:
            raise WireError("the agent is no process of ours")
        return self._process_or_none

    def _close_outbox(self) -> None:
        self._is_closed = True
        self._outbox.close()

    def _note_sent(self, part: bytes, *, is_part: bool) -> None:
        self._sent_parts.append(part)
        message = None if is_part else decode(b"".join(self._sent_parts))
        if not is_part:
            self._sent_parts.clear()
        self.trace.append(Entry(self._now_s(), "sent", part, message, is_part))

    def _take(self, raw: bytes) -> None:
        message = decode(raw)
        self.trace.append(Entry(self._now_s(), "received", raw, message))
        if message is not None:
            self._received.append(message)
            self._react(message)
        self._wake()

    def _react(self, message: Message) -> None:
        message_id, method = message.get("id"), message.get("method")
        if not isinstance(method, str):
            if message_id is None or isinstance(message_id, int | str | float):
                self._responses.setdefault((type(message_id), message_id), []).append(message)
            return
        if "id" not in message or self._is_closed:
            return
        answer = self.answer.get(method)
        if answer is None:
            return self.send({"jsonrpc": "2.0", "id": message_id, "error": METHOD_NOT_FOUND})
        params = message.get("params")
        result = answer(params if isinstance(params, dict) else {})
        if isinstance(result, Body):
            for _ in range(result.n_times):
                self.send({"jsonrpc": "2.0", "id": message_id, **result.members})
        elif result is not None:
            self.send({"jsonrpc": "2.0", "id": message_id, "result": result})
        elif isinstance(message_id, int | str):
            self.unanswered[message_id] = message

    async def _wait_for(self, look: Callable[[], T | None], timeout_s: float, what: str) -> T:
        found: T | None = None

        async def wait() -> None:
            nonlocal found
            while (found := look()) is None and not self._is_over:
                await self._changed.wait()

        if not await self._in_time(wait, timeout_s):
            raise self._error(f"{what} did not come within {timeout_s} s")
        if found is None:
            raise self._error(self._flood or f"{what} cannot come any more")
        return found

    async def _in_time(self, wait: Callable[[], Awaitable[object]], timeout_s: float) -> bool:
        """Wait, and say whether it came to its end in time.

        Time in which a busy machine let us or the agent wait for a processor does not count, up to
        a few times the limit: the agent is not to blame for it.
        """
        started_s, before = time.monotonic(), self._starved_s()
        left_s = timeout_s
        while True:
            with anyio.move_on_after(left_s):
                await wait()
                return True
            lost_s = max(now - then for now, then in zip(self._starved_s(), before, strict=True))
            limit_s = timeout_s + min(lost_s, MOST_LOST * timeout_s)
            left_s = limit_s - (time.monotonic() - started_s)
            if left_s <= LEAST_WAIT_S:
                return False

    def _starved_s(self) -> tuple[float, float]:
        """Return for how long we and the agent have had to wait for a processor so far."""
        agents = 0.0 if self._process_or_none is None else processes.starved_s(self.pid)
        return processes.starved_s(os.getpid()), agents

    def _finish(self) -> None:
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    def _error(self, text: str) -> WireError:
        return WireError(f"{text}\n{self.transcript()}")


def _is_id(value: object) -> TypeGuard[int | str]:
    return isinstance(value, int | str)


def _opened() -> anyio.Event:
    event = anyio.Event()
    event.set()
    return event
