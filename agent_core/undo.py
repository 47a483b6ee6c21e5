"""Taking back what the last turn that changed files did to them, from what the log kept.

The rules:
- A file is put back only if it is as the turn left it; whoever changed it since is not overruled.
- A file that the turn created is deleted; directories stay.
- What was taken back, or cannot ever be, is done with: the next undo goes on behind it.
- The model is told in the log, so that it knows also after a restart.

Changes that commands made are none of it: nothing says what they touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from agent_core.cancellation import AbortSignal
from agent_core.content import Text
from agent_core.errors import ToolError
from agent_core.events import ContextMessage, Event, FileChanged, FilesRestored, TurnStart
from agent_core.text import printable
from agent_core.tools.kept_files import hash_of

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["undo"]

_NOTHING: Final = (
    "There is nothing to undo: no turn whose changes are still there has written or edited a file."
)


@dataclass(slots=True)
class _Change:
    """What a turn did to one file since something else last changed it: back to `before`.

    `after` holds the hash of each text that it was given.
    """

    before: str | None
    lost: str
    after: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Report:
    """What became of each file: a line for people, and those that are done with."""

    lines: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)


class _Changed(Exception):
    """The file is not as the turn left it. `is_undone`: it is as it was before."""

    def __init__(self, reason: str, *, is_undone: bool = False) -> None:
        super().__init__(reason)
        self.is_undone = is_undone


async def undo(agent: Agent, signal: AbortSignal) -> str:
    """Take back what the last turn that changed any files did to them.

    It is the person's own act: no permission is asked for. The files go through `Agent.files`.

    Cancellation: through `signal`, between two files; what was restored by then is logged and
    shown. Concurrency: one at a time, in the agent's own turn.

    Returns:
        What became of each file, in Markdown.

    Raises:
        TurnAborted: The signal fired.
    """
    turn, changes = _latest(agent.session.events)
    if not changes:
        return _NOTHING
    report = _Report()
    is_whole = False
    try:
        for path, change in changes.items():
            signal.raise_if_aborted()
            await _restore(agent, path, change, report, signal)
        is_whole = True
    finally:
        text = _text(turn, report, changes, is_whole=is_whole)
        _log(agent, turn, report, "" if is_whole else text)
    return text


def _latest(events: Sequence[Event]) -> tuple[int, dict[str, _Change]]:
    """Return the last turn with changes that are not done with, and these by path."""
    turn = 0
    turns: dict[int, dict[str, _Change]] = {}
    for event in events:
        match event.data:
            case TurnStart(turn=turn):
                pass
            case FileChanged() as data:
                changes = turns.setdefault(turn, {})
                if not data.follows or data.path not in changes:
                    changes[data.path] = _Change(data.before, data.lost)
                changes[data.path].after.add(data.after)
            case FilesRestored(turn=restored, paths=paths):
                for path in paths:
                    turns.get(restored, {}).pop(path, None)
    return next(((n, turns[n]) for n in sorted(turns, reverse=True) if turns[n]), (0, {}))


async def _restore(
    agent: Agent, path: str, change: _Change, report: _Report, signal: AbortSignal
) -> None:
    """Put one file back and note what came of it."""
    try:
        _check_place(agent, path)
        if change.lost:
            raise _Changed(change.lost)
        await _check_unchanged(agent, path, change, signal)
    except _Changed as exc:
        note = "already as it was" if exc.is_undone else f"left as it is: {exc}"
        report.done.append(path)
        report.lines.append(f"- {_code(agent, path)}: {note}")
        return
    try:
        if change.before is None:
            await anyio.to_thread.run_sync(_delete, path)
        else:
            await agent.files.write(path, change.before, signal)
    except ToolError as exc:
        again = "`/undo` tries it again"
        report.lines.append(f"- {_code(agent, path)}: not restored, {exc.message}; {again}")
        return
    report.done.append(path)
    report.restored.append(path)
    what = "restored" if change.before is not None else "deleted, it was new"
    report.lines.append(f"- {_code(agent, path)}: {what}")


def _check_place(agent: Agent, path: str) -> None:
    try:
        is_there = agent.roots.resolve(path) == path
    except ToolError as exc:
        raise _Changed(exc.message) from None
    if not is_there:
        raise _Changed("a part of its path is a link now")


async def _check_unchanged(agent: Agent, path: str, change: _Change, signal: AbortSignal) -> None:
    try:
        now: str | None = await agent.files.read(path, signal)
    except ToolError as exc:
        if exc.code != "NOT_FOUND":
            raise _Changed(exc.message) from None
        now = None
    if now == change.before:
        raise _Changed("", is_undone=True)
    if now is None:
        raise _Changed("it was deleted since")
    if hash_of(now) not in change.after:
        raise _Changed("it was changed since")


def _delete(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as exc:
        raise ToolError(f"it cannot be deleted: {exc.strerror}") from exc


def _log(agent: Agent, turn: int, report: _Report, notice: str) -> None:
    if report.restored:
        files = "\n".join(report.restored)
        told = (
            f"The person took back, with /undo, what turn {turn} did to these files. They are as "
            f"they were before it, so read them again before you change them:\n{files}"
        )
        agent.session.append(ContextMessage((Text(told),), "undo"))
    if report.done or notice:
        agent.session.append(FilesRestored(turn, tuple(report.done), notice))


def _text(turn: int, report: _Report, changes: Iterable[str], *, is_whole: bool) -> str:
    head = f"Taking back the changes of turn {turn}:"
    if is_whole:
        return "\n".join((head, "", *report.lines))
    left = len(list(changes)) - len(report.lines)
    files = "1 file" if left == 1 else f"{left} files"
    end = f"Stopped with {files} to go; `/undo` goes on with them."
    return "\n".join((head, "", *report.lines, "", end) if report.lines else (end,))


def _code(agent: Agent, path: str) -> str:
    """Return the path as Markdown shows it, whatever characters it has."""
    shown = printable(agent.roots.show(path), "\ufffd")
    fence = "``" if "`" in shown else "`"
    pad = " " if "`" in shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}"
