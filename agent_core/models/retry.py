"""Try a failed model call again, visibly, as long as it has said nothing yet.

A call that has said something is never repeated: people have seen its words, and a second answer
would contradict them. What looks like success but is none, an empty answer or a stream that just
stops, counts as a failure here, so that no adapter has to think of it and no turn ends well with
nothing said.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import anyio

from agent_core.errors import ModelError
from agent_core.logs import get_logger
from agent_core.models.adapter import (
    Finish,
    ModelAdapter,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    ReasoningDelta,
    Retrying,
    TextDelta,
    ToolCallDelta,
)

__all__ = ["RetryingModel"]

# Who is asked to wait longer than this wants to know it now, not to watch a spinner.
MAX_RETRY_AFTER_S: Final = 120.0

log = get_logger(__name__)


class RetryingModel:
    """A `ModelAdapter` that calls another one until it answers.

    Waits between attempts grow exponentially from `base_s` to `cap_s`, less up to half by chance so
    that sessions that failed together do not come back together. A provider's Retry-After is
    honoured, unless it is longer than two minutes: then the call fails with it.

    Args:
        adapter: The model to call. `aclose` closes it.
        max_attempts: Calls in all, at least 1.
        base_s: The first wait, in seconds.
        cap_s: The longest wait we choose ourselves, in seconds.
        chance: Returns a number in 0.0–1.0.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        max_attempts: int = 5,
        base_s: float = 0.5,
        cap_s: float = 10.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._adapter = adapter
        self._max_attempts = max_attempts
        self._base_s = base_s
        self._cap_s = cap_s
        self._chance = chance

    @property
    def info(self) -> ModelInfo:
        """What is known of the model that is called."""
        return self._adapter.info

    async def aclose(self) -> None:
        """Close the adapter. Called once, when no stream is open."""
        await self._adapter.aclose()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model; see `ModelAdapter.stream`.

        Yields a `Retrying` before each wait. An abort ends the wait at once.

        Raises:
            ModelError: The last failure: not retryable, after something was said, or one too many.
                ``EMPTY_RESPONSE``: the model finished without text or tool call.
                ``TRANSPORT``: the stream ended without a `Finish`.
            TurnAborted: The signal fired.
        """
        for attempt in range(1, self._max_attempts + 1):
            has_spoken = False
            try:
                async with aclosing(_checked(self._adapter, request)) as events:
                    async for event in events:
                        has_spoken |= isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta)
                        yield event
                return
            except ModelError as error:
                request.signal.raise_if_aborted()
                delay_s = self._delay_s(attempt, error)
                if has_spoken or delay_s is None:
                    raise
                log.info(
                    "model_call_failed", model=self.info.name, attempt=attempt, code=error.code
                )
                retrying = Retrying(attempt, delay_s, error.code, error.message)
            yield retrying
            async with request.signal.scope():
                await anyio.sleep(delay_s)

    def _delay_s(self, attempt: int, error: ModelError) -> float | None:
        """Return how long to wait before the next attempt, `None` for not to try again."""
        if not error.is_retryable or attempt == self._max_attempts:
            return None
        asked_s = error.retry_after_s or 0.0
        if asked_s > MAX_RETRY_AFTER_S:
            return None
        ours_s = min(self._cap_s, self._base_s * 2.0 ** (attempt - 1))
        return max(asked_s, ours_s * (1 - self._chance() / 2))


async def _checked(
    adapter: ModelAdapter, request: ModelRequest
) -> AsyncGenerator[ModelEvent, None]:
    """Yield one attempt's events; a success that is none becomes a `ModelError`."""
    has_answer = False
    async with aclosing(adapter.stream(request)) as events:
        async for event in events:
            if isinstance(event, Finish):
                if event.reason in ("stop", "tool_calls") and not has_answer:
                    raise ModelError(
                        "the model ended its answer without saying anything", code="EMPTY_RESPONSE"
                    )
                yield event
                return
            if isinstance(event, TextDelta):
                has_answer |= bool(event.text.strip())  # nobody sees white space
            has_answer |= isinstance(event, ToolCallDelta)
            yield event
    request.signal.raise_if_aborted()
    raise ModelError("the model's answer broke off", code="TRANSPORT")
