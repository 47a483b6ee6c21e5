"""Which tools there are. A new built-in tool is named here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable

from agent_core.models.adapter import ToolSpec
from agent_core.tools.edit import Edit
from agent_core.tools.list_files import ListFiles
from agent_core.tools.plan import Plan
from agent_core.tools.read import Read
from agent_core.tools.search import Search
from agent_core.tools.shell import Shell
from agent_core.tools.tool import Tool
from agent_core.tools.write import Write

__all__ = ["ToolRegistry", "default_tools"]


def default_tools() -> tuple[Tool, ...]:
    """Return the built-in tools that need nothing but a session."""
    return (Read(), Write(), Edit(), ListFiles(), Search(), Shell(), Plan())


class ToolRegistry:
    """Tools by name. Does not change."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        """Take `tools`.

        Raises:
            ValueError: Two have the same name.
        """
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ValueError(f"there are two tools named {tool.name}")
            self._tools[tool.name] = tool

    def get(self, name: str) -> Tool | None:
        """Return the tool of this name, if there is one."""
        return self._tools.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._tools))

    def specs(self) -> tuple[ToolSpec, ...]:
        """Return what models are told, sorted by name: the same order in each request."""
        return tuple(self._tools[name].spec() for name in self.names)
