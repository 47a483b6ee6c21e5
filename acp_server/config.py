"""Configuration: flags, then environment variables, then the file, then defaults.

The file is TOML, by default ``~/.config/acp-agent/config.toml``; an unknown key is an error with
its path, so that a typo never passes for a default. Where providers are and what they are shown
comes from the variables of their own SDKs or from the file, since some clients pass no environment
on. Messages never quote a value that may be a secret.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

from acp_server.config_tables import (
    ModelConfig,
    Name,
    NetworkConfig,
    ProviderConfig,
    SubagentConfig,
    SubagentName,
    in_words,
)

__all__ = [
    "CONFIG_FILE",
    "TRACE_SECRETS",
    "Config",
    "ConfigError",
    "ModelConfig",
    "NetworkConfig",
    "ProviderConfig",
    "SubagentConfig",
    "Target",
    "config_dir",
    "load_config",
    "state_dir",
    "table_name",
]

CONFIG_FILE: Final = "~/.config/acp-agent/config.toml"
"""Where the file is by default, as people write it."""

TRACE_SECRETS: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
"""Variables with what the collector of traces is shown; the first that is set counts."""

# What makes a request the request it is.
_NOT_SAMPLING: Final = ("input", "instructions", "messages", "model", "stream", "system", "tools")


class ConfigError(Exception):
    """The configuration cannot be used; the message says which part and why."""


_NUMBERS: Final = {"idle_limit_s": float, "unload_after_s": float, "max_steps": int}
"""Options that a variable may give, too, as text."""
_TABLES: Final = {
    "providers": ProviderConfig,
    "models": ModelConfig,
    "subagents": SubagentConfig,
}


class Target(NamedTuple):
    """A model by its provider and its name there, and what is configured for it."""

    provider: str
    id: str
    settings: ModelConfig


class _Options(Struct, frozen=True, forbid_unknown_fields=True):
    model: str = "rehearsal"
    mode: str = "ask"
    max_steps: Annotated[int, Meta(ge=0)] = 200
    idle_limit_s: Annotated[float, Meta(ge=0)] = 300.0
    unload_after_s: Annotated[float, Meta(ge=0)] | None = None
    state_dir: str | None = None
    rehearsal_script: str | None = None
    plugins: tuple[str, ...] = ()
    providers: dict[Name, ProviderConfig] = {}
    models: dict[Name, ModelConfig] = {}
    subagents: dict[SubagentName, SubagentConfig] = {}
    network: NetworkConfig = NetworkConfig()


class Config(_Options, frozen=True):
    """What the agent runs with.

    Attributes:
        model: ``rehearsal``, ``provider:id``, or a name of `models`.
        mode: The permission mode of new sessions.
        max_steps: Model calls a turn may have; 0 for any number.
        idle_limit_s: Seconds a model may say nothing; 0 for no limit.
        unload_after_s: Seconds after which a session that nobody uses gives back its memory and
            its MCP servers, until it is used again; 0 for never. `None` is never for one client on
            stdio, and half an hour for clients on the network.
        state_dir: Where sessions are kept; by default the XDG state folder.
        rehearsal_script: A script for the rehearsal model.
        plugins: Plugins to load, ``module:function`` each; see `agent_core.plugins`.
        providers: Providers by name: known ones set up otherwise, and further ones.
        models: Models by a name of one's own; a session may choose any of them.
        subagents: Other agents by name, for models to give work to.
        network: Who may reach ``serve --listen``, and how much one client may take.
        trace_headers: What the collector of traces is shown, as OpenTelemetry writes headers.
        file: The configuration file, which need not be there, as people write it.
        sources: Where values came from, by their path in the file (``providers.openai.key``): a
            flag, a variable or the file. What is not in it is a default.
    """

    trace_headers: str | None = None
    file: str = CONFIG_FILE
    sources: Mapping[str, str] = {}

    @property
    def sessions_path(self) -> Path:
        """The SQLite file of the sessions."""
        return Path(self.state_dir or state_dir()) / "sessions.sqlite3"

    def provider(self, name: str) -> ProviderConfig:
        """Return how a provider is set up."""
        return self.providers.get(name) or ProviderConfig()

    def target(self, name: str) -> Target:
        """Return what a name of `models`, or ``provider:id``, stands for.

        Raises:
            ConfigError: There is no such model.
        """
        from agent_core.models.providers import PROVIDERS

        settings = self.models.get(name) or ModelConfig(name)
        providers = {*PROVIDERS, *self.providers}
        provider = max(
            (each for each in providers if settings.model.startswith(f"{each}:")),
            key=len,
            default="",
        )
        id = settings.model[len(provider) + 1 :]
        if not provider or not id.strip():
            said, there_are = repr(settings.model), ", ".join(sorted(providers))
            if name in self.models and (other := self.models.get(settings.model)) is not None:
                raise ConfigError(f"{said} is a name, too; write what it stands for, {other.model}")
            raise ConfigError(f"no model {said}; write PROVIDER:NAME with one of {there_are}")
        return Target(provider, id, settings)


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Config:
    """Put the configuration together.

    Args:
        flags: Values of command line flags by field name, `None` where not given; ``config`` names
            another file.
        environ: The environment.

    Raises:
        ConfigError: The file cannot be read, or a value is not usable.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    named = given.pop("config", None) or environ.get("ACP_AGENT_CONFIG")
    path = Path(named) if named else config_dir(environ) / "config.toml"
    file = _as_written(path, environ)
    values = _read(path, is_named=bool(named))
    sources = dict.fromkeys(_places(values), file)
    for field in ("model", "mode", "state_dir", "rehearsal_script", *_NUMBERS):
        if value := environ.get(variable := f"ACP_AGENT_{field.upper()}"):
            values[field], sources[field] = value, variable
    if plugins := environ.get("ACP_AGENT_PLUGINS"):
        values["plugins"], sources["plugins"] = plugins.split(), "ACP_AGENT_PLUGINS"
    for field, value in given.items():
        flag = "--plugin" if field == "plugins" else f"--{field.replace('_', '-')}"
        values[field], sources[field] = value, flag
    _take_variables(values, sources, environ)
    config = _Checker(file, sources).checked(values)
    shown = next((environ[name] for name in TRACE_SECRETS if environ.get(name)), None)
    return msgspec.structs.replace(config, trace_headers=shown)


