"""One client's connection: the ACP methods we serve, and the order in which they may be called.

A handler that is a plain ``def`` takes effect while its line is being received; what it returns
waits for the rest. The agent's side is imported and opened only after ``initialize`` has been
answered, so that a client sees us fast.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from acp_server import __version__
from acp_server import types as wire
from acp_server.capabilities import Features, features_of
from acp_server.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    RpcError,
    unknown_session,
)
from acp_server.guest import LOCAL, Guest
from acp_server.methods import methods_of
from acp_server.methods.auth import auth_methods
from acp_server.peer import InFlight, Method, Outbox, Peer, ready
from agent_core.logs import get_logger

if TYPE_CHECKING:
    from acp_server.backend import Backend
    from acp_server.session import ClientSession

__all__ = ["Connection"]

PROTOCOL_VERSION: Final = 1
STEER_KEY: Final = "acp-agent/steer"
"""``_meta`` of a prompt: true joins the running turn instead of waiting for one of its own."""

log = get_logger(__name__)


class Connection:
    """Serves one client. `receive` takes its lines; everything else follows from them.

    Attributes:
        is_initialized: Whether ``initialize`` has been read.
        peer: The client.
        features: What it offered.
        sessions: Those the client may name: made, loaded or being loaded here, and not closed.
        guest: Who the client is, and what it may do.
    """

    def __init__(self, outbox: Outbox, tasks: TaskGroup, guest: Guest = LOCAL) -> None:
        self.guest = guest
        self.is_initialized = False
        self._initialized: list[Callable[[], None]] = []
        self.peer = Peer(
            outbox,
            tasks,
            methods_of(self, initialize=Method(wire.InitializeParams, self._initialize)),
            {"session/cancel": self._cancel},
            self._admit,
        )
        self._is_in_use = False  # something other than initialize was served
        self.sessions: dict[str, ClientSession] = {}
        self._backend: Backend | None = None
        self._settled: anyio.Event | None = None  # there while somebody waits for a backend
        self._problem = ""
        self.features = Features()

    def receive(self, line: bytes | None) -> None:
        """Take one line; `None` stands for one that was too long."""
        self.peer.receive(line)

    def on_initialized(self, callback: Callable[[], None]) -> None:
        """Call `callback` once ``initialize`` has been answered."""
        self._initialized.append(callback)

    def open(self, backend: Backend) -> None:
        """Give the connection what agents run on; requests that came before wait for it."""
        self._backend = backend
        self._wake()

    def refuse(self, problem: str) -> None:
        """Say `problem` to every request that needs an agent: there will be none."""
        self._problem = problem
        self._wake()

    def _wake(self) -> None:
        if self._settled is not None:
            self._settled.set()

    async def opened(self) -> Backend:
        """Wait for what agents run on.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            RpcError: There will be none; says why.
        """
        if self._backend is None and not self._problem:
            self._settled = self._settled or anyio.Event()
            await self._settled.wait()
        if self._backend is None:
            raise RpcError(INTERNAL_ERROR, self._problem)
        return self._backend

    def _admit(self, method: str) -> None:
        if method == "initialize":
            if self._is_in_use:
                raise RpcError(INVALID_REQUEST, "The connection is initialized already")
        elif not self.is_initialized:
            raise RpcError(INVALID_REQUEST, "The first request must be initialize")
        else:
            self._is_in_use = True
            self.guest.admit(method)

    # --- the connection ----------------------------------------------------------------------

    def _initialize(
        self, params: wire.InitializeParams, in_flight: InFlight
    ) -> Coroutine[Any, Any, Any]:
        version = params.protocol_version
        if not 0 <= version <= 0xFFFF or version % 1:
            reason = "protocolVersion must be a whole number between 0 and 65535"
            raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": reason})
        self.is_initialized = True
        self.features = features_of(params.client_capabilities)
        if self.guest.is_remote:  # there is no terminal of this machine to log in at
            self.features = msgspec.structs.replace(self.features, runs_logins=False)
        in_flight.after += self._initialized
        return ready(self._introduction())

    def _introduction(self) -> dict[str, Any]:
        methods = auth_methods(self.features)
        result = _INITIALIZE_RESULT | {"authMethods": methods}
        if self.guest.is_remote:  # to log out is the whole machine's matter
            result["agentCapabilities"] = {**_CAPABILITIES, "auth": {}}
        return result

    # --- sessions ----------------------------------------------------------------------------

    def session(self, session_id: str) -> ClientSession:
        """Return a session that the client may name.

        Raises:
            RpcError: There is none; ``data.sessionId`` says which.
        """
        session = self.sessions.get(session_id)
        if session is None or session.is_handed_over:
            raise unknown_session(session_id)
        return session

    def reserve(self, session_id: str) -> ClientSession:
        """Let the client name a session from now on, also before it has an agent."""
        from acp_server.session import ClientSession

        session = self.sessions.get(session_id)
        if session is None or session.is_handed_over:
            session = ClientSession(session_id, self.peer, self.features, self.guest.number)
            self.sessions[session_id] = session
        return session

    def forget(self, session: ClientSession) -> None:
        """Let the client name a session no more."""
        if self.sessions.get(session.id) is session:
            del self.sessions[session.id]

    # --- the end -----------------------------------------------------------------------------

    def lose(self, *, keeps: bool) -> None:
        """The client is gone: stop what it had going, or let that finish. Nothing is answered.

        Args:
            keeps: Whether turns that run go on without it.
        """
        for session in self.sessions.values():
            if session.is_handed_over:
                session.detach()
                continue
            if keeps:
                session.note_unseen()
            if keeps and session.agent is not None and session.agent.status == "running":
                session.leave_behind()
            else:
                session.close()
        self.peer.close()

    async def ended(self, keep_s: float) -> None:
        """Wait until nothing is left of a client that was lost, and let go of its agents.

        Cancellation: the agents stay as they are. Concurrency: once, behind `lose`.

        Args:
            keep_s: How long a turn may go on without a client.
        """
        async with anyio.create_task_group() as tasks:
            for session in tuple(self.sessions.values()):
                tasks.start_soon(session.ended, keep_s)

    def _cancel(self, raw: bytes | None) -> None:
        try:
            session_id = msgspec.json.decode(raw or b"{}", type=wire.SessionId).session_id
        except msgspec.MsgspecError:
            log.info("session_cancel_malformed")
            return
        session = self.sessions.get(session_id)
        if session is not None:
            session.cancel()
        else:
            for each in self.sessions.values():
                each.subagents.cancel(session_id)


_CAPABILITIES: Final[dict[str, Any]] = {
    "auth": {"logout": {}},
    "loadSession": True,
    "mcpCapabilities": {"http": True, "sse": True},
    "promptCapabilities": {"image": True, "embeddedContext": True},
    "sessionCapabilities": {
        "additionalDirectories": {},
        "close": {},
        "delete": {},
        "fork": {},
        "list": {},
        "resume": {},
    },
    "_meta": {STEER_KEY: True},
}
_INITIALIZE_RESULT: Final[dict[str, Any]] = {
    "protocolVersion": PROTOCOL_VERSION,
    "agentCapabilities": _CAPABILITIES,
    "agentInfo": {"name": "acp-agent", "title": "acp-agent", "version": __version__},
}
