from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from core_rig import runtime_for, tool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_rig import HI, KEY, a_request, abort_at, collect, failure_of, served

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import (
    Block,
    Image,
    Link,
    Part,
    ReasoningPart,
    Resource,
    Text,
    TextPart,
    ToolCallPart,
    Usage,
)
from agent_core.errors import ModelError
from agent_core.events import Completed, Failed
from agent_core.models.adapter import (
    AssistantTurn,
    Finish,
    Message,
    ModelEvent,
    ModelInfo,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
    ToolTurn,
    UsageReport,
    UserTurn,
)
from agent_core.models.reply import Reply as Collected
from agent_core.models.responses import Responses
from agent_core.tools.tool import ToolOutput
from conformance.providers import responses as double_of
from conformance.providers.responses import (
    arguments,
    call_item,
    call_read,
    completed,
    created,
    event,
    failed,
    incomplete,
    item_added,
    item_done,
    last_words,
    reasoning_item,
    refusal,
    summary,
    text,
    thought,
    usage,
    violations,
)
from conformance.providers.server import Drip, Drop, Gate, Reply, Stall, Step, comment, status

NAME = "openai:any"
SEALED = reasoning_item("Which file?")
OPAQUE = json.dumps(SEALED)
READ = ToolSpec("read", "Read a file.", {"type": "object", "properties": {}})
CALLED = AssistantTurn(
    (ReasoningPart("Which file?", NAME, OPAQUE), ToolCallPart("c1", "read", '{"path":"a"}'))
)
RESULT = ToolTurn("c1", "read", "text of a")


def an_answer(*steps: Step) -> Reply:
    return Reply([created(), *steps, completed()])


async def events_of(*steps: Step) -> list[ModelEvent]:
    async with served(Reply(steps), api="responses") as (model, double):
        events, error = await collect(model)
    assert error is None
    assert double.violations == []
    return events


