"""Real clients as data: what each says first, and what it does that others do not.

A file for each client. `conformance.scenarios.profiles` plays them.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec
from msgspec import Struct

__all__ = ["Profile", "profiles", "scenario_name"]


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client's habits. What is not said is as in a client without any of its own."""

    rule: str
    """The rule that says that an agent works with it."""
    title: str
    """What people call it."""
    initialize: dict[str, Any]
    """The params of its ``initialize``, exactly."""
    ids: Literal["number", "text"] = "number"
    """What its request ids are."""
    is_bare: bool = False
    """Whether it starts the agent without its own environment."""
    authenticates: bool = False
    """Whether it authenticates by the first method that is offered, needed or not."""
    answers_permission: bool = True
    """Whether it ever answers a permission request."""
    answers_at_cancel: bool = True
    """Whether it answers open permission requests when it cancels."""
    cancels: bool = True
    """Whether it cancels; else it prompts on while the turn runs."""
    cancel: dict[str, Any] = {}
    """What its ``session/cancel`` has besides the session."""
    unknown: Literal["error", "null", "silence"] = "error"
    """What it answers to requests that it does not offer."""
    writes_null: bool = False
    """Whether it answers null where there is nothing to say."""
    prompts_without_session: bool = False
    """Whether it prompts with null as the session when it could open none."""
    repeats_text: bool = False
    """Whether the prompt behind a cancelled one has two texts, the cancelled one's too."""
    attaches: bool = False
    """Whether it sends attachments as links whatever the agent offers."""
    is_new_each_time: bool = False
    """Whether each prompt comes from a new process that takes the session up."""
    is_stderr_shown: bool = False
    """Whether people see each line that the agent logs."""
    is_stderr_unread: bool = False
    """Whether nobody reads the agent's stderr."""
    ends: Literal["eof", "term", "kill"] = "eof"
    """How it ends the agent."""


@cache
def profiles() -> dict[str, Profile]:
    """Return all clients by the name of their file.

    Raises:
        msgspec.ValidationError: A file says what no client can do.
    """
    return {
        file.name.removesuffix(".toml"): msgspec.convert(
            tomllib.loads(file.read_text(encoding="utf-8")), Profile
        )
        for file in sorted(files(__package__).iterdir(), key=lambda each: each.name)
        if file.name.endswith(".toml")
    }


def scenario_name(name: str) -> str:
    """Return the name of the scenario that plays a client."""
    return f"as_{name.replace('-', '_').replace('.', '_')}"
