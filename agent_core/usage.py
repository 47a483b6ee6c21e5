"""How full a context is, and what has been spent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agent_core.content import Image, Resource, Usage
from agent_core.events import ModelUsage, SubagentUsage
from agent_core.models.adapter import Message, ModelInfo, ToolTurn
from agent_core.sessions.projection import Projection

__all__ = [
    "CHARS_PER_TOKEN",
    "context_tokens",
    "rough_tokens",
    "subagent_usage",
    "usage_event",
]

CHARS_PER_TOKEN: Final = 4  # the usual rule of thumb for English
_IMAGE_TOKENS: Final = 1_500  # what a large one takes with most providers


def usage_event(
    state: Projection,
    info: ModelInfo,
    usage: Usage,
    *,
    turn: int,
    step: int,
    context: int | None = None,
) -> ModelUsage:
    """Return the event that says what a model call took.

    Args:
        state: The session's, before the event.
        info: The model that was called.
        usage: What its provider counted.
        turn: The turn's number.
        step: The step's.
        context: How full the context is now; `None` for what the call itself took.
    """
    cost, currency = state.cost, state.currency
    if info.price is not None and currency in (None, info.price.currency):
        cost = (cost or 0.0) + info.price.of(usage)
        currency = info.price.currency
    used = usage.input_tokens + usage.output_tokens if context is None else context
    return ModelUsage(turn, step, info.name, usage, used, info.context_tokens, cost, currency)


def subagent_usage(
    state: Projection,
    info: ModelInfo,
    run_id: str,
    usage: Usage,
    cost: float | None,
    currency: str | None,
) -> SubagentUsage:
    """Return the event that says what a subagent took.

    Args:
        state: That of the session it worked for, before the event.
        info: That session's model.
        run_id: The subagent's.
        usage: Its tokens, and those of all below it.
        cost: What they cost, in `currency`; `None` where no price is known.
        currency: The session's is kept if it has another one, and so is its cost.
    """
    total, kept = state.cost, state.currency
    if cost is not None and kept in (None, currency):
        total, kept = (total or 0.0) + cost, currency
    used = state.counted_tokens
    return SubagentUsage(run_id, usage, used, info.context_tokens, total, kept)


def context_tokens(state: Projection) -> int:
    """Return how many tokens the history takes: as counted, and a guess at what came since."""
    return state.counted_tokens + rough_tokens(state.messages[state.counted_messages :])


def rough_tokens(messages: Iterable[Message]) -> int:
    """Guess how many tokens `messages` take."""
    return sum(_chars(message) for message in messages) // CHARS_PER_TOKEN


def _chars(message: Message) -> int:
    if isinstance(message, ToolTurn):
        return len(message.output)
    chars = 0
    for part in message.content:
        if isinstance(part, Image):
            chars += _IMAGE_TOKENS * CHARS_PER_TOKEN
        elif isinstance(part, Resource):
            chars += len(part.text or part.blob or "")
        else:
            chars += len(getattr(part, "text", "") or getattr(part, "arguments", ""))
    return chars
