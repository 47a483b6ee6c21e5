"""Asking the client to do something for a tool: whatever goes wrong is the tool's failure."""

from __future__ import annotations

from typing import Final, TypeVar

import anyio
import msgspec

from acp_server.errors import RESOURCE_NOT_FOUND, PeerClosed, RemoteError
from acp_server.peer import Late, Peer
from agent_core.cancellation import AbortSignal
from agent_core.errors import ToolError
from agent_core.text import printable, shortened

__all__ = ["ANSWER_LIMIT_S", "call_client"]

ANSWER_LIMIT_S: Final = 60.0
"""What a client has for anything that it can do at once."""
_MAX_MESSAGE_CHARS: Final = 500

T = TypeVar("T")


async def call_client(
    peer: Peer,
    method: str,
    params: object,
    answer: type[T],
    *,
    signal: AbortSignal | None,
    limit_s: float | None = None,
    late: Late | None = None,
) -> T:
    """Send a request for a tool and return the client's answer.

    Cancellation: safe, through `signal` too; see `Peer.call`. Concurrency: any number of tasks.

    Args:
        peer: The client.
        method: Of the request.
        params: Of the request.
        answer: What the result has to be.
        signal: The turn's; `None` for what has to be done although it fired.
        limit_s: How long to wait; `None` for `ANSWER_LIMIT_S`, infinity for any time.
        late: See `Peer.call`.

    Raises:
        ToolError: There is no answer (``CLIENT_GONE``, ``CLIENT_TIMEOUT``), it makes no sense
            (``CLIENT_MALFORMED``), or it is an error (``NOT_FOUND``, ``CLIENT_ERROR``).
        TurnAborted: The signal fired.
    """
    if limit_s is None:
        limit_s = ANSWER_LIMIT_S
    try:
        with anyio.fail_after(limit_s):
            raw = await peer.call(method, params, signal=signal, late=late)
        # Some clients write an object without fields as null.
        return msgspec.json.decode(b"{}" if raw == b"null" else raw, type=answer)
    except RemoteError as exc:
        code = "NOT_FOUND" if exc.code == RESOURCE_NOT_FOUND else "CLIENT_ERROR"
        message = f"the client refused {method}: {_on_one_line(exc.message)}"
        raise ToolError(message, code=code) from None
    except PeerClosed:
        raise ToolError(
            f"the client went away before it answered {method}", code="CLIENT_GONE"
        ) from None
    except TimeoutError:
        raise ToolError(
            f"the client did not answer {method} within {limit_s:g} s", code="CLIENT_TIMEOUT"
        ) from None
    except (msgspec.MsgspecError, RecursionError):
        raise ToolError(
            f"the client's answer to {method} is malformed", code="CLIENT_MALFORMED"
        ) from None


def _on_one_line(message: str) -> str:
    """Return what the client says as words for the model, or say that it says nothing."""
    line = " ".join(printable(message, " ").split())
    return shortened(line, _MAX_MESSAGE_CHARS) or "it does not say why"
