from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from core_rig import runtime_for, tool
from model_rig import HI, KEY, a_model, a_request, abort_at, collect, failure_of, served

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import (
    Image,
    Link,
    ReasoningPart,
    Text,
    TextPart,
    ToolCallPart,
    Usage,
)
from agent_core.errors import ModelError
from agent_core.events import Failed
from agent_core.models.adapter import (
    AssistantTurn,
    Finish,
    Message,
    ModelEvent,
    ReasoningDelta,
    Retrying,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
    ToolTurn,
    UsageReport,
    UserTurn,
)
from agent_core.models.retry import RetryingModel
from agent_core.tools.tool import ToolOutput
from conformance.providers.server import (
    DONE,
    Drip,
    Drop,
    Gate,
    Reply,
    Stall,
    Step,
    answer,
    chunk,
    comment,
    error_event,
    finish,
    provider_double,
    reasoning,
    status,
    text,
    tool_call,
    usage,
)

CALLED = AssistantTurn((ReasoningPart("hm"), ToolCallPart("c1", "read", '{"path":"a"}')))
RESULT = ToolTurn("c1", "read", "text of a")


async def events_of(*steps: Step, reason: str | None = "stop") -> list[ModelEvent]:
    async with served(answer(*steps, reason=reason)) as (model, double):
        events, error = await collect(model)
    assert error is None
    assert double.violations == []
    return events


async def sent_for(*messages: Message, **fields: Any) -> dict[str, Any]:
    async with served(answer(text("ok"))) as (model, double):
        await collect(model, a_request(*messages, **fields))
    assert double.violations == []
    return double.requests[0]


# --- what is streamed -----------------------------------------------------------------------


async def test_text_arrives_piece_by_piece_and_ends_with_a_finish() -> None:
    events = await events_of(chunk({"role": "assistant", "content": ""}), text("Hel"), text("lo"))

    assert events == [TextDelta("Hel"), TextDelta("lo"), Finish("stop")]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
async def test_thinking_arrives_under_either_of_its_names(key: str) -> None:
    events = await events_of(reasoning("hm", key=key), text("so"))

    assert events == [ReasoningDelta("hm"), TextDelta("so"), Finish("stop")]


async def test_characters_may_be_cut_apart_by_packets() -> None:
    events = await events_of(Drip(text("naïve 東京 🦊")), text("é"))

    assert events == [TextDelta("naïve 東京 🦊"), TextDelta("é"), Finish("stop")]


async def test_parallel_tool_calls_arrive_in_interleaved_fragments() -> None:
    events = await events_of(
        tool_call(0, "a", "read"),
        tool_call(1, "b", "list", "{"),
        tool_call(0, None, None, '{"path":'),
        tool_call(1, None, None, "}"),
        tool_call(0, None, None, '"x"}'),
        reason="tool_calls",
    )

    assert events == [
        ToolCallDelta(0, "read", ""),
        ToolCallDelta(1, "list", "{"),
        ToolCallDelta(0, "", '{"path":'),
        ToolCallDelta(1, "", "}"),
        ToolCallDelta(0, "", '"x"}'),
        Finish("tool_calls"),
    ]


