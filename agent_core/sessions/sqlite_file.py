"""The SQLite file that sessions are kept in: how it is opened, and what its failures are called."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent_core.errors import StoreError

if TYPE_CHECKING:
    import sqlite3

__all__ = ["SCHEMA_VERSION", "Stamp", "connect", "explained", "stamp_of"]

Stamp = tuple[int, int]
"""When the write-ahead log was last written, in nanoseconds, and its size in bytes."""

_MAX_LOG_PAGES: Final = 8000  # 32 MiB; then SQLite folds the write-ahead log, whoever waits
_PAUSE_S: Final = 0.02  # between two tries

_STEPS: Final = (  # step n leads from version n to the next; a new file takes them all
    (
        "create table sessions (id text primary key, cwd text not null, created_ms integer"
        " not null, updated_ms integer not null, title text)",
        "create table events (session text not null, seq integer not null, time_ms integer"
        " not null, body blob not null, primary key (session, seq)) without rowid",
    ),
    (
        "alter table sessions add column parent_id text",
        "alter table sessions add column depth integer not null default 0",
    ),
    ("alter table sessions add column owner text not null default ''",),
)
SCHEMA_VERSION: Final = len(_STEPS)
_FAILED: Final = "the session database failed"
_EXPLAINED: Final = {
    "SQLITE_BUSY": "the session database is locked by another process",
    "SQLITE_CANTOPEN": "the session database cannot be opened",
    "SQLITE_CORRUPT": "the session database is damaged",
    "SQLITE_FULL": "the session could not be saved: the disk is full",
    "SQLITE_IOERR": "the session database could not be read or written: the disk failed",
    "SQLITE_LOCKED": "the session database is locked by another process",
    "SQLITE_NOTADB": "the file is not a session database",
    "SQLITE_PERM": "the session database cannot be opened: permission denied",
    "SQLITE_READONLY": "the session database cannot be written: it is read only",
}


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of the file's write-ahead log: whoever commits changes it.

    Not quite: clocks may be too coarse for two commits, one in the place of the other.
    """
    try:
        found = os.stat(f"{path}-wal")
    except OSError:
        return 0, 0
    return (found.st_mtime_ns, found.st_size) if found.st_size else (0, 0)


def connect(path: Path, busy_timeout_s: float) -> sqlite3.Connection:
    """Open the file, made or brought up to date if need be, for commits that are not synced.

    Raises:
        StoreError: It was made by a newer version.
        sqlite3.Error, OSError: What else there is; see `explained`.
    """
    import sqlite3

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Only a new file: closing a descriptor of one that SQLite has open would drop its locks.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    db = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None)
    try:
        _write_ahead(db, busy_timeout_s)
        db.execute("pragma synchronous = normal")
        db.execute(f"pragma wal_autocheckpoint = {_MAX_LOG_PAGES}")
        db.execute("pragma fullfsync = on")  # macOS: a plain sync stops at the disk's own cache
        if _version(db) < SCHEMA_VERSION:
            db.execute("begin immediate")
            for step in _STEPS[_version(db) :]:  # none, if another process was faster
                for statement in step:
                    db.execute(statement)
            db.execute(f"pragma user_version = {SCHEMA_VERSION}")
            db.execute("commit")
        if _version(db) > SCHEMA_VERSION:
            raise StoreError(
                "the session database was made by a newer version of this program; "
                "update it, or use another folder with --state-dir"
            )
    except BaseException:
        db.close()
        raise
    return db


def _write_ahead(db: sqlite3.Connection, limit_s: float) -> None:
    """Switch to the write-ahead log. SQLite's own time-out does not cover the lock this takes."""
    import sqlite3

    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            db.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_PAUSE_S)


def _version(db: sqlite3.Connection) -> int:
    version: int = db.execute("pragma user_version").fetchone()[0]
    return version


def explained(exc: Exception) -> Exception:
    """Return `exc` as the error people are shown; a mistake in the program stays what it is."""
    import sqlite3

    if isinstance(exc, sqlite3.Error):
        name = getattr(exc, "sqlite_errorname", "")
        primary = "_".join(name.split("_")[:2])
        told = StoreError(_EXPLAINED.get(primary, _FAILED))
    elif isinstance(exc, OSError):
        told = StoreError(f"the session database cannot be opened: {exc.strerror}")
    elif isinstance(exc, UnicodeError):
        told = StoreError("the session's id or directory is not valid Unicode")
    else:
        return exc
    told.__cause__ = exc
    return told
