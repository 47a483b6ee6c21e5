"""The `edit` tool: one piece of text in a file replaced by another.

Models write LF; files have whatever they have. So the search happens on text with all line endings
as LF, and the replacement on the file's own text, where only what differs between old and new is
touched and gets the line ending of its surroundings.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from agent_core.content import ToolContent, ToolKind
from agent_core.errors import ToolError
from agent_core.tools.read import locate
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView
from agent_core.tools.write import show_change

__all__ = ["Edit"]


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1, description="The file.")]
    old_text: Annotated[str, Meta(min_length=1, description="What to replace, exactly as it is.")]
    new_text: Annotated[str, Meta(description="What to put in its place.")]
    replace_all: Annotated[bool, Meta(description="Replace every occurrence.")] = False


class Edit(Tool):
    """Changes a file through `Files`, and nothing of it but the given text."""

    name: ClassVar[str] = "edit"
    description: ClassVar[str] = (
        "Replace text in a file. old_text must occur exactly once, unless replace_all is set: "
        "include as many lines around it as make it unique. Line endings are kept."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "edit"
    effect: ClassVar[Effect] = "edit"

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Name the file."""
        return ToolView(f"Edit {roots.show(args.path)}", (locate(args.path, roots),))

    def remember_key(self, args: _Args) -> tuple[str, str]:
        """Cover all changes of files."""
        return "edit", "edits"

    async def preview(self, args: _Args, context: ToolContext) -> tuple[ToolContent, ...]:
        """Show what would change."""
        path, old = await self._target(args, context)
        return (show_change(path, old, _replace(old, args)[0]),)

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Change the file.

        Raises:
            ToolError: It cannot be read or written, or `args.old_text` is not in it just once;
                nothing was changed.
        """
        path, old = await self._target(args, context)
        new, lines = _replace(old, args)
        await context.files.write(path, new, context.signal)
        count = "1 place" if len(lines) == 1 else f"{len(lines)} places"
        return ToolOutput(
            f"changed {count} in {args.path}",
            (show_change(path, old, new),),
            locations=(locate(args.path, context.roots, lines[0]),),
        )

    async def _target(self, args: _Args, context: ToolContext) -> tuple[str, str]:
        path = context.roots.resolve(args.path)
        return path, await context.files.read(path, context.signal)


def _replace(text: str, args: _Args) -> tuple[str, list[int]]:
    """Return the changed text, and the line of each change."""
    flat = text.replace("\r\n", "\n")
    old = args.old_text.replace("\r\n", "\n")
    new = args.new_text.replace("\r\n", "\n")
    if old == new:
        raise ToolError("old_text and new_text are the same", code="BAD_ARGUMENTS")
    starts = [match.start() for match in re.finditer(re.escape(old), flat)]
    lines = [flat.count("\n", 0, start) + 1 for start in starts]
    if not starts:
        raise ToolError(_missing(flat, old, args.path), code="NO_MATCH")
    if len(starts) > 1 and not args.replace_all:
        some = ", ".join(map(str, lines[:10]))
        raise ToolError(
            f"old_text occurs {len(starts)} times in {args.path} (lines {some}); add lines around "
            "it to make it unique, or set replace_all",
            code="SEVERAL_MATCHES",
        )
    # What old and new have in common at both ends keeps its bytes, mixed line endings too.
    skip = _common_length(old, new)
    keep = _common_length(old[skip:][::-1], new[skip:][::-1])
    spans = [(start + skip, start + len(old) - keep) for start in starts]
    return _splice(text, spans, new[skip : len(new) - keep]), lines


def _splice(text: str, spans: list[tuple[int, int]], new: str) -> str:
    """Put `new` in place of each of the spans, which are ascending positions in the LF text."""
    # The position in the LF text of each LF that is CR LF in `text`.
    crlfs = [match.start() - i for i, match in enumerate(re.finditer("\r\n", text))]
    pieces: list[str] = []
    done = 0
    for span in spans:
        start, end = (at + bisect_left(crlfs, at) for at in span)
        pieces += (text[done:start], new.replace("\n", _line_ending(text, start, end)))
        done = end
    return "".join([*pieces, text[done:]])


def _line_ending(text: str, start: int, end: int) -> str:
    """Return the line ending in, behind or else before the given place; LF if there is none."""
    at = text.find("\n", start)
    if at < 0:
        at = text.rfind("\n", 0, end)
    return "\r\n" if at > 0 and text[at - 1] == "\r" else "\n"


def _common_length(one: str, other: str) -> int:
    """Return how many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _missing(flat: str, old: str, path: str) -> str:
    """Say why `old` may not have been found."""
    message = f"old_text is not in {path}"
    if re.match(r" *\d+\t", old):
        return f"{message}; leave out the line numbers that read shows"
    wanted = [line.split() for line in old.strip("\n").split("\n")]
    have = [line.split() for line in flat.split("\n")]
    for i in range(len(have) - len(wanted) + 1):
        if have[i : i + len(wanted)] == wanted:
            return f"{message}, but line {i + 1} differs from it only in white space; read it again"
    return f"{message}; read the file again, it may have changed"
