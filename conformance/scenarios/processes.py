"""The agent as a process: how it starts, ends and lasts, and what it leaves behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

import anyio

import conformance
from conformance.client import Client
from conformance.scenarios import scenario
from conformance.steps import ask, needs_pipe, offers, prompted, results
from conformance.trace import Message, WireError
from conformance.trial import Check, Trial
from conformance.wire import Wire

PROC: Final = Path("/proc")
STUB: Final = Path(conformance.__file__).with_name("stub_mcp.py")
LOOK_S: Final = 0.02
N_WARM_UP: Final = 20
N_TURNS: Final = 100
MOST_GROWTH_BYTES: Final = 64 * 2**20
MOST_FILES: Final = 16
IDLE_S: Final = 1.0
MOST_IDLE_CPU_S: Final = 0.3
NO_WAY_OUT: Final = {
    name: "http://127.0.0.1:9"
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
}
"""A proxy where nobody listens: whatever goes through it fails at once."""


@scenario("PRC-01", is_quick=True)
async def input_ends(trial: Trial) -> None:
    """Close the agent's input while a session is open that does nothing."""
    needs_pipe(trial)
    client, _ = await trial.session()
    with trial.expect("PRC-01") as it:
        await client.wire.close_stdin(trial.target.timeout_s)
        code = await client.wire.exited(trial.target.timeout_s)
        it.that(code == 0, f"it ended with {code}")


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
        await _gone(trial, client.wire, it)


@scenario("PRC-04", is_quick=True)
async def terminated_in_a_turn(trial: Trial) -> None:
    """Send SIGTERM while a command runs."""
    needs_pipe(trial)
    client = await _with_a_command(trial)
    with trial.expect("PRC-04") as it:
        client.wire.terminate()
        await client.wire.exited(trial.target.timeout_s)
        await _gone(trial, client.wire, it)


@scenario("PRC-05")
async def home_that_cannot_be_written(trial: Trial) -> None:
    """Start with a home that is no folder, which not even the superuser can write."""
    needs_pipe(trial)
    file = trial.folder / "file"
    file.write_text("", encoding="utf-8")
    wire = await trial.wire(env={"HOME": str(file / "home")})
    with trial.expect("PRC-05"):
        await _first_answers(trial, wire)


@scenario("PRC-06")
async def network_that_leads_nowhere(trial: Trial) -> None:
    """Start with proxies at which nobody listens."""
    needs_pipe(trial)
    wire = await trial.wire(env=NO_WAY_OUT)
    with trial.expect("PRC-06"):
        await _first_answers(trial, wire)


@scenario("PRC-07", limit_s=60.0)
async def hundred_turns(trial: Trial) -> None:
    """Have a hundred short turns, and compare memory and open files before and after."""
    needs_pipe(trial)
    trial.needs(PROC.is_dir(), "a machine with /proc")
    client, session_id = await trial.session()
    wire, hello = client.wire, trial.say("hello")
    for _ in range(N_WARM_UP):
        await prompted(trial, wire, session_id, hello)
    family = {wire.pid, *wire.descendants()}
    before_bytes, before_files = _memory_bytes(family), _open_files(family)
    for _ in range(N_TURNS):
        await prompted(trial, wire, session_id, hello)
    grown_bytes = _memory_bytes(family) - before_bytes
    with trial.expect("PRC-07") as it:
        mib = grown_bytes / 2**20
        it.that(grown_bytes < MOST_GROWTH_BYTES, f"{N_TURNS} turns took {mib:.0f} MiB")
        more = _open_files(family) - before_files
        it.that(more < MOST_FILES, f"{N_TURNS} turns left {more} files open")


@scenario("PRC-08")
async def nothing_to_do(trial: Trial) -> None:
    """Leave an agent alone behind a turn, and look at its use of the processor."""
    needs_pipe(trial)
    trial.needs(PROC.is_dir(), "a machine with /proc")
    client, session_id = await trial.session()
    await prompted(trial, client.wire, session_id, trial.say("hello"))
    await anyio.sleep(IDLE_S)  # what it still has to put away
    before_s = client.wire.cpu_s()
    await anyio.sleep(IDLE_S)
    used_s = client.wire.cpu_s() - before_s
    with trial.expect("PRC-08") as it:
        it.that(used_s < MOST_IDLE_CPU_S, f"it used {used_s:.1f} s in {IDLE_S:g} s")


@scenario("PRC-09")
async def closed_session_ends_its_servers(trial: Trial) -> None:
    """Open a session with an MCP server, have a turn, and close it."""
    needs_pipe(trial)
    client = await trial.client()
    trial.needs(offers(client.wire, "session/close"), "to close sessions")
    before = client.wire.descendants()
    log = trial.folder / "mcp.log"
    server = {"name": "stub", "command": sys.executable, "args": [str(STUB), str(log)], "env": []}
    params = {"cwd": str(trial.folder), "mcpServers": [server]}
    new = await results(trial, client.wire, "session/new", params)
    session_id = str(new.get("sessionId"))
    await prompted(trial, client.wire, session_id, trial.say("hello"))
    trial.brought_about(log.exists(), "the server was not started")
    with trial.expect("PRC-09") as it:
        await results(trial, client.wire, "session/close", {"sessionId": session_id})
        await _gone(trial, client.wire, it, before)


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


async def _gone(trial: Trial, wire: Wire, it: Check, kept: set[int] | None = None) -> None:
    """Wait until nothing is left that the agent started, but for `kept`."""
    limit_s = time.monotonic() + trial.target.timeout_s
    while left := wire.descendants() - (kept or set()):
        it.that(time.monotonic() < limit_s, f"{len(left)} of its processes run on: {_names(left)}")
        await anyio.sleep(LOOK_S)


async def _first_answers(trial: Trial, wire: Wire) -> None:
    hello: Message = {"protocolVersion": 1, "clientCapabilities": {}}
    response = await ask(trial, wire, "initialize", hello)
    if "result" not in response:
        raise WireError(f"initialize was answered with {response.get('error')}")
    await ask(trial, wire, "session/new", {"cwd": str(trial.folder), "mcpServers": []})


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


def _names(pids: set[int]) -> str:
    lines = [(PROC / str(pid) / "cmdline") for pid in sorted(pids)]
    shown = [
        each.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        for each in lines
        if each.exists()
    ]
    return "; ".join(each.strip()[:60] for each in shown)
