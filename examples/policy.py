"""A plugin that stops turns which go on for too long.

    acp-agent chat --plugin examples.policy:set_up

``agent/turn-stop`` has the last word after every step: whatever it returns but `None` ends the
turn as completed. It is a decision between two steps, not a cancel: nothing is interrupted.
"""

from __future__ import annotations

from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.events import StepEnd
from agent_core.runtime import AgentRuntime

MAX_STEPS = 3


def set_up(runtime: AgentRuntime) -> None:
    """Add the policy to every agent."""
    runtime.hooks.on("agent/turn-stop", stop_after_some_steps)


async def stop_after_some_steps(agent: Agent, turn: int, _signal: AbortSignal) -> str | None:
    """Stop a turn that has had `MAX_STEPS` model calls."""
    ends = (event.data for event in agent.session.events if isinstance(event.data, StepEnd))
    steps = sum(end.turn == turn for end in ends)
    return f"{steps} steps are enough" if steps >= MAX_STEPS else None
