"""What a forked child takes over from its parent, and what it must not."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import ScriptedModel, answer_ok, call, rig, say, tool

from agent_core.agent import Agent
from agent_core.cancellation import USER, AbortController
from agent_core.content import ReasoningPart, Text, TextPart
from agent_core.events import (
    AssistantChunk,
    AssistantMessage,
    Completed,
    ModeChanged,
    ModelRetry,
    PermissionAsked,
    PermissionDecided,
    ToolProgress,
    ToolResult,
)
from agent_core.models.adapter import Finish, ModelEvent, ModelRequest, ReasoningDelta, TextDelta
from agent_core.permissions import Approval
from agent_core.runtime import AgentRuntime
from agent_core.subagents import SubagentRequest, SubagentRun
from agent_core.testing import rehearsal_agent
from agent_core.tools.tool import ToolContext, ToolOutput


async def delegate(
    runtime: AgentRuntime, parent: Agent, prompt: str, *, how: str = "fork"
) -> tuple[SubagentRun, Agent]:
    request = SubagentRequest((Text(prompt),), parent, AbortController().signal)
    run = await runtime.subagents.start(how, request)
    return run, runtime.agents[run.id]


def kinds_of(agent: Agent, *kinds: type[Any]) -> list[Any]:
    return [event.data for event in agent.session.events if isinstance(event.data, kinds)]


@asynccontextmanager
async def forked(
    runtime: AgentRuntime, parent: Agent, prompt: str
) -> AsyncGenerator[tuple[SubagentRun, Agent]]:
    run, child = await delegate(runtime, parent, prompt)
    yield run, child
    await run.dispose()


@pytest.mark.parametrize("how", ["fork", "spawn"])
async def test_a_mode_tightened_between_two_turns_holds_for_the_child(
    how: str, tmp_path: Path
) -> None:
    async with rehearsal_agent(str(tmp_path)) as parent:

        async def loosen(*args: Any) -> Any:
            parent.set_mode("bypass")
            return await args[-1]()

        stop = parent.hooks.on("agent/prompt-submit", loosen)
        parent.set_mode("ask")
        assert await parent.send("say one").settled() == Completed()
        stop()
        parent.set_mode("read-only")

        run, child = await delegate(parent._runtime, parent, "write x.txt: x", how=how)
        await run.result()

        assert child.mode == "read-only"
        assert [result.code for result in kinds_of(child, ToolResult)] == ["DENIED"]
        assert os.listdir(tmp_path) == []
        await run.dispose()


async def test_a_mode_loosened_for_the_parent_later_does_not_reach_the_child(
    tmp_path: Path,
) -> None:
    async with rehearsal_agent(str(tmp_path)) as parent:
        parent.set_mode("read-only")
        await parent.send("say one").settled()

        run, child = await delegate(parent._runtime, parent, "stall")
        parent.set_mode("bypass")

        assert child.mode == "read-only"
        await run.dispose()


async def test_a_remembered_yes_is_the_sessions_and_holds_for_its_subagents_too() -> None:
    acts = tool("act", answer_ok, does="execute")
    async with rig(call("act"), say("done"), call("act"), tools=[acts], mode="ask") as at:
        asked: list[Agent] = []

        async def always(execution: Any, _next: object) -> Approval:
            asked.append(execution.agent)
            return Approval.ALLOWED_ALWAYS

        at.agent.hooks.on("approval/request", always)
        await at.agent.send("go").settled()
        assert at.agent.session.state.remembered
        assert len(at.of(PermissionDecided)) == 1

        async with forked(at.runtime, at.agent, "go") as (run, child):
            await run.result()

            assert kinds_of(child, ToolResult)[-1].code is None
            assert not child.session.state.remembered  # it is looked up at the root
            assert asked == [at.agent]


class Chatty(ScriptedModel):
    """Thinks and speaks in many pieces."""

    def __init__(self) -> None:
        super().__init__([])

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.requests.append(request)
        for number in range(50):
            yield ReasoningDelta(f"{number}?")
        for number in range(50):
            yield TextDelta(f"{number} ")
        yield Finish("stop")


async def test_a_child_gets_one_chunk_for_each_part_and_the_same_history() -> None:
    async with rig(model=Chatty()) as at:
        await at.agent.send("talk").settled()
        (message,) = at.of(AssistantMessage)

        async with forked(at.runtime, at.agent, "go on") as (run, child):
            await run.result()

            seeded = [
                chunk for chunk in kinds_of(child, AssistantChunk) if chunk.turn == message.turn
            ]
            assert [(chunk.text, chunk.reasoning) for chunk in seeded[:2]] == [
                (part.text, isinstance(part, ReasoningPart))
                for part in message.content
                if isinstance(part, TextPart | ReasoningPart)
            ]
            assert len(at.of(AssistantChunk)) >= 2
            told = at.model.requests[-1].messages
            assert told[: len(at.agent.session.messages)] == at.agent.session.messages


async def test_what_was_shown_or_decided_on_the_way_is_no_part_of_a_childs_history() -> None:
    async def shows(context: ToolContext) -> ToolOutput:
        context.progress((Text("half"),))
        return ToolOutput("whole")

    acts = tool("act", shows, does="execute")
    async with rig(call("act"), say("done"), tools=[acts], mode="ask") as at:

        async def allow(*_args: Any) -> Approval:
            return Approval.ALLOWED

        at.agent.hooks.on("approval/request", allow)
        at.agent.set_mode("accept-edits")
        await at.agent.send("go").settled()
        passing = (ModeChanged, ModelRetry, PermissionAsked, PermissionDecided, ToolProgress)
        assert {type(data) for data in kinds_of(at.agent, *passing)} == set(passing) - {ModelRetry}

        async with forked(at.runtime, at.agent, "go on") as (run, child):
            await run.result()

            assert kinds_of(child, *passing) == []
            assert [result.output for result in kinds_of(child, ToolResult)] == ["whole"]
            assert child.mode == "accept-edits"


@pytest.mark.parametrize("how", ["fork", "spawn"])
async def test_an_abort_by_a_listener_that_hears_of_the_childs_prompt_reaches_the_child(
    how: str, tmp_path: Path
) -> None:
    async with rehearsal_agent(str(tmp_path)) as parent:
        controller = AbortController()

        def stop(_agent: Agent, _content: object, delivery: dict[str, Any]) -> None:
            if delivery["source"] == "parent":
                controller.abort(USER)

        parent._runtime.hooks.on("agent/queued", stop)
        request = SubagentRequest((Text("stall"),), parent, controller.signal)

        with anyio.fail_after(5):
            run = await parent._runtime.subagents.start(how, request)
            assert (await run.result()).reason == "aborted"
            await run.dispose()
