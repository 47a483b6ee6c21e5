from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import Text, Usage
from agent_core.errors import ModelError
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    ReasoningDelta,
    Retrying,
    TextDelta,
    ToolCallDelta,
    UsageReport,
    UserTurn,
)
from agent_core.models.retry import MAX_RETRY_AFTER_S, RetryingModel

HELLO = [TextDelta("hello"), Finish("stop")]
OVERLOADED = ModelError("busy", code="OVERLOADED")


class Scripted:
    """A model that plays one attempt after the other: events, then perhaps an error."""

    info = ModelInfo("scripted:any")

    def __init__(self, *attempts: Sequence[Any]) -> None:
        self.attempts = list(attempts)
        self.n_calls = 0
        self.n_open = 0
        self.is_closed = False

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.n_calls += 1
        self.n_open += 1
        try:
            for step in self.attempts.pop(0):
                if isinstance(step, ModelError):
                    raise step
                yield step
        finally:
            self.n_open -= 1

    async def aclose(self) -> None:
        self.is_closed = True


def a_request(controller: AbortController | None = None) -> ModelRequest:
    return ModelRequest(
        model="scripted:any",
        messages=(UserTurn((Text("hi"),)),),
        system="",
        tools=(),
        session_id="s",
        signal=(controller or AbortController()).signal,
    )


def quick(model: Scripted, *, max_attempts: int = 5) -> RetryingModel:
    return RetryingModel(model, base_s=0.0, max_attempts=max_attempts)


async def collect(
    model: RetryingModel, request: ModelRequest | None = None
) -> tuple[list[ModelEvent], Exception | None]:
    events: list[ModelEvent] = []
    with anyio.fail_after(5):
        async with aclosing(model.stream(request or a_request())) as stream:
            try:
                async for event in stream:
                    events.append(event)
            except (ModelError, TurnAborted) as exc:
                return events, exc
    return events, None


async def abort_once_all_wait(controller: AbortController) -> None:
    await anyio.wait_all_tasks_blocked()
    controller.abort(USER)


async def test_a_call_that_succeeds_is_passed_on_as_it_is() -> None:
    said = [
        ReasoningDelta("hm"),
        ToolCallDelta(0, "read", "{}"),
        UsageReport(Usage(3, 4)),
        Finish("tool_calls"),
    ]

    events, error = await collect(quick(Scripted(said)))

    assert (events, error) == (said, None)


@pytest.mark.parametrize("code", sorted(ModelError.RETRYABLE))
async def test_a_failure_that_may_pass_is_tried_again_and_shown(code: str) -> None:
    model = Scripted([ModelError("oops", code=code)], [ModelError("oops", code=code)], HELLO)

    events, error = await collect(quick(model))

    assert events == [Retrying(1, 0.0, code, "oops"), Retrying(2, 0.0, code, "oops"), *HELLO]
    assert error is None


@pytest.mark.parametrize("code", ["AUTH", "BAD_REQUEST", "CONTEXT_TOO_LONG", "PROTOCOL"])
async def test_a_failure_that_will_not_pass_is_final(code: str) -> None:
    failure = ModelError("no", code=code)
    model = Scripted([failure], HELLO)

    assert await collect(quick(model)) == ([], failure)
    assert model.n_calls == 1


@pytest.mark.parametrize("word", [TextDelta("wor"), ReasoningDelta("hm"), ToolCallDelta(0, "read")])
async def test_a_call_that_has_said_something_is_never_repeated(word: ModelEvent) -> None:
    model = Scripted([word, OVERLOADED], HELLO)

    assert await collect(quick(model)) == ([word], OVERLOADED)
    assert model.n_calls == 1


async def test_a_count_of_tokens_is_nothing_said() -> None:
    report = UsageReport(Usage(1, 0))
    model = Scripted([report, OVERLOADED], HELLO)

    events, error = await collect(quick(model))

    assert events == [report, Retrying(1, 0.0, "OVERLOADED", "busy"), *HELLO]
    assert error is None


async def test_the_last_attempt_ends_in_its_own_error() -> None:
    model = Scripted([OVERLOADED], [OVERLOADED], [OVERLOADED], HELLO)

    events, error = await collect(quick(model, max_attempts=3))

    assert [type(event) for event in events] == [Retrying, Retrying]
    assert error is OVERLOADED
    assert model.n_calls == 3


