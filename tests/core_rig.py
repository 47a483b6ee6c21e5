"""The loop rig: a real runtime, store and driver, with a model and tools that do as they are told.

`rig(...)` opens one agent whose model plays a script, one entry for each model call; what is past
the script's end answers "done". Every wait in the block is bounded, and a failed test does not wait
for what it left hanging. `Recorder` keeps what every seam was given, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import anyio
import anyio.lowlevel
import msgspec
from msgspec import Struct
from structlog.testing import capture_logs

from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal, TurnAborted
from agent_core.content import Usage
from agent_core.events import EventData, Outcome, ToolCall, ToolResult, TurnEnd
from agent_core.execution import current
from agent_core.hooks import HOOKS, Kind
from agent_core.models.adapter import (
    Finish,
    FinishReason,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    TextDelta,
    ToolCallDelta,
    UsageReport,
)
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput

LIMIT_S: Final = 5.0
USER: Final = {"kind": "user"}
PARENT: Final = {"kind": "parent"}
DISPOSED: Final = {"kind": "disposed"}

STAGES: Final = (
    "agent/prompt-submit",
    "system-prompt/assemble",
    "agent/session-prefix",
    "agent/pre-step",
    "agent/request",
    "model stream",
    "agent/step-result",
    "tool execution",
    "agent/turn-continuation",
    "agent/turn-stop",
)
"""The ten stages of a turn, in the order in which its first step reaches them."""


# --- the model ------------------------------------------------------------------------------

Entry = Callable[[ModelRequest], AsyncGenerator[ModelEvent, None]]


class ScriptedModel:
    """A `ModelAdapter` that plays one entry for each call and remembers the requests."""

    info = ModelInfo("scripted")

    def __init__(self, script: Sequence[Entry]) -> None:
        self.requests: list[ModelRequest] = []
        self.agents: list[Agent | None] = []  # the ambient agent of each call
        self.open_streams = 0
        self._script = list(script)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        number = len(self.requests)
        self.requests.append(request)
        self.agents.append(ambient())
        entry = self._script[number] if number < len(self._script) else say("done")
        self.open_streams += 1
        try:
            async with aclosing(entry(request)) as events:
                async for event in events:
                    yield event
        finally:
            self.open_streams -= 1

    async def aclose(self) -> None:
        pass


def say(*texts: str, finish: FinishReason = "stop", usage: Usage | None = None) -> Entry:
    async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        for text in texts:
            yield TextDelta(text)
        if usage is not None:
            yield UsageReport(usage)
        yield Finish(finish)

    return play


def call(*names: str, text: str = "", finish: FinishReason = "tool_calls") -> Entry:
    """Say `text`, then call the named tools without arguments."""

    async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        if text:
            yield TextDelta(text)
        for index, name in enumerate(names):
            yield ToolCallDelta(index, name, "{}")
        yield Finish(finish)

    return play


def fail(error: BaseException, *texts: str) -> Entry:
    async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        for text in texts:
            yield TextDelta(text)
        raise error

    return play


class Hang:
    """Emits two chunks, then waits for the abort. A slow one ends only once `gate` is set.

    `raising` is what it raises because of the abort; by default `TurnAborted`.
    """

    def __init__(self, *, is_slow: bool = False, raising: BaseException | None = None) -> None:
        self.hanging, self.noticed, self.gate = anyio.Event(), anyio.Event(), anyio.Event()
        self._raising = raising
        if not is_slow:
            self.gate.set()

    async def __call__(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield TextDelta("one ")
        yield TextDelta("two ")
        self.hanging.set()
        reason = await request.signal.wait()
        self.noticed.set()
        await self.gate.wait()
        raise self._raising or TurnAborted(reason)


# --- tools ----------------------------------------------------------------------------------

Body = Callable[[ToolContext], Awaitable[ToolOutput]]


class NoArgs(Struct, forbid_unknown_fields=True):
    """What every scripted tool takes."""


def tool(
    called: str, body: Body, *, does: Effect = "none", overlaps: bool = False, title: str = ""
) -> Tool:
    class Scripted(Tool):
        name = called
        description = called
        Args = NoArgs
        effect = does
        is_parallel = overlaps

        def view(self, args: Any, roots: Any) -> Any:
            return msgspec.structs.replace(super().view(args, roots), title=title or called)

        async def run(self, args: Any, context: ToolContext) -> ToolOutput:
            return await body(context)

    return Scripted()


async def answer_ok(_context: ToolContext) -> ToolOutput:
    return ToolOutput("ok")


class Waiting:
    """A tool body that has been entered, and does not return before its gate is open.

    A cooperative one gives up when the turn is aborted; the other ignores the signal.
    """

    def __init__(self, *, is_cooperative: bool = False) -> None:
        self.entered, self.gate = anyio.Event(), anyio.Event()
        self.signal: AbortSignal | None = None
        self.times_entered = 0
        self._is_cooperative = is_cooperative

    async def __call__(self, context: ToolContext) -> ToolOutput:
        self.signal = context.signal
        self.times_entered += 1
        self.entered.set()
        if self._is_cooperative:
            async with context.signal.scope():
                await self.gate.wait()
        else:
            await self.gate.wait()
        return ToolOutput("done after all")


# --- stores ---------------------------------------------------------------------------------


class GatedStore(MemoryStore):
    """Lets a flush wait: after `close_gate`, every flush waits until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.flushing = anyio.Event(), anyio.Event()
        self.gate.set()
        self.flushes = 0

    def close_gate(self) -> None:
        self.gate, self.flushing = anyio.Event(), anyio.Event()

    async def flush(self, session_id: str) -> None:
        self.flushes += 1
        self.flushing.set()
        await self.gate.wait()
        await super().flush(session_id)


