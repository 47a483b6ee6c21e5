"""What a subagent costs, and whether many at once get in each other's way."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import anyio

from acp_server.backend import open_backend
from acp_server.config import Config
from agent_core.agent import Agent
from agent_core.cancellation import AbortController
from agent_core.content import Text
from agent_core.subagents import SubagentRequest
from benchmarks.table import Figure, at_most, median, ratio_at_least

TEAM = 8


def subagents(*, is_quick: bool) -> Iterator[Figure]:
    """Processor time of a subagent with one short answer, and chunks a second of one and of 8."""
    runs, count, rounds = (50, 20_000, 1) if is_quick else (300, 80_000, 3)
    spawn_ms, alone, together = anyio.run(_measure, runs, count, rounds)
    yield Figure(f"processor time of a subagent, n={runs}", spawn_ms, "ms", budget=at_most(3))
    yield Figure(f"chunks of one subagent, {count:,}", alone, "/s")
    name, budget = f"chunks of {TEAM} at once, all together", ratio_at_least(0.9)
    yield Figure(name, together, "/s", alone, "one", budget)


async def _measure(runs: int, count: int, rounds: int) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory(prefix="acp-benchmark-") as folder:
        place = Path(folder)
        async with open_backend(Config(state_dir=str(place / "state"), mode="bypass")) as backend:
            agent = await backend.runtime.create(str(place))
            await _run(agent, "say warm")
            begun_s = time.process_time()
            for _ in range(runs):
                await _run(agent, "say x")
            spawn_ms = (time.process_time() - begun_s) / runs * 1000
            rates = [
                (await _rate(agent, 1, count), await _rate(agent, TEAM, count // TEAM))
                for _ in range(rounds)
            ]
    alone, together = (median(values) for values in zip(*rates, strict=True))
    return spawn_ms, alone, together


async def _rate(agent: Agent, team: int, count: int) -> float:
    begun_s = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(team):
            tasks.start_soon(_run, agent, f"count {count}")
    return team * count / (time.perf_counter() - begun_s)


async def _run(agent: Agent, task: str) -> None:
    request = SubagentRequest((Text(task),), agent, AbortController().signal)
    run = await agent.subagents.start("spawn", request)
    try:
        result = await run.result()
    finally:
        await run.dispose()
    if result.reason != "completed":
        raise RuntimeError(result.message)
