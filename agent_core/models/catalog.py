"""What is known of models by name: how much they hold, and how hard they may think.

A name is looked up by its longest known beginning, behind a maker's name and a slash if it has one.
Nothing is guessed: of a model that is not here only the configuration, or the provider itself when
it refuses, says how much it holds. Models that people run themselves hold what their server was
started with, so of those only what they take is here.

Figures: the makers' model pages, July to November 2026. Prices are the configuration's: they
change, and differ from account to account.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

__all__ = ["Known", "known"]


class Known(Struct, frozen=True):
    """What is known of a family of models.

    `wants_responses`: with OpenAI itself it is at its best, or only there, through the Responses
    API. The other fields are those of `ModelInfo`.
    """

    context_tokens: int | None = None
    max_output_tokens: int | None = None
    takes_images: bool = True
    takes_files: bool = False
    efforts: tuple[str, ...] = ()
    effort: str | None = None
    wants_responses: bool = False


def _openai(
    context_tokens: int, max_output_tokens: int, efforts: str, effort: str | None = None
) -> Known:
    """Return a model of OpenAI's that reasons; all but the oldest read images and files."""
    return Known(
        context_tokens,
        max_output_tokens,
        takes_files=True,
        efforts=tuple(efforts.split()),
        effort=effort,
        wants_responses=True,
    )


def _claude(context_tokens: int, max_output_tokens: int, efforts: str, effort: str) -> Known:
    return Known(
        context_tokens,
        max_output_tokens,
        takes_files=True,
        efforts=tuple(efforts.split()),
        effort=effort,
    )


def _gemini(efforts: str = "") -> Known:
    return Known(1_048_576, 65_536, takes_files=True, efforts=tuple(efforts.split()))


# What is not here is newer than this table, and so wants Responses, if it is OpenAI's.
_UNKNOWN: Final = Known(wants_responses=True)
_TEXT_ONLY: Final = Known(takes_images=False)
_CHATTY: Final = Known(128_000, 16_384, takes_files=True)
_3: Final = "low medium high"
_4: Final = "low medium high xhigh"
_5: Final = "low medium high xhigh max"

