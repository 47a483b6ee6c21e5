"""agent_core as a library: an agent in a program of your own, with a tool, a hook and a Stop.

Run it from the project's folder: ``python examples/library.py``. It needs no network and no key,
because the model plays the script beside this file; put an `OpenAIModel` in its place for a real
one.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Annotated, ClassVar

import anyio
from msgspec import Meta, Struct

from agent_core.events import AssistantChunk, Event, ToolResult
from agent_core.models.rehearsal import RehearsalModel
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.pipeline import ToolExecution
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput

SCRIPT = Path(__file__).with_suffix(".jsonl")


class Dice(Tool):
    """A tool: what it takes, what it may do to the world, and `run`."""

    class Args(Struct, frozen=True, forbid_unknown_fields=True):
        """What the model passes; its JSON schema is made from this."""

        count: Annotated[int, Meta(ge=1, le=10, description="How many dice.")] = 1

    name: ClassVar[str] = "dice"
    description: ClassVar[str] = "Roll dice and return what they show."
    effect: ClassVar[Effect] = "none"  # touches nothing, so nobody is asked

    async def run(self, args: Args, context: ToolContext) -> ToolOutput:
        """Roll. A tool that waits does so in ``async with context.signal.scope():``."""
        return ToolOutput(" ".join(str(random.randint(1, 6)) for _ in range(args.count)))


class Screen:
    """Prints what happens. `spoke` is set once the agent has said anything since `listen`."""

    def listen(self) -> None:
        """Begin to wait for the agent's next words."""
        self.spoke = anyio.Event()

    def show(self, event: Event) -> None:
        """Observe the session's log: every event comes here as soon as it is in."""
        if isinstance(event.data, AssistantChunk):
            print(event.data.text, end="", flush=True)
            self.spoke.set()


def note_result(execution: ToolExecution, result: ToolResult) -> None:
    """Listen to the ``tools/result`` hook."""
    print(f"[{execution.tool.name}: {result.output}] ", end="")


async def main() -> None:
    """Hold a conversation of three prompts, the second of which is stopped."""
    screen = Screen()
    async with AgentRuntime(
        MemoryStore(),
        model=RehearsalModel(script=SCRIPT),
        tools=(Dice(),),
        files=LocalFiles(),
        commands=LocalCommands(),
    ) as runtime:
        runtime.hooks.on("tools/result", note_result)
        agent = await runtime.create(os.getcwd())
        agent.session.observe(screen.show)

        for text, is_stopped in (
            ("Roll two dice.", False),
            ("Why?", True),
            ("Still there?", False),
        ):
            print(f"> {text}")
            screen.listen()
            prompt = agent.send(text)
            if is_stopped:
                await screen.spoke.wait()
                agent.cancel({"kind": "user"})
            # Settled means: all that the turn started has ended, and its log is safe.
            print(f"\n({await prompt.settled()})")
    # Leaving the block stopped the agent, and waited for it.


if __name__ == "__main__":
    anyio.run(main)
