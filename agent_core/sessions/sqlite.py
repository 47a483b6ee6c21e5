"""Session logs in one SQLite file, which several processes may share.

The event loop never waits for the disk: this side only puts things into the inbox of a thread,
`agent_core.sessions.sqlite_writer`, which owns the only connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from agent_core.errors import StoreError
from agent_core.events import Event
from agent_core.sessions.memory import position_of
from agent_core.sessions.sqlite_writer import Append, Request, Touch, Writer
from agent_core.sessions.store import SessionHeader, SessionPage

__all__ = ["SqliteStore"]

_T = TypeVar("_T")


class SqliteStore:
    """Keeps session logs in the SQLite file at `path`. See `SessionStore` for the contract.

    The file and its directory are made at the first use, readable for their owner only.

    Args:
        path: Absolute path of the file.
        busy_timeout_s: How long to wait for another process that is writing. At the end of a
            process it may come to twice as long, which has to fit into its time for stopping.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout_s: float = 3.0) -> None:
        self._writer = Writer(Path(path), busy_timeout_s)
        self._is_closed = False

    async def create(self, header: SessionHeader) -> None:
        """Keep a new session; forget those that never had a prompt and are older than 7 days."""
        await self._ask(partial(self._writer.create, header))

    def append(self, session_id: str, seq: int, time_ms: int, body: bytes) -> None:
        """Enqueue one encoded event."""
        self._writer.post(Append(session_id, seq, time_ms, body))

    def touch(self, session_id: str, updated_ms: int, title: str | None) -> None:
        """Enqueue the header's new time and title."""
        self._writer.post(Touch(session_id, updated_ms, title))

    async def flush(self, session_id: str) -> None:
        """Wait until all that was appended is committed and synced to the disk."""
        await self._ask(partial(self._writer.check, session_id), is_flush=True)

    async def check(self, session_id: str) -> None:
        """Write what was appended, without a sync, and look whether that was still possible.

        Where nobody else has the file there is nothing to look for.
        """
        if self._is_closed or not self._writer.is_ours_alone(session_id):
            await self._ask(partial(self._writer.check, session_id))

    async def load(self, session_id: str) -> tuple[SessionHeader, list[Event]]:
        """Read a session with its events in order."""
        return await self._ask(partial(self._writer.load, session_id))

    async def header(self, session_id: str) -> SessionHeader:
        """Read what is known of a session besides its events."""
        return await self._ask(partial(self._writer.header, session_id))

    async def list_sessions(
        self,
        *,
        cwd: str | None = None,
        owner: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> SessionPage:
        """Read one page of the sessions that had a prompt, the latest first."""
        before = position_of(cursor)
        return await self._ask(partial(self._writer.page, cwd, owner, before, limit))

    async def delete(self, session_id: str) -> None:
        """Forget the session for good."""
        await self._ask(partial(self._writer.delete, session_id))

    async def ping(self) -> None:
        """Raise `StoreError` unless the store can be read."""
        await self._ask(self._writer.ping)

    async def aclose(self) -> None:
        """Write everything, fold the write-ahead log into the file, end the thread.

        Raises:
            StoreError: Something could not be written and is lost now.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._writer.is_started:
            await self._answered(self._writer.close)
        self._writer.join()

    async def _ask(self, work: Callable[[], _T], *, is_flush: bool = False) -> _T:
        if self._is_closed:
            raise StoreError("the session store is closed")
        return await self._answered(work, is_flush=is_flush)

    async def _answered(self, work: Callable[[], _T], *, is_flush: bool = False) -> _T:
        request = Request(work, is_flush=is_flush)
        self._writer.post(request)
        await request.done.wait()
        if request.error is not None:
            raise request.error
        result: _T = request.result
        return result
