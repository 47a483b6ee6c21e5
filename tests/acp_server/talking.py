"""A client of a connection in this process: every line it sends is taken before the next."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from serving import ask, text

from acp_server.backend import Backend, open_backend
from acp_server.config import Config
from acp_server.connection import Connection
from conformance.schema import Schema

__all__ = ["CWD", "Lines", "Talk", "said_by_agent", "talk"]


CWD = "/"
SCHEMA: Final = Schema()
DRAFTS: Final = Schema(is_unstable=True)


class Lines:
    """An outbox that keeps what was sent, and refuses what no ACP client could read.

    Attributes:
        schema: What updates and requests have to agree with.
        asked: The methods of requests by id; their results are held against the schema.
    """

    def __init__(self) -> None:
        self.schema = SCHEMA
        self.asked: dict[object, str] = {}
        self.sent: list[dict[str, Any]] = []
        self.is_congested = False
        self.low = anyio.Event()
        self._changed = anyio.Event()

    def send(self, message: bytes) -> None:
        self.sent.append(json.loads(message))
        self._check(self.sent[-1])
        self._changed.set()
        self._changed = anyio.Event()

    async def drained(self) -> None:
        if self.is_congested:
            await self.low.wait()

    def _check(self, message: dict[str, Any]) -> None:
        """Hold what is sent against the published schema."""
        if (method := message.get("method")) is not None:
            if method in self.schema.methods("client"):
                assert self.schema.params_problems("client", method, message["params"]) == []
        elif "result" in message and (method := self.asked.get(message["id"])) is not None:
            schema = SCHEMA if method in SCHEMA.methods("agent") else DRAFTS
            assert schema.result_problems("agent", method, message["result"]) == []

    def responses(self, request_id: object) -> list[dict[str, Any]]:
        return [m for m in self.sent if "method" not in m and m["id"] == request_id]

    def updates(self) -> list[dict[str, Any]]:
        return [m["params"]["update"] for m in self.sent if m.get("method") == "session/update"]

    async def until(self, condition: Any, limit_s: float = 10) -> None:
        with anyio.fail_after(limit_s):
            while not condition():
                await self._changed.wait()


class Talk:
    """A connection and what a client says on it."""

    def __init__(self, connection: Connection, lines: Lines) -> None:
        self.connection = connection
        self.lines = lines
        self._last_id = 0

    def say(self, method: str, **params: object) -> int:
        """Send a request without waiting; return its id."""
        self._last_id += 1
        self.lines.asked[self._last_id] = method
        self.connection.receive(json.dumps(ask(self._last_id, method, params)).encode())
        return self._last_id

    def note(self, method: str, **params: object) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        self.connection.receive(json.dumps(message).encode())

    def answer(self, request: dict[str, Any], result: object) -> None:
        """Answer a request of the agent's."""
        message = {"jsonrpc": "2.0", "id": request["id"], "result": result}
        self.connection.receive(json.dumps(message).encode())

    async def response(self, request_id: int) -> dict[str, Any]:
        await self.lines.until(lambda: self.lines.responses(request_id))
        (response,) = self.lines.responses(request_id)
        return response

    async def result(self, request_id: int) -> dict[str, Any]:
        response = await self.response(request_id)
        assert "error" not in response, response
        result: dict[str, Any] = response["result"]
        return result

    async def new_session(self) -> str:
        result = await self.result(self.say("session/new", cwd=CWD, mcpServers=[]))
        session_id: str = result["sessionId"]
        return session_id

    def prompt(self, session_id: str, said: str, **more: object) -> int:
        return self.say("session/prompt", sessionId=session_id, prompt=text(said), **more)

    def load(self, session_id: str) -> int:
        return self.say("session/load", sessionId=session_id, cwd=CWD, mcpServers=[])

    def cancel(self, session_id: str) -> None:
        self.note("session/cancel", sessionId=session_id)


@asynccontextmanager
async def talk(
    tmp_path: Any,
    *,
    is_open: bool = True,
    capabilities: object = None,
    **settings: Any,
) -> AsyncIterator[tuple[Talk, Backend]]:
    """Yield a connection that was initialized, and the backend it has or will be given.

    `capabilities` are the client's, `settings` go to the `Config`.
    """
    lines = Lines()
    if isinstance(capabilities, dict) and "subagents" in capabilities:
        lines.schema = DRAFTS  # whoever asked for a draft is sent it
    async with anyio.create_task_group() as tasks:
        connection = Connection(lines, tasks)
        at = Talk(connection, lines)
        async with open_backend(Config(state_dir=str(tmp_path), **settings)) as backend:
            offered = {} if capabilities is None else {"clientCapabilities": capabilities}
            await at.result(at.say("initialize", protocolVersion=1, **offered))
            if is_open:
                connection.open(backend)
            yield at, backend
        connection.peer.close()
        tasks.cancel_scope.cancel()


def said_by_agent(updates: list[dict[str, Any]]) -> str:
    return "".join(
        u["content"]["text"] for u in updates if u["sessionUpdate"] == "agent_message_chunk"
    )
