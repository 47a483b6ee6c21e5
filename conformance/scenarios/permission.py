"""Permission: what is asked, what each answer does, and what happens meanwhile.

Whether something was done is looked up on the disk: the command that needs permission leaves a
line in a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from conformance.client import CANCELLED, Client
from conformance.moments import answer_of, is_answered, question, quiet, tool_calls
from conformance.scenarios import scenario
from conformance.stopping import NATURAL
from conformance.trace import Message, WireError
from conformance.trial import NotBroughtAbout, Trial

NOTHING_TOLD: Final[dict[str, Any]] = {
    "an option that was not offered": {
        "result": {"outcome": {"outcome": "selected", "optionId": "no-such-option"}}
    },
    "a selection of nothing": {"result": {"outcome": {"outcome": "selected"}}},
    "an outcome nobody knows": {"result": {"outcome": {"outcome": "allowed"}}},
    "an empty object": {"result": {}},
    "null": {"result": None},
}
FAILED: Final = {"error": {"code": -32603, "message": "Internal error"}}


class _Deed:
    """A command that needs permission, and how often it was run."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / name
        self.command: Final = f"echo ran >> {self._file}"

    @property
    def n_times(self) -> int:
        return len(self._file.read_text().splitlines()) if self._file.exists() else 0


@scenario("PER-01", "PER-07", "PER-10", "PER-11", is_quick=True)
async def permission_is_waited_for(trial: Trial) -> None:
    """Leave a question open, work in another session, then allow it."""
    client, session_id = await trial.shared_session(permission="never")
    other = await trial.open_session(client)
    deed = _Deed(trial.folder, "waited")
    turn, asked = await _asked(trial, client, session_id, deed)
    _see_the_options(trial, asked)
    with trial.expect("PER-07") as it:
        reason = await answer_of(trial, client, client.prompt(other, trial.say("hello")))
        it.that(reason in NATURAL, f"the other session's prompt was answered with {reason}")
    with trial.expect("PER-10") as it:
        it.that(deed.n_times == 0, "it was run while the question was open")
        it.that(not is_answered(client.wire, turn), "the turn ended while the question was open")
    with trial.expect("PER-11") as it:
        client.permission = "allow"  # if it asks again
        client.wire.reply(asked["id"], _chosen(asked, "allow"))
        reason = await answer_of(trial, client, turn)
        it.that(reason in NATURAL, f"the turn was answered with {reason}")
        it.that(deed.n_times == 1, f"what was allowed was run {deed.n_times} times")


@scenario("PER-02", "PER-10", is_quick=True)
async def writes_wait_for_the_permission(trial: Trial) -> None:
    """Leave a question about a write open, then reject it."""
    client, session_id = await trial.shared_session(permission="never")
    file = trial.folder / "asked.txt"
    turn = client.prompt(session_id, trial.say("write", path="asked.txt", text="heron"))
    asked = await question(trial, client.wire, session_id, turn)
    with trial.expect("PER-10") as it:
        it.that(not file.exists(), "the file was written while the question was open")
    client.permission = "reject"  # a model may try again
    client.wire.reply(asked["id"], _chosen(asked, "reject"))
    await _end(trial, client, turn)
    with trial.expect("PER-02") as it:
        it.that(not file.exists(), "what was rejected was written")


@scenario("PER-10", "PER-11")
async def permission_to_write_is_waited_for(trial: Trial) -> None:
    """Leave the question open whether a file may be written, then allow it."""
    client, session_id = await trial.shared_session(permission="never")
    path = trial.folder / "made.txt"
    turn = client.prompt(session_id, trial.say("write", path=str(path), text="osprey"))
    asked = await question(trial, client.wire, session_id, turn)
    with trial.expect("PER-10") as it:
        await quiet(trial, client.wire)
        it.that(not path.exists(), "the file was written while the question was open")
    with trial.expect("PER-11") as it:
        client.permission = "allow"
        client.wire.reply(asked["id"], _chosen(asked, "allow"))
        reason = await answer_of(trial, client, turn)
        it.that(reason in NATURAL, f"the turn was answered with {reason}")
        it.that(path.exists(), "what was allowed was not written")


