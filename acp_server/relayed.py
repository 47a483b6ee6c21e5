"""What has to be known of a relayed conversation so that it can be taken up again, without I/O.

Messages pass as they are. They are looked at to see what is unanswered, in both directions, and
which sessions the editor has. When the connection is lost nobody is left waiting: the editor's
requests are answered with an error, the agent's are withdrawn. On a later connection the agent
counts its requests anew; they pass under ids of our own then, or an answer to an old question would
be taken for the answer to a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from acp_server.errors import INTERNAL_ERROR
from acp_server.message import BadMessage, Notification, Request, RequestId, Response, parse
from agent_core.logs import get_logger

__all__ = ["Relayed", "error_answer", "session_of"]

OWN: Final = "acp-agent-connect/"
"""How the ids begin that we give to requests."""
_HISTORY: Final = frozenset(
    {
        "user_message_chunk",
        "agent_message_chunk",
        "agent_thought_chunk",
        "tool_call",
        "tool_call_update",
        "plan",
    }
)
"""Updates that tell what happened. The others tell how it is now."""
_OPENS: Final = ("session/load", "session/resume")
_MAKES: Final = ("session/new", "session/fork")
_ENDS: Final = ("session/close", "session/delete")

_Key = tuple[type, RequestId]
_Fields = dict[str, Raw]

log = get_logger(__name__)


class _About(Struct, rename="camel"):
    session_id: str | None = None


class _Update(Struct, rename="camel", frozen=True):
    session_update: str = ""


class _UpdateParams(Struct, rename="camel"):
    session_id: str | None = None
    update: _Update = _Update()


class Relayed:
    """One editor's conversation with one agent, over one connection after the other.

    Args:
        to_agent: Sends a message to the agent.
        to_editor: Sends a message to the editor.

    Attributes:
        initialize: The params of the editor's ``initialize`` that was answered well, undecoded.
        authenticate: Likewise, of its ``authenticate``.
        sessions: What each open session is to be opened with again, by its id.
        replaying: The sessions whose history is being told again.
    """

    def __init__(
        self, to_agent: Callable[[bytes], None], to_editor: Callable[[bytes], None]
    ) -> None:
        self.initialize: bytes | None = None
        self.authenticate: bytes | None = None
        self.sessions: dict[str, _Fields] = {}
        self.replaying: set[str] = set()
        self._reopens_by: str | None = None
        self._to_agent = to_agent
        self._to_editor = to_editor
        self._asked: dict[_Key, Request] = {}  # by the editor
        self._questions: dict[_Key, Raw] = {}  # by the agent: the editor's id for it, and its own
        self._answers: dict[str, Callable[[Response], None]] = {}  # to what we ask
        self._n_asked = 0
        self._n_losses = 0

    # --- what the editor says ----------------------------------------------------------------

    def from_editor(self, line: bytes) -> None:
        """Pass one line on to the agent."""
        match parse(line):
            case None:
                return
            case Request() as request:
                self._asked[_key(request.id)] = request
            case Response() as response:
                own = self._questions.pop(_key(response.id), None)
                if self._n_losses:
                    if own is None:
                        log.info("answer_to_a_lost_question_dropped")
                        return
                    line = _with(line, "id", own)
            case BadMessage(code, reason) if not _is_text(line):  # no frame can hold it
                self._to_editor(error_answer(None, "Parse error", reason, code=code))
                return
            case _:
                pass
        self._to_agent(line)

    @property
    def is_answered(self) -> bool:
        """Whether the editor waits for nothing."""
        return not self._asked

    def stops(self) -> Iterator[bytes]:
        """Yield the messages that stop all turns of the editor's."""
        for request in self._asked.values():
            session_id = session_of(request.params)
            if request.method == "session/prompt" and session_id is not None:
                params = {"sessionId": session_id}
                yield _message(method="session/cancel", params=params)

    # --- what the agent says -----------------------------------------------------------------

    def from_agent(self, message: bytes) -> None:
        """Pass one message on to the editor, as one line."""
        line = message.replace(b"\n", b" ").replace(b"\r", b" ")  # in JSON they only space it
        match parse(line):
            case Request():
                line = self._asked_by_agent(line)
            case Notification("$/cancel_request", params) if self._n_losses:
                line = _with(line, "params", self._withdrawn(params))
            case Notification("session/update", params) if self._is_told_again(params):
                return
            case Notification():
                pass
            case Response(id=str() as own) as response if own in self._answers:
                self._answers.pop(own)(response)
                return
            case Response() as response:
                request = self._asked.pop(_key(response.id), None)
                if request is not None and response.error is None:
                    self._note(request, response)
            case _:
                log.warning("agent_sent_no_message", n_bytes=len(line))
                return
        self._to_editor(line)

    def _asked_by_agent(self, line: bytes) -> bytes:
        own = msgspec.json.decode(line, type=_Fields)["id"]
        visible = self._visible(own)
        self._questions[_key(msgspec.json.decode(visible))] = Raw(bytes(own))
        return _with(line, "id", visible) if self._n_losses else line

    def _visible(self, own: Raw) -> Raw:
        if not self._n_losses:
            return own
        return Raw(msgspec.json.encode(f"{OWN}{self._n_losses}/{bytes(own).decode()}"))

    def _withdrawn(self, params: bytes | None) -> Raw:
        try:
            fields = msgspec.json.decode(params or b"{}", type=_Fields)
        except msgspec.MsgspecError:
            return Raw(params or b"{}")
        if "requestId" in fields:
            fields["requestId"] = self._visible(fields["requestId"])
        return Raw(msgspec.json.encode(fields))

    def _is_told_again(self, params: bytes | None) -> bool:
        if not self.replaying:
            return False
        try:
            about = msgspec.json.decode(params or b"{}", type=_UpdateParams)
        except msgspec.MsgspecError:
            return False
        return about.session_id in self.replaying and about.update.session_update in _HISTORY

    def _note(self, request: Request, response: Response) -> None:
        """Remember what an answer means for a later connection."""
        method, session_id = request.method, session_of(request.params)
        if method == "initialize":
            self.initialize = request.params or b"{}"
            self._reopens_by = _way_to_reopen(response.result)
        elif method == "authenticate":
            self.authenticate = request.params or b"{}"
        elif method == "logout":
            self.authenticate = None
        elif method in _ENDS:
            self.sessions.pop(session_id or "", None)
        elif method in (*_OPENS, *_MAKES):
            made = session_of(response.result) if method in _MAKES else session_id
            if made is not None:
                fields = msgspec.json.decode(request.params or b"{}", type=_Fields)
                fields = {name: Raw(bytes(value)) for name, value in fields.items()}
                self.sessions[made] = fields | {"sessionId": Raw(msgspec.json.encode(made))}

    # --- a connection is lost, and another one is there --------------------------------------

    def lose(self, why: str) -> None:
        """Tell the editor that nothing will come of what is unanswered."""
        self._n_losses += 1
        self.replaying.clear()
        self._answers.clear()
        for _kind, visible in self._questions:
            self._to_editor(_message(method="$/cancel_request", params={"requestId": visible}))
        self._questions.clear()
        for request in self._asked.values():
            self._to_editor(error_answer(request.id, f"No answer will come: {why}"))
        self._asked.clear()

    def ask(self, method: str, params: Any, answered: Callable[[Response], None]) -> None:
        """Send a request of our own; `answered` gets its answer, unless the connection is lost."""
        self._n_asked += 1
        own = f"{OWN}{self._n_asked}"
        self._answers[own] = answered
        self._to_agent(_message(id=own, method=method, params=params))

    def reopen(self, session_id: str, answered: Callable[[Response], None]) -> bool:
        """Ask the agent to open a session again, without its history; say whether it can.

        Args:
            session_id: One of `sessions`.
            answered: Gets the answer.
        """
        if self._reopens_by is None:
            return False
        if self._reopens_by == "session/load":
            self.replaying.add(session_id)

        def done(response: Response) -> None:
            self.replaying.discard(session_id)
            if response.error is not None:  # the editor will hear so when it uses it
                self.sessions.pop(session_id, None)
            answered(response)

        self.ask(self._reopens_by, self.sessions[session_id], done)
        return True


