"""Closing a log whose process died in a turn.

A real turn is never cut short: what was logged stays, and deterministic closers are added, the same
kinds that a cancel would have written, but with the outcome ``interrupted``, never ``aborted``.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_core.content import Part, ReasoningPart, TextPart, ToolCallPart
from agent_core.events import (
    AssistantChunk,
    AssistantMessage,
    CompactionEnd,
    CompactionStart,
    Event,
    EventData,
    Interrupted,
    StepEnd,
    StepStart,
    ToolCall,
    ToolResult,
    ToolStart,
    TurnEnd,
    TurnStart,
)

__all__ = ["closers_for", "merge_chunks"]

_NOT_STARTED = "The agent stopped before this call started; it can be made again."
_OUTCOME_UNKNOWN = (
    "The agent stopped while this call ran, so its outcome is unknown; verify before repeating it."
)


def closers_for(events: Sequence[Event]) -> list[EventData]:
    """Return what must be appended to `events` so that no turn is left open.

    Returns:
        Nothing for a balanced log; otherwise, in this order: the end of a compaction, the assistant
        text that had streamed, an error result for each call without one, the step's end, the
        turn's end.
    """
    start = next(
        (i for i in range(len(events) - 1, -1, -1) if isinstance(events[i].data, TurnStart)), None
    )
    if start is None:
        return []
    turn = 0
    step: int | None = None
    chunks: list[AssistantChunk] = []
    open_calls: dict[str, ToolCall] = {}
    promised: dict[str, ToolCallPart] = {}
    started: set[str] = set()
    compaction: str | None = None
    for event in events[start:]:
        match event.data:
            case AssistantChunk() as chunk:
                chunks.append(chunk)
            case TurnStart(turn=turn):
                pass
            case TurnEnd():
                return []
            case StepStart(step=step):
                chunks.clear()
            case StepEnd():
                step = None
                chunks.clear()
            case AssistantMessage(content=content):
                chunks.clear()
                promised = {part.id: part for part in content if isinstance(part, ToolCallPart)}
            case ToolCall(call_id=call_id) as call:
                promised.pop(call_id, None)
                open_calls[call_id] = call
            case ToolStart(call_id=call_id):
                started.add(call_id)
            case ToolResult(call_id=call_id):
                open_calls.pop(call_id, None)
            case CompactionStart(id=compaction):
                pass
            case CompactionEnd():
                compaction = None
    closers: list[EventData] = []
    if compaction is not None:
        closers.append(CompactionEnd(compaction, "cancelled"))
    if step is not None:
        if chunks and (parts := merge_chunks(chunks)):
            closers.append(AssistantMessage(turn, step, parts, interrupted=True))
        for call in open_calls.values():
            ran = call.call_id in started
            closers.append(
                ToolResult(
                    turn,
                    step,
                    call.call_id,
                    _OUTCOME_UNKNOWN if ran else _NOT_STARTED,
                    is_error=True,
                    code="TOOL_OUTCOME_UNKNOWN" if ran else "TOOL_NOT_STARTED",
                )
            )
        for part in promised.values():
            closers += (
                ToolCall(turn, step, part.id, part.name, part.arguments, title=part.name),
                ToolResult(
                    turn, step, part.id, _NOT_STARTED, is_error=True, code="TOOL_NOT_STARTED"
                ),
            )
        closers.append(StepEnd(turn, step))
    closers.append(TurnEnd(turn, Interrupted()))
    return closers


def merge_chunks(chunks: Sequence[AssistantChunk]) -> tuple[Part, ...]:
    """Join streamed chunks into parts, in stream order; nothing if they are blank."""
    parts: list[TextPart | ReasoningPart] = []
    pieces: list[str] = []
    for index, chunk in enumerate(chunks):
        pieces.append(chunk.text)
        if index + 1 == len(chunks) or chunks[index + 1].reasoning != chunk.reasoning:
            text = "".join(pieces)
            pieces.clear()
            if text.strip():
                parts.append(ReasoningPart(text) if chunk.reasoning else TextPart(text))
    return tuple(parts)
