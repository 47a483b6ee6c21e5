"""What was said, put in order: requests with their answers, updates, turns.

Made from the entries of a trace, whoever recorded it. *sent* is what the client said, *received*
what the agent said. Nothing here judges, and nothing here trusts what it reads: parts of the wrong
type are as if they were not there, since the schema's judge says so already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from conformance.trace import Entry, Message, object_of

__all__ = ["Call", "Conversation", "Update"]


class Call(Struct, kw_only=True):
    """A request and its answers."""

    at: int
    """The index of the request's entry."""
    is_agents: bool
    """Whether the agent asked the client, rather than the client the agent."""
    id: object
    method: str
    params: Message
    """Empty if they were no object."""
    answers: list[int]
    """The indices of the entries that answered it; at most one in a sound conversation."""
    response: Message | None = None
    """The first answer."""

    @property
    def result(self) -> Message | None:
        """The answer's result if it is an object."""
        result = None if self.response is None else self.response.get("result")
        return result if isinstance(result, dict) else None

    @property
    def error(self) -> Message | None:
        """The answer's error if it is an object."""
        error = None if self.response is None else self.response.get("error")
        return error if isinstance(error, dict) else None

    @property
    def session_id(self) -> str | None:
        """The session it names."""
        return _text(self.params.get("sessionId"))

    @property
    def end(self) -> int | None:
        """The index of the first answer's entry."""
        return self.answers[0] if self.answers else None


class Update(Struct, kw_only=True):
    """One ``session/update``."""

    at: int
    session_id: str
    kind: str
    body: Message


class Conversation:
    """All entries of one connection, oldest first.

    Args:
        entries: The trace.
        has_died: Whether the agent ended, or the connection, without the client's doing.

    Attributes:
        entries: The trace.
        calls: Requests of both sides, in order.
        notifications: Index and message of those of both sides that want no answer.
        strays: Index and message of answers to no request that was open or ever made.
        updates: The agent's ``session/update`` notifications, in order.
    """

    def __init__(self, entries: Sequence[Entry], *, has_died: bool = False) -> None:
        self.entries: Final = entries
        self._has_died = has_died
        self.calls: Final[list[Call]] = []
        self.notifications: Final[list[tuple[int, Message]]] = []
        self.strays: Final[list[tuple[int, Message]]] = []
        self.updates: Final[list[Update]] = []
        self._calls: dict[tuple[bool, str, object], list[Call]] = defaultdict(list)
        for at, entry in enumerate(entries):
            if entry.message is not None:
                self._read(at, entry.direction == "received", entry.message)

    def asked(self, method: str, *, of_agent: bool = True) -> Iterator[Call]:
        """Yield the requests for `method`, of the client by default those to the agent."""
        return (c for c in self.calls if c.method == method and c.is_agents != of_agent)

    def notified(self, method: str, *, by_agent: bool) -> Iterator[tuple[int, Message]]:
        """Yield index and params of the notifications of one side."""
        direction = "received" if by_agent else "sent"
        for at, message in self.notifications:
            if message["method"] == method and self.entries[at].direction == direction:
                params = message.get("params")
                yield at, params if isinstance(params, dict) else {}

    def messages(self, *, of_agent: bool = True) -> Iterator[tuple[int, Message]]:
        """Yield index and message of all that one side said."""
        direction = "received" if of_agent else "sent"
        for at, entry in enumerate(self.entries):
            if entry.direction == direction and entry.message is not None:
                yield at, entry.message

    def updates_of(self, call: Call) -> Iterator[Update]:
        """Yield the updates of a call's session between the call and its first answer."""
        end = len(self.entries) if call.end is None else call.end
        for update in self.updates:
            if call.at < update.at < end and update.session_id == call.session_id:
                yield update

    @property
    def died_of_nothing(self) -> bool:
        """Whether the agent ended by itself though nothing was sent to it that is no message."""
        return self._has_died and all(
            entry.message is not None or entry.is_part
            for entry in self.entries
            if entry.direction == "sent"
        )

    @property
    def initialized(self) -> Call | None:
        """The first ``initialize`` that succeeded."""
        return next((c for c in self.asked("initialize") if c.result is not None), None)

    @property
    def client_capabilities(self) -> Message:
        """What the client said it can do, or nothing."""
        call = self.initialized
        return object_of(call.params.get("clientCapabilities")) if call else {}

    @property
    def agent_capabilities(self) -> Message:
        """What the agent said it can do, or nothing."""
        call = self.initialized
        return object_of(call.result.get("agentCapabilities")) if call and call.result else {}

    def _read(self, at: int, is_agents: bool, message: Message) -> None:
        method = message.get("method")
        if not isinstance(method, str):
            return self._answer(at, is_agents, message)
        params = object_of(message.get("params"))
        if "id" in message:
            call = Call(
                at=at,
                is_agents=is_agents,
                id=message["id"],
                method=method,
                params=params,
                answers=[],
            )
            self.calls.append(call)
            self._calls[_key(is_agents, call.id)].append(call)
            return None
        self.notifications.append((at, message))
        session_id, update = _text(params.get("sessionId")), object_of(params.get("update"))
        kind = _text(update.get("sessionUpdate"))
        if is_agents and method == "session/update" and session_id is not None and kind is not None:
            self.updates.append(Update(at=at, session_id=session_id, kind=kind, body=update))
        return None

    def _answer(self, at: int, is_agents: bool, message: Message) -> None:
        if "result" not in message and "error" not in message:
            return
        calls = self._calls[_key(not is_agents, message.get("id"))]
        call = next((each for each in calls if not each.answers), calls[-1] if calls else None)
        if call is None:
            self.strays.append((at, message))
            return
        if not call.answers:
            call.response = message
        call.answers.append(at)


def _key(is_agents: bool, value: object) -> tuple[bool, str, object]:
    """Tell 1 from true and from "1"; what cannot be hashed is told by its text."""
    plain = value if isinstance(value, str | int | float | bool | None) else repr(value)
    return is_agents, type(value).__name__, plain


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
