"""What the model is told about a project: ``AGENTS.md`` files, and the skills there are.

Both become sections of the system prompt. They are what a turn's look into the project found, and
are read again only when one of them has changed; so a turn keeps the prompt it began with.

Instructions are those of the person's own folder first, then of every directory from the root of
the repository down to the session's: the nearer, the later, and the last to be cut. Skills are
listed by name, description and path, for the model to read with its tools; so only those that lie
in the session's directories are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from agent_core.cancellation import AbortSignal
from agent_core.hooks import Hooks
from agent_core.logs import get_logger
from agent_core.project_files import Found, read_in_thread
from agent_core.project_text import read_text, reason_of, split_front_matter
from agent_core.prompt import AssembleContext, Assembly
from agent_core.text import printable, replace_surrogates, shortened

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["Instructions", "Knowledge", "Known", "Skill"]

MAX_INSTRUCTION_BYTES: Final = 32 * 1024
"""Of all ``AGENTS.md`` files together."""
MAX_SKILLS: Final = 64
_MAX_SKILL_BYTES: Final = 16 * 1024  # its head is all that is read here
_IS_NAME: Final = re.compile(r"[\w-]{1,64}").fullmatch
_MAX_DESCRIPTION_CHARS: Final = 500

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Instructions:
    """What one ``AGENTS.md`` says. `cut_from_bytes` is the whole file's size if it is not all."""

    path: str
    text: str
    cut_from_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Skill:
    """Instructions for one kind of task, in the file at `path`."""

    name: str
    description: str
    path: str


@dataclass(frozen=True, slots=True)
class Known:
    """What there is to know: instructions with the nearest last, and skills by name."""

    instructions: tuple[Instructions, ...] = ()
    skills: tuple[Skill, ...] = ()

    @property
    def sections(self) -> dict[str, str]:
        """The sections of the system prompt that tell it."""
        sections = {"instructions": _told(self.instructions), "skills": _listed(self.skills)}
        return {name: replace_surrogates(text) for name, text in sections.items() if text}


_Files = tuple[tuple[Found, ...], tuple[Found, ...]]  # of instructions, and of skills
_NOTHING: Final[tuple[_Files, Known]] = (((), ()), Known())


class Knowledge:
    """Tells agents what their project's files say."""

    def __init__(self) -> None:
        self._read: WeakKeyDictionary[Agent, tuple[_Files, Known]] = WeakKeyDictionary()

    def listen(self, hooks: Hooks) -> None:
        """Register the listener for every agent of `hooks`."""
        hooks.on("system-prompt/assemble", self._assemble)

    async def known(self, agent: Agent, signal: AbortSignal | None = None) -> Known:
        """Return what the agent is told, in the turn that runs or if one began now.

        Cancellation: through `signal`; a file that is being read is read to its end.
        Concurrency: any number of tasks.

        Raises:
            TurnAborted: The signal fired.
        """
        look = await agent.project_files.look(agent, signal)
        files = look.instructions, look.skills
        # A subagent is told what its root is, unless something has changed since.
        read, known = self._read.get(agent) or self._read.get(agent.root) or _NOTHING
        if files != read:
            known = await read_in_thread(_read, files, signal)
            self._read[agent] = files, known
        return known

    async def _assemble(
        self,
        assembly: Assembly,
        context: AssembleContext,
        next_: Callable[[Assembly, AssembleContext], Awaitable[Assembly]],
    ) -> Assembly:
        known = await self.known(context.agent, context.signal)
        sections = {**assembly.sections, **known.sections}
        return await next_(replace(assembly, sections=sections), context)


# --- in a worker thread ---------------------------------------------------------------------


def _read(files: _Files, signal: AbortSignal | None) -> Known:
    instructions, skills = files
    return Known(_instructions(instructions, signal), _skills(skills, signal))


def _instructions(files: tuple[Found, ...], signal: AbortSignal | None) -> tuple[Instructions, ...]:
    """Read the files, the last one first, until there is no more room."""
    found: list[Instructions] = []
    seen: set[str] = set()
    room_bytes = MAX_INSTRUCTION_BYTES
    for path, within, _stamp in reversed(files):
        if signal is not None and signal.aborted:
            break  # whoever waits for this says so
        try:
            if (real := os.path.realpath(path)) in seen:
                continue
            file = read_text(path, max_bytes=room_bytes, within=within)
        except (OSError, ValueError) as exc:
            log.warning("instructions_skipped", path=path, reason=reason_of(exc))
            continue
        if file is not None and (file.text.strip() or file.cut_from_bytes is not None):
            seen.add(real)
            room_bytes -= len(file.text.encode())
            found.append(Instructions(path, file.text.strip(), file.cut_from_bytes))
    return tuple(found[::-1])


def _skills(files: tuple[Found, ...], signal: AbortSignal | None) -> tuple[Skill, ...]:
    found: dict[str, Skill] = {}
    for path, within, _stamp in files:
        if signal is not None and signal.aborted:
            break
        try:
            skill = _skill(path, within)
        except (OSError, ValueError) as exc:
            log.warning("skill_skipped", path=path, reason=reason_of(exc))
            continue
        if skill is not None:
            found.setdefault(skill.name, skill)
    if len(found) > MAX_SKILLS:
        log.warning("skills_left_out", count=len(found) - MAX_SKILLS)
    return tuple(found[name] for name in sorted(found)[:MAX_SKILLS])


def _skill(path: str, within: tuple[str, ...] | None) -> Skill | None:
    file = read_text(path, max_bytes=_MAX_SKILL_BYTES, within=within)
    if file is None:
        return None
    settings, _body = split_front_matter(file.text)
    name = settings.get("name") or os.path.basename(os.path.dirname(path))
    if not settings.get("description"):
        raise ValueError("its front matter has no description")
    if not _IS_NAME(name):
        raise ValueError("its name is not one of letters, digits, hyphens and underscores")
    return Skill(name, shortened(printable(settings["description"]), _MAX_DESCRIPTION_CHARS), path)


# --- as the model reads it ------------------------------------------------------------------


def _told(instructions: tuple[Instructions, ...]) -> str:
    if not instructions:
        return ""
    head = "Instructions of the person and the project. Where they disagree, the later ones hold."
    return "\n\n".join((head, *(_element(each) for each in instructions)))


def _element(each: Instructions) -> str:
    note = ""
    if each.cut_from_bytes is not None:
        shown = len(each.text.encode())
        note = f"\n[cut: about {shown} of {each.cut_from_bytes} bytes are shown]"
    return f'<instructions path="{each.path}">\n{each.text}{note}\n</instructions>'


def _listed(skills: tuple[Skill, ...]) -> str:
    if not skills:
        return ""
    head = "Skills: instructions for particular tasks. When one fits, read its file first."
    return "\n".join((head, *(f"- {s.name}: {s.description} ({s.path})" for s in skills)))
