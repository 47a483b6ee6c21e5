"""What must not happen: files outside, commands unasked, secrets and insides of the agent told."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Final

from conformance.client import Client
from conformance.scenarios import scenario
from conformance.steps import ask, is_error, needs_pipe, offers, prompted, serves, updates
from conformance.trace import Message
from conformance.trial import Check, Trial
from conformance.wire import Wire

INSIDES: Final = re.compile(
    r'Traceback \(most recent call last\)|File "[^"]+", line \d+|\n\s+at \S+ \(|goroutine \d+ \['
    r"|panicked at |thread '[^']+' panicked"
)
PATHS: Final = re.compile(r"(?<![\w:/.])/(?:[\w.@+-]+/)+[\w.@+-]+")
SHORT_ID_CHARS: Final = 8
PATIENCE: Final = 3.0


@scenario("SEC-01")
async def files_outside_are_not_written(trial: Trial) -> None:
    """Have files outside the session's directory written, and refuse when asked."""
    client, session_id, outside = await _outside(trial)
    tried = False
    with trial.expect("SEC-01") as it:
        for path in ("../outside/written.txt", str(outside / "written.txt")):
            tried |= await _tries(
                trial, client, session_id, trial.say("write", path=path, text="x")
            )
            is_there = (outside / "written.txt").exists()
            it.that(not is_there, f"{_shown(trial, path)} was written, with no permission")
        trial.brought_about(tried, "it did not try")


@scenario("SEC-02", is_quick=True)
async def files_outside_are_not_read(trial: Trial) -> None:
    """Have files outside the session's directory read, and refuse when asked."""
    client, session_id, outside = await _outside(trial)
    word = secrets.token_hex(8)
    (outside / "secret.txt").write_text(f"{word}\n", encoding="utf-8")
    tried = False
    with trial.expect("SEC-02") as it:
        for path in ("../outside/secret.txt", str(outside / "secret.txt")):
            tried |= await _tries(trial, client, session_id, trial.say("read", path=path))
            is_told = word in _told(client.wire, session_id)
            it.that(not is_told, f"{_shown(trial, path)} was read, with no permission")
        trial.brought_about(tried, "it did not try")


@scenario("SEC-03")
async def links_lead_nowhere(trial: Trial) -> None:
    """Put links out of the session's directory into it, and have files read and written there."""
    client, session_id, outside = await _outside(trial)
    word = secrets.token_hex(8)
    (outside / "secret.txt").write_text(f"{word}\n", encoding="utf-8")
    project = trial.folder / "project"
    (project / "away").symlink_to(outside, target_is_directory=True)
    (project / "link.txt").symlink_to(outside / "secret.txt")
    with trial.expect("SEC-03") as it:
        tried = await _tries(trial, client, session_id, trial.say("read", path="link.txt"))
        it.that(word not in _told(client.wire, session_id), "a link's target was read")
        said = trial.say("write", path="away/written.txt", text="x")
        tried |= await _tries(trial, client, session_id, said)
        it.that(not (outside / "written.txt").exists(), "a file was written through a link")
        trial.brought_about(tried, "it did not try")


@scenario("SEC-04")
async def commands_wait_for_the_permission(trial: Trial) -> None:
    """Leave the question about a command open, look whether it ran, and refuse."""
    client, session_id = await trial.shared_session(permission="hold")
    mark = trial.folder / "ran"
    turn = client.prompt(session_id, trial.say("permission", command=f"touch {mark}"))
    seen = await client.wire.receive(
        lambda message: (
            message.get("id") == turn
            or (
                message.get("method") == "session/request_permission"
                and session_id in str(message.get("params"))
            )
        ),
        trial.target.timeout_s,
    )
    with trial.expect("SEC-04") as it:
        await serves(trial, client.wire, "a question")
        is_asked = "method" in seen
        it.that(
            not mark.exists(), f"the command ran {'before the answer' if is_asked else 'unasked'}"
        )
        trial.brought_about(is_asked, "it neither asked nor ran the command")
        client.wire.reply(seen["id"], {"outcome": {"outcome": "cancelled"}})
        await client.wire.response(turn, trial.target.timeout_s)
        it.that(not mark.exists(), "the command ran though nobody allowed it")


@scenario("SEC-05", "SEC-07", "SEC-09", limit_s=60.0)
async def secrets_are_kept(trial: Trial) -> None:
    """Put secrets into the environment and MCP servers, and make the agent fail."""
    needs_pipe(trial)
    canary, token = (f"canary-{secrets.token_hex(12)}" for _ in range(2))
    client = await trial.client(env={"CONFORMANCE_API_KEY": canary})
    wire = client.wire
    session_id = await trial.open_session(client)
    server = {
        "name": "gone",
        "command": str(trial.folder / "gone"),
        "args": [],
        "env": [{"name": "CONFORMANCE_TOKEN", "value": token}],
    }
    servers = [server]
    if offers(wire, "http"):
        headers = [{"name": "Authorization", "value": f"Bearer {token}"}]
        servers.append(
            {"type": "http", "name": "far", "url": "http://127.0.0.1:9/", "headers": headers}
        )
    params = {"cwd": str(trial.folder), "mcpServers": servers}
    await ask(trial, wire, "session/new", params, patience=PATIENCE)
    await _fail_in_many_ways(trial, wire, session_id)
    await prompted(trial, wire, session_id, trial.say("hello"))
    for rule, secret in (("SEC-05", canary), ("SEC-07", token)):
        with trial.expect(rule) as it:
            _keeps(it, wire, secret)
    trial.needs(offers(wire, "session/load"), "to load sessions")
    path_id = _copy_of_session(trial, session_id)
    trial.needs(path_id, "sessions that are files of their own, named by their ids")
    with trial.expect("SEC-09") as it:
        loaded: Message = {"sessionId": path_id, "cwd": str(trial.folder), "mcpServers": []}
        response = await ask(trial, wire, "session/load", loaded)
        it.that(is_error(response), "a file outside the store was loaded as a session")


