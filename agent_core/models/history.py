"""What every dialect does to a history before it can be sent, whatever a model once wrote."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from agent_core.content import ToolCallPart

__all__ = ["NO_TEXT", "arguments_object", "call_name", "data_url", "is_object"]

NO_TEXT: Final = "(no text)"
"""What stands for a message in which nothing is said: many endpoints refuse an empty one."""
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]")


def call_name(part: ToolCallPart, n_chars: int) -> str:
    """Return the name of what was called as strict endpoints take it back; it may be empty.

    What a model called may be no tool at all, and one bad name would have its whole history
    refused.
    """
    return _NOT_IN_NAMES.sub("_", part.name)[:n_chars]


def arguments_object(part: ToolCallPart) -> str:
    """Return a call's arguments as the JSON of an object, whatever the model wrote.

    Some endpoints parse the arguments of past calls and refuse the whole history over one that is
    broken; what the model wrote stays visible to it.
    """
    arguments = part.arguments.strip() or "{}"
    if is_object(arguments):
        return arguments
    return msgspec.json.encode({"malformed": arguments}).decode()


def is_object(text: str) -> bool:
    """Say whether `text` is the JSON of an object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def data_url(mime_type: str | None, data: str) -> str:
    """Return an attachment, base64 in `data`, as a URL."""
    return f"data:{mime_type};base64,{data}"
