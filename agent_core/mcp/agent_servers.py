"""The MCP servers of one agent: its tools come from them, and its turns know which are missing."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import anyio
from msgspec import Struct

from agent_core.cancellation import AbortSignal
from agent_core.content import Block
from agent_core.errors import AgentDisposed, ToolError
from agent_core.logs import get_logger
from agent_core.mcp.connection import CONNECT_S, Connection
from agent_core.mcp.servers import Answer, Question, Server, StdioServer
from agent_core.mcp.tools import Problem, make_tools
from agent_core.prompt import AssembleContext, Assembly
from agent_core.questions import Visit, ask_form, ask_url

if TYPE_CHECKING:
    from agent_core.agent import Agent
    from agent_core.loop import Allow, Refuse
    from agent_core.runtime import AgentRuntime

__all__ = ["AgentServers", "McpServers", "ServerNotice"]

PROMPT_WAIT_S: Final = 10.0
_SAY_AFTER_S: Final = 1.0
"""How long the first prompt waits for servers that are connecting."""
_MAX_NAMED: Final = 3

log = get_logger(__name__)


class ServerNotice(Struct, frozen=True):
    """What people should know about a server: a line, and what to look at."""

    title: str
    description: str


class McpServers:
    """The servers of all agents of a runtime. Made once, before there are agents."""

    def __init__(
        self,
        runtime: AgentRuntime,
        *,
        identity: tuple[str, str],
        connect_s: float = CONNECT_S,
        wait_s: float = PROMPT_WAIT_S,
    ) -> None:
        """Prepare.

        Args:
            runtime: Runs the connections.
            identity: Our name and version, for the servers.
            connect_s: What a server has to become ready.
            wait_s: How long a first prompt waits for servers that are not.
        """
        self.identity = identity
        self.connect_s = connect_s
        self.wait_s = wait_s
        self.start_task = runtime.start_task
        self._by_agent: dict[str, AgentServers] = {}

    def of(self, agent: Agent) -> AgentServers:
        """Return the servers of `agent`, none at first."""
        servers = self._by_agent.get(agent.id)
        if servers is None or servers.agent is not agent:
            servers = self._by_agent[agent.id] = AgentServers(agent, self)
            agent.hooks.on("agent/disposed", self._forget)
        return servers

    def _forget(self, agent: Agent) -> None:
        servers = self._by_agent.get(agent.id)
        if servers is not None and servers.agent is agent:
            del self._by_agent[agent.id]


class AgentServers:
    """The servers of `agent`."""

    def __init__(self, agent: Agent, shared: McpServers) -> None:
        self.agent = agent
        self._shared = shared
        self._connections: dict[str, Connection] = {}
        self._ending: set[Connection] = set()
        self._tools: dict[str, set[str]] = {}  # the names in agent.tools, by server
        self._listeners: dict[object, Callable[[ServerNotice], None]] = {}
        self._told: set[ServerNotice] = set()
        self._visits: dict[str, Visit] = {}
        self._is_waited_for = False
        agent.hooks.on("agent/disposed", lambda _agent: self.stop())
        agent.hooks.on("agent/prompt-submit", self._before_the_first_prompt)
        agent.hooks.on("system-prompt/assemble", self._name_the_missing)

    def observe(self, listener: Callable[[ServerNotice], None]) -> Callable[[], None]:
        """Call `listener` with every notice from now on; return a function that ends that."""
        key = object()
        self._listeners[key] = listener

        def remove() -> None:
            self._listeners.pop(key, None)

        return remove

    def use(self, servers: Sequence[Server]) -> None:
        """Have these servers and no others. Returns at once; they connect beside the agent.

        Those that are there already are kept as they are, unless they are over.

        Args:
            servers: With names of their own each.
        """
        wanted = {server.name: server for server in servers}
        if self.agent.status == "disposed":
            return  # nobody would end them
        self._told.clear()
        for name, connection in tuple(self._connections.items()):
            if wanted.get(name) != connection.server or connection.over.is_set():
                self._drop(connection)
        for name, server in wanted.items():
            if name not in self._connections:
                self._connect(server)

    def stop(self) -> None:
        """Have all of them end."""
        for connection in tuple(self._connections.values()):
            self._drop(connection)

    async def _ask(self, server: str, question: Question, signal: AbortSignal) -> Answer:
        """Ask the person for a server; what cannot be asked is declined, and logged."""
        message = f"{server}: {question.message}"
        try:
            if question.url is not None:
                visit = await ask_url(self.agent, message, question.url, signal)
                self._visits[question.visit_id] = visit
                return visit.action, {}
            reply = await ask_form(self.agent, message, question.schema or {}, signal)
        except ToolError as exc:
            log.info("mcp_question_declined", server=server, code=exc.code)
            return "decline", {}
        return reply.action, reply.content

    def _complete_visit(self, visit_id: str) -> None:
        visit = self._visits.pop(visit_id, None)
        if visit is not None:
            visit.complete()

    async def ended(self) -> None:
        """Wait until nothing is left of those that were told to end.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        for connection in tuple(self._ending):
            await connection.over.wait()

    def _connect(self, server: Server) -> None:
        roots = self.agent.roots
        connection = Connection(
            server,
            cwd=roots.cwd,
            roots=lambda: (self.agent.roots.cwd, *self.agent.roots.additional),
            identity=self._shared.identity,
            on_listed=self._take_tools,
            on_warning=self._warn,
            on_over=self._forget_tools,
            ask=functools.partial(self._ask, server.name),
            on_visited=self._complete_visit,
            connect_s=self._shared.connect_s,
        )
        try:
            self._shared.start_task(
                connection.run, stop=connection.stop, name=f"mcp {self.agent.id} {server.name}"
            )
        except AgentDisposed:
            log.info("mcp_server_not_started", server=server.name)
            return
        self._connections[server.name] = connection
        self._is_waited_for = True

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection.name]
        self._remove_tools(connection)
        if not connection.over.is_set():
            self._ending.add(connection)
            connection.stop()

    # --- what connections say ----------------------------------------------------------------

    def _take_tools(self, connection: Connection, listed: list[Any]) -> None:
        if self._connections.get(connection.name) is not connection:
            return
        self._remove_tools(connection)
        tools, left_out = make_tools(connection, listed, self.agent.tools)
        self.agent.tools.update(tools)
        self._tools[connection.name] = set(tools)
        if left_out:
            self._warn(connection, _left_out_text(left_out))

    def _remove_tools(self, connection: Connection) -> None:
        for name in self._tools.pop(connection.name, ()):
            self.agent.tools.pop(name, None)

    def _forget_tools(self, connection: Connection) -> None:
        self._ending.discard(connection)
        if self._connections.get(connection.name) is connection and connection.problem is not None:
            self._remove_tools(connection)
            title = f"The MCP server {connection.name!r} is not available."
            look = f"{connection.problem.rstrip('.')}. {_what_to_look_at(connection.server)}"
            self._tell(ServerNotice(title, look))

    def _warn(self, connection: Connection, text: str) -> None:
        self._tell(ServerNotice(f"The MCP server {connection.name!r} is at fault.", f"{text}."))

    def _tell(self, notice: ServerNotice) -> None:
        if notice in self._told:
            return
        self._told.add(notice)
        log.warning("mcp_server_notice", title=notice.title, description=notice.description)
        for listener in tuple(self._listeners.values()):
            listener(notice)

    # --- the agent's turns -------------------------------------------------------------------

    async def _before_the_first_prompt(
        self,
        _agent: Agent,
        _content: tuple[Block, ...],
        _source: str,
        signal: AbortSignal,
        next_: Callable[[], Awaitable[Allow | Refuse]],
    ) -> Allow | Refuse:
        """Wait a little for servers that are connecting, so that the first request has them."""
        if self._is_waited_for:
            self._is_waited_for = False
            async with signal.scope():
                with anyio.move_on_after(min(_SAY_AFTER_S, self._shared.wait_s)):
                    await self._settled()
                if self._shared.wait_s > _SAY_AFTER_S:
                    self._say_who_is_waited_for()
                    with anyio.move_on_after(self._shared.wait_s - _SAY_AFTER_S):
                        await self._settled()
            for connection in self._connections.values():
                if not connection.settled.is_set():
                    title = f"The MCP server {connection.name!r} is still connecting."
                    self._tell(ServerNotice(title, "Its tools come later, if it gets ready."))
        return await next_()

    async def _settled(self) -> None:
        for connection in tuple(self._connections.values()):
            await connection.settled.wait()

    def _say_who_is_waited_for(self) -> None:
        for connection in self._connections.values():
            if not connection.settled.is_set():
                title = f"Waiting for the MCP server {connection.name!r}."
                limit = f"{self._shared.wait_s:g} seconds"
                self._tell(ServerNotice(title, f"The prompt goes on after {limit} at most."))

    async def _name_the_missing(
        self,
        assembly: Assembly,
        context: AssembleContext,
        next_: Callable[..., Awaitable[Assembly]],
    ) -> Assembly:
        missing = [name for name, each in self._connections.items() if not each.is_ready]
        if not missing:
            return await next_()
        text = (
            f"These MCP servers are not available now, and their tools are missing: "
            f"{', '.join(missing)}. If you need one, say so."
        )
        sections = {**assembly.sections, "mcp": text}
        return await next_(Assembly(sections, assembly.tools), context)


def _left_out_text(left_out: dict[str, Problem]) -> str:
    named = [f"{name[:64]!r} ({why})" for name, why in list(left_out.items())[:_MAX_NAMED]]
    more = len(left_out) - len(named)
    return f"it lists tools that cannot be used: {', '.join(named)}" + (
        f" and {more} more" if more else ""
    )


def _what_to_look_at(server: Server) -> str:
    if isinstance(server, StdioServer):
        return f"Look at its command, {server.command!r}, and start it by hand to see what it says."
    parts = urlsplit(server.url)  # what else it holds may be secret
    address = f"{parts.scheme}://{parts.hostname}{parts.path}"
    return f"Look at its address, {address}, its headers, and whether it is running."
