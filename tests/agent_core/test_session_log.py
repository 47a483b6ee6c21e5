from __future__ import annotations

import json
import math
from collections.abc import Sequence

import msgspec
import pytest

from agent_core.cancellation import AbortController
from agent_core.content import (
    PlanEntry,
    ReasoningPart,
    Text,
    TextPart,
    ToolCallPart,
)
from agent_core.errors import SessionCorrupt, StoreError
from agent_core.events import (
    Aborted,
    AssistantChunk,
    AssistantMessage,
    Completed,
    ContextMessage,
    Event,
    EventData,
    Interrupted,
    ModeChanged,
    ModelRetry,
    PermissionDecided,
    PlanWritten,
    PromptBlocked,
    SteeringMessage,
    StepEnd,
    StepStart,
    ToolCall,
    ToolProgress,
    ToolResult,
    ToolStart,
    TurnEnd,
    TurnStart,
    UserMessage,
    decode,
    encode,
)
from agent_core.models.adapter import AssistantTurn, ToolTurn, UserTurn
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore
from agent_core.sessions.repair import closers_for, merge_chunks
from agent_core.sessions.store import SessionHeader

HEADER = SessionHeader("s", "/work", 1, 1)


async def new_session(store: MemoryStore | None = None) -> Session:
    return await Session.create(HEADER, store or MemoryStore())


def user(text: str) -> UserMessage:
    return UserMessage("m", (Text(text),), "user")


def said(*parts: object, step: int = 1) -> AssistantMessage:
    return AssistantMessage(1, step, parts)  # type: ignore[arg-type]


def called(call_id: str, name: str = "shell") -> ToolCall:
    return ToolCall(1, 1, call_id, name, "{}", title=name)


def promised(call_id: str, name: str = "shell") -> ToolCallPart:
    return ToolCallPart(call_id, name, "{}")


# --- appending -------------------------------------------------------------------------------


async def test_events_are_numbered_from_zero_without_gaps() -> None:
    session = await new_session()

    events = [session.append(user(str(number))) for number in range(3)]

    assert [event.seq for event in events] == [0, 1, 2]
    assert list(session.events) == events


@pytest.mark.requirement("R24", "R25", "R27")
@pytest.mark.parametrize(
    "bad",
    [
        "just text",
        {"type": "turn/start", "turn": 1, "source": "user"},
        None,
        AbortController().signal,
        RuntimeError("SECRET"),
        TurnStart(1, AbortController().signal),  # type: ignore[arg-type]
        TurnStart(1, RuntimeError("SECRET")),  # type: ignore[arg-type]
        TurnStart(1, RuntimeError),  # type: ignore[arg-type]
        TurnEnd(1, RuntimeError("SECRET")),  # type: ignore[arg-type]
        TurnEnd(1, {"kind": "aborted", "reason": "user"}),  # type: ignore[arg-type]
        TurnStart("one", "user"),  # type: ignore[arg-type]
        TurnStart(1, b"bytes"),  # type: ignore[arg-type]
        TurnStart(1, {"user"}),  # type: ignore[arg-type]
        UserMessage("m", [Text("a list")], "user"),  # type: ignore[arg-type]
        ModelRetry(1, 1, 1, math.nan, "RATE_LIMIT", "later"),
        ModelRetry(1, 1, 1, math.inf, "RATE_LIMIT", "later"),
    ],
    ids=lambda bad: repr(bad)[:40],
)
async def test_what_is_not_an_event_of_lossless_json_is_refused(bad: EventData) -> None:
    session = await new_session()

    with pytest.raises(TypeError):
        session.append(bad)

    assert list(session.events) == []
    assert session.append(TurnStart(1, "user")).seq == 0


async def test_lone_surrogates_are_replaced_everywhere_and_pairs_survive() -> None:
    session = await new_session()

    message = session.append(user("a\ud800b \U0001f600 \udfffc"))
    call = session.append(ToolCall(1, 1, "c", "shell", '{"x":"\ud83d"}', title="\udc80"))

    assert message.data == user("a\ufffdb \U0001f600 \ufffdc")
    assert call.data == ToolCall(1, 1, "c", "shell", '{"x":"\ufffd"}', title="\ufffd")
    assert session.messages == (UserTurn((Text("a\ufffdb \U0001f600 \ufffdc"),)),)


async def test_the_event_in_the_log_is_detached_from_what_was_appended() -> None:
    session = await new_session()
    data = user("text")

    event = session.append(data)

    assert event.data == data
    assert event.data is not data
    with pytest.raises(AttributeError):
        event.seq = 7  # type: ignore[misc]


