"""Stop, at every moment of a turn that a client can see."""

from __future__ import annotations

import time

from conformance.scenarios import scenario
from conformance.trial import Trial


@scenario("CAN-01", "CAN-04", is_quick=True)
async def cancel_in_a_long_answer(trial: Trial) -> None:
    """Cancel an answer in the middle, then prompt again."""
    client, session_id = await trial.shared_session()
    turn = client.prompt(session_id, trial.say("long"))
    await client.wire.receive(
        lambda m: (
            m.get("method") == "session/update"
            and m["params"]["update"]["sessionUpdate"] == "agent_message_chunk"
        ),
        trial.target.timeout_s,
    )
    started_s = time.monotonic()
    client.cancel(session_id)
    with trial.expect("CAN-01") as it:
        reason = await client.stop_reason(turn, trial.target.timeout_s)
        trial.measure("in an answer", started_s)
        it.that(reason == "cancelled", f"the stop reason was {reason}")
    with trial.expect("CAN-04") as it:
        again = client.prompt(session_id, trial.say("hello"))
        reason = await client.stop_reason(again, trial.target.timeout_s)
        it.that(reason == "end_turn", f"the next prompt's stop reason was {reason}")
