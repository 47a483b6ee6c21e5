"""The `search` tool: which lines of which files contain something.

A regex can take for ever and Python's cannot be interrupted, so the work is done by
`agent_core.tools.search_worker` in a process that an abort ends.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta, Struct

from agent_core.content import ToolKind
from agent_core.errors import ToolError
from agent_core.tools.processes import ProcessTree, run_to_end
from agent_core.tools.read import locate
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["Search"]

_LIMIT_S: Final = 60.0
_DEFAULT_RESULTS: Final = 100
_WORKER: Final = Path(__file__).with_name("search_worker.py")


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    pattern: Annotated[str, Meta(min_length=1, max_length=2000, description="What to look for.")]
    path: Annotated[str, Meta(min_length=1, description="A directory or a file.")] = "."
    regex: Annotated[bool, Meta(description="Take pattern as a Python regex.")] = False
    glob: (
        Annotated[
            str,
            Meta(min_length=1, max_length=500, description="Such files only: *.py, src/**/*.ts"),
        ]
        | None
    ) = None
    case_sensitive: bool = True
    max_results: Annotated[int, Meta(ge=1, le=1000)] = _DEFAULT_RESULTS


class _Line(Struct, frozen=True):
    """What the worker says, a line at a time."""

    path: str = ""
    line: int = 0
    text: str = ""
    error: str | None = None
    is_cut: bool = False
    skipped: int = 0


class Search(Tool):
    """Searches the local disk, line by line, without following links."""

    name: ClassVar[str] = "search"
    description: ClassVar[str] = (
        "Find lines of text in the files below a directory. Gives path:line: text. Leaves out "
        "binary and very large files, links, and directories such as .git and node_modules."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "search"
    effect: ClassVar[Effect] = "read"
    is_parallel: ClassVar[bool] = True

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Say what is looked for and where."""
        where = "" if args.path == "." else f" in {roots.show(args.path)}"
        return ToolView(f"Search {args.pattern!r}{where}", (locate(args.path, roots),))

    def remember_key(self, args: _Args) -> tuple[str, str]:
        """Cover all reading."""
        return "read", "reads"

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Search. An abort ends it at once, whatever the regex is doing.

        Raises:
            ToolError: The pattern is wrong, or the path is missing or lies outside.
            TurnAborted: The signal fired.
        """
        path = context.roots.resolve(args.path)
        if not args.regex and "\n" in args.pattern:
            raise ToolError("a pattern is looked for in single lines", code="BAD_ARGUMENTS")
        context.signal.raise_if_aborted()
        request = {**msgspec.structs.asdict(args), "path": path}
        found = bytearray()
        tree = ProcessTree(
            [sys.executable, "-I", "-S", str(_WORKER)],
            cwd=context.roots.cwd,
            stdin=msgspec.json.encode(request),
        )
        ending, _ = await run_to_end(
            tree, signal=context.signal, timeout_s=_LIMIT_S, on_output=found.extend
        )
        context.signal.raise_if_aborted()
        if ending == "exited" and tree.exit_code != 0:
            raise ToolError(f"the search failed: {found.decode(errors='replace')[-500:]}")
        notes = [f"[stopped after {_LIMIT_S:g} s]"] if ending == "timed_out" else []
        lines = [*_describe(bytes(found), context.roots), *notes]
        if all(line.startswith("[") for line in lines):
            lines.insert(0, "no matches")
        return ToolOutput("\n".join(lines))


def _describe(found: bytes, roots: Roots) -> list[str]:
    # Each message ends in a newline; what follows the last one was cut off by the time limit.
    messages = [
        msgspec.json.decode(line, type=_Line) for line in found.rpartition(b"\n")[0].splitlines()
    ]
    if messages and messages[0].error is not None:
        raise ToolError(messages[0].error, code="BAD_ARGUMENTS")
    return [text for message in messages if (text := _text_of(message, roots))]


def _text_of(message: _Line, roots: Roots) -> str:
    if message.is_cut:
        return "[cut: there are more matches; narrow the search or raise max_results]"
    if message.path:
        return f"{roots.show(message.path)}:{message.line}: {message.text}"
    files = "file was" if message.skipped == 1 else "files were"
    return f"[{message.skipped} {files} too large, or no text]" if message.skipped else ""
