from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import anyio
import pytest
from msgspec import Struct

from agent_core import execution
from agent_core.agent import Agent
from agent_core.cancellation import (
    PARENT,
    USER,
    AbortController,
    AbortSignal,
    TurnAborted,
    agent_interrupt_reason_of,
)
from agent_core.content import Text, TextPart
from agent_core.events import Aborted, Completed, Disposed, TurnEnd, encode
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    TextDelta,
    UserTurn,
)
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.subagents import (
    Capabilities,
    SubagentRefused,
    SubagentRequest,
    SubagentRun,
)
from agent_core.testing import rehearsal_agent
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.tool import Tool, ToolContext, ToolOutput

LIMIT_S = 5


class DelegateArgs(Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str
    provider: str = "spawn"


class Delegate(Tool):
    """Hands a prompt on as a tool should: signal down, result up, always disposed."""

    name: ClassVar[str] = "delegate"
    description: ClassVar[str] = "Delegates."
    Args: ClassVar[type[Struct]] = DelegateArgs

    def __init__(self) -> None:
        self.seen: list[tuple[Agent, AbortSignal]] = []

    async def run(self, args: DelegateArgs, context: ToolContext) -> ToolOutput:
        assert execution.require().agent is context.agent
        self.seen.append((context.agent, context.signal))
        run = await start(context.agent, context.signal, args.prompt, provider=args.provider)
        try:
            result = await run.result()
        finally:
            await run.dispose()
        assert execution.require().agent is context.agent
        return ToolOutput(result.output, is_error=result.reason != "completed")


class Nesting:
    """Delegates until `depth` is reached, and there waits for its signal, or says its depth."""

    def __init__(self, depth: int, *, hangs: bool) -> None:
        self.depth = depth
        self.hangs = hangs
        self.bottom = anyio.Event()
        self.agents: list[Agent] = []
        self.signals: list[AbortSignal] = []

    @property
    def info(self) -> ModelInfo:
        return ModelInfo("nesting")

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        from agent_core.models.adapter import ToolCallDelta

        agent = execution.require().agent
        if isinstance(request.messages[-1], UserTurn):
            self.agents.append(agent)
            self.signals.append(request.signal)
        if isinstance(request.messages[-1], UserTurn) and agent.depth < self.depth:
            yield ToolCallDelta(0, "delegate", '{"prompt": "deeper"}')
            yield Finish("tool_calls")
            return
        if self.hangs and agent.depth == self.depth:
            self.bottom.set()
            async with request.signal.scope():
                await anyio.sleep_forever()
        yield TextDelta(f"depth {agent.depth}")
        yield Finish("stop")

    async def aclose(self) -> None:
        pass


async def start(
    parent: Agent, signal: AbortSignal, prompt: str, *, provider: str = "spawn", **parts: Any
) -> SubagentRun:
    request = SubagentRequest((Text(prompt),), parent, signal, **parts)
    return await subagents_of(parent).start(provider, request)


def subagents_of(agent: Agent) -> Any:
    return agent._runtime.subagents


def outcome_of(agent: Agent) -> object:
    ends = [event.data for event in agent.session.events if isinstance(event.data, TurnEnd)]
    return ends[-1].outcome


@asynccontextmanager
async def nesting_agent(model: Nesting, tool: Delegate) -> AsyncGenerator[Agent, None]:
    async with AgentRuntime(
        MemoryStore(),
        model=model,
        tools=(tool,),
        files=LocalFiles(),
        commands=LocalCommands(),
        mode="bypass",
    ) as runtime:
        yield await runtime.create("/")


async def test_a_spawned_child_knows_nothing_and_its_last_words_come_back(tmp_path: Any) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:
        await agent.send("say only the parent knows this").settled()

        run = await start(agent, AbortController().signal, "say from below")
        result = await run.result()
        child = agent._runtime.agents[run.id]
        await run.dispose()

    assert (result.reason, result.output) == ("completed", "from below")
    assert "only the parent" not in str(child.session.messages)
    assert (child.parent, child.depth) == (agent, 1)


async def test_a_forked_child_knows_what_was_finished_and_nothing_of_the_open_turn(
    tmp_path: Any,
) -> None:
    seen: list[str] = []

    async def look(
        _agent: object, _turn: object, _default: bool, signal: AbortSignal, next_: Any
    ) -> Any:
        remove()
        run = await start(agent, signal, "say forked", provider="fork")
        seen.append(str(agent._runtime.agents[run.id].session.messages))
        seen.append((await run.result()).output)
        await run.dispose()
        return await next_()

    async with rehearsal_agent(str(tmp_path)) as agent:
        await agent.send("say finished").settled()
        remove = agent.hooks.on("agent/turn-continuation", look)
        await agent.send("say still open").settled()

    assert "finished" in seen[0]
    assert "still open" not in seen[0]
    assert seen[1] == "forked"


@pytest.mark.race
@pytest.mark.requirement("R60", "R61", "R62", "R69", "R82", "R83")
async def test_a_cancel_goes_down_three_levels_as_parent_and_all_is_quiet_behind_it() -> None:
    model, tool = Nesting(3, hangs=True), Delegate()
    async with nesting_agent(model, tool) as root:
        prompt = root.send("go")
        with anyio.fail_after(LIMIT_S):
            await model.bottom.wait()
            root.cancel()
            outcome = await prompt.settled()

        reasons = [agent_interrupt_reason_of(signal) for signal in model.signals]
        assert outcome == Aborted()
        assert reasons == [USER, PARENT, PARENT, PARENT]
        assert [agent.depth for agent in model.agents] == [0, 1, 2, 3]
        assert [agent.status for agent in model.agents] == ["idle", *["disposed"] * 3]
        assert len({id(signal) for signal in model.signals}) == 4
        # What a tool was handed is its own agent's turn signal, and it travelled to the seam.
        assert [(agent, signal) for agent, signal in tool.seen] == list(
            zip(model.agents, model.signals, strict=True)
        )[:3]
        assert list(root._runtime.agents) == [root.id]
        for agent in model.agents:
            assert outcome_of(agent) == Aborted()
            written = b"".join(encode(event.data) for event in agent.session.events[-6:])
            assert b'"user"' not in written.replace(b'"source":"user"', b"")
            assert b'"kind":"parent"' not in written


@pytest.mark.race
@pytest.mark.requirement("R70")
async def test_a_forked_child_is_cancelled_as_parent_too() -> None:
    model = Nesting(0, hangs=False)
    controller = AbortController()
    async with nesting_agent(model, Delegate()) as root:
        await root.send("go").settled()
        model.hangs, model.depth = True, 1
        model.bottom = anyio.Event()

        with anyio.fail_after(LIMIT_S):
            run = await start(root, controller.signal, "go", provider="fork")
            await model.bottom.wait()
            controller.abort(USER)
            result = await run.result()
            await run.dispose()

    assert result.reason == "aborted"
    assert agent_interrupt_reason_of(model.signals[-1]) == PARENT


async def test_a_child_that_had_finished_stays_finished_when_the_parent_is_cancelled(
    tmp_path: Any,
) -> None:
    controller = AbortController()
    async with rehearsal_agent(str(tmp_path)) as agent:
        run = await start(agent, controller.signal, "say done")
        await run.result()
        controller.abort(USER)

        result = await run.result()
        await run.dispose()

    assert (result.reason, result.output) == ("completed", "done")


async def test_a_signal_that_fired_before_leaves_nothing(tmp_path: Any) -> None:
    controller = AbortController()
    controller.abort(USER)
    async with rehearsal_agent(str(tmp_path)) as agent:
        with pytest.raises(TurnAborted):
            await start(agent, controller.signal, "say x")

        assert list(agent._runtime.agents) == [agent.id]


@pytest.mark.race
async def test_an_abort_while_the_child_is_made_leaves_nothing(tmp_path: Any) -> None:
    controller = AbortController()
    async with rehearsal_agent(str(tmp_path)) as agent:
        made: list[Agent] = []

        def abort(child: Agent) -> None:
            made.append(child)
            controller.abort(USER)

        agent._runtime.hooks.on("agent/created", abort)
        with anyio.fail_after(LIMIT_S), pytest.raises(TurnAborted):
            await start(agent, controller.signal, "say x")

        assert [child.status for child in made] == ["disposed"]
        assert list(agent._runtime.agents) == [agent.id]


@pytest.mark.race
async def test_what_waits_for_a_place_never_starts_after_a_cancel() -> None:
    model, controller, refused = Nesting(1, hangs=True), AbortController(), 0
    async with nesting_agent(model, Delegate()) as root:
        subagents_of(root).max_live = 2
        runs = [await start(root, controller.signal, "go") for _ in range(2)]

        async def wait_for_a_place() -> None:
            nonlocal refused
            with pytest.raises(TurnAborted):
                await start(root, controller.signal, "too many")
            refused += 1

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(wait_for_a_place)
                await anyio.wait_all_tasks_blocked()
                assert len(model.agents) == 2
                controller.abort(USER)
            for run in runs:
                await run.dispose()

        assert (refused, len(model.agents)) == (5, 2)
        assert list(root._runtime.agents) == [root.id]


async def test_a_place_is_given_on_when_a_child_is_disposed(tmp_path: Any) -> None:
    signal = AbortController().signal
    async with rehearsal_agent(str(tmp_path)) as agent:
        subagents_of(agent).max_live = 1
        first = await start(agent, signal, "say 1")
        outputs: list[str] = []

        async def second() -> None:
            run = await start(agent, signal, "say 2")
            outputs.append((await run.result()).output)
            await run.dispose()

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(second)
                await anyio.wait_all_tasks_blocked()
                assert outputs == []
                await first.dispose()
                await first.dispose()

    assert outputs == ["2"]


async def test_requests_for_what_is_not_honoured_are_refused_and_start_nothing(
    tmp_path: Any,
) -> None:
    class Plain:
        name = "plain"
        capabilities = Capabilities()

        async def start(self, request: SubagentRequest) -> SubagentRun:
            raise AssertionError("must not be reached")

    signal = AbortController().signal
    async with rehearsal_agent(str(tmp_path)) as agent:
        remove = subagents_of(agent).register(Plain())

        with pytest.raises(SubagentRefused, match="persona"):
            await start(agent, signal, "x", provider="plain", persona="a poet")
        with pytest.raises(SubagentRefused, match="tool_names"):
            await start(agent, signal, "x", provider="plain", tool_names=frozenset({"read"}))
        remove()
        with pytest.raises(SubagentRefused, match="spawn, fork"):
            await start(agent, signal, "x", provider="plain")


async def test_depth_ends_at_the_limit() -> None:
    model, tool = Nesting(4, hangs=False), Delegate()
    async with nesting_agent(model, tool) as root:
        with anyio.fail_after(LIMIT_S):
            assert await root.send("go").settled() == Completed()

    assert max(agent.depth for agent in model.agents) == 3


async def test_a_child_has_only_the_tools_it_was_given_and_its_persona(tmp_path: Any) -> None:
    signal = AbortController().signal
    async with rehearsal_agent(str(tmp_path)) as agent:
        run = await start(
            agent, signal, "list", tool_names=frozenset({"read"}), persona="You are a poet."
        )
        child = agent._runtime.agents[run.id]
        result = await run.result()
        await run.dispose()

    assert set(child.tools) == {"read"}
    assert "there is no tool named 'list'" in result.output
    assert "You are a poet." in str(child.session.events)


async def test_a_mode_is_inherited_and_a_later_change_above_does_not_reach_down(
    tmp_path: Any,
) -> None:
    signal = AbortController().signal
    async with rehearsal_agent(str(tmp_path)) as agent:
        agent.set_mode("read-only")
        run = await start(agent, signal, "write x.txt: no")
        agent.set_mode("bypass")
        result = await run.result()
        await run.dispose()

    assert "read-only" in result.output
    assert not (tmp_path / "x.txt").exists()


async def test_lifecycle_is_announced_in_order(tmp_path: Any) -> None:
    seen: list[tuple[object, ...]] = []
    async with rehearsal_agent(str(tmp_path)) as agent:
        agent.hooks.on("subagent/start", lambda *args: seen.append(("start", *args[1:])))
        agent.hooks.on("subagent/end", lambda *args: seen.append(("end", *args[1:])))
        run = await start(agent, AbortController().signal, "say x")
        await run.result()
        await run.dispose()
        await run.dispose()

    assert seen == [("start", run.id, "spawn"), ("end", run.id, "completed")]


async def test_children_are_stored_below_their_parent_and_never_listed(tmp_path: Any) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:
        await agent.send("say parent").settled()
        run = await start(agent, AbortController().signal, "say child")
        await run.result()
        await run.dispose()
        store = agent._runtime._store

        header, events = await store.load(run.id)
        listed = [header.id for header in (await store.list_sessions()).sessions]

    assert (header.parent_id, header.depth) == (agent.id, 1)
    assert any("child" in str(event.data) for event in events)
    assert listed == [agent.id]


async def test_partial_text_comes_back_from_a_child_that_was_stopped() -> None:
    class Talks(Nesting):
        async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
            yield TextDelta("half a sen")
            self.bottom.set()
            async with request.signal.scope():
                await anyio.sleep_forever()

    model, controller = Talks(0, hangs=True), AbortController()
    async with nesting_agent(model, Delegate()) as root:
        with anyio.fail_after(LIMIT_S):
            run = await start(root, controller.signal, "go")
            await model.bottom.wait()
            controller.abort(USER)
            result = await run.result()
            await run.dispose()

    assert (result.reason, result.output) == ("aborted", "half a sen")
    assert TextPart("half a sen")


async def test_a_disposed_parent_ends_its_children_and_records_disposed_itself() -> None:
    model, tool = Nesting(2, hangs=True), Delegate()
    async with nesting_agent(model, tool) as root:
        root.send("go")
        with anyio.fail_after(LIMIT_S):
            await model.bottom.wait()
            await root.dispose()

        assert outcome_of(root) == Disposed()
        assert [outcome_of(agent) for agent in model.agents[1:]] == [Aborted(), Aborted()]
        assert root._runtime.agents == {}
