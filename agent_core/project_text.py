"""Text files that anybody may have written: read with bounds.

Everything here blocks, so it is called in a worker thread. Nothing but regular UTF-8 files is read,
no more of them than was asked for, and no link out of the places that the caller names is followed.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections.abc import Collection
from typing import Final, NamedTuple

__all__ = ["FileText", "read_text", "reason_of", "split_front_matter"]

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_PAIR: Final = re.compile(r"([A-Za-z][\w-]*):(?:[ \t]+(.*)|)$")
_ITEM: Final = re.compile(r"[ \t]*-[ \t]+(.+)")
_NOT_PLAIN: Final = ("|", ">", "[", "{", "&", "*", "!", "%", "@", "`")


class FileText(NamedTuple):
    """What a file says: `text`, and how many bytes the whole file has where that is not all."""

    text: str
    cut_from_bytes: int | None = None


def reason_of(exc: Exception) -> str:
    """Say why a file was not read: in the system's words, or in ours."""
    return (exc.strerror or type(exc).__name__) if isinstance(exc, OSError) else str(exc)


def read_text(path: str, *, max_bytes: int, within: tuple[str, ...] | None) -> FileText | None:
    """Return what the file at `path` says, `None` if there is none.

    Args:
        path: Absolute.
        max_bytes: The rest of the file is left out.
        within: The directories that links may lead to; `None` for any.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not text, not a regular file, or lies elsewhere; says which.
    """
    try:
        real = os.path.realpath(path, strict=True)
        if within is not None and not any(_is_in(real, place) for place in within):
            raise ValueError("it is a link that leads out of the project")
        fd = os.open(real, _READ_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(max_bytes + 1)
    is_cut = len(data) > max_bytes
    if b"\0" in data:
        raise ValueError("it is a binary file")
    try:  # a character that the cut went through is left out, too
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data[:max_bytes], not is_cut)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    return FileText(text, status.st_size if is_cut else None)


def _is_in(real: str, directory: str) -> bool:
    place = os.path.realpath(directory).rstrip("/")
    return real.startswith(place + "/")


def split_front_matter(text: str, lists: Collection[str] = ()) -> tuple[dict[str, str], str]:
    """Return the settings at the head of a Markdown file, and the text behind them.

    Of YAML there is ``key: value`` on one line, with or without quotes, and comments. Everything
    else a value can be, nested or on several lines, is as if it were not there.

    Args:
        text: The file's.
        lists: Keys whose value may be a list, in brackets, with commas, or an item a line; it comes
            back with commas between its items, and is never left out.

    Raises:
        ValueError: The head has no end, or a line in it is nothing of this; says which.
    """
    lines = text.splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}, text
    end = next((i for i in range(1, len(lines)) if lines[i].rstrip() == "---"), None)
    if end is None:
        raise ValueError("its front matter has no end")
    settings: dict[str, str] = {}
    key = ""
    for number, line in enumerate(lines[1:end], 2):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line[0] in " \t-" and key:
            if key not in lists:
                settings.pop(key, None)  # its value goes on here: nothing that we read
            elif item := _ITEM.match(line.rstrip()):
                settings[key] += f", {_unquoted(item[1])}"
            else:
                raise ValueError(f"line {number} of its front matter is no item of {key!r}")
        elif pair := _PAIR.match(line.rstrip()):
            key, value = pair[1], (pair[2] or "").strip()
            if key in lists:
                settings[key] = value = value.removeprefix("[").removesuffix("]")
            if value and not value.startswith(_NOT_PLAIN):
                settings[key] = _unquoted(value)
            elif value and key in lists:
                raise ValueError(f"line {number} of its front matter is no list")
        else:
            raise ValueError(f"line {number} of its front matter is not `key: value`")
    return settings, "\n".join(lines[end + 1 :]).strip("\n")


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value
