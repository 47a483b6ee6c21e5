from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import Entry, Hang, Rig, ScriptedModel, call, fail, rig, say, tool
from dialects import APIS, call_read, last_words
from model_rig import served
from msgspec import structs

from agent_core.agent import Agent
from agent_core.cancellation import AbortController, AbortSignal, TurnAborted
from agent_core.compaction import CompactionResult, Compactor, compact
from agent_core.content import ReasoningPart, Text, TextPart, ToolCallPart, Usage, text_of
from agent_core.errors import ModelError
from agent_core.events import (
    Aborted,
    AssistantMessage,
    CompactionEnd,
    CompactionStart,
    Completed,
    Disposed,
    Event,
    EventData,
    Failed,
    ModelRetry,
    ModelUsage,
    Rejected,
    RequestHeader,
    SteeringMessage,
    StepStart,
    ToolResult,
    TurnStart,
    UserMessage,
)
from agent_core.loop import Refuse
from agent_core.models.adapter import (
    AssistantTurn,
    Finish,
    Message,
    ModelAdapter,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolTurn,
    UserTurn,
)
from agent_core.models.providers import Api
from agent_core.models.rehearsal import RehearsalModel
from agent_core.models.retry import RetryingModel
from agent_core.runtime import AgentRuntime
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore
from agent_core.sessions.projection import Projection
from agent_core.sessions.repair import closers_for
from agent_core.subagents import SubagentRequest
from agent_core.summary import SUMMARISER
from agent_core.testing import abort_at_every_await
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.read import Read
from agent_core.tools.tool import ToolContext, ToolOutput
from agent_core.usage import context_tokens, rough_tokens
from conformance.providers.server import Reply, status

LONG = "word " * 400  # 500 tokens
TOO_LONG = ModelError("the prompt is too long", code="CONTEXT_TOO_LONG")


