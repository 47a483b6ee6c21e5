"""Content values: what people send, what models say, what tools show. Plain frozen data.

Everything here is immutable, JSON through msgspec, and free of behaviour, so that the session log,
the model adapters and the front ends can share it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import astuple

__all__ = [
    "Block",
    "Diff",
    "Image",
    "Link",
    "Location",
    "Part",
    "PlanEntry",
    "ReasoningPart",
    "Resource",
    "Terminal",
    "Text",
    "TextPart",
    "ToolCallPart",
    "ToolContent",
    "ToolKind",
    "Usage",
    "text_of",
]


class _Value(Struct, frozen=True, omit_defaults=True, tag_field="type"):
    pass


# --- what a prompt is made of ---------------------------------------------------------------


class _Block(_Value, frozen=True, kw_only=True):
    """`annotations` and `meta` are what front ends tell each other: JSON objects, no model's text.

    They are kept as they are written, so that no depth and no number in them is too much.
    """

    annotations: str | None = None
    meta: str | None = None


class Text(_Block, frozen=True, tag="text"):
    """Text written by a person or shown by a tool."""

    text: str


class Image(_Block, frozen=True, tag="image"):
    """An image, base64."""

    data: str
    mime_type: str
    uri: str | None = None


class Link(_Block, frozen=True, tag="link"):
    """A reference to something the model may open with a tool."""

    uri: str
    name: str
    mime_type: str | None = None
    title: str | None = None
    description: str | None = None
    size_bytes: int | None = None


class Resource(_Block, frozen=True, tag="resource"):
    """Something embedded in the prompt: `text`, or `blob` in base64.

    `contents_meta` is the `meta` of what is embedded, beside that of the block around it.
    """

    uri: str
    text: str | None = None
    blob: str | None = None
    mime_type: str | None = None
    contents_meta: str | None = None


Block = Text | Image | Link | Resource
"""One block of a prompt, of injected context or of steering."""


# --- what a model says ----------------------------------------------------------------------


class TextPart(_Value, frozen=True, tag="text"):
    """Text of an assistant message."""

    text: str


class ReasoningPart(_Value, frozen=True, tag="reasoning"):
    """A model's thinking. Some endpoints demand it back with the message it belongs to.

    `opaque` is what only the model named `origin` can read, a signature or the thinking itself
    encrypted; it goes back to that model unchanged and to no other.
    """

    text: str
    origin: str = ""
    opaque: str = ""


class ToolCallPart(_Value, frozen=True, tag="tool_call"):
    """One tool call of an assistant message.

    `id` is ours and unique in the session: some providers start counting anew with each request.
    `arguments` is the model's own text, JSON or not.
    """

    id: str
    name: str
    arguments: str


Part = TextPart | ReasoningPart | ToolCallPart
"""One part of an assistant message, in the order in which the model produced it."""


class Usage(Struct, frozen=True, omit_defaults=True):
    """Tokens of one model call, as the provider counted them.

    `input_tokens` includes `cached_tokens`, read from the provider's cache, and
    `cache_write_tokens`, kept there; `output_tokens` includes `reasoning_tokens`.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


# --- what a tool shows ----------------------------------------------------------------------

ToolKind = Literal[
    "read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"
]
"""What a tool does, for the icon a front end draws."""


class Location(Struct, frozen=True, omit_defaults=True):
    """A place a tool call is about: an absolute path and a line counted from 1."""

    path: str
    line: int | None = None


class Diff(_Value, frozen=True, tag="diff"):
    """A file before (`None`: it did not exist) and after. `path` is absolute."""

    path: str
    old_text: str | None
    new_text: str


class Terminal(_Value, frozen=True, tag="terminal"):
    """A terminal that a front end runs and shows by itself; its text is in the call's result."""

    id: str


ToolContent = Text | Diff | Terminal | Image | Link | Resource
"""What a front end shows below a tool call."""


class PlanEntry(Struct, frozen=True):
    """One line of the plan."""

    content: str
    priority: Literal["high", "medium", "low"] = "medium"
    status: Literal["pending", "in_progress", "completed"] = "pending"


def text_of(blocks: tuple[Block, ...]) -> str:
    """Return the blocks as the text a model without other senses is given."""
    return "\n".join(_block_text(block) for block in blocks)


def _block_text(block: Block) -> str:
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Link):
        return f"[{block.title or block.name}]({block.uri})"
    if isinstance(block, Resource) and block.text is not None:
        return f"<resource uri={block.uri!r}>\n{block.text}\n</resource>"
    return f"[{block.mime_type or 'attachment'}: {block.uri or 'inline'}]"