_KNOWN: Final[Mapping[str, Known]] = {
    # OpenAI
    "gpt-6.2-astra": _openai(1_050_000, 128_000, _5, "medium"),
    "gpt-6.2-sol": _openai(1_050_000, 128_000, _5, "medium"),
    "gpt-6.1-sol": _openai(1_050_000, 128_000, _5, "medium"),
    "gpt-6.1-terra": _openai(1_050_000, 128_000, f"none {_5}", "medium"),
    "gpt-6-astra": _openai(1_050_000, 128_000, _5, "medium"),
    "gpt-6-sol": _openai(1_050_000, 128_000, f"none {_5}", "medium"),
    "gpt-6-luna": _openai(1_050_000, 128_000, f"none {_5}", "medium"),
    "gpt-5.6": _openai(1_050_000, 128_000, f"none {_5}", "medium"),
    "gpt-5.5": _openai(1_050_000, 128_000, f"none {_4}", "medium"),
    "gpt-5.5-pro": _openai(1_050_000, 128_000, "medium high xhigh", "high"),
    "gpt-5.4": _openai(1_050_000, 128_000, f"none {_4}"),
    "gpt-5.4-mini": _openai(400_000, 128_000, f"none {_4}"),
    "gpt-5.4-nano": _openai(400_000, 128_000, f"none {_4}"),
    "gpt-5.4-pro": _openai(1_050_000, 128_000, "medium high xhigh"),
    "gpt-5.3-chat": _CHATTY,
    "gpt-5.3-codex": _openai(400_000, 128_000, _4, "medium"),
    "gpt-5.3-codex-spark": _openai(128_000, 32_000, _4),
    "gpt-5.2": _openai(400_000, 128_000, f"none {_4}", "none"),
    "gpt-5.2-chat": _CHATTY,
    "gpt-5.2-codex": _openai(400_000, 128_000, _4, "medium"),
    "gpt-5.2-pro": _openai(400_000, 128_000, "medium high xhigh"),
    "gpt-5.1": _openai(400_000, 128_000, f"none {_3}", "none"),
    "gpt-5.1-chat": _CHATTY,
    "gpt-5.1-codex": _openai(400_000, 128_000, _3, "medium"),
    "gpt-5.1-codex-max": _openai(400_000, 128_000, _4, "medium"),
    "gpt-5": _openai(400_000, 128_000, f"minimal {_3}", "medium"),
    "gpt-5-chat": _CHATTY,
    "gpt-5-codex": _openai(400_000, 128_000, _3, "medium"),
    "gpt-5-pro": _openai(400_000, 272_000, "high", "high"),
    "o4-mini": _openai(200_000, 100_000, _3, "medium"),
    "o3": _openai(200_000, 100_000, _3, "medium"),
    "o3-mini": Known(
        200_000,
        100_000,
        takes_images=False,
        efforts=tuple(_3.split()),
        effort="medium",
        wants_responses=True,
    ),
    "o1": _openai(200_000, 100_000, _3, "medium"),
    "gpt-4.1": Known(1_047_576, 32_768, takes_files=True),
    "gpt-4o": _CHATTY,
    "gpt-4-turbo": Known(128_000, 4_096),
    "gpt-4": Known(8_192, takes_images=False),
    "gpt-3.5-turbo": Known(16_385, 4_096, takes_images=False),
    "gpt-oss": Known(takes_images=False, efforts=tuple(_3.split()), effort="medium"),
    # Anthropic. Up to 4.5 a model thinks only if it is told how much; some newer ones always do.
    "claude-fable-5": _claude(1_000_000, 128_000, _5, "high"),
    "claude-mythos-5": _claude(1_000_000, 128_000, _5, "high"),
    "claude-opus-5-5": _claude(1_000_000, 128_000, _5, "medium"),
    "claude-opus-5": _claude(1_000_000, 128_000, f"none {_5}", "high"),
    "claude-opus-4-8": _claude(1_000_000, 128_000, f"none {_5}", "high"),
    "claude-opus-4-7": _claude(1_000_000, 128_000, f"none {_5}", "high"),
    "claude-opus-4-6": _claude(1_000_000, 128_000, f"none {_3} max", "high"),
    "claude-opus-4-5": _claude(200_000, 64_000, f"none {_3}", "none"),
    "claude-opus-4": _claude(200_000, 32_000, f"none {_3}", "none"),
    "claude-sonnet-5-5": _claude(1_000_000, 128_000, _5, "high"),
    "claude-sonnet-5": _claude(1_000_000, 128_000, f"none {_5}", "high"),
    "claude-sonnet-4-6": _claude(1_000_000, 64_000, f"none {_3} max", "high"),
    "claude-sonnet-4": _claude(200_000, 64_000, f"none {_3}", "none"),
    "claude-haiku-5-5": _claude(1_000_000, 128_000, f"none {_5}", "medium"),
    "claude-haiku-4-5": _claude(200_000, 64_000, f"none {_3}", "none"),
    # Google, through OpenRouter or its own compatible endpoint
    "gemini-3.5-flash": _gemini(f"minimal {_3}"),
    "gemini-3.1-flash-lite": _gemini(f"minimal {_3}"),
    "gemini-3.1-pro": _gemini(_3),
    "gemini-3-flash": _gemini(f"minimal {_3}"),
    "gemini-3-pro": _gemini("low high"),
    "gemini-2.5-flash": _gemini(),
    "gemini-2.5-pro": _gemini(),
    # DeepSeek
    "deepseek-v4": Known(
        1_000_000, 384_000, takes_images=False, efforts=("high", "max"), effort="high"
    ),
    "deepseek-chat": _TEXT_ONLY,
    "deepseek-reasoner": _TEXT_ONLY,
    "deepseek-coder": _TEXT_ONLY,
    "deepseek-r1": _TEXT_ONLY,
    "deepseek-v3": _TEXT_ONLY,
    # Hosted by their makers
    "grok-4.3": Known(1_000_000, 30_000, takes_files=True, efforts=("none", *_3.split())),
    "mistral-large-latest": Known(262_144),
    "mistral-medium-latest": Known(262_144),
    "mistral-small-latest": Known(256_000),
    "qwen3-max": Known(262_144, 65_536, takes_images=False),
    "qwen3-coder-plus": Known(1_048_576, 65_536, takes_images=False),
    "qwen3-coder-flash": Known(1_000_000, 65_536, takes_images=False),
    "qwen3.7-max": Known(1_000_000, 65_536, takes_images=False),
    "qwen3.7-plus": Known(1_000_000, 65_536),
    # Run by people themselves
    "codellama": _TEXT_ONLY,
    "devstral": _TEXT_ONLY,
    "devstral-small-2": Known(),
    "llama3": _TEXT_ONLY,
    "llama-3": _TEXT_ONLY,
    "llama3.1": _TEXT_ONLY,
    "llama-3.1": _TEXT_ONLY,
    "llama3.3": _TEXT_ONLY,
    "llama-3.3": _TEXT_ONLY,
    "mixtral": _TEXT_ONLY,
    "phi4": _TEXT_ONLY,
    "qwen2.5": _TEXT_ONLY,
    "qwen2.5-coder": _TEXT_ONLY,
    "qwen2.5-vl": Known(),
    "qwen2.5-omni": Known(),
    "qwen3": _TEXT_ONLY,
    "qwen3-omni": Known(),
    "qwen3-vl": Known(),
    "qwq": _TEXT_ONLY,
}


def known(id: str) -> Known:
    """Return what is known of the model that a provider calls `id`; nothing, if need be."""
    name = id.rpartition("/")[2].lower()
    if name.startswith("claude-"):
        name = name.replace(".", "-")  # OpenRouter's way to write Anthropic's version numbers
    # A name ends or goes on behind a mark: gpt-5.9 is no gpt-5, and o30 no o3.
    ends = [mark.start() for mark in re.finditer(r"[-:@]|$", name)]
    beginnings = (name[:end] for end in reversed(ends))
    return next((_KNOWN[each] for each in beginnings if each in _KNOWN), _UNKNOWN)
