"""Keys that ``acp-agent login`` keeps: one file, beside the configuration, that its owner can read.

The file is never there with other rights than those, nor half written; symbolic links are not
followed, neither the file's nor its folder's. It is read whenever a key is needed, so that a login
counts from the next model call on.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from acp_server.config import config_dir
from agent_core.logs import get_logger

__all__ = [
    "KeysUnusable",
    "forget_keys",
    "keys_file",
    "keys_stamp",
    "store_key",
    "stored_key",
    "stored_keys",
]

FILE: Final = "keys.toml"
MAX_BYTES: Final = 64 * 1024
_HEAD: Final = "# Kept by `acp-agent login`; `acp-agent logout` removes them.\n"

log = get_logger(__name__)


class KeysUnusable(Exception):
    """The file cannot be used; the message says why, and never has a key in it."""


def keys_file() -> Path:
    """Return where the keys are."""
    return config_dir() / FILE


def stored_key(provider: str) -> str | None:
    """Return the key stored for `provider`; `None` if there is none, or none that can be used."""
    try:
        return stored_keys().get(provider)
    except KeysUnusable as exc:
        log.warning("stored_keys_unusable", problem=str(exc))
        return None


def keys_stamp() -> tuple[object, ...]:
    """Return what is another value after every change of the file or of its folder."""
    stamp: list[object] = []
    for place in (config_dir(), keys_file()):
        try:
            status = os.lstat(place)
        except OSError as exc:
            stamp.append(exc.errno)
        else:
            stamp += (status.st_ino, status.st_mode, status.st_size, status.st_ctime_ns)
    return tuple(stamp)


def stored_keys() -> dict[str, str]:
    """Return all keys by provider.

    Raises:
        KeysUnusable: The file is not the owner's alone, or broken.
    """
    try:
        with _opened_folder() as folder:
            return _read(folder)
    except FileNotFoundError:
        return {}


def store_key(provider: str, key: str) -> None:
    """Keep `key` for `provider`, in place of the one before. Safe against other logins.

    Raises:
        KeysUnusable: It cannot be kept.
    """
    _make_folder()
    with _opened_folder() as folder, _locked(folder):
        _write(folder, _read(folder) | {provider: key})


def forget_keys(provider: str | None = None) -> list[str]:
    """Forget the key of `provider`, or all of them.

    Returns:
        The providers whose keys there were.

    Raises:
        KeysUnusable: They cannot be forgotten.
    """
    try:
        with _opened_folder() as folder, _locked(folder):
            if provider is None:
                return _forget_all(folder)
            keys = _read(folder)
            if keys.pop(provider, None) is None:
                return []
            _write(folder, keys)
            return [provider]
    except FileNotFoundError:
        return []


def _forget_all(folder: int) -> list[str]:
    keys: dict[str, str] = {}
    with suppress(KeysUnusable):  # whatever it is, it goes
        keys = _read(folder)
    with _as_unusable():
        os.unlink(FILE, dir_fd=folder)
        os.fsync(folder)
    return list(keys)


# --- the file -------------------------------------------------------------------------------


def _make_folder() -> None:
    try:
        config_dir().parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(config_dir(), 0o700)
    except OSError as exc:  # also a missing parent: /proc/nohome is such a home
        raise KeysUnusable(f"{config_dir()} cannot be made: {exc.strerror}") from None


@contextmanager
def _opened_folder() -> Iterator[int]:
    """Open the folder, and make it the owner's alone if others can look into it.

    Raises:
        FileNotFoundError: There is none.
        KeysUnusable: It is a link, or somebody else's.
    """
    with _as_unusable():
        folder = os.open(config_dir(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Keep other logins out, and everybody else's eyes, while the file changes."""
    with _as_unusable():
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise KeysUnusable(f"{config_dir()} belongs to somebody else")
        if status.st_mode & 0o077:
            os.fchmod(folder, 0o700)
        fcntl.flock(folder, fcntl.LOCK_EX)  # until the folder is closed
    yield


def _read(folder: int) -> dict[str, str]:
    """Return the keys in the file; none if there is no file."""
    import tomllib

    place = keys_file()
    with _as_unusable():
        try:
            # Not to wait for a writer, should it be a pipe.
            file = os.open(FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            return {}
        with open(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise KeysUnusable(f"{place} is not a file of yours")
            if status.st_mode & 0o077:
                raise KeysUnusable(f"others can use {place}; run: chmod 600 {place}")
            content = opened.read(MAX_BYTES + 1)
    try:
        keys = tomllib.loads(content.decode())
    except ValueError:
        keys = {"": None}
    if len(content) > MAX_BYTES or not all(isinstance(key, str) for key in keys.values()):
        raise KeysUnusable(f"{place} is broken; remove it, and log in again")
    return keys


def _write(folder: int, keys: dict[str, str]) -> None:
    """Put another file in the place of the one before; that may be a link, and is not followed."""
    lines = (f"{_quoted(name)} = {_quoted(key)}\n" for name, key in keys.items())
    temporary = f".{FILE}.{secrets.token_hex(8)}"
    with _as_unusable():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with open(file, "wb") as opened:
                opened.write((_HEAD + "".join(lines)).encode())
                opened.flush()
                os.fsync(file)
            os.replace(temporary, FILE, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)


def _quoted(text: str) -> str:
    """Write a string as TOML has it: JSON's, but for pairs of surrogates and one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@contextmanager
def _as_unusable() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise KeysUnusable(f"{keys_file()} cannot be used: {exc.strerror}") from None
