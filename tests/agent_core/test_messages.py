from __future__ import annotations

import copy
from typing import Any

import anyio
import msgspec
import pytest
from core_rig import answer_ok, runtime_for, tool
from hypothesis import given
from hypothesis import strategies as st
from model_rig import HI, KEY, a_model, a_request, abort_at, collect, failure_of, served

from agent_core.cancellation import AbortController, TurnAborted
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
from agent_core.models.messages import Messages
from agent_core.tools.tool import ToolOutput
from conformance.providers.messages import (
    block_delta,
    block_start,
    block_stop,
    call_read,
    delta_end,
    error_event,
    event,
    last_words,
    message,
    ping,
    redacted,
    signature_of,
    start,
    stop,
    text,
    thinking,
    tool_use,
    violations,
)
from conformance.providers.server import Drip, Drop, Gate, Repeat, Reply, Stall, Step, status

ORIGIN = "anthropic:any"
READ = ToolSpec("read", "Read a file.", {"type": "object", "properties": {}})
CALL = ToolCallPart("call_1_1_1", "read", '{"path":"a"}')
RESULT = ToolTurn("call_1_1_1", "read", "text of a")
EPHEMERAL = {"type": "ephemeral"}


def sealed(thought: str) -> ReasoningPart:
    opaque = msgspec.json.encode({"signature": signature_of(thought)}).decode()
    return ReasoningPart(thought, ORIGIN, opaque)


def hidden() -> ReasoningPart:
    data = msgspec.json.decode(redacted(0)[0].split(b"data: ")[1])["content_block"]["data"]
    return ReasoningPart("", ORIGIN, msgspec.json.encode({"redacted": data}).decode())


async def events_of(*steps: Step) -> list[ModelEvent]:
    async with served(Reply(steps), api="anthropic") as (model, double):
        events, error = await collect(model)
    assert error is None
    assert double.violations == []
    return [event for event in events if not isinstance(event, UsageReport)]


async def sent_for(*messages: Message, facts: Any = None, **fields: Any) -> dict[str, Any]:
    async with served(Reply(last_words()), api="anthropic", facts=facts) as (model, double):
        _, error = await collect(model, a_request(*messages, **fields))
    assert error is None
    assert double.violations == []
    return double.requests[0]


