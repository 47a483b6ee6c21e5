"""A team of three: two subagents that look into something at once, and one that is stopped.

Run it from the project's folder: ``python examples/team.py``. It needs no network and no key,
because the model is the built-in one, which does what a prompt says; put another in its place.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio

from agent_core.agent import Agent
from agent_core.agent_files import AgentFiles
from agent_core.cancellation import AbortController, AbortSignal
from agent_core.content import Text
from agent_core.models.rehearsal import RehearsalModel
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.subagents import SubagentRequest
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.registry import default_tools

READER = """\
---
name: reader
description: Reads files and changes nothing
tools: read, list, search
---
You read, and say what you found.
"""


async def work(agent: Agent, name: str, who: str, task: str, signal: AbortSignal) -> None:
    """Give `task` to a subagent, and say how it ended. Its end is waited for, whatever happens."""
    request = SubagentRequest(
        (Text(task),), agent, signal, name=name, show=lambda line: print(f"{name} ... {line}")
    )
    provider, request = await agent.subagents.resolved(who, request)
    run = await agent.subagents.start(provider, request)
    try:
        result = await run.result()
    finally:
        await run.dispose()
    print(f"{name} {result.reason}: {' '.join(result.output.split())}")


async def main(place: Path) -> None:
    """Have Ann read, Bob run something, and Carl wait for what never comes."""
    (place / ".agents" / "agents").mkdir(parents=True)
    (place / ".agents" / "agents" / "reader.md").write_text(READER)
    (place / "notes.txt").write_text("the answer is 42\n")
    async with AgentRuntime(
        MemoryStore(),
        model=RehearsalModel(),
        tools=default_tools(),
        files=LocalFiles(),
        commands=LocalCommands(),
        mode="bypass",  # nobody is there to be asked
    ) as runtime:
        AgentFiles().use(runtime)
        agent = await runtime.create(str(place))
        stop = AbortController()  # in a turn, it would be the turn's own signal
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as team:
                tasks.start_soon(work, agent, "Carl", "spawn", "say Well,\nstall", stop.signal)
                team.start_soon(work, agent, "Ann", "reader", "read notes.txt", stop.signal)
                team.start_soon(work, agent, "Bob", "spawn", "run echo hello", stop.signal)
            # Ann and Bob are done. A stop reaches whoever is left, however deep.
            stop.abort("enough")
        print(f"left: {len(runtime.agents) - 1}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(main, Path(folder))
