from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from agent_core.content import Text
from agent_core.errors import SessionCorrupt, SessionNotFound, StoreError
from agent_core.events import (
    AssistantChunk,
    Completed,
    Event,
    TurnEnd,
    TurnStart,
    UserMessage,
    encode,
)
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore
from agent_core.sessions.sqlite import SqliteStore
from agent_core.sessions.store import SessionHeader, SessionStore


@asynccontextmanager
async def opened(kind: str, tmp_path: Path) -> AsyncIterator[SessionStore]:
    store: SessionStore = (
        MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "state" / "sessions.db")
    )
    with anyio.fail_after(20):
        yield store
        await store.aclose()


Opened = AbstractAsyncContextManager[SessionStore]


@pytest.fixture(params=["memory", "sqlite"])
def fresh_store(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    return opened(request.param, tmp_path)


def header(session_id: str, ms: int = 1000, title: str | None = None) -> SessionHeader:
    return SessionHeader(session_id, "/work", ms, ms, title)


def chunk(text: str) -> bytes:
    return encode(AssistantChunk(1, 1, text))


async def titles(store: SessionStore, **query: object) -> list[str]:
    page = await store.list_sessions(**query)  # type: ignore[arg-type]
    return [session.id for session in page.sessions]


@pytest.mark.requirement("B083")
async def test_a_session_is_loaded_as_it_was_appended(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.create(header("s", 5))
        store.append("s", 0, 11, chunk("grüße"))
        store.append("s", 1, 12, chunk("\x00\U0001f600"))
        await store.flush("s")

        loaded, events = await store.load("s")

        assert loaded == SessionHeader("s", "/work", 5, 5, None)
        assert events == [
            Event(0, 11, AssistantChunk(1, 1, "grüße")),
            Event(1, 12, AssistantChunk(1, 1, "\x00\U0001f600")),
        ]


async def test_a_load_without_a_flush_sees_what_was_appended_before_it(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.create(header("s"))
        for seq in range(200):
            store.append("s", seq, 1, chunk(str(seq)))
        store.touch("s", 77, "a title")

        loaded, events = await store.load("s")

        assert [event.seq for event in events] == list(range(200))
        assert (loaded.updated_ms, loaded.title) == (77, "a title")


async def test_an_id_is_created_once(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.create(header("s"))
        store.append("s", 0, 1, chunk("kept"))

        with pytest.raises(StoreError, match="already"):
            await store.create(header("s"))

        assert len((await store.load("s"))[1]) == 1


async def test_an_unknown_id_is_not_found(fresh_store: Opened) -> None:
    async with fresh_store as store:
        with pytest.raises(SessionNotFound):
            await store.load("nobody")


async def test_an_event_that_would_leave_a_gap_is_dropped(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.create(header("s"))
        store.append("s", 1, 1, chunk("too early"))
        store.append("s", 0, 1, chunk("first"))
        store.append("s", 2, 1, chunk("too early"))
        await store.flush("s")

        assert [event.data for event in (await store.load("s"))[1]] == [
            AssistantChunk(1, 1, "first")
        ]


@pytest.mark.requirement("B086")
async def test_a_deleted_session_does_not_come_back_with_a_late_append(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.create(header("s"))
        store.append("s", 0, 1, chunk("one"))
        store.touch("s", 2000, "title")

        await store.delete("s")
        store.append("s", 1, 1, chunk("late"))
        store.append("s", 0, 1, chunk("late"))
        store.touch("s", 3000, "title")
        await store.flush("s")

        with pytest.raises(SessionNotFound):
            await store.load("s")
        assert await titles(store) == []
        await store.delete("s")
        await store.create(header("s"))
        assert (await store.load("s"))[1] == []


async def test_deleting_one_session_leaves_the_others(fresh_store: Opened) -> None:
    async with fresh_store as store:
        for session_id in "ab":
            await store.create(header(session_id, title=session_id))
            store.append(session_id, 0, 1, chunk(session_id))

        await store.delete("a")

        assert await titles(store) == ["b"]
        assert len((await store.load("b"))[1]) == 1


async def test_the_first_title_stays_and_the_time_moves_on(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.create(header("s", 1))
        store.touch("s", 2, None)
        store.touch("s", 3, "first")
        store.touch("s", 4, "second")
        store.touch("s", 5, None)

        loaded, _ = await store.load("s")

        assert (loaded.created_ms, loaded.updated_ms, loaded.title) == (1, 5, "first")


@pytest.mark.requirement("B084")
async def test_a_session_is_listed_from_its_first_prompt_on(fresh_store: Opened) -> None:
    async with fresh_store as store:
        for number in range(20):
            await store.create(header(f"empty-{number}"))
        await store.create(header("s"))
        before = await titles(store)

        store.touch("s", 2000, "now it has one")

        assert before == []
        assert await titles(store) == ["s"]
        assert (await store.load("empty-3"))[1] == []


async def test_sessions_are_listed_latest_first_and_ids_break_ties(fresh_store: Opened) -> None:
    async with fresh_store as store:
        for session_id, ms in [("b", 5), ("é", 5), ("a", 9), ("c", 5), ("d", 1)]:
            await store.create(header(session_id, ms, "t"))

        assert await titles(store) == ["a", "é", "c", "b", "d"]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
async def test_pages_show_every_session_once_even_with_equal_times(
    fresh_store: Opened, limit: int
) -> None:
    async with fresh_store as store:
        for number in range(7):
            await store.create(header(f"s{number}", 1000 + number // 3, "t"))
        seen: list[str] = []
        cursor: str | None = None
        while True:
            page = await store.list_sessions(cursor=cursor, limit=limit)
            assert 0 < len(page.sessions) <= limit
            seen += [session.id for session in page.sessions]
            cursor = page.next_cursor
            if cursor is None:
                break

        assert seen == ["s6", "s5", "s4", "s3", "s2", "s1", "s0"]


async def test_a_session_created_between_two_pages_repeats_nothing(fresh_store: Opened) -> None:
    async with fresh_store as store:
        for number in range(4):
            await store.create(header(f"s{number}", 1000 + number, "t"))
        first = await store.list_sessions(limit=2)

        await store.create(header("new", 9000, "t"))

        assert await titles(store, cursor=first.next_cursor, limit=2) == ["s1", "s0"]


async def test_only_sessions_of_exactly_the_directory_are_listed(fresh_store: Opened) -> None:
    async with fresh_store as store:
        for session_id, cwd in [("a", "/x"), ("b", "/x/y"), ("c", "/x")]:
            await store.create(SessionHeader(session_id, cwd, 1, 1, "t"))

        assert await titles(store, cwd="/x") == ["c", "a"]
        assert await titles(store, cwd="/") == []


@pytest.mark.parametrize("cursor", ["", "nonsense", "é", "WzEsMl0", "W10", "bnVsbA", "a", "[1]"])
async def test_a_foreign_cursor_is_refused(fresh_store: Opened, cursor: str) -> None:
    async with fresh_store as store:
        with pytest.raises(ValueError, match="cursor"):
            await store.list_sessions(cursor=cursor)


@pytest.mark.requirement("R22", "R98")
async def test_an_outcome_that_says_more_than_aborted_is_refused(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.create(header("s"))
        store.append("s", 0, 1, encode(TurnStart(1, "user")))
        bad = {"type": "turn/end", "turn": 1, "outcome": {"kind": "aborted", "reason": "user"}}
        store.append("s", 1, 1, msgspec.json.encode(bad))

        with pytest.raises(SessionCorrupt, match="event 1"):
            await Session.load("s", store)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"type":"who/knows"}', b"[" * 3000])
async def test_a_body_that_cannot_be_read_makes_the_session_corrupt(
    fresh_store: Opened, body: bytes
) -> None:
    async with fresh_store as store:
        await store.create(header("s"))
        store.append("s", 0, 1, body)

        with pytest.raises(SessionCorrupt):
            await store.load("s")


async def test_a_cancelled_flush_still_writes_what_was_enqueued(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.create(header("s"))
        store.append("s", 0, 1, chunk("kept"))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await store.flush("s")

        assert len((await store.load("s"))[1]) == 1


async def test_many_tasks_append_and_flush_at_the_same_time(fresh_store: Opened) -> None:
    async with fresh_store as store:

        async def work(session_id: str) -> None:
            await store.create(header(session_id, title="t"))
            for seq in range(50):
                store.append(session_id, seq, 1, chunk(str(seq)))
                if seq % 7 == 0:
                    await store.flush(session_id)
            await store.flush(session_id)

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(work, f"s{number}")

        for number in range(10):
            _, events = await store.load(f"s{number}")
            assert [event.seq for event in events] == list(range(50))
        assert len(await titles(store)) == 10


async def test_a_store_that_can_be_read_answers_a_ping(fresh_store: Opened) -> None:
    async with fresh_store as store:
        await store.ping()


async def test_a_conversation_survives_the_way_through_the_store(fresh_store: Opened) -> None:
    async with fresh_store as store:
        session = await Session.create(header("s"), store)
        session.append(TurnStart(1, "user"))
        session.append(UserMessage("m1", (Text("Hello\nthere"),), "user"))
        session.append(TurnEnd(1, Completed()))
        await session.flush()

        again = await Session.load("s", store)

        assert list(again.events) == list(session.events)
        assert again.messages == session.messages
        assert (await store.list_sessions()).sessions[0].title == "Hello"


async def test_with_a_session_its_subagents_go_however_deep_and_nobody_else(
    fresh_store: Opened,
) -> None:
    async with fresh_store as store:
        for session_id, parent in (
            ("a", None),
            ("a1", "a"),
            ("a2", "a"),
            ("a11", "a1"),
            ("b", None),
            ("b1", "b"),
        ):
            await store.create(SessionHeader(session_id, "/work", 1, 1, "t", parent))
            store.append(session_id, 0, 1, chunk("SECRET"))
            await store.flush(session_id)

        await store.delete("a")

        for gone in ("a", "a1", "a2", "a11"):
            with pytest.raises(SessionNotFound):
                await store.load(gone)
        for kept in ("b", "b1"):
            assert len((await store.load(kept))[1]) == 1
        store.append("a11", 1, 1, chunk("late"))
        await store.flush("a11")
        with pytest.raises(SessionNotFound):
            await store.load("a11")
