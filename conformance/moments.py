"""Moments of a turn: how a scenario waits for one, and what holds of a turn at its end.

Whoever waits for a moment that the turn never comes to is told that it was not brought about, not
that a rule was broken. Nothing here trusts what the agent says to be well formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from conformance.client import Client
from conformance.commands import Sleeper
from conformance.steps import serves
from conformance.trace import Message, WireError
from conformance.trial import NotBroughtAbout, Trial
from conformance.wire import Wire

__all__ = [
    "FINAL",
    "answer_of",
    "asleep",
    "behind_answer",
    "cancel_message",
    "first_chunk",
    "is_answer",
    "is_answered",
    "n_chunks",
    "open_tool_calls",
    "prompt_message",
    "question",
    "quiet",
    "said_in_turns",
    "text_of",
    "tool_calls",
    "tool_update",
    "until",
    "update_of",
    "updates",
]

FINAL: Final = frozenset({"completed", "failed"})
OUTSIDE_TURNS: Final = frozenset(
    {
        "available_commands_update",
        "config_option_update",
        "current_mode_update",
        "session_info_update",
        "usage_update",
    }
)
"""The updates that may come at any time."""


# What was said


def update_of(message: Message, session_id: str) -> Message:
    """Return the update that `message` brings to the session, or nothing."""
    params = message.get("params")
    if message.get("method") != "session/update" or not isinstance(params, dict):
        return {}
    update = params.get("update")
    return update if params.get("sessionId") == session_id and isinstance(update, dict) else {}


def updates(wire: Wire, session_id: str) -> list[Message]:
    """Return all updates of the session so far."""
    return [found for message in wire.received if (found := update_of(message, session_id))]


def n_chunks(wire: Wire, session_id: str) -> int:
    """Return how many pieces of the agent's messages came in the session so far."""
    return sum(
        update.get("sessionUpdate") == "agent_message_chunk" for update in updates(wire, session_id)
    )


def text_of(wire: Wire, session_id: str) -> str:
    """Return what the agent said in the session so far."""
    said = []
    for update in updates(wire, session_id):
        content = update.get("content")
        if update.get("sessionUpdate") == "agent_message_chunk" and isinstance(content, dict):
            said.append(str(content.get("text", "")))
    return "".join(said)


def said_in_turns(messages: list[Message], session_id: str) -> list[str]:
    """Return the kinds of those updates of the session that belong to a turn."""
    kinds = (str(update_of(message, session_id).get("sessionUpdate", "")) for message in messages)
    return [kind for kind in kinds if kind and kind not in OUTSIDE_TURNS]


def tool_calls(wire: Wire, session_id: str) -> dict[str, Message]:
    """Return every tool call of the session so far by id, as it stands after its last update."""
    calls: dict[str, Message] = {}
    for update in updates(wire, session_id):
        call_id = update.get("toolCallId")
        if isinstance(call_id, str) and update.get("sessionUpdate") in (
            "tool_call",
            "tool_call_update",
        ):
            changed = {name: value for name, value in update.items() if value is not None}
            calls.setdefault(call_id, {}).update(changed)
    return calls


def open_tool_calls(wire: Wire, session_id: str) -> list[str]:
    """Return the tool calls of the session that have no final status, each with what it has."""
    return [
        f"{call_id} is {call.get('status', 'pending')}"
        for call_id, call in tool_calls(wire, session_id).items()
        if call.get("status") not in FINAL
    ]


def is_answer(message: Message, request_id: object) -> bool:
    """Return whether `message` answers this request of ours."""
    return (
        "method" not in message
        and type(message.get("id")) is type(request_id)
        and message.get("id") == request_id
    )


def is_answered(wire: Wire, request_id: int | str) -> bool:
    """Return whether a request of ours was answered by now."""
    return bool(wire.responses(request_id))


def behind_answer(wire: Wire, request_id: int | str) -> list[Message]:
    """Return what came behind the answer to a request of ours, as far as it came."""
    answers = wire.responses(request_id)
    received = wire.received
    at = next((i for i, message in enumerate(received) if answers and message is answers[0]), None)
    return [] if at is None else received[at + 1 :]


# Waiting


