"""The ten stages of a turn, its end and its flush: an abort at each, for each cause.

Each stage waits for the turn's signal, once as a listener that cooperates and once as one that is
released only later; then the turn ends there, and no later stage is reached.
"""

from __future__ import annotations

from typing import Any

import pytest
from core_rig import (
    DISPOSED,
    PARENT,
    STAGES,
    USER,
    GatedStore,
    Hang,
    Held,
    Rig,
    Waiting,
    answer_ok,
    call,
    rig,
    say,
    settle,
    signal_in,
    tool,
)

from agent_core.cancellation import AbortSignal
from agent_core.events import Aborted, Completed, Disposed, TurnEnd, encode
from agent_core.hooks import HOOKS, Kind

CAUSES = [
    pytest.param("user", marks=pytest.mark.requirement("R66")),
    pytest.param("parent", marks=pytest.mark.requirement("R66")),
    pytest.param("dispose", marks=pytest.mark.requirement("R63", "R65")),
]
REASONS = {"user": USER, "parent": PARENT, "dispose": DISPOSED}
RULE = {
    "agent/prompt-submit": "R31",
    "system-prompt/assemble": "R32",
    "agent/session-prefix": "R33",
    "agent/pre-step": "R33",
    "agent/request": "R33",
    "model stream": "R34",
    "agent/step-result": "R33",
    "tool execution": "R35",
    "agent/turn-continuation": "R36",
    "agent/turn-stop": "R37",
}
ABORTED_LOG = {
    "agent/prompt-submit": ["turn/start", "turn/end"],
    "system-prompt/assemble": ["turn/start", "user/message", "turn/end"],
    "agent/session-prefix": ["turn/start", "user/message", "turn/end"],
    "agent/pre-step": ["turn/start", "user/message", "turn/end"],
    "agent/request": ["turn/start", "user/message", "step/start", "step/end", "turn/end"],
}
"""All that is in the log after an abort before the model was reached."""

MATRIX = [pytest.param(stage, marks=pytest.mark.requirement(RULE[stage])) for stage in STAGES]


def abort(r: Rig, cause: str) -> None:
    if cause == "dispose":
        r.agent.dispose()
    else:
        r.agent.cancel(REASONS[cause])


def reached(r: Rig, waiting: Waiting) -> list[str]:
    """Return the stages that were reached, each once, in order."""
    names = [name for name in r.record.names if name in STAGES]
    stages = list(dict.fromkeys(names))
    if r.model.requests:
        stages.insert(stages.index("agent/request") + 1, "model stream")
    if waiting.times_entered:
        stages.insert(stages.index("agent/step-result") + 1, "tool execution")
    return stages


@pytest.mark.race
@pytest.mark.requirement("R78", "R80", "R72", "R19", "R20", "R40", "R41", "R53", "R54", "R95")
@pytest.mark.parametrize("stage", MATRIX)
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("manner", ["cooperates", "is released later"])
async def test_an_abort_at_a_stage_ends_the_turn_there(stage: str, cause: str, manner: str) -> None:
    is_cooperative = manner == "cooperates"
    hang, body = Hang(is_slow=not is_cooperative), Waiting(is_cooperative=is_cooperative)
    script = hang if stage == "model stream" else call("probe")
    if stage != "tool execution":
        body.gate.set()
    async with rig(script, say("done"), tools=[tool("probe", body)]) as r:
        held: Held | None = None
        if stage == "model stream":
            entered, gate = hang.hanging, hang.gate
        elif stage == "tool execution":
            entered, gate = body.entered, body.gate
        else:
            held = Held(r.agent, stage, is_cooperative=is_cooperative)
            entered, gate = held.reached, held.gate
        prompt = r.agent.send("A")
        await entered.wait()
        abort(r, cause)
        if not is_cooperative:
            await settle()
            assert r.of(TurnEnd) == []
            assert not prompt.is_settled
            gate.set()
        await r.agent.when_idle()

        signals: list[AbortSignal | None] = [signal for _name, signal in r.record.signals]
        signals += [request.signal for request in r.model.requests]
        signals += [held.signal] if held else []
        signals += [body.signal] if body.signal else []
        assert len({id(signal) for signal in signals}) == 1
        assert signals[0] is not None
        assert signals[0].reason == REASONS[cause]

        outcome = Disposed() if cause == "dispose" else Aborted()
        assert r.outcomes == [outcome]
        assert await prompt.settled() == outcome
        assert encode(r.log[-1]) == (
            b'{"type":"turn/end","turn":1,"outcome":{"kind":"%s"}}'
            % (b"disposed" if cause == "dispose" else b"aborted")
        )
        assert r.kinds == ABORTED_LOG.get(stage, r.kinds)
        assert reached(r, body) == list(STAGES[: STAGES.index(stage) + 1])
        assert r.record.given("agent/error") == []
        assert len(r.calls) == len(r.results)
        assert r.kinds.count("step/start") == r.kinds.count("step/end")
        if cause != "dispose":
            assert await r.agent.send("B").settled() == Completed()
            assert not r.model.requests[-1].signal.aborted
            assert r.model.requests[-1].signal is not signals[0]


