from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest

from agent_core.models import catalog
from agent_core.models.catalog import Known, known

ORDER = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@pytest.mark.parametrize(
    ("id", "context_tokens", "efforts", "effort"),
    [
        ("gpt-6.2-sol", 1_050_000, "low medium high xhigh max", "medium"),
        ("gpt-5.5-2026-04-23", 1_050_000, "none low medium high xhigh", "medium"),
        ("gpt-5-mini-2025-08-07", 400_000, "minimal low medium high", "medium"),
        ("openai/gpt-5-pro:free", 400_000, "high", "high"),
        ("gpt-5.1", 400_000, "none low medium high", "none"),
        ("o4-mini", 200_000, "low medium high", "medium"),
        ("gpt-4.1-nano", 1_047_576, "", None),
        ("claude-opus-5-5", 1_000_000, "low medium high xhigh max", "medium"),
        ("anthropic/claude-sonnet-4.5", 200_000, "none low medium high", "none"),
        ("claude-haiku-4-5-20251001", 200_000, "none low medium high", "none"),
        ("claude-sonnet-4-6", 1_000_000, "none low medium high max", "high"),
        ("deepseek-v4-pro", 1_000_000, "high max", "high"),
        ("google/gemini-2.5-pro", 1_048_576, "", None),
    ],
)
def test_a_model_is_known_by_the_beginning_of_its_name(id, context_tokens, efforts, effort):
    facts = known(id)

    assert facts.context_tokens == context_tokens
    assert facts.efforts == tuple(efforts.split())
    assert facts.effort == effort


@pytest.mark.parametrize("id", ["qwen3", "qwen3:8b", "llama3.1", "Qwen/Qwen3-32B", "gpt-oss:20b"])
def test_what_people_run_themselves_holds_what_its_server_says(id):
    assert known(id).context_tokens is None
    assert known(id).max_output_tokens is None
    assert not known(id).takes_images


@pytest.mark.parametrize("id", ["gpt-5.9", "o30", "qwen3.9", "gpt", "", "/", "my-own", "claude"])
def test_a_name_that_only_looks_like_another_is_not_guessed_at(id):
    facts = known(id)

    assert facts == Known(wants_responses=True)


@pytest.mark.parametrize(
    ("id", "does"),
    [
        ("gpt-5", True),
        ("o3-pro", True),
        ("gpt-5.6-sol", True),
        ("gpt-4o-mini", False),
        ("gpt-4.1", False),
        ("gpt-5-chat-latest", False),
        ("gpt-9-nova", True),
    ],
)
def test_openais_models_that_reason_want_responses_and_new_ones_are_taken_to(id, does):
    assert known(id).wants_responses is does


def test_a_model_that_cannot_see_is_not_shown_images():
    assert not known("gpt-3.5-turbo").takes_images
    assert not known("deepseek-v4-flash").takes_images
    assert known("qwen3-vl:8b").takes_images
    assert known("claude-opus-5").takes_images


@pytest.mark.parametrize("facts", catalog._KNOWN.values(), ids=catalog._KNOWN)
def test_the_table_is_sound(facts):
    places = [ORDER.index(effort) for effort in facts.efforts]

    assert all(least < most for least, most in pairwise(places))
    assert facts.effort is None or facts.effort in facts.efforts
    assert (facts.max_output_tokens or 0) < (facts.context_tokens or float("inf"))


def test_every_model_that_the_sdks_name_and_that_answers_in_text_is_known():
    from anthropic.types import Model
    from openai.types.shared.chat_model import ChatModel

    names = [*get_args(ChatModel), *get_args(get_args(Model)[0])]
    elsewhere = ("audio", "codex-mini", "chatgpt", "preview")

    unknown = [
        name
        for name in names
        if known(name).context_tokens is None and not any(word in name for word in elsewhere)
    ]
    assert unknown == []
