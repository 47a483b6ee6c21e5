"""Slash commands: prompts that are answered here, or that stand for a longer one.

A command is the first word of a prompt's first text. Text and links behind it are its argument;
whatever else the prompt holds stays in it, where the model gets to see it at all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import UNSET, Struct

from acp_server.command_files import CommandFile, CommandFiles, expanded
from acp_server.types import AvailableCommand, CommandInput
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.compaction import compact
from agent_core.content import Block, Link, PlanEntry, Text, text_of
from agent_core.events import ModelUsage, SubagentUsage, TurnStart
from agent_core.knowledge import Knowledge
from agent_core.loop import Allow, Refuse
from agent_core.permissions import MODES
from agent_core.tools.agents import listed
from agent_core.undo import undo

__all__ = ["COMMANDS", "Call", "Command", "SessionCommands", "Told"]


class Told(Struct, frozen=True):
    """What the model is told in place of the command."""

    text: str


class Call(Struct, frozen=True):
    """A command as it was typed, and what its answer may need."""

    agent: Agent
    argument: str
    signal: AbortSignal
    files: tuple[CommandFile, ...]


class Command(Struct, frozen=True):
    """One built-in command: what the client offers, and what it answers, or tells the model."""

    name: str
    description: str
    answer: Callable[[Call], Awaitable[str | Told]]
    hint: str = ""

    @property
    def offer(self) -> AvailableCommand:
        """The command as a client lists it."""
        hint = CommandInput(self.hint) if self.hint else UNSET
        return AvailableCommand(self.name, self.description, hint)


class SessionCommands:
    """The commands of one session: the built-in ones, and those of files.

    Args:
        offer: Called with all commands when there are others than before.
    """

    def __init__(self, offer: Callable[[tuple[AvailableCommand, ...]], None]) -> None:
        self._offer = offer
        reserved = frozenset(command.name for command in COMMANDS)
        self._files = CommandFiles(reserved)

    async def look(self, agent: Agent) -> None:
        """Look for command files of the session's agent, to be offered with `offer`.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        look = await agent.project_files.look_again(agent)
        await self._files.update(look.commands)

    def offer(self) -> None:
        """Offer what there was at the last look."""
        built_in = (command.offer for command in COMMANDS)
        from_files = (file.offer for file in self._files.commands.values())
        self._offer((*built_in, *from_files))

    async def submit(
        self,
        agent: Agent,
        content: tuple[Block, ...],
        source: str,
        signal: AbortSignal,
        next_: Callable[..., Awaitable[Any]],
    ) -> Allow | Refuse:
        """Answer or replace a prompt that is a command; let every other one pass.

        An ``agent/prompt-submit``. What stands for a command passes the listeners behind this one
        like any prompt.
        """
        look = await agent.project_files.look(agent, signal)
        if await self._files.update(look.commands, signal):
            self.offer()
        name, argument, rest = _parts(content)
        files = self._files.commands
        answer: str | Told
        if (command := _BY_NAME.get(name)) is not None:
            answer = await command.answer(Call(agent, argument, signal, tuple(files.values())))
        elif (file := files.get(name)) is not None:
            answer = Told(expanded(file.body, argument))
        else:
            verdict: Allow | Refuse = await next_()
            return verdict
        if isinstance(answer, str):
            return Refuse(answer)
        replaced = (Text(answer.text), *rest)
        verdict = await next_(agent, replaced, source, signal)
        if isinstance(verdict, Refuse):
            return verdict
        told = replaced if verdict.content is None else verdict.content
        return Allow(told, verdict.context, content if verdict.shown is None else verdict.shown)


def _parts(content: tuple[Block, ...]) -> tuple[str, str, tuple[Block, ...]]:
    """Return the name of a prompt's command, its argument, and the blocks that are no text.

    The name is empty if the prompt is no command.
    """
    said = [block for block in content if isinstance(block, Text | Link)]
    if not said or not isinstance(said[0], Text) or not said[0].text.lstrip().startswith("/"):
        return "", "", content
    name, *behind = said[0].text.strip().split(None, 1)
    argument = " ".join((*behind, *(text_of((block,)).strip() for block in said[1:])))
    return name[1:], argument.strip(), tuple(b for b in content if not isinstance(b, Text))


# --- the built-in ones ----------------------------------------------------------------------


async def _help(call: Call) -> str:
    lines = [_described(command.offer) for command in COMMANDS]
    if call.files:
        lines += ("", "These are prompts from files:", "")
        lines += (f"{_described(file.offer)} (`{file.path}`)" for file in call.files)
    return "\n".join(("These commands are built in:", "", *lines))


