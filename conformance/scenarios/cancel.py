"""Stop, at every moment of a turn that a client can see."""

from __future__ import annotations

from typing import Final

from conformance.client import Client
from conformance.commands import Sleeper
from conformance.moments import (
    answer_of,
    asleep,
    first_chunk,
    is_answered,
    question,
    quiet,
    tool_calls,
)
from conformance.scenarios import scenario
from conformance.stopping import AFTER_STOP, settle, stop
from conformance.trial import Trial

REQUEST_CANCELLED: Final = {"code": -32800, "message": "Request cancelled"}
GETS_AWAY: Final = {
    "setsid sleep {s} & sleep {s}": "has left its process group",
    "trap '' TERM; sleep {s}": "ignores TERM",
}


@scenario("CAN-01", *AFTER_STOP, is_quick=True)
async def cancel_in_a_long_answer(trial: Trial) -> None:
    """Cancel an answer at its first piece, then prompt again."""
    client, session_id = await trial.shared_session()
    turn = client.prompt(session_id, trial.say("long"))
    await first_chunk(trial, client.wire, session_id, turn)
    await stop(trial, client, session_id, turn, rule="CAN-01", moment="in an answer", is_long=True)


@scenario("CAN-01", *AFTER_STOP)
async def cancel_at_several_pieces(trial: Trial) -> None:
    """Cancel answers at their second, fifth and ninth piece."""
    for nth in (2, 5, 9):
        client, session_id = await trial.shared_session()
        turn = client.prompt(session_id, trial.say("long"))
        await first_chunk(trial, client.wire, session_id, turn, nth=nth)
        moment = f"at piece {nth} of an answer"
        await stop(trial, client, session_id, turn, rule="CAN-01", moment=moment, is_long=True)


@scenario("CAN-01", *AFTER_STOP)
async def cancel_again_and_again(trial: Trial) -> None:
    """Cancel an answer five times in one write."""
    client, session_id = await trial.shared_session()
    turn = client.prompt(session_id, trial.say("long"))
    await first_chunk(trial, client.wire, session_id, turn)

    def cancel() -> None:
        for _ in range(5):
            client.cancel(session_id)

    await stop(
        trial,
        client,
        session_id,
        turn,
        rule="CAN-01",
        moment="five times",
        cancel=cancel,
        is_long=True,
    )


@scenario("CAN-15", *AFTER_STOP)
async def cancel_before_the_first_word(trial: Trial) -> None:
    """Cancel a prompt as soon as the agent has read it."""
    client, session_id = await trial.shared_session()
    turn = client.prompt(session_id, trial.say("long"))
    await quiet(trial, client.wire)
    await stop(
        trial,
        client,
        session_id,
        turn,
        rule="CAN-15",
        moment="before the first word",
        is_long=True,
    )


@scenario("CAN-15", *AFTER_STOP, is_quick=True)
async def cancel_while_the_model_is_silent(trial: Trial) -> None:
    """Cancel a turn whose model says nothing at all."""
    client, session_id = await trial.shared_session()
    turn = client.prompt(session_id, trial.say("stall"))
    await quiet(trial, client.wire)
    await stop(trial, client, session_id, turn, rule="CAN-15", moment="while the model is silent")


@scenario("CAN-06", "CAN-14", "CAN-28", *AFTER_STOP, is_quick=True)
async def cancel_while_a_command_runs(trial: Trial) -> None:
    """Cancel a turn that runs a command."""
    client, session_id = await trial.shared_session(permission="allow")
    with Sleeper.asleep() as sleeper:
        turn = client.prompt(session_id, trial.say("command", command=sleeper.command))
        await asleep(trial, client.wire, turn, sleeper)
        moment = "while a command runs"
        await stop(trial, client, session_id, turn, rule="CAN-14", moment=moment)
        with trial.expect("CAN-06") as it:
            is_gone = await sleeper.is_gone(trial.target.timeout_s)
            it.that(is_gone, "the command runs on after the turn")
        with trial.expect("CAN-28") as it:
            calls = tool_calls(client.wire, session_id).values()
            told = [each.get("title") for each in calls if each.get("status") == "completed"]
            it.that(not told, f"shown as completed: {told[:1]}")


