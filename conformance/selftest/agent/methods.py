"""What a client may call, and the life of the process around it."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Coroutine
from typing import Any, Final

from conformance.selftest.agent import checks
from conformance.selftest.agent.listing import page_of
from conformance.selftest.agent.loop import Cancelled, Future, Loop, Task
from conformance.selftest.agent.permissions import MODES
from conformance.selftest.agent.rpc import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    Connection,
    Message,
    Request,
    RpcError,
)
from conformance.selftest.agent.session import Session, Turn
from conformance.selftest.agent.store import Log, Store

__all__ = ["Agent", "main"]

PROTOCOL_VERSION: Final = 1
AUTH_REQUIRED: Final = -32000
NOT_FOUND: Final = -32002
CANCELLED: Final = -32800
CANCELLABLE: Final = ("session/new", "session/load", "session/resume", "session/fork")
END_LIMIT_S: Final = 1.0
AGENT_INFO: Final = {
    "name": "acp-reference-agent",
    "title": "Reference agent",
    "version": "1.0.0",
}
AUTH_METHOD: Final = {"id": "local", "name": "Nothing to do", "description": "Always works."}

Answer = Message | Coroutine[Future, None, Message]


class Agent:
    """The agent of one connection.

    Args:
        has_auth: Whether sessions need a login first.
        has_fork: Whether sessions can be forked, which is a draft.
    """

    def __init__(self, *, has_auth: bool = False, has_fork: bool = False) -> None:
        self.loop: Final = Loop()
        self.connection: Final = Connection(
            self.loop, self.take_request, self.take_notification, self.stop
        )
        self._has_auth = has_auth
        self._has_fork = has_fork
        self._is_initialized = False
        self._is_used = False
        self._is_authenticated = not has_auth
        self._is_stopped = Future()
        self._capabilities: Message = {}
        self._store = Store(_state_folder())
        self._sessions: dict[str, Session] = {}
        self._fresh: Session | None = None  # whose commands the client is yet to be told
        self._turns: dict[tuple[type, object], Turn] = {}
        self._tasks: dict[tuple[type, object], Task] = {}
        self._methods: dict[str, Callable[[Message], Answer]] = {
            "initialize": self.initialize,
            "authenticate": self.authenticate,
            "logout": self.logout,
            "session/new": self.new_session,
            "session/load": self.load_session,
            "session/resume": self.resume_session,
            "session/list": self.list_sessions,
            "session/close": self.close_session,
            "session/delete": self.delete_session,
            "session/set_mode": self.set_mode,
            "session/set_config_option": self.set_option,
        }
        if has_fork:
            self._methods["session/fork"] = self.fork_session

    # --- the life of the process ----------------------------------------------------------------

    def serve(self) -> int:
        """Serve until the client is gone or SIGTERM comes; return the exit code."""
        self.loop.on_signal(signals.SIGTERM, self.connection.end)
        self.loop.on_signal(signals.SIGINT, self.connection.end)
        try:
            self.loop.run(self._is_stopped)
            self.loop.run(self.loop.spawn(self._close_all()))
            self.connection.flush()
        finally:
            _end_commands()
        return 0

    def stop(self) -> None:
        """End `serve`."""
        self._is_stopped.set()

    async def _close_all(self) -> None:
        closings = [self.loop.spawn(session.close()) for session in self._sessions.values()]
        limit = self.loop.sleep(END_LIMIT_S)
        for closing in closings:
            either = Future()
            closing.watch(either.set)
            limit.watch(either.set)
            await either

    # --- what comes in --------------------------------------------------------------------------

    def take_request(self, request: Request) -> None:
        """See to it that a request is answered."""
        try:
            if request.method == "initialize":
                if self._is_used:
                    raise RpcError(INVALID_REQUEST, "this connection is initialized")
            elif not self._is_initialized:
                raise RpcError(INVALID_REQUEST, "the first request must be initialize")
            else:
                self._is_used = True
            if request.method.startswith("session/") and not self._is_authenticated:
                raise RpcError(AUTH_REQUIRED, "authenticate first")
            if request.method == "session/prompt":
                return self._take_prompt(request)
            method = self._methods.get(request.method)
            if method is None:
                raise RpcError(METHOD_NOT_FOUND, "there is no such method")
            params = {} if request.params is None else request.params
            answer = method(checks.fields(params))
        except RpcError as error:
            return request.fail(error)
        except Exception:
            return request.fail(RpcError(INTERNAL_ERROR, "the request failed inside the agent"))
        if isinstance(answer, dict):
            return request.answer(answer)
        task = self.loop.spawn(self._finish(request, answer))
        if request.method in CANCELLABLE:
            self._tasks[request.key] = task

    def take_notification(self, method: str, params: Any) -> None:
        """Act on a notification; what makes no sense is ignored."""
        if not isinstance(params, dict):
            return
        if method == "session/cancel" and isinstance(params.get("sessionId"), str):
            session = self._sessions.get(params["sessionId"])
            if session is not None:
                session.cancel()
        elif method == "$/cancel_request" and isinstance(params.get("requestId"), int | str):
            key = (type(params["requestId"]), params["requestId"])
            if key in self._turns:
                self._turns[key].cancel()
            elif key in self._tasks:
                self._tasks[key].cancel()

    def _take_prompt(self, request: Request) -> None:
        params = checks.fields(request.params)
        session = self._session(params)
        turn = Turn(request, checks.blocks(params))
        self._turns = {key: turn for key, turn in self._turns.items() if key in self._inflight}
        self._turns[request.key] = turn
        session.submit(turn)

    @property
    def _inflight(self) -> dict[tuple[type, object], Request]:
        return self.connection.inflight

    async def _finish(self, request: Request, work: Coroutine[Future, None, Message]) -> None:
        try:
            request.answer(await work)
            fresh, self._fresh = self._fresh, None
            if fresh is not None:
                fresh.announce()  # behind the answer: before it, nobody knows the session
        except Cancelled:
            request.fail(RpcError(CANCELLED, "the request was cancelled"))
        except RpcError as error:
            request.fail(error)
        except Exception:
            request.fail(RpcError(INTERNAL_ERROR, "the request failed inside the agent"))
        finally:
            self._tasks.pop(request.key, None)

    # --- methods --------------------------------------------------------------------------------

    def initialize(self, params: Message) -> Message:
        """Agree on the version, and say what we can do."""
        version = params.get("protocolVersion")
        if type(version) is not int or not 0 <= version <= 65535:
            raise checks.invalid("protocolVersion", "must be a whole number up to 65535")
        capabilities = params.get("clientCapabilities")
        self._capabilities = capabilities if isinstance(capabilities, dict) else {}
        self._is_initialized = True
        features = ["list", "delete", "resume", "close", "additionalDirectories"]
        if self._has_fork:
            features.append("fork")
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": checks.PROMPT_CAPABILITIES,
                "mcpCapabilities": {"http": False, "sse": False},
                "sessionCapabilities": {feature: {} for feature in features},
                "auth": {"logout": {}},
            },
            "authMethods": [AUTH_METHOD],
            "agentInfo": AGENT_INFO,
        }

    def authenticate(self, params: Message) -> Message:
        """Log in; there is nothing to do for it."""
        if checks.string(params, "methodId") != AUTH_METHOD["id"]:
            raise checks.invalid("methodId", "there is no such way to log in")
        self._is_authenticated = True
        return {}

    def logout(self, params: Message) -> Message:
        """Log out: sessions need a login again, if they ever did."""
        self._is_authenticated = not self._has_auth
        return {}

    async def new_session(self, params: Message) -> Message:
        """Open a session. May be cancelled."""
        cwd = checks.absolute(params, "cwd")
        directories = checks.absolutes(params, "additionalDirectories")
        servers = checks.mcp_servers(params, is_required=True)
        session_id, log = self._store.create(cwd, directories, [])
        session = self._make(session_id, log, directories)
        try:
            return await self._activate(session, servers)
        except Cancelled:
            self._store.delete(session_id)
            raise

    async def load_session(self, params: Message) -> Message:
        """Activate a session that was, and tell all of it again. May be cancelled."""
        session, servers = self._open(params, is_required=True)
        await session.replay()
        return _without_id(await self._activate(session, servers))

    async def resume_session(self, params: Message) -> Message:
        """Activate a session that was. May be cancelled."""
        session, servers = self._open(params, is_required=False)
        return _without_id(await self._activate(session, servers))

    async def fork_session(self, params: Message) -> Message:
        """Make a session with the history of another. May be cancelled."""
        cwd = checks.absolute(params, "cwd")
        directories = checks.absolutes(params, "additionalDirectories")
        servers = checks.mcp_servers(params, is_required=False)
        origin = self._log(params)
        origin.close()
        session_id, log = self._store.create(cwd, directories, origin.events[1:])
        session = self._make(session_id, log, directories)
        return await self._activate(session, servers)

    def list_sessions(self, params: Message) -> Message:
        """Return a page of the sessions, the newest first."""
        return page_of(self._store.summaries(), params)

    def close_session(self, params: Message) -> Answer:
        """Cancel what runs in a session and give it up; it can be loaded again."""
        return self._close(self._session(params))

    def delete_session(self, params: Message) -> Answer:
        """Forget a session, whether it is there or not."""
        session_id = checks.string(params, "sessionId")
        self._store.delete(session_id)
        session = self._sessions.get(session_id)
        return {} if session is None else self._close(session)

    def set_mode(self, params: Message) -> Message:
        """Change the mode of a session."""
        session = self._session(params)
        mode = checks.string(params, "modeId")
        if mode not in MODES:
            raise checks.invalid("modeId", "there is no such mode")
        session.set_mode(mode)
        return {}

    def set_option(self, params: Message) -> Message:
        """Change an option of a session; return all of them."""
        session = self._session(params)
        key = checks.string(params, "configId")
        session.set_option(key, session.options.checked(key, params))
        return {"configOptions": session.options.shown(session.permissions.mode)}

    # --- sessions -------------------------------------------------------------------------------

    def _session(self, params: Message) -> Session:
        session_id = checks.string(params, "sessionId")
        session = self._sessions.get(session_id)
        if session is None:
            raise RpcError(NOT_FOUND, "there is no such session", {"sessionId": session_id})
        return session

    def _log(self, params: Message) -> Log:
        session_id = checks.string(params, "sessionId")
        log = self._store.open(session_id)
        if log is None:
            raise RpcError(NOT_FOUND, "there is no such session", {"sessionId": session_id})
        return log

    def _open(self, params: Message, *, is_required: bool) -> tuple[Session, list[Message]]:
        """Return a session that was, or that is active here."""
        cwd = checks.absolute(params, "cwd")
        directories = checks.absolutes(params, "additionalDirectories")
        servers = checks.mcp_servers(params, is_required=is_required)
        active = self._sessions.get(checks.string(params, "sessionId"))
        log = self._log(params) if active is None else active.log
        if os.path.realpath(cwd) != os.path.realpath(log.events[0]["cwd"]):
            raise checks.invalid("cwd", "is not the folder of this session")
        if active is None:
            return self._make(params["sessionId"], log, directories), servers
        active.use_roots(directories)
        return active, servers

    def _make(self, session_id: str, log: Log, directories: list[str]) -> Session:
        model = None
        if url := os.environ.get("OPENAI_BASE_URL"):
            from conformance.selftest.agent.model import Model

            model = Model(self.loop, url)
        return Session(
            self.loop, self.connection, self._capabilities, session_id, log, directories, model
        )

    async def _activate(self, session: Session, servers: list[Message]) -> Message:
        if servers:
            from conformance.selftest.agent import mcp

            session.servers += await mcp.start(self.loop, servers, session.cwd)
        self._sessions[session.id] = session
        self._fresh = session
        return {"sessionId": session.id, **session.state()}

    def _close(self, session: Session) -> Coroutine[Future, None, Message]:
        del self._sessions[session.id]

        async def close() -> Message:
            await session.close()
            return {}

        return close()


def main(flags: list[str]) -> int:
    """Serve a client on stdin and stdout; return the exit code.

    Args:
        flags: ``--auth`` to ask for a login, ``--fork`` to offer that draft.
    """
    return Agent(has_auth="--auth" in flags, has_fork="--fork" in flags).serve()


def _end_commands() -> None:
    from conformance.selftest.agent.commands import end_all

    end_all()


def _state_folder() -> str:
    if folder := os.environ.get("ACP_SELFTEST_STATE"):
        return os.path.abspath(folder)
    home = os.environ.get("XDG_STATE_HOME")
    if not home and "HOME" in os.environ:
        home = os.path.expanduser("~/.local/state")
    return os.path.join(home or os.environ.get("TMPDIR", "/tmp"), f"acp-selftest-{os.getuid()}")


def _without_id(result: Message) -> Message:
    return {key: value for key, value in result.items() if key != "sessionId"}
