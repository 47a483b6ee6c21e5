"""``acp-agent check``: what is configured, where it came from, and whether it works."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    from acp_server.config import Config, SubagentConfig
    from acp_server.key_commands import KeyCommands

__all__ = ["run_check"]


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
    from acp_server.key_commands import KeyCommands
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
    tried = KeyCommands(config)
    model = _model(config, tried)
    yield model
    for name in config.models:
        if name != config.model:
            yield _further_model(config, name, tried)
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


def _model(config: Config, tried: KeyCommands) -> Finding:
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
    if problem := model_problem(config) or tried.problem(config.model):
        return Finding("model", "failed", problem)
    return Finding("model", "ok", f"{config.model} ({source}): {_facts(config, config.model)}")


def _further_model(config: Config, name: str, tried: KeyCommands) -> Finding:
    from acp_server.models import model_problem

    if problem := model_problem(config, name) or tried.problem(name):
        return Finding(f"model {name}", "warning", problem)
    return Finding(f"model {name}", "ok", _facts(config, name))


def _facts(config: Config, name: str) -> str:
    """Say where a model is, what it is spoken to with and shown, and how much it holds."""
    from acp_server.check_online import without_secrets
    from acp_server.models import ModelMaker

    maker, target = ModelMaker(config), config.target(name)
    info, provider = maker.info(name), target.provider
    spoken = {"chat": "chat completions", "responses": "Responses", "anthropic": "messages"}
    facts = [
        *([] if target.settings.model == name else [target.settings.model]),
        f"{spoken[maker.api(name)]} at {without_secrets(maker.base_url(provider))}",
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


def _source(config: Config, place: str) -> str:
    return config.sources.get(place, "default")


# --- everything else -------------------------------------------------------------------------


def _settings(config: Config) -> Iterator[Finding]:
    yield Finding("mode", "ok", f"{config.mode} ({_source(config, 'mode')})")
    limits = (
        f"{name} {value:g} ({_source(config, name)})"
        for name in ("max_steps", "idle_limit_s", "unload_after_s")
        if (value := getattr(config, name)) is not None
    )
    yield Finding("limits", "ok", ", ".join(limits))
    if config.plugins:
        names = ", ".join(config.plugins)
        yield Finding("plugins", "ok", f"{names} ({_source(config, 'plugins')})")


def _subagents(config: Config) -> Iterator[Finding]:
    import shutil

    from acp_server.remote import without_credentials

    for name, agent in config.subagents.items():
        if agent.url is not None:
            yield Finding(f"subagent {name}", "ok", _address(config, name, agent))
            continue
        path = (without_credentials(os.environ) | agent.env).get("PATH")
        program = shutil.which(agent.command[0], path=path)
        if program is None:
            problem = f"there is no program {agent.command[0]!r}"
            yield Finding(f"subagent {name}", "warning", f"{problem} (subagents.{name}.command)")
        else:
            text = f"{program}; what it asks: {_ANSWERS[agent.permissions]}"
            yield Finding(f"subagent {name}", "ok", text)


def _address(config: Config, name: str, agent: SubagentConfig) -> str:
    from acp_server.config import table_name
    from acp_server.transports.websocket import shown_url

    place = table_name("subagents", name)
    token = "no token"
    if agent.token is not None:
        token = f"with a token ({_source(config, f'{place}.token')})"
    elif agent.token_command is not None:
        token = f"with the token that {agent.token_command[0]!r} prints"
    elif agent.token_variable is not None:
        token = f"no token, as {agent.token_variable} is not set"
    shown = shown_url(str(agent.url))
    return f"{shown}, {token}; not tried; what it asks: {_ANSWERS[agent.permissions]}"


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

    from acp_server.check_online import answer_of

    if config.model == "rehearsal":
        return Finding("request", "warning", "none sent: the rehearsal model is no service")
    is_ok, text = anyio.run(answer_of, config)
    return Finding("request", "ok" if is_ok else "failed", text)
