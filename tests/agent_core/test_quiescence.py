"""What does not cooperate is waited for, visibly, and nothing is ever cancelled from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from core_rig import (
    LIMIT_S,
    GatedStore,
    Hang,
    Held,
    Rig,
    ScriptedModel,
    Waiting,
    call,
    rig,
    runtime_for,
    say,
    settle,
    started,
    tool,
)

import agent_core.runtime
from agent_core.events import (
    Aborted,
    Completed,
    Disposed,
    ToolProgress,
    ToolResult,
    TurnEnd,
    TurnStart,
)
from agent_core.models.adapter import Finish, ModelEvent, ModelRequest, TextDelta
from agent_core.tools.tool import ToolOutput


@pytest.fixture
async def cancelled_tasks() -> list[str]:
    """The names of all tasks that anybody called `cancel` on."""
    names: list[str] = []

    class RecordingTask(asyncio.Task[Any]):
        def cancel(self, msg: Any = None) -> bool:
            names.append(self.get_name())
            return super().cancel(msg)

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return RecordingTask(coro, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(make)
    return names


async def test_the_recorder_of_cancelled_tasks_records(cancelled_tasks: list[str]) -> None:
    with anyio.move_on_after(0.001):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever, name="sleeper")

    assert "sleeper" in cancelled_tasks


WHERE = ["tool", "parallel tools", "listener", "adapter", "serial listener", "stubborn stream"]


class Stuck:
    """Something of each kind that ignores the signal until its gate is opened."""

    def __init__(self, where: str) -> None:
        self.entered, self.gate = anyio.Event(), anyio.Event()
        self._where = where
        self.body = Waiting()
        self.other = Waiting()

    def script(self) -> Any:
        if self._where == "adapter":

            async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
                yield TextDelta("some ")
                self.entered.set()
                await self.gate.wait()
                yield TextDelta("more")
                yield Finish("stop")

            return play
        if self._where == "stubborn stream":  # takes its time to close

            async def linger(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
                try:
                    yield TextDelta("some ")
                    self.entered.set()
                    await request.signal.wait()
                    yield TextDelta("more")
                finally:
                    await self.gate.wait()

            return linger
        if self._where == "parallel tools":
            return call("one", "two")
        return call("one") if self._where == "tool" else say("done")

    def tools(self) -> list[Any]:
        return [
            tool("one", self._one, overlaps=True),
            tool("two", self._two, overlaps=True),
        ]

    async def _one(self, context: Any) -> Any:
        self.entered.set()
        await self.gate.wait()
        return await self._answer()

    async def _two(self, context: Any) -> Any:
        await self.gate.wait()
        return await self._answer()

    async def _answer(self) -> Any:
        return ToolOutput("done after all")

    def listen(self, r: Rig) -> None:
        if self._where == "listener":
            r.agent.hooks.on("agent/step-result", self._hold_waterfall)
        elif self._where == "serial listener":
            r.agent.hooks.on("agent/pre-step", self._hold)

    async def _hold(self, *_args: Any) -> None:
        self.entered.set()
        await self.gate.wait()

    async def _hold_waterfall(self, *args: Any) -> Any:
        await self._hold()
        return await args[-1]()


@pytest.mark.race
@pytest.mark.requirement("R73", "R74", "R75", "R76", "R94", "R97")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("verb", ["cancel", "dispose"])
async def test_nothing_reports_quiet_before_uncooperative_work_has_returned(
    where: str, verb: str, cancelled_tasks: list[str]
) -> None:
    stuck = Stuck(where)
    model = ScriptedModel([stuck.script()])
    left = anyio.Event()
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            ready, leave = anyio.Event(), anyio.Event()
            rigs: list[Rig] = []

            async def own() -> None:
                async with runtime_for(model, stuck.tools()) as runtime:
                    rigs.append(Rig(runtime, await runtime.create("/"), model))
                    ready.set()
                    await leave.wait()
                left.set()

            tasks.start_soon(own)
            await ready.wait()
            (r,) = rigs
            stuck.listen(r)
            prompt = r.agent.send("A")
            await stuck.entered.wait()
            idle = await started(r.agent.when_idle, tasks)
            getattr(r.agent, verb)()
            after = await started(r.agent.when_idle, tasks)
            disposed = await started(dispose(r), tasks)
            leave.set()
            await settle()

            waiting = (idle, after, disposed, left)
            assert [event.is_set() for event in waiting] == [False] * 4
            assert not prompt.is_settled
            assert r.of(TurnEnd) == []
            assert r.agent.id in r.runtime.agents
            stuck.gate.set()
            for event in waiting:
                await event.wait()

    assert r.outcomes == [Disposed()]
    assert prompt.outcome == Disposed()
    assert r.model.open_streams == 0
    assert r.agent.id not in r.runtime.agents
    assert cancelled_tasks == []


def dispose(r: Rig) -> Any:
    async def wait() -> None:
        await r.agent.dispose()

    return wait


@pytest.mark.race
@pytest.mark.requirement("R73", "R74", "R97")
@pytest.mark.parametrize("where", WHERE)
async def test_a_cancelled_agent_stays_running_until_the_work_has_returned(where: str) -> None:
    stuck = Stuck(where)
    async with rig(stuck.script(), tools=stuck.tools()) as r, anyio.create_task_group() as tasks:
        stuck.listen(r)
        prompt = r.agent.send("A")
        await stuck.entered.wait()
        r.agent.cancel()
        idle = await started(r.agent.when_idle, tasks)
        assert r.agent.status == "running"
        assert not idle.is_set()
        assert r.of(TurnEnd) == []
        stuck.gate.set()
        await idle.wait()

        assert await prompt.settled() == Aborted()
        assert r.agent.status == "idle"
        assert await r.agent.send("B").settled() == Completed()


@pytest.mark.race
@pytest.mark.requirement("R76")
async def test_leaving_the_runtime_by_an_error_waits_for_the_work_just_the_same(
    cancelled_tasks: list[str],
) -> None:
    waiting, left = Waiting(), anyio.Event()
    model = ScriptedModel([call("wait")])
    rigs: list[Rig] = []

    async def fail_inside() -> None:
        async with runtime_for(model, [tool("wait", waiting)]) as runtime:
            rigs.append(Rig(runtime, await runtime.create("/"), model))
            rigs[0].agent.send("A")
            await waiting.entered.wait()
            raise KeyError("the owner's own failure")

    async def own() -> None:
        with pytest.raises(KeyError):
            await fail_inside()
        left.set()

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(own)
            await waiting.entered.wait()
            await settle()
            assert not left.is_set()
            assert cancelled_tasks == []
            waiting.gate.set()
            await left.wait()
            assert cancelled_tasks == []

    assert rigs[0].outcomes == [Disposed()]
    assert [result.code for result in rigs[0].results] == ["ABORTED"]


@pytest.mark.race
@pytest.mark.requirement("R75", "R88")
async def test_every_caller_of_dispose_waits_for_the_same_end() -> None:
    store = GatedStore()
    async with rig(store=store) as r, anyio.create_task_group() as tasks:
        store.close_gate()
        r.agent.send("A")
        await store.flushing.wait()
        ends = [await started(dispose(r), tasks) for _ in range(3)]
        assert [end.is_set() for end in ends] == [False, False, False]
        store.gate.set()
        for end in ends:
            await end.wait()

        assert r.agent.status == "disposed"
        assert r.record.names.count("agent/disposed") == 1
        assert r.record.statuses.count("disposed") == 1
        await r.agent.dispose()
        await r.agent.when_idle()


@pytest.mark.race
@pytest.mark.requirement("R88", "R64", "R75")
@pytest.mark.parametrize("order", ["cancel first", "dispose first"])
async def test_cancel_against_dispose_ends_quiet_and_disposed_in_either_order(
    order: str,
) -> None:
    hang = Hang(is_slow=True)
    async with rig(hang) as r, anyio.create_task_group() as tasks:
        r.agent.send("A")
        queued = r.agent.send("B")
        await hang.hanging.wait()
        verbs: list[Any] = [r.agent.cancel, r.agent.dispose]
        for verb in verbs if order == "cancel first" else reversed(verbs):
            verb()
        end = await started(dispose(r), tasks)
        assert queued.is_settled
        assert not end.is_set()
        hang.gate.set()
        await end.wait()

        kind = "user" if order == "cancel first" else "disposed"
        assert r.model.requests[0].signal.reason == {"kind": kind}
        assert r.outcomes == [Disposed()]


@pytest.mark.race
@pytest.mark.requirement("R75")
@pytest.mark.parametrize("verb", ["when_idle", "dispose"])
async def test_an_agents_own_work_cannot_wait_for_its_own_end(verb: str) -> None:
    async with rig() as r:
        refused: list[BaseException] = []

        async def listen(*args: Any) -> Any:
            try:
                await getattr(r.agent, verb)()
            except RuntimeError as exc:
                refused.append(exc)
            return await args[-1]()

        r.agent.hooks.on("agent/prompt-submit", listen)
        r.agent.send("A")
        await r.agent.when_idle()

        assert len(refused) == 1
        assert r.outcomes == [Completed() if verb == "when_idle" else Disposed()]


# --- cancelling the host --------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R73", "R65")
@pytest.mark.parametrize("where", ["tool", "parallel tools", "listener", "adapter"])
async def test_the_hosts_cancellation_disposes_and_leaves_a_balanced_log(where: str) -> None:
    stuck = Stuck(where)
    model = ScriptedModel([stuck.script()])
    rigs: list[Rig] = []
    store = GatedStore()
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:

            async def own() -> None:
                async with runtime_for(model, stuck.tools(), store=store) as runtime:
                    rigs.append(Rig(runtime, await runtime.create("/"), model))
                    stuck.listen(rigs[0])
                    rigs[0].agent.send("A")
                    await anyio.sleep_forever()

            tasks.start_soon(own)
            await stuck.entered.wait()
            flushes = store.flushes
            tasks.cancel_scope.cancel()

    (r,) = rigs
    assert r.outcomes == [Disposed()]
    assert r.kinds[-1] == "turn/end"
    assert r.kinds.count("step/start") == r.kinds.count("step/end")
    assert [c.call_id for c in r.calls] == [result.call_id for result in r.results]
    assert store.flushes > flushes
    assert r.agent.status == "disposed"
    assert r.model.open_streams == 0


@pytest.mark.race
@pytest.mark.requirement("R38")
async def test_the_hosts_cancellation_during_the_flush_changes_no_outcome() -> None:
    store = GatedStore()
    model = ScriptedModel([])
    settled: list[Any] = []
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:

            async def own() -> None:
                async with runtime_for(model, store=store) as runtime:
                    agent = await runtime.create("/")
                    store.close_gate()
                    settled.append(agent.send("A"))
                    await anyio.sleep_forever()

            async def open_gate() -> None:
                with anyio.CancelScope(shield=True):
                    await settle()
                    store.gate.set()

            tasks.start_soon(own)
            await anyio.lowlevel.checkpoint()
            while not settled:
                await anyio.lowlevel.checkpoint()
            await store.flushing.wait()
            tasks.start_soon(open_gate)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    assert settled[0].outcome == Completed()


# --- saying so ------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_core.runtime, "SAY_AWAITING_AFTER_S", 0.001)


@pytest.mark.race
@pytest.mark.requirement("R73", "R97", "B023")
@pytest.mark.usefixtures("impatient")
async def test_a_tool_that_does_not_stop_is_named_in_the_log_and_to_people() -> None:
    waiting = Waiting()
    told = anyio.Event()
    script = call("wait")
    async with rig(script, tools=[tool("wait", waiting, title="Dig a hole")]) as r:
        r.on_event(ToolProgress, told.set)
        r.agent.send("A")
        await waiting.entered.wait()
        r.agent.cancel()
        await told.wait()
        (progress,) = r.of(ToolProgress)
        waiting.gate.set()
        await r.agent.when_idle()

        (start,) = r.calls
        assert progress.call_id == start.call_id
        assert progress.title is not None
        assert "Dig a hole" in progress.title
        assert progress.title != "Dig a hole"
        assert [result.title for result in r.results] == ["Dig a hole"]
        assert r.outcomes == [Aborted()]
    (record,) = [entry for entry in r.records if entry["event"] == "turn_still_unwinding"]
    assert record["awaiting"] == "Dig a hole"
    assert record["session_id"] == r.agent.id


@pytest.mark.race
@pytest.mark.requirement("R97")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("seam", "named"),
    [
        ("agent/prompt-submit", "agent/prompt-submit"),
        ("system-prompt/assemble", "system prompt"),
        ("agent/pre-step", "agent/pre-step"),
        ("llm/stream", "scripted"),
        ("agent/turn-stop", "agent/turn-stop"),
    ],
)
async def test_a_listener_that_does_not_stop_is_named_in_the_log(seam: str, named: str) -> None:
    async with rig() as r:
        held = Held(r.agent, seam, is_cooperative=False)
        r.agent.send("A")
        await held.reached.wait()
        r.agent.cancel()
        await held.noticed.wait()
        while not any(entry["event"] == "turn_still_unwinding" for entry in r.records):
            await anyio.lowlevel.checkpoint()
        held.gate.set()
        await r.agent.when_idle()
    (record,) = [entry for entry in r.records if entry["event"] == "turn_still_unwinding"]
    assert named in record["awaiting"]


@pytest.mark.race
@pytest.mark.requirement("R38", "R97")
@pytest.mark.usefixtures("impatient")
async def test_a_flush_that_takes_long_is_named_in_the_log() -> None:
    store = GatedStore()
    async with rig(store=store) as r:
        store.close_gate()
        r.agent.send("A")
        await store.flushing.wait()
        r.agent.cancel()
        while not any(entry["event"] == "turn_still_unwinding" for entry in r.records):
            await anyio.lowlevel.checkpoint()
        store.gate.set()
        await r.agent.when_idle()
    (record,) = [entry for entry in r.records if entry["event"] == "turn_still_unwinding"]
    assert record["awaiting"] == "the session store"


@pytest.mark.race
async def test_a_turn_that_stops_in_time_says_nothing() -> None:
    hang = Hang()
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel()
        r.agent.cancel()
        await r.agent.when_idle()
        assert r.agent.awaiting() == "nothing"
    assert [entry["event"] for entry in r.records] == []
    assert r.of(ToolProgress) == []


# --- no unfinished business -----------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R72", "R74")
async def test_the_models_stream_is_closed_before_the_turn_ends() -> None:
    closed_at: list[int] = []

    async def play(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        try:
            yield TextDelta("some ")
            entered.set()
            await request.signal.wait()
            yield TextDelta("more")  # the loop looks at the signal here, and closes us
        finally:
            closed_at.append(len(r.of(TurnEnd)))

    entered = anyio.Event()
    async with rig(play) as r:
        r.agent.send("A")
        await entered.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert closed_at == [0]
        assert r.model.open_streams == 0
        assert "more" not in str(r.log)


@pytest.mark.race
@pytest.mark.requirement("R73")
async def test_a_tool_that_swallows_the_abort_still_ends_the_turn_as_aborted() -> None:
    entered = anyio.Event()

    async def swallow(context: Any) -> Any:
        entered.set()
        await context.signal.wait()
        return ToolOutput("fine, thank you")

    async with rig(call("swallow"), tools=[tool("swallow", swallow)]) as r:
        r.agent.send("A")
        await entered.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        (result,) = r.of(ToolResult)
        assert result.code == "ABORTED"
        assert "fine, thank you" in result.output
        assert r.outcomes == [Aborted()]
        assert len(r.of(TurnStart)) == 1
