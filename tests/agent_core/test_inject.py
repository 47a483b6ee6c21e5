from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from agent_core.content import Text, text_of
from agent_core.errors import AgentDisposed, QueueFull
from agent_core.events import Completed, ContextMessage, StepStart, TurnStart, UserMessage
from agent_core.inbox import MAX_QUEUED
from agent_core.models.adapter import UserTurn
from agent_core.testing import rehearsal_agent


def contexts(agent: object) -> list[str]:
    events = agent.session.events  # type: ignore[attr-defined]
    return [text_of(e.data.content) for e in events if isinstance(e.data, ContextMessage)]


async def test_context_for_an_idle_agent_starts_no_turn_and_joins_the_next(tmp_path: Path) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:
        agent.inject("the build is red", source="ci")
        await agent.when_idle()
        assert list(agent.session.events) == []

        with anyio.fail_after(5):
            assert await agent.send("say ok").settled() == Completed()

        kinds = [type(event.data) for event in agent.session.events[:4]]
        assert kinds == [TurnStart, UserMessage, ContextMessage, StepStart]
        told = [m for m in agent.session.messages if isinstance(m, UserTurn)]
        assert "the build is red" in text_of(told[1].content)
        assert "'ci'" in text_of(told[1].content)


async def test_context_joins_the_turn_that_runs_and_asks_for_no_further_step(
    tmp_path: Path,
) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:

        async def inject(*args: object) -> object:
            agent.inject("meanwhile", source="watcher")
            return await args[-1]()  # type: ignore[operator]

        agent.hooks.on("agent/step-result", inject)
        with anyio.fail_after(5):
            await agent.send("say ok").settled()

        steps = [e for e in agent.session.events if isinstance(e.data, StepStart)]
        assert contexts(agent) == ["meanwhile"]
        assert len(steps) == 1


async def test_a_cancel_leaves_context_because_it_asks_for_nothing(tmp_path: Path) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:
        agent.inject("still true", source="ci")
        dropped = agent.send("say never")
        agent.cancel()
        with anyio.fail_after(5):
            assert await dropped.settled() is None
            await agent.send("say ok").settled()

        assert contexts(agent) == ["still true"]


async def test_context_is_checked_before_anything_happens(tmp_path: Path) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:
        with pytest.raises(TypeError):
            agent.inject(("text",), source="ci")  # type: ignore[arg-type]
        for _ in range(MAX_QUEUED):
            agent.inject((Text("x"),), source="ci")
        with pytest.raises(QueueFull):
            agent.inject("one too many", source="ci")
        await agent.dispose()
        with pytest.raises(AgentDisposed):
            agent.inject("too late", source="ci")
