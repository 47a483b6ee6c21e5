"""The rules of the network break on servers that each have one bug."""

from __future__ import annotations

import http
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import pytest
from websockets.asyncio.server import ServerConnection, serve

from conformance.runner import run, select
from conformance.target import Target, Words
from conformance.verdicts import Report

WORDS = Words({"hello": "hello", "long": "long"})
TOKEN = "the-right-token"


class Agent:
    """A small agent by WebSocket, sound but for one bug."""

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.sockets: set[ServerConnection] = set()
        self.n_sessions = 0

    def let_in(self, socket: ServerConnection, request: Any) -> Any:
        origin, host = request.headers.get("Origin"), request.headers["Host"]
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.bug == "no token" or token == TOKEN:
            is_known = host.startswith("127.0.0.1") or self.bug == "any host"
            is_ours = origin is None or self.bug == "any origin" or host in origin
            if is_known and is_ours:
                return None
            return socket.respond(http.HTTPStatus.FORBIDDEN, "no\n")
        return socket.respond(http.HTTPStatus.UNAUTHORIZED, "no\n")

    def answered(self, _socket: ServerConnection, _request: Any, response: Any) -> Any:
        if self.bug != "no id":
            response.headers["Acp-Connection-Id"] = "c"
        return response

    async def serve(self, socket: ServerConnection) -> None:
        self.sockets.add(socket)
        is_open = False
        try:
            while True:
                raw = await self.received(socket)
                if isinstance(raw, bytes) and self.bug not in ("binary", "no UTF-8"):
                    continue
                message = json.loads(
                    raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
                )
                if not is_open and message["method"] != "initialize" and self.bug != "any first":
                    return await socket.close(1002)
                is_open = True
                await self.answer(socket, message)
        finally:
            self.sockets.discard(socket)
            if self.bug == "dies" and socket.close_code == 1006:
                for other in self.sockets:
                    other.transport.abort()

    async def received(self, socket: ServerConnection) -> str | bytes:
        if self.bug == "no UTF-8":
            return await socket.recv(decode=False)
        if self.bug != "first fragment":
            return await socket.recv()
        parts = [part async for part in socket.recv_streaming()]
        return parts[0] if len(parts) == 1 else '{"method": "nothing"}'  # the rest was not read

    async def answer(self, socket: ServerConnection, message: dict[str, Any]) -> None:
        result: dict[str, Any] = {}
        params = message.get("params", {})
        match message["method"]:
            case "initialize":
                result = {"protocolVersion": 1, "agentInfo": {"name": "a", "version": "1"}}
            case "session/new":
                self.n_sessions += 1
                result = {"sessionId": f"s{self.n_sessions}"}
            case "session/prompt":
                content = {"type": "text", "text": "Hi"}
                update = {"sessionUpdate": "agent_message_chunk", "content": content}
                told = {"sessionId": params["sessionId"], "update": update}
                line = {"jsonrpc": "2.0", "method": "session/update", "params": told}
                for each in [*self.sockets] if self.bug == "to everybody" else [socket]:
                    await each.send(json.dumps(line))
                if params["prompt"][0]["text"] == "long":
                    return
                result = {"stopReason": "end_turn"}
            case _ if "id" not in message:
                return
        await socket.send(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}))


@asynccontextmanager
async def serving(bug: str) -> AsyncIterator[str]:
    agent = Agent(bug)
    async with serve(
        agent.serve,
        "127.0.0.1",
        0,
        process_request=agent.let_in,
        process_response=agent.answered,
        compression=None,
    ) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}/acp"


async def judged(url: str) -> Report:
    target = Target(url=url, token=TOKEN, words=WORDS, timeout_s=3.0)
    return await run(target, select(["NET"]), jobs=1, limit_s=50)


def statuses(report: Report) -> dict[str, str]:
    return {
        each.rule: f"{each.status} {each.says}".strip()
        for each in report.verdicts
        if each.rule.startswith("NET") and each.status != "skip"
    }


async def test_a_sound_agent_by_websocket_breaks_nothing() -> None:
    async with serving("none") as url:
        found = statuses(await judged(url))

    assert set(found.values()) == {"pass"}, found
    assert len(found) == 10


@pytest.mark.parametrize(
    ("bug", "rule", "status"),
    [
        ("no id", "NET-01", "warn"),
        ("any first", "NET-02", "warn"),
        ("binary", "NET-03", "warn"),
        ("first fragment", "NET-04", "fail"),
        ("no UTF-8", "NET-05", "fail"),
        ("to everybody", "NET-06", "fail"),
        ("any origin", "NET-07", "warn"),
        ("no token", "NET-08", "warn"),
        ("dies", "NET-09", "warn"),
        ("any host", "NET-10", "warn"),
    ],
)
async def test_an_agent_with_one_bug_breaks_that_rule(bug: str, rule: str, status: str) -> None:
    async with serving(bug) as url:
        found = statuses(await judged(url))

    assert found[rule].startswith(status), found


# Streamable HTTP


async def anything_goes(stream: anyio.abc.SocketStream) -> None:
    """Answer every request with 200 and the result of initialize, whatever it asks."""
    body = b'{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":1}}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    async with stream:
        try:
            while True:
                request = await stream.receive()
                while b"\r\n\r\n" not in request:
                    request += await stream.receive()
                await stream.send(head % len(body) + body)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return


async def test_a_server_that_answers_anything_breaks_the_rules_of_http() -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, anything_goes)
        report = await judged(f"http://127.0.0.1:{port}/acp")
        tasks.cancel_scope.cancel()

    found = statuses(report)
    for rule in ("NET-07", "NET-08", "NET-10", "NET-20", "NET-22", "NET-23"):
        assert found[rule].startswith("warn"), (rule, found)
    assert all(not each.startswith("pass") for each in found.values()), found