@pytest.mark.parametrize(
    "fragments",
    [
        pytest.param(
            [tool_call(None, "a", "read", '{"n":1}'), tool_call(None, "b", "read", '{"n":2}')],
            id="whole calls without index",
        ),
        pytest.param(
            [tool_call(0, "a", "read", '{"n":1}'), tool_call(0, "b", "read", '{"n":2}')],
            id="whole calls that all have index 0",
        ),
        pytest.param(
            [tool_call(None, None, "read", '{"n":1}'), tool_call(None, None, "read", '{"n":2}')],
            id="whole calls without index and id",
        ),
        pytest.param(
            [tool_call(0, "x", "read", '{"n":1}'), tool_call(1, "x", "read", '{"n":2}')],
            id="one id for all calls",
        ),
        pytest.param(
            [tool_call(None, "x", "read", '{"n":1}'), tool_call(None, "x", "read", '{"n":2}')],
            id="one id for all calls and no index",
        ),
        pytest.param(
            [
                tool_call(0, "a", "read", '{"n":'),
                tool_call(0, "a", "read", "1}"),
                tool_call(0, "a", "read", ""),
                tool_call(1, "b", "read", '{"n":2}'),
            ],
            id="id and name in every fragment",
        ),
        pytest.param(
            [
                tool_call(None, "a", "read"),
                tool_call(None, "b", "read"),
                tool_call(None, "a", None, '{"n":1}'),
                tool_call(None, "b", None, '{"n":2}'),
            ],
            id="fragments that are told apart by id alone",
        ),
        pytest.param(
            [
                tool_call(2, "a", "read", '{"n":1}'),
                chunk({"tool_calls": [{"function": {"name": "read", "arguments": {"n": 2}}}]}),
            ],
            id="arguments as an object",
        ),
    ],
)
async def test_tool_calls_are_put_together_whatever_the_endpoint_leaves_out(
    fragments: list[bytes],
) -> None:
    events = await events_of(*fragments, reason="tool_calls")

    calls: dict[int, list[str]] = {}
    for event in events[:-1]:
        assert isinstance(event, ToolCallDelta)
        name_and_arguments = calls.setdefault(event.index, ["", ""])
        name_and_arguments[0] += event.name
        name_and_arguments[1] += event.arguments
    assert calls == {0: ["read", '{"n":1}'], 1: ["read", '{"n":2}']}


@pytest.mark.requirement("B152")
async def test_all_counts_of_tokens_are_kept() -> None:
    events = await events_of(text("a"), finish("stop"), usage(9, 5, cached=4, thought=3), DONE)

    assert events == [TextDelta("a"), UsageReport(Usage(9, 5, 4, 3)), Finish("stop")]


async def test_an_unchanged_count_is_reported_once() -> None:
    events = await events_of(usage(9, 1), text("a"), usage(9, 1), usage(9, 2))

    assert events == [
        UsageReport(Usage(9, 1)),
        TextDelta("a"),
        UsageReport(Usage(9, 2)),
        Finish("stop"),
    ]


@pytest.mark.requirement("B034")
@pytest.mark.parametrize(
    ("wire", "steps", "expected"),
    [
        ("stop", [text("a")], "stop"),
        ("stop", [tool_call(0, "a", "list")], "tool_calls"),
        ("tool_calls", [tool_call(0, "a", "list")], "tool_calls"),
        ("tool_calls", [text("a")], "stop"),
        ("function_call", [tool_call(0, "a", "list")], "tool_calls"),
        ("length", [text("a")], "length"),
        ("content_filter", [], "refusal"),
        ("eos", [text("a")], "stop"),
        ("stop", [chunk({"refusal": "I cannot"})], "refusal"),
        ("stop", [], "stop"),
        (None, [text("a"), DONE], "stop"),
        (None, [text("a")], "stop"),
    ],
)
async def test_each_finish_reason_has_one_meaning(
    wire: str | None, steps: list[bytes], expected: str
) -> None:
    events = await events_of(*steps, reason=wire)

    assert events[-1] == Finish(expected)  # type: ignore[arg-type]


async def test_an_answer_is_complete_with_its_reason_whatever_follows() -> None:
    for rest in (Drop(), Drop(reset=True), b"data: {nonsense\n\n", error_event(message="late")):
        events = await events_of(text("a"), finish("stop"), rest, reason=None)
        assert events == [TextDelta("a"), Finish("stop")]


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    async with served(answer(text("a")), answer(text("b"))) as (model, double):
        await collect(model)
        await collect(model)

        assert double.open_connections == 1


# --- what is sent ---------------------------------------------------------------------------


