"""What went over a wire, as it is kept and shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

__all__ = ["Entry", "Message", "Tail", "WireError", "decode", "object_of", "transcript"]

TRANSCRIPT_CHARS: Final = 240
TRANSCRIPT_LINES: Final = 30

Message = dict[str, Any]


class WireError(Exception):
    """A wait ended without what was waited for. The message ends with a transcript."""

    @property
    def reason(self) -> str:
        """The message without the transcript: one line."""
        return str(self).partition("\n")[0]


class Entry(Struct, frozen=True):
    """One line that went over the wire."""

    time_s: float
    """Seconds since the agent was started, on the monotonic clock. What we sent bears the time at
    which it was queued."""
    direction: Literal["sent", "received"]
    raw: bytes
    """The line without its end, or the part of it that was sent by one `Wire.send_bytes`."""
    message: Message | None
    """What the line says, at its last part; `None` if it is no JSON object."""
    is_part: bool = False
    """Whether the rest of the line comes later."""


class Tail:
    """The end of a byte stream: at least the last `n_bytes` of it, or all if it is shorter."""

    def __init__(self, n_bytes: int) -> None:
        self._limit = n_bytes
        self._n_kept = 0
        self._chunks: deque[bytes] = deque()

    def append(self, chunk: bytes) -> None:
        """Add what came next."""
        self._chunks.append(chunk)
        self._n_kept += len(chunk)
        while self._n_kept - len(self._chunks[0]) >= self._limit:
            self._n_kept -= len(self._chunks.popleft())

    def text(self) -> str:
        """Return what is kept, as text."""
        return b"".join(self._chunks).decode("utf-8", "replace")


def decode(raw: bytes) -> Message | None:
    """Return the JSON object in `raw`, or `None` if it holds anything else."""
    try:
        message = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def object_of(value: object) -> Message:
    """Return `value` if it is an object, else an empty one: agents say anything anywhere."""
    return value if isinstance(value, dict) else {}


def transcript(trace: Sequence[Entry], exit_code: int | None, stderr: str) -> str:
    """Return the end of a trace and of stderr, for people; long lines are cut.

    Args:
        trace: All entries.
        exit_code: The agent's, `None` while it runs.
        stderr: What the agent logged.
    """
    lines = [_to_line(entry) for entry in trace[-TRANSCRIPT_LINES:]]
    if len(trace) > TRANSCRIPT_LINES:
        lines.insert(0, f"({len(trace) - TRANSCRIPT_LINES} lines before)")
    lines.append("the agent runs" if exit_code is None else f"the agent ended with {exit_code}")
    logged = stderr.splitlines()[-TRANSCRIPT_LINES:]
    return "\n".join([*lines, *(f"stderr  {line}" for line in logged)])


def _to_line(entry: Entry) -> str:
    arrow = "-->" if entry.direction == "sent" else "<--"
    text = entry.raw[: TRANSCRIPT_CHARS + 1].decode("utf-8", "replace")
    if len(entry.raw) > TRANSCRIPT_CHARS:
        text = f"{text[:TRANSCRIPT_CHARS]}… ({len(entry.raw)} bytes)"
    return f"{entry.time_s:8.3f} {arrow} {text}"