async def sent_for(
    *messages: Message, facts: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """Return the body of the request that tells `messages`; the double has nothing against it."""
    async with served(an_answer(text("ok")), api="responses", facts=facts) as (model, double):
        await collect(model, a_request(*messages, **fields))
    assert double.violations == []
    return double.requests[0]


# --- what is streamed -----------------------------------------------------------------------


async def test_an_answer_with_thinking_text_and_a_call_arrives_in_pieces() -> None:
    events = await events_of(*call_read("a.txt"))

    sealed = events.pop(2)
    assert isinstance(sealed, ReasoningDelta)
    assert (sealed.text, sealed.origin) == ("", NAME)
    assert json.loads(sealed.opaque) == SEALED
    assert events == [
        ReasoningDelta("Which "),
        ReasoningDelta("file?"),
        TextDelta("Let me "),
        TextDelta("look."),
        ToolCallDelta(0, "read"),
        ToolCallDelta(0, "", '{"pat'),
        ToolCallDelta(0, "", 'h": "'),
        ToolCallDelta(0, "", 'a.txt"}'),
        ToolCallDelta(0),
        UsageReport(Usage(120, 30, cached_tokens=100, reasoning_tokens=10)),
        Finish("tool_calls"),
    ]


async def test_characters_may_be_cut_apart_by_packets() -> None:
    events = await events_of(created(), Drip(text("naïve 東京 🦊")), text("é"), completed())

    assert events == [TextDelta("naïve 東京 🦊"), TextDelta("é"), Finish("stop")]


async def test_parts_of_a_summary_are_paragraphs() -> None:
    events = await events_of(
        summary("one"), summary(" more"), summary("two", 1), summary("three", 0, at=1), completed()
    )

    assert [event.text for event in events if isinstance(event, ReasoningDelta)] == [
        "one",
        " more",
        "\n\ntwo",
        "\n\nthree",
    ]


async def test_thinking_in_clear_arrives_and_is_nothing_to_send_back() -> None:
    item: dict[str, Any] = reasoning_item() | {"encrypted_content": None}
    events = await events_of(
        thought("hm"), item_done(0, item), item_done(1, {"type": "reasoning"}), completed()
    )

    assert events == [ReasoningDelta("hm"), Finish("stop")]


async def test_thinking_without_id_and_summary_is_kept_by_its_seal() -> None:
    item = {"type": "reasoning", "id": None, "status": None, "encrypted_content": "x"}
    events = await events_of(item_done(0, item), completed())

    assert isinstance(events[0], ReasoningDelta)
    expected = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert json.loads(events[0].opaque) == expected


async def test_parallel_calls_arrive_in_interleaved_fragments() -> None:
    events = await events_of(
        item_added(1, call_item("a", "read")),
        arguments('{"path"', 1),
        item_added(2, call_item("b", "list")),
        arguments("{", 2),
        arguments(':"x"}', 1),
        arguments("}", 2),
        item_done(2, call_item("b", "list", "{}")),
        item_done(1, call_item("a", "read", '{"path":"x"}')),
        completed(),
    )

    assert calls_in(events) == [("read", '{"path":"x"}'), ("list", "{}")]
    assert events[-1] == Finish("tool_calls")


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([item_done(0, call_item("a", "read", '{"n":1}'))], id="only whole"),
        pytest.param(
            [
                item_added(0, call_item("a", "read")),
                item_done(0, call_item("a", "read", '{"n":1}')),
            ],
            id="no fragments",
        ),
        pytest.param(
            [arguments('{"n"'), item_done(0, call_item("a", "read", '{"n":1}'))],
            id="too few fragments, and no beginning",
        ),
        pytest.param(
            [
                item_added(0, call_item("a", "read", '{"n":1}')),
                arguments('{"n":1}'),
                item_done(0, call_item("a", "read", '{"n":1}')),
            ],
            id="whole from the beginning",
        ),
        pytest.param(
            [
                event("response.output_item.added", item=call_item("a", "read", id="x")),
                event("response.function_call_arguments.delta", item_id="x", delta='{"n":1}'),
                event("response.output_item.done", item=call_item("a", "read", id="x")),
            ],
            id="by id",
        ),
        pytest.param(
            [
                event(
                    "response.output_item.done",
                    item={"type": "function_call", "name": "read", "arguments": {"n": 1}},
                )
            ],
            id="arguments that are an object",
        ),
    ],
)
async def test_a_call_is_whole_however_it_comes(steps: Sequence[bytes]) -> None:
    assert calls_in(await events_of(*steps, completed())) == [("read", '{"n":1}')]


def calls_in(events: Sequence[ModelEvent]) -> list[tuple[str, str]]:
    reply = Collected()
    for each in events:
        reply.add(each)
    return [
        (call.name, call.arguments)
        for call in reply.content("call")
        if isinstance(call, ToolCallPart)
    ]


async def test_what_nobody_knows_is_ignored() -> None:
    events = await events_of(
        event("response.in_progress"),
        event("response.audio.delta", delta={"not": "text"}),
        event("response.output_item.added", item={"type": "web_search_call", "id": "ws"}),
        event("response.output_item.done", item={"type": "mcp_call", "arguments": 1}),
        event("keepalive", sequence_number=3),
        text(""),
        text("a"),
        completed(),
    )

    assert events == [TextDelta("a"), Finish("stop")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (usage(7, 3), Usage(7, 3)),
        (usage(7, 3, cached=5, thought=2), Usage(7, 3, cached_tokens=5, reasoning_tokens=2)),
        ({"input_tokens": 7, "output_tokens": None}, Usage(7, 0)),
        (
            {"input_tokens": 7, "input_tokens_details": {"cache_write_tokens": 4}},
            Usage(7, cache_write_tokens=4),
        ),
    ],
)
async def test_tokens_are_counted_as_the_api_counts_them(
    count: dict[str, Any], expected: Usage
) -> None:
    events = await events_of(text("a"), completed(count))

    assert events[1:] == [UsageReport(expected), Finish("stop")]


