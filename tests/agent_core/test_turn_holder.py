"""One holder for each prospective turn: when it exists, what it covers, and who can reach it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from core_rig import (
    DISPOSED,
    PARENT,
    STAGES,
    USER,
    GatedStore,
    Hang,
    Held,
    Rig,
    Waiting,
    answer_ok,
    call,
    rig,
    say,
    settle,
    started,
    tool,
)

import agent_core.loop
from agent_core.cancellation import AbortController, AbortSignal
from agent_core.events import Aborted, Completed, TurnEnd, TurnStart
from agent_core.loop import TurnCancellation


class Counted(TurnCancellation):
    """Remembers every holder that was made."""

    made: list[TurnCancellation]

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TurnCancellation]:
    Counted.made = []
    monkeypatch.setattr(agent_core.loop, "TurnCancellation", Counted)
    return Counted.made


def holder_of(rig: Rig) -> TurnCancellation | None:
    return rig.agent._loop._holder


# --- one owner --------------------------------------------------------------------------------


@pytest.mark.requirement("R28")
async def test_every_turn_has_a_holder_of_its_own_and_at_most_one_is_live(
    made: list[TurnCancellation],
) -> None:
    live_at_start: list[list[TurnCancellation]] = []

    async with rig() as r:

        def note() -> None:
            live_at_start.append([holder for holder in made if not holder.over.is_set()])

        def replace() -> None:
            r.agent.cancel()
            r.agent.send("replacement")

        r.on_event(TurnStart, note, once=False)
        for text in ("A", "B", "C"):
            r.agent.send(text)
        await r.agent.when_idle()
        assert len(made) == 3
        for act in (r.agent.cancel, replace):
            r.on_status("running", act)
            r.agent.send("cancelled before its turn")
            await r.agent.when_idle()

        used = [holder for (holder,) in live_at_start]
        assert len({id(holder) for holder in used}) == len(r.of(TurnStart)) == 4
        assert [holder.signal for holder in used] == [q.signal for q in r.model.requests]
        assert all(holder.over.is_set() for holder in made)
        assert holder_of(r) is None


@pytest.mark.requirement("R28", "R56")
async def test_nothing_public_reaches_the_holder_or_its_controller() -> None:
    hang = Hang()
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        reachable = [
            (name, getattr(owner, name))
            for owner in (r.agent, r.agent.session, r.agent.hooks, r.runtime, r.model.requests[0])
            for name in dir(owner)
            if not name.startswith("_")
        ]

        assert holder_of(r) is not None
        assert [
            name
            for name, value in reachable
            if isinstance(value, AbortController | TurnCancellation)
        ] == []
        assert "TurnCancellation" not in agent_core.loop.__all__
        r.agent.cancel()


@pytest.mark.race
@pytest.mark.requirement("R29", "R47")
async def test_the_holder_is_there_before_running_is_announced() -> None:
    held: list[TurnCancellation | None] = []
    async with rig() as r:

        def cancel() -> None:
            held.append(holder_of(r))
            r.agent.cancel()
            held.append(holder_of(r))
            assert not r.agent._loop._pre_run_cancelled

        r.on_status("running", cancel)
        r.agent.send("A")
        await r.agent.when_idle()

        assert held[0] is not None
        assert held[0] is held[1]
        assert held[0].signal.reason == USER
        assert r.record.statuses == ["running", "idle"]
        assert r.log == []
        await r.agent.send("B").settled()
        assert r.outcomes == [Completed()]


@pytest.mark.requirement("R30", "R40", "R35", "R34", "R52")
async def test_one_turn_has_one_signal_at_every_seam() -> None:
    given: list[AbortSignal] = []

    async def body(context: Any) -> Any:
        given.append(context.signal)
        return await answer_ok(context)

    async with rig(call("probe"), say("done"), tools=[tool("probe", body)]) as r:
        r.agent.send("A")
        await r.agent.when_idle()
        given += [request.signal for request in r.model.requests]
        given += [signal for _name, signal in r.record.signals]
        names = {name for name, _signal in r.record.signals}

        assert len(r.model.requests) == 2
        assert {stage for stage in STAGES if "/" in stage} <= names
        assert {"llm/stream", "tools/pre-execute", "tools/execute", "tools/post-execute"} <= names
        assert len({id(signal) for signal in given}) == 1


# --- what it covers ---------------------------------------------------------------------------

SEAMS = [
    pytest.param("agent/prompt-submit", marks=pytest.mark.requirement("R31", "R53", "R95")),
    pytest.param("system-prompt/assemble", marks=pytest.mark.requirement("R32", "R55")),
    pytest.param("agent/session-prefix", marks=pytest.mark.requirement("R33", "R54", "R95")),
    pytest.param("agent/pre-step", marks=pytest.mark.requirement("R33", "R54")),
    pytest.param("agent/request", marks=pytest.mark.requirement("R33", "R53")),
    pytest.param("llm/stream", marks=pytest.mark.requirement("R34", "R54")),
    pytest.param("agent/step-result", marks=pytest.mark.requirement("R33", "R53")),
    pytest.param("tools/pre-execute", marks=pytest.mark.requirement("R35", "R54")),
    pytest.param("tools/execute", marks=pytest.mark.requirement("R35", "R54")),
    pytest.param("tools/post-execute", marks=pytest.mark.requirement("R35")),
    pytest.param("agent/turn-continuation", marks=pytest.mark.requirement("R36", "R53", "R95")),
    pytest.param("agent/turn-stop", marks=pytest.mark.requirement("R37", "R53", "R95")),
]


@pytest.mark.race
@pytest.mark.parametrize("seam", SEAMS)
async def test_a_cancel_wakes_who_waits_at_the_seam_and_ends_the_turn(seam: str) -> None:
    async with rig(call("probe"), tools=[tool("probe", answer_ok)]) as r:
        held = Held(r.agent, seam)
        r.agent.send("A")
        await held.reached.wait()
        assert not held.noticed.is_set()
        r.agent.cancel()
        await r.agent.when_idle()

        assert held.noticed.is_set()
        assert r.outcomes == [Aborted()]


@pytest.mark.race
@pytest.mark.requirement("R33", "R36", "R37")
@pytest.mark.parametrize(
    "seam",
    [
        *("system-prompt/assemble", "agent/pre-step", "agent/request", "llm/stream"),
        *("agent/step-result", "tools/execute", "agent/turn-continuation", "agent/turn-stop"),
    ],
)
@pytest.mark.parametrize("nth", [2, 3])
async def test_the_second_and_third_step_are_covered_like_the_first(seam: str, nth: int) -> None:
    script = [call("probe")] * 3
    async with rig(*script, tools=[tool("probe", answer_ok)]) as r:
        held = Held(r.agent, seam, nth=nth)
        r.agent.send("A")
        await held.reached.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert held.noticed.is_set()
        assert r.outcomes == [Aborted()]
        assert len(r.calls) == len(r.results)


@pytest.mark.requirement("R55")
async def test_a_prompt_assembled_outside_a_turn_carries_no_signal() -> None:
    from agent_core.prompt import AssembleContext

    seen: list[AbortSignal | None] = []
    async with rig() as r:

        async def listen(assembly: Any, context: AssembleContext, next_: Any) -> Any:
            seen.append(context.signal)
            return await next_()

        r.runtime.hooks.on("system-prompt/assemble", listen)
        bare = AssembleContext(r.agent)
        other = await r.new_agent()  # its hooks hear of no turn
        await other.system_prompt.assemble(bare, (), other.hooks)
        r.agent.send("A")
        await r.agent.when_idle()

        assert seen == [None, r.model.requests[0].signal]


@pytest.mark.race
@pytest.mark.requirement("R38", "R20", "R65")
@pytest.mark.parametrize("verb", ["cancel", "dispose"])
async def test_an_abort_by_an_observer_of_the_turns_end_changes_no_outcome(verb: str) -> None:
    async with rig() as r:
        prompt = r.agent.send("A")
        queued = r.agent.send("B")
        r.on_event(TurnEnd, lambda: getattr(r.agent, verb)())
        await r.agent.when_idle()
        signal = r.model.requests[0].signal

        assert signal.reason == (USER if verb == "cancel" else DISPOSED)
        assert await prompt.settled() == Completed()
        assert await queued.settled() is None
        assert r.outcomes == [Completed()]


@pytest.mark.race
@pytest.mark.requirement("R38", "R41", "R74")
@pytest.mark.parametrize("verb", ["cancel", "dispose"])
async def test_an_abort_during_the_flush_changes_no_outcome_and_waits_for_it(verb: str) -> None:
    store = GatedStore()
    async with rig(store=store) as r, anyio.create_task_group() as tasks:
        store.close_gate()
        prompt = r.agent.send("A")
        queued = r.agent.send("B")
        await store.flushing.wait()
        signal: Any = r.model.requests[0].signal
        assert not signal.aborted
        getattr(r.agent, verb)()
        idle = await started(r.agent.when_idle, tasks)

        assert signal.aborted
        assert queued.is_settled
        assert not idle.is_set()
        assert not prompt.is_settled
        store.gate.set()
        await idle.wait()
        assert await prompt.settled() == Completed()
        assert r.outcomes == [Completed()]
        if verb == "cancel":
            await r.agent.send("C").settled()
            assert not r.model.requests[1].signal.aborted
            assert r.outcomes == [Completed(), Completed()]


@pytest.mark.race
@pytest.mark.requirement("R38")
async def test_the_next_turn_starts_only_after_the_flush_of_the_one_before() -> None:
    store = GatedStore()
    async with rig(store=store) as r:
        store.close_gate()
        r.agent.send("A")
        second = r.agent.send("B")
        await store.flushing.wait()
        await settle()
        assert r.kinds[-1] == "turn/end"
        assert len(r.of(TurnStart)) == 1
        store.gate.set()

        assert await second.settled() == Completed()


@pytest.mark.requirement("R39")
async def test_once_the_flush_is_done_there_is_nothing_left_to_cancel() -> None:
    async with rig() as r:
        prompt = r.agent.send("A")
        await prompt.settled()
        await r.agent.when_idle()
        signal = r.model.requests[0].signal
        r.agent.cancel()

        assert holder_of(r) is None
        assert not signal.aborted
        assert r.agent.unwinding() is None


@pytest.mark.requirement("R39")
async def test_clearing_an_old_holder_does_not_remove_a_newer_one() -> None:
    async with rig() as r:
        loop = r.agent._loop
        old, new = TurnCancellation(), TurnCancellation()
        loop._holder = new
        loop._clear(old)
        assert loop._holder is new
        assert old.over.is_set()
        assert not new.over.is_set()
        loop._clear(new)
        assert loop._holder is None


@pytest.mark.requirement("R41", "R80")
@pytest.mark.parametrize("cancels_first", [False, True])
async def test_the_next_turn_has_a_new_signal_of_its_own(cancels_first: bool) -> None:
    hang = Hang()
    async with rig(hang if cancels_first else say("A")) as r:
        r.agent.send("A")
        if cancels_first:
            await hang.hanging.wait()
            r.agent.cancel(PARENT)
        r.agent.send("B")
        await r.agent.when_idle()
        first, second = (request.signal for request in r.model.requests)

        assert first is not second
        assert first.aborted is cancels_first
        assert not second.aborted
        assert second.reason is None
        assert r.outcomes == [Aborted() if cancels_first else Completed(), Completed()]


@pytest.mark.race
@pytest.mark.requirement("R56", "R41")
async def test_a_kept_signal_neither_follows_nor_disturbs_a_later_turn() -> None:
    second, third = Hang(), Hang()
    async with rig(say("A"), second, third) as r:
        woken: list[object] = []
        await r.agent.send("A").settled()
        kept = r.model.requests[0].signal
        kept.on_abort(woken.append)
        r.agent.send("B")
        await second.hanging.wait()
        r.agent.cancel()
        await r.agent.when_idle()
        assert not kept.aborted
        assert woken == []

        stale = r.model.requests[1].signal
        r.agent.send("C")
        await third.hanging.wait()
        assert stale.aborted
        assert not r.model.requests[2].signal.aborted
        r.agent.cancel(PARENT)
        await r.agent.when_idle()
        assert stale.reason == USER


@pytest.mark.race
@pytest.mark.requirement("R35", "R40")
async def test_overlapping_calls_share_the_turns_signal() -> None:
    one, two = Waiting(is_cooperative=True), Waiting(is_cooperative=True)
    tools = [tool("one", one, overlaps=True), tool("two", two, overlaps=True)]
    async with rig(call("one", "two"), tools=tools) as r:
        r.agent.send("A")
        await one.entered.wait()
        await two.entered.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert one.signal is two.signal is r.model.requests[0].signal
        assert r.outcomes == [Aborted()]
