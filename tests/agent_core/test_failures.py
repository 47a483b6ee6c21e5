from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from model_rig import KEY, a_model, collect, failure_of, served

from agent_core.errors import ModelError
from agent_core.models.adapter import Finish, ModelInfo, TextDelta
from agent_core.models.chat_completions import ChatCompletions
from agent_core.models.endpoint import Endpoint
from agent_core.models.endpoint_model import MAX_AMENDMENTS, EndpointModel
from agent_core.models.failures import retry_after_s
from agent_core.models.keys import Key
from agent_core.models.providers import Api
from conformance.providers.messages import error_event as messages_error
from conformance.providers.messages import ping, start
from conformance.providers.server import (
    DONE,
    Drop,
    Repeat,
    Reply,
    answer,
    error_event,
    provider_double,
    status,
    text,
)

APIS: tuple[Api, ...] = ("chat", "responses", "anthropic")


def page(code: int, body: bytes, content_type: str) -> Reply:
    return Reply([body], code=code, content_type=content_type)


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.requirement("B148", "B149")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("code", "error", "expected"),
    [
        (400, {"message": "bad tool"}, "BAD_REQUEST"),
        (400, {"message": "m", "code": "context_length_exceeded"}, "CONTEXT_TOO_LONG"),
        (400, {"message": "This model's maximum context length is 5"}, "CONTEXT_TOO_LONG"),
        (400, "only a string", "BAD_REQUEST"),
        (400, {"message": "Model Not Exist", "type": "invalid_request_error"}, "MODEL_NOT_FOUND"),
        (400, {"message": "x/y is not a valid model ID", "code": 400}, "MODEL_NOT_FOUND"),
        (400, {"message": "Your credit balance is too low to access the API"}, "BAD_REQUEST"),
        (401, {"message": f"Incorrect API key provided: {KEY}"}, "AUTH"),
        (402, {"message": "Insufficient Balance"}, "BAD_REQUEST"),
        (403, {"message": "no access"}, "AUTH"),
        (404, {"message": "no such model"}, "MODEL_NOT_FOUND"),
        (404, {"message": "m", "code": "model_not_found"}, "MODEL_NOT_FOUND"),
        (404, {"type": "not_found_error", "message": "model: claude-x"}, "MODEL_NOT_FOUND"),
        (404, {"type": "not_found_error", "message": "File Not Found"}, "NOT_CONFIGURED"),
        (404, {"message": "Invalid URL (POST /chat/completions)"}, "NOT_CONFIGURED"),
        (404, b'{"detail":"Not Found"}', "NOT_CONFIGURED"),
        (404, b"404 page not found", "NOT_CONFIGURED"),
        (404, b"<html>our models page has moved</html>", "NOT_CONFIGURED"),
        (404, b"", "NOT_CONFIGURED"),
        (405, b"<!DOCTYPE html>", "NOT_CONFIGURED"),
        (408, {"message": "slow"}, "TIMEOUT"),
        (409, {"message": "conflict"}, "BAD_REQUEST"),
        (413, {"message": "too large"}, "CONTEXT_TOO_LONG"),
        (418, b"short and stout", "BAD_REQUEST"),
        (422, {"message": "what?"}, "BAD_REQUEST"),
        (429, {"message": "slow down", "code": "rate_limit_exceeded"}, "RATE_LIMIT"),
        (429, {"message": "m", "type": "rate_limit_error"}, "RATE_LIMIT"),
        (429, {"message": "m", "code": "insufficient_quota"}, "BAD_REQUEST"),
        (429, {"message": "m", "type": "insufficient_quota"}, "BAD_REQUEST"),
        (400, {"message": "m", "type": "billing_error"}, "BAD_REQUEST"),
        (500, {"message": "m"}, "SERVER"),
        (500, {"message": "m", "type": "api_error"}, "SERVER"),
        (502, b"<html><body>Bad Gateway</body></html>", "SERVER"),
        (503, None, "OVERLOADED"),
        (504, b"", "SERVER"),
        (529, {"message": "m", "type": "overloaded_error"}, "OVERLOADED"),
        (529, None, "OVERLOADED"),
    ],
)
async def test_each_refusal_has_one_code(api: Api, code: int, error: object, expected: str) -> None:
    failure = await failure_of(status(code, error), api=api)

    assert failure.code == expected
    assert "127.0.0.1" in failure.message or "any" in failure.message
    assert "<" not in failure.message


