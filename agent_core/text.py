"""Text that can be written down, and shown on a line."""

from __future__ import annotations

from typing import Any

__all__ = ["printable", "replace_surrogates", "shortened"]


def replace_surrogates(value: Any) -> Any:
    """Return a JSON value with U+FFFD for every lone surrogate, which UTF-8 cannot express."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_surrogates(item) for item in value]
    return value


def printable(text: str, instead: str = "") -> str:
    """Return `text` with `instead` for every character that a terminal or an editor cannot show."""
    return "".join(char if char.isprintable() else instead for char in text)


def shortened(text: str, n_chars: int) -> str:
    """Return `text`, cut to `n_chars` characters with an ellipsis as the last if it is longer."""
    return text if len(text) <= n_chars else text[: n_chars - 1] + "…"
