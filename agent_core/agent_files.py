"""Subagents that people describe in files: ``.agents/agents/NAME.md``.

They lie in the project, from the session's directory up to the root of the repository, and in the
person's own folder; the nearer wins. The front matter has a ``description``, and may have a
``name``, the ``tools`` and the ``model``; the text behind it is what the subagent is told about
itself. The model is told of them with the delegate tool: of those that the turn's look into the
project found. When one is asked for there is another look; what has not changed is not read again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from msgspec import Struct, structs

from agent_core.cancellation import AbortSignal
from agent_core.logs import get_logger
from agent_core.models.adapter import ToolSpec
from agent_core.project_files import Found, Look, read_in_thread
from agent_core.project_text import read_text, reason_of, split_front_matter
from agent_core.prompt import AssembleContext, Assembly
from agent_core.text import printable, replace_surrogates, shortened

if TYPE_CHECKING:
    from agent_core.agent import Agent
    from agent_core.runtime import AgentRuntime

__all__ = ["AgentFile", "AgentFiles"]

MAX_AGENTS: Final = 64
MAX_BODY_BYTES: Final = 64 * 1024
_MAX_DESCRIPTION_CHARS: Final = 500
_IS_NAME: Final = re.compile(r"[\w-]{1,40}").fullmatch
_DELEGATE: Final = "delegate"

log = get_logger(__name__)


class AgentFile(Struct, frozen=True):
    """One subagent as its file describes it; `None` for what is its parent's."""

    name: str
    path: str
    description: str
    persona: str
    tool_names: frozenset[str] | None = None
    model: str | None = None


class AgentFiles:
    """Finds the subagents that files describe, and tells models of all that there are."""

    def __init__(self) -> None:
        # By root: an agent and all its subagents work in the same places.
        self._read: WeakKeyDictionary[Agent, tuple[tuple[Found, ...], Mapping[str, AgentFile]]]
        self._read = WeakKeyDictionary()

    def use(self, runtime: AgentRuntime) -> None:
        """Let every agent of `runtime` delegate to them."""
        runtime.subagents.files = self
        runtime.hooks.on("system-prompt/assemble", self._assemble)

    async def known(
        self, agent: Agent, signal: AbortSignal | None = None
    ) -> Mapping[str, AgentFile]:
        """Return those that `agent` can delegate to now, by name.

        Cancellation: through `signal`; a file that is being read is read to its end.
        Concurrency: any number of tasks.

        Raises:
            TurnAborted: The signal fired.
        """
        return await self._found(agent, await agent.project_files.look_again(agent, signal), signal)

    async def _found(
        self, agent: Agent, look: Look, signal: AbortSignal | None
    ) -> Mapping[str, AgentFile]:
        read, found = self._read.get(agent.root, ((), {}))
        if look.agents != read:
            found = await read_in_thread(_read_all, look.agents, signal)
            self._read[agent.root] = look.agents, found
        return found

    async def _assemble(
        self,
        assembly: Assembly,
        context: AssembleContext,
        next_: Callable[[Assembly, AssembleContext], Awaitable[Assembly]],
    ) -> Assembly:
        """Name them in the delegate tool's description, the same ones for a whole turn.

        Cancellation: through ``context.signal``. Concurrency: any number of agents.
        """
        if any(spec.name == _DELEGATE for spec in assembly.tools):
            agent, signal = context.agent, context.signal
            files = await self._found(agent, await agent.project_files.look(agent, signal), signal)
            tools = tuple(_with_list(spec, agent, files) for spec in assembly.tools)
            assembly = replace(assembly, tools=tools)
        return await next_(assembly, context)


# --- in a worker thread ----------------------------------------------------------------------


def _read_all(files: tuple[Found, ...], signal: AbortSignal | None) -> dict[str, AgentFile]:
    found: dict[str, AgentFile] = {}
    for path, within, _stamp in files:
        if signal is not None and signal.aborted:
            break  # whoever waits for this says so
        if len(found) >= MAX_AGENTS:
            log.warning("agent_files_left_out", from_path=path)
            break
        try:
            described = _read(path, within)
        except (OSError, ValueError) as exc:
            log.warning("agent_file_skipped", path=path, reason=reason_of(exc))
            continue
        if described is not None:
            found.setdefault(described.name, described)
    return found


def _read(path: str, within: tuple[str, ...] | None) -> AgentFile | None:
    file = read_text(path, max_bytes=MAX_BODY_BYTES, within=within)
    if file is None:
        return None
    if file.cut_from_bytes is not None:
        raise ValueError(f"it is larger than {MAX_BODY_BYTES // 1024} KiB")
    settings, body = split_front_matter(file.text, lists=("tools",))
    name = settings.get("name") or os.path.basename(path).removesuffix(".md")
    if not _IS_NAME(name):
        raise ValueError("its name is not one of letters, digits, hyphens and underscores")
    if not settings.get("description"):
        raise ValueError("its front matter has no description")
    if not body.strip():
        raise ValueError("it does not say who it is")
    model = settings.get("model")
    return AgentFile(
        name,
        path,
        shortened(printable(settings["description"]), _MAX_DESCRIPTION_CHARS),
        body.strip(),
        None if "tools" not in settings else _items(settings["tools"]),
        None if model == "inherit" else model,
    )


def _items(listed: str) -> frozenset[str]:
    items = (each.strip(" \t\"'") for each in listed.split(","))
    return frozenset(each for each in items if each)


# --- as the model reads it -------------------------------------------------------------------


def _with_list(spec: ToolSpec, agent: Agent, files: Mapping[str, AgentFile]) -> ToolSpec:
    """Return the delegate tool with all there are to delegate to; any other tool as it is."""
    if spec.name != _DELEGATE:
        return spec
    known = dict(agent.subagents.described)  # which come first where a file has the same name
    for name, file in sorted(files.items()):
        known.setdefault(name, file.description)
    lines = (f"- {name}: {description}".rstrip(": ") for name, description in known.items())
    listed = "\n".join((spec.description, "There are, as `agent`:", *lines))
    return structs.replace(spec, description=replace_surrogates(listed))
