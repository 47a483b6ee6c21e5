from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from core_rig import Rig, ScriptedModel, answer_ok, call, fail, rig, say, tool

from agent_core.cancellation import AbortController, TurnAborted
from agent_core.content import (
    Image,
    ReasoningPart,
    Resource,
    Text,
    TextPart,
    ToolCallPart,
    Usage,
)
from agent_core.errors import ModelError
from agent_core.events import Aborted, Event, Failed, ModelUsage, ToolResult
from agent_core.models.adapter import (
    AssistantTurn,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    Price,
    TextDelta,
    ToolTurn,
    UsageReport,
    UserTurn,
)
from agent_core.models.choice import Models
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore
from agent_core.sessions.projection import Projection
from agent_core.subagents import SubagentRequest
from agent_core.usage import context_tokens, rough_tokens, usage_event

MILLION = 1_000_000
PRICE = Price(input=2.0, output=8.0)


def after(*usages: ModelUsage) -> Projection:
    """Return the state of a log that holds these."""
    state = Projection()
    for seq, usage in enumerate(usages):
        state.apply(Event(seq, 0, usage))
    return state


def priced(name: str, price: Price | None, size: int | None = None) -> ModelInfo:
    return ModelInfo(name, price=price, context_tokens=size)


def event_for(state: Projection, info: ModelInfo, usage: Usage, **context: Any) -> ModelUsage:
    return usage_event(state, info, usage, turn=1, step=1, **context)