class Model(ScriptedModel):
    """Plays `notes` when it is asked for a summary, and its script otherwise."""

    def __init__(
        self,
        *script: Entry,
        notes: Sequence[Entry] = (),
        context_tokens: int | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(script)
        self.info = ModelInfo("scripted", context_tokens=context_tokens, **facts)
        self.asked: list[ModelRequest] = []  # for a summary
        self._notes = list(notes)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        if request.system != SUMMARISER:
            async with aclosing(super().stream(request)) as events:
                async for event in events:
                    yield event
            return
        self.asked.append(request)
        entry = self._notes.pop(0) if self._notes else say("the notes")
        self.open_streams += 1
        try:
            async with aclosing(entry(request)) as events:
                async for event in events:
                    yield event
        finally:
            self.open_streams -= 1

    @property
    def told(self) -> str:
        """What the latest request for a summary says."""
        (message,) = self.asked[-1].messages
        return words(message)


@asynccontextmanager
async def compactable(model: Model, **options: Any) -> AsyncIterator[Rig]:
    """A rig whose agent compacts when it is told ``/compact``."""
    async with rig(model=model, **options) as at:

        async def answer(
            agent: Agent, content: Any, _source: str, signal: AbortSignal, next_: Any
        ) -> Any:
            if text_of(content) != "/compact":
                return await next_()
            return Refuse((await compact(agent, signal)).sentence)

        at.agent.hooks.on("agent/prompt-submit", answer)
        yield at


def words(message: Message) -> str:
    assert isinstance(message, UserTurn)
    return text_of(message.content)


def ends(at: Rig) -> list[str]:
    """How the compactions ended; each has one end, right where it belongs."""
    log = [data for data in at.log if isinstance(data, CompactionStart | CompactionEnd)]
    for start, end in zip(log[::2], log[1::2], strict=True):
        assert isinstance(start, CompactionStart)
        assert isinstance(end, CompactionEnd)
        assert start.id == end.id
    assert len({data.id for data in log}) * 2 == len(log)
    return [data.status for data in log if isinstance(data, CompactionEnd)]


def is_valid(messages: Sequence[Message]) -> bool:
    """Say whether the history begins with a user and every call has its result right behind it."""
    owed: list[str] = []
    for message in messages:
        if isinstance(message, ToolTurn):
            if message.call_id not in owed:
                return False
            owed.remove(message.call_id)
        elif owed:
            return False
        elif isinstance(message, AssistantTurn):
            owed = [part.id for part in message.content if isinstance(part, ToolCallPart)]
    return bool(messages) and isinstance(messages[0], UserTurn) and not owed


async def answer_long(_context: ToolContext) -> ToolOutput:
    return ToolOutput(LONG)


LOOK = tool("look", answer_long)
SUMMARY = '<summary of="earlier">\nthe notes\n</summary>'
DONE_TOO = "\nIt includes what was already done about the request that follows."


# --- asked for ------------------------------------------------------------------------------


async def test_a_summary_takes_the_place_of_the_history() -> None:
    model = Model(say(LONG), say("as I said"))
    async with compactable(model) as at:
        await at.agent.send("explain").settled()

        outcome = await at.agent.send("/compact").settled()
        assert await at.agent.send("and now?").settled() == Completed()

        assert isinstance(outcome, Rejected)
        assert outcome.reason.startswith("Compacted: about 6")
        assert ends(at) == ["completed"]
        assert [words(message) for message in model.requests[-1].messages] == [SUMMARY, "and now?"]


async def test_the_request_for_a_summary_is_one_plain_text_in_the_turns_own_signal() -> None:
    model = Model(call("look"), say("seen"), efforts=("low", "high"), context_tokens=10_000)
    async with compactable(model, tools=[LOOK]) as at:
        await at.agent.send("look at it").settled()
        await at.agent.send("/compact").settled()

        (request,) = model.asked
        assert request.system == SUMMARISER
        assert request.tools == ()
        assert (request.effort, request.max_output_tokens) == ("low", 1_500)
        assert request.signal is at.record.signals[-1][1]
        for told in (
            "[user]\nlook at it\n",
            "[assistant, calling look]\n{}\n",
            f"[result of look]\n{LONG.strip()}",
            "[assistant]\nseen\n",
        ):
            assert told in model.told


async def test_with_nothing_said_there_is_nothing_to_compact() -> None:
    model = Model()
    async with compactable(model) as at:
        outcome = await at.agent.send("/compact").settled()

        assert outcome == Rejected("There is nothing to compact.")
        assert ends(at) == []
        assert model.asked == []


async def test_what_was_compacted_just_now_is_not_compacted_again() -> None:
    model = Model(say(LONG))
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        await at.agent.send("/compact").settled()

        assert await at.agent.send("/compact").settled() == Rejected("There is nothing to compact.")
        assert ends(at) == ["completed"]


async def test_the_next_summary_carries_the_earlier_one_over() -> None:
    model = Model(say(LONG), say(LONG), notes=[say("first notes"), say("second notes")])
    async with compactable(model) as at:
        for prompt in ("explain", "/compact", "more", "/compact"):
            await at.agent.send(prompt).settled()

        assert "first notes" in model.told
        assert ends(at) == ["completed", "completed"]
        (message,) = at.agent.session.messages
        assert "second notes" in words(message)
        assert "first notes" not in words(message)


async def test_outside_of_a_turn_nothing_is_compacted() -> None:
    async with rig(model=Model(say(LONG))) as at:
        await at.agent.send("explain").settled()

        with pytest.raises(RuntimeError, match="part of a turn"):
            await compact(at.agent, AbortController().signal)

        assert ends(at) == []


async def test_what_the_summary_took_is_logged_behind_its_end_with_what_the_context_now_holds() -> (
    None
):
    model = Model(say(LONG, usage=Usage(100, 600)), notes=[say("the notes", usage=Usage(700, 9))])
    async with compactable(model) as at:
        at.agent.system_prompt.section("place", "x" * 1_000)
        await at.agent.send("explain").settled()
        before = context_tokens(at.agent.session.state)
        outcome = await at.agent.send("/compact").settled()

        assert at.kinds[-5:] == [
            "compaction/start",
            "compaction/end",
            "model/usage",
            "prompt/blocked",
            "turn/end",
        ]
        usage = at.of(ModelUsage)[-1]
        system = len(at.of(RequestHeader)[-1].system) // 4
        assert usage.usage == Usage(700, 9)
        assert usage.context_tokens == system + rough_tokens(at.agent.session.messages)
        assert usage.context_tokens == context_tokens(at.agent.session.state)
        assert before == 700
        assert outcome == Rejected(f"Compacted: about 700 → {usage.context_tokens:,} tokens.")


async def test_a_summary_that_hit_its_limit_says_so() -> None:
    model = Model(say(LONG), notes=[say("half of", finish="length")])
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        await at.agent.send("/compact").settled()

        assert ends(at) == ["completed"]
        assert "half of\n[The summary was cut off here.]" in words(at.agent.session.messages[0])


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ((12_345, 912), "Compacted: about 12,300 → 912 tokens."),
        ((1_234_567, 0), "Compacted: about 1,230,000 → 0 tokens."),
    ],
)
def test_people_are_told_round_numbers(tokens: tuple[int, int], sentence: str) -> None:
    assert CompactionResult("completed", *tokens).sentence == sentence


