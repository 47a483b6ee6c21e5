"""Opening sessions: ids, directories, MCP servers, and many at a time."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import conformance
from conformance.scenarios import scenario
from conformance.steps import (
    ask,
    error_code,
    gone,
    is_error,
    needs_entry,
    needs_pipe,
    offers,
    prompted,
    results,
    serves,
    updates,
)
from conformance.trace import Message
from conformance.trial import Trial
from conformance.wire import Wire

PATIENCE: Final = 3.0
N_SESSIONS: Final = 10
NOT_ABSOLUTE: Final = ("src", "", "~", "./")
OPTIONAL: Final = (
    "session/load",
    "session/resume",
    "session/list",
    "session/close",
    "session/delete",
)
STUB: Final = Path(conformance.__file__).with_name("stub_mcp.py")


async def _needs_sessions(trial: Trial, wire: Wire) -> None:
    """Go on if the agent opens an ordinary session.

    It may lack what it works with: a login, a program. That is legal, and the last line says so.

    Raises:
        NotBroughtAbout: It opens none.
    """
    await needs_entry(trial, wire)
    first = await ask(trial, wire, "session/new", _new(trial.folder))
    trial.brought_about(not is_error(first), f"no session was opened: {first.get('error')}")


@scenario("SES-01", "SES-02", is_quick=True)
async def sessions_have_ids(trial: Trial) -> None:
    """Open ten sessions in one directory."""
    wire = (await trial.shared_client()).wire
    await _needs_sessions(trial, wire)
    ids = []
    with trial.expect("SES-01") as it:
        for _ in range(N_SESSIONS):
            result = await results(trial, wire, "session/new", _new(trial.folder))
            ids.append(result.get("sessionId"))
            it.that(isinstance(ids[-1], str) and ids[-1], f"the id is {ids[-1]!r}")
    with trial.expect("SES-02") as it:
        trial.brought_about(len(ids) > 1, "there is one session at most")
        it.that(len(set(ids)) == len(ids), f"{len(ids)} sessions have {len(set(ids))} ids")


@scenario("SES-03", "SES-04", "SES-06", "SES-14", is_quick=True)
async def directories_of_all_kinds(trial: Trial) -> None:
    """Open sessions in directories that are not absolute, not there, or named in another script."""
    wire = (await trial.shared_client()).wire
    await _needs_sessions(trial, wire)
    with trial.expect("SES-06") as it:
        folder = trial.folder / "mein Projekt 日本 & Söhne"
        folder.mkdir()
        response = await ask(trial, wire, "session/new", _new(folder))
        it.that(not is_error(response), f"it was answered with {response.get('error')}")
    with trial.expect("SES-03") as it:
        for cwd in NOT_ABSOLUTE:
            response = await ask(trial, wire, "session/new", _new(cwd))
            it.that(is_error(response), f"a session was opened in {cwd!r}")
            code = error_code(response)
            it.that(code == -32602, f"{cwd!r} was answered with {code}")
    with trial.expect("SES-04"):
        await ask(trial, wire, "session/new", _new(trial.folder / "not" / "there"))
        await serves(trial, wire, "a directory that does not exist")
    with trial.expect("SES-14") as it:
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1", "baggage": ""}
        meta = {**trace, "example.org/anything": {"deep": [{"er": None}]}}
        response = await ask(trial, wire, "session/new", {**_new(trial.folder), "_meta": meta})
        it.that(not is_error(response), f"it was answered with {response.get('error')}")


@scenario("SES-07", is_quick=True)
async def relative_paths_are_the_sessions(trial: Trial) -> None:
    """Have a file written by a relative path, where the agent was not started."""
    needs_pipe(trial)
    client, session_id = await trial.shared_session()
    name = f"conformance-{secrets.token_hex(4)}.txt"
    started, meant = Path(trial.target.cwd or Path.cwd()) / name, trial.folder / name
    said = trial.say("write", path=name, text="marker")
    await prompted(trial, client.wire, session_id, said)
    is_elsewhere = started.exists()
    started.unlink(missing_ok=True)
    trial.brought_about(is_elsewhere or meant.exists(), "it wrote no such file")
    with trial.expect("SES-07") as it:
        it.that(not is_elsewhere, "the file is where the agent was started")


@scenario("SES-08", "SES-37", "PRC-09", limit_s=90.0)
async def mcp_server_of_the_client(trial: Trial) -> None:
    """Open a session with an MCP server, have a turn, and close the session."""
    needs_pipe(trial)
    client = await trial.client()
    wire, before = client.wire, client.wire.descendants()
    log = trial.folder / "mcp.log"
    arguments = ["--flag", "two words", "ü"]
    server = {
        "name": "conformance-stub",
        "command": sys.executable,
        "args": [str(STUB), str(log), *arguments],
        "env": [{"name": "CONFORMANCE_MARKER", "value": "märker =1"}],
    }
    params = _with(trial, server)
    new = await results(trial, wire, "session/new", params, patience=PATIENCE)
    session_id = str(new.get("sessionId"))
    if not any(each.get("method") == "tools/list" for each in _logged(log)):
        await prompted(trial, wire, session_id, trial.say("hello"), patience=PATIENCE)
    with trial.expect("SES-08") as it:
        asked = [each.get("method") for each in _logged(log)]
        it.that(asked, "the server was not started")
        it.that("initialize" in asked, "the server was not initialized")
        it.that("tools/list" in asked, "the server was not asked for its tools")
    started = next((each for each in _logged(log) if each["event"] == "start"), None)
    trial.brought_about(started, "the server was not started")
    assert started is not None
    with trial.expect("SES-37") as it:
        it.that(started["args"] == arguments, f"its arguments are {started['args']}")
        it.that(started["marker"] == "märker =1", f"the variable is {started['marker']!r}")
    if not offers(wire, "session/close"):
        trial.see("PRC-09", "skipped", "the agent does not offer to close sessions")
        return
    with trial.expect("PRC-09") as it:
        await results(trial, wire, "session/close", {"sessionId": session_id})
        await gone(trial, wire, it, before)


@scenario("SES-09", "SES-10", "SES-11", limit_s=90.0)
async def mcp_servers_that_are_not_there(trial: Trial) -> None:
    """Open sessions with MCP servers that cannot be started, reached or understood."""
    wire = (await trial.shared_client()).wire
    await needs_entry(trial, wire)
    missing = {"name": "gone", "command": str(trial.folder / "gone"), "args": [], "env": []}
    with trial.expect("SES-09"):
        params = _with(trial, missing)
        response = await ask(trial, wire, "session/new", params, patience=PATIENCE)
        if not is_error(response):
            session_id = response["result"]["sessionId"]
            await prompted(trial, wire, session_id, trial.say("hello"), patience=PATIENCE)
        await serves(trial, wire, "an MCP server that cannot be started")
    kind = next((each for each in ("http", "sse") if not offers(wire, each)), None)
    if kind is None:
        trial.see("SES-10", "skipped", "the agent takes MCP servers of all kinds")
    else:
        with trial.expect("SES-10"):
            remote = {"type": kind, "name": "far", "url": "http://127.0.0.1:9/", "headers": []}
            await ask(trial, wire, "session/new", _with(trial, remote), patience=PATIENCE)
            await serves(trial, wire, f"an MCP server of the kind {kind}")
    with trial.expect("SES-11") as it:
        response = await ask(trial, wire, "session/new", _with(trial, {"name": "nothing"}))
        it.that(is_error(response), "a session was opened")


@scenario("SES-12", "SES-13")
async def additional_directories(trial: Trial) -> None:
    """Open sessions with more than one directory."""
    wire = (await trial.shared_client()).wire
    trial.needs(offers(wire, "additionalDirectories"), "additional directories")
    await needs_entry(trial, wire)
    other = trial.folder / "other"
    other.mkdir()
    with trial.expect("SES-12") as it:
        params = {**_new(trial.folder), "additionalDirectories": [str(other)]}
        response = await ask(trial, wire, "session/new", params)
        it.that(not is_error(response), f"it was answered with {response.get('error')}")
    with trial.expect("SES-13") as it:
        params = {**_new(trial.folder), "additionalDirectories": ["other"]}
        response = await ask(trial, wire, "session/new", params)
        it.that(is_error(response), "a session was opened with 'other'")


@scenario("SES-15", is_quick=True)
async def two_sessions_at_once(trial: Trial) -> None:
    """Have two sessions read a file each, at the same time."""
    client = await trial.shared_client()
    markers = ("walrus-4711", "pelican-0815")
    sessions = []
    for marker in markers:
        folder = trial.folder / marker[:3]
        folder.mkdir()
        (folder / "notes.txt").write_text(f"the word is {marker}\n", encoding="utf-8")
        sessions.append(await trial.open_session(client, folder))
    said = trial.say("read", path="notes.txt")
    turns = [client.prompt(session_id, said) for session_id in sessions]
    with trial.expect("SES-15") as it:
        for turn in turns:
            await client.stop_reason(turn, trial.target.timeout_s)
        told = [json.dumps(list(updates(client.wire, each))) for each in sessions]
        shown = [[marker in text for marker in markers] for text in told]
        it.that(not shown[0][1] and not shown[1][0], "a session was told what the other one read")
        trial.brought_about(shown[0][0] and shown[1][1], "it did not show what it read")


@scenario("SES-20")
async def methods_that_are_not_offered(trial: Trial) -> None:
    """Call each optional method for sessions that the agent does not advertise."""
    client, session_id = await trial.shared_session()
    missing = [each for each in OPTIONAL if not offers(client.wire, each)]
    trial.needs(missing, "less than everything")
    params = {**_new(trial.folder), "sessionId": session_id}
    with trial.expect("SES-20") as it:
        for method in missing:
            code = error_code(await ask(trial, client.wire, method, params))
            told = "a result" if code is None else code
            it.that(code == -32601, f"{method} was answered with {told}")


@scenario("SES-36", is_quick=True)
async def session_beside_a_question(trial: Trial) -> None:
    """Leave a question open, and have a turn in another session meanwhile."""
    client, session_id = await trial.shared_session(permission="hold")
    command = f"touch {trial.folder / 'asked'}"
    turn = client.prompt(session_id, trial.say("permission", command=command))
    await client.wire.receive(
        lambda message: (
            message.get("method") == "session/request_permission"
            and session_id in str(message.get("params"))
        ),
        trial.target.timeout_s,
    )
    with trial.expect("SES-36"):
        other_id = await trial.open_session(client)
        await prompted(trial, client.wire, other_id, trial.say("hello"))
    client.cancel(session_id)
    await client.stop_reason(turn, trial.target.timeout_s)


def _new(cwd: object) -> Message:
    return {"cwd": str(cwd), "mcpServers": []}


def _with(trial: Trial, server: Message) -> Message:
    return {"cwd": str(trial.folder), "mcpServers": [server]}


def _logged(log: Path) -> Iterator[dict[str, Any]]:
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
