"""What each turn took, for the answers to the prompts in it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from acp_server import types as wire
from agent_core.content import Usage
from agent_core.events import (
    EventData,
    ModelUsage,
    PromptBlocked,
    SteeringMessage,
    SubagentUsage,
    TurnStart,
    UserMessage,
)

__all__ = ["Spending"]


class _Turn:
    """The tokens of one turn; `usage` is `None` while none were counted."""

    __slots__ = ("usage",)

    def __init__(self) -> None:
        self.usage: Usage | None = None


class Spending:
    """Follows a session's log. Tell it which prompts will be asked about."""

    def __init__(self) -> None:
        self._running = _Turn()
        self._turn_of: dict[str, _Turn] = {}

    def expect(self, prompt_id: str) -> None:
        """Keep what the turn of this prompt takes, until `take`."""
        self._turn_of[prompt_id] = _Turn()

    def count(self, data: EventData) -> None:
        """Take one more event into account."""
        match data:
            case TurnStart():
                self._running = _Turn()
            case UserMessage(id=id) | SteeringMessage(id=id) | PromptBlocked(id=id):
                if id in self._turn_of:
                    self._turn_of[id] = self._running
            case ModelUsage(usage=usage) | SubagentUsage(usage=usage):
                self._running.usage = (self._running.usage or Usage()) + usage
            case _:
                pass

    def take(self, prompt_id: str) -> wire.TurnUsage | UnsetType:
        """Return what the prompt's turn took, if anything was counted, and forget the prompt."""
        turn = self._turn_of.pop(prompt_id, None)
        if turn is None or turn.usage is None:
            return UNSET
        usage = turn.usage
        return wire.TurnUsage(
            usage.input_tokens + usage.output_tokens,
            usage.input_tokens,
            usage.output_tokens,
            usage.reasoning_tokens,
            usage.cached_tokens,
            usage.cache_write_tokens,
        )
