"""A model that fails, breaks off or is busy, and what it is told of the conversation."""

from __future__ import annotations

from typing import Final

from conformance.moments import answer_of
from conformance.scenarios import scenario
from conformance.scripted_model import BROKEN_OFF, KEY
from conformance.steps import said
from conformance.trial import Trial

N_BARRIERS: Final = 3
"""So many answers the agent gives before it is taken to have read that the model is busy."""


@scenario("MOD-06", "MOD-07", "MOD-08")
async def model_that_fails(trial: Trial) -> None:
    """Have the model refuse its key, then break off its answer, and prompt again after each."""
    model = trial.model
    client, session_id = await trial.session()
    wire = client.wire
    for situation in ("failure", "cut"):
        start, n_calls = len(wire.trace), len(model.calls(trial.scenario.name))
        turn = client.prompt(session_id, trial.say(situation))
        with trial.expect("MOD-06") as it:
            reason = await answer_of(trial, client, turn)
            called = len(model.calls(trial.scenario.name)) > n_calls
            trial.brought_about(called, "the agent did not call the model")
            told = said(wire, session_id, "agent_message_chunk", start).strip()
            is_silent = reason == "end_turn" and told in ("", BROKEN_OFF)
            it.that(not is_silent, f"the turn ended as if nothing was, with {told!r}")
        with trial.expect("MOD-07") as it:
            reason = await answer_of(trial, client, client.prompt(session_id, trial.say("hello")))
            it.that(reason == "end_turn", f"the next prompt was answered with {reason}")
    with trial.expect("MOD-08") as it:
        received = [each.raw for each in wire.trace if each.direction == "received"]
        it.that(not any(KEY.encode() in raw for raw in received), "a message has it")
        it.that(KEY not in wire.stderr, "the log on stderr has it")


@scenario("MOD-09")
async def model_is_told_the_conversation(trial: Trial) -> None:
    """Prompt in two sessions by turns, and look at what the model is told."""
    model = trial.model
    client, session_id = await trial.session()
    other_id = await trial.open_session(client)
    first, other, second = (trial.say("hello", word=word) for word in ("heron", "egret", "stork"))
    for session, text in ((session_id, first), (other_id, other)):
        await answer_of(trial, client, client.prompt(session, text))
    n_calls = len(model.calls(trial.scenario.name))
    await answer_of(trial, client, client.prompt(session_id, second))
    told = [model.told(each) for each in model.calls(trial.scenario.name)[n_calls:]]
    trial.brought_about(told, "the agent did not call the model")
    with trial.expect("MOD-09") as it:
        it.that(not any(other in each for each in told), "it was told what another session said")
        it.that(any(first in each for each in told), "it was not told the prompt before")
        most = max(each.count(text) for each in told for text in (first, second))
        it.that(most == 1, f"it was told a prompt {most} times")


@scenario("MOD-10")
async def cancel_while_the_model_is_busy(trial: Trial) -> None:
    """Have the model ask for a minute's patience, and cancel meanwhile."""
    model = trial.model
    client, session_id = await trial.session()
    turn = client.prompt(session_id, trial.say("busy"))
    is_put_off = await model.put_off(trial.scenario.name, trial.target.timeout_s)
    trial.brought_about(is_put_off, "the agent did not call the model")
    for _ in range(N_BARRIERS):
        await client.wire.silence(timeout_s=trial.target.timeout_s)
    trial.brought_about(not client.wire.responses(turn), "it does not ask again")
    with trial.expect("MOD-10") as it:
        client.cancel(session_id)
        reason = await answer_of(trial, client, turn)
        it.that(reason == "cancelled", f"the answer was {reason}")
