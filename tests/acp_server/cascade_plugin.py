"""A plugin for the tests of the cascade: a model that does as it is told, and a look inside.

A prompt to it is a JSON list of calls, ``[["delegate", {"task": …}], …]``. The model makes all of
them at once, and says ``done`` when their results are there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar

import anyio
from msgspec import Struct

from agent_core.cancellation import TurnAborted
from agent_core.content import text_of
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    TextDelta,
    ToolCallDelta,
    UserTurn,
)
from agent_core.models.choice import Models
from agent_core.runtime import AgentRuntime
from agent_core.tools.tool import Tool, ToolContext, ToolOutput


def set_up(runtime: AgentRuntime) -> None:
    """Put the model and the two tools in place."""
    runtime.models = Models(Obedient())
    runtime.add_tool(Deaf())
    runtime.add_tool(Census())


class Obedient:
    """Makes the calls that its prompt lists."""

    info = ModelInfo("obedient")

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        last = request.messages[-1]
        if isinstance(last, UserTurn):
            for index, (name, arguments) in enumerate(json.loads(text_of(last.content))):
                yield ToolCallDelta(index, name, json.dumps(arguments))
            yield Finish("tool_calls")
        else:
            yield TextDelta("done")
            yield Finish("stop")

    async def aclose(self) -> None:
        pass


class _Folder(Struct, frozen=True, forbid_unknown_fields=True):
    folder: str


class Deaf(Tool):
    """Takes note of the abort in the file ``noticed``, and goes on until there is ``enough``."""

    name: ClassVar[str] = "deaf"
    description: ClassVar[str] = "Does not listen."
    Args: ClassVar[type[Struct]] = _Folder

    async def run(self, args: _Folder, context: ToolContext) -> ToolOutput:
        folder = Path(args.folder)
        (folder / "started-deaf").touch()
        await context.signal.wait()
        (folder / "noticed").touch()
        while not (folder / "enough").exists():  # noqa: ASYNC110 - another process's word
            await anyio.sleep(0.005)
        raise TurnAborted(context.signal.reason)


class _Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Census(Tool):
    """Says which agents there are, and which tasks run in this process."""

    name: ClassVar[str] = "census"
    description: ClassVar[str] = "Counts."
    Args: ClassVar[type[Struct]] = _Nothing
    effect: ClassVar[Any] = "none"

    async def run(self, args: _Nothing, context: ToolContext) -> ToolOutput:
        tasks = sorted(task.get_name() for task in asyncio.all_tasks())
        agents = len(context.agent._runtime.agents)
        return ToolOutput(json.dumps({"agents": agents, "tasks": tasks}))
