"""From the end of the agent's input to the end of its process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.cancelling import BYPASS, IGNORES, OBEYS, IsReached, is_up
from benchmarks.client import BARE, OURS, agent, is_text
from benchmarks.provider import provider
from benchmarks.table import Figure, at_most, median


def end_of_input(*, is_quick: bool) -> Iterator[Figure]:
    """End of input to exit: idle, in a stream, and in commands that obey TERM or do not."""
    n = 3 if is_quick else 10
    left = 0
    floor, _left = _exits(BARE, {}, None, None, n)
    with provider() as environ:
        for name, command, env, text, is_reached, times, limit in (
            ("idle", OURS, {}, None, None, n, 150),
            ("in a stream", OURS, {}, "count 900000000", is_text, n, 150),
            ("in a stream, openai", OURS, environ, "stream 900000000 10", is_text, n, 150),
            ("in a command, TERM obeyed", BYPASS, {}, OBEYS, is_up, n, 250),
            ("in a command, TERM ignored", BYPASS, {}, IGNORES, is_up, 2, 2500),
        ):
            taken, remaining = _exits(command, env, text, is_reached, times)
            left += remaining
            title = f"end of input to exit, {name}, n={times}"
            yield Figure(title, median(taken), "ms", median(floor), "bare, idle", at_most(limit))
    yield Figure("end of input, processes left", left, "", budget=at_most(0))


def _exits(
    command: Sequence[str],
    environ: Mapping[str, str],
    text: str | None,
    is_reached: IsReached | None,
    times: int,
) -> tuple[list[float], int]:
    """Return the milliseconds of each exit, and how many processes were left in all."""
    taken, left = [], 0
    for _ in range(times):
        with agent(command, environ) as process:
            process.initialize()
            session = process.new_session()
            if text is not None and is_reached is not None:
                process.prompt(session, text)
                process.wait_for(is_reached)
            taken.append(process.leave() * 1000)
            left += len(process.processes())
    return taken, left
