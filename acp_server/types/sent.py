"""What we send. What is not set is left out: some clients take an explicit null for a value."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

__all__ = [
    "AgentMessageChunk",
    "AgentThoughtChunk",
    "AskedToolCall",
    "AvailableCommand",
    "AvailableCommandsUpdate",
    "CommandInput",
    "CompactionUpdate",
    "ConfigChoice",
    "ConfigOption",
    "ConfigOptionUpdate",
    "Content",
    "Cost",
    "CurrentModeUpdate",
    "ImageContent",
    "LinkContent",
    "Location",
    "Notice",
    "PlanUpdate",
    "PlanUpdateEntry",
    "PromptResult",
    "ResourceContent",
    "ResourceContents",
    "SessionInfoUpdate",
    "SessionMessage",
    "SessionMessageChunk",
    "SubagentSessionCapabilities",
    "SubagentState",
    "SubagentUpdate",
    "TextContent",
    "ToolCallStart",
    "ToolCallUpdate",
    "ToolContent",
    "ToolContentBlock",
    "ToolContentDiff",
    "ToolContentSession",
    "ToolContentTerminal",
    "TurnUsage",
    "Update",
    "UsageUpdate",
    "UserMessageChunk",
    "encode_update",
]


class _Out(Struct, rename="camel", frozen=True, omit_defaults=True):
    pass


class _Content(_Out, frozen=True, tag_field="type", kw_only=True):
    annotations: Raw | UnsetType = UNSET
    meta: Raw | UnsetType = field(default=UNSET, name="_meta")


class TextContent(_Content, frozen=True, tag="text"):
    text: str


class LinkContent(_Content, frozen=True, tag="resource_link"):
    uri: str
    name: str
    mime_type: str | UnsetType = UNSET
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    size: int | UnsetType = UNSET


class ImageContent(_Content, frozen=True, tag="image"):
    data: str
    mime_type: str
    uri: str | UnsetType = UNSET


class ResourceContents(_Out, frozen=True):
    uri: str
    text: str | UnsetType = UNSET
    blob: str | UnsetType = UNSET
    mime_type: str | UnsetType = UNSET
    meta: Raw | UnsetType = field(default=UNSET, name="_meta")


class ResourceContent(_Content, frozen=True, tag="resource"):
    resource: ResourceContents


Content = TextContent | LinkContent | ImageContent | ResourceContent


class ToolContentBlock(_Out, frozen=True, tag_field="type", tag="content"):
    content: Content


class ToolContentDiff(_Out, frozen=True, tag_field="type", tag="diff"):
    path: str
    new_text: str
    old_text: str | UnsetType = UNSET


class ToolContentTerminal(_Out, frozen=True, tag_field="type", tag="terminal"):
    terminal_id: str


class ToolContentSession(_Out, frozen=True, tag_field="type", tag="session"):
    session_id: str


ToolContent = ToolContentBlock | ToolContentDiff | ToolContentTerminal | ToolContentSession


class Location(_Out, frozen=True):
    path: str
    line: int | UnsetType = UNSET


class _Update(Struct, rename="camel", frozen=True, omit_defaults=True, tag_field="sessionUpdate"):
    pass


class UserMessageChunk(_Update, frozen=True, tag="user_message_chunk"):
    content: Content
    message_id: str


class AgentMessageChunk(_Update, frozen=True, tag="agent_message_chunk"):
    content: Content
    message_id: str


class AgentThoughtChunk(_Update, frozen=True, tag="agent_thought_chunk"):
    content: Content
    message_id: str


class ToolCallStart(_Update, frozen=True, tag="tool_call"):
    tool_call_id: str
    title: str
    status: str
    kind: str
    name: str
    locations: tuple[Location, ...] | UnsetType = UNSET
    raw_input: Raw | UnsetType = UNSET
    content: tuple[ToolContent, ...] | UnsetType = UNSET


class ToolCallUpdate(_Update, frozen=True, tag="tool_call_update"):
    tool_call_id: str
    status: str | UnsetType = UNSET
    title: str | UnsetType = UNSET
    content: tuple[ToolContent, ...] | UnsetType = UNSET
    locations: tuple[Location, ...] | UnsetType = UNSET


class AskedToolCall(_Out, frozen=True):
    """The call a permission question is about: a tool call update that is not an update."""

    tool_call_id: str
    title: str
    status: str
    kind: str
    name: str
    content: tuple[ToolContent, ...] | UnsetType = UNSET
    locations: tuple[Location, ...] | UnsetType = UNSET
    raw_input: Raw | UnsetType = UNSET


class PlanUpdateEntry(_Out, frozen=True):
    content: str
    priority: str
    status: str


class PlanUpdate(_Update, frozen=True, tag="plan"):
    entries: tuple[PlanUpdateEntry, ...]


class SessionInfoUpdate(_Update, frozen=True, tag="session_info_update"):
    title: str
    updated_at: str


class CurrentModeUpdate(_Update, frozen=True, tag="current_mode_update"):
    current_mode_id: str


class ConfigChoice(_Out, frozen=True):
    value: str
    name: str
    description: str | UnsetType = UNSET


class ConfigOption(_Out, frozen=True, tag_field="type", tag="select"):
    id: str
    name: str
    category: str
    current_value: str
    options: tuple[ConfigChoice, ...]


class ConfigOptionUpdate(_Update, frozen=True, tag="config_option_update"):
    config_options: tuple[ConfigOption, ...]


class Cost(_Out, frozen=True):
    amount: float
    currency: str


class UsageUpdate(_Update, frozen=True, tag="usage_update"):
    used: int
    size: int
    cost: Cost | UnsetType = UNSET


class TurnUsage(_Out, frozen=True):
    """What one turn took. Input has what came from the cache in it, output has the thinking."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    thought_tokens: int | UnsetType = UNSET
    cached_read_tokens: int | UnsetType = UNSET
    cached_write_tokens: int | UnsetType = UNSET


