"""The agent as a process: how it starts, ends and lasts, and what it leaves behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Final

import anyio

from conformance.client import Client
from conformance.commands import Sleeper
from conformance.processes import starved_s as starved
from conformance.scenarios import scenario
from conformance.steps import ask, gone, needs_pipe, prompted
from conformance.trace import Message, WireError
from conformance.trial import Trial
from conformance.wire import Wire

PROC: Final = Path("/proc")
LOOK_S: Final = 0.02
N_WARM_UP: Final = 20
N_TURNS: Final = 100
MOST_GROWTH_BYTES: Final = 64 * 2**20
MOST_FILES: Final = 16
REST_S: Final = 0.5
N_COMPARED: Final = 7
SLOW_S: Final = 2.0
SLOWER: Final = 5.0
"""A turn is slow if it lasts so long, and so many times as long as the first ones."""
IDLE_S: Final = 1.0
MOST_IDLE: Final = 0.3
"""The part of the time that it may use."""
LEAST_S: Final = 0.2
NO_WAY_OUT: Final = {
    name: "http://127.0.0.1:9"
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
}
"""A proxy where nobody listens: whatever goes through it fails at once."""


@scenario("PRC-01")
async def input_ends(trial: Trial) -> None:
    """Close the agent's input while a session is open that does nothing."""
    needs_pipe(trial)
    client, _ = await trial.session()
    with trial.expect("PRC-01") as it:
        await client.wire.close_stdin(trial.target.timeout_s)
        code = await client.wire.exited(trial.target.timeout_s)
        it.that(code == 0, f"it ended with {code}")


@scenario("PRC-03")
async def input_ends_behind_a_command(trial: Trial) -> None:
    """Have a command leave something running in the background, and close the agent's input."""
    needs_pipe(trial)
    client, session_id = await trial.session()
    with Sleeper.asleep("sleep {s} > /dev/null 2>&1 &") as sleeper:
        said = trial.say("command", command=sleeper.command)
        await prompted(trial, client.wire, session_id, said)
        await client.wire.close_stdin(trial.target.timeout_s)
        await client.wire.exited(trial.target.timeout_s)
        with trial.expect("PRC-03") as it:
            is_gone = await sleeper.is_gone(trial.target.timeout_s)
            it.that(is_gone, "what a command left in the background outlived the agent")


@scenario("PRC-02", "PRC-03", is_quick=True)
async def input_ends_in_a_turn(trial: Trial) -> None:
    """Close the agent's input while a command runs."""
    needs_pipe(trial)
    client = await _with_a_command(trial)
    family = client.wire.descendants()
    with trial.expect("PRC-02"):
        await client.wire.close_stdin(trial.target.timeout_s)
        await client.wire.exited(trial.target.timeout_s)
    with trial.expect("PRC-03") as it:
        trial.brought_about(family, "the command was none of its processes")
        await gone(trial, client.wire, it)


@scenario("PRC-04")
async def terminated_in_a_turn(trial: Trial) -> None:
    """Send SIGTERM while a command runs."""
    needs_pipe(trial)
    client = await _with_a_command(trial)
    with trial.expect("PRC-04") as it:
        client.wire.terminate()
        await client.wire.exited(trial.target.timeout_s)
        await gone(trial, client.wire, it)


@scenario("PRC-05", "PRC-11")
async def home_that_cannot_be_written(trial: Trial) -> None:
    """Start with a home that nobody can write, since it is no folder, and with none at all."""
    needs_pipe(trial)
    file = trial.folder / "file"
    file.write_text("", encoding="utf-8")
    wire = await trial.wire(env={"HOME": str(file / "home")})
    with trial.expect("PRC-05"):
        await _first_answers(trial, wire)
    homeless = await trial.wire(env={"HOME": None})
    with trial.expect("PRC-11"):
        await _first_answers(trial, homeless)


@scenario("PRC-06")
async def network_that_leads_nowhere(trial: Trial) -> None:
    """Start with proxies at which nobody listens."""
    needs_pipe(trial)
    wire = await trial.wire(env=NO_WAY_OUT)
    with trial.expect("PRC-06"):
        await _first_answers(trial, wire)


