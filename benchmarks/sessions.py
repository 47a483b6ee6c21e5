"""Long sessions, and many of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.client import OURS, AgentProcess, agent
from benchmarks.provider import provider
from benchmarks.table import Figure, at_most, median

LONG = 9_990
"""Chunks, which make a session of 10,000 events with those of the turn around them."""
PACE_MS = 2


def load(*, is_quick: bool) -> Iterator[Figure]:
    """Load a session of 10,000 events, alone and beside a stream of another session."""
    n = 2 if is_quick else 7
    with tempfile.TemporaryDirectory(prefix="acp-benchmark-") as folder, provider() as environ:
        place = Path(folder)
        with agent(place=place) as process:
            process.initialize()
            long_session = process.new_session()
            process.result(process.prompt(long_session, f"count {LONG}"))
            process.leave()
        alone, gaps, calm_gaps = [], [], []
        for _ in range(n):
            with agent(place=place) as process:
                process.initialize()
                process.new_session()  # the agent's side is imported
                alone.append(_load(process, long_session) * 1000)
            with agent(OURS, environ, place=place) as process:
                process.initialize()
                calm, loaded = _gaps(process, long_session)
                calm_gaps.append(calm * 1000)
                gaps.append(loaded * 1000)
    yield Figure(f"load of 10,000 events, n={n}", median(alone), "ms", budget=at_most(300))
    yield Figure(
        "longest gap in another stream meanwhile",
        median(gaps),
        "ms",
        median(calm_gaps),
        "no load",
        at_most(50),
    )


def many_sessions(*, is_quick: bool) -> Iterator[Figure]:
    """Memory that a session with one turn keeps while it is open. Nothing closes one yet."""
    first, last = (20, 200) if is_quick else (100, 1_000)
    with agent() as process:
        process.initialize()
        begun = time.perf_counter()
        for number in range(1, last + 1):
            process.result(process.prompt(process.new_session(), "say hello"))
            if number == first:
                before_mb = process.rss_mb()
        elapsed_ms = (time.perf_counter() - begun) * 1000
        growth_kb = (process.rss_mb() - before_mb) * 1024 / (last - first)
        yield Figure(f"memory of an open session, {last:,} of them", growth_kb, "KB")
        yield Figure("session/new and one turn", elapsed_ms / last, "ms")


def _load(process: AgentProcess, session_id: str) -> float:
    begun = time.perf_counter()
    _ask_to_load(process, session_id)
    lines = process.lines_until(b'"modes"')
    elapsed_s = time.perf_counter() - begun
    if lines < LONG:
        raise RuntimeError(f"the session came back with {lines} lines")
    return elapsed_s


def _ask_to_load(process: AgentProcess, session_id: str) -> None:
    process.request("session/load", sessionId=session_id, cwd=str(process.place), mcpServers=[])


def _gaps(process: AgentProcess, long_session: str) -> tuple[float, float]:
    """Return the longest gap, in seconds, in a paced stream without and with a load beside it."""
    session = process.new_session()
    process.result(process.prompt(session, "stream 3"))
    process.prompt(session, f"stream 100000 {PACE_MS}")
    ours = session.encode()
    calm = _longest_gap(process, ours, until=None, updates=300)
    _ask_to_load(process, long_session)
    loaded = _longest_gap(process, ours, until=b'"modes"', updates=0)
    return calm, loaded


def _longest_gap(process: AgentProcess, mark: bytes, *, until: bytes | None, updates: int) -> float:
    longest, seen, last = 0.0, 0, time.perf_counter()
    while True:
        line = process.next_line()
        if until is not None and until in line:
            return max(longest, time.perf_counter() - last)
        if mark in line:
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            seen += 1
            if until is None and seen == updates:
                return longest
