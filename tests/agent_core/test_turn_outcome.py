"""How turns end, what the log says of it, and what it never says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from core_rig import (
    PARENT,
    USER,
    GatedStore,
    Hang,
    Rig,
    Waiting,
    answer_ok,
    call,
    fail,
    rig,
    say,
    settle,
    tool,
)

from agent_core.cancellation import AbortController, TurnAborted
from agent_core.content import ReasoningPart, Text, TextPart, Usage
from agent_core.errors import ModelError, SessionCorrupt, StoreError
from agent_core.events import (
    Aborted,
    AssistantChunk,
    AssistantMessage,
    Completed,
    ContextMessage,
    Disposed,
    Failed,
    MaxTokens,
    ModelUsage,
    PromptBlocked,
    Refused,
    Rejected,
    RequestHeader,
    StepEnd,
    StepStart,
    TurnEnd,
    TurnStart,
    UserMessage,
    encode,
)
from agent_core.loop import Allow, Refuse
from agent_core.models.adapter import (
    AssistantTurn,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolTurn,
    UsageReport,
    UserTurn,
)
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore


def serialised(r: Rig) -> str:
    return "\n".join(encode(data).decode() for data in r.log)


def errors_of(r: Rig) -> list[Any]:
    return r.record.given("agent/error")


async def cancelled_run(cause: dict[str, str], store: MemoryStore) -> list[str]:
    hang = Hang()
    async with rig(hang, store=store) as r:
        prompt = r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel(cause)
        await r.agent.when_idle()
        return [line.replace(prompt.id, "ID") for line in serialised(r).splitlines()]


# --- the coarse outcome -------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R19", "R20", "R91", "R98")
@pytest.mark.parametrize("cause", [USER, PARENT])
async def test_an_interrupted_turn_ends_as_aborted_and_the_signal_says_who(
    cause: dict[str, str],
) -> None:
    hang = Hang()
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel(cause)
        await r.agent.when_idle()

        last = msgspec.to_builtins(r.log[-1])
        assert last == {"type": "turn/end", "turn": 1, "outcome": {"kind": "aborted"}}
        assert r.model.requests[0].signal.reason == cause
        assert errors_of(r) == []


@pytest.mark.requirement("R2", "R21", "R22")
async def test_the_log_does_not_tell_a_users_cancel_from_a_parents() -> None:
    by_user = await cancelled_run(USER, MemoryStore())
    by_parent = await cancelled_run(PARENT, MemoryStore())

    assert by_user == by_parent
    kinds = {msgspec.json.decode(line)["type"] for line in by_user}
    assert not [kind for kind in kinds if "cancel" in kind or "abort" in kind]


@pytest.mark.requirement("R21", "R79", "R77")
async def test_an_aborted_turn_reads_back_as_it_was_and_says_no_more() -> None:
    store, hang = MemoryStore(), Hang()
    async with rig(hang, store=store) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel(PARENT)
        await r.agent.when_idle()
        again = await Session.load(r.agent.id, store)

        assert list(again.events) == list(r.agent.session.events)
        assert again.messages == r.agent.session.messages
        ends = [encode(e.data) for e in again.events if isinstance(e.data, TurnEnd)]
        assert ends == [b'{"type":"turn/end","turn":1,"outcome":{"kind":"aborted"}}']


@pytest.mark.requirement("R22", "R98")
@pytest.mark.parametrize(
    "outcome",
    [
        b'{"kind":"aborted","reason":"user"}',
        b'{"kind":"aborted","reason":{"kind":"user"}}',
        b'{"kind":"aborted","cause":"parent"}',
        b'{"kind":"disposed","by":"user"}',
        b'{"kind":"user"}',
    ],
)
async def test_a_stored_outcome_that_says_more_is_refused(outcome: bytes) -> None:
    store = MemoryStore()
    async with rig(store=store) as r:
        store.append(r.agent.id, 0, 1, b'{"type":"turn/start","turn":1,"source":"user"}')
        body = b'{"type":"turn/end","turn":1,"outcome":' + outcome + b"}"
        store.append(r.agent.id, 1, 1, body)
        with pytest.raises(SessionCorrupt):
            await Session.load(r.agent.id, store)


@pytest.mark.requirement("R24", "R2")
@pytest.mark.parametrize(
    "smuggled",
    [AbortController().signal, ValueError("x"), {"kind": "user"}, "user", Aborted],
    ids=lambda value: type(value).__name__,
)
async def test_the_log_takes_no_signal_error_or_cause(smuggled: Any) -> None:
    async with rig() as r:
        for data in (smuggled, TurnEnd(1, smuggled), ContextMessage((smuggled,), "x")):
            with pytest.raises(TypeError):
                r.agent.session.append(data)
        assert r.log == []


class BackendError(RuntimeError):
    def __init__(self) -> None:
        super().__init__("SECRET-xyz")
        self.backend_request = "PRIVATE-request-17"
        self.__notes__ = ["PRIVATE-note"]


def deep(error: BaseException, depth: int = 5) -> None:
    if depth:
        deep(error, depth - 1)
    raise error


@pytest.mark.race
@pytest.mark.requirement("R23", "R25", "R27", "R66")
@pytest.mark.parametrize("where", ["adapter", "tool", "listener"])
async def test_an_error_that_only_carried_the_abort_leaves_no_trace_in_the_log(
    where: str,
) -> None:
    waiting = Waiting()

    async def body(context: Any) -> Any:
        waiting.entered.set()
        await context.signal.wait()
        deep(BackendError())

    async def listen(*args: Any) -> Any:
        if where == "listener":
            waiting.entered.set()
            await args[-2].wait()
            deep(BackendError())
        return await args[-1]()

    async def play(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield TextDelta("so far")
        waiting.entered.set()
        await request.signal.wait()
        deep(BackendError())

    script = play if where == "adapter" else call("probe")
    async with rig(script, tools=[tool("probe", body)]) as r:
        r.agent.hooks.on("agent/step-result", listen)
        r.agent.send("A")
        await waiting.entered.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert r.outcomes == [Aborted()]
        assert errors_of(r) == []
        text = serialised(r)
        for leak in ("SECRET", "PRIVATE", "Traceback", "BackendError", ".py", "line "):
            assert leak not in text


@pytest.mark.requirement("R23", "R27", "R67")
async def test_an_unexpected_error_is_logged_by_its_type_only() -> None:
    async with rig(fail(BackendError())) as r:
        r.agent.send("A")
        await r.agent.when_idle()

        (outcome,) = r.outcomes
        assert isinstance(outcome, Failed)
        assert outcome.code == "INTERNAL"
        assert "BackendError" in outcome.message
        text = serialised(r)
        for leak in ("SECRET", "PRIVATE", "Traceback", ".py"):
            assert leak not in text


# --- what decides -------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R64", "R65", "R88")
async def test_disposal_decides_although_a_cancel_took_the_reason() -> None:
    hang = Hang(is_slow=True)
    async with rig(hang) as r:
        prompt = r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel(USER)
        await hang.noticed.wait()
        r.agent.dispose()
        hang.gate.set()
        await r.agent.when_idle()

        assert r.model.requests[0].signal.reason == USER
        assert r.outcomes == [Disposed()]
        assert await prompt.settled() == Disposed()
        assert errors_of(r) == []


@pytest.mark.race
@pytest.mark.requirement("R63", "R65", "R88")
async def test_disposal_aborts_the_turn_with_a_reason_of_its_own() -> None:
    hang = Hang()
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        quiet = r.agent.dispose()
        signal = r.model.requests[0].signal
        assert signal.reason == {"kind": "disposed"}
        r.agent.cancel(PARENT)
        assert signal.reason == {"kind": "disposed"}
        await quiet

        assert r.outcomes == [Disposed()]


@pytest.mark.race
@pytest.mark.requirement("R66")
@pytest.mark.parametrize(
    "error", [RuntimeError("x"), ModelError("x", code="SERVER"), asyncio.CancelledError()]
)
async def test_whatever_an_adapter_raises_because_of_the_abort_the_turn_is_aborted(
    error: BaseException,
) -> None:
    hang = Hang(raising=error)
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert r.outcomes == [Aborted()]
        assert errors_of(r) == []
        assert await r.agent.send("B").settled() == Completed()


@pytest.mark.requirement("R67")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("x"), "INTERNAL"),
        (ModelError("overloaded", code="OVERLOADED"), "OVERLOADED"),
        (TurnAborted("a deadline"), "ABORTED"),
        (asyncio.CancelledError(), "INTERNAL"),
    ],
)
async def test_an_error_nobody_asked_for_is_an_error(error: BaseException, code: str) -> None:
    async with rig(fail(error)) as r:
        r.agent.send("A")
        await r.agent.when_idle()

        (outcome,) = r.outcomes
        assert isinstance(outcome, Failed)
        assert (outcome.code, outcome.step) == (code, 1)
        assert [(turn, step, exc) for _agent, turn, step, exc in errors_of(r)] == [(1, 1, error)]
        assert await r.agent.send("B").settled() == Completed()


@pytest.mark.requirement("R67")
async def test_a_signal_aborted_for_a_foreign_reason_leads_to_the_error_path() -> None:
    async with rig(say("A")) as r:

        async def abort(*args: Any) -> Any:
            holder = r.agent._loop._holder
            assert holder is not None
            holder._controller.abort("a deadline")
            return await args[-1]()

        r.agent.hooks.on("agent/prompt-submit", abort)
        r.agent.send("A")
        await r.agent.when_idle()

        (outcome,) = r.outcomes
        assert isinstance(outcome, Failed)
        assert outcome.code == "ABORTED"
        assert len(errors_of(r)) == 1


@pytest.mark.race
@pytest.mark.requirement("R67")
async def test_an_error_before_the_cancel_stays_an_error() -> None:
    async with rig(fail(ModelError("overloaded", code="OVERLOADED"))) as r:
        r.on_event(TurnEnd, r.agent.cancel)
        r.agent.send("A")
        await r.agent.when_idle()

        assert [type(outcome) for outcome in r.outcomes] == [Failed]
        assert r.model.requests[0].signal.aborted


async def test_a_model_that_says_aborted_by_itself_is_an_error() -> None:
    async with rig(say("so far", finish="aborted")) as r:
        r.agent.send("A")
        await r.agent.when_idle()

        (outcome,) = r.outcomes
        assert isinstance(outcome, Failed)
        assert outcome.code == "ABORTED"
        assert len(errors_of(r)) == 1


async def test_a_model_that_breaks_off_is_an_error_and_never_an_empty_success() -> None:
    async def break_off(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield TextDelta("so far")

    async with rig(break_off) as r:
        r.agent.send("A")
        await r.agent.when_idle()

        (outcome,) = r.outcomes
        assert isinstance(outcome, Failed)
        assert outcome.code == "TRANSPORT"
        assert [m.interrupted for m in r.of(AssistantMessage)] == [True]


async def test_hitting_the_limit_once_marks_the_whole_turn() -> None:
    async with rig(say("A", finish="length"), say("B")) as r:

        async def go_on_once(_agent: Any, _turn: int, _default: bool, *rest: Any) -> bool:
            return len(r.model.requests) == 1

        r.agent.hooks.on("agent/turn-continuation", go_on_once)
        r.agent.send("A")
        await r.agent.when_idle()

        assert len(r.model.requests) == 2
        assert r.outcomes == [MaxTokens()]


@pytest.mark.race
@pytest.mark.requirement("R66")
async def test_an_abort_after_hitting_the_limit_is_an_abort() -> None:
    hang = Hang()
    async with rig(say("A", finish="length"), hang) as r:

        async def go_on(*_args: Any) -> bool:
            return True

        r.agent.hooks.on("agent/turn-continuation", go_on)
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert r.outcomes == [Aborted()]


async def test_calls_of_a_message_that_hit_the_limit_are_dropped() -> None:
    waiting = Waiting()
    script = call("probe", text="so", finish="length")
    async with rig(script, tools=[tool("probe", waiting)]) as r:
        r.agent.send("A")
        await r.agent.when_idle()

        assert waiting.times_entered == 0
        assert r.calls == []
        assert r.outcomes == [MaxTokens()]


async def test_a_refusal_ends_the_turn_as_refused() -> None:
    async with rig(say("no", finish="refusal")) as r:
        assert await r.agent.send("A").settled() == Refused()
        assert r.outcomes == [Refused()]


# --- the prompt's own policy --------------------------------------------------------------------


async def test_a_refused_prompt_reaches_no_model_and_is_no_error() -> None:
    async with rig() as r:

        async def refuse(*_args: Any) -> Refuse:
            return Refuse("not here")

        stop = r.agent.hooks.on("agent/prompt-submit", refuse)
        assert await r.agent.send("A").settled() == Rejected("not here")
        stop()

        assert r.model.requests == []
        assert [blocked.reason for blocked in r.of(PromptBlocked)] == ["not here"]
        assert r.of(StepStart) == []
        assert await r.agent.send("B").settled() == Completed()


async def test_a_listener_may_rewrite_a_prompt_and_add_to_it() -> None:
    async with rig() as r:

        async def rewrite(*_args: Any) -> Allow:
            return Allow((Text("rewritten"),), (Text("besides"),))

        r.agent.hooks.on("agent/prompt-submit", rewrite)
        await r.agent.send("A").settled()

        told, context = r.model.requests[0].messages
        assert told == UserTurn((Text("rewritten"),))
        assert isinstance(context, UserTurn)
        assert "besides" in str(context)


# --- what was said before the cancel ------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R19", "R72")
async def test_text_that_had_streamed_is_kept_as_interrupted_and_told_to_the_model() -> None:
    hang = Hang()
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel()
        await r.agent.send("B").settled()

        (first, second) = r.of(AssistantMessage)
        assert first == AssistantMessage(1, 1, (TextPart("one two "),), interrupted=True)
        assert not second.interrupted
        assert r.kinds.index("assistant/message") < r.kinds.index("step/end")
        assert AssistantTurn((TextPart("one two "),), interrupted=True) in (
            r.model.requests[1].messages
        )


@pytest.mark.race
async def test_reasoning_alone_is_kept_and_half_a_tool_call_is_not() -> None:
    waiting = Waiting()

    async def play(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield ReasoningDelta("hm ")
        yield UsageReport(Usage(3, 1))
        yield ToolCallDelta(0, "probe", '{"te')
        waiting.entered.set()
        await request.signal.wait()
        raise TurnAborted("x")

    async with rig(play, tools=[tool("probe", waiting)]) as r:
        r.agent.send("A")
        await waiting.entered.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        (message,) = r.of(AssistantMessage)
        assert message.content == (ReasoningPart("hm "),)
        assert [each.usage for each in r.of(ModelUsage)] == [Usage(3, 1)]
        assert message.interrupted
        assert r.calls == []
        assert r.results == []


@pytest.mark.race
async def test_blank_text_before_a_cancel_leaves_no_message() -> None:
    waiting = Waiting()

    async def play(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield TextDelta("  \n")
        waiting.entered.set()
        await request.signal.wait()

    async with rig(play) as r:
        r.agent.send("A")
        await waiting.entered.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert r.of(AssistantMessage) == []
        assert r.outcomes == [Aborted()]


@pytest.mark.race
@pytest.mark.requirement("R33", "R72")
async def test_text_is_kept_when_the_cancel_lands_while_the_message_is_processed() -> None:
    async with rig(call("probe", text="said"), tools=[tool("probe", answer_ok)]) as r:

        async def cancel(*args: Any) -> Any:
            r.agent.cancel()
            return await args[-1]()

        r.agent.hooks.on("agent/step-result", cancel)
        await r.agent.send("A").settled()

        (message,) = r.of(AssistantMessage)
        assert message.content == (TextPart("said"),)
        assert message.interrupted
        assert r.calls == []
        assert r.outcomes == [Aborted()]


# --- one send, one turn -------------------------------------------------------------------------


async def test_every_send_is_a_turn_of_its_own_in_the_order_of_arrival() -> None:
    async with rig() as r:
        sent = [r.agent.send(text) for text in "ABC"]
        settled: list[int] = []
        for number, prompt in enumerate(sent):
            assert await prompt.settled() == Completed()
            settled.append(number)

        assert [turn.turn for turn in r.of(TurnStart)] == [1, 2, 3]
        assert [message.id for message in r.of(UserMessage)] == [prompt.id for prompt in sent]
        await r.agent.when_idle()
        assert r.record.statuses == ["running", "idle"]


async def test_a_prompt_is_settled_only_once_its_turn_is_flushed() -> None:
    store = GatedStore()
    async with rig(store=store) as r:
        store.close_gate()
        prompt = r.agent.send("A")
        await store.flushing.wait()
        await settle()
        assert r.kinds[-1] == "turn/end"
        assert not prompt.is_settled
        store.gate.set()

        assert await prompt.settled() == Completed()


async def test_a_failed_flush_is_reported_live_and_changes_no_outcome() -> None:
    class FullStore(MemoryStore):
        async def flush(self, session_id: str) -> None:
            raise StoreError("the disk is full")

    async with rig(store=FullStore()) as r:
        prompt = r.agent.send("A")
        with pytest.raises(StoreError):
            await prompt.settled()

        assert prompt.outcome == Completed()
        assert r.outcomes == [Completed()]
        assert len(errors_of(r)) == 1


async def test_a_vetoed_turn_consumes_no_number_and_the_driver_survives() -> None:
    async with rig() as r:

        def veto(event: Any) -> None:
            if isinstance(event.data, TurnStart):
                raise ValueError("not now")

        allow = r.agent.session.validate(veto)
        prompt = r.agent.send("A")
        await r.agent.when_idle()
        allow()

        assert isinstance(prompt.outcome, Failed)
        assert r.log == []
        assert [(turn, step) for _agent, turn, step, _exc in errors_of(r)] == [(1, 0)]
        assert await r.agent.send("B").settled() == Completed()
        assert [turn.turn for turn in r.of(TurnStart)] == [1]
        assert len(r.model.requests[0].messages) == 1


# --- a balanced log, wherever the abort comes from ------------------------------------------------

COMMITTED: list[type[Any]] = [
    *(TurnStart, UserMessage, StepStart, RequestHeader, AssistantChunk),
    *(AssistantMessage, StepEnd),
]


def is_balanced(r: Rig) -> bool:
    depth: list[str] = []
    for kind in r.kinds:
        if kind in ("turn/start", "step/start"):
            depth.append(kind.split("/")[0])
        elif kind in ("turn/end", "step/end"):
            assert depth, "closed what was not open"
            assert depth.pop() == kind.split("/")[0]
    return not depth


@pytest.mark.race
@pytest.mark.requirement("R72", "R19", "R65")
@pytest.mark.parametrize("verb", ["cancel", "dispose"])
@pytest.mark.parametrize("moment", COMMITTED, ids=lambda kind: kind.__name__)
async def test_an_abort_at_any_commit_stops_the_turn_there(moment: type[Any], verb: str) -> None:
    async with rig() as r:

        def abort() -> None:
            getattr(r.agent, verb)()
            del r.record.seen[:]

        r.on_event(moment, abort)
        r.agent.send("A")
        await r.agent.when_idle()

        assert r.outcomes == [Aborted() if verb == "cancel" else Disposed()]
        assert is_balanced(r)
        awaited = [name for name in r.record.names if name not in ("agent/status",)]
        assert [name for name in awaited if name != "agent/disposed"] == []
        expected = 0 if COMMITTED.index(moment) < COMMITTED.index(AssistantChunk) else 1
        assert len(r.model.requests) == expected
        assert r.model.open_streams == 0


@pytest.mark.race
@pytest.mark.requirement("R36", "R72")
async def test_a_listener_that_cancels_and_votes_to_go_on_does_not_go_on() -> None:
    async with rig() as r:

        async def cancel_and_continue(*_args: Any) -> bool:
            r.agent.cancel()
            return True

        r.agent.hooks.on("agent/turn-continuation", cancel_and_continue)
        await r.agent.send("A").settled()

        assert len(r.model.requests) == 1
        assert "agent/turn-stop" not in r.record.names
        assert r.outcomes == [Aborted()]


@pytest.mark.race
@pytest.mark.requirement("R33")
async def test_an_interrupted_session_prefix_is_composed_anew() -> None:
    async with rig() as r:
        composed: list[bool] = []

        async def compose(_agent: Any, _prefix: Any, signal: Any, _next: Any) -> Any:
            if not composed:
                r.agent.cancel()
            composed.append(signal.aborted)
            return (UserTurn((Text(f"prefix {len(composed)}"),)),)

        r.agent.hooks.on("agent/session-prefix", compose)
        await r.agent.send("A").settled()
        await r.agent.send("B").settled()
        await r.agent.send("C").settled()

        assert composed == [True, False]
        for request in r.model.requests:
            assert request.messages[0] == UserTurn((Text("prefix 2"),))
        assert r.outcomes == [Aborted(), Completed(), Completed()]


@pytest.mark.requirement("R50")
async def test_failing_observers_break_neither_balance_nor_disposal() -> None:
    async with rig(call("probe"), tools=[tool("probe", answer_ok)]) as r:

        def explode(*_args: Any) -> None:
            raise RuntimeError("observer")

        r.agent.session.observe(explode)
        for name in ("agent/status", "agent/error", "agent/queued", "tools/result"):
            r.agent.hooks.on(name, explode)
        r.runtime.hooks.on("agent/disposed", explode)
        assert await r.agent.send("A").settled() == Completed()
        await r.agent.dispose()

        assert is_balanced(r)


async def test_the_request_after_a_cancelled_call_answers_every_call() -> None:
    waiting = Waiting(is_cooperative=True)
    tools = [tool("wait", waiting), tool("probe", answer_ok)]
    async with rig(call("wait", "probe", text="now"), tools=tools) as r:
        r.agent.send("A")
        await waiting.entered.wait()
        r.agent.cancel()
        await r.agent.send("B").settled()

        _user, said, one, two, _again = r.model.requests[1].messages
        assert isinstance(said, AssistantTurn)
        assert [type(turn) for turn in (one, two)] == [ToolTurn, ToolTurn]
        assert [turn.call_id for turn in (one, two)] == [p.id for p in said.content[1:]]  # type: ignore[union-attr]


async def test_usage_is_logged_for_each_model_call_also_for_one_that_said_nothing() -> None:
    async with rig(say("A", usage=Usage(5, 2)), say(usage=Usage(1, 0))) as r:
        await r.agent.send("A").settled()
        await r.agent.send("B").settled()

        assert [each.usage for each in r.of(ModelUsage)] == [Usage(5, 2), Usage(1, 0)]


@pytest.mark.requirement("ACP-086")
async def test_a_refused_prompt_and_all_that_followed_it_is_not_told_to_the_model_again() -> None:
    script = (say("A"), call("probe"), say("no", finish="refusal"), say("B"))
    async with rig(*script, tools=[tool("probe", answer_ok)]) as r:
        await r.agent.send("first").settled()
        await r.agent.send("refused").settled()
        await r.agent.send("third").settled()

        messages = r.model.requests[-1].messages
        assert messages == (
            UserTurn((Text("first"),)),
            AssistantTurn((TextPart("A"),)),
            UserTurn((Text("third"),)),
        )
