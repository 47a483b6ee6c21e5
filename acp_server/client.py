"""The client's end of an ACP connection: what an agent is asked and told, however it is reached.

Knows messages, nothing of sessions or screens. Updates and answers are handed on in the order in
which the agent wrote them, so whatever the agent said before an answer has been shown when the
answer arrives. What is no message is kept for people and never answered: an agent that prints to
its stdout would not know what to do with an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from acp_server import __version__
from acp_server.errors import PeerClosed, RemoteError
from acp_server.message import BadMessage, parse
from acp_server.peer import Method, Outbox, Peer

__all__ = ["CANCELLED", "AgentConnection", "AgentGone", "Params", "selected"]

PROTOCOL_VERSION: Final = 1
KEPT_LINES: Final = 20
KEPT_LINE_BYTES: Final = 2_000

CANCELLED: Final = {"outcome": {"outcome": "cancelled"}}
"""The answer to a permission question of a turn that is being stopped."""

Params = dict[str, Any]


class AgentGone(Exception):
    """The agent could not be reached, ended, or closed its output. The message says which."""


def selected(option_id: str) -> Params:
    """Return the answer to a permission question that picks an option."""
    return {"outcome": {"outcome": "selected", "optionId": option_id}}


class AgentConnection(ABC):
    """Requests and notifications to one agent; see `agent_process` and `agent_socket`.

    Attributes:
        ended: Set once nothing more can come from the agent.
    """

    def __init__(
        self,
        outbox: Outbox,
        tasks: TaskGroup,
        methods: Mapping[str, Method],
        notifications: Mapping[str, Callable[[bytes | None], None]],
    ) -> None:
        self.ended: Final = anyio.Event()
        self._peer = Peer(outbox, tasks, methods, notifications, lambda _method: None)
        self._last_words: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def last_words(self) -> list[str]:
        """The newest lines the agent logged, and those that should have been messages."""
        return list(self._last_words)

    async def initialize(self, client: str, capabilities: Params | None = None) -> Params:
        """Introduce us as `client` with its `capabilities`, if any; return the agent's answer.

        Cancellation and errors: as `request`; another protocol version is a `RemoteError`.
        """
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "clientCapabilities": capabilities or {},
            "clientInfo": {"name": client, "version": __version__},
        }
        hello = await self.request("initialize", params)
        version = hello.get("protocolVersion")
        if version != PROTOCOL_VERSION:
            raise RemoteError(0, f"the agent speaks protocol version {version}, not 1")
        return hello

    async def request(self, method: str, params: Params) -> Params:
        """Send a request and wait for its answer, without a limit.

        Cancellation: safe; the agent is told by ``$/cancel_request``, a late answer is dropped.
        Concurrency: any number of tasks; requests go out in call order.

        Returns:
            The ``result`` member; ``{}`` if it is not an object.

        Raises:
            RemoteError: The agent answered with an error.
            AgentGone: The agent ended first, or we hung up.
        """
        try:
            result = msgspec.json.decode(await self._peer.call(method, params))
        except PeerClosed:
            raise self.why_gone() from None
        return result if isinstance(result, dict) else {}

    def notify(self, method: str, params: Params) -> None:
        """Send a notification. Nothing happens if the agent is gone."""
        self._peer.notify(method, params)

    def hang_up(self) -> None:
        """Send nothing more, and wait for no answer. What was sent is still delivered."""
        self._peer.close()

    @abstractmethod
    def why_gone(self) -> AgentGone:
        """Say how the agent ended; meant for after `ended`."""

    def _settle(self) -> None:
        self.ended.set()
        self.hang_up()

    def _receive(self, line: bytes | None) -> None:
        message = BadMessage(0, "too long") if line is None else parse(line)
        if isinstance(message, BadMessage):
            self._keep("not a message: ", line or b"(too long)")
        else:
            self._peer.handle(message)

    def _keep(self, prefix: str, line: bytes) -> str:
        kept = prefix + line[:KEPT_LINE_BYTES].decode("utf-8", "replace").rstrip()
        self._last_words.append(kept)
        return kept
