"""What ``session/cancel`` asks of the agent, over a real connection in this process."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
from core_rig import Hang, rig, say

from acp_server.backend import Backend
from acp_server.config import Config
from acp_server.connection import Connection
from agent_core.events import Aborted, Completed, TurnEnd


class Lines:
    """An `Outbox` that keeps what the client would read."""

    is_congested = False

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self._news = anyio.Event()

    def send(self, message: bytes) -> None:
        self.sent.append(msgspec.json.decode(message))
        self._news.set()
        self._news = anyio.Event()

    async def drained(self) -> None:
        pass

    async def answer(self, request_id: int) -> dict[str, Any]:
        while True:
            for message in self.sent:
                if message.get("id") == request_id and "method" not in message:
                    return message
            await self._news.wait()


@pytest.mark.race
@pytest.mark.requirement("R68", "R77", "R19")
async def test_a_clients_cancel_stops_the_turn_for_the_user_and_says_so_to_nobody() -> None:
    hang = Hang()
    async with rig(hang, say("B")) as r, anyio.create_task_group() as tasks:
        outbox = Lines()
        connection = Connection(outbox, tasks)
        store: Any = r.runtime._store

        def receive(method: str, request_id: int | None = None, **params: Any) -> None:
            message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
            if request_id is not None:
                message["id"] = request_id
            connection.receive(msgspec.json.encode(message))

        receive("initialize", 1, protocolVersion=1)
        await outbox.answer(1)
        connection.open(Backend(Config(), r.runtime, store))
        receive("session/new", 2, cwd="/", mcpServers=[])
        session_id = (await outbox.answer(2))["result"]["sessionId"]
        text = [{"type": "text", "text": "A"}]
        receive("session/prompt", 3, sessionId=session_id, prompt=text)
        receive("session/prompt", 4, sessionId=session_id, prompt=text)
        await hang.hanging.wait()
        receive("session/cancel", sessionId=session_id)
        signal = r.model.requests[0].signal

        assert signal.reason == {"kind": "user"}
        assert (await outbox.answer(3))["result"]["stopReason"] == "cancelled"
        assert (await outbox.answer(4))["result"]["stopReason"] == "cancelled"
        receive("session/prompt", 5, sessionId=session_id, prompt=text)
        assert (await outbox.answer(5))["result"]["stopReason"] == "end_turn"
        agent = r.runtime.agents[session_id]
        ends = [e.data.outcome for e in agent.session.events if isinstance(e.data, TurnEnd)]
        assert ends == [Aborted(), Completed()]
        assert '"kind": "user"' not in str(outbox.sent)
        tasks.cancel_scope.cancel()
