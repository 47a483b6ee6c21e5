"""Which tools there are. A new built-in tool is named here and nowhere else."""

from __future__ import annotations

from agent_core.tools.agents import Agents
from agent_core.tools.ask import AskPerson
from agent_core.tools.delegate import Delegate
from agent_core.tools.edit import Edit
from agent_core.tools.list_files import ListFiles
from agent_core.tools.plan import Plan
from agent_core.tools.read import Read
from agent_core.tools.search import Search
from agent_core.tools.shell import Shell
from agent_core.tools.tool import Tool
from agent_core.tools.write import Write

__all__ = ["default_tools"]


def default_tools() -> tuple[Tool, ...]:
    """Return the built-in tools that need nothing but a session."""
    return (
        Read(),
        Write(),
        Edit(),
        ListFiles(),
        Search(),
        Shell(),
        Plan(),
        AskPerson(),
        Delegate(),
        Agents(),
    )