@pytest.mark.requirement("B061", "B065")
async def test_a_conversation_is_sent_as_strict_endpoints_want_it() -> None:
    sent = await sent_for(
        HI,
        CALLED,
        RESULT,
        AssistantTurn((TextPart("al"), TextPart("pha")), interrupted=True),
        HI,
        AssistantTurn((ReasoningPart("only thought"),), interrupted=True),
        UserTurn((Text("look"), Image("aW1n", "image/png"), Link("file:///a", "a"))),
        system="be kind",
    )

    function = {"name": "read", "arguments": '{"path":"a"}'}
    call = {"id": "c1", "type": "function", "function": function}
    assert sent["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "text of a"},
        {"role": "assistant", "content": "alpha"},
        {"role": "user", "content": "hi"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aW1n"}},
                {"type": "text", "text": "[a](file:///a)"},
            ],
        },
    ]


async def test_the_request_carries_model_tools_sampling_key_and_headers() -> None:
    tool = ToolSpec("read", "Read a file.", {"type": "object", "properties": {}})
    async with served(answer(text("ok")), headers={"x-title": "t"}) as (model, double):
        await collect(model, a_request(tools=(tool,), sampling={"temperature": 0.5, "top_k": 3}))

    function = {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {}},
    }
    assert double.requests[0] == {
        "model": "any",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": function}],
        "temperature": 0.5,
        "top_k": 3,
    }
    assert double.headers[0]["authorization"] == f"Bearer {KEY}"
    assert double.headers[0]["x-title"] == "t"


@pytest.mark.parametrize(
    ("written", "expected"),
    [("", "{}"), (" ", "{}"), ('{"a"', '{"malformed":"{\\"a\\""}'), ("[1]", '{"malformed":"[1]"}')],
)
async def test_broken_arguments_do_not_poison_the_history(written: str, expected: str) -> None:
    sent = await sent_for(HI, AssistantTurn((ToolCallPart("c1", "read", written),)), RESULT)

    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("name", ["functions.read", "", "lies\n東京", "x" * 200])
async def test_a_name_that_no_tool_has_does_not_spoil_the_history(name: str) -> None:
    call = AssistantTurn((ToolCallPart("c1", name, "{}"),))

    await sent_for(HI, call, ToolTurn("c1", name, "there is no such tool", is_error=True))


async def test_a_prompt_without_a_word_is_no_empty_message() -> None:
    sent = await sent_for(
        UserTurn((Text(" "), Text(""))), UserTurn((Text(""), Image("aW1n", "image/png")))
    )

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aW1n"}}
    assert [message["content"] for message in sent["messages"]] == ["(no text)", [image]]


@pytest.mark.requirement("B066")
async def test_thinking_goes_back_with_tool_calls_once_the_endpoint_sent_it_as_such() -> None:
    first = answer(reasoning("hm"), tool_call(0, "c1", "read", "{}"), reason="tool_calls")
    async with served(first, answer(text("ok"))) as (model, double):
        await collect(model)
        await collect(model, a_request(HI, CALLED, RESULT, AssistantTurn((TextPart("x"),)), HI))

    with_calls, without_calls = double.requests[1]["messages"][1], double.requests[1]["messages"][3]
    assert with_calls["reasoning_content"] == "hm"
    assert "reasoning_content" not in without_calls


@pytest.mark.requirement("B066")
async def test_an_endpoint_that_asks_for_thinking_gets_it_at_once() -> None:
    refusal = status(400, {"message": "The reasoning_content in the thinking mode is missing"})
    async with served(refusal, answer(text("ok")), answer(text("ok"))) as (model, double):
        events, error = await collect(model, a_request(HI, CALLED, RESULT))
        await collect(model, a_request(HI, CALLED, RESULT))

    assert (events[0], error) == (TextDelta("ok"), None)
    assert "reasoning_content" not in double.requests[0]["messages"][1]
    assert double.requests[1]["messages"][1]["reasoning_content"] == "hm"
    assert double.requests[2]["messages"][1]["reasoning_content"] == "hm"


async def test_an_endpoint_that_keeps_complaining_about_thinking_is_asked_twice() -> None:
    refusal = status(400, {"message": "reasoning_content is wrong"})

    assert (await failure_of(refusal, refusal)).code == "BAD_REQUEST"


