"""One server's life. One task opens the connection, waits, and closes it; nobody else may.

States: *connecting*, then *ready*, then *over*; or *over* at once. It is settled when it is no
longer connecting. Nothing that a server does gets out of here but `problem` and warnings, in words.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import anyio

from agent_core.cancellation import AbortSignal, is_host_cancellation
from agent_core.errors import ToolError
from agent_core.logs import get_logger
from agent_core.mcp.loading import load
from agent_core.mcp.servers import Answer, Progress, Question, Server, StdioServer

if TYPE_CHECKING:
    from agent_core.mcp.client import Client
    from agent_core.mcp.stdio import Spoken

__all__ = ["CONNECT_S", "Connection"]

CONNECT_S: Final = 30.0
"""What a server has to start, to shake hands and to list its tools."""
CLOSE_S: Final = 1.5
"""What a server at an address has to hear that we leave; a process has its own time."""
RELIST_PAUSE_S: Final = 1.0

_DEFECTS: Final = (TypeError, AttributeError, LookupError, AssertionError, NameError)

log = get_logger(__name__)


class Connection:
    """A server of one agent.

    Attributes:
        server: Which.
        settled: Set when its tools are there, or will never be.
        over: Set when nothing of it is left.
        problem: Why it is over, if nobody stopped it.
        is_ready: Whether its tools can be called.
    """

    def __init__(
        self,
        server: Server,
        *,
        cwd: str,
        roots: Callable[[], tuple[str, ...]],
        identity: tuple[str, str],
        on_listed: Callable[[Connection, list[Any]], None],
        on_warning: Callable[[Connection, str], None],
        on_over: Callable[[Connection], None],
        ask: Callable[[Question, AbortSignal], Awaitable[Answer]],
        on_visited: Callable[[str], None],
        connect_s: float = CONNECT_S,
    ) -> None:
        """Prepare it; `run` does the rest.

        Args:
            server: Which.
            cwd: Where its process is started.
            roots: Returns the directories to name when it asks.
            identity: Our name and version.
            on_listed: Called with each list of its tools, undecoded.
            on_warning: Called with what people should know about it, in words.
            on_over: Called when it is over.
            ask: Asks the person what it wants to know.
            on_visited: Called with the id of a visit that it says is done.
            connect_s: The limit for becoming ready.
        """
        self.server = server
        self.settled, self.over = anyio.Event(), anyio.Event()
        self.problem: str | None = None
        self.is_ready = False
        self._cwd = cwd
        self._roots = roots
        self._identity = identity
        self._on_listed = on_listed
        self._on_warning = on_warning
        self._on_over = on_over
        self._ask = ask
        self._on_visited = on_visited
        self._connect_s = connect_s
        self._life = anyio.CancelScope()
        self._wake = anyio.Event()
        self._is_stopping = False
        self._has_ended = False  # the server's side
        self._is_list_stale = False
        self._client: Client | None = None
        self._spoken: Spoken | None = None

    @property
    def name(self) -> str:
        """The server's name."""
        return self.server.name

    def stop(self) -> None:
        """Have it end soon. Calling it again is harmless."""
        self._is_stopping = True
        self._wake.set()
        if self.is_ready:
            self._life.deadline = anyio.current_time() + CLOSE_S
        else:
            self._life.cancel()

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        *,
        signal: AbortSignal,
        on_progress: Progress,
    ) -> dict[str, Any]:
        """Call a tool; see `Client.call`.

        Cancellation: through `signal`. Concurrency: any number of tasks.

        Raises:
            ToolError: The server refused, or is gone.
            TurnAborted: The signal fired, and the server gave no result.
        """
        if self._client is None:
            why = self.problem or "it was closed"
            raise ToolError(f"The MCP server {self.name!r} is gone: {why}.", code="MCP_SERVER_GONE")
        return await self._client.call(tool, arguments, signal=signal, on_progress=on_progress)

    async def run(self) -> None:
        """Live. Ends soon after `stop`.

        Cancellation: safe. Concurrency: once.
        """
        problem: str | None = None
        self._life.deadline = anyio.current_time() + self._connect_s
        try:
            with self._life:
                await self._live()
            problem = "it ended"
            if self._life.cancelled_caught:
                problem = f"it was not ready within {self._connect_s:g} s"
        except asyncio.CancelledError:
            if is_host_cancellation():
                raise
            problem = "its connection was cancelled"  # by the SDK: one more way to end
        except Exception as exc:
            problem = self._reason(exc)
        finally:
            self._finish(problem)

    async def _live(self) -> None:
        sdk = await load()
        self._spoken = sdk.Spoken(self.name, self._warn_of_noise)
        host = sdk.Host(
            identity=self._identity,
            cwd=self._cwd,
            roots=self._roots,
            on_end=self._note_end,
            on_tools_changed=self._note_change,
            ask=self._ask,
            on_visited=self._on_visited,
        )
        async with sdk.open_client(self.server, host, self._spoken) as client:
            has_tools = await client.initialize()
            listed = await client.list_tools() if has_tools else []
            self._life.deadline = math.inf
            self._client = client
            self.is_ready = True
            self._on_listed(self, listed)
            self.settled.set()
            log.info("mcp_server_connected", server=self.name, tools=len(listed))
            try:
                await self._follow(client)
            finally:
                self._client = None

    async def _follow(self, client: Client) -> None:
        """Keep the list of tools up to date, until somebody ends the connection."""
        while not (self._is_stopping or self._has_ended):
            if self._is_list_stale:
                self._is_list_stale = False
                with anyio.fail_after(self._connect_s):
                    self._on_listed(self, await client.list_tools())
                with anyio.move_on_after(RELIST_PAUSE_S):  # it may say so for ever
                    await self._until(lambda: self._is_stopping or self._has_ended)
            else:
                await self._until(lambda: self._is_list_stale)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not (is_so() or self._is_stopping or self._has_ended):
            self._wake = anyio.Event()
            await self._wake.wait()

    def _note_end(self) -> None:
        self._has_ended = True
        self._wake.set()

    def _note_change(self) -> None:
        self._is_list_stale = True
        self._wake.set()

    def _warn_of_noise(self) -> None:
        text = "it writes lines to its stdout that are not MCP messages; they are skipped"
        self._on_warning(self, text)

    def _finish(self, problem: str | None) -> None:
        self._client = None
        self.is_ready = False
        if not self._is_stopping:
            self.problem = self._with_last_words(problem or "it ended")
        log.info("mcp_server_over", server=self.name, problem=self.problem)
        self.over.set()
        self.settled.set()
        self._on_over(self)

    def _with_last_words(self, problem: str) -> str:
        spoken = self._spoken
        if spoken is None or not isinstance(self.server, StdioServer):
            return problem
        if spoken.fault is not None:
            return spoken.fault
        if spoken.has_left:
            problem = f"it ended with exit code {spoken.exit_code}"
        return f"{problem}; it said: {spoken.last_line}" if spoken.last_line else problem

    def _reason(self, exc: BaseException) -> str:
        """Return in words why it failed, without what only a programmer understands."""
        while isinstance(exc, BaseExceptionGroup):
            exc = exc.exceptions[0]
        if isinstance(exc, _DEFECTS):
            log.error("mcp_connection_crashed", server=self.name, exc_info=exc)
        return _words_for(exc)


def _words_for(exc: BaseException) -> str:
    if isinstance(exc, ToolError):
        return exc.message
    if isinstance(exc, ImportError):
        return "the MCP library cannot be loaded"
    if isinstance(exc, TimeoutError):
        return "it did not answer in time"
    text = " ".join(re.sub(r"\?[^\s'\"]*", "", str(exc)).split())[
        :200
    ]  # a URL's query may be secret
    return text or type(exc).__name__