async def until(
    trial: Trial, wire: Wire, turn: int | str, fits: Callable[[Message], bool], what: str
) -> Message:
    """Wait for a message of a turn.

    Cancellation: safe. Concurrency: any number of tasks.

    Args:
        trial: Whose scenario waits.
        wire: The agent.
        turn: The id of the prompt.
        fits: Whether a message is the one.
        what: What it is, for people: behind "the turn ended before".

    Raises:
        NotBroughtAbout: The turn ended before, or it did not come in time.
    """
    try:
        message = await wire.receive(
            lambda m: fits(m) or is_answer(m, turn), trial.target.timeout_s
        )
    except WireError as exc:
        reason = exc.reason
        raise NotBroughtAbout(f"nothing came to wait for: {what}; {reason}") from None
    if is_answer(message, turn):
        raise NotBroughtAbout(f"the turn ended before {what}")
    return message


async def first_chunk(
    trial: Trial, wire: Wire, session_id: str, turn: int | str, *, nth: int = 1
) -> None:
    """Wait until the agent has said something, or so many pieces of it, since now.

    Raises:
        NotBroughtAbout: The turn ended before, or it did not come in time.
    """

    def fits(message: Message) -> bool:
        return update_of(message, session_id).get("sessionUpdate") == "agent_message_chunk"

    for number in range(nth):
        await until(trial, wire, turn, fits, f"piece {number + 1} of the answer came")


async def question(trial: Trial, wire: Wire, session_id: str, turn: int | str) -> Message:
    """Wait for a permission request of the session; return the whole message.

    Raises:
        NotBroughtAbout: The turn ended before, or it did not come in time.
    """

    def fits(message: Message) -> bool:
        params = message.get("params")
        return (
            message.get("method") == "session/request_permission"
            and "id" in message
            and isinstance(params, dict)
            and params.get("sessionId") == session_id
        )

    return await until(trial, wire, turn, fits, "the agent asked for permission")


async def tool_update(
    trial: Trial, wire: Wire, session_id: str, turn: int | str, *, status: str
) -> Message:
    """Wait until a tool call of the session has this status; return the update.

    Raises:
        NotBroughtAbout: The turn ended before, or it did not come in time.
    """

    def fits(message: Message) -> bool:
        update = update_of(message, session_id)
        return "toolCallId" in update and update.get("status", "pending") == status

    message = await until(trial, wire, turn, fits, f"a tool call was {status}")
    return update_of(message, session_id)


async def asleep(
    trial: Trial, wire: Wire, turn: int | str, sleeper: Sleeper, *, n_processes: int = 1
) -> None:
    """Wait until the command that a turn was told to run does run.

    Cancellation: safe. Concurrency: any number of tasks.

    Raises:
        NotBroughtAbout: The turn ended before, or it does not run in time.
    """
    trial.brought_about(
        await sleeper.has_started(
            trial.target.timeout_s, lambda: is_answered(wire, turn), n_processes=n_processes
        ),
        f"the agent did not run the command {sleeper.command}",
    )


async def quiet(trial: Trial, wire: Wire) -> list[Message]:
    """Return what the agent still says before it answers something harmless.

    A barrier rather than a sleep, and one that agents pass that answer no method they do not know.

    Cancellation: safe. Concurrency: one task for each wire.

    Raises:
        WireError: It answers nothing any more.
    """
    n_before = len(wire.received)
    await serves(trial, wire, "a turn")
    return wire.received[n_before:]


async def answer_of(trial: Trial, client: Client, turn: int | str) -> str:
    """Wait for the answer to a prompt and say what it is: the stop reason, or the error in words.

    Cancellation: safe. Concurrency: any number of tasks.

    Raises:
        WireError: There is none.
    """
    response = await client.wire.response(turn, trial.target.timeout_s)
    error: Any = response.get("error")
    if error is not None:
        code = error.get("code") if isinstance(error, dict) else None
        return f"the error {code}"
    result: Any = response.get("result")
    reason = result.get("stopReason") if isinstance(result, dict) else None
    return reason if isinstance(reason, str) else f"no stop reason but {result!r}"


# Messages to send in one write


def prompt_message(wire: Wire, session_id: str, text: str) -> Message:
    """Return a prompt with a fresh id, not sent yet."""
    return {
        "jsonrpc": "2.0",
        "id": wire.new_id(),
        "method": "session/prompt",
        "params": {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]},
    }


def cancel_message(session_id: str) -> Message:
    """Return a ``session/cancel``, not sent yet."""
    return {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": session_id}}
