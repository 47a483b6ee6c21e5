"""An ordered queue of messages in front of one stream to a client."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import anyio.lowlevel

__all__ = ["HIGH_WATER_BYTES", "MessageQueue"]

HIGH_WATER_BYTES: Final = 1024 * 1024
"""Unread output at which producers are held back; they go on at a quarter of it."""
_BATCH: Final = 32
_BATCH_BYTES: Final = 64 * 1024


class MessageQueue:
    """Messages on their way out. `send` never blocks; `run` writes them, as fast as they are read.

    Args:
        limit_bytes: How much may be unread.
        on_flood: Called, once, when more is; nothing is queued any more then.
    """

    def __init__(self, limit_bytes: int, on_flood: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes
        self._on_flood = on_flood
        self._queue: deque[bytes] = deque()
        self._unread_bytes = 0
        self._n_given = 0
        self._n_gone = 0
        self._wake = anyio.Event()
        self._low: anyio.Event | None = None  # there while somebody waits for it
        self._is_lost = False

    @property
    def is_congested(self) -> bool:
        """Whether more than `HIGH_WATER_BYTES` are unread."""
        return self._unread_bytes > HIGH_WATER_BYTES and not self._is_lost

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._unread_bytes

    def progress(self, _session_id: str) -> tuple[int, int]:
        """Return how many messages were given to it, and how many have left."""
        return self._n_given, self._n_gone

    def send(self, message: bytes) -> None:
        """Queue one message. Dropped once the client is gone."""
        if self._is_lost:
            return
        self._queue.append(message)
        self._n_given += 1
        self._unread_bytes += len(message)
        self._wake.set()
        if self._unread_bytes > self._limit_bytes:
            self.lose()
            self._on_flood()

    def lose(self) -> None:
        """Forget what is queued: nobody will read it. Idempotent."""
        self._is_lost = True
        self._queue.clear()
        self._fall()

    async def drained(self) -> None:
        """Wait until little is unread, or the client is gone. Cancellation: safe."""
        if self._unread_bytes > HIGH_WATER_BYTES // 4 and not self._is_lost:
            await self._fallen()

    async def flushed(self) -> None:
        """Wait until all has left, or the client is gone. Cancellation: safe."""
        while self._unread_bytes and not self._is_lost:
            await self._fallen()

    async def run(
        self, write: Callable[[list[bytes]], Awaitable[None]], *, idle_s: float = float("inf")
    ) -> None:
        """Write what is queued, for ever.

        Cancellation: safe; the batch that is being written is lost. Concurrency: one at a time.

        Args:
            write: Called with some messages, with none after `idle_s`; returns when the next ones
                may come.
            idle_s: How long nothing may be said.
        """
        while True:
            while self._queue:
                batch, size = self._take()
                try:
                    await write(batch)
                    self._n_gone += len(batch)
                finally:
                    self._read(size)
                await anyio.lowlevel.checkpoint()  # others go on
            self._wake = anyio.Event()
            with anyio.move_on_after(idle_s) as idle:
                await self._wake.wait()
            if idle.cancelled_caught:
                await write([])

    def _take(self) -> tuple[list[bytes], int]:
        batch: list[bytes] = []
        size = 0
        while self._queue and size < _BATCH_BYTES and len(batch) < _BATCH:
            batch.append(self._queue.popleft())
            size += len(batch[-1])
        return batch, size

    def _read(self, size: int) -> None:
        self._unread_bytes -= size
        if self._unread_bytes <= HIGH_WATER_BYTES // 4:
            self._fall()

    async def _fallen(self) -> None:
        """Wait until little is unread, or nobody reads any more. Cancellation: safe."""
        self._low = self._low or anyio.Event()
        await self._low.wait()

    def _fall(self) -> None:
        if self._low is not None:
            self._low.set()
            self._low = None
