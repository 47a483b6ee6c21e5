"""A client by Streamable HTTP, for the tests of the network."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
from network_rig import LIMIT_S, Server

JSON = {"content-type": "application/json"}


class HttpEditor:
    """A client by HTTP, and all that came on its streams, with the stream's session."""

    def __init__(self, http: httpx2.AsyncClient, url: str, tasks: Any) -> None:
        self.http = http
        self.url = url
        self.id = ""
        self.received: list[tuple[str | None, dict[str, Any]]] = []
        self._tasks = tasks
        self._changed = anyio.Event()
        self._last_id = 0

    async def initialize(self) -> dict[str, Any]:
        answer = await self.post("initialize", protocolVersion=1)
        assert answer.status_code == 200
        self.id = answer.headers["acp-connection-id"]
        result: dict[str, Any] = answer.json()["result"]
        return result

    def headers(self, session: str | None = None) -> dict[str, str]:
        named = {} if session is None else {"acp-session-id": session}
        return ({"acp-connection-id": self.id} if self.id else {}) | named

    async def post(
        self, method: str, *, session: str | None = None, **params: Any
    ) -> httpx2.Response:
        self._last_id += 1
        body = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        return await self.send(body, session)

    async def send(self, body: object, session: str | None = None) -> httpx2.Response:
        headers = JSON | self.headers(session)
        return await self.http.post(self.url, content=json.dumps(body), headers=headers)

    async def ask(self, method: str, *, session: str | None = None, **params: Any) -> int:
        answer = await self.post(method, session=session, **params)
        assert (answer.status_code, answer.content) == (202, b"")
        return self._last_id

    async def open(self, session: str | None = None) -> None:
        await self._tasks.start(self._read, session)

    async def _read(self, session: str | None, *, task_status: Any) -> None:
        headers = self.headers(session) | {"accept": "text/event-stream"}
        async with self.http.stream("GET", self.url, headers=headers) as stream:
            assert stream.status_code == 200
            task_status.started()
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    self.received.append((session, json.loads(line[6:])))
                    self._changed.set()
                    self._changed = anyio.Event()

    def leave(self) -> None:
        """Read no stream any more, and be gone at the end of the block."""
        self._tasks.cancel_scope.cancel()

    async def until(self, condition: Callable[[], Any]) -> Any:
        with anyio.fail_after(LIMIT_S):
            while not (found := condition()):
                await self._changed.wait()
        return found

    async def answer(self, request_id: int) -> tuple[str | None, dict[str, Any]]:
        """The answer, with the stream it came on."""
        found: tuple[str | None, dict[str, Any]] = await self.until(
            lambda: next(
                (e for e in self.received if e[1].get("id") == request_id and "method" not in e[1]),
                None,
            )
        )
        return found

    async def new_session(self, cwd: Path) -> str:
        stream, answer = await self.answer(
            await self.ask("session/new", cwd=str(cwd), mcpServers=[])
        )
        assert stream is None
        session: str = answer["result"]["sessionId"]
        return session

    async def prompt(self, session: str, said: str) -> int:
        text = [{"type": "text", "text": said}]
        return await self.ask("session/prompt", session=session, sessionId=session, prompt=text)

    def said(self, session: str, stream: str | None) -> str:
        updates = [m["params"] for at, m in self.received if at == stream and "params" in m]
        return "".join(
            each["update"]["content"]["text"]
            for each in updates
            if each["sessionId"] == session
            and each.get("update", {}).get("sessionUpdate") == "agent_message_chunk"
        )


@asynccontextmanager
async def http_editor(
    server: Server, *, token: str | None = None, initialize: bool = True
) -> AsyncIterator[HttpEditor]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx2.AsyncClient(timeout=LIMIT_S, headers=headers) as http,
        anyio.create_task_group() as tasks,
    ):
        client = HttpEditor(http, f"{server.http}/acp", tasks)
        if initialize:
            await client.initialize()
            await client.open()
        yield client
        tasks.cancel_scope.cancel()
