"""An agent somewhere else, spoken to over a WebSocket; for what is said see `client`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from acp_server.client import AgentConnection, AgentGone
from acp_server.peer import Method
from acp_server.transports.websocket import Socket, SocketError, open_socket

__all__ = ["AgentSocket", "TokenRefused", "reach_agent"]


class TokenRefused(AgentGone):
    """The agent's server wants a token, or another one."""


@asynccontextmanager
async def reach_agent(
    url: str,
    *,
    token: str | None = None,
    connecting: anyio.CancelScope | None = None,
    methods: Mapping[str, Method],
    notifications: Mapping[str, Callable[[bytes | None], None]],
) -> AsyncIterator[AgentSocket]:
    """Connect to the agent; close the connection when the block ends.

    Cancellation: safe; the connection is closed first. Concurrency: any number of agents.

    Args:
        url: Where it is, ``ws://`` or ``wss://``.
        token: What it is shown.
        connecting: What to cancel to give up before there is a connection.
        methods: The requests it may make of us, as `Peer` takes them.
        notifications: What it may tell us, likewise.

    Raises:
        TokenRefused: It wants another token.
        AgentGone: It cannot be reached, or does not let us in.
    """
    async with AsyncExitStack() as stack:
        try:
            socket = await stack.enter_async_context(
                open_socket(url, token=token, connecting=connecting)
            )
        except SocketError as exc:
            raise (TokenRefused if exc.is_about_token else AgentGone)(str(exc)) from None
        tasks = await stack.enter_async_context(anyio.create_task_group())
        agent = AgentSocket(socket, tasks, methods, notifications)
        tasks.start_soon(agent._watch)
        try:
            yield agent
        finally:
            agent._settle()
            tasks.cancel_scope.cancel()


class AgentSocket(AgentConnection):
    """A connection to one agent. Made by `reach_agent`."""

    def __init__(
        self,
        socket: Socket,
        tasks: TaskGroup,
        methods: Mapping[str, Method],
        notifications: Mapping[str, Callable[[bytes | None], None]],
    ) -> None:
        super().__init__(socket.outbox, tasks, methods, notifications)
        self._socket = socket
        socket.listen(self._receive, self._pace)

    def why_gone(self) -> AgentGone:
        """Say why the connection is over; meant for after `ended`."""
        return AgentGone(str(self._socket.problem))

    async def _pace(self) -> None:
        if self._socket.outbox.is_congested:
            await self._socket.outbox.drained()

    async def _watch(self) -> None:
        await self._socket.ended.wait()
        self._settle()
