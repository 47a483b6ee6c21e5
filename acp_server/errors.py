"""Errors a peer may see, and the JSON-RPC codes they carry.

```text
RpcError          our answer to a request: a code, one sentence, and data
RemoteError       the peer's answer to a request of ours
PeerClosed        the connection ended before the answer came
```

Nothing else reaches the wire: every other exception becomes `INTERNAL_ERROR` with an id that
stands beside the traceback in the log.

Source: https://www.jsonrpc.org/specification#error_object and the error codes of ACP v1.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "AUTH_REQUIRED",
    "INTERNAL_ERROR",
    "INVALID_PARAMS",
    "INVALID_REQUEST",
    "METHOD_NOT_FOUND",
    "PARSE_ERROR",
    "REQUEST_CANCELLED",
    "RESOURCE_NOT_FOUND",
    "PeerClosed",
    "RemoteError",
    "RpcError",
    "unknown_session",
]

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
REQUEST_CANCELLED: Final = -32800
AUTH_REQUIRED: Final = -32000
RESOURCE_NOT_FOUND: Final = -32002


class RpcError(Exception):
    """A request is answered with an error. `message` is one sentence fit for people."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class RemoteError(Exception):
    """The peer answered a request of ours with an error; `reason` is from its data, or empty."""

    def __init__(self, code: int, message: str, reason: str = "") -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.reason = reason


class PeerClosed(Exception):
    """The connection ended before the answer came. Nothing is known about the request's fate."""


def unknown_session(session_id: str) -> RpcError:
    """Return the answer to whoever names a session that this connection does not have."""
    return RpcError(RESOURCE_NOT_FOUND, "Unknown session", {"sessionId": session_id})
