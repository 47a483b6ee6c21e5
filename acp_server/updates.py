"""From an event of the session log to what a client sees: one function, live and in replay.

Live and replay cannot differ, because both come from here; the one thing a live client is not
shown is its own prompt.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from acp_server import types as wire
from agent_core.content import (
    Block,
    Diff,
    Image,
    Link,
    Location,
    Resource,
    Text,
    ToolContent,
)
from agent_core.events import (
    AssistantChunk,
    Event,
    ModeChanged,
    ModelRetry,
    PlanWritten,
    PromptBlocked,
    SteeringMessage,
    ToolCall,
    ToolProgress,
    ToolResult,
    ToolStart,
    UserMessage,
)
from agent_core.tools.pipeline import ToolExecution

__all__ = ["asked_call", "updates_for"]

MAX_TEXT_CHARS: Final = 16 * 1024
"""A longer text is sent in pieces; some clients cannot read a line beyond 64 KiB."""
MAX_RAW_INPUT_BYTES: Final = 16 * 1024
MAX_DIFF_CHARS: Final = 16 * 1024
"""A diff with longer sides is cut to the lines that changed, with this many around them."""
_CONTEXT_LINES: Final = 3


def updates_for(event: Event, *, is_replay: bool = False) -> list[wire.Update]:
    """Return what to tell the client about `event`, in order; often nothing.

    Args:
        event: Any event of the log.
        is_replay: Whether the client has not seen what the user said.
    """
    data = event.data
    match data:
        case AssistantChunk():
            return _chunks(data)
        case UserMessage() | SteeringMessage():
            return _user(data.id, data.content) if is_replay else []
        case PromptBlocked():
            said = _user(data.id, data.content) if is_replay else []
            return [*said, *_agent_text(data.reason, f"{data.id}-answer")]
        case ToolCall():
            return [_announced(data)]
        case ToolStart():
            return [wire.ToolCallUpdate(data.call_id, status="in_progress")]
        case ToolProgress():
            content = UNSET if data.content is None else _tool_content(data.content)
            title = UNSET if data.title is None else data.title
            return [wire.ToolCallUpdate(data.call_id, title=title, content=content)]
        case ToolResult():
            return [_finished(data)]
        case PlanWritten():
            entries = ((entry.content, entry.priority, entry.status) for entry in data.entries)
            return [wire.PlanUpdate(tuple(wire.PlanUpdateEntry(*entry) for entry in entries))]
        case ModelRetry():
            text = f"{data.message.rstrip('.')}. Trying again in {data.delay_s:.1f} s.\n"
            message_id = f"retry-{event.seq}"
            return [wire.AgentThoughtChunk(wire.TextContent(text), message_id)]
        case ModeChanged():
            return [wire.CurrentModeUpdate(data.mode)]
        case _:
            return []


def asked_call(execution: ToolExecution) -> wire.AskedToolCall:
    """Return the call as a permission question shows it."""
    return wire.AskedToolCall(
        execution.call_id,
        execution.view.title,
        "pending",
        execution.tool.kind,
        execution.tool.name,
        _tool_content(execution.preview) if execution.preview else UNSET,
        _locations(execution.view.locations),
        _raw_input(execution.arguments),
    )


def _raw_input(arguments: str) -> Raw | UnsetType:
    """Return a call's arguments as JSON to show, unless they are none or too long."""
    try:
        if len(arguments) <= MAX_RAW_INPUT_BYTES:
            msgspec.json.decode(arguments)
            return Raw(msgspec.json.format(arguments, indent=-1).encode())
    except (msgspec.DecodeError, RecursionError):
        pass  # the model wrote something that is not JSON; the call's result says so
    return UNSET


def _chunks(data: AssistantChunk) -> list[wire.Update]:
    if data.reasoning:
        message_id = f"turn-{data.turn}-step-{data.step}-thought"
        return [wire.AgentThoughtChunk(text, message_id) for text in _pieces(data.text)]
    return _agent_text(data.text, f"turn-{data.turn}-step-{data.step}")


