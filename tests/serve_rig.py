"""What the black-box tests share: `acp-agent serve` on a raw wire, and a judge of what was said.

`served` starts the real command. When the block ends well it closes the agent's input and checks
what is true of every conversation: the agent leaves with 0 and no process behind, wrote nothing but
messages to stdout, and obeyed the rules that `violations` lists. `served_here` is the same without
the process: the agent runs in this one, where a test can listen to its hooks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from os import environ
from pathlib import Path
from typing import Any, cast

import anyio
import transports

from acp_server.backend import Backend, open_backend
from acp_server.config import Config
from acp_server.connection import Connection
from conformance.client import Client, PermissionPolicy
from conformance.wire import Message, Wire

__all__ = [
    "SERVE",
    "ask_for_permission",
    "cancel_message",
    "chunk_of",
    "follow_up",
    "prompt_message",
    "send_together",
    "served",
    "served_here",
    "settle_cancelled",
    "texts",
    "tool_calls",
    "tool_update",
    "violations",
    "write_script",
]

SERVE = [sys.executable, "-m", "acp_server", "serve"]
OUTSIDE_TURNS = ("available_commands_update", "config_option_update", "current_mode_update")
FINAL = ("completed", "failed")


@asynccontextmanager
async def served(
    cwd: Path,
    *flags: str,
    permission: PermissionPolicy = "allow",
    env: Mapping[str, str] | None = None,
    command: list[str] | None = None,
) -> AsyncIterator[Client]:
    """A client of a fresh agent that runs in `cwd`; `env` is added to our own."""
    async with transports.spawn(
        command or SERVE, *flags, cwd=cwd, env={**environ, **(env or {})}
    ) as wire:
        client = Client(wire, permission=permission)
        await client.initialize()
        yield client
        await wire.close_stdin()
        assert await wire.exited() == 0, wire.transcript()
        assert wire.descendants() == set()
        assert wire.noise == []
        assert violations(wire) == [], wire.transcript()


class _Here:
    """What a wire wants to know of its agent's process, which is this one."""

    pid = os.getpid()
    returncode = None


class _Lines:
    """An outbox that puts each message on a wire at once."""

    is_congested = False

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, message: bytes) -> None:
        self._wire._take(message)

    async def drained(self) -> None:
        pass


@asynccontextmanager
async def served_here(
    config: Config, *, permission: PermissionPolicy = "allow"
) -> AsyncIterator[tuple[Client, Backend]]:
    """A client of a fresh agent in this process, and what the agent runs on."""
    outbox, queued = anyio.create_memory_object_stream[bytes](float("inf"))
    here = cast(Any, _Here())  # nothing is read from it: `_Lines` brings what is said
    wire = Wire(here, outbox, here, "served=here")
    failure: Exception | None = None
    async with outbox, queued, anyio.create_task_group() as tasks:
        connection = Connection(_Lines(wire), tasks)

        async def read() -> None:
            async for raw in queued:
                for line in raw.splitlines():
                    connection.receive(line)

        tasks.start_soon(read)
        client = Client(wire, permission=permission)
        try:
            async with open_backend(config) as backend:
                await client.initialize()
                connection.open(backend)
                yield client, backend
                assert violations(wire) == [], wire.transcript()
        except Exception as error:
            failure = error  # raised outside the group, which would wrap it
        connection.peer.close()
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def write_script(folder: Path, *calls: list[dict[str, Any]]) -> str:
    """Write a rehearsal script, one list of steps per model call; return the flag for it."""
    path = folder / "script.jsonl"
    path.write_text("".join(json.dumps(steps) + "\n" for steps in calls))
    return f"--rehearsal-script={path}"


# --- sending and waiting --------------------------------------------------------------------


def prompt_message(request_id: str, session: str, text: str) -> Message:
    """Return a prompt with an id of the test's own."""
    params = {"sessionId": session, "prompt": [{"type": "text", "text": text}]}
    return {"jsonrpc": "2.0", "id": request_id, "method": "session/prompt", "params": params}


