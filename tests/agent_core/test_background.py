from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest
from core_rig import Entry, Hang, say, settle

from agent_core.agent import Agent
from agent_core.cancellation import (
    PARENT,
    AbortController,
    TurnAborted,
    agent_interrupt_reason_of,
)
from agent_core.content import Text, Usage, text_of
from agent_core.errors import AgentDisposed
from agent_core.events import (
    Aborted,
    Completed,
    ContextMessage,
    Disposed,
    SubagentUsage,
    ToolResult,
    TurnEnd,
)
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    ToolCallDelta,
    UsageReport,
    UserTurn,
)
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.subagents import SubagentRefused, SubagentRequest
from agent_core.testing import abort_at_every_await, tool_context
from agent_core.tools.agents import Agents
from agent_core.tools.delegate import Delegate
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles

LIMIT_S = 10


def calls(*made: tuple[str, Mapping[str, Any]]) -> Entry:
    async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        for index, (name, arguments) in enumerate(made):
            yield ToolCallDelta(index, name, json.dumps(arguments))
        yield Finish("tool_calls")

    return play


def starts(*tasks: str) -> Entry:
    given = ({"task": task, "name": task, "background": True} for task in tasks)
    return calls(*(("delegate", each) for each in given))


def agents(action: str, name: str = "") -> Entry:
    return calls(("agents", {"action": action, "name": name}))


