"""The directories a session may touch, and the check that every path passes first."""

from __future__ import annotations

import os
from dataclasses import dataclass

from agent_core.errors import ToolError

__all__ = ["Roots"]


@dataclass(frozen=True, slots=True)
class Roots:
    """`cwd` and further directories, all absolute. The first is the base of relative paths."""

    cwd: str
    additional: tuple[str, ...] = ()

    def resolve(self, path: str) -> str:
        """Return the real, absolute path, with all symbolic links followed.

        A path that does not exist yet is fine as long as it would lie inside.

        Raises:
            ToolError: It leads out of every root (code ``OUTSIDE_ROOTS``), or is not a path.
        """
        if "\0" in path:
            raise ToolError("a path cannot contain a NUL character", code="BAD_ARGUMENTS")
        real = os.path.realpath(os.path.join(self.cwd, os.path.expanduser(path)))
        for root in (self.cwd, *self.additional):
            real_root = os.path.realpath(root)
            if real == real_root or real.startswith(real_root.rstrip("/") + "/"):
                return real
        raise ToolError(f"{path} is outside of this session's directories", code="OUTSIDE_ROOTS")

    def show(self, path: str) -> str:
        """Return `path` as people read it: relative to the cwd where it lies inside."""
        if "\0" in path:
            return path  # no path at all; `resolve` says so when the call runs
        absolute = os.path.normpath(os.path.join(self.cwd, os.path.expanduser(path)))
        relative = os.path.relpath(absolute, self.cwd)
        return absolute if relative.startswith("..") else relative
