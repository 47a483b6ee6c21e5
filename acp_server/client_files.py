"""The client's files, unsaved changes and all, where it offers them; the local disk elsewhere.

The disk is looked at first, also when the client is asked: it knows better than most clients what
is a directory, what is not text, and what is not there, and it has the exact bytes of a file that
nobody is changing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from typing import Any, Final

import anyio.to_thread

from acp_server import types as wire
from acp_server.capabilities import Features
from acp_server.client_calls import call_client
from acp_server.peer import Peer
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.errors import ToolError
from agent_core.tools.local_files import MAX_FILE_BYTES
from agent_core.tools.tool import Files

__all__ = ["ClientFiles", "lend_files"]

# What the disk says that holds whatever a client says.
_FINAL: Final = frozenset({"NOT_A_FILE", "NOT_TEXT", "TOO_LARGE"})


def lend_files(agent: Agent, session_id: str, peer: Peer, features: Features) -> Callable[[], None]:
    """Have `agent` work on the client's files, as far as the client offers it.

    Returns:
        What gives the agent the local files back, unless others were lent to it since.
    """
    local = agent.files.local if isinstance(agent.files, ClientFiles) else agent.files
    lent = local
    if features.reads_files or features.writes_files:
        lent = ClientFiles(session_id, peer, features, local)
    agent.files = lent

    def give_back() -> None:
        if agent.files is lent:
            agent.files = local

    return give_back


class ClientFiles:
    """The `Files` protocol through ``fs/read_text_file`` and ``fs/write_text_file``.

    Attributes:
        local: What does the rest.
    """

    def __init__(self, session_id: str, peer: Peer, features: Features, local: Files) -> None:
        self.local = local
        self._session_id = session_id
        self._peer = peer
        self._features = features

    async def read(self, path: str, signal: AbortSignal) -> str:
        """Return the text as the client has it; see `Files.read`.

        Without unsaved changes it is the disk's own, line endings and byte order mark included,
        which editors keep apart from the text.
        Cancellation: through `signal`. Concurrency: any number of tasks.
        """
        if not self._features.reads_files:
            return await self.local.read(path, signal)
        on_disk = await self._on_disk(path, signal)
        try:
            text = await self._ask_to_read(path, signal)
        except ToolError as exc:
            if exc.code == "NOT_FOUND" and isinstance(on_disk, str):
                return on_disk  # it has no such buffer, but there is such a file
            if exc.code == "CLIENT_ERROR" and _is_missing(on_disk):
                raise ToolError(f"{path} does not exist ({exc.message})", code="NOT_FOUND") from exc
            raise
        if isinstance(on_disk, str) and _without_form(text) == _without_form(on_disk):
            return on_disk
        if not text and _is_missing(on_disk):  # some editors open a buffer for any path
            raise ToolError(f"{path} does not exist", code="NOT_FOUND")
        _check(path, text)
        return text

    async def write(self, path: str, text: str, signal: AbortSignal) -> None:
        """Replace or create a file by way of the client; see `Files.write`.

        Cancellation: through `signal`; a client that was asked already may write it all the same.
        Concurrency: one task for each path.
        """
        if not self._features.writes_files:
            return await self.local.write(path, text, signal)
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise ToolError("the text has a lone surrogate, which UTF-8 cannot hold") from exc
        on_disk = await self._on_disk(path, signal, final=("NOT_A_FILE",))
        try:
            await self._ask_to_write(path, text, signal)
        except ToolError as exc:
            if exc.code not in ("NOT_FOUND", "CLIENT_ERROR") or not _is_missing(on_disk):
                raise
            if not await anyio.to_thread.run_sync(_make_directory, os.path.dirname(path)):
                raise
            # It may only have lacked the directory, which a client need not make.
            await self._ask_to_write(path, text, signal)

    async def _on_disk(
        self, path: str, signal: AbortSignal, *, final: Collection[str] = _FINAL
    ) -> str | ToolError:
        """Return the text that is on disk, or why there is none; raise if that is `final`."""
        try:
            return await self.local.read(path, signal)
        except ToolError as exc:
            if exc.code in final:
                raise
            return exc

    async def _ask_to_read(self, path: str, signal: AbortSignal) -> str:
        params = {"sessionId": self._session_id, "path": path}
        method = "fs/read_text_file"
        return (await call_client(self._peer, method, params, wire.FileText, signal=signal)).content

    async def _ask_to_write(self, path: str, text: str, signal: AbortSignal) -> None:
        params = {"sessionId": self._session_id, "path": path, "content": text}
        await call_client(self._peer, "fs/write_text_file", params, Any, signal=signal)


def _is_missing(on_disk: str | ToolError) -> bool:
    return isinstance(on_disk, ToolError) and on_disk.code == "NOT_FOUND"


def _without_form(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _check(path: str, text: str) -> None:
    """Refuse what would be refused if it were on the local disk."""
    if len(text) > MAX_FILE_BYTES or len(text.encode()) > MAX_FILE_BYTES:
        raise ToolError(
            f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB; use a command to see "
            "parts of it",
            code="TOO_LARGE",
        )
    if "\0" in text:
        raise ToolError(f"{path} is a binary file, not text", code="NOT_TEXT")


def _make_directory(path: str) -> bool:
    """Return whether it was missing and is there now."""
    if os.path.isdir(path):
        return False
    with contextlib.suppress(OSError):
        os.makedirs(path, exist_ok=True)
    return os.path.isdir(path)
