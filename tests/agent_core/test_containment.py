"""Mistakes of tools, listeners and stores stay where they were made."""

from __future__ import annotations

import sys
from typing import Any

import anyio
import pytest
from core_rig import answer_ok, call, rig, say, tool

from agent_core.content import Text, ToolCallPart
from agent_core.errors import StoreError
from agent_core.events import Completed, MaxSteps, Refused, ToolProgress, ToolStart
from agent_core.models.adapter import AssistantTurn, Finish, TextDelta, ToolCallDelta
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.subagents import SubagentRequest
from agent_core.tools import local_commands
from agent_core.tools.tool import ToolContext, ToolOutput

# --- tools ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["body", "pre-execute", "execute", "post-execute"])
async def test_a_tool_or_listener_that_wants_the_process_to_exit_has_failed(where: str) -> None:
    async def exits(*_args: Any) -> ToolOutput:
        sys.exit(3)

    tools = [tool("act", exits if where == "body" else answer_ok)]
    async with rig(call("act"), say("done"), tools=tools) as at:
        if where != "body":
            at.agent.hooks.on(f"tools/{where}", exits)

        assert await at.agent.send("go").settled() == Completed()

        (result,) = at.results
        assert result.code == "TOOL_CRASHED"
        assert "SystemExit" in result.output
        assert await at.agent.send("again").settled() == Completed()


async def test_what_a_tool_shows_after_its_result_is_shown_to_nobody() -> None:
    kept: list[Any] = []

    async def keeps(context: ToolContext) -> ToolOutput:
        kept.append(context.progress)
        context.progress((Text("in time"),))
        return ToolOutput("ok")

    async def next_call(_context: ToolContext) -> ToolOutput:
        kept[0]((Text("too late"),))
        return ToolOutput("ok")

    tools = [tool("keeps", keeps), tool("next", next_call)]
    async with rig(call("keeps"), call("next"), tools=tools) as at:
        assert await at.agent.send("go").settled() == Completed()
        length = len(at.log)
        kept[0]((Text("much too late"),))

        assert len(at.log) == length
        assert [data.content for data in at.of(ToolProgress)] == [(Text("in time"),)]


async def test_a_long_command_reports_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    output = local_commands.CutOutput()
    output.feed(b"x")
    slept: list[float] = []
    reports: list[str] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        output.feed(b"x")
        if len(slept) == 100:
            scope.cancel()
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(local_commands.anyio, "sleep", sleep)
    with anyio.CancelScope() as scope:
        await output.report(reports.append)

    assert slept[0] == 0.25
    assert slept == sorted(slept)
    assert slept[-1] == slept[-2] == 10
    assert sum(slept) / len(reports) > 5  # an hour makes hundreds of reports, not 14 400


# --- the model and its listeners --------------------------------------------------------------


async def test_the_calls_of_a_refusal_do_not_run() -> None:
    acts = [tool("act", answer_ok, does="execute")]
    async with rig(call("act", text="hm", finish="refusal"), tools=acts) as at:
        assert await at.agent.send("go").settled() == Refused()

        assert at.calls == at.of(ToolStart) == []
        assert len(at.model.requests) == 1


@pytest.mark.parametrize("ids", [("x", "x"), ("", ""), ("call_1_1_2", "call_1_1_1")])
async def test_calls_that_a_listener_adds_get_ids_of_their_own(ids: tuple[str, str]) -> None:
    async def play(_request: Any) -> Any:
        yield TextDelta("look")
        yield ToolCallDelta(0, "act", "{}")
        yield Finish("tool_calls")

    async with rig(play, say("done"), tools=[tool("act", answer_ok, overlaps=True)]) as at:

        async def double(*args: Any) -> AssistantTurn:
            message: AssistantTurn = await args[-1]()
            if not any(isinstance(part, ToolCallPart) for part in message.content):
                return message
            return AssistantTurn(tuple(ToolCallPart(call_id, "act", "{}") for call_id in ids))

        at.agent.hooks.on("agent/step-result", double)

        assert await at.agent.send("go").settled() == Completed()
        assert len({data.call_id for data in at.calls}) == 2
        assert [data.call_id for data in at.results] == [data.call_id for data in at.calls]
        owed = at.model.requests[-1].messages[1].content
        assert [part.id for part in owed] == [data.call_id for data in at.calls]


# --- the store --------------------------------------------------------------------------------


class Broken(MemoryStore):
    """Fails to flush, in a way no store should, as often as it is told."""

    failures = 0

    async def flush(self, session_id: str) -> None:
        if self.failures:
            self.failures -= 1
            raise OverflowError("SECRET of a mistake")
        await super().flush(session_id)


async def test_a_store_that_fails_in_a_way_no_store_should_fails_the_prompt_only() -> None:
    store = Broken()
    async with rig(store=store) as at:
        store.failures = 1
        prompt = at.agent.send("one")

        with pytest.raises(StoreError, match="could not be saved") as told:
            await prompt.settled()

        assert "SECRET" not in str(told.value)
        assert at.agent.status == "idle"
        assert await at.agent.send("two").settled() == Completed()


# --- a turn without an end --------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_turn_has_no_more_model_calls_than_it_may_and_all_its_results(limit: int) -> None:
    tools = [tool("act", answer_ok)]
    async with rig(*[call("act")] * 10, tools=tools) as at:
        at.agent.max_steps = limit

        assert await at.agent.send("go").settled() == MaxSteps()

        assert len(at.model.requests) == len(at.results) == limit
        assert at.outcomes == [MaxSteps()]
        assert at.agent.status == "idle"


async def test_a_turn_that_ends_by_itself_at_the_limit_is_completed() -> None:
    async with rig(call("act"), say("done"), tools=[tool("act", answer_ok)]) as at:
        at.agent.max_steps = 2

        assert await at.agent.send("go").settled() == Completed()


async def test_the_limit_counts_anew_with_each_turn_and_0_is_none() -> None:
    async with rig(*[call("act")] * 7, tools=[tool("act", answer_ok)]) as at:
        at.agent.max_steps = 2
        assert await at.agent.send("go").settled() == MaxSteps()
        assert await at.agent.send("go").settled() == MaxSteps()
        at.agent.max_steps = 0
        assert await at.agent.send("go").settled() == Completed()

        assert len(at.model.requests) == 2 + 2 + 4


async def test_a_child_has_the_limit_of_its_parent_and_says_so() -> None:
    async def delegate(context: ToolContext) -> ToolOutput:
        runtime: AgentRuntime = at.runtime
        request = SubagentRequest((Text("go"),), context.agent, context.signal)
        run = await runtime.subagents.start("spawn", request)
        try:
            result = await run.result()
        finally:
            await run.dispose()
        return ToolOutput(result.reason)

    tools = [tool("delegate", delegate), tool("act", answer_ok)]
    script = (call("delegate"), call("act"), call("act"), say("never"))
    async with rig(*script, tools=tools) as at:
        at.agent.max_steps = 2
        await at.agent.send("go").settled()

        assert [result.output for result in at.results] == ["max_steps"]
