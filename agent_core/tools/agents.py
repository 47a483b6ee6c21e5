"""The `agents` tool: look after the subagents in the background."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from agent_core.background import BackgroundChild
from agent_core.content import ToolKind
from agent_core.errors import ToolError
from agent_core.tools.delegate import told
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["Agents", "listed"]


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    action: Annotated[
        Literal["list", "wait", "stop"],
        Meta(description="wait: until it has ended, for its answer; stop: end it now"),
    ] = "list"
    name: Annotated[str, Meta(description="Which one, for wait and stop")] = ""


class Agents(Tool):
    """Lists, awaits and stops them. Stopping takes until the subagent is quiet."""

    name: ClassVar[str] = "agents"
    description: ClassVar[str] = (
        "Look after the subagents you started in the background. You hear of their ends without "
        "asking; wait only if you cannot go on before."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "other"
    effect: ClassVar[Effect] = "none"
    is_parallel: ClassVar[bool] = True

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Say what is done with which."""
        titles = {"list": "List subagents", "wait": "Wait for", "stop": "Stop"}
        return ToolView(
            f"{titles[args.action]} {args.name if args.action != 'list' else ''}".strip()
        )

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Do it.

        Cancellation: through ``context.signal``. Concurrency: any number of calls.
        """
        background = context.agent.background
        if args.action == "list":
            return ToolOutput(listed(background.children))
        child = background.get(args.name)
        if child is None:
            known = ", ".join(each.name for each in background.children) or "none"
            raise ToolError(
                f"There is no subagent {args.name!r}; there are {known}.", code="UNKNOWN"
            )
        if args.action == "stop":
            background.stop(child)
        result = await background.wait(child, context.signal)
        if args.action == "stop" and result.reason == "aborted":
            said = f"\nWhat it had said by then:\n{result.output}" if result.output.strip() else ""
            return ToolOutput(f"{child.name} was stopped.{said}")
        return told(result)


def listed(children: tuple[BackgroundChild, ...]) -> str:
    """Return a line for each subagent: its name, its state and what it does."""
    if not children:
        return "There are no subagents in the background."
    return "\n".join(_line(child) for child in children)


def _line(child: BackgroundChild) -> str:
    doing = f" ({child.doing})" if child.result is None else ""
    return f"- {child.name}: {child.state}{doing}: {child.task}"
