"""Which agent is running here: the one ambient value, and it is identity only.

The frame holds the agent and nothing else. It lives as long as the agent's driver, so whatever a
turn leaves behind still sees it; it therefore proves neither that the agent is alive, nor that a
turn runs, nor that anybody may cancel one. Cancellation travels in arguments
(`agent_core.cancellation`), never here.

Source: RFC "explicit turn cancellation", Decision 6.
"""

from __future__ import annotations

from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["AgentExecution", "current", "require"]


@dataclass(frozen=True, slots=True)
class AgentExecution:
    """The ambient frame."""

    agent: Agent


_execution: ContextVar[AgentExecution | None] = ContextVar("agent_execution", default=None)


def current() -> AgentExecution | None:
    """Return the frame of the agent whose driver led here, or `None` outside of any."""
    return _execution.get()


def require() -> AgentExecution:
    """Return the frame.

    Raises:
        LookupError: No agent's driver led here.
    """
    frame = _execution.get()
    if frame is None:
        raise LookupError("no agent is running here")
    return frame


def context_for(agent: Agent, base: Context) -> Context:
    """Return a copy of `base` in which `agent` is the ambient agent, for its driver task."""
    context = base.copy()
    context.run(_execution.set, AgentExecution(agent))
    return context
