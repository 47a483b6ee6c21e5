"""Bytes to lines and back, without I/O: one JSON-RPC message per line, of any length up to a limit.

Source: ACP v1, transports: messages are delimited by a newline and contain none.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_LINE_BYTES", "LineSplitter"]

MAX_LINE_BYTES: Final = 64 * 2**20
"""Longer lines are refused. Images travel in base64, so this is ten times what people send."""


class LineSplitter:
    """Cuts a byte stream into lines. A line that is too long is dropped up to its newline."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes | None]:
        """Take more bytes; return the lines they complete.

        Returns:
            Lines without their newline, in order; `None` in place of one that was too long.
        """
        lines: list[bytes | None] = []
        *complete, rest = data.split(b"\n")
        for piece in complete:
            self._add(piece)
            lines.append(self._take())
        self._add(rest)
        return lines

    def finish(self) -> bytes | None:
        """Return what stands behind the last newline: a message, if the peer forgot its newline."""
        return self._take()

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max:
            self._parts.clear()
        elif piece:
            self._parts.append(piece)

    def _take(self) -> bytes | None:
        line = None if self._size > self._max else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return line