@scenario("PER-02", "PER-12", "PER-13", is_quick=True)
async def permission_is_refused(trial: Trial) -> None:
    """Reject a call once, then allow another like it."""
    client, session_id = await trial.shared_session(permission="reject")
    deed = _Deed(trial.folder, "rejected")
    turn, asked = await _asked(trial, client, session_id, deed)
    trial.brought_about(_kinds(asked) & {"reject_once"}, "there is no option to reject it once")
    reason = await _end(trial, client, turn)
    with trial.expect("PER-02") as it:
        it.that(deed.n_times == 0, "what was rejected was run")
    _see_that_it_failed(trial, client, session_id, asked)
    with trial.expect("PER-13") as it:
        it.that(reason in NATURAL or reason == "cancelled", f"the turn was answered with {reason}")
        client.permission = "never"
        turn, asked = await _asked(trial, client, session_id, deed)
        client.permission = "allow"
        client.wire.reply(asked["id"], _chosen(asked, "allow"))
        reason = await answer_of(trial, client, turn)
        it.that(reason in NATURAL, f"the turn after it was answered with {reason}")
        it.that(deed.n_times > 0, "a call that was allowed after a rejection was not run")


@scenario("PER-03", "PER-14", "PER-15", is_quick=True)
async def permission_is_answered_as_cancelled(trial: Trial) -> None:
    """Answer a question as if the turn was cancelled, without cancelling it."""
    client, session_id = await trial.shared_session(permission="never")
    deed = _Deed(trial.folder, "cancelled")
    turn, asked = await _asked(trial, client, session_id, deed)
    client.permission = "cancelled"
    client.wire.reply(asked["id"], CANCELLED)
    with trial.expect("PER-14") as it:
        reason = await answer_of(trial, client, turn)
        trial.see("PER-15", "recorded", f"with {reason}")
        it.that(not reason.startswith("no stop"), f"it was answered with {reason}")
    with trial.expect("PER-03") as it:
        it.that(deed.n_times == 0, "what was answered as cancelled was run")


@scenario("PER-04", "PER-05", "PER-14")
async def permission_is_answered_wrongly(trial: Trial) -> None:
    """Answer questions with an error, with options that were not offered, and with nothing."""
    for number, (what, body) in enumerate({"an error": FAILED, **NOTHING_TOLD}.items()):
        client, session_id = await trial.shared_session(permission="never")
        deed = _Deed(trial.folder, f"wrongly-{number}")
        turn, asked = await _asked(trial, client, session_id, deed)
        client.permission = "reject"  # a model may try again
        client.wire.unanswered.pop(asked["id"], None)
        client.wire.send({"jsonrpc": "2.0", "id": asked["id"], **body})
        with trial.expect("PER-14") as it:
            try:
                await client.wire.response(turn, trial.target.timeout_s)
            except WireError:
                client.cancel(session_id)
                it.that(False, f"{what} as the answer hangs the turn")
        with trial.expect("PER-04" if body is FAILED else "PER-05") as it:
            it.that(deed.n_times == 0, f"{what} as the answer was taken for a permission")


@scenario("PER-16")
async def permission_is_given_once(trial: Trial) -> None:
    """Allow a command once, then have the same run again."""
    client, session_id = await trial.shared_session(permission="never")
    deed = _Deed(trial.folder, "once")
    turn, asked = await _asked(trial, client, session_id, deed)
    trial.brought_about(_kinds(asked) & {"allow_once"}, "there is no option to allow it once")
    client.wire.reply(asked["id"], _chosen(asked, "allow"))
    await _end(trial, client, turn)
    trial.brought_about(deed.n_times == 1, "what was allowed once was not run once")
    again = client.prompt(session_id, trial.say("permission", command=deed.command))
    with trial.expect("PER-16") as it:
        try:
            asked = await question(trial, client.wire, session_id, again)
        except NotBroughtAbout:
            it.that(deed.n_times == 1, "it was run again without a question")
            raise
    client.permission = "reject"
    client.wire.reply(asked["id"], _chosen(asked, "reject"))
    await _end(trial, client, again)


