"""uvicorn's two protocols, with an end for peers that are there but do nothing, or too much.

Who made a mistake is told of it: the connection is open, and what still comes in is thrown away,
until the peer has had time to read. A socket that is closed over unread input takes back what was
written to it last.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

__all__ = ["PatientHttp", "WebSocket", "patient_http"]

ABORT_AFTER_S: Final = 5.0
"""So long a peer that is told to go may take what was written for it, and not any longer."""
LINGER_S: Final = 2.0
"""So long a peer that made a mistake may take to read what is said of it."""
_BAD_REQUEST: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\ncontent-length: 26\r\n\r\nThis is no HTTP request.\r\n"
)


class PatientHttp(H11Protocol):
    """HTTP/1.1, but nobody may send a request byte by byte for ever.

    Attributes:
        header_s: Seconds in which a request has to be there with all of its headers.
    """

    header_s: ClassVar[float] = 20.0
    _has_failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to look at the clock."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._last_cycle: object = None
        self._looks = self.loop.call_later(self.header_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more: nothing is kept of a connection that is over."""
        self._looks.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over; nothing keeps this half of it."""
        self._looks.cancel()
        super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        """Take what came, but nothing behind a mistake."""
        if not self._has_failed:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Say that this is no HTTP, unless something else is being said, and end the connection."""
        self._has_failed = True
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_BAD_REQUEST)
        _linger(self.loop, self.transport)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle
        if (cycle is None or cycle.response_complete) and cycle is self._last_cycle:
            self.transport.abort()
            return
        self._last_cycle = cycle
        self._looks = self.loop.call_later(self.header_s, self._look)


def patient_http(header_s: float) -> type[PatientHttp]:
    """Return the protocol with a limit of its own; uvicorn makes the instances."""
    return type("PatientHttp", (PatientHttp,), {"header_s": header_s})


class WebSocket(WebSocketsSansIOProtocol):
    """A WebSocket on which a hostile peer has no more than its share of memory and of time."""

    _owed = b""

    def data_received(self, data: bytes) -> None:
        """Take what came. The first piece is all of the upgrade: if it is no good, say so."""
        if self.conn.parser_exc is not None:
            return  # behind a mistake
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST)
            _linger(self.loop, self.transport)

    def handle_cont(self, event: Frame) -> None:
        """Take a fragment. It costs as much as it holds, also if it holds nothing."""
        whole: Any = self.frames[0]
        if isinstance(whole, bytes):
            whole = bytearray(whole)
            self.frames = [whole]
        whole += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping; the latest only, as long as the peer does not read our answers."""
        if self.close_sent:
            return
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._owed = b"".join(self.conn.data_to_send())

    def resume_writing(self) -> None:
        """Go on: what was written has been read."""
        owed, self._owed = self._owed, b""
        if owed and not self.close_sent:
            self.transport.write(owed)
        super().resume_writing()

    def handle_parser_exception(self) -> None:
        """Close over a mistake of the peer's, with the code that says which."""
        closing = self.conn.close_sent
        code, reason = (1006, "") if closing is None else (closing.code, closing.reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = _linger(self.loop, self.transport)

    def keepalive_timeout(self) -> None:
        """End the connection: its peer answered no ping, and unread output holds it no more."""
        super().keepalive_timeout()
        self.loop.call_later(ABORT_AFTER_S, self.transport.abort)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """See to it that a connection that was served is over before long."""
        super().on_task_complete(task)
        if not self.disconnected:
            self.loop.call_later(self.close_timeout + ABORT_AFTER_S, self.transport.abort)


def _linger(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> asyncio.TimerHandle:
    """Say no more, let the peer read, and end the connection, the sooner if the peer does."""
    if transport.can_write_eof():
        transport.write_eof()
    return loop.call_later(LINGER_S, transport.abort)
