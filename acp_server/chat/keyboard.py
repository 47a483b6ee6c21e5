"""What a person types, read in the main thread for a loop that runs in another.

Only the main thread has a line editor that signals can interrupt, and only there do Python's signal
handlers run. A read that is no longer wanted is ended by a signal, too.
"""

from __future__ import annotations

import asyncio
import enum
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import anyio

from acp_server.chat.text import encodable

__all__ = ["Keyboard", "Typed"]

WAKE: Final = signal.SIGUSR1  # ends a read in the main thread
WAKE_INTERVAL_S: Final = 0.05


class Typed(enum.Enum):
    """What a person can give instead of a line."""

    END = "end of the input"
    INTERRUPT = "Ctrl-C"
    DISCARDED = "Ctrl-C, on a line that was not empty"


class _Woken(Exception):
    """Leaves the blocking read in the main thread."""

    def __init__(self, had_text: bool) -> None:
        super().__init__()
        self.had_text = had_text


class _Read:
    """One line wanted from the person."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.is_abandoned = False
        self.done = anyio.Event()
        self.typed: str | Typed = Typed.INTERRUPT


class Keyboard:
    """Reads lines and hears signals in the main thread, for a loop in another thread."""

    def __init__(self, is_interactive: bool) -> None:
        self.is_interactive: Final = is_interactive
        # Python's handlers run in the main thread, and a read that is about to block delays them.
        # What the interpreter writes here when a signal arrives is seen by the loop at once.
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._read_wanted: _Read | None = None
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._is_reading = False
        self._is_told_to_end = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_thread = threading.get_ident()

    # In the loop's thread.

    def attach(self) -> None:
        """Make the running loop the one that is told."""
        self._loop = asyncio.get_running_loop()

    async def read_line(self, marker: str) -> str | Typed:
        """Return the next line without its end.

        Cancellation: safe; a line that is being typed is thrown away. Concurrency: one task.
        """
        read = self._read_wanted = _Read(marker)
        self._reads.put(read)
        try:
            await read.done.wait()
        finally:
            self._read_wanted = None
            with anyio.CancelScope(shield=True):
                await self._abandon(read)
        return read.typed

    async def next_signal(self) -> int:
        """Return the number of the next signal, but for a Ctrl-C that ended a read.

        Cancellation: safe. Concurrency: one task.
        """
        while True:
            await anyio.wait_readable(self._ear)
            (number,) = self._ear.recv(1)
            read = self._read_wanted
            if number == signal.SIGINT and read is not None:
                await self._abandon(read)
                if isinstance(read.typed, str):  # the line was quicker
                    return number
            elif number != WAKE:
                return number

    async def _abandon(self, read: _Read) -> None:
        read.is_abandoned = True
        while not read.done.is_set():
            # Once is not enough: a signal just before the read blocks does not end it.
            signal.pthread_kill(self._main_thread, WAKE)
            with anyio.move_on_after(WAKE_INTERVAL_S):
                await read.done.wait()

    def remember(self, line: str) -> None:
        """Put a line into the editor's history. Not while a line is being read."""
        if self.is_interactive:
            import readline

            with suppress(UnicodeEncodeError):  # not in this locale
                readline.add_history(line)

    def forget_typed(self) -> None:
        """Drop what was typed ahead, so that it does not answer a question not seen yet."""
        if self.is_interactive:
            import termios

            with suppress(termios.error):  # the terminal is gone
                termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)

    # In the main thread.

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Hear signals in the block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, WAKE)
        before = {number: signal.signal(number, self._hear) for number in numbers}
        signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._ear.close()
            self._mouth.close()

    def serve(self) -> None:
        """Read the lines that are wanted until `close` is called."""
        while (read := self._reads.get()) is not None:
            self._read(read)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(read.done.set)

    def close(self) -> None:
        """Let `serve` return. May be called from any thread."""
        self._reads.put(None)

    def _read(self, read: _Read) -> None:
        try:
            try:
                self._is_reading = True
                if not read.is_abandoned:
                    read.typed = self._next_line(read.marker)
            finally:
                self._is_reading = False
        except _Woken as woken:
            read.typed = Typed.DISCARDED if woken.had_text else Typed.INTERRUPT
            self._leave_line()
        except (EOFError, OSError):  # OSError: the terminal is gone
            read.typed = Typed.END
            self._leave_line()

    def _next_line(self, marker: str) -> str:
        if self.is_interactive:
            return _to_unicode(input(encodable(sys.stdout, marker)))
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return line.decode("utf-8", "replace").rstrip("\r\n")

    def _has_text(self) -> bool:
        if not self.is_interactive:
            return False
        import readline

        return bool(readline.get_line_buffer())

    def _leave_line(self) -> None:
        if self.is_interactive:
            with suppress(OSError):  # the terminal is gone, and so is the line
                print(flush=True)  # noqa: T201 - a terminal client prints

    def _hear(self, number: int, frame: object) -> None:
        if number == WAKE and self._is_reading:
            self._is_reading = False
            raise _Woken(self._has_text())
        if number in (signal.SIGTERM, signal.SIGHUP):
            # The first is the loop's. It may hang on a terminal that takes nothing more.
            if self._is_told_to_end:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._is_told_to_end = True


def _to_unicode(line: str) -> str:
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
