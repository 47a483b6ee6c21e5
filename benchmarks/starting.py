"""From the start of the process to its first words."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping

from benchmarks.client import BARE, OURS, PYTHON, SCRIPT, SDK, AgentProcess, agent, is_text
from benchmarks.provider import APIS, own_times, provider
from benchmarks.table import Figure, at_most, median, ratio_at_most

TURNS = 20
"""In one session. Python still gets quicker in the first ten, by about 0.7 ms."""
SETTLED_S = 2.0
"""How long a person takes at least to write a first prompt."""


def cold_start(*, is_quick: bool) -> Iterator[Figure]:
    """Start to ``initialize`` answered, in turns with the floors."""
    rounds = 5 if is_quick else 20
    samples: dict[tuple[str, ...], list[float]] = {OURS: [], SCRIPT: [], BARE: [], SDK: []}
    cpu_ms: dict[tuple[str, ...], list[float]] = {command: [] for command in samples}
    new_ms: list[float] = []
    for _ in range(rounds + 1):
        for command in samples:
            with agent(command) as process:
                samples[command].append(process.initialize() * 1000)
                cpu_ms[command].append(process.cpu_s() * 1000)
                if command == OURS:
                    begun = time.perf_counter()
                    process.new_session()
                    new_ms.append((time.perf_counter() - begun) * 1000)
    ours, script, bare, sdk = (median(taken[1:]) for taken in samples.values())  # [0] is the disk's
    name = f"cold start, n={rounds}"
    yield Figure(name, ours, "ms", bare, "bare asyncio", ratio_at_most(2.0))
    yield Figure(name, ours, "ms", sdk, "official SDK", ratio_at_most(0.25))
    yield Figure(f"{name}, console script", script, "ms", bare, "bare asyncio")
    cpu = [median(taken[1:]) for taken in cpu_ms.values()]
    yield Figure("cold start, processor time", cpu[0], "ms", cpu[2], "bare asyncio")
    yield Figure("the first session/new behind it", median(new_ms), "ms")


def footprint(*, is_quick: bool) -> Iterator[Figure]:
    """Memory and threads after the start, after a prompt, and after 5,000 updates."""
    with agent() as process, agent(BARE) as bare:
        process.initialize()
        bare.initialize()
        session = process.new_session()  # the store's thread has started
        other = bare.rss_mb()
        yield Figure("memory after the start", process.rss_mb(), "MB", other, "bare", at_most(45))
        process.result(process.prompt(session, "say hello"))
        yield Figure("memory after a prompt", process.rss_mb(), "MB", budget=at_most(45))
        process.result(process.prompt(session, "count 5000"))
        yield Figure("memory after 5,000 updates", process.rss_mb(), "MB")
        yield Figure("threads", process.threads(), "")
        yield Figure("processes", len(process.processes()), "", budget=at_most(1))
    with provider() as environ, agent(environ=environ) as process:
        process.initialize()
        process.result(process.prompt(process.new_session(), "stream 10"))
        yield Figure("memory after a prompt, openai", process.rss_mb(), "MB")


def first_chunk(*, is_quick: bool) -> Iterator[Figure]:
    """Prompt to the first piece of the answer, beside each SDK without any agent.

    The first turn comes twice: right behind the handshake, as only programs do it, and after the
    time that a person takes. What the provider itself takes is measured, and taken off.
    """
    rounds = 3 if is_quick else 10
    first, later, at_once = [], [], []
    ours: dict[str, list[list[float]]] = {api: [] for api in APIS}
    alone: dict[str, list[list[float]]] = {api: [] for api in APIS}
    own: dict[str, list[float]] = {api: [] for api in APIS}
    with provider() as environ, provider("responses") as responses, provider("anthropic") as other:
        environs = dict(zip(APIS, (environ, responses, other), strict=True))
        for _ in range(rounds):
            with agent() as process:
                taken = list(_chunk_times(process, "say hello", 0.0))
                first.append(taken[0])
                later += taken[1:]
            with agent(environ=environ) as process:
                at_once.append(next(_chunk_times(process, "stream 3", 0.0)))
            for api, of_api in environs.items():
                with agent(environ=of_api) as process:
                    ours[api].append(list(_chunk_times(process, "stream 3", SETTLED_S)))
                alone[api].append(_sdk_alone(of_api, api))
                own[api] += own_times(of_api, api, TURNS)
    name = f"prompt to first chunk, n={rounds}"
    yield Figure(f"{name}, first turn, rehearsal", median(first), "ms", budget=at_most(30))
    yield Figure(f"{name}, first turn, openai, at once", median(at_once), "ms")
    yield Figure(f"{name}, later, rehearsal", median(later), "ms", budget=at_most(4))
    for api, turns in ours.items():
        own_ms = median(own[api])
        title = {"chat": "openai", "responses": "openai, Responses"}.get(api, api)
        yield Figure(f"the provider's own time, taken off below, {title}", own_ms, "ms")
        for which, kept, budget in (
            ("first turn", slice(1), at_most(30)),
            ("second turn", slice(1, 2), None),
            ("later", slice(1, None), at_most(4)),
        ):
            taken_ms, floor_ms = (
                median([taken for turn in those for taken in turn[kept]]) - own_ms
                for those in (turns, alone[api])
            )
            yield Figure(f"{name}, {which}, {title}", taken_ms, "ms", floor_ms, "SDK alone", budget)


def _chunk_times(process: AgentProcess, text: str, pause_s: float) -> Iterator[float]:
    process.initialize()
    session = process.new_session()
    time.sleep(pause_s)
    for _ in range(TURNS):
        yield chunk_time(process, session, text)


def chunk_time(process: AgentProcess, session: str, text: str) -> float:
    """Run a turn; return the milliseconds from its prompt to the first piece of the answer."""
    begun = time.perf_counter()
    prompt = process.prompt(session, text)
    process.wait_for(is_text)
    taken_ms = (time.perf_counter() - begun) * 1000
    process.result(prompt)
    return taken_ms


def _sdk_alone(environ: Mapping[str, str], api: str) -> list[float]:
    command = (PYTHON, "-m", "benchmarks.floors.model", api, str(TURNS))
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, check=True)
    return [float(line) for line in done.stdout.split()]
