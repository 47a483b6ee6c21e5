"""A server's tools as ours, and what they answer as output for the model and content for people.

Whatever a server lists is its own, possibly broken, word: what no provider would take is left out,
because one bad schema makes a provider refuse the whole request.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Final, Protocol

import anyio
import msgspec

from agent_core.cancellation import AbortSignal
from agent_core.content import Image, Link, Resource, Text, ToolContent, ToolKind
from agent_core.errors import ToolError
from agent_core.mcp.servers import Progress
from agent_core.models.adapter import ToolSpec
from agent_core.text import printable, shortened
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["McpTool", "Problem", "ToolCaller", "make_tools", "output_from"]

MAX_NAME_CHARS: Final = 64
"""What every provider takes, of the characters A-Z, a-z, 0-9, _ and -."""
MAX_TOOLS: Final = 256
MAX_SCHEMA_BYTES: Final = 32 * 1024
MAX_SCHEMA_DEPTH: Final = 32
MAX_DESCRIPTION_CHARS: Final = 4096
# As much as of a command's output: how it began, and above all how it ended.
HEAD_CHARS: Final = 8 * 1024
TAIL_CHARS: Final = 24 * 1024
MAX_SHOWN_CHARS: Final = 1024 * 1024
"""Base64 characters of images and the like that a result may show to people."""
MAX_ITEMS: Final = 64
_TITLE_CHARS: Final = 100
_PROGRESS_PAUSE_S: Final = 0.25

Problem = str
"""Why a tool is left out, in words."""


class ToolCaller(Protocol):
    """A server's connection, as its tools see it."""

    @property
    def name(self) -> str:
        """The server's name."""
        ...

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        *,
        signal: AbortSignal,
        on_progress: Progress,
    ) -> dict[str, Any]:
        """See `agent_core.mcp.client.Client.call`."""
        ...


class McpTool(Tool):
    """A tool of an MCP server. Made by `make_tools`, a class for each."""

    kind: ClassVar[ToolKind] = "other"
    schema: ClassVar[Mapping[str, Any]]
    title: ClassVar[str]
    remote_name: ClassVar[str]

    def __init__(self, server: ToolCaller) -> None:
        self._server = server

    def spec(self) -> ToolSpec:
        """Return the tool as the server describes it."""
        return ToolSpec(self.name, self.description, self.schema)

    def parse(self, arguments: str) -> dict[str, Any]:
        """Decode the arguments; whether they fit is for the server to say.

        Raises:
            ToolError: They are no JSON object.
        """
        try:
            return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise ToolError(
                f"the arguments of {self.name} are wrong: {exc}", code="BAD_ARGUMENTS"
            ) from None

    def view(self, args: dict[str, Any], roots: Roots) -> ToolView:
        """Show the tool's title, and whose it is."""
        return ToolView(f"{self.title} ({_line(self._server.name)})")

    def remember_key(self, args: dict[str, Any]) -> tuple[str, str]:
        """Cover every call of this tool."""
        words = f"{_line(self.remote_name)} of {_line(self._server.name)}"
        return f"mcp:{self._server.name}:{self.remote_name}", words

    async def run(self, args: dict[str, Any], context: ToolContext) -> ToolOutput:
        """Call it. An abort is told to the server, which has 2 s to say how the call ended.

        Raises:
            ToolError: The server refused, or is gone.
        """
        result = await self._server.call(
            self.remote_name, args, signal=context.signal, on_progress=_reporter(context)
        )
        return output_from(result)


def make_tools(
    server: ToolCaller, listed: Collection[Any], taken: Collection[str]
) -> tuple[dict[str, Tool], dict[str, Problem]]:
    """Make tools of what a server listed.

    Args:
        server: What they call.
        listed: The members of its list, whatever they are.
        taken: Names that are in use.

    Returns:
        The tools by their names for the model, and by the server's names why others are left out.
    """
    tools: dict[str, Tool] = {}
    left_out: dict[str, Problem] = {}
    seen: set[str] = set()
    for number, item in enumerate(listed, 1):
        fields: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
        name = fields.get("name")
        if not isinstance(name, str) or not name:
            left_out[f"number {number}"] = "it has no name"
        elif name in seen:
            left_out[name] = "another one has this name"
        elif len(tools) >= MAX_TOOLS:
            left_out[name] = f"these are more than {MAX_TOOLS}"
        elif (problem := _schema_problem(fields.get("inputSchema"))) is not None:
            left_out[name] = problem
        else:
            seen.add(name)
            tool = _make_tool(server, name, fields, {*taken, *tools})
            tools[tool.name] = tool
    return tools, left_out


def _make_tool(
    server: ToolCaller, name: str, fields: Mapping[str, Any], taken: Collection[str]
) -> Tool:
    annotations = fields.get("annotations")
    hints: Mapping[str, Any] = annotations if isinstance(annotations, Mapping) else {}
    is_read_only = hints.get("readOnlyHint") is True
    title = next(
        (t for t in (fields.get("title"), hints.get("title")) if isinstance(t, str) and t), name
    )
    description = fields.get("description")
    effect: Effect = "read" if is_read_only else "execute"
    attributes = {
        "name": _offered_name(server.name, name, taken),
        "description": description[:MAX_DESCRIPTION_CHARS] if isinstance(description, str) else "",
        "schema": {"properties": {}, **fields["inputSchema"]},
        "title": _line(title),
        "remote_name": name,
        "effect": effect,
        "is_parallel": is_read_only,
    }
    made: McpTool = type("McpTool", (McpTool,), attributes)(server)
    return made