def plain(wire: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the turns that were sent as pairs, without marks for the cache."""
    wire = copy.deepcopy(wire)
    for turn in wire:
        for block in turn["content"]:
            block.pop("cache_control", None)
    return [(turn["role"], turn["content"]) for turn in wire]


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


USED = {"type": "tool_use", "id": "call_1_1_1", "name": "read", "input": {"path": "a"}}
GOT = {"type": "tool_result", "tool_use_id": "call_1_1_1", "content": "text of a"}


# --- what is streamed -----------------------------------------------------------------------


async def test_text_arrives_piece_by_piece_and_ends_with_a_finish() -> None:
    events = await events_of(*message(text(0, "Hel", "", "lo")))

    assert events == [TextDelta("Hel"), TextDelta("lo"), Finish("stop")]


async def test_thinking_ends_with_what_only_its_model_can_read() -> None:
    events = await events_of(*message(thinking(0, "h", "m"), redacted(1), text(2, "so")))

    assert events == [
        ReasoningDelta("h"),
        ReasoningDelta("m"),
        ReasoningDelta("", ORIGIN, sealed("hm").opaque),
        ReasoningDelta("", ORIGIN, hidden().opaque),
        TextDelta("so"),
        Finish("stop"),
    ]


async def test_thinking_that_is_not_signed_yet_has_nothing_to_go_back_with() -> None:
    unsigned = [block_start(0, type="thinking", thinking="h"), block_stop(0)]

    events = await events_of(*message(unsigned, text(1, "a")))

    assert events == [ReasoningDelta("h"), TextDelta("a"), Finish("stop")]


async def test_parallel_tool_calls_are_told_apart_by_their_blocks() -> None:
    first, second = tool_use(1, "read", '{"path":', '"x"}'), tool_use(3, "list", id="toolu_2")
    interleaved = [first[0], second[0], *first[1:3], *second[1:], first[-1]]

    events = await events_of(*message(text(0, "a"), interleaved, reason="tool_use"))

    assert events == [
        TextDelta("a"),
        ToolCallDelta(0, "read", ""),
        ToolCallDelta(1, "list", ""),
        ToolCallDelta(0, "", '{"path":'),
        ToolCallDelta(0, "", '"x"}'),
        ToolCallDelta(1, "", "{}"),
        Finish("tool_calls"),
    ]


async def test_arguments_that_come_whole_with_their_call_are_kept() -> None:
    whole = [block_start(0, type="tool_use", id="t", name="read", input={"n": 1}), block_stop(0)]

    events = await events_of(*message(whole, reason="tool_use"))

    assert events[1] == ToolCallDelta(0, "", '{"n":1}')


async def test_what_may_be_invented_yet_is_passed_over() -> None:
    odd = [
        block_start(0, type="hologram", text={"depth": 3}, name=7),
        block_delta(0, "hologram_delta", text=[1]),
        block_delta(0, "citations_delta", citation={}),
        block_delta(9, "signature_delta", signature="s"),
        block_delta(9, "input_json_delta", partial_json="{"),
        block_stop(0),
        event("message_fold", index=1),
        ping(),
    ]

    events = await events_of(*message(odd, text(1, "a")))

    assert events == [TextDelta("a"), Finish("stop")]


async def test_characters_may_be_cut_apart_by_packets() -> None:
    pieces = [Drip(step) for step in message(text(0, "naïve 東京 🦊"))]

    assert await events_of(*pieces) == [TextDelta("naïve 東京 🦊"), Finish("stop")]


@pytest.mark.requirement("B152")
async def test_tokens_that_the_cache_had_or_took_are_counted_as_input() -> None:
    counts: Any = {"output_tokens_details": {"thinking_tokens": 4}, "input_tokens": 12}
    head = start(input=10, cached=100, written=30)
    async with served(
        Reply([head, *text(0, "a"), delta_end(output=7, **counts), stop()]), api="anthropic"
    ) as (model, _):
        events, _ = await collect(model)

    assert events == [
        UsageReport(Usage(140, 1, cached_tokens=100, cache_write_tokens=30)),
        TextDelta("a"),
        UsageReport(Usage(142, 7, 100, 4, 30)),
        Finish("stop"),
    ]


@pytest.mark.requirement("B034")
@pytest.mark.parametrize(
    ("wire", "blocks", "expected"),
    [
        ("end_turn", [text(0, "a")], "stop"),
        ("stop_sequence", [text(0, "a")], "stop"),
        ("pause_turn", [text(0, "a")], "stop"),
        ("whatever_else", [text(0, "a")], "stop"),
        ("tool_use", [tool_use(0, "read", "{}")], "tool_calls"),
        ("end_turn", [tool_use(0, "read", "{}")], "tool_calls"),
        ("max_tokens", [text(0, "a")], "length"),
        ("max_tokens", [tool_use(0, "read", "{")], "length"),
        ("model_context_window_exceeded", [text(0, "a")], "length"),
        ("refusal", [], "refusal"),
    ],
)
async def test_each_stop_reason_has_one_meaning(
    wire: str, blocks: list[list[bytes]], expected: str
) -> None:
    events = await events_of(*message(*blocks, reason=wire))

    assert events[-1] == Finish(expected)  # type: ignore[arg-type]


async def test_an_answer_is_complete_with_its_reason_whatever_follows() -> None:
    late = error_event("api_error", "late")
    for rest in (Drop(), Drop(reset=True), b"event: x\ndata: {nonsense\n\n", late):
        events = await events_of(start(), *text(0, "a"), delta_end(), rest)
        assert events == [TextDelta("a"), Finish("stop")]


# --- what is sent ---------------------------------------------------------------------------


async def test_the_request_carries_model_limit_tools_system_and_key() -> None:
    async with served(Reply(last_words()), api="anthropic", headers={"x-title": "t"}) as (
        model,
        double,
    ):
        await collect(
            model, a_request(system="be kind", tools=(READ, READ), sampling={"temperature": 0.5})
        )

    tool = {"name": "read", "description": "Read a file.", "input_schema": READ.parameters}
    assert double.paths == ["/v1/messages"]
    assert double.requests[0] == {
        "model": "any",
        "max_tokens": 32_000,
        "stream": True,
        "system": [{"type": "text", "text": "be kind", "cache_control": EPHEMERAL}],
        "messages": [
            {"role": "user", "content": [{**said("hi"), "cache_control": EPHEMERAL}]},
        ],
        "tools": [tool, {**tool, "cache_control": EPHEMERAL}],
        "temperature": 0.5,
    }
    assert "authorization" not in double.headers[0]
    assert double.headers[0]["x-api-key"] == KEY
    assert "anthropic-version" in double.headers[0]
    assert double.headers[0]["x-title"] == "t"


@pytest.mark.requirement("B061", "B065")
async def test_a_conversation_is_sent_in_turns_that_alternate() -> None:
    sent = await sent_for(
        HI,
        AssistantTurn((TextPart("  "), TextPart("I look. \n"), CALL)),
        RESULT,
        UserTurn((Text("be quick"),)),
        AssistantTurn((ReasoningPart("only thought"),), interrupted=True),
        UserTurn((Text(" "), Text("go on"))),
        AssistantTurn((TextPart("al"), TextPart("pha ")), interrupted=True),
        UserTurn((Text(" \n"),)),
    )

    assert plain(sent["messages"]) == [
        ("user", [said("hi")]),
        ("assistant", [said("I look. \n"), USED]),
        ("user", [GOT, said("be quick"), said("go on")]),
        ("assistant", [said("al"), said("pha")]),
        ("user", [said("(no text)")]),
    ]


async def test_results_come_first_and_steering_behind_them() -> None:
    other = ToolCallPart("call_1_1_2", "read", "{}")
    sent = await sent_for(
        HI,
        AssistantTurn((CALL, other)),
        RESULT,
        UserTurn((Text("steered"),)),
        ToolTurn("call_1_1_2", "read", " \n", is_error=True),
    )

    assert plain(sent["messages"])[2] == (
        "user",
        [
            GOT,
            {
                "type": "tool_result",
                "tool_use_id": "call_1_1_2",
                "content": "(no output)",
                "is_error": True,
            },
            said("steered"),
        ],
    )


async def test_a_history_that_begins_with_the_model_gets_a_user_before_it() -> None:
    sent = await sent_for(AssistantTurn((TextPart("hello"),)), HI)

    assert [role for role, _ in plain(sent["messages"])] == ["user", "assistant", "user"]


async def test_a_history_that_says_nothing_is_still_a_request() -> None:
    sent = await sent_for(AssistantTurn((ReasoningPart("hm"),)))

    assert plain(sent["messages"]) == [("user", [said("(no text)")])]


async def test_a_final_message_of_the_model_has_no_white_space_behind_it() -> None:
    sent = await sent_for(HI, AssistantTurn((TextPart("and then \n"),)))

    assert plain(sent["messages"])[1] == ("assistant", [said("and then")])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {}),
        ('{"a"', {"malformed": '{"a"'}),
        ("[1]", {"malformed": "[1]"}),
        ('{"n":1}', {"n": 1}),
    ],
)
async def test_broken_arguments_do_not_poison_the_history(
    written: str, expected: dict[str, Any]
) -> None:
    sent = await sent_for(HI, AssistantTurn((ToolCallPart("call_1_1_1", "read", written),)), RESULT)

    assert sent["messages"][1]["content"][0]["input"] == expected


@pytest.mark.parametrize(
    ("called", "expected"),
    [("fs.read file", "fs_read_file"), ("", "unknown"), ("r" * 200, "r" * 128)],
)
async def test_a_call_of_what_no_tool_can_be_named_is_sent_under_another_name(
    called: str, expected: str
) -> None:
    sent = await sent_for(HI, AssistantTurn((ToolCallPart("call_1_1_1", called, "{}"),)), RESULT)

    assert sent["messages"][1]["content"][0]["name"] == expected


IMAGE = Image("aW1n", "image/png")
PDF = Resource("file:///a.pdf", blob="cGRm", mime_type="application/pdf")


async def test_images_and_pdfs_go_to_models_that_take_them() -> None:
    prompt = UserTurn(
        (
            IMAGE,
            PDF,
            Image("c3Zn", "image/svg+xml"),
            Resource("file:///a.zip", blob="emlw", mime_type="application/zip"),
            Resource("file:///a.txt", text="words", mime_type="text/plain"),
            Link("file:///b", "b"),
        )
    )

    sent = await sent_for(prompt, facts={"takes_files": True})

    assert plain(sent["messages"])[0][1] == [
        {"type": "image", "source": source("image/png", "aW1n")},
        {"type": "document", "source": source("application/pdf", "cGRm")},
        said("[image/svg+xml: inline]"),
        said("[application/zip: file:///a.zip]"),
        said("<resource uri='file:///a.txt'>\nwords\n</resource>"),
        said("[b](file:///b)"),
    ]


def source(mime_type: str, data: str) -> dict[str, str]:
    return {"type": "base64", "media_type": mime_type, "data": data}


async def test_images_and_pdfs_are_named_to_models_that_do_not_take_them() -> None:
    sent = await sent_for(UserTurn((IMAGE, PDF)), facts={"takes_images": False})

    assert plain(sent["messages"])[0][1] == [
        said("[image/png: inline]"),
        said("[application/pdf: file:///a.pdf]"),
    ]


@pytest.mark.parametrize(
    ("of_request", "of_model", "expected"),
    [(None, None, 32_000), (None, 64_000, 64_000), (1, 64_000, 1)],
)
async def test_the_limit_is_the_requests_else_the_models_else_ours(
    of_request: int | None, of_model: int | None, expected: int
) -> None:
    sent = await sent_for(
        HI, facts={"max_output_tokens": of_model}, max_output_tokens=of_request, effort="high"
    )

    assert sent["max_tokens"] == expected


async def test_a_smaller_limit_of_the_model_is_learnt_from_its_refusal() -> None:
    words = "max_tokens: 32000 > 8192, which is the maximum allowed number of output tokens for any"
    async with served(*refusing(words), api="anthropic") as (model, double):
        assert (await collect(model))[1] is None
        await collect(model, a_request(max_output_tokens=9000))

    assert [request["max_tokens"] for request in double.requests] == [32_000, 8192, 8192]


def refusing(*words: str) -> list[Reply]:
    """One refusal for each of `words`, then two answers."""
    errors = [status(400, {"type": "invalid_request_error", "message": each}) for each in words]
    return [*errors, Reply(last_words()), Reply(last_words())]


# --- thinking -------------------------------------------------------------------------------

ADAPTIVE = {"type": "adaptive", "display": "summarized"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": signature_of("hm")}


def body_of(id: str, *messages: Message, limit: int | None = None, **fields: Any) -> dict[str, Any]:
    info = ModelInfo(ORIGIN, max_output_tokens=limit)
    body = Messages(info, id).body(a_request(*messages, **fields))
    assert violations(body) == []
    return body


@pytest.mark.parametrize(
    "id", ["claude-opus-4-6", "claude-sonnet-5-5", "claude-opus-4-10-20271231", "any", "glm-5"]
)
def test_newer_models_are_told_a_word(id: str) -> None:
    body = body_of(id, effort="low")

    assert (body["thinking"], body["output_config"]) == (ADAPTIVE, {"effort": "low"})


@pytest.mark.parametrize(
    "id",
    [
        "claude-3-7-sonnet-20250219",
        "claude-sonnet-4-20250514",
        "claude-haiku-4-5",
        "anthropic/claude-opus-4.1",
        "us.anthropic.claude-opus-4-5-20251101-v1:0",
    ],
)
def test_older_models_are_given_a_budget(id: str) -> None:
    body = body_of(id, effort="low")

    assert body["thinking"] == {"type": "enabled", "budget_tokens": 4000, "display": "summarized"}
    assert "output_config" not in body


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max", "odd"])
@pytest.mark.parametrize("limit", [1, 1024, 1364, 1365, 8192, 64_000, None])
def test_a_budget_leaves_room_for_the_answer_or_is_not_given(
    effort: str, limit: int | None
) -> None:
    body = body_of("claude-haiku-4-5", effort=effort, limit=limit)

    assert ("thinking" in body) == (limit is None or limit >= 1365)


def test_no_effort_leaves_thinking_to_the_model_and_none_is_none() -> None:
    assert "thinking" not in body_of("claude-opus-5")
    assert body_of("claude-opus-5", effort="none")["thinking"] == {"type": "disabled"}


@pytest.mark.requirement("B066")
async def test_signed_and_redacted_thinking_goes_back_byte_for_byte() -> None:
    first = message(
        thinking(0, "I ", "müss\n "), redacted(1), tool_use(2, "act", "{}"), reason="tool_use"
    )
    async with (
        served(Reply(first), Reply(last_words()), api="anthropic") as (model, double),
        runtime_for(model, [tool("act", answer_ok)]) as runtime,
    ):
        outcome = await (await runtime.create("/")).send("go").settled()

    thought = "I müss\n "
    assert outcome == Completed()
    assert double.violations == []
    assert double.requests[1]["messages"][1]["content"][:2] == [
        {"type": "thinking", "thinking": thought, "signature": signature_of(thought)},
        {"type": "redacted_thinking", "data": msgspec.json.decode(hidden().opaque)["redacted"]},
    ]


async def test_thinking_that_others_did_or_nobody_signed_stays_here() -> None:
    sent = await sent_for(
        HI,
        AssistantTurn(
            (
                ReasoningPart("plain"),
                ReasoningPart("x", "openai:o9", '{"id":"rs_1"}'),
                ReasoningPart("y", ORIGIN, "not json"),
                ReasoningPart("z", ORIGIN, '{"id":"rs_1"}'),
                ReasoningPart("interrupted", ORIGIN),
                CALL,
            )
        ),
        RESULT,
        effort="high",
    )

    assert plain(sent["messages"])[1] == ("assistant", [USED])
    assert sent["thinking"] == ADAPTIVE


async def test_thinking_is_never_the_last_that_the_model_said() -> None:
    sent = await sent_for(
        HI, AssistantTurn((TextPart("so "), sealed("hm"), hidden()), interrupted=True), HI
    )

    assert plain(sent["messages"])[1] == ("assistant", [said("so")])


async def test_thinking_behind_a_call_goes_before_it() -> None:
    sent = await sent_for(HI, AssistantTurn((CALL, sealed("hm"))), RESULT)

    assert plain(sent["messages"])[1] == ("assistant", [THOUGHT, USED])


def test_thinking_by_budget_waits_for_the_end_of_a_loop_that_began_without() -> None:
    without = (HI, AssistantTurn((TextPart("I look"), CALL)), RESULT)
    within = (HI, AssistantTurn((sealed("hm"), CALL)), RESULT)

    assert "thinking" not in body_of("claude-haiku-4-5", *without, effort="high")
    assert "thinking" in body_of("claude-haiku-4-5", *within, effort="high")
    assert "thinking" in body_of(
        "claude-haiku-4-5", *without, AssistantTurn((TextPart("so"),)), HI, effort="high"
    )


ADAPTIVE_REFUSALS = [
    "adaptive thinking is not supported on this model",
    "thinking: Input tag 'adaptive' found using 'type' does not match any of the expected tags:"
    " 'disabled', 'enabled'",
    "output_config: Extra inputs are not permitted",
    "This model does not support the effort parameter.",
]


@pytest.mark.parametrize("words", ADAPTIVE_REFUSALS)
async def test_a_model_that_refuses_a_word_is_given_a_budget_from_then_on(words: str) -> None:
    async with served(*refusing(words), api="anthropic") as (model, double):
        assert (await collect(model, a_request(effort="low")))[1] is None
        await collect(model, a_request(effort="low"))

    assert double.violations == []
    assert [request["thinking"]["type"] for request in double.requests] == [
        "adaptive",
        "enabled",
        "enabled",
    ]


def test_a_model_that_refuses_a_budget_is_told_a_word_from_then_on() -> None:
    dialect = Messages(ModelInfo(ORIGIN), "claude-opus-4-5")
    refusal = (
        '"thinking.type.enabled" is not supported for this model. Use "thinking.type.adaptive"'
        ' and "output_config.effort" to control thinking behavior.'
    )

    assert dialect.amend(str({"error": {"message": refusal}}), set(), {})
    assert dialect.body(a_request(effort="low"))["thinking"] == ADAPTIVE


async def test_a_model_that_refuses_both_forms_is_asked_twice() -> None:
    words = ("adaptive thinking is not supported on this model", "adaptive: no")

    failure = await refusal_of(*words)

    assert failure.code == "BAD_REQUEST"


async def refusal_of(*words: str) -> ModelError:
    async with served(*refusing(*words)[: len(words)], api="anthropic") as (model, double):
        _, error = await collect(model, a_request(effort="low"))
    assert double.violations == []
    assert isinstance(error, ModelError)
    return error


async def test_a_word_that_the_model_does_not_know_is_said_in_its_own_words() -> None:
    words = "output_config.effort: Input should be 'low', 'medium' or 'high'"

    assert words in (await refusal_of(words)).message


async def test_two_requests_that_are_refused_at_once_learn_the_same() -> None:
    dialect = Messages(ModelInfo(ORIGIN), "any")

    assert dialect.amend(ADAPTIVE_REFUSALS[0], set(), {})
    assert dialect.amend(ADAPTIVE_REFUSALS[0], set(), {})
    assert dialect.body(a_request(effort="low"))["thinking"]["type"] == "enabled"


async def test_a_refused_signature_or_display_is_left_out_from_then_on() -> None:
    refusals = refusing(
        "messages.1.content.0: Invalid `signature` in `thinking` block",
        "thinking.adaptive.display: Extra inputs are not permitted",
    )
    history = (HI, AssistantTurn((sealed("hm"), CALL)), RESULT)
    async with served(*refusals, api="anthropic") as (model, double):
        _, error = await collect(model, a_request(*history, effort="low"))

    first, _, last = double.requests
    assert error is None
    assert double.violations == []
    assert plain(first["messages"])[1] == ("assistant", [THOUGHT, USED])
    assert plain(last["messages"])[1] == ("assistant", [USED])
    assert last["thinking"] == {"type": "adaptive"}


# --- any history ----------------------------------------------------------------------------

WORDS = st.sampled_from(["", " ", "\n\t", "a", "b \n", " c", "\u00a0", "é "])
THOUGHTS = st.one_of(
    WORDS.map(sealed),
    st.just(hidden()),
    WORDS.map(ReasoningPart),
    st.builds(ReasoningPart, WORDS, st.just(ORIGIN), st.sampled_from(["", "x", "{}"])),
    st.builds(ReasoningPart, WORDS, st.just("openai:o9"), st.just('{"signature":"s"}')),
)
ARGUMENTS = st.sampled_from(["", "{}", '{"a":1}', "{", "[]", "null", '{"a":1e999}', '{"a":NaN}'])
NAMES = st.sampled_from(["read", "", "fs.read", "läs", "r" * 200])
BLOCKS: st.SearchStrategy[Block] = st.one_of(
    WORDS.map(Text), st.sampled_from([IMAGE, PDF, Link("", ""), Resource("u", text="")])
)
USERS = st.lists(BLOCKS, max_size=3).map(lambda blocks: UserTurn(tuple(blocks)))


@st.composite
def steps(draw: st.DrawFn, number: int) -> list[Message]:
    """What one step of the loop leaves: an assistant's message, its results, and what was said."""
    parts: list[Part] = draw(st.lists(st.one_of(WORDS.map(TextPart), THOUGHTS), max_size=4))
    calls = [
        ToolCallPart(f"call_1_{number}_{n}", draw(NAMES), draw(ARGUMENTS))
        for n in range(draw(st.integers(0, 3)))
    ]
    content = draw(st.permutations([*parts, *calls]))
    results: list[Message] = [
        ToolTurn(call.id, call.name, draw(WORDS), draw(st.booleans())) for call in calls
    ]
    heard: list[Message] = draw(st.lists(USERS, min_size=0 if calls else 1, max_size=2))
    behind = draw(st.permutations([*results, *heard]))
    return [AssistantTurn(tuple(content), draw(st.booleans())), *behind]


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    history: list[Message] = draw(st.lists(USERS, min_size=1, max_size=2))
    for number in range(draw(st.integers(0, 5))):
        history += draw(steps(number))
    return history


@pytest.mark.requirement("B061", "B065")
@given(
    history=histories(),
    system=WORDS,
    tools=st.sampled_from([(), (READ,)]),
    effort=st.sampled_from([None, "none", "low", "max"]),
    id=st.sampled_from(["claude-opus-5", "claude-haiku-4-5"]),
    limit=st.sampled_from([None, 1, 2000]),
)
def test_no_history_of_ours_is_refused(
    history: list[Message],
    system: str,
    tools: tuple[ToolSpec, ...],
    effort: str | None,
    id: str,
    limit: int | None,
) -> None:
    info = ModelInfo(ORIGIN, takes_files=True, max_output_tokens=limit)
    request = a_request(*history, system=system, tools=tools, effort=effort)

    body = Messages(info, id).body(request)

    assert violations(body) == []
    assert Messages(info, id).body(request) == body


# --- what goes wrong ------------------------------------------------------------------------


@pytest.mark.requirement("B148", "B149")
@pytest.mark.parametrize(
    ("code", "type", "words", "expected"),
    [
        (400, "invalid_request_error", "tools.0: no", "BAD_REQUEST"),
        (401, "authentication_error", f"invalid x-api-key {KEY}", "AUTH"),
        (403, "permission_error", "no", "AUTH"),
        (404, "not_found_error", "model: any", "MODEL_NOT_FOUND"),
        (413, "request_too_large", "Request exceeds the maximum size", "CONTEXT_TOO_LONG"),
        (429, "rate_limit_error", "slow down", "RATE_LIMIT"),
        (500, "api_error", "oops", "SERVER"),
        (529, "overloaded_error", "Overloaded", "OVERLOADED"),
    ],
)
async def test_each_refusal_has_one_code(code: int, type: str, words: str, expected: str) -> None:
    body = {"type": "error", "error": {"type": type, "message": words}}

    failure = await failure_of(status(code, msgspec.json.encode(body)), api="anthropic")

    assert failure.code == expected


async def test_a_limited_rate_says_how_long_to_wait() -> None:
    error = {"type": "rate_limit_error", "message": "slow down"}

    failure = await failure_of(status(429, error, headers={"Retry-After": "7"}), api="anthropic")

    assert (failure.code, failure.retry_after_s) == ("RATE_LIMIT", 7.0)


@pytest.mark.parametrize(
    "words",
    [
        "prompt is too long: 208310 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease"
        " input length or `max_tokens` and try again",
    ],
)
async def test_a_prompt_that_is_too_long_says_how_much_the_model_holds(words: str) -> None:
    error = {"type": "invalid_request_error", "message": words}
    async with served(status(400, error), api="anthropic") as (model, _):
        _, failure = await collect(model)

    assert isinstance(failure, ModelError)
    assert (failure.code, failure.context_tokens) == ("CONTEXT_TOO_LONG", 200_000)
    assert model.info.context_tokens == 200_000


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([error_event("overloaded_error", "Overloaded")], "OVERLOADED"),
        ([start(), *text(0, "a"), error_event("overloaded_error", "Overloaded")], "OVERLOADED"),
        ([start(), error_event("rate_limit_error", "slow")], "RATE_LIMIT"),
        ([start(), error_event("api_error", "oops")], "SERVER"),
        ([start(), b"event: error\ndata: nonsense\n\n"], "PROTOCOL"),
        ([b'event: other\ndata: {"type": "error", "error": {"type": "api_error"}}\n\n'], "SERVER"),
        ([b'event: other\ndata: {"type": "error"}\n\n'], "SERVER"),
        ([start(), Drop(reset=True)], "TRANSPORT"),
        ([b"event: message_start\ndata: {nonsense\n\n"], "PROTOCOL"),
        ([b"event: message_start\ndata: [1]\n\n"], "PROTOCOL"),
        ([b'event: message_start\ndata: {"type": 5}\n\n'], "PROTOCOL"),
        ([], "TRANSPORT"),
    ],
)
async def test_each_broken_answer_has_one_code(steps: list[Step], expected: str) -> None:
    assert (await failure_of(Reply(steps), api="anthropic")).code == expected


