"""What ``acp-agent check --online`` does: one request to the configured model."""

from __future__ import annotations

import json
import time
from contextlib import aclosing, suppress
from signal import SIGINT
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import anyio
from anyio.abc import TaskStatus

from acp_server.config import Config, table_name
from acp_server.models import ModelMaker, library_of
from agent_core.cancellation import AbortController, AbortSignal, TurnAborted
from agent_core.content import Text, Usage
from agent_core.errors import ModelError
from agent_core.models.adapter import (
    ModelAdapter,
    ModelRequest,
    Retrying,
    TextDelta,
    UsageReport,
    UserTurn,
)
from agent_core.models.sdk import load

__all__ = ["answer_of", "without_secrets"]

REQUEST_LIMIT_S: Final = 30.0
LONGEST_WAIT_S: Final = 10.0
"""Who is asked to wait longer before the next attempt is told so, and does not wait."""


def without_secrets(url: str) -> str:
    """Return a base URL without whatever in it may be a secret."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


async def answer_of(config: Config) -> tuple[bool, str]:
    """Ask the configured model for one token; Ctrl-C ends that, and so does the limit.

    Cancellation: through the request's signal only. Concurrency: once at a time.

    Returns:
        Whether it answered, and what there is to say of it.
    """
    controller = AbortController()
    model = ModelMaker(config, max_attempts=2).make(config.model)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(_end_on_interrupt, controller, name="interrupt")
            tasks.start_soon(_end_in_time, controller, name="limit")
            try:
                answer = await _asked(config, model, controller.signal)
            except ModelError as exc:
                answer = False, f"{exc.message}{_advice(config, exc)}"
            except TurnAborted as exc:
                answer = False, str(exc.reason)
            tasks.cancel_scope.cancel()
    finally:
        await model.aclose()
    return answer


async def _asked(config: Config, model: ModelAdapter, signal: AbortSignal) -> tuple[bool, str]:
    request = ModelRequest(
        model=config.model,
        messages=(UserTurn((Text("Say: ok"),)),),
        system="",
        tools=(),
        session_id="check",
        signal=signal,
        effort=model.info.effort,
        max_output_tokens=1,
    )
    if (library := library_of(config)) is not None:
        with suppress(Exception):  # the call itself says what is wrong, and how long it took
            await load(library, signal)
    said, usage, began = "", Usage(), time.monotonic()
    async with aclosing(model.stream(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                said += event.text
            elif isinstance(event, UsageReport):
                usage = event.usage
            elif isinstance(event, Retrying) and event.delay_s > LONGEST_WAIT_S:
                asked = f"it asks to wait {event.delay_s:.0f} s"
                return False, f"{event.message}; {asked}"
    took_s = time.monotonic() - began
    tokens = f"{usage.input_tokens} tokens in, {usage.output_tokens} out"
    text = f"answered in {took_s:.2f} s, {json.dumps(said[:80])}, {tokens}"
    return True, text


def _advice(config: Config, error: ModelError) -> str:
    """Return where to change what a failed call may be due to, behind what it says itself."""
    if error.code not in ("TRANSPORT", "TIMEOUT", "PROTOCOL", "MODEL_NOT_FOUND"):
        return ""
    provider = config.target(config.model).provider
    table = table_name("providers", provider)
    source = config.sources.get(f"{table}.base_url", "default")
    url = without_secrets(ModelMaker(config).base_url(provider))
    shown = "" if url.split("/")[2] in error.message else f" {url}"
    place = f"under [{table}] in {config.file}"
    if source == config.file:
        return f"; the base_url{shown} stands {place}"
    origin = "is the default" if source == "default" else f"is from {source}"
    return f"; the base_url{shown} {origin}, and can be set {place}"


async def _end_on_interrupt(controller: AbortController, *, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(SIGINT) as interrupts:
        task_status.started()
        async for _ in interrupts:
            controller.abort("interrupted")


async def _end_in_time(controller: AbortController) -> None:
    await anyio.sleep(REQUEST_LIMIT_S)
    controller.abort(f"no answer within {REQUEST_LIMIT_S:g} seconds")
