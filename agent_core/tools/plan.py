"""The `plan` tool: the model's own list of what it is about to do."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from agent_core.content import PlanEntry, ToolKind
from agent_core.events import PlanWritten
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["Plan"]


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    entries: Annotated[tuple[PlanEntry, ...], Meta(description="The whole plan, in order.")]


class Plan(Tool):
    """Replaces the session's plan."""

    name: ClassVar[str] = "plan"
    description: ClassVar[str] = (
        "Show people what you are going to do and how far you are. Always give the whole plan; it "
        "replaces the one before."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "think"
    effect: ClassVar[Effect] = "none"

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Say that the plan changes; people see the plan itself elsewhere."""
        return ToolView("Update the plan")

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Append the plan to the log."""
        context.agent.session.append(PlanWritten(args.entries))
        done = sum(entry.status == "completed" for entry in args.entries)
        return ToolOutput(f"the plan has {len(args.entries)} entries, {done} completed")
