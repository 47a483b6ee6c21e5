"""The MCP servers that a client names for a session, and what it is told of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from acp_server import types as wire
from acp_server.capabilities import Features
from acp_server.peer import Peer
from agent_core.cancellation import AbortSignal
from agent_core.content import Block
from agent_core.mcp.agent_servers import AgentServers, ServerNotice
from agent_core.mcp.servers import HttpServer, Server, SseServer, StdioServer

if TYPE_CHECKING:
    from agent_core.agent import Agent
    from agent_core.loop import Allow, Refuse

__all__ = ["SessionServers", "servers_from", "servers_problem"]


def servers_problem(named: Sequence[wire.McpServer]) -> str | None:
    """Return what is wrong with a list of servers, or `None`."""
    names: set[str] = set()
    for server in named:
        if (problem := server.problem()) is not None:
            return problem
        if server.name in names:
            return f"two MCP servers in mcpServers have the name {server.name!r}"
        names.add(server.name)
    return None


def servers_from(named: Sequence[wire.McpServer]) -> tuple[Server, ...]:
    """Translate a list of servers without problems."""
    return tuple(_server_from(server) for server in named)


def _server_from(server: wire.McpServer) -> Server:
    if server.type == "stdio":
        environ = tuple((each.name, each.value) for each in server.env or ())
        return StdioServer(server.name, server.command or "", tuple(server.args or ()), environ)
    kind = HttpServer if server.type == "http" else SseServer
    headers = tuple((each.name, each.value) for each in server.headers or ())
    return kind(server.name, server.url or "", headers)


class SessionServers:
    """The servers of one session, as its client named them.

    What the client should know of them it is told once: in a notice if it takes these, otherwise
    in a line of the next turn, because outside of a turn clients expect no text.
    """

    def __init__(self, session_id: str, peer: Peer, features: Features) -> None:
        self._session_id = session_id
        self._peer = peer
        self._features = features
        self._agent: Agent | None = None
        self._servers: AgentServers | None = None
        self._named: tuple[Server, ...] | None = None
        self._remove: Callable[[], None] = _nothing
        self._held: list[ServerNotice] = []
        self._n_said = 0

    def attach(self, agent: Agent) -> Callable[[], None]:
        """Speak in the turns of `agent`; return a function that ends that."""
        self._agent = agent
        remove_listener = agent.hooks.on("agent/prompt-submit", self._say_what_was_held)

        def detach() -> None:
            remove_listener()
            self._remove()
            self._remove = _nothing
            self._agent = None

        return detach

    def use(self, servers: AgentServers, named: Sequence[wire.McpServer] | None) -> None:
        """Have the agent use what the client named, in place of what it used before."""
        self._named = servers_from(named or ())
        self.use_again(servers)

    def use_again(self, servers: AgentServers) -> None:
        """Have the agent use what the client named before for another one."""
        self._remove()
        self._servers = servers
        self._remove = servers.observe(self._say)
        servers.use(self._named or ())

    @property
    def are_named(self) -> bool:
        """Whether the client's servers are known, be they none."""
        return self._named is not None

    async def ended(self) -> None:
        """Wait until nothing is left of servers that were told to end.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        servers = self._servers
        if servers is None:
            return
        await servers.ended()
        if self._servers is servers and servers.agent.status == "disposed":
            self._servers = None  # nothing keeps the agent any more

    def _say(self, notice: ServerNotice) -> None:
        if self._features.knows_notices:
            update: wire.Update = wire.Notice("warning", notice.title, notice.description)
        elif self._agent is not None and self._agent.status == "running":
            self._n_said += 1
            text = wire.TextContent(f"{notice.title} {notice.description}\n")
            update = wire.AgentThoughtChunk(text, f"mcp-{self._n_said}")
        else:
            self._held.append(notice)
            return
        self._peer.send(wire.encode_update(self._session_id, update))

    async def _say_what_was_held(
        self,
        _agent: Agent,
        _content: tuple[Block, ...],
        _source: str,
        _signal: AbortSignal,
        next_: Callable[[], Awaitable[Allow | Refuse]],
    ) -> Allow | Refuse:
        held, self._held = self._held, []
        for notice in held:
            self._say(notice)
        return await next_()


def _nothing() -> None:
    pass
