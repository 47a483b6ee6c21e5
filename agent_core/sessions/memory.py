"""Session logs in memory: for tests, and for servers that are to keep nothing.

Bodies are kept as bytes and decoded by `load`, exactly like a store on disk would do it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

import msgspec

from agent_core.errors import SessionCorrupt, SessionNotFound, StoreError
from agent_core.events import Event, decode
from agent_core.sessions.store import SessionHeader, SessionPage

__all__ = ["MemoryStore", "cursor_behind", "decode_events", "page_of", "position_of"]


@dataclass(slots=True)
class _Kept:
    header: SessionHeader
    events: list[tuple[int, bytes]] = field(default_factory=list)  # (time_ms, body)


class MemoryStore:
    """Keeps session logs as long as the process lives. See `SessionStore` for the contract."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Kept] = {}

    async def create(self, header: SessionHeader) -> None:
        """Keep a new session without events."""
        if header.id in self._sessions:
            raise StoreError(f"there is a session {header.id} already")
        self._sessions[header.id] = _Kept(header)

    def append(self, session_id: str, seq: int, time_ms: int, body: bytes) -> None:
        """Keep one event if it follows the one before."""
        kept = self._sessions.get(session_id)
        if kept is not None and seq == len(kept.events):
            kept.events.append((time_ms, body))

    def touch(self, session_id: str, updated_ms: int, title: str | None) -> None:
        """Set the header's time and, unless it has one, its title."""
        if kept := self._sessions.get(session_id):
            known = kept.header.title
            kept.header = msgspec.structs.replace(
                kept.header, updated_ms=updated_ms, title=title if known is None else known
            )

    async def flush(self, session_id: str) -> None:
        """Do nothing: all that can be kept is kept already."""

    async def check(self, session_id: str) -> None:
        """Do nothing: no other process has this memory."""

    async def load(self, session_id: str) -> tuple[SessionHeader, list[Event]]:
        """Return a session with its events in order."""
        kept = self._sessions.get(session_id)
        if kept is None:
            raise SessionNotFound(session_id)
        rows = [(seq, time_ms, body) for seq, (time_ms, body) in enumerate(kept.events)]
        return kept.header, decode_events(rows)

    async def header(self, session_id: str) -> SessionHeader:
        """Return what is known of a session besides its events."""
        kept = self._sessions.get(session_id)
        if kept is None:
            raise SessionNotFound(session_id)
        return kept.header

    async def list_sessions(
        self,
        *,
        cwd: str | None = None,
        owner: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> SessionPage:
        """Return one page of the sessions that had a prompt, the latest first."""
        before = position_of(cursor)
        headers = [
            header
            for header in (kept.header for kept in self._sessions.values())
            if header.title is not None
            and header.parent_id is None
            and cwd in (None, header.cwd)
            and owner in (None, header.owner)
            and (before is None or (header.updated_ms, header.id) < before)
        ]
        headers.sort(key=lambda header: (header.updated_ms, header.id), reverse=True)
        return page_of(headers, limit)

    async def delete(self, session_id: str) -> None:
        """Forget the session and its subagents' for good."""
        family = {session_id}
        while more := {
            kept.header.id
            for kept in self._sessions.values()
            if kept.header.parent_id in family and kept.header.id not in family
        }:
            family |= more
        for forgotten in family:
            self._sessions.pop(forgotten, None)

    async def ping(self) -> None:
        """Do nothing: memory can always be read."""

    async def aclose(self) -> None:
        """Forget everything."""
        self._sessions.clear()


def decode_events(rows: list[tuple[int, int, bytes]]) -> list[Event]:
    """Turn stored ``(seq, time_ms, body)`` rows, ordered by ``seq``, into events.

    Raises:
        SessionCorrupt: An event cannot be read, or the sequence has a gap.
    """
    events: list[Event] = []
    for index, (seq, time_ms, body) in enumerate(rows):
        if seq != index:
            raise SessionCorrupt(f"the session's log is damaged: event {index} is missing")
        try:
            events.append(Event(seq, time_ms, decode(body)))
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError):
            raise SessionCorrupt(
                f"the session's log is damaged: event {index} cannot be read"
            ) from None
    return events


def page_of(headers: list[SessionHeader], limit: int) -> SessionPage:
    """Cut the first page off `headers`, which holds more than `limit` if there are more."""
    page = tuple(headers[:limit])
    return SessionPage(page, cursor_behind(page[-1]) if len(headers) > limit else None)


def cursor_behind(header: SessionHeader) -> str:
    """Return the cursor of the page that starts behind `header`."""
    position = msgspec.json.encode((header.updated_ms, header.id))
    return base64.urlsafe_b64encode(position).rstrip(b"=").decode()


def position_of(cursor: str | None) -> tuple[int, str] | None:
    """Return where the page of `cursor` starts: behind ``(updated_ms, id)``.

    Raises:
        ValueError: The cursor is not one of ours.
    """
    if cursor is None:
        return None
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        position = base64.b64decode(padded, altchars=b"-_", validate=True)
        return msgspec.json.decode(position, type=tuple[int, str])
    except (ValueError, msgspec.MsgspecError):
        raise ValueError("the cursor is not one of this agent's") from None
