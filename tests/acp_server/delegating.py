"""Clients of an agent whose subagents do what a script says, by their tasks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from core_rig import Entry, say
from talking import Talk, talk

from agent_core.agent import Agent
from agent_core.content import Usage, text_of
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    Price,
    ToolCallDelta,
    UsageReport,
    UserTurn,
)
from agent_core.models.choice import Models

__all__ = ["LIMIT_S", "ByTask", "Client", "alone", "calls", "client", "delegates", "runs"]

LIMIT_S = 15


class ByTask:
    """Plays the entries of whatever the last prompt says, one for each call, then ``done``."""

    info = ModelInfo("by-task", context_tokens=1000, price=Price(input=1e6, output=0.0))

    def __init__(self, script: Mapping[str, Sequence[Entry]]) -> None:
        self.requests: list[ModelRequest] = []
        self._script = script
        self._played: dict[tuple[str, str], int] = {}

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        told = (text_of(m.content) for m in reversed(request.messages) if isinstance(m, UserTurn))
        task = next(text for text in told if not text.startswith("<"))
        self.requests.append(request)
        number = self._played.get((request.session_id, task), 0)
        self._played[request.session_id, task] = number + 1
        entries = self._script.get(task, ())
        entry = entries[number] if number < len(entries) else say("done")
        async with aclosing(entry(request)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        pass


def calls(name: str, *arguments: Mapping[str, Any], tokens: int = 0) -> Entry:
    async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        for index, each in enumerate(arguments):
            yield ToolCallDelta(index, name, json.dumps(each))
        if tokens:
            yield UsageReport(Usage(input_tokens=tokens))
        yield Finish("tool_calls")

    return play


def runs(command: str = "true") -> Entry:
    return calls("shell", {"command": command})


def delegates(*names: str, background: bool = False) -> Entry:
    more = {"background": True} if background else {}
    return calls("delegate", *({"task": name, "name": name} | more for name in names))


class Client:
    """One session of a client in this process."""

    def __init__(self, at: Talk, agent: Agent, model: ByTask) -> None:
        self.at = at
        self.agent = agent
        self.model = model
        self.id = agent.id

    @property
    def questions(self) -> list[dict[str, Any]]:
        sent = self.at.lines.sent
        return [m for m in sent if m.get("method") == "session/request_permission"]

    @property
    def updates(self) -> list[dict[str, Any]]:
        return self.at.lines.updates()

    def prompt(self, text: str) -> int:
        return self.at.prompt(self.id, text)

    def cancel(self) -> None:
        self.at.cancel(self.id)

    async def asked(self, count: int = 1) -> dict[str, Any]:
        """Wait for so many questions; return the last one."""
        await self.at.lines.until(lambda: len(self.questions) >= count)
        return self.questions[-1]

    def answer(self, question: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        message = {"jsonrpc": "2.0", "id": question["id"], "result": result}
        self.at.connection.receive(json.dumps(message).encode())

    async def stop_reason(self, request_id: int) -> str:
        reason: str = (await self.at.result(request_id))["stopReason"]
        return reason

    async def say(self, text: str) -> list[dict[str, Any]]:
        """Prompt, and return the updates up to the answer."""
        before = len(self.updates)
        await self.at.result(self.prompt(text))
        return self.updates[before:]

    def calls_of(self, call_id: str) -> list[dict[str, Any]]:
        return [u for u in self.updates if u.get("toolCallId") == call_id]

    def call_ids(self) -> list[str]:
        return [u["toolCallId"] for u in self.updates if u["sessionUpdate"] == "tool_call"]


@asynccontextmanager
async def client(
    tmp_path: Path,
    script: Mapping[str, Sequence[Entry]],
    *,
    mode: str = "ask",
    capabilities: object = None,
) -> AsyncIterator[Client]:
    model = ByTask(script)
    with anyio.fail_after(LIMIT_S):
        async with talk(tmp_path, mode=mode, capabilities=capabilities) as (at, backend):
            backend.runtime.models = Models(model)
            session_id = await at.new_session()
            yield Client(at, backend.runtime.agents[session_id], model)


def alone(at: Client) -> bool:
    return list(at.agent._runtime.agents) == [at.id]
