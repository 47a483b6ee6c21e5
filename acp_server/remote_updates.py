"""What another agent says while it works for us, read leniently: its text, its tokens, its cost."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from agent_core.content import Usage

__all__ = [
    "MAX_OUTPUT_BYTES",
    "Cost",
    "Output",
    "SpentTokens",
    "TextSaid",
    "Update",
    "lenient",
    "update_of",
]

MAX_OUTPUT_BYTES: Final = 1024 * 1024
"""Of what an agent says the end is kept: its conclusion stands there."""

_T = TypeVar("_T")
_Count = Annotated[int, Meta(ge=0)]


def lenient(value: object, kind: type[_T]) -> _T:
    """Return what an agent says of its tokens or its cost; nothing, if that makes no sense."""
    try:
        return msgspec.convert(value or {}, kind)
    except msgspec.ValidationError:
        return kind()


class Output:
    """The end of a text of any length."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._dropped_bytes = 0

    def add(self, text: str) -> None:
        """Take a piece."""
        self._kept += text.encode()
        if len(self._kept) > 2 * MAX_OUTPUT_BYTES:  # seldom: each time moves all that is kept
            self._trim()

    def _trim(self) -> None:
        surplus = max(0, len(self._kept) - MAX_OUTPUT_BYTES)
        del self._kept[:surplus]
        self._dropped_bytes += surplus

    def __str__(self) -> str:
        self._trim()
        text = self._kept.decode("utf-8", "ignore")  # the first character may be cut in two
        if not self._dropped_bytes:
            return text
        return f"(the first {self._dropped_bytes} bytes are left out)\n{text}"


class TextSaid(Struct):
    """A piece of its message."""

    text: str = ""


class Update(Struct, rename="camel"):
    """A ``session/update``, as far as anything is made of it."""

    session_update: str
    content: Raw = Raw(b"{}")
    tool_call_id: str = ""
    title: str | None = None
    kind: str | None = None
    status: str | None = None
    cost: object = None


class SpentTokens(Struct, rename="camel"):
    """The ``usage`` of its answer."""

    input_tokens: _Count = 0
    output_tokens: _Count = 0
    thought_tokens: _Count | None = None
    cached_read_tokens: _Count | None = None
    cached_write_tokens: _Count | None = None

    @property
    def counted(self) -> Usage:
        """As we count."""
        return Usage(
            self.input_tokens,
            self.output_tokens,
            self.cached_read_tokens or 0,
            self.thought_tokens or 0,
            self.cached_write_tokens or 0,
        )


class Cost(Struct):
    """What it cost so far."""

    amount: Annotated[float, Meta(ge=0)] | None = None
    currency: str | None = None


class _UpdateParams(Struct):
    update: Update


def update_of(params: bytes | None) -> Update:
    """Return the update in the params of a ``session/update``.

    Raises:
        msgspec.MsgspecError: There is none.
    """
    return msgspec.json.decode(params or b"{}", type=_UpdateParams).update