async def test_an_endpoint_that_cannot_count_in_a_stream_is_asked_without_from_then_on() -> None:
    refusal = status(400, {"message": "Unknown parameter: 'stream_options'"})
    async with served(refusal, answer(text("ok")), answer(text("ok"))) as (model, double):
        events, error = await collect(model)
        await collect(model)

    assert (events[0], error) == (TextDelta("ok"), None)
    assert ["stream_options" in request for request in double.requests] == [True, False, False]


# --- limits and aborts ----------------------------------------------------------------------


@pytest.mark.requirement("B147")
@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply(before=[Stall()]), id="no headers"),
        pytest.param(answer(Stall()), id="headers, then silence"),
        pytest.param(answer(text("a"), comment(), Stall()), id="a ping, then silence"),
        pytest.param(answer(text("mid-"), text("word")[:30], Stall()), id="silence in an event"),
    ],
)
async def test_a_stall_ends_at_the_idle_limit(reply: Reply) -> None:
    async with served(reply, idle_limit_s=0.05) as (model, double):
        _, error = await collect(model)
        await double.disconnected(0)

    assert isinstance(error, ModelError)
    assert error.code == "TIMEOUT"


@pytest.mark.requirement("B147")
async def test_pings_are_no_sign_of_life() -> None:
    class Pings(Sequence[Step]):
        def __len__(self) -> int:
            return sys.maxsize

        def __getitem__(self, at: Any) -> Any:
            return comment()

    async with served(Reply(Pings()), idle_limit_s=0.2) as (model, double):
        _, error = await collect(model)
        await double.disconnected(0)

    assert isinstance(error, ModelError)
    assert error.code == "TIMEOUT"


async def test_an_idle_limit_of_zero_is_none() -> None:
    gate = Gate()
    async with (
        served(answer(gate, text("late")), idle_limit_s=0) as (model, _),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(open_when_blocked, gate)
        events, error = await collect(model)

    assert (events, error) == ([TextDelta("late"), Finish("stop")], None)


async def open_when_blocked(gate: Gate) -> None:
    await gate.reached.wait()
    await anyio.wait_all_tasks_blocked()
    gate.opened.set()


async def test_what_never_follows_a_finish_reason_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent_core.models.endpoint_model.TRAILING_LIMIT_S", 0.02)
    reply = answer(text("a"), finish("stop"), Stall())
    async with served(reply, idle_limit_s=0) as (model, double):
        events, error = await collect(model)
        await double.disconnected(0)

    assert (events, error) == ([TextDelta("a"), Finish("stop")], None)


SAID: Sequence[tuple[bytes, ModelEvent]] = [
    (reasoning("hm"), ReasoningDelta("hm")),
    (text("a"), TextDelta("a")),
    (tool_call(0, "c", "read", "{"), ToolCallDelta(0, "read", "{")),
    (tool_call(0, None, None, "}"), ToolCallDelta(0, "", "}")),
    (usage(1, 2), UsageReport(Usage(1, 2))),
]


def stalled_before(n: int) -> tuple[Reply, Gate]:
    """An answer that stalls before what it says as number `n`; -1 is before the headers."""
    gate = Gate()
    if n < 0:
        return answer(before=[gate]), gate
    steps: list[Step] = [step for step, _ in SAID]
    return answer(*steps[:n], gate, *steps[n:]), gate


@pytest.mark.requirement("R34", "B028", "B029", "B147")
@pytest.mark.parametrize("n", range(-1, len(SAID) + 1))
async def test_an_abort_in_a_stall_ends_the_stream_and_the_server_sees_it(n: int) -> None:
    reply, gate = stalled_before(n)
    controller = AbortController()
    async with served(reply, answer(text("next"))) as (model, double):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort_at, gate, controller)
            events, error = await collect(model, a_request(controller=controller))
        await double.disconnected(0)
        later, _ = await collect(model)

    assert isinstance(error, TurnAborted)
    assert events == [event for _, event in SAID[: max(n, 0)]]
    assert later == [TextDelta("next"), Finish("stop")]
    assert double.violations == []


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("n", range(1, len(SAID) + 1))
async def test_an_abort_while_the_consumer_has_an_event_ends_the_stream(n: int) -> None:
    controller = AbortController()
    steps = [step for step, _ in SAID]
    async with (
        served(answer(*steps[:n], Stall())) as (model, double),
        aclosing(model.stream(a_request(controller=controller))) as stream,
    ):
        for _, event in SAID[:n]:
            assert await anext(stream) == event
        controller.abort(USER)
        with pytest.raises(TurnAborted):
            await anext(stream)
        await double.disconnected(0)


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("n", range(1, len(SAID) + 1))
async def test_a_consumer_that_leaves_closes_the_connection(n: int) -> None:
    steps = [step for step, _ in SAID]
    async with served(answer(*steps[:n], Stall())) as (model, double):
        async with aclosing(model.stream(a_request())) as stream:
            for _, event in SAID[:n]:
                assert await anext(stream) == event
        await double.disconnected(0)