@pytest.mark.parametrize("api", APIS)
async def test_a_refused_key_is_named_by_its_variable_and_file_never_by_itself(api: Api) -> None:
    failure = await failure_of(status(401, {"message": f"Incorrect API key: {KEY}"}), api=api)

    name = "anthropic" if api == "anthropic" else "openai"
    assert f"{name.upper()}_API_KEY" in failure.message
    assert f"[providers.{name}]" in failure.message
    assert "Incorrect" not in failure.message


async def test_what_is_forbidden_is_said_in_the_endpoints_own_words() -> None:
    failure = await failure_of(status(403, {"message": "not in your country"}))

    assert failure.code == "AUTH"
    assert failure.message.endswith("not in your country")


async def test_an_address_that_knows_no_such_call_says_which_address_it_is() -> None:
    async with served(status(404, b"")) as (model, double):
        _, error = await collect(model)

    assert f"is its base URL {double.url} right?" in str(error)


async def test_the_endpoints_own_words_are_short_printable_and_free_of_secrets() -> None:
    words = f"key {KEY}, header hunter2-hunter2, other sk-proj-abc \x1b[31m\n and {'x' * 400}"

    failure = await failure_of(
        status(400, {"message": words}), headers={"x-token": "hunter2-hunter2"}
    )

    _, _, detail = failure.message.partition("refused the request: ")
    assert detail.startswith("key ***, header ***, other *** [31m and xxx")
    assert len(detail) == 300


@pytest.mark.parametrize("api", APIS)
async def test_who_is_named_in_the_url_is_named_in_no_message(api: Api) -> None:
    async with provider_double([status(404, {"message": "p4ssword! for me"})]) as double:
        url = double.url.replace("//", "//me:p4ssword!@").removesuffix("/v1" * (api == "anthropic"))
        model = a_model(url, api=api)
        _, error = await collect(model)
        await model.aclose()

    assert isinstance(error, ModelError)
    assert error.code == "NOT_CONFIGURED"
    assert "p4ssword!" not in error.message
    assert "me:" not in error.message


async def test_a_used_up_quota_is_said_clearly_and_not_tried_again() -> None:
    failure = await failure_of(status(429, {"message": "m", "code": "insufficient_quota"}))

    assert "no quota left" in failure.message
    assert not failure.is_retryable


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("code", "body", "expected"),
    [
        (500, b"x" * 60_000, "SERVER"),
        (401, b"\x00\xff\xfe" * 20_000, "AUTH"),
        (429, b"\x1f\x8b not gzip at all", "RATE_LIMIT"),
        (400, b"[" * 20_000, "BAD_REQUEST"),
        (400, b'{"error":' * 5_000, "BAD_REQUEST"),
    ],
)
async def test_huge_and_binary_error_pages_are_no_obstacle(
    api: Api, code: int, body: bytes, expected: str
) -> None:
    failure = await failure_of(page(code, body, "application/octet-stream"), api=api)

    assert failure.code == expected
    assert len(failure.message) < 500
    assert failure.message.isprintable()


@pytest.mark.parametrize("api", APIS)
async def test_an_error_page_without_end_is_not_read_to_its_end(api: Api) -> None:
    reply = Reply([Repeat(b"x" * 10_000, 0.0)], code=500, content_type="text/plain")
    async with served(reply, api=api) as (model, double):
        _, error = await collect(model)
        await double.disconnected(0)

    assert isinstance(error, ModelError)
    assert error.code == "SERVER"


# --- Retry-After ----------------------------------------------------------------------------


@pytest.mark.requirement("B148")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("code", [429, 503, 529])
async def test_an_endpoint_says_how_long_to_wait(api: Api, code: int) -> None:
    failure = await failure_of(status(code, None, headers={"Retry-After": "7"}), api=api)

    assert failure.retry_after_s == 7.0


