"""Spans of what agents do, for OpenTelemetry, where ``OTEL_EXPORTER_OTLP_ENDPOINT`` says where to.

A span for each turn; below it one for each model request, tool call, compaction and subagent, and
below a subagent's those of its own turns. A turn goes on with the trace that its prompt named.
Names, numbers, outcomes and error codes are told; what people, models and tools said is not.

Nothing here is looked up in what is ambient: a span's parent is known from the log and the hooks.
The SDK is an extra, ``acp-agent-server[otel]``; without it a record in the log says so, no more.
What the exporter cannot deliver concerns nobody but the log.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread

from acp_server import __version__
from agent_core.agent import Agent
from agent_core.errors import ModelError
from agent_core.events import (
    CompactionEnd,
    CompactionStart,
    Event,
    Failed,
    PermissionAsked,
    PermissionDecided,
    ToolCall,
    ToolResult,
    ToolStart,
    TurnEnd,
    TurnStart,
)
from agent_core.logs import get_logger
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    Retrying,
    TextDelta,
    ToolCallDelta,
    UsageReport,
)
from agent_core.outcomes import kind_of
from agent_core.runtime import AgentRuntime

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

__all__ = ["Tracing", "is_asked_for", "open_tracing"]

FLUSH_LIMIT_S: Final = 2.0
"""How long the last spans may take to leave."""
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ADVICE: Final = "pip install 'acp-agent-server[otel]'"
_DELTAS: Final = (TextDelta, ReasoningDelta, ToolCallDelta)

log = get_logger(__name__)


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment names a place for spans, and does not turn them off."""
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporters = environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    return bool(_first(environ, _ENDPOINTS)) and not is_off and "otlp" in exporters


@asynccontextmanager
async def open_tracing(headers: str | None) -> AsyncGenerator[Tracing | None, None]:
    """Make spans while the block runs, if somebody asks for them; send the last ones at its end.

    Cancellation: safe; what was not sent is lost. Concurrency: once for a process.

    Args:
        headers: What the collector is shown, in the form of ``OTEL_EXPORTER_OTLP_HEADERS``, which
            commands that an agent runs do not see.
    """
    provider = await _provider(headers) if is_asked_for() else None
    if provider is None:
        yield None
        return
    try:
        yield Tracing(provider)
    finally:
        with anyio.CancelScope(shield=True):
            await _shut_down(provider)


async def _provider(headers: str | None) -> TracerProvider | None:
    protocol = _first(os.environ, _PROTOCOLS) or "http/protobuf"
    if protocol != "http/protobuf":
        log.warning("tracing_not_started", protocol=protocol, advice="only http/protobuf is spoken")
        return None
    try:
        return await anyio.to_thread.run_sync(_make_provider, headers)
    except ImportError as exc:
        log.warning("tracing_not_started", missing=exc.name, advice=_ADVICE)
    except Exception as exc:  # whatever a variable says that the SDK cannot use
        log.warning("tracing_not_started", error=type(exc).__name__)
    return None


def _make_provider(headers: str | None) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.util.re import parse_env_headers

    shown = parse_env_headers(headers, liberal=True) if headers else None
    about = Resource.create({"service.version": __version__})
    if str(about.attributes["service.name"]).startswith("unknown_service"):
        about = about.merge(Resource({"service.name": "acp-agent"}))
    # Ours alone: what other libraries might say through a global one is not known.
    provider = TracerProvider(resource=about, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(headers=shown)))
    return provider


async def _shut_down(provider: TracerProvider) -> None:
    import asyncio

    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def shut_down() -> None:
        provider.shutdown()
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    # A daemon: a collector that does not answer holds up nobody's end.
    threading.Thread(target=shut_down, name="last spans", daemon=True).start()
    with anyio.move_on_after(FLUSH_LIMIT_S) as limit:
        await done.wait()
    if limit.cancelled_caught:
        log.warning("last_spans_not_sent", limit_s=FLUSH_LIMIT_S)