class PromptResult(_Out, frozen=True):
    stop_reason: str
    usage: TurnUsage | UnsetType = UNSET


class Notice(_Update, frozen=True, tag="notice"):
    severity: str
    title: str
    description: str | UnsetType = UNSET


class CompactionUpdate(_Update, frozen=True, tag="compaction_update"):
    compaction_id: str
    status: str
    summary: tuple[TextContent, ...] | UnsetType = UNSET
    error: str | UnsetType = UNSET


class SubagentSessionCapabilities(_Out, frozen=True):
    cancel: Raw


class SubagentState(_Out, frozen=True):
    state: str
    stop_reason: str | UnsetType = UNSET


class SubagentUpdate(_Update, frozen=True, tag="subagent_update"):
    session_id: str
    title: str | UnsetType = UNSET
    capabilities: SubagentSessionCapabilities | UnsetType = UNSET
    state: SubagentState | UnsetType = UNSET
    cwd: str | UnsetType = UNSET


class SessionMessage(_Update, frozen=True, tag="session_message"):
    message_id: str
    sender_session_id: str
    recipient_session_id: str
    content: tuple[Content, ...]


class SessionMessageChunk(_Update, frozen=True, tag="session_message_chunk"):
    message_id: str
    content: Content


class CommandInput(_Out, frozen=True):
    hint: str


class AvailableCommand(_Out, frozen=True):
    name: str
    description: str
    input: CommandInput | UnsetType = UNSET


class AvailableCommandsUpdate(_Update, frozen=True, tag="available_commands_update"):
    available_commands: tuple[AvailableCommand, ...]


Update = (
    UserMessageChunk
    | AgentMessageChunk
    | AgentThoughtChunk
    | ToolCallStart
    | ToolCallUpdate
    | PlanUpdate
    | CurrentModeUpdate
    | SessionInfoUpdate
    | ConfigOptionUpdate
    | UsageUpdate
    | CompactionUpdate
    | Notice
    | SubagentUpdate
    | SessionMessage
    | SessionMessageChunk
    | AvailableCommandsUpdate
)


class _UpdateParams(_Out, frozen=True):
    session_id: str
    update: Update


class _UpdateNotification(Struct, frozen=True):
    jsonrpc: str
    method: str
    params: _UpdateParams


_encode = msgspec.json.Encoder().encode


def encode_update(session_id: str, update: Update) -> bytes:
    """Return the whole ``session/update`` notification, ready to send."""
    params = _UpdateParams(session_id, update)
    return _encode(_UpdateNotification("2.0", "session/update", params))
