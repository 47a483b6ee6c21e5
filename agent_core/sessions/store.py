"""The seam to where session logs are kept.

A store keeps headers and, for each session, a contiguous list of events. `append` only enqueues;
`flush` is the durability point the loop awaits at the end of a turn and before a tool that has side
effects. One contract suite (tests/agent_core/test_store_contract.py) runs against every store.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from agent_core.events import Event

__all__ = ["SessionHeader", "SessionPage", "SessionStore"]


class SessionHeader(Struct, frozen=True):
    """What is known of a session besides its events.

    `cwd` is absolute. Times are milliseconds since the epoch. `title` is `None` until the first
    prompt; until then the session can be loaded, but is not listed. A subagent's session has a
    `parent_id` and a `depth` of at least 1; it is loaded, but never listed. `owner` names whose it
    is where several share a store; empty for the person whose process it is.
    """

    id: str
    cwd: str
    created_ms: int
    updated_ms: int
    title: str | None = None
    parent_id: str | None = None
    depth: int = 0
    owner: str = ""


class SessionPage(Struct, frozen=True):
    """Some sessions, latest first. `next_cursor` is `None` on the last page."""

    sessions: tuple[SessionHeader, ...]
    next_cursor: str | None = None


class SessionStore(Protocol):
    """Keeps session logs.

    Cancellation: every coroutine here is safe to cancel; what was enqueued is still written.
    Concurrency: any number of tasks of one event loop.
    """

    async def create(self, header: SessionHeader) -> None:
        """Keep a new session without events.

        Raises:
            StoreError: The id exists, or the store failed.
        """
        ...

    def append(self, session_id: str, seq: int, time_ms: int, body: bytes) -> None:
        """Enqueue one encoded event. Never blocks; a failure shows in the next `flush`.

        An event is kept only behind its predecessor: a late append to a deleted session, or one
        that would leave a gap, is dropped.
        """
        ...

    def touch(self, session_id: str, updated_ms: int, title: str | None) -> None:
        """Enqueue the header's new time and, unless it has one, its title. Never blocks."""
        ...

    async def flush(self, session_id: str) -> None:
        """Wait until all that was appended to the session so far survives a power cut.

        Raises:
            StoreError: It could not be written (disk full, database locked). Nothing is lost: the
                events stay queued and the next flush tries again.
        """
        ...

    async def check(self, session_id: str) -> None:
        """Look whether what is appended to the session is still written.

        Raises:
            StoreError: It is not: another process went on with the session, or deleted it.
        """
        ...

    async def load(self, session_id: str) -> tuple[SessionHeader, list[Event]]:
        """Read a session with its events in order.

        Raises:
            SessionNotFound: There is none.
            SessionCorrupt: An event cannot be read, or the sequence has a gap.
        """
        ...

    async def header(self, session_id: str) -> SessionHeader:
        """Read what is known of a session besides its events.

        Raises:
            SessionNotFound: There is none.
        """
        ...

    async def list_sessions(
        self,
        *,
        cwd: str | None = None,
        owner: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> SessionPage:
        """List sessions that had a prompt, the latest first, ids breaking ties.

        Args:
            cwd: Only sessions with exactly this directory.
            owner: Only this one's sessions; `None` for everybody's.
            cursor: `next_cursor` of the page before.
            limit: Sessions on a page, at least 1.

        Raises:
            ValueError: The cursor is not one of ours.
        """
        ...

    async def delete(self, session_id: str) -> None:
        """Forget the session and its subagents' for good. Unknown ids are fine."""
        ...

    async def ping(self) -> None:
        """Raise `StoreError` unless the store can be read."""
        ...

    async def aclose(self) -> None:
        """Write everything and let go. Called once; nothing may be called afterwards."""
        ...