@pytest.mark.requirement("B149")
@pytest.mark.parametrize("finish", [Finish("stop"), Finish("tool_calls")])
async def test_an_empty_answer_is_a_failure(finish: Finish) -> None:
    model = Scripted([TextDelta(""), finish], [finish])

    events, error = await collect(quick(model, max_attempts=2))

    assert isinstance(error, ModelError)
    assert error.code == "EMPTY_RESPONSE"
    assert finish not in events


@pytest.mark.requirement("B149")
async def test_thinking_alone_is_an_empty_answer_that_is_not_repeated() -> None:
    model = Scripted([ReasoningDelta("hm"), Finish("stop")], HELLO)

    events, error = await collect(quick(model))

    assert events == [ReasoningDelta("hm")]
    assert isinstance(error, ModelError)
    assert error.code == "EMPTY_RESPONSE"


@pytest.mark.parametrize("reason", ["length", "refusal"])
async def test_an_empty_answer_with_a_reason_of_its_own_is_passed_on(reason: str) -> None:
    said = [Finish(reason)]  # type: ignore[arg-type]

    assert await collect(quick(Scripted(said))) == (said, None)


@pytest.mark.requirement("B034")
async def test_a_stream_without_an_end_is_a_failure() -> None:
    events, error = await collect(quick(Scripted([], [TextDelta("hel")])))

    assert [type(event) for event in events] == [Retrying, TextDelta]
    assert isinstance(error, ModelError)
    assert error.code == "TRANSPORT"


async def test_waits_grow_to_the_cap_and_lose_up_to_half_by_chance() -> None:
    chances = iter([0.0, 1.0, 0.5, 0.0])
    model = Scripted(*[[OVERLOADED]] * 4, HELLO)
    retrying = RetryingModel(model, base_s=0.001, cap_s=0.004, chance=lambda: next(chances))

    events, _ = await collect(retrying)

    waits = [event.delay_s for event in events if isinstance(event, Retrying)]
    assert waits == [0.001, 0.001, 0.003, 0.004]


@pytest.mark.requirement("B148")
async def test_the_wait_the_provider_asks_for_is_kept() -> None:
    limited = ModelError("slow down", code="RATE_LIMIT", retry_after_s=0.02)

    events, error = await collect(quick(Scripted([limited], HELLO)))

    assert events[0] == Retrying(1, 0.02, "RATE_LIMIT", "slow down")
    assert error is None


async def test_a_wait_that_is_too_long_to_watch_ends_in_the_error() -> None:
    limited = ModelError("tomorrow", code="RATE_LIMIT", retry_after_s=MAX_RETRY_AFTER_S + 1)

    assert await collect(quick(Scripted([limited], HELLO))) == ([], limited)


@pytest.mark.requirement("R34", "B147")
async def test_an_abort_ends_the_wait_at_once() -> None:
    controller = AbortController()
    limited = ModelError("slow down", code="RATE_LIMIT", retry_after_s=100.0)
    model = Scripted([limited], HELLO)
    with anyio.fail_after(5):
        async with aclosing(quick(model).stream(a_request(controller))) as stream:
            assert isinstance(await anext(stream), Retrying)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(abort_once_all_wait, controller)
                with pytest.raises(TurnAborted):
                    await anext(stream)

    assert model.n_calls == 1


async def test_a_failure_under_an_aborted_signal_is_an_abort() -> None:
    controller = AbortController()
    controller.abort(USER)

    events, error = await collect(quick(Scripted([OVERLOADED], HELLO)), a_request(controller))

    assert events == []
    assert isinstance(error, TurnAborted)


async def test_the_attempt_is_closed_before_the_wait_and_when_the_consumer_leaves() -> None:
    model = Scripted([OVERLOADED], HELLO)

    async with aclosing(quick(model).stream(a_request())) as stream:
        assert isinstance(await anext(stream), Retrying)
        assert model.n_open == 0
        assert await anext(stream) == TextDelta("hello")
        assert model.n_open == 1

    assert model.n_open == 0


async def test_it_bears_the_name_of_its_model_and_closes_it() -> None:
    model = Scripted()
    retrying = RetryingModel(model)

    await retrying.aclose()

    assert retrying.info.name == "scripted:any"
    assert model.is_closed