async def test_an_aborted_signal_reaches_no_endpoint() -> None:
    controller = AbortController()
    controller.abort(USER)
    async with served() as (model, double):
        _, error = await collect(model, a_request(controller=controller))

        assert isinstance(error, TurnAborted)
        assert double.requests == []


async def test_an_abort_while_the_connection_is_made_ends_the_stream() -> None:
    controller = AbortController()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        # Nobody accepts, so one client fills the queue; the next one's SYN stays unanswered.
        stack.enter_context(socket.create_connection(address))
        model = a_model(f"http://127.0.0.1:{address[1]}")
        stack.push_async_callback(model.aclose)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(abort_when_blocked, controller)
                _, error = await collect(model, a_request(controller=controller))

    assert isinstance(error, TurnAborted)


async def abort_when_blocked(controller: AbortController) -> None:
    await anyio.wait_all_tasks_blocked()
    controller.abort(USER)


@pytest.mark.requirement("R34")
async def test_an_abort_in_the_wait_for_a_retry_ends_it_and_no_request_follows() -> None:
    controller = AbortController()
    limited = status(429, None, headers={"Retry-After": "100"})
    async with served(limited) as (model, double):
        retrying = RetryingModel(model)
        async with aclosing(retrying.stream(a_request(controller=controller))) as stream:
            assert isinstance(await anext(stream), Retrying)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(abort_when_blocked, controller)
                with pytest.raises(TurnAborted):
                    await anext(stream)

        assert len(double.requests) == 1


async def test_a_retry_reaches_an_endpoint_that_has_recovered() -> None:
    script = (status(503), answer(Drop()), answer(reason=None), answer(text("at last")))
    async with served(*script) as (model, _):
        events, error = await collect(RetryingModel(model, base_s=0.0))

    codes = [event.code for event in events if isinstance(event, Retrying)]
    assert codes == ["OVERLOADED", "TRANSPORT", "TRANSPORT"]
    assert events[3:] == [TextDelta("at last"), Finish("stop")]
    assert error is None


async def test_a_host_that_cancels_the_task_closes_the_connection() -> None:
    async with served(answer(text("a"), Stall())) as (model, double):
        with anyio.CancelScope() as scope:
            async with aclosing(model.stream(a_request())) as stream:
                await anext(stream)
                scope.cancel()
                await anext(stream)
        await double.disconnected(0)

    assert scope.cancelled_caught


async def test_an_abort_of_one_stream_leaves_the_others_alone() -> None:
    gates = [Gate(), Gate()]
    controller = AbortController()
    script = [answer(text("a"), gate, text("b")) for gate in gates]
    async with (
        served(*script) as (model, double),
        aclosing(model.stream(a_request(controller=controller))) as aborted,
        aclosing(model.stream(a_request())) as other,
    ):
        assert [await anext(aborted), await anext(other)] == [TextDelta("a"), TextDelta("a")]
        controller.abort(USER)
        with pytest.raises(TurnAborted):
            await anext(aborted)
        await double.disconnected(0)
        gates[1].opened.set()

        assert [event async for event in other] == [TextDelta("b"), Finish("stop")]


