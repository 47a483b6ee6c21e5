"""Commands that people bring as files: ``.agents/commands/NAME.md``, a prompt with a name.

They lie in the project, from the session's directory up to the root of the repository, and in the
person's own folder; the nearer wins. What is behind the front matter is the prompt: in it
``$ARGUMENTS`` stands for what was typed behind the name, ``$1`` to ``$9`` for its words.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Final

from msgspec import UNSET, Struct

from acp_server.types import AvailableCommand, CommandInput
from agent_core.cancellation import AbortSignal
from agent_core.logs import get_logger
from agent_core.project_files import Found, read_in_thread
from agent_core.project_text import read_text, reason_of, split_front_matter
from agent_core.text import printable, shortened

__all__ = ["MAX_COMMANDS", "CommandFile", "CommandFiles", "expanded"]

MAX_COMMANDS: Final = 200
"""So many are offered; a client shows them all in one menu."""
MAX_BODY_BYTES: Final = 64 * 1024
_MAX_NAME_CHARS: Final = 64
_MAX_LINE_CHARS: Final = 200
_PLACEHOLDER: Final = re.compile(r"\$(?:ARGUMENTS\b|([1-9])(?!\d))")

log = get_logger(__name__)


class CommandFile(Struct, frozen=True):
    """One command: its file, what the client offers, and the prompt."""

    name: str
    path: str
    description: str
    hint: str
    body: str

    @property
    def offer(self) -> AvailableCommand:
        """The command as a client lists it."""
        hint = CommandInput(self.hint) if self.hint else UNSET
        return AvailableCommand(self.name, self.description, hint)


class CommandFiles:
    """The command files of one session, read again when one of them has changed.

    Attributes:
        commands: What there was at the last look, by name.

    Args:
        reserved: Names that no file can take.
    """

    def __init__(self, reserved: frozenset[str]) -> None:
        self.commands: dict[str, CommandFile] = {}
        self._reserved = reserved
        self._read: tuple[Found, ...] = ()

    async def update(self, files: tuple[Found, ...], signal: AbortSignal | None = None) -> bool:
        """Take what a look found; return whether there are other commands than before.

        Cancellation: through `signal`; a file that is being read is read to its end.
        Concurrency: any number of tasks; the last one's files hold.

        Raises:
            TurnAborted: The signal fired; `commands` is as it was.
        """
        if files == self._read:
            return False
        found = await read_in_thread(self._read_all, files, signal)
        was, self.commands, self._read = self.commands, found, files
        return found != was

    # --- in a worker thread ------------------------------------------------------------------

    def _read_all(
        self, files: tuple[Found, ...], signal: AbortSignal | None
    ) -> dict[str, CommandFile]:
        found: dict[str, CommandFile] = {}
        for path, within, _stamp in files:
            if signal is not None and signal.aborted:
                break  # whoever waits for this says so
            name = _name_of(path)
            if len(found) >= MAX_COMMANDS:
                log.warning("command_files_left_out", from_path=path)
                break
            if not name or name in self._reserved or name in found:
                log.info("command_file_skipped", path=path, reason="its name is not free")
            elif (command := _read(path, name, within)) is not None:
                found[name] = command
        return found


def _name_of(path: str) -> str:
    """Return the name of a file's command: what a person can type behind a slash."""
    stem = os.path.basename(path).removesuffix(".md")
    return re.sub(r"[^\w-]+", "-", stem).strip("-")[:_MAX_NAME_CHARS]


def _read(path: str, name: str, within: tuple[str, ...] | None) -> CommandFile | None:
    try:
        file = read_text(path, max_bytes=MAX_BODY_BYTES, within=within)
        if file is None:
            return None
        if file.cut_from_bytes is not None:
            raise ValueError(f"it is larger than {MAX_BODY_BYTES // 1024} KiB")
        settings, body = split_front_matter(file.text)
        if not body.strip():
            raise ValueError("it has no prompt")
    except (OSError, ValueError) as exc:
        log.warning("command_file_skipped", path=path, reason=reason_of(exc))
        return None
    described = settings.get("description") or body.strip().splitlines()[0]
    return CommandFile(
        name,
        path,
        shortened(printable(described), _MAX_LINE_CHARS),
        shortened(printable(settings.get("argument-hint", "")), _MAX_LINE_CHARS),
        body.strip(),
    )


# --- in use ---------------------------------------------------------------------------------


def expanded(body: str, arguments: str) -> str:
    """Return the prompt with what was typed in its places; at its end, if it has no place for it.

    Words are those of a shell: quotes keep them together. What was typed is not looked into again.
    """
    words = _words(arguments)

    def fill(match: re.Match[str]) -> str:
        if match[1] is None:
            return arguments
        index = int(match[1]) - 1
        return words[index] if index < len(words) else ""

    text, n_places = _PLACEHOLDER.subn(fill, body)
    return text if n_places or not arguments else f"{text}\n\n{arguments}"


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError:  # an apostrophe, say
        return arguments.split()