ACTS = message(
    thinking(0, "hm"), text(1, "I act."), tool_use(2, "act", "{", "}"), reason="tool_use"
)


@pytest.mark.requirement("B149", "B150")
@pytest.mark.parametrize("n", range(len(ACTS) + 1))
async def test_an_answer_that_breaks_off_before_its_reason_runs_no_call(n: int) -> None:
    ran: list[object] = []

    async def act(context: Any) -> ToolOutput:
        ran.append(context)
        return ToolOutput("ok")

    script = (Reply(ACTS[:n]), Reply(last_words()), Reply(last_words()))
    async with (
        served(*script, api="anthropic") as (model, double),
        runtime_for(model, [tool("act", act)]) as runtime,
    ):
        agent = await runtime.create("/")
        first = await agent.send("go").settled()
        after = await agent.send("again").settled()

    if n >= len(ACTS) - 1:  # its reason has come
        assert (first, len(ran)) == (Completed(), 1)
    else:
        assert isinstance(first, Failed)
        assert (first.code, ran) == ("TRANSPORT", [])
    assert after == Completed()
    assert double.violations == []


READS = call_read("a")


@pytest.mark.requirement("B147")
async def test_pings_are_no_sign_of_life() -> None:
    pings = Reply([Repeat(ping(), 0.01)])
    async with served(pings, api="anthropic", idle_limit_s=0.2) as (model, double):
        _, error = await collect(model)
        await double.disconnected(0)

    assert isinstance(error, ModelError)
    assert error.code == "TIMEOUT"


