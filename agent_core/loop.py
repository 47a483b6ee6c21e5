"""A turn's whole life, from top to bottom. Long, because it is told in one place on purpose.

One `AgentLoop` drives one agent: it parks until a prompt waits, runs one turn for it, and parks
again. The phases carry the names of docs/architecture.md: L0-L9 the driver, T0-T9 the turn, S1-S18
one step. The rules that shape the file:

- The loop owns one `TurnCancellation` per prospective turn, installed before ``running`` is
  announced and cleared after the flush. Its signal goes, as an explicit argument, to everything the
  turn calls; nothing else can abort it.
- Before and after each await the loop looks at the signal. It never cancels a task, a scope or a
  time-out around a listener, an adapter or a tool: what does not cooperate is waited for.
- Once `TurnStart` is in the log, a `TurnEnd` is owed whatever happens, every step is closed, and
  every tool call of a message has exactly one result, in the model's order.
- An abort during `TurnEnd` or the flush changes nothing that was recorded.

Source: RFC "explicit turn cancellation".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import Struct

from agent_core.cancellation import (
    DISPOSED,
    USER,
    AbortController,
    AbortSignal,
    CancelCause,
    TurnAborted,
    agent_interrupt_reason_of,
    is_host_cancellation,
)
from agent_core.content import Block, ToolCallPart
from agent_core.errors import AgentError, ModelError, StoreError
from agent_core.events import (
    Aborted,
    AssistantChunk,
    AssistantMessage,
    Completed,
    ContextMessage,
    Disposed,
    Failed,
    MaxSteps,
    MaxTokens,
    ModelRetry,
    Outcome,
    PromptBlocked,
    Refused,
    Rejected,
    RequestHeader,
    SteeringMessage,
    StepEnd,
    StepStart,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from agent_core.inbox import Inbox, Prompt
from agent_core.logs import get_logger
from agent_core.models.adapter import (
    AssistantTurn,
    FinishReason,
    Message,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    ReasoningDelta,
    RequestConfig,
    Retrying,
    TextDelta,
)
from agent_core.models.reply import Reply, number_calls
from agent_core.outcomes import kind_of
from agent_core.prompt import AssembleContext, Assembly
from agent_core.tools.batch import StepCalls
from agent_core.tools.pipeline import ToolPipeline
from agent_core.usage import usage_event

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["AgentLoop", "Allow", "Refuse"]

log = get_logger(__name__)


class Allow(Struct, frozen=True):
    """``agent/prompt-submit``: go on, with `content` in place of what was sent, and `context`.

    `shown` is what people go on to see of the prompt where that is not the content.
    """

    content: tuple[Block, ...] | None = None
    context: tuple[Block, ...] = ()
    shown: tuple[Block, ...] | None = None


class Refuse(Struct, frozen=True):
    """``agent/prompt-submit``: no model sees this prompt; `reason` is the answer to it."""

    reason: str


class TurnCancellation:
    """The one owner of one prospective turn's cancellation. Never leaves this module."""

    __slots__ = ("_controller", "over")

    def __init__(self) -> None:
        self._controller = AbortController()
        self.over = anyio.Event()

    @property
    def signal(self) -> AbortSignal:
        """What the turn hands to everything it calls."""
        return self._controller.signal

    def request(self, cause: CancelCause) -> None:
        """Abort the turn; the first request wins."""
        self._controller.abort(cause)


class _Turn:
    """Bookkeeping of the turn that runs; it dies with it."""

    def __init__(self, prompt: Prompt, number: int, signal: AbortSignal) -> None:
        self.prompts = [prompt]  # and what steered it: all are settled with the turn
        self.number = number
        self.signal = signal
        self.step = 0
        self.outcome: Outcome = Disposed()
        self.error: AgentError | None = None
        self.is_stopped = False  # agent/turn-stop had its say: late steering is dropped


