"""``python -m benchmarks [--quick] [NAME ...]``: measure, and print one table.

Figures of one topic are taken in turns with those they are compared to, so that a busy machine
spoils both alike; still, look at the ratios first. Needs Linux, for ``/proc``.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.cancelling import cancel, cancel_shell
from benchmarks.children import subagents
from benchmarks.ending import end_of_input
from benchmarks.network import (
    network_cancel,
    network_connects,
    network_idle,
    network_load,
    network_updates,
)
from benchmarks.sessions import load, many_sessions
from benchmarks.starting import cold_start, first_chunk, footprint
from benchmarks.streaming import updates, updates_anthropic, updates_openai, updates_responses
from benchmarks.table import Figure, render

TOPICS = {
    topic.__name__.replace("_", "-"): topic
    for topic in (
        cold_start,
        footprint,
        first_chunk,
        updates,
        updates_openai,
        updates_responses,
        updates_anthropic,
        cancel,
        cancel_shell,
        end_of_input,
        load,
        many_sessions,
        subagents,
        network_updates,
        network_idle,
        network_cancel,
        network_load,
        network_connects,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure acp-agent.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TOPICS))
    parser.add_argument("--quick", action="store_true", help="fewer samples, for a first look")
    options = parser.parse_intermixed_args()
    if unknown := [name for name in options.names if name not in TOPICS]:
        parser.error(f"no topic {unknown[0]!r}; there are {', '.join(TOPICS)}")
    figures: list[Figure] = []
    for name in options.names or TOPICS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        figures += TOPICS[name](is_quick=options.quick)
    print(render(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
