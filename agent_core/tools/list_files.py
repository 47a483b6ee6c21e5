"""The `list` tool: what is in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, ClassVar, Final

import anyio.to_thread
from msgspec import Meta, Struct

from agent_core.cancellation import AbortSignal
from agent_core.content import ToolKind
from agent_core.errors import ToolError
from agent_core.tools.read import locate
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["ListFiles"]

_MAX_ENTRIES: Final = 500


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1, description="The directory.")] = "."
    depth: Annotated[int, Meta(ge=1, le=3, description="How many levels.")] = 1


class ListFiles(Tool):
    """Lists the local disk. Links are shown, not followed."""

    name: ClassVar[str] = "list"
    description: ClassVar[str] = (
        "List a directory, sorted by name, hidden entries too. Directories end in a slash; what is "
        f"inside of .git is left out. At most {_MAX_ENTRIES} entries."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "read"
    effect: ClassVar[Effect] = "read"
    is_parallel: ClassVar[bool] = True

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Name the directory."""
        return ToolView(f"List {roots.show(args.path)}", (locate(args.path, roots),))

    def remember_key(self, args: _Args) -> tuple[str, str]:
        """Cover all reading."""
        return "read", "reads"

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """List the directory.

        Raises:
            ToolError: It is none, cannot be read, or lies outside.
        """
        path = context.roots.resolve(args.path)
        names = await anyio.to_thread.run_sync(_list, path, args.depth, context.signal)
        context.signal.raise_if_aborted()
        if not names:
            return ToolOutput("(the directory is empty)")
        if len(names) > _MAX_ENTRIES:
            names[_MAX_ENTRIES:] = [f"[cut: only the first {_MAX_ENTRIES} entries are shown]"]
        return ToolOutput("\n".join(names))


def _list(path: str, depth: int, signal: AbortSignal) -> list[str]:
    """Return up to one name more than is shown. Runs in a thread."""
    try:
        return list(islice(_walk(path, "", depth, signal), _MAX_ENTRIES + 1))
    except NotADirectoryError as exc:
        raise ToolError(f"{path} is a file; use read", code="NOT_A_DIRECTORY") from exc
    except FileNotFoundError as exc:
        raise ToolError(f"{path} does not exist", code="NOT_FOUND") from exc
    except OSError as exc:
        raise ToolError(f"{path} cannot be listed: {exc.strerror}") from exc


def _walk(path: str, prefix: str, depth: int, signal: AbortSignal) -> Iterator[str]:
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if signal.aborted:
                return
            name = prefix + os.fsencode(entry.name).decode(errors="replace")
            if not entry.is_dir(follow_symlinks=False):
                yield name
                continue
            yield f"{name}/"
            if depth > 1 and entry.name != ".git":
                yield from _walk_below(entry.path, f"{name}/", depth - 1, signal)


def _walk_below(path: str, prefix: str, depth: int, signal: AbortSignal) -> Iterator[str]:
    try:
        yield from _walk(path, prefix, depth, signal)
    except OSError as exc:  # one closed door must not hide the rest
        yield f"{prefix} [cannot be listed: {exc.strerror}]"