A_CALL = item_done(0, call_item("a", "read", "{}"))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([text("a"), completed()], "stop"),
        ([completed()], "stop"),
        ([text("a"), A_CALL, completed()], "tool_calls"),
        ([text("a"), incomplete("max_output_tokens")], "length"),
        ([A_CALL, incomplete("max_output_tokens")], "length"),
        ([text("a"), incomplete("content_filter")], "refusal"),
        ([text("a"), incomplete("something new")], "length"),
        ([text("a"), incomplete(None)], "length"),
        ([refusal("I will"), refusal(" not."), completed()], "refusal"),
        ([refusal("No."), A_CALL, completed()], "refusal"),
    ],
)
async def test_each_way_of_ending_has_its_reason(steps: list[bytes], expected: str) -> None:
    events = await events_of(*steps)

    assert isinstance(events[-1], Finish)
    assert events[-1].reason == expected


async def test_a_refusal_is_shown() -> None:
    events = await events_of(refusal("I will"), refusal(" not."), completed())

    assert events == [TextDelta("I will"), TextDelta(" not."), Finish("refusal")]


async def test_tokens_of_an_answer_cut_short_are_counted() -> None:
    events = await events_of(text("a"), incomplete("max_output_tokens", usage(7, 16)))

    assert events[1:] == [UsageReport(Usage(7, 16)), Finish("length")]


async def test_nothing_behind_the_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_core.models.endpoint_model.TRAILING_LIMIT_S", 0.02)
    async with served(
        Reply([text("a"), completed(), Stall()]), api="responses", idle_limit_s=0
    ) as (model, double):
        events, error = await collect(model)
        await double.disconnected(0)

    assert (events, error) == ([TextDelta("a"), Finish("stop")], None)


# --- what is sent ---------------------------------------------------------------------------


async def test_a_request_says_everything_itself_and_has_nothing_kept() -> None:
    async with served(an_answer(text("ok")), api="responses") as (model, double):
        request = a_request(
            HI, system="Be brief.", tools=(READ,), effort="high", sampling={"top_p": 0.5}
        )
        await collect(model, request)

    assert double.paths == ["/v1/responses"]
    assert double.headers[0]["authorization"] == f"Bearer {KEY}"
    assert double.violations == []
    assert double.requests == [
        {
            "model": "any",
            "instructions": "Be brief.",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "hi"}],
                }
            ],
            "tools": [
                {
                    "type": "function",
                    "name": "read",
                    "description": "Read a file.",
                    "parameters": {"type": "object", "properties": {}},
                    "strict": False,
                }
            ],
            "stream": True,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "high", "summary": "auto"},
            "top_p": 0.5,
        }
    ]


@pytest.mark.parametrize(
    ("asked", "known", "sent"),
    [(None, None, None), (None, 9000, None), (500, 9000, 500), (1, None, 16)],
)
async def test_an_answer_is_held_to_its_limit_and_not_to_less_than_the_api_takes(
    asked: int | None, known: int | None, sent: int | None
) -> None:
    body = await sent_for(HI, max_output_tokens=asked, facts={"max_output_tokens": known})

    assert body.get("max_output_tokens") == sent


async def test_a_history_goes_out_in_the_order_in_which_it_happened() -> None:
    said = AssistantTurn(
        (TextPart("I look."), ToolCallPart("c2", "read", ""), ToolCallPart("c3", "read", "[oops"))
    )
    body = await sent_for(
        HI, CALLED, RESULT, said, ToolTurn("c2", "read", ""), ToolTurn("c3", "read", "no"), HI
    )

    hi = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    assert body["input"] == [
        hi,
        SEALED,
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "read",
            "arguments": '{"path":"a"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "text of a"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "call_id": "c2", "name": "read", "arguments": "{}"},
        {
            "type": "function_call",
            "call_id": "c3",
            "name": "read",
            "arguments": '{"malformed":"[oops"}',
        },
        {"type": "function_call_output", "call_id": "c2", "output": ""},
        {"type": "function_call_output", "call_id": "c3", "output": "no"},
        hi,
    ]


