"""``session/prompt``: in the inbox before the next line is read, so that a cancel finds it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from acp_server import types as wire
from acp_server.blocks import blocks_from
from acp_server.connection import STEER_KEY
from acp_server.errors import INTERNAL_ERROR, INVALID_PARAMS, RpcError
from acp_server.peer import InFlight

if TYPE_CHECKING:
    from acp_server.connection import Connection


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
        raise RpcError(INTERNAL_ERROR, f"{most} prompts of this session are waiting already")
    is_steering = isinstance(params.meta, dict) and params.meta.get(STEER_KEY) is True
    prompt = session.submit(content, is_steering=is_steering)
    before, answered = session.in_turn(prompt, is_steering=is_steering)
    in_flight.cancel = lambda: session.withdraw(prompt)
    in_flight.after.append(answered.set)
    return session.answer_to(prompt, before)
