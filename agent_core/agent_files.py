"""Subagents that people describe in files: ``.agents/agents/NAME.md``.

They lie in the project, from the session's directory up to the root of the repository, and in the
person's own folder; the nearer wins. The front matter has a ``description``, and may have a
``name``, the ``tools`` and the ``model``; the text behind it is what the subagent is told about
itself. The model is told of them with the delegate tool. They are looked at once a turn and when
one is asked for, in a worker thread, and read again only when one of them changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import anyio.to_thread
from msgspec import Struct, structs

from agent_core.cancellation import AbortSignal
from agent_core.logs import get_logger
from agent_core.models.adapter import ToolSpec
from agent_core.project_files import (
    markdown_files,
    read_text,
    reason_of,
    signature_of,
    split_front_matter,
)
from agent_core.prompt import AssembleContext, Assembly
from agent_core.text import printable, replace_surrogates, shortened
from agent_core.tools.roots import Roots

if TYPE_CHECKING:
    from agent_core.agent import Agent
    from agent_core.runtime import AgentRuntime

__all__ = ["AgentFile", "AgentFiles"]

MAX_AGENTS: Final = 64
MAX_BODY_BYTES: Final = 64 * 1024
_MAX_FILES: Final = 1000
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


class _Look(Struct, frozen=True):
    """What the last look found, in which turn, and the signature of all that was looked at.

    One for an agent and all its subagents: they work in the same places.
    """

    turn: int
    signature: object
    found: Mapping[str, AgentFile]


class AgentFiles:
    """Finds the subagents that files describe, and tells models of all that there are.

    Args:
        user_folder: The person's own, with their ``agents``.
    """

    def __init__(self, user_folder: str) -> None:
        self._folder = os.path.join(user_folder, "agents")
        self._looks: WeakKeyDictionary[Agent, _Look] = WeakKeyDictionary()

    def use(self, runtime: AgentRuntime) -> None:
        """Let every agent of `runtime` delegate to them."""
        runtime.subagents.files = self
        runtime.hooks.on("system-prompt/assemble", self._assemble)

    async def known(
        self, agent: Agent, signal: AbortSignal | None = None
    ) -> Mapping[str, AgentFile]:
        """Return those that `agent` can delegate to, by name.

        Cancellation: through `signal`; a file that is being read is read to its end.
        Concurrency: any number of tasks.

        Raises:
            TurnAborted: The signal fired.
        """
        if signal is not None:
            signal.raise_if_aborted()
        last, turn = self._looks.get(agent.root), agent.root.session.state.last_turn
        look = await anyio.to_thread.run_sync(self._look, agent.roots, turn, last, signal)
        if signal is not None:
            signal.raise_if_aborted()
        self._looks[agent.root] = look
        return look.found

    async def _assemble(
        self,
        assembly: Assembly,
        context: AssembleContext,
        next_: Callable[[Assembly, AssembleContext], Awaitable[Assembly]],
    ) -> Assembly:
        """Name them in the delegate tool's description.

        Cancellation: through ``context.signal``. Concurrency: any number of agents.
        """
        if any(spec.name == _DELEGATE for spec in assembly.tools):
            agent = context.agent
            last = self._looks.get(agent.root)
            if last is not None and last.turn == agent.root.session.state.last_turn:
                files = last.found  # what is said of the tools stays the same for a whole turn
            else:
                files = await self.known(agent, context.signal)
            tools = tuple(_with_list(spec, agent, files) for spec in assembly.tools)
            assembly = replace(assembly, tools=tools)
        return await next_(assembly, context)

    # --- in a worker thread ------------------------------------------------------------------

    def _look(
        self, roots: Roots, turn: int, last: _Look | None, signal: AbortSignal | None
    ) -> _Look:
        found_in = markdown_files("agents", roots.cwd, roots.additional, self._folder)
        files = list(islice(found_in, _MAX_FILES))
        signature = (roots, [signature_of(path) for path, _within in files])
        if last is not None and last.signature == signature:
            return structs.replace(last, turn=turn)
        found: dict[str, AgentFile] = {}
        for path, within in files:
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
        return _Look(turn, signature, found)


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