@pytest.mark.parametrize("name", ["functions.read", "", "lies\n東京", "x" * 200])
async def test_a_name_that_no_tool_has_does_not_spoil_the_history(name: str) -> None:
    call = AssistantTurn((ToolCallPart("c1", name, "{}"),))

    await sent_for(HI, call, ToolTurn("c1", name, "there is no such tool", is_error=True))


async def test_a_prompt_without_a_word_is_no_request_without_input() -> None:
    sent = await sent_for(UserTurn((Text(""),)))

    content = [{"type": "input_text", "text": "(no text)"}]
    assert sent["input"] == [{"type": "message", "role": "user", "content": content}]


async def test_thinking_goes_back_byte_for_byte_through_a_whole_turn() -> None:
    async def read(_context: Any) -> ToolOutput:
        return ToolOutput("text of a")

    async with (
        served(Reply(call_read("a")), Reply(last_words()), api="responses") as (model, double),
        runtime_for(model, [tool("read", read)]) as runtime,
    ):
        outcome = await (await runtime.create("/")).send("go").settled()

    assert outcome == Completed()
    assert double.violations == []
    kinds = [item["type"] for item in double.requests[1]["input"]]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert json.dumps(double.requests[1]["input"][1], sort_keys=True) == json.dumps(
        SEALED, sort_keys=True
    )


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param(ReasoningPart("hm", "anthropic:any", "c2lnbmF0dXJl"), id="signed thinking"),
        pytest.param(ReasoningPart("hm", "openai:other", OPAQUE), id="another model's seal"),
        pytest.param(ReasoningPart("hm"), id="thinking in clear"),
        pytest.param(ReasoningPart("hm", NAME, "c2lnbmF0dXJl"), id="the name meant another model"),
        pytest.param(ReasoningPart("hm", NAME, '{"type":"other"}'), id="and had other seals"),
    ],
)
async def test_thinking_of_other_models_stays_away(foreign: ReasoningPart) -> None:
    said = AssistantTurn((foreign, TextPart("I look."), ToolCallPart("c1", "read", "{}")))

    body = await sent_for(HI, said, RESULT)

    kinds = [item["type"] for item in body["input"]]
    assert kinds == ["message", "message", "function_call", "function_call_output"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((ReasoningPart("Whi"), TextPart("Let")), ["message"]),
        ((ReasoningPart("", NAME, OPAQUE), TextPart("Let")), ["reasoning", "message"]),
        ((TextPart("Let"), ReasoningPart("", NAME, OPAQUE)), ["message"]),
        ((ReasoningPart("", NAME, OPAQUE), TextPart("")), []),
        ((ReasoningPart("", NAME, OPAQUE),), []),
        ((ReasoningPart("Whi"),), []),
        ((), []),
    ],
)
async def test_what_an_interrupt_left_is_a_history_that_the_api_takes(
    said: tuple[Part, ...], expected: list[str]
) -> None:
    body = await sent_for(HI, AssistantTurn(said, interrupted=True), HI)

    assert [item["type"] for item in body["input"][1:-1]] == expected


PIXEL = "iVBORw0KGgo="
BLOCKS: tuple[Block, ...] = (
    Text("look"),
    Text(""),
    Image(PIXEL, "image/png"),
    Image(PIXEL, "image/svg+xml"),
    Resource("file:///a/b.pdf", blob="JVBERi0=", mime_type="application/pdf"),
    Resource("file:///a/b.bin", blob="AAAA", mime_type="application/octet-stream"),
    Resource("file:///a/b.txt", text="hello"),
    Link("file:///c", "c"),
)


