"""The `delegate` tool: give a piece of work to a subagent and wait for its answer.

The call is what people see of the subagent: its content says what the subagent is doing, and the
call ends when the subagent is quiet. Calls overlap, so several calls in one message are a team. One
in the background is none of its call's business any more: that ends at once.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct

from agent_core.content import Text, ToolKind
from agent_core.errors import ToolError
from agent_core.subagents import SubagentRefused, SubagentRequest, SubagentResult
from agent_core.text import shortened
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["Delegate", "told"]

MAX_TITLE_CHARS: Final = 80
MAX_SHOWN_LINES: Final = 12
"""What people see of a subagent at work: the last things it did."""

_PROBLEMS: Final = {
    "aborted": "The subagent was stopped.",
    "max_tokens": "The subagent reached its token limit; its answer is cut off.",
    "max_steps": "The subagent had as many model calls as one may have.",
    "refusal": "The subagent's model refused.",
    "error": "The subagent failed.",
}


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    task: Annotated[
        str, Meta(description="All the subagent needs to know; it sees nothing else.", min_length=1)
    ]
    agent: Annotated[
        str,
        Meta(description="Who does it: spawn knows nothing, fork knows this conversation"),
    ] = "spawn"
    name: Annotated[str, Meta(description="A short name, for people", max_length=40)] = ""
    output_schema: Annotated[
        dict[str, Any] | None, Meta(description="JSON schema that its answer must agree with")
    ] = None
    background: Annotated[
        bool, Meta(description="Go on without its answer; you are told when it has ended")
    ] = False


class Delegate(Tool):
    """Runs a subagent as part of the call."""

    name: ClassVar[str] = "delegate"
    description: ClassVar[str] = (
        "Give a piece of work to a subagent and get its answer. Use it for work that can be "
        "described completely. Several calls in one message run at the same time."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "other"
    effect: ClassVar[Effect] = "none"  # what the subagent does is asked about there
    is_parallel: ClassVar[bool] = True

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Name the subagent and its task."""
        where = " (in the background)" if args.background else ""
        title = f"{_name(args)}{where}: {_first_line(args.task)}"
        return ToolView(shortened(title, MAX_TITLE_CHARS))

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Start the subagent, and return when it is quiet or, in the background, at once.

        Cancellation: through ``context.signal``. Concurrency: any number of calls.
        """
        agent = context.agent
        shown: deque[str] = deque(maxlen=MAX_SHOWN_LINES)

        def show(line: str) -> None:
            shown.append(line)
            context.progress((Text("\n".join(shown)),))

        request = SubagentRequest(
            (Text(args.task),),
            agent,
            context.signal,
            call_id=context.call_id,
            name=_name(args),
            output_schema=args.output_schema,
            show=show,
        )
        try:
            provider, request = await agent.subagents.resolved(args.agent, request)
            if args.background:
                name = agent.background.start(provider, request, _first_line(args.task)).name
                return ToolOutput(f"Started in the background, as {name}.")
            run = await agent.subagents.start(provider, request)
        except SubagentRefused as exc:
            raise ToolError(str(exc), code="REFUSED") from None
        try:
            result = await run.result()
        finally:
            await run.dispose()
        return told(result)


def _name(args: _Args) -> str:
    is_plain = args.agent in ("spawn", "fork")
    return args.name or ("subagent" if is_plain else args.agent)


def _first_line(task: str) -> str:
    first = next((line.strip() for line in task.splitlines() if line.strip()), task)
    return shortened(first, MAX_TITLE_CHARS)


def told(result: SubagentResult) -> ToolOutput:
    """Return what the model is told of a subagent's end: its answer, or what went wrong."""
    if result.reason == "completed":
        return ToolOutput(result.output or "(the subagent said nothing)")
    problem = result.message or _PROBLEMS[result.reason]
    said = f"\nWhat it had said by then:\n{result.output}" if result.output.strip() else ""
    return ToolOutput(f"{problem}{said}", is_error=True, code="SUBAGENT_FAILED")