@pytest.mark.requirement("B148")
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 0.5 "}, 0.5),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "1500.5", "retry-after": "2"}, 1.5005),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "9" * 400}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "Mon, 01 Jan 2024 00:00:00 +999999999999"}, None),
        ({"retry-after": "Mon, 01 Jan 2024 00:00:00 GMT"}, 0.0),
        ({}, None),
    ],
)
def test_a_wait_is_understood_in_seconds_and_milliseconds(
    headers: dict[str, str], expected: float | None
) -> None:
    assert retry_after_s(headers) == expected


@pytest.mark.parametrize(("hours", "low", "high"), [(1, 3500, 3600), (-1, 0, 0)])
def test_a_wait_until_a_date_is_understood(hours: int, low: int, high: int) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(hours=hours), usegmt=True)

    wait_s = retry_after_s({"retry-after": date})

    assert wait_s is not None
    assert low <= wait_s <= high


# --- contexts that are too long -------------------------------------------------------------


def refusal(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


LLAMA = "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it"
OPENROUTER = {"provider_name": "Anthropic", "is_byok": False}
ANTHROPIC = "prompt is too long: 208310 tokens > 200000 maximum"


@pytest.mark.parametrize(
    ("code", "body", "tokens"),
    [
        pytest.param(
            400,
            refusal(
                "This model's maximum context length is 8192 tokens. However, your messages "
                "resulted in 10001 tokens. Please reduce the length of the messages.",
                type="invalid_request_error",
                param="messages",
                code="context_length_exceeded",
            ),
            8192,
            id="OpenAI",
        ),
        pytest.param(
            400,
            refusal(
                "Your input exceeds the context window of this model. Please adjust your input.",
                code="context_length_exceeded",
            ),
            None,
            id="OpenAI, Responses",
        ),
        pytest.param(
            400,
            {"type": "error", "error": {"type": "invalid_request_error", "message": ANTHROPIC}},
            200_000,
            id="Anthropic",
        ),
        pytest.param(
            400,
            refusal(
                "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, "
                "decrease input length or `max_tokens` and try again",
                type="invalid_request_error",
            ),
            200_000,
            id="Anthropic, with the answer",
        ),
        pytest.param(
            400,
            refusal(
                "the request exceeds the available context size, try increasing it",
                code=400,
                type="exceed_context_size_error",
                n_prompt_tokens=5000,
                n_ctx=4096,
            ),
            4096,
            id="llama.cpp",
        ),
        pytest.param(500, refusal(LLAMA, code=500, type="server_error"), 4096, id="llama.cpp, old"),
        pytest.param(
            400,
            {
                "object": "error",
                "message": "This model's maximum context length is 4096 tokens. However, you "
                "requested 5000 tokens (4000 in the messages, 1000 in the completion).",
                "type": "BadRequestError",
                "code": 400,
            },
            4096,
            id="vLLM",
        ),
        pytest.param(
            400,
            refusal(
                "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
                type="BadRequestError",
                code=400,
            ),
            4096,
            id="vLLM, prompt alone",
        ),
        pytest.param(
            400,
            refusal("input length exceeds maximum context length", type="api_error"),
            None,
            id="Ollama",
        ),
        pytest.param(
            400,
            {
                "error": "Trying to keep the first 5000 tokens when context the overflows. However,"
                " the model is loaded with context length of only 4096 tokens, which is not enough."
            },
            4096,
            id="LM Studio",
        ),
        pytest.param(
            400,
            {"error": "Cannot truncate prompt with n_keep (5000) >= n_ctx (4096)"},
            4096,
            id="LM Studio, old",
        ),
        pytest.param(
            400,
            refusal(
                "This endpoint's maximum context length is 131,072 tokens. However, you requested "
                "about 140000 tokens (139000 of text input, 1000 in the output).",
                code=400,
            ),
            131_072,
            id="OpenRouter",
        ),
        pytest.param(
            400,
            refusal(
                "Provider returned error",
                code=400,
                metadata={"raw": json.dumps(refusal(ANTHROPIC)), **OPENROUTER},
            ),
            200_000,
            id="OpenRouter, another's words",
        ),
        pytest.param(
            400,
            refusal("Provider returned error", code=400, metadata={"raw": refusal(ANTHROPIC)}),
            200_000,
            id="OpenRouter, another's words as JSON",
        ),
        pytest.param(
            400,
            refusal("Provider returned error", code=400, metadata={"raw": ANTHROPIC, **OPENROUTER}),
            200_000,
            id="OpenRouter, another's bare words",
        ),
        pytest.param(
            400,
            refusal(
                "This model's maximum context length is 65536 tokens. However, you requested 70000 "
                "tokens (66000 in the messages, 4000 in the completion). Please reduce the length.",
                type="invalid_request_error",
                code="invalid_request_error",
            ),
            65_536,
            id="DeepSeek",
        ),
        pytest.param(
            400,
            [
                refusal(
                    "The input token count (1200000) exceeds the maximum number of tokens allowed "
                    "(1048576).",
                    code=400,
                    status="INVALID_ARGUMENT",
                )
            ],
            1_048_576,
            id="Gemini",
        ),
        pytest.param(
            400,
            refusal(
                "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 "
                "maximum context length"
            ),
            32_768,
            id="Mistral",
        ),
        pytest.param(
            400,
            refusal(
                "This model's maximum prompt length is 131072 but the request has 200000 tokens."
            ),
            131_072,
            id="xAI",
        ),
        pytest.param(
            413, refusal("Request exceeds the maximum size", type="request_too_large"), None
        ),
    ],
)
async def test_a_context_that_is_too_long_tells_how_much_the_model_holds(
    code: int, body: object, tokens: int | None
) -> None:
    async with served(status(code, json.dumps(body).encode())) as (model, _):
        _, error = await collect(model)

    assert isinstance(error, ModelError)
    assert error.code == "CONTEXT_TOO_LONG"
    assert error.context_tokens == tokens
    assert model.info.context_tokens == tokens


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens is too large: 100000. This model supports at most 16384 completion tokens.",
        "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens",
        "context_management: Extra inputs are not permitted",
        "temperature: 3 > 2",
        "The tool read was used out of context.",
    ],
)
async def test_other_limits_are_not_taken_for_the_contexts(message: str) -> None:
    failure = await failure_of(status(400, {"message": message}))

    assert (failure.code, failure.context_tokens) == ("BAD_REQUEST", None)


