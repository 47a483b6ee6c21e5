"""Many clients of one server, by WebSocket."""

from __future__ import annotations

import multiprocessing
import os
import select
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cancelling import FAST, WAIT_S
from benchmarks.client import ANSWERED, agent
from benchmarks.provider import provider
from benchmarks.sessions import LONG, PACE_MS
from benchmarks.sockets import Listening, Socket, listening
from benchmarks.streaming import measure
from benchmarks.table import Figure, at_least, at_most, median, percentile, ratio_at_most

STREAMS = 100
CHUNKS_A_SECOND = 20
"""Of what ``count N slowly`` says."""
LOADED = b'"modes"'
"""What the answer to a load holds."""


def network_updates(*, is_quick: bool) -> Iterator[Figure]:
    """Processor time of an update over WebSocket, in turns with stdio."""
    count, rounds = (20_000, 1) if is_quick else (100_000, 3)
    stdio, websocket = [], []
    for _ in range(rounds):
        with agent() as process:
            process.initialize()
            stdio.append(measure(process, f"count {count}", count)[1])
        with listening() as server:
            websocket.append(_cost(server, count))
    name = f"processor time an update, WebSocket, {count:,}"
    ours, other = median(websocket), median(stdio)
    yield Figure(name, ours, "us", other, "stdio", ratio_at_most(1.5))


def network_idle(*, is_quick: bool) -> Iterator[Figure]:
    """Memory of connections that have shaken hands, and do nothing."""
    n = 200 if is_quick else 1_000
    with listening("--log-level", "error") as server:
        sockets = [server.connect()]
        before_mb = server.process.rss_mb()
        sockets += [server.connect() for _ in range(n)]
        growth_kb = (server.process.rss_mb() - before_mb) * 1024 / n
        cpu_s = server.process.cpu_s()
        time.sleep(1)
        idle_percent = (server.process.cpu_s() - cpu_s) * 100
        yield Figure(f"memory of an idle connection, {n:,}", growth_kb, "KB", budget=at_most(40))
        yield Figure(f"processor, {n:,} idle connections", idle_percent, "%")


def network_cancel(*, is_quick: bool) -> Iterator[Figure]:
    """Cancel to answer of one session while others stream, and of all at once."""
    n = 50 if is_quick else 200
    with listening() as server:
        mine = server.connect()
        session = mine.new_session()
        calm = _cancels(mine, session, n)
        with _streaming(server, f"{FAST} slowly", STREAMS) as others:
            loaded = _cancels(mine, session, n)
            updates = others.rate()
            together = others.stop()
        name = f"cancel beside {STREAMS} streams"
        p50, p99 = median(loaded), percentile(loaded, 99)
        yield Figure(f"{name}, p50, n={n}", p50, "ms", median(calm), "alone")
        yield Figure(f"{name}, p99", p99, "ms", percentile(calm, 99), "alone", at_most(50))
        expected = STREAMS * CHUNKS_A_SECOND
        yield Figure("updates meanwhile", updates, "/s", budget=at_least(0.9 * expected))
        yield Figure(f"cancel of {STREAMS} streams at once, the last", together, "ms")
        yield from _storm(mine, session, n * 10)


def network_load(*, is_quick: bool) -> Iterator[Figure]:
    """Load a session of 10,000 events on one connection, beside a stream on another."""
    n = 2 if is_quick else 7
    with tempfile.TemporaryDirectory(prefix="acp-benchmark-") as folder, provider() as environ:
        place = Path(folder)
        with listening(place=place) as server:
            maker = server.connect()
            long_session = maker.new_session()
            maker.result(maker.prompt(long_session, f"count {LONG}"))
        calm, loaded = [], []
        for _ in range(n):
            with listening(environ=environ, place=place) as server:
                reader, loader = server.connect(), server.connect()
                reader.prompt(reader.new_session(), f"stream 100000 {PACE_MS}")
                with _reading(loader, LOADED) as is_loaded:
                    calm.append(_longest_gap(reader, 300) * 1000)
                    where = {"cwd": str(place), "mcpServers": []}
                    loader.request("session/load", sessionId=long_session, **where)
                    loaded.append(_longest_gap(reader, None, is_loaded) * 1000)
    name = "longest gap in a stream beside a load by another client"
    yield Figure(name, median(loaded), "ms", median(calm), "no load", at_most(50))


def network_connects(*, is_quick: bool) -> Iterator[Figure]:
    """Memory after connections that shook hands and left."""
    first, last = (200, 2_000) if is_quick else (1_000, 10_000)
    with listening("--log-level", "error") as server:
        begun = time.perf_counter()
        for number in range(1, last + 1):
            server.connect().close()
            if number == first:
                before_mb = server.process.rss_mb()
        elapsed_ms = (time.perf_counter() - begun) * 1000
        after_mb = server.process.rss_mb()
        other = f"after {first:,}"
        name = f"memory after {last:,} connections"
        yield Figure(name, after_mb, "MB", before_mb, other, ratio_at_most(1.1))
        yield Figure("connect, initialize, close", elapsed_ms / last, "ms")