def error_answer(
    request_id: RequestId, message: str, reason: str | None = None, *, code: int = INTERNAL_ERROR
) -> bytes:
    """Return the answer to a request that comes to nothing."""
    error: dict[str, Any] = {"code": code, "message": message}
    if reason is not None:
        error["data"] = {"reason": reason}
    return _message(id=request_id, error=error)


def _way_to_reopen(result: bytes | None) -> str | None:
    try:
        hello = msgspec.json.decode(result or b"{}")
        offered = hello.get("agentCapabilities") or {}
        if isinstance((offered.get("sessionCapabilities") or {}).get("resume"), dict):
            return "session/resume"
        return "session/load" if offered.get("loadSession") is True else None
    except (msgspec.MsgspecError, AttributeError):
        return None


def session_of(raw: bytes | None) -> str | None:
    """Return the ``sessionId`` in undecoded params or a result; `None` if there is none."""
    try:
        return msgspec.json.decode(raw or b"{}", type=_About).session_id
    except msgspec.MsgspecError:
        return None


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
        return True
    except UnicodeDecodeError:
        return False


def _with(line: bytes, field: str, value: Raw) -> bytes:
    fields = msgspec.json.decode(line, type=_Fields)
    return msgspec.json.encode(fields | {field: value})


def _message(**parts: Any) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", **parts})


def _key(request_id: RequestId) -> _Key:
    return type(request_id), request_id
