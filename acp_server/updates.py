"""From an event of the session log to what a client sees: one function, live and in replay.

Live and replay cannot differ, because both come from here, but for two things: a live client is
not shown its own prompt, and one that has no longer the terminal of a command is shown the text.
"""

from __future__ import annotations

from collections.abc import Container
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import UNSET, Raw, UnsetType, structs

from acp_server import types as wire
from agent_core.background import SOURCE as BACKGROUND
from agent_core.content import (
    Block,
    Diff,
    Image,
    Link,
    Location,
    Resource,
    Terminal,
    Text,
    ToolContent,
    text_of,
)
from agent_core.events import (
    AssistantChunk,
    CompactionEnd,
    CompactionStart,
    ContextMessage,
    Event,
    FilesRestored,
    ModeChanged,
    ModelRetry,
    ModelUsage,
    PlanWritten,
    PromptBlocked,
    SteeringMessage,
    SubagentUsage,
    ToolCall,
    ToolProgress,
    ToolResult,
    ToolStart,
    UserMessage,
)
from agent_core.tools.pipeline import ToolExecution

__all__ = ["announced", "asked_call", "contents", "iso_time", "updates_for"]

MAX_TEXT_CHARS: Final = 16 * 1024
"""A longer text is sent in pieces; some clients cannot read a line beyond 64 KiB."""
MAX_RAW_INPUT_BYTES: Final = 16 * 1024
MAX_DIFF_CHARS: Final = 16 * 1024
"""A diff with longer sides is cut to the lines that changed, with this many around them."""
_CONTEXT_LINES: Final = 3


def updates_for(
    event: Event,
    *,
    is_replay: bool = False,
    knows_compaction: bool = False,
    terminals: Container[str] = (),
) -> list[wire.Update]:
    """Return what to tell the client about `event`, in order; often nothing.

    Args:
        event: Any event of the log.
        is_replay: Whether the client has not seen what the user said.
        knows_compaction: Whether the client asked for compaction updates; else it gets a line.
        terminals: The ids of those that the client has; it sees the text of others.
    """
    data = event.data
    match data:
        case AssistantChunk():
            return _chunks(data)
        case UserMessage(shown=tuple(shown)):
            return _user(data.id, shown) if is_replay else []
        case UserMessage() | SteeringMessage():
            return _user(data.id, data.content) if is_replay else []
        case ContextMessage(source=source) if source == BACKGROUND:
            return [_ended_in_background(text_of(data.content), event.seq)]
        case PromptBlocked():
            said = _user(data.id, data.content) if is_replay else []
            return [*said, *_agent_text(data.reason, f"{data.id}-answer")]
        case FilesRestored():
            return _agent_text(data.notice, f"restored-{event.seq}")
        case ToolCall():
            return [_announced(data)]
        case ToolStart():
            return [wire.ToolCallUpdate(data.call_id, status="in_progress")]
        case ToolProgress():
            return _progressed(data, terminals)
        case ToolResult():
            return [_finished(data, terminals)]
        case PlanWritten():
            entries = ((entry.content, entry.priority, entry.status) for entry in data.entries)
            return [wire.PlanUpdate(tuple(wire.PlanUpdateEntry(*entry) for entry in entries))]
        case ModelRetry():
            end = "" if data.message.endswith(("?", "!")) else "."
            text = f"{data.message.rstrip('.')}{end} Trying again in {data.delay_s:.1f} s.\n"
            message_id = f"retry-{event.seq}"
            return [wire.AgentThoughtChunk(wire.TextContent(text), message_id)]
        case ModeChanged():
            return [wire.CurrentModeUpdate(data.mode)]
        case ModelUsage(context_size=int(size)) | SubagentUsage(context_size=int(size)):
            cost = UNSET if data.cost is None else wire.Cost(data.cost, data.currency or "USD")
            return [wire.UsageUpdate(min(data.context_tokens, size), size, cost)]
        case CompactionStart() if knows_compaction:
            return [wire.CompactionUpdate(data.id, "in_progress")]
        case CompactionEnd() if knows_compaction:
            summary = (wire.TextContent(data.summary),) if data.summary else UNSET
            return [wire.CompactionUpdate(data.id, data.status, summary, data.error or UNSET)]
        case CompactionStart() | CompactionEnd():
            return _compaction_line(data, event.seq)
        case _:
            return []


