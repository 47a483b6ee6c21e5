"""What a client may choose for a session: the permission mode, the model, how hard it thinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from acp_server import types as wire
from agent_core.agent import Agent
from agent_core.permissions import MODES

__all__ = ["config_options", "mode_state", "set_config_option"]

_Choice = wire.ConfigChoice


class _Option(Struct, frozen=True):
    """One option: its choices, the one in effect, and what sets it."""

    id: str
    name: str
    category: str
    choices: Callable[[Agent], tuple[_Choice, ...]]
    current: Callable[[Agent], str | None]
    set: Callable[[Agent, str], None]


def config_options(agent: Agent) -> tuple[wire.ConfigOption, ...]:
    """Return the complete list, as it is now. An option without a choice is left out."""
    options: list[wire.ConfigOption] = []
    for option in _OPTIONS:
        choices, current = option.choices(agent), option.current(agent)
        if choices and current is not None:
            options.append(
                wire.ConfigOption(option.id, option.name, option.category, current, choices)
            )
    return tuple(options)


def mode_state(agent: Agent) -> dict[str, Any]:
    """Return the modes as the older way to choose one has them."""
    available = [
        {"id": mode.id, "name": mode.name, "description": mode.description}
        for mode in MODES.values()
    ]
    return {"currentModeId": agent.mode, "availableModes": available}


def set_config_option(agent: Agent, id: str, value: object) -> None:
    """Set one option.

    Raises:
        ValueError: There is no such option, or no such choice; nothing has changed.
    """
    option = next((each for each in _OPTIONS if each.id == id), None)
    if option is None or not (choices := option.choices(agent)):
        raise ValueError(f"no config option {id!r}")
    if not any(choice.value == value for choice in choices):
        there_are = ", ".join(choice.value for choice in choices)
        raise ValueError(f"no choice {value!r} for {id!r}; there are {there_are}")
    option.set(agent, str(value))


def _modes(_agent: Agent) -> tuple[_Choice, ...]:
    return tuple(_Choice(mode.id, mode.name, mode.description) for mode in MODES.values())


def _models(agent: Agent) -> tuple[_Choice, ...]:
    return tuple(_Choice(each.info.name, each.info.name) for each in agent.models.adapters)


def _efforts(agent: Agent) -> tuple[_Choice, ...]:
    return tuple(_Choice(effort, effort.capitalize()) for effort in agent.model.info.efforts)


def _effort(agent: Agent) -> str | None:
    return agent.effort or next(iter(agent.model.info.efforts), None)


_OPTIONS: Final = (
    _Option("mode", "Permissions", "mode", _modes, lambda agent: agent.mode, Agent.set_mode),
    _Option(
        "model", "Model", "model", _models, lambda agent: agent.model.info.name, Agent.set_model
    ),
    _Option("effort", "Thinking", "thought_level", _efforts, _effort, Agent.set_effort),
)
