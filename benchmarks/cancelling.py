"""From ``session/cancel`` to the prompt's answer, in every place where a turn can wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from benchmarks.client import (
    ANSWERED,
    BARE,
    OURS,
    AgentProcess,
    Message,
    agent,
    is_text,
    is_update,
)
from benchmarks.floors.disk import commits
from benchmarks.provider import provider
from benchmarks.table import Figure, at_most, median, percentile

UP = "it is up"
BYPASS = (*OURS, "--mode", "bypass")
OBEYS = f"run echo {UP}; exec sleep 600"
IGNORES = f"run trap '' TERM; echo {UP}; sleep 600"
FAST = "count 900000000"
STALLED = "stall"
WAIT_S = 0.005
"""Between what shows that the turn waits and the cancel, so that it does wait."""

IsReached = Callable[[Message], bool]


def cancel(*, is_quick: bool) -> Iterator[Figure]:
    """Cancel to answer while a model streams, says nothing, or is waited for.

    Beside it, what that takes at least: the bare agent's cancel, which keeps nothing, and a commit
    that is synced to the disk. Where the disk alone takes longer than the budget, it shows there.
    """
    n_each, rounds = (3, 3) if is_quick else (10, 5)
    with provider() as environ, agent(BARE) as bare, agent() as own, agent(OURS, environ) as model:
        for process in (bare, own, model):
            process.initialize()
        model.result(model.prompt(model.new_session(), "stream 3"))  # the SDK is loaded
        floors: dict[str, list[float]] = {FAST: [], STALLED: []}
        synced: list[float] = []
        cases: tuple[tuple[str, str, AgentProcess, str, IsReached | None], ...] = (
            ("full speed", FAST, own, FAST, is_text),
            ("full speed, openai", FAST, model, "stream 900000000", is_text),
            ("a chunk every 10 ms, openai", STALLED, model, "stream 900000000 10", is_text),
            ("stalled model, openai", STALLED, model, STALLED, None),
            ("retry wait, openai", STALLED, model, "busy", _is_retry),
            ("permission pending", STALLED, own, "run true", _is_question),
        )
        taken: dict[str, list[float]] = {name: [] for name, *_rest in cases}
        for _ in range(rounds):
            synced += commits(own.place, n_each)
            floors[FAST] += cancels(bare, FAST, is_text, n_each)
            floors[STALLED] += cancels(bare, STALLED, None, n_each)
            for name, _floor, process, text, is_reached in cases:
                taken[name] += cancels(process, text, is_reached, n_each)
    name = f"a commit synced to the disk, SQLite alone, n={len(synced)}"
    yield Figure(f"{name}, p50", median(synced), "ms")
    yield Figure(f"{name}, p99", percentile(synced, 99), "ms")
    for name, floor, *_rest in cases:
        both = [sum(pair) for pair in zip(floors[floor], synced, strict=True)]
        yield from _figures(name, taken[name], both)


def cancel_shell(*, is_quick: bool) -> Iterator[Figure]:
    """Cancel to answer while a command runs; the answer comes when the command is gone."""
    n = 10 if is_quick else 50
    with agent(BYPASS) as process:
        process.initialize()
        taken = cancels(process, OBEYS, is_up, n)
        name = f"cancel, shell, TERM obeyed, p50, n={n}"
        yield Figure(name, median(taken), "ms", budget=at_most(15))
        yield Figure("cancel, shell, TERM obeyed, p99", percentile(taken, 99), "ms")
        taken = cancels(process, IGNORES, is_up, 2 if is_quick else 5)
        worst = max(taken)
        yield Figure("cancel, shell, TERM ignored, worst", worst, "ms", budget=at_most(2500))
        left = len(process.processes()) - 1
        yield Figure("cancel, shell, processes left", left, "", budget=at_most(0))


def cancels(
    process: AgentProcess,
    text: str,
    is_reached: IsReached | None,
    n: int,
    *,
    session: str | None = None,
) -> list[float]:
    """Cancel `n` turns once they have got to where they wait.

    Args:
        process: The agent, initialized.
        text: The prompt.
        is_reached: Recognizes the message that shows it; `None` where there is none.
        n: How often.
        session: Where; in a new one if it is `None`.

    Returns:
        Milliseconds from the cancel to the answer.
    """
    taken = []
    session = session or process.new_session()
    for _ in range(n):
        process.prompt(session, text)
        if is_reached is not None:
            process.wait_for(is_reached)
        time.sleep(WAIT_S if is_reached else 10 * WAIT_S)
        begun = time.perf_counter()
        process.cancel(session)
        process.lines_until(ANSWERED)
        taken.append((time.perf_counter() - begun) * 1000)
    return taken


def _figures(name: str, taken: list[float], floor: list[float]) -> Iterator[Figure]:
    p50, p99 = median(taken), percentile(taken, 99)
    name = f"cancel, {name}"
    least = (median(floor), percentile(floor, 99))
    other = "bare + commit"
    yield Figure(f"{name}, p50, n={len(taken)}", p50, "ms", least[0], other, at_most(1.5))
    yield Figure(f"{name}, p99", p99, "ms", least[1], other, at_most(10))


def _is_question(message: Message) -> bool:
    return message.get("method") == "session/request_permission"


def _is_retry(message: Message) -> bool:
    return is_update(message) and (
        message["params"]["update"]["sessionUpdate"] == "agent_thought_chunk"
    )


def is_up(message: Message) -> bool:
    """Whether the command of `OBEYS` or `IGNORES` shows that it runs."""
    if not is_update(message):
        return False
    update = message["params"]["update"]
    return update["sessionUpdate"] == "tool_call_update" and UP in str(update.get("content", ""))
