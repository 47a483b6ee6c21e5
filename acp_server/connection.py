"""One client's connection: the ACP methods we serve, and the order in which they may be called.

A handler that is a plain ``def`` takes effect while its line is being received; what it returns
waits for the rest. The agent's side is imported and opened only after ``initialize`` has been
answered, so that a client sees us fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from acp_server import __version__
from acp_server import types as wire
from acp_server.errors import (
    AUTH_REQUIRED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    RESOURCE_NOT_FOUND,
    RpcError,
)
from acp_server.peer import InFlight, Method, Outbox, Peer
from agent_core.logs import get_logger

if TYPE_CHECKING:
    from acp_server.backend import Backend
    from acp_server.session import ClientSession

__all__ = ["Connection"]

PROTOCOL_VERSION: Final = 1
AUTH_METHOD: Final = "configured"
STEER_KEY: Final = "acp-agent/steer"
"""``_meta`` of a prompt: true joins the running turn instead of waiting for one of its own."""

log = get_logger(__name__)


class Connection:
    """Serves one client. `receive` takes its lines; everything else follows from them.

    Attributes:
        is_initialized: Whether ``initialize`` has been read.
        peer: The client.
    """

    def __init__(self, outbox: Outbox, tasks: TaskGroup) -> None:
        self.is_initialized = False
        self._initialized: list[Callable[[], None]] = []
        self.peer = Peer(
            outbox,
            tasks,
            {
                "initialize": Method(wire.InitializeParams, self._initialize),
                "authenticate": Method(wire.AuthenticateParams, self._authenticate),
                "session/new": Method(wire.NewSessionParams, self._new_session),
                "session/load": Method(wire.LoadSessionParams, self._load_session),
                "session/list": Method(wire.ListSessionsParams, self._list_sessions),
                "session/prompt": Method(wire.PromptParams, self._prompt),
                "session/set_mode": Method(wire.SetModeParams, self._set_mode),
            },
            {"session/cancel": self._cancel},
            self._admit,
        )
        self._is_in_use = False  # something other than initialize was served
        self._sessions: dict[str, ClientSession] = {}
        self._backend: Backend | None = None
        self._backend_ready = anyio.Event()
        self._problem = ""

    def receive(self, line: bytes | None) -> None:
        """Take one line; `None` stands for one that was too long."""
        self.peer.receive(line)

    def on_initialized(self, callback: Callable[[], None]) -> None:
        """Call `callback` once ``initialize`` has been answered."""
        self._initialized.append(callback)

    def open(self, backend: Backend) -> None:
        """Give the connection what agents run on; requests that came before wait for it."""
        self._backend = backend
        self._backend_ready.set()

    def refuse(self, problem: str) -> None:
        """Say `problem` to every request that needs an agent: there will be none."""
        self._problem = problem
        self._backend_ready.set()

    async def _opened(self) -> Backend:
        await self._backend_ready.wait()
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

    # --- the connection ----------------------------------------------------------------------

    def _initialize(
        self, params: wire.InitializeParams, in_flight: InFlight
    ) -> Coroutine[Any, Any, Any]:
        if not 0 <= params.protocol_version <= 0xFFFF:
            reason = "protocolVersion must be between 0 and 65535"
            raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": reason})
        self.is_initialized = True
        in_flight.after += self._initialized
        return _value(_INITIALIZE_RESULT)

    async def _authenticate(self, params: wire.AuthenticateParams, _in_flight: InFlight) -> Any:
        if params.method_id != AUTH_METHOD:
            reason = f"the only method is {AUTH_METHOD!r}"
            raise RpcError(INVALID_PARAMS, "Unknown authentication method", {"reason": reason})
        if (problem := (await self._opened()).configuration_problem()) is not None:
            raise RpcError(AUTH_REQUIRED, problem)
        return {}

    # --- sessions ----------------------------------------------------------------------------

    async def _new_session(self, params: wire.NewSessionParams, in_flight: InFlight) -> Any:
        from acp_server.session import ClientSession
        from agent_core.errors import AgentError

        _check_place(params.cwd, params.mcp_servers)
        backend = await self._opened()
        try:
            agent = await backend.runtime.create(params.cwd)
        except AgentError as exc:
            raise RpcError(INTERNAL_ERROR, str(exc)) from None
        session = self._sessions[agent.id] = ClientSession(agent.id, self.peer)
        session.attach(agent)
        in_flight.after.append(lambda: self._offer_commands(session))
        return {"sessionId": agent.id, "modes": _modes(agent.mode)}

    def _load_session(
        self, params: wire.LoadSessionParams, in_flight: InFlight
    ) -> Coroutine[Any, Any, Any]:
        from acp_server.session import ClientSession

        _check_place(params.cwd, params.mcp_servers)
        session = self._sessions.get(params.session_id)
        if session is None:
            session = ClientSession(params.session_id, self.peer)
            self._sessions[params.session_id] = session
        session.begin_load()
        return self._finish_loading(session, params.cwd, in_flight)

    async def _finish_loading(
        self, session: ClientSession, cwd: str, in_flight: InFlight
    ) -> dict[str, Any]:
        from agent_core.errors import AgentError, SessionNotFound

        error: AgentError | None = SessionNotFound(session.id)
        try:
            agent = await (await self._opened()).agent_for(session.id, cwd)
        except ValueError as exc:
            raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": str(exc)}) from None
        except SessionNotFound:
            raise _unknown_session(session.id) from None
        except AgentError as exc:
            error = exc
            raise RpcError(INTERNAL_ERROR, str(exc)) from None
        else:
            error = None
            if session.agent is not agent:
                session.detach()
                session.attach(agent)
        finally:
            if session.end_load(error):
                del self._sessions[session.id]
        await session.replay()
        in_flight.after.append(lambda: self._offer_commands(session))
        return {"modes": _modes(agent.mode)}

    async def _list_sessions(self, params: wire.ListSessionsParams, _in_flight: InFlight) -> Any:
        from agent_core.errors import StoreError

        if params.cwd is not None and not os.path.isabs(params.cwd):
            reason = "cwd must be an absolute path"
            raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": reason})
        store = (await self._opened()).store
        try:
            page = await store.list_sessions(cwd=params.cwd, cursor=params.cursor)
        except ValueError:
            reason = "cursor is not one this agent gave"
            raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": reason}) from None
        except StoreError as exc:
            raise RpcError(INTERNAL_ERROR, str(exc)) from None
        result: dict[str, Any] = {
            "sessions": [
                {
                    "sessionId": header.id,
                    "cwd": header.cwd,
                    "title": header.title,
                    "updatedAt": _iso(header.updated_ms),
                }
                for header in page.sessions
            ]
        }
        if page.next_cursor is not None:
            result["nextCursor"] = page.next_cursor
        return result

    async def _set_mode(self, params: wire.SetModeParams, _in_flight: InFlight) -> Any:
        agent = await self._session(params.session_id).loaded()
        if agent is None:
            raise _unknown_session(params.session_id)
        try:
            agent.set_mode(params.mode_id)
        except ValueError as exc:
            raise RpcError(INVALID_PARAMS, "Unknown mode", {"reason": str(exc)}) from None
        return {}

    # --- prompts -----------------------------------------------------------------------------

    def _prompt(self, params: wire.PromptParams, in_flight: InFlight) -> Coroutine[Any, Any, Any]:
        from acp_server.session import blocks_from

        session = self._session(params.session_id)
        try:
            content = blocks_from(params.prompt)
        except ValueError as exc:
            raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": str(exc)}) from None
        is_steering = params.meta is not None and params.meta.get(STEER_KEY) is True
        prompt = session.submit(content, is_steering=is_steering)
        before, answered = session.in_turn(prompt, is_steering=is_steering)
        in_flight.cancel = lambda: session.withdraw(prompt)
        in_flight.after.append(answered.set)
        return session.answer_to(prompt, before)

    def _cancel(self, raw: bytes | None) -> None:
        try:
            session_id = msgspec.json.decode(raw or b"{}", type=wire.SessionId).session_id
        except msgspec.MsgspecError:
            log.info("session_cancel_malformed")
            return
        session = self._sessions.get(session_id)
        if session is not None:
            session.cancel()

    def _session(self, session_id: str) -> ClientSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise _unknown_session(session_id)
        return session

    def _offer_commands(self, session: ClientSession) -> None:
        from acp_server.commands import COMMANDS

        commands = tuple(command.offer for command in COMMANDS)
        update = wire.AvailableCommandsUpdate(commands)
        self.peer.send(wire.encode_update(session.id, update))


_INITIALIZE_RESULT: Final = {
    "protocolVersion": PROTOCOL_VERSION,
    "agentCapabilities": {
        "loadSession": True,
        "promptCapabilities": {"image": True, "embeddedContext": True},
        "sessionCapabilities": {"list": {}},
        "_meta": {STEER_KEY: True},
    },
    "agentInfo": {"name": "acp-agent", "title": "acp-agent", "version": __version__},
    "authMethods": [
        {
            "id": AUTH_METHOD,
            "name": "Use the configured model",
            "description": "Checks that the model acp-agent was configured with can be used.",
        }
    ],
}


async def _value(value: object) -> object:
    return value


def _modes(current: str) -> dict[str, Any]:
    from agent_core.permissions import MODES

    available = [
        {"id": mode.id, "name": mode.name, "description": mode.description}
        for mode in MODES.values()
    ]
    return {"currentModeId": current, "availableModes": available}


def _check_place(cwd: str, servers: list[wire.McpServer] | None) -> None:
    problem = None if os.path.isabs(cwd) and "\0" not in cwd else "cwd must be an absolute path"
    if os.path.exists(cwd) and not os.path.isdir(cwd):
        problem = "cwd is not a directory"
    for server in servers or ():
        problem = problem or server.problem()
    if problem is not None:
        raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": problem})
    if servers:
        log.warning("mcp_servers_not_started", count=len(servers))


def _unknown_session(session_id: str) -> RpcError:
    return RpcError(RESOURCE_NOT_FOUND, "Unknown session", {"sessionId": session_id})


def _iso(time_ms: int) -> str:
    from datetime import UTC, datetime

    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
