"""Every call of a message has exactly one true result, in the model's order, whatever happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import pytest
from core_rig import (
    LIMIT_S,
    GatedStore,
    Rig,
    ScriptedModel,
    Waiting,
    answer_ok,
    call,
    rig,
    runtime_for,
    say,
    settle,
    tool,
)
from ids import plain

from agent_core.cancellation import AbortController, AbortSignal, TurnAborted
from agent_core.content import Text, ToolCallPart
from agent_core.errors import StoreError, ToolError
from agent_core.events import (
    Aborted,
    AssistantMessage,
    Completed,
    ContextMessage,
    Disposed,
    PermissionAsked,
    PermissionDecided,
    ToolCall,
    ToolProgress,
    ToolResult,
    ToolStart,
    TurnStart,
)
from agent_core.models.adapter import AssistantTurn, Finish, ToolCallDelta, ToolTurn
from agent_core.permissions import Approval, Decision, Verdict
from agent_core.sessions.memory import MemoryStore
from agent_core.tools.batch import MAX_PARALLEL
from agent_core.tools.tool import ToolOutput


def codes(r: Rig) -> list[str | None]:
    return [result.code for result in r.results]


def assert_one_result_each(r: Rig) -> None:
    promised = [
        part.id
        for message in r.of(AssistantMessage)
        for part in message.content
        if isinstance(part, ToolCallPart)
    ]
    assert [announced.call_id for announced in r.calls] == promised
    assert [result.call_id for result in r.results] == promised
    for call_id in promised:
        kinds = [type(data) for data in r.log if getattr(data, "call_id", None) == call_id]
        assert kinds[0] is ToolCall
        assert kinds[-1] is ToolResult
        assert kinds.count(ToolStart) <= 1


async def assert_next_request_is_valid(r: Rig) -> None:
    await r.agent.send("and now").settled()
    owed: list[str] = []
    for message in r.model.requests[-1].messages:
        if isinstance(message, ToolTurn):
            assert message.call_id == owed.pop(0)
            continue
        assert owed == []
        if isinstance(message, AssistantTurn):
            owed = [part.id for part in message.content if isinstance(part, ToolCallPart)]
    assert owed == []


# --- order and overlap ----------------------------------------------------------------------------


async def test_calls_run_one_after_the_other_in_the_models_order() -> None:
    running: list[str] = []

    def body(name: str) -> Any:
        async def run(_context: Any) -> ToolOutput:
            running.append(name)
            await settle()
            assert running[-1] == name
            return ToolOutput(name)

        return run

    tools = [tool(name, body(name)) for name in ("a", "b", "c")]
    async with rig(call("b", "a", "c"), tools=tools) as r:
        await r.agent.send("A").settled()

        assert running == ["b", "a", "c"]
        assert [result.output for result in r.results] == ["b", "a", "c"]
        assert_one_result_each(r)


@pytest.mark.race
async def test_parallel_neighbours_overlap_and_their_results_keep_the_models_order() -> None:
    bodies = [Waiting(), Waiting(), Waiting()]
    tools = [tool(name, body, overlaps=True) for name, body in zip("abc", bodies, strict=True)]
    async with rig(call("a", "b", "c"), tools=tools) as r:
        r.agent.send("A")
        for body in bodies:
            await body.entered.wait()
        for body in reversed(bodies):  # the last is done first
            assert r.results == []
            body.gate.set()
            await settle()
        await r.agent.when_idle()

        assert len(r.results) == 3
        assert_one_result_each(r)


@pytest.mark.race
async def test_a_call_that_may_not_overlap_separates_those_that_may() -> None:
    before, middle, after = Waiting(), Waiting(), Waiting()
    tools = [
        tool("before", before, overlaps=True),
        tool("middle", middle),
        tool("after", after, overlaps=True),
    ]
    async with rig(call("before", "middle", "after"), tools=tools) as r:
        r.agent.send("A")
        for body, others in ((before, [middle, after]), (middle, [after]), (after, [])):
            await body.entered.wait()
            await settle()
            assert not any(other.entered.is_set() for other in others)
            body.gate.set()
        await r.agent.when_idle()
        assert_one_result_each(r)


@pytest.mark.race
async def test_no_more_than_eight_calls_overlap() -> None:
    body = Waiting()
    async with rig(
        call(*["read"] * (MAX_PARALLEL + 3)), tools=[tool("read", body, overlaps=True)]
    ) as r:
        r.agent.send("A")
        await body.entered.wait()
        await settle()
        assert body.times_entered == MAX_PARALLEL == 8
        body.gate.set()
        await r.agent.when_idle()

        assert body.times_entered == MAX_PARALLEL + 3
        assert_one_result_each(r)


# --- aborts ---------------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R35", "R72")
async def test_a_cancel_as_the_message_is_committed_runs_no_body() -> None:
    body = Waiting()
    tools = [tool("a", body), tool("b", body, overlaps=True)]
    async with rig(call("a", "b", "b", "nosuch"), tools=tools) as r:
        r.on_event(AssistantMessage, r.agent.cancel)
        await r.agent.send("A").settled()

        assert body.times_entered == 0
        assert codes(r) == ["ABORTED_BEFORE_DISPATCH"] * 3 + ["UNKNOWN_TOOL"]
        assert r.of(ToolStart) == []
        assert r.outcomes == [Aborted()]
        assert_one_result_each(r)
        await assert_next_request_is_valid(r)


@pytest.mark.race
@pytest.mark.requirement("R35", "R72")
async def test_a_cancel_in_the_first_call_leaves_the_second_unrun() -> None:
    body, other = Waiting(is_cooperative=True), Waiting()
    async with rig(call("a", "b"), tools=[tool("a", body), tool("b", other)]) as r:
        r.agent.send("A")
        await body.entered.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert codes(r) == ["ABORTED", "ABORTED_BEFORE_DISPATCH"]
        assert other.times_entered == 0
        assert_one_result_each(r)
        await assert_next_request_is_valid(r)


@pytest.mark.race
@pytest.mark.requirement("R35", "R73")
async def test_a_cancel_while_calls_overlap_waits_for_the_entered_and_skips_the_rest() -> None:
    body = Waiting()
    many = MAX_PARALLEL + 2
    async with rig(call(*["read"] * many), tools=[tool("read", body, overlaps=True)]) as r:
        r.agent.send("A")
        await body.entered.wait()
        await settle()
        r.agent.cancel()
        await settle()
        assert r.results == []
        body.gate.set()
        await r.agent.when_idle()

        assert codes(r) == ["ABORTED"] * MAX_PARALLEL + ["ABORTED_BEFORE_DISPATCH"] * 2
        assert body.times_entered == MAX_PARALLEL
        assert_one_result_each(r)


@pytest.mark.race
@pytest.mark.requirement("R35", "R72")
@pytest.mark.parametrize("moment", [ToolCall, ToolStart, ToolResult], ids=lambda m: m.__name__)
async def test_a_cancel_at_each_commit_of_a_call_gives_each_call_the_true_result(
    moment: type[Any],
) -> None:
    body = Waiting()
    body.gate.set()
    async with rig(call("a", "a"), tools=[tool("a", body)]) as r:
        r.on_event(moment, r.agent.cancel)
        await r.agent.send("A").settled()

        truth: dict[Any, str | None] = {
            ToolCall: "ABORTED_BEFORE_DISPATCH",
            ToolStart: "ABORTED",
            ToolResult: None,
        }
        assert codes(r) == [truth[moment], "ABORTED_BEFORE_DISPATCH"]
        assert body.times_entered == (1 if moment is ToolResult else 0)
        assert r.outcomes == [Aborted()]
        assert_one_result_each(r)
        await assert_next_request_is_valid(r)


@pytest.mark.race
@pytest.mark.requirement("R35", "R72")
async def test_a_cancel_while_the_log_is_made_durable_skips_the_body() -> None:
    store, body = GatedStore(), Waiting()
    async with rig(call("a"), store=store, tools=[tool("a", body, does="execute")]) as r:
        store.close_gate()
        r.agent.send("A")
        await store.flushing.wait()
        r.agent.cancel()
        store.gate.set()
        await r.agent.when_idle()

        assert codes(r) == ["ABORTED_BEFORE_DISPATCH"]
        assert body.times_entered == 0


@pytest.mark.race
@pytest.mark.requirement("R73")
async def test_a_success_that_the_abort_overtook_is_reported_as_aborted_with_what_it_said() -> None:
    body = Waiting()
    async with rig(call("a"), tools=[tool("a", body)]) as r:
        r.agent.send("A")
        await body.entered.wait()
        r.agent.cancel()
        body.gate.set()
        await r.agent.when_idle()

        (result,) = r.results
        assert result.code == "ABORTED"
        assert result.is_error
        assert "done after all" in result.output


@pytest.mark.race
@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ToolError("no space", code="TOOL_TIMEOUT"), "TOOL_TIMEOUT"),
        (ToolError("no space"), "TOOL_FAILED"),
        (TurnAborted("x"), "ABORTED"),
        (RuntimeError("because of the abort"), "ABORTED"),
        (asyncio.CancelledError(), "ABORTED"),
    ],
    ids=repr,
)
async def test_a_tools_own_failure_beats_the_abort_and_a_crash_does_not(
    raised: BaseException, code: str
) -> None:
    entered = anyio.Event()

    async def body(context: Any) -> ToolOutput:
        entered.set()
        await context.signal.wait()
        raise raised

    async with rig(call("a"), tools=[tool("a", body)]) as r:
        r.agent.send("A")
        await entered.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert codes(r) == [code]
        assert r.outcomes == [Aborted()]


@pytest.mark.race
async def test_context_of_finished_calls_survives_the_abort() -> None:
    body = Waiting()
    async with rig(call("a", "b"), tools=[tool("a", answer_ok), tool("b", body)]) as r:

        async def add(execution: Any, output: ToolOutput, next_: Any) -> ToolOutput:
            done: ToolOutput = await next_()
            return msgspec.structs.replace(done, context=(Text(execution.call_id),))

        r.agent.hooks.on("tools/post-execute", add)
        r.agent.send("A")
        await body.entered.wait()
        r.agent.cancel()
        body.gate.set()
        await r.agent.when_idle()

        (context,) = r.of(ContextMessage)
        assert [block.text for block in context.content] == [c.call_id for c in r.calls]
        assert r.kinds[-3:] == ["context/message", "step/end", "turn/end"]
        assert len(r.of(TurnStart)) == 1


# --- policy and approval --------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R35", "R54")
@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.ALLOW, "ABORTED_BEFORE_DISPATCH"),
        (Verdict.DENY, "DENIED"),
        (Verdict.ASK, "ABORTED_BEFORE_DISPATCH"),
    ],
)
async def test_a_denial_beats_the_abort_and_nobody_is_asked_after_it(
    verdict: Verdict, code: str
) -> None:
    body, previewed = Waiting(), list[str]()
    probe: Any = tool("a", body)

    async def preview(_args: Any, _context: Any) -> tuple[Any, ...]:
        previewed.append("a")
        return ()

    probe.preview = preview
    async with rig(call("a"), tools=[probe]) as r:

        async def decide(_execution: Any, _next: Any) -> Decision:
            r.agent.cancel()
            return Decision(verdict, "the policy says no")

        r.agent.hooks.on("tools/pre-execute", decide)
        await r.agent.send("A").settled()

        assert codes(r) == [code]
        assert body.times_entered == 0
        assert previewed == []
        assert r.of(PermissionAsked) == []
        assert "approval/request" not in r.record.names
        assert r.outcomes == [Aborted()]
        assert_one_result_each(r)


@pytest.mark.race
@pytest.mark.requirement("R54")
async def test_a_cancel_while_the_preview_is_made_asks_nobody() -> None:
    probe: Any = tool("a", answer_ok, does="execute")

    async def preview(_args: Any, _context: Any) -> tuple[Any, ...]:
        r.agent.cancel()
        return ()

    probe.preview = preview
    async with rig(call("a"), tools=[probe], mode="ask") as r:
        await r.agent.send("A").settled()

        assert codes(r) == ["ABORTED_BEFORE_DISPATCH"]
        assert r.of(PermissionAsked) == []
        assert "approval/request" not in r.record.names


@pytest.mark.race
@pytest.mark.requirement("R54", "R72")
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Approval.ALLOWED, "ABORTED_BEFORE_DISPATCH"),
        (Approval.CANCELLED, "ABORTED_BEFORE_DISPATCH"),
        (Approval.REJECTED, "DENIED"),
        (RuntimeError("the line is dead"), "ABORTED_BEFORE_DISPATCH"),
        (TurnAborted("x"), "ABORTED_BEFORE_DISPATCH"),
    ],
    ids=repr,
)
async def test_a_cancel_while_a_person_is_asked_never_runs_the_body(answer: Any, code: str) -> None:
    body, asked = Waiting(), anyio.Event()
    async with rig(call("a", "a"), tools=[tool("a", body, does="execute")], mode="ask") as r:

        async def ask(execution: Any, _next: Any) -> Approval:
            asked.set()
            await execution.signal.wait()
            if isinstance(answer, BaseException):
                raise answer
            return Approval(answer)

        r.agent.hooks.on("approval/request", ask)
        r.agent.send("A")
        await asked.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert codes(r) == [code, "ABORTED_BEFORE_DISPATCH"]
        assert body.times_entered == 0
        assert len(r.of(PermissionAsked)) == len(r.of(PermissionDecided)) == 1
        assert r.outcomes == [Aborted()]
        assert_one_result_each(r)


@pytest.mark.requirement("R3", "R54")
async def test_dismissing_the_question_cancels_the_turn_for_the_user() -> None:
    body = Waiting()
    async with rig(call("a", "a"), tools=[tool("a", body, does="execute")], mode="ask") as r:

        async def dismiss(*_args: Any) -> Approval:
            return Approval.CANCELLED

        r.agent.hooks.on("approval/request", dismiss)
        await r.agent.send("A").settled()

        assert r.model.requests[0].signal.reason == {"kind": "user"}
        assert r.outcomes == [Aborted()]
        assert codes(r) == ["ABORTED_BEFORE_DISPATCH"] * 2
        assert len(r.of(PermissionAsked)) == 1
        assert [decided.outcome for decided in r.of(PermissionDecided)] == ["cancelled"]


async def test_a_rejection_is_told_to_the_model_and_the_turn_goes_on() -> None:
    body = Waiting()
    async with rig(call("a"), tools=[tool("a", body, does="execute")], mode="ask") as r:

        async def reject(*_args: Any) -> Approval:
            return Approval.REJECTED

        r.agent.hooks.on("approval/request", reject)
        await r.agent.send("A").settled()

        assert codes(r) == ["DENIED"]
        assert len(r.model.requests) == 2
        assert r.outcomes == [Completed()]


# --- tools that misbehave -------------------------------------------------------------------------


async def cancelled_future(_context: Any) -> ToolOutput:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future
    raise AssertionError("unreachable")


async def cancelled_child(_context: Any) -> ToolOutput:
    child = asyncio.create_task(asyncio.sleep(60))
    await settle()
    child.cancel()
    await child
    raise AssertionError("unreachable")


async def foreign_abort(_context: Any) -> ToolOutput:
    controller = AbortController()
    controller.abort("a deadline of the tool's own")
    controller.signal.raise_if_aborted()
    raise AssertionError("unreachable")


async def nothing(_context: Any) -> Any:
    return None


async def no_text(_context: Any) -> ToolOutput:
    return ToolOutput(17)  # type: ignore[arg-type]


async def an_object(_context: Any) -> ToolOutput:
    return ToolOutput("x", content=(object(),))  # type: ignore[arg-type]


MISBEHAVING = [
    (cancelled_future, "TOOL_CANCELLED"),
    (cancelled_child, "TOOL_CANCELLED"),
    (foreign_abort, "TOOL_CANCELLED"),
    (nothing, "TOOL_CRASHED"),
    (no_text, "TOOL_CRASHED"),
    (an_object, "TOOL_CRASHED"),
]


@pytest.mark.requirement("R73")
@pytest.mark.parametrize(("body", "code"), MISBEHAVING, ids=plain)
@pytest.mark.parametrize("overlaps", [False, True])
async def test_what_goes_wrong_in_one_tool_is_that_calls_failure_only(
    body: Any, code: str, overlaps: bool
) -> None:
    good = Waiting()
    tools = [tool("bad", body, overlaps=overlaps), tool("good", good, overlaps=overlaps)]
    async with rig(call("bad", "good"), tools=tools) as r:
        r.agent.send("A")
        await good.entered.wait()
        await settle()
        good.gate.set()
        await r.agent.when_idle()

        assert codes(r) == [code, None]
        assert len(r.model.requests) == 2
        assert r.outcomes == [Completed()]
        assert_one_result_each(r)


@pytest.mark.parametrize("seam", ["tools/pre-execute", "tools/execute", "tools/post-execute"])
async def test_a_listener_that_fails_around_a_tool_fails_that_call_only(seam: str) -> None:
    async with rig(call("a", "a"), tools=[tool("a", answer_ok)]) as r:
        failed: list[str] = []

        async def explode_once(*args: Any) -> Any:
            if not failed:
                failed.append(seam)
                raise RuntimeError("SECRET")
            return await args[-1]()

        r.agent.hooks.on(seam, explode_once)
        await r.agent.send("A").settled()

        assert codes(r) == ["TOOL_CRASHED", None]
        assert "SECRET" not in str(r.log)
        assert r.outcomes == [Completed()]


async def test_a_tool_that_cannot_even_be_announced_has_a_result() -> None:
    broken: Any = tool("broken", answer_ok)

    def view(_args: Any, _roots: Any) -> Any:
        raise ValueError("no view")

    broken.view = view
    async with rig(call("broken", "a"), tools=[broken, tool("a", answer_ok)]) as r:
        await r.agent.send("A").settled()

        assert codes(r) == ["TOOL_CRASHED", None]
        assert_one_result_each(r)


async def test_unknown_tools_and_wrong_arguments_are_answered_without_running() -> None:
    body = Waiting()

    async def play(_request: Any) -> Any:
        yield ToolCallDelta(0, "nosuch", "{}")
        yield ToolCallDelta(1, "a", '{"wrong": 1}')
        yield ToolCallDelta(2, "a", "not json")
        yield Finish("tool_calls")

    async with rig(play, tools=[tool("a", body)]) as r:
        await r.agent.send("A").settled()

        assert codes(r) == ["UNKNOWN_TOOL", "BAD_ARGUMENTS", "BAD_ARGUMENTS"]
        assert body.times_entered == 0
        assert_one_result_each(r)


# --- the signal of a wrapper ----------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R40", "R35")
async def test_a_wrapper_may_add_a_deadline_and_the_turns_abort_still_arrives() -> None:
    body = Waiting(is_cooperative=True)
    async with rig(call("a", "b"), tools=[tool("a", body), tool("b", answer_ok)]) as r:
        deadline = AbortController()

        async def limit(execution: Any, next_: Any) -> Any:
            with AbortSignal.any(execution.signal, deadline.signal) as limited:
                return await next_(replace(execution, signal=limited))

        r.agent.hooks.on("tools/execute", limit)
        r.agent.send("A")
        await body.entered.wait()
        turn_signal = r.model.requests[0].signal
        assert body.signal is not turn_signal
        r.agent.cancel()
        await r.agent.when_idle()

        assert body.signal is not None
        assert body.signal.reason == {"kind": "user"}
        assert codes(r) == ["ABORTED", "ABORTED_BEFORE_DISPATCH"]
        assert {signal for _name, signal in r.record.signals} == {turn_signal}


@pytest.mark.race
async def test_a_wrappers_own_abort_fails_its_call_and_not_the_turn() -> None:
    body = Waiting(is_cooperative=True)
    async with rig(call("a"), tools=[tool("a", body)]) as r:

        async def expired(execution: Any, next_: Any) -> Any:
            deadline = AbortController()
            deadline.abort("a deadline")
            return await next_(replace(execution, signal=deadline.signal))

        r.agent.hooks.on("tools/execute", expired)
        await r.agent.send("A").settled()

        assert body.times_entered == 0
        assert codes(r) == ["TOOL_CANCELLED"]
        assert r.outcomes == [Completed()]


# --- failures of the scheduler itself -------------------------------------------------------------


class FailingStore(MemoryStore):
    """Fails the flush before a side effect, once armed."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_at: list[int] = []
        self.flushes = 0

    async def flush(self, session_id: str) -> None:
        self.flushes += 1
        if self.flushes in self.fails_at:
            raise StoreError("the disk is full")