def cancel_message(session: str) -> Message:
    """Return a ``session/cancel``."""
    return {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": session}}


def send_together(client: Client, *messages: Message) -> None:
    """Send several messages in one write."""
    client.wire.send_bytes(b"".join(json.dumps(message).encode() + b"\n" for message in messages))


async def chunk_of(client: Client, session: str, text: str, *, is_thought: bool = False) -> None:
    """Wait for a piece of the agent's message that holds `text`."""
    kind = "agent_thought_chunk" if is_thought else "agent_message_chunk"

    def fits(message: Message) -> bool:
        update = _update(message, session)
        return update.get("sessionUpdate") == kind and text in update["content"]["text"]

    await client.wire.receive(fits)


async def tool_update(client: Client, session: str, text: str) -> Message:
    """Wait for the update of a tool call that holds `text` anywhere; return it."""

    def fits(message: Message) -> bool:
        update = _update(message, session)
        return update.get("sessionUpdate") == "tool_call_update" and text in json.dumps(update)

    return _update(await client.wire.receive(fits), session)


async def ask_for_permission(client: Client, session: str) -> Message:
    """Wait for the agent's next question; return it."""
    return await client.wire.receive(
        lambda message: (
            message.get("method") == "session/request_permission"
            and message["params"]["sessionId"] == session
        )
    )


async def settle_cancelled(client: Client, session: str, request_id: Any) -> None:
    """Check what a cancelled turn owes at its answer: nothing left running, nothing said later."""
    wire = client.wire
    assert await client.stop_reason(request_id) == "cancelled"
    assert wire.descendants() == set(), "a process outlived the answer"
    said = [message for message in await wire.silence() if _update(message, session)]
    assert said == []
    assert len(wire.responses(request_id)) == 1
    assert violations(wire) == []


async def follow_up(client: Client, session: str) -> None:
    """Check that the session works as if nothing had happened, and says nothing old."""
    before = len(client.text(session))
    assert await client.stop_reason(client.prompt(session, "say ok")) == "end_turn"
    assert client.text(session)[before:] == "ok"


def texts(client: Client, session: str, request_ids: list[Any]) -> list[str]:
    """Return what the agent said until each answer, since the one before it.

    The last entry is what came behind the last answer.
    """
    said = [""]
    for message in client.wire.received:
        update = _update(message, session)
        if update.get("sessionUpdate") == "agent_message_chunk":
            said[-1] += update["content"]["text"]
        elif message.get("id") in request_ids and "method" not in message:
            said.append("")
    return said


def tool_calls(client: Client, session: str) -> dict[str, Message]:
    """Return every announced tool call by id, as it stands after its last update."""
    calls: dict[str, Message] = {}
    for update in client.wire.updates(session):
        if "toolCallId" in update:
            calls.setdefault(update["toolCallId"], {}).update(update)
    return calls


# --- the judge ------------------------------------------------------------------------------


def violations(wire: Wire) -> list[str]:
    """Return what the agent did wrong so far, as sentences.

    - A prompt is answered once, and prompts of a session in the order in which they came.
    - What belongs to a turn is said while a prompt (or load) of its session is open.
    - At the answer every tool call so far has its final status, and every question was answered
      or withdrawn. Nothing follows a final status.
    """
    judge = _Judge()
    for sent, message in _messages(wire):
        if sent:
            judge.note_sent(message)
        else:
            judge.note_received(message)
    return judge.found


class _Judge:
    def __init__(self) -> None:
        self.found: list[str] = []
        self._open: dict[tuple[type, Any], tuple[str, bool]] = {}  # id -> session, is a prompt
        self._answered: set[tuple[type, Any]] = set()
        self._calls: dict[str, dict[str, str]] = {}  # session -> call -> status
        self._questions: dict[Any, str] = {}  # id -> session

    def note_sent(self, message: Message) -> None:
        method = message.get("method")
        if method in ("session/prompt", "session/load"):
            self._open[_key(message)] = message["params"]["sessionId"], method == "session/prompt"
        elif method is None:
            self._questions.pop(message.get("id"), None)

    def note_received(self, message: Message) -> None:
        method = message.get("method")
        if method is None:
            self._note_answer(message)
        elif method == "$/cancel_request":
            self._questions.pop(message["params"]["requestId"], None)
        elif method == "session/request_permission":
            self._questions[message["id"]] = message["params"]["sessionId"]
            self._check_open(message, "a question")
        else:
            self._note_update(message)

    def _note_answer(self, message: Message) -> None:
        key = _key(message)
        if key in self._answered:
            self.found.append(f"a second answer to {message['id']!r}")
        if key not in self._open:
            return
        self._answered.add(key)
        earlier = next(other for other, owner in self._open.items() if owner == self._open[key])
        session, is_prompt = self._open.pop(key)
        if not is_prompt or "error" in message:
            return
        if earlier != key:
            self.found.append(f"{message['id']!r} is answered before {earlier[1]!r}")
        for call, status in self._calls.get(session, {}).items():
            if status not in FINAL:
                self.found.append(f"{call} is {status} at the answer to {message['id']!r}")
        left = [question for question, owner in self._questions.items() if owner == session]
        if left:
            self.found.append(f"questions {left} are open at the answer to {message['id']!r}")

    def _note_update(self, message: Message) -> None:
        session, update = message["params"]["sessionId"], message["params"]["update"]
        kind = update["sessionUpdate"]
        if kind in OUTSIDE_TURNS:
            return
        self._check_open(message, kind)
        if "toolCallId" in update:
            calls, call = self._calls.setdefault(session, {}), update["toolCallId"]
            if kind == "tool_call_update" and calls.get(call) in FINAL:
                self.found.append(f"{call} goes on after its end")
            calls[call] = update.get("status", calls.get(call, "pending"))

    def _check_open(self, message: Message, what: str) -> None:
        session = message["params"]["sessionId"]
        if all(owner != session for owner, _ in self._open.values()):
            self.found.append(f"{what} outside a turn: {json.dumps(message)[:200]}")


def _messages(wire: Wire) -> Iterator[tuple[bool, Message]]:
    rest = b""
    for entry in wire.trace:
        if entry.message is not None:
            yield entry.direction == "sent", entry.message
        if entry.message is not None or entry.direction == "received":
            continue
        *lines, rest = (rest + entry.raw).split(b"\n")  # several were sent together, or a piece
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # wrong on purpose
            if isinstance(message, dict):
                yield True, message


def _key(message: Message) -> tuple[type, Any]:
    return type(message.get("id")), message.get("id")


def _update(message: Message, session: str) -> Message:
    """Return the update in `message` if it is one of `session`, otherwise nothing."""
    params = message.get("params", {})
    if message.get("method") != "session/update" or params["sessionId"] != session:
        return {}
    update: Message = params["update"]
    return update
