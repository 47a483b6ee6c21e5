from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from talking import CWD, Talk, talk

from acp_server.config import ModelConfig, ProviderConfig
from agent_core.models.adapter import Price
from conformance.providers.server import ProviderDouble, Reply, answer, provider_double, text, usage

SIZED = {"context_tokens": 1_000, "price": Price(2.0, 10.0, cached=0.5)}


@asynccontextmanager
async def between_models(
    tmp_path: Any, *script: Reply, **options: Any
) -> AsyncIterator[tuple[Talk, ProviderDouble]]:
    """A connection with the rehearsal model, and two that a real endpoint has."""
    async with provider_double(script) as double:
        settings: dict[str, Any] = {
            "providers": {"here": ProviderConfig(base_url=double.url)},
            "models": {
                "quick": ModelConfig("here:small", efforts=(), **SIZED),
                "wise": ModelConfig("here:large", efforts=("low", "high"), effort="low"),
            },
        }
        async with talk(tmp_path, **settings, **options) as (at, _backend):
            yield at, double


def choose(at: Talk, session: str, option: str, value: object) -> int:
    return at.say("session/set_config_option", sessionId=session, configId=option, value=value)


def by_id(options: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {option["id"]: option for option in options}


def now(options: list[dict[str, Any]]) -> dict[str, str]:
    return {id: option["currentValue"] for id, option in by_id(options).items()}


def told(at: Talk, kind: str) -> list[dict[str, Any]]:
    return [update for update in at.lines.updates() if update["sessionUpdate"] == kind]


@pytest.mark.requirement("B120")
async def test_a_new_and_a_loaded_session_have_the_same_options_with_their_categories(tmp_path):
    async with between_models(tmp_path) as (at, _double):
        new = await at.result(at.say("session/new", cwd=CWD, mcpServers=[]))
        loaded = await at.result(at.load(new["sessionId"]))

        assert loaded["configOptions"] == new["configOptions"]
        options = by_id(new["configOptions"])
        assert {id: each["category"] for id, each in options.items()} == {
            "mode": "mode",
            "model": "model",
        }
        assert {each["type"] for each in options.values()} == {"select"}
        names = [choice["value"] for choice in options["model"]["options"]]
        assert names == ["rehearsal", "quick", "wise"]
        assert options["model"]["currentValue"] == "rehearsal"


async def test_choosing_a_model_brings_its_efforts_and_the_next_call_goes_to_it(tmp_path):
    async with between_models(tmp_path, answer(text("yes"))) as (at, double):
        session = await at.new_session()

        options = (await at.result(choose(at, session, "model", "wise")))["configOptions"]
        choose(at, session, "effort", "high")
        await at.result(at.prompt(session, "hello"))

        assert by_id(options)["effort"]["category"] == "thought_level"
        assert now(options) == {"mode": "ask", "model": "wise", "effort": "low"}
        assert now(told(at, "config_option_update")[-1]["configOptions"])["effort"] == "high"
        (request,) = double.requests
        assert (request["model"], request["reasoning_effort"]) == ("large", "high")


@pytest.mark.race
async def test_a_prompt_read_right_behind_a_choice_has_it(tmp_path):
    async with between_models(tmp_path, answer(text("yes"))) as (at, double):
        session = await at.new_session()

        choice = choose(at, session, "model", "quick")
        prompt = at.prompt(session, "hello")

        await at.result(choice)
        await at.result(prompt)
        assert [request["model"] for request in double.requests] == ["small"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", "nobody:knows"),
        ("model", "openai:"),
        ("model", True),
        ("mode", "sudo"),
        ("effort", "high"),  # the rehearsal model has none
        ("colour", "red"),
    ],
)
async def test_a_wrong_choice_is_refused_and_changes_nothing(tmp_path, option, value):
    async with between_models(tmp_path) as (at, _double):
        session = await at.new_session()

        error = (await at.response(choose(at, session, option, value)))["error"]
        options = (await at.result(choose(at, session, "mode", "ask")))["configOptions"]

        assert error["code"] == -32602
        assert repr(option) in error["data"]["reason"]
        assert now(options) == {"mode": "ask", "model": "rehearsal"}
        assert told(at, "config_option_update") == []


async def test_an_option_of_an_unknown_session_is_an_error(tmp_path):
    async with between_models(tmp_path) as (at, _double):
        error = (await at.response(choose(at, "sess_nobody", "mode", "ask")))["error"]

        assert error["code"] == -32002


