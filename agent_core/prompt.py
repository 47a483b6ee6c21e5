"""The system prompt: named, ordered sections, put together for every request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent_core.cancellation import AbortSignal
from agent_core.hooks import Hooks
from agent_core.models.adapter import ToolSpec

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["AssembleContext", "Assembly", "SystemPrompt"]

IDENTITY: Final = """\
You are acp-agent, a software engineer working inside a person's editor. Work in small steps: \
look before you change, make the change, check it. Use the tools rather than guessing; say plainly \
what you did and what you could not do. When a call is refused, find another way or ask. When a \
call was aborted, its side effects may be partial: look before you go on."""


@dataclass(frozen=True, slots=True)
class AssembleContext:
    """For whom the prompt is put together. `signal` is the turn's, absent outside of one."""

    agent: Agent
    signal: AbortSignal | None = None


@dataclass(frozen=True, slots=True)
class Assembly:
    """What the ``system-prompt/assemble`` hook may change: section texts by name, and the tools."""

    sections: dict[str, str]
    tools: tuple[ToolSpec, ...]

    @property
    def text(self) -> str:
        """The sections that say something, in order, with blank lines between."""
        return "\n\n".join(text for text in self.sections.values() if text)


class SystemPrompt:
    """Named sections in the order of their rank. A section is text, or a function of the agent."""

    def __init__(self) -> None:
        self._sections: dict[str, tuple[int, Callable[[Agent], str]]] = {}
        self.section("identity", IDENTITY, rank=-100)
        self.section("place", _place, rank=0)

    def section(self, name: str, text: str | Callable[[Agent], str], *, rank: int = 100) -> None:
        """Add or replace the section `name`; lower ranks come first."""
        self._sections[name] = (rank, text if callable(text) else lambda _agent: text)

    def copy(self) -> SystemPrompt:
        """Return one with the same sections, to be changed by itself."""
        other = SystemPrompt()
        other._sections = dict(self._sections)
        return other

    async def assemble(
        self, context: AssembleContext, tools: tuple[ToolSpec, ...], hooks: Hooks
    ) -> Assembly:
        """Put the prompt together.

        Cancellation: through ``context.signal``. Concurrency: any number of tasks.
        """
        ordered = sorted(self._sections.items(), key=lambda item: item[1][0])
        sections = {name: build(context.agent) for name, (_rank, build) in ordered}

        async def finish(assembly: Assembly, _context: AssembleContext) -> Assembly:
            return assembly

        result: Assembly = await hooks.waterfall(
            "system-prompt/assemble", Assembly(sections, tools), context, final=finish
        )
        return result


def _place(agent: Agent) -> str:
    roots = "\n".join(f"- {root}" for root in agent.roots.additional)
    also = f"\nYou may also work in:\n{roots}" if roots else ""
    return f"Your working directory is {agent.roots.cwd}. Paths are relative to it.{also}"
