"""All clients on the network, and the life of each: admitted, served, over."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import anyio
import structlog
from anyio.abc import TaskGroup

from acp_server.connection import Connection
from acp_server.guest import Guest
from acp_server.message import Message
from acp_server.network.limits import check_limits
from acp_server.network.outbox import MessageQueue
from acp_server.network.security import Principal, Refusal
from acp_server.network.streams import Streams
from agent_core.logs import get_logger

if TYPE_CHECKING:
    from acp_server.backend import Backend
    from acp_server.config import NetworkConfig

__all__ = ["Hub", "NetworkClient"]

log = get_logger(__name__)


class Traffic:
    """What went over one kind of transport, in bytes of messages, since the start."""

    __slots__ = ("n_connections", "received", "sent")

    def __init__(self) -> None:
        self.received = 0
        self.sent = 0
        self.n_connections = 0


class Hub:
    """The clients of one server.

    Attributes:
        backend: What their agents run on.
        limits: The ``[network]`` table.
        root: Where their sessions have to lie, a real path, or `None`.
        keeps: Whether turns go on when their client is lost.
        clients: Those that are connected.
        draining: Set when the server takes no more work.
        tasks: Where what outlives a request runs.
        traffic: What went over each transport.
        refused: How many requests were turned away, by the reason.
        ended: How many connections are over, by the reason.
        on_stopped: Called with the seconds from a stop to the answer of what was stopped.
    """

    def __init__(
        self,
        backend: Backend,
        limits: NetworkConfig,
        tasks: TaskGroup,
        *,
        root: str | None = None,
        keeps: bool = False,
    ) -> None:
        self.backend = backend
        self.limits = limits
        self.root = root
        self.keeps = keeps
        self.tasks = tasks
        self.clients: set[NetworkClient] = set()
        self.draining = anyio.Event()
        self.traffic = {"websocket": Traffic(), "http": Traffic()}
        self.refused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.on_stopped: Callable[[float], None] = lambda _seconds: None
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """Return a number no client had before; it stands for the client in the log."""
        return next(self._numbers)

    def turned_away(self) -> Refusal | None:
        """Return why no more clients are taken now, or `None`. Counts who is turned away."""
        if self.draining.is_set():
            refusal = Refusal(503, "The server is shutting down.", "draining")
        elif len(self.clients) >= self.limits.max_connections:
            sentence = "The server has as many connections as it takes."
            refusal = Refusal(503, sentence, "full")
        else:
            return None
        self.refused[refusal.reason] += 1
        return refusal

    @property
    def n_running(self) -> int:
        """How many turns run of people's own agents."""
        agents = self.backend.runtime.agents.values()
        return sum(agent.parent is None and agent.status == "running" for agent in agents)

    async def answered(self) -> None:
        """Wait until every request of every client has its answer, and no kept turn runs.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        for client in tuple(self.clients):
            await client.connection.peer.answered()
        for agent in tuple(self.backend.runtime.agents.values()):
            await agent.when_idle()

    def cancel_all(self) -> None:
        """Stop all turns."""
        for agent in tuple(self.backend.runtime.agents.values()):
            if agent.parent is None:
                agent.cancel({"kind": "user"})

    async def flushed(self) -> None:
        """Wait until all that was said has left. Cancellation: safe."""
        for client in tuple(self.clients):
            await client.flushed()

    def end_all(self, why: str) -> None:
        """End every connection."""
        for client in tuple(self.clients):
            client.end(why)

    def end_revoked(self, is_good: Callable[[Principal], bool]) -> None:
        """End the connections of those whose token is not good any more."""
        for client in tuple(self.clients):
            if not is_good(client.principal):
                client.end("revoked")


class NetworkClient:
    """One connection.

    Attributes:
        id: Known to nobody else, so it may stand for the connection in later requests.
        number: What it is called in the log.
        principal: Who it is.
        over: Set when it is over.
        transport: How it is connected: ``websocket`` or ``http``.
        why: Why it is: ``left``, ``flooded``, ``idle``, ``revoked``, ``shutdown``.
        traffic: What went over its transport.
        outbox: Where messages go; set by the transport.
        connection: What it talks to; there from the beginning of `run` on.
    """

    transport: ClassVar[str]
    outbox: MessageQueue | Streams
    connection: Connection

    def __init__(self, hub: Hub, principal: Principal) -> None:
        self.id = secrets.token_urlsafe(24)
        self.number = hub.next_number()
        self.principal = principal
        self.over = anyio.Event()
        self.why = ""
        self.traffic = hub.traffic[self.transport]
        self.traffic.n_connections += 1
        self._looks: asyncio.TimerHandle | None = None
        self._hub = hub
        self._heard_s = time.monotonic()
        hub.clients.add(self)

    async def flushed(self) -> None:
        """Wait until all that was said to it has left, or it is over. Cancellation: safe."""
        await self.outbox.flushed()

    def end(self, why: str) -> None:
        """Let it be over. Idempotent."""
        if not self.over.is_set():
            self.why = why
            self.over.set()
            self._hub.ended[why] += 1
            if self._looks is not None:
                self._looks.cancel()
            self._hub.clients.discard(self)

    @property
    def quiet_s(self) -> float:
        """How long nothing was heard of the client."""
        return time.monotonic() - self._heard_s

    def touch(self) -> None:
        """Note that the client is there."""
        self._heard_s = time.monotonic()

    def hear(self, message: Message | None) -> None:
        """Take one message; what comes when it is over is dropped."""
        self.touch()
        if not self.over.is_set():
            # A request by HTTP comes from a task of its own.
            with structlog.contextvars.bound_contextvars(connection=self.number):
                self.connection.peer.handle(message)

    async def run(self, begin: Callable[[TaskGroup], None]) -> None:
        """Serve the client until it is over; what it had going ends, or goes on, beside.

        Cancellation: the client is lost. Concurrency: once.

        Args:
            begin: Called with where the transport's own tasks run.
        """
        guest = Guest(
            owner=self.principal.name,
            is_remote=True,
            root=self._hub.root,
            max_prompts=self._hub.limits.max_prompts,
            admit=self._admit,
            number=self.number,
            on_stopped=self._hub.on_stopped,
        )
        try:
            structlog.contextvars.bind_contextvars(connection=self.number)  # in a task of its own
            async with anyio.create_task_group() as tasks:
                self.connection = Connection(self.outbox, tasks, guest)
                self.connection.open(self._hub.backend)
                self.connection.on_initialized(self._watch_idleness)
                log.info("client_connected", principal=self.principal.name)
                begin(tasks)
                self._watch_idleness()
                try:
                    await self.over.wait()
                finally:
                    self.end("left")
                    self.connection.lose(keeps=self._hub.keeps)
                    tasks.cancel_scope.cancel()
        finally:
            log.info("client_disconnected", why=self.why)
            self._hub.tasks.start_soon(self.connection.ended, self._hub.limits.keep_s)

    def _admit(self, method: str) -> None:
        limits = self._hub.limits
        check_limits(method, self.connection, limits, is_draining=self._hub.draining.is_set())

    def _watch_idleness(self) -> None:
        """End a client that says nothing, or look again later. A timer is less than a task."""
        if self._looks is not None:
            self._looks.cancel()
        limits = self._hub.limits
        limit_s = limits.idle_s if self.connection.is_initialized else limits.handshake_s
        left_s = limit_s - self.quiet_s
        if not limit_s or self.over.is_set():
            return
        if left_s <= 0 and not self.connection.peer.n_in_flight:
            self.end("idle")
            return
        often_s = limit_s / 4
        delay_s = max(left_s, often_s) if self.connection.is_initialized else often_s
        self._looks = asyncio.get_running_loop().call_later(delay_s, self._watch_idleness)
