"""Cancels that race with something, and those that have nothing to cancel."""

from __future__ import annotations

from typing import Any, Final

import anyio

from conformance.client import Client
from conformance.moments import (
    answer_of,
    behind_answer,
    cancel_message,
    first_chunk,
    is_answered,
    prompt_message,
    quiet,
    said_in_turns,
    until,
    update_of,
)
from conformance.scenarios import scenario
from conformance.stopping import AFTER_STOP, NATURAL, settle
from conformance.trace import WireError
from conformance.trial import Trial

OFFSETS_MS: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34)
TIMES: Final = 4
WRONG_PARAMS: Final[tuple[Any, ...]] = (
    {"sessionId": "no-such-session"},
    {"sessionId": None},
    {"sessionId": 7},
    {},
    [],
    None,
)
WITHDRAWN: Final = frozenset({"cancelled", "the error -32800", *NATURAL})


@scenario("CAN-16", "CAN-17", *AFTER_STOP, is_quick=True)
async def cancel_in_the_write_of_the_prompt(trial: Trial) -> None:
    """Send prompts together with their cancel."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    moment = "in the write of the prompt"
    prompt = prompt_message(wire, session_id, trial.say("long"))
    wire.send_together([prompt, cancel_message(session_id)])
    try:
        reason = await answer_of(trial, client, prompt["id"])
    except WireError:
        trial.see("CAN-17", "broken", "the answer went on as if nobody had cancelled it")
        client.cancel(session_id)
        reason = await answer_of(trial, client, prompt["id"])
    else:
        # Whether one that ended by itself was lost or only short cannot be told.
        if reason == "cancelled":
            trial.see("CAN-17", "kept")
    with trial.expect("CAN-16") as it:
        it.that(reason in NATURAL or reason == "cancelled", f"cancelled {moment}: {reason}")
    await settle(trial, client, session_id, prompt["id"], moment=moment)
    for _ in range(TIMES):
        prompt = prompt_message(wire, session_id, trial.say("hello"))
        wire.send_together([prompt, cancel_message(session_id)])
        await _settle_either_way(trial, client, session_id, prompt["id"], moment)


@scenario("CAN-02", "CAN-03", "CAN-04", "CAN-16")
async def cancel_at_swept_moments(trial: Trial) -> None:
    """Cancel short answers so many milliseconds behind the prompt, and right behind the answer."""
    client, session_id = await trial.shared_session()
    for offset_ms in OFFSETS_MS:
        turn = client.prompt(session_id, trial.say("hello"))
        await anyio.sleep(offset_ms / 1000)
        client.cancel(session_id)
        await _settle_either_way(trial, client, session_id, turn, f"{offset_ms} ms in")
    with trial.expect("CAN-04") as it:
        for _ in range(TIMES):
            turn = client.prompt(session_id, trial.say("hello"))
            reason = await answer_of(trial, client, turn)
            client.cancel(session_id)
            it.that(reason != "cancelled", "a cancel behind an answer cancelled the next prompt")
    await quiet(trial, client.wire)


@scenario("CAN-01", "CAN-03", "CAN-26", is_quick=True)
async def cancel_and_prompt_in_one_write(trial: Trial) -> None:
    """Send a prompt in the same write as the cancel of the one before it."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    for _ in range(TIMES):
        old = client.prompt(session_id, trial.say("long"))
        await first_chunk(trial, wire, session_id, old)
        trial.brought_about(not is_answered(wire, old), "the answer was over")
        new = prompt_message(wire, session_id, trial.say("hello"))
        wire.send_together([cancel_message(session_id), new])
        with trial.expect("CAN-01") as it:
            reason = await answer_of(trial, client, old)
            it.that(
                reason == "cancelled" or reason in NATURAL,
                f"cancelled with a prompt behind it: the answer was {reason}",
            )
        with trial.expect("CAN-26") as it:
            reason = await answer_of(trial, client, new["id"])
            it.that(reason in NATURAL, f"the prompt behind the cancel was answered with {reason}")
        with trial.expect("CAN-03") as it:
            await quiet(trial, wire)
            for each in (old, new["id"]):
                n_answers = len(wire.responses(each))
                it.that(n_answers == 1, f"a prompt was answered {n_answers} times")


@scenario("CAN-20", is_quick=True)
async def cancel_where_nothing_fits(trial: Trial) -> None:
    """Cancel unknown sessions, an idle one and none at all while another answers."""
    client, session_id = await trial.shared_session()
    idle = await trial.open_session(client)
    wire = client.wire
    with trial.expect("CAN-20") as it:
        client.cancel(idle)
        said = await quiet(trial, wire)
        strays = [
            message for message in said if "method" not in message and message is not said[-1]
        ]
        it.that(not strays, f"a cancel of an idle session was answered with {strays}")
        turn = client.prompt(session_id, trial.say("long"))
        await first_chunk(trial, wire, session_id, turn)
        client.cancel(idle)
        for params in WRONG_PARAMS:
            wire.notify("session/cancel", params)
            await quiet(trial, wire)
            reason = "" if not is_answered(wire, turn) else await answer_of(trial, client, turn)
            it.that(reason != "cancelled", f"a cancel with the params {params} stopped a turn")
        trial.brought_about(not is_answered(wire, turn), "the long answer was over")
        await first_chunk(trial, wire, session_id, turn)
        client.cancel(session_id)
        await wire.response(turn, trial.target.timeout_s)
        again = client.prompt(idle, trial.say("hello"))
        reason = await answer_of(trial, client, again)
        it.that(reason != "cancelled", "an earlier cancel of an idle session cancelled its prompt")