async def test_a_validator_vetoes_before_anything_happens() -> None:
    store = MemoryStore()
    session = await new_session(store)
    heard: list[Event] = []
    session.observe(heard.append)

    def veto(event: Event) -> None:
        raise ValueError("not this one")

    stop = session.validate(veto)
    with pytest.raises(ValueError, match="not this one"):
        session.append(user("no"))
    stop()
    stop()
    kept = session.append(user("yes"))

    assert list(session.events) == heard == [kept]
    assert kept.seq == 0
    assert session.messages == (UserTurn((Text("yes"),)),)
    assert (await store.load("s"))[1] == [kept]


async def test_an_observer_that_fails_undoes_nothing_and_hides_nothing_from_the_next() -> None:
    session = await new_session()
    heard: list[Event] = []

    def fail(event: Event) -> None:
        raise RuntimeError("observer")

    session.observe(fail)
    session.observe(heard.append)
    event = session.append(user("kept"))

    assert list(session.events) == heard == [event]


async def test_an_observer_sees_the_state_the_event_led_to() -> None:
    session = await new_session()
    seen: list[int] = []
    session.observe(lambda event: seen.append(session.state.last_turn))

    session.append(TurnStart(4, "user"))

    assert seen == [4]


@pytest.mark.parametrize("register", ["observe", "validate"])
async def test_an_append_from_inside_an_append_is_refused(register: str) -> None:
    session = await new_session()
    refused: list[RuntimeError] = []

    def again(event: Event) -> None:
        try:
            session.append(user("inner"))
        except RuntimeError as exc:
            refused.append(exc)

    getattr(session, register)(again)
    session.append(user("outer"))

    assert len(refused) == 1
    assert [event.data for event in session.events] == [user("outer")]


async def test_a_removed_observer_hears_nothing_more() -> None:
    session = await new_session()
    heard: list[Event] = []
    stop = session.observe(heard.append)
    session.append(user("one"))

    stop()
    session.append(user("two"))

    assert [event.data for event in heard] == [user("one")]


async def test_a_session_is_not_created_twice() -> None:
    store = MemoryStore()
    await new_session(store)

    with pytest.raises(StoreError):
        await new_session(store)


# --- what the log means ----------------------------------------------------------------------


async def test_the_history_tells_what_was_said_called_and_found() -> None:
    session = await new_session()
    for data in (
        TurnStart(1, "user"),
        user("do it"),
        ContextMessage((Text("it is Monday"),), "clock"),
        StepStart(1, 1),
        AssistantChunk(1, 1, "On "),
        said(ReasoningPart("hm"), TextPart("On it"), promised("c1")),
        called("c1"),
        ToolStart("c1"),
        ToolProgress("c1", "half way"),
        ToolResult(1, 1, "c1", "found", is_error=True),
        StepEnd(1, 1),
        SteeringMessage("m2", 1, (Text("and quickly"),), "user"),
        StepStart(1, 2),
        AssistantMessage(1, 2, (), interrupted=True),
        AssistantMessage(1, 2, (TextPart("Do"),), interrupted=True),
        StepEnd(1, 2),
        TurnEnd(1, Aborted()),
        PromptBlocked("m3", (Text("forbidden"),), "user", "policy"),
    ):
        session.append(data)

    assert session.messages == (
        UserTurn((Text("do it"),)),
        UserTurn((Text("<context source='clock'>\nit is Monday\n</context>"),)),
        AssistantTurn((ReasoningPart("hm"), TextPart("On it"), promised("c1"))),
        ToolTurn("c1", "shell", "found", True),
        UserTurn((Text("and quickly"),)),
        AssistantTurn((TextPart("Do"),), interrupted=True),
    )


@pytest.mark.parametrize(
    ("prompt", "title"),
    [
        ("Fix it\nplease", "Fix it"),
        ("\n  \n  indented  \n", "indented"),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * 79 + "…"),
        ("", "(no text)"),
        (" \n", "(no text)"),
    ],
)
async def test_the_title_is_the_first_line_of_the_first_prompt(prompt: str, title: str) -> None:
    store = MemoryStore()
    session = await new_session(store)
    before = session.state.title

    session.append(user(prompt))
    session.append(user("a later prompt"))

    assert before is None
    assert session.state.title == title
    assert (await store.load("s"))[0].title == title


async def test_a_blocked_prompt_names_the_session_too() -> None:
    session = await new_session()

    session.append(PromptBlocked("m", (Text("Forbidden"),), "user", "policy"))

    assert session.state.title == "Forbidden"
    assert session.messages == ()


