"""Text and values from an agent, made safe to print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TextIO

__all__ = ["clean", "clean_line", "encodable", "to_list", "to_mapping", "to_string", "to_text"]

# Whole sequences first, so that nothing of them stays behind as text; then what is left of ESC,
# the other C0 and C1 controls, and the characters that reorder what is shown after them.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(text: object) -> str:
    """Return `text` without anything that could steer a terminal; ``""`` if it is no string."""
    if not isinstance(text, str):
        return ""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x85", "\n")
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def clean_line(text: object) -> str:
    """Return `text` cleaned and on one line, for titles and names."""
    return " ".join(clean(text).split())


def encodable(stream: TextIO, text: str) -> str:
    """Return `text` with what `stream` cannot encode replaced."""
    encoding = stream.encoding or "utf-8"
    if "…" in text and not encoding.lower().startswith("utf"):
        text = text.replace("…", "...")
    return text.encode(encoding, "replace").decode(encoding, "replace")


def to_mapping(value: object) -> Mapping[str, Any]:
    """Return `value`, or nothing if it is no JSON object."""
    return value if isinstance(value, dict) else {}


def to_list(value: object) -> list[Any]:
    """Return `value`, or nothing if it is no JSON array."""
    return value if isinstance(value, list) else []


def to_string(value: object) -> str:
    """Return `value`, or nothing if it is no JSON string."""
    return value if isinstance(value, str) else ""


def to_text(block: object) -> str:
    """Return what a content block says, or names what cannot be shown."""
    fields = to_mapping(block)
    kind = to_string(fields.get("type"))
    if kind == "text":
        return clean(fields.get("text"))
    if kind == "resource_link":
        return f"[{clean_line(fields.get('name'))}]({clean_line(fields.get('uri'))})"
    if kind == "resource":
        return clean(to_mapping(fields.get("resource")).get("text"))
    return f"[{clean_line(kind)} {clean_line(fields.get('mimeType'))}]" if kind else ""