# --- what a call costs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("price", "usage", "cost"),
    [
        (PRICE, Usage(MILLION, MILLION), 10.0),
        (PRICE, Usage(MILLION, 0, cached_tokens=MILLION // 2), 2.0),
        (Price(2.0, 8.0, cached=0.2), Usage(MILLION, 0, cached_tokens=MILLION // 2), 1.1),
        (
            Price(2.0, 8.0, cached=0.2, cache_write=2.5),
            Usage(MILLION, 0, cached_tokens=MILLION // 2, cache_write_tokens=MILLION // 4),
            0.5 + 0.1 + 0.625,
        ),
        (Price(2.0, 8.0, cache_write=2.5), Usage(MILLION, 0, cache_write_tokens=MILLION), 2.5),
        (PRICE, Usage(0, MILLION, reasoning_tokens=MILLION), 8.0),
        (PRICE, Usage(10, 0, cached_tokens=20), 20 * 2.0 / MILLION),
        (Price(0.0, 0.0), Usage(MILLION, MILLION), 0.0),
    ],
    ids=[
        "in and out",
        "cached at no price of its own",
        "cached",
        "cached and written",
        "written",
        "thinking is output",
        "more cached than there was",
        "for free",
    ],
)
def test_a_call_costs_what_each_kind_of_token_costs(
    price: Price, usage: Usage, cost: float
) -> None:
    assert price.of(usage) == pytest.approx(cost)


def test_costs_add_up_over_a_session() -> None:
    info, usage = priced("m", PRICE), Usage(MILLION, MILLION)
    first = event_for(Projection(), info, usage)
    second = event_for(after(first), info, usage)

    assert (first.cost, first.currency) == (10.0, "USD")
    assert (second.cost, second.currency) == (20.0, "USD")


def test_without_a_price_nothing_is_said_of_costs() -> None:
    event = event_for(Projection(), priced("m", None), Usage(MILLION, MILLION))

    assert (event.cost, event.currency) == (None, None)


def test_a_call_without_a_price_leaves_the_costs_so_far() -> None:
    first = event_for(Projection(), priced("m", PRICE), Usage(MILLION, 0))
    second = event_for(after(first), priced("local", None), Usage(MILLION, 0))

    assert (second.cost, second.currency) == (2.0, "USD")


def test_what_is_paid_in_another_currency_is_not_added() -> None:
    euros = Price(5.0, 5.0, currency="EUR")
    first = event_for(Projection(), priced("m", PRICE), Usage(MILLION, 0))
    second = event_for(after(first), priced("n", euros), Usage(MILLION, 0))
    third = event_for(after(first, second), priced("m", PRICE), Usage(MILLION, 0))

    assert (second.cost, second.currency) == (2.0, "USD")
    assert (third.cost, third.currency) == (4.0, "USD")


# --- how full the context is ----------------------------------------------------------------


def test_a_call_fills_the_context_with_its_prompt_and_its_answer() -> None:
    event = event_for(Projection(), priced("m", None, 8_000), Usage(700, 50, cached_tokens=600))

    assert (event.context_tokens, event.context_size) == (750, 8_000)


def test_a_call_beside_the_conversation_does_not_say_how_full_it_is() -> None:
    event = event_for(Projection(), priced("m", None), Usage(700, 50), context=40)

    assert event.context_tokens == 40
    assert context_tokens(after(event)) == 40


def test_what_came_behind_the_last_count_is_guessed() -> None:
    state = after(event_for(Projection(), priced("m", None), Usage(700, 50)))
    state.apply(Event(1, 0, ToolResult(1, 1, "c", "x" * 400)))

    assert context_tokens(state) == 750 + 100


def test_every_kind_of_content_takes_room() -> None:
    said = UserTurn(
        (Text("x" * 40), Resource("file:///a", text="x" * 40), Image("AAAA", "image/png"))
    )
    call_part = ToolCallPart("c", "look", "x" * 40)
    answered = AssistantTurn((ReasoningPart("x" * 40), TextPart("x" * 40), call_part))

    assert rough_tokens([said]) == 10 + 10 + 1_500
    assert rough_tokens([answered]) == 30
    assert rough_tokens([ToolTurn("c", "look", "x" * 40)]) == 10


# --- in a session ---------------------------------------------------------------------------


class Priced(ScriptedModel):
    def __init__(self, name: str, *script: Any, price: Price | None = None, size: int = 8_000):
        super().__init__(script)
        self.info = priced(name, price, size)


def costs(at: Rig) -> list[float | None]:
    return [usage.cost for usage in at.of(ModelUsage)]


async def test_every_call_of_a_turn_is_counted_in_the_step_it_belongs_to() -> None:
    async def use(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield UsageReport(Usage(MILLION, 0))
        async for event in call("act")(request):
            yield event

    last = say("done", usage=Usage(2 * MILLION, 0))
    model = Priced("m", use, last, price=PRICE)
    async with rig(model=model, tools=[tool("act", answer_ok)]) as at:
        await at.agent.send("go").settled()

        assert [(usage.turn, usage.step) for usage in at.of(ModelUsage)] == [(1, 1), (1, 2)]
        assert costs(at) == [2.0, 6.0]


async def test_the_last_report_of_a_call_counts() -> None:
    async def report(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield UsageReport(Usage(100, 1))
        async for event in say("done", usage=Usage(100, 20))(request):
            yield event

    async with rig(model=Priced("m", report)) as at:
        await at.agent.send("go").settled()

        assert [usage.usage for usage in at.of(ModelUsage)] == [Usage(100, 20)]


async def test_a_call_that_reports_nothing_is_not_counted() -> None:
    async with rig(model=Priced("m", say("done"), price=PRICE)) as at:
        await at.agent.send("go").settled()

        assert at.of(ModelUsage) == []
        assert at.agent.session.state.cost is None


@pytest.mark.requirement("R73")
async def test_a_cancelled_call_counts_with_what_it_had_reported() -> None:
    hanging = anyio.Event()

    async def hang(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield UsageReport(Usage(MILLION, 0))
        yield TextDelta("half")
        hanging.set()
        raise TurnAborted(await request.signal.wait())

    model = Priced("m", hang, say("done", usage=Usage(MILLION, 0)), price=PRICE)
    async with rig(model=model) as at:
        prompt = at.agent.send("go")
        await hanging.wait()
        at.agent.cancel()

        assert await prompt.settled() == Aborted()
        assert costs(at) == [2.0]
        await at.agent.send("again").settled()
        assert costs(at) == [2.0, 4.0]


async def test_a_failed_call_counts_as_well() -> None:
    async def break_off(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield UsageReport(Usage(MILLION, 0))
        async for event in fail(ModelError("gone", code="TRANSPORT"), "half")(request):
            yield event

    async with rig(model=Priced("m", break_off, price=PRICE)) as at:
        assert isinstance(await at.agent.send("go").settled(), Failed)

        assert costs(at) == [2.0]


async def test_after_a_switch_the_new_model_is_charged_and_measured() -> None:
    usage = Usage(MILLION, 0)
    cheap = Priced("cheap", say("a", usage=usage), price=Price(1.0, 1.0), size=1_000)
    dear = Priced("dear", say("b", usage=usage), price=Price(50.0, 50.0), size=2_000)
    async with rig(model=Models(cheap, dear)) as at:  # type: ignore[arg-type]
        await at.agent.send("a").settled()
        at.agent.set_model("dear")
        await at.agent.send("b").settled()

        assert costs(at) == [1.0, 51.0]
        assert [(u.model, u.context_size) for u in at.of(ModelUsage)] == [
            ("cheap", 1_000),
            ("dear", 2_000),
        ]


async def test_a_session_that_is_loaded_again_goes_on_counting() -> None:
    store = MemoryStore()
    async with rig(
        model=Priced("m", say("a", usage=Usage(MILLION, 9)), price=PRICE), store=store
    ) as at:
        await at.agent.send("go").settled()

        again = await Session.load(at.agent.id, store)

        assert again.state.cost == pytest.approx(at.agent.session.state.cost)
        assert context_tokens(again.state) == MILLION + 9


@pytest.mark.parametrize("how", ["fork", "spawn"])
async def test_what_a_child_takes_is_its_own(how: str) -> None:
    usage = Usage(500, 500)
    model = Priced("m", say("a", usage=usage), say("child's", usage=usage), price=PRICE)
    async with rig(model=model) as at:
        await at.agent.send("go").settled()
        before = vars(at.agent.session.state).copy()
        request = SubagentRequest((Text("x" * 40),), at.agent, AbortController().signal)
        run = await at.runtime.subagents.start(how, request)
        child = at.runtime.agents[run.id].session
        await run.result()

        (*_, own) = [e.data for e in child.events if isinstance(e.data, ModelUsage)]
        assert own.cost == pytest.approx(PRICE.of(usage))
        assert vars(at.agent.session.state) == before
        assert context_tokens(child.state) == 1_000
        await run.dispose()


async def test_a_fork_begins_with_its_parents_context_but_owes_nothing() -> None:
    model = Priced("m", say("a", usage=Usage(500, 500)), say("child's"), price=PRICE)
    async with rig(model=model) as at:
        await at.agent.send("go").settled()
        request = SubagentRequest((Text("x" * 40),), at.agent, AbortController().signal)
        run = await at.runtime.subagents.start("fork", request)
        await run.result()

        state = at.runtime.agents[run.id].session.state
        assert state.cost is None
        assert context_tokens(state) == 1_000 + rough_tokens(state.messages[2:])
        await run.dispose()