class ByTask:
    """Plays the entries of whatever the last prompt says, one for each call, then ``done``."""

    info = ModelInfo("by-task")

    def __init__(self, script: Mapping[str, Sequence[Entry]]) -> None:
        self.requests: list[ModelRequest] = []
        self.tasks: list[str] = []
        self._script = script
        self._played: dict[tuple[str, str], int] = {}

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        told = (text_of(m.content) for m in reversed(request.messages) if isinstance(m, UserTurn))
        task = next(text for text in told if not text.startswith("<"))
        self.requests.append(request)
        number = self._played.get((request.session_id, task), 0)
        self._played[request.session_id, task] = number + 1
        if not number:
            self.tasks.append(task)
        entries = self._script.get(task, ())
        entry = entries[number] if number < len(entries) else say("done")
        async with aclosing(entry(request)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def at_top(script: Mapping[str, Sequence[Entry]]) -> AsyncIterator[tuple[Agent, ByTask]]:
    model = ByTask(script)
    with anyio.fail_after(LIMIT_S):
        async with AgentRuntime(
            MemoryStore(),
            model=model,
            tools=(Delegate(), Agents()),
            files=LocalFiles(),
            commands=LocalCommands(),
            mode="bypass",
        ) as runtime:
            yield await runtime.create("/"), model


def of(agent: Agent, kind: type[Any]) -> list[Any]:
    return [event.data for event in agent.session.events if isinstance(event.data, kind)]


def notices(agent: Agent) -> list[str]:
    return [text_of(each.content) for each in of(agent, ContextMessage)]


def states(agent: Agent) -> dict[str, str]:
    return {child.name: child.state for child in agent.background.children}


async def ended(agent: Agent, name: str) -> None:
    child = agent.background.get(name)
    assert child is not None
    await child.over.wait()
    await settle()  # the notice comes right behind


async def test_the_call_ends_at_once_and_the_next_turn_hears_of_the_end() -> None:
    hang = Hang()
    async with at_top({"go": [starts("a", "b")], "b": [hang]}) as (root, model):
        assert await root.send("go").settled() == Completed()
        await hang.hanging.wait()
        await ended(root, "a")

        assert [r.output for r in of(root, ToolResult)] == [
            "Started in the background, as a.",
            "Started in the background, as b.",
        ]
        assert states(root) == {"a": "finished", "b": "running"}
        assert root.status == "idle"
        n_requests = len(model.requests)
        await settle()
        assert len(model.requests) == n_requests  # no turn starts by itself

        assert await root.send("more").settled() == Completed()

        assert notices(root)[-1:] == ["The subagent a has finished.\ndone"]
        assert states(root)["b"] == "running"  # a new prompt stops none
        assert "The subagent a has finished." in str(model.requests[-1].messages)


@pytest.mark.race
@pytest.mark.requirement("B047", "B050", "B058")
async def test_a_cancel_without_a_turn_stops_them_all_and_none_of_them_speaks_afterwards() -> None:
    hangs = {f"t{n}": Hang() for n in range(10)}
    script: dict[str, Sequence[Entry]] = {name: [hang] for name, hang in hangs.items()}
    async with at_top({"go": [starts(*hangs)], **script}) as (root, model):
        await root.send("go").settled()
        for name in list(hangs)[:8]:
            await hangs[name].hanging.wait()
        children = [each for each in root._runtime.agents.values() if each is not root]
        signals = [r.signal for r in model.requests if r.session_id != root.id]

        root.cancel()
        await root.when_idle()

        assert list(root._runtime.agents) == [root.id]
        assert [agent_interrupt_reason_of(signal) for signal in signals] == [PARENT] * 8
        assert [of(child, TurnEnd)[-1].outcome for child in children] == [Aborted()] * 8
        assert set(states(root).values()) == {"stopped"}
        assert model.tasks == ["go", *list(hangs)[:8]]  # two never had a place
        n_requests = len(model.requests)
        await root.send("more").settled()
        assert notices(root) == []
        assert len(model.requests) == n_requests + 1


@pytest.mark.race
@pytest.mark.requirement("B047")
async def test_a_cancel_of_a_turn_stops_those_in_front_and_those_behind() -> None:
    front, behind = Hang(), Hang()
    script = {
        "go": [starts("behind"), calls(("delegate", {"task": "front"}))],
        "front": [front],
        "behind": [behind],
    }
    async with at_top(script) as (root, model):
        prompt = root.send("go")
        await front.hanging.wait()
        await behind.hanging.wait()
        n_requests = len(model.requests)

        root.cancel()
        assert await prompt.settled() == Aborted()
        await root.when_idle()

        assert list(root._runtime.agents) == [root.id]
        assert states(root) == {"behind": "stopped"}
        await settle()
        assert len(model.requests) == n_requests


@pytest.mark.race
@pytest.mark.requirement("R74", "R75")
async def test_one_that_does_not_listen_is_waited_for() -> None:
    slow = Hang(is_slow=True)
    async with at_top({"go": [starts("slow")], "slow": [slow]}) as (root, _model):
        await root.send("go").settled()
        await slow.hanging.wait()
        idle = anyio.Event()

        async def wait() -> None:
            await root.when_idle()
            idle.set()

        async with anyio.create_task_group() as tasks:
            root.cancel()
            tasks.start_soon(wait)
            await slow.noticed.wait()
            await settle()
            assert not idle.is_set()
            assert states(root) == {"slow": "stopping"}
            slow.gate.set()
        assert states(root) == {"slow": "stopped"}


@pytest.mark.race
@pytest.mark.requirement("B058")
async def test_one_that_finishes_while_it_is_stopped_keeps_its_answer_and_says_nothing() -> None:
    gate = anyio.Event()

    async def late(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        await gate.wait()
        async with aclosing(say("late")(_request)) as events:
            async for event in events:
                yield event

    async with at_top({"go": [starts("late")], "late": [late]}) as (root, _model):
        root.hooks.on("subagent/end", lambda *_args: None)
        await root.send("go").settled()
        child = root.background.get("late")
        assert child is not None
        # Its turn is over, and it is being let go of, when the Stop comes.
        root._runtime.hooks.on("agent/disposed", lambda each: each.parent and root.cancel())
        gate.set()
        await ended(root, "late")

        assert child.result is not None
        assert (child.state, child.result.output) == ("finished", "late")
        await root.send("more").settled()
        assert notices(root) == []


async def test_the_model_lists_waits_and_stops() -> None:
    hang = Hang()
    script = {
        "go": [starts("quick", "long"), agents("wait", "quick"), agents("list")],
        "stop": [agents("stop", "long"), agents("list"), agents("stop", "nobody")],
        "long": [hang],
    }
    async with at_top(script) as (root, _model):
        await root.send("go").settled()
        await hang.hanging.wait()
        await root.send("stop").settled()

        outputs = [(r.output, r.code) for r in of(root, ToolResult)][2:]
        assert outputs[0] == ("done", None)
        assert outputs[1][0].startswith("- quick: finished: quick\n- long: running")
        assert outputs[2] == ("long was stopped.\nWhat it had said by then:\none two ", None)
        assert outputs[3][0] == "- quick: finished: quick\n- long: stopped: long"
        assert outputs[4] == ("There is no subagent 'nobody'; there are quick, long.", "UNKNOWN")
        assert notices(root) == []  # who waited needs no notice


async def test_waiting_ends_with_the_turn_and_the_child_goes_on() -> None:
    hang = Hang()
    script = {"go": [starts("long"), agents("wait", "long")], "long": [hang]}
    async with at_top(script) as (root, _model):
        prompt = root.send("go")
        await hang.hanging.wait()
        await anyio.wait_all_tasks_blocked()
        root.withdraw(prompt)  # this prompt, and nothing else
        assert await prompt.settled() == Aborted()

        assert states(root) == {"long": "running"}


@pytest.mark.race
@pytest.mark.requirement("R63", "R75", "B060")
async def test_the_end_of_the_session_is_theirs() -> None:
    hang = Hang()
    async with at_top({"go": [starts("long")], "long": [hang]}) as (root, _model):
        await root.send("go").settled()
        await hang.hanging.wait()
        (child,) = (each for each in root._runtime.agents.values() if each is not root)

        await root.dispose()

        assert root._runtime.agents == {}
        assert of(child, TurnEnd)[-1].outcome == Aborted()
        with pytest.raises(AgentDisposed):
            root.inject("x", source="y")


@pytest.mark.race
@pytest.mark.requirement("B049")
async def test_leaving_the_runtime_ends_them() -> None:
    hang = Hang()
    async with at_top({"go": [starts("long")], "long": [hang]}) as (root, _model):
        await root.send("go").settled()
        await hang.hanging.wait()
        (child,) = (each for each in root._runtime.agents.values() if each is not root)

    assert root._runtime.agents == {}
    assert of(child, TurnEnd)[-1].outcome in (Aborted(), Disposed())


async def test_only_the_agent_at_the_top_has_some_and_a_bad_request_is_refused_at_once() -> None:
    script = {
        "go": [calls(("delegate", {"task": "mid"}))],
        "mid": [starts("low")],
        "odd": [calls(("delegate", {"task": "x", "agent": "nobody", "background": True}))],
    }
    seen: list[ToolResult] = []
    async with at_top(script) as (root, model):
        root._runtime.hooks.on("tools/result", lambda _execution, result: seen.append(result))
        await root.send("go").settled()
        await root.send("odd").settled()

        assert [each.code for each in seen] == ["REFUSED", None, "REFUSED"]
        assert "agent at the top" in seen[0].output
        assert "nobody" in seen[2].output
        assert model.tasks == ["go", "mid", "odd"]
        assert states(root) == {}


async def test_names_are_unique_and_too_many_are_refused() -> None:
    hang = Hang()
    async with at_top({"same": [hang]}) as (root, _model):
        root.subagents.max_live = 1
        request = SubagentRequest((Text("same"),), root, AbortController().signal, name="two words")
        names = [root.background.start("spawn", request, "t").name for _ in range(33)]
        with pytest.raises(SubagentRefused, match="33 subagents"):
            root.background.start("spawn", request, "t")

        assert names[:3] == ["two-words", "two-words-2", "two-words-3"]
        root.cancel()
        await root.when_idle()


async def test_the_oldest_that_ended_are_forgotten() -> None:
    async with at_top({}) as (root, _model):
        request = SubagentRequest((Text("x"),), root, AbortController().signal, name="n")
        for _ in range(40):
            child = root.background.start("spawn", request, "t")
            await child.over.wait()

        assert len(root.background.children) == 32


async def test_one_that_fails_says_why() -> None:
    controller = AbortController()
    async with at_top({}) as (root, _model):
        root.background.start(
            "spawn", SubagentRequest((Text("x"),), root, controller.signal, model="none"), "t"
        )
        await ended(root, "subagent")
        await root.send("more").settled()

        assert notices(root) == [
            "The subagent subagent has failed.\nNo model 'none' is configured."
        ]


async def test_what_one_takes_is_counted_when_it_ends() -> None:
    async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield UsageReport(Usage(5, 7))
        yield Finish("stop")

    async with at_top({"go": [starts("x")], "x": [play]}) as (root, _model):
        await root.send("go").settled()
        await ended(root, "x")

        assert [each.usage for each in of(root, SubagentUsage)] == [Usage(5, 7)]


@pytest.mark.race
async def test_a_start_aborted_at_any_await_is_started_or_not_at_all() -> None:
    async with at_top({}) as (root, _model):

        async def start(signal: Any) -> object:
            args = Delegate().parse('{"task": "x", "background": true}')
            output = await Delegate().run(args, tool_context(root, signal))
            await root.background.children[-1].over.wait()
            await settle()
            return output

        runs = await abort_at_every_await(start)
        controller = AbortController()
        controller.abort("before")
        with pytest.raises(TurnAborted):
            await start(controller.signal)

        assert {child.state for child in root.background.children} == {"finished"}
        assert all(run.error is None for run in runs)  # later it is none of the call's business
