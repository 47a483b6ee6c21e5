"""The `read` tool: a file's text with line numbers."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from agent_core.content import Location, Text, ToolKind
from agent_core.errors import ToolError
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["Read", "locate"]

_DEFAULT_LINES: Final = 2000
_MAX_LINE_CHARS: Final = 2000  # minified files have lines of megabytes
_MAX_CHARS: Final = 200_000


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1, description="The file.")]
    line: Annotated[int, Meta(ge=1, description="The first line to read, from 1.")] | None = None
    limit: Annotated[int, Meta(ge=1, description="How many lines; 2000 if left out.")] | None = None


class Read(Tool):
    """Reads text through `Files`, so that an editor's unsaved changes are seen."""

    name: ClassVar[str] = "read"
    description: ClassVar[str] = (
        "Read a text file. Each line comes with its number and a tab in front, which are not part "
        "of the file. Long files are cut; read on with line."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "read"
    effect: ClassVar[Effect] = "read"
    is_parallel: ClassVar[bool] = True

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Name the file and the place in it."""
        return ToolView(f"Read {roots.show(args.path)}", (locate(args.path, roots, args.line),))

    def remember_key(self, args: _Args) -> tuple[str, str]:
        """Cover all reading."""
        return "read", "reads"

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Read the file.

        Raises:
            ToolError: It cannot be read, lies outside, or has fewer lines than `args.line`.
        """
        path = context.roots.resolve(args.path)
        text = (await context.files.read(path, context.signal)).removeprefix("\ufeff")
        if not text:
            return ToolOutput("(the file is empty)")
        lines = text.removesuffix("\n").split("\n")
        first = args.line or 1
        if first > len(lines):
            raise ToolError(f"{args.path} has only {len(lines)} lines", code="BAD_ARGUMENTS")
        shown = _take(lines[first - 1 : first - 1 + (args.limit or _DEFAULT_LINES)])
        last = first - 1 + len(shown)
        output = "\n".join(f"{n:>6}\t{line}" for n, line in enumerate(shown, first))
        if last < len(lines):
            output += f"\n[cut: lines {first}-{last} of {len(lines)}; go on with line={last + 1}]"
        return ToolOutput(output, (Text("\n".join(shown)),))


def locate(path: str, roots: Roots, line: int | None = None) -> Location:
    """Return the place for people: absolute, with links as they are written."""
    return Location(os.path.normpath(os.path.join(roots.cwd, roots.show(path))), line)


def _take(lines: list[str]) -> list[str]:
    """Cut long lines, and stop after `_MAX_CHARS`, but not before the first line."""
    taken: list[str] = []
    left = _MAX_CHARS
    for line in lines:
        shown = line.removesuffix("\r")
        if len(shown) > _MAX_LINE_CHARS:
            left_out = len(shown) - _MAX_LINE_CHARS
            shown = f"{shown[:_MAX_LINE_CHARS]} [… {left_out} characters left out]"
        left -= len(shown)
        if taken and left < 0:
            break
        taken.append(shown)
    return taken