async def test_the_mode_and_its_option_are_kept_in_step(tmp_path):
    async with between_models(tmp_path) as (at, _double):
        session = await at.new_session()

        await at.result(choose(at, session, "mode", "bypass"))
        await at.result(at.say("session/set_mode", sessionId=session, modeId="read-only"))
        await at.result(at.prompt(session, "/mode ask"))

        modes = [update["currentModeId"] for update in told(at, "current_mode_update")]
        options = [update["configOptions"] for update in told(at, "config_option_update")]
        assert modes == [now(each)["mode"] for each in options] == ["bypass", "read-only", "ask"]


async def test_what_was_chosen_survives_a_load_in_another_process(tmp_path):
    async with between_models(tmp_path) as (at, _double):
        session = await at.new_session()
        await at.result(choose(at, session, "model", "wise"))
        await at.result(choose(at, session, "effort", "high"))
        await at.result(at.prompt(session, "/status"))

    async with between_models(tmp_path) as (at, _double):
        loaded = await at.result(at.load(session))

        assert now(loaded["configOptions"]) == {"mode": "ask", "model": "wise", "effort": "high"}


async def test_a_model_that_is_configured_no_more_gives_way_to_the_default(tmp_path):
    async with between_models(tmp_path) as (at, _double):
        session = await at.new_session()
        await at.result(choose(at, session, "model", "wise"))
        await at.result(at.prompt(session, "/status"))

    async with talk(tmp_path) as (at, _backend):
        loaded = await at.result(at.load(session))
        await at.result(at.prompt(session, "say x"))

        assert now(loaded["configOptions"])["model"] == "rehearsal"


async def test_the_model_command_shows_and_changes_it(tmp_path):
    async with between_models(tmp_path) as (at, _double):
        session = await at.new_session()

        await at.result(at.prompt(session, "/model wise"))
        await at.result(at.prompt(session, "/model nonsense"))

        shown, refused = (each["content"]["text"] for each in told(at, "agent_message_chunk"))
        assert "`wise` (now)" in shown
        assert "nonsense" in refused
        assert now(told(at, "config_option_update")[-1]["configOptions"])["model"] == "wise"


# --- what it takes and costs ----------------------------------------------------------------


@pytest.mark.requirement("B151", "B152", "B153", "ACP-087")
async def test_usage_is_told_with_the_size_of_the_context_and_what_was_spent(tmp_path):
    replies = (
        answer(text("one"), usage(100, 20, cached=40, thought=5)),
        answer(text("two"), usage(150, 10)),
    )
    async with between_models(tmp_path, *replies) as (at, _double):
        session = await at.new_session()
        await at.result(choose(at, session, "model", "quick"))

        first = await at.result(at.prompt(session, "hello"))
        await at.result(at.prompt(session, "again"))

        assert first["usage"] == {
            "totalTokens": 120,
            "inputTokens": 100,
            "outputTokens": 20,
            "thoughtTokens": 5,
            "cachedReadTokens": 40,
            "cachedWriteTokens": 0,
        }
        once = (60 * 2.0 + 40 * 0.5 + 20 * 10.0) / 1e6
        updates = told(at, "usage_update")
        assert [(update["used"], update["size"]) for update in updates] == [
            (120, 1_000),
            (160, 1_000),
        ]
        costs = [update["cost"] for update in updates]
        assert [cost["currency"] for cost in costs] == ["USD", "USD"]
        assert [cost["amount"] for cost in costs] == pytest.approx(
            [once, once + (150 * 2.0 + 10 * 10.0) / 1e6]
        )


@pytest.mark.requirement("B153", "B004")
async def test_a_cancelled_turn_tells_what_it_took_until_then(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        prompt = at.prompt(session, "say one then count 100000 slowly")
        await at.lines.until(lambda: len(told(at, "agent_message_chunk")) > 3)

        at.cancel(session)
        cancelled = await at.result(prompt)
        after = await at.result(at.prompt(session, "say x"))

        assert cancelled["stopReason"] == "cancelled"
        assert "usage" not in cancelled  # nothing was counted by then
        assert after["usage"]["totalTokens"] > 0


async def test_queued_prompts_are_told_their_own_turns_usage(tmp_path):
    replies = (answer(text("a"), usage(10, 1)), answer(text("b"), usage(20, 2)))
    async with between_models(tmp_path, *replies) as (at, _double):
        session = await at.new_session()
        choose(at, session, "model", "quick")

        prompts = [at.prompt(session, "one"), at.prompt(session, "two")]
        command = at.prompt(session, "/help")

        totals = [(await at.result(prompt))["usage"]["totalTokens"] for prompt in prompts]
        assert totals == [11, 22]
        assert "usage" not in await at.result(command)