def asked_call(execution: ToolExecution) -> wire.AskedToolCall:
    """Return the call as a permission question shows it.

    A subagent's is shown as the call by which its work was given away, with the names on the way.
    """
    agent, call_id, path = execution.agent, execution.call_id, [execution.view.title]
    if execution.delegation is not None:
        call_id = execution.delegation.call_id or call_id
        path.insert(0, execution.delegation.name)
    while agent.parent is not None and agent.delegation is not None:
        call_id = agent.delegation.call_id or f"{agent.id}_{call_id}"
        path.insert(0, agent.delegation.name)
        agent = agent.parent
    return wire.AskedToolCall(
        call_id,
        " › ".join(path),
        "pending" if len(path) == 1 else "in_progress",
        execution.tool.kind,
        execution.tool.name,
        _tool_content(execution.preview) if execution.preview else UNSET,
        _locations(execution.view.locations),
        _raw_input(execution.arguments),
    )


def announced(call: wire.AskedToolCall) -> wire.ToolCallStart:
    """Return the announcement of a call that nothing but a permission question is about."""
    return wire.ToolCallStart(
        call.tool_call_id,
        call.title,
        "pending",
        call.kind,
        call.name,
        call.locations,
        call.raw_input,
        call.content,
    )


def _ended_in_background(text: str, seq: int) -> wire.ToolCallStart:
    """Show the end of a subagent as a call of its own: the one that started it is long over."""
    title, _, said = text.partition("\n")
    content = _tool_content((Text(said),)) if said else UNSET
    return wire.ToolCallStart(
        f"ended-{seq}", title, "completed", "other", "agents", content=content
    )


def _compaction_line(data: CompactionStart | CompactionEnd, seq: int) -> list[wire.Update]:
    if isinstance(data, CompactionStart):
        text = "The conversation is being summarised to make room."
    elif data.status == "failed":
        text = f"It was not summarised: {data.error}"
    else:
        return []  # a cancel needs no words, and what follows shows that it worked
    return [wire.AgentThoughtChunk(wire.TextContent(f"{text}\n"), f"compaction-{seq}")]


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
    return [wire.UserMessageChunk(content, message_id) for content in contents(blocks)]


def contents(blocks: tuple[Block, ...]) -> list[wire.Content]:
    """Return what was said as a client sees it; long text is in pieces."""
    return [
        structs.replace(content, annotations=_json(block.annotations), meta=_json(block.meta))
        for block in blocks
        for content in _block(block)
    ]


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
            contents = wire.ResourceContents(
                block.uri,
                _or_unset(block.text),
                _or_unset(block.blob),
                _or_unset(block.mime_type),
                _json(block.contents_meta),
            )
            return [wire.ResourceContent(contents)]


def _json(text: str | None) -> Raw | UnsetType:
    return UNSET if text is None else Raw(text.encode())


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


def _progressed(data: ToolProgress, terminals: Container[str]) -> list[wire.Update]:
    content = _visible(data.content or (), terminals)
    is_said = data.content is not None and bool(content or not data.content)
    if data.title is None and not is_said:
        return []
    shown = _tool_content(content) if is_said else UNSET
    return [wire.ToolCallUpdate(data.call_id, title=_or_unset(data.title), content=shown)]


def _finished(data: ToolResult, terminals: Container[str]) -> wire.ToolCallUpdate:
    shown = _visible(data.content, terminals) or ((Text(data.output),) if data.output else ())
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


def _visible(
    content: tuple[ToolContent, ...], terminals: Container[str]
) -> tuple[ToolContent, ...]:
    return tuple(item for item in content if not isinstance(item, Terminal) or item.id in terminals)


def _tool_content(content: tuple[ToolContent, ...]) -> tuple[wire.ToolContent, ...]:
    return tuple(shown for item in content for shown in _tool_item(item))


def _tool_item(item: ToolContent) -> list[wire.ToolContent]:
    match item:
        case Text():
            return [wire.ToolContentBlock(_fenced(item.text))]
        case Diff():
            return [_diff(item)]
        case Terminal():
            return [wire.ToolContentTerminal(item.id)]
        case _:
            return [wire.ToolContentBlock(content) for content in _block(item)]


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


def iso_time(time_ms: int) -> str:
    """Return milliseconds since the epoch as ACP writes a time."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
