"""Sessions on disk: one file each, one line of JSON for each event, written before it is told.

A line is written by one call, so that a process that is killed leaves at most a torn last line,
which does not count.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

from conformance.selftest.agent.rpc import Message

__all__ = ["Log", "Store", "Summary", "new_id"]

_SUFFIX: Final = ".jsonl"


class Summary(NamedTuple):
    """What a list of sessions says about one."""

    session_id: str
    cwd: str
    directories: list[str]
    created: float
    updated: float
    title: str | None


class Log:
    """The events of one session, in memory and on disk. Made by `Store`."""

    def __init__(self, path: str, events: list[Message]) -> None:
        self.events: Final = events
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, event: Message) -> None:
        """Keep an event; it is on disk when this returns."""
        self.events.append(event)
        os.write(self._fd, _line(event))

    def close(self) -> None:
        """Give up the file."""
        os.close(self._fd)


class Store:
    """All sessions that were not deleted.

    Args:
        folder: Where they are; made if it is not there.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def create(self, cwd: str, directories: list[str], events: list[Message]) -> tuple[str, Log]:
        """Make a session with these first events; return its id and log."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        session_id = new_id()
        header = {"cwd": cwd, "directories": directories, "created": time.time()}
        path = self._path(session_id)
        draft = f"{path}.new"
        with open(draft, "xb") as file:
            file.write(b"".join(map(_line, [header, *events])))
        os.rename(draft, path)
        return session_id, Log(path, [header, *events])

    def open(self, session_id: str) -> Log | None:
        """Return the log of a session; `None` if there is none."""
        if not session_id.isalnum():
            return None
        path = self._path(session_id)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            return None
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))
        events = list(filter(None, map(_event, whole.splitlines())))
        return Log(path, events) if events and "cwd" in events[0] else None

    def delete(self, session_id: str) -> None:
        """Forget a session, if there is one."""
        if session_id.isalnum():
            with suppress(FileNotFoundError):
                os.unlink(self._path(session_id))

    def summaries(self) -> list[Summary]:
        """Return what is there, the newest first."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        found: list[Summary] = []
        for name in names:
            if name.endswith(_SUFFIX):
                with suppress(FileNotFoundError, ValueError):  # it was deleted, or is spoilt
                    found.append(self._summary(name.removesuffix(_SUFFIX)))
        return sorted(found, key=lambda each: (each.created, each.session_id), reverse=True)

    def _summary(self, session_id: str) -> Summary:
        path = self._path(session_id)
        title: str | None = None
        with open(path, "rb") as file:
            header = _event(file.readline())
            if header is None or "cwd" not in header:
                raise ValueError("this is no session")
            for line in file:
                if line.startswith(b'{"title"') and line.endswith(b"\n"):
                    title = json.loads(line)["title"]
                    break
        updated = os.stat(path).st_mtime
        return Summary(
            session_id, header["cwd"], header["directories"], header["created"], updated, title
        )

    def _path(self, session_id: str) -> str:
        return os.path.join(self._folder, session_id + _SUFFIX)


def new_id() -> str:
    """Return a name that nothing else has."""
    return os.urandom(8).hex()


def _event(line: bytes) -> Message | None:
    """Return what a line says; `None` if it is spoilt."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"