# --- the parts ------------------------------------------------------------------------------


def _cost(server: Listening, count: int) -> float:
    """Return processor microseconds an update."""
    mine = server.connect()
    session = mine.new_session()
    mine.result(mine.prompt(session, "count 3"))
    cpu_s = server.process.cpu_s()
    mine.prompt(session, f"count {count}")
    updates = mine.wait_for(ANSWERED)
    if not count < updates + 2 <= count + 5:
        raise RuntimeError(f"{updates} messages for {count} updates")
    return (server.process.cpu_s() - cpu_s) / count * 1e6


def _cancels(mine: Socket, session: str, n: int) -> list[float]:
    """Cancel `n` turns that stream; return milliseconds from the cancel to the answer."""
    taken = []
    for _ in range(n):
        mine.prompt(session, f"{FAST} slowly")
        mine.wait_for(b"agent_message_chunk")
        time.sleep(WAIT_S)
        begun = time.perf_counter()
        mine.cancel(session)
        mine.wait_for(ANSWERED)
        taken.append((time.perf_counter() - begun) * 1000)
    return taken


def _storm(mine: Socket, session: str, n: int) -> Iterator[Figure]:
    """Send a prompt and its cancel `n` times without waiting; each prompt has to be answered."""
    begun = time.perf_counter()
    for _ in range(0, n, 50):
        last = 0
        for _ in range(50):
            last = mine.prompt(session, FAST)
            mine.cancel(session)
        mine.result(last)
    elapsed_ms = (time.perf_counter() - begun) * 1000
    yield Figure(f"prompt and cancel in a storm of {n:,}", elapsed_ms / n, "ms")


class _Streams:
    """Sessions that stream, each on a connection of its own, read by another process."""

    def __init__(self, sockets: Sequence[Socket], sessions: Sequence[str]) -> None:
        self._sockets, self._sessions = sockets, sessions
        context = multiprocessing.get_context("fork")
        self._said, said = context.Pipe()
        self._process = context.Process(target=_read_all, args=(sockets, said), daemon=True)
        self._process.start()

    def rate(self) -> float:
        """Return how many updates a second came since the last time, or the beginning."""
        self._said.send("rate")
        rate: float = self._said.recv()
        return rate

    def stop(self) -> float:
        """Cancel all; return milliseconds until the last has its answer."""
        begun = time.perf_counter()
        for each, session in zip(self._sockets, self._sessions, strict=True):
            each.cancel(session)
        self._said.send("answers")
        self._said.recv()
        elapsed_ms = (time.perf_counter() - begun) * 1000
        self._process.join()
        return elapsed_ms


@contextmanager
def _streaming(server: Listening, text: str, n: int) -> Iterator[_Streams]:
    sockets = [server.connect() for _ in range(n)]
    sessions = [each.new_session() for each in sockets]
    for each, session in zip(sockets, sessions, strict=True):
        each.prompt(session, text)
        each.wait_for(b"agent_message_chunk")
    yield _Streams(sockets, sessions)
    for each in sockets:
        each.raw.close()


def _read_all(sockets: Sequence[Socket], said: multiprocessing.connection.Connection) -> None:
    """Read everything until every socket has had an answer, and say what is asked."""
    poll = select.poll()
    by_fd = {each.raw.fileno(): b"" for each in sockets}
    for fd in (*by_fd, said.fileno()):
        poll.register(fd, select.POLLIN)
    count, begun, awaited = 0, time.perf_counter(), False
    left = set(by_fd)
    while left:
        for fd, _ in poll.poll():
            if fd == said.fileno():
                if said.recv() == "answers":
                    awaited = True
                else:
                    said.send(count / (time.perf_counter() - begun))
                continue
            data = os.read(fd, 2**20)
            count += data.count(b"agent_message_chunk")
            tail = by_fd[fd] + data
            if ANSWERED in tail or not data:
                left.discard(fd)
                poll.unregister(fd)
            by_fd[fd] = tail[-len(ANSWERED) :]
    if not awaited and said.recv() != "answers":
        raise RuntimeError("the streams ended by themselves")
    said.send("all")


@contextmanager
def _reading(socket: Socket, mark: bytes) -> Iterator[multiprocessing.synchronize.Event]:
    """Have another process read a socket up to `mark`; what comes in the block is set then."""
    context = multiprocessing.get_context("fork")
    is_there = context.Event()

    def read() -> None:
        socket.wait_for(mark)
        is_there.set()

    process = context.Process(target=read, daemon=True)
    process.start()
    yield is_there
    process.join()


def _longest_gap(
    reader: Socket, updates: int | None, until: multiprocessing.synchronize.Event | None = None
) -> float:
    longest, seen, last = 0.0, 0, time.perf_counter()
    while True:
        if b"agent_message_chunk" not in reader.next_message():
            continue
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        seen += 1
        if seen == updates or (until is not None and until.is_set()):
            return longest
