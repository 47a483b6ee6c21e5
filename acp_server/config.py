"""Configuration: flags, then ``ACP_AGENT_*`` variables, then the file, then defaults.

The file is TOML, by default ``~/.config/acp-agent/config.toml``; an unknown key is an error with
its path, so that a typo never passes for a default. Keys of model providers come from the
provider's own variable or from the file, since some clients pass no environment on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

__all__ = ["KEY_VARIABLES", "Config", "ConfigError", "OpenAIConfig", "load_config", "state_dir"]


KEY_VARIABLES: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""Where the model libraries look for keys."""


class ConfigError(Exception):
    """The configuration cannot be used; the message says which part and why."""


class OpenAIConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach OpenAI or an endpoint that speaks its protocol."""

    api_key: str | None = None
    base_url: str | None = None
    headers: dict[str, str] = {}


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """What the agent runs with.

    Attributes:
        model: ``rehearsal``, or ``openai:NAME``.
        mode: The permission mode of new sessions.
        max_steps: Model calls a turn may have; 0 for any number.
        idle_limit_s: Seconds a model may say nothing; 0 for no limit.
        state_dir: Where sessions are kept; by default the XDG state folder.
        rehearsal_script: A script for the rehearsal model.
        plugins: Plugins to load, ``module:function`` each; see `agent_core.plugins`.
        openai: The OpenAI-compatible endpoint.
    """

    model: str = "rehearsal"
    mode: str = "ask"
    max_steps: int = 200
    idle_limit_s: float = 300.0
    state_dir: str | None = None
    rehearsal_script: str | None = None
    plugins: tuple[str, ...] = ()
    openai: OpenAIConfig = OpenAIConfig()

    @property
    def sessions_path(self) -> Path:
        """The SQLite file of the sessions."""
        return Path(self.state_dir or state_dir()) / "sessions.sqlite3"


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
    path = Path(named) if named else _config_dir(environ) / "config.toml"
    values = _read(path, is_named=bool(named))
    for field in ("model", "mode", "state_dir", "rehearsal_script", "idle_limit_s", "max_steps"):
        if value := environ.get(f"ACP_AGENT_{field.upper()}"):
            values[field] = value
    if plugins := environ.get("ACP_AGENT_PLUGINS"):
        values["plugins"] = plugins.split()
    values.update(given)
    openai = values.setdefault("openai", {})
    if isinstance(openai, dict):
        for field, variable in (("api_key", "OPENAI_API_KEY"), ("base_url", "OPENAI_BASE_URL")):
            if value := environ.get(variable):
                openai[field] = value
    try:
        config = msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"The configuration is wrong: {exc} (file: {path}).") from None
    _check(config)
    return config


def _check(config: Config) -> None:
    from agent_core.permissions import MODES

    if config.mode not in MODES:
        raise ConfigError(f"No permission mode {config.mode!r}; there are {', '.join(MODES)}.")
    provider, _, name = config.model.partition(":")
    key, url = config.openai.api_key, config.openai.base_url
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError("The key for openai has characters that no key has.")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError("The base URL for openai must begin with http:// or https://.")
    if config.max_steps < 0 or config.idle_limit_s < 0:
        raise ConfigError("Limits cannot be negative; 0 means none.")
    if config.model != "rehearsal" and (provider != "openai" or not name):
        raise ConfigError(f"No model {config.model!r}; write openai:NAME, or rehearsal.")


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


def _config_dir(environ: Mapping[str, str]) -> Path:
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
