"""The socket we listen on, and how many of those it accepts may be open at once.

Every client needs a file descriptor, and so does every command that a turn runs. Whoever opens
connections without end gets no more than their share: the rest of the descriptors is kept for the
work of those who are in.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from acp_server.config import ConfigError
from agent_core.logs import get_logger

__all__ = ["FULL", "Listener", "bound", "room_for"]

GONE_AFTER_MS: Final = 60_000
"""A peer that acknowledges nothing for so long is gone, whatever it said before."""
KEPT_FILES: Final = 512
"""Descriptors, at most, that connections leave for sessions, commands and the store."""
TURNED_AWAY_AT_ONCE: Final = 64
"""So many may be turned away before somebody else gets a turn."""
FULL: Final = "The server has as many connections as it takes."
_FULL: Final = (
    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    f"connection: close\r\ncontent-length: {len(FULL) + 1}\r\n\r\n{FULL}\n"
).encode()

log = get_logger(__name__)


class _Accepted(socket.socket):
    """A socket that tells when it is closed."""

    on_closed: Callable[[], None] | None = None

    def close(self) -> None:
        """Close it, and tell; the second time is of no matter."""
        super().close()
        on_closed, self.on_closed = self.on_closed, None
        if on_closed is not None:
            on_closed()


class Listener(socket.socket):
    """A socket that accepts so many connections, and turns the others away.

    Attributes:
        max_open: How many may be open at once.
        is_plain: Whether HTTP without TLS is spoken; only then can the others be told why.
        n_open: How many are.
    """

    max_open = 1
    is_plain = True
    n_open = 0
    _is_full = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection there is room for.

        Raises:
            BlockingIOError: There is none, or others have to have a turn first.
        """
        for _ in range(TURNED_AWAY_AT_ONCE):
            connection, address = super().accept()
            number = connection.detach()
            accepted = _Accepted(self.family, self.type, self.proto, fileno=number)
            if self.n_open < self.max_open:
                self.n_open += 1
                accepted.on_closed = self._note_closed
                return accepted, address
            self._turn_away(accepted)
        raise BlockingIOError

    def _turn_away(self, accepted: socket.socket) -> None:
        if not self._is_full:
            self._is_full = True
            log.warning("connections_turned_away", open=self.n_open)
        with accepted, suppress(OSError):
            accepted.setblocking(False)
            if self.is_plain:
                accepted.send(_FULL)
                accepted.shutdown(socket.SHUT_WR)

    def _note_closed(self) -> None:
        self.n_open -= 1
        self._is_full = False


def room_for(n_clients: int) -> int:
    """Return how many connections may be open, once the process may have enough descriptors.

    Args:
        n_clients: How many clients there may be. One by HTTP has a connection for each stream that
            it reads, and some for what it posts.
    """
    wanted = 4 * n_clients + KEPT_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):  # macOS has a limit below the one it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
    room = max(1, files - min(KEPT_FILES, files // 2))
    if room < n_clients:
        log.warning("few_file_descriptors", limit=soft, connections=room)
    return room


@contextmanager
def bound(host: str, port: int) -> Iterator[Listener]:
    """Bind, but do not listen yet.

    Raises:
        ConfigError: It is no address of this computer, or it is taken.
    """
    try:
        family, kind, number, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = Listener(family, kind, number)
    except OSError as exc:
        raise ConfigError(f"{host} is no address: {exc.strerror}.") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets have it, too
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_MS)
        try:
            listener.bind(address)
        except OSError as exc:
            raise ConfigError(f"Cannot listen on {host}:{port}: {exc.strerror}.") from None
        yield listener
