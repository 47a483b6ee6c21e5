"""What one client may have at once. Whoever wants more is told, and loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from acp_server.errors import INTERNAL_ERROR, RpcError

if TYPE_CHECKING:
    from acp_server.config import NetworkConfig
    from acp_server.connection import Connection

__all__ = ["check_limits"]

_OPENS: Final = ("session/new", "session/load", "session/resume", "session/fork")
_IS_WORK: Final = (*_OPENS, "session/prompt")


def check_limits(
    method: str, connection: Connection, limits: NetworkConfig, *, is_draining: bool
) -> None:
    """Refuse a request that is too much.

    Raises:
        RpcError: Why.
    """
    if is_draining and method in _IS_WORK:
        raise RpcError(INTERNAL_ERROR, "The server is shutting down and takes no new work")
    if connection.peer.n_in_flight >= limits.max_requests:
        raise RpcError(INTERNAL_ERROR, f"{limits.max_requests} requests are being served already")
    if method in _OPENS and len(connection.sessions) >= limits.max_sessions:
        raise RpcError(
            INTERNAL_ERROR, f"{limits.max_sessions} sessions are open on this connection already"
        )
