"""What an agent that was killed leaves to the next: modes, broken calls, and spoilt files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from conformance import processes
from conformance.client import Client
from conformance.commands import Sleeper
from conformance.moments import asleep
from conformance.scenarios import scenario
from conformance.steps import ask, is_error, needs_pipe, offers, prompted, updates
from conformance.trace import Message, WireError
from conformance.trial import NotBroughtAbout, Trial
from conformance.wire import Wire

GARBAGE: Final = b"\x00spoilt\xff{\n"
FINAL: Final = ("completed", "failed")


@scenario("STO-16", "STO-17", "STO-18", limit_s=40.0)
async def what_a_kill_leaves(trial: Trial) -> None:
    """Change a mode, kill the agent while a command runs, spoil a session's file, and load."""
    needs_pipe(trial)
    client, kept_id = await trial.session()
    wire = client.wire
    trial.needs(offers(wire, "session/load"), "to load sessions")
    spoilt_id = await trial.open_session(client)
    for each in (kept_id, spoilt_id):
        await prompted(trial, wire, each, trial.say("hello"))
    mode = await _other_mode(trial, wire, kept_id)
    with Sleeper.asleep() as sleeper:
        cut_id = await _cut_short(trial, client, sleeper)
        await _kill(trial, wire)
    wire = (await trial.client()).wire
    if mode is None:
        trial.see("STO-17", "skipped", "the agent has no two modes that can be set")
    else:
        with trial.expect("STO-17") as it:
            found = _mode((await _load(trial, wire, kept_id)).get("modes"))
            it.that(found == mode, f"the mode was {mode!r}, and is {found!r} in the next process")
    if cut_id:
        with trial.expect("STO-18") as it:
            await _load(trial, wire, cut_id)
            left = _open_calls(wire, cut_id)
            it.that(not left, f"{len(left)} calls are shown as running")
    files = _files_of(trial, spoilt_id)
    trial.needs(files, "sessions that are files of their own, named by their ids")
    for file in files:
        file.write_bytes(GARBAGE + file.read_bytes()[len(GARBAGE) :])
    wire = (await trial.client()).wire
    with trial.expect("STO-16") as it:
        await ask(trial, wire, "session/load", _named(trial, spoilt_id))
        await _load(trial, wire, kept_id)
        if offers(wire, "session/list"):
            listed = await ask(trial, wire, "session/list", {"cwd": str(trial.folder)})
            it.that(not is_error(listed), f"the list is the error {listed.get('error')}")
            ids = [each.get("sessionId") for each in listed["result"].get("sessions") or []]
            it.that(kept_id in ids, "a sound session is on the list no more")


async def _other_mode(trial: Trial, wire: Wire, session_id: str) -> str | None:
    """Set a mode that the session is not in, and return it; `None` if there is none."""
    opened = [m["result"] for m in wire.received if isinstance(m.get("result"), dict)]
    modes = next(each for each in opened if each.get("sessionId") == session_id).get("modes")
    available = modes.get("availableModes") if isinstance(modes, dict) else None
    ids = [each.get("id") for each in available or [] if isinstance(each, dict)]
    mode = next((each for each in ids if isinstance(each, str) and each != _mode(modes)), None)
    if mode is None:
        return None
    params = {"sessionId": session_id, "modeId": mode}
    return None if is_error(await ask(trial, wire, "session/set_mode", params)) else mode


async def _cut_short(trial: Trial, client: Client, sleeper: Sleeper) -> str:
    """Have a command run in a session of its own, and return that, or nothing if it does not."""
    session_id = await trial.open_session(client)
    try:
        turn = client.prompt(session_id, trial.say("command", command=sleeper.command))
        await asleep(trial, client.wire, turn, sleeper)
        trial.brought_about(_open_calls(client.wire, session_id), "no call was shown as running")
    except NotBroughtAbout as exc:
        trial.see("STO-18", "unseen", str(exc))
        return ""
    return session_id


async def _kill(trial: Trial, wire: Wire) -> None:
    family = wire.descendants()
    wire.kill()
    processes.kill(family)
    await wire.exited(trial.target.timeout_s)


async def _load(trial: Trial, wire: Wire, session_id: str) -> Message:
    response = await ask(trial, wire, "session/load", _named(trial, session_id))
    if is_error(response):
        raise WireError(f"load was answered with {response['error']}")
    result = response.get("result")
    return result if isinstance(result, dict) else {}


def _open_calls(wire: Wire, session_id: str) -> list[str]:
    """Return the ids of the calls that were not shown to have ended."""
    status: dict[str, object] = {}
    for update in updates(wire, session_id):
        if update.get("sessionUpdate") in ("tool_call", "tool_call_update"):
            call_id = str(update.get("toolCallId"))
            status[call_id] = update.get("status") or status.get(call_id)
    return [call_id for call_id, last in status.items() if last not in FINAL]


def _files_of(trial: Trial, session_id: str) -> list[Path]:
    found = sorted(trial.home.rglob(f"{session_id}*"))
    inside = [below for each in found if each.is_dir() for below in sorted(each.rglob("*"))]
    return [each for each in (*found, *inside) if each.is_file()]


def _mode(modes: object) -> object:
    return modes.get("currentModeId") if isinstance(modes, dict) else None


def _named(trial: Trial, session_id: str) -> Message:
    return {"sessionId": session_id, "cwd": str(trial.folder), "mcpServers": []}
