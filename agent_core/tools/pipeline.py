"""One tool call, from its announcement to its one result: parsing, policy, approval, body.

Every failure in here is the call's own and becomes an error result for the model; only a failing
session store and the cancellation of the host get out. The code of a result says which:

- ``UNKNOWN_TOOL``, ``BAD_ARGUMENTS``, ``DENIED``: it never ran, and why.
- ``ABORTED_BEFORE_DISPATCH``: the turn was aborted before the body was entered; no side effects.
- ``ABORTED``: the body had been entered; side effects are possible.
- ``TOOL_FAILED``, ``TOOL_CANCELLED``, ``TOOL_CRASHED`` and the tools' own: it ran and failed.

A specific failure beats the generic abort; a success overtaken by the abort is reported as aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import structs

from agent_core.cancellation import AbortSignal, TurnAborted, is_host_cancellation
from agent_core.content import Block, ToolCallPart, ToolContent
from agent_core.errors import ToolError
from agent_core.events import (
    PermissionAsked,
    PermissionDecided,
    ToolCall,
    ToolProgress,
    ToolResult,
    ToolStart,
)
from agent_core.logs import get_logger
from agent_core.permissions import Approval, Decision, Verdict, decide
from agent_core.subagents import Delegation
from agent_core.tools.kept_files import KeptFiles
from agent_core.tools.tool import Tool, ToolContext, ToolOutput, ToolView

if TYPE_CHECKING:
    from agent_core.agent import Agent

_OutputT = TypeVar("_OutputT")

__all__ = ["ABORTED", "NOT_RUN", "ToolExecution", "ToolPipeline", "ask_from", "stop_asker"]

log = get_logger(__name__)

ABORTED: Final = ToolOutput(
    "This call was aborted while it ran; its side effects may be partial.",
    is_error=True,
    code="ABORTED",
)
NOT_RUN: Final = ToolOutput(
    "The turn was aborted before this call ran; it had no effect.",
    is_error=True,
    code="ABORTED_BEFORE_DISPATCH",
)
_DENIALS: Final = {
    Approval.REJECTED: "the user said no",
    Approval.REJECTED_ALWAYS: "the user said no, for the rest of this session",
    Approval.UNAVAILABLE: "this needs the user's permission, and no valid answer came",
    Approval.CANCELLED: "the question was dismissed",
}


@dataclass(frozen=True, slots=True)
class ToolExecution:
    """A call as the ``tools/*`` and ``approval/request`` hooks see it.

    `signal` is the turn's own; `preview` is for the person who is asked, and empty elsewhere.
    `delegation` is whose call it is, where that is another process's subagent of `agent`.
    """

    agent: Agent
    turn: int
    step: int
    call_id: str
    tool: Tool
    arguments: str
    args: Any
    view: ToolView
    signal: AbortSignal
    preview: tuple[ToolContent, ...] = ()
    delegation: Delegation | None = None


class ToolPipeline:
    """Runs calls of one agent. Holds no state of a turn."""

    def __init__(self, agent: Agent, tools: Mapping[str, Tool]) -> None:
        self._agent = agent
        self._tools = tools

    def is_parallel(self, part: ToolCallPart) -> bool:
        """Whether the call may overlap with its neighbours."""
        tool = self._tools.get(part.name)
        return tool is not None and tool.is_parallel

    def announce(
        self, turn: int, step: int, part: ToolCallPart, signal: AbortSignal
    ) -> ToolExecution | ToolResult:
        """Log the call; return how to run it, or its result if it cannot be run at all."""
        tool = self._tools.get(part.name)
        view, args, failure = ToolView(part.name), None, ToolError("")
        if tool is None:
            failure = ToolError(f"there is no tool named {part.name!r}", code="UNKNOWN_TOOL")
        else:
            try:
                args = tool.parse(part.arguments)
                view = tool.view(args, self._agent.roots)
            except ToolError as exc:
                failure = exc
            except Exception as exc:
                failure = _crash(tool, part.id, exc)
        self._agent.session.append(
            ToolCall(
                turn,
                step,
                part.id,
                part.name,
                part.arguments,
                view.title,
                "other" if tool is None else tool.kind,
                view.locations,
            )
        )
        if tool is None or failure.message:
            return ToolResult(turn, step, part.id, failure.message, True, failure.code)
        return ToolExecution(
            self._agent, turn, step, part.id, tool, part.arguments, args, view, signal
        )

    async def dispatch(self, execution: ToolExecution) -> tuple[ToolResult, tuple[Block, ...]]:
        """Run an announced call to its one result, and what listeners add for the model.

        Cancellation: through ``execution.signal``; the body is always waited for.
        Concurrency: any number of calls of one step.

        Raises:
            StoreError: The log could not be made durable before a side effect.
        """
        output = await _contained(execution, NOT_RUN, self._admit(execution))
        if output is None:
            has_effects = execution.tool.effect not in ("read", "none")
            if has_effects:
                await self._agent.session.flush()  # what led here is durable before it has effects
            if execution.signal.aborted:
                output = NOT_RUN
            else:
                self._agent.session.append(ToolStart(execution.call_id))
                if has_effects:  # and so is that it has some: no crash may call it unstarted
                    await self._agent.session.flush()
                output = await _contained(execution, ABORTED, self._execute(execution))
                output = _unless_overtaken(execution.signal, output)
        result = ToolResult(
            execution.turn,
            execution.step,
            execution.call_id,
            output.output,
            output.is_error,
            output.code,
            output.content,
            output.locations,
        )
        return result, output.context

    async def _admit(self, execution: ToolExecution) -> ToolOutput | None:
        """Return `None` if the call may run, otherwise its result."""
        execution.signal.raise_if_aborted()
        decision = _decided(
            await self._agent.hooks.waterfall("tools/pre-execute", execution, final=self._policy)
        )
        if decision.verdict is Verdict.ASK:
            decision = await self._ask(execution)
        if decision.verdict is not Verdict.ALLOW:
            reason = f"Not permitted: {decision.reason}."
            return ToolOutput(reason, is_error=True, code="DENIED")
        execution.signal.raise_if_aborted()
        return None

    async def _policy(self, execution: ToolExecution) -> Decision:
        key, _words = execution.tool.remember_key(execution.args)
        agent = self._agent
        remembered = agent.root.session.state.remembered
        return decide(agent.mode, execution.tool.effect, remembered, key)

    async def _ask(self, execution: ToolExecution) -> Decision:
        session = self._agent.session
        execution.signal.raise_if_aborted()
        preview = await execution.tool.preview(execution.args, self._context(execution))
        execution.signal.raise_if_aborted()
        execution = replace(execution, preview=preview)
        session.append(PermissionAsked(execution.call_id))
        approval = Approval.CANCELLED  # what is logged if asking itself fails
        try:
            approval = await ask_from(self._agent, execution)
        finally:
            key, _words = execution.tool.remember_key(execution.args)
            decided = PermissionDecided(
                execution.call_id,
                "allowed" if approval.is_allowed else str(approval),
                key if approval.is_remembered else None,
            )
            session.append(decided)
            if approval.is_remembered and self._agent.parent is not None:
                self._agent.root.session.append(decided)  # an "always" is for the whole session
        if approval is Approval.CANCELLED:
            stop_asker(self._agent)
            execution.signal.raise_if_aborted()
        if approval.is_allowed:
            if await execution.tool.preview(execution.args, self._context(execution)) != preview:
                raise ToolError("It changed while the question was open.", code="CHANGED")
            return Decision(Verdict.ALLOW)
        return Decision(Verdict.DENY, _DENIALS[approval])

    async def _execute(self, execution: ToolExecution) -> ToolOutput:
        hooks = self._agent.hooks
        body = _output_of(hooks.waterfall("tools/execute", execution, final=self._run_body))
        output = await _contained(execution, ABORTED, body)

        async def same(_execution: ToolExecution, output: ToolOutput) -> ToolOutput:
            return output

        return await _output_of(
            hooks.waterfall("tools/post-execute", execution, output, final=same)
        )

    async def _run_body(self, execution: ToolExecution) -> ToolOutput:
        execution.signal.raise_if_aborted()
        return await execution.tool.run(execution.args, self._context(execution))

    def _context(self, execution: ToolExecution) -> ToolContext:
        agent = self._agent

        def progress(content: tuple[ToolContent, ...]) -> None:
            if execution.call_id in agent.running_calls:  # and not from what a tool left behind
                agent.session.append(ToolProgress(execution.call_id, content=content))

        return ToolContext(
            agent,
            execution.call_id,
            execution.signal,
            agent.roots,
            KeptFiles(agent.files, agent.root.session, execution.call_id),
            agent.commands,
            progress,
        )


async def _contained(
    execution: ToolExecution, aborted: ToolOutput, work: Awaitable[_OutputT]
) -> _OutputT | ToolOutput:
    """Await `work` and turn what it raises into the call's own result; `aborted` for the abort."""
    try:
        return await work
    except ToolError as exc:
        return ToolOutput(exc.message, is_error=True, code=exc.code)
    except (TurnAborted, asyncio.CancelledError) as exc:
        if isinstance(exc, asyncio.CancelledError) and is_host_cancellation():
            raise
        if execution.signal.aborted:
            return aborted
        return ToolOutput(
            "The tool cancelled itself; what it was doing is unfinished.",
            is_error=True,
            code="TOOL_CANCELLED",
        )
    except (Exception, SystemExit) as exc:
        failure = _crash(execution.tool, execution.call_id, exc)
        if execution.signal.aborted:
            return aborted
        return ToolOutput(failure.message, is_error=True, code=failure.code)


def _crash(tool: Tool, call_id: str, exc: BaseException) -> ToolError:
    # The text of a foreign exception may hold anything; its type is safe and often enough.
    log.error("tool_call_crashed", tool=tool.name, call_id=call_id, exc_info=exc)
    return ToolError(f"The tool failed unexpectedly ({type(exc).__name__}).", code="TOOL_CRASHED")


async def _output_of(work: Awaitable[object]) -> ToolOutput:
    """Await `work`; a tool or listener that forgot to return its output has failed."""
    output = await work
    if not isinstance(output, ToolOutput):
        raise TypeError(f"a ToolOutput was expected, not {type(output).__name__}")
    return output


def _decided(value: object) -> Decision:
    """Return what a listener decided; whatever is not a decision is a denial."""
    if isinstance(value, Decision) and isinstance(value.verdict, Verdict):
        return value
    log.error("decision_malformed", got=type(value).__name__)
    return Decision(Verdict.DENY, "the policy gave no valid decision")


def _unless_overtaken(signal: AbortSignal, output: ToolOutput) -> ToolOutput:
    """Return `output`, marked as aborted if it is a success that the abort overtook."""
    if output.is_error or not signal.aborted:
        return output
    text = f"{ABORTED.output} What it returned:\n{output.output}"
    return structs.replace(output, output=text, is_error=True, code="ABORTED")


async def ask_from(agent: Agent, execution: ToolExecution) -> Approval:
    """Ask the listeners of `agent`, and if none of them answers those of whoever it works for.

    Cancellation: through ``execution.signal``. Concurrency: any number of questions.
    """

    async def ask_above(execution: ToolExecution) -> Approval:
        if agent.parent is None:
            return Approval.UNAVAILABLE
        return await ask_from(agent.parent, execution)

    approval: Approval = await agent.hooks.waterfall("approval/request", execution, final=ask_above)
    return approval


def stop_asker(agent: Agent) -> None:
    """Stop the turn that `agent` works for: its person dismissed what it asked."""
    agent.root.cancel()
    agent.cancel()  # also where it is no part of the turn
