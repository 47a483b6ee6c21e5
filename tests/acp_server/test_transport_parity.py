"""One conversation over stdio, by WebSocket and by HTTP: the same messages in the same order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
import transports
from serve_rig import chunk_of, served, tool_update

from conformance.client import Client
from conformance.wire import Message

_CHANGING = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z|[0-9a-f]{32}")


async def conversation(client: Client, cwd: Path) -> list[str]:
    """Say a bit of everything in one session; return its id and another one's."""
    session, other = [await client.new_session(cwd) for _ in range(2)]
    wire = client.wire

    async def done(text: str) -> None:
        assert await client.stop_reason(client.prompt(session, text)) == "end_turn"

    await done("think hm then say one then plan look; do then write a.txt: x then read a.txt")
    await done("run echo out; exit 3")
    await done("delegate run echo deep")

    await done("count 300")
    running = client.prompt(session, "say so far then stall")
    queued = client.prompt(session, "say never")
    await chunk_of(client, session, "far")
    client.cancel(session)
    for request_id in (running, queued):
        assert await client.stop_reason(request_id) == "cancelled"

    client.permission = "hold"
    asked = client.prompt(session, "write never.txt: x")
    await wire.receive(
        lambda message: (
            message.get("method") == "session/request_permission"
            and "never.txt" in json.dumps(message)
        )
    )
    client.cancel(session)
    assert await client.stop_reason(asked) == "cancelled"
    client.permission = "allow"

    tool = client.prompt(session, "run echo ready; sleep 60")
    await tool_update(client, session, "ready")
    wire.notify("$/cancel_request", {"requestId": tool})
    assert await client.stop_reason(tool) == "cancelled"

    params: dict[str, Any] = {"sessionId": session}
    await client.result(wire.request("session/set_mode", {**params, "modeId": "bypass"}))
    await done("write b.txt: x")
    opening = {**params, "cwd": str(cwd), "mcpServers": []}
    for method in ("session/load", "session/resume"):
        await client.result(wire.request(method, opening))
    assert await client.stop_reason(client.prompt(other, "say other")) == "end_turn"
    await client.result(wire.request("session/close", params))
    await wire.silence()
    return [session, other]


def told(client: Client, session: str) -> list[Message]:
    """What the agent said about a session, answers to what was asked about it included."""
    wire = client.wire
    about = {
        entry.message["id"]
        for entry in wire.trace
        if entry.direction == "sent"
        and entry.message is not None
        and "id" in entry.message
        and "method" in entry.message
        and entry.message["params"].get("sessionId") == session
    }
    messages = []
    for message in wire.received:
        is_about = message.get("params", {}).get("sessionId") == session
        if is_about or ("method" not in message and message["id"] in about):
            text = _CHANGING.sub("…", json.dumps(message, sort_keys=True))
            messages.append(json.loads(text.replace(session, "SESSION")))
    return _joined(messages)


def _joined(messages: list[Message]) -> list[Message]:
    """Put the pieces of a text together: how it was cut is no matter."""
    joined: list[Message] = []
    for message in messages:
        update = message.get("params", {}).get("update", {})
        if update.get("sessionUpdate") == "agent_message_chunk":
            text = update["content"].pop("text")
            last = joined[-1] if joined else {}
            if last.get("chunks_of") == message:
                last["text"] += text
                continue
            joined.append({"chunks_of": message, "text": text})
        else:
            joined.append(message)
    return joined


@pytest.mark.transports
async def test_a_test_runs_over_the_transport_that_it_is_named_for(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    over = request.config.getoption("--over") or request.node.callspec.params["_transport"]
    async with served(tmp_path) as client:
        command = await anyio.Path(f"/proc/{client.wire.pid}/cmdline").read_text()
    assert [name for name in ("ws", "http") if name in command.split("\0")] == [over] * (
        over != "stdio"
    )


async def test_every_transport_tells_the_same_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, list[list[Message]]] = {}
    cwd = tmp_path / "work"
    cwd.mkdir()
    for name in transports.TRANSPORTS:
        monkeypatch.setattr(transports, "current", name)
        for made in cwd.iterdir():
            made.unlink()
        async with served(cwd, f"--state-dir={tmp_path / name}") as client:
            sessions = await conversation(client, cwd)
            heard[name] = [told(client, session) for session in sessions]

    assert len(heard["stdio"][0]) > 50
    for name in transports.TRANSPORTS[1:]:
        for ours, theirs in zip(heard["stdio"], heard[name], strict=True):
            for one, other in zip(ours, theirs, strict=False):
                assert one == other
            assert len(ours) == len(theirs)