@pytest.mark.race
@pytest.mark.requirement("R36", "R37", "R72", "R95")
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("stage", ["agent/turn-continuation", "agent/turn-stop"])
async def test_an_abort_at_the_last_words_of_a_turn_that_would_have_ended_is_an_abort(
    stage: str, cause: str
) -> None:
    async with rig() as r:
        held = Held(r.agent, stage)
        r.agent.send("A")
        await held.reached.wait()
        abort(r, cause)
        await r.agent.when_idle()

        assert r.outcomes == [Disposed() if cause == "dispose" else Aborted()]


@pytest.mark.race
@pytest.mark.requirement("R38", "R20", "R41")
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("stage", ["turn end", "flush"])
async def test_an_abort_after_the_last_stage_reaches_the_signal_and_not_the_outcome(
    stage: str, cause: str
) -> None:
    store = GatedStore()
    async with rig(call("probe"), store=store, tools=[tool("probe", answer_ok)]) as r:
        if stage == "turn end":
            r.on_event(TurnEnd, lambda: abort(r, cause))
            prompt = r.agent.send("A")
        else:
            store.close_gate()
            prompt = r.agent.send("A")
            await store.flushing.wait()
            abort(r, cause)
            store.gate.set()
        await r.agent.when_idle()

        assert {signal.reason["kind"] for _name, signal in r.record.signals} == {  # type: ignore[index]
            REASONS[cause]["kind"]
        }
        assert r.outcomes == [Completed()]
        assert await prompt.settled() == Completed()
        if cause != "dispose":
            assert await r.agent.send("B").settled() == Completed()


# --- signatures -----------------------------------------------------------------------------------

CARRIERS = {
    "system-prompt/assemble": "context",
    "llm/stream": "request",
    "tools/pre-execute": "execution",
    "approval/request": "execution",
    "tools/execute": "execution",
    "tools/post-execute": "execution",
}


@pytest.mark.requirement("R52", "R55")
def test_the_table_puts_the_signal_last_or_into_the_request_value() -> None:
    for spec in HOOKS.values():
        if spec.kind is Kind.EMIT:
            assert "signal" not in spec.arguments, spec.name
        elif spec.name in CARRIERS:
            assert CARRIERS[spec.name] in spec.arguments
        else:
            assert spec.arguments[-1] == "signal", spec.name


@pytest.mark.requirement("R52", "R53", "R54", "R55", "R93")
async def test_every_seam_is_given_what_the_table_says_with_the_signal_before_next() -> None:
    async with rig(
        call("probe"), tools=[tool("probe", answer_ok, does="execute")], mode="ask"
    ) as r:
        await r.agent.send("A").settled()
        await r.agent.when_idle()
        (signal,) = {signal for _name, signal in r.record.signals}

        silent = {"agent/created", "agent/disposed", "agent/session-start", "agent/error"}
        silent |= {"subagent/start", "subagent/end"}
        assert set(r.record.names) == set(HOOKS) - silent - {"tools/execute", "tools/post-execute"}
        for name, args in r.record.seen:
            spec = HOOKS[name]
            has_next = spec.kind is Kind.WATERFALL
            assert len(args) == len(spec.arguments) + has_next, name
            assert not has_next or callable(args[-1]), name
            given = args[: len(spec.arguments)]
            if spec.kind is Kind.EMIT:
                continue
            assert signal_in(name, given) is signal, name
            if name not in CARRIERS:
                assert given[-1] is signal, name
            else:
                position = spec.arguments.index(CARRIERS[name])
                assert given[position].signal is signal, name


@pytest.mark.requirement("R52", "R54")
async def test_the_seams_around_a_tools_body_carry_the_signal_too() -> None:
    async with rig(call("probe"), tools=[tool("probe", answer_ok)]) as r:
        await r.agent.send("A").settled()
        signal = r.model.requests[0].signal

        for name in ("tools/execute", "tools/post-execute"):
            ((execution, *_rest),) = r.record.given(name)
            assert execution.signal is signal


@pytest.mark.requirement("R93")
async def test_listeners_are_given_no_wrapper_of_a_turn_or_step() -> None:
    async with rig(call("probe"), tools=[tool("probe", answer_ok)]) as r:
        await r.agent.send("A").settled()
        given: list[Any] = [arg for _name, args in r.record.seen for arg in args]

    kinds = {type(value).__name__ for value in given}
    assert not {name for name in kinds if "Turn" in name and name not in ("AssistantTurn",)}
    assert not {name for name in kinds if "StepContext" in name or "TurnContext" in name}
