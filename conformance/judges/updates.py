"""Updates: whose they are, when they come, and what the client has to have asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final

from conformance.conversation import Call, Conversation
from conformance.judges import Finding, judge
from conformance.trace import object_of

WORK: Final = frozenset(
    {
        "agent_message_chunk",
        "agent_thought_chunk",
        "user_message_chunk",
        "tool_call",
        "tool_call_update",
        "plan",
    }
)
"""Kinds of updates that tell of a turn, or of one that is replayed."""

MANY_PIECES: Final = 8
"""So many pieces in a row are no longer messages of their own, each whole."""

ONLY_IF_ASKED_FOR: Final = {
    "plan_update": "plan",
    "plan_removed": "plan",
    "notice": "notices",
    "compaction_update": "compaction",
    "subagent_update": "subagents",
    "session_message": "subagents",
    "session_message_update": "subagents",
}
"""Kinds of updates by the client's capability that they need."""


@judge("UPD-01")
def updates_name_known_sessions(conversation: Conversation) -> Iterator[Finding]:
    """The session of an update is one that the client opened."""
    if conversation.client_capabilities.get("subagents") is not None:
        return  # sessions that the agent opens are shown as well
    known = {call.session_id for call in conversation.calls if not call.is_agents}
    known |= {(call.result or {}).get("sessionId") for call in conversation.calls}
    for update in conversation.updates:
        wrong = "" if update.session_id in known else f"nobody opened {update.session_id!r}"
        yield Finding("UPD-01", update.at, wrong)


@judge("UPD-09")
def costs_add_up(conversation: Conversation) -> Iterator[Finding]:
    """What a session has cost never gets less."""
    spent: dict[tuple[str, str], float] = {}
    for update in conversation.updates:
        cost = object_of(update.body.get("cost")) if update.kind == "usage_update" else {}
        amount = cost.get("amount")
        if isinstance(amount, int | float):
            key = update.session_id, str(cost.get("currency"))
            before, spent[key] = spent.get(key, amount), amount
            wrong = f"{amount} after {before}" if amount < before else ""
            yield Finding("UPD-09", update.at, wrong)


@judge("UPD-10")
def names_of_commands_are_bare(conversation: Conversation) -> Iterator[Finding]:
    """The client puts the slash before a command's name."""
    for update in conversation.updates:
        if update.kind == "available_commands_update":
            names = [each.get("name") for each in _list(update.body.get("availableCommands"))]
            slashed = [each for each in names if isinstance(each, str) and each.startswith("/")]
            yield Finding("UPD-10", update.at, f"the name {slashed[0]!r}" if slashed else "")


@judge("UPD-08")
def pieces_of_one_message_bear_one_id(conversation: Conversation) -> Iterator[Finding]:
    """A message that comes in many pieces has one id, or none."""
    runs: dict[str, list[object]] = {}  # the ids of the pieces in a row, by session
    for update in conversation.updates:
        if update.kind != "agent_message_chunk":
            runs.pop(update.session_id, None)
            continue
        run = runs.setdefault(update.session_id, [])
        message_id = update.body.get("messageId")
        if isinstance(message_id, str):
            run.append(message_id)
            if len(run) >= MANY_PIECES:
                n_ids = len(set(run))
                wrong = f"{n_ids} pieces in a row have {n_ids} ids" if n_ids == len(run) else ""
                yield Finding("UPD-08", update.at, wrong)
                run.clear()


@judge("UPD-07")
def sessions_are_named_before_they_are_told_of(conversation: Conversation) -> Iterator[Finding]:
    """No update of a new session comes before the answer with its id."""
    for call in conversation.asked("session/new"):
        session_id = (call.result or {}).get("sessionId")
        if call.end is None or not isinstance(session_id, str):
            continue
        told = (each for each in conversation.updates if each.session_id == session_id)
        early = next((each for each in told if call.at < each.at < call.end), None)
        wrong = "" if early is None else f"{early.kind} before the answer to session/new"
        yield Finding("UPD-07", call.end, wrong)


@judge("UPD-02", "UPD-03")
def turns_are_told_before_their_answer(conversation: Conversation) -> Iterator[Finding]:
    """Behind the answer to a prompt nothing more is told of the turn."""
    for call in conversation.asked("session/prompt"):
        if call.end is None or call.result is None:
            continue
        rule = "UPD-02" if call.result.get("stopReason") == "cancelled" else "UPD-03"
        late = next(_late(conversation, call), None)
        if late is None:
            yield Finding(rule, call.end)
        else:
            at, kind = late
            yield Finding(rule, at, f"{kind} after the answer to the prompt")


def _late(conversation: Conversation, turn: Call) -> Iterator[tuple[int, str]]:
    """Yield what is told of a turn's work when no turn and no replay of the session runs."""
    others = [
        call
        for call in conversation.calls
        if not call.is_agents
        and call.session_id == turn.session_id
        and call.method in ("session/prompt", "session/load")
    ]
    for update in conversation.updates:
        if update.session_id != turn.session_id or update.kind not in WORK:
            continue
        if turn.end is None or update.at < turn.end:
            continue
        if any(each.at < update.at and (each.end or update.at) >= update.at for each in others):
            return  # another has begun, and whose it is cannot be told from here on
        if any(turn.end < each.at < update.at for each in others):
            return
        yield update.at, update.kind


@judge("UPD-04")
def updates_are_asked_for(conversation: Conversation) -> Iterator[Finding]:
    """Updates that only some clients can read are sent to those."""
    offered = conversation.client_capabilities
    asked_for = {
        name
        for name in ONLY_IF_ASKED_FOR.values()
        if offered.get(name) is not None or _session(offered).get(name) is not None
    }
    for update in conversation.updates:
        needed = ONLY_IF_ASKED_FOR.get(update.kind)
        is_uninvited = needed is not None and needed not in asked_for
        wrong = f"{update.kind}, and the client has no {needed}" if is_uninvited else ""
        yield Finding("UPD-04", update.at, wrong)


@judge("UPD-05", "UPD-06")
def places_are_absolute(conversation: Conversation) -> Iterator[Finding]:
    """Paths of the agent are absolute, and its lines are counted from one."""
    for at, message in conversation.messages():
        for name, value in _places(message):
            if name == "line":
                wrong = "" if type(value) is int and value >= 1 else f"line {value!r}"
                yield Finding("UPD-06", at, wrong)
            else:
                wrong = "" if _is_absolute(value) else f"{name} is {value!r}"
                yield Finding("UPD-05", at, wrong)


def _places(message: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield names and values of the paths and lines that the protocol has in a message."""
    params = object_of(message.get("params"))
    method = message.get("method")
    if method in ("fs/read_text_file", "fs/write_text_file"):
        yield "path", params.get("path")
    elif method == "terminal/create" and params.get("cwd") is not None:
        yield "cwd", params["cwd"]
    if method == "fs/read_text_file" and params.get("line") is not None:
        yield "line", params["line"]
    tool_call = object_of(params.get("update")) or object_of(params.get("toolCall"))
    for location in _list(tool_call.get("locations")):
        yield "path", location.get("path")
        if location.get("line") is not None:
            yield "line", location["line"]
    for content in _list(tool_call.get("content")):
        if content.get("type") == "diff":
            yield "path", content.get("path")
    for session in _list(object_of(message.get("result")).get("sessions")):
        yield "cwd", session.get("cwd")


def _is_absolute(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()


def _session(capabilities: dict[str, Any]) -> dict[str, Any]:
    return object_of(capabilities.get("session"))


def _list(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list, or nothing."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
