"""Collecting a model's events into the message they add up to."""

from __future__ import annotations

from itertools import count

from msgspec import Struct, structs

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


class _Run(Struct):
    """Pieces of one kind, one behind the other; without a kind, the place of a tool call."""

    kind: type[TextPart] | type[ReasoningPart] | None
    pieces: list[str]
    origin: str = ""
    opaque: str = ""

    def part(self) -> Part | None:
        text = "".join(self.pieces)
        if self.kind is None or not (text.strip() or self.opaque):
            return None
        if self.kind is TextPart:
            return TextPart(text)
        return ReasoningPart(text, self.origin, self.opaque)


class Reply:
    """What one model call said so far. Feed it every event in order.

    Attributes:
        finish: Why the model stopped; `None` while it has not.
        usage: The latest token counts, `None` if it never reported any.
    """

    def __init__(self) -> None:
        self.finish: FinishReason | None = None
        self.usage: Usage | None = None
        self._runs: list[_Run] = []
        self._calls: dict[int, tuple[list[str], list[str]]] = {}

    def add(self, event: ModelEvent) -> None:
        """Take one more event into account."""
        match event:
            case TextDelta():
                self._run(TextPart).pieces.append(event.text)
            case ReasoningDelta():
                run = self._run(ReasoningPart)
                run.pieces.append(event.text)
                run.origin, run.opaque = event.origin, event.opaque
            case ToolCallDelta():
                if event.index not in self._calls:
                    self._calls[event.index] = ([], [])
                    self._runs.append(_Run(None, []))
                names, arguments = self._calls[event.index]
                names.append(event.name)
                arguments.append(event.arguments)
            case UsageReport():
                self.usage = event.usage
            case Finish():
                self.finish = event.reason
            case _:
                pass

    def _run(self, kind: type[TextPart] | type[ReasoningPart]) -> _Run:
        if not self._runs or self._runs[-1].kind is not kind or self._runs[-1].opaque:
            self._runs.append(_Run(kind, []))
        return self._runs[-1]

    def said(self) -> tuple[Part, ...]:
        """Return the text and reasoning that are not blank, in stream order."""
        return tuple(part for run in self._runs if (part := run.part()) is not None)

    def content(self, prefix: str) -> tuple[Part, ...]:
        """Return all of it in stream order, the tool calls in the model's own order.

        Their ids are `prefix` and a number.
        """
        calls = iter(
            ToolCallPart(f"{prefix}_{number}", "".join(names), "".join(arguments))
            for number, (_index, (names, arguments)) in enumerate(sorted(self._calls.items()), 1)
        )
        parts = (next(calls) if run.kind is None else run.part() for run in self._runs)
        return tuple(part for part in parts if part is not None)


def number_calls(content: tuple[Part, ...], prefix: str) -> tuple[Part, ...]:
    """Return `content` with the ids that `Reply.content` gives, whatever its calls had before."""
    numbers = count(1)
    return tuple(
        structs.replace(part, id=f"{prefix}_{next(numbers)}")
        if isinstance(part, ToolCallPart)
        else part
        for part in content
    )