def table_name(table: str, name: str) -> str:
    """Return ``table.name`` as the file has it: with quotes where the name needs them."""
    written = name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
    return f"{table}.{written}".lstrip(".")


# --- what the environment says of providers --------------------------------------------------


def _take_variables(
    values: dict[str, Any], sources: dict[str, str], environ: Mapping[str, str]
) -> None:
    """Put what the environment says of providers over what the file says."""
    from agent_core.models.providers import PROVIDERS

    providers = values.setdefault("providers", {})
    if not isinstance(providers, dict):
        return  # the check says so
    for name in {*PROVIDERS, *providers}:
        table = providers.get(name, {})
        if isinstance(table, dict) and (found := _found(name, table, environ)):
            place = table_name("providers", name)
            providers[name] = table | {field: value for field, (value, _) in found.items()}
            sources.update({f"{place}.{field}": source for field, (_, source) in found.items()})
    _take_tokens(values.get("subagents"), sources, environ)


def _take_tokens(tables: Any, sources: dict[str, str], environ: Mapping[str, str]) -> None:
    for name, table in tables.items() if isinstance(tables, dict) else ():
        variable = table.get("token_variable") if isinstance(table, dict) else None
        if token := environ.get(str(variable), "").strip():
            table.update(token=token, token_command=None)
            sources[f"{table_name('subagents', name)}.token"] = str(variable)


def _found(
    name: str, table: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, tuple[Any, str]]:
    """Return the fields of a provider that the environment says, each with where it says so."""
    from agent_core.models.providers import PROVIDERS, Provider

    known = PROVIDERS.get(name) or Provider("")
    found: dict[str, tuple[Any, str]] = {}
    headers, shown_by = known.headers(environ), "the environment"
    key_variable = str(table.get("key_variable") or known.key_variable)
    token_variable, url_variable = str(known.token_variable), str(known.url_variable)
    if key := environ.get(key_variable, "").strip():
        found = {"key": (key, key_variable), "key_command": (None, key_variable)}
    elif token := environ.get(token_variable, "").strip():
        headers["Authorization"], shown_by = f"Bearer {token}", token_variable
        found = {"key": (None, token_variable), "key_command": (None, token_variable)}
    if url := environ.get(url_variable, "").strip():
        found["base_url"] = (url, url_variable)
    written = table.get("headers", {})
    if headers and isinstance(written, dict):
        names = {each.lower() for each in headers}
        kept = {each: value for each, value in written.items() if each.lower() not in names}
        found["headers"] = (kept | headers, shown_by)
    return found


# --- what a configuration may be -------------------------------------------------------------


