"""Difficult clients that are within their rights: they refuse, repeat, read late, say nothing.

What they do to permission requests stands in `conformance.scenarios.permission`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from conformance.client import Client
from conformance.editor import CAPABILITIES, Editor
from conformance.moments import answer_of, quiet, tool_calls, until, updates
from conformance.scenarios import scenario
from conformance.steps import harmless, serves
from conformance.stopping import NATURAL
from conformance.trace import Message, WireError
from conformance.trial import Check, Trial
from conformance.wire import Body

REFUSED: Final = (
    Body({"error": {"code": -32002, "message": "Resource not found"}}),
    Body({"error": {"code": -32603, "message": "Internal error"}}),
)
NULL: Final = Body({"result": None})
WRONG: Final = (NULL, Body({"result": {}}), Body({"result": {"content": 7}}), Body({"result": []}))
N_PINGS: Final = 4000
"""Their answers are more than the pipe and our own buffer hold."""


@scenario("HOS-01", "HOS-02", is_quick=True)
async def a_client_refuses(trial: Trial) -> None:
    """Offer files and terminals, and answer each request for one with an error."""
    client, session_id = await trial.session(CAPABILITIES, permission="allow")
    path = trial.folder / "refused.txt"
    path.write_text("heron-4711\n")
    for number, refused in enumerate(REFUSED):
        for method in ("fs/read_text_file", "fs/write_text_file", "terminal/create"):
            client.wire.answer[method] = _always(refused)
        made, ran = trial.folder / f"made-{number}", trial.folder / f"ran-{number}"
        with trial.expect("HOS-01") as it:
            text = trial.say("read", path=str(path))
            told = await _refused(trial, client, session_id, text, it)
            it.that("heron-4711" in told or "completed" not in told, "a read that failed succeeded")
            text = trial.say("write", path=str(made), text="osprey")
            told = await _refused(trial, client, session_id, text, it)
            it.that(made.exists() or "completed" not in told, "a write that failed succeeded")
        with trial.expect("HOS-02") as it:
            text = trial.say("command", command=f"echo ran > {ran}")
            told = await _refused(trial, client, session_id, text, it)
            it.that(ran.exists() or "completed" not in told, "a command that was not run succeeded")


@scenario("HOS-03")
async def a_client_says_null(trial: Trial) -> None:
    """Do what is asked, and answer null wherever there is nothing to say."""
    client, session_id = await trial.session(CAPABILITIES, permission="allow")
    async with Editor.beside(client.wire) as editor:

        def write(params: Message) -> Body:
            editor.asked.append("fs/write_text_file")
            Path(params["path"]).write_text(params["content"])
            return NULL

        def release(params: Message) -> Body:
            editor.terminals.pop(params["terminalId"]).kill()
            return NULL

        client.wire.answer["fs/write_text_file"] = write
        client.wire.answer["terminal/release"] = release
        with trial.expect("HOS-03") as it:
            text = trial.say("write", path=str(trial.folder / "made.txt"), text="osprey")
            await _succeeds(trial, client, session_id, text, it)
            await _succeeds(trial, client, session_id, trial.say("command", command="true"), it)
            trial.brought_about(
                {"fs/write_text_file", "terminal/create"} & set(editor.asked),
                "the agent asked the client for nothing",
            )


@scenario("HOS-04")
async def a_client_answers_nonsense(trial: Trial) -> None:
    """Answer requests for files and terminals with results of the wrong form."""
    client, session_id = await trial.session(CAPABILITIES, permission="allow")
    path = trial.folder / "open.txt"
    path.write_text("heron\n")
    asked: list[str] = []
    for wrong in WRONG:
        for method in ("fs/read_text_file", "terminal/create"):
            client.wire.answer[method] = _always(wrong, asked)
        with trial.expect("HOS-04") as it:
            for text in (
                trial.say("read", path=str(path)),
                trial.say("command", command="echo ran"),
            ):
                reason = await _done(trial, client, session_id, text)
                it.that(reason in NATURAL, f"{wrong.members} led to {reason}")
            trial.brought_about(asked, "the agent asked the client for nothing")


@scenario("HOS-05")
async def a_client_answers_twice(trial: Trial) -> None:
    """Answer each request for a file twice."""
    client, session_id = await trial.session({"fs": CAPABILITIES["fs"]}, permission="allow")
    asked: list[str] = []

    def read(params: Message) -> Body:
        asked.append(str(params.get("path")))
        return Body({"result": {"content": "heron\n"}}, n_times=2)

    client.wire.answer["fs/read_text_file"] = read
    with trial.expect("HOS-05") as it:
        for _ in range(2):
            text = trial.say("read", path=str(trial.folder / "open.txt"))
            await _succeeds(trial, client, session_id, text, it)
        trial.brought_about(asked, "the agent asked the client for no file")
        await serves(trial, client.wire, "two answers to one request")


@scenario("HOS-06")
async def a_client_never_answers(trial: Trial) -> None:
    """Cancel turns that wait for a file and for a terminal."""
    client, _ = await trial.session(CAPABILITIES, permission="allow")
    path = trial.folder / "open.txt"
    path.write_text("heron\n")
    waits = {
        "fs/read_text_file": trial.say("read", path=str(path)),
        "terminal/create": trial.say("command", command="echo ran"),
    }
    for method, text in waits.items():
        client.wire.answer[method] = lambda _: None
        session_id = await trial.open_session(client)
        turn = client.prompt(session_id, text)
        await until(
            trial,
            client.wire,
            turn,
            lambda message, method=method: message.get("method") == method,  # type: ignore[misc]
            f"the agent asked for {method}",
        )
        client.cancel(session_id)
        with trial.expect("HOS-06") as it:
            reason = await answer_of(trial, client, turn)
            it.that(reason == "cancelled", f"cancelled while it waited: it was {reason}")
            reason = await _done(trial, client, session_id, trial.say("hello"))
            it.that(reason in NATURAL, f"the next prompt was answered with {reason}")


@scenario("HOS-07")
async def a_client_reads_late(trial: Trial) -> None:
    """Leave the agent's output unread until its pipe is full, then read on."""
    trial.needs(trial.target.transport == "stdio", "a pipe that can be full")
    client, session_id = await trial.session()
    wire = client.wire
    await serves(trial, wire, "its start")
    method, params = harmless(trial, wire)
    trial.brought_about(method != "session/new", "the agent answers nothing that is cheap")
    with trial.expect("HOS-07") as it:
        with wire.unread("stdout"):
            pings = [wire.request(method, params) for _ in range(N_PINGS)]
        for ping in pings:
            await wire.response(ping, trial.target.timeout_s)
        await quiet(trial, wire)
        n_twice = sum(len(wire.responses(ping)) != 1 for ping in pings)
        it.that(n_twice == 0, f"{n_twice} requests were answered more than once")
        reason = await _done(trial, client, session_id, trial.say("hello"))
        it.that(reason in NATURAL, f"the next prompt was answered with {reason}")


