"""Which message of a Streamable HTTP connection goes on which of its streams.

What is about a session goes on the session's stream, answers included, and everything else on the
connection's. Clients differ in how they open a session that is there already. Some open its stream,
or name it in a header, before they load it. Others open a stream when something on the connection's
stream first names its session; for them a session begins there, and moves to its own stream when
that is open, its loading is answered, and nothing is left on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import msgspec
from msgspec import Struct

from acp_server.message import Request, RequestId, Response
from acp_server.network.outbox import MessageQueue

__all__ = ["Stream", "Streams"]

OPENING: Final = frozenset({"session/load", "session/resume"})
SESSION_METHODS: Final = frozenset(
    {
        "session/prompt",
        "session/cancel",
        "session/close",
        "session/set_mode",
        "session/set_config_option",
    }
)
"""Methods about a session that is open; a client names it in a header, too."""


class _Params(Struct, rename="camel"):
    session_id: str | None = None
    request_id: RequestId = None


class _Envelope(Struct):
    id: RequestId = None
    method: str | None = None
    params: _Params | None = None


_Key = tuple[type, object]
_envelope: Final = msgspec.json.Decoder(_Envelope).decode


class Stream(MessageQueue):
    """One stream, which somebody may be reading."""

    is_open = False

    def closed(self) -> None:
        """Nobody reads it any more: nobody waits for that either."""
        self.is_open = False
        self._fall()


class Streams:
    """The outbox of one connection.

    Args:
        limit_bytes: How much may be unread on a stream.
        on_flood: Called when more is.

    Attributes:
        initialized: The answer to ``initialize``, which goes on no stream.
        is_initialized: Set when it is there, or there will be none.
    """

    def __init__(self, limit_bytes: int, on_flood: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes
        self._on_flood = on_flood
        self.initialized = b""
        self.is_initialized = anyio.Event()
        self.of_connection = Stream(limit_bytes, on_flood)
        self._of_sessions: dict[str, Stream] = {}
        self._answers: dict[_Key, str | None] = {}  # about which session they will be
        self._loading: dict[str, set[_Key]] = {}  # begun on the connection's stream
        self._questions: dict[_Key, str | None] = {}  # about which session they were

    def all(self) -> tuple[Stream, ...]:
        """Return all streams there are."""
        return (self.of_connection, *self._of_sessions.values())

    def of_session(self, session_id: str) -> Stream:
        """Return the stream of a session; makes it."""
        stream = self._of_sessions.get(session_id)
        if stream is None:
            stream = self._of_sessions[session_id] = Stream(self._limit_bytes, self._on_flood)
        return stream

    def knows(self, session_id: str) -> bool:
        """Return whether there is a stream for a session."""
        return session_id in self._of_sessions

    def forget(self, is_known: Callable[[str], bool]) -> None:
        """Forget the streams that nobody reads, of sessions that are not known any more."""
        for session_id, stream in tuple(self._of_sessions.items()):
            if stream.is_empty and not stream.is_open and not is_known(session_id):
                del self._of_sessions[session_id]

    # --- what came in ------------------------------------------------------------------------

    def expect(self, request: Request, session_id: str | None, *, is_announced: bool) -> None:
        """Note where the answer to a request has to go.

        Args:
            request: What came.
            session_id: The session it is about.
            is_announced: Whether a header said so.
        """
        key = _key(request.id)
        if request.method in OPENING and session_id is not None:
            if session_id in self._loading or not (is_announced or self.knows(session_id)):
                self._loading.setdefault(session_id, set()).add(key)
        elif request.method not in SESSION_METHODS:
            session_id = None
        self._answers[key] = session_id

    def settle(self, response: Response) -> None:
        """Note that a question of ours was answered."""
        self._questions.pop(_key(response.id), None)

    # --- what goes out: an outbox ------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Queue one message on its stream."""
        about = _envelope(message)
        params = about.params or _Params()
        if about.method is None:
            self._answer(_key(about.id), message)
        elif about.method == "$/cancel_request":
            self._stream(self._questions.pop(_key(params.request_id), None)).send(message)
        else:
            if about.id is not None:
                self._questions[_key(about.id)] = params.session_id
            self._stream(params.session_id).send(message)

    def _answer(self, key: _Key, message: bytes) -> None:
        if not self.is_initialized.is_set():
            self.initialized = message
            self.is_initialized.set()
            return
        session_id = self._answers.pop(key, None)
        self._stream(session_id).send(message)
        if session_id is not None and session_id in self._loading:
            self._loading[session_id].discard(key)

    def _stream(self, session_id: str | None) -> Stream:
        if session_id is None:
            return self.of_connection
        if session_id in self._loading:
            is_ready = self.knows(session_id) and self.of_session(session_id).is_open
            if self._loading[session_id] or not is_ready or not self.of_connection.is_empty:
                return self.of_connection
            del self._loading[session_id]
        return self.of_session(session_id)

    @property
    def is_congested(self) -> bool:
        """Whether a stream that somebody reads is read too slowly."""
        return any(stream.is_open and stream.is_congested for stream in self.all())

    async def drained(self) -> None:
        """Wait until little is unread on those that are read. Cancellation: safe."""
        for stream in self.all():
            if stream.is_open:
                await stream.drained()

    async def flushed(self) -> None:
        """Wait until all has left on the streams that are read. Cancellation: safe."""
        for stream in self.all():
            if stream.is_open:
                await stream.flushed()

    def progress(self, session_id: str) -> tuple[int, int]:
        """Return how many messages may have been about a session, and how many have left."""
        streams = [self.of_connection]
        if self.knows(session_id):
            streams.append(self.of_session(session_id))
        counts = [stream.progress(session_id) for stream in streams]
        return sum(given for given, _ in counts), sum(gone for _, gone in counts)

    def lose(self) -> None:
        """Forget everything: nobody will read it."""
        self.is_initialized.set()
        for stream in self.all():
            stream.lose()


def _key(request_id: RequestId) -> _Key:
    return type(request_id), request_id
