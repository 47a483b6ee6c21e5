"""A client as one of its sessions sees it: the same peer, until the session lets go of it."""

from __future__ import annotations

from collections import deque
from typing import Protocol, runtime_checkable

import anyio

from acp_server.errors import PeerClosed
from acp_server.peer import Late, Peer
from agent_core.cancellation import AbortSignal

__all__ = ["Progress", "SessionPeer"]


@runtime_checkable
class Progress(Protocol):
    """An outbox that knows how much of what it was given has left this process."""

    def progress(self, session_id: str) -> tuple[int, int]:
        """Return how many messages of a session were given to it, and how many have left."""
        ...


class SessionPeer(Peer):
    """The peer of one session. After `release` it sends nothing, and whoever waits is told.

    Attributes:
        is_released: Whether the client is not this session's any more.
    """

    def __init__(self, peer: Peer, session_id: str) -> None:
        self.is_released = False
        self._peer = peer
        self._session_id = session_id
        self._progress = peer.outbox if isinstance(peer.outbox, Progress) else None
        self._calls: set[anyio.CancelScope] = set()
        self._on_their_way: deque[tuple[int, int]] = deque()  # (messages so far, seq)

    @property
    def awaits_client(self) -> bool:
        """Whether somebody waits for the client's answer, or for it to read."""
        return bool(self._calls)

    def release(self) -> None:
        """Let go of the client: what it was asked is withdrawn. Idempotent."""
        self.is_released = True
        for scope in tuple(self._calls):
            scope.cancel()

    # --- what a peer does --------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """See `Peer.send`."""
        if not self.is_released:
            self._peer.send(message)

    def notify(self, method: str, params: object) -> None:
        """See `Peer.notify`."""
        if not self.is_released:
            self._peer.notify(method, params)

    def post(self, method: str, params: object) -> None:
        """See `Peer.post`. What is sent after `release` undoes what was done before."""
        self._peer.post(method, params)

    @property
    def is_congested(self) -> bool:
        """See `Peer.is_congested`."""
        return not self.is_released and self._peer.is_congested

    async def drained(self) -> None:
        """See `Peer.drained`.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        if not self.is_released:
            with anyio.CancelScope() as scope:
                self._calls.add(scope)
                try:
                    await self._peer.drained()
                finally:
                    self._calls.discard(scope)

    async def call(
        self,
        method: str,
        params: object,
        *,
        signal: AbortSignal | None = None,
        late: Late | None = None,
    ) -> bytes:
        """See `Peer.call`.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        if self.is_released:
            if signal is not None:
                signal.raise_if_aborted()
            raise PeerClosed
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await self._peer.call(method, params, signal=signal, late=late)
            finally:
                self._calls.discard(scope)
        raise PeerClosed

    # --- what the client has not been sent ---------------------------------------------------

    def mark(self, seq: int) -> None:
        """Note that all that event `seq` leads to has been sent."""
        if self._progress is not None and not self.is_released:
            given, gone = self._progress.progress(self._session_id)
            self._on_their_way.append((given, seq))
            self._forget_up_to(gone)

    def first_unsent(self, n_events: int) -> int:
        """Return the first event of which not everything has left this process.

        Args:
            n_events: How many there are; the answer if nothing is on its way.
        """
        if self._progress is not None:
            self._forget_up_to(self._progress.progress(self._session_id)[1])
        return self._on_their_way[0][1] if self._on_their_way else n_events

    def _forget_up_to(self, gone: int) -> None:
        while self._on_their_way and self._on_their_way[0][0] <= gone:
            self._on_their_way.popleft()