# --- recording and holding ------------------------------------------------------------------


def ambient() -> Agent | None:
    frame = current()
    return None if frame is None else frame.agent


def signal_in(name: str, args: Sequence[Any]) -> AbortSignal | None:
    """Return the signal among a hook's arguments (without ``next``), wherever it travels."""
    arguments = HOOKS[name].arguments
    if "signal" in arguments:
        signal = args[arguments.index("signal")]
    else:
        values = [getattr(value, "signal", None) for value in args]
        signal = next((value for value in values if value is not None), None)
    assert signal is None or isinstance(signal, AbortSignal)
    return signal


class Recorder:
    """Listens to every hook, and keeps in order what each was given."""

    def __init__(self, agent: Agent) -> None:
        self.seen: list[tuple[str, tuple[Any, ...]]] = []
        self.signals: list[tuple[str, AbortSignal]] = []
        self.agents: list[tuple[str, Agent | None]] = []  # who was ambient
        self.statuses: list[str] = []
        for name, spec in HOOKS.items():
            if spec.kind is Kind.EMIT:
                agent.hooks.on(name, self._emit(name))
            elif spec.kind is Kind.SERIAL:
                agent.hooks.on(name, self._serial(name))
            else:
                agent.hooks.on(name, self._waterfall(name))

    @property
    def names(self) -> list[str]:
        return [name for name, _args in self.seen]

    def given(self, name: str) -> list[tuple[Any, ...]]:
        return [args for seen, args in self.seen if seen == name]

    def _note(self, name: str, args: tuple[Any, ...], hook_args: tuple[Any, ...]) -> None:
        self.seen.append((name, args))
        if HOOKS[name].kind is not Kind.EMIT:
            self.agents.append((name, ambient()))
            signal = signal_in(name, hook_args)
            assert signal is not None, name
            self.signals.append((name, signal))
        if name == "agent/status":
            self.statuses.append(args[1])

    def _emit(self, name: str) -> Callable[..., None]:
        return lambda *args: self._note(name, args, args)

    def _serial(self, name: str) -> Callable[..., Awaitable[None]]:
        async def listen(*args: Any) -> None:
            self._note(name, args, args)

        return listen

    def _waterfall(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def listen(*args: Any) -> Any:
            self._note(name, args, args[:-1])
            return await args[-1]()

        return listen


class Held:
    """A listener that stops at its seam the `nth` time.

    It waits for the abort, and unless `is_cooperative` for `gate` as well; then it goes on as if
    nothing were, so that only the loop's own look at the signal ends the turn.
    """

    def __init__(
        self, agent: Agent, name: str, *, nth: int = 1, is_cooperative: bool = True
    ) -> None:
        self.reached, self.noticed, self.gate = anyio.Event(), anyio.Event(), anyio.Event()
        self.signal: AbortSignal | None = None
        self._name = name
        self._left = nth
        if is_cooperative:
            self.gate.set()
        is_serial = HOOKS[name].kind is Kind.SERIAL
        agent.hooks.on(name, self._serial if is_serial else self._waterfall)

    async def _serial(self, *args: Any) -> None:
        await self._hold(args)

    async def _waterfall(self, *args: Any) -> Any:
        await self._hold(args[:-1])
        return await args[-1]()

    async def _hold(self, args: tuple[Any, ...]) -> None:
        self._left -= 1
        if self._left:
            return
        self.signal = signal_in(self._name, args)
        assert self.signal is not None
        self.reached.set()
        await self.signal.wait()
        self.noticed.set()
        await self.gate.wait()


# --- the rig --------------------------------------------------------------------------------


class Rig:
    """One agent and what it runs on. `records` are the log's, as structlog got them."""

    def __init__(
        self,
        runtime: AgentRuntime,
        agent: Agent,
        model: ScriptedModel,
        records: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.runtime = runtime
        self.agent = agent
        self.model = model
        self.records = records
        self.record = Recorder(agent)

    @property
    def log(self) -> list[EventData]:
        return [event.data for event in self.agent.session.events]

    @property
    def kinds(self) -> list[str]:
        """The types of the log's events, in order."""
        return [msgspec.to_builtins(data)["type"] for data in self.log]

    @property
    def outcomes(self) -> list[Outcome]:
        return [data.outcome for data in self.log if isinstance(data, TurnEnd)]

    @property
    def results(self) -> list[ToolResult]:
        return [data for data in self.log if isinstance(data, ToolResult)]

    @property
    def calls(self) -> list[ToolCall]:
        return [data for data in self.log if isinstance(data, ToolCall)]

    def of(self, kind: type[Any]) -> list[Any]:
        return [data for data in self.log if isinstance(data, kind)]

    def on_event(self, kind: type[Any], act: Callable[[], object], *, once: bool = True) -> None:
        """Call `act` synchronously when an event of `kind` has been committed."""

        def observe(event: Any) -> None:
            if isinstance(event.data, kind):
                if once:
                    stop()
                act()

        stop = self.agent.session.observe(observe)

    def on_status(self, status: str, act: Callable[[], object], *, once: bool = True) -> None:
        """Call `act` synchronously when the agent's status becomes `status`."""

        def listen(_agent: Agent, became: str) -> None:
            if became == status:
                if once:
                    stop()
                act()

        stop = self.agent.hooks.on("agent/status", listen)

    async def new_agent(self) -> Agent:
        """Make another agent on the same runtime, store and model."""
        return await self.runtime.create("/")


def runtime_for(
    model: ScriptedModel,
    tools: Sequence[Tool] = (),
    *,
    mode: str = "bypass",
    store: MemoryStore | None = None,
) -> AgentRuntime:
    return AgentRuntime(
        store or MemoryStore(),
        model=model,
        tools=tuple(tools),
        files=LocalFiles(),
        commands=LocalCommands(),
        mode=mode,
    )


@asynccontextmanager
async def rig(
    *script: Entry,
    tools: Sequence[Tool] = (),
    mode: str = "bypass",
    store: MemoryStore | None = None,
    model: ScriptedModel | None = None,
) -> AsyncIterator[Rig]:
    """Open a runtime with one agent; leaving disposes it and waits until it is quiet."""
    model = model or ScriptedModel(script)
    failure: BaseException | None = None
    with capture_logs() as records, anyio.fail_after(LIMIT_S) as limit:
        async with runtime_for(model, tools, mode=mode, store=store) as runtime:
            try:
                yield Rig(runtime, await runtime.create("/"), model, records)
            except asyncio.CancelledError:
                raise
            except BaseException as exc:
                failure = exc
                limit.cancel()  # a failed test does not wait for what it left hanging
    if failure is not None:
        raise failure


async def started(work: Callable[[], Awaitable[object]], tasks: Any) -> anyio.Event:
    """Start `work` in `tasks`; return the event of its end, once it has begun to wait."""
    over = anyio.Event()

    async def run() -> None:
        await work()
        over.set()

    tasks.start_soon(run)
    await settle()
    return over


async def settle() -> None:
    """Let every task that can run do so, several times over: for what must *not* happen."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
