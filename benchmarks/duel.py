"""``python -m benchmarks.duel OTHER [NAME ...]``: is this tree faster than the tree at OTHER?

A machine has slow moments that last for minutes, so two runs one behind the other differ by a fifth
and more. Here an agent of each tree is up, they work turn by turn in alternation, and what counts
is the difference of two turns of one moment: a tree against itself shows 0.00 to 0.02 ms.

Both use the packages that are installed; `git worktree add ../other REVISION` makes another tree.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cancelling import FAST, STALLED, cancels
from benchmarks.client import AgentProcess, agent, is_text
from benchmarks.provider import provider
from benchmarks.starting import SETTLED_S, chunk_time
from benchmarks.table import Figure, median, render

TREE = Path(__file__).parents[1]
SESSIONS = 6
"""Of each agent; the first turn of each is left out."""
TURNS = 20

Turn = Callable[[AgentProcess, str, str], float]
"""Takes an agent, initialized, one of its sessions, and a prompt; returns milliseconds."""


def cancel_time(process: AgentProcess, session: str, text: str) -> float:
    is_silent = text == STALLED
    return cancels(process, text, None if is_silent else is_text, 1, session=session)[0]


CASES: dict[str, tuple[str | None, Turn, str]] = {
    "first-chunk-rehearsal": (None, chunk_time, "say hello"),
    "first-chunk-openai": ("chat", chunk_time, "stream 3"),
    "first-chunk-responses": ("responses", chunk_time, "stream 3"),
    "first-chunk-anthropic": ("anthropic", chunk_time, "stream 3"),
    "cancel-full-speed": (None, cancel_time, FAST),
    "cancel-stalled": ("chat", cancel_time, STALLED),
    "cancel-a-chunk-every-10-ms": ("chat", cancel_time, "stream 900000000 10"),
}
"""The dialect of the provider, `None` for the built-in model; what is measured; the prompt."""


def duel(other: Path, api: str | None, turn: Turn, text: str) -> Iterator[tuple[float, float]]:
    """Yield pairs of milliseconds, of this tree and of the other."""
    with ExitStack() as stack:
        environ = {} if api is None else stack.enter_context(provider(api))
        processes = [
            stack.enter_context(agent(environ=environ | {"PYTHONPATH": str(tree)}))
            for tree in (TREE, other)
        ]
        for process in processes:
            process.initialize()
        time.sleep(SETTLED_S)
        for _ in range(SESSIONS):
            both = [(process, process.new_session()) for process in processes]
            for number in range(TURNS + 1):
                order = both if number % 2 else both[::-1]
                taken = {process: turn(process, session, text) for process, session in order}
                if number:
                    yield taken[processes[0]], taken[processes[1]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.duel", description="Compare this tree with another one."
    )
    parser.add_argument("other", metavar="OTHER", type=Path, help="where the other tree is")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="pairs of agents (default: 3)")
    options = parser.parse_intermixed_args()
    if not (options.other / "acp_server").is_dir():
        parser.error(f"no tree of this project at {options.other}")
    if unknown := [name for name in options.names if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    figures = []
    for name in options.names or CASES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        pairs = [
            pair
            for _ in range(options.rounds)
            for pair in duel(options.other.resolve(), *CASES[name])
        ]
        ours, others = zip(*pairs, strict=True)
        against = median(others), "other tree"
        figures.append(Figure(f"{name}, n={len(pairs)}", median(ours), "ms", *against))
        by_ms = median([our - theirs for our, theirs in pairs])
        figures.append(Figure(f"{name}, difference within a pair", by_ms, "ms"))
    print(render(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
