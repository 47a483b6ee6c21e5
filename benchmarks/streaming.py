"""What one chunk of a model's answer costs, and how many fit into a second."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.client import ANSWERED, BARE, OURS, SDK, AgentProcess, agent
from benchmarks.provider import provider
from benchmarks.table import Budget, Figure, at_least, at_most, median


def updates(*, is_quick: bool) -> Iterator[Figure]:
    """Updates a second, and processor time for each, with the built-in model."""
    count, rounds = (20_000, 1) if is_quick else (100_000, 3)
    samples: dict[tuple[str, ...], list[tuple[float, float]]] = {OURS: [], BARE: [], SDK: []}
    for _ in range(rounds):
        for command, taken in samples.items():
            with agent(command) as process:
                process.initialize()
                taken.append(measure(process, f"count {count}", count))
    rates = [median([rate for rate, _cost in taken]) for taken in samples.values()]
    costs = [median([cost for _rate, cost in taken]) for taken in samples.values()]
    yield Figure(f"updates, {count:,}", rates[0], "/s", rates[1], "bare asyncio", at_least(10_000))
    yield Figure(f"updates, {count:,}", rates[0], "/s", rates[2], "official SDK")
    yield Figure("processor time an update", costs[0], "us", costs[1], "bare asyncio", at_most(60))
    yield Figure("processor time an update", costs[0], "us", costs[2], "official SDK")


def updates_openai(*, is_quick: bool) -> Iterator[Figure]:
    """The same through the openai SDK and a provider on loopback."""
    yield from _through("chat", "openai", is_quick=is_quick, budget=at_least(2_500))


def updates_responses(*, is_quick: bool) -> Iterator[Figure]:
    """The same with OpenAI's Responses API."""
    yield from _through("responses", "openai, Responses", is_quick=is_quick)


def updates_anthropic(*, is_quick: bool) -> Iterator[Figure]:
    """The same through the anthropic SDK."""
    yield from _through("anthropic", "anthropic", is_quick=is_quick)


def _through(
    api: str, name: str, *, is_quick: bool, budget: Budget | None = None
) -> Iterator[Figure]:
    count, rounds = (5_000, 1) if is_quick else (20_000, 3)
    taken = []
    with provider(api) as environ:
        for _ in range(rounds):
            with agent(environ=environ) as process:
                process.initialize()
                taken.append(measure(process, f"stream {count}", count, warm_up="stream 3"))
    rate, cost = (median(values) for values in zip(*taken, strict=True))
    yield Figure(f"updates through {name}, {count:,}", rate, "/s", budget=budget)
    yield Figure(f"processor time an update, {name}", cost, "us")


def measure(
    process: AgentProcess, text: str, count: int, *, warm_up: str = "count 3"
) -> tuple[float, float]:
    """Return updates a second, and processor microseconds an update."""
    session = process.new_session()
    process.result(process.prompt(session, warm_up))
    cpu_s, begun = process.cpu_s(), time.perf_counter()
    process.prompt(session, text)
    lines = process.lines_until(ANSWERED)
    elapsed_s = time.perf_counter() - begun
    if not count < lines + 2 <= count + 5:
        raise RuntimeError(f"{lines} lines for {count} updates")
    return count / elapsed_s, (process.cpu_s() - cpu_s) / count * 1e6
