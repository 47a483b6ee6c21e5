"""Listing, closing and deleting sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from conformance.client import Client
from conformance.scenarios import scenario
from conformance.steps import ask, is_error, needs_entry, offers, prompted, results, serves, speaks
from conformance.trace import Message, WireError
from conformance.trial import Trial

MOST_PAGES: Final = 50
N_AT_ONCE: Final = 24


@scenario("SES-23", "SES-24", "SES-25", "SES-28", is_quick=True)
async def sessions_are_listed(trial: Trial) -> None:
    """List all sessions, those of one directory, and those of one that was never used."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    trial.needs(offers(wire, "session/list"), "a list of sessions")
    other = trial.folder / "other"
    other.mkdir()
    other_id = await trial.open_session(client, other)
    for prompted_id in (session_id, other_id):
        await _make_last(trial, client, prompted_id)
    start = len(wire.received)
    with trial.expect("SES-23") as it:
        for each in await _listed(trial, client):
            cwd = each.get("cwd")
            it.that(isinstance(cwd, str) and Path(cwd).is_absolute(), f"a session is in {cwd!r}")
    with trial.expect("SES-24") as it:
        params = {"cwd": str(trial.folder / "never used")}
        response = await ask(trial, wire, "session/list", params)
        it.that(not is_error(response), f"it was answered with {response.get('error')}")
        listed = (response.get("result") or {}).get("sessions")
        it.that(listed == [], f"the list is {listed!r:.80}")
    with trial.expect("SES-25") as it:
        found = await _listed(trial, client, other)
        strange = [each.get("cwd") for each in found if each.get("cwd") != str(other)]
        it.that(not strange, f"it has {len(strange)} of other directories")
        is_known = any(each.get("sessionId") == other_id for each in await _listed(trial, client))
        is_there = any(each.get("sessionId") == other_id for each in found)
        it.that(is_there or not is_known, "the session of that directory is not on it")
    with trial.expect("SES-28") as it:
        await serves(trial, wire, "a list of sessions")
        told = [m for m in wire.received[start:] if m.get("method") == "session/update"]
        it.that(not told, f"it was followed by {len(told)} updates")


@scenario("SES-27")
async def cursor_that_is_none(trial: Trial) -> None:
    """Ask for a page of the list that there is not."""
    wire = (await trial.shared_client()).wire
    trial.needs(offers(wire, "session/list"), "a list of sessions")
    with trial.expect("SES-27") as it:
        response = await ask(trial, wire, "session/list", {"cursor": "no cursor at all"})
        it.that(is_error(response), "it was answered with a list")


@scenario("SES-38", "SES-26")
async def many_sessions_at_once(trial: Trial) -> None:
    """Open two dozen sessions, prompt in all of them at once, and follow the list to its end."""
    client = await trial.shared_client()
    await needs_entry(trial, client.wire)
    wire, hello = client.wire, trial.say("hello")
    new = {"cwd": str(trial.folder), "mcpServers": []}
    with trial.expect("SES-38") as it:
        asked = [wire.request("session/new", new) for _ in range(N_AT_ONCE)]
        opened = [await client.result(each, trial.target.timeout_s) for each in asked]
        ids = [each.get("sessionId") for each in opened]
        it.that(len(set(ids)) == N_AT_ONCE, "two sessions have one id")
        turns = [client.prompt(str(each), hello) for each in ids]
        for turn in turns:
            await client.stop_reason(turn, trial.target.timeout_s)
    if not offers(wire, "session/list"):
        trial.see("SES-26", "skipped", "the agent does not offer a list of sessions")
        return
    with trial.expect("SES-26") as it:
        listed = [each.get("sessionId") for each in await _listed(trial, client, trial.folder)]
        it.that(len(set(listed)) == len(listed), "a session is on the list twice")
        lost = len(set(ids) - set(listed))
        it.that(not listed or not lost, f"{lost} of {len(ids)} sessions are on no page")