class AgentLoop:
    """Drives one agent. Its synchronous verbs are for `Agent`; `drive` is the agent's one task."""

    def __init__(self, agent: Agent) -> None:
        self.status = "idle"
        self.awaiting = "nothing"  # for people: what an aborted turn still waits for
        self.running_calls: dict[str, str] = {}  # call id -> title
        self.is_disposed = False
        self.quiet = anyio.Event()  # set once, when the driver is gone
        self._agent = agent
        self._inbox = Inbox()
        self._holder: TurnCancellation | None = None
        self._turn: _Turn | None = None
        self._pre_run_cancelled = False  # the pre-run marker; holds no cause
        self._wake = anyio.Event()
        self._idle_edge = anyio.Event()
        self._prefix: tuple[Message, ...] | None = None
        self._header: RequestHeader | None = None
        self._pipeline = ToolPipeline(agent, agent.tools)

    # --- synchronous verbs -------------------------------------------------------------------

    def enqueue(self, prompt: Prompt, *, is_steering: bool) -> None:
        """See `Agent.send` and `Agent.steer`."""
        if is_steering and self.status == "running":
            self._inbox.steer(prompt)
        else:
            self._inbox.send(prompt)
        self._wake.set()

    def inject(self, content: tuple[Block, ...], source: str) -> None:
        """See `Agent.inject`."""
        self._inbox.inject(content, source)

    def withdraw(self, prompt: Prompt) -> bool:
        """See `Agent.withdraw`."""
        if not self._inbox.remove(prompt):
            if self._holder is not None and self._turn is not None and prompt in self._turn.prompts:
                self._holder.request(USER)
            return False
        prompt.settle(None)
        if self._holder is None and not self._inbox.has_queued:
            self._pre_run_cancelled = True  # whoever waits for idle must hear of it
            self._wake.set()
        return True

    def cancel(self, cause: CancelCause) -> None:
        """See `Agent.cancel`; `cause` is canonical."""
        cleared = self._inbox.clear()  # before any abort listener: what it sends must survive
        for prompt in cleared:
            prompt.settle(None)
        if self._holder is not None:
            self._holder.request(cause)
        elif cleared:
            self._pre_run_cancelled = True
            self._wake.set()

    def dispose(self) -> None:
        """See `Agent.dispose`."""
        self.is_disposed = True
        for prompt in self._inbox.clear():
            prompt.settle(None)
        if self._holder is not None:
            self._holder.request(DISPOSED)
        self._set_status("disposed")
        self._wake.set()

    async def when_idle(self) -> None:
        """See `Agent.when_idle`."""
        while not self.is_disposed and (
            self.status != "idle" or self._inbox.has_queued or self._pre_run_cancelled
        ):
            await self._idle_edge.wait()  # a listener of the edge may have sent more meanwhile
        if self.is_disposed:
            await self.quiet.wait()

    @property
    def is_at_rest(self) -> bool:
        """Whether no turn runs, and nothing waits for one."""
        return self.status == "idle" and not self._pre_run_cancelled and self._inbox.is_empty

    @property
    def n_queued(self) -> int:
        """See `Agent.n_queued`."""
        return self._inbox.n_queued

    @property
    def prompt(self) -> Prompt | None:
        """See `Agent.prompt`."""
        return None if self._turn is None else self._turn.prompts[0]

    @property
    def turn(self) -> int | None:
        """See `Agent.turn`."""
        return None if self._turn is None else self._turn.number

    def unwinding(self) -> anyio.Event | None:
        """See `Agent.unwinding`."""
        holder = self._holder
        return holder.over if holder is not None and holder.signal.aborted else None

    # --- the driver --------------------------------------------------------------------------

    async def drive(self) -> None:
        """Run turns until disposed. The host's cancellation disposes, and then goes on."""
        try:
            while await self._has_work():
                await self._run_one_turn()
        finally:
            self.dispose()
            self._idle_edge.set()
            self.quiet.set()
            self._agent.hooks.emit("agent/disposed", self._agent)

    async def _has_work(self) -> bool:
        while not self.is_disposed:
            if self._pre_run_cancelled:  # L1
                self._pre_run_cancelled = False
                if not self._inbox.has_queued:
                    self._become_idle()
            elif self._inbox.has_queued:
                return True
            else:  # L0: no await between the checks above and this one, so no wake is lost
                self._wake = anyio.Event()
                await self._wake.wait()
        return False

    async def _run_one_turn(self) -> None:
        holder = self._holder = TurnCancellation()  # L2
        self._set_status("running")  # L3
        if holder.signal.aborted:  # L4: a listener cancelled, and may have sent a replacement
            self._clear(holder)
            holder = self._holder = TurnCancellation()
        if not self._inbox.has_queued:
            self._inbox.requeue_steering()  # the listener's; there is no other turn it could join
        if not self._inbox.has_queued or self.is_disposed:
            self._clear(holder)
        else:
            turn = self._turn = _Turn(
                self._inbox.claim(),  # T0
                self._agent.session.state.last_turn + 1,  # L5
                holder.signal,
            )
            try:
                await self._run_turn(turn)  # L6
            finally:
                self._turn = None
                self._clear(holder)  # L7
                self._settle_steering(turn)  # L8
                for prompt in turn.prompts:
                    prompt.settle(turn.outcome, turn.error)
        if not self._inbox.has_queued and not self.is_disposed:  # L9
            self._become_idle()

    def _clear(self, holder: TurnCancellation) -> None:
        if self._holder is holder:  # a stale clear must not remove a newer holder
            self._holder = None
        holder.over.set()
        self.awaiting = "nothing"

    def _settle_steering(self, turn: _Turn) -> None:
        if turn.is_stopped:
            for dropped in self._inbox.take_steering():
                dropped.settle(None)
        else:
            self._inbox.requeue_steering()

    def _become_idle(self) -> None:
        self.status, was = "idle", self.status
        edge, self._idle_edge = self._idle_edge, anyio.Event()
        edge.set()  # waiters settle before the edge is announced
        if was != "idle":
            self._agent.hooks.emit("agent/status", self._agent, "idle")

    def _set_status(self, status: str) -> None:
        if self.status != status:
            self.status = status
            self._agent.hooks.emit("agent/status", self._agent, status)

    # --- the turn ----------------------------------------------------------------------------

    async def _run_turn(self, turn: _Turn) -> None:
        session = self._agent.session
        try:
            session.append(TurnStart(turn.number, turn.prompts[0].source))  # T1
        except Exception as exc:
            turn.outcome = self._failure(turn, exc)
            return
        host_cancelled: BaseException | None = None
        try:
            turn.outcome = await self._run_prompt(turn)
        except BaseException as exc:
            if not isinstance(exc, Exception) and not _is_stray(exc):
                host_cancelled = exc
                self.dispose()
            turn.outcome = self._classify(turn, exc)
        session.append(TurnEnd(turn.number, turn.outcome))  # T8: the outcome is a fact now
        self.awaiting = "the session store"
        try:
            if host_cancelled is None:
                await self._flush(turn)  # T9
        except BaseException as exc:
            host_cancelled = exc
            self.dispose()
        if host_cancelled is not None:
            with anyio.CancelScope(shield=True):
                await self._flush(turn)
            raise host_cancelled
        log.info("turn_ended", outcome=kind_of(turn.outcome), steps=turn.step)

    async def _flush(self, turn: _Turn) -> None:
        try:
            await self._agent.session.flush()
        except Exception as exc:
            at = {"session_id": self._agent.id, "turn": turn.number}
            if isinstance(exc, StoreError):
                turn.error = exc
                log.error("turn_flush_failed", error=str(exc), **at)
            else:
                turn.error = StoreError("The session could not be saved.")
                log.exception("turn_flush_failed", **at)
            self._agent.hooks.emit("agent/error", self._agent, turn.number, turn.step, exc)

    def _classify(self, turn: _Turn, exc: BaseException) -> Outcome:
        """Say how a turn ended that raised: the lifecycle first, then who asked, then the error."""
        if self.is_disposed:
            return Disposed()
        if agent_interrupt_reason_of(turn.signal) is not None:
            return Aborted()
        return self._failure(turn, exc)

    def _failure(self, turn: _Turn, exc: BaseException) -> Failed:
        if isinstance(exc, AgentError):
            code, message = getattr(exc, "code", "STORE"), str(exc)
            log.warning("turn_failed", turn=turn.number, code=code)
        elif isinstance(exc, TurnAborted):
            code, message = "ABORTED", "Something other than a cancel aborted the turn."
        else:  # its text may hold anything, so only its type gets out
            code, message = "INTERNAL", f"The turn failed unexpectedly ({type(exc).__name__})."
            log.error("turn_crashed", turn=turn.number, exc_info=exc)
        self._agent.hooks.emit("agent/error", self._agent, turn.number, turn.step, exc)
        return Failed(turn.step, code, message)

    async def _run_prompt(self, turn: _Turn) -> Outcome:
        agent, session, prompt = self._agent, self._agent.session, turn.prompts[0]

        async def allow(*_args: object) -> Allow:
            return Allow()

        verdict: Allow | Refuse = await self._waterfall(  # T2
            turn, "agent/prompt-submit", agent, prompt.content, prompt.source, final=allow
        )
        if isinstance(verdict, Refuse):  # T3
            session.append(PromptBlocked(prompt.id, prompt.content, prompt.source, verdict.reason))
            return Rejected(verdict.reason)
        content = prompt.content if verdict.content is None else verdict.content
        session.append(UserMessage(prompt.id, content, prompt.source, verdict.shown))
        if verdict.context:
            session.append(ContextMessage(verdict.context, "agent/prompt-submit"))
        outcome: Outcome = Completed()
        while True:
            finish, owes_more = await self._run_step(turn)
            if finish == "refusal":
                return Refused()
            if finish == "length":
                outcome = MaxTokens()
            if not await self._continues(turn, owes_more):
                return outcome
            if turn.step == agent.max_steps:
                return MaxSteps()

    async def _continues(self, turn: _Turn, owes_more: bool) -> bool:
        goes_on: bool = await self._waterfall(  # S17
            turn, "agent/turn-continuation", self._agent, turn.number, owes_more, final=_unchanged
        )
        stop = await self._serial(turn, "agent/turn-stop", self._agent, turn.number)  # S18
        if stop is not None:
            turn.is_stopped = True
            return False
        return goes_on or self._inbox.has_steering

    # --- one step ----------------------------------------------------------------------------

    async def _run_step(self, turn: _Turn) -> tuple[FinishReason, bool]:
        """Run one model call and its tools; return why the model stopped and if it is owed more."""
        agent, session = self._agent, self._agent.session
        turn.step += 1  # S1
        self._log_arrivals(turn)
        assembly = await self._assemble(turn)  # S2
        prefix = await self._compose_prefix(turn)  # S3
        at = (agent, turn.number, turn.step)
        await self._serial(turn, "agent/pre-step", *at, assembly.text, prefix)  # S4
        messages = (*prefix, *session.messages)  # S5
        session.append(StepStart(turn.number, turn.step))  # S6
        try:
            config: RequestConfig = await self._waterfall(  # S7
                turn,
                "agent/request",
                *at,
                RequestConfig(agent.model.info.name, agent.effort),
                final=_unchanged,
            )
            self._log_header(config, assembly)  # S8
            request = ModelRequest(
                config.model,
                messages,
                assembly.text,
                assembly.tools,
                session.id,
                turn.signal,
                config.sampling,
                config.effort,
            )
            reply = await self._stream(turn, request)  # S9, S10
            calls = await self._log_message(turn, request, reply)  # S11, S12
            await self._run_calls(turn, calls)  # S13, S14
            was_steered = self._log_arrivals(turn)  # S16
        finally:
            session.append(StepEnd(turn.number, turn.step))  # S15, S16
        turn.signal.raise_if_aborted()
        assert reply.finish is not None
        return reply.finish, bool(calls) or was_steered

    async def _assemble(self, turn: _Turn) -> Assembly:
        turn.signal.raise_if_aborted()
        self.awaiting = "the system prompt"
        agent = self._agent
        tools = tuple(tool.spec() for _name, tool in sorted(agent.tools.items()))
        context = AssembleContext(agent, turn.signal)
        assembly = await agent.system_prompt.assemble(context, tools, agent.hooks)
        turn.signal.raise_if_aborted()
        return assembly

    async def _compose_prefix(self, turn: _Turn) -> tuple[Message, ...]:
        if self._prefix is None:
            # An interrupted composition raises here and is not kept.
            self._prefix = tuple(
                await self._waterfall(
                    turn, "agent/session-prefix", self._agent, (), final=_unchanged
                )
            )
        return self._prefix

    def _log_header(self, config: RequestConfig, assembly: Assembly) -> None:
        names = tuple(spec.name for spec in assembly.tools)
        header = RequestHeader(config.model, assembly.text, names)
        if header != self._header:
            self._agent.session.append(header)
            self._header = header

    async def _stream(self, turn: _Turn, request: ModelRequest) -> Reply:
        async def call(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
            return self._agent.models.adapter(request.model).stream(request)

        signal, reply = turn.signal, Reply()
        signal.raise_if_aborted()
        self.awaiting = f"the model {request.model}"
        stream = await self._agent.hooks.waterfall("llm/stream", request, final=call)
        try:
            async with aclosing(stream):
                signal.raise_if_aborted()
                async for event in stream:
                    signal.raise_if_aborted()
                    self._log_model_event(turn, event)
                    reply.add(event)
            signal.raise_if_aborted()
            if reply.finish is None:
                raise ModelError("The model's answer broke off.", code="TRANSPORT")
            if reply.finish == "aborted":
                raise ModelError("The provider aborted the answer.", code="ABORTED")
        except BaseException:
            self._keep_said(turn, request, reply)
            raise
        return reply

    def _keep_said(self, turn: _Turn, request: ModelRequest, reply: Reply) -> None:
        """Log what was said before a break: people saw it. Calls that never ran are dropped."""
        if said := reply.said():
            self._agent.session.append(
                AssistantMessage(turn.number, turn.step, said, interrupted=True)
            )
        self._log_usage(turn, request, reply)

    def _log_usage(self, turn: _Turn, request: ModelRequest, reply: Reply) -> None:
        if reply.usage is not None:
            session, adapter = self._agent.session, self._agent.models.get(request.model)
            info = ModelInfo(request.model) if adapter is None else adapter.info
            at = {"turn": turn.number, "step": turn.step}
            session.append(usage_event(session.state, info, reply.usage, **at))

    def _log_model_event(self, turn: _Turn, event: ModelEvent) -> None:
        append, number, step = self._agent.session.append, turn.number, turn.step
        match event:
            case TextDelta(text=text):
                append(AssistantChunk(number, step, text))
            case ReasoningDelta(text=text) if text:
                append(AssistantChunk(number, step, text, reasoning=True))
            case Retrying():
                retry = (event.attempt, event.delay_s, event.code, event.message)
                append(ModelRetry(number, step, *retry))
            case _:
                pass

    async def _log_message(
        self, turn: _Turn, request: ModelRequest, reply: Reply
    ) -> tuple[ToolCallPart, ...]:
        """Let listeners see the message, log it, and return the calls to run."""
        is_whole = reply.finish not in ("length", "refusal")
        prefix = f"call_{turn.number}_{turn.step}"
        at = (self._agent, turn.number, turn.step)
        draft = AssistantTurn(reply.content(prefix) if is_whole else reply.said())
        try:
            message: AssistantTurn = await self._waterfall(  # S11
                turn, "agent/step-result", *at, draft, final=_unchanged
            )
        except BaseException:
            self._keep_said(turn, request, reply)
            raise
        content = number_calls(message.content, prefix)  # a listener may have added some
        if content:
            self._agent.session.append(  # S12
                AssistantMessage(turn.number, turn.step, content)
            )
        self._log_usage(turn, request, reply)
        return tuple(part for part in content if isinstance(part, ToolCallPart))

    async def _run_calls(self, turn: _Turn, calls: Sequence[ToolCallPart]) -> None:
        hooks = self._agent.hooks
        self.awaiting = "a tool"
        await StepCalls(
            self._pipeline,
            self._agent.session,
            calls,
            turn=turn.number,
            step=turn.step,
            signal=turn.signal,
            running=self.running_calls,
            on_result=lambda execution, result: hooks.emit("tools/result", execution, result),
        ).run()

    def _log_arrivals(self, turn: _Turn) -> bool:
        """Log context and steering that came meanwhile; say if there was steering."""
        turn.signal.raise_if_aborted()  # what was steered after a cancel is not this turn's
        for content, source in self._inbox.take_context():
            self._agent.session.append(ContextMessage(content, source))
        steering = self._inbox.take_steering()
        turn.prompts += steering
        for prompt in steering:
            self._agent.session.append(
                SteeringMessage(prompt.id, turn.number, prompt.content, prompt.source)
            )
        return bool(steering)

    # --- seams -------------------------------------------------------------------------------

    async def _waterfall(self, turn: _Turn, name: str, *args: object, final: Any) -> Any:
        """Await a signalled waterfall, looking at the signal before and after."""
        turn.signal.raise_if_aborted()
        self.awaiting = f"a listener of {name}"
        result = await self._agent.hooks.waterfall(name, *args, turn.signal, final=final)
        turn.signal.raise_if_aborted()
        return result

    async def _serial(self, turn: _Turn, name: str, *args: object) -> Any:
        """Await a signalled serial hook, looking at the signal before and after."""
        turn.signal.raise_if_aborted()
        self.awaiting = f"a listener of {name}"
        result = await self._agent.hooks.serial(name, *args, turn.signal)
        turn.signal.raise_if_aborted()
        return result


async def _unchanged(*args: Any) -> Any:
    """End a signalled waterfall with its value as it is: the argument before the signal."""
    return args[-2]


def _is_stray(exc: BaseException) -> bool:
    """Say whether this is a `CancelledError` that nobody sent to the driver."""
    return isinstance(exc, asyncio.CancelledError) and not is_host_cancellation()