@scenario("PER-06")
async def permission_is_given_for_always(trial: Trial) -> None:
    """Allow a command for always, then have the same run again."""
    client, session_id = await trial.session(permission="never")
    deed = _Deed(trial.folder, "always")
    turn, asked = await _asked(trial, client, session_id, deed)
    trial.brought_about(_kinds(asked) & {"allow_always"}, "there is no option to allow always")
    n_questions = 0

    def count(params: Message) -> Message:
        nonlocal n_questions
        n_questions += 1
        return _chosen({"params": params}, "allow_once")

    client.permission = count
    client.wire.reply(asked["id"], _chosen(asked, "allow_always"))
    await _end(trial, client, turn)
    trial.brought_about(deed.n_times == 1, "what was allowed for always was not run")
    n_before = n_questions
    with trial.expect("PER-06") as it:
        again = client.prompt(session_id, trial.say("permission", command=deed.command))
        await answer_of(trial, client, again)
        it.that(n_questions == n_before, "it asks about the same command again")


@scenario("PER-08")
async def permission_is_answered_twice(trial: Trial) -> None:
    """Allow a call twice in one write, and reject it behind that."""
    client, session_id = await trial.shared_session(permission="never")
    deed = _Deed(trial.folder, "twice")
    turn, asked = await _asked(trial, client, session_id, deed)
    client.wire.unanswered.pop(asked["id"], None)
    answers = [
        {"jsonrpc": "2.0", "id": asked["id"], "result": _chosen(asked, kind)}
        for kind in ("allow", "allow", "reject")
    ]
    with trial.expect("PER-08") as it:
        client.wire.send_together(answers)
        reason = await answer_of(trial, client, turn)
        it.that(reason in NATURAL, f"the turn was answered with {reason}")
        it.that(deed.n_times <= 1, f"it was run {deed.n_times} times")
        await quiet(trial, client.wire)
        it.that(len(client.wire.responses(turn)) == 1, "the prompt was answered twice")


async def _asked(trial: Trial, client: Client, session_id: str, deed: _Deed) -> tuple[int, Message]:
    """Have the agent ask about a deed; return the prompt's id and the question."""
    turn = client.prompt(session_id, trial.say("permission", command=deed.command))
    return turn, await question(trial, client.wire, session_id, turn)


async def _end(trial: Trial, client: Client, turn: int) -> str:
    """Wait for the end of a turn that is none of the scenario's business by itself."""
    try:
        return await answer_of(trial, client, turn)
    except WireError:
        return "nothing"


def _options(asked: Message) -> list[Message]:
    options = asked["params"].get("options")
    return [each for each in options if isinstance(each, dict)] if isinstance(options, list) else []


def _kinds(asked: Message) -> set[str]:
    return {str(option.get("kind")) for option in _options(asked)}


def _chosen(asked: Message, kind: str) -> Message:
    """Return the answer that chooses the first option whose kind begins so, once before always."""
    fitting = sorted(
        (str(option.get("kind")) != f"{kind}_once", index, option.get("optionId"))
        for index, option in enumerate(_options(asked))
        if str(option.get("kind")).startswith(kind)
    )
    if not fitting:
        return CANCELLED
    return {"outcome": {"outcome": "selected", "optionId": fitting[0][2]}}


def _see_the_options(trial: Trial, asked: Message) -> None:
    options = _options(asked)
    kinds, ids = _kinds(asked), [str(option.get("optionId")) for option in options]
    with trial.expect("PER-01") as it:
        it.that(options, "it offers no options")
        it.that(len(ids) == len(set(ids)), f"two options have one id: {', '.join(ids)}")
        for kind in ("allow", "reject"):
            shown = ", ".join(sorted(kinds))
            it.that(any(each.startswith(kind) for each in kinds), f"none can {kind}: {shown}")


def _see_that_it_failed(trial: Trial, client: Client, session_id: str, asked: Message) -> None:
    call = asked["params"].get("toolCall")
    call_id = call.get("toolCallId") if isinstance(call, dict) else None
    told = tool_calls(client.wire, session_id).get(str(call_id))
    if told is None:
        return trial.see("PER-12", "unseen", "the call was told in the question only")
    with trial.expect("PER-12") as it:
        status = told.get("status", "pending")
        it.that(status == "failed", f"the call that was rejected is {status}")
