"""``session/prompt``: in the inbox before the next line is read, so that a cancel finds it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from acp_server import types as wire
from acp_server.blocks import blocks_from
from acp_server.connection import STEER_KEY
from acp_server.errors import INVALID_PARAMS, INVALID_REQUEST, RpcError
from acp_server.peer import InFlight

if TYPE_CHECKING:
    from acp_server.connection import Connection

TRACE_KEYS: Final = ("traceparent", "tracestate")
MAX_TRACE_CHARS: Final = 512


def prompt(
    connection: Connection, params: wire.PromptParams, in_flight: InFlight
) -> Coroutine[Any, Any, Any]:
    """Take a prompt; the answer comes at the end of its turn."""
    session = connection.session(params.session_id)
    try:
        content = blocks_from(params.prompt)
    except ValueError as exc:
        raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": str(exc)}) from None
    most = connection.guest.max_prompts
    if most and session.n_unanswered >= most:
        message = f"{most} prompts of this session are waiting already"
        raise RpcError(INVALID_REQUEST, message, {"reason": "busy"})
    meta = params.meta if isinstance(params.meta, dict) else {}
    is_steering = meta.get(STEER_KEY) is True
    prompt = session.submit(content, is_steering=is_steering, trace=_trace_in(meta))
    before, answered = session.in_turn(prompt, is_steering=is_steering)
    in_flight.cancel = lambda: session.withdraw(prompt)

    def after() -> None:
        answered.set()
        if (stopping_s := session.stopping_s(prompt)) is not None:
            connection.guest.on_stopped(stopping_s)

    in_flight.after.append(after)
    return session.answer_to(prompt, before)


def _trace_in(meta: dict[str, Any]) -> dict[str, str]:
    """Return what a client says of the trace that its prompt is part of."""
    said = {key: meta.get(key) for key in TRACE_KEYS}
    return {
        key: value
        for key, value in said.items()
        if isinstance(value, str) and len(value) <= MAX_TRACE_CHARS
    }