async def test_closing_the_model_leaves_no_socket_open() -> None:
    async with provider_double([answer(text("a"))]) as double:
        model = a_model(double.url)
        await collect(model)
        assert double.open_connections == 1

        await model.aclose()

        with anyio.fail_after(5):
            await double.no_connection()


@pytest.mark.requirement("R34", "B006")
async def test_an_abort_after_any_number_of_loop_turns_leaves_no_connection() -> None:
    n_turns = 40
    script = [answer(text("warm")), *[answer(text("a"), Stall())] * n_turns]
    async with served(*script) as (model, double):
        await collect(model)  # the SDK takes longer to load than all that follows
        n_started = 0
        for turn in range(n_turns):
            controller = AbortController()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(abort_after, turn, controller)
                events, error = await collect(model, a_request(controller=controller))
            n_started += bool(events)
            assert isinstance(error, TurnAborted)
            for n in range(1, len(double.requests)):
                await double.disconnected(n)

    assert 0 < n_started < n_turns  # the sweep went over the whole call


async def abort_after(n_turns: int, controller: AbortController) -> None:
    for _ in range(n_turns):
        await anyio.lowlevel.checkpoint()
    controller.abort(USER)


async def test_200_aborted_streams_leave_no_task_and_no_file_behind() -> None:
    replies = [stalled_before(n % (len(SAID) + 2) - 1) for n in range(200)]
    async with served(*(reply for reply, _ in replies)) as (model, double):
        n_files = n_tasks = 0
        for n, (_, gate) in enumerate(replies):
            controller = AbortController()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(abort_at, gate, controller)
                _, error = await collect(model, a_request(controller=controller))
            assert isinstance(error, TurnAborted)
            await double.disconnected(n)
            await anyio.wait_all_tasks_blocked()
            if n == 9:
                n_files, n_tasks = len(os.listdir("/dev/fd")), len(anyio.get_running_tasks())

        assert len(os.listdir("/dev/fd")) == n_files
        assert len(anyio.get_running_tasks()) == n_tasks


@pytest.mark.requirement("B149", "B150")
@pytest.mark.parametrize("words", [(), (text("I will look"),)])
@pytest.mark.parametrize("end", [(), (DONE,)])
async def test_calls_without_a_finish_reason_may_be_half_and_do_not_run(
    words: tuple[bytes, ...], end: tuple[bytes, ...]
) -> None:
    ran: list[object] = []

    async def act(context: Any) -> ToolOutput:
        ran.append(context)
        return ToolOutput("ok")

    steps = (*words, tool_call(0, "c", "act", "{}"), *end)
    async with (
        served(answer(*steps, reason=None)) as (model, _double),
        runtime_for(model, [tool("act", act, does="execute")]) as runtime,
    ):
        outcome = await (await runtime.create("/")).send("go").settled()

    assert isinstance(outcome, Failed)
    assert outcome.code == "TRANSPORT"
    assert ran == []


async def test_two_requests_refused_for_the_same_reason_both_learn_from_it() -> None:
    refusal = status(400, {"message": "reasoning_content must be passed back"})
    gates = Gate(), Gate()
    held = [Reply(refusal.body, before=[gate], code=400) for gate in gates]
    told = answer(text("ok")), answer(text("ok"))
    async with served(*held, *told) as (model, double), anyio.create_task_group() as tasks:
        ends: list[Exception | None] = []

        async def call() -> None:
            ends.append((await collect(model, a_request(HI, CALLED, RESULT)))[1])

        tasks.start_soon(call)
        tasks.start_soon(call)
        for gate in gates:
            await gate.reached.wait()
        for gate in gates:
            gate.opened.set()
        while len(ends) < 2:
            await anyio.lowlevel.checkpoint()

        assert ends == [None, None]
        assert ["reasoning_content" in str(each) for each in double.requests] == [
            False,
            False,
            True,
            True,
        ]
