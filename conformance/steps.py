"""What many scenarios do and ask: whether an agent offers something, whether it still answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final
from weakref import WeakSet

import anyio

from conformance.agents import AUTH_REQUIRED, LOGIN_WANTED
from conformance.trace import Message, WireError, object_of
from conformance.trial import Check, Trial
from conformance.wire import Wire

__all__ = [
    "ask",
    "error_code",
    "gone",
    "harmless",
    "introduction",
    "is_error",
    "needs_entry",
    "needs_pipe",
    "offers",
    "prompted",
    "results",
    "said",
    "serves",
    "speaks",
    "text_of",
    "updates",
]

PING: Final = "_conformance/ping"
LOOK_S: Final = 0.02
PATIENCE_S: Final = 3.0
"""How long the answer to a ping may take before another way is tried."""

_DEAF: Final[WeakSet[Wire]] = WeakSet()
"""Agents that do not answer methods they do not know; that is one mistake, not one in each rule."""


async def ask(
    trial: Trial, wire: Wire, method: str, params: object, *, patience: float = 1.0
) -> Message:
    """Send a request and return the whole response.

    Cancellation: safe. Concurrency: any number of tasks.

    Args:
        trial: Ours.
        wire: The agent.
        method: The method.
        params: Its params.
        patience: How many times the usual limit to wait, for what starts other processes.

    Raises:
        WireError: No response.
    """
    return await wire.response(wire.request(method, params), patience * trial.target.timeout_s)


async def results(
    trial: Trial, wire: Wire, method: str, params: object, *, patience: float = 1.0
) -> Message:
    """Send a request and return its result; whatever is no object is an empty one.

    Cancellation: safe. Concurrency: any number of tasks. The arguments are those of `ask`.

    Raises:
        WireError: No response, or an error.
    """
    response = await ask(trial, wire, method, params, patience=patience)
    if "error" in response:
        raise WireError(f"{method} was answered with {response['error']}")
    return object_of(response.get("result"))


async def speaks(trial: Trial, wire: Wire, session_id: str) -> None:
    """Wait for the next piece of an answer in a session; call it right behind the prompt.

    Cancellation: safe. Concurrency: any number of tasks.

    Raises:
        WireError: None came.
    """
    old = {id(message) for message in wire.received}

    def is_piece(message: Message) -> bool:
        if id(message) in old:
            return False
        params = object_of(message.get("params"))
        kind = object_of(params.get("update")).get("sessionUpdate")
        return params.get("sessionId") == session_id and kind == "agent_message_chunk"

    await wire.receive(is_piece, trial.target.timeout_s)


async def serves(trial: Trial, wire: Wire, after: str) -> None:
    """Go on if the agent still answers.

    Cancellation: safe. Concurrency: one task for each wire.

    Args:
        trial: Ours.
        wire: The agent, initialized.
        after: What was done to it, for the report.

    Raises:
        WireError: It answers nothing any more.
    """
    ping = None
    try:
        if wire not in _DEAF:
            ping = wire.request(PING, {})
            with suppress(WireError):
                await wire.response(ping, PATIENCE_S)
                return
        await ask(trial, wire, "session/new", {"cwd": str(trial.folder), "mcpServers": []})
        if ping is None or not wire.responses(ping):
            _DEAF.add(wire)
    except WireError:
        ended = wire.exit_code
        what = "it answers nothing any more" if ended is None else f"it ended with {ended}"
        raise WireError(f"after {after} {what}") from None


def harmless(trial: Trial, wire: Wire) -> tuple[str, Message]:
    """Return a method and params that this agent answers and that leave it as it was.

    Call `serves` first.
    """
    if wire not in _DEAF:
        return PING, {}
    return "session/new", {"cwd": str(trial.folder), "mcpServers": []}


async def gone(trial: Trial, wire: Wire, it: Check, kept: set[int] | None = None) -> None:
    """Wait until nothing is left that the agent started; else the rule is broken.

    Cancellation: safe. Concurrency: any number of tasks.

    Args:
        trial: Ours.
        wire: The agent.
        it: Of the rule.
        kept: Process ids that may stay.
    """
    limit_s = time.monotonic() + trial.target.timeout_s
    while left := wire.descendants() - (kept or set()):
        it.that(time.monotonic() < limit_s, f"{len(left)} of its processes run on: {_names(left)}")
        await anyio.sleep(LOOK_S)


def introduction(wire: Wire) -> Message:
    """Return the result of ``initialize``, or nothing."""
    for message in wire.received:
        result = message.get("result")
        if isinstance(result, dict) and "protocolVersion" in result:
            return result
    return {}


def offers(wire: Wire, what: str) -> bool:
    """Say whether the agent advertised something.

    Args:
        wire: The agent, initialized.
        what: An optional method (``session/load``, ``logout``), ``additionalDirectories``, a kind
            of prompt content (``image``), or a kind of MCP server (``http``).
    """
    capabilities = object_of(introduction(wire).get("agentCapabilities"))
    name = what.rpartition("/")[2]
    if what == "session/load":
        return capabilities.get("loadSession") is True
    if what == "logout":
        return isinstance(object_of(capabilities.get("auth")).get("logout"), dict)
    if what in ("image", "audio", "embeddedContext"):
        return object_of(capabilities.get("promptCapabilities")).get(what) is True
    if what in ("http", "sse"):
        return object_of(capabilities.get("mcpCapabilities")).get(what) is True
    return isinstance(object_of(capabilities.get("sessionCapabilities")).get(name), dict)


async def needs_entry(trial: Trial, wire: Wire) -> None:
    """Go on unless the agent opens sessions behind a login only, which nobody gave us.

    Cancellation: safe. Concurrency: any number of tasks.

    Raises:
        NotBroughtAbout: It wants a login.
        WireError: No response.
    """
    new = {"cwd": str(trial.folder), "mcpServers": []}
    is_shut = error_code(await ask(trial, wire, "session/new", new)) == AUTH_REQUIRED
    trial.brought_about(not is_shut, LOGIN_WANTED)


def needs_pipe(trial: Trial) -> None:
    """Go on if the agent is a process of ours, reached by its standard streams.

    Raises:
        Skipped: It is reached some other way.
    """
    trial.needs(trial.target.transport == "stdio", "standard input and output")


def is_error(response: Message) -> bool:
    """Say whether the response is an error."""
    return isinstance(response.get("error"), dict)


def error_code(response: Message) -> object:
    """Return the code of the response's error; `None` if it has none."""
    return object_of(response.get("error")).get("code")


