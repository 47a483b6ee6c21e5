"""What another agent asks permission for, and who answers it.

Its question is put as if a tool of ours asked it: the parent's permission mode and remembered
answers come first, then the person, who sees the name of the agent and what it wants. What an
"always" covers is this one thing of this one agent, for the rest of the parent's session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, cast, get_args

from msgspec import Struct

from acp_server.client import CANCELLED, selected
from acp_server.config_tables import Permissions
from acp_server.errors import REQUEST_CANCELLED, RpcError
from acp_server.peer import InFlight
from agent_core.cancellation import AbortController, AbortSignal, TurnAborted
from agent_core.content import ToolKind
from agent_core.events import PermissionDecided
from agent_core.permissions import Approval, Verdict, decide
from agent_core.subagents import Delegation, SubagentRequest
from agent_core.tools.pipeline import ToolExecution, ask_from, stop_asker
from agent_core.tools.tool import Effect, Tool, ToolView

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallShown", "Question", "RemoteQuestions"]

MAX_CALLS: Final = 256
"""So many of an agent's calls are remembered for the questions about them."""
MAX_TITLE_CHARS: Final = 200

_KINDS: Final = {  # of the agent's options, by what came of the question; the first there is
    Approval.ALLOWED: ("allow_once", "allow_always"),
    Approval.ALLOWED_ALWAYS: ("allow_always", "allow_once"),
    Approval.REJECTED: ("reject_once",),
    Approval.REJECTED_ALWAYS: ("reject_always", "reject_once"),
    Approval.UNAVAILABLE: ("reject_once",),
}
_READS: Final = ("read", "search", "think")
_EDITS: Final = ("edit", "delete", "move")


class CallShown(Struct, frozen=True, rename="camel"):
    """A call as the agent shows it; what is `None` is as it was."""

    tool_call_id: str = ""
    title: str | None = None
    kind: str | None = None


class _Option(Struct, frozen=True, rename="camel"):
    option_id: str
    kind: str = ""


class Question(Struct, frozen=True, rename="camel"):
    """The params of ``session/request_permission``, as far as they matter."""

    options: tuple[_Option, ...]
    tool_call: CallShown = CallShown()


class RemoteQuestions:
    """The questions of one run.

    Args:
        request: What the run is for.
        run_id: The run's.
        permissions: Who answers.
        stop: Stops the run.
    """

    def __init__(
        self,
        request: SubagentRequest,
        run_id: str,
        permissions: Permissions,
        stop: Callable[[], None],
    ) -> None:
        self._request = request
        self._run_id = run_id
        self._permissions = permissions
        self._stop = stop
        self._calls: dict[str, CallShown] = {}
        self._closing = AbortController()

    def note(self, call: CallShown) -> None:
        """Take note of a call that a question may be about."""
        before = self._calls.pop(call.tool_call_id, call)
        self._calls[call.tool_call_id] = CallShown(
            call.tool_call_id, call.title or before.title, call.kind or before.kind
        )
        if len(self._calls) > MAX_CALLS:
            del self._calls[next(iter(self._calls))]

    def close(self) -> None:
        """Give up what is being asked, and allow nothing any more. Idempotent."""
        self._closing.abort("the agent is stopped or gone")

    async def decide(self, question: Question, in_flight: InFlight) -> dict[str, Any]:
        """Answer one. Nothing is allowed once the run was told to stop.

        Cancellation: through the request's signal, `close` and ``$/cancel_request``.
        Concurrency: any number of questions.
        """
        taken_back = AbortController()

        def take_back() -> None:
            taken_back.abort("the agent took its question back")

        in_flight.cancel = take_back
        signals = (self._request.signal, self._closing.signal, taken_back.signal)
        with AbortSignal.any(*signals) as signal:
            try:
                approval = await self._approval(question.tool_call, signal)
                signal.raise_if_aborted()
            except TurnAborted:
                approval = Approval.CANCELLED
        if taken_back.signal.aborted:
            raise RpcError(REQUEST_CANCELLED, "Request cancelled")
        for kind in _KINDS.get(approval, ()):
            for option in question.options:
                if option.kind == kind:
                    return selected(option.option_id)
        return CANCELLED

    async def _approval(self, call: CallShown, signal: AbortSignal) -> Approval:
        """Decide by policy, mode and what is remembered, or ask.

        Cancellation: through `signal`. Concurrency: any number of questions.
        """
        signal.raise_if_aborted()
        parent = self._request.parent
        name = self._request.name or "subagent"
        seen = self._calls.get(call.tool_call_id, call)
        tool = _tool(name, call.title or seen.title, call.kind or seen.kind)
        key, _words = tool.remember_key(None)
        remembered = parent.root.session.state.remembered
        verdict = decide(parent.mode, tool.effect, remembered, key).verdict
        if verdict is Verdict.DENY and tool.kind in _READS and key not in remembered:
            verdict = Verdict.ASK
        if self._permissions == "reject" or verdict is Verdict.DENY:
            return Approval.REJECTED
        if self._permissions == "allow" or verdict is Verdict.ALLOW:
            return Approval.ALLOWED
        execution = ToolExecution(
            parent,
            parent.session.state.last_turn,
            0,
            self._run_id,
            tool,
            "",
            None,
            ToolView(tool.title),
            signal,
            delegation=Delegation(self._request.call_id, name),
        )
        approval = await ask_from(parent, execution)
        signal.raise_if_aborted()  # an answer that came with the end is none
        if approval.is_remembered:
            outcome = "allowed" if approval.is_allowed else str(approval)
            parent.root.session.append(PermissionDecided(self._run_id, outcome, key))
        if approval is Approval.CANCELLED:
            stop_asker(parent)
            self._stop()
        return approval


class _ForeignTool(Tool):
    """What an agent asks about; it is never run here."""

    name: ClassVar[str] = "subagent"
    title: ClassVar[str]
    agent: ClassVar[str]

    def remember_key(self, args: object) -> tuple[str, str]:
        """Cover just this, of just this agent."""
        return f"agent:{self.agent}:{self.title}", f"“{self.title}” of {self.agent}"


def _tool(agent: str, title: str | None, kind: str | None) -> _ForeignTool:
    shown = "".join(filter(str.isprintable, title or ""))[:MAX_TITLE_CHARS] or "something"
    known = cast("ToolKind", kind) if kind in get_args(ToolKind) else "other"
    # It asks although it says that it only reads, so that is not taken for a reason to allow it.
    effect: Effect = "edit" if known in _EDITS else "execute"
    fields = {"agent": agent, "title": shown, "kind": known, "effect": effect}
    made: type[_ForeignTool] = type("ForeignTool", (_ForeignTool,), fields)
    return made()