def _offered_name(server: str, tool: str, taken: Collection[str]) -> str:
    """Return a name that every provider takes; the same one each time the server is listed."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", f"mcp__{server}__{tool}")
    if len(name) <= MAX_NAME_CHARS and name not in taken:
        return name
    mark = hashlib.sha256(f"{server}\0{tool}".encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME_CHARS - 9]}_{mark}"


def _line(text: str) -> str:
    """Return `text` on one line that is not too long for a title."""
    return shortened(" ".join(printable(text, " ").split()), _TITLE_CHARS)


# --- schemas --------------------------------------------------------------------------------

_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAPS_OF_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


def _schema_problem(schema: object) -> Problem | None:
    """Return why providers would refuse `schema`, or `None`."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return "its schema is not that of an object"
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        return f"its schema is larger than {MAX_SCHEMA_BYTES // 1024} KiB"
    return None if _is_schema(schema, MAX_SCHEMA_DEPTH) else "its schema is no JSON schema"


def _is_schema(schema: object, depth: int) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, Mapping) or not depth:
        return False
    types = schema.get("type", "object")
    required = schema.get("required", [])
    options = schema.get("enum", [])
    inner: list[object] = [schema[key] for key in _SCHEMAS if key in schema]
    for key in _MAPS_OF_SCHEMAS:
        members = schema.get(key, {})
        if not isinstance(members, Mapping):
            return False
        inner += members.values()
    for key in _LISTS_OF_SCHEMAS:
        members = schema.get(key, [])
        if not isinstance(members, list):
            return False
        inner += members
    return (
        all(name in _TYPES for name in (types if isinstance(types, list) else [types]))
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
        and isinstance(options, list)
        and all(_is_schema(member, depth - 1) for member in inner)
    )


# --- results --------------------------------------------------------------------------------


def output_from(result: Mapping[str, Any]) -> ToolOutput:
    """Return what a call's result says, bounded like any tool's."""
    items = result.get("content")
    blocks = items if isinstance(items, list) else []
    room = _Room(MAX_SHOWN_CHARS)
    said: list[str] = []
    shown: list[ToolContent] = []
    for block in blocks[:MAX_ITEMS]:
        words, content = _block(block if isinstance(block, Mapping) else {}, room)
        said.append(words)
        shown.append(content)
    if len(blocks) > MAX_ITEMS:
        said.append(f"[… {len(blocks) - MAX_ITEMS} more parts left out …]")
    if not blocks and result.get("structuredContent") is not None:
        said.append(msgspec.json.encode(result["structuredContent"]).decode())
    output = _cut("\n".join(said)) or "(no output)"
    is_plain = all(isinstance(content, Text) for content in shown)
    is_error = result.get("isError") is True
    return ToolOutput(
        output,
        content=() if is_plain else tuple(shown),
        is_error=is_error,
        code="MCP_TOOL_ERROR" if is_error else None,
    )


class _Room:
    """How many more characters of images and the like may be shown."""

    def __init__(self, n_chars: int) -> None:
        self._left = n_chars

    def takes(self, data: str) -> bool:
        """Take `data`, if there is room for it."""
        if len(data) > self._left:
            return False
        self._left -= len(data)
        return True


def _block(block: Mapping[str, Any], room: _Room) -> tuple[str, ToolContent]:
    """Return what the model is told of one content block, and what people are shown."""
    kind, mime = block.get("type"), _string(block, "mimeType")
    if kind == "text":
        text = _string(block, "text")
        return text, Text(_cut(text))
    if kind in ("image", "audio"):
        data = _string(block, "data")
        words = f"[{kind} {mime}, {_size(data)}]"
        if kind == "image" and data and room.takes(data):
            return f"{words[:-1]}, shown to the user]", Image(data, mime or "image/png")
        return words, Text(words)
    if kind == "resource_link":
        uri, name = _string(block, "uri"), _string(block, "name")
        description = _string(block, "description")
        words = f"[link {uri} {name}]" + (f" {description}" if description else "")
        return words, Link(uri, name or uri, mime or None, _string(block, "title") or None)
    if kind == "resource":
        return _resource(block.get("resource"), room)
    words = f"[a part of the unknown type {str(kind)[:40]!r}]"
    return words, Text(words)


def _resource(resource: object, room: _Room) -> tuple[str, ToolContent]:
    fields: Mapping[str, Any] = resource if isinstance(resource, Mapping) else {}
    uri, mime, text = _string(fields, "uri"), _string(fields, "mimeType"), fields.get("text")
    if isinstance(text, str):
        return f"[resource {uri}]\n{text}", Resource(uri, text=_cut(text), mime_type=mime or None)
    blob = _string(fields, "blob")
    words = f"[resource {uri} {mime}, {_size(blob)}]"
    if blob and room.takes(blob):
        return words, Resource(uri, blob=blob, mime_type=mime or None)
    return words, Text(words)


def _string(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""


def _size(data: str) -> str:
    return f"{len(data) * 3 // 4 // 1024} KiB"


def _cut(text: str) -> str:
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    return f"{text[:HEAD_CHARS]}\n[… {left_out} characters left out …]\n{text[-TAIL_CHARS:]}"


def _reporter(
    context: ToolContext,
) -> Progress:
    """Return what shows a call's progress, four times a second at the most."""
    next_s = 0.0

    async def report(progress: float, total: float | None, message: str | None) -> None:
        nonlocal next_s
        if anyio.current_time() < next_s:
            return
        next_s = anyio.current_time() + _PROGRESS_PAUSE_S
        done = f"{progress:g}" if total is None else f"{progress:g} of {total:g}"
        context.progress((Text(f"{done} {_line(message or '')}".strip()),))

    return report
