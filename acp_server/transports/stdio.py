"""The stdio transport: bytes on two file descriptors, without ever blocking the event loop.

Clients hand us pipes, socket pairs, terminals, files and /dev/null; each wants its own way of
reading and writing without blocking. File descriptor 1 belongs to the protocol alone: `claim_stdio`
moves it away and points 1 at stderr and 0 at nothing, so that a stray print, or a child that
inherits them, can neither corrupt the stream nor eat from it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import anyio
import anyio.to_thread

from acp_server.framing import LineSplitter

__all__ = ["FdOutbox", "claim_stdio", "read_lines"]

_READ_BYTES: Final = 256 * 1024
_WRITE_BYTES: Final = 256 * 1024
HIGH_WATER_BYTES: Final = 1024 * 1024
"""Unread output at which producers are held back; they go on at a quarter of it."""


def claim_stdio() -> tuple[int, int]:
    """Take the protocol's descriptors out of everybody else's reach.

    Returns:
        Private duplicates of file descriptors 0 and 1, closed on exec.
    """
    _fill_gaps()
    reads, writes = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return reads, writes


def _fill_gaps() -> None:
    """Open what we were started without, or the next descriptor we open would pass for it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free one


async def read_lines(
    fd: int,
    receive: Callable[[bytes | None], None],
    *,
    pace: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Give `receive` every line until the peer closes its end.

    Cancellation: safe. Concurrency: one task a descriptor.

    Args:
        fd: Where to read.
        receive: Called with each line, with `None` for one that was too long.
        pace: Awaited before more is read.
    """
    # Regular files and /dev/null cannot be waited for, and never make one wait for long.
    mode = os.fstat(fd).st_mode
    is_file = stat.S_ISREG(mode) or _is_same_file(fd, 0)
    read = _read_file if is_file else _read
    splitter = LineSplitter()
    while data := await read(fd):
        for line in splitter.feed(data):
            receive(line)
        if pace is not None:
            await pace()
    receive(splitter.finish())


def _is_same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


async def _read_file(fd: int) -> bytes:
    return await anyio.to_thread.run_sync(os.read, fd, _READ_BYTES)


async def _read(fd: int) -> bytes:
    while True:
        await anyio.wait_readable(fd)
        try:
            return os.read(fd, _READ_BYTES)
        except BlockingIOError:
            continue  # somebody who shares the descriptor was faster
        except OSError:  # the connection was reset, or the terminal is gone
            return b""


class FdOutbox:
    """An ordered queue of lines in front of a descriptor, written by `run`.

    The first line of each round of the event loop is written at once: whoever sends it may keep the
    loop for a while. Those behind it are written together.
    """

    def __init__(self, fd: int) -> None:
        self._write = _writer(fd)
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._begun = memoryview(b"")  # taken from the queue, and not yet written
        self._unread_bytes = 0
        self._wake = anyio.Event()  # not set while `run` waits for it, and at no other time
        self._wake.set()
        self._low = anyio.Event()
        self._is_lost = False

    @property
    def is_congested(self) -> bool:
        """Whether more than `HIGH_WATER_BYTES` are unread."""
        return self._unread_bytes > HIGH_WATER_BYTES and not self._is_lost

    def send(self, message: bytes) -> None:
        """Queue one message; a newline is added. Dropped once the peer is gone."""
        if not self._is_lost:
            self._queue.append(message)
            self._unread_bytes += len(message) + 1
            if not self._wake.is_set():
                self._wake.set()
                with suppress(OSError):  # `run` meets it, too
                    self._write_some()

    async def drained(self) -> None:
        """Wait until little is unread, or the peer is gone. Cancellation: safe."""
        if self._unread_bytes > HIGH_WATER_BYTES // 4 and not self._is_lost:
            await self._low.wait()

    async def flushed(self) -> None:
        """Wait until everything is written, or the peer is gone. Cancellation: safe."""
        while self._unread_bytes and not self._is_lost:
            await self._low.wait()

    async def run(self, on_lost: Callable[[], None]) -> None:
        """Write what is queued, for ever; `on_lost` is called when the peer has closed its end.

        Cancellation: safe; the rest of a line is lost. Concurrency: once.
        """
        try:
            while True:
                while self._queue or self._begun:
                    try:
                        self._write_some()
                    except BlockingIOError:
                        await anyio.wait_writable(self._fd)
                self._wake = anyio.Event()
                await self._wake.wait()
        except OSError:  # the pipe is broken, the terminal gone, the disk behind the file full
            self._is_lost = True
            self._queue.clear()
            self._low.set()
            on_lost()
        finally:
            self._wake.set()

    def _take(self) -> bytes:
        parts, size = [], 0
        while self._queue and size < _WRITE_BYTES:
            parts.append(self._queue.popleft())
            size += len(parts[-1]) + 1
        parts.append(b"")
        return b"\n".join(parts)

    def _write_some(self) -> None:
        self._begun = self._begun or memoryview(self._take())
        written = self._write(self._begun)
        self._begun = self._begun[written:]
        self._unread_bytes -= written
        if self._unread_bytes <= HIGH_WATER_BYTES // 4 and not self._low.is_set():
            self._low.set()
            self._low = anyio.Event()


def _writer(fd: int) -> Callable[[memoryview], int]:
    """Return a write that raises `BlockingIOError` instead of blocking, where there is one."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return lambda view: _send(fd, view)
    if stat.S_ISFIFO(mode) or os.isatty(fd):
        try:
            # A description of our own, so that nobody else's end becomes non-blocking.
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            os.set_blocking(fd, False)
        else:
            os.dup2(own, fd, inheritable=False)
            os.close(own)
    return lambda view: os.write(fd, view)


def _send(fd: int, view: memoryview) -> int:
    peer = socket.socket(fileno=fd)
    try:
        # The flag of one call; O_NONBLOCK would change the other end of a shared description.
        return peer.send(view, socket.MSG_DONTWAIT)
    finally:
        peer.detach()  # the descriptor is not ours to close