@pytest.mark.requirement("R34", "B028", "B029")
@pytest.mark.parametrize("n", range(-1, len(READS)))
async def test_an_abort_in_a_stall_ends_the_stream_and_the_server_sees_it(n: int) -> None:
    gate = Gate()
    at = max(n, 0)
    stalled: list[Step] = [*READS[:at], gate, *READS[at:]]
    first = Reply(READS, before=[gate]) if n < 0 else Reply(stalled)
    script = (first, Reply(last_words()))
    controller = AbortController()
    async with served(*script, api="anthropic") as (model, double):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort_at, gate, controller)
            events, error = await collect(model, a_request(controller=controller))
        await double.disconnected(0)
        _, later = await collect(model)

    assert isinstance(error, TurnAborted)
    assert not any(isinstance(event, Finish) for event in events)
    assert later is None
    assert double.violations == []


async def test_a_stall_behind_the_stop_reason_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent_core.models.endpoint_model.TRAILING_LIMIT_S", 0.02)

    events = await events_of(start(), *text(0, "a"), delta_end(), Stall())

    assert events == [TextDelta("a"), Finish("stop")]


async def test_an_endpoint_of_ones_own_needs_no_key() -> None:
    async with served(Reply(last_words()), api="anthropic", api_key=None) as (model, double):
        _, error = await collect(model)

    assert error is None
    assert "x-api-key" not in double.headers[0]


async def test_without_a_key_the_variable_is_named() -> None:
    model = a_model("https://api.anthropic.com", api="anthropic", api_key=None, needs_key=True)

    _, error = await collect(model)

    assert isinstance(error, ModelError)
    assert error.code == "NO_KEY"
    assert "ANTHROPIC_API_KEY" in error.message
