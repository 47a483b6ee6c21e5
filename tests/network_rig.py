"""What the tests of the network share: the real command, listening, and a client on a WebSocket."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from conformance.processes import MARKER, kill, living_family

TOKEN = "a-good-token-0123456789"
LIMIT_S = 20


class Server:
    """A process that listens."""

    def __init__(self, process: anyio.abc.Process, state: Path) -> None:
        self.process = process
        self.state = state
        self.port = 0
        self.said = ""
        self._heard = anyio.Event()

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}/acp"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def hear(self) -> None:
        assert self.process.stderr is not None
        async for data in self.process.stderr:
            self.said += data.decode("utf-8", "replace")
            if found := re.search(r"listening on https?://\S+?:(\d+)/acp", self.said):
                self.port = int(found[1])
            self._heard.set()
            self._heard = anyio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        with anyio.fail_after(LIMIT_S):
            while not condition():
                await self._heard.wait()

    async def until_said(self, text: str) -> None:
        await self.until(lambda: text in self.said)


@asynccontextmanager
async def listening(
    tmp_path: Path,
    *flags: str,
    listen: str = "127.0.0.1:0",
    network: str = "",
    env: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
    must_end_well: bool = True,
) -> AsyncIterator[Server]:
    """Start the command; at the end it must leave with 0 when it is told to.

    `network` are lines of the table ``[network]``; `under` is a command that runs another one.
    """
    config = tmp_path / "config.toml"
    config.write_text(f"[network]\n{network}\n")
    state = tmp_path / "state"
    command = [*under, sys.executable, "-m", "acp_server", "serve", "--listen", listen]
    command += ["--state-dir", str(state), "--config", str(config), *flags]
    mark = uuid.uuid4().hex
    env = {**os.environ, MARKER: mark, **(env or {})}
    process = await anyio.open_process(command, stdin=subprocess.DEVNULL, env=env)
    server = Server(process, state)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.hear)
        try:
            await server.until_said("listening on")
            yield server
            if must_end_well:
                process.terminate()
                with anyio.fail_after(LIMIT_S):
                    assert await process.wait() == 0, server.said
                assert "Traceback" not in server.said, server.said
        finally:
            # Of a server that was killed, by the test or here, commands may be left.
            root = {process.pid} if process.returncode is None else set()
            kill(living_family(root, f"{MARKER}={mark}"))
            with anyio.CancelScope(shield=True):
                await process.wait()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await process.aclose()


class Editor:
    """A client on a WebSocket. It answers no question by itself."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.received: list[dict[str, Any]] = []
        self.close_code: int | None = None
        self._last_id = 0
        self._changed = anyio.Event()

    async def read(self) -> None:
        try:
            while True:
                message = await self.socket.recv()
                assert isinstance(message, str)
                self.received.append(json.loads(message))
                self._change()
        except ConnectionClosed:
            self.close_code = self.socket.close_code
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        with anyio.fail_after(limit_s):
            while not condition():
                await self._changed.wait()

    async def say(self, method: str, **params: Any) -> int:
        self._last_id += 1
        await self.post({"id": self._last_id, "method": method, "params": params})
        return self._last_id

    async def note(self, method: str, **params: Any) -> None:
        await self.post({"method": method, "params": params})

    async def post(self, message: dict[str, Any]) -> None:
        await self.socket.send(json.dumps({"jsonrpc": "2.0", **message}))

    async def response(self, request_id: int) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [m for m in self.received if "method" not in m and m["id"] == request_id]

        await self.until(found)
        (response,) = found()
        return response

    async def result(self, method: str, **params: Any) -> dict[str, Any]:
        response = await self.response(await self.say(method, **params))
        assert "error" not in response, response
        result: dict[str, Any] = response["result"]
        return result

    async def error(self, method: str, **params: Any) -> dict[str, Any]:
        response = await self.response(await self.say(method, **params))
        error: dict[str, Any] = response["error"]
        return error

    async def new_session(self, cwd: Path | str) -> str:
        session_id: str = (await self.result("session/new", cwd=str(cwd), mcpServers=[]))[
            "sessionId"
        ]
        return session_id

    async def load(self, session_id: str, cwd: Path, how: str = "load") -> dict[str, Any]:
        return await self.result(
            f"session/{how}", sessionId=session_id, cwd=str(cwd), mcpServers=[]
        )

    async def prompt(self, session_id: str, said: str) -> int:
        text = [{"type": "text", "text": said}]
        return await self.say("session/prompt", sessionId=session_id, prompt=text)

    def prompt_and_cancel(self, session_id: str, said: str) -> int:
        """Say both in one write, so that they are there at once."""
        self._last_id += 1
        text = [{"type": "text", "text": said}]
        about = {"sessionId": session_id}
        prompt = {
            "id": self._last_id,
            "method": "session/prompt",
            "params": about | {"prompt": text},
        }
        cancel = {"method": "session/cancel", "params": about}
        frames = (
            Frame(Opcode.TEXT, json.dumps({"jsonrpc": "2.0", **message}).encode())
            for message in (prompt, cancel)
        )
        self.socket.transport.write(b"".join(frame.serialize(mask=True) for frame in frames))
        return self._last_id

    async def stop_reason(self, request_id: int) -> str:
        response = await self.response(request_id)
        assert "result" in response, response
        reason: str = response["result"]["stopReason"]
        return reason

    def updates(self, session_id: str, kind: str | None = None) -> list[dict[str, Any]]:
        return [
            m["params"]["update"]
            for m in self.received
            if m.get("method") == "session/update"
            and m["params"]["sessionId"] == session_id
            and kind in (None, m["params"]["update"]["sessionUpdate"])
        ]

    def text(self, session_id: str) -> str:
        chunks = self.updates(session_id, "agent_message_chunk")
        return "".join(chunk["content"]["text"] for chunk in chunks)

    def questions(self) -> list[dict[str, Any]]:
        return [m for m in self.received if m.get("method") == "session/request_permission"]

    async def question(self) -> dict[str, Any]:
        await self.until(self.questions)
        return self.questions()[-1]

    async def choose(self, question: dict[str, Any], option: str) -> None:
        outcome = {"outcome": {"outcome": "selected", "optionId": option}}
        await self.post({"id": question["id"], "result": outcome})

    def vanish(self) -> None:
        """Be gone at once, without a word."""
        self.socket.transport.abort()


@asynccontextmanager
async def editor(
    server: Server, *, token: str | None = None, initialize: bool = True, **options: Any
) -> AsyncIterator[Editor]:
    """A client that is connected, and has initialized."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        connect(
            server.ws, additional_headers=headers, proxy=None, max_size=None, **options
        ) as socket,
        anyio.create_task_group() as tasks,
    ):
        client = Editor(socket)
        tasks.start_soon(client.read)
        if initialize:
            await client.result("initialize", protocolVersion=1)
        yield client
        await _close(socket, tasks)


async def _close(socket: ClientConnection, tasks: TaskGroup) -> None:
    await socket.close()
    tasks.cancel_scope.cancel()
