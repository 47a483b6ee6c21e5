"""A cancel, and what must hold behind it whatever the moment was."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio

from conformance.client import Client
from conformance.moments import (
    answer_of,
    behind_answer,
    is_answered,
    open_tool_calls,
    quiet,
    said_in_turns,
)
from conformance.trace import WireError
from conformance.trial import NotBroughtAbout, Trial

__all__ = ["AFTER_STOP", "NATURAL", "settle", "stop"]

AFTER_STOP: Final = ("CAN-02", "CAN-03", "CAN-04", "CAN-05", "CAN-08")
"""What `stop` holds an agent to besides the reason; a scenario that uses it names them."""
NATURAL: Final = frozenset({"end_turn", "max_tokens", "max_turn_requests", "refusal"})
"""Why a turn ends that nobody cancelled."""


async def stop(
    trial: Trial,
    client: Client,
    session_id: str,
    turn: int,
    *,
    rule: str,
    moment: str,
    cancel: Callable[[], None] | None = None,
    is_long: bool = False,
) -> None:
    """Cancel a turn at the moment that it has come to, and look at all that follows.

    Cancellation: safe.

    Args:
        trial: Whose scenario it is; it names `rule` and `AFTER_STOP`.
        client: The client.
        session_id: The turn's session.
        turn: The id of its prompt.
        rule: What says that the turn is answered as cancelled.
        moment: When the cancel comes, for people: behind "cancelled".
        cancel: Sends the cancel, and what the scenario sends with it; just the cancel by default.
        is_long: Whether the turn is nothing but a long answer, which may have ended by itself.

    Raises:
        NotBroughtAbout: The turn was over before.
    """
    trial.brought_about(not is_answered(client.wire, turn), f"the turn was over {moment}")
    started_s = time.monotonic()
    if cancel is None:
        client.cancel(session_id)
    else:
        cancel()
    with trial.expect(rule) as it:
        reason = await answer_of(trial, client, turn)
        trial.measure(moment, started_s)
        if is_long and reason in NATURAL:
            await _see_that_it_is_long(trial, client, time.monotonic() - started_s)
        it.that(reason == "cancelled", f"cancelled {moment}: the answer was {reason}")
    if is_answered(client.wire, turn):
        await settle(trial, client, session_id, turn, moment=moment)


async def settle(
    trial: Trial, client: Client, session_id: str, turn: int | str, *, moment: str
) -> None:
    """Hold an agent to `AFTER_STOP` once a cancelled turn was answered.

    Cancellation: safe.
    """
    wire = client.wire
    open_calls = open_tool_calls(wire, session_id)
    with trial.expect("CAN-08") as it:
        it.that(not open_calls, f"cancelled {moment}: at the answer {'; '.join(open_calls)}")
    with trial.expect("CAN-02") as it:
        await quiet(trial, wire)
        said = said_in_turns(behind_answer(wire, turn), session_id)
        it.that(not said, f"cancelled {moment}: behind the answer came {', '.join(said[:3])}")
    with trial.expect("CAN-03") as it:
        n_answers = len(wire.responses(turn))
        it.that(n_answers == 1, f"cancelled {moment}: the prompt was answered {n_answers} times")
    await _go_on(trial, client, session_id, moment)


async def _go_on(trial: Trial, client: Client, session_id: str, moment: str) -> None:
    try:
        text = trial.say("hello")
    except NotBroughtAbout:
        return  # the rest was seen nevertheless
    reason = "nothing"
    with trial.expect("CAN-05") as it:
        reason = await answer_of(trial, client, client.prompt(session_id, text))
        it.that(
            reason in NATURAL or reason == "cancelled",
            f"cancelled {moment}: the next prompt was answered with {reason}",
        )
    with trial.expect("CAN-04") as it:
        it.that(reason != "cancelled", f"cancelled {moment}: so was the next prompt, by no one")


async def _see_that_it_is_long(trial: Trial, client: Client, took_s: float) -> None:
    """Make sure that a long answer does not end by itself so soon.

    An agent that ended it at a cancel and called it the end is wrong; one whose answer was over
    when the cancel came is not, and then there was nothing to cancel.

    Raises:
        NotBroughtAbout: It does end by itself.
    """
    session_id = await trial.open_session(client)
    turn = client.prompt(session_id, trial.say("long"))
    with anyio.move_on_after(4 * took_s + 2):
        try:
            await client.wire.response(turn, trial.target.timeout_s)
        except WireError:
            return
        raise NotBroughtAbout("the long answer is too short to be cancelled")
    client.cancel(session_id)