async def test_the_latest_mode_plan_and_answers_count() -> None:
    session = await new_session()
    for data in (
        ModeChanged("read-only"),
        ModeChanged("ask"),
        PlanWritten((PlanEntry("old"),)),
        PlanWritten((PlanEntry("new", status="completed"),)),
        PermissionDecided("c1", "allowed"),
        PermissionDecided("c2", "allowed", "shell:make"),
        PermissionDecided("c3", "rejected", "shell:rm"),
        PermissionDecided("c4", "rejected", "write"),
        PermissionDecided("c5", "allowed", "write"),
    ):
        session.append(data)

    assert session.state.mode == "ask"
    assert session.state.plan == (PlanEntry("new", status="completed"),)
    assert session.state.remembered == {"shell:make": True, "shell:rm": False, "write": True}


async def test_a_turn_is_open_between_its_start_and_its_end() -> None:
    session = await new_session()
    states = []
    for data in (TurnStart(7, "user"), TurnEnd(7, Completed())):
        session.append(data)
        states.append((session.state.last_turn, session.state.open_turn))

    assert states == [(7, True), (7, False)]


# --- the aborted outcome ---------------------------------------------------------------------


@pytest.mark.requirement("R19", "R21", "R79")
async def test_an_aborted_turn_survives_json_and_says_nothing_more() -> None:
    store = MemoryStore()
    session = await new_session(store)
    for data in (TurnStart(1, "user"), user("stop me"), TurnEnd(1, Aborted())):
        session.append(data)

    log = [
        (event.seq, event.time_ms, json.loads(json.dumps(msgspec.to_builtins(event.data))))
        for event in session.events
    ]
    again = [Event(seq, ms, decode(json.dumps(body).encode())) for seq, ms, body in log]
    restored = Session(HEADER, store, again)

    assert log[-1][2] == {"type": "turn/end", "turn": 1, "outcome": {"kind": "aborted"}}
    assert list(restored.events) == list(session.events)
    assert restored.messages == session.messages
    assert list((await Session.load("s", store)).events) == list(session.events)


@pytest.mark.requirement("R22", "R26", "R90", "R91", "R98")
@pytest.mark.parametrize(
    "outcome",
    [
        {"kind": "aborted", "reason": {"kind": "user"}},
        {"kind": "aborted", "reason": "user"},
        {"kind": "aborted", "message": "because"},
        {"kind": "aborted", "by": None},
        {"kind": "user"},
        {"kind": "parent"},
        {},
        "aborted",
        None,
    ],
    ids=str,
)
async def test_a_stored_turn_end_that_says_who_or_why_is_refused(outcome: object) -> None:
    store = MemoryStore()
    await store.create(HEADER)
    body = msgspec.json.encode({"type": "turn/end", "turn": 1, "outcome": outcome})
    store.append("s", 0, 1, encode(TurnStart(1, "user")))
    store.append("s", 1, 1, body)

    with pytest.raises(msgspec.ValidationError):
        decode(body)
    with pytest.raises(SessionCorrupt):
        await Session.load("s", store)


# --- closing what a crash left open ----------------------------------------------------------

OPEN = (TurnStart(1, "user"), user("go"))
STEP = (*OPEN, StepStart(1, 1))
NOT_STARTED = "TOOL_NOT_STARTED"
UNKNOWN = "TOOL_OUTCOME_UNKNOWN"

CRASHES: dict[str, tuple[Sequence[EventData], list[tuple[str, str | None]], str | None]] = {
    # what was logged; the tool results then, in order; the text kept as interrupted
    "nothing": (OPEN[:1], [], None),
    "a prompt": (OPEN, [], None),
    "a step": (STEP, [], None),
    "chunks": (
        (*STEP, AssistantChunk(1, 1, "Hel"), AssistantChunk(1, 1, "lo")),
        [],
        "Hello",
    ),
    "blank chunks": ((*STEP, AssistantChunk(1, 1, " \n")), [], None),
    "a message": ((*STEP, AssistantChunk(1, 1, "Hello"), said(TextPart("Hello"))), [], None),
    "promised calls": (
        (*STEP, said(promised("a"), promised("b", "read"))),
        [("a", NOT_STARTED), ("b", NOT_STARTED)],
        None,
    ),
    "some announced": (
        (*STEP, said(promised("a"), promised("b"), promised("c")), called("a"), called("b")),
        [("a", NOT_STARTED), ("b", NOT_STARTED), ("c", NOT_STARTED)],
        None,
    ),
    "one started": (
        (*STEP, said(promised("a"), promised("b")), called("a"), ToolStart("a")),
        [("a", UNKNOWN), ("b", NOT_STARTED)],
        None,
    ),
    "one done": (
        (
            *STEP,
            said(promised("a"), promised("b"), promised("c")),
            called("a"),
            ToolStart("a"),
            ToolResult(1, 1, "a", "fine"),
            called("b"),
            ToolStart("b"),
        ),
        [("a", None), ("b", UNKNOWN), ("c", NOT_STARTED)],
        None,
    ),
    "all done": (
        (
            *STEP,
            said(promised("a")),
            called("a"),
            ToolStart("a"),
            ToolResult(1, 1, "a", "fine"),
        ),
        [("a", None)],
        None,
    ),
    "the step's end": ((*STEP, said(TextPart("Hello")), StepEnd(1, 1)), [], None),
    "a second step": (
        (
            *STEP,
            AssistantChunk(1, 1, "first"),
            said(TextPart("first")),
            StepEnd(1, 1),
            StepStart(1, 2),
            AssistantChunk(1, 2, "second"),
        ),
        [],
        "second",
    ),
    "a retried call": (
        (*STEP, ModelRetry(1, 1, 1, 0.5, "OVERLOADED", "busy"), AssistantChunk(1, 1, "again")),
        [],
        "again",
    ),
}


