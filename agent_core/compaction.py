"""Compaction: a summary in the place of a history that is getting too long for the model.

The rules:
- It happens inside a turn, and gets that turn's signal like everything else there.
- Once a `CompactionStart` is in the log a `CompactionEnd` is owed, whatever happens.
- The history changes with a ``completed`` end and in no other way: whoever cancels a compaction, or
  whatever makes it fail, leaves it as it was.
- A summary that makes nothing shorter is a failure, too.
- One that nobody asked for never ends a turn: the model call behind it may still work.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakKeyDictionary

from agent_core.cancellation import AbortSignal, TurnAborted, is_host_cancellation
from agent_core.errors import ModelError
from agent_core.events import (
    CompactionEnd,
    CompactionStart,
    RequestHeader,
    StepStart,
    TurnStart,
)
from agent_core.hooks import Hooks
from agent_core.logs import get_logger
from agent_core.models.adapter import (
    Message,
    ModelEvent,
    ModelRequest,
    Retrying,
    UsageReport,
)
from agent_core.sessions.log import Session
from agent_core.sessions.projection import Projection
from agent_core.summary import Summariser
from agent_core.usage import CHARS_PER_TOKEN, context_tokens, rough_tokens, usage_event

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["CompactionResult", "Compactor", "compact"]

THRESHOLD: Final = 0.85
"""Share of a model's context that may be full before a step; the rest is for its answer."""
_MIN_GAIN: Final = 0.05
"""Share of the context that must be won for a compaction nobody asked for."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What came of a compaction. The tokens are what the context held before, and what it holds.

    ``nothing``: there was nothing to compact, and nothing was logged. `error` says in words for
    people why one ``failed``.
    """

    status: Literal["completed", "failed", "nothing"]
    before_tokens: int = 0
    after_tokens: int = 0
    error: str = ""

    @property
    def sentence(self) -> str:
        """The result as people are told it."""
        if self.status == "completed":
            before, after = _about(self.before_tokens), _about(self.after_tokens)
            return f"Compacted: about {before} → {after} tokens."
        if self.status == "nothing":
            return "There is nothing to compact."
        return f"The conversation could not be compacted: {self.error.rstrip('.')}."


async def compact(
    agent: Agent, signal: AbortSignal, *, model: str | None = None
) -> CompactionResult:
    """Put a summary in the place of the agent's history; see the rules above.

    Cancellation: through `signal`; the history stays as it was. Concurrency: one at a time, in the
    agent's own turn.

    Args:
        agent: Must be in a turn.
        signal: That turn's.
        model: The name of the model to ask; `None` for the agent's.

    Raises:
        TurnAborted: The signal fired.
        RuntimeError: No turn runs.
    """
    session, state = agent.session, agent.session.state
    if not state.open_turn:
        raise RuntimeError("a compaction is part of a turn")
    signal.raise_if_aborted()
    if not state.n_to_compact:
        return CompactionResult("nothing")
    adapter = agent.model if model is None else agent.models.adapter(model)
    step, before_tokens = _step_of(session), _used(session)
    summariser = Summariser(session, adapter, signal, step)
    end = CompactionEnd(f"compaction_{secrets.token_hex(8)}", "cancelled")
    session.append(CompactionStart(end.id))
    try:
        end = await _outcome(end.id, state, summariser)
    finally:  # also when the host cancels the task: the end is owed
        session.append(end)
        if summariser.spent is not None:
            at = {"turn": state.last_turn, "step": step, "context": _used(session)}
            session.append(usage_event(state, adapter.info, summariser.spent, **at))
    if end.status == "completed":
        return CompactionResult("completed", before_tokens, _used(session))
    return CompactionResult("failed", before_tokens, before_tokens, end.error)


async def _outcome(id: str, state: Projection, summariser: Summariser) -> CompactionEnd:
    try:
        summary = await summariser.summary()
    except (Exception, asyncio.CancelledError) as exc:
        if isinstance(exc, asyncio.CancelledError) and is_host_cancellation():
            raise
        summariser.signal.raise_if_aborted()
        return CompactionEnd(id, "failed", error=_words(exc))
    if rough_tokens(state.compacted(summary)) >= rough_tokens(state.messages):
        return CompactionEnd(id, "failed", error="the history would not be shorter")
    return CompactionEnd(id, "completed", summary)


def _words(exc: BaseException) -> str:
    if isinstance(exc, ModelError):
        return exc.message
    if isinstance(exc, TurnAborted):
        return "something other than a cancel aborted the summary"
    # The text of a foreign exception may hold anything, so only its type gets out.
    log.error("compaction_crashed", exc_info=exc)
    return f"the summary failed unexpectedly ({type(exc).__name__})"