@scenario("CAN-07", "CAN-14", *AFTER_STOP)
async def cancel_a_command_that_gets_away(trial: Trial) -> None:
    """Cancel turns whose command leaves its process group, or ignores TERM."""
    for form, what in GETS_AWAY.items():
        client, session_id = await trial.shared_session(permission="allow")
        with Sleeper.asleep(form) as sleeper:
            turn = client.prompt(session_id, trial.say("command", command=sleeper.command))
            n_processes = form.count("{s}")
            await asleep(trial, client.wire, turn, sleeper, n_processes=n_processes)
            moment = f"while a command that {what} runs"
            await stop(trial, client, session_id, turn, rule="CAN-14", moment=moment)
            with trial.expect("CAN-07") as it:
                is_gone = await sleeper.is_gone(trial.target.timeout_s)
                it.that(is_gone, f"a command that {what} runs on after the turn")


@scenario("CAN-10", "CAN-11", *AFTER_STOP, is_quick=True)
async def cancel_while_it_asks(trial: Trial) -> None:
    """Cancel a turn that asks for permission, and answer the question as cancelled."""
    client, session_id = await trial.shared_session(permission="hold")
    turn = await _ask(trial, client, session_id)
    moment = "while it asks for permission"
    await stop(trial, client, session_id, turn, rule="CAN-10", moment=moment)
    _see_that_nothing_ran(trial, moment)


@scenario("CAN-10", "CAN-11", *AFTER_STOP)
async def cancel_and_withdraw_the_question(trial: Trial) -> None:
    """Cancel a turn that asks for permission, and answer the question with an error."""
    client, session_id = await trial.shared_session(permission="never")
    turn = await _ask(trial, client, session_id)

    def cancel() -> None:
        client.cancel(session_id)
        for request_id in list(client.wire.unanswered):
            del client.wire.unanswered[request_id]
            client.wire.send({"jsonrpc": "2.0", "id": request_id, "error": REQUEST_CANCELLED})

    moment = "with an error as the answer to its question"
    await stop(trial, client, session_id, turn, rule="CAN-10", moment=moment, cancel=cancel)
    _see_that_nothing_ran(trial, moment)


@scenario("CAN-11", "CAN-12", "CAN-13", *AFTER_STOP)
async def cancel_and_answer_late(trial: Trial) -> None:
    """Cancel a turn that asks for permission, and allow what it asked when all is over."""
    client, session_id = await trial.shared_session(permission="never")
    turn = await _ask(trial, client, session_id)
    (request_id, asked), *_ = client.wire.unanswered.items()
    moment = "with its question left open"
    await stop(trial, client, session_id, turn, rule="CAN-12", moment=moment)
    if not is_answered(client.wire, turn):
        return
    with trial.expect("CAN-13") as it:
        allowed = next(
            (each["optionId"] for each in asked["params"]["options"] if "allow" in each["kind"]),
            "allow",
        )
        outcome = {"outcome": {"outcome": "selected", "optionId": allowed}}
        client.wire.reply(request_id, outcome)
        await quiet(trial, client.wire)
        after = client.prompt(session_id, trial.say("hello"))
        reason = await answer_of(trial, client, after)
        it.that(not reason.startswith("the error"), f"the next prompt was answered with {reason}")
    _see_that_nothing_ran(trial, "and allowed what it asked afterwards")


