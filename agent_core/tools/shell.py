"""The `shell` tool: one command in the session's directory."""

from __future__ import annotations

import signal as signals
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from agent_core.content import ToolKind
from agent_core.text import shortened
from agent_core.tools.roots import Roots
from agent_core.tools.tool import (
    CommandAborted,
    CommandResult,
    Effect,
    Tool,
    ToolContext,
    ToolOutput,
    ToolView,
)

__all__ = ["Shell"]

_TITLE_CHARS: Final = 100


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    command: Annotated[str, Meta(min_length=1, description="What /bin/sh -c is to run.")]
    timeout_s: (
        Annotated[float, Meta(gt=0, description="Ends the command after so many seconds.")] | None
    ) = None


class Shell(Tool):
    """Runs a command through `Commands` and shows its output while it runs."""

    name: ClassVar[str] = "shell"
    description: ClassVar[str] = (
        "Run a shell command in the working directory and return its output (stdout and stderr "
        "together). It has no input and no terminal. Everything it started is ended with it, "
        "background processes too."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "execute"
    effect: ClassVar[Effect] = "execute"

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Show the command on one line."""
        line = shortened(" ".join(args.command.split()), _TITLE_CHARS)
        return ToolView(f"Run: {line}")

    def remember_key(self, args: _Args) -> tuple[str, str]:
        """Cover this command only: another one may do anything."""
        return f"shell:{args.command}", "this exact command"

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Run the command. An abort gives what it printed until then, with code ``ABORTED``.

        Raises:
            ToolError: It could not be started, or ran out of time.
        """
        try:
            result = await context.commands.run(
                args.command,
                cwd=context.roots.cwd,
                signal=context.signal,
                timeout_s=args.timeout_s,
                show=context.progress,
            )
        except CommandAborted as aborted:
            output = _describe(aborted.result.output, "[stopped before it was done]")
            return ToolOutput(output, aborted.result.content, is_error=True, code="ABORTED")
        output = _describe(result.output, *_notes(result))
        if result.exit_code:
            return ToolOutput(output, result.content, is_error=True, code="EXIT")
        return ToolOutput(output, result.content)


def _notes(result: CommandResult) -> list[str]:
    notes: list[str] = []
    if result.ended_leftovers:
        notes.append(f"[{result.ended_leftovers} background process(es) it left were ended]")
    if result.exit_code is None:
        notes.append("[how it ended is not known]")
    elif result.exit_code < 0:
        notes.append(f"[ended by signal {_signal_name(-result.exit_code)}]")
    elif result.exit_code > 0:
        notes.append(f"[exit code {result.exit_code}]")
    return notes


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return str(number)


def _describe(output: str, *notes: str) -> str:
    body = output.removesuffix("\n")
    return "\n".join([body, *notes] if body else ["(no output)", *notes])