class Tracing:
    """Makes the spans of all agents of a runtime.

    Args:
        provider: Where they go.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("acp_agent", __version__)
        self._of_agents: WeakKeyDictionary[Agent, _AgentSpans] = WeakKeyDictionary()
        self._of_runs: dict[str, Span] = {}
        self._agents: Mapping[str, Agent] = {}

    def follow(self, runtime: AgentRuntime) -> None:
        """Follow every agent that is made from now on."""
        self._agents = runtime.agents
        runtime.hooks.on("agent/created", self._follow_agent)
        runtime.hooks.on("llm/stream", self._around_call)
        runtime.hooks.on("subagent/start", self._begin_run)
        runtime.hooks.on("subagent/end", self._end_run)

    def begin(
        self, name: str, above: Context, about: dict[str, Any], *, kind: str = "INTERNAL"
    ) -> Span:
        """Begin a span below `above`, with what is told about it."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(name, above, SpanKind[kind], about)

    def context_of(self, agent: Agent) -> Context:
        """Return what the next turn of an agent is part of."""
        if agent.parent is None:
            return _context(agent.prompt.trace if agent.prompt else {})
        run = self._of_runs.get(agent.id)
        return _below(run) if run is not None else self._context_of_call(agent.parent, agent)

    def _context_of_call(self, parent: Agent, child: Agent | None) -> Context:
        spans = self._of_agents.get(parent)
        if spans is None:
            return _context({})
        call_id = "" if child is None or child.delegation is None else child.delegation.call_id
        return _below(spans.calls.get(call_id) or spans.turn)

    def _follow_agent(self, agent: Agent) -> None:
        spans = self._of_agents[agent] = _AgentSpans(self, agent)
        agent.session.observe(spans.note)

    # --- subagents ---------------------------------------------------------------------------

    def _begin_run(self, agent: Agent, run_id: str, provider: str) -> None:
        above = self._context_of_call(agent, self._agents.get(run_id))
        about = {"acp_agent.provider": provider, "acp_agent.run": run_id}
        self._of_runs[run_id] = self.begin("subagent", above, about)

    def _end_run(self, _agent: Agent, run_id: str, reason: str) -> None:
        if (span := self._of_runs.pop(run_id, None)) is not None:
            span.set_attribute("acp_agent.outcome", reason)
            _end(span, reason if reason == "error" else None)

    # --- model requests ----------------------------------------------------------------------

    async def _around_call(
        self,
        request: ModelRequest,
        next_: Callable[[], Awaitable[AsyncGenerator[ModelEvent, None]]],
    ) -> AsyncGenerator[ModelEvent, None]:
        return self._spanned(await next_(), request)

    async def _spanned(
        self, stream: AsyncGenerator[ModelEvent, None], request: ModelRequest
    ) -> AsyncGenerator[ModelEvent, None]:
        agent = self._agents.get(request.session_id)
        spans = None if agent is None else self._of_agents.get(agent)
        about = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": request.model,
            "gen_ai.conversation.id": request.session_id,
        }
        above = _below(None if spans is None else spans.turn)
        span = self.begin("chat", above, about, kind="CLIENT")
        begun_s, has_spoken, failure = time.monotonic(), False, None
        try:
            async with aclosing(stream):
                async for event in stream:
                    if not isinstance(event, _DELTAS):
                        _tell(span, event)
                    elif not has_spoken:
                        has_spoken = True
                        span.set_attribute("acp_agent.first_s", time.monotonic() - begun_s)
                    yield event
        except Exception as exc:
            failure = exc.code if isinstance(exc, ModelError) else type(exc).__name__
            raise
        finally:
            if request.signal.aborted:
                span.set_attribute("acp_agent.outcome", "aborted")
                failure = None
            _end(span, failure)


class _AgentSpans:
    """The spans of one agent's turns.

    Attributes:
        turn: That of the turn that runs, or ran last.
        calls: Those of the turn's tool calls, by their ids.
    """

    def __init__(self, tracing: Tracing, agent: Agent) -> None:
        self.turn: Span | None = None
        self.calls: dict[str, Span] = {}
        self._tracing = tracing
        self._agent = agent
        self._compaction: Span | None = None
        self._on: dict[type, Callable[[Any], None]] = {
            TurnStart: self._begin_turn,
            TurnEnd: self._end_turn,
            ToolCall: self._begin_call,
            ToolStart: lambda data: self._note_call(data, "started"),
            ToolResult: self._end_call,
            PermissionAsked: lambda data: self._note_call(data, "permission asked"),
            PermissionDecided: lambda data: self._note_call(data, f"permission {data.outcome}"),
            CompactionStart: self._begin_compaction,
            CompactionEnd: self._end_compaction,
        }

    def note(self, event: Event) -> None:
        """Take one event of the log."""
        handle = self._on.get(type(event.data))
        if handle is not None:
            handle(event.data)

    def _begin_turn(self, data: TurnStart) -> None:
        agent = self._agent
        self.calls = {}
        about = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": agent.id,
            "acp_agent.turn": data.turn,
        }
        kind = "SERVER" if agent.parent is None else "INTERNAL"
        above = self._tracing.context_of(agent)
        self.turn = self._tracing.begin("turn", above, about, kind=kind)

    def _end_turn(self, data: TurnEnd) -> None:
        if self.turn is not None:
            self.turn.set_attribute("acp_agent.outcome", kind_of(data.outcome))
            _end(self.turn, data.outcome.code if isinstance(data.outcome, Failed) else None)

    def _begin_call(self, data: ToolCall) -> None:
        # What is no tool of ours was made up by the model, and may be anything.
        name = data.name if data.name in self._agent.tools else "unknown"
        about = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.id": data.call_id,
            "acp_agent.step": data.step,
        }
        self.calls[data.call_id] = self._tracing.begin(
            f"execute_tool {name}", _below(self.turn), about
        )

    def _note_call(self, data: Any, words: str) -> None:
        if (span := self.calls.get(data.call_id)) is not None:
            span.add_event(words)

    def _end_call(self, data: ToolResult) -> None:
        if (span := self.calls.get(data.call_id)) is not None:
            _end(span, (data.code or "error") if data.is_error else None)

    def _begin_compaction(self, _data: CompactionStart) -> None:
        self._compaction = self._tracing.begin("compaction", _below(self.turn), {})

    def _end_compaction(self, data: CompactionEnd) -> None:
        if self._compaction is not None:
            self._compaction.set_attribute("acp_agent.outcome", data.status)
            _end(self._compaction, data.status if data.status == "failed" else None)


def _tell(span: Span, event: ModelEvent) -> None:
    match event:
        case UsageReport(usage=usage):
            span.set_attribute("gen_ai.usage.input_tokens", usage.input_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)
        case Retrying():
            span.add_event("retry", {"attempt": event.attempt, "error.type": event.code})
        case Finish(reason=reason):
            span.set_attribute("gen_ai.response.finish_reasons", [reason])
        case _:
            pass


def _end(span: Span, failure: str | None) -> None:
    from opentelemetry.trace import StatusCode

    if failure is not None:
        span.set_attribute("error.type", failure)
        span.set_status(StatusCode.ERROR)
    span.end()


def _below(span: Span | None) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return Context() if span is None else set_span_in_context(span, Context())


def _context(trace: Mapping[str, str]) -> Context:
    """Return the trace that a prompt named; what is none of the W3C's form is passed over."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(trace, Context())


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := environ.get(name, "").strip())), "")
