"""The providers that are known by name: where each is, and how to speak with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from agent_core.models.adapter import ModelInfo
from agent_core.models.chat_completions import ChatCompletions
from agent_core.models.endpoint_model import Dialect
from agent_core.models.sdk import Library

__all__ = ["PROVIDERS", "Api", "Provider", "dialect_for", "is_openai", "library_for"]

Api = Literal["chat", "responses", "anthropic"]
"""What an endpoint speaks: OpenAI's chat completions or Responses, or Anthropic's messages."""


class Provider(Struct, frozen=True):
    """A provider, and the environment variables that its own SDK reads.

    Attributes:
        base_url: Where it is.
        key_variable: The variable with its key.
        needs_key: Whether it is of no use without one.
        api: What it speaks.
        url_variable: The variable that says that it is elsewhere.
        token_variable: The variable with a bearer token that it takes instead of a key.
        header_variables: The variables with headers for it; ``{}`` is a variable's value, lines of
            ``Name: value`` where it stands alone.
    """

    base_url: str
    key_variable: str | None = None
    needs_key: bool = True
    api: Api = "chat"
    url_variable: str | None = None
    token_variable: str | None = None
    header_variables: Mapping[str, str] = {}

    def headers(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that `header_variables` in `environ` ask for."""
        found: dict[str, str] = {}
        for variable, form in self.header_variables.items():
            if value := environ.get(variable, "").strip():
                lines = (line.partition(":") for line in form.format(value).splitlines())
                found |= {name.strip(): text.strip() for name, colon, text in lines if colon}
        return found


PROVIDERS: Final[Mapping[str, Provider]] = {
    "openai": Provider(
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
        url_variable="OPENAI_BASE_URL",
        header_variables={
            "OPENAI_ORG_ID": "OpenAI-Organization: {}",
            "OPENAI_PROJECT_ID": "OpenAI-Project: {}",
            "OPENAI_CUSTOM_HEADERS": "{}",
        },
    ),
    "anthropic": Provider(
        "https://api.anthropic.com",
        "ANTHROPIC_API_KEY",
        api="anthropic",
        url_variable="ANTHROPIC_BASE_URL",
        token_variable="ANTHROPIC_AUTH_TOKEN",
        header_variables={"ANTHROPIC_CUSTOM_HEADERS": "{}"},
    ),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "ollama": Provider("http://localhost:11434/v1", needs_key=False),
    "lmstudio": Provider("http://localhost:1234/v1", needs_key=False),
    "vllm": Provider("http://localhost:8000/v1", needs_key=False),
    "llamacpp": Provider("http://localhost:8080/v1", needs_key=False),
}


def library_for(api: Api) -> Library:
    """Return the library that speaks `api`."""
    return "anthropic" if api == "anthropic" else "openai"


def is_openai(base_url: str) -> bool:
    """Say whether `base_url` is OpenAI's own, in any of its regions."""
    return re.match(r"https://([a-z]+\.)?api\.openai\.com(:443)?(/|$)", base_url) is not None


def dialect_for(api: Api, info: ModelInfo, id: str, base_url: str) -> Dialect:
    """Return how to speak `api` with one model.

    Args:
        api: What its endpoint speaks.
        info: The model.
        id: Its name there.
        base_url: Where that is.
    """
    if api == "anthropic":
        from agent_core.models.messages import Messages

        return Messages(info, id)
    if api == "responses":
        from agent_core.models.responses import Responses

        return Responses(info, id)
    limit_name = "max_completion_tokens" if is_openai(base_url) else "max_tokens"
    return ChatCompletions(info, id, limit_name=limit_name)
