"""Who is judged: how to reach the agent, and what to say so that it does things."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

__all__ = [
    "REHEARSAL",
    "SITUATIONS",
    "Prompter",
    "Target",
    "Words",
    "hermetic_environment",
    "read_words",
]

SITUATIONS: Final[dict[str, str]] = {
    "hello": "any short answer",
    "long": "an answer of many pieces that takes at least twenty seconds",
    "permission": "run {command}, which the agent has to ask the person about first",
    "read": "read the file {path}",
    "write": "write {text} to the file {path}",
    "edit": "replace the word `before` by {text} in the file {path}",
    "command": "run {command} in a shell",
    "plan": "make a plan of at least two steps and show it",
    "refusal": "refuse",
    "delegate": "have a subagent run {command}",
    "stall": "wait for a model that says nothing at all",
    "question": "ask the person to choose between two things",
}
"""What a scenario may want to be brought about. A prompt for one may use the placeholders."""

REHEARSAL: Final[dict[str, str]] = {
    "hello": "hello",
    "long": "count 100000 slowly",
    "permission": "run {command}",
    "read": "read {path}",
    "write": "write {path}: {text}",
    "edit": "edit {path}: before => {text}",
    "command": "run {command}",
    "plan": "plan look around; do the work; check it",
    "delegate": "delegate run {command}",
    "stall": "stall",
    "question": "ask Which one?: red | blue",
}
"""The words of agents that do what they are told without a model: the reference agent's and
acp-agent's own rehearsal."""

KEPT_CACHES: Final = {
    "PYTHONUSERBASE": "~/.local",
    "npm_config_cache": "~/.npm",
    "UV_CACHE_DIR": "~/.cache/uv",
}


class Prompter(Protocol):
    """Knows what to say to an agent to bring a situation about."""

    def say(self, situation: str, key: str, fill: Mapping[str, str]) -> str | None:
        """Return the prompt, or `None` if it does not know how.

        Args:
            situation: One of `SITUATIONS`.
            key: Names the trial, for prompters that have to tell trials apart.
            fill: What goes into the placeholders.
        """
        ...


class Words:
    """A map from situations to prompts, for agents whose model is not ours to script.

    Args:
        prompts: Prompts by situation, with placeholders.
    """

    def __init__(self, prompts: Mapping[str, str]) -> None:
        self.prompts: Final = dict(prompts)

    def say(self, situation: str, key: str, fill: Mapping[str, str]) -> str | None:
        """Return the prompt, or `None` if the map has none."""
        prompt = self.prompts.get(situation)
        return None if prompt is None else _filled(prompt, fill)


def read_words(path: Path) -> Words:
    """Read a map of prompts from a JSON file.

    Raises:
        ValueError: It is no JSON object of texts, names a situation that nobody knows, or uses a
            placeholder that the situation does not have; says which.
        OSError: It cannot be read.
    """
    try:
        prompts = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except msgspec.MsgspecError as exc:
        raise ValueError(f"{path} is no JSON object of prompts: {exc}") from None
    for situation, prompt in prompts.items():
        if situation not in SITUATIONS:
            raise ValueError(
                f"{path}: nobody knows the situation {situation!r}; there are "
                f"{', '.join(SITUATIONS)}"
            )
        allowed = _placeholders(SITUATIONS[situation])
        if strange := _placeholders(prompt) - allowed:
            can = ", ".join(f"{{{each}}}" for each in sorted(allowed)) or "no placeholder"
            raise ValueError(f"{path}: {situation} takes {can}, not {{{min(strange)}}}")
    return Words(prompts)


class Target(Struct, kw_only=True):
    """How to reach the agent."""

    command: tuple[str, ...] = ()
    """Program and arguments; with a `url`, of what serves there, or empty if that runs already."""
    url: str = ""
    """``ws://``, ``wss://``, ``http://`` or ``https://``."""
    token: str = ""
    """Sent as a bearer token to a `url`."""
    env: dict[str, str] = {}
    """Added to the agent's environment."""
    keeps_home: bool = False
    """Whether the agent gets the person's own home folder rather than an empty one."""
    cwd: str = ""
    """Where the agent starts; an empty folder of the trial's by default."""
    words: Words | None = None
    """What to say; the rehearsal's words for agents known to act on them, else nothing."""
    scripts_model: bool = False
    """Whether the agent is pointed at a model of ours, which does what a scenario needs. In `env`
    and `command`, ``{model_url}`` and ``{model_key}`` are then filled in."""
    auth_method: str = ""
    """The method to authenticate with before a session is made."""
    may_log_out: bool = False
    """Whether `logout` may be called, which ends the person's own login."""
    timeout_s: float = 10.0
    """How long to wait for one thing."""

    @property
    def transport(self) -> str:
        """How messages travel: ``stdio``, ``ws`` or ``http``."""
        if not self.url:
            return "stdio"
        return "ws" if self.url.startswith("ws") else "http"

    def environment(self, home: Path, *, is_bare: bool = False) -> dict[str, str]:
        """Return the environment of an agent that is started with this folder as its home.

        Args:
            home: The folder.
            is_bare: Leave out all that a program can do without, and be hermetic in any case.
        """
        base = dict(os.environ) if self.keeps_home else hermetic_environment(home)
        if is_bare:
            kept = ("PATH", *KEPT_CACHES)
            base = {
                name: value
                for name, value in hermetic_environment(home).items()
                if name in kept or name in ("HOME", "TERM")
            }
        return base | self.env


def hermetic_environment(home: Path) -> dict[str, str]:
    """Return our own environment with an empty home folder; caches of installers stay known."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ACP_"))
    }
    caches = {
        name: os.environ.get(name, str(Path(folder).expanduser()))
        for name, folder in KEPT_CACHES.items()
    }
    return {**kept, **caches, "HOME": str(home), "TERM": "dumb"}


def _filled(prompt: str, fill: Mapping[str, Any]) -> str:
    for name, value in fill.items():
        prompt = prompt.replace(f"{{{name}}}", str(value))
    return prompt


def _placeholders(text: str) -> set[str]:
    try:
        return {name for _, name, _, _ in Formatter().parse(text) if name}
    except ValueError as exc:
        raise ValueError(f"{text!r}: {exc}") from None
