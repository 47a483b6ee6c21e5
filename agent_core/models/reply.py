"""Collecting a model's events into the message they add up to."""

from __future__ import annotations

from itertools import count

from msgspec import structs

from agent_core.content import Part, ReasoningPart, TextPart, ToolCallPart, Usage
from agent_core.models.adapter import (
    Finish,
    FinishReason,
    ModelEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    UsageReport,
)

__all__ = ["Reply", "number_calls"]


class Reply:
    """What one model call said so far. Feed it every event in order.

    Attributes:
        finish: Why the model stopped; `None` while it has not.
        usage: The latest token counts, `None` if it never reported any.
    """

    def __init__(self) -> None:
        self.finish: FinishReason | None = None
        self.usage: Usage | None = None
        self._runs: list[tuple[type[TextPart] | type[ReasoningPart], list[str]]] = []
        self._calls: dict[int, tuple[list[str], list[str]]] = {}

    def add(self, event: ModelEvent) -> None:
        """Take one more event into account."""
        match event:
            case TextDelta():
                self._say(TextPart, event.text)
            case ReasoningDelta():
                self._say(ReasoningPart, event.text)
            case ToolCallDelta():
                names, arguments = self._calls.setdefault(event.index, ([], []))
                names.append(event.name)
                arguments.append(event.arguments)
            case UsageReport():
                self.usage = event.usage
            case Finish():
                self.finish = event.reason
            case _:
                pass

    def _say(self, kind: type[TextPart] | type[ReasoningPart], text: str) -> None:
        if not self._runs or self._runs[-1][0] is not kind:
            self._runs.append((kind, []))
        self._runs[-1][1].append(text)

    def said(self) -> tuple[Part, ...]:
        """Return the text and reasoning that are not blank, in stream order."""
        joined = ((kind, "".join(pieces)) for kind, pieces in self._runs)
        return tuple(kind(text) for kind, text in joined if text.strip())

    def calls(self, prefix: str) -> tuple[ToolCallPart, ...]:
        """Return the tool calls in the model's order; ids are `prefix` and a number."""
        ordered = sorted(self._calls.items())
        return tuple(
            ToolCallPart(f"{prefix}_{number}", "".join(names), "".join(arguments))
            for number, (_index, (names, arguments)) in enumerate(ordered, start=1)
        )


def number_calls(content: tuple[Part, ...], prefix: str) -> tuple[Part, ...]:
    """Return `content` with the ids that `Reply.calls` gives, whatever its calls had before."""
    numbers = count(1)
    return tuple(
        structs.replace(part, id=f"{prefix}_{next(numbers)}")
        if isinstance(part, ToolCallPart)
        else part
        for part in content
    )