async def _done(trial: Trial, client: Client, session_id: str, text: str) -> str:
    """Prompt, and wait for the end of the turn; return how it ended, or that it hangs."""
    turn = client.prompt(session_id, text)
    try:
        return await answer_of(trial, client, turn)
    except WireError as exc:
        client.cancel(session_id)
        return exc.reason


async def _refused(trial: Trial, client: Client, session_id: str, text: str, it: Check) -> str:
    """Prompt for what the client refuses; return all that the agent told of it, as JSON."""
    n_before = len(updates(client.wire, session_id))
    reason = await _done(trial, client, session_id, text)
    it.that(reason in NATURAL, f"the turn was answered with {reason}")
    return msgspec.json.encode(updates(client.wire, session_id)[n_before:]).decode()


def _always(body: Body, asked: list[str] | None = None) -> Callable[[Message], Body]:
    """Return what answers each request so, and counts it."""

    def answer(params: Message) -> Body:
        if asked is not None:
            asked.append(str(params.get("sessionId")))
        return body

    return answer


async def _succeeds(trial: Trial, client: Client, session_id: str, text: str, it: Check) -> None:
    before = set(tool_calls(client.wire, session_id))
    reason = await _done(trial, client, session_id, text)
    it.that(reason in NATURAL, f"the turn was answered with {reason}")
    for key, call in tool_calls(client.wire, session_id).items():
        it.that(key in before or call.get("status") != "failed", "the call failed")
