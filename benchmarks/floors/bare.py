"""An agent of nothing but asyncio and json: what any Python agent pays at least.

It answers ``initialize``, ``session/new`` and ``session/prompt``, and understands two prompts:
``count N`` and ``stall``. It has no model, no tools, no log, and forgets everything.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

UPDATES_BETWEEN_YIELDS = 16


class Bare:
    """The agent and its two pipes."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._encode = json.JSONEncoder(separators=(",", ":")).encode
        self._turns: dict[str, asyncio.Task[None]] = {}

    def receive(self, line: bytes) -> None:
        """Do what one message asks for."""
        message = json.loads(line)
        match message["method"]:
            case "initialize":
                self._answer(message, {"protocolVersion": 1, "agentCapabilities": {}})
            case "session/new":
                self._answer(message, {"sessionId": f"session-{message['id']}"})
            case "session/prompt":
                session_id = message["params"]["sessionId"]
                self._turns[session_id] = asyncio.create_task(self._turn(message))
            case "session/cancel":
                self._turns[message["params"]["sessionId"]].cancel()

    async def _turn(self, message: dict[str, Any]) -> None:
        session_id = message["params"]["sessionId"]
        words = message["params"]["prompt"][0]["text"].split()
        try:
            if words == ["stall"]:
                await asyncio.Event().wait()
            await self._count(session_id, int(words[1]))
        except asyncio.CancelledError:
            self._answer(message, {"stopReason": "cancelled"})
        else:
            self._answer(message, {"stopReason": "end_turn"})

    async def _count(self, session_id: str, count: int) -> None:
        for number in range(1, count + 1):
            content = {"type": "text", "text": f"{number} "}
            update = {"sessionUpdate": "agent_message_chunk", "content": content}
            params = {"sessionId": session_id, "update": update}
            self._send({"method": "session/update", "params": params})
            if number % UPDATES_BETWEEN_YIELDS == 0:
                await self._writer.drain()
                await asyncio.sleep(0)

    def _answer(self, message: dict[str, Any], result: dict[str, Any]) -> None:
        self._send({"id": message["id"], "result": result})

    def _send(self, body: dict[str, Any]) -> None:
        self._writer.write(self._encode({"jsonrpc": "2.0", **body}).encode() + b"\n")


async def serve() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    agent = Bare(asyncio.StreamWriter(transport, protocol, None, loop))
    async for line in reader:
        agent.receive(line)


if __name__ == "__main__":
    asyncio.run(serve())
