"""The messages of ACP v1 that we read and write, as msgspec Structs without behaviour.

What we read is strict about the fields we use and ignores all others. What we write leaves out
what is not set: some clients take an explicit null for a value.

Source: the published ACP v1 JSON schema.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

__all__ = [
    "AgentMessageChunk",
    "AgentThoughtChunk",
    "AskedToolCall",
    "AuthenticateParams",
    "AvailableCommand",
    "AvailableCommandsUpdate",
    "CompactionUpdate",
    "ConfigChoice",
    "ConfigOption",
    "ConfigOptionUpdate",
    "ContentBlock",
    "Cost",
    "CreatedTerminal",
    "CurrentModeUpdate",
    "FileText",
    "InitializeParams",
    "ListSessionsParams",
    "LoadSessionParams",
    "LogoutParams",
    "McpServer",
    "NewSessionParams",
    "Notice",
    "PermissionAnswer",
    "PlanUpdate",
    "PromptParams",
    "PromptResult",
    "ResumeSessionParams",
    "SessionId",
    "SessionInfoUpdate",
    "SetConfigOptionParams",
    "SetModeParams",
    "TerminalExit",
    "TerminalOutput",
    "TextContent",
    "ToolCallStart",
    "ToolCallUpdate",
    "ToolContent",
    "ToolContentBlock",
    "ToolContentDiff",
    "ToolContentTerminal",
    "TurnUsage",
    "Update",
    "UsageUpdate",
    "UserMessageChunk",
]


Lenient = Raw | UnsetType
"""An optional field whose malformed value counts as absent; decoded where it is used."""


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


class LogoutParams(_In, frozen=True):
    pass


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
        """Return what is missing or cannot be, or `None`."""
        if not self.name.strip():
            return "an MCP server in mcpServers has no name"
        at_fault = self._command_problem() if self.type == "stdio" else self._address_problem()
        return None if at_fault is None else f"MCP server {self.name!r} {at_fault}"

    def _command_problem(self) -> str | None:
        if not self.command:
            return "needs 'command'"
        names = [variable.name for variable in self.env or ()]
        if any(not name or "=" in name for name in names):
            return "has a variable in 'env' whose name cannot be one"
        values = [variable.value for variable in self.env or ()]
        if any("\0" in text for text in (self.command, *(self.args or ()), *names, *values)):
            return "has a NUL character in what starts it"
        return None

    def _address_problem(self) -> str | None:
        if self.url is None:
            return "needs 'url'"
        if not _is_web_address(self.url):
            return "needs a 'url' that begins with http:// or https:// and names a host"
        for header in self.headers or ():
            if not header.name or not all(_is_of_a_name(c) for c in header.name):
                return "has a header whose name cannot be one"
            if not all(c.isprintable() or c == "\t" for c in header.value):
                return f"has a header {header.name!r} with characters that no header can have"
        return None


_IN_NAMES: Final = "!#$%&'*+-.^_`|~"  # RFC 9110, section 5.6.2


def _is_of_a_name(c: str) -> bool:
    return (c.isascii() and c.isalnum()) or c in _IN_NAMES


def _is_web_address(url: str) -> bool:
    from urllib.parse import urlsplit  # most clients name no server, and all wait for this module

    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for what is no port
    except ValueError:
        return False
    is_clean = url.isprintable() and " " not in url
    return is_clean and parts.scheme in ("http", "https") and bool(parts.hostname)


class NewSessionParams(_In, frozen=True):
    cwd: str
    mcp_servers: list[McpServer] | None = None
    additional_directories: list[str] | None = None


class LoadSessionParams(NewSessionParams, frozen=True, kw_only=True):
    session_id: str


class ResumeSessionParams(LoadSessionParams, frozen=True):
    """Also those of a fork."""


class ListSessionsParams(_In, frozen=True):
    cwd: str | None = None
    cursor: str | None = None


class SetConfigOptionParams(_In, frozen=True):
    """`value` is an id for every option of ours; anything else is none of its choices."""

    session_id: str
    config_id: str
    value: str | bool


class SetModeParams(_In, frozen=True):
    session_id: str
    mode_id: str


class SessionId(_In, frozen=True):
    session_id: str


class Annotations(_In, frozen=True):
    audience: Lenient = UNSET
    last_modified: Lenient = UNSET
    priority: Lenient = UNSET
    meta: Lenient = field(default=UNSET, name="_meta")


class EmbeddedResource(_In, frozen=True):
    uri: str
    text: str | None = None
    blob: str | None = None
    mime_type: Lenient = UNSET
    meta: Lenient = field(default=UNSET, name="_meta")


class _Block(Struct, rename="camel", frozen=True, tag_field="type", kw_only=True):
    annotations: Lenient = UNSET
    meta: Lenient = field(default=UNSET, name="_meta")


class TextBlock(_Block, frozen=True, tag="text"):
    text: str


class ImageBlock(_Block, frozen=True, tag="image"):
    data: str
    mime_type: str
    uri: Lenient = UNSET


class AudioBlock(_Block, frozen=True, tag="audio"):
    data: str
    mime_type: str


class LinkBlock(_Block, frozen=True, tag="resource_link"):
    uri: str
    name: str
    mime_type: Lenient = UNSET
    title: Lenient = UNSET
    description: Lenient = UNSET
    size: Lenient = UNSET


class ResourceBlock(_Block, frozen=True, tag="resource"):
    resource: EmbeddedResource


ContentBlock = TextBlock | ImageBlock | AudioBlock | LinkBlock | ResourceBlock


class PromptParams(_In, frozen=True):
    session_id: str
    prompt: list[ContentBlock]
    meta: Any = field(default=None, name="_meta")


class _PermissionOutcome(_In, frozen=True):
    outcome: Literal["selected", "cancelled"]
    option_id: str | None = None


class PermissionAnswer(_In, frozen=True):
    outcome: _PermissionOutcome


class FileText(_In, frozen=True):
    content: str


class CreatedTerminal(_In, frozen=True):
    terminal_id: str


class TerminalOutput(_In, frozen=True):
    output: str
    truncated: bool = False


class TerminalExit(_In, frozen=True):
    """Either or neither: some clients do not know how a command ended.

    What is no number, or no text, counts as absent; it is looked at where it is used.
    """

    exit_code: Any = None
    signal: Any = None


# --- what an agent sends --------------------------------------------------------------------


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


ToolContent = ToolContentBlock | ToolContentDiff | ToolContentTerminal


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
