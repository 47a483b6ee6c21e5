"""The messages of ACP v1 that we read and write, as msgspec Structs without behaviour.

What we read is strict about the fields we use and ignores all others. What we write leaves out
what is not set: some clients take an explicit null for a value.

Source: the published ACP v1 JSON schema.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

__all__ = [
    "AgentMessageChunk",
    "AgentThoughtChunk",
    "AskedToolCall",
    "AuthenticateParams",
    "AvailableCommand",
    "AvailableCommandsUpdate",
    "ContentBlock",
    "CurrentModeUpdate",
    "InitializeParams",
    "ListSessionsParams",
    "LoadSessionParams",
    "NewSessionParams",
    "PermissionAnswer",
    "PlanUpdate",
    "PromptParams",
    "SessionId",
    "SetModeParams",
    "TextContent",
    "ToolCallStart",
    "ToolCallUpdate",
    "ToolContentBlock",
    "ToolContentDiff",
    "Update",
    "UserMessageChunk",
]


class _In(Struct, rename="camel", frozen=True):
    pass


class _Out(Struct, rename="camel", frozen=True, omit_defaults=True):
    pass


# --- what a client sends --------------------------------------------------------------------


class InitializeParams(_In, frozen=True):
    """`client_capabilities` stays undecoded: garbage in it means "not offered", never an error."""

    protocol_version: int
    client_capabilities: Raw = Raw(b"{}")
    client_info: Raw = Raw(b"{}")


class AuthenticateParams(_In, frozen=True):
    method_id: str


class EnvVariable(_In, frozen=True):
    name: str
    value: str


class McpServer(_In, frozen=True):
    """Any of the three kinds; which fields a kind needs is checked by `problem`."""

    name: str
    type: Literal["stdio", "http", "sse"] = "stdio"
    command: str | None = None
    args: list[str] | None = None
    env: list[EnvVariable] | None = None
    url: str | None = None
    headers: list[EnvVariable] | None = None

    def problem(self) -> str | None:
        """Return what is missing, or `None`."""
        needed = "command" if self.type == "stdio" else "url"
        missing = getattr(self, needed) is None
        return f"MCP server {self.name!r} needs {needed!r}" if missing else None


class NewSessionParams(_In, frozen=True):
    cwd: str
    mcp_servers: list[McpServer] | None = None


class LoadSessionParams(_In, frozen=True):
    session_id: str
    cwd: str
    mcp_servers: list[McpServer] | None = None


class ListSessionsParams(_In, frozen=True):
    cwd: str | None = None
    cursor: str | None = None


class SetModeParams(_In, frozen=True):
    session_id: str
    mode_id: str


class SessionId(_In, frozen=True):
    session_id: str


class EmbeddedResource(_In, frozen=True):
    uri: str
    text: str | None = None
    blob: str | None = None
    mime_type: str | None = None


class _Block(Struct, rename="camel", frozen=True, tag_field="type"):
    pass


class TextBlock(_Block, frozen=True, tag="text"):
    text: str


class ImageBlock(_Block, frozen=True, tag="image"):
    data: str
    mime_type: str
    uri: str | None = None


class AudioBlock(_Block, frozen=True, tag="audio"):
    data: str
    mime_type: str


class LinkBlock(_Block, frozen=True, tag="resource_link"):
    uri: str
    name: str
    mime_type: str | None = None
    title: str | None = None
    description: str | None = None
    size: int | None = None


class ResourceBlock(_Block, frozen=True, tag="resource"):
    resource: EmbeddedResource


ContentBlock = TextBlock | ImageBlock | AudioBlock | LinkBlock | ResourceBlock


class PromptParams(_In, frozen=True):
    session_id: str
    prompt: list[ContentBlock]
    meta: dict[str, Any] | None = field(default=None, name="_meta")


class _PermissionOutcome(_In, frozen=True):
    outcome: Literal["selected", "cancelled"]
    option_id: str | None = None


class PermissionAnswer(_In, frozen=True):
    outcome: _PermissionOutcome


# --- what an agent sends --------------------------------------------------------------------


class TextContent(_Out, frozen=True, tag_field="type", tag="text"):
    text: str


class LinkContent(_Out, frozen=True, tag_field="type", tag="resource_link"):
    uri: str
    name: str
    mime_type: str | UnsetType = UNSET
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    size: int | UnsetType = UNSET


class ImageContent(_Out, frozen=True, tag_field="type", tag="image"):
    data: str
    mime_type: str
    uri: str | UnsetType = UNSET


class ResourceContents(_Out, frozen=True):
    uri: str
    text: str | UnsetType = UNSET
    blob: str | UnsetType = UNSET
    mime_type: str | UnsetType = UNSET


class ResourceContent(_Out, frozen=True, tag_field="type", tag="resource"):
    resource: ResourceContents


Content = TextContent | LinkContent | ImageContent | ResourceContent


class ToolContentBlock(_Out, frozen=True, tag_field="type", tag="content"):
    content: Content


class ToolContentDiff(_Out, frozen=True, tag_field="type", tag="diff"):
    path: str
    new_text: str
    old_text: str | UnsetType = UNSET


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


class ToolCallUpdate(_Update, frozen=True, tag="tool_call_update"):
    tool_call_id: str
    status: str | UnsetType = UNSET
    title: str | UnsetType = UNSET
    content: tuple[ToolContentBlock | ToolContentDiff, ...] | UnsetType = UNSET
    locations: tuple[Location, ...] | UnsetType = UNSET


class AskedToolCall(_Out, frozen=True):
    """The call a permission question is about: a tool call update that is not an update."""

    tool_call_id: str
    title: str
    status: str
    kind: str
    name: str
    content: tuple[ToolContentBlock | ToolContentDiff, ...] | UnsetType = UNSET
    locations: tuple[Location, ...] | UnsetType = UNSET
    raw_input: Raw | UnsetType = UNSET


class PlanUpdateEntry(_Out, frozen=True):
    content: str
    priority: str
    status: str


class PlanUpdate(_Update, frozen=True, tag="plan"):
    entries: tuple[PlanUpdateEntry, ...]


class CurrentModeUpdate(_Update, frozen=True, tag="current_mode_update"):
    current_mode_id: str


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
