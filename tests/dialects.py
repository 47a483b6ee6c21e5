"""The three dialects side by side: how to configure a model of each, and what the double says.

An answer is a list of events, one step each, so that a test can put a gate or a failure between any
two of them. `Heard` is what the agent makes of a part of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from acp_server.config import Config, ModelConfig, ProviderConfig
from agent_core.content import Usage
from agent_core.models import endpoint, endpoint_model
from agent_core.models.adapter import (
    ModelEvent,
    ModelInfo,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    UsageReport,
)
from agent_core.models.providers import Api, dialect_for
from agent_core.models.retry import RetryingModel
from conformance.providers import chat as chat_double
from conformance.providers import messages as messages_double
from conformance.providers import responses as responses_double
from conformance.providers.server import ProviderDouble

__all__ = [
    "APIS",
    "KEY",
    "Heard",
    "call",
    "call_read",
    "configured",
    "flags_for",
    "last_words",
    "says",
    "without_end_limits",
    "without_waits",
]

APIS: Final[tuple[Api, ...]] = ("chat", "responses", "anthropic")
KEY: Final = "sk-test-0123456789"
PROVIDERS: Final[Mapping[Api, str]] = {
    "chat": "openai",
    "responses": "openai",
    "anthropic": "anthropic",
}
_DOUBLES: Final[Mapping[Api, Any]] = {
    "chat": chat_double,
    "responses": responses_double,
    "anthropic": messages_double,
}


# --- what to configure ----------------------------------------------------------------------


def base_url(api: Api, double: ProviderDouble) -> str:
    """Return where the double is; the paths of Anthropic's messages have the version themselves."""
    return double.url.removesuffix("/v1") if api == "anthropic" else double.url


def configured(
    doubles: Mapping[Api, ProviderDouble], *, facts: Mapping[str, Any] | None = None, **fields: Any
) -> Config:
    """Return a configuration with one model for each api, by its name; the first is the default.

    `facts` are fields of each `ModelConfig`, `fields` those of the whole.
    """
    providers: dict[str, ProviderConfig] = {}
    models: dict[str, ModelConfig] = {}
    known = {"efforts": ("low", "high"), "effort": "low"} | dict(facts or {})
    for api, double in doubles.items():
        url = base_url(api, double)
        providers[f"{api}-double"] = ProviderConfig(api=api, base_url=url, key=KEY)
        models[api] = ModelConfig(f"{api}-double:any", **known)
    return Config(**({"model": next(iter(doubles))} | fields), providers=providers, models=models)


def flags_for(api: Api, double: ProviderDouble, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the environment with which the real command uses the double."""
    provider = PROVIDERS[api]
    path = folder / "config.toml"
    path.write_text(f'[models.it]\nmodel = "{provider}:any"\napi = "{api}"\n')
    variables = {"API_KEY": KEY, "BASE_URL": base_url(api, double)}
    env = {f"{provider.upper()}_{name}": value for name, value in variables.items()}
    return [f"--config={path}", "--model=it"], env


def without_end_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agent wait for what comes behind an answer's last word as long as a gate is shut."""
    monkeypatch.setattr(endpoint, "DRAIN_LIMIT_S", 30.0)
    monkeypatch.setattr(endpoint_model, "TRAILING_LIMIT_S", 30.0)


def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agent call again at once, unless the provider asks it to wait."""
    defaults = RetryingModel.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "base_s", 0.0)


# --- what the double says -------------------------------------------------------------------


def call_read(api: Api, path: str) -> list[bytes]:
    """Return an answer that thinks, says a word and reads `path`, in fragments."""
    events: list[bytes] = _DOUBLES[api].call_read(path)
    return events


def last_words(api: Api) -> list[bytes]:
    """Return an answer that says something and ends."""
    events: list[bytes] = _DOUBLES[api].last_words()
    return events


def says(api: Api, *texts: str) -> list[bytes]:
    """Return an answer that says `texts`, one behind the other."""
    if api == "chat":
        said = [chat_double.text(text) for text in texts]
        return [*said, chat_double.finish("stop"), chat_double.DONE]
    if api == "responses":
        said = [responses_double.text(text) for text in texts]
        return [responses_double.created(), *said, responses_double.completed()]
    return messages_double.message(messages_double.text(0, *texts))


def call(api: Api, name: str, arguments: str) -> list[bytes]:
    """Return an answer that does nothing but call a tool."""
    if api == "chat":
        opened = chat_double.tool_call(0, "call_1", name)
        pieces = [chat_double.tool_call(0, arguments=piece) for piece in halves(arguments)]
        return [opened, *pieces, chat_double.finish("tool_calls"), chat_double.DONE]
    if api == "responses":
        item = responses_double.call_item("call_1", name)
        return [
            responses_double.created(),
            responses_double.item_added(0, item),
            *(responses_double.arguments(piece) for piece in halves(arguments)),
            responses_double.item_done(0, item | {"status": "completed", "arguments": arguments}),
            responses_double.completed(),
        ]
    use = messages_double.tool_use(0, name, *halves(arguments))
    return messages_double.message(use, reason="tool_use")


def halves(text: str) -> tuple[str, str]:
    """Cut a text in two."""
    return text[: len(text) // 2], text[len(text) // 2 :]


class Heard:
    """What the agent makes of `events`, by the very reader it uses.

    Attributes:
        events: What comes out.
        text: What of it is said.
        is_anything: Whether it is more than counts of tokens.
        has_ended: Whether the answer is complete.
        usage: What it counts.
    """

    def __init__(self, api: Api, events: Sequence[bytes]) -> None:
        reader = dialect_for(api, ModelInfo("any"), "any", "http://double").reader()
        self.events: list[ModelEvent] = []
        for event in events:
            data = event.partition(b"data: ")[2].strip()
            if data and data != b"[DONE]":
                self.events += reader.read(json.loads(data))
        self.text = "".join(event.text for event in self.events if isinstance(event, TextDelta))
        said = (TextDelta, ReasoningDelta, ToolCallDelta)
        self.is_anything = any(isinstance(event, said) for event in self.events)
        self.has_ended = reader.has_ended
        reports = [event.usage for event in self.events if isinstance(event, UsageReport)]
        self.usage = reports[-1] if reports else Usage()
