"""What the log means: the model's history and the session's present state, folded from events."""

from __future__ import annotations

from agent_core.content import Block, PlanEntry, Text, text_of
from agent_core.events import (
    AssistantChunk,
    AssistantMessage,
    CompactionEnd,
    ContextMessage,
    EffortChanged,
    Event,
    ModeChanged,
    ModelChanged,
    ModelUsage,
    PermissionDecided,
    PlanWritten,
    PromptBlocked,
    Refused,
    SteeringMessage,
    SubagentUsage,
    ToolCall,
    ToolResult,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from agent_core.models.adapter import AssistantTurn, Message, ToolTurn, UserTurn
from agent_core.text import shortened

__all__ = ["Projection"]

_TITLE_CHARS = 80


class Projection:
    """The state a log leads to. Feed it every event in order; read its attributes.

    Attributes:
        messages: The conversation as the next model request tells it.
        last_turn: Number of the latest turn, 0 before the first.
        open_turn: Whether that turn's `TurnEnd` is still owed.
        mode: The permission mode, `None` where the log does not say.
        model: The name of the chosen model, `None` where the log does not say.
        effort: How hard it is to think, `None` where the log does not say.
        counted_tokens: What the latest model call and its answer took of the context.
        counted_messages: How many of `messages` they had.
        summary: What the latest compaction left, the first of `messages`; `None` before it.
        cost: What the session cost so far, in `currency`; `None` where no price was known.
        plan: The latest plan.
        remembered: What "always" answers cover: ``{key: is it allowed}``.
        title: The first prompt's first line, cut to 80 characters; `None` before it.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.last_turn = 0
        self.open_turn = False
        self.mode: str | None = None
        self.model: str | None = None
        self.effort: str | None = None
        self.counted_tokens = 0
        self.counted_messages = 0
        self.cost: float | None = None
        self.currency: str | None = None
        self.summary: Message | None = None
        self.plan: tuple[PlanEntry, ...] = ()
        self.remembered: dict[str, bool] = {}
        self.title: str | None = None
        self._tool_names: dict[str, str] = {}
        self._n_before_turn = 0
        self._said_in_turn: list[Message] = []  # by people; no compaction takes it away

    def apply(self, event: Event) -> None:
        """Take one more event into account."""
        data = event.data
        match data:
            case AssistantChunk():  # most of a log; the message that follows has it all
                pass
            case UserMessage():
                self._hear(data.content)
                self._name_after(text_of(data.content if data.shown is None else data.shown))
            case PromptBlocked():
                self._name_after(text_of(data.content))
            case SteeringMessage():
                self._hear(data.content)
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
                self._n_before_turn = len(self.messages)
                self._said_in_turn.clear()
            case TurnEnd(outcome=outcome):
                self.open_turn = False
                self._said_in_turn.clear()
                if isinstance(outcome, Refused):  # as ACP has it: the next prompt begins without
                    del self.messages[self._n_before_turn :]
                    self.counted_messages = min(self.counted_messages, self._n_before_turn)
            case ModelUsage():
                self.counted_tokens = data.context_tokens
                self.counted_messages = len(self.messages)
                self.cost, self.currency = data.cost, data.currency
            case SubagentUsage():
                self.cost, self.currency = data.cost, data.currency
            case CompactionEnd(status="completed", summary=summary):
                self.messages[:] = self.compacted(summary)
                self.summary = self.messages[0]
                self._n_before_turn = 1
                self.counted_tokens = self.counted_messages = 0
            case ModeChanged():
                self.mode = data.mode
            case ModelChanged():
                self.model = data.model
            case EffortChanged():
                self.effort = data.effort
            case PlanWritten():
                self.plan = data.entries
            case PermissionDecided():
                if data.remember is not None:
                    self.remembered[data.remember] = data.outcome == "allowed"
            case _:
                pass

    def compacted(self, summary: str) -> tuple[Message, ...]:
        """Return what a completed compaction makes of `messages`.

        What people said in the turn that runs stays as it is, behind the summary.
        """
        text = f'<summary of="earlier">\n{summary}\n</summary>'
        if self._said_in_turn:  # or it would look as if nothing had been done about it yet
            text += "\nIt includes what was already done about the request that follows."
        return (UserTurn((Text(text),)), *self._said_in_turn)

    @property
    def n_to_compact(self) -> int:
        """How many of `messages` a compaction would do away with, an earlier summary aside."""
        return len(self.messages) - len(self._said_in_turn) - (self.summary is not None)

    def _hear(self, content: tuple[Block, ...]) -> None:
        self.messages.append(UserTurn(content))
        self._said_in_turn.append(self.messages[-1])

    def _name_after(self, prompt: str) -> None:
        if self.title is None:
            first = next((line.strip() for line in prompt.splitlines() if line.strip()), "")
            self.title = shortened(first, _TITLE_CHARS) or "(no text)"
