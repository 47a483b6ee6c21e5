from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import agent_core.sessions.sqlite_writer
from agent_core.errors import SessionCorrupt, SessionNotFound, StoreError
from agent_core.events import AssistantChunk, Event, TurnStart, encode
from agent_core.sessions.sqlite import SqliteStore
from agent_core.sessions.sqlite_writer import KEEP_UNUSED_MS, Writer
from agent_core.sessions.store import SessionHeader


@asynccontextmanager
async def opened(path: Path, *, busy_timeout_s: float = 5.0) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, busy_timeout_s=busy_timeout_s)
    with anyio.fail_after(20):
        yield store
        await store.aclose()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "sessions.db"


def header(session_id: str = "s", ms: int = 1000, title: str | None = None) -> SessionHeader:
    return SessionHeader(session_id, "/work", ms, ms, title)


def chunk(text: str) -> bytes:
    return encode(AssistantChunk(1, 1, text))


async def texts(store: SqliteStore, session_id: str = "s") -> list[str]:
    _, events = await store.load(session_id)
    return [event.data.text for event in events if isinstance(event.data, AssistantChunk)]


def execute(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement, values)
        db.commit()


def fill(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def read(path: Path) -> bytes:
    return path.read_bytes()


# --- the file --------------------------------------------------------------------------------


async def test_only_the_owner_can_read_the_file_and_its_directory(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())

        modes = [stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.iterdir()]

        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert set(modes) == {0o600}
        assert len(modes) == 3


async def test_nothing_touches_the_disk_before_the_first_use(path: Path) -> None:
    async with opened(path):
        pass

    assert not path.parent.exists()


async def test_one_file_is_left_after_the_close_and_holds_everything(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())
        for seq in range(300):
            store.append("s", seq, 1, chunk(str(seq)))

    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    async with opened(path) as store:
        assert await texts(store) == [str(seq) for seq in range(300)]


async def test_a_closed_store_says_so(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())

    with pytest.raises(StoreError, match="closed"):
        await store.ping()


@pytest.mark.parametrize("content", [b"this is not a database" * 100, b"\x00" * 4096])
async def test_a_file_that_is_no_database_is_an_error_for_people(
    path: Path, content: bytes
) -> None:
    fill(path, content)

    async with opened(path) as store:
        with pytest.raises(StoreError, match="not a session database") as caught:
            await store.ping()

    assert str(path) not in str(caught.value)
    assert read(path) == content


async def test_a_directory_in_place_of_the_file_is_an_error_for_people(path: Path) -> None:
    fill(path / "something", b"")

    async with opened(path) as store:
        with pytest.raises(StoreError, match="cannot be opened"):
            await store.create(header())


async def test_a_file_in_place_of_the_directory_is_an_error_for_people(path: Path) -> None:
    fill(path.parent, b"in the way")

    async with opened(path) as store:
        with pytest.raises(StoreError, match="cannot be opened"):
            await store.create(header())


async def test_a_database_of_a_newer_version_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    execute(path, "pragma user_version = 99")

    async with opened(path) as store:
        with pytest.raises(StoreError, match="newer version"):
            await store.create(header())

    with closing(sqlite3.connect(path)) as db:
        assert db.execute("select count(*) from sqlite_master").fetchone() == (0,)


async def test_a_directory_name_that_is_not_unicode_is_an_error_for_people(path: Path) -> None:
    async with opened(path) as store:
        with pytest.raises(StoreError, match="not valid Unicode"):
            await store.create(SessionHeader("s", "/tmp/\udcff", 1, 1))
        await store.create(header())


# --- what is stored --------------------------------------------------------------------------


async def test_a_missing_event_makes_the_session_corrupt(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())
        for seq in range(3):
            store.append("s", seq, 1, chunk(str(seq)))
        await store.flush("s")
        execute(path, "delete from events where seq = 1")

        with pytest.raises(SessionCorrupt, match="event 1 is missing"):
            await store.load("s")


async def test_a_damaged_event_makes_only_its_session_corrupt(path: Path) -> None:
    async with opened(path) as store:
        for session_id in "st":
            await store.create(header(session_id))
            store.append(session_id, 0, 1, chunk("fine"))
            await store.flush(session_id)
        execute(path, "update events set body = ? where session = 's'", b'{"type":"turn/')

        with pytest.raises(SessionCorrupt, match="event 0 cannot be read"):
            await store.load("s")

        assert await texts(store, "t") == ["fine"]


@pytest.mark.requirement("B084")
async def test_sessions_that_never_had_a_prompt_are_forgotten_after_a_week(path: Path) -> None:
    now = 10 * KEEP_UNUSED_MS
    async with opened(path) as store:
        await store.create(header("old", now - KEEP_UNUSED_MS - 1))
        await store.create(header("younger", now - KEEP_UNUSED_MS))
        await store.create(header("prompted", 1, "a title"))
        store.append("old", 0, 1, chunk("x"))

    async with opened(path) as store:
        await store.create(header("new", now))

        with pytest.raises(SessionNotFound):
            await store.load("old")
        for session_id in ("younger", "prompted", "new"):
            await store.load(session_id)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("select count(*) from events").fetchone() == (0,)


async def test_an_unused_session_that_is_open_is_kept_for_its_first_prompt(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header("open", 1))

        await store.create(header("new", 10 * KEEP_UNUSED_MS))
        store.append("open", 0, 1, chunk("at last"))

        assert await texts(store, "open") == ["at last"]


async def test_a_session_of_ten_thousand_events_is_loaded(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())
        for seq in range(10_000):
            store.append("s", seq, seq, chunk(f"piece {seq}"))
        await store.flush("s")

        _, events = await store.load("s")

        assert [event.time_ms for event in events] == list(range(10_000))


async def test_appends_reach_the_file_although_nobody_waits_for_them(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())
        for seq in range(3):
            store.append("s", seq, 1, chunk("x"))
            with anyio.fail_after(5):
                while stored_events(path) <= seq:  # noqa: ASYNC110 - there is nothing else to watch
                    await anyio.sleep(0.005)


def stored_events(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        n_events: int = db.execute("select count(*) from events").fetchone()[0]
    return n_events


# --- when it cannot be written ---------------------------------------------------------------


def n_folded(path: Path) -> int:
    """Return how many events are in the file itself, without its write-ahead log."""
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
        if not db.execute("select * from sqlite_schema where name = 'events'").fetchall():
            return 0
        count: int = db.execute("select count(*) from events").fetchone()[0]
        return count


async def test_the_write_ahead_log_is_folded_in_when_nobody_asks_for_anything(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_core.sessions.sqlite_writer, "_COMMITS_PER_FOLD", 3)
    monkeypatch.setattr(agent_core.sessions.sqlite_writer, "_QUIET_S", 0.0)
    fold, has_folded = Writer._fold, threading.Event()

    def noted(writer: Writer) -> None:
        fold(writer)
        has_folded.set()

    monkeypatch.setattr(Writer, "_fold", noted)

    async with opened(path) as store:
        await store.create(header())
        store.append("s", 0, 0, chunk("x"))
        await store.flush("s")
        await store.ping()  # the thread has been waiting for this, two commits behind
        was_early = has_folded.is_set()
        store.append("s", 1, 1, chunk("y"))
        await store.flush("s")
        assert await anyio.to_thread.run_sync(has_folded.wait, 5)
        folded = n_folded(path)
        store.append("s", 2, 2, chunk("and it goes on"))
        await store.flush("s")
        known = await texts(store)

    assert not was_early
    assert folded == 2
    assert known == ["x", "y", "and it goes on"]


async def test_a_flush_never_folds_the_write_ahead_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_core.sessions.sqlite_writer, "_COMMITS_PER_FOLD", 1)
    monkeypatch.setattr(agent_core.sessions.sqlite_writer, "_QUIET_S", 60.0)

    async with opened(path) as store:
        await store.create(header())
        for seq in range(1200):  # SQLite by itself folds at 1,000 pages
            store.append("s", seq, seq, chunk("x" * 4000))
            if seq % 10 == 0:
                await store.flush("s")
        await store.flush("s")
        in_flushes = n_folded(path)

    assert in_flushes == 0
    assert n_folded(path) == 1200


async def test_a_flush_syncs_what_was_committed_before_it_also_when_nothing_is_new(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []
    connect = sqlite3.connect

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        db.set_trace_callback(statements.append)
        return db

    async with opened(path) as store:
        monkeypatch.setattr(sqlite3, "connect", traced)
        await store.create(header())
        store.append("s", 0, 0, chunk("x"))
        assert await texts(store) == ["x"]  # committed, but not synced
        statements.clear()
        await store.flush("s")
        first = [each.lower() for each in statements]
        statements.clear()
        await store.flush("s")

    # The commit must write something, or SQLite syncs nothing.
    assert first[0] == "pragma synchronous = full"
    assert any(each.startswith("pragma user_version = ") for each in first)
    assert first[-1] == "commit"
    assert statements == []  # all is safe by now


async def test_what_a_locked_database_refuses_is_written_by_a_later_flush(path: Path) -> None:
    async with opened(path, busy_timeout_s=0.01) as store:
        await store.create(header(title="t"))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            store.append("s", 0, 1, chunk("first"))
            with pytest.raises(StoreError, match="locked by another process"):
                await store.flush("s")
            store.append("s", 1, 1, chunk("second"))
            with pytest.raises(StoreError, match="locked by another process"):
                await store.flush("s")
            with pytest.raises(StoreError, match="locked by another process"):
                await store.load("s")
            assert len((await store.list_sessions()).sessions) == 1
            await store.ping()
            other.execute("rollback")

        await store.flush("s")

        assert await texts(store) == ["first", "second"]


async def test_what_a_full_disk_refuses_is_written_when_there_is_space(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())
        store.append("s", 0, 1, chunk("earlier turn"))
        await store.flush("s")
        await limit_pages(store, 1)
        store.append("s", 1, 1, chunk("x" * 100_000))
        store.append("s", 2, 1, chunk("y"))

        with pytest.raises(StoreError, match="the disk is full") as caught:
            await store.flush("s")
        assert str(path) not in str(caught.value)
        await limit_pages(store, 1_000_000)
        await store.flush("s")

        assert await texts(store) == ["earlier turn", "x" * 100_000, "y"]


async def limit_pages(store: SqliteStore, n_pages: int) -> None:
    """Make SQLite itself find the disk full, or not."""
    await store._ask(lambda: store._writer._db().execute(f"pragma max_page_count = {n_pages}"))


async def test_a_read_only_database_is_an_error_for_people(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())
        await store._ask(lambda: store._writer._db().execute("pragma query_only = on"))
        store.append("s", 0, 1, chunk("kept"))

        with pytest.raises(StoreError, match="read only"):
            await store.flush("s")
        await store._ask(lambda: store._writer._db().execute("pragma query_only = off"))
        await store.flush("s")

        assert await texts(store) == ["kept"]


async def test_a_close_that_cannot_write_says_so_and_ends_the_thread(path: Path) -> None:
    store = SqliteStore(path, busy_timeout_s=0.01)
    await store.create(header())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        store.append("s", 0, 1, chunk("lost"))

        with anyio.fail_after(5), pytest.raises(StoreError, match="locked"):
            await store.aclose()
    store._writer.join()


def test_a_loop_that_has_gone_does_not_hurt_the_writer(path: Path) -> None:
    store = SqliteStore(path)

    async def give_up() -> None:
        await store.create(header())
        store.append("s", 0, 1, chunk("kept"))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            with anyio.move_on_after(0):
                await store.flush("s")  # answered only after this loop is closed, or just before

    async def look() -> list[str]:
        with anyio.fail_after(5):
            found = await texts(store)
            await store.aclose()
        return found

    anyio.run(give_up)
    assert anyio.run(look) == ["kept"]


# --- other processes -------------------------------------------------------------------------


async def test_who_has_the_file_alone_asks_nobody_whether_a_session_is_still_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    ask = SqliteStore._ask

    async def noted(store: SqliteStore, *args: Any, **how: Any) -> Any:
        asked.append(args)
        return await ask(store, *args, **how)

    async with opened(path) as ours:
        await ours.create(header())
        ours.append("s", 0, 1, chunk("ours"))
        await ours.flush("s")
        monkeypatch.setattr(SqliteStore, "_ask", noted)
        await ours.check("s")
        assert asked == []

        async with opened(path) as theirs:
            await theirs.load("s")
            theirs.append("s", 1, 1, chunk("theirs"))
            await theirs.flush("s")
        asked.clear()
        ours.append("s", 1, 1, chunk("ours"))
        with pytest.raises(StoreError, match="written by another process"):
            await ours.check("s")
        assert len(asked) == 1


async def test_two_writers_of_one_session_are_told_and_nothing_is_overwritten(path: Path) -> None:
    async with opened(path) as ours, opened(path) as theirs:
        await ours.create(header())
        await theirs.load("s")
        ours.append("s", 0, 1, chunk("ours"))
        await ours.flush("s")

        for seq in range(3):  # the last two would fit behind ours by number
            theirs.append("s", seq, 1, chunk("theirs"))
            with pytest.raises(StoreError, match="written by another process"):
                await theirs.check("s")
            with pytest.raises(StoreError, match="written by another process"):
                await theirs.flush("s")
        await ours.check("s")
        ours.append("s", 1, 1, chunk("ours, too"))
        await ours.flush("s")

        assert await texts(theirs) == ["ours", "ours, too"]
        theirs.append("s", 2, 1, chunk("theirs, after a load"))
        await theirs.flush("s")
        assert await texts(ours) == ["ours", "ours, too", "theirs, after a load"]


async def test_a_conflict_in_one_session_does_not_hold_up_the_others(path: Path) -> None:
    async with opened(path) as ours, opened(path) as theirs:
        await ours.create(header("s"))
        await ours.create(header("t"))
        await theirs.load("s")
        ours.append("s", 0, 1, chunk("ours"))
        await ours.flush("s")

        theirs.append("s", 0, 1, chunk("theirs"))
        theirs.append("t", 0, 1, chunk("fine"))
        await theirs.flush("t")

        assert await texts(ours, "t") == ["fine"]


async def test_a_session_that_another_process_deleted_is_not_lost_in_silence(path: Path) -> None:
    async with opened(path) as ours, opened(path) as theirs:
        await ours.create(header())
        await theirs.delete("s")

        ours.append("s", 0, 1, chunk("where to?"))

        with pytest.raises(StoreError, match="deleted by another process"):
            await ours.flush("s")


async def test_stores_that_make_the_file_at_the_same_time_agree(path: Path) -> None:
    stores = [SqliteStore(path) for _ in range(8)]

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for number, store in enumerate(stores):
                group.start_soon(store.create, header(f"s{number}", title="t"))
        found = [len((await store.list_sessions()).sessions) for store in stores]
        for store in stores:
            await store.aclose()

    assert found == [8] * 8


FIRST_USE = """
import sys, anyio
from agent_core.sessions.sqlite import SqliteStore
from agent_core.sessions.store import SessionHeader

async def main(path, name):
    store = SqliteStore(path)
    await store.create(SessionHeader(name, "/work", 1, 1, name))
    await store.aclose()

sys.stdin.readline()
anyio.run(main, *sys.argv[1:])
"""


def test_processes_that_make_the_file_at_the_same_time_agree(path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", FIRST_USE, path, f"s{number}"], stdin=-1)
        for number in range(6)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()

    assert [process.wait(30) for process in processes] == [0] * 6
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("select count(*) from sessions").fetchone() == (6,)


UNTIL_KILLED = """
import sys, anyio
from agent_core.events import TurnStart, encode
from agent_core.sessions.sqlite import SqliteStore
from agent_core.sessions.store import SessionHeader

async def main(path):
    store = SqliteStore(path)
    await store.create(SessionHeader("s", "/work", 1, 1, "t"))
    for seq in range(10**9):
        store.append("s", seq, 1, encode(TurnStart(seq, "user")))
        if seq % 10 == 9:
            await store.flush("s")
            print(seq, flush=True)

anyio.run(main, sys.argv[1])
"""


def test_a_kill_after_a_flush_loses_nothing(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", UNTIL_KILLED, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    flushed = [int(process.stdout.readline()) for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    flushed += [int(line) for line in process.stdout if line.endswith(b"\n")]
    process.wait(10)
    process.stdout.close()

    async def look() -> list[Event]:
        async with opened(path) as store:
            _, events = await store.load("s")
        return events

    events = anyio.run(look)
    assert len(events) >= flushed[-1] + 1
    assert [event.data for event in events] == [
        TurnStart(seq, "user") for seq in range(len(events))
    ]


# --- its beginning and its end ---------------------------------------------------------------


async def test_a_thread_that_could_not_be_started_is_started_by_the_next_request(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with opened(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                await store.ping()

        await store.create(header())
        await store.ping()


@pytest.mark.race
async def test_whatever_is_asked_while_the_store_closes_is_answered(path: Path) -> None:
    store = SqliteStore(path)
    await store.create(header(title="t"))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.aclose)
            await anyio.lowlevel.checkpoint()  # the thread has been told to end
            with pytest.raises(StoreError, match="closed"):
                await store.list_sessions()
            with pytest.raises(StoreError, match="closed"):
                await store.flush("s")


async def test_a_store_that_was_closed_before_its_first_use_is_closed(path: Path) -> None:
    store = SqliteStore(path)
    await store.aclose()
    await store.aclose()

    with pytest.raises(StoreError, match="closed"):
        await store.ping()
    assert not await anyio.Path(path).exists()


async def test_a_file_with_other_columns_does_not_pass_for_a_store(path: Path) -> None:
    async with opened(path) as store:
        await store.create(header())
        await store.ping()
    with closing(sqlite3.connect(path)) as db:
        db.execute("alter table sessions rename column title to headline")

    async with opened(path) as store:
        with pytest.raises(StoreError):
            await store.ping()


async def test_a_file_of_the_first_version_is_brought_up_to_date(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "create table sessions (id text primary key, cwd text not null, created_ms integer"
            " not null, updated_ms integer not null, title text)"
        )
        db.execute(
            "create table events (session text not null, seq integer not null, time_ms integer"
            " not null, body blob not null, primary key (session, seq)) without rowid"
        )
        db.execute("insert into sessions values ('old', '/work', 1, 1, 'a title')")
        db.execute("pragma user_version = 1")
        db.commit()
    store = SqliteStore(path)

    loaded, _events = await store.load("old")
    await store.create(header("new", title="t"))

    assert (loaded.title, loaded.parent_id, loaded.depth) == ("a title", None, 0)
    assert {found.id for found in (await store.list_sessions()).sessions} == {"old", "new"}
    await store.aclose()
