"""Plugins: functions that are given the runtime before its first agent, to add hooks and tools.

A plugin is named ``module:function`` on the command line or in the configuration, or is installed
with an entry point in the group ``acp_agent.plugins``. It is called once, with the `AgentRuntime`,
and registers what it wants: ``runtime.hooks.on(...)``, ``runtime.add_tool(...)``. docs/hooks.md
lists the hooks; docs/cancellation.md says what a listener owes its signal.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any, Final

from agent_core.errors import AgentError
from agent_core.logs import get_logger
from agent_core.runtime import AgentRuntime

__all__ = ["GROUP", "PluginError", "load_plugins"]

GROUP: Final = "acp_agent.plugins"

log = get_logger(__name__)


class PluginError(AgentError):
    """A plugin cannot be loaded or failed while it was set up."""


def load_plugins(runtime: AgentRuntime, names: Iterable[str]) -> None:
    """Set up the installed plugins, then those named.

    Args:
        runtime: Without agents yet.
        names: ``module:function`` each.

    Raises:
        PluginError: One of them; the message names it.
    """
    installed = importlib.metadata.entry_points(group=GROUP)
    for name in (*(entry.value for entry in installed), *names):
        try:
            _import(name)(runtime)
        except Exception as exc:
            log.exception("plugin_failed", plugin=name)
            raise PluginError(f"The plugin {name} failed: {type(exc).__name__}: {exc}") from None
        log.info("plugin_loaded", plugin=name)


def _import(name: str) -> Callable[[AgentRuntime], Any]:
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError("a plugin is written module:function")
    plugin: Callable[[AgentRuntime], Any] = getattr(importlib.import_module(module), function)
    return plugin
