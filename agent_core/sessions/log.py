"""A session: its append-only log, and everything that follows from it.

The rules, in order of importance:
1. An event is in the log only as what will be read back: `append` encodes, decodes and compares.
2. Commit, then notify. Validators may veto before the commit; observers hear of it afterwards and
   cannot undo it: their errors are logged and go no further.
3. `seq` is contiguous from 0. An append from inside an append is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio.lowlevel
import msgspec

from agent_core.errors import SessionNotFound
from agent_core.events import (
    CompactionEnd,
    Event,
    EventData,
    PromptBlocked,
    SteeringMessage,
    StepEnd,
    ToolCall,
    ToolResult,
    TurnEnd,
    UserMessage,
    decode,
    encode,
)
from agent_core.logs import get_logger
from agent_core.models.adapter import Message
from agent_core.sessions.projection import Projection
from agent_core.sessions.repair import closers_for
from agent_core.sessions.store import SessionHeader, SessionStore
from agent_core.text import replace_surrogates

__all__ = ["Session"]

log = get_logger(__name__)

_EVENTS_PER_CHECKPOINT: Final = 1000
# What was promised is kept and what was begun is closed; nobody may veto that.
_OWED = (ToolCall, ToolResult, CompactionEnd, StepEnd, TurnEnd)


class Session:
    """One conversation. Build a new one with `create`, an old one with `load`.

    Not thread-safe. Everything but `flush` is synchronous.

    Attributes:
        id: Unguessable, stable for ever.
        cwd: The absolute directory the conversation is about.
        depth: 0, or how deep the subagent is whose session this is.
        owner: Whose it is, where several share a store.
        state: What the events so far lead to.
    """

    def __init__(self, header: SessionHeader, store: SessionStore, events: Sequence[Event] = ()):
        self.id = header.id
        self.cwd = header.cwd
        self.depth = header.depth
        self.owner = header.owner
        self.state = Projection()
        self._store = store
        self._events: list[Event] = []
        self._validators: dict[object, Callable[[Event], None]] = {}
        self._observers: dict[object, Callable[[Event], None]] = {}
        self._is_appending = False
        self._restore(events)

    @classmethod
    async def create(cls, header: SessionHeader, store: SessionStore) -> Session:
        """Make a new session and keep it in `store`.

        Raises:
            StoreError: It could not be kept.
        """
        await store.create(header)
        return cls(header, store)

    @classmethod
    async def load(
        cls, session_id: str, store: SessionStore, *, owner: str | None = None
    ) -> Session:
        """Read a session and close what a crash left open.

        Args:
            session_id: Which.
            store: Where it is kept.
            owner: Whose it has to be; `None` for anybody's.

        Raises:
            SessionNotFound: There is none, or it is another's.
            SessionCorrupt: Its log cannot be read.
            StoreError: The repair could not be written.
        """
        header, events = await store.load(session_id)
        if owner not in (None, header.owner):
            raise SessionNotFound(session_id)
        session = cls(header, store)
        for start in range(0, len(events), _EVENTS_PER_CHECKPOINT):
            session._restore(events[start : start + _EVENTS_PER_CHECKPOINT])
            await anyio.lowlevel.checkpoint()  # other sessions go on
        if closers := closers_for(events):
            for data in closers:
                session.append(data)
            await session.flush()
        return session

    def _restore(self, events: Sequence[Event]) -> None:
        for event in events:
            self._events.append(event)
            self.state.apply(event)

    @property
    def events(self) -> Sequence[Event]:
        """The log. Do not change it."""
        return self._events

    @property
    def messages(self) -> tuple[Message, ...]:
        """The history as the next model request will tell it."""
        return tuple(self.state.messages)

    def append(self, data: EventData) -> Event:
        """Commit one event and tell the observers.

        Text that is not valid Unicode (a lone surrogate) is replaced by U+FFFD.

        Returns:
            The event as it now stands in the log, detached from `data`.

        Raises:
            TypeError: `data` is not an event, or not lossless JSON.
            RuntimeError: Called by a validator or observer of another append.
        """
        if self._is_appending:
            raise RuntimeError("an append from inside an append would reorder the log")
        body, detached = _lossless(data)
        event = Event(len(self._events), time.time_ns() // 1_000_000, detached)
        self._is_appending = True
        try:
            observers = tuple(self._observers.values())
            if not isinstance(detached, _OWED):
                for validate in tuple(self._validators.values()):
                    validate(event)
            self._events.append(event)
            self.state.apply(event)
            self._store.append(self.id, event.seq, event.time_ms, body)
            if isinstance(detached, UserMessage | PromptBlocked | SteeringMessage):
                self._store.touch(self.id, event.time_ms, self.state.title)
            for observe in observers:
                try:
                    observe(event)
                except (Exception, asyncio.CancelledError):
                    log.exception("session_observer_failed", session_id=self.id, seq=event.seq)
        finally:
            self._is_appending = False
        return event

    def observe(self, observer: Callable[[Event], None]) -> Callable[[], None]:
        """Call `observer` with every event committed from now on; return a function to stop."""
        return _register(self._observers, observer)

    def validate(self, validator: Callable[[Event], None]) -> Callable[[], None]:
        """Let `validator` veto events by raising before they are committed.

        What the log owes (a call of a logged message, its result, the end of a step or turn)
        cannot be vetoed; whether a call may run is a question for ``tools/pre-execute``.
        """
        return _register(self._validators, validator)

    async def flush(self) -> None:
        """Wait until the log so far survives a power cut.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            StoreError: It could not be written; it is kept and tried again with the next flush.
        """
        await self._store.flush(self.id)

    async def check(self) -> None:
        """Look whether the log is still written.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            StoreError: Another process went on with the session, or deleted it.
        """
        await self._store.check(self.id)


def _register(table: dict[object, Callable[[Event], None]], entry: Any) -> Callable[[], None]:
    key = object()
    table[key] = entry

    def remove() -> None:
        table.pop(key, None)

    return remove


def _lossless(data: EventData) -> tuple[bytes, EventData]:
    try:
        body = encode(data)
    except UnicodeEncodeError:
        clean = replace_surrogates(msgspec.to_builtins(data))
        body = msgspec.json.encode(clean)
        return body, decode(body)
    try:
        detached = decode(body)
    except msgspec.ValidationError as exc:
        raise TypeError(f"not an event of the session log: {exc}") from None
    if detached != data:
        raise TypeError(f"not lossless JSON: {type(data).__name__}")
    return body, detached
