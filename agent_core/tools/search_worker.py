"""Searches files in a process of its own, which can be killed in the middle of a regex.

Run by path as ``python -I -S search_worker.py``, so it imports the standard library only. Reads one
JSON object from stdin (`_Request`), writes JSON lines: ``{"path", "line", "text"}`` for each match,
``{"error"}`` for a wrong request, ``{"is_cut": true}`` when there are more matches than asked for,
and last, if any, ``{"skipped"}``: how many files were too large or not text.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import Final, TypedDict

_SKIPPED_DIRS: Final = {".git", ".hg", ".svn", ".venv", "__pycache__", "node_modules"}
_MAX_FILE_BYTES: Final = 5 * 2**20
_MAX_LINE_CHARS: Final = 300
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class _Request(TypedDict):
    """What to search for; `path` is the real, absolute file or directory to begin at."""

    path: str
    pattern: str
    regex: bool
    glob: str | None
    case_sensitive: bool
    max_results: int


def main() -> None:
    """Serve one request."""
    request: _Request = json.load(sys.stdin)
    flags = 0 if request["case_sensitive"] else re.IGNORECASE
    try:
        wanted = re.compile(
            request["pattern"] if request["regex"] else re.escape(request["pattern"]), flags
        )
    except re.error as exc:
        _say(error=f"the pattern is wrong: {exc}")
        return
    if not os.path.exists(request["path"]):
        _say(error=f"{request['path']} does not exist")
        return
    is_named = re.compile(_glob_to_regex(request["glob"])) if request["glob"] else None
    left = request["max_results"]
    skipped = 0
    for path, name in _files(request["path"]):
        if is_named is not None and not is_named.fullmatch(name):
            continue
        data = _read(path)
        if data is None:
            continue
        if len(data) > _MAX_FILE_BYTES or b"\0" in data:
            skipped += 1
            continue
        text = data.decode(errors="replace")
        # A literal cannot span lines, so one search tells whether it is worth looking at them.
        if not (request["regex"] or wanted.search(text)):
            continue
        for number, line in enumerate(text.split("\n"), 1):
            match = wanted.search(line.removesuffix("\r"))
            if match is None:
                continue
            if left == 0:
                _say(is_cut=True)
                return
            left -= 1
            _say(path=_printable(path), line=number, text=_around(line.removesuffix("\r"), match))
    if skipped:
        _say(skipped=skipped)


def _files(start: str) -> Iterator[tuple[str, str]]:
    """Yield regular files by path, each with its name relative to `start`; follow no link."""
    if not os.path.isdir(start):
        yield start, os.path.basename(start)
        return
    for folder, folders, names in os.walk(start):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_DIRS)
        for name in sorted(names):
            path = os.path.join(folder, name)
            yield path, os.path.relpath(path, start)


def _read(path: str) -> bytes | None:
    """Return what is in a regular file; of a large one only enough to tell that it is one."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError:  # a link, a socket, not ours to read, or gone by now
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read(_MAX_FILE_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(fd)


def _around(line: str, match: re.Match[str]) -> str:
    """Return the line, or the part around the match if it is long."""
    if len(line) <= _MAX_LINE_CHARS:
        return line
    begin = 0 if match.end() <= _MAX_LINE_CHARS else max(0, match.start() - 50)
    return ("…" if begin else "") + line[begin : begin + _MAX_LINE_CHARS] + "…"


def _glob_to_regex(glob: str) -> str:
    """Translate a glob. ``*`` stays inside a folder, ``**/`` is any folders, ``{a,b}`` either.

    A glob without a slash is about the file's name, in any folder.
    """
    if "/" not in glob:
        glob = f"**/{glob}"
    tokens = re.findall(r"\*\*/|\*+|\[[^\]]+\]|.", glob.removeprefix("./"), re.DOTALL)
    return "".join(_GLOB_TOKENS.get(token) or _other_token(token) for token in tokens)


_GLOB_TOKENS: Final = {
    "**/": "(?:.*/)?",
    "**": ".*",
    "*": "[^/]*",
    "?": "[^/]",
    "{": "(?:",
    "}": ")",
    ",": "|",
}


def _other_token(token: str) -> str:
    if token.startswith("[") and token.endswith("]") and len(token) > 2:
        return token.replace("[!", "[^", 1)
    return re.escape(token)


def _printable(path: str) -> str:
    return os.fsencode(path).decode(errors="replace")


def _say(**fields: object) -> None:
    # Flushed, so that what was found is known when time runs out.
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