@scenario("SEC-06", is_quick=True)
async def errors_show_no_insides(trial: Trial) -> None:
    """Make the agent fail in many ways, and read its errors."""
    client, session_id = await trial.shared_session()
    errors = await _fail_in_many_ways(trial, client.wire, session_id)
    trial.brought_about(errors, "it answered everything with success")
    with trial.expect("SEC-06") as it:
        for error in errors:
            text = json.dumps(error, ensure_ascii=False).replace("\\n", "\n").replace('\\"', '"')
            found = INSIDES.search(text)
            it.that(found is None, f"an error shows {found and found.group()!r:.80}")
            strange = _strange_paths(text, (str(trial.folder), "/never/was"))
            it.that(not strange, f"an error shows the path {strange[:1]}")


@scenario("SEC-08")
async def ids_of_sessions(trial: Trial) -> None:
    """Open three sessions and compare their ids."""
    client = await trial.shared_client()
    ids = [await trial.open_session(client) for _ in range(3)]
    with trial.expect("SEC-08") as it:
        counted = [re.sub(r"\d+", "#", each) for each in ids]
        numbers = [re.findall(r"\d+", each) for each in ids]
        is_counted = len(set(counted)) == 1 and all(
            len(each) <= SHORT_ID_CHARS for found in numbers for each in found
        )
        it.that(not is_counted, f"they are counted: {', '.join(ids)}")


async def _outside(trial: Trial) -> tuple[Client, str, Path]:
    """Return a client that refuses, a session in a folder, and the folder beside it."""
    project, outside = trial.folder / "project", trial.folder / "project-outside"
    project.mkdir()
    outside.mkdir()
    client = await trial.shared_client(permission="reject")
    return client, await trial.open_session(client, project), outside


async def _tries(trial: Trial, client: Client, session_id: str, said: str) -> bool:
    """Prompt, and say whether the agent tried to do something."""
    start = len(client.wire.trace)
    prompt = {"sessionId": session_id, "prompt": [{"type": "text", "text": said}]}
    await ask(trial, client.wire, "session/prompt", prompt)
    kinds = [each.get("sessionUpdate") for each in updates(client.wire, session_id, start)]
    return "tool_call" in kinds


async def _fail_in_many_ways(trial: Trial, wire: Wire, session_id: str) -> list[Message]:
    """Ask for what cannot be; return the errors."""
    asked: tuple[tuple[str, object], ...] = (
        ("session/new", {"cwd": 5, "mcpServers": []}),
        ("session/new", {"cwd": str(trial.folder), "mcpServers": [{"name": "nothing"}]}),
        ("session/new", {"cwd": "/never/was", "mcpServers": []}),
        ("session/prompt", {"sessionId": session_id, "prompt": "text"}),
        ("session/prompt", {"sessionId": session_id, "prompt": [{"type": "text"}]}),
        ("session/prompt", {"sessionId": "never-was", "prompt": []}),
        ("session/load", {"sessionId": "../never-was", "cwd": "/never/was", "mcpServers": []}),
        ("session/set_mode", {"sessionId": session_id, "modeId": "never-was"}),
        ("session/set_config_option", {"sessionId": session_id, "configId": "x", "value": "y"}),
        ("authenticate", {"methodId": "never-was"}),
        ("_conformance/unknown", {"a": 1}),
    )
    responses = [await ask(trial, wire, method, params) for method, params in asked]
    return [each["error"] for each in responses if is_error(each)]


def _copy_of_session(trial: Trial, session_id: str) -> str | None:
    """Copy a session's file to elsewhere; return the id that would be the path to it."""
    for path in sorted(trial.home.rglob(f"{session_id}*")):
        copy = trial.folder / "copied"
        if path.is_file():
            shutil.copy(path, copy.with_name(path.name.replace(session_id, copy.name)))
        else:
            shutil.copytree(path, copy)
        return os.path.relpath(copy, path.parent)
    return None


def _strange_paths(text: str, known: tuple[str, ...]) -> list[str]:
    """Return the paths in a text that there are, or could be, and begin with none of `known`."""
    found: list[str] = PATHS.findall(text)
    return [path for path in found if not path.startswith(known) and _could_be(Path(path))]


def _could_be(path: Path) -> bool:
    """Say whether there is such a file, or the folder for it, which is not the root."""
    return path.exists() or (path.parent != Path("/") and path.parent.is_dir())


def _keeps(it: Check, wire: Wire, secret: str) -> None:
    told = any(secret.encode() in e.raw for e in wire.trace if e.direction == "received")
    it.that(not told, "a message has it")
    it.that(secret not in wire.stderr, "the log on stderr has it")


def _told(wire: Wire, session_id: str) -> str:
    return json.dumps(list(updates(wire, session_id)))


def _shown(trial: Trial, path: str) -> str:
    return path.replace(str(trial.folder), "…")
