"""What the log means: the model's history and the session's present state, folded from events."""

from __future__ import annotations

from agent_core.content import PlanEntry, Text, text_of
from agent_core.events import (
    AssistantChunk,
    AssistantMessage,
    ContextMessage,
    Event,
    ModeChanged,
    PermissionDecided,
    PlanWritten,
    PromptBlocked,
    SteeringMessage,
    ToolCall,
    ToolResult,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from agent_core.models.adapter import AssistantTurn, Message, ToolTurn, UserTurn

__all__ = ["Projection"]

_TITLE_CHARS = 80


class Projection:
    """The state a log leads to. Feed it every event in order; read its attributes.

    Attributes:
        messages: The conversation as the next model request tells it.
        last_turn: Number of the latest turn, 0 before the first.
        open_turn: Whether that turn's `TurnEnd` is still owed.
        mode: The permission mode, `None` where the log does not say.
        plan: The latest plan.
        remembered: What "always" answers cover: ``{key: is it allowed}``.
        title: The first prompt's first line, cut to 80 characters; `None` before it.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.last_turn = 0
        self.open_turn = False
        self.mode: str | None = None
        self.plan: tuple[PlanEntry, ...] = ()
        self.remembered: dict[str, bool] = {}
        self.title: str | None = None
        self._tool_names: dict[str, str] = {}

    def apply(self, event: Event) -> None:
        """Take one more event into account."""
        data = event.data
        match data:
            case AssistantChunk():  # most of a log; the message that follows has it all
                pass
            case UserMessage():
                self.messages.append(UserTurn(data.content))
                self._name_after(text_of(data.content))
            case PromptBlocked():
                self._name_after(text_of(data.content))
            case SteeringMessage():
                self.messages.append(UserTurn(data.content))
            case ContextMessage():
                text = f"<context source={data.source!r}>\n{text_of(data.content)}\n</context>"
                self.messages.append(UserTurn((Text(text),)))
            case AssistantMessage():
                if data.content:
                    self.messages.append(AssistantTurn(data.content, data.interrupted))
            case ToolCall():
                self._tool_names[data.call_id] = data.name
            case ToolResult():
                name = self._tool_names.pop(data.call_id, "unknown")
                self.messages.append(ToolTurn(data.call_id, name, data.output, data.is_error))
            case TurnStart():
                self.last_turn, self.open_turn = data.turn, True
            case TurnEnd():
                self.open_turn = False
            case ModeChanged():
                self.mode = data.mode
            case PlanWritten():
                self.plan = data.entries
            case PermissionDecided():
                if data.remember is not None:
                    self.remembered[data.remember] = data.outcome == "allowed"
            case _:
                pass

    def _name_after(self, prompt: str) -> None:
        if self.title is None:
            first = next((line.strip() for line in prompt.splitlines() if line.strip()), "")
            cut = first if len(first) <= _TITLE_CHARS else first[: _TITLE_CHARS - 1] + "…"
            self.title = cut or "(no text)"