def _described(offer: AvailableCommand) -> str:
    hint = offer.input.hint if isinstance(offer.input, CommandInput) else ""
    return f"- `/{offer.name} {hint}".rstrip() + f"`: {offer.description}"


async def _mode(call: Call) -> str:
    if call.argument:
        try:
            call.agent.set_mode(call.argument)
        except ValueError as exc:
            return f"{exc}."
    lines = (
        f"- `{mode.id}`{' (now)' if mode.id == call.agent.mode else ''}: {mode.description}"
        for mode in MODES.values()
    )
    return "\n".join(("Permission modes:", "", *lines))


async def _model(call: Call) -> str:
    agent = call.agent
    if call.argument:
        try:
            agent.set_model(call.argument)
        except ValueError as exc:
            return f"{exc}."
    now = agent.model.info.name
    names = (each.info.name for each in agent.models.adapters)
    lines = (f"- `{name}`{' (now)' if name == now else ''}" for name in names)
    return "\n".join(("Models:", "", *lines))


async def _plan(call: Call) -> str | Told:
    if call.argument:
        return Told(_PLAN_REQUEST.format(call.argument))
    plan = call.agent.session.state.plan
    if not plan:
        return "There is no plan yet. `/plan WHAT` asks the model for one."
    return "\n".join(("The plan:", "", *map(_entry, plan)))


def _entry(entry: PlanEntry) -> str:
    box = "x" if entry.status == "completed" else " "
    text = " ".join(entry.content.split())
    return f"- [{box}] **{text}**" if entry.status == "in_progress" else f"- [{box}] {text}"


async def _compact(call: Call) -> str:
    return (await compact(call.agent, call.signal)).sentence


async def _status(call: Call) -> str:
    agent = call.agent
    events = [event.data for event in agent.session.events]
    turns = sum(isinstance(data, TurnStart) for data in events)
    used = [data.usage for data in events if isinstance(data, ModelUsage | SubagentUsage)]
    tokens_in = sum(usage.input_tokens for usage in used)
    tokens_out = sum(usage.output_tokens for usage in used)
    known = await Knowledge().known(agent, call.signal)
    return "\n".join(
        (
            f"- Session: `{agent.id}`, turn {turns}",
            f"- Directory: `{agent.roots.cwd}`",
            f"- Model: `{agent.model.info.name}`",
            f"- Permission mode: `{agent.mode}`",
            f"- Tokens: {tokens_in} in, {tokens_out} out{_spent(agent)}",
            *_listed("Instructions", [each.path for each in known.instructions]),
            *_listed("Skills", [skill.name for skill in known.skills]),
            *_listed("Commands from files", [f"/{file.name}" for file in call.files]),
        )
    )


def _spent(agent: Agent) -> str:
    state = agent.session.state
    return "" if state.cost is None else f"; {state.cost:.4f} {state.currency}"


def _listed(title: str, names: list[str]) -> tuple[str, ...]:
    return (f"- {title}: {', '.join(f'`{name}`' for name in names)}",) if names else ()


async def _agents(call: Call) -> str:
    return listed(call.agent.background.children)


async def _stop(call: Call) -> str:
    background = call.agent.background
    child = background.get(call.argument)
    if child is None:
        known = ", ".join(f"`{each.name}`" for each in background.children) or "none"
        return f"Say which one to stop: `/stop NAME`. There are {known}."
    background.stop(child)
    await background.wait(child, call.signal)
    return f"`{child.name}` has {'been stopped' if child.state == 'stopped' else child.state}."


async def _undo(call: Call) -> str:
    return await undo(call.agent, call.signal)


_PLAN_REQUEST: Final = """\
Make a plan for the request below and write it down with the plan tool. Read whatever you need to \
know for it, but change nothing and run nothing that does: stop when the plan is written, and say \
what you would begin with.

{}"""

COMMANDS: Final = (
    Command("help", "List these commands", _help),
    Command("model", "Show or change the model", _model, hint="[model]"),
    Command("mode", "Show or change the permission mode", _mode, hint="[mode]"),
    Command("plan", "Show the plan, or ask the model for one", _plan, hint="[what to plan]"),
    Command("agents", "Show the subagents in the background", _agents),
    Command("stop", "Stop a subagent in the background", _stop, hint="name"),
    Command("compact", "Put a summary in the place of the conversation so far", _compact),
    Command("status", "Show the session, its model, its mode and its tokens", _status),
    Command("undo", "Take back the last turn's changes of files", _undo),
)
_BY_NAME: Final = {command.name: command for command in COMMANDS}
