"""The WebSocket transport: one text frame is one message, in both directions.

Frames, pings, fragments and the size of messages are the server's matter; see
`acp_server.network.protocols`. Binary frames are no messages and are passed over.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import anyio
from anyio.abc import TaskGroup

from acp_server.message import parse
from acp_server.network.asgi import Receive, Scope, Send
from acp_server.network.hub import Hub, NetworkClient
from acp_server.network.outbox import MessageQueue
from acp_server.network.security import SUBPROTOCOL, Principal
from agent_core.logs import get_logger

__all__ = ["serve_websocket"]

LAST_WORDS_S: Final = 1.0
"""How long what was said last may take to leave, when we end a connection."""
CLOSE_CODES: Final = {"flooded": 1008, "idle": 1008, "revoked": 1008, "shutdown": 1001}

log = get_logger(__name__)


class _WebSocketClient(NetworkClient):
    transport = "websocket"


async def serve_websocket(
    hub: Hub, principal: Principal, scope: Scope, receive: Receive, send: Send
) -> None:
    """Accept one connection that was found good, and serve it until it is over.

    Cancellation: the client is lost. Concurrency: any number of connections.
    """
    client = _WebSocketClient(hub, principal)
    client.outbox = queue = MessageQueue(hub.limits.max_unread_bytes, lambda: client.end("flooded"))

    def begin(tasks: TaskGroup) -> None:
        tasks.start_soon(_write, queue, client, send, name="write")
        tasks.start_soon(_read, client, receive, name="read")

    try:
        await send(
            {
                "type": "websocket.accept",
                "subprotocol": SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None,
                "headers": [(b"acp-connection-id", client.id.encode())],
            }
        )
    except OSError:  # it left before we could say so
        client.end("left")
        return
    await client.run(begin)
    queue.lose()
    with anyio.move_on_after(LAST_WORDS_S), suppress(OSError, RuntimeError):
        code = CLOSE_CODES.get(client.why, 1000)
        await send({"type": "websocket.close", "code": code, "reason": client.why})


async def _write(queue: MessageQueue, client: NetworkClient, send: Send) -> None:
    async def write(batch: list[bytes]) -> None:
        for message in batch:
            await send({"type": "websocket.send", "text": message.decode()})
            client.traffic.sent += len(message)

    try:
        await queue.run(write)
    except (OSError, RuntimeError):  # it is closed, which is noticed here first
        client.end("left")


async def _read(client: NetworkClient, receive: Receive) -> None:
    while (message := await receive())["type"] != "websocket.disconnect":
        text = message.get("text")
        if text is None:
            log.info("binary_frame_ignored")
        else:
            data = text.encode()
            client.traffic.received += len(data)
            client.hear(parse(data))
    client.end("left")