def _agent_text(text: str, message_id: str) -> list[wire.Update]:
    return [wire.AgentMessageChunk(piece, message_id) for piece in _pieces(text)]


def _pieces(text: str) -> list[wire.TextContent]:
    starts = range(0, len(text), MAX_TEXT_CHARS)
    return [wire.TextContent(text[start : start + MAX_TEXT_CHARS]) for start in starts]


def _user(message_id: str, blocks: tuple[Block, ...]) -> list[wire.Update]:
    contents = (content for block in blocks for content in _block(block))
    return [wire.UserMessageChunk(content, message_id) for content in contents]


def _block(block: Block) -> list[wire.Content]:
    match block:
        case Text():
            return list(_pieces(block.text))
        case Image():
            return [wire.ImageContent(block.data, block.mime_type, _or_unset(block.uri))]
        case Link():
            return [
                wire.LinkContent(
                    block.uri,
                    block.name,
                    _or_unset(block.mime_type),
                    _or_unset(block.title),
                    _or_unset(block.description),
                    UNSET if block.size_bytes is None else block.size_bytes,
                )
            ]
        case Resource():
            text, blob = _or_unset(block.text), _or_unset(block.blob)
            contents = wire.ResourceContents(block.uri, text, blob, _or_unset(block.mime_type))
            return [wire.ResourceContent(contents)]


def _announced(data: ToolCall) -> wire.ToolCallStart:
    return wire.ToolCallStart(
        data.call_id,
        data.title,
        "pending",
        data.kind,
        data.name,
        _locations(data.locations),
        _raw_input(data.arguments),
    )


def _finished(data: ToolResult) -> wire.ToolCallUpdate:
    shown = data.content or ((Text(data.output),) if data.output else ())
    return wire.ToolCallUpdate(
        data.call_id,
        status="failed" if data.is_error else "completed",
        title=_or_unset(data.title),
        content=_tool_content(shown),
        locations=UNSET if data.locations is None else _locations(data.locations),
    )


def _locations(locations: tuple[Location, ...]) -> tuple[wire.Location, ...] | UnsetType:
    if not locations:
        return UNSET
    return tuple(
        wire.Location(place.path, UNSET if place.line is None else place.line)
        for place in locations
    )


def _tool_content(
    content: tuple[ToolContent, ...],
) -> tuple[wire.ToolContentBlock | wire.ToolContentDiff, ...]:
    return tuple(
        _diff(item) if isinstance(item, Diff) else wire.ToolContentBlock(_fenced(item.text))
        for item in content
    )


def _fenced(text: str) -> wire.TextContent:
    """Editors render this as Markdown, which would join the lines of a command's output."""
    if "\n" not in text.strip("\n"):
        return wire.TextContent(text)
    fence = "```"
    while fence in text:
        fence += "`"
    return wire.TextContent(f"{fence}\n{text.rstrip()}\n{fence}")


def _diff(diff: Diff) -> wire.ToolContentDiff:
    old, new = diff.old_text, diff.new_text
    if old is not None and max(len(old), len(new)) > MAX_DIFF_CHARS:
        old, new = _changed_lines(old, new)
    return wire.ToolContentDiff(diff.path, new, _or_unset(old))


def _changed_lines(old: str, new: str) -> tuple[str, str]:
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    shorter = min(len(before), len(after))
    head = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    most = shorter - head
    tail = next((i for i in range(most) if before[-1 - i] != after[-1 - i]), most)
    first, last = max(0, head - _CONTEXT_LINES), max(0, tail - _CONTEXT_LINES)
    return (
        "".join(before[first : len(before) - last]),
        "".join(after[first : len(after) - last]),
    )


def _or_unset(value: str | None) -> str | UnsetType:
    return UNSET if value is None else value
