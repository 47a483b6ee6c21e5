"""Tools whose work is done by a thread, beside those of the event loop: a Stop reaches both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from core_rig import call, rig, say, tool

from agent_core.cancellation import TurnAborted
from agent_core.content import ToolCallPart
from agent_core.events import Aborted, Completed
from agent_core.models.adapter import AssistantTurn, ToolTurn
from agent_core.tools.tool import ToolContext, ToolOutput

Beat = Callable[[], None]
KINDS = ("a task", "a thread")


class Worker:
    """Writes a line now and then, until the signal says stop; `lines` are those so far."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.works = anyio.Event()

    async def __call__(self, context: ToolContext) -> ToolOutput:
        if self.kind == "a thread":
            await anyio.to_thread.run_sync(self._in_a_thread, context)
        else:
            await self._in_a_task(context)
        raise TurnAborted(context.signal.reason)

    def _in_a_thread(self, context: ToolContext) -> None:
        while not context.signal.aborted:  # may be read from any thread
            self._write()
            anyio.from_thread.run_sync(self.works.set)

    async def _in_a_task(self, context: ToolContext) -> None:
        while not context.signal.aborted:
            self._write()
            self.works.set()
            await anyio.lowlevel.checkpoint()

    def _write(self) -> None:
        with self.path.open("a") as file:
            file.write("half of it\n")


@pytest.mark.race
@pytest.mark.requirement("R73", "B054", "B063", "B064", "B136")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stop_ends_the_work_and_the_model_is_told_that_it_may_be_half_done(
    tmp_path: Path, kind: str
) -> None:
    worker = Worker(kind, tmp_path / "written")
    async with rig(call("work"), say("ok"), tools=[tool("work", worker)]) as r:
        prompt = r.agent.send("go")
        await worker.works.wait()
        r.agent.cancel()

        assert await prompt.settled() == Aborted()
        written = worker.path.read_text()
        n_requests = len(r.model.requests)
        assert n_requests == 1

        assert await r.agent.send("on").settled() == Completed()
        assert worker.path.read_text() == written
        (result,) = r.results
        assert result.code == "ABORTED"
        assert "may be partial" in result.output
        told = r.model.requests[-1].messages
        calls = [p.id for m in told if isinstance(m, AssistantTurn) for p in _calls(m)]
        assert [m.call_id for m in told if isinstance(m, ToolTurn)] == calls
        assert len(calls) == 1


def _calls(message: AssistantTurn) -> list[Any]:
    return [part for part in message.content if isinstance(part, ToolCallPart)]
