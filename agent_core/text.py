"""Text that can be written down."""

from __future__ import annotations

from typing import Any

__all__ = ["replace_surrogates"]


def replace_surrogates(value: Any) -> Any:
    """Return a JSON value with U+FFFD for every lone surrogate, which UTF-8 cannot express."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_surrogates(item) for item in value]
    return value
