"""`Files` as tools get them: before a file is written, the log keeps what it held.

The event is committed before the file is touched, so that no crash comes between them; whether the
file was written in the end is seen from the file itself, by its hash.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Final

from agent_core.cancellation import AbortSignal
from agent_core.errors import ToolError
from agent_core.events import FileChanged, TurnStart
from agent_core.sessions.log import Session
from agent_core.tools.tool import Files

__all__ = ["MAX_FILE_BYTES", "MAX_TURN_BYTES", "KeptFiles", "hash_of"]

MAX_FILE_BYTES: Final = 2**20
"""Of one file, so much is kept."""
MAX_TURN_BYTES: Final = 16 * 2**20
"""Of all files that one turn changes."""


def hash_of(text: str) -> str:
    """Return what tells one file's text from another."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class KeptFiles:
    """The `Files` protocol for one tool call, around the agent's own.

    Args:
        files: What reads and writes.
        session: Whose log keeps what was there; for a subagent that of the agent at the top, whose
            person may want it back.
        call_id: The call's.
    """

    def __init__(self, files: Files, session: Session, call_id: str) -> None:
        self._files = files
        self._session = session
        self._call_id = call_id
        self._seen: dict[str, str | ToolError] = {}  # what this call last saw of a file

    async def read(self, path: str, signal: AbortSignal) -> str:
        """See `Files.read`.

        Cancellation: through `signal`. Concurrency: any number of tasks.
        """
        try:
            text = await self._files.read(path, signal)
        except ToolError as exc:
            self._seen[path] = exc
            raise
        self._seen[path] = text
        return text

    async def write(self, path: str, text: str, signal: AbortSignal) -> None:
        """See `Files.write`. What the call read last counts as what was there.

        Cancellation: through `signal`. Concurrency: one task for each path.
        """
        if path not in self._seen:
            with contextlib.suppress(ToolError):  # then that is what was seen
                await self.read(path, signal)
        signal.raise_if_aborted()
        before = self._seen[path]
        if before != text:
            self._session.append(self._change(path, before, hash_of(text)))
        await self._files.write(path, text, signal)
        self._seen[path] = text

    def _change(self, path: str, before: str | ToolError, after: str) -> FileChanged:
        at = (self._call_id, path, after)
        if isinstance(before, ToolError):
            is_new = before.code == "NOT_FOUND"
            return FileChanged(*at, lost="" if is_new else before.message or "it cannot be read")
        kept_bytes, last = self._turn_so_far(path)
        size_bytes = len(before.encode("utf-8", "surrogatepass"))
        if last == hash_of(before):
            return FileChanged(*at, follows=True)
        if size_bytes > MAX_FILE_BYTES:
            return FileChanged(*at, lost=f"it was larger than {MAX_FILE_BYTES // 2**20} MiB")
        if kept_bytes + size_bytes > MAX_TURN_BYTES:
            limit = f"{MAX_TURN_BYTES // 2**20} MiB"
            return FileChanged(*at, lost=f"the turn had changed more than {limit} before it")
        return FileChanged(*at, before)

    def _turn_so_far(self, path: str) -> tuple[int, str | None]:
        """Return how many bytes the turn has kept, and the hash it last gave the file."""
        kept_bytes, last = 0, None
        for event in reversed(self._session.events):
            data = event.data
            if isinstance(data, TurnStart):
                break
            if isinstance(data, FileChanged):
                kept_bytes += len((data.before or "").encode())
                if last is None and data.path == path:
                    last = data.after
        return kept_bytes, last
