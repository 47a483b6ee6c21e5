"""What an agent does with the files and the terminals that an editor lends it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from conformance.client import Client
from conformance.commands import Sleeper
from conformance.editor import CAPABILITIES, Editor
from conformance.moments import answer_of, asleep, quiet, tool_calls, updates
from conformance.scenarios import scenario
from conformance.stopping import NATURAL
from conformance.trace import Message, WireError
from conformance.trial import NotBroughtAbout, Trial

MOST_PATIENCE: Final = 0.75
"""The part of the usual limit that a turn gets to end without its terminal."""
PARTS: Final[dict[str, Message]] = {
    "reading files": {"fs": {"readTextFile": True, "writeTextFile": False}},
    "writing files": {"fs": {"writeTextFile": True}},
    "terminals": {"terminal": True},
    "files and no terminals": {"fs": {"readTextFile": True, "writeTextFile": True}},
}


@scenario("ACT-11", "ACT-12", "ACT-13", "ACT-14", "ACT-15", is_quick=True)
async def an_editor_lends_all_it_has(trial: Trial) -> None:
    """Offer files and terminals: read and edit an open file, write one, run and cancel commands."""
    client, session_id = await trial.session(CAPABILITIES, permission="allow")
    async with Editor.beside(client.wire) as editor:
        await _read_an_open_file(trial, client, session_id, editor)
        await _edit_an_open_file(trial, client, session_id, editor)
        await _write_a_file(trial, client, session_id, editor)
        await _run_in_a_terminal(trial, client, session_id, editor)
        await _cancel_a_terminal(trial, client, session_id, editor)


@scenario("ACT-16")
async def an_editor_lends_a_part(trial: Trial) -> None:
    """Offer only one of reading, writing and terminals, and have the agent use all three."""
    for what, capabilities in PARTS.items():
        client, session_id = await trial.session(capabilities, permission="allow")
        async with Editor.beside(client.wire) as editor:
            with trial.expect("ACT-16") as it:
                folder = trial.folder / what.replace(" ", "-")
                folder.mkdir()
                (folder / "read.txt").write_text("heron\n")
                await _use_all(trial, client, session_id, folder)
                strange = sorted(set(editor.asked) - _offered(capabilities))
                it.that(not strange, f"offered {what}, it was asked for {', '.join(strange)}")
                made = (folder / "made.txt").exists() and (folder / "ran").exists()
                it.that(made, f"offered {what} only, it could not write and run a command")
        await trial.leave(client)


@scenario("TER-04")
async def a_terminal_comes_late(trial: Trial) -> None:
    """Leave the request for a terminal open, cancel the turn, and make the terminal then."""
    client, session_id = await trial.session(CAPABILITIES, permission="allow")
    wire = client.wire
    wire.answer["terminal/create"] = lambda params: None
    for method in ("terminal/release", "terminal/kill"):
        wire.answer[method] = lambda params: {}
    limit_s = trial.target.timeout_s
    turn = client.prompt(session_id, trial.say("command", command="sleep 100"))
    try:
        asked = await wire.receive(lambda each: _wants(each, "terminal/create"), limit_s)
    except WireError:
        raise NotBroughtAbout("the agent asked for no terminal") from None
    client.cancel(session_id)
    with suppress(WireError):  # some end the turn without it, some wait for it
        await wire.response(turn, MOST_PATIENCE * limit_s)
    wire.reply(asked["id"], {"terminalId": "late"})
    with trial.expect("TER-04"):
        await wire.receive(_gives_up, trial.target.timeout_s)
        await answer_of(trial, client, turn)


def _wants(message: Message, method: str) -> bool:
    return message.get("method") == method and "id" in message


def _gives_up(message: Message) -> bool:
    params = message.get("params")
    is_its = isinstance(params, dict) and params.get("terminalId") == "late"
    return is_its and message.get("method") in ("terminal/release", "terminal/kill")


async def _read_an_open_file(trial: Trial, client: Client, session_id: str, editor: Editor) -> None:
    path = trial.folder / "open.txt"
    path.write_text("saved-heron-1\n")
    editor.buffers[str(path)] = "unsaved-heron-2\n"
    await _done(trial, client, session_id, trial.say("read", path=str(path)))
    shown = msgspec.json.encode(updates(client.wire, session_id))
    with trial.expect("ACT-11") as it:
        it.that(b"saved-heron-1" not in shown.replace(b"unsaved", b""), "it was read from the disk")
        trial.brought_about(b"unsaved-heron-2" in shown, "the agent never showed what it read")


async def _edit_an_open_file(trial: Trial, client: Client, session_id: str, editor: Editor) -> None:
    path = trial.folder / "edited.txt"
    path.write_text("saved before\n")
    editor.buffers[str(path)] = "saved before\ntyped since\n"
    await _done(trial, client, session_id, trial.say("edit", path=str(path), text="behind"))
    trial.brought_about(
        "behind" in editor.buffers[str(path)] + path.read_text(), "the agent edited nothing"
    )
    with trial.expect("ACT-13") as it:
        text = path.read_text()
        it.that("typed since" in text, "what was typed and not saved is gone")
        it.that("behind" in editor.buffers[str(path)], "the open file does not have the change")


async def _write_a_file(trial: Trial, client: Client, session_id: str, editor: Editor) -> None:
    path = trial.folder / "made.txt"
    await _done(trial, client, session_id, trial.say("write", path=str(path), text="osprey"))
    trial.brought_about(path.exists(), "the agent wrote nothing")
    with trial.expect("ACT-12") as it:
        it.that("fs/write_text_file" in editor.asked, "a file was written past the editor")


async def _run_in_a_terminal(trial: Trial, client: Client, session_id: str, editor: Editor) -> None:
    where = trial.folder / "where"
    await _done(trial, client, session_id, trial.say("command", command=f"pwd -P > {where}"))
    trial.brought_about(where.exists(), "the agent did not run the command")
    trial.brought_about(
        "terminal/create" in editor.asked, "the agent runs commands without the editor's terminals"
    )
    with trial.expect("ACT-14") as it:
        it.that(where.read_text().strip() == str(trial.folder.resolve()), "it started elsewhere")
        shown = any(
            isinstance(part, dict) and part.get("type") == "terminal"
            for call in tool_calls(client.wire, session_id).values()
            for part in (call.get("content") or ())
        )
        it.that(shown, "no call shows the terminal")


async def _cancel_a_terminal(trial: Trial, client: Client, session_id: str, editor: Editor) -> None:
    with Sleeper.asleep() as sleeper:
        turn = client.prompt(session_id, trial.say("command", command=sleeper.command))
        await asleep(trial, client.wire, turn, sleeper)
        client.cancel(session_id)
        with trial.expect("ACT-15") as it:
            reason = await answer_of(trial, client, turn)
            it.that(reason == "cancelled", f"the cancelled turn was answered with {reason}")
            await quiet(trial, client.wire)
            left = ", ".join(editor.terminals)
            it.that(not left, f"{left} was not released")
            it.that(await sleeper.is_gone(trial.target.timeout_s), "the command runs on")


async def _use_all(trial: Trial, client: Client, session_id: str, folder: Path) -> None:
    """Have the agent read, write and run something in a folder."""
    for text in (
        trial.say("read", path=str(folder / "read.txt")),
        trial.say("write", path=str(folder / "made.txt"), text="osprey"),
        trial.say("command", command=f"echo ran > {folder}/ran"),
    ):
        reason = await _done(trial, client, session_id, text)
        trial.brought_about(reason in NATURAL, f"a turn was answered with {reason}")


def _offered(capabilities: Message) -> set[str]:
    methods = set()
    files = capabilities.get("fs", {})
    if files.get("readTextFile"):
        methods.add("fs/read_text_file")
    if files.get("writeTextFile"):
        methods.add("fs/write_text_file")
    if capabilities.get("terminal"):
        methods |= {
            f"terminal/{name}" for name in ("create", "output", "wait_for_exit", "kill", "release")
        }
    return methods


async def _done(trial: Trial, client: Client, session_id: str, text: str) -> str:
    """Prompt, and wait for the end of the turn; return how it ended."""
    return await answer_of(trial, client, client.prompt(session_id, text))
