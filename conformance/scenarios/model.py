"""What the model sees: hung up on by a cancel, and never told a history that it must refuse."""

from __future__ import annotations

from conformance.client import Client
from conformance.commands import Sleeper
from conformance.moments import answer_of, asleep, first_chunk, question
from conformance.scenarios import scenario
from conformance.scripted_model import ScriptedModel
from conformance.trial import Trial


@scenario("MOD-01", "MOD-02", "MOD-05")
async def cancel_while_the_model_writes(trial: Trial) -> None:
    """Cancel an answer in the middle, look at the model's side, and prompt again."""
    model = trial.model
    client, session_id = await trial.session()
    turn = client.prompt(session_id, trial.say("long"))
    await first_chunk(trial, client.wire, session_id, turn, nth=3)
    await _stop(trial, model, client, session_id, turn)
    await _see_hung_up(trial, model)
    await _prompt_again(trial, model, client, session_id, "MOD-02")


@scenario("MOD-01", "MOD-02", "MOD-05")
async def cancel_while_the_model_thinks(trial: Trial) -> None:
    """Cancel before the model's first word, look at the model's side, and prompt again."""
    model = trial.model
    client, session_id = await trial.session()
    turn = client.prompt(session_id, trial.say("stall"))
    is_called = await model.called(trial.scenario.name, trial.target.timeout_s)
    trial.brought_about(is_called, "the agent did not call the model")
    await _stop(trial, model, client, session_id, turn)
    await _see_hung_up(trial, model)
    await _prompt_again(trial, model, client, session_id, "MOD-02")


@scenario("MOD-03", "MOD-05")
async def cancel_while_a_tool_of_the_model_runs(trial: Trial) -> None:
    """Cancel a command that the model called, and look at what the model is told next."""
    model = trial.model
    client, session_id = await trial.session()
    with Sleeper.asleep() as sleeper:
        turn = client.prompt(session_id, trial.say("command", command=sleeper.command))
        await asleep(trial, client.wire, turn, sleeper)
        await _stop(trial, model, client, session_id, turn)
    await _prompt_again(trial, model, client, session_id, "MOD-03")


@scenario("MOD-03", "MOD-05")
async def cancel_while_a_tool_of_the_model_is_asked_about(trial: Trial) -> None:
    """Cancel a call that waits for permission, and look at what the model is told next."""
    model = trial.model
    client, session_id = await trial.session(permission="hold")
    turn = client.prompt(session_id, trial.say("permission", command="true"))
    await question(trial, client.wire, session_id, turn)
    await _stop(trial, model, client, session_id, turn)
    await _prompt_again(trial, model, client, session_id, "MOD-03")


@scenario("MOD-04")
async def refusal_of_the_model(trial: Trial) -> None:
    """Have the model refuse."""
    model = trial.model
    client, session_id = await trial.session()
    turn = client.prompt(session_id, trial.say("refusal"))
    reason = await answer_of(trial, client, turn)
    trial.brought_about(model.calls(trial.scenario.name), "the agent did not call the model")
    with trial.expect("MOD-04") as it:
        it.that(reason == "refusal", f"the answer was {reason}")


async def _stop(
    trial: Trial, model: ScriptedModel, client: Client, session_id: str, turn: int
) -> None:
    """Cancel, wait for the answer and see that no call of the model follows."""
    client.cancel(session_id)
    await answer_of(trial, client, turn)
    n_calls = len(model.calls(trial.scenario.name))
    await client.wire.silence(timeout_s=trial.target.timeout_s)
    with trial.expect("MOD-05") as it:
        n_more = len(model.calls(trial.scenario.name)) - n_calls
        it.that(not n_more, f"the model was called {n_more} times behind the answer")


async def _see_hung_up(trial: Trial, model: ScriptedModel) -> None:
    for call in model.calls(trial.scenario.name):
        with trial.expect("MOD-01") as it:
            is_closed = await model.hung_up(call, trial.target.timeout_s)
            it.that(is_closed, f"the connection is open {trial.target.timeout_s:g} s later")


async def _prompt_again(
    trial: Trial, model: ScriptedModel, client: Client, session_id: str, rule: str
) -> None:
    n_calls = len(model.calls(trial.scenario.name))
    await answer_of(trial, client, client.prompt(session_id, trial.say("hello")))
    later = model.calls(trial.scenario.name)[n_calls:]
    trial.brought_about(later, "the next prompt did not come to the model")
    with trial.expect(rule) as it:
        it.that(not later[0].problems, "; ".join(later[0].problems[:2]))
