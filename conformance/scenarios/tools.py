"""What an agent does with files and commands of its own, and how it tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from conformance.client import Client
from conformance.moments import answer_of, tool_calls, updates
from conformance.scenarios import scenario
from conformance.stopping import NATURAL
from conformance.trace import Message
from conformance.trial import Trial

LINES: Final = "a line above\none before two\na line below\n"


@scenario("ACT-01", "ACT-02", "ACT-03", is_quick=True)
async def a_file_is_read(trial: Trial) -> None:
    """Have a file read by a path that is relative to the session's cwd."""
    client, session_id = await trial.shared_session(permission="allow")
    (trial.folder / "pelican.txt").write_text("the bird is a pelican-4711\n")
    await _done(trial, client, session_id, trial.say("read", path="pelican.txt"))
    calls = tool_calls(client.wire, session_id)
    told = b"pelican-4711" in msgspec.json.encode(updates(client.wire, session_id))
    with trial.expect("ACT-02") as it:
        it.that(calls or not told, "it was read without a tool call")
        trial.brought_about(calls, "the agent read nothing")
    with trial.expect("ACT-01") as it:
        failed = [call for call in calls.values() if call.get("status") == "failed"]
        it.that(told or not failed, "a path that is relative to the session's cwd was not found")
        trial.brought_about(told, "the agent never showed what it read")
    with trial.expect("ACT-03") as it:
        it.that(_is_located(calls, trial.folder / "pelican.txt"), "no call has it as a location")


@scenario("ACT-03", "ACT-04", "ACT-05", is_quick=True)
async def files_are_written_and_edited(trial: Trial) -> None:
    """Have one file written and another one edited."""
    client, session_id = await trial.shared_session(permission="allow")
    made, edited = trial.folder / "made.txt", trial.folder / "edited.txt"
    edited.write_text(LINES)
    await _done(trial, client, session_id, trial.say("write", path=str(made), text="osprey"))
    with trial.expect("ACT-05") as it:
        trial.brought_about(made.exists(), "the agent wrote nothing")
        it.that(made.read_text().rstrip("\n") == "osprey", f"it holds {made.read_text()!r}")
    _see_the_change(trial, client, session_id, made, "osprey")
    session_id = await trial.open_session(client)
    await _done(trial, client, session_id, trial.say("edit", path=str(edited), text="behind"))
    with trial.expect("ACT-05") as it:
        trial.brought_about(edited.read_text() != LINES, "the agent edited nothing")
        wanted = LINES.replace("before", "behind")
        it.that(edited.read_text() == wanted, f"{LINES!r} became {edited.read_text()!r}")
    _see_the_change(trial, client, session_id, edited, "behind", "before")


@scenario("ACT-01", "ACT-02", "ACT-06", is_quick=True)
async def a_command_is_run(trial: Trial) -> None:
    """Have a command tell where it runs."""
    client, session_id = await trial.shared_session(permission="allow")
    where = trial.folder / "where"
    await _done(trial, client, session_id, trial.say("command", command=f"pwd -P > {where}"))
    trial.brought_about(where.exists(), "the agent did not run the command")
    with trial.expect("ACT-01") as it:
        shown = where.read_text().strip()
        it.that(shown == str(trial.folder.resolve()), "a command started elsewhere than there")
    said = [update for update in updates(client.wire, session_id) if "toolCallId" in update]
    with trial.expect("ACT-02") as it:
        it.that(said, "a command was run without a tool call")
    with trial.expect("ACT-06") as it:
        statuses = [update.get("status", "pending") for update in said]
        it.that("in_progress" in statuses, f"its statuses were {', '.join(statuses)}")


@scenario("ACT-07", "ACT-08")
async def a_command_fails(trial: Trial) -> None:
    """Have a command print something and fail."""
    client, session_id = await trial.shared_session(permission="allow")
    ran = trial.folder / "ran"
    command = f"touch {ran}; echo kingfisher-$((4000 + 711)); exit 3"
    with trial.expect("ACT-07") as it:
        reason = await _done(trial, client, session_id, trial.say("command", command=command))
        trial.brought_about(ran.exists(), "the agent did not run the command")
        it.that(reason in NATURAL, f"the turn was answered with {reason}")
        calls = tool_calls(client.wire, session_id)
        it.that(b"kingfisher-4711" in msgspec.json.encode(calls), "no call shows what it printed")
    statuses = {str(call.get("status", "pending")) for call in calls.values()}
    trial.see("ACT-08", "recorded", f"the status is {', '.join(sorted(statuses))}")


@scenario("ACT-09")
async def a_file_is_missing(trial: Trial) -> None:
    """Have a file read that is not there."""
    client, session_id = await trial.shared_session(permission="allow")
    with trial.expect("ACT-09") as it:
        path = str(trial.folder / "nothing-here.txt")
        reason = await _done(trial, client, session_id, trial.say("read", path=path))
        calls = tool_calls(client.wire, session_id)
        trial.brought_about(calls, "the agent did not try to read it")
        it.that(reason in NATURAL, f"the turn was answered with {reason}")
        statuses = [str(call.get("status", "pending")) for call in calls.values()]
        it.that("failed" in statuses, f"the status is {', '.join(statuses)}")


@scenario("ACT-10", is_quick=True)
async def a_plan_is_made(trial: Trial) -> None:
    """Have a plan made."""
    client, session_id = await trial.shared_session(permission="allow")
    await _done(trial, client, session_id, trial.say("plan"))
    plans = [
        update
        for update in updates(client.wire, session_id)
        if update.get("sessionUpdate") == "plan"
    ]
    with trial.expect("ACT-10") as it:
        trial.brought_about(plans, "the agent showed no plan")
        entries: Any = plans[0].get("entries")
        n_entries = len(entries) if isinstance(entries, list) else 0
        it.that(n_entries >= 2, f"a plan of two or more steps has {n_entries} entries")


async def _done(trial: Trial, client: Client, session_id: str, text: str) -> str:
    """Prompt, and wait for the end of the turn; return how it ended."""
    return await answer_of(trial, client, client.prompt(session_id, text))


def _is_located(calls: dict[str, Message], path: Path) -> bool:
    wanted = path.resolve()
    for call in calls.values():
        locations = call.get("locations")
        for location in locations if isinstance(locations, list) else ():
            shown = location.get("path") if isinstance(location, dict) else None
            if isinstance(shown, str) and Path(shown).resolve() == wanted:
                return True
    return False


def _see_the_change(
    trial: Trial, client: Client, session_id: str, path: Path, new: str, old: str = ""
) -> None:
    calls = tool_calls(client.wire, session_id)
    with trial.expect("ACT-03") as it:
        it.that(_is_located(calls, path), f"no call has {path.name} as a location")
    with trial.expect("ACT-04") as it:
        diffs = [
            part
            for call in calls.values()
            for part in (call.get("content") or ())
            if isinstance(part, dict) and part.get("type") == "diff"
        ]
        it.that(diffs, f"no call shows a diff of {path.name}")
        diff = diffs[-1]
        it.that(Path(str(diff.get("path"))).resolve() == path.resolve(), "it is of another file")
        it.that(new in str(diff.get("newText")), f"{new!r} is not in the new text")
        it.that(old in str(diff.get("oldText")), f"{old!r} is not in the old text")
