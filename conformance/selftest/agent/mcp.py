"""MCP servers on stdio, as far as this agent goes: started, greeted and asked for their tools."""

from __future__ import annotations

import json
import os
from typing import Final

from conformance.selftest.agent.commands import Command
from conformance.selftest.agent.loop import READ, Loop
from conformance.selftest.agent.rpc import Message

__all__ = ["start"]

START_LIMIT_S: Final = 5.0
PROTOCOL_VERSION: Final = "2025-06-18"
INITIALIZE: Final[Message] = {
    "protocolVersion": PROTOCOL_VERSION,
    "capabilities": {},
    "clientInfo": {"name": "selftest", "version": "1"},
}


async def start(loop: Loop, servers: list[Message], cwd: str) -> list[Command]:
    """Start the servers; return those that run. One that cannot be started is left out.

    Cancellation: safe; what was started is ended.

    Args:
        loop: What all runs on.
        servers: As in ``mcpServers``, checked.
        cwd: Where they start.
    """
    started: list[Command] = []
    try:
        for server in servers:
            env = {each["name"]: each["value"] for each in server.get("env") or []}
            arguments = [server["command"], *(server.get("args") or [])]
            try:
                command = Command(loop, arguments, cwd, env=env, has_input=True)
            except (OSError, ValueError):
                continue
            started.append(command)
            greeting = loop.spawn(_greet(loop, command))
            if not await loop.within(START_LIMIT_S, greeting):
                greeting.cancel()
    except BaseException:
        for command in started:
            await command.end()
        raise
    return started


async def _greet(loop: Loop, command: Command) -> None:
    rest = bytearray()
    _send(command, {"id": 1, "method": "initialize", "params": INITIALIZE})
    await _answered(loop, command, rest, 1)
    _send(command, {"method": "notifications/initialized"})
    _send(command, {"id": 2, "method": "tools/list", "params": {}})
    await _answered(loop, command, rest, 2)


def _send(command: Command, message: Message) -> None:
    command.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


async def _answered(loop: Loop, command: Command, rest: bytearray, request_id: int) -> None:
    fd = command.stdout.fileno()
    while True:
        line, found, _ = bytes(rest).partition(b"\n")
        if found:
            del rest[: len(line) + 1]
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and message.get("id") == request_id:
                return
            continue
        await loop.is_ready(fd, READ)
        chunk = os.read(fd, 65536)
        if not chunk:
            raise EOFError
        rest += chunk
