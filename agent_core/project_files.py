"""The files in a project and in a person's own folder that agents are made of: one look for all.

A look lists them once a turn, in a worker thread that begins when the prompt comes. It opens none:
whoever is told by one reads it, in a worker thread too, and again only when a look shows that it
has changed. A project may be anybody's, so with each file comes where links in it may lead to.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import anyio.to_thread

from agent_core import execution
from agent_core.cancellation import AbortSignal
from agent_core.errors import ToolError
from agent_core.hooks import Hooks
from agent_core.logs import get_logger
from agent_core.project_text import reason_of
from agent_core.tools.roots import Roots

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["Found", "Look", "ProjectFiles", "read_in_thread"]

_MAX_ENTRIES: Final = 10_000  # of a directory; nobody has so many commands or skills
_MAX_FILES: Final = 1000  # of a kind

_Files = Iterable[tuple[str, tuple[str, ...] | None]]
_Some = TypeVar("_Some")
_T = TypeVar("_T")

log = get_logger(__name__)


class Found(NamedTuple):
    """A file as a look saw it.

    `within` are the directories that links may lead to, `None` for any. The `stamp` is another one
    when the file has changed, in all likelihood.
    """

    path: str
    within: tuple[str, ...] | None
    stamp: object


class Look(NamedTuple):
    """What there is at one moment. Two looks are equal if nothing has changed between them.

    `instructions` are the ``AGENTS.md`` files: the person's, then those from the root of the
    repository down. `skills` are the ``.agents/skills/*/SKILL.md`` of the session's directories.
    `agents` and `commands` are the Markdown files in ``.agents`` from the session's directory up to
    the root of the repository, then the person's own.
    """

    instructions: tuple[Found, ...]
    skills: tuple[Found, ...]
    agents: tuple[Found, ...]
    commands: tuple[Found, ...]


class ProjectFiles:
    """Looks for the files of agents' projects: once a turn, for everybody who reads some of them.

    Args:
        user_folder: The person's own; empty if there is none.
    """

    def __init__(self, user_folder: str = "") -> None:
        self._user_folder = user_folder
        # The look of a turn, with the turn's number: the one that runs, or the next one.
        self._looks: WeakKeyDictionary[Agent, tuple[int, asyncio.Future[Look]]]
        self._looks = WeakKeyDictionary()

    def listen(self, hooks: Hooks) -> None:
        """Begin a turn's look when its prompt comes, and not when somebody needs it."""
        hooks.on("agent/queued", self._look_ahead)

    async def look(self, agent: Agent, signal: AbortSignal | None = None) -> Look:
        """Return the look of the turn that runs, the same for all of it; a new one if none does.

        Cancellation: through `signal`, at the end of the look. Concurrency: any number of tasks.

        Raises:
            TurnAborted: The signal fired.
        """
        state = agent.session.state
        if not state.open_turn:
            return await self.look_again(agent, signal)
        if signal is not None:
            signal.raise_if_aborted()
        turn, looking = self._looks.get(agent, (0, None))
        if looking is None or turn != state.last_turn:
            looking = self._begin(agent, state.last_turn)
        return await _looked(looking, signal)

    async def look_again(self, agent: Agent, signal: AbortSignal | None = None) -> Look:
        """Return a new look, also in a turn, whose own stays what it is.

        Cancellation: through `signal`, at the end of the look. Concurrency: any number of tasks.

        Raises:
            TurnAborted: The signal fired.
        """
        if signal is not None:
            signal.raise_if_aborted()
        return await _looked(self._start(agent), signal)

    def _look_ahead(self, agent: Agent, _content: object, _delivery: object) -> None:
        # What the prompts before this one do may change files, so theirs have to be over.
        if agent.status == "idle" and agent.n_queued == 1:
            self._begin(agent, agent.session.state.last_turn + 1)

    def _begin(self, agent: Agent, turn: int) -> asyncio.Future[Look]:
        looking = self._start(agent)
        self._looks[agent] = turn, looking
        return looking

    def _start(self, agent: Agent) -> asyncio.Future[Look]:
        # Not anyio's thread: that needs a task to wait for it, and a look ahead has none yet.
        context = execution.context_for(agent, contextvars.copy_context())
        return asyncio.get_running_loop().run_in_executor(
            None, context.run, _look, self._user_folder, agent.roots
        )


async def _looked(looking: asyncio.Future[Look], signal: AbortSignal | None) -> Look:
    look = await asyncio.shield(looking)  # others may be waiting for it
    if signal is not None:
        signal.raise_if_aborted()
    return look


async def read_in_thread(
    read: Callable[[_Some, AbortSignal | None], _T], files: _Some, signal: AbortSignal | None
) -> _T:
    """Return what `read` makes of the files; it may stop between two of them when `signal` fires.

    Cancellation: through `signal`; a file that is being read is read to its end.
    Concurrency: any number of tasks.

    Raises:
        TurnAborted: The signal fired.
    """
    result = await anyio.to_thread.run_sync(read, files, signal)
    if signal is not None:
        signal.raise_if_aborted()
    return result


# --- a look, in a worker thread --------------------------------------------------------------


def _look(user_folder: str, roots: Roots) -> Look:
    places = (roots.cwd, *roots.additional)
    nearest_last = _directories_of(roots.cwd)
    instructions = [(f"{place}/AGENTS.md", (place, *places)) for place in nearest_last]
    own: _Files = [(f"{user_folder}/AGENTS.md", None)] if user_folder else ()
    return Look(
        _stamped((*own, *instructions)),
        _stamped(_skills(roots)),
        _stamped(_markdown("agents", nearest_last, places, user_folder)),
        _stamped(_markdown("commands", nearest_last, places, user_folder)),
    )


def _stamped(files: _Files) -> tuple[Found, ...]:
    found = []
    for path, within in islice(files, _MAX_FILES):
        stamp: object
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as exc:  # whoever reads it hears why, too
            stamp = exc.errno
        else:
            stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
        found.append(Found(path, within, stamp))
    return tuple(found)


def _directories_of(cwd: str) -> list[str]:
    """Return the real directories from the root of the repository that `cwd` is in down to it.

    Outside of a repository that is `cwd` alone.
    """
    here = os.path.realpath(cwd)
    found = [here]
    while not os.path.lexists(os.path.join(found[-1], ".git")):
        above = os.path.dirname(found[-1])
        if above == found[-1]:
            return [here]
        found.append(above)
    return found[::-1]


def _skills(roots: Roots) -> _Files:
    places = (roots.cwd, *roots.additional)
    for place in places:
        folder = os.path.join(place, ".agents", "skills")
        names = _entries_of(folder)
        try:
            if names:
                roots.resolve(folder)
        except ToolError as exc:
            log.warning("project_folder_skipped", path=folder, reason=exc.message)
        else:
            yield from ((os.path.join(folder, name, "SKILL.md"), places) for name in names)


def _markdown(
    kind: str, nearest_last: list[str], places: tuple[str, ...], user_folder: str
) -> _Files:
    folders: list[tuple[str, tuple[str, ...] | None]] = [
        (os.path.join(place, ".agents", kind), (place, *places)) for place in nearest_last[::-1]
    ]
    if user_folder:
        folders.append((os.path.join(user_folder, kind), None))
    for folder, within in folders:
        for name in _entries_of(folder):
            if name.endswith(".md") and not name.startswith("."):
                yield os.path.join(folder, name), within


def _entries_of(folder: str) -> list[str]:
    """Return the names in a folder, sorted; none if there is no such folder, or no way in."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in islice(entries, _MAX_ENTRIES))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as exc:
        log.warning("project_folder_skipped", path=folder, reason=reason_of(exc))
    return []