async def test_images_and_pdf_files_go_to_a_model_that_takes_them() -> None:
    body = await sent_for(UserTurn(BLOCKS), facts={"takes_files": True})

    assert body["input"][0]["content"] == [
        {"type": "input_text", "text": "look"},
        {
            "type": "input_image",
            "image_url": f"data:image/png;base64,{PIXEL}",
            "detail": "auto",
        },
        {"type": "input_text", "text": "[image/svg+xml: inline]"},
        {
            "type": "input_file",
            "filename": "b.pdf",
            "file_data": "data:application/pdf;base64,JVBERi0=",
        },
        {"type": "input_text", "text": "[application/octet-stream: file:///a/b.bin]"},
        {"type": "input_text", "text": "<resource uri='file:///a/b.txt'>\nhello\n</resource>"},
        {"type": "input_text", "text": "[c](file:///c)"},
    ]


async def test_a_model_that_takes_neither_is_told_of_them() -> None:
    body = await sent_for(UserTurn(BLOCKS), facts={"takes_images": False})

    texts = [part["text"] for part in body["input"][0]["content"]]
    assert texts[1:4] == [
        "[image/png: inline]",
        "[image/svg+xml: inline]",
        "[application/pdf: file:///a/b.pdf]",
    ]


# --- what the API will not have ---------------------------------------------------------------

UNVERIFIED = {
    "message": "Your organization must be verified to generate reasoning summaries.",
    "type": "invalid_request_error",
    "param": "reasoning.summary",
    "code": "unsupported_value",
}
UNSEALED = {
    "message": "Encrypted content is not supported with this model.",
    "type": "invalid_request_error",
    "param": "include",
    "code": None,
}
NOT_OURS = {
    "message": "The encrypted content gAAA could not be verified.",
    "type": "invalid_request_error",
    "param": None,
    "code": "invalid_encrypted_content",
}


@pytest.mark.parametrize(("refused", "missing"), [(UNVERIFIED, "summary"), (UNSEALED, "include")])
async def test_what_the_api_will_not_have_is_left_out_from_then_on(
    refused: dict[str, Any], missing: str
) -> None:
    script = (status(400, refused), an_answer(text("a")), an_answer(text("b")))
    async with served(*script, api="responses") as (model, double):
        first, error = await collect(model, a_request(effort="low"))
        second, _ = await collect(model, a_request(effort="low"))

    assert error is None
    assert (first[0], second[0]) == (TextDelta("a"), TextDelta("b"))
    assert double.violations == []
    has_it = [missing in body or missing in body["reasoning"] for body in double.requests]
    assert has_it == [True, False, False]
    assert double.requests[2]["reasoning"]["effort"] == "low"


async def test_thinking_that_the_key_cannot_unseal_is_given_up_and_new_thinking_is_not() -> None:
    script = (status(400, NOT_OURS), Reply(call_read("a")), an_answer(text("ok")))
    async with served(*script, api="responses") as (model, double):
        events, error = await collect(model, a_request(HI, CALLED, RESULT))
        reply = Collected()
        for each in events:
            reply.add(each)
        later = AssistantTurn(reply.content("call"))
        result = ToolTurn("call_1", "read", "text of a")
        await collect(model, a_request(HI, CALLED, RESULT, later, result))

    assert error is None
    assert double.violations == []
    n_thoughts = [
        sum(item["type"] == "reasoning" for item in body["input"]) for body in double.requests
    ]
    assert n_thoughts == [1, 0, 1]


async def test_two_calls_at_once_both_learn_from_their_refusals() -> None:
    gates = [Gate(), Gate()]
    refusals = [
        Reply([gate, json.dumps({"error": UNVERIFIED}).encode()], code=400) for gate in gates
    ]
    results: list[tuple[list[ModelEvent], Exception | None]] = []
    async with served(*refusals, an_answer(text("a")), an_answer(text("a")), api="responses") as (
        model,
        double,
    ):

        async def call() -> None:
            results.append(await collect(model, a_request(effort="low")))

        async with anyio.create_task_group() as tasks:
            for gate in gates:
                tasks.start_soon(call)
                await gate.reached.wait()
            for gate in gates:
                gate.opened.set()

    assert results == [([TextDelta("a"), Finish("stop")], None)] * 2
    assert len(double.requests) == 4


