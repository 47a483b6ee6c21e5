"""uvicorn's two protocols, with an end for clients that are there but do nothing."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

__all__ = ["PatientHttp", "WebSocket"]

REQUEST_LIMIT_S: Final = 20.0
"""Within this time a request has to be there with all of its headers."""
ABORT_AFTER_S: Final = 5.0
"""So long a peer that answers no ping may take what was written for it, and not any longer."""


class PatientHttp(H11Protocol):
    """HTTP/1.1, but nobody may send a request byte by byte for ever."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to look at the clock."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._last_cycle: object = None
        self.loop.call_later(REQUEST_LIMIT_S, self._look)

    def _look(self) -> None:
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return  # over, or a WebSocket by now
        cycle: Any = self.cycle
        if (cycle is None or cycle.response_complete) and cycle is self._last_cycle:
            self.transport.abort()
            return
        self._last_cycle = cycle
        self.loop.call_later(REQUEST_LIMIT_S, self._look)


class WebSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose peer, once it answers no ping, is gone: unread output holds it no more."""

    def keepalive_timeout(self) -> None:
        """End the connection."""
        super().keepalive_timeout()
        self.loop.call_later(ABORT_AFTER_S, self.transport.abort)
