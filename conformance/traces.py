"""Traces on disk: ours, and those of other recorders, so that anybody's session can be judged.

Each line of a trace is one JSON object. Known are:

- ours: ``{"time_s": 0.1, "direction": "sent" | "received", "raw": "…"}``, *sent* by the client
- a recorder's between client and agent: ``{"t": 0.1, "dir": "c2a" | "a2c", "raw": "…"}``
- an inspector's: ``{"ts": …, "direction": "fromClient" | "fromAgent", "json": "…"}``
- a conductor's: ``{"ts": …, "type": "request" | "response" | "notification", "from": …, …}``

and text with an arrow before each message, ``--> {…}`` to the agent and ``<-- {…}`` from it, which
may stand behind a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from conformance.trace import Entry, decode

__all__ = ["FORMATS", "read_trace", "to_line"]

Direction = Literal["sent", "received"]

_ARROW: Final = re.compile(rb"^\s*(?:[\d.:]+\s+)?(-->|<--)\s*(.*)$")


def read_trace(path: Path) -> list[Entry]:
    """Return the entries of a trace, in the order of the file.

    Raises:
        ValueError: No line is in a known form; says which forms there are.
        OSError: It cannot be read.
    """
    entries: list[Entry] = []
    n_strange = 0
    for line in path.read_bytes().splitlines():
        if not line.strip():
            continue
        entry = _read_line(line)
        if entry is None:
            n_strange += 1
        elif isinstance(entry, Entry):
            entries.append(entry)
    if not entries:
        raise ValueError(
            f"{path}: none of its {n_strange} lines is in a known form ({', '.join(FORMATS)})"
        )
    return entries


def to_line(entry: Entry) -> bytes:
    """Return an entry as one line of a trace of ours."""
    row = {
        "time_s": round(entry.time_s, 6),
        "direction": entry.direction,
        "raw": entry.raw.decode("utf-8", "backslashreplace"),
    }
    return msgspec.json.encode(row) + b"\n"


class _NoMessage:
    """A line that a recorder writes besides messages."""


def _read_line(line: bytes) -> Entry | _NoMessage | None:
    arrow = _ARROW.match(line)
    if arrow is not None:
        return _entry(0.0, "sent" if arrow[1] == b"-->" else "received", arrow[2])
    row = decode(line)
    if row is None:
        return None
    for read in FORMATS.values():
        entry = read(row)
        if entry is not None:
            return entry
    return None


def _ours(row: dict[str, Any]) -> Entry | _NoMessage | None:
    match row:
        case {"time_s": time_s, "direction": "sent" | "received" as direction, "raw": str(raw)}:
            return _entry(time_s, direction, raw.encode("utf-8", "surrogatepass"))
    return None


def _recorder(row: dict[str, Any]) -> Entry | _NoMessage | None:
    match row:
        case {"dir": "c2a" | "a2c" as way, "raw": str(raw)}:
            direction: Direction = "sent" if way == "c2a" else "received"
            return _entry(row.get("t"), direction, raw.encode("utf-8", "surrogatepass"))
        case {"dir": str(), "raw": str()}:
            return _NoMessage()
    return None


def _inspector(row: dict[str, Any]) -> Entry | _NoMessage | None:
    match row:
        case {"direction": str(direction), "json": str(raw)}:
            way = direction.lower()
            if way in ("fromclient", "fromagent"):
                who: Direction = "sent" if way == "fromclient" else "received"
                return _entry(row.get("ts"), who, raw.encode("utf-8", "surrogatepass"))
    return None


def _conductor(row: dict[str, Any]) -> Entry | _NoMessage | None:
    """Read what passed between the client and its neighbour; proxies behind that are not ours."""
    kind, sender, receiver = row.get("type"), row.get("from"), row.get("to")
    if kind == "trace":
        return _NoMessage()
    if kind not in ("request", "response", "notification") or not isinstance(sender, str):
        return None
    ends = (str(sender).lower(), str(receiver).lower())
    if "client" not in ends or row.get("protocol", "acp") != "acp":
        return _NoMessage()
    message: dict[str, Any] = {"jsonrpc": "2.0"}
    if kind != "notification":
        message["id"] = row.get("id")
    if kind == "response":
        message["error" if row.get("is_error") else "result"] = row.get("payload")
    else:
        message |= {"method": row.get("method"), "params": row.get("params")}
    direction: Direction = "sent" if ends[0] == "client" else "received"
    return _entry(row.get("ts"), direction, msgspec.json.encode(message))


FORMATS: Final[dict[str, Callable[[dict[str, Any]], Entry | _NoMessage | None]]] = {
    "ours": _ours,
    "recorder": _recorder,
    "inspector": _inspector,
    "conductor": _conductor,
}
"""How to read a line, by whose it is."""


def _entry(time: object, direction: Direction, raw: bytes) -> Entry:
    return Entry(_seconds(time), direction, raw, decode(raw))


def _seconds(time: object) -> float:
    if isinstance(time, int | float):
        return float(time)
    if isinstance(time, str):
        try:
            return datetime.fromisoformat(time).timestamp()
        except ValueError:
            return 0.0
    return 0.0
