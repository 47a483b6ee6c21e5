"""One thread and one loop: everything between two waits is atomic.

A `Task` runs a coroutine that awaits `Future`s. `Task.cancel` raises `Cancelled` at the wait the
task stands at, once; what the task awaits afterwards, to clean up, is left in peace.

asyncio would do as well, but takes twice as long to import as all of this agent.
"""

from __future__ import annotations

import heapq
import os
import selectors
import signal as signals
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Final

__all__ = ["READ", "WRITE", "Cancelled", "Future", "Loop", "Task"]

READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE


class Cancelled(BaseException):
    """Raised in a task that is told to stop."""


class Future:
    """A value that comes once. Any number of tasks may wait for it."""

    def __init__(self) -> None:
        self.is_done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._watchers: list[Callable[[], None]] = []

    def set(self, value: Any = None) -> None:
        """Give the value; what comes later does not count."""
        self._settle(value, None)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in whoever waits."""
        self._settle(None, error)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` when there is a value or an error: at once if there is one now."""
        if self.is_done:
            watcher()
        else:
            self._watchers.append(watcher)

    def __await__(self) -> Generator[Future, None, Any]:
        if not self.is_done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self.is_done:
            return
        self.is_done, self._value, self._error = True, value, error
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()


class Task(Future):
    """A coroutine that runs; its value is what the coroutine returns. Made by `Loop.spawn`."""

    def __init__(self, loop: Loop, work: Coroutine[Future, None, Any]) -> None:
        super().__init__()
        self.is_cancelled = False
        self._loop = loop
        self._work = work
        self._awaited: Future | None = None
        loop.soon(lambda: self._advance(None))

    def cancel(self) -> None:
        """Stop it at the wait it stands at; only the first call counts."""
        if self.is_done or self.is_cancelled:
            return
        self.is_cancelled = True
        self._awaited = None  # whatever it waited for wakes it no more
        self._loop.soon(lambda: self._advance(Cancelled()))

    def _advance(self, error: BaseException | None) -> None:
        if self.is_done:
            return
        self._awaited = None
        try:
            awaited = self._work.send(None) if error is None else self._work.throw(error)
        except StopIteration as stop:
            return self.set(stop.value)
        except (Exception, Cancelled) as failure:
            return self.fail(failure)
        self._awaited = awaited
        awaited.watch(lambda: self._loop.soon(lambda: self._wake(awaited)))

    def _wake(self, awaited: Future) -> None:
        if self._awaited is awaited:
            self._advance(None)


class Loop:
    """Runs tasks, timers, and callbacks for file descriptors and signals."""

    def __init__(self) -> None:
        self._ready: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Future]] = []
        self._n_timers = 0
        self._selector = selectors.PollSelector()  # unlike epoll it also takes regular files
        self._signals: dict[int, Callable[[], None]] = {}
        self._children: list[tuple[Callable[[], object], Future]] = []
        wakeup, self._wakeup = os.pipe()
        for end in (wakeup, self._wakeup):
            os.set_blocking(end, False)
        signals.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self.watch(wakeup, READ, lambda: self._take_signals(wakeup))
        self.on_signal(signals.SIGCHLD, self._reap)

    def soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` after those that were handed in before, never inside this call."""
        self._ready.append(callback)

    def spawn(self, work: Coroutine[Future, None, Any]) -> Task:
        """Start a task; it does not run before this returns."""
        return Task(self, work)

    def sleep(self, seconds: float) -> Future:
        """Return a future that is set after so many seconds."""
        future = Future()
        self._n_timers += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._n_timers, future))
        return future

    async def within(self, seconds: float, future: Future) -> bool:
        """Wait for `future`, not longer than so many seconds; say whether it is done."""
        either = self.sleep(seconds)
        future.watch(either.set)
        await either
        return future.is_done

    def watch(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is ready, until `unwatch`. One callback for each."""
        self._selector.register(fd, events, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching; nothing happens if nobody watches."""
        with suppress(KeyError):
            self._selector.unregister(fd)

    async def is_ready(self, fd: int, events: int) -> None:
        """Wait until `fd` can be read or written. May be cancelled."""
        future = Future()
        self.watch(fd, events, future.set)
        try:
            await future
        finally:
            self.unwatch(fd)

    def on_signal(self, number: int, callback: Callable[[], None]) -> None:
        """Call `callback` from the loop, not from within other code, when the signal comes."""
        self._signals[number] = callback
        signals.signal(number, lambda *_: None)

    def exited(self, poll: Callable[[], object]) -> Future:
        """Return a future that is set when a child process has ended: `poll` is no more `None`."""
        future = Future()
        self._children.append((poll, future))
        self._reap()
        return future

    def run(self, until: Future) -> None:
        """Run until the future is done."""
        while not until.is_done:
            for _ in range(len(self._ready)):
                self._ready.popleft()()
            for key, _ in self._selector.select(self._timeout(until)):
                key.data()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2].set()

    def _timeout(self, until: Future) -> float | None:
        if self._ready or until.is_done:
            return 0
        return max(0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _take_signals(self, fd: int) -> None:
        for number in set(os.read(fd, 4096)):
            self._signals[number]()

    def _reap(self) -> None:
        for child in list(self._children):
            poll, future = child
            if poll() is not None:
                self._children.remove(child)
                future.set()