@pytest.mark.race
@pytest.mark.requirement("R73")
async def test_a_store_that_fails_before_a_body_waits_for_the_others_and_invents_nothing() -> None:
    store, slow = FailingStore(), Waiting()
    never = Waiting()
    tools = [
        tool("slow", slow, overlaps=True),
        tool("unsafe", never, overlaps=True, does="execute"),
        tool("next", never),
    ]
    async with rig(call("slow", "unsafe", "next"), store=store, tools=tools) as r:
        store.fails_at = [1]
        prompt = r.agent.send("A")
        await slow.entered.wait()
        await settle()
        assert r.results == []
        assert not prompt.is_settled
        slow.gate.set()
        await r.agent.when_idle()

        assert never.times_entered == 0
        assert codes(r) == [None, "ABORTED_BEFORE_DISPATCH", "ABORTED_BEFORE_DISPATCH"]
        assert [type(outcome).__name__ for outcome in r.outcomes] == ["Failed"]
        assert_one_result_each(r)
        await assert_next_request_is_valid(r)


@pytest.mark.race
@pytest.mark.requirement("R73", "R65")
@pytest.mark.parametrize("overlaps", [False, True])
async def test_cancelling_the_host_leaves_one_result_for_each_call(overlaps: bool) -> None:
    body, other = Waiting(), Waiting()
    tools = [tool("a", body, overlaps=overlaps), tool("b", other, overlaps=overlaps)]
    model = ScriptedModel([call("a", "b", "nosuch")])
    rigs: list[Rig] = []
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:

            async def own() -> None:
                async with runtime_for(model, tools) as runtime:
                    rigs.append(Rig(runtime, await runtime.create("/"), model))
                    rigs[0].agent.send("A")
                    await anyio.sleep_forever()

            tasks.start_soon(own)
            await body.entered.wait()
            await settle()
            tasks.cancel_scope.cancel()

    (r,) = rigs
    second = "ABORTED" if overlaps else "ABORTED_BEFORE_DISPATCH"
    assert codes(r) == ["ABORTED", second, "UNKNOWN_TOOL"]
    assert r.outcomes == [Disposed()]
    assert_one_result_each(r)


# --- what is told to others -----------------------------------------------------------------------


async def test_every_result_is_announced_once_in_order() -> None:
    tools = [tool("a", answer_ok, overlaps=True), tool("b", answer_ok, overlaps=True)]
    async with rig(call("a", "b"), say("done"), tools=tools) as r:
        await r.agent.send("A").settled()

        announced = [result.call_id for _execution, result in r.record.given("tools/result")]
        assert announced == [result.call_id for result in r.results]


@pytest.mark.race
async def test_running_calls_are_listed_while_they_run() -> None:
    one, two = Waiting(), Waiting()
    tools = [
        tool("a", one, overlaps=True, title="One"),
        tool("b", two, overlaps=True, title="Two"),
    ]
    async with rig(call("a", "b"), tools=tools) as r:
        r.agent.send("A")
        await one.entered.wait()
        await two.entered.wait()
        assert r.agent.awaiting() == "One, Two"
        one.gate.set()
        await settle()
        assert r.agent.awaiting() == "Two"
        two.gate.set()
        await r.agent.when_idle()

        assert dict(r.agent.running_calls) == {}
        assert r.of(ToolProgress) == []
