"""Which client's session holds each agent: one at most, the latest that opened it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from acp_server.session import ClientSession

__all__ = ["Holders"]

MAX_UNSEEN: Final = 10_000


class Holders:
    """The holders of a process's agents."""

    def __init__(self) -> None:
        self._held: dict[str, ClientSession] = {}
        self._awaited: dict[str, anyio.Event] = {}
        self._unseen: dict[str, int] = {}

    def take(self, session: ClientSession) -> None:
        """Make `session` the holder of its agent; who was it before lets go first."""
        former = self._held.get(session.id)
        if former is not None and former is not session:
            former.hand_over()
        self._held[session.id] = session
        session.holders = self
        if (awaited := self._awaited.pop(session.id, None)) is not None:
            awaited.set()

    def holds(self, session: ClientSession) -> bool:
        """Return whether `session` is the holder."""
        return self._held.get(session.id) is session

    def is_free_for(self, session: ClientSession) -> bool:
        """Return whether nobody else than `session` holds its agent."""
        return self._held.get(session.id) in (None, session)

    @property
    def sessions(self) -> tuple[ClientSession, ...]:
        """All holders."""
        return tuple(self._held.values())

    def leave(self, session: ClientSession) -> None:
        """Have no holder any more, if it was `session`."""
        if self.holds(session):
            del self._held[session.id]

    async def other_than(self, session: ClientSession) -> ClientSession:
        """Wait until somebody else than `session` holds its agent.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        while (holder := self._held.get(session.id)) is None or holder is session:
            await self._awaited.setdefault(session.id, anyio.Event()).wait()
        return holder

    # --- what a lost client has not seen -----------------------------------------------------

    def note_unseen(self, session_id: str, seq: int) -> None:
        """Remember that from event `seq` on nobody was shown what happened."""
        self._unseen.setdefault(session_id, seq)
        while len(self._unseen) > MAX_UNSEEN:
            del self._unseen[next(iter(self._unseen))]

    def take_unseen(self, session_id: str) -> int | None:
        """Return from which event on nobody was shown anything, and forget it."""
        return self._unseen.pop(session_id, None)
