"""The `write` tool: a whole file."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from agent_core.content import Diff, Text, ToolContent, ToolKind
from agent_core.errors import ToolError
from agent_core.tools.read import locate
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["Write", "show_change"]

_MAX_DIFF_CHARS: Final = 2**20  # it goes into the log and over the wire, twice


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1, description="The file.")]
    content: Annotated[str, Meta(description="The whole new text.")]


class Write(Tool):
    """Creates or replaces a file through `Files`."""

    name: ClassVar[str] = "write"
    description: ClassVar[str] = (
        "Write a whole text file. Creates missing directories; replaces what was there. To change "
        "a part of a file, use edit."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "edit"
    effect: ClassVar[Effect] = "edit"

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Name the file."""
        return ToolView(f"Write {roots.show(args.path)}", (locate(args.path, roots),))

    def remember_key(self, args: _Args) -> tuple[str, str]:
        """Cover all changes of files."""
        return "edit", "edits"

    async def preview(self, args: _Args, context: ToolContext) -> tuple[ToolContent, ...]:
        """Show what the file would become."""
        path, old = await self._target(args, context)
        return (_shown(path, old, args.content),)

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Write the file.

        Raises:
            ToolError: It cannot be written, or lies outside.
        """
        path, old = await self._target(args, context)
        await context.files.write(path, args.content, context.signal)
        verb = "created" if old is None else "replaced"
        output = f"{verb} {args.path} ({len(args.content.encode())} bytes)"
        return ToolOutput(output, (_shown(path, old, args.content),))

    async def _target(
        self, args: _Args, context: ToolContext
    ) -> tuple[str, str | ToolError | None]:
        """Return the path, and its text, or why there is none; `None` for a new file."""
        path = context.roots.resolve(args.path)
        try:
            return path, await context.files.read(path, context.signal)
        except ToolError as exc:
            return path, None if exc.code == "NOT_FOUND" else exc


def _shown(path: str, old: str | ToolError | None, new: str) -> ToolContent:
    if isinstance(old, ToolError):
        return Text(f"{old.message}; it is replaced as a whole by {len(new)} characters of text")
    return show_change(path, old, new)


def show_change(path: str, old: str | None, new: str) -> ToolContent:
    """Return what people see of a change: the difference, unless it is too large to draw."""
    if len(old or "") + len(new) > _MAX_DIFF_CHARS:
        return Text(f"{path} was changed; it is too large to show the difference")
    return Diff(path, old, new)
