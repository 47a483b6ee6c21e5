"""How listeners are called, in which order, and what their failures reach."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from core_rig import USER, Held, answer_ok, call, rig, tool
from structlog.testing import capture_logs

from agent_core.cancellation import AbortController
from agent_core.events import Completed, Failed
from agent_core.hooks import HOOKS, Hooks, HookSpec, Kind

SIGNAL = AbortController().signal
SERIAL = "agent/turn-stop"
WATERFALL = "agent/request"
EMIT = "agent/status"


async def plus(*args: Any) -> Any:
    """End a waterfall: return the fourth argument."""
    return args[3]


# --- registration ---------------------------------------------------------------------------------


def test_every_hook_has_one_of_three_kinds_and_says_when_it_is_reached() -> None:
    for name, spec in HOOKS.items():
        assert isinstance(spec, HookSpec)
        assert spec.name == name
        assert spec.kind in Kind
        assert spec.arguments
        assert spec.when.endswith(".")


def test_an_unknown_hook_is_refused() -> None:
    with pytest.raises(KeyError):
        Hooks().on("agent/nosuch", lambda: None)


@pytest.mark.requirement("R74")
@pytest.mark.parametrize(
    "name", [name for name, spec in HOOKS.items() if spec.kind is Kind.EMIT], ids=str
)
def test_an_async_listener_of_a_notification_is_refused(name: str) -> None:
    async def listen(*_args: Any) -> None: ...

    class Callable:
        async def __call__(self, *_args: Any) -> None: ...

    class Owner:
        async def listen(self, *_args: Any) -> None: ...

    for listener in (listen, functools.partial(listen, 1), Callable(), Owner().listen):
        with pytest.raises(TypeError, match="plain functions"):
            Hooks().on(name, listener)


@pytest.mark.parametrize(
    "name", [name for name, spec in HOOKS.items() if spec.kind is not Kind.EMIT], ids=str
)
def test_a_plain_listener_of_an_awaited_hook_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="async functions"):
        Hooks().on(name, lambda *_args: None)


def test_a_removed_listener_is_not_called_and_removing_it_twice_is_harmless() -> None:
    hooks, seen = Hooks(), list[Any]()
    remove = hooks.on(EMIT, lambda *args: seen.append(args))
    hooks.on(EMIT, lambda *args: seen.append("other"))
    remove()
    remove()
    hooks.emit(EMIT, "agent", "idle")

    assert seen == ["other"]


# --- emit -----------------------------------------------------------------------------------------


def test_notifications_run_in_the_order_of_registration_the_agents_own_first() -> None:
    runtime = Hooks()
    agent, seen = Hooks(runtime), []
    agent.on(EMIT, lambda *_args: seen.append("agent 1"))
    runtime.on(EMIT, lambda *_args: seen.append("runtime 1"))
    agent.on(EMIT, lambda *_args: seen.append("agent 2"))
    runtime.on(EMIT, lambda *_args: seen.append("runtime 2"))
    agent.emit(EMIT, "agent", "idle")
    assert seen == ["agent 1", "agent 2", "runtime 1", "runtime 2"]

    seen.clear()
    runtime.emit(EMIT, "agent", "idle")
    assert seen == ["runtime 1", "runtime 2"]


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()], ids=repr)
def test_a_failing_listener_of_a_notification_is_logged_and_reaches_nobody(
    error: BaseException,
) -> None:
    hooks, seen = Hooks(), list[Any]()

    def explode(*_args: Any) -> None:
        raise error

    hooks.on(EMIT, explode)
    hooks.on(EMIT, lambda *args: seen.append(args))
    with capture_logs() as records:
        hooks.emit(EMIT, "agent", "idle")

    assert seen == [("agent", "idle")]
    assert [(entry["event"], entry["hook"]) for entry in records] == [
        ("hook_listener_failed", EMIT)
    ]


def test_a_listener_that_is_registered_in_a_dispatch_waits_for_the_next_one() -> None:
    hooks, seen = Hooks(), list[Any]()

    def register(*_args: Any) -> None:
        hooks.on(EMIT, lambda *_more: seen.append("new"))

    remove = hooks.on(EMIT, register)
    hooks.emit(EMIT, "agent", "idle")
    assert seen == []
    remove()
    hooks.emit(EMIT, "agent", "idle")
    assert seen == ["new"]


# --- serial ---------------------------------------------------------------------------------------


async def test_a_serial_hook_stops_at_the_first_answer() -> None:
    hooks, seen = Hooks(), list[Any]()

    def listener(answer: object) -> Any:
        async def listen(*args: Any) -> object:
            seen.append((answer, args))
            return answer

        return listen

    for answer in (None, False, "never reached"):
        hooks.on(SERIAL, listener(answer))
    args = ("agent", 1, SIGNAL)

    assert await hooks.serial(SERIAL, *args) is False
    assert seen == [(None, args), (False, args)]
    assert await Hooks().serial(SERIAL, *args) is None


async def test_what_a_serial_listener_raises_propagates() -> None:
    hooks = Hooks()

    async def explode(*_args: Any) -> None:
        raise ValueError("no")

    hooks.on(SERIAL, explode)
    with pytest.raises(ValueError, match="no"):
        await hooks.serial(SERIAL, "agent", 1, SIGNAL)


# --- waterfall ------------------------------------------------------------------------------------


@pytest.mark.requirement("R52")
async def test_a_waterfall_wraps_its_end_in_its_listeners() -> None:
    hooks, seen = Hooks(Hooks()), list[Any]()

    def around(name: str) -> Any:
        async def listen(*args: Any) -> Any:
            assert args[-2] is SIGNAL
            seen.append(f"{name} in")
            result = await args[-1]()
            seen.append(f"{name} out")
            return f"{name}({result})"

        return listen

    assert hooks._parent is not None
    hooks.on(WATERFALL, around("agent"))
    hooks._parent.on(WATERFALL, around("runtime"))
    result = await hooks.waterfall(WATERFALL, "agent", 1, 1, "config", SIGNAL, final=plus)

    assert result == "agent(runtime(config))"
    assert seen == ["agent in", "runtime in", "runtime out", "agent out"]


async def test_a_listener_of_a_waterfall_may_answer_by_itself_or_hand_on_other_values() -> None:
    hooks = Hooks()

    async def replace(*args: Any) -> Any:
        agent, turn, step, _config, signal, next_ = args
        return await next_(agent, turn, step, "replaced", signal)

    async def answer(*_args: Any) -> str:
        return "own answer"

    hooks.on(WATERFALL, replace)
    args = ("agent", 1, 1, "config", SIGNAL)
    assert await hooks.waterfall(WATERFALL, *args, final=plus) == "replaced"
    hooks.on(WATERFALL, answer)
    assert await hooks.waterfall(WATERFALL, *args, final=plus) == "own answer"


async def test_what_a_listener_of_a_waterfall_raises_propagates_through_those_around_it() -> None:
    hooks, seen = Hooks(), list[Any]()

    async def outer(*args: Any) -> Any:
        try:
            return await args[-1]()
        finally:
            seen.append("outer out")

    async def explode(*_args: Any) -> Any:
        raise ValueError("no")

    hooks.on(WATERFALL, outer)
    hooks.on(WATERFALL, explode)
    with pytest.raises(ValueError, match="no"):
        await hooks.waterfall(WATERFALL, "agent", 1, 1, "config", SIGNAL, final=plus)
    assert seen == ["outer out"]


# --- in a turn ------------------------------------------------------------------------------------


@pytest.mark.requirement("R67")
@pytest.mark.parametrize(
    "name",
    [
        *("agent/prompt-submit", "system-prompt/assemble", "agent/session-prefix"),
        *("agent/pre-step", "agent/request", "llm/stream", "agent/step-result"),
        *("agent/turn-continuation", "agent/turn-stop"),
    ],
)
async def test_a_failing_listener_fails_the_turn_and_not_the_agent(name: str) -> None:
    async with rig() as r:

        async def explode(*_args: Any) -> Any:
            raise ValueError("SECRET")

        remove = r.agent.hooks.on(name, explode)
        outcome = await r.agent.send("A").settled()
        remove()

        assert isinstance(outcome, Failed)
        assert outcome.code == "INTERNAL"
        assert "SECRET" not in str(r.log)
        assert len(r.record.given("agent/error")) == 1
        assert r.kinds.count("step/start") == r.kinds.count("step/end")
        assert await r.agent.send("B").settled() == Completed()


@pytest.mark.race
@pytest.mark.requirement("R60")
async def test_listeners_of_one_agent_hear_nothing_of_another() -> None:
    async with rig() as r:
        other = await r.new_agent()
        held = Held(other, "agent/prompt-submit")
        seen: list[Any] = []
        r.runtime.hooks.on(EMIT, lambda agent, status: seen.append((agent, status)))
        await r.agent.send("A").settled()
        other.send("B")
        await held.reached.wait()
        r.agent.cancel()
        assert held.signal is not None
        assert not held.signal.aborted
        other.cancel()
        await other.when_idle()

        assert held.signal.reason == USER
        assert {agent for agent, _status in seen} == {r.agent, other}
        assert r.record.statuses == ["running", "idle"]


async def test_the_life_of_an_agent_is_announced_in_order() -> None:
    async with rig(call("probe"), tools=[tool("probe", answer_ok)]) as r:
        seen: list[tuple[str, Any]] = []
        for name in ("agent/created", "agent/session-start", "agent/status", "agent/disposed"):
            r.runtime.hooks.on(name, lambda *args, name=name: seen.append((name, args[-1])))
        agent = await r.new_agent()
        await agent.send("A").settled()
        await agent.dispose()

        assert seen == [
            ("agent/created", agent),
            ("agent/session-start", "startup"),
            ("agent/status", "running"),
            ("agent/status", "idle"),
            ("agent/status", "disposed"),
            ("agent/disposed", agent),
        ]


async def test_queued_work_is_announced_with_how_it_was_delivered() -> None:
    async with rig() as r:
        r.agent.send("A")
        r.agent.steer("S", source="a listener")
        await r.agent.when_idle()

        deliveries = [delivery for _agent, _content, delivery in r.record.given("agent/queued")]
        assert deliveries == [
            {"source": "user", "steering": False},
            {"source": "a listener", "steering": True},
        ]