@scenario("CAN-09", "CAN-01", *AFTER_STOP, is_quick=True)
async def cancel_one_of_two_sessions(trial: Trial) -> None:
    """Cancel one of two answers that are given at the same time."""
    client, cancelled = await trial.shared_session()
    other = await trial.open_session(client)
    turn = client.prompt(cancelled, trial.say("long"))
    others_turn = client.prompt(other, trial.say("long"))
    await first_chunk(trial, client.wire, cancelled, turn)
    await first_chunk(trial, client.wire, other, others_turn)
    moment = "beside another session"
    await stop(trial, client, cancelled, turn, rule="CAN-01", moment=moment, is_long=True)
    with trial.expect("CAN-09") as it:
        if is_answered(client.wire, others_turn):
            reason = await answer_of(trial, client, others_turn)
            it.that(reason != "cancelled", "the other session's turn was cancelled too")
            it.that(not reason.startswith("the error"), f"the other turn ended with {reason}")
        else:
            await first_chunk(trial, client.wire, other, others_turn, nth=2)
    client.cancel(other)
    await client.wire.response(others_turn, trial.target.timeout_s)


@scenario("CAN-18", "CAN-19", "CAN-01", *AFTER_STOP)
async def cancel_with_a_prompt_behind(trial: Trial) -> None:
    """Cancel an answer when another prompt waits behind it."""
    client, session_id = await trial.shared_session()
    turn = client.prompt(session_id, trial.say("long"))
    await first_chunk(trial, client.wire, session_id, turn)
    behind = client.prompt(session_id, trial.say("hello"))
    await quiet(trial, client.wire)
    trial.brought_about(
        not is_answered(client.wire, turn), "the second prompt ended the first one's turn"
    )
    client.cancel(session_id)
    with trial.expect("CAN-18") as it:
        reason = await answer_of(trial, client, behind)
        trial.see("CAN-19", "recorded", f"it was answered with {reason}")
        await quiet(trial, client.wire)
        n_answers = len(client.wire.responses(behind))
        it.that(n_answers == 1, f"the prompt behind was answered {n_answers} times")
    with trial.expect("CAN-01") as it:
        reason = await answer_of(trial, client, turn)
        it.that(reason == "cancelled", f"cancelled with a prompt behind: it was {reason}")
    await settle(trial, client, session_id, turn, moment="with a prompt behind")


@scenario("CAN-25", "CAN-14", *AFTER_STOP)
async def cancel_a_subagent(trial: Trial) -> None:
    """Cancel a turn whose subagent runs a command."""
    client, session_id = await trial.shared_session(permission="allow")
    with Sleeper.asleep() as sleeper:
        turn = client.prompt(session_id, trial.say("delegate", command=sleeper.command))
        await asleep(trial, client.wire, turn, sleeper)
        moment = "while a subagent works"
        await stop(trial, client, session_id, turn, rule="CAN-14", moment=moment)
        with trial.expect("CAN-25") as it:
            is_gone = await sleeper.is_gone(trial.target.timeout_s)
            it.that(is_gone, "what the subagent ran runs on after the turn")


@scenario("CAN-24")
async def cancel_and_leave(trial: Trial) -> None:
    """Cancel a turn that runs a command, and close the agent's input behind it."""
    trial.needs(trial.target.transport == "stdio", "an input that can be closed")
    client, session_id = await trial.session(permission="allow")
    with Sleeper.asleep() as sleeper:
        turn = client.prompt(session_id, trial.say("command", command=sleeper.command))
        await asleep(trial, client.wire, turn, sleeper)
        client.cancel(session_id)
        with trial.expect("CAN-24") as it:
            await client.wire.close_stdin(trial.target.timeout_s)
            await client.wire.exited(trial.target.timeout_s)
            is_gone = await sleeper.is_gone(trial.target.timeout_s)
            it.that(is_gone, "the command outlived the agent")


async def _ask(trial: Trial, client: Client, session_id: str) -> int:
    """Have the agent ask whether it may run something; return the prompt's id."""
    command = f"echo ran >> {trial.folder}/ran"
    turn = client.prompt(session_id, trial.say("permission", command=command))
    await question(trial, client.wire, session_id, turn)
    return turn


def _see_that_nothing_ran(trial: Trial, moment: str) -> None:
    with trial.expect("CAN-11") as it:
        ran = (trial.folder / "ran").exists()
        it.that(not ran, f"cancelled {moment}: what it asked about was run")
