"""Running another ACP agent for one prompt, and looking at what was said to it and what is left.

The agent is a process of ours, or, for tests that use `each_way`, also reached by WebSocket.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from acp_server.agent_socket import AgentSocket
from acp_server.remote import RemoteProvider
from agent_core.agent import Agent
from agent_core.cancellation import AbortController, AbortSignal
from agent_core.content import Text
from agent_core.subagents import SubagentRequest, SubagentResult, SubagentRun
from agent_core.testing import rehearsal_agent

__all__ = [
    "LIMIT_S",
    "assert_told_nothing_but_the_session",
    "delegating",
    "each_way",
    "group_of",
    "on_socket",
    "outcome_of",
    "pid_of",
    "received",
    "recorded",
    "said",
    "start",
    "until",
]

LIMIT_S = 15


def recorded(path: Path, command: list[str]) -> list[str]:
    """The command, with all that it reads kept in a file."""
    return ["sh", "-c", 'tee "$0" | exec "$@"', str(path), *command]


def received(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


_way = "stdio"


@pytest.fixture(params=["stdio", "websocket"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test once for each way to reach an agent."""
    monkeypatch.setattr("remoting._way", request.param)


@asynccontextmanager
async def delegating(place: Path, command: list[str], **options: Any) -> AsyncIterator[Agent]:
    with anyio.fail_after(LIMIT_S):
        async with AsyncExitStack() as stack:
            if _way == "websocket":
                options["url"] = await stack.enter_async_context(on_socket(command))
                options.pop("exit_grace_s", None)
                command = []
            parent = await stack.enter_async_context(rehearsal_agent(str(place)))
            runtime = parent._runtime
            runtime.subagents.register(RemoteProvider(runtime, "remote", command, **options))
            yield parent


@asynccontextmanager
async def on_socket(command: list[str], token: str = "") -> AsyncIterator[str]:
    """Let an agent on stdio be reached by WebSocket; yield the address."""
    script = Path(__file__).with_name("agent_on_socket.py")
    process = await anyio.open_process([sys.executable, str(script), token, *command], stderr=None)
    async with process:
        assert process.stdout is not None
        port = (await process.stdout.receive()).decode().strip()
        try:
            yield f"ws://127.0.0.1:{port}/acp"
        finally:
            assert process.stdin is not None
            await process.stdin.aclose()
            with anyio.CancelScope(shield=True):
                await process.wait()


async def start(
    parent: Agent, prompt: str, *, signal: AbortSignal | None = None, **parts: Any
) -> SubagentRun:
    signal = signal or AbortController().signal
    request = SubagentRequest((Text(prompt),), parent, signal, **parts)
    return await parent._runtime.subagents.start("remote", request)


async def outcome_of(parent: Agent, prompt: str, **options: Any) -> SubagentResult:
    """Run to the end; nothing is left of it."""
    run = await start(parent, prompt, **options)
    try:
        return await run.result()
    finally:
        await run.dispose()
        assert group_of(run) == []


def pid_of(run: Any) -> int:
    return int(run._run._agent.pid)


def group_of(run: Any) -> list[int]:
    """What is left of it: the processes of its group, zombies too; or its connection."""
    agent = run._run._agent
    if isinstance(agent, AgentSocket):
        return [] if agent._socket.ended.is_set() else [0]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == pid_of(run):
                found.append(int(entry.name))
    return found


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - another process makes it true
        await anyio.sleep(0.005)


def said(run: Any) -> str:
    return str(run._run._output)


def assert_told_nothing_but_the_session(wire: Path) -> None:
    messages = received(wire)
    methods = [message["method"] for message in messages if "method" in message]
    session_id = messages[[m.get("method") for m in messages].index("session/prompt")]["params"]
    assert methods == ["initialize", "session/new", "session/prompt", "session/cancel"]
    assert messages[-1] == {
        "jsonrpc": "2.0",
        "method": "session/cancel",
        "params": {"sessionId": session_id["sessionId"]},
    }
    for word in (b'"parent"', b'"user"', b'"kind"', b'"cause"', b'"reason"'):
        assert word not in wire.read_bytes()