# --- broken answers -------------------------------------------------------------------------


@pytest.mark.requirement("B149", "B150")
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(before=[Drop()]), "TRANSPORT"),
        (Reply(before=[Drop(reset=True)]), "TRANSPORT"),
        (answer(Drop()), "TRANSPORT"),
        (answer(text("a"), Drop()), "TRANSPORT"),
        (answer(text("a"), Drop(reset=True)), "TRANSPORT"),
        (answer(text("a"), text("b")[:20], Drop()), "TRANSPORT"),
        (answer(reason=None), "TRANSPORT"),
        (answer(DONE, reason=None), "TRANSPORT"),
        (answer(b"data: {nonsense\n\n"), "PROTOCOL"),
        (answer(b"data: \xff\n\n"), "PROTOCOL"),
        (answer(b"data: " + b"[" * 100_000 + b"\n\n"), "PROTOCOL"),
        (answer(b"data: [1]\n\n"), "PROTOCOL"),
        (answer(b"data: null\n\n"), "PROTOCOL"),
        (answer(b'data: {"choices": 5}\n\n'), "PROTOCOL"),
        (Reply([b"\x1f\x8b nonsense"], headers={"Content-Encoding": "gzip"}), "PROTOCOL"),
        (page(200, b"<html>hello</html>", "text/html"), "PROTOCOL"),
        (page(200, b"just words", "text/plain"), "PROTOCOL"),
        (page(200, b"", "application/json"), "PROTOCOL"),
        (page(200, b'{"choices": []}', "application/json"), "PROTOCOL"),
        (page(200, b'{"error": {"code": 402}}', "application/json"), "PROTOCOL"),
        (page(200, b'{"error":{"message":"m","code":402}}', "application/json"), "BAD_REQUEST"),
        (page(200, b'{"error":"Unexpected endpoint."}', "application/json"), "NOT_CONFIGURED"),
        (answer(error_event(message="oops")), "SERVER"),
        (answer(text("a"), error_event(message="oops", code=502)), "SERVER"),
        (answer(error_event(message="busy", type="overloaded_error")), "OVERLOADED"),
        (answer(error_event(message="slow", code=429)), "RATE_LIMIT"),
        (answer(error_event(message="what?", type="invalid_request_error")), "BAD_REQUEST"),
        (answer(error_event(message="long", code="context_length_exceeded")), "CONTEXT_TOO_LONG"),
        (answer(error_event(message="context length of only 99 tokens")), "CONTEXT_TOO_LONG"),
        (answer(b'data: {"error": "only a string"}\n\n'), "SERVER"),
        (answer(b'event: error\ndata: {"error": {"message": "named"}}\n\n'), "SERVER"),
        (Reply(before=[b"GARBAGE\r\n\r\n"]), "TRANSPORT"),
    ],
)
async def test_each_broken_answer_has_one_code(reply: Reply, expected: str) -> None:
    assert (await failure_of(reply)).code == expected


