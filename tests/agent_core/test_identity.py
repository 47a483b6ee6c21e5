"""The ambient frame says which agent runs here, and nothing else."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncGenerator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import (
    LIMIT_S,
    ScriptedModel,
    Waiting,
    ambient,
    answer_ok,
    call,
    rig,
    say,
    settle,
    tool,
)

import agent_core
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.events import Aborted, Completed
from agent_core.execution import AgentExecution, current, require
from agent_core.models.adapter import Finish, ModelEvent, ModelRequest, TextDelta
from agent_core.tools.tool import ToolOutput

SOURCES = sorted(Path(agent_core.__file__).parent.rglob("*.py"))


@pytest.mark.requirement("R57", "R81", "R89")
async def test_the_frame_is_frozen_and_holds_the_agent_only() -> None:
    assert [field.name for field in fields(AgentExecution)] == ["agent"]
    async with rig() as r:
        frame: Any = AgentExecution(r.agent)
        with pytest.raises(FrozenInstanceError):
            frame.agent = None
        with pytest.raises((AttributeError, TypeError)):
            frame.signal = None
        assert not hasattr(frame, "__dict__")


@pytest.mark.requirement("R57", "R81")
async def test_every_hook_tool_and_adapter_sees_its_agent() -> None:
    seen: list[Agent | None] = []

    async def body(context: Any) -> ToolOutput:
        seen.append(ambient())
        return await answer_ok(context)

    tools = [tool("one", body, overlaps=True), tool("two", body, overlaps=True)]
    async with rig(call("one", "two"), tools=tools) as r:
        await r.agent.send("A").settled()

        assert seen == [r.agent, r.agent]
        assert {agent for _name, agent in r.record.agents} == {r.agent}
        assert r.model.agents == [r.agent, r.agent]


@pytest.mark.requirement("R57")
async def test_outside_of_any_driver_there_is_no_frame() -> None:
    async with rig() as r:
        await r.agent.send("A").settled()
        r.agent.cancel()

        assert current() is None
        with pytest.raises(LookupError):
            require()


@pytest.mark.race
@pytest.mark.requirement("R58")
async def test_what_a_turn_leaves_behind_still_sees_the_agent_and_gets_no_authority() -> None:
    left: list[asyncio.Task[Any]] = []
    go_on = anyio.Event()

    async def stray() -> tuple[Agent, list[str]]:
        await go_on.wait()
        frame = require()
        return frame.agent, [name for name in dir(frame) if not name.startswith("_")]

    async def body(context: Any) -> ToolOutput:
        left.append(asyncio.create_task(stray()))
        return await answer_ok(context)

    async with rig(call("leave"), tools=[tool("leave", body)]) as r:
        await r.agent.send("A").settled()
        await r.agent.dispose()
        go_on.set()
        agent, names = await left[0]

        assert agent is r.agent
        assert agent.status == "disposed"
        assert names == ["agent"]
        signals = [
            name
            for name in dir(agent)
            if not name.startswith("_") and isinstance(getattr(agent, name), AbortSignal)
        ]
        assert signals == []


@pytest.mark.race
@pytest.mark.requirement("R60", "R82", "R41")
async def test_two_agents_at_once_have_their_own_identity_and_signal() -> None:
    both = [anyio.Event(), anyio.Event()]
    release = anyio.Event()
    seen: dict[str, tuple[Agent | None, AbortSignal]] = {}

    async def play(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        both[len(seen)].set()
        seen[request.session_id] = (ambient(), request.signal)
        for event in both:
            await event.wait()
        await release.wait()
        yield TextDelta(f"I am {ambient().id}")  # type: ignore[union-attr]
        yield Finish("stop")

    async with rig(play, play) as r:
        other = await r.new_agent()
        first, second = r.agent.send("A"), other.send("B")
        for event in both:
            await event.wait()
        r.agent.cancel()
        await settle()
        release.set()

        assert await first.settled() == Aborted()
        assert await second.settled() == Completed()
        assert seen[r.agent.id][0] is r.agent
        assert seen[other.id][0] is other
        assert seen[r.agent.id][1].aborted
        assert not seen[other.id][1].aborted
        assert f"I am {other.id}" in str(other.session.events)


@pytest.mark.race
@pytest.mark.requirement("R61", "R83")
async def test_a_child_shadows_its_parent_in_its_own_driver_and_nowhere_else() -> None:
    seen: list[tuple[str, Agent | None]] = []
    children: list[Agent] = []

    def note(where: str) -> None:
        seen.append((where, ambient()))

    async def spawn(_context: Any) -> ToolOutput:
        note("before")
        child = await r.runtime.create("/")
        note("after creation")
        children.append(child)

        async def in_child(*args: Any) -> Any:
            note("in the child")
            return await args[-1]()

        child.hooks.on("agent/prompt-submit", in_child)
        await child.send("B").settled()
        await child.when_idle()
        note("after the child")
        return ToolOutput("ok")

    script = [call("spawn"), say("the child's"), say("done")]
    async with rig(*script, tools=[tool("spawn", spawn)]) as r:
        r.runtime.hooks.on("agent/created", lambda _agent: note("set-up"))
        assert await r.agent.send("A").settled() == Completed()

        (child,) = children
        assert seen == [
            ("before", r.agent),
            ("set-up", r.agent),
            ("after creation", r.agent),
            ("in the child", child),
            ("after the child", r.agent),
        ]
        assert r.model.agents == [r.agent, child, r.agent]
        first, childs, _last = (request.signal for request in r.model.requests)
        assert childs is not first


@pytest.mark.race
@pytest.mark.requirement("R62", "R96")
async def test_cancelling_a_parent_reaches_a_child_only_through_the_signal_it_is_given() -> None:
    cooperative = Waiting(is_cooperative=True)
    children: list[Agent] = []

    async def spawn(context: Any) -> ToolOutput:
        child = await r.runtime.create("/")
        children.append(child)
        prompt = child.send("B")
        remove = context.signal.on_abort(lambda _reason: child.cancel({"kind": "parent"}))
        await prompt.settled()
        remove()
        return ToolOutput("the child has ended")

    tools = [tool("spawn", spawn), tool("wait", cooperative)]
    async with rig(call("spawn"), call("wait"), say("done"), tools=tools) as r:
        r.agent.send("A")
        await cooperative.entered.wait()
        (child,) = children
        r.agent.cancel()
        await r.agent.when_idle()

        assert cooperative.signal is not None
        assert cooperative.signal.reason == {"kind": "parent"}
        assert r.model.requests[0].signal.reason == {"kind": "user"}
        assert r.outcomes == [Aborted()]
        assert child.status == "idle"


@pytest.mark.requirement("R57")
async def test_a_driver_does_not_inherit_the_frame_of_whoever_made_the_agent() -> None:
    model = ScriptedModel([])
    with anyio.fail_after(LIMIT_S):
        async with rig(model=model) as r:
            made: list[Agent] = []

            async def make(*args: Any) -> Any:
                if not made:
                    made.append(await r.runtime.create("/"))
                return await args[-1]()

            r.agent.hooks.on("agent/prompt-submit", make)
            await r.agent.send("A").settled()
            await made[0].send("B").settled()

            assert model.agents == [r.agent, made[0]]


@pytest.mark.requirement("R89")
def test_there_is_one_context_variable_and_no_signal_in_it() -> None:
    made = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "ContextVar" in ast.unparse(node.func):
                made.append(path.name)

    assert made == ["execution.py"]


@pytest.mark.requirement("R93")
def test_no_class_wraps_a_turn_or_a_step_for_others() -> None:
    public = {
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }

    wrappers = {"TurnContext", "StepContext", "Turn", "Step", "TurnHandle", "CurrentTurn"}
    assert public & wrappers <= {"Step"}  # a rehearsal script's step, which is no seam
    for name in public & wrappers:
        (path,) = [p for p in SOURCES if f"class {name}(" in p.read_text(encoding="utf-8")]
        assert path.name == "rehearsal_script.py"


@pytest.mark.requirement("R73", "R94")
def test_the_core_never_uses_what_cancels_work_from_outside() -> None:
    """What turns a wait into an abandonment may stand in a leaf, never in the loop."""
    watched = ["loop.py", "agent.py", "hooks.py", "inbox.py", "pipeline.py", "batch.py"]
    banned = {"wait_for", "shield", "timeout", "TaskGroup", "gather", "move_on_after", "fail_after"}
    for path in SOURCES:
        if path.name not in watched:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in banned, (path.name, name)