def _used(session: Session) -> int:
    """Return how many tokens the context holds; providers count the system prompt, too."""
    if session.state.counted_tokens:
        return context_tokens(session.state)
    header = next(
        (e.data for e in reversed(session.events) if isinstance(e.data, RequestHeader)), None
    )
    n_system = 0 if header is None else len(header.system) // CHARS_PER_TOKEN
    return n_system + context_tokens(session.state)


def _step_of(session: Session) -> int:
    """Return the number of the turn's latest step, 0 before the first."""
    for event in reversed(session.events):
        if isinstance(event.data, StepStart):
            return event.data.step
        if isinstance(event.data, TurnStart):
            break
    return 0


def _about(tokens: int) -> str:
    """Write a number with its three leading digits, which is more than a guess is worth."""
    return f"{round(tokens, 3 - len(str(tokens))):,}"


# --- when nobody asks for it ----------------------------------------------------------------


class Compactor:
    """Compacts before a step when the context is nearly full, and when a model says it is.

    Args:
        agents: The agents by id, as the runtime has them.
        threshold: Share of the model's context that may be full, 0.0–1.0.
    """

    def __init__(self, agents: Mapping[str, Agent], *, threshold: float = THRESHOLD) -> None:
        self._agents = agents
        self._threshold = threshold
        # The turn in which an agent's context stayed full, so that not every step tries again.
        self._given_up: WeakKeyDictionary[Agent, int] = WeakKeyDictionary()

    def listen(self, hooks: Hooks) -> None:
        """Register the listeners for every agent of `hooks`."""
        hooks.on("agent/pre-step", self._before_step)
        hooks.on("llm/stream", self._around_call)

    async def _before_step(
        self,
        agent: Agent,
        turn: int,
        _step: int,
        system: str,
        prefix: tuple[Message, ...],
        signal: AbortSignal,
    ) -> None:
        fixed_tokens = len(system) // CHARS_PER_TOKEN + rough_tokens(prefix)
        state, info = agent.session.state, agent.model.info
        size = info.context_tokens

        def is_full() -> bool:
            used = context_tokens(state) + (0 if state.counted_tokens else fixed_tokens)
            return size is not None and used > self._room(size, info.max_output_tokens or 0)

        if not is_full() or self._given_up.get(agent) == turn:
            return
        gain = rough_tokens(state.messages) - rough_tokens(state.compacted(""))
        if size is not None and gain >= _MIN_GAIN * size:
            result = await compact(agent, signal)
            log.info("context_was_nearly_full", session_id=agent.id, result=result.status)
        if is_full():
            self._given_up[agent] = turn

    def _room(self, size: int, n_answer: int) -> float:
        """Return what may be full of a context that must also hold an answer of `n_answer`."""
        return min(self._threshold * size, max(size - n_answer, size / 2))

    async def _around_call(
        self, request: ModelRequest, next_: _Next
    ) -> AsyncGenerator[ModelEvent, None]:
        return self._stream(request, next_)

    async def _stream(
        self, request: ModelRequest, next_: _Next
    ) -> AsyncGenerator[ModelEvent, None]:
        has_spoken = False
        try:
            async with aclosing(await next_(request)) as events:
                async for event in events:
                    has_spoken |= not isinstance(event, Retrying | UsageReport)
                    yield event
            return
        except ModelError as exc:
            if has_spoken or exc.code != "CONTEXT_TOO_LONG":
                raise
            error = exc
        shorter = await self._shortened(request)
        if shorter is None:
            raise error
        async with aclosing(await next_(shorter)) as events:
            async for event in events:
                yield event

    async def _shortened(self, request: ModelRequest) -> ModelRequest | None:
        """Compact the history that is the end of `request`; return what to send, if it worked."""
        request.signal.raise_if_aborted()
        agent = self._agents.get(request.session_id)
        if agent is None:
            return None
        history = agent.session.messages
        n_prefix = len(request.messages) - len(history)
        if n_prefix < 0 or request.messages[n_prefix:] != history:
            return None  # a listener told it in its own way, which nobody else can shorten
        result = await compact(agent, request.signal, model=request.model)
        log.info("context_was_too_long", session_id=agent.id, result=result.status)
        if result.status != "completed":
            return None
        prefix = request.messages[:n_prefix]
        return replace(request, messages=(*prefix, *agent.session.messages))


_Next = Callable[[ModelRequest], Awaitable[AsyncGenerator[ModelEvent, None]]]
