"""A model of each dialect before the provider double, and what it says to a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import Text
from agent_core.errors import ModelError
from agent_core.models.adapter import (
    Message,
    ModelAdapter,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    UserTurn,
)
from agent_core.models.endpoint import Endpoint
from agent_core.models.endpoint_model import EndpointModel
from agent_core.models.keys import Key
from agent_core.models.providers import Api, dialect_for, library_for
from conformance.providers.server import Gate, ProviderDouble, Reply, provider_double

__all__ = ["HI", "KEY", "a_model", "a_request", "abort_at", "collect", "failure_of", "served"]

KEY = "sk-test-0123456789"
HI = UserTurn((Text("hi"),))
PROVIDERS: dict[Api, str] = {"chat": "openai", "responses": "openai", "anthropic": "anthropic"}


def a_model(
    base_url: str,
    *,
    api: Api = "chat",
    api_key: str | None = KEY,
    needs_key: bool = False,
    sampling: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **options: Any,
) -> EndpointModel:
    """Return a model; `facts` are fields of its `ModelInfo`, `options` go to its endpoint."""
    provider = PROVIDERS[api]
    info = ModelInfo(f"{provider}:any", **(facts or {}))
    advice = f"set {provider.upper()}_API_KEY, or key under [providers.{provider}]"
    endpoint = Endpoint(
        provider,
        library=library_for(api),
        base_url=base_url,
        key=Key(api_key, advice=advice),
        needs_key=needs_key,
        **options,
    )
    dialect = dialect_for(api, info, "any", base_url)
    return EndpointModel(info, id="any", endpoint=endpoint, dialect=dialect, sampling=sampling)


def a_request(
    *messages: Message, controller: AbortController | None = None, **fields: Any
) -> ModelRequest:
    """Return a request with `messages`, by default one that says hi."""
    defaults: dict[str, Any] = {
        "model": "openai:any",
        "messages": messages or (HI,),
        "system": "",
        "tools": (),
        "session_id": "s",
        "signal": (controller or AbortController()).signal,
    }
    return ModelRequest(**(defaults | fields))


@asynccontextmanager
async def served(
    *script: Reply, **options: Any
) -> AsyncIterator[tuple[EndpointModel, ProviderDouble]]:
    """A model and the endpoint it talks to; no wait in the block is longer than 10 s."""
    with anyio.fail_after(10):
        async with provider_double(script) as double:
            is_anthropic = options.get("api") == "anthropic"  # its paths have the version
            base_url = double.url.removesuffix("/v1") if is_anthropic else double.url
            model = a_model(base_url, **options)
            try:
                yield model, double
            finally:
                await model.aclose()


async def collect(
    model: ModelAdapter, request: ModelRequest | None = None
) -> tuple[list[ModelEvent], Exception | None]:
    """Return what a model says to `request`, and the error it ends with, if any."""
    events: list[ModelEvent] = []
    async with aclosing(model.stream(request or a_request())) as stream:
        try:
            async for event in stream:
                events.append(event)
        except (ModelError, TurnAborted) as exc:
            return events, exc
    return events, None


async def failure_of(*script: Reply, **options: Any) -> ModelError:
    """Return how a call fails that is answered by `script`; its words never show the key."""
    async with served(*script, **options) as (model, _):
        _, error = await collect(model)
    assert isinstance(error, ModelError)
    assert KEY not in str(error)
    return error


async def abort_at(gate: Gate, controller: AbortController) -> None:
    """Abort once the server stands at `gate`, and everything it had sent has been taken."""
    await gate.reached.wait()
    await anyio.wait_all_tasks_blocked()
    controller.abort(USER)