@pytest.mark.requirement("B149", "B150")
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([start(), Drop()], "TRANSPORT"),
        ([start(), Drop(reset=True)], "TRANSPORT"),
        ([start(), b"data: {nonsense\n\n"], "PROTOCOL"),
        ([ping(), messages_error("overloaded_error", "busy")], "OVERLOADED"),
        ([start(), messages_error("api_error", "oops")], "SERVER"),
        ([start(), messages_error("rate_limit_error", "slow")], "RATE_LIMIT"),
    ],
)
async def test_both_libraries_break_alike(steps: list[Any], expected: str) -> None:
    assert (await failure_of(Reply(steps), api="anthropic")).code == expected


async def test_half_an_emoji_is_no_broken_answer() -> None:
    half = b'data: {"choices": [{"delta": {"content": "a\\ud83e"}}]}\n\n'
    async with served(answer(half)) as (model, _):
        events, error = await collect(model)

    assert (events, error) == ([TextDelta("a\ud83e"), Finish("stop")], None)


# --- what an endpoint wants otherwise -------------------------------------------------------


class NeverContent(ChatCompletions):
    """A dialect that has always learnt something."""

    def amend(self, refusal: str, tried: set[str], body: Mapping[str, Any]) -> bool:
        assert refusal == '{"error": {"message": "no"}}'
        return True


async def test_a_dialect_cannot_ask_for_ever() -> None:
    n_asked = MAX_AMENDMENTS + 1
    async with provider_double([status(400, {"message": "no"})] * n_asked) as double:
        info = ModelInfo("openai:any")
        endpoint = Endpoint(
            "openai", library="openai", base_url=double.url, key=Key(KEY, advice="")
        )
        model = EndpointModel(info, id="any", endpoint=endpoint, dialect=NeverContent(info, "any"))
        _, error = await collect(model)
        await model.aclose()

    assert isinstance(error, ModelError)
    assert error.code == "BAD_REQUEST"
    assert len(double.requests) == n_asked
    assert double.violations == []


@pytest.mark.parametrize("code", [400, 422])
async def test_only_the_form_of_a_request_can_be_amended(code: int) -> None:
    refused = status(code, {"message": "Unknown parameter: 'stream_options'"})
    async with served(refused, answer(text("ok"))) as (model, double):
        events, _ = await collect(model)
    async with served(status(500, {"message": "stream_options"})) as (other, _):
        _, error = await collect(other)

    assert events == [TextDelta("ok"), Finish("stop")]
    assert len(double.requests) == 2
    assert isinstance(error, ModelError)
    assert error.code == "SERVER"
