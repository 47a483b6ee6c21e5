"""Slash commands: prompts that are answered here and that no model sees."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import UNSET, Struct

from acp_server.types import AvailableCommand, CommandInput
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.content import Block, text_of
from agent_core.events import AssistantMessage, TurnStart
from agent_core.loop import Allow, Refuse
from agent_core.permissions import MODES

__all__ = ["COMMANDS", "Command", "answer_commands"]


class Command(Struct, frozen=True):
    """One command: what the client offers, and what it answers to its argument."""

    name: str
    description: str
    answer: Callable[[Agent, str], str]
    hint: str = ""

    @property
    def offer(self) -> AvailableCommand:
        """The command as a client lists it."""
        hint = CommandInput(self.hint) if self.hint else UNSET
        return AvailableCommand(self.name, self.description, hint)


async def answer_commands(
    agent: Agent,
    content: tuple[Block, ...],
    _source: str,
    _signal: AbortSignal,
    next_: Callable[[], Awaitable[Any]],
) -> Allow | Refuse:
    """Answer a prompt that is a command; let every other one pass. An ``agent/prompt-submit``."""
    name, _, argument = text_of(content).strip().partition(" ")
    command = next((each for each in COMMANDS if name == f"/{each.name}"), None)
    if command is not None:
        return Refuse(command.answer(agent, argument.strip()))
    verdict: Allow | Refuse = await next_()
    return verdict


def _help(_agent: Agent, _argument: str) -> str:
    lines = (
        f"- `/{each.name} {each.hint}`".rstrip() + f": {each.description}" for each in COMMANDS
    )
    return "\n".join(("These commands are answered without the model:", "", *lines))


def _mode(agent: Agent, argument: str) -> str:
    if argument:
        try:
            agent.set_mode(argument)
        except ValueError as exc:
            return f"{exc}."
    lines = (
        f"- `{mode.id}`{' (now)' if mode.id == agent.mode else ''}: {mode.description}"
        for mode in MODES.values()
    )
    return "\n".join(("Permission modes:", "", *lines))


def _status(agent: Agent, _argument: str) -> str:
    events = [event.data for event in agent.session.events]
    turns = sum(isinstance(data, TurnStart) for data in events)
    used = [data.usage for data in events if isinstance(data, AssistantMessage) and data.usage]
    tokens_in = sum(usage.input_tokens for usage in used)
    tokens_out = sum(usage.output_tokens for usage in used)
    return "\n".join(
        (
            f"- Session: `{agent.id}`, turn {turns}",
            f"- Directory: `{agent.roots.cwd}`",
            f"- Model: `{agent.model.model}`",
            f"- Permission mode: `{agent.mode}`",
            f"- Tokens: {tokens_in} in, {tokens_out} out",
        )
    )


COMMANDS: Final = (
    Command("help", "List these commands", _help),
    Command("mode", "Show or change the permission mode", _mode, hint="[mode]"),
    Command("status", "Show the session, its model, its mode and its tokens", _status),
)
