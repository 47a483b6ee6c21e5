"""What clients send. Strict about the fields we use, lenient where the protocol says so."""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import UNSET, Raw, Struct, UnsetType, field

__all__ = [
    "Annotations",
    "AudioBlock",
    "AuthenticateParams",
    "ContentBlock",
    "CreatedTerminal",
    "EmbeddedResource",
    "EnvVariable",
    "FileText",
    "ImageBlock",
    "InitializeParams",
    "Lenient",
    "LinkBlock",
    "ListSessionsParams",
    "LoadSessionParams",
    "LogoutParams",
    "McpServer",
    "NewSessionParams",
    "PermissionAnswer",
    "PromptParams",
    "ResourceBlock",
    "ResumeSessionParams",
    "SessionId",
    "SetConfigOptionParams",
    "SetModeParams",
    "TerminalExit",
    "TerminalOutput",
    "TextBlock",
]


Lenient = Raw | UnsetType
"""An optional field whose malformed value counts as absent; decoded where it is used."""


class _In(Struct, rename="camel", frozen=True):
    pass


class InitializeParams(_In, frozen=True):
    """`client_capabilities` stays undecoded: garbage in it means "not offered", never an error.

    `protocol_version` may be written as 1.0, which is the same number in JSON.
    """

    protocol_version: int | float
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