async def stored(data: Sequence[EventData]) -> MemoryStore:
    store = MemoryStore()
    await store.create(HEADER)
    for seq, item in enumerate(data):
        store.append("s", seq, 1000, encode(item))
    return store


@pytest.mark.parametrize("crash", CRASHES)
async def test_a_turn_that_a_crash_left_open_is_closed_as_interrupted(crash: str) -> None:
    logged, results, text = CRASHES[crash]
    store = await stored(logged)

    session = await Session.load("s", store)

    data = [event.data for event in session.events]
    assert data[: len(logged)] == list(logged)
    assert data[-1] == TurnEnd(1, Interrupted())
    assert count(data, StepStart) == count(data, StepEnd)
    assert count(data, TurnStart) == count(data, TurnEnd) == 1
    found = [(item.call_id, item.code) for item in data if isinstance(item, ToolResult)]
    assert found == results
    assert [item.call_id for item in data if isinstance(item, ToolCall)] == [
        call_id for call_id, _ in results
    ]
    kept = [
        item.content for item in data if isinstance(item, AssistantMessage) and item.interrupted
    ]
    assert kept == ([] if text is None else [(TextPart(text),)])
    assert not session.state.open_turn


@pytest.mark.parametrize("crash", CRASHES)
async def test_a_repaired_log_is_whole_and_stays_as_it_is(crash: str) -> None:
    logged, _, _ = CRASHES[crash]
    store = await stored(logged)

    once = await Session.load("s", store)
    twice = await Session.load("s", store)
    elsewhere = await Session.load("s", await stored(logged))

    assert closers_for(once.events) == []
    assert list(twice.events) == list(once.events)
    assert [event.data for event in elsewhere.events] == [event.data for event in once.events]
    unanswered = {
        part.id
        for message in once.messages
        if isinstance(message, AssistantTurn)
        for part in message.content
        if isinstance(part, ToolCallPart)
    } - {message.call_id for message in once.messages if isinstance(message, ToolTurn)}
    assert unanswered == set()


async def test_only_the_last_turn_can_be_open() -> None:
    closed = (*OPEN, TurnEnd(1, Completed()))
    store = await stored((*closed, TurnStart(2, "user"), StepStart(2, 1)))

    session = await Session.load("s", store)

    assert [event.data for event in session.events[len(closed) + 2 :]] == [
        StepEnd(2, 1),
        TurnEnd(2, Interrupted()),
    ]


@pytest.mark.parametrize("data", [(), (ModeChanged("ask"),), (*OPEN, TurnEnd(1, Aborted()))])
async def test_a_log_without_an_open_turn_needs_no_repair(data: Sequence[EventData]) -> None:
    store = await stored(data)

    session = await Session.load("s", store)

    assert [event.data for event in session.events] == list(data)


def test_chunks_are_joined_in_stream_order_and_blank_parts_left_out() -> None:
    chunks = [
        AssistantChunk(1, 1, "hm", reasoning=True),
        AssistantChunk(1, 1, " yes", reasoning=True),
        AssistantChunk(1, 1, "\n"),
        AssistantChunk(1, 1, "so", reasoning=True),
        AssistantChunk(1, 1, "Hel"),
        AssistantChunk(1, 1, "lo "),
    ]

    assert merge_chunks(chunks) == (
        ReasoningPart("hm yes"),
        ReasoningPart("so"),
        TextPart("Hello "),
    )


def count(data: Sequence[EventData], kind: type) -> int:
    return sum(isinstance(item, kind) for item in data)