@pytest.mark.parametrize("refused", [UNVERIFIED, UNSEALED, NOT_OURS])
async def test_a_request_that_is_refused_for_the_same_again_fails(refused: dict[str, Any]) -> None:
    error = await failure_of(*[status(400, refused)] * 2, api="responses")

    assert error.code == "BAD_REQUEST"
    assert refused["message"] in error.message


async def test_any_other_refusal_fails_at_once() -> None:
    error = await failure_of(
        status(400, {"message": "Invalid type for 'input[0]'."}), api="responses"
    )

    assert error.code == "BAD_REQUEST"


# --- failures -------------------------------------------------------------------------------

TOO_LONG = "Your input exceeds the context window of this model."


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (status(401, {"message": f"Incorrect API key: {KEY}", "code": "invalid_api_key"}), "AUTH"),
        (status(404, {"message": "no", "code": "model_not_found"}), "MODEL_NOT_FOUND"),
        (status(429, {"message": "slow", "code": "rate_limit_exceeded"}), "RATE_LIMIT"),
        (status(429, {"message": "pay", "code": "insufficient_quota"}), "BAD_REQUEST"),
        (status(400, {"message": TOO_LONG, "code": "context_length_exceeded"}), "CONTEXT_TOO_LONG"),
        (status(500, {"message": "oops", "type": "server_error"}), "SERVER"),
        (status(503), "OVERLOADED"),
        (Reply([failed("context_length_exceeded", TOO_LONG)]), "CONTEXT_TOO_LONG"),
        (Reply([failed("rate_limit_exceeded")]), "RATE_LIMIT"),
        (Reply([failed("server_error")]), "SERVER"),
        (Reply([failed("server_is_overloaded")]), "OVERLOADED"),
        (Reply([failed("insufficient_quota")]), "BAD_REQUEST"),
        (Reply([failed("invalid_prompt")]), "BAD_REQUEST"),
        (Reply([failed(None)]), "SERVER"),
        (Reply([text("a"), double_of.error("rate_limit_exceeded")]), "RATE_LIMIT"),
        (Reply([text("a"), double_of.error("server_error")]), "SERVER"),
        (Reply([text("a"), double_of.error(None)]), "SERVER"),
        (Reply([text("a"), event("error", error={"code": "slow_down"})]), "OVERLOADED"),
        (Reply([text("a"), event("error", error={"type": "server_error"})]), "SERVER"),
        (Reply([b'data: {"type": "response.output_text.delta", "delta": 1}\n\n']), "PROTOCOL"),
        (Reply([b'data: {"type": "response.completed"}\n\n']), "PROTOCOL"),
        (Reply([b"data: [1]\n\n"]), "PROTOCOL"),
        (Reply([b"data: {nonsense\n\n"]), "PROTOCOL"),
        (Reply([b"<html>hello</html>"], content_type="text/html"), "PROTOCOL"),
    ],
)
async def test_each_failure_has_one_code(reply: Reply, expected: str) -> None:
    assert (await failure_of(reply, api="responses")).code == expected


@pytest.mark.parametrize(
    "said",
    [
        failed("server_error", "The server had an error."),
        double_of.error("server_error", "The server had an error."),
        event("error", error={"code": "server_error", "message": "The server had an error."}),
    ],
)
async def test_the_words_of_a_failure_in_the_stream_reach_the_person(said: bytes) -> None:
    error = await failure_of(Reply([said]), api="responses")

    assert "The server had an error." in error.message


async def test_a_rate_limit_says_how_long_to_wait() -> None:
    error = await failure_of(
        status(429, {"message": "slow"}, headers={"Retry-After": "7"}), api="responses"
    )

    assert (error.code, error.retry_after_s) == ("RATE_LIMIT", 7.0)


