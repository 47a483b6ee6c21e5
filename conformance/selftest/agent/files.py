"""Files: through the client where it offers them, else on our disk; never outside the roots."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import Final

from conformance.selftest.agent.rpc import Connection, Message, RpcError

__all__ = ["Files", "ToolError"]

READ_LIMIT_BYTES: Final = 4 * 1024 * 1024
SEARCH_LIMIT: Final = 50


class ToolError(Exception):
    """A tool did not work. The text is for the model and for people."""


class Files:
    """The files of one session.

    Args:
        connection: The client.
        capabilities: The client's ``fs``; whatever is not exactly true is not offered.
        session_id: For requests to the client.
        roots: Absolute folders; the first is the base of relative paths.
    """

    def __init__(
        self, connection: Connection, capabilities: object, session_id: str, roots: list[str]
    ) -> None:
        offered = capabilities if isinstance(capabilities, dict) else {}
        self._connection = connection
        self._session_id = session_id
        self._roots = roots
        self._can_read = offered.get("readTextFile") is True
        self._can_write = offered.get("writeTextFile") is True

    def place(self, path: str) -> str:
        """Return the absolute path.

        Raises:
            ToolError: It is outside the roots, also by way of a link.
        """
        full = os.path.normpath(os.path.join(self._roots[0], path))
        real = os.path.realpath(full)
        for root in map(os.path.realpath, self._roots):
            if os.path.commonpath([root, real]) == root:
                return full
        raise ToolError("the path is outside the folders of this session")

    async def read(self, path: str) -> str:
        """Return the text of a file. May be cancelled.

        Raises:
            ToolError: It cannot be read.
        """
        if not self._can_read:
            return _read(path)
        params = {"sessionId": self._session_id, "path": path}
        result = await self._ask("fs/read_text_file", params)
        content = result.get("content") if isinstance(result, dict) else None
        if not isinstance(content, str):
            raise ToolError("the client gave no content")
        return content

    async def write(self, path: str, content: str) -> None:
        """Make or replace a file. May be cancelled; the file is whole then, the old or the new.

        Raises:
            ToolError: It cannot be written.
        """
        if not self._can_write:
            return _write(path, content)
        params = {"sessionId": self._session_id, "path": path, "content": content}
        await self._ask("fs/write_text_file", params)

    def names(self, path: str) -> list[str]:
        """Return what is in a folder, folders with a slash.

        Raises:
            ToolError: It cannot be listed.
        """
        try:
            with os.scandir(path) as entries:
                return sorted(each.name + "/" * each.is_dir() for each in entries)
        except OSError as error:
            raise ToolError(_reason(error)) from None

    def matches(self, pattern: str) -> list[str]:
        """Return ``FILE:LINE: TEXT`` for lines with `pattern` in them, not too many."""
        found: list[str] = []
        for folder, folders, names in os.walk(self._roots[0]):
            folders[:] = sorted(each for each in folders if not each.startswith("."))
            for name in sorted(names):
                found.extend(self._matches(os.path.join(folder, name), pattern))
                if len(found) >= SEARCH_LIMIT:
                    return found[:SEARCH_LIMIT]
        return found

    def _matches(self, path: str, pattern: str) -> Iterator[str]:
        try:
            lines = _read(path).splitlines()
        except ToolError:
            return
        shown = os.path.relpath(path, self._roots[0])
        for number, line in enumerate(lines, 1):
            if pattern in line:
                yield f"{shown}:{number}: {line[:200]}"

    async def _ask(self, method: str, params: Message) -> object:
        reply = self._connection.request(method, params)
        try:
            return await reply
        except RpcError as error:
            raise ToolError(_one_line(error.message)) from None
        finally:
            self._connection.abandon(reply)


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not hold us up
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ToolError("this is no file")
            content = file.read(READ_LIMIT_BYTES + 1)
    except OSError as error:
        raise ToolError(_reason(error)) from None
    if len(content) > READ_LIMIT_BYTES:
        raise ToolError("the file is too big")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ToolError("the file is no text") from None


def _write(path: str, content: str) -> None:
    draft = f"{path}.{os.getpid()}.new"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content.encode("utf-8", "replace"))
        if os.path.exists(path):
            os.chmod(draft, stat.S_IMODE(os.stat(path).st_mode))
        os.rename(draft, os.path.realpath(path))
    except OSError as error:
        raise ToolError(_reason(error)) from None


def _reason(error: OSError) -> str:
    return error.strerror or "it does not work"


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:200]
