"""What ``acp-agent check`` finds out about commands that print keys: it runs them."""

from __future__ import annotations

import os
from functools import partial
from tempfile import TemporaryFile
from typing import Final

import anyio

from acp_server.config import Config, table_name
from agent_core.models.keys import key_from
from agent_core.text import shortened

__all__ = ["KeyCommands"]

MAX_SAID_CHARS: Final = 120
_READ_BYTES: Final = 4096


class KeyCommands:
    """Runs each provider's ``key_command`` once. Call it outside of an event loop."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._problems: dict[str, str] = {}

    def problem(self, model: str) -> str:
        """Say why the command prints no key for a model, with its last words; empty if it does.

        Raises:
            ConfigError: There is no such model.
        """
        provider = self._config.target(model).provider
        if provider not in self._problems:
            self._problems[provider] = self._tried(provider)
        return self._problems[provider]

    def _tried(self, provider: str) -> str:
        command = self._config.provider(provider).key_command
        if not command:
            return ""
        with TemporaryFile() as errors:
            printed, problem = anyio.run(partial(key_from, command, errors))
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _READ_BYTES))
            said = _last_line(errors.read(), printed)
        if not problem:
            return ""
        words = f" and said {said!r}" if said else ""
        place = f"{table_name('providers', provider)}.key_command"
        return f"{place}: {command[0]!r} prints no key, {problem}{words}"


def _last_line(said: bytes, secret: str) -> str:
    """Return the last line of what a command said, without what it printed as a key."""
    lines = said.decode("utf-8", "replace").split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return shortened(line.replace(secret, "…") if secret else line, MAX_SAID_CHARS)