def updates(
    wire: Wire, session_id: str, since: int = 0, until: int | None = None
) -> Iterator[Message]:
    """Yield the well-formed updates of a session.

    Args:
        wire: The agent.
        session_id: Whose.
        since: How many entries of the trace to pass over.
        until: The entry to stop before; the last by default.
    """
    for entry in wire.trace[since:until]:
        if entry.direction != "received" or entry.message is None:
            continue
        params = object_of(entry.message.get("params"))
        update = object_of(params.get("update"))
        is_update = entry.message.get("method") == "session/update"
        if is_update and params.get("sessionId") == session_id and update:
            yield update


def text_of(update: Message) -> str:
    """Return the text in an update's message or in a tool call's content."""
    content = update.get("content")
    if isinstance(content, list):
        return "".join(
            str(
                object_of(object_of(each).get("content")).get("text")
                or object_of(each).get("newText")
                or ""
            )
            for each in content
        )
    return str(object_of(content).get("text") or "")


def said(wire: Wire, session_id: str, kind: str, since: int = 0) -> str:
    """Return all text of one kind of update, such as ``agent_message_chunk``."""
    return "".join(
        text_of(update)
        for update in updates(wire, session_id, since)
        if update.get("sessionUpdate") == kind
    )


async def prompted(
    trial: Trial, wire: Wire, session_id: str, text: str, *, patience: float = 1.0
) -> str:
    """Prompt, wait for the end of the turn, and return its stop reason.

    Cancellation: safe. Concurrency: one task for each session. `patience` is that of `ask`.

    Raises:
        WireError: No response, or an error.
    """
    prompt = [{"type": "text", "text": text}]
    params = {"sessionId": session_id, "prompt": prompt}
    result = await results(trial, wire, "session/prompt", params, patience=patience)
    return str(result.get("stopReason"))


def _names(pids: set[int]) -> str:
    lines = [(Path("/proc") / str(pid) / "cmdline") for pid in sorted(pids)]
    shown = [
        each.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        for each in lines
        if each.exists()
    ]
    return "; ".join(each.strip()[:60] for each in shown)
