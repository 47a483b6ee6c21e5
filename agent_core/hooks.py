"""The seams of the loop: named hooks, how each is dispatched, and what its listeners are given.

Three kinds:
- *emit*: a synchronous notification. Listeners run in registration order, each contained: what one
  raises is logged and reaches nobody. ``async def`` listeners are refused: nobody would wait for
  them, and quiescence would be a lie.
- *serial*: awaited one after the other until one returns something other than `None`.
- *waterfall*: around-middleware. A listener gets the arguments and ``next``; it calls ``await
  next()`` and returns the value, changed or not, or returns its own without calling it. Where the
  argument is one request value, ``next(value)`` hands on another one.

Arguments are positional, and ``signal`` stands last, before a waterfall's ``next``. A listener may
cooperate with the signal of the call it is in; it must not keep it to steer another turn.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

from agent_core.logs import get_logger

__all__ = ["HOOKS", "HookSpec", "Hooks", "Kind", "hook_table"]

log = get_logger(__name__)


class Kind(enum.StrEnum):
    """How a hook is dispatched."""

    EMIT = "emit"
    SERIAL = "serial"
    WATERFALL = "waterfall"


class HookSpec(Struct, frozen=True):
    """One seam: its positional arguments (without ``next``), when it is reached, and what it gives.

    `on_cancel` says what a cancel means for a listener that is running there.
    """

    name: str
    kind: Kind
    arguments: tuple[str, ...]
    when: str
    on_cancel: str = "Nothing: it is synchronous, and over at once."


_E, _S, _W = Kind.EMIT, Kind.SERIAL, Kind.WATERFALL
_NO_STEP = "The signal fires; the turn waits for the listener, and no step follows."
_NO_MODEL = "The signal fires; the turn waits for the listener, and no model is called."
_NO_TOOL = "The signal fires; the turn waits for the listener, and no tool runs."

HOOKS: Final[dict[str, HookSpec]] = {
    spec.name: spec
    for spec in (
        HookSpec("agent/created", _E, ("agent",), "The agent can take work."),
        HookSpec("agent/session-start", _E, ("agent", "source"), "Then: `startup` or `resume`."),
        HookSpec("agent/queued", _E, ("agent", "content", "delivery"), "Work entered the inbox."),
        HookSpec("agent/status", _E, ("agent", "status"), "`running`, `idle` or `disposed`."),
        HookSpec("agent/error", _E, ("agent", "turn", "step", "error"), "A turn failed."),
        HookSpec("subagent/start", _E, ("agent", "run_id", "provider"), "A subagent started."),
        HookSpec("subagent/end", _E, ("agent", "run_id", "reason"), "It is quiet again."),
        HookSpec("agent/disposed", _E, ("agent",), "The agent is quiet for ever."),
        HookSpec(
            "agent/prompt-submit",
            _W,
            ("agent", "content", "source", "signal"),
            "A turn took a prompt. Returns `Allow` or `Refuse`.",
            "The signal fires; the turn waits for the listener, and the prompt is not logged.",
        ),
        HookSpec(
            "system-prompt/assemble",
            _W,
            ("assembly", "context"),
            "The system prompt and the tools are put together. `context.signal` is the turn's; it "
            "is `None` outside of a turn. Returns an `Assembly`.",
            _NO_STEP,
        ),
        HookSpec(
            "agent/session-prefix",
            _W,
            ("agent", "prefix", "signal"),
            "Once per agent: messages that go before the history. Returns a tuple of messages.",
            "As before, and what was composed is not kept.",
        ),
        HookSpec(
            "agent/pre-step",
            _S,
            ("agent", "turn", "step", "system", "prefix", "signal"),
            "Before the history is read for a model request.",
            _NO_STEP,
        ),
        HookSpec(
            "agent/request",
            _W,
            ("agent", "turn", "step", "config", "signal"),
            "The model and its sampling are chosen. Returns a `RequestConfig`.",
            _NO_MODEL,
        ),
        HookSpec(
            "llm/stream",
            _W,
            ("request",),
            "The model is called. `request.signal` is the turn's. Returns an asynchronous "
            "generator of model events.",
            "The signal fires; the generator is closed and waited for, what it said is kept.",
        ),
        HookSpec(
            "agent/step-result",
            _W,
            ("agent", "turn", "step", "message", "signal"),
            "The model's message is complete. Returns an `AssistantTurn`.",
            _NO_TOOL,
        ),
        HookSpec(
            "tools/pre-execute",
            _W,
            ("execution",),
            "May the call run? `execution.signal` is the turn's. Returns a `Decision`.",
            _NO_TOOL,
        ),
        HookSpec(
            "approval/request",
            _W,
            ("execution",),
            "A person is asked. Returns an `Approval`.",
            "The signal fires; give the question up, a late answer counts for nothing.",
        ),
        HookSpec(
            "tools/execute",
            _W,
            ("execution",),
            "Around the tool's body: the one place that may hand on another signal, in another "
            "`execution`. Returns a `ToolOutput`.",
            "The signal fires; the body is waited for, its result is `ABORTED`.",
        ),
        HookSpec(
            "tools/post-execute",
            _W,
            ("execution", "output"),
            "The body returned. Returns a `ToolOutput`, which may add context for the model.",
            "The signal fires; the turn waits for the listener, a success becomes `ABORTED`.",
        ),
        HookSpec("tools/result", _E, ("execution", "result"), "The call has its one result."),
        HookSpec(
            "agent/turn-continuation",
            _W,
            ("agent", "turn", "default", "signal"),
            "After a step: shall another follow? Returns a `bool`.",
            _NO_STEP,
        ),
        HookSpec(
            "agent/turn-stop",
            _S,
            ("agent", "turn", "signal"),
            "The last word: anything but `None` ends the turn and drops its steering.",
            _NO_STEP,
        ),
    )
}


def hook_table() -> str:
    """Return the hooks as the Markdown table of docs/hooks.md."""
    rows = [
        "| hook | kind | arguments | when | what a cancel means there |",
        "|---|---|---|---|---|",
    ]
    for spec in HOOKS.values():
        arguments = (*spec.arguments, "next") if spec.kind is Kind.WATERFALL else spec.arguments
        rows.append(
            f"| `{spec.name}` | {spec.kind} | `{', '.join(arguments)}` | {spec.when} "
            f"| {spec.on_cancel} |"
        )
    return "\n".join(rows) + "\n"


Listener = Callable[..., Any]


class Hooks:
    """Listeners by hook name. An agent's own come before those of its parent registry.

    Not thread-safe. Registering in a dispatch takes effect with the next one.
    """

    def __init__(self, parent: Hooks | None = None) -> None:
        self._parent = parent
        self._listeners: dict[str, dict[object, Listener]] = {}

    def on(self, name: str, listener: Listener) -> Callable[[], None]:
        """Register `listener`; return a function that removes it, harmless when called twice.

        Raises:
            KeyError: There is no such hook.
            TypeError: An ``async def`` for an emit hook, or a plain function for another kind.
        """
        spec = HOOKS[name]
        is_async = inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(
            type(listener).__call__
        )
        if is_async == (spec.kind is Kind.EMIT):
            raise TypeError(
                f"{name} is {spec.kind}: it takes {'plain' if is_async else 'async'} functions"
            )
        key = object()
        table = self._listeners.setdefault(name, {})
        table[key] = listener

        def remove() -> None:
            table.pop(key, None)

        return remove

    def emit(self, name: str, *args: object) -> None:
        """Notify the listeners of an emit hook, each contained."""
        for listener in self._of(name, Kind.EMIT):
            try:
                listener(*args)
            except (Exception, asyncio.CancelledError):
                log.exception("hook_listener_failed", hook=name)

    async def serial(self, name: str, *args: object) -> Any:
        """Await the listeners in order; return the first result that is not `None`.

        Cancellation: through the signal among `args`. What a listener raises propagates.
        """
        for listener in self._of(name, Kind.SERIAL):
            result = await listener(*args)
            if result is not None:
                return result
        return None

    async def waterfall(
        self, name: str, *args: object, final: Callable[..., Awaitable[Any]]
    ) -> Any:
        """Run `final` with `args`, inside all listeners; return what comes out of the outermost.

        Cancellation: through the signal in `args`. What a listener raises propagates.
        """
        listeners = self._of(name, Kind.WATERFALL)

        async def run(index: int, values: tuple[object, ...]) -> Any:
            if index == len(listeners):
                return await final(*values)

            async def next_(*replaced: object) -> Any:
                return await run(index + 1, replaced or values)

            return await listeners[index](*values, next_)

        return await run(0, args)

    def _of(self, name: str, kind: Kind) -> tuple[Listener, ...]:
        assert HOOKS[name].kind is kind, name
        own = tuple(self._listeners.get(name, {}).values())
        return own if self._parent is None else own + self._parent._of(name, kind)
