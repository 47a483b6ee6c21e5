"""Running another ACP agent for one prompt, and looking at what was said to it and what is left."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

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
    "group_of",
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


@asynccontextmanager
async def delegating(place: Path, command: list[str], **options: Any) -> AsyncIterator[Agent]:
    with anyio.fail_after(LIMIT_S):
        async with rehearsal_agent(str(place)) as parent:
            runtime = parent._runtime
            runtime.subagents.register(RemoteProvider(runtime, "remote", command, **options))
            yield parent


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


def group_of(run: SubagentRun) -> list[int]:
    """The processes of its group, zombies too."""
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
