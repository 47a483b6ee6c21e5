"""The agent as a client starts it, for tests from outside."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import transports

from conformance.client import Client, PermissionPolicy
from conformance.wire import Wire

SERVE = [sys.executable, "-m", "acp_server", "serve"]


@asynccontextmanager
async def serving(
    *arguments: str,
    permission: PermissionPolicy = "reject",
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Client]:
    """Yield a client that has initialized; check at the end that stdout was pure."""
    async with transports.spawn(SERVE, *arguments, env=env) as wire:
        client = Client(wire, permission=permission)
        await client.initialize()
        yield client
        assert_pure(wire)


def assert_pure(wire: Wire) -> None:
    """Every line is a JSON-RPC message without explicit nulls, and every id is answered once."""
    assert wire.noise == []
    seen: set[tuple[type, object]] = set()
    for message in wire.received:
        assert message["jsonrpc"] == "2.0"
        if "method" in message:
            assert "null" not in json.dumps(message).split('"')[2::2]
            continue
        assert ("result" in message) != ("error" in message)
        assert message.get("result", {}) is not None
        if message["id"] is not None and "error" not in message:
            key = (type(message["id"]), message["id"])
            assert key not in seen
            seen.add(key)


def line(message: object) -> bytes:
    """One message as a line."""
    return json.dumps(message, ensure_ascii=False).encode() + b"\n"


def ask(request_id: object, method: str, params: object = None) -> dict[str, Any]:
    """A request with an id of the caller's choice."""
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params or {}}


def text(said: str) -> list[dict[str, str]]:
    """A prompt of one text block."""
    return [{"type": "text", "text": said}]


async def error_of(client: Client, method: str, params: object) -> dict[str, Any]:
    """Send a request that must fail; return the error."""
    response = await client.wire.response(client.wire.request(method, params))
    assert "error" in response, response
    error: dict[str, Any] = response["error"]
    assert isinstance(error["code"], int)
    assert "\n" not in error["message"]
    return error


def environment(**changes: str | None) -> dict[str, str]:
    """Our environment with `changes`; `None` takes a variable away."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}
