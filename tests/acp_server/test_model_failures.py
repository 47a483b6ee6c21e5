"""What can go wrong with a model, what the person sees of it, and what the provider is sent next.

`FAILURES` is the table: each row one failure, in every dialect. Nothing in it ends as a turn that
is over without a word; and whatever happened, the session goes on with a request that the provider
takes.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from dialects import (
    APIS,
    KEY,
    Heard,
    call,
    call_read,
    configured,
    last_words,
    says,
    without_waits,
)
from serve_rig import chunk_of, served_here, tool_calls

from acp_server.config import Config, ModelConfig
from agent_core.models.adapter import Price
from agent_core.models.providers import Api
from conformance.client import Client
from conformance.providers import chat as chat_double
from conformance.providers import messages as messages_double
from conformance.providers import responses as responses_double
from conformance.providers.server import (
    Drop,
    Gate,
    ProviderDouble,
    Repeat,
    Reply,
    Stall,
    comment,
    provider_double,
    status,
)

IDLE_LIMIT_S: Final = 0.2


# --- what a provider does -------------------------------------------------------------------

Script = Callable[[Api], Sequence[Reply]]

REFUSALS: Final[Mapping[str, tuple[int, str, str, str]]] = {
    # status, what OpenAI calls it, what Anthropic calls it, what they say
    "rate limit": (429, "rate_limit_exceeded", "rate_limit_error", "Slow down"),
    "quota": (402, "insufficient_quota", "billing_error", "You have spent it all"),
    "overload": (529, "server_is_overloaded", "overloaded_error", "Overloaded"),
    "failure": (500, "server_error", "api_error", "Something went wrong"),
    "too long": (
        400,
        "context_length_exceeded",
        "invalid_request_error",
        "prompt is too long: 9001 tokens > 9000 maximum",
    ),
    "bad key": (401, "invalid_api_key", "authentication_error", f"Incorrect API key {KEY}"),
    "unknown model": (404, "model_not_found", "not_found_error", "No such model: any"),
    "bad request": (400, "invalid_value", "invalid_request_error", "It has a field too many"),
}


def refusal(api: Api, name: str, **headers: str) -> Reply:
    """Return a provider's refusal, as that provider words it."""
    code, openai, anthropic, message = REFUSALS[name]
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if api == "anthropic":
        error = {"type": "error", "error": {"type": anthropic, "message": message}}
        return status(code, json.dumps(error).encode(), headers=sent)
    return status(code, {"message": message, "type": "error", "code": openai}, headers=sent)


def refuses(name: str, times: int = 1, **headers: str) -> Script:
    return lambda api: [refusal(api, name, **headers)] * times


def begun(api: Api) -> list[bytes]:
    """Return the beginning of an answer, up to its first words."""
    events = last_words(api)
    n = next(n for n in range(len(events)) if Heard(api, events[:n]).text)
    return events[:n]


def half_a_call(api: Api) -> list[bytes]:
    """Return an answer that has all but its end."""
    return call_read(api, "notes.txt")[:-3]


def breaks(*steps: Any, begins: bool = False, times: int = 1) -> Script:
    """Return a script in which `steps` come in an answer's place, or behind its first words."""
    return lambda api: [Reply([*(begun(api) if begins else ()), *steps])] * times


def error_event(api: Api) -> bytes:
    if api == "chat":
        return chat_double.error_event(message="Overloaded", code="server_is_overloaded")
    if api == "responses":
        return responses_double.failed("server_is_overloaded", "Overloaded")
    return messages_double.error_event("overloaded_error", "Overloaded")


def empty(api: Api, text: str = "") -> Reply:
    """Return an answer that says nothing, or only `text`."""
    if api == "chat":
        said = [chat_double.text(text)] if text else []
        return Reply([*said, chat_double.finish("stop"), chat_double.DONE])
    if api == "responses":
        said = [responses_double.text(text)] if text else []
        return Reply([responses_double.created(), *said, responses_double.completed()])
    said = messages_double.text(0, text) if text else []
    return Reply(messages_double.message(said))


def thought_only(api: Api) -> Reply:
    if api == "chat":
        return Reply([chat_double.reasoning("hm"), chat_double.finish("stop"), chat_double.DONE])
    if api == "responses":
        item = responses_double.reasoning_item("hm")
        created, done = responses_double.created(), responses_double.item_done(0, item)
        return Reply([created, responses_double.summary("hm"), done, responses_double.completed()])
    return Reply(messages_double.message(messages_double.thinking(0, "hm")))