@scenario("SES-29", "SES-31", "SES-32", is_quick=True)
async def session_is_closed(trial: Trial) -> None:
    """Close a session, prompt in it, close it again, and close one that never was."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    trial.needs(offers(wire, "session/close"), "to close sessions")
    with trial.expect("SES-29"):
        await results(trial, wire, "session/close", {"sessionId": session_id})
    with trial.expect("SES-31") as it:
        prompt = [{"type": "text", "text": "hello"}]
        params = {"sessionId": session_id, "prompt": prompt}
        response = await ask(trial, wire, "session/prompt", params)
        it.that(is_error(response), f"it was answered with {response.get('result')}")
    with trial.expect("SES-32"):
        for each in (session_id, "never-was"):
            await ask(trial, wire, "session/close", {"sessionId": each})
        await serves(trial, wire, "closing what is closed")


@scenario("SES-30")
async def session_is_closed_in_a_turn(trial: Trial) -> None:
    """Close a session in the middle of a long answer."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    trial.needs(offers(wire, "session/close"), "to close sessions")
    turn = client.prompt(session_id, trial.say("long"))
    await speaks(trial, wire, session_id)
    with trial.expect("SES-30") as it:
        closed = wire.request("session/close", {"sessionId": session_id})
        response = await wire.response(turn, trial.target.timeout_s)
        it.that(not is_error(response), f"the prompt was answered with {response.get('error')}")
        reason = response["result"].get("stopReason")
        it.that(reason == "cancelled", f"the stop reason was {reason}")
        response = await wire.response(closed, trial.target.timeout_s)
        it.that(not is_error(response), f"close was answered with {response.get('error')}")


@scenario("SES-33", "SES-34")
async def session_is_deleted(trial: Trial) -> None:
    """Delete a session twice, and one that never was, and look at the list."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    trial.needs(offers(wire, "session/delete"), "to delete sessions")
    await _make_last(trial, client, session_id)
    has_list = offers(wire, "session/list")
    if has_list:
        trial.brought_about(await _is_listed(trial, client, session_id), "it was never listed")
    if offers(wire, "session/close"):
        await ask(trial, wire, "session/close", {"sessionId": session_id})
    with trial.expect("SES-33") as it:
        await results(trial, wire, "session/delete", {"sessionId": session_id})
        if has_list:
            it.that(not await _is_listed(trial, client, session_id), "it is listed still")
    with trial.expect("SES-34") as it:
        for each, what in ((session_id, "a deleted session"), ("never-was", "an unknown one")):
            response = await ask(trial, wire, "session/delete", {"sessionId": each})
            it.that(not is_error(response), f"{what} was answered with {response.get('error')}")


async def _make_last(trial: Trial, client: Client, session_id: str) -> None:
    """Have a turn in a session, where it is known how: many agents keep none that has no turn."""
    await prompted(trial, client.wire, session_id, trial.say("hello"))


async def _is_listed(trial: Trial, client: Client, session_id: str) -> bool:
    return any(each.get("sessionId") == session_id for each in await _listed(trial, client))


async def _listed(trial: Trial, client: Client, cwd: Path | None = None) -> list[Message]:
    """Return all sessions on all pages.

    Raises:
        WireError: The list does not end, or is none.
    """
    found: list[Message] = []
    params: Message = {} if cwd is None else {"cwd": str(cwd)}
    for _ in range(MOST_PAGES):
        result = await results(trial, client.wire, "session/list", params)
        sessions = result.get("sessions")
        if not isinstance(sessions, list) or not all(isinstance(each, dict) for each in sessions):
            raise WireError(f"the sessions are {sessions!r:.80}")
        found.extend(sessions)
        if result.get("nextCursor") is None:
            return found
        params = {**params, "cursor": result["nextCursor"]}
    raise WireError(f"the list does not end after {MOST_PAGES} pages")