# --- what makes it fail ---------------------------------------------------------------------


async def think_only(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
    yield ReasoningDelta("hm")
    yield Finish("stop")


async def break_off(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
    yield TextDelta("the no")


FAILURES = {
    "empty": (say(), "the summary is empty"),
    "blank": (say(" \n"), "the summary is empty"),
    "thinking": (think_only, "the summary is empty"),
    "refusal": (say("no", finish="refusal"), "the model refuses to summarise it"),
    "aborted": (say("no", finish="aborted"), "the summary broke off"),
    "broken": (break_off, "the summary broke off"),
    "error": (fail(ModelError("busy", code="OVERLOADED"), "the"), "busy"),
    "crash": (fail(ZeroDivisionError("secret")), "the summary failed unexpectedly (ZeroDiv"),
    "stray": (fail(asyncio.CancelledError()), "the summary failed unexpectedly (Cancelled"),
    "foreign": (fail(TurnAborted("a deadline")), "something other than a cancel"),
    "longer": (say(LONG * 2), "the history would not be shorter"),
}


@pytest.mark.parametrize("how", FAILURES)
async def test_a_failed_compaction_says_why_and_leaves_the_history(how: str) -> None:
    notes, why = FAILURES[how]
    model = Model(say(LONG), notes=[notes])
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        history = at.agent.session.messages

        outcome = await at.agent.send("/compact").settled()

        assert ends(at) == ["failed"]
        assert why in at.of(CompactionEnd)[0].error
        assert isinstance(outcome, Rejected)
        assert outcome.reason.startswith("The conversation could not be compacted: ")
        assert at.agent.session.messages == history
        assert await at.agent.send("go on").settled() == Completed()
        assert model.requests[-1].messages[:-1] == history
        assert model.open_streams == 0


async def test_what_a_failed_summary_took_counts_without_changing_what_the_context_holds() -> None:
    model = Model(
        say(LONG, usage=Usage(100, 600)), notes=[say("", usage=Usage(700, 9)), say("the notes")]
    )
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        await at.agent.send("/compact").settled()

        assert at.of(ModelUsage)[-1].usage == Usage(700, 9)
        assert at.of(ModelUsage)[-1].context_tokens == 700


async def test_a_conversation_too_long_for_its_summary_is_told_in_less_words() -> None:
    model = Model(
        *(say(LONG) for _ in range(4)),
        notes=[fail(TOO_LONG), fail(TOO_LONG), say("the notes")],
    )
    async with compactable(model) as at:
        for _ in range(4):
            await at.agent.send("more").settled()
        await at.agent.send("/compact").settled()

        sizes = [rough_tokens(request.messages) for request in model.asked]
        assert len(sizes) == 3
        assert sizes[2] < sizes[1] < sizes[0] * 0.7
        assert ends(at) == ["completed"]


async def test_it_is_not_told_in_less_words_for_ever() -> None:
    model = Model(say(LONG), notes=[fail(TOO_LONG) for _ in range(10)])
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        await at.agent.send("/compact").settled()

        assert len(model.asked) == 4
        assert ends(at) == ["failed"]


# --- cancelled ------------------------------------------------------------------------------


async def slow_notes(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
    for word in ("the ", "notes ", "in ", "pieces"):
        async with request.signal.scope():
            await anyio.lowlevel.checkpoint()
        yield TextDelta(word)
    yield Finish("stop")


@pytest.mark.requirement("R73")
async def test_a_cancel_at_any_await_leaves_the_history_as_it_was() -> None:
    model = Model(say(LONG), notes=[slow_notes] * 100)
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()
        history, session = at.agent.session.messages, at.agent.session
        session.append(TurnStart(2, "user"))

        async def run(signal: AbortSignal) -> CompactionResult:
            try:
                return await compact(at.agent, signal)
            finally:
                if signal.aborted:
                    assert session.messages == history
                    assert model.open_streams == 0

        runs = await abort_at_every_await(run)

        assert len(runs) >= 4
        assert all(isinstance(run.error, TurnAborted) for run in runs)
        assert ends(at) == ["cancelled"] * len(runs) + ["completed"]


@pytest.mark.parametrize("is_asked_for", [True, False])
async def test_a_cancelled_compaction_ends_the_turn_and_the_next_one_has_all(
    is_asked_for: bool,
) -> None:
    hang = Hang()
    model = Model(say(LONG), notes=[hang], context_tokens=100_000 if is_asked_for else 600)
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        history = at.agent.session.messages

        prompt = at.agent.send("/compact" if is_asked_for else "next")
        await hang.hanging.wait()
        at.agent.cancel()

        assert await prompt.settled() == Aborted()
        assert ends(at) == ["cancelled"]
        assert at.agent.session.messages[: len(history)] == history
        assert await at.agent.send("/compact").settled() != Aborted()
        assert ends(at) == ["cancelled", "completed"]


@pytest.mark.requirement("R73")
async def test_a_cancel_in_the_retry_wait_of_the_summary_ends_it_at_once() -> None:
    busy = [fail(ModelError("busy", code="OVERLOADED"))] * 3
    inner = Model(say(LONG), notes=busy)
    model = RetryingModel(inner, base_s=600, cap_s=600)
    async with rig(model=model) as at:  # type: ignore[arg-type]
        await at.agent.send("explain").settled()

        async def run(*args: Any) -> Any:
            await compact(args[0], args[3])

        at.agent.hooks.on("agent/prompt-submit", run)
        waiting = anyio.Event()
        at.on_event(ModelRetry, waiting.set)
        prompt = at.agent.send("next")
        await waiting.wait()
        at.agent.cancel()

        assert await prompt.settled() == Aborted()
        assert ends(at) == ["cancelled"]
        (retry,) = at.of(ModelRetry)
        assert (retry.turn, retry.step, retry.code) == (2, 0, "OVERLOADED")


async def test_the_end_is_logged_when_the_agent_is_disposed_or_its_task_cancelled() -> None:
    hang = Hang()
    model = Model(say(LONG), notes=[hang, Hang()])
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        at.agent.send("/compact")
        await hang.hanging.wait()
        await at.agent.dispose()

        assert at.outcomes[-1] == Disposed()
        assert ends(at) == ["cancelled"]

        at.agent.session.append(TurnStart(3, "user"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compact, at.agent, AbortController().signal)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

        assert ends(at) == ["cancelled", "cancelled"]


async def test_a_model_that_fails_because_of_the_abort_was_cancelled() -> None:
    hang = Hang(raising=ModelError("the connection is gone", code="TRANSPORT"))
    model = Model(say(LONG), notes=[hang])
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        prompt = at.agent.send("/compact")
        await hang.hanging.wait()
        at.agent.cancel()

        assert await prompt.settled() == Aborted()
        assert ends(at) == ["cancelled"]


async def test_a_cancelled_summary_that_was_counted_counts() -> None:
    async def report(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        async with aclosing(say(usage=Usage(700, 1))(request)) as events:
            yield await anext(events)
        reason = await request.signal.wait()
        raise TurnAborted(reason)

    model = Model(say(LONG, usage=Usage(100, 600)), notes=[report])
    async with compactable(model) as at:
        await at.agent.send("explain").settled()
        prompt = at.agent.send("/compact")
        await anyio.wait_all_tasks_blocked()
        at.agent.cancel()

        assert await prompt.settled() == Aborted()
        assert at.of(ModelUsage)[-1].usage == Usage(700, 1)
        assert at.of(ModelUsage)[-1].context_tokens == 700


# --- before a step --------------------------------------------------------------------------


async def test_a_nearly_full_context_is_compacted_before_the_step() -> None:
    model = Model(say(LONG, usage=Usage(2_000, 600)), say("ok"), context_tokens=3_000)
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()
        assert ends(at) == []

        assert await at.agent.send("next").settled() == Completed()

        assert ends(at) == ["completed"]
        assert at.kinds.index("compaction/end") < len(at.kinds) - 1 - at.kinds[::-1].index(
            "step/start"
        )
        told = [words(message) for message in model.requests[-1].messages]
        assert told == [SUMMARY + DONE_TOO, "next"]


@pytest.mark.parametrize(
    ("counted", "size"), [(2_549, 3_000), (5_000, None)], ids=["room enough", "size unknown"]
)
async def test_a_context_with_room_is_left_alone(counted: int, size: int | None) -> None:
    model = Model(say(LONG, usage=Usage(counted, 0)), say("ok"), context_tokens=size)
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()
        await at.agent.send("a").settled()

        assert ends(at) == []


@pytest.mark.parametrize(("n_answer", "expected"), [(999, []), (1_001, ["completed"])])
async def test_room_is_kept_for_the_longest_answer(n_answer: int, expected: list[str]) -> None:
    script = (say(LONG, usage=Usage(2_000, 0)), say("ok"))
    model = Model(*script, context_tokens=3_000, max_output_tokens=n_answer)
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()
        await at.agent.send("").settled()

        assert ends(at) == expected


async def test_a_context_that_was_never_counted_is_guessed_with_the_system_prompt() -> None:
    model = Model(say(LONG), say("ok"), context_tokens=1_500)
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()
        at.agent.system_prompt.section("long", LONG * 2)
        await at.agent.send("next").settled()

        assert ends(at) == ["completed"]


async def test_in_the_middle_of_a_turn_what_people_said_stays_word_for_word() -> None:
    model = Model(call("look"), call("look"), say("ok"), context_tokens=1_200)
    async with rig(model=model, tools=[LOOK]) as at:
        at.on_event(ToolResult, lambda: at.agent.steer("and be quick"))
        await at.agent.send("look twice").settled()

        assert ends(at) == ["completed"]
        first, *rest = model.requests[-1].messages
        assert words(first) == SUMMARY + DONE_TOO
        assert [words(message) for message in rest] == ["look twice", "and be quick"]
        assert all(is_valid(request.messages) for request in model.requests)
        assert len(at.of(SteeringMessage)) == 1
        (end,) = (i for i, kind in enumerate(at.kinds) if kind == "compaction/end")
        assert at.kinds[end + 1] == "step/start"
        assert "[assistant, calling look]" in model.told


async def test_what_the_model_does_behind_a_compaction_is_added_to_it() -> None:
    script = (call("look"), call("look"), call("look"), say("ok"))
    model = Model(*script, context_tokens=1_200)
    async with rig(model=model, tools=[LOOK]) as at:
        await at.agent.send("look often").settled()

        messages = model.requests[-1].messages
        assert ends(at) == ["completed"]
        assert [type(message) for message in messages[2:]] == [AssistantTurn, ToolTurn]
        assert is_valid(messages)


async def test_a_failed_compaction_does_not_end_the_turn_and_is_not_tried_in_its_other_steps() -> (
    None
):
    busy = fail(ModelError("busy", code="OVERLOADED"))
    script = (say(LONG), call("look"), call("look"), say("ok"))
    model = Model(*script, notes=[busy, busy], context_tokens=600)
    async with rig(model=model, tools=[LOOK]) as at:
        await at.agent.send("explain").settled()

        assert await at.agent.send("look twice").settled() == Completed()
        assert ends(at) == ["failed"]
        assert is_valid(model.requests[-1].messages)

        assert await at.agent.send("next").settled() == Completed()
        assert ends(at) == ["failed", "failed"]


async def test_a_context_that_stays_full_is_compacted_once_in_a_turn() -> None:
    script = (say(LONG), call("look"), call("look"), say("ok"))
    model = Model(*script, context_tokens=600)
    async with rig(model=model, tools=[LOOK]) as at:
        await at.agent.send("explain").settled()
        await at.agent.send(LONG).settled()

        assert ends(at) == ["completed"]


async def test_the_threshold_can_be_chosen() -> None:
    model = Model(say(LONG), say("ok"), context_tokens=3_000)
    async with rig(model=model) as at:
        Compactor(at.runtime.agents, threshold=0.1).listen(at.agent.hooks)
        await at.agent.send("explain").settled()
        await at.agent.send("next").settled()

        assert ends(at) == ["completed"]


async def test_what_would_win_nothing_is_not_tried() -> None:
    model = Model(say("short"), say("ok"), context_tokens=2_000)
    async with rig(model=model) as at:
        at.agent.system_prompt.section("long", LONG * 4)
        await at.agent.send("hi").settled()
        await at.agent.send("hi again").settled()

        assert ends(at) == []


# --- when the model says so -----------------------------------------------------------------


async def test_a_model_that_finds_it_too_long_is_asked_again_with_less() -> None:
    model = Model(say(LONG), fail(TOO_LONG), say("ok"))
    prefix = (UserTurn((Text("before all else"),)),)

    async def compose(*_args: Any) -> tuple[Message, ...]:
        return prefix

    async with rig(model=model) as at:
        at.agent.hooks.on("agent/session-prefix", compose)
        await at.agent.send("explain").settled()

        assert await at.agent.send("next").settled() == Completed()

        assert ends(at) == ["completed"]
        refused, accepted = model.requests[-2:]
        told = [words(message) for message in accepted.messages]
        assert told == ["before all else", SUMMARY + DONE_TOO, "next"]
        assert replace(accepted, messages=()) == replace(refused, messages=())
        assert "before all else" not in model.told
        assert at.agent.session.messages[-1] == AssistantTurn((TextPart("ok"),))
        assert (at.kinds.count("step/start"), at.kinds.count("step/end")) == (2, 2)


async def test_in_the_middle_of_a_turn_too_long_a_history_is_shortened_as_well() -> None:
    model = Model(call("look"), fail(TOO_LONG), say("ok"))
    async with rig(model=model, tools=[LOOK]) as at:
        assert await at.agent.send("look").settled() == Completed()

        assert [words(message) for message in model.requests[-1].messages] == [
            SUMMARY + DONE_TOO,
            "look",
        ]


async def test_the_model_that_refused_is_the_one_that_summarises() -> None:
    small, model = Model(fail(TOO_LONG), say("ok")), Model(say(LONG))
    small.info = ModelInfo("small")
    async with rig(model=model) as at:
        at.runtime.models._adapters["small"] = small
        await at.agent.send("explain").settled()

        async def choose(*args: Any) -> Any:
            return structs.replace(await args[-1](), model="small")

        at.agent.hooks.on("agent/request", choose)
        assert await at.agent.send("next").settled() == Completed()

        assert (len(small.asked), len(model.asked)) == (1, 0)


async def test_a_call_is_shortened_once_and_no_more() -> None:
    again = ModelError("still too long", code="CONTEXT_TOO_LONG")
    model = Model(say(LONG), fail(TOO_LONG), fail(again), say("ok"))
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()

        assert await at.agent.send("next").settled() == Failed(
            1, "CONTEXT_TOO_LONG", "still too long"
        )
        assert ends(at) == ["completed"]
        assert len(model.requests) == 3
        assert await at.agent.send("again").settled() == Completed()


async def test_a_call_that_cannot_be_shortened_fails_for_its_own_reason() -> None:
    model = Model(say(LONG), fail(TOO_LONG), notes=[fail(ModelError("busy", code="OVERLOADED"))])
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()

        outcome = await at.agent.send("next").settled()

        assert outcome == Failed(1, "CONTEXT_TOO_LONG", "the prompt is too long")
        assert ends(at) == ["failed"]


async def test_a_prompt_that_is_too_long_by_itself_is_not_compacted() -> None:
    model = Model(fail(TOO_LONG))
    async with rig(model=model) as at:
        outcome = await at.agent.send(LONG).settled()

        assert outcome == Failed(1, "CONTEXT_TOO_LONG", "the prompt is too long")
        assert ends(at) == []


async def test_a_model_that_has_spoken_is_not_asked_again() -> None:
    model = Model(say(LONG), fail(TOO_LONG, "I"))
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()
        outcome = await at.agent.send("next").settled()

        assert outcome == Failed(1, "CONTEXT_TOO_LONG", "the prompt is too long")
        assert ends(at) == []
        assert at.of(AssistantMessage)[-1].interrupted


@pytest.mark.parametrize("in_place_of_the_first", [(), (UserTurn((Text("hidden"),)),)])
async def test_messages_that_a_listener_made_up_are_not_replaced(
    in_place_of_the_first: tuple[Message, ...],
) -> None:
    model = Model(say(LONG), fail(TOO_LONG))
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()

        async def hide(request: ModelRequest, next_: Any) -> Any:
            told = (*in_place_of_the_first, *request.messages[1:])
            return await next_(replace(request, messages=told))

        at.agent.hooks.on("llm/stream", hide)
        outcome = await at.agent.send("next").settled()

        assert outcome == Failed(1, "CONTEXT_TOO_LONG", "the prompt is too long")
        assert ends(at) == []


@pytest.mark.requirement("R73")
async def test_a_cancel_while_a_call_is_shortened_closes_the_step() -> None:
    hang = Hang()
    model = Model(say(LONG), fail(TOO_LONG), say("ok"), notes=[hang])
    async with rig(model=model) as at:
        await at.agent.send("explain").settled()
        history = at.agent.session.messages
        prompt = at.agent.send("next")
        await hang.hanging.wait()
        at.agent.cancel()

        assert await prompt.settled() == Aborted()
        assert at.kinds[-4:] == ["compaction/start", "compaction/end", "step/end", "turn/end"]
        assert ends(at) == ["cancelled"]
        assert at.agent.session.messages[:-1] == history
        assert await at.agent.send("again").settled() == Completed()
        assert model.requests[-1].messages[: len(history)] == history


# --- what the summariser is shown -----------------------------------------------------------


async def told_of(*messages: Message, context_tokens: int | None, summary: str = "") -> str:
    """Return what a model that holds so much is shown of a history."""
    model = Model(context_tokens=context_tokens)
    async with rig(model=model) as at:
        session = at.agent.session
        session.append(TurnStart(1, "user"))
        session.append(UserMessage("p", (Text("begin"),), "user"))
        session.append(TurnStart(2, "user"))
        if summary:
            session.append(CompactionEnd("c", "completed", summary))
        session.state.messages += messages
        await compact(at.agent, AbortController().signal)
    return model.told


async def test_long_results_of_tools_are_cut_oldest_first() -> None:
    results = [ToolTurn(f"c{n}", f"tool{n}", f"<{n}" + LONG + f"{n}>") for n in range(4)]

    asked = "asked " * 350

    told = await told_of(UserTurn((Text(asked),)), *results, context_tokens=2_500)

    assert rough_tokens([UserTurn((Text(told),))]) <= 2_500 * 0.75
    assert asked in told
    assert results[3].output in told
    assert results[0].output not in told
    for n in range(4):
        assert f"<{n}word" in told
        assert f"word {n}>" in told
    assert "characters left out …]" in told


async def test_then_the_oldest_is_left_out_but_for_earlier_notes() -> None:
    said = [UserTurn((Text(f"<{n}{LONG}"),)) for n in range(100)]

    told = await told_of(*said, context_tokens=2_500, summary="earlier notes")

    assert rough_tokens([UserTurn((Text(told),))]) <= 2_500 * 0.75
    assert "earlier notes" in told
    assert "<99word" in told
    assert "<0word" not in told
    assert "oldest entries were too long and are left out" in told


async def test_earlier_notes_that_are_too_long_themselves_leave_room_for_the_rest() -> None:
    told = await told_of(UserTurn((Text("news"),)), context_tokens=1_000, summary=LONG * 4)

    assert "[user]\nnews" in told
    assert rough_tokens([UserTurn((Text(told),))]) <= 1_000 * 0.75


async def test_where_nobody_knows_what_the_model_holds_there_is_a_limit_too() -> None:
    told = await told_of(*(UserTurn((Text(LONG),)) for _ in range(100)), context_tokens=None)

    assert 20_000 <= rough_tokens([UserTurn((Text(told),))]) <= 25_000


async def test_thinking_and_what_only_one_provider_understands_is_left_out() -> None:
    turn = AssistantTurn(
        (ReasoningPart("secret", "scripted", "sealed"), TextPart("said")), interrupted=True
    )
    told = await told_of(
        turn, ToolTurn("c", "look", "no such file", is_error=True), context_tokens=None
    )

    assert "[assistant, interrupted]\nsaid" in told
    assert "[error of look]\nno such file" in told
    assert "secret" not in told
    assert "sealed" not in told


# --- the log --------------------------------------------------------------------------------


async def test_a_session_that_is_loaded_again_tells_the_same() -> None:
    store = MemoryStore()
    model = Model(call("look"), call("look"), say("ok"), context_tokens=1_200)
    async with compactable(model, tools=[LOOK], store=store) as at:
        await at.agent.send("look twice").settled()
        await at.agent.send("/compact").settled()
        await at.agent.send("and then?").settled()
        assert ends(at) == ["completed", "completed"]

        again = await Session.load(at.agent.id, store)

        assert again.messages == at.agent.session.messages
        assert context_tokens(again.state) == context_tokens(at.agent.session.state)
        folded = Projection()
        for event in at.agent.session.events:
            folded.apply(event)
        assert vars(folded) == vars(again.state)


@pytest.mark.parametrize("is_in_step", [True, False])
def test_a_compaction_in_which_the_process_died_is_closed_as_cancelled(is_in_step: bool) -> None:
    facts: list[EventData] = [TurnStart(1, "user"), UserMessage("p", (Text("hi"),), "user")]
    facts += [StepStart(1, 1)] if is_in_step else []
    facts += [CompactionStart("c")]
    events = [Event(seq, 0, data) for seq, data in enumerate(facts)]

    first, *rest = closers_for(events)

    assert first == CompactionEnd("c", "cancelled")
    assert len(rest) == (2 if is_in_step else 1)
    assert closers_for([*events, Event(9, 0, first)]) == rest


# --- real providers -------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_by_error", [True, False], ids=["refused", "nearly full"])
async def test_a_provider_accepts_every_request_around_a_compaction(
    api: Api, is_by_error: bool, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text(f"{LONG[:100]}\n" * 160)
    told = "This model's maximum context length is 8192 tokens, and you sent 9000."
    refusal = status(400, {"type": "invalid_request_error", "message": told})
    reads, speaks = Reply(call_read(api, "notes.txt")), Reply(last_words(api))
    script = [reads, refusal, speaks, reads, speaks] if is_by_error else [reads, speaks, speaks]
    facts = {} if is_by_error else {"context_tokens": 4_500}
    async with served(*script, api=api, facts=facts) as (model, double), reading(model) as runtime:
        agent = await runtime.create(str(tmp_path))
        prompt = agent.send("read notes.txt")

        assert await prompt.settled() == Completed()

        statuses = [e.data.status for e in agent.session.events if hasattr(e.data, "status")]
        assert statuses == ["completed"]
        assert double.violations == []
        assert double.script == []
        assert model.info.context_tokens == (8_192 if is_by_error else 4_500)


@asynccontextmanager
async def reading(model: ModelAdapter) -> AsyncIterator[AgentRuntime]:
    async with AgentRuntime(
        MemoryStore(), model=model, tools=(Read(),), files=LocalFiles(), commands=LocalCommands()
    ) as runtime:
        yield runtime


# --- children -------------------------------------------------------------------------------


async def test_a_fork_of_a_compacted_parent_knows_what_its_parent_knows() -> None:
    model = Model(say(LONG), say("ok", usage=Usage(60, 5)), say("child's"))
    async with compactable(model) as at:
        for prompt in ("explain", "/compact", "next"):
            await at.agent.send(prompt).settled()
        request = SubagentRequest((Text("do it"),), at.agent, AbortController().signal)
        run = await at.runtime.subagents.start("fork", request)
        await run.result()

        told = model.requests[-1].messages
        assert told[:-1] == at.agent.session.messages
        assert words(told[0]) == SUMMARY
        assert words(told[-1]) == "do it"
        await run.dispose()


async def test_a_child_is_compacted_by_itself() -> None:
    model = Model(call("look"), call("look"), say("ok"), context_tokens=1_200)
    async with rig(model=model, tools=[LOOK]) as at:
        request = SubagentRequest((Text("look"),), at.agent, AbortController().signal)
        run = await at.runtime.subagents.start("spawn", request)

        assert (await run.result()).reason == "completed"
        child = at.runtime.agents[run.id]
        assert sum(isinstance(e.data, CompactionEnd) for e in child.session.events) == 1
        assert ends(at) == []
        await run.dispose()


# --- the built-in model ---------------------------------------------------------------------


@asynccontextmanager
async def rehearsing(cwd: Path, context_tokens: int | None = None) -> AsyncIterator[Agent]:
    model = RehearsalModel(ModelInfo("rehearsal", context_tokens=context_tokens))
    async with reading(model) as runtime:
        with anyio.fail_after(5):
            yield await runtime.create(str(cwd))


async def test_the_built_in_model_writes_notes(tmp_path: Path) -> None:
    async with rehearsing(tmp_path) as agent:
        await agent.send("say one then count 300").settled()
        results: list[CompactionResult] = []

        async def run(*args: Any) -> Any:
            results.append(await compact(args[0], args[3]))
            return Refuse(results[-1].sentence)

        agent.hooks.on("agent/prompt-submit", run)
        await agent.send("/compact").settled()

        (result,) = results
        assert result.status == "completed"
        assert result.after_tokens < result.before_tokens
        (message,) = agent.session.messages
        assert "2 entries." in words(message)
        assert "The last request was: say one then count 300\n" in words(message)


async def test_the_built_in_model_goes_on_where_a_compaction_found_it(tmp_path: Path) -> None:
    names = [f"{n}.txt" for n in range(8)]
    for name in names:
        (tmp_path / name).write_text(LONG)
    async with rehearsing(tmp_path, context_tokens=2_000) as agent:
        outcome = await agent.send(" then ".join(f"read {name}" for name in names)).settled()

        log = [event.data for event in agent.session.events]
        assert outcome == Completed()
        assert sum(isinstance(data, ToolResult) for data in log) == len(names)
        assert sum(isinstance(data, CompactionEnd) for data in log) >= 2
        reads = [data.arguments for data in log if hasattr(data, "arguments")]
        assert [name in told for name, told in zip(names, reads, strict=True)] == [True] * 8