def calls(name: str, arguments: str) -> Script:
    return lambda api: [Reply(call(api, name, arguments))]


def cut_arguments(api: Api) -> Reply:
    """Return an answer that ends at its limit, in the midst of a call."""
    arguments = '{"path": "no'
    if api == "chat":
        half = chat_double.tool_call(0, "c", "read", arguments)
        return Reply([half, chat_double.finish("length"), chat_double.DONE])
    if api == "responses":
        item = responses_double.item_added(0, responses_double.call_item("c", "read"))
        end = responses_double.incomplete("max_output_tokens")
        return Reply([responses_double.created(), item, responses_double.arguments(arguments), end])
    use = messages_double.tool_use(0, "read", arguments)
    return Reply(messages_double.message(use, reason="max_tokens"))


def in_an_hour() -> str:
    return format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)


def in_a_minute() -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)


# --- what comes of it -----------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A row of the table. What is a pattern is searched for.

    Attributes:
        provider: What it does before it answers as it should.
        retry: The line that says the call is made again; "" for no such line.
        call: What the model is told of its call, which is shown as failed; "" for no call.
        error: The error's ``data.code`` and its message; `None` if the turn goes well in the end.
        keeps: The events whose text stays.
        waits: Whether the wait is so long that the person presses Stop.
        stalls: Whether the idle limit is what ends it; in the other rows there is none.
        stop_reason: How the turn ends without an error.
        n_requests: How often the provider is asked in this turn.
    """

    provider: Script
    retry: str = ""
    call: str = ""
    error: tuple[str, str] | None = None
    keeps: Callable[[Api], list[bytes]] | None = None
    waits: bool = False
    stalls: bool = False
    stop_reason: str = "end_turn"
    n_requests: int = 2


HOST: Final = r"127\.0\.0\.1:\d+"
AGAIN: Final = r"\. Trying again in 0\.0 s\."

FAILURES: Final = {
    # --- passes by itself: the call is made again, and the person is told
    "rate limit, Retry-After in seconds": Failure(
        refuses("rate limit", retry_after="57"),
        retry=rf"{HOST} limits the rate of calls: Slow down\. Trying again in 57\.0 s\.",
        waits=True,
        n_requests=1,
    ),
    "rate limit, Retry-After as a date": Failure(
        lambda api: [refusal(api, "rate limit", retry_after=in_a_minute())],
        retry=rf"{HOST} limits the rate of calls: Slow down\. Trying again in (5\d|60)\.\d s\.",
        waits=True,
        n_requests=1,
    ),
    "rate limit, no word of when": Failure(
        refuses("rate limit"), retry=rf"{HOST} limits the rate of calls: Slow down{AGAIN}"
    ),
    "overload": Failure(refuses("overload"), retry=rf"{HOST} is overloaded: Overloaded{AGAIN}"),
    "server error": Failure(
        refuses("failure"), retry=rf"{HOST} failed: Something went wrong{AGAIN}"
    ),
    "bad gateway": Failure(
        lambda _: [status(502, b"<html>bad gateway</html>")], retry=rf"{HOST} failed{AGAIN}"
    ),
    "closed before the first byte": Failure(
        lambda _: [Reply(before=[Drop()])], retry=rf"the connection to {HOST} failed{AGAIN}"
    ),
    "reset before the first byte": Failure(
        lambda _: [Reply(before=[Drop(reset=True)])],
        retry=rf"the connection to {HOST} failed{AGAIN}",
    ),
    "reset behind the headers": Failure(
        breaks(Drop(reset=True)), retry=rf"the connection to {HOST} failed{AGAIN}"
    ),
    "an error event first": Failure(
        lambda api: [Reply([error_event(api)])], retry=rf"{HOST} is overloaded: Overloaded{AGAIN}"
    ),
    "an empty answer": Failure(lambda api: [empty(api)], retry=rf"without saying anything{AGAIN}"),
    "no headers": Failure(
        lambda _: [Reply(before=[Stall()])],
        retry=rf"{HOST} did not answer in time{AGAIN}",
        stalls=True,
    ),
    "silence behind the headers": Failure(
        breaks(Stall()), retry=rf"{HOST} did not answer in time{AGAIN}", stalls=True
    ),
    "keep-alive comments and nothing else": Failure(
        breaks(Repeat(comment(), every_s=IDLE_LIMIT_S / 5)),
        retry=rf"{HOST} did not answer in time{AGAIN}",
        stalls=True,
    ),
    # --- does not pass: an error, after five calls
    "an empty answer, again and again": Failure(
        lambda api: [empty(api)] * 5,
        retry=rf"without saying anything{AGAIN}",
        error=("EMPTY_RESPONSE", "without saying anything"),
        n_requests=5,
    ),
    "server error, again and again": Failure(
        refuses("failure", times=5),
        retry=rf"{HOST} failed: Something went wrong{AGAIN}",
        error=("SERVER", rf"{HOST} failed: Something went wrong"),
        n_requests=5,
    ),
    # --- the person has heard the beginning: it stays, and no second answer contradicts it
    "reset in the middle": Failure(
        breaks(Drop(reset=True), begins=True),
        error=("TRANSPORT", rf"the connection to {HOST} failed"),
        keeps=begun,
        n_requests=1,
    ),
    "closed in the middle": Failure(
        breaks(Drop(), begins=True),
        error=("TRANSPORT", rf"the connection to {HOST} failed"),
        keeps=begun,
        n_requests=1,
    ),
    "an end without an end": Failure(
        lambda api: [Reply(half_a_call(api))],
        error=("TRANSPORT", rf"the connection to {HOST} failed"),
        keeps=half_a_call,
        n_requests=1,
    ),
    "an error event in the middle": Failure(
        lambda api: [Reply([*begun(api), error_event(api)])],
        error=("OVERLOADED", rf"{HOST} is overloaded: Overloaded"),
        keeps=begun,
        n_requests=1,
    ),
    "invalid JSON in the middle": Failure(
        breaks(b"event: x\ndata: {nonsense\n\n", begins=True),
        error=("PROTOCOL", rf"{HOST} sent something that is no stream of "),
        keeps=begun,
        n_requests=1,
    ),
    "JSON of another shape": Failure(
        breaks(b"event: x\ndata: [1]\n\n", begins=True),
        error=("PROTOCOL", rf"{HOST} sent something that is no stream of "),
        keeps=begun,
        n_requests=1,
    ),
    "a stall in the middle": Failure(
        breaks(Stall(), begins=True),
        error=("TIMEOUT", rf"{HOST} did not answer in time"),
        keeps=begun,
        stalls=True,
        n_requests=1,
    ),
    "nothing but thinking": Failure(
        lambda api: [thought_only(api)],
        error=("EMPTY_RESPONSE", "without saying anything"),
        n_requests=1,
    ),
    "nothing but white space": Failure(
        lambda api: [empty(api, " \n")],
        error=("EMPTY_RESPONSE", "without saying anything"),
        n_requests=1,
    ),
    # --- a mistake of the model's: it is told, and goes on
    "truncated tool arguments": Failure(calls("read", '{"path": "no'), call="arguments"),
    "wrong tool arguments": Failure(calls("read", '{"file": "x"}'), call="unknown field"),
    "unknown tool": Failure(calls("teleport", "{}"), call="there is no tool named 'teleport'"),
    "arguments cut off by the limit": Failure(
        lambda api: [cut_arguments(api)], stop_reason="max_tokens", n_requests=1
    ),
    # --- something to change: an error that says what, at once
    "rate limit for an hour": Failure(
        refuses("rate limit", retry_after="3600"),
        error=("RATE_LIMIT", rf"{HOST} limits the rate of calls: Slow down"),
        n_requests=1,
    ),
    "rate limit for an hour, as a date": Failure(
        lambda api: [refusal(api, "rate limit", retry_after=in_an_hour())],
        error=("RATE_LIMIT", rf"{HOST} limits the rate of calls: Slow down"),
        n_requests=1,
    ),
    "no quota left": Failure(
        refuses("quota"), error=("BAD_REQUEST", "plan and billing"), n_requests=1
    ),
    "context too long": Failure(
        refuses("too long"),
        error=("CONTEXT_TOO_LONG", "the conversation is too long for any"),
        n_requests=1,
    ),
    "bad key": Failure(
        refuses("bad key"),
        error=("AUTH", rf"refused by {HOST}; set key under \[providers\.\w+-double\] in .*toml"),
        n_requests=1,
    ),
    "unknown model": Failure(
        refuses("unknown model"),
        error=("MODEL_NOT_FOUND", rf"{HOST} has no model any"),
        n_requests=1,
    ),
    "bad request": Failure(
        refuses("bad request"),
        error=("BAD_REQUEST", rf"{HOST} refused the request: It has a field too many"),
        n_requests=1,
    ),
    "a page instead of a stream": Failure(
        lambda _: [Reply([b"<html>Sign in</html>"], content_type="text/html")],
        error=("PROTOCOL", rf"{HOST} sent something that is no stream of "),
        n_requests=1,
    ),
}


# --- the table is true ----------------------------------------------------------------------


@pytest.mark.requirement("B122", "B147", "B148", "B149", "B150", "R34", "R72")
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("api", APIS)
async def test_a_failure_has_one_answer(
    api: Api, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = FAILURES[name]
    without_waits(monkeypatch)
    script = [*row.provider(api), *[Reply(last_words(api))] * 2]
    limit_s = IDLE_LIMIT_S if row.stalls else 0.0
    async with serving(api, *script, idle_limit_s=limit_s) as (client, double):
        session = await client.new_session(tmp_path)

        prompt = client.prompt(session, "the first prompt")
        if row.waits:
            await chunk_of(client, session, "Trying again", is_thought=True)
            client.cancel(session)

        answer = await client.wire.response(prompt)
        asked, said = list(double.requests), client.text(session)
        lines = [line for line in thoughts(client, session).splitlines() if "Trying" in line]
        assert all(re.search(row.retry, line) for line in lines)
        assert len(lines) == (row.n_requests - (not row.waits) if row.retry else 0)
        assert len(asked) == row.n_requests
        if row.retry:
            assert all(request == asked[0] for request in asked)
        if row.call:
            (shown,) = tool_calls(client, session).values()
            assert shown["status"] == "failed"
            assert row.call in json.dumps(shown["content"])
            assert row.call in json.dumps(asked[1])
        else:
            assert tool_calls(client, session) == {}

        kept = Heard(api, row.keeps(api)).text if row.keeps else ""
        if row.error is not None:
            code, words = row.error
            assert answer["error"]["data"]["code"] == code
            assert re.search(words, answer["error"]["message"])
            assert said.strip() == kept.strip()
        elif row.waits:
            assert answer["result"]["stopReason"] == "cancelled"
        elif row.stop_reason == "end_turn":
            assert answer["result"]["stopReason"] == "end_turn"
            assert said == Heard(api, last_words(api)).text
        else:
            assert answer["result"]["stopReason"] == row.stop_reason
        assert "Traceback" not in json.dumps(answer)
        assert KEY not in json.dumps(client.wire.received)

        double.script[:] = [Reply(last_words(api))]
        assert await client.stop_reason(client.prompt(session, "the next prompt")) == "end_turn"
        sent = json.dumps(double.requests[-1])
        assert "the first prompt" in sent
        assert "the next prompt" in sent
        assert kept.strip() in sent


@asynccontextmanager
async def serving(
    api: Api, *script: Reply, **config: Any
) -> AsyncIterator[tuple[Client, ProviderDouble]]:
    """A client of an agent in this process whose model the double plays; every request is valid."""
    with anyio.fail_after(20):
        async with (
            provider_double(script) as double,
            served_here(configured({api: double}, **config)) as (client, _),
        ):
            yield client, double
            assert double.violations == []


def thoughts(client: Client, session: str) -> str:
    return "".join(
        update["content"]["text"]
        for update in client.wire.updates(session)
        if update["sessionUpdate"] == "agent_thought_chunk"
    )


# --- the rest of what may fail --------------------------------------------------------------


@pytest.mark.requirement("B150")
@pytest.mark.parametrize("api", APIS)
async def test_a_provider_that_is_not_there_is_called_five_times(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_waits(monkeypatch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with anyio.fail_after(20):
        async with served_here(configured({api: ProviderDouble((), port)})) as (client, _):
            session = await client.new_session(tmp_path)

            answer = await client.wire.response(client.prompt(session, "first"))

            assert answer["error"]["data"]["code"] == "TRANSPORT"
            problem = f"nothing listens at 127.0.0.1:{port}"
            assert answer["error"]["message"] == problem
            assert thoughts(client, session).count(f"{problem}. Trying again in 0.0 s.") == 4
            async with provider_double([Reply(last_words(api))], port=port) as double:
                assert await client.stop_reason(client.prompt(session, "second")) == "end_turn"
                assert double.violations == []
                assert "first" in json.dumps(double.requests[0])


@pytest.mark.requirement("B148", "B149")
@pytest.mark.parametrize(
    ("api", "advice"),
    [
        ("chat", "set OPENAI_API_KEY, or key under [providers.openai]"),
        ("responses", "set OPENAI_API_KEY, or key under [providers.openai]"),
        ("anthropic", "set ANTHROPIC_API_KEY, or key under [providers.anthropic]"),
    ],
)
async def test_without_a_key_the_prompt_says_where_one_goes(
    api: Api, advice: str, tmp_path: Path
) -> None:
    provider = "anthropic" if api == "anthropic" else "openai"
    model = ModelConfig(f"{provider}:any", api=api)
    with anyio.fail_after(20):
        async with served_here(Config(model="it", models={"it": model})) as (client, _):
            session = await client.new_session(tmp_path)

            answer = await client.wire.response(client.prompt(session, "hello"))

    assert answer["error"]["code"] == -32000
    assert answer["error"]["data"]["code"] == "NO_KEY"
    assert answer["error"]["message"].startswith("no key for it: ")
    assert advice in answer["error"]["message"]
    assert "config.toml" in answer["error"]["message"]


@pytest.mark.requirement("B147")
async def test_a_slow_model_that_is_alive_is_never_idle(tmp_path: Path) -> None:
    gates = [Gate() for _ in range(6)]
    words = [chat_double.text(f"{n} ") for n in range(len(gates))]
    steps = [step for pair in zip(gates, words, strict=True) for step in pair]
    answer = Reply([*steps, chat_double.finish("stop"), chat_double.DONE])
    async with serving("chat", answer, idle_limit_s=1.0) as (client, _):
        session = await client.new_session(tmp_path)

        prompt = client.prompt(session, "take your time")
        for gate in gates:
            await gate.reached.wait()
            await anyio.sleep(0.2)  # this is what is tested
            gate.opened.set()

        assert await client.stop_reason(prompt) == "end_turn"
        assert client.text(session) == "0 1 2 3 4 5 "


@pytest.mark.requirement("B122")
@pytest.mark.parametrize("api", APIS)
async def test_a_thousand_chunks_come_before_the_answer(api: Api, tmp_path: Path) -> None:
    said = [f"{n} " for n in range(1000)]
    async with serving(api, Reply(says(api, *said))) as (client, _):
        session = await client.new_session(tmp_path)

        assert await client.stop_reason(client.prompt(session, "count")) == "end_turn"

        assert "".join(said) == client.text(session)


@pytest.mark.requirement("B151", "B152", "B153")
@pytest.mark.parametrize("api", APIS)
async def test_tokens_are_counted_in_full_and_the_context_is_never_over_full(
    api: Api, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("text of the notes")
    price = Price(input=1.0, output=10.0, cached=0.1)
    answers = (call_read(api, "notes.txt"), last_words(api))
    reports = [Heard(api, events).usage for events in answers]
    facts = {"context_tokens": 1000, "price": price}
    script = [Reply(events) for events in answers] * 10
    async with serving(api, *script, facts=facts) as (client, _):
        session = await client.new_session(tmp_path)
        for number in range(1, 11):
            answer = await client.result(client.prompt(session, "read the file"))

            assert answer["usage"] == {
                "inputTokens": sum(usage.input_tokens for usage in reports),
                "outputTokens": sum(usage.output_tokens for usage in reports),
                "cachedReadTokens": sum(usage.cached_tokens for usage in reports),
                "cachedWriteTokens": 0,
                "thoughtTokens": sum(usage.reasoning_tokens for usage in reports),
                "totalTokens": sum(u.input_tokens + u.output_tokens for u in reports),
            }
            meters = [
                update
                for update in client.wire.updates(session)
                if update["sessionUpdate"] == "usage_update"
            ]
            assert len(meters) == 2 * number
            last = reports[-1]
            assert meters[-1]["used"] == last.input_tokens + last.output_tokens < 1000
            assert meters[-1]["size"] == 1000
            cost = number * sum(price.of(usage) for usage in reports)
            assert meters[-1]["cost"] == {"amount": pytest.approx(cost), "currency": "USD"}
