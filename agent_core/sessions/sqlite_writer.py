"""The thread that owns the SQLite file of `agent_core.sessions.sqlite`.

The rules:
1. Everything goes through one inbox, in order, so a read sees what was appended before it.
2. Appends are written together: soon (`_LINGER_S`) by themselves, at once when anybody waits. A
   flush is a commit that is synced to the disk; flushes that meet in the inbox share one.
3. What could not be written stays in memory, in order, until a later flush writes it.
4. The write-ahead log is folded into the file when nobody has asked for anything for a moment:
   that syncs the disk twice, and must not hold up the flush that a cancel's answer waits for.
5. Whether an event follows its predecessor is decided inside the transaction that writes it, so
   that it holds against other processes, too. A session has one writer: when it turns out that
   another process wrote to it, each flush says so until the session is loaded again.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
from anyio import RunFinishedError
from anyio.lowlevel import current_token
from msgspec.structs import astuple

from agent_core.errors import SessionNotFound, StoreError
from agent_core.events import Event
from agent_core.logs import get_logger
from agent_core.sessions.memory import decode_events, page_of
from agent_core.sessions.sqlite_file import SCHEMA_VERSION, Stamp, connect, explained, stamp_of
from agent_core.sessions.store import SessionHeader, SessionPage

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Append", "Request", "Touch", "Writer"]

KEEP_UNUSED_MS: Final = 7 * 24 * 3600 * 1000

_LINGER_S: Final = 0.02  # a commit costs as much as fifty inserts, and nobody waits for this one
_COMMITS_PER_FOLD: Final = 250  # some 500 to 1,000 pages of 4 KiB
_QUIET_S: Final = 0.5
_ROWS_PER_INSERT: Final = 50  # one statement, so one hand-over of the GIL; 200 of 999 parameters

_NEXT_SEQ: Final = (
    "select (select coalesce(max(seq) + 1, 0) from events where session = sessions.id)"
    " from sessions where id = ?"
)
_COLUMNS: Final = "id, cwd, created_ms, updated_ms, title, parent_id, depth, owner"
_HEADER: Final = f"select {_COLUMNS} from sessions"
_PAGE: Final = (
    f"{_HEADER} where title is not null and parent_id is null and (:cwd is null or cwd = :cwd)"
    " and (:owner is null or owner = :owner)"
    " and (:all or updated_ms < :ms or (updated_ms = :ms and id < :id))"
    " order by updated_ms desc, id desc limit :limit"
)
_FAMILY: Final = (
    "with recursive family(id) as (select ? union select sessions.id from sessions"
    " join family on sessions.parent_id = family.id) select id from family"
)
_TOUCH: Final = "update sessions set updated_ms = ?, title = coalesce(title, ?) where id = ?"

_OTHER_WRITER: Final = "this session is being written by another process; load it again to go on"
_DELETED: Final = "this session was deleted by another process"

log = get_logger(__name__)


class Append(NamedTuple):
    """An event to write."""

    session_id: str
    seq: int
    time_ms: int
    body: bytes


class Touch(NamedTuple):
    """A header to bring up to date."""

    session_id: str
    updated_ms: int
    title: str | None


class Request:
    """Work for the writer thread that a task waits for."""

    __slots__ = ("_token", "done", "error", "is_flush", "result", "work")

    def __init__(self, work: Callable[[], Any], *, is_flush: bool) -> None:
        self.work = work
        self.is_flush = is_flush
        self.result: Any = None
        self.error: Exception | None = None
        self.done = anyio.Event()
        self._token = current_token()

    def answer(self, failure: Exception | None = None) -> None:
        """Do the work, unless it failed already, and wake the task."""
        try:
            if failure is not None:
                raise failure
            self.result = self.work()
        except Exception as exc:
            self.error = explained(exc)
        # Not `from_thread.run_sync`: it waits for the loop, and for ever when the loop has stopped
        # but is not closed yet.
        with suppress(RunFinishedError):
            self._token.backend_class.run_sync_soon(self.done.set, (), self._token.native_token)


class Writer:
    """The thread and its connection. `post`, `join` and `is_started` are for the event loop.

    Everything else runs on the thread, the public methods as the work of a `Request`.
    """

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._thread: threading.Thread | None = None
        self._inbox: deque[Append | Touch | Request] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_due = False  # the bell will ring soon
        self._connection: sqlite3.Connection | None = None
        self._is_finished = False
        self._unwritten: list[Append | Touch] = []
        self._is_failing = False
        self._is_synced = True
        self._is_full = False  # each commit is synced to the disk
        self._n_unfolded = 0  # commits
        self._stamp: Stamp | None = None  # of the write-ahead log behind our last commit
        self._has_company = False  # others have written to the file since it was opened
        self._ours: set[str] = set()  # created or loaded here, and not deleted here
        self._refused: dict[str, str] = {}  # why a session's events are not written any more

    # --- the loop's side ---------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether there has been anything to do."""
        return self._thread is not None

    def post(self, item: Append | Touch | Request) -> None:
        """Put `item` into the inbox. Never blocks."""
        self._inbox.append(item)
        if type(item) is Request:
            self._bell.put(None)
        elif not self._is_due:
            # The thread is not woken before: a turn that begins has better use for the processor.
            self._is_due = True
            # In a context of its own: the caller's would keep an agent alive as long.
            loop = asyncio.get_running_loop()
            loop.call_later(_LINGER_S, self._ring, context=Context())
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="session-store", daemon=True)
            thread.start()  # may fail; the next item tries again
            self._thread = thread

    def _ring(self) -> None:
        self._is_due = False
        if self._inbox:
            self._bell.put(None)

    def is_ours_alone(self, session_id: str) -> bool:
        """Say whether nobody but us can have written to the file, without asking the thread.

        `False` where it is not known; then the thread does.
        """
        if self._has_company or self._stamp is None or session_id in self._refused:
            return False
        return self._stamp == stamp_of(self._path)

    def join(self) -> None:
        """Wait for the thread, which is done with everything but its return."""
        if self._thread is not None:
            self._thread.join()

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_finished:
            self._hear()
            self._empty_inbox()

    def _hear(self) -> None:
        """Wait for the bell; fold if it stays silent for long."""
        if self._n_unfolded >= _COMMITS_PER_FOLD:
            try:
                self._bell.get(timeout=_QUIET_S)
                return
            except queue.Empty:
                self._fold()
        self._bell.get()

    def _empty_inbox(self) -> None:
        flushes: list[Request] = []
        while self._inbox and not self._is_finished:
            item = self._inbox.popleft()
            if not isinstance(item, Request):
                self._unwritten.append(item)
            elif item.is_flush:
                flushes.append(item)
            else:
                self._settle(flushes)
                item.answer()
        self._settle(flushes)

    def _settle(self, flushes: list[Request]) -> None:
        """Write what there is and answer `flushes`; after a failure only a flush tries again."""
        failure: Exception | None = None
        if flushes or not self._is_failing:
            try:
                self._write(is_durable=bool(flushes))
            except Exception as exc:
                failure = exc
        for request in flushes:
            request.answer(failure)
        flushes.clear()

    def _write(self, *, is_durable: bool) -> None:
        if not self._unwritten and (self._is_synced or not is_durable):
            return
        self._is_failing = True
        try:
            with self._transaction(is_durable=is_durable) as db:
                self._insert(db)
        except Exception as exc:
            log.warning("session_write_failed", error=str(exc), unwritten=len(self._unwritten))
            raise
        self._unwritten.clear()
        self._is_failing = False

    def _insert(self, db: sqlite3.Connection) -> None:
        next_seqs: dict[str, int | None] = {}
        touched: dict[str, Touch] = {}
        values: list[Any] = []
        for item in self._unwritten:
            if isinstance(item, Touch):
                before = touched.get(item.session_id)
                title = before.title if before and before.title is not None else item.title
                touched[item.session_id] = item._replace(title=title)
                continue
            session_id = item.session_id
            if session_id not in next_seqs:
                row = db.execute(_NEXT_SEQ, (session_id,)).fetchone()
                next_seqs[session_id] = row and row[0]
            if self._is_next(item, next_seqs[session_id]):
                next_seqs[session_id] = item.seq + 1
                values += item
        size = 4 * _ROWS_PER_INSERT
        for start in range(0, len(values), size):
            chunk = values[start : start + size]
            rows = ", ".join(["(?, ?, ?, ?)"] * (len(chunk) // 4))
            db.execute(f"insert into events (session, seq, time_ms, body) values {rows}", chunk)
        for touch in touched.values():
            db.execute(_TOUCH, (touch.updated_ms, touch.title, touch.session_id))

    def _is_next(self, item: Append, next_seq: int | None) -> bool:
        if item.session_id in self._refused:
            return False
        if item.seq == next_seq:
            return True
        if next_seq is None and item.session_id in self._ours:
            self._refused[item.session_id] = _DELETED
        elif next_seq is not None and item.seq < next_seq:
            self._refused[item.session_id] = _OTHER_WRITER
        if next_seq is not None or item.session_id in self._refused:
            log.warning("session_event_dropped", session_id=item.session_id, seq=item.seq)
        return False

    @contextmanager
    def _transaction(self, *, is_durable: bool = False) -> Iterator[sqlite3.Connection]:
        db = self._db()
        if is_durable is not self._is_full:
            # In full, a commit syncs the log with what earlier commits left there.
            db.execute(f"pragma synchronous = {'full' if is_durable else 'normal'}")
            self._is_full = is_durable
        try:
            db.execute("begin immediate")
            self._has_company |= self._stamp != stamp_of(self._path)
            n_before = db.total_changes
            yield db
            if is_durable and db.total_changes == n_before:
                db.execute(f"pragma user_version = {SCHEMA_VERSION}")  # or there is no commit
            db.execute("commit")
            self._stamp = stamp_of(self._path)
            self._is_synced = is_durable
            self._n_unfolded += 1
        finally:
            if db.in_transaction:
                db.rollback()

    def _fold(self) -> None:
        """Move the write-ahead log into the file; readers and other processes are not held up."""
        import sqlite3

        self._n_unfolded = 0
        try:
            self._db().execute("pragma wal_checkpoint(passive)").fetchall()
        except sqlite3.Error as exc:  # what is in the log is safe there
            log.warning("session_log_not_folded", error=str(exc))

    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = connect(self._path, self._busy_timeout_s)
            self._stamp = stamp_of(self._path)
        return self._connection

    # --- the work of requests ----------------------------------------------------------------

    def create(self, header: SessionHeader) -> None:
        """See `SqliteStore.create`."""
        oldest_ms = header.created_ms - KEEP_UNUSED_MS
        with self._transaction() as db:
            if db.execute(_NEXT_SEQ, (header.id,)).fetchone():
                raise StoreError(f"there is a session {header.id} already")
            unused = db.execute(
                "select id from sessions where title is null and updated_ms < ?", (oldest_ms,)
            ).fetchall()
            # A session that is open here may get its first prompt at any time.
            _forget(db, [session_id for (session_id,) in unused if session_id not in self._ours])
            db.execute(
                f"insert into sessions ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?)",
                astuple(header),
            )
        self._ours.add(header.id)

    def check(self, session_id: str) -> None:
        """Raise `StoreError` if the session's events are not written any more."""
        if session_id in self._refused:
            raise StoreError(self._refused[session_id])

    def load(self, session_id: str) -> tuple[SessionHeader, list[Event]]:
        """See `SqliteStore.load`."""
        self._write(is_durable=False)
        db = self._db()
        header = self.header(session_id)
        rows = db.execute(
            "select seq, time_ms, body from events where session = ? order by seq", (session_id,)
        ).fetchall()
        events = decode_events(rows)
        self._ours.add(session_id)
        self._refused.pop(session_id, None)
        return header, events

    def header(self, session_id: str) -> SessionHeader:
        """See `SqliteStore.header`."""
        row = self._db().execute(f"{_HEADER} where id = ?", (session_id,)).fetchone()
        if row is None:
            raise SessionNotFound(session_id)
        return SessionHeader(*row)

    def page(
        self, cwd: str | None, owner: str | None, before: tuple[int, str] | None, limit: int
    ) -> SessionPage:
        """See `SqliteStore.list_sessions`."""
        ms, last_id = before or (0, "")
        where = {"cwd": cwd, "owner": owner}
        values = where | {"all": before is None, "ms": ms, "id": last_id, "limit": limit + 1}
        return page_of([SessionHeader(*row) for row in self._db().execute(_PAGE, values)], limit)

    def delete(self, session_id: str) -> None:
        """See `SqliteStore.delete`."""
        with self._transaction() as db:
            family = [found for (found,) in db.execute(_FAMILY, (session_id,))]
            _forget(db, family)
        for forgotten in family:
            self._ours.discard(forgotten)
            self._refused.pop(forgotten, None)

    def ping(self) -> None:
        """See `SqliteStore.ping`."""
        self._db().execute(f"{_HEADER} limit 1").fetchone()

    def close(self) -> None:
        """Write what there is, let go of the file, end the thread."""
        self._is_finished = True
        try:
            if self._is_failing and self._connection is not None:
                self._connection.execute("pragma busy_timeout = 0")  # it was waited for already
            self._write(is_durable=True)
        finally:
            if self._connection is not None:
                self._connection.close()  # folds the write-ahead log in, if nobody else has it open


def _forget(db: sqlite3.Connection, session_ids: Sequence[str]) -> None:
    for session_id in session_ids:
        db.execute("delete from events where session = ?", (session_id,))
        db.execute("delete from sessions where id = ?", (session_id,))
