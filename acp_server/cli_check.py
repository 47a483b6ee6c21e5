"""``acp-agent check``: what is configured, where it came from, and whether it works."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from acp_server.config import Config
    from agent_core.cancellation import AbortController, AbortSignal
    from agent_core.models.adapter import ModelAdapter

__all__ = ["run_check"]

REQUEST_LIMIT_S: Final = 30.0
LONGEST_WAIT_S: Final = 10.0
"""Who is asked to wait longer before the next attempt is told so, and does not wait."""


class Finding(Struct, frozen=True):
    """One thing that was looked at. `state` is ``ok``, ``warning`` or ``failed``."""

    name: str
    state: str
    text: str


def run_check(flags: Mapping[str, Any], *, online: bool = False, as_json: bool = False) -> int:
    """Look at everything and print it.

    With `as_json` that is one object, ``{"ok": …, "findings": [{"name", "state", "text"}, …]}``.
    The names are ``version``, ``configuration``, ``stored keys`` if they cannot be used, ``model``,
    ``model NAME`` for each further one,
    ``mode``, ``limits``, ``plugins`` if there are any, ``subagent NAME`` for each of another agent,
    ``sessions``, ``shell``, ``sandbox``, and
    ``request`` if one was sent. Behind a ``configuration`` that failed only ``version`` is there.
    Further names may come; these stay. The texts are for people.

    Args:
        flags: As for `load_config`.
        online: Send the configured model a request.
        as_json: Print JSON, in one line; otherwise a line a finding, each as it is found.

    Returns:
        0 if nothing failed, else 1.
    """
    import msgspec

    findings = []
    for finding in _findings(flags, online=online):
        findings.append(finding)
        if not as_json:
            mark = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}[finding.state]
            sys.stdout.write(f"{mark}  {finding.name}: {finding.text}\n")
            sys.stdout.flush()
    is_ok = all(finding.state != "failed" for finding in findings)
    if as_json:
        body = {"ok": is_ok, "findings": findings}
        sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    return 0 if is_ok else 1


def _findings(flags: Mapping[str, Any], *, online: bool) -> Iterator[Finding]:
    from acp_server import __version__
    from acp_server.config import ConfigError, load_config
    from acp_server.models import hide_variables

    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("version", "ok", f"acp-agent {__version__}, Python {python}")
    try:
        config = load_config(flags)
    except ConfigError as exc:
        yield Finding("configuration", "failed", str(exc))
        return
    hide_variables(config)
    is_read = config.file in config.sources.values()
    yield Finding(
        "configuration", "ok", f"{config.file}{'' if is_read else ', which sets nothing'}"
    )
    yield from _stored_keys()
    model = _model(config)
    yield model
    for name in config.models:
        if name != config.model:
            yield _further_model(config, name)
    yield from _settings(config)
    yield from _subagents(config)
    yield _store(config)
    yield _shell()
    yield _sandbox()
    if online and model.state != "failed":
        yield _request(config)


def _stored_keys() -> Iterator[Finding]:
    from acp_server.stored_keys import KeysUnusable, stored_keys

    try:
        stored_keys()
    except KeysUnusable as exc:
        yield Finding("stored keys", "warning", str(exc))


# --- models ----------------------------------------------------------------------------------


def _model(config: Config) -> Finding:
    import anyio

    from acp_server.config import ConfigError
    from acp_server.models import make_models, model_problem

    try:
        anyio.run(make_models(config).aclose)
    except ConfigError as exc:
        return Finding("model", "failed", str(exc))
    source = _source(config, "model")
    if config.model == "rehearsal":
        advice = "built in and offline; name a real one with --model PROVIDER:NAME"
        return Finding("model", "warning", f"rehearsal ({source}): {advice}")
    if (problem := model_problem(config)) is not None:
        return Finding("model", "failed", problem)
    return Finding("model", "ok", f"{config.model} ({source}): {_facts(config, config.model)}")


def _further_model(config: Config, name: str) -> Finding:
    from acp_server.models import model_problem

    problem = model_problem(config, name)
    if problem is not None:
        return Finding(f"model {name}", "warning", problem)
    return Finding(f"model {name}", "ok", _facts(config, name))


def _facts(config: Config, name: str) -> str:
    """Say where a model is, what it is spoken to with and shown, and how much it holds."""
    from acp_server.models import ModelMaker

    maker, target = ModelMaker(config), config.target(name)
    info, provider = maker.info(name), target.provider
    spoken = {"chat": "chat completions", "responses": "Responses", "anthropic": "messages"}
    facts = [
        *([] if target.settings.model == name else [target.settings.model]),
        f"{spoken[maker.api(name)]} at {_without_secrets(maker.base_url(provider))}",
        _key(config, provider),
    ]
    size = "of unknown size" if info.context_tokens is None else f"of {info.context_tokens} tokens"
    facts.append(f"a context {size}")
    if info.efforts:
        facts.append(f"effort {info.effort or 'by default'} of {', '.join(info.efforts)}")
    return "; ".join(facts)


def _key(config: Config, provider: str) -> str:
    from acp_server.config import table_name
    from acp_server.stored_keys import stored_key

    settings, place = config.provider(provider), table_name("providers", provider)
    if settings.key is not None:
        return f"key from {_source(config, f'{place}.key')}"
    if settings.key_command is not None:
        return f"key from key_command in {config.file}"
    if any(name.lower() in ("authorization", "x-api-key") for name in settings.headers):
        return f"no key but a header from {_source(config, f'{place}.headers')}"
    if stored_key(provider) is not None:
        return "key from `acp-agent login`"
    return "no key"


def _without_secrets(url: str) -> str:
    from urllib.parse import urlsplit, urlunsplit

    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _source(config: Config, place: str) -> str:
    return config.sources.get(place, "default")


# --- everything else -------------------------------------------------------------------------


def _settings(config: Config) -> Iterator[Finding]:
    yield Finding("mode", "ok", f"{config.mode} ({_source(config, 'mode')})")
    limits = (
        f"{name} {getattr(config, name):g} ({_source(config, name)})"
        for name in ("max_steps", "idle_limit_s")
    )
    yield Finding("limits", "ok", ", ".join(limits))
    if config.plugins:
        names = ", ".join(config.plugins)
        yield Finding("plugins", "ok", f"{names} ({_source(config, 'plugins')})")


def _subagents(config: Config) -> Iterator[Finding]:
    import shutil

    from acp_server.remote import without_credentials

    for name, agent in config.subagents.items():
        path = (without_credentials(os.environ) | agent.env).get("PATH")
        program = shutil.which(agent.command[0], path=path)
        if program is None:
            problem = f"there is no program {agent.command[0]!r}"
            yield Finding(f"subagent {name}", "warning", f"{problem} (subagents.{name}.command)")
        else:
            text = f"{program}; what it asks: {_ANSWERS[agent.permissions]}"
            yield Finding(f"subagent {name}", "ok", text)


_ANSWERS: Final = {
    "ask": "the person decides",
    "reject": "always rejected",
    "allow": "always allowed",
}


def _store(config: Config) -> Finding:
    import anyio

    from agent_core.errors import StoreError
    from agent_core.sessions.sqlite import SqliteStore

    async def ping() -> None:
        store = SqliteStore(config.sessions_path)
        try:
            await store.ping()
        finally:
            await store.aclose()

    try:
        anyio.run(ping)
    except StoreError as exc:
        return Finding("sessions", "failed", f"{config.sessions_path}: {exc}")
    source = _source(config, "state_dir")
    return Finding("sessions", "ok", f"{config.sessions_path} ({source})")


def _shell() -> Finding:
    if not os.access("/bin/sh", os.X_OK):
        return Finding("shell", "failed", "/bin/sh cannot be run")
    return Finding("shell", "ok", "/bin/sh")


def _sandbox() -> Finding:
    return Finding("sandbox", "ok", "commands run with your rights; there is no sandbox")


# --- a request -------------------------------------------------------------------------------


def _request(config: Config) -> Finding:
    import anyio

    if config.model == "rehearsal":
        return Finding("request", "warning", "none sent: the rehearsal model is no service")
    return anyio.run(_answer, config)


async def _answer(config: Config) -> Finding:
    """Ask the configured model for one token; Ctrl-C ends that, and so does the limit.

    Cancellation: through the request's signal only. Concurrency: once at a time.
    """
    import anyio

    from acp_server.models import ModelMaker
    from agent_core.cancellation import AbortController, TurnAborted
    from agent_core.errors import ModelError

    controller = AbortController()
    model = ModelMaker(config, max_attempts=2).make(config.model)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(_end_on_interrupt, controller, name="interrupt")
            tasks.start_soon(_end_in_time, controller, name="limit")
            try:
                finding = await _asked(config, model, controller.signal)
            except ModelError as exc:
                finding = Finding("request", "failed", f"{exc.message}{_advice(config, exc.code)}")
            except TurnAborted as exc:
                finding = Finding("request", "failed", str(exc.reason))
            tasks.cancel_scope.cancel()
    finally:
        await model.aclose()
    return finding


async def _asked(config: Config, model: ModelAdapter, signal: AbortSignal) -> Finding:
    import json
    import time
    from contextlib import aclosing, suppress

    from acp_server.models import library_of
    from agent_core.content import Text, Usage
    from agent_core.models.adapter import (
        ModelRequest,
        Retrying,
        TextDelta,
        UsageReport,
        UserTurn,
    )
    from agent_core.models.sdk import load

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
                return Finding("request", "failed", f"{event.message}; {asked}")
    took_s = time.monotonic() - began
    tokens = f"{usage.input_tokens} tokens in, {usage.output_tokens} out"
    text = f"answered in {took_s:.2f} s, {json.dumps(said[:80])}, {tokens}"
    return Finding("request", "ok", text)


def _advice(config: Config, code: str) -> str:
    """Return where to change what a failed call may be due to, behind what it says itself."""
    from acp_server.config import table_name
    from acp_server.models import ModelMaker

    if code not in ("TRANSPORT", "TIMEOUT", "PROTOCOL", "MODEL_NOT_FOUND"):
        return ""
    provider = config.target(config.model).provider
    table = table_name("providers", provider)
    source = _source(config, f"{table}.base_url")
    url = _without_secrets(ModelMaker(config).base_url(provider))
    return f"; base_url is {url} ({source}), to be set under [{table}] in {config.file}"


async def _end_on_interrupt(controller: AbortController, *, task_status: TaskStatus[None]) -> None:
    import signal

    import anyio

    with anyio.open_signal_receiver(signal.SIGINT) as interrupts:
        task_status.started()
        async for _ in interrupts:
            controller.abort("interrupted")


async def _end_in_time(controller: AbortController) -> None:
    import anyio

    await anyio.sleep(REQUEST_LIMIT_S)
    controller.abort(f"no answer within {REQUEST_LIMIT_S:g} seconds")
