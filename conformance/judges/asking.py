"""What the agent asks of the client: only what was offered, and in good order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from conformance.conversation import Call, Conversation
from conformance.judges import Finding, judge
from conformance.trace import object_of

FILES: Final = {
    "fs/read_text_file": "readTextFile",
    "fs/write_text_file": "writeTextFile",
}
OPENING: Final = ("session/new", "session/load", "session/resume", "session/fork")


@judge("ASK-01", "ASK-02", "ASK-03")
def only_what_was_offered_is_asked_for(conversation: Conversation) -> Iterator[Finding]:
    """Files, terminals and forms are asked of clients that have them."""
    offered = conversation.client_capabilities
    files = object_of(offered.get("fs"))
    elicitation = object_of(offered.get("elicitation"))
    for call in conversation.calls:
        if not call.is_agents:
            continue
        if call.method in FILES:
            offer = files.get(FILES[call.method])
            if _is_plain(offer):
                yield Finding("ASK-01", call.at, "" if offer else f"{call.method} uninvited")
        elif call.method.startswith("terminal/"):
            offer = offered.get("terminal")
            if _is_plain(offer):
                yield Finding("ASK-02", call.at, "" if offer else f"{call.method} uninvited")
        elif call.method == "elicitation/create":
            mode = call.params.get("mode")
            is_offered = isinstance(mode, str) and elicitation.get(mode) is not None
            yield Finding("ASK-03", call.at, "" if is_offered else f"{mode} uninvited")
    if conversation.initialized and any(conversation.asked("session/prompt")):
        end = len(conversation.entries) - 1
        if files.get("readTextFile") is not True:
            yield Finding("ASK-01", end)
        if offered.get("terminal") is not True:
            yield Finding("ASK-02", end)
        if not elicitation:
            yield Finding("ASK-03", end)


def _is_plain(offer: object) -> bool:
    """Say whether it is clear what is offered; other scenarios are about what is not."""
    return offer is None or isinstance(offer, bool)


@judge("ASK-04")
def boolean_options_are_asked_for(conversation: Conversation) -> Iterator[Finding]:
    """Options that are switches are shown to clients that can draw them."""
    session = object_of(conversation.client_capabilities.get("session"))
    if object_of(session.get("configOptions")).get("boolean") is not None:
        return
    for call in conversation.calls:
        if call.method in OPENING and call.result is not None and call.end is not None:
            yield from _judge_options(call.end, call.result.get("configOptions"))
    for update in conversation.updates:
        if update.kind == "config_option_update":
            yield from _judge_options(update.at, update.body.get("configOptions"))


def _judge_options(at: int, options: object) -> Iterator[Finding]:
    for option in options if isinstance(options, list) else []:
        is_boolean = object_of(option).get("type") == "boolean"
        wrong = f"{object_of(option).get('id')!r} is a boolean option" if is_boolean else ""
        yield Finding("ASK-04", at, wrong)


@judge("ASK-05")
def terminal_logins_are_asked_for(conversation: Conversation) -> Iterator[Finding]:
    """A login in a terminal is offered to clients that can run one."""
    call = conversation.initialized
    if call is None or call.end is None or call.result is None:
        return
    if object_of(conversation.client_capabilities.get("auth")).get("terminal") is True:
        return
    methods = call.result.get("authMethods")
    for method in methods if isinstance(methods, list) else []:
        is_terminal = object_of(method).get("type") == "terminal"
        yield Finding("ASK-05", call.end, f"{object_of(method).get('id')!r}" if is_terminal else "")
    if not methods:
        yield Finding("ASK-05", call.end)


@judge("ASK-06", "ASK-07", "ASK-08")
def permission_is_asked_for_properly(conversation: Conversation) -> Iterator[Finding]:
    """A question has options to choose from, and is about a call in a turn that runs."""
    turns = list(conversation.asked("session/prompt"))
    for call in conversation.asked("session/request_permission", of_agent=False):
        options = call.params.get("options")
        ids = (
            [object_of(each).get("optionId") for each in options]
            if isinstance(options, list)
            else []
        )
        is_sound = bool(ids) and len({repr(each) for each in ids}) == len(ids)
        yield Finding("ASK-06", call.at, "" if is_sound else f"the options are {ids}")
        runs = any(
            turn.session_id == call.session_id and turn.at < call.at < _end(turn) for turn in turns
        )
        yield Finding("ASK-07", call.at, "" if runs else "no turn of that session runs")
        call_id = object_of(call.params.get("toolCall")).get("toolCallId")
        is_told = any(
            update.kind == "tool_call"
            and update.session_id == call.session_id
            and update.body.get("toolCallId") == call_id
            for update in conversation.updates
        )
        yield Finding("ASK-08", call.at, "" if is_told else f"{call_id!r} is no tool call")


class _Terminal(Struct):
    call: Call
    released_at: int | None = None


@judge("TER-01", "TER-02", "TER-03")
def terminals_are_released(conversation: Conversation) -> Iterator[Finding]:
    """Each terminal is released before its turn is over, and not used afterwards."""
    terminals: dict[str, _Terminal] = {}
    for call in conversation.calls:
        if not call.is_agents or not call.method.startswith("terminal/"):
            continue
        if call.method == "terminal/create":
            if call.result is not None and isinstance(call.result.get("terminalId"), str):
                terminals[repr(call.result.get("terminalId"))] = _Terminal(call)
            continue
        terminal = terminals.get(repr(call.params.get("terminalId")))
        if terminal is None:
            continue
        is_gone = terminal.released_at is not None
        yield Finding("TER-02", call.at, f"{call.method} after its release" if is_gone else "")
        if call.method == "terminal/release":
            terminal.released_at = call.at
    for terminal in terminals.values():
        for turn in conversation.asked("session/prompt"):
            ends = turn.end
            if ends is None or turn.session_id != terminal.call.session_id:
                continue
            if turn.at < terminal.call.at and _end(terminal.call) < ends:  # else it came too late
                is_released = terminal.released_at is not None and terminal.released_at < ends
                yield Finding("TER-01", ends, "" if is_released else _unreleased(terminal))
    yield from _judge_embedded(conversation, terminals)


def _judge_embedded(
    conversation: Conversation, terminals: dict[str, _Terminal]
) -> Iterator[Finding]:
    replays = [(call.at, _end(call)) for call in conversation.asked("session/load")]
    shown: set[str] = set()
    for update in conversation.updates:
        content = update.body.get("content")
        for each in content if isinstance(content, list) else []:
            terminal_id = repr(object_of(each).get("terminalId"))
            if object_of(each).get("type") != "terminal" or terminal_id in shown:
                continue
            if any(first < update.at < last for first, last in replays):
                continue
            shown.add(terminal_id)
            terminal = terminals.get(terminal_id)
            if terminal is None:
                yield Finding("TER-03", update.at, f"there is no terminal {terminal_id}")
            else:
                is_gone = terminal.released_at is not None and terminal.released_at < update.at
                yield Finding("TER-03", update.at, "it was released before" if is_gone else "")


def _unreleased(terminal: _Terminal) -> str:
    return f"{(terminal.call.result or {}).get('terminalId')!r} is not released"


def _end(call: Call) -> float:
    return float("inf") if call.end is None else call.end