@pytest.mark.requirement("B149", "B150")
@pytest.mark.parametrize("end", [(), (Drop(),), (Drop(reset=True),)])
@pytest.mark.parametrize("n", range(len(call_read("a"))))
async def test_an_answer_that_breaks_off_anywhere_is_no_answer_and_no_call_runs(
    n: int, end: tuple[Step, ...]
) -> None:
    ran: list[object] = []

    async def read(context: Any) -> ToolOutput:
        ran.append(context)
        return ToolOutput("ok")

    script = (Reply([*call_read("a")[:n], *end]), Reply(last_words()))
    async with (
        served(*script, api="responses") as (model, double),
        runtime_for(model, [tool("read", read, does="execute")]) as runtime,
    ):
        agent = await runtime.create("/")
        outcome = await agent.send("go").settled()
        later = await agent.send("and now?").settled()

    assert isinstance(outcome, Failed)
    assert outcome.code == "TRANSPORT"
    assert ran == []
    assert later == Completed()
    assert double.violations == []


# --- limits and aborts ----------------------------------------------------------------------


@pytest.mark.requirement("B147")
@pytest.mark.parametrize("n", [-1, *range(len(call_read("a")))])
async def test_a_silent_stall_anywhere_ends_at_the_idle_limit(n: int) -> None:
    reply = Reply([*call_read("a")[: max(n, 0)], comment(), Stall()])
    if n < 0:
        reply = Reply(before=[Stall()])
    async with served(reply, api="responses", idle_limit_s=0.2) as (model, double):
        _, error = await collect(model)
        await double.disconnected(0)

    assert isinstance(error, ModelError)
    assert error.code == "TIMEOUT"


@pytest.mark.requirement("R34", "B028", "B029")
@pytest.mark.parametrize("n", [-1, *range(len(call_read("a")))])
async def test_a_cancel_in_a_stall_anywhere_closes_the_socket(n: int) -> None:
    gate, controller = Gate(), AbortController()
    reply = Reply(before=[gate]) if n < 0 else Reply([*call_read("a")[:n], gate])
    async with served(reply, Reply(last_words()), api="responses") as (model, double):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort_at, gate, controller)
            _, error = await collect(model, a_request(controller=controller))
        await double.disconnected(0)
        later, _ = await collect(model)

    assert isinstance(error, TurnAborted)
    assert later[-1] == Finish("stop")
    assert double.violations == []


@pytest.mark.requirement("R34")
async def test_a_cancel_between_two_events_ends_the_stream() -> None:
    controller = AbortController()
    async with (
        served(Reply([text("a"), text("b"), Stall()]), api="responses") as (model, double),
        aclosing(model.stream(a_request(controller=controller))) as stream,
    ):
        assert await anext(stream) == TextDelta("a")
        controller.abort(USER)
        with pytest.raises(TurnAborted):
            await anext(stream)
        await double.disconnected(0)


# --- any history ----------------------------------------------------------------------------

words = st.text(max_size=12)
mime_types = st.sampled_from(("image/png", "image/bmp", "application/pdf", "text/plain", ""))
blocks = st.one_of(
    st.builds(Text, words),
    st.builds(Image, st.just(PIXEL), mime_types),
    st.builds(Link, words, words),
    st.builds(Resource, words, st.none() | words, st.none() | st.just(PIXEL), mime_types),
)
sealed_parts = st.builds(
    lambda value, id, text: ReasoningPart(text, NAME, json.dumps(reasoning_item(value, id=id))),
    words,
    words,
    words,
)
foreign_parts = st.builds(ReasoningPart, words, st.sampled_from(("", NAME, "other:m")), words)
said_parts = st.lists(st.one_of(st.builds(TextPart, words), sealed_parts, foreign_parts))


