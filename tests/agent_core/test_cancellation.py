"""The closed causes, the signal, its controller, and what may be read from them."""

from __future__ import annotations

import asyncio
import enum
import inspect
import json
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import anyio
import pytest
from core_rig import DISPOSED, LIMIT_S, PARENT, USER, Hang, Rig, rig, settle
from ids import plain

from agent_core import cancellation
from agent_core.agent import Agent
from agent_core.cancellation import (
    AbortController,
    AbortSignal,
    TurnAborted,
    agent_interrupt_reason_of,
    normalize_cancel_cause,
)


class UserString(str):
    pass


class Kind(enum.StrEnum):
    USER = "user"


@dataclass
class DataCause:
    kind: str = "user"


class TupleCause(NamedTuple):
    kind: str = "user"


class DictCause(dict[str, str]):
    pass


class Chameleon:
    """Claims to equal everything and to be any text."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("user")

    def __str__(self) -> str:
        return "user"


class ChameleonKey(Chameleon):
    def __hash__(self) -> int:
        return hash("kind")


class MisreadingDict(dict[str, str]):
    """Shows a good cause to whoever asks, and holds another."""

    def items(self) -> Any:
        return {"kind": "user"}.items()

    def __len__(self) -> int:
        return 1


UNKNOWN_KINDS = [
    *("timeout", "shutdown", "superseded", "disposed", "hook", "", "USER", "user "),
    *(None, 1, True, b"user", UserString("user"), Kind.USER, Chameleon(), ["user"]),
]
BAD_SHAPES: list[object] = [
    {"kind": "user", "detail": 1},
    {"kind": "user", object(): 1},
    {"kind": "user", 0: 1},
    {},
    {"Kind": "user"},
    {b"kind": "user"},
    {UserString("kind"): "user"},
    {ChameleonKey(): "user"},
    MappingProxyType({"kind": "user", "detail": 1}),
    MappingProxyType({}),
]
BAD_STRINGS: list[object] = ["user", "parent", "", "cancelled by the user", UserString("user")]
BAD_ARRAYS: list[object] = [[], ["user"], ("user",), [("kind", "user")], {"kind"}, {"user"}]
BAD_INSTANCES: list[object] = [
    DataCause(),
    SimpleNamespace(kind="user"),
    TupleCause(),
    DictCause(kind="user"),
    OrderedDict(kind="user"),
    defaultdict(str, kind="user"),
    MappingProxyType(OrderedDict(kind="user")),
    MappingProxyType(MisreadingDict(kind="timeout")),
    MappingProxyType(MappingProxyType({"kind": "user"})),
    Kind.USER,
    Chameleon(),
    object(),
    0,
    False,
    1.5,
    type,
]
BAD_ERRORS: list[object] = [
    Exception("user"),
    asyncio.CancelledError(),
    asyncio.CancelledError,
    Exception,
    TurnAborted({"kind": "user"}),
]
BAD_SIGNALS: list[object] = [AbortController().signal, AbortController(), anyio.Event]
ALL_BAD = [
    *({"kind": kind} for kind in UNKNOWN_KINDS),
    *(BAD_SHAPES + BAD_STRINGS + BAD_ARRAYS + BAD_INSTANCES + BAD_ERRORS + BAD_SIGNALS),
]


# --- the causes -----------------------------------------------------------------------------


@pytest.mark.requirement("R1", "R92")
def test_the_public_causes_are_user_and_parent_and_nothing_else() -> None:
    kinds = [normalize_cancel_cause({"kind": kind})["kind"] for kind in ("user", "parent")]

    assert kinds == ["user", "parent"]
    assert set(cancellation._PUBLIC) == {"user", "parent"}
    assert set(cancellation._ALL) == {"user", "parent", "disposed"}


@pytest.mark.requirement("R4", "R5")
@pytest.mark.parametrize("wrap", [dict, lambda cause: MappingProxyType(dict(cause))])
@pytest.mark.parametrize("cause", [USER, PARENT])
def test_a_plain_mapping_of_exactly_one_kind_is_a_cause(
    cause: dict[str, str], wrap: Callable[[Any], Any]
) -> None:
    assert normalize_cancel_cause(wrap(cause)) == cause


@pytest.mark.requirement("R3")
def test_no_cause_means_the_user() -> None:
    assert normalize_cancel_cause() == USER
    assert normalize_cancel_cause(None) == USER


@pytest.mark.requirement("R6")
@pytest.mark.parametrize("value", BAD_SHAPES, ids=plain)
def test_extra_missing_or_misspelt_fields_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        normalize_cancel_cause(value)


@pytest.mark.requirement("R7", "R63", "R92")
@pytest.mark.parametrize("kind", UNKNOWN_KINDS, ids=plain)
def test_kinds_that_are_not_exactly_the_two_strings_are_refused(kind: object) -> None:
    with pytest.raises(TypeError):
        normalize_cancel_cause({"kind": kind})
    with pytest.raises(TypeError):
        normalize_cancel_cause(MappingProxyType({"kind": kind}))


@pytest.mark.parametrize(
    "value",
    [
        *(pytest.param(v, marks=pytest.mark.requirement("R8", "R90")) for v in BAD_STRINGS),
        *(pytest.param(v, marks=pytest.mark.requirement("R9")) for v in BAD_ARRAYS),
        *(pytest.param(v, marks=pytest.mark.requirement("R10")) for v in BAD_INSTANCES),
        *(pytest.param(v, marks=pytest.mark.requirement("R11")) for v in BAD_ERRORS),
        *(pytest.param(v, marks=pytest.mark.requirement("R12")) for v in BAD_SIGNALS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_mapping_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        normalize_cancel_cause(value)


@pytest.mark.requirement("R12")
async def test_events_and_tasks_are_refused() -> None:
    task = asyncio.current_task()
    for value in (asyncio.Event(), anyio.Event(), task):
        with pytest.raises(TypeError):
            normalize_cancel_cause(value)


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("wrap", [lambda cause: cause, MappingProxyType])
def test_a_cause_does_not_change_with_the_mapping_it_came_from(
    wrap: Callable[[Any], Any],
) -> None:
    supplied = {"kind": "user"}
    cause = normalize_cancel_cause(wrap(supplied))
    supplied["kind"] = "parent"
    supplied["more"] = "x"

    assert cause == USER
    assert cause is not supplied


@pytest.mark.requirement("R14")
@pytest.mark.parametrize("supplied", [None, USER, PARENT])
def test_a_cause_cannot_be_changed(supplied: dict[str, str] | None) -> None:
    cause: Any = normalize_cancel_cause(supplied)

    with pytest.raises(TypeError):
        cause["kind"] = "parent"
    with pytest.raises(TypeError):
        cause["more"] = 1
    with pytest.raises(TypeError):
        del cause["kind"]
    with pytest.raises(AttributeError):
        cause.kind = "parent"
    assert not hasattr(cause, "clear")


@pytest.mark.requirement("R17")
@pytest.mark.parametrize("supplied", [USER, PARENT])
def test_a_canonical_cause_is_accepted_again(supplied: dict[str, str]) -> None:
    cause = normalize_cancel_cause(supplied)

    assert normalize_cancel_cause(cause) is cause


@pytest.mark.requirement("R18")
def test_the_one_field_is_judged_by_its_exact_type_and_read_once() -> None:
    reads: list[str] = []

    class Shifting(UserString):
        def __eq__(self, other: object) -> bool:
            reads.append("compared")
            return True

        __hash__ = str.__hash__

    for value in ({"kind": Shifting("timeout")}, {Shifting("kind"): "user"}):
        with pytest.raises(TypeError):
            normalize_cancel_cause(value)
    assert reads == []


@pytest.mark.requirement("R2")
def test_a_cause_cannot_be_written_as_json_by_accident() -> None:
    with pytest.raises(TypeError):
        json.dumps(normalize_cancel_cause(USER))


@pytest.mark.requirement("R26", "R90")
def test_cancel_takes_one_cause_and_has_no_place_for_text() -> None:
    parameters = list(inspect.signature(Agent.cancel).parameters)

    assert parameters == ["self", "cause"]


# --- the boundary, in every state of an agent -------------------------------------------------


def facts(rig: Rig, signal: AbortSignal | None) -> tuple[object, ...]:
    loop = rig.agent._loop
    return (
        rig.agent.status,
        [prompt.id for prompt in (*loop._inbox._queued, *loop._inbox._steering)],
        loop._pre_run_cancelled,
        None if signal is None else (signal.aborted, signal.reason),
        len(rig.log),
        len(rig.record.seen),
    )


def refuse_all(rig: Rig, signal: AbortSignal | None = None) -> None:
    before = facts(rig, signal)
    for bad in ALL_BAD:
        with pytest.raises(TypeError):
            rig.agent.cancel(bad)
        assert facts(rig, signal) == before, bad


@pytest.mark.requirement("R15")
async def test_a_bad_cause_is_refused_at_once_while_idle() -> None:
    async with rig() as r:
        refuse_all(r)
        r.agent.cancel()
        await r.agent.send("A").settled()

        assert len(r.model.requests) == 1


@pytest.mark.race
@pytest.mark.requirement("R15")
async def test_a_bad_cause_is_refused_at_once_before_the_queued_prompt_starts() -> None:
    async with rig() as r:
        prompt: Any = r.agent.send("A")
        refuse_all(r)
        assert not prompt.is_settled
        r.agent.cancel(USER)

        assert prompt.is_settled
        await r.agent.when_idle()
        assert r.log == []


@pytest.mark.race
@pytest.mark.requirement("R15", "R16")
async def test_a_bad_cause_is_refused_at_once_while_running_and_a_good_one_still_works() -> None:
    hang = Hang()
    async with rig(hang) as r:
        r.agent.send("A")
        queued = r.agent.send("B")
        await hang.hanging.wait()
        signal = r.model.requests[0].signal
        refuse_all(r, signal)
        assert not queued.is_settled

        r.agent.cancel(PARENT)
        assert signal.reason == PARENT
        await r.agent.when_idle()
        assert len(r.model.requests) == 1


@pytest.mark.requirement("R15")
async def test_a_bad_cause_is_refused_at_once_after_disposal() -> None:
    async with rig() as r:
        await r.agent.dispose()
        refuse_all(r)
        r.agent.cancel(USER)  # harmless

        assert r.agent.status == "disposed"


@pytest.mark.requirement("R3", "R16", "R14")
@pytest.mark.parametrize(
    ("supplied", "reason"), [((), USER), ((None,), USER), ((USER,), USER), ((PARENT,), PARENT)]
)
async def test_the_turns_signal_carries_the_canonical_cause(
    supplied: tuple[Any, ...], reason: dict[str, str]
) -> None:
    hang = Hang()
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel(*supplied)
        carried: Any = r.model.requests[0].signal.reason

        assert dict(carried) == reason
        assert carried is normalize_cancel_cause(*supplied)
        assert type(carried) is MappingProxyType


@pytest.mark.race
@pytest.mark.requirement("R48", "R87")
async def test_the_first_of_repeated_cancels_stands() -> None:
    hang = Hang(is_slow=True)
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        supplied = {"kind": "parent"}
        r.agent.cancel(supplied)
        signal = r.model.requests[0].signal
        first = signal.reason
        supplied["kind"] = "user"
        r.agent.cancel(USER)
        r.agent.cancel()
        await hang.noticed.wait()
        r.agent.cancel(USER)
        hang.gate.set()
        await r.agent.when_idle()

        assert signal.reason is first
        assert first == PARENT


async def test_cancelling_from_another_thread_is_refused() -> None:
    async with rig() as r:
        with pytest.raises(RuntimeError, match="another thread"):
            await anyio.to_thread.run_sync(r.agent.cancel)


# --- the signal -----------------------------------------------------------------------------


@pytest.mark.requirement("R56")
def test_a_signal_offers_no_way_to_abort() -> None:
    public = {name for name in dir(AbortController().signal) if not name.startswith("_")}

    assert public == {"aborted", "any", "on_abort", "raise_if_aborted", "reason", "scope", "wait"}
    signal: Any = AbortController().signal
    with pytest.raises(AttributeError):
        signal.reason = USER
    with pytest.raises(AttributeError):
        signal.aborted = True


@pytest.mark.requirement("R51")
def test_state_is_set_before_listeners_run_in_the_order_of_registration() -> None:
    controller = AbortController()
    seen: list[object] = []
    for number in range(3):
        controller.signal.on_abort(
            lambda reason, number=number: seen.append(  # type: ignore[misc]
                (number, reason, controller.signal.aborted, controller.signal.reason)
            )
        )

    assert controller.abort("why")
    assert seen == [(number, "why", True, "why") for number in range(3)]


@pytest.mark.requirement("R51")
@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()])
def test_a_failing_listener_reaches_neither_the_caller_nor_its_peers(
    error: BaseException,
) -> None:
    controller = AbortController()
    seen: list[object] = []

    def explode(_reason: object) -> None:
        raise error

    controller.signal.on_abort(explode)
    controller.signal.on_abort(seen.append)
    controller.abort("why")

    assert seen == ["why"]


@pytest.mark.requirement("R51", "R48")
def test_a_second_abort_does_nothing_not_even_from_inside_the_first() -> None:
    controller = AbortController()
    seen: list[object] = []
    controller.signal.on_abort(lambda _reason: seen.append(controller.abort("third")))
    controller.signal.on_abort(seen.append)

    assert controller.abort("first")
    assert not controller.abort("second")
    assert controller.signal.reason == "first"
    assert seen == [False, "first"]


@pytest.mark.requirement("R51")
def test_a_listener_that_comes_after_the_abort_is_not_called() -> None:
    controller = AbortController()
    seen: list[object] = []

    def listen_late(_reason: object) -> None:
        controller.signal.on_abort(seen.append)

    controller.signal.on_abort(listen_late)
    controller.abort("why")
    remove = controller.signal.on_abort(seen.append)
    remove()

    assert seen == []


def test_a_removed_listener_is_not_called_even_if_an_earlier_listener_removes_it() -> None:
    controller = AbortController()
    seen: list[object] = []
    controller.signal.on_abort(lambda _reason: remove())
    remove = controller.signal.on_abort(seen.append)
    gone = controller.signal.on_abort(seen.append)
    gone()
    gone()
    controller.abort("why")

    assert seen == []


def test_an_abort_needs_a_reason() -> None:
    controller = AbortController()
    with pytest.raises(TypeError):
        controller.abort(None)
    assert not controller.signal.aborted


async def test_every_waiter_gets_the_reason_also_when_it_comes_late() -> None:
    controller, seen = AbortController(), []

    async def wait() -> None:
        seen.append(await controller.signal.wait())

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
            await settle()
            assert seen == []
            controller.abort("why")
        assert await controller.signal.wait() == "why"
    assert seen == ["why", "why"]


def test_raising_if_aborted_carries_the_reason() -> None:
    controller = AbortController()
    controller.signal.raise_if_aborted()
    controller.abort("why")

    with pytest.raises(TurnAborted) as raised:
        controller.signal.raise_if_aborted()
    assert raised.value.reason == "why"


# --- the scope of a leaf ----------------------------------------------------------------------


async def sleeping_in(signal: AbortSignal, inside: anyio.Event) -> None:
    async with signal.scope():
        inside.set()
        await anyio.sleep_forever()


async def in_scope_of(signal: AbortSignal, step: Callable[[], object]) -> None:
    async with signal.scope():
        step()


@pytest.mark.race
async def test_a_scope_gives_up_the_await_of_its_leaf() -> None:
    controller, inside = AbortController(), anyio.Event()
    ends: list[str] = []

    async def leaf() -> None:
        with pytest.raises(TurnAborted):
            await sleeping_in(controller.signal, inside)
        ends.append("aborted")
        await anyio.lowlevel.checkpoint()  # nothing of the scope's cancellation is left
        ends.append("went on")

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leaf)
            await inside.wait()
            assert ends == []
            controller.abort("why")
    assert ends == ["aborted", "went on"]


async def test_a_scope_is_not_entered_once_aborted_and_raises_at_its_end_if_it_fired() -> None:
    controller = AbortController()
    entered: list[bool] = []
    with pytest.raises(TurnAborted):
        await in_scope_of(controller.signal, lambda: controller.abort("why"))
    with pytest.raises(TurnAborted):
        await in_scope_of(controller.signal, lambda: entered.append(True))

    assert entered == []
    assert controller.signal._listeners == {}


async def test_a_scope_lets_a_failure_of_its_block_pass_although_it_fired() -> None:
    controller = AbortController()

    def explode() -> None:
        controller.abort("why")
        raise KeyError("own")

    with pytest.raises(KeyError):
        await in_scope_of(controller.signal, explode)


async def limited(signal: AbortSignal, *steps: Callable[[], object], limit_s: float) -> None:
    async with signal.scope(limit_s):
        for step in steps:
            step()
            await anyio.lowlevel.checkpoint()
        await anyio.sleep_forever()


async def test_a_scope_gives_up_the_await_of_its_leaf_at_its_limit() -> None:
    signal = AbortController().signal
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(TimeoutError):
            await limited(signal, limit_s=0.01)
        await anyio.lowlevel.checkpoint()  # nothing of the scope's cancellation is left

    assert not signal.aborted
    assert signal._listeners == {}


@pytest.mark.parametrize("is_abort_first", [True, False])
async def test_an_abort_outranks_a_limit_that_is_over_too(is_abort_first: bool) -> None:
    controller = AbortController()
    steps = [partial(controller.abort, "why"), partial(time.sleep, 0.02)]
    if not is_abort_first:
        steps.reverse()
    with anyio.fail_after(LIMIT_S), pytest.raises(TurnAborted):
        await limited(controller.signal, lambda: [step() for step in steps], limit_s=0.01)


async def test_what_a_leaf_has_counts_although_the_limit_of_its_scope_is_over_by_then() -> None:
    signal = AbortController().signal
    async with signal.scope(0.01):
        await anyio.lowlevel.checkpoint()
        time.sleep(0.02)  # noqa: ASYNC251 - nothing is awaited any more
        result = "here"

    assert result == "here"


async def test_a_scope_lets_foreign_cancellation_pass() -> None:
    signal, inside = AbortController().signal, anyio.Event()
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleeping_in, signal, inside)
            await inside.wait()
            tasks.cancel_scope.cancel()

    assert not signal.aborted
    assert signal._listeners == {}


# --- derived signals --------------------------------------------------------------------------


def test_a_derived_signal_fires_with_the_first_of_its_sources_and_lets_go_of_all() -> None:
    one, other = AbortController(), AbortController()
    with AbortSignal.any(one.signal, other.signal) as derived:
        other.abort("other")
        one.abort("one")

        assert derived.reason == "other"
    assert one.signal._listeners == other.signal._listeners == {}


def test_a_derived_signal_of_an_aborted_source_is_aborted_at_once() -> None:
    one, other = AbortController(), AbortController()
    other.abort("other")
    with AbortSignal.any(one.signal, other.signal) as derived:
        assert derived.reason == "other"
    assert one.signal._listeners == {}


def test_a_derived_signal_stops_following_and_never_reaches_back() -> None:
    one = AbortController()
    with AbortSignal.any(one.signal) as derived:
        pass
    one.abort("late")
    assert not derived.aborted

    two = AbortController()
    with AbortSignal.any(two.signal) as derived:
        derived._abort("the leaf's own")
    assert not two.signal.aborted


# --- who interrupted --------------------------------------------------------------------------


@pytest.mark.requirement("R59")
def test_the_interrupt_reason_is_none_until_an_agents_abort() -> None:
    controller = AbortController()
    assert agent_interrupt_reason_of(controller.signal) is None
    for cause in (USER, PARENT, DISPOSED):
        controller = AbortController()
        controller.abort(cause)
        assert agent_interrupt_reason_of(controller.signal) == cause


@pytest.mark.requirement("R59")
@pytest.mark.parametrize(
    "reason",
    [
        *("user", ValueError("user"), {"kind": "timeout"}, {"kind": "user", "more": 1}),
        *({}, 0, False, "", DataCause(), OrderedDict(kind="user"), Chameleon()),
    ],
    ids=plain,
)
def test_a_foreign_reason_is_no_interrupt(reason: object) -> None:
    controller = AbortController()
    controller.abort(reason)

    assert controller.signal.aborted
    assert agent_interrupt_reason_of(controller.signal) is None


@pytest.mark.requirement("R59")
def test_an_error_while_reading_the_reason_is_not_hidden() -> None:
    class Broken:
        @property
        def reason(self) -> object:
            raise RuntimeError("cannot be read")

    signal: Any = Broken()
    with pytest.raises(RuntimeError, match="cannot be read"):
        agent_interrupt_reason_of(signal)


@pytest.mark.requirement("R59")
async def test_the_interrupt_reason_looks_at_its_argument_only() -> None:
    aborted, clean = AbortController(), AbortController()
    aborted.abort(PARENT)
    seen: list[object] = []

    async with rig() as r:

        async def listen(*args: Any) -> Any:
            seen.append(agent_interrupt_reason_of(aborted.signal))
            seen.append(agent_interrupt_reason_of(clean.signal))
            return await args[-1]()

        r.agent.hooks.on("agent/prompt-submit", listen)
        await r.agent.send("A").settled()

    assert seen == [PARENT, None]
    assert agent_interrupt_reason_of(aborted.signal) == PARENT
    assert agent_interrupt_reason_of(clean.signal) is None
