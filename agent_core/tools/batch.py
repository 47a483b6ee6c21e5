"""The tool calls of one step: their order, what may overlap, and one result for each.

Calls run in the model's order. Neighbours that declare themselves parallel overlap, at most
`MAX_PARALLEL` at a time; results are logged in the model's order all the same. Whatever happens,
an abort included, every call has been announced and has exactly one result when `run` is left:
without that no provider accepts the session's next request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final

import anyio
from msgspec import structs

from agent_core.cancellation import AbortSignal
from agent_core.content import Block, ToolCallPart
from agent_core.events import ContextMessage, ToolResult, ToolStart
from agent_core.logs import get_logger
from agent_core.sessions.log import Session
from agent_core.tools.pipeline import ABORTED, NOT_RUN, ToolExecution, ToolPipeline

__all__ = ["StepCalls"]

MAX_PARALLEL: Final = 8

log = get_logger(__name__)


class StepCalls:
    """Runs the calls of one step, once. `running` maps ids of entered calls to their titles."""

    def __init__(
        self,
        pipeline: ToolPipeline,
        session: Session,
        calls: Sequence[ToolCallPart],
        *,
        turn: int,
        step: int,
        signal: AbortSignal,
        running: dict[str, str],
        on_result: Callable[[ToolExecution, ToolResult], None],
    ) -> None:
        self._pipeline = pipeline
        self._session = session
        self._calls = calls
        self._at = (turn, step)
        self._signal = signal
        self._running = running
        self._on_result = on_result
        self._announced: dict[str, ToolExecution | ToolResult] = {}
        self._unlogged: dict[str, ToolResult] = {}  # done, waiting for the calls before them
        self._logged = 0
        self._begin = len(session.events)
        self._context: list[Block] = []

    async def run(self) -> None:
        """Run them all.

        Cancellation: through the signal; started bodies are waited for, others get their result
        without running. Concurrency: once.

        Raises:
            TurnAborted: The signal fired.
            StoreError: The log could not be made durable before a side effect.
        """
        try:
            for group in self._groups():
                self._signal.raise_if_aborted()
                for part in group:
                    self._announce(part)
                if len(group) == 1:
                    await self._run_one(group[0])
                else:
                    await self._run_overlapping(group)
                self._signal.raise_if_aborted()
        finally:
            self._close()
            if self._context:
                self._session.append(ContextMessage(tuple(self._context), "tools"))

    def _groups(self) -> Iterator[list[ToolCallPart]]:
        for is_parallel, parts in groupby(self._calls, self._pipeline.is_parallel):
            if is_parallel:
                yield list(parts)
            else:
                yield from ([part] for part in parts)

    async def _run_overlapping(self, group: Sequence[ToolCallPart]) -> None:
        # Each call contains its own failures, so the task group never cancels a sibling.
        failures: list[Exception] = []
        room = anyio.Semaphore(MAX_PARALLEL)

        async def run(part: ToolCallPart) -> None:
            async with room:
                if failures:
                    return  # nothing new starts
                try:
                    await self._run_one(part)
                except Exception as exc:
                    failures.append(exc)

        async with anyio.create_task_group() as group_tasks:
            for part in group:
                group_tasks.start_soon(run, part, name=f"tool call {part.id}")
        if failures:
            raise failures[0]

    def _announce(self, part: ToolCallPart) -> None:
        self._announced[part.id] = self._pipeline.announce(*self._at, part, self._signal)

    async def _run_one(self, part: ToolCallPart) -> None:
        announced = self._announced[part.id]
        if isinstance(announced, ToolResult):
            self._done(announced)
            return
        self._running[part.id] = announced.view.title
        try:
            result, context = await self._pipeline.dispatch(announced)
        finally:
            shown = self._running.pop(part.id)
        if shown != announced.view.title:  # it took so long to stop that people were told
            result = structs.replace(result, title=announced.view.title)
        self._context += context
        self._done(result)

    def _done(self, result: ToolResult) -> None:
        self._unlogged[result.call_id] = result
        while self._logged < len(self._calls):
            call_id = self._calls[self._logged].id
            if (ready := self._unlogged.pop(call_id, None)) is None:
                return
            self._logged += 1
            self._log(ready)
            announced = self._announced[call_id]
            if isinstance(announced, ToolExecution):
                self._on_result(announced, ready)

    def _log(self, result: ToolResult) -> None:
        try:
            self._session.append(result)
        except TypeError:  # the tool's output is not what it claims to be
            log.exception("tool_result_unusable", call_id=result.call_id)
            text = "The tool gave a result that cannot be kept."
            self._session.append(ToolResult(*self._at, result.call_id, text, True, "TOOL_CRASHED"))

    def _close(self) -> None:
        """Give the calls that have no result yet the one that is true of them."""
        since = self._session.events[self._begin :]
        entered = {event.data.call_id for event in since if isinstance(event.data, ToolStart)}
        while self._logged < len(self._calls):  # each round logs one, and those that waited for it
            part = self._calls[self._logged]
            if part.id not in self._announced:
                self._announce(part)
            output = ABORTED if part.id in entered else NOT_RUN
            announced = self._announced[part.id]
            if isinstance(announced, ToolResult):
                self._done(announced)
                continue
            self._done(ToolResult(*self._at, part.id, output.output, True, output.code))
