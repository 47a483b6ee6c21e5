"""What ``/metrics`` says, for Prometheus.

Nothing is counted where an update passes by. What can be looked up is looked up when somebody asks:
connections, sessions, queues, bytes. The rest is counted when it happens and seldom happens: a turn
ends, a prompt that was stopped is answered, a model is called. No label has a value that a client
may choose, so that their number stays small and no session or person is named.
"""

from __future__ import annotations

import platform
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from acp_server import __version__
from acp_server.network.hub import Hub
from agent_core.agent import Agent
from agent_core.errors import ModelError
from agent_core.events import Event, ModelRetry, TurnEnd
from agent_core.models.adapter import ModelEvent, ModelRequest
from agent_core.outcomes import kind_of

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["Metrics"]

_STOPS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_CALLS_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The figures of one server, in a registry of their own. Make it before there are agents.

    Args:
        hub: Whose.
        provider_of: Returns the name of the provider behind the name of a model.
    """

    def __init__(self, hub: Hub, provider_of: Callable[[str], str]) -> None:
        # Heavy, and for whoever serves the network only.
        from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

        self._hub = hub
        self._provider_of = provider_of
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Live(hub, self))
        self.n_subagents = 0

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"acp_agent_{name}", words, labels, registry=registry)

        def histogram(name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"acp_agent_{name}", words, labels, registry=registry, buckets=buckets)

        self._turns = counter("turns", "Turns that ended.", "agent", "outcome")
        self._subagents = counter("subagents_ended", "Subagents that ended.", "reason")
        self._stops = histogram(
            "stop_seconds", "From a stop to the answer of what was stopped.", _STOPS_S
        )
        self._calls = histogram(
            "model_request_seconds", "Model requests.", _CALLS_S, "provider", "outcome"
        )
        self._first = histogram(
            "model_first_event_seconds",
            "From a model request to the first of its answer.",
            _CALLS_S,
            "provider",
        )
        self._failures = counter(
            "model_failures", "Calls of a model that failed, those tried again too.", "code"
        )
        self._listen()

    def render(self) -> tuple[bytes, bytes]:
        """Return all figures as they are now, and their content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST.encode()

    def _listen(self) -> None:
        hooks = self._hub.backend.runtime.hooks
        hooks.on("agent/created", self._follow)
        hooks.on("llm/stream", self._around_call)
        hooks.on("subagent/start", self._note_start)
        hooks.on("subagent/end", self._note_end)
        self._hub.on_stopped = self._stops.observe

    def _follow(self, agent: Agent) -> None:
        kind = "person" if agent.parent is None else "subagent"

        def note(event: Event) -> None:
            data = event.data
            if isinstance(data, TurnEnd):
                self._turns.labels(kind, kind_of(data.outcome)).inc()
            elif isinstance(data, ModelRetry):
                self._failures.labels(data.code).inc()

        agent.session.observe(note)

    def _note_start(self, _agent: Agent, _run_id: str, _provider: str) -> None:
        self.n_subagents += 1

    def _note_end(self, _agent: Agent, _run_id: str, reason: str) -> None:
        self.n_subagents -= 1
        self._subagents.labels(reason).inc()

    async def _around_call(
        self,
        request: ModelRequest,
        next_: Callable[[], Awaitable[AsyncGenerator[ModelEvent, None]]],
    ) -> AsyncGenerator[ModelEvent, None]:
        return self._timed(await next_(), request)

    async def _timed(
        self, stream: AsyncGenerator[ModelEvent, None], request: ModelRequest
    ) -> AsyncGenerator[ModelEvent, None]:
        provider, begun_s = self._provider_of(request.model), time.monotonic()
        outcome = "failed"
        try:
            async with aclosing(stream):
                async for event in stream:
                    self._first.labels(provider).observe(time.monotonic() - begun_s)
                    yield event
                    break
                async for event in stream:
                    yield event
            outcome = "completed"
        except ModelError as exc:
            if not request.signal.aborted:
                self._failures.labels(exc.code).inc()
            raise
        finally:
            outcome = "cancelled" if request.signal.aborted else outcome
            self._calls.labels(provider, outcome).observe(time.monotonic() - begun_s)


class _Live:
    """What is looked up when somebody asks."""

    def __init__(self, hub: Hub, metrics: Metrics) -> None:
        self._hub = hub
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Name nothing beforehand."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        hub, agents = self._hub, tuple(self._hub.backend.runtime.agents.values())
        held = hub.backend.holders.sessions

        def family(kind: Any, name: str, words: str, label: str, values: dict[str, float]) -> Any:
            metric = kind(f"acp_agent_{name}", words, labels=(label,))
            for value, number in values.items():
                metric.add_metric((value,), number)
            return metric

        about = GaugeMetricFamily(
            "acp_agent_build_info", "What runs here.", labels=("version", "python")
        )
        about.add_metric((__version__, platform.python_version()), 1)
        yield about
        gauges = (
            ("ready", "Whether new work is taken.", not hub.draining.is_set()),
            ("sessions", "Sessions that are open.", len(held)),
            (
                "sessions_unloaded",
                "Those of them that are unloaded, since nobody uses them.",
                sum(session.agent is None for session in held),
            ),
            ("subagents", "Subagents that are not quiet yet.", self._metrics.n_subagents),
            ("turns_running", "Turns of people's own agents that run.", hub.n_running),
            (
                "prompts_queued",
                "Prompts that wait for their turn.",
                sum(a.n_queued for a in agents),
            ),
        )
        for name, words, value in gauges:
            yield GaugeMetricFamily(f"acp_agent_{name}", words, value=float(value))
        live = dict.fromkeys(hub.traffic, 0.0)
        for client in hub.clients:
            live[client.transport] += 1
        yield family(GaugeMetricFamily, "connections", "Live connections.", "transport", live)
        traffic = hub.traffic.items()
        counted: tuple[tuple[str, str, str, dict[str, float]], ...] = (
            (
                "connections_opened",
                "Connections that were let in.",
                "transport",
                {name: each.n_connections for name, each in traffic},
            ),
            ("connections_ended", "Connections that are over.", "reason", dict(hub.ended)),
            ("refused", "Requests that were turned away.", "reason", dict(hub.refused)),
            (
                "received_bytes",
                "Bytes of messages that came.",
                "transport",
                {name: each.received for name, each in traffic},
            ),
            (
                "sent_bytes",
                "Bytes of messages that went.",
                "transport",
                {name: each.sent for name, each in traffic},
            ),
        )
        for each in counted:
            yield family(CounterMetricFamily, *each)
