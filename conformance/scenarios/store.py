"""What becomes of a session: shown again, continued, killed, deleted, and shared."""

from __future__ import annotations

from typing import Final

from conformance import processes
from conformance.client import Client
from conformance.scenarios import scenario
from conformance.steps import (
    ask,
    is_error,
    offers,
    prompted,
    results,
    serves,
    speaks,
    text_of,
    updates,
)
from conformance.trace import Message, WireError
from conformance.trial import Trial
from conformance.wire import Wire

MARKER: Final = "cormorant-2718"
N_PIECES: Final = 10
SPEAKERS: Final = {"user_message_chunk": "person", "agent_message_chunk": "agent"}

History = list[tuple[str, str]]
"""Who or which tool call, and what was shown; in order, with the pieces of a message joined."""


@scenario("STO-01", "STO-02", "STO-03", "STO-04", "STO-12", is_quick=True)
async def session_is_shown_again(trial: Trial) -> None:
    """Have a turn with a tool call and one without, then load the session."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    trial.needs(offers(wire, "session/load"), "to load sessions")
    live = await _two_turns(trial, wire, session_id)
    if offers(wire, "session/close"):
        await ask(trial, wire, "session/close", {"sessionId": session_id})
    start = len(wire.trace)
    response = await ask(trial, wire, "session/load", _named(trial, session_id))
    trial.brought_about(not is_error(response), f"load was answered with {response.get('error')}")
    replay = _history(wire, session_id, start, _place(wire, response))
    with trial.expect("STO-02") as it:
        await serves(trial, wire, "load")
        late = _history(wire, session_id, _place(wire, response))
        it.that(not late, f"behind the answer came {late[:1]}")
    _same_words(trial, live, replay)
    _same_calls(trial, live, replay)
    with trial.expect("STO-04") as it:
        difference = _difference(live, replay)
        it.that(not difference, difference)
    with trial.expect("STO-12"):
        await prompted(trial, wire, session_id, trial.say("hello"))


@scenario("STO-05", "STO-06", "STO-07", "STO-13", "STO-14", limit_s=60.0)
async def session_outlives_its_agents(trial: Trial) -> None:
    """Leave, load and prompt, kill, load and prompt, kill in the turn, and load once more."""
    client, session_id = await trial.session()
    trial.needs(offers(client.wire, "session/load"), "to load sessions")
    expected = await _two_turns(trial, client.wire, session_id)
    await trial.leave(client)
    client = await trial.client()
    if offers(client.wire, "session/list"):
        with trial.expect("STO-13") as it:
            it.that(await _is_listed(trial, client.wire, session_id), "it is not on the list")
    else:
        trial.see("STO-13", "skipped", "the agent does not offer a list of sessions")
    with trial.expect("STO-05") as it:
        difference = _difference(expected, await _loaded(trial, client.wire, session_id))
        it.that(not difference, difference)
    if trial.target.transport != "stdio":
        return
    expected += await _turn(trial, client.wire, session_id, trial.say("hello"))
    client = await _killed(trial, client)
    with trial.expect("STO-06") as it:
        difference = _difference(expected, await _loaded(trial, client.wire, session_id))
        it.that(not difference, difference)
    said = trial.say("long")
    client.wire.skip()  # the replay has pieces as well
    client.prompt(session_id, said)
    for _ in range(N_PIECES):  # an agent may write several at a time
        await speaks(trial, client.wire, session_id)
    client = await _killed(trial, client)
    with trial.expect("STO-07") as it:
        loaded = await _loaded(trial, client.wire, session_id)
        difference = _difference(expected, loaded[: len(expected)])
        it.that(not difference, difference)
    with trial.expect("STO-14") as it:
        broken_off = loaded[len(expected) :]
        it.that(broken_off[:1] == [("person", said)], "the prompt is missing")
        it.that(len(broken_off) > 1, "what was said in answer is missing")
    with trial.expect("STO-07") as it:
        reason = await prompted(trial, client.wire, session_id, trial.say("hello"))
        it.that(reason == "end_turn", f"the next prompt's stop reason was {reason}")


@scenario("STO-08", "STO-10", "STO-15", limit_s=40.0)
async def sessions_of_the_last_process(trial: Trial) -> None:
    """Have two sessions, delete one, leave, look for it with the next process, resume the other."""
    client, session_id = await trial.session()
    wire = client.wire
    can_resume, can_delete = offers(wire, "session/resume"), offers(wire, "session/delete")
    trial.needs(can_resume or can_delete, "to resume or delete sessions")
    deleted_id = await trial.open_session(client)
    for each in (session_id, deleted_id):
        await prompted(trial, wire, each, trial.say("hello"))
    if can_delete:
        if offers(wire, "session/close"):
            await ask(trial, wire, "session/close", {"sessionId": deleted_id})
        await results(trial, wire, "session/delete", {"sessionId": deleted_id})
    await trial.leave(client)
    wire = (await trial.client()).wire
    if can_resume:
        await _resumed(trial, wire, session_id)
    else:
        for rule in ("STO-08", "STO-15"):
            trial.see(rule, "skipped", "the agent does not offer to resume sessions")
    if not can_delete:
        trial.see("STO-10", "skipped", "the agent does not offer to delete sessions")
        return
    with trial.expect("STO-10") as it:
        if offers(wire, "session/list"):
            it.that(not await _is_listed(trial, wire, deleted_id), "it is listed again")
        for method in ("session/load", "session/resume"):
            if offers(wire, method):
                response = await ask(trial, wire, method, _named(trial, deleted_id))
                it.that(is_error(response), f"{method} brought it back")


@scenario("STO-09")
async def session_that_never_was(trial: Trial) -> None:
    """Load and resume sessions that do not exist."""
    wire = (await trial.shared_client()).wire
    methods = [each for each in ("session/load", "session/resume") if offers(wire, each)]
    trial.needs(methods, "to load or resume sessions")
    with trial.expect("STO-09") as it:
        for method in methods:
            for name in ("never-was", "../../etc/passwd", ""):
                response = await ask(trial, wire, method, _named(trial, name))
                it.that(is_error(response), f"{method} of {name!r} succeeded")


@scenario("STO-11", limit_s=40.0)
async def two_agents_know_a_session(trial: Trial) -> None:
    """Load a session with a second process while the first one lives, and prompt in both."""
    client, session_id = await trial.session()
    trial.needs(offers(client.wire, "session/load"), "to load sessions")
    kept = await _two_turns(trial, client.wire, session_id)
    second = (await trial.client()).wire
    with trial.expect("STO-11") as it:
        answered = await ask(trial, second, "session/load", _named(trial, session_id))
        for wire in (second, client.wire) if not is_error(answered) else (client.wire,):
            params = {"sessionId": session_id, "prompt": _text(trial.say("hello"))}
            await ask(trial, wire, "session/prompt", params)
        await trial.leave(client)
        third = (await trial.client()).wire
        difference = _difference(kept, (await _loaded(trial, third, session_id))[: len(kept)])
        it.that(not difference, difference)


async def _resumed(trial: Trial, wire: Wire, session_id: str) -> None:
    response = await ask(trial, wire, "session/resume", _named(trial, session_id))
    refused = f"it was refused: {response.get('error')}"
    if is_error(response):
        for rule in ("STO-08", "STO-15"):
            trial.see(rule, "unseen", refused)
        return
    with trial.expect("STO-08") as it:
        shown = _history(wire, session_id, 0, _place(wire, response))
        it.that(not shown, f"before the answer came {shown[:1]}")
    with trial.expect("STO-15"):
        await prompted(trial, wire, session_id, trial.say("hello"))


async def _two_turns(trial: Trial, wire: Wire, session_id: str) -> History:
    """Have a turn that reads a file and one that does not; return what was shown."""
    (trial.folder / "notes.txt").write_text(f"{MARKER}\n", encoding="utf-8")
    shown = await _turn(trial, wire, session_id, trial.say("read", path="notes.txt"))
    return shown + await _turn(trial, wire, session_id, trial.say("hello"))


async def _turn(trial: Trial, wire: Wire, session_id: str, said: str) -> History:
    start = len(wire.trace)
    await prompted(trial, wire, session_id, said)
    shown = _history(wire, session_id, start)
    return shown if shown[:1] == [("person", said)] else [("person", said), *shown]


async def _loaded(trial: Trial, wire: Wire, session_id: str) -> History:
    start = len(wire.trace)
    response = await ask(trial, wire, "session/load", _named(trial, session_id))
    if is_error(response):
        raise WireError(f"load was answered with {response['error']}")
    return _history(wire, session_id, start, _place(wire, response))


async def _killed(trial: Trial, client: Client) -> Client:
    """Kill an agent with all that belongs to it, and start the next."""
    wire = client.wire
    family = wire.descendants()
    wire.kill()
    processes.kill(family)
    await wire.exited(trial.target.timeout_s)
    return await trial.client()


async def _is_listed(trial: Trial, wire: Wire, session_id: str) -> bool:
    listed = await results(trial, wire, "session/list", {"cwd": str(trial.folder)})
    sessions = listed.get("sessions")
    return isinstance(sessions, list) and any(
        isinstance(each, dict) and each.get("sessionId") == session_id for each in sessions
    )


def _same_words(trial: Trial, live: History, replay: History) -> None:
    with trial.expect("STO-01") as it:
        for who in ("person", "agent"):
            was = [text for speaker, text in live if speaker == who]
            shown = "\n".join(text for speaker, text in replay if speaker == who)
            missing = [text for text in was if text.strip() not in shown]
            it.that(not missing, f"missing of the {who}: {missing[:1]!r:.100}")


def _same_calls(trial: Trial, live: History, replay: History) -> None:
    with trial.expect("STO-03") as it:
        was = [who for who, _ in live if who not in ("person", "agent")]
        trial.brought_about(was, "there was no tool call")
        shown = [who for who, _ in replay]
        missing = [each for each in was if each not in shown]
        it.that(not missing, f"missing: {missing}")


def _difference(live: History, replay: History) -> str:
    """Say what is not as it was, or nothing."""
    for index, was in enumerate(live):
        if index >= len(replay):
            return f"missing: {was[0]}: {was[1]!r:.60}"
        if replay[index] != was:
            who, text = replay[index]
            return f"{was[0]}: {was[1]!r:.50} came back as {who}: {text!r:.50}"
    if len(replay) > len(live):
        return f"nobody said before: {replay[len(live)][1]!r:.60}"
    return ""


def _history(wire: Wire, session_id: str, start: int, end: int | None = None) -> History:
    """Return what was shown between two places of the trace."""
    shown: History = []
    calls: dict[str, int] = {}
    for update in updates(wire, session_id, start, end):
        kind = update.get("sessionUpdate")
        if speaker := SPEAKERS.get(str(kind)):
            if shown and shown[-1][0] == speaker:
                shown[-1] = speaker, shown[-1][1] + text_of(update)
            else:
                shown.append((speaker, text_of(update)))
        elif kind in ("tool_call", "tool_call_update"):
            call_id = f"call {update.get('toolCallId')}"
            if call_id not in calls:
                calls[call_id] = len(shown)
                shown.append((call_id, ""))
            if "content" in update:  # what comes later replaces what was there
                shown[calls[call_id]] = call_id, text_of(update)
    return shown


def _place(wire: Wire, response: Message) -> int:
    """Return the place of a response in the trace."""
    return next(at for at, entry in enumerate(wire.trace) if entry.message is response)


def _named(trial: Trial, session_id: str) -> Message:
    return {"sessionId": session_id, "cwd": str(trial.folder), "mcpServers": []}


def _text(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]
