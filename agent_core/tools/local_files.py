"""Files on the local disk: whole, regular, UTF-8, and replaced in one step."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from typing import Final

import anyio.to_thread

from agent_core.cancellation import AbortSignal
from agent_core.errors import ToolError

__all__ = ["MAX_FILE_BYTES", "LocalFiles"]

MAX_FILE_BYTES: Final = 10 * 2**20  # far more than a model can read; a guard for our memory
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalFiles:
    """The `Files` protocol on the local disk. Has no state."""

    async def read(self, path: str, signal: AbortSignal) -> str:
        """Return the text of a regular file of at most 10 MiB; see `Files.read`.

        A byte order mark is the first character. Anything else than a regular file is refused
        without reading from it, so that no FIFO or device can block.
        Cancellation: through `signal`. Concurrency: any number of tasks.
        """
        signal.raise_if_aborted()
        text = await anyio.to_thread.run_sync(_read, path)
        signal.raise_if_aborted()
        return text

    async def write(self, path: str, text: str, signal: AbortSignal) -> None:
        """Replace or create a file; see `Files.write`.

        Whoever reads meanwhile sees the old or the new text, never a part. An existing file keeps
        its permission bits and, where we may set it, its owner.
        Cancellation: through `signal`, before it begins. Concurrency: one task for each path.
        """
        signal.raise_if_aborted()
        await anyio.to_thread.run_sync(_write, path, text)


def _read(path: str) -> str:
    try:
        fd = os.open(path, _READ_FLAGS)
        try:
            _check_regular(path, os.fstat(fd))
            with open(fd, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)  # files of /proc have no size to look at
        finally:
            os.close(fd)
    except OSError as exc:
        raise _failure("read", path, exc) from exc
    if len(data) > MAX_FILE_BYTES:
        raise ToolError(
            f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB; use a command to see "
            "parts of it",
            code="TOO_LARGE",
        )
    if b"\0" in data:
        raise ToolError(f"{path} is a binary file, not text", code="NOT_TEXT")
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise ToolError(
            f"{path} is not UTF-8 text: byte {exc.start} is wrong", code="NOT_TEXT"
        ) from exc


def _write(path: str, text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError as exc:
        raise ToolError("the text has a lone surrogate, which UTF-8 cannot hold") from exc
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory, exist_ok=True)
        before = _status(path)
        if before is not None:
            _check_regular(path, before)
            if not os.access(path, os.W_OK):
                raise ToolError(f"{path} cannot be written: it is read-only", code="READ_ONLY")
        temporary = os.path.join(directory, f".{uuid.uuid4().hex}.tmp")
        try:
            _create(temporary, data, before)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as exc:
        raise _failure("written", path, exc) from exc


def _create(path: str, data: bytes, model: os.stat_result | None) -> None:
    """Write a new file that looks like `model` from outside."""
    with open(os.open(path, _WRITE_FLAGS, 0o666), "wb") as file:
        if model is not None:
            created = os.fstat(file.fileno())
            if (created.st_uid, created.st_gid) != (model.st_uid, model.st_gid):
                with contextlib.suppress(PermissionError):  # only root may give files away
                    os.fchown(file.fileno(), model.st_uid, model.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(model.st_mode))
        file.write(data)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _check_regular(path: str, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise ToolError(f"{path} is a directory; use list to see what is in it", code="NOT_A_FILE")
    if not stat.S_ISREG(status.st_mode):
        raise ToolError(
            f"{path} is not a regular file (a device, FIFO, socket or link)", code="NOT_A_FILE"
        )


def _failure(verb: str, path: str, error: OSError) -> ToolError:
    if isinstance(error, FileNotFoundError):
        return ToolError(f"{path} does not exist; use list to see what does", code="NOT_FOUND")
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return ToolError(f"{path} cannot be {verb}: a part of the path is a file")
    return ToolError(f"{path} cannot be {verb}: {error.strerror}")