@st.composite
def histories(draw: st.DrawFn) -> tuple[Message, ...]:
    """Any history that the loop makes: calls have ids of ours and exactly one result each."""
    history: list[Message] = [HI]
    for step in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            history.append(UserTurn(tuple(draw(st.lists(blocks, max_size=3)))))
        said = tuple(draw(said_parts))
        if draw(st.booleans()):
            history.append(AssistantTurn(said, interrupted=True))
            continue
        calls = tuple(
            ToolCallPart(f"call_1_{step}_{n}", draw(words), draw(st.just('{"a":1}') | words))
            for n in range(draw(st.integers(0, 3)))
        )
        history.append(AssistantTurn((*said, *calls)))
        history += [ToolTurn(call.id, call.name, draw(words)) for call in calls]
    return tuple(history)


@settings(deadline=None, database=None, suppress_health_check=[*HealthCheck])
@given(
    histories(),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(1, 10_000),
    st.none() | st.sampled_from(("minimal", "high")),
    st.lists(st.sampled_from(("reasoning.summary", "'include'", "encrypted_content")), max_size=2),
)
def test_any_history_is_one_that_the_api_takes(
    history: tuple[Message, ...],
    takes_images: bool,
    takes_files: bool,
    limit: int | None,
    effort: str | None,
    refusals: list[str],
) -> None:
    info = ModelInfo(NAME, takes_images=takes_images, takes_files=takes_files)
    dialect = Responses(info, "any")
    for words_of_refusal in refusals:
        dialect.amend(words_of_refusal, set(), {})
    request = a_request(*history, tools=(READ,), effort=effort, max_output_tokens=limit)

    body = json.loads(json.dumps(dialect.body(request)))

    assert violations(body) == []


# --- the double -----------------------------------------------------------------------------

TAMPERED = SEALED | {"summary": [{"type": "summary_text", "text": "Other"}]}
A_RESULT = {"type": "function_call_output", "call_id": "c1", "output": ""}
ASKED = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}


def said(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": list(content)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"store": True}, "stored"),
        ({"max_output_tokens": 15}, "max_output_tokens"),
        ({"messages": []}, "unknown parameter"),
        ({"input": []}, "no input"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"tools": [{"type": "function", "function": {"name": "read"}}]}, "malformed tool"),
        ({"input": [ASKED]}, "no output for"),
        ({"input": [A_RESULT]}, "nobody owes"),
        ({"input": [A_RESULT, ASKED]}, "nobody owes"),
        ({"input": [ASKED, A_RESULT, A_RESULT]}, "nobody owes"),
        ({"input": [ASKED, ASKED, A_RESULT]}, "another call"),
        ({"input": [ASKED | {"call_id": ""}, A_RESULT | {"call_id": ""}]}, "call_id"),
        ({"input": [ASKED | {"arguments": "[]"}, A_RESULT]}, "arguments"),
        ({"input": [ASKED | {"name": "a.b"}, A_RESULT]}, "name"),
        ({"input": [SEALED]}, "what it led to"),
        ({"input": [SEALED, said("user", {"type": "input_text", "text": "a"})]}, "what it led to"),
        ({"input": [TAMPERED, ASKED, A_RESULT]}, "not issued"),
        ({"input": [SEALED | {"status": None}, ASKED, A_RESULT]}, "fields"),
        ({"input": [said("tool", {"type": "input_text", "text": "a"})]}, "role"),
        ({"input": [said("user")]}, "empty"),
        ({"input": [said("user", {"type": "input_text", "text": ""})]}, "input_text"),
        ({"input": [said("assistant", {"type": "input_text", "text": "a"})]}, "input_text"),
        ({"input": [said("user", {"type": "input_image", "image_url": "x"})]}, "input_image"),
    ],
)
def test_the_double_refuses_what_the_api_refuses(change: dict[str, Any], expected: str) -> None:
    whole = {
        "model": "any",
        "store": False,
        "stream": True,
        "input": [said("user", {"type": "input_text", "text": "hi"}), SEALED, ASKED, A_RESULT],
    }
    assert violations(whole) == []

    found = violations(whole | change)

    assert any(expected in wrong for wrong in found), found
