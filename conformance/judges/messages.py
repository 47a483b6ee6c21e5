"""Every message by itself: lines, JSON-RPC, and the published schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Final

from conformance.conversation import Call, Conversation
from conformance.judges import Finding, judge
from conformance.schema import Schema, Violation
from conformance.trace import Message

LINE_BYTES: Final = 10_000_000  # langgraph-acp ends the connection above it
TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\)|^\s+at .+:\d+:\d+\)?$", re.M)
PARSE_ERRORS: Final = (-32700, -32600)
EXACT_LIMIT: Final = 2**53  # what a number of JavaScript holds exactly


@judge("MSG-01")
def lines_are_messages(conversation: Conversation) -> Iterator[Finding]:
    """Whatever comes is one JSON object a line, in UTF-8."""
    for at, entry in enumerate(conversation.entries):
        if entry.direction == "received" and entry.raw.strip():
            is_object = entry.message is not None or _is_object(entry.raw)
            wrong = "" if is_object else f"no message: {_start(entry.raw)}"
            yield Finding("MSG-01", at, wrong)


def _is_object(raw: bytes) -> bool:
    """Say whether a line that was not understood is a JSON object nevertheless.

    It may hold escaped halves of characters: the grammar has them, and MSG-16 is about them.
    """
    try:
        return isinstance(json.loads(raw.decode(), parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


@judge("MSG-02", "MSG-03", "MSG-04", "MSG-05", "MSG-06")
def messages_are_json_rpc(conversation: Conversation) -> Iterator[Finding]:
    """Each is a request, a notification or a response of JSON-RPC 2.0."""
    for at, message in conversation.messages():
        version = message.get("jsonrpc")
        yield Finding("MSG-02", at, "" if version == "2.0" else f"jsonrpc is {version!r}")
        if isinstance(message.get("method"), str):
            continue
        parts = [key for key in ("result", "error") if key in message]
        wrong = "" if len(parts) == 1 else f"a response with {' and '.join(parts) or 'neither'}"
        yield Finding("MSG-03", at, wrong)
        if "error" in message:
            yield from _judge_error(at, message["error"])


def _judge_error(at: int, error: object) -> Iterator[Finding]:
    body = error if isinstance(error, dict) else {}
    code, text = body.get("code"), body.get("message")
    is_sound = type(code) is int and isinstance(text, str)
    yield Finding("MSG-04", at, "" if is_sound else f"an error of the form {error}")
    if isinstance(text, str):
        is_line = bool(text.strip()) and "\n" not in text.strip()
        yield Finding("MSG-05", at, "" if is_line else f"an error's message is {text!r}")
    has_traceback = TRACEBACK.search(f"{text}\n{body.get('data')}") is not None
    yield Finding("MSG-06", at, "an error shows a traceback" if has_traceback else "")


@judge("MSG-07", "MSG-08", "MSG-17")
def requests_are_answered_once(conversation: Conversation) -> Iterator[Finding]:
    """Each request has one answer, and nothing else has any."""
    # An agent that never got as far as to answer initialize did not start: that is no matter of
    # the protocol, and other rules tell of it.
    owes = conversation.died_of_nothing and conversation.initialized is not None
    for call in conversation.calls:
        n_answers = len(call.answers)
        if call.is_agents or (n_answers == 0 and not owes):
            continue
        wrong = "" if n_answers == 1 else f"{call.method} {call.id!r} has {n_answers} answers"
        if n_answers == 0:
            wrong = f"the agent ended and did not answer {call.method}"
        yield Finding("MSG-07", call.answers[-1] if call.answers else call.at, wrong)
    if conversation.died_of_nothing:
        yield Finding("MSG-17", len(conversation.entries) - 1, "the agent ended by itself")
    elif conversation.initialized:
        yield Finding("MSG-17", 0)
    for at, message in conversation.strays:
        if conversation.entries[at].direction == "received":
            is_meant = _is_complaint(message) or _may_answer_unread(conversation, at, message)
            yield Finding("MSG-08", at, "" if is_meant else _stray(message))
    if any(conversation.notified("session/cancel", by_agent=False)) and not conversation.strays:
        yield Finding("MSG-08", len(conversation.entries) - 1)


def _is_complaint(message: Message) -> bool:
    """Say whether it is an answer to what was no request at all."""
    error = message.get("error")
    return message.get("id") is None and isinstance(error, dict)


def _may_answer_unread(conversation: Conversation, at: int, message: Message) -> bool:
    """Say whether it may answer a line that is no message to us, but was one to the agent.

    Ids beyond 2^53 do not pass every JSON reader unchanged; a rule of robustness is about those.
    """
    message_id = message.get("id")
    if isinstance(message_id, int | float) and abs(message_id) >= EXACT_LIMIT:
        return True
    shown = f'"{message_id}"' if isinstance(message_id, str) else str(message_id)
    return any(
        entry.direction == "sent" and _is_unread(entry.message) and shown.encode() in entry.raw
        for entry in conversation.entries[:at]
    )


def _is_unread(message: Message | None) -> bool:
    return message is None or not (
        isinstance(message.get("method"), str) or "result" in message or "error" in message
    )


def _stray(message: Message) -> str:
    return f"an answer to {message.get('id')!r}, which nobody asked"


@judge("MSG-09")
def ids_of_the_agent_are_unique(conversation: Conversation) -> Iterator[Finding]:
    """No two requests of the agent bear one id while both wait."""
    waiting: dict[str, Call] = {}
    for call in conversation.calls:
        if not call.is_agents:
            continue
        key = f"{type(call.id).__name__} {call.id!r}"
        other = waiting.get(key)
        is_twice = other is not None and (other.end is None or other.end > call.at)
        yield Finding(
            "MSG-09", call.at, f"two requests have the id {call.id!r}" if is_twice else ""
        )
        waiting[key] = call


@judge("MSG-10", "MSG-11", "MSG-12", "MSG-13")
def messages_agree_with_the_schema(conversation: Conversation) -> Iterator[Finding]:
    """What the schema knows agrees with it; what it does not know is not used."""
    checker = _checker()
    for call in conversation.calls:
        if call.is_agents:
            yield from _judge_call(call.at, call.method, call.params)
        elif call.end is not None and call.response is not None:
            name = checker.result_name(call.method)
            result = call.response.get("result")
            if name is not None and result is not None:
                yield from checker.findings(call.end, name, result)
    for at, message in conversation.notifications:
        if conversation.entries[at].direction == "received":
            yield from _judge_call(at, message["method"], message.get("params"))


def _judge_call(at: int, method: str, params: object) -> Iterator[Finding]:
    checker = _checker()
    name = checker.params_name(method)
    if name is not None:
        yield Finding("MSG-13", at)
        yield from checker.findings(at, name, {} if params is None else params)
    elif not method.startswith(("_", "$/")):
        yield Finding("MSG-13", at, f"the protocol has no {method}")
    else:
        yield Finding("MSG-13", at)


@judge("MSG-14")
def results_are_objects(conversation: Conversation) -> Iterator[Finding]:
    """A result that has nothing to say is an empty object."""
    known = _checker().schema.methods("agent")
    for call in conversation.calls:
        if call.is_agents or call.response is None or call.end is None:
            continue
        if call.method in known and "result" in call.response:
            is_null = call.response["result"] is None
            wrong = f"the result of {call.method} is null" if is_null else ""
            yield Finding("MSG-14", call.end, wrong)


@judge("MSG-15", "MSG-16")
def lines_can_be_read_by_known_clients(conversation: Conversation) -> Iterator[Finding]:
    """Lines are of a length, and of characters, that clients survive."""
    for at, entry in enumerate(conversation.entries):
        if entry.direction != "received":
            continue
        n_bytes = len(entry.raw)
        yield Finding("MSG-15", at, f"{n_bytes} bytes" if n_bytes > LINE_BYTES else "")
        half = _LONE_SURROGATE.search(entry.raw)
        yield Finding("MSG-16", at, f"half a character: {half[0].decode()}" if half else "")


_LONE_SURROGATE: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F]))"
)


class _Checker:
    """Holds values against the schema; what looks like one it has seen is not looked at again."""

    def __init__(self) -> None:
        self.schema = Schema(is_unstable=True)
        self._seen: dict[tuple[str, object], list[Violation | str]] = {}

    def result_name(self, method: str) -> str | None:
        """Return the definition of the result of a method of the agent's."""
        if method not in self.schema.methods("agent"):
            return None
        is_notification = self.schema.is_notification("agent", method)
        return None if is_notification else self.schema.result_name("agent", method)

    def params_name(self, method: str) -> str | None:
        """Return the definition of the params of a method of the client's."""
        return self.schema.params_name("client", method)

    def findings(self, at: int, name: str, value: object) -> Iterator[Finding]:
        """Find about ``MSG-10`` to ``MSG-12``."""
        key = name, self._shape(value)
        problems = self._seen.get(key)
        if problems is None:
            problems = [*self.schema.violations(name, value), *self.schema.strangers(name, value)]
            self._seen[key] = problems
        for rule in ("MSG-10", "MSG-11", "MSG-12"):
            wrong = next((f"{name} {each}" for each in problems if _rule_of(each) == rule), "")
            yield Finding(rule, at, wrong)

    def _shape(self, value: object) -> object:
        """Return the same for values that the schema cannot tell apart."""
        match value:
            case dict():
                return tuple((key, self._shape(each)) for key, each in value.items())
            case list():
                return tuple({self._shape(each): None for each in value})
            case str():
                return value if value in self.schema.words else "text"
            case bool() | None:
                return value
            case int():
                return min(value, 2)
        return type(value).__name__


def _rule_of(problem: Violation | str) -> str:
    if isinstance(problem, str):
        return "MSG-12"
    return "MSG-11" if problem.is_unknown_word else "MSG-10"


@cache
def _checker() -> _Checker:
    return _Checker()


def _start(raw: bytes) -> str:
    return repr(raw[:80])[1:]