@scenario("PRC-07", "PRC-08", "PRC-10", limit_s=90.0)
async def hundred_turns(trial: Trial) -> None:
    """Have a hundred short turns, compare memory and files with before, and do nothing then."""
    needs_pipe(trial)
    trial.needs(PROC.is_dir(), "a machine with /proc")
    client, session_id = await trial.session()
    wire, hello = client.wire, trial.say("hello")
    lasted_s: list[float] = []
    for _ in range(N_WARM_UP):
        await _timed(trial, wire, session_id, hello, lasted_s)
    family = {wire.pid, *wire.descendants()}
    before_bytes, before_files = _memory_bytes(family), _open_files(family)
    with trial.expect("PRC-10") as it:
        for n in range(N_TURNS):
            await _timed(trial, wire, session_id, hello, lasted_s)
            first_s, last_s = median(lasted_s[:N_COMPARED]), median(lasted_s[-N_COMPARED:])
            is_slow = last_s > SLOW_S and last_s > SLOWER * first_s
            it.that(not is_slow, f"turn {n} takes {last_s:.1f} s, the first took {first_s:.1f} s")
    grown_bytes = _memory_bytes(family) - before_bytes
    with trial.expect("PRC-07") as it:
        mib = grown_bytes / 2**20
        it.that(grown_bytes < MOST_GROWTH_BYTES, f"{N_TURNS} turns took {mib:.0f} MiB")
        more = _open_files(family) - before_files
        it.that(more < MOST_FILES, f"{N_TURNS} turns left {more} files open")
    await anyio.sleep(REST_S)  # what it still has to put away
    started_s, before_s, starved_s = time.monotonic(), wire.cpu_s(), starved(wire.pid)
    await anyio.sleep(IDLE_S)
    used_s = wire.cpu_s() - before_s
    could_s = time.monotonic() - started_s - (starved(wire.pid) - starved_s)
    with trial.expect("PRC-08") as it:
        is_busy = used_s > MOST_IDLE * max(could_s, LEAST_S)
        it.that(not is_busy, f"it used {used_s:.1f} of the {could_s:.1f} s in which it could run")


async def _with_a_command(trial: Trial) -> Client:
    """Return a client of an agent in whose turn a command runs, which it was allowed to."""
    client, session_id = await trial.session()
    mark = trial.folder / "runs"
    command = f"touch {mark}; sleep 300"
    client.prompt(session_id, trial.say("command", command=command))
    limit_s = time.monotonic() + trial.target.timeout_s
    while not mark.exists():
        trial.brought_about(time.monotonic() < limit_s, "the command was not run")
        trial.brought_about(client.wire.exit_code is None, "it ended before")
        await anyio.sleep(LOOK_S)
    return client


async def _first_answers(trial: Trial, wire: Wire) -> None:
    hello: Message = {"protocolVersion": 1, "clientCapabilities": {}}
    response = await ask(trial, wire, "initialize", hello)
    if "result" not in response:
        raise WireError(f"initialize was answered with {response.get('error')}")
    await ask(trial, wire, "session/new", {"cwd": str(trial.folder), "mcpServers": []})


async def _timed(
    trial: Trial, wire: Wire, session_id: str, text: str, lasted_s: list[float]
) -> None:
    """Have a turn, and note how long it lasted, but for the time that the machine was busy."""
    started_s, starved_s = time.monotonic(), starved(wire.pid)
    await prompted(trial, wire, session_id, text)
    lasted_s.append(time.monotonic() - started_s - (starved(wire.pid) - starved_s))


def _memory_bytes(pids: set[int]) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(
        int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * page
        for pid in pids
        if (PROC / str(pid)).is_dir()
    )


def _open_files(pids: set[int]) -> int:
    return sum(
        len(os.listdir(PROC / str(pid) / "fd")) for pid in pids if (PROC / str(pid)).is_dir()
    )
