"""Races that no other file has: a stop at every await of a turn, and re-entrance from all sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from core_rig import (
    LIMIT_S,
    USER,
    GatedStore,
    Hang,
    Held,
    ScriptedModel,
    Waiting,
    answer_ok,
    call,
    rig,
    runtime_for,
    say,
    settle,
    started,
    tool,
)

import agent_core.runtime
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.content import text_of
from agent_core.errors import AgentDisposed
from agent_core.events import (
    Aborted,
    Completed,
    Disposed,
    Outcome,
    SteeringMessage,
    ToolProgress,
    TurnEnd,
    UserMessage,
)
from agent_core.hooks import HOOKS, Kind
from agent_core.inbox import Prompt
from agent_core.models.adapter import Finish, ModelEvent, ModelRequest, TextDelta, ToolCallDelta
from agent_core.runtime import AgentRuntime
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore
from agent_core.testing import _Stepped
from agent_core.tools.tool import Tool, ToolOutput

# --- a stop at every await ------------------------------------------------------------------------


class Settling(MemoryStore):
    """A store whose flush takes a while, and which knows what it has finished."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed_events = 0

    async def flush(self, session_id: str) -> None:
        count = len(self._sessions[session_id].events)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        self.flushed_events = count


async def talk(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
    """Say a word and call a tool; once it has answered, say that all is done."""
    await anyio.lowlevel.checkpoint()
    yield TextDelta("words")
    await anyio.lowlevel.checkpoint()
    if len(request.messages) == 1:
        yield ToolCallDelta(0, "probe", "{}")
        yield ToolCallDelta(1, "probe", "{}")
        yield Finish("tool_calls")
    else:
        yield Finish("stop")


async def slow_answer(context: Any) -> ToolOutput:
    await anyio.lowlevel.checkpoint()
    return await answer_ok(context)


def slow_listeners(runtime: AgentRuntime) -> None:
    """Have every seam suspend before and after what it is around."""

    async def around(*args: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        result = await args[-1]()
        await anyio.lowlevel.checkpoint()
        return result

    async def before(*_args: Any) -> None:
        await anyio.lowlevel.checkpoint()

    for name, spec in HOOKS.items():
        if spec.kind is not Kind.EMIT:
            runtime.hooks.on(name, around if spec.kind is Kind.WATERFALL else before)


@dataclass
class Run:
    """One turn, stopped at its `at`-th await."""

    at: int
    stop: Callable[[Run], object]
    agent: Agent = field(init=False)
    prompt: Prompt = field(init=False)
    host: asyncio.Task[None] = field(init=False)
    driver: asyncio.Task[Any] | None = None
    store: Settling = field(default_factory=Settling)
    was_stopped: bool = False
    was_over: bool = False  # the turn's end was in the log by then
    was_parked: bool = False

    def abort(self, _reason: object) -> None:
        """What the stepping calls, in the driver, while the turn is suspended."""
        self.driver = asyncio.current_task()
        self.was_stopped = True
        self.was_over = bool(self.outcomes)
        self.was_parked = self.agent.status == "idle"
        self.stop(self)

    async def live(self, ready: anyio.Event, leave: anyio.Event) -> None:
        probe = tool("probe", slow_answer, does="execute")
        model = ScriptedModel([talk] * 9)
        async with runtime_for(model, [probe], store=self.store) as runtime:
            slow_listeners(runtime)
            self.agent = await runtime.create("/")
            self.prompt = self.agent.send("A")
            ready.set()
            await leave.wait()

    @property
    def outcomes(self) -> list[Outcome]:
        return [e.data.outcome for e in self.agent.session.events if isinstance(e.data, TurnEnd)]

    def assert_balanced(self) -> None:
        tags = [str(type(e.data).__struct_config__.tag) for e in self.agent.session.events]
        for kind in ("turn", "step"):
            edges = [tag for tag in tags if tag in (f"{kind}/start", f"{kind}/end")]
            assert edges == [f"{kind}/start", f"{kind}/end"] * (len(edges) // 2), self.at
        assert tags.count("tool/call") == tags.count("tool/result"), self.at


async def stopped_at(
    at: int, stop: Callable[[Run], object], monkeypatch: pytest.MonkeyPatch, *, goes_on: bool
) -> Run:
    """Run a turn and stop it at its `at`-th await; with `goes_on`, another turn follows."""
    run = Run(at, stop)
    ready, leave = anyio.Event(), anyio.Event()
    drive = Agent.drive

    async def stepped(agent: Agent) -> None:
        await _Stepped(drive(agent), at, run)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Agent, "drive", stepped)
        run.host = asyncio.create_task(run.live(ready, leave))
        await ready.wait()
        await run.prompt.settled()
        if goes_on:
            assert await run.agent.send("B").settled() == Completed(), at
        leave.set()
        await asyncio.wait([run.host])
    return run


async def every_await(
    stop: Callable[[Run], object], monkeypatch: pytest.MonkeyPatch, *, goes_on: bool = False
) -> list[Run]:
    """Stop a turn at its first await, its second, and so on, until the agent has parked."""
    runs: list[Run] = []
    with anyio.fail_after(10 * LIMIT_S):
        while True:
            run = await stopped_at(len(runs) + 1, stop, monkeypatch, goes_on=goes_on)
            if not run.was_stopped or run.was_parked:
                return runs
            runs.append(run)


@pytest.mark.timeout(60)
@pytest.mark.requirement("R19", "R38", "R45", "R72", "R73", "R95")
async def test_a_cancel_at_any_await_of_a_turn_ends_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = await every_await(lambda run: run.agent.cancel(), monkeypatch, goes_on=True)

    assert len(runs) > 50
    assert {run.was_over for run in runs} == {True, False}
    for run in runs:
        assert run.outcomes == [Completed() if run.was_over else Aborted(), Completed()], run.at
        run.assert_balanced()
        assert run.host.result() is None


@pytest.mark.timeout(60)
@pytest.mark.requirement("R63", "R65", "R72", "R75", "R76")
async def test_a_disposal_at_any_await_of_a_turn_ends_it_and_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = await every_await(lambda run: run.agent.dispose(), monkeypatch)

    assert len(runs) > 50
    for run in runs:
        assert run.outcomes == [Completed() if run.was_over else Disposed()], run.at
        run.assert_balanced()
        assert run.store.flushed_events == len(run.agent.session.events)
        assert run.host.result() is None


@pytest.mark.timeout(60)
@pytest.mark.requirement("R38", "R65", "R73", "R75", "R76")
@pytest.mark.parametrize("whom", ["the host", "the driver"])
async def test_a_task_cancelled_at_any_await_disposes_first_and_then_ends(
    whom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancel(run: Run) -> None:
        task = run.host if whom == "the host" else run.driver
        assert task is not None
        task.cancel()

    runs = await every_await(cancel, monkeypatch)

    assert len(runs) > 50
    for run in runs:
        assert run.outcomes == [Completed() if run.was_over else Disposed()], run.at
        run.assert_balanced()
        assert run.store.flushed_events == len(run.agent.session.events), run.at
        assert run.agent.status == "disposed"
        assert run.prompt.outcome == run.outcomes[0]
        assert run.host.cancelled() is (whom == "the host"), run.at
        assert run.driver is not None
        assert run.driver.cancelled(), run.at
        again = await Session.load(run.agent.id, run.store)
        assert list(again.events) == list(run.agent.session.events)  # nothing to repair


# --- re-entrance ----------------------------------------------------------------------------------

BEFORE_A_TURN = ("agent/created", "agent/session-start")
ELSEWHERE = ("agent/error", "agent/disposed", "subagent/start", "subagent/end")


@pytest.mark.requirement("R28", "R63", "R65", "R66", "R75")
@pytest.mark.parametrize("verb", ["cancel", "dispose"])
@pytest.mark.parametrize("name", [name for name in HOOKS if name not in ELSEWHERE])
async def test_a_listener_may_stop_its_own_agent_from_inside_any_hook(name: str, verb: str) -> None:
    tools = [tool("probe", answer_ok, does="execute")]
    mode = "ask" if name == "approval/request" else "bypass"
    agents: list[Agent] = []  # the one it is about; made with the listener in place

    def stop(agent: Agent) -> None:
        remove()
        getattr(agent, verb)()

    async def around(*args: Any) -> Any:
        stop(agents[0])
        return await args[-1]()

    async def before(*_args: Any) -> None:
        stop(agents[0])

    def notice(subject: Any, *_args: Any) -> None:
        stop(subject if isinstance(subject, Agent) else subject.agent)

    listener: dict[Kind, Any] = {Kind.WATERFALL: around, Kind.SERIAL: before, Kind.EMIT: notice}
    async with rig(call("probe"), say("done"), tools=tools, mode=mode) as r:
        remove = r.runtime.hooks.on(name, listener[HOOKS[name].kind])
        agent = await r.new_agent()
        agents.append(agent)
        if name in BEFORE_A_TURN and verb == "dispose":
            with pytest.raises(AgentDisposed):
                agent.send("A")
            await agent.when_idle()
            assert agent.session.events == []
            return
        outcome = await agent.send("A").settled()
        await agent.when_idle()

        ends = [e.data.outcome for e in agent.session.events if isinstance(e.data, TurnEnd)]
        assert ends == ([] if outcome is None else [outcome])
        if verb == "dispose":
            assert agent.status == "disposed"
            assert outcome in (None, Disposed())
        else:
            assert outcome in ((Completed(),) if name in BEFORE_A_TURN else (None, Aborted()))
            assert agent.status == "idle"
            assert await agent.send("B").settled() == Completed()


@pytest.mark.race
@pytest.mark.requirement("R74", "R86")
async def test_a_waiter_for_idle_is_not_told_so_while_a_listener_of_idle_sends_more() -> None:
    hang, store = Hang(), GatedStore()
    async with rig(say("A"), hang, store=store) as r, anyio.create_task_group() as tasks:
        statuses: list[str] = []

        async def wait() -> None:
            await r.agent.when_idle()
            statuses.append(r.agent.status)

        r.on_status("idle", lambda: r.agent.send("B"))
        store.close_gate()
        r.agent.send("A")
        await store.flushing.wait()
        over = await started(wait, tasks)
        store.gate.set()
        await hang.hanging.wait()
        await settle()
        assert not over.is_set()  # idle was announced, and is over already
        r.agent.cancel()
        await over.wait()

        assert statuses == ["idle"]


@pytest.mark.race
@pytest.mark.requirement("R75", "R88")
async def test_an_automation_that_restarts_whatever_stops_does_not_outlive_a_disposal() -> None:
    hang = Hang()
    async with rig(hang) as r:
        refused: list[str] = []

        def restart(agent: Agent, status: str) -> None:
            if status != "running":
                try:
                    agent.send("and on")
                except AgentDisposed:
                    refused.append(status)

        r.agent.hooks.on("agent/status", restart)
        r.agent.send("A")
        await hang.hanging.wait()
        await r.agent.dispose()
        await settle()

        assert refused == ["disposed"]
        assert r.outcomes == [Disposed()]
        assert len(r.model.requests) == 1


@pytest.mark.race
async def test_steering_of_the_step_that_a_stop_ends_is_logged_and_gets_no_step() -> None:
    waiting = Waiting()
    async with rig(call("wait"), say("never"), tools=[tool("wait", waiting)]) as r:

        async def stop(*_args: Any) -> str:
            return "enough"

        r.agent.hooks.on("agent/turn-stop", stop)
        prompt = r.agent.send("A")
        await waiting.entered.wait()
        steering = r.agent.steer("S")
        waiting.gate.set()

        assert await prompt.settled() == Completed()
        assert await steering.settled() == Completed()
        assert [text_of(m.content) for m in r.of(SteeringMessage)] == ["S"]
        assert len(r.model.requests) == 1


@pytest.mark.race
@pytest.mark.requirement("R38", "R45", "R49")
async def test_what_is_sent_after_a_cancel_in_the_flush_waits_for_the_flush_and_runs() -> None:
    store = GatedStore()
    async with rig(store=store) as r:
        store.close_gate()
        first, second = r.agent.send("A"), r.agent.send("B")
        await store.flushing.wait()
        r.agent.cancel()
        third = r.agent.send("C")
        await settle()
        assert r.kinds[-1] == "turn/end"
        assert second.is_settled
        assert not first.is_settled
        store.gate.set()

        assert await third.settled() == Completed()
        assert first.outcome == Completed()
        assert [text_of(m.content) for m in r.of(UserMessage)] == ["A", "C"]


@pytest.mark.race
@pytest.mark.requirement("R66", "R72")
async def test_a_success_that_the_abort_overtakes_behind_the_body_is_aborted() -> None:
    async with rig(call("probe"), say("done"), tools=[tool("probe", answer_ok)]) as r:
        held = Held(r.agent, "tools/post-execute")
        r.agent.send("A")
        await held.reached.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        (result,) = r.results
        assert (result.code, result.is_error) == ("ABORTED", True)
        assert "ok" in result.output
        assert r.outcomes == [Aborted()]


@pytest.mark.race
@pytest.mark.requirement("R58", "R73")
async def test_a_task_that_a_tool_leaves_behind_is_not_the_turns() -> None:
    go_on, strays = anyio.Event(), list[asyncio.Task[None]]()
    seen: list[bool] = []

    async def stray(signal: AbortSignal) -> None:
        await go_on.wait()
        seen.append(signal.aborted)

    async def body(context: Any) -> ToolOutput:
        strays.append(asyncio.create_task(stray(context.signal)))
        return ToolOutput("left one behind")

    async with rig(call("leave"), say("done"), tools=[tool("leave", body)]) as r:
        assert await r.agent.send("A").settled() == Completed()
        second = r.agent.send("B")
        r.agent.cancel()
        go_on.set()
        await strays[0]

        assert second.is_settled
        assert seen == [False]  # the cancel of a later turn is not its signal's


# --- other threads --------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R15", "R66")
async def test_another_thread_stops_a_turn_by_the_call_that_the_refusal_names() -> None:
    hang = Hang()
    async with rig(hang) as r:
        prompt = r.agent.send("A")
        await hang.hanging.wait()
        refusals: list[str] = []

        def stop() -> None:
            with pytest.raises(RuntimeError) as refused:
                r.agent.cancel()
            refusals.append(str(refused.value))
            anyio.from_thread.run_sync(r.agent.cancel)

        await anyio.to_thread.run_sync(stop)

        assert refusals == [
            "this agent belongs to another thread; call it through anyio.from_thread.run_sync"
        ]
        assert await prompt.settled() == Aborted()
        assert r.model.requests[0].signal.reason == USER


# --- the end of an agent --------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R75")
async def test_a_listener_of_the_end_that_fails_does_not_keep_the_agent() -> None:
    async with rig() as r:

        def explode(*_args: Any) -> None:
            raise RuntimeError("listener")

        r.runtime.hooks.on("agent/disposed", explode)
        r.agent.send("A")
        await r.agent.dispose()
        await settle()

        assert r.runtime.agents == {}
        assert (await r.new_agent()).status == "idle"


class Kept(Tool):
    """Notes when it is closed."""

    name = "kept"

    def __init__(self) -> None:
        self.closed = 0

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("end", ["in peace", "by an error", "by a cancellation"])
async def test_leaving_the_runtime_closes_the_tools_however_it_is_left(end: str) -> None:
    kept = Kept()
    with anyio.CancelScope() as scope:
        try:
            async with runtime_for(ScriptedModel([])) as runtime:
                runtime.add_tool(kept)
                if end == "by an error":
                    raise KeyError(end)
                if end == "by a cancellation":
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
        except KeyError:
            pass

    assert kept.closed == 1


@pytest.mark.race
@pytest.mark.requirement("R97")
async def test_a_veto_of_what_is_said_of_a_slow_stop_harms_no_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_core.runtime, "SAY_AWAITING_AFTER_S", 0.001)
    waiting, vetoed = Waiting(), anyio.Event()

    def veto(event: Any) -> None:
        if isinstance(event.data, ToolProgress):
            vetoed.set()
            raise ValueError("no progress here")

    async with rig(call("wait"), tools=[tool("wait", waiting)]) as r:
        other = await r.new_agent()
        r.agent.session.validate(veto)
        prompt = r.agent.send("A")
        await waiting.entered.wait()
        r.agent.cancel()
        await vetoed.wait()
        await settle()
        waiting.gate.set()

        assert await prompt.settled() == Aborted()
        assert await other.send("B").settled() == Completed()
