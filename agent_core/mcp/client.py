"""One connection to a server through the MCP SDK. Imported only by `loading`, in a thread.

Requests go to the SDK's dispatcher as they are and results come back as plain JSON: one tool with
a broken schema must not hide the others, and a cancel needs the id of the request it is about. The
SDK's session does the handshake and answers what the server asks of us.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import httpx2
import mcp_types as types
from anyio.abc import TaskStatus
from mcp import ClientSession, MCPError
from mcp.client.session import ClientRequestContext
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.dispatcher import CallOptions
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher

from agent_core.cancellation import AbortSignal, TurnAborted
from agent_core.errors import ToolError
from agent_core.logs import get_logger
from agent_core.mcp.servers import (
    Answer,
    HttpServer,
    Progress,
    Question,
    Server,
    SseServer,
    StdioServer,
)
from agent_core.mcp.stdio import Spoken, stdio_streams

__all__ = ["Client", "Host", "open_client"]

CANCEL_GRACE_S: Final = 0.5
"""How long a cancelled call may take to say how it ended; the protocol lets it say nothing."""
MAX_PAGES: Final = 50
MAX_ERROR_CHARS: Final = 2000
_CONNECT_S: Final = 30.0
_SILENCE_S: Final = 300.0
_SESSION_TERMINATED: Final = "Session terminated"  # what the SDK makes of a 404 after the handshake

log = get_logger(__name__)


class Host:
    """What a connection needs of whoever owns it.

    Attributes:
        identity: Our name and version, for the server.
        cwd: Where a process of ours is started.
        roots: Returns the directories to name when the server asks.
        on_end: Called when no more messages will come.
        on_tools_changed: Called when the server says that its list has changed.
        ask: Asks the person for the server, under the signal of a call that is running.
        on_visited: Called with the id of a visit that the server says is done.
    """

    def __init__(
        self,
        *,
        identity: tuple[str, str],
        cwd: str,
        roots: Callable[[], tuple[str, ...]],
        on_end: Callable[[], None],
        on_tools_changed: Callable[[], None],
        ask: Callable[[Question, AbortSignal], Awaitable[Answer]],
        on_visited: Callable[[str], None],
    ) -> None:
        self.identity = identity
        self.cwd = cwd
        self.roots = roots
        self.on_end = on_end
        self.on_tools_changed = on_tools_changed
        self.ask = ask
        self.on_visited = on_visited


class Client:
    """An open connection."""

    def __init__(
        self,
        name: str,
        session: ClientSession,
        dispatcher: JSONRPCDispatcher,
        running: dict[types.RequestId, AbortSignal],
    ) -> None:
        self._name = name
        self._running = running
        self._session = session
        self._dispatcher = dispatcher
        # The handshake has the only id that is not ours; an id must not be used twice.
        self._ids = itertools.count(1000)

    async def initialize(self) -> bool:
        """Shake hands; say whether the server has tools.

        Cancellation: safe. Concurrency: once.

        Raises:
            MCPError: The server refused, or ended.
            ValueError: Its answer is not MCP.
        """
        result = await self._session.initialize()
        return result.capabilities.tools is not None

    async def list_tools(self) -> list[Any]:
        """Return the server's tools, undecoded, at most `MAX_PAGES` pages of them.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            MCPError: The server refused, or ended.
        """
        tools: list[Any] = []
        cursor: object = None
        for _ in range(MAX_PAGES):
            params = {} if cursor is None else {"cursor": cursor}
            page = await self._dispatcher.send_raw_request(
                "tools/list", params, {"request_id": next(self._ids)}
            )
            listed = page.get("tools")
            tools += listed if isinstance(listed, list) else []
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str):
                break
        return tools

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        *,
        signal: AbortSignal,
        on_progress: Progress,
    ) -> dict[str, Any]:
        """Call a tool and return the result as JSON has it.

        Cancellation: through `signal`: the server is told at once, and has 0.5 s to say how it
        ended. Concurrency: any number of tasks.

        Raises:
            ToolError: The server refused (``MCP_ERROR``), or is gone (``MCP_SERVER_GONE``).
            TurnAborted: The signal fired, and the server gave no result.
        """
        signal.raise_if_aborted()
        options: CallOptions = {
            "request_id": next(self._ids),
            "on_progress": on_progress,
            "cancel_on_abandon": False,  # we say so ourselves, and before we stop to listen
        }
        answer: dict[str, Any] | None = None
        failure: ToolError | None = None
        self._running[options["request_id"]] = signal
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                self._cancel_when, signal, options["request_id"], tasks.cancel_scope.cancel
            )
            try:
                answer = await self._dispatcher.send_raw_request(
                    "tools/call", {"name": tool, "arguments": arguments}, options
                )
            except MCPError as exc:
                failure = self._failure(exc)
            del self._running[options["request_id"]]
            tasks.cancel_scope.cancel()
        if answer is not None:
            return answer
        if signal.aborted or failure is None:
            raise TurnAborted(signal.reason)
        raise failure

    async def _cancel_when(
        self, signal: AbortSignal, request_id: types.RequestId, give_up: Callable[[], None]
    ) -> None:
        await signal.wait()
        with anyio.move_on_after(CANCEL_GRACE_S):
            params = {"requestId": request_id, "reason": "The user stopped the turn."}
            await self._dispatcher.notify("notifications/cancelled", params)
            await anyio.sleep_forever()
        log.info("mcp_call_abandoned", server=self._name, request_id=request_id)
        give_up()

    def _failure(self, exc: MCPError) -> ToolError:
        message = exc.error.message[:MAX_ERROR_CHARS]
        if exc.error.code == types.CONNECTION_CLOSED or message == _SESSION_TERMINATED:
            text = f"The MCP server {self._name!r} ended before it answered ({message})."
            return ToolError(text, code="MCP_SERVER_GONE")
        text = f"The MCP server {self._name!r} refused: {message} (code {exc.error.code})"
        return ToolError(text, code="MCP_ERROR")


@asynccontextmanager
async def open_client(server: Server, host: Host, spoken: Spoken) -> AsyncGenerator[Client, None]:
    """Connect to `server` and yield the connection, on which nothing has been said yet.

    Cancellation: safe. Concurrency: one task enters and leaves it.

    Raises:
        ToolError: Its process could not be started.
        httpx2.HTTPError: Its address could not be reached. It may come while the block runs, too.
    """
    async with _streams(server, host.cwd, spoken) as (from_server, to_server):
        dispatcher = _Dispatcher(from_server, to_server, host.on_end)
        running: dict[types.RequestId, AbortSignal] = {}
        session = ClientSession(
            dispatcher=dispatcher,
            client_info=types.Implementation(name=host.identity[0], version=host.identity[1]),
            elicitation_callback=_elicitation_callback(host, running),
            list_roots_callback=_roots_callback(host),
            message_handler=_notification_handler(host),
        )
        async with session:
            yield Client(server.name, session, dispatcher, running)


class _Dispatcher(JSONRPCDispatcher):
    """Tells when the connection is over, which the SDK tells only those who wait for an answer."""

    def __init__(self, from_server: Any, to_server: Any, on_end: Callable[[], None]) -> None:
        super().__init__(from_server, to_server)
        self._on_end = on_end

    async def run(
        self, *handlers: Any, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        await super().run(*handlers, task_status=task_status)
        self._on_end()


@asynccontextmanager
async def _streams(server: Server, cwd: str, spoken: Spoken) -> AsyncGenerator[Any, None]:
    if isinstance(server, StdioServer):
        async with stdio_streams(server, cwd, spoken) as streams:
            yield streams
        return
    # Reading the certificates takes 30 ms of somebody's time, and the event loop has none.
    certificates = await anyio.to_thread.run_sync(httpx2.create_ssl_context)

    def make_client(*_args: Any, **_kwargs: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers=list(server.headers),
            timeout=httpx2.Timeout(_CONNECT_S, read=_SILENCE_S),
            verify=certificates,
        )

    if isinstance(server, HttpServer):
        async with make_client() as http, _http_streams(server, http) as streams:
            yield streams
    else:
        async with _sse_streams(server, make_client) as streams:
            yield streams


def _http_streams(server: HttpServer, http: httpx2.AsyncClient) -> AbstractAsyncContextManager[Any]:
    return streamable_http_client(server.url, http_client=http)


def _sse_streams(
    server: SseServer, make_client: Callable[..., httpx2.AsyncClient]
) -> AbstractAsyncContextManager[Any]:
    return sse_client(server.url, httpx_client_factory=make_client)


def _elicitation_callback(host: Host, running: dict[types.RequestId, AbortSignal]) -> Any:
    async def elicit(
        _context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        """Ask the person in the name of the latest call: the server does not say which one."""
        if not running:  # nobody would know what it is about, or could stop it
            return types.ElicitResult(action="decline")
        if isinstance(params, types.ElicitRequestURLParams):
            question = Question(
                params.message, url=params.url, visit_id=params.elicitation_id or ""
            )
        else:
            question = Question(params.message, schema=dict(params.requested_schema))
        try:
            action, content = await host.ask(question, next(reversed(running.values())))
        except TurnAborted:
            return types.ElicitResult(action="cancel")
        return types.ElicitResult(action=action, content=dict(content) or None)

    return elicit


def _roots_callback(host: Host) -> Any:
    async def list_roots(_context: ClientRequestContext) -> types.ListRootsResult:
        roots = [
            types.Root.model_validate({"uri": Path(root).as_uri(), "name": Path(root).name or root})
            for root in host.roots()
        ]
        return types.ListRootsResult(roots=roots)

    return list_roots


def _notification_handler(host: Host) -> Any:
    async def handle(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            host.on_tools_changed()
        elif isinstance(message, types.ElicitCompleteNotification):
            host.on_visited(message.params.elicitation_id)

    return handle
