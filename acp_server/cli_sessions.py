"""``acp-agent sessions``: look at, take along and forget what was said."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from agent_core.sessions.sqlite import SqliteStore

__all__ = ["add_sessions_command"]

_NO_SESSIONS: Final = "No sessions yet."


def add_sessions_command(commands: Any, configured: argparse.ArgumentParser) -> None:
    """Add the command and its verbs to the parser."""
    sessions = commands.add_parser(
        "sessions",
        help="list, show, export or delete sessions",
        description="List, show, export or delete sessions.",
    )
    sessions.set_defaults(run=lambda _options: _help(sessions))
    verbs = sessions.add_subparsers(title="verbs", metavar="VERB")

    listing = verbs.add_parser("list", parents=[configured], help="the latest sessions")
    listing.add_argument("--cwd", metavar="DIR", help="only those of this directory")
    listing.add_argument("-n", type=_count, default=20, metavar="N", help="at most N; default 20")
    listing.set_defaults(run=lambda options: _run(options, _list))

    for name, text, act in (
        ("show", "a session as a person reads it", _show),
        ("export", "a session's log as JSON lines", _export),
        ("delete", "forget a session for good", _delete),
    ):
        verb = verbs.add_parser(name, parents=[configured], help=text, description=text)
        verb.add_argument("id", help="the session's id, or enough of its beginning")
        verb.set_defaults(run=lambda options, act=act: _run(options, act))


def _count(text: str) -> int:
    import argparse

    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _run(
    options: argparse.Namespace,
    act: Callable[[SqliteStore, argparse.Namespace], Awaitable[int]],
) -> int:
    import anyio

    from acp_server.cli import configuration_flags
    from acp_server.config import ConfigError, load_config
    from agent_core.errors import StoreError
    from agent_core.sessions.sqlite import SqliteStore

    async def run() -> int:
        path = load_config(configuration_flags(options)).sessions_path
        if act is _list and _is_missing(path):  # a look makes no file
            _print(_NO_SESSIONS)
            return 0
        store = SqliteStore(path)
        try:
            return await act(store, options)
        finally:
            await store.aclose()

    try:
        code = anyio.run(run)
        sys.stdout.flush()
        return code
    except ConfigError as exc:
        return _complain(str(exc), 2)
    except StoreError as exc:
        return _complain(str(exc), 1)
    except OSError as exc:
        # What is left to be flushed at exit must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(exc, BrokenPipeError):  # `acp-agent sessions show … | head`
            return 0
        return _complain(f"standard output: {exc.strerror}", 1)


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass  # the store says it better
    return False


async def _list(store: SqliteStore, options: argparse.Namespace) -> int:
    from datetime import datetime

    cwd = os.path.abspath(options.cwd) if options.cwd else None  # noqa: ASYNC240
    page = await store.list_sessions(cwd=cwd, limit=options.n)
    for header in page.sessions:
        when = datetime.fromtimestamp(header.updated_ms / 1000).strftime("%Y-%m-%d %H:%M")
        _print(f"{header.id}  {when}  {header.cwd}  {_printable(header.title or '')}")
    if not page.sessions:
        _print(_NO_SESSIONS)
    return 0


async def _show(store: SqliteStore, options: argparse.Namespace) -> int:
    from agent_core.content import TextPart, text_of
    from agent_core.events import (
        AssistantMessage,
        Failed,
        PromptBlocked,
        SteeringMessage,
        ToolCall,
        ToolResult,
        TurnEnd,
        UserMessage,
    )

    header, events = await store.load(await _find(store, options.id))
    _print(f"{header.id}  {header.cwd}")
    for event in events:
        match event.data:
            case UserMessage(shown=tuple(content)) | UserMessage(content=content):
                _print(f"\n> {_printable(text_of(content))}")
            case SteeringMessage(content=content):
                _print(f"\n> {_printable(text_of(content))}")
            case PromptBlocked(content=content, reason=reason):
                _print(f"\n> {_printable(text_of(content))}\n{_printable(reason)}")
            case AssistantMessage(content=parts, interrupted=interrupted):
                text = "".join(part.text for part in parts if isinstance(part, TextPart))
                _print(_printable(text) + (" [interrupted]" if interrupted else ""))
            case ToolCall(title=title):
                _print(f"* {_printable(title)}")
            case ToolResult(is_error=True, code=code):
                _print(f"  failed: {code}")
            case TurnEnd(outcome=outcome):
                kind = outcome.__struct_config__.tag
                reason = f": {_printable(outcome.message)}" if isinstance(outcome, Failed) else ""
                _print(f"[{kind}{reason}]")
            case _:
                pass
    return 0


async def _export(store: SqliteStore, options: argparse.Namespace) -> int:
    import msgspec

    header, events = await store.load(await _find(store, options.id))
    _print(msgspec.json.encode(header).decode())
    for event in events:
        _print(msgspec.json.encode(event).decode())
    return 0


async def _delete(store: SqliteStore, options: argparse.Namespace) -> int:
    session_id = await _find(store, options.id)
    await store.delete(session_id)
    _print(f"Deleted {session_id}.")
    return 0


async def _find(store: SqliteStore, start: str) -> str:
    """Return the id that begins with `start`: exactly that one, or the only listed one."""
    from contextlib import suppress

    from agent_core.errors import SessionNotFound, StoreError

    with suppress(SessionNotFound):  # also one that had no prompt yet, or a subagent's
        return (await store.load(start))[0].id
    found: set[str] = set()
    cursor = None
    while True:
        page = await store.list_sessions(cursor=cursor, limit=500)
        found.update(header.id for header in page.sessions if header.id.startswith(start))
        cursor = page.next_cursor
        if cursor is None:
            break
    if len(found) > 1:
        raise StoreError(f"{len(found)} sessions begin with {start}; write more of the id.")
    if not found:
        raise SessionNotFound(start)
    return found.pop()


def _printable(text: str) -> str:
    """Return `text` without what a terminal would obey."""
    return "".join(char for char in text if char in "\n\t" or char.isprintable())


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"acp-agent: {text}\n")
    return code
