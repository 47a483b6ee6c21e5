"""A real agent against a reference model: any history of verbs, listeners, slow and failing work.

The machine owns its event loop and lets it run after each rule until every task is blocked, so a
history is deterministic and nothing sleeps. `turn_reference` says what has to be seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

import anyio
import pytest
from core_rig import ScriptedModel, runtime_for, tool
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from structlog.testing import capture_logs
from turn_reference import MOMENTS, SEAMS, Act, Fact, Reference

import agent_core.loop
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.content import Text, TextPart, ToolCallPart
from agent_core.errors import AgentDisposed, ModelError, StoreError, ToolError
from agent_core.events import decode, encode
from agent_core.inbox import Prompt
from agent_core.loop import Refuse, TurnCancellation
from agent_core.models.adapter import Finish, ModelEvent, ModelRequest, TextDelta, ToolCallDelta
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore
from agent_core.tools.tool import ToolContext, ToolOutput

TOOLS: Final = ("polite", "stubborn", "pair", "stubborn pair")
BAD_CAUSES: Final = ("user", {"kind": "timeout"}, {"kind": "user", "why": "x"}, ["user"], 0, Text)

VERBS = ["send", "send", "send", "steer", "steer", "cancel", "cancel", "bad_cancel", "withdraw"]
acts = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 11)), min_size=1, max_size=4)
acts_or_end = st.integers(0, 15).flatmap(lambda n: acts if n else st.just([("dispose", 0)]))
meanwhile = st.integers(0, 3).flatmap(lambda n: st.just([]) if n else acts_or_end)


class World(MemoryStore):
    """The real agent, and everything it waits for: a store, a model, tools and listeners."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, Prompt] = {}
        self.refused: set[str] = set()
        self.statuses: list[str] = []
        self.signals: list[AbortSignal] = []
        self.waits: dict[str, asyncio.Future[str]] = {}
        self.listeners: dict[str, list[Sequence[Act]]] = {moment: [] for moment in MOMENTS}
        self.held: dict[str, bool] = {}
        self.model_is_stubborn = False
        self.refuses_next = self.votes_stop = False
        self.flush_is_blocked = self.flush_fails = False
        self.idle_waiters: list[asyncio.Task[None]] = []
        self.holders: list[TurnCancellation] = []

    # --- its life -------------------------------------------------------------------------------

    async def run(self, ready: anyio.Event, leave: anyio.Event) -> None:
        model = ScriptedModel([self._play] * 1000)
        self.model = model
        tools = [tool(name, self._body(name), overlaps=name.endswith("pair")) for name in TOOLS]
        async with runtime_for(model, tools, store=self) as runtime:
            self.agent: Agent = await runtime.create("/")
            self._listen(self.agent)
            ready.set()
            await leave.wait()

    def _listen(self, agent: Agent) -> None:
        agent.hooks.on("agent/status", self._on_status)
        agent.session.observe(lambda event: self._fire(tag_of(event.data)))
        for seam in SEAMS:
            is_serial = seam in ("agent/pre-step", "agent/turn-stop")
            agent.hooks.on(seam, self._serial(seam) if is_serial else self._waterfall(seam))

    def _on_status(self, _agent: Agent, status: str) -> None:
        self.statuses.append(status)
        self._fire(status)

    # --- verbs ----------------------------------------------------------------------------------

    def act(self, act: Act) -> None:
        verb, operand = act
        if verb in ("send", "steer"):
            try:
                self.prompts[operand] = getattr(self.agent, verb)(operand)
            except AgentDisposed:
                self.refused.add(operand)
        elif verb == "cancel":
            self.agent.cancel({"kind": operand})
        elif verb == "bad_cancel":
            with pytest.raises(TypeError):
                self.agent.cancel(BAD_CAUSES[int(operand)])
        elif verb == "withdraw":
            if operand in self.prompts:
                self.agent.withdraw(self.prompts[operand])
        else:
            self.agent.dispose()

    def _fire(self, moment: str) -> None:
        if self.listeners.get(moment):
            for act in self.listeners[moment].pop(0):
                self.act(act)

    # --- what the agent waits for ---------------------------------------------------------------

    async def _wait(self, at: str) -> str:
        self.waits[at] = asyncio.get_running_loop().create_future()
        try:
            return await self.waits[at]
        finally:
            del self.waits[at]

    async def _wait_for(self, at: str, signal: AbortSignal, is_stubborn: bool) -> str:
        if is_stubborn:
            return await self._wait(at)
        async with signal.scope():
            how = await self._wait(at)
        return how

    def _meet(self, signal: AbortSignal) -> None:
        if signal not in self.signals:
            assert not signal.aborted, "a turn was cancelled before it began"
            signal.on_abort(lambda _reason: self._fire("abort"))
            self.signals.append(signal)
        assert signal is self.signals[-1], "a turn was handed the signal of another"

    async def _hold(self, seam: str, signal: AbortSignal) -> None:
        self._meet(signal)
        if seam in self.held:
            await self._wait_for(seam, signal, self.held.pop(seam))

    def _serial(self, seam: str) -> Callable[..., Any]:
        async def listen(*args: Any) -> str | None:
            await self._hold(seam, args[-1])
            votes, self.votes_stop = self.votes_stop, self.votes_stop and seam != "agent/turn-stop"
            return "enough" if votes and seam == "agent/turn-stop" else None

        return listen

    def _waterfall(self, seam: str) -> Callable[..., Any]:
        async def listen(*args: Any) -> Any:
            await self._hold(seam, args[-2])
            if seam == "agent/prompt-submit" and self.refuses_next:
                self.refuses_next = False
                return Refuse("not here")
            return await args[-1]()

        return listen

    async def _play(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self._meet(request.signal)
        is_stubborn = self.model_is_stubborn
        while True:
            heard = await self._wait_for("model", request.signal, is_stubborn)
            what, _, operand = heard.partition(":")
            if what == "says":
                yield TextDelta(operand)
            elif what == "fails":
                raise ModelError("overloaded", code="OVERLOADED")
            elif what == "calls":
                for index, name in enumerate(operand.split(",")):
                    yield ToolCallDelta(index, name, "{}")
                yield Finish("tool_calls")
                return
            else:
                yield Finish(operand)  # type: ignore[arg-type]
                return

    def _body(self, name: str) -> Callable[[ToolContext], Any]:
        async def body(context: ToolContext) -> ToolOutput:
            self._meet(context.signal)
            at = f"tool {int(context.call_id.rsplit('_', 1)[1]) - 1}"
            how = await self._wait_for(at, context.signal, name.startswith("stubborn"))
            if how == "fails":
                raise ToolError("it did not work")
            if how == "crashes":
                raise KeyError("SECRET")
            if how == "gives up":
                raise asyncio.CancelledError
            return ToolOutput("fine")

        async def polite_body(context: ToolContext) -> ToolOutput:
            return await body(context)

        return polite_body

    async def flush(self, session_id: str) -> None:
        if self.flush_is_blocked:
            await self._wait("flush")
        if self.flush_fails:
            self.flush_fails = False
            raise StoreError("the disk is full")

    # --- what is seen ---------------------------------------------------------------------------

    def facts(self) -> list[Fact]:
        events = [event.data for event in self.agent.session.events]
        return [fact for data in events if (fact := fact_of(data)) is not None]

    def settled(self) -> dict[str, str | None]:
        return {
            name: None if prompt.outcome is None else tag_of(prompt.outcome)
            for name, prompt in self.prompts.items()
            if prompt.is_settled
        }


def tag_of(data: Any) -> str:
    return str(type(data).__struct_config__.tag)


def fact_of(data: Any) -> Fact | None:
    """Return an entry of the log as the reference writes it."""
    match tag_of(data):
        case "turn/start":
            return "turn/start", data.turn
        case "turn/end":
            return "turn/end", data.turn, tag_of(data.outcome)
        case "step/start" | "step/end" as tag:
            return tag, data.turn, data.step
        case "user/message" | "prompt/blocked" | "steering/message" as tag:
            return tag, data.content[0].text
        case "assistant/message" as tag:
            text = "".join(part.text for part in data.content if isinstance(part, TextPart))
            calls = tuple(part.name for part in data.content if isinstance(part, ToolCallPart))
            return tag, text, calls, data.interrupted
        case "tool/result" as tag:
            return tag, data.code or "ok"
        case _:
            return None


class AgentMachine(RuleBasedStateMachine):
    """Does the same to both, and compares what is seen of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names = 0
        self.reference, self.world = Reference(), World()
        self.loop: Any = asyncio.new_event_loop()
        self.logs = capture_logs()
        self.logs.__enter__()
        self._count_holders()
        self.ready, self.leave = anyio.Event(), anyio.Event()
        self.host = self.loop.create_task(self.world.run(self.ready, self.leave))
        self.tick(lambda: None)

    def _count_holders(self) -> None:
        made = self.world.holders

        class Counted(TurnCancellation):
            def __init__(self) -> None:
                super().__init__()
                assert all(other.over.is_set() for other in made), "two holders at once"
                made.append(self)

        agent_core.loop.TurnCancellation = Counted  # type: ignore[misc]

    def tick(self, *steps: Callable[[], object]) -> None:
        """Do `steps` without a break between them; then run until all tasks are blocked."""

        async def run() -> None:
            for step in steps:
                step()
            while True:
                await asyncio.sleep(0)
                if not self.loop._ready:  # what could run has run, and made nothing else ready
                    return

        self.loop.run_until_complete(run())

    def both(self, history: Sequence[Act]) -> list[Callable[[], object]]:
        def step(act: Act) -> Callable[[], object]:
            def both() -> None:
                self.world.act(act)
                self.reference.act(act)

            return both

        return [step(act) for act in history]

    def named(self, drawn: Sequence[tuple[str, int]]) -> list[Act]:
        """Give the drawn verbs operands."""
        history: list[Act] = []
        for verb, number in drawn:
            if verb in ("send", "steer"):
                self.names += 1
                history.append((verb, f"p{self.names}"))
            elif verb == "cancel":
                history.append((verb, "user" if number % 2 else "parent"))
            elif verb == "withdraw":
                history.append((verb, f"p{max(1, self.names - number % 4)}"))
            else:
                history.append((verb, str(number % len(BAD_CAUSES))))
        return history

    # --- rules ----------------------------------------------------------------------------------

    @rule(drawn=acts)
    def somebody_acts(self, drawn: list[tuple[str, int]]) -> None:
        self.tick(*self.both(self.named(drawn)))
        self.reference.drive()

    @precondition(lambda self: not self.reference.is_quiet)
    @rule(drawn=acts_or_end, moment=st.sampled_from(MOMENTS))
    def a_listener_will_act(self, drawn: list[tuple[str, int]], moment: str) -> None:
        history = self.named(drawn)
        self.world.listeners[moment].append(history)
        self.reference.listeners[moment].append(history)

    @precondition(lambda self: not self.reference.is_quiet)
    @rule(seam=st.sampled_from(SEAMS), is_stubborn=st.booleans())
    def a_listener_will_wait(self, seam: str, is_stubborn: bool) -> None:
        self.world.held[seam] = self.reference.held[seam] = is_stubborn

    @precondition(lambda self: not self.reference.is_quiet)
    @rule(is_stubborn=st.booleans())
    def models_will_be(self, is_stubborn: bool) -> None:
        self.world.model_is_stubborn = self.reference.model_is_stubborn = is_stubborn

    @precondition(lambda self: not self.reference.is_quiet)
    @rule(which=st.sampled_from(["refuses_next", "votes_stop", "flush_fails", "flush_is_blocked"]))
    def it_will_happen(self, which: str) -> None:
        setattr(self.world, which, True)
        setattr(self.reference, which, True)

    def is_waiting_at(self, prefix: str) -> list[str]:
        return self.reference.waiting_at(lambda at: at.startswith(prefix))

    def let_go(self, at: str, how: str, then: Sequence[tuple[str, int]] = ()) -> None:
        """Release what waits, and act before it has gone on."""

        def release() -> None:
            self.world.waits[at].set_result(how)
            self.reference.release(at, how)

        self.tick(release, *self.both(self.named(then)))
        self.reference.drive()

    @precondition(lambda self: self.is_waiting_at("model"))
    @rule(
        heard=st.sampled_from(["says:so ", "says:and ", "fails", "ends:stop", "ends:stop"])
        | st.sampled_from(["ends:length", "ends:refusal"])
        | st.lists(st.sampled_from(TOOLS), min_size=1, max_size=3).map(
            lambda names: "calls:" + ",".join(names)
        ),
        then=meanwhile,
    )
    def the_model_goes_on(self, heard: str, then: list[tuple[str, int]]) -> None:
        self.let_go("model", heard, then)

    @precondition(lambda self: self.is_waiting_at("model"))
    @rule(names=st.lists(st.sampled_from(TOOLS), max_size=2))
    def the_model_calls_or_ends(self, names: list[str]) -> None:
        self.let_go("model", "calls:" + ",".join(names) if names else "ends:stop")

    @precondition(lambda self: self.is_waiting_at("tool"))
    @rule(
        which=st.integers(0, 2),
        how=st.sampled_from(["ends", "ends", "fails", "crashes", "gives up"]),
        then=meanwhile,
    )
    def a_tool_ends(self, which: int, how: str, then: list[tuple[str, int]]) -> None:
        waiting = self.is_waiting_at("tool")
        self.let_go(waiting[which % len(waiting)], how, then)

    @precondition(lambda self: self.is_waiting_at("agent/"))
    @rule(then=meanwhile)
    def a_listener_goes_on(self, then: list[tuple[str, int]]) -> None:
        self.let_go(self.is_waiting_at("agent/")[0], "goes on", then)

    @precondition(lambda self: self.reference.flush_is_blocked)
    @rule(then=meanwhile)
    def the_store_goes_on(self, then: list[tuple[str, int]]) -> None:
        self.world.flush_is_blocked = self.reference.flush_is_blocked = False
        if self.is_waiting_at("flush"):
            self.let_go("flush", "goes on", then)

    @rule(drawn=acts)
    def somebody_waits_for_idle(self, drawn: list[tuple[str, int]]) -> None:
        async def wait() -> None:
            await self.world.agent.when_idle()
            assert self.world.agent.status != "running", "idle was reported while work runs"

        def begin() -> None:
            self.world.idle_waiters.append(self.loop.create_task(wait()))

        self.tick(*self.both(self.named(drawn))[:1], begin)
        self.reference.drive()

    @precondition(lambda self: self.names > 5)
    @rule(is_sure=st.integers(0, 9))
    def somebody_disposes(self, is_sure: int) -> None:
        if is_sure:
            return
        self.tick(*self.both([("dispose", "")]))
        self.reference.drive()

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def the_agent_is_as_the_reference_says(self) -> None:
        world, reference = self.world, self.reference
        assert world.facts() == reference.log
        assert world.statuses == reference.statuses
        assert world.agent.status == reference.status
        assert world.settled() == reference.settled
        assert world.refused == reference.refused
        unsaved = {name for name, prompt in world.prompts.items() if prompt.error is not None}
        assert unsaved == reference.unsaved
        waiting = sorted(reference.waiting_at(lambda _at: True))
        assert sorted(world.waits) == waiting

    @invariant()
    def the_first_cause_of_each_turn_stands(self) -> None:
        reasons: list[Any] = [signal.reason for signal in self.world.signals]
        given = [None if reason is None else reason["kind"] for reason in reasons]
        assert given == self.reference.reasons

    @invariant()
    def at_most_one_holder_is_live(self) -> None:
        live = [holder for holder in self.world.holders if not holder.over.is_set()]
        assert len(live) == (self.reference.turn is not None)

    @invariant()
    def quiet_is_reported_when_it_is_quiet(self) -> None:
        is_quiet = self.reference.is_parked or self.reference.is_quiet
        waiters = self.world.idle_waiters
        assert [task.done() for task in waiters] == [is_quiet] * len(waiters)
        while is_quiet and waiters:
            waiters.pop().result()
        assert self.world.agent._loop.quiet.is_set() == self.reference.is_quiet
        assert not is_quiet or self.world.model.open_streams == 0

    @invariant()
    def the_log_reads_back_as_it_is(self) -> None:
        events = list(self.world.agent.session.events)
        for event in events[-3:]:
            assert decode(encode(event.data)) == event.data
        _header, stored = self.loop.run_until_complete(self.world.load(self.world.agent.id))
        assert stored == events

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            agent_core.loop.TurnCancellation = TurnCancellation  # type: ignore[misc]
            self.logs.__exit__(None, None, None)
            self.loop.close()

    def _end(self) -> None:
        world = self.world
        world.flush_is_blocked = False
        world.held.clear()
        self.tick(self.leave.set)
        while world.waits:
            at, future = next(iter(world.waits.items()))
            self.tick(lambda future=future, at=at: future.set_result("ends:stop"))  # type: ignore[misc]
        assert self.host.done(), "leaving the runtime waits for something that is not there"
        self.host.result()
        assert asyncio.all_tasks(self.loop) == set()
        assert all(prompt.is_settled for prompt in world.prompts.values())
        assert_balanced(world)
        again = self.loop.run_until_complete(Session.load(world.agent.id, world))
        assert list(again.events) == list(world.agent.session.events)  # nothing to repair
        assert again.messages == world.agent.session.messages


def assert_balanced(world: World) -> None:
    """Each start has its end, and each call of a message one result, in the model's order."""
    promised: list[str] = []
    answered: list[str] = []
    for event in world.agent.session.events:
        data: Any = event.data
        match tag_of(data):
            case "assistant/message":
                promised += [part.id for part in data.content if isinstance(part, ToolCallPart)]
            case "tool/result":
                answered.append(data.call_id)
            case _:
                pass
    assert promised == answered
    tags = [tag_of(event.data) for event in world.agent.session.events]
    for kind in ("turn", "step"):
        edges = [tag for tag in tags if tag in (f"{kind}/start", f"{kind}/end")]
        assert edges == [f"{kind}/start", f"{kind}/end"] * (len(edges) // 2)


@pytest.mark.race
@pytest.mark.timeout(300)
@pytest.mark.requirement("R28", "R40", "R41", "R42", "R43", "R44", "R45", "R46", "R47", "R48")
@pytest.mark.requirement("R49", "R50", "R64", "R65", "R66", "R67", "R72", "R73", "R74", "R88")
def test_an_agent_does_what_the_reference_says_whatever_happens_to_it(
    request: pytest.FixtureRequest,
) -> None:
    # Each of the 200 repetitions of `make stress` has other examples: 2,000 in all.
    is_repeated = request.config.getoption("--repeat") > 1
    run_state_machine_as_test(
        AgentMachine,
        settings=settings(
            max_examples=10 if is_repeated else 100,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