@scenario("CAN-21", "CAN-22")
async def withdraw_a_prompt(trial: Trial) -> None:
    """Withdraw a prompt by its request id, alone and together with a cancel."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    for with_cancel in (False, True):
        turn = client.prompt(session_id, trial.say("long"))
        await first_chunk(trial, wire, session_id, turn)
        withdrawal = {
            "jsonrpc": "2.0",
            "method": "$/cancel_request",
            "params": {"requestId": turn},
        }
        with trial.expect("CAN-21") as it:
            if with_cancel:
                wire.send_together([withdrawal, cancel_message(session_id)])
            else:
                wire.send(withdrawal)
                await _wait_for_an_effect(trial, client, session_id, turn)
            reason = await answer_of(trial, client, turn)
            it.that(reason in WITHDRAWN, f"a withdrawn prompt was answered with {reason}")
            await quiet(trial, wire)
            n_answers = len(wire.responses(turn))
            it.that(n_answers == 1, f"a withdrawn prompt was answered {n_answers} times")


@scenario("CAN-23")
async def withdraw_nothing(trial: Trial) -> None:
    """Withdraw requests that do not exist while an answer is given."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    turn = client.prompt(session_id, trial.say("long"))
    await first_chunk(trial, wire, session_id, turn)
    with trial.expect("CAN-23") as it:
        for params in (
            {"requestId": str(turn)},
            {"requestId": turn + 1000},
            {"requestId": None},
            {},
        ):
            wire.notify("$/cancel_request", params)
            await quiet(trial, wire)
            reason = "" if not is_answered(wire, turn) else await answer_of(trial, client, turn)
            it.that(
                reason not in WITHDRAWN - NATURAL,
                f"{params} withdrew the prompt with the id {turn}",
            )
        trial.brought_about(not is_answered(wire, turn), "the long answer was over")
        await first_chunk(trial, wire, session_id, turn)
    client.cancel(session_id)
    await wire.response(turn, trial.target.timeout_s)


@scenario("CAN-27")
async def cancel_as_a_request(trial: Trial) -> None:
    """Send a cancel as a request, for an idle session."""
    client, session_id = await trial.shared_session()
    request = client.wire.request("session/cancel", {"sessionId": session_id})
    try:
        response = await client.wire.response(request, trial.target.timeout_s)
    except WireError:
        trial.see("CAN-27", "recorded", "nothing")
    else:
        error = response.get("error")
        shown = f"the error {error.get('code')}" if isinstance(error, dict) else "a result"
        trial.see("CAN-27", "recorded", shown)


@scenario("CAN-02", "CAN-03", "CAN-16")
async def cancel_behind_a_plan(trial: Trial) -> None:
    """Cancel a turn as soon as its plan is there."""
    client, session_id = await trial.shared_session()
    turn = client.prompt(session_id, trial.say("plan"))
    await until(
        trial,
        client.wire,
        turn,
        lambda message: update_of(message, session_id).get("sessionUpdate") == "plan",
        "there was a plan",
    )
    client.cancel(session_id)
    await _settle_either_way(trial, client, session_id, turn, "behind a plan")


async def _settle_either_way(
    trial: Trial, client: Client, session_id: str, turn: int, moment: str
) -> None:
    """Hold an agent to what is due when nobody can say which came first, the cancel or the end."""
    wire = client.wire
    with trial.expect("CAN-16") as it:
        reason = await answer_of(trial, client, turn)
        is_sound = reason == "cancelled" or reason in NATURAL
        it.that(is_sound, f"cancelled {moment}: the answer was {reason}")
    if not is_answered(wire, turn):
        return
    with trial.expect("CAN-02") as it:
        await quiet(trial, wire)
        said = said_in_turns(behind_answer(wire, turn), session_id)
        it.that(
            not said or reason != "cancelled",
            f"cancelled {moment}: behind the answer came {', '.join(said[:3])}",
        )
    with trial.expect("CAN-03") as it:
        n_answers = len(wire.responses(turn))
        it.that(n_answers == 1, f"cancelled {moment}: the prompt was answered {n_answers} times")


async def _wait_for_an_effect(trial: Trial, client: Client, session_id: str, turn: int) -> None:
    """See what a withdrawal does: it ends the turn, or the answer goes on; then end that."""
    wire = client.wire
    await quiet(trial, wire)
    with anyio.move_on_after(1):  # agents need not react, and then nothing tells that they do not
        reason = await answer_of(trial, client, turn)
        return trial.see("CAN-22", "recorded", f"the answer is {reason}")
    trial.see("CAN-22", "recorded", "the turn goes on")
    client.cancel(session_id)