class _Checker:
    """Turns values into a `Config`, or says what is wrong with which, and where it came from."""

    def __init__(self, file: str, sources: Mapping[str, str]) -> None:
        self._file = file
        self._sources = sources

    def checked(self, values: dict[str, Any]) -> Config:
        for table, kind in _TABLES.items():
            if isinstance(tables := values.get(table), dict):
                for name, fields in tables.items():
                    self._converted(fields, kind, table_name(table, name))
        for field, number in _NUMBERS.items():
            if self._sources.get(field, "").startswith("ACP_AGENT_"):
                values[field] = self._converted(values[field], number, field, strict=False)
        options = self._converted(values, _Options, "")
        config = Config(**msgspec.structs.asdict(options), file=self._file, sources=self._sources)
        self._check_mode(config.mode)
        if config.model != "rehearsal":
            self._target(config, config.model, "model")
        for name, provider in config.providers.items():
            self._check_provider(name, provider)
        for name, model in config.models.items():
            self._check_model(config, name, model)
        for name, agent in config.subagents.items():
            self._check_subagent(name, agent)
        return config

    def _converted(self, value: Any, kind: Any, place: str, *, strict: bool = True) -> Any:
        try:
            return msgspec.convert(value, kind, strict=strict)
        except msgspec.ValidationError as exc:
            problem, _, at = str(exc).partition(" - at ")
            inner = re.sub(r"^(`key` in )?`\$|\[\.\.\.\]|`$", "", at)
            problem = in_words(problem, kind, inner)
            raise self._wrong(f"{place}{inner}".lstrip("."), problem) from None

    def _wrong(self, place: str, problem: str) -> ConfigError:
        source = self._sources.get(place, self._file)
        return ConfigError(f"{place}: {problem} ({source}).".removeprefix(": "))

    def _check_mode(self, mode: str) -> None:
        from agent_core.permissions import MODES

        if mode not in MODES:
            there_are = ", ".join(MODES)
            raise self._wrong("mode", f"no permission mode {mode!r}; there are {there_are}")

    def _check_provider(self, name: str, provider: ProviderConfig) -> None:
        from agent_core.models.providers import PROVIDERS

        place = table_name("providers", name)
        if provider.base_url is None and name not in PROVIDERS:
            raise self._wrong(place, "a provider of one's own needs a base_url")
        if provider.key is not None and provider.key_command is not None:
            raise self._wrong(place, "give key or key_command, not both")

    def _check_subagent(self, name: str, agent: SubagentConfig) -> None:
        place = table_name("subagents", name)
        if bool(agent.command) == bool(agent.url):
            raise self._wrong(place, "give command or url, one of the two")
        if agent.token is not None and agent.token_command is not None:
            raise self._wrong(place, "give token or token_command, not both")
        of_urls = ("token", "token_command", "token_variable")
        idle = of_urls if agent.url is None else ("env",)
        for field in idle:
            if getattr(agent, field):
                needed = "url" if agent.url is None else "command"
                raise self._wrong(f"{place}.{field}", f"is of no use without {needed}")

    def _check_model(self, config: Config, name: str, model: ModelConfig) -> None:
        from agent_core.models.catalog import known

        place = table_name("models", name)
        target = self._target(config, name, f"{place}.model")
        for field in _NOT_SAMPLING:
            if field in model.sampling:
                raise self._wrong(f"{place}.sampling", f"{field} is no matter of sampling")
        efforts = known(target.id).efforts if model.efforts is None else model.efforts
        if model.effort is not None and model.effort not in efforts:
            there_are = ", ".join(efforts) or "none, unless efforts says so"
            raise self._wrong(f"{place}.effort", f"is none of its efforts; there are {there_are}")
        price = {} if model.price is None else msgspec.structs.asdict(model.price)
        for field, amount in price.items():
            if isinstance(amount, float) and not 0 <= amount < float("inf"):
                raise self._wrong(f"{place}.price", f"{field} must be 0 or more")

    def _target(self, config: Config, name: str, place: str) -> Target:
        try:
            return config.target(name)
        except ConfigError as exc:
            raise self._wrong(place, str(exc)) from None


# --- where things are ------------------------------------------------------------------------


def _places(values: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """Yield the paths of all values of a file."""
    for name, value in values.items():
        yield (place := table_name(table, name))
        if isinstance(value, dict):
            yield from _places(value, place)


def _read(path: Path, *, is_named: bool) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if is_named:
            raise ConfigError(f"There is no configuration file {path}.") from None
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError(f"The configuration file {path} cannot be read: {exc}") from None


def _as_written(path: Path, environ: Mapping[str, str]) -> str:
    home = environ.get("HOME")
    if home and path.is_relative_to(home):
        return f"~/{path.relative_to(home)}"
    return str(path)


def config_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the person's own folder: the configuration, instructions and commands."""
    return _xdg(environ, "XDG_CONFIG_HOME", ".config") / "acp-agent"


def state_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder that sessions are kept in by default."""
    return str(_xdg(environ, "XDG_STATE_HOME", ".local/state") / "acp-agent")


def _xdg(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    """Return a base directory; HOME may be missing, and then the user database knows."""
    if (value := environ.get(variable)) and os.path.isabs(value):
        return Path(value)
    home = environ.get("HOME") or os.path.expanduser("~")
    if not os.path.isabs(home):
        home = f"/tmp/acp-agent-{os.getuid()}"
    return Path(home) / fallback
