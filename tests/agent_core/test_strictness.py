"""The boundary of `Agent.cancel`, rule by rule, in every state an agent can be in."""

from __future__ import annotations

import asyncio
import collections
import enum
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, NamedTuple

import anyio
import msgspec
import pytest
from core_rig import DISPOSED, PARENT, USER, Hang, Rig, rig, say
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_core.agent import Agent
from agent_core.cancellation import AbortController, TurnAborted, normalize_cancel_cause
from agent_core.events import Aborted, Completed, Disposed
from agent_core.inbox import Prompt


class TextLike(str):
    """A string by inheritance only."""


class KindOfUser(enum.StrEnum):
    USER = "user"


@dataclass(frozen=True)
class Cause:
    kind: str = "user"


class CauseStruct(msgspec.Struct):
    kind: str = "user"


class CauseTuple(NamedTuple):
    kind: str = "user"


class CauseDict(dict[Any, Any]):
    """A dict by inheritance only."""


class CauseMapping(Mapping[str, str]):
    """Behaves like the real thing, and is none."""

    def __getitem__(self, key: str) -> str:
        return {"kind": "user"}[key]

    def __iter__(self) -> Any:
        return iter(["kind"])

    def __len__(self) -> int:
        return 1


def proxies_too(*values: Any) -> list[object]:
    """Return each dict as it is and behind a read-only view."""
    return [*values, *(MappingProxyType(value) for value in values)]


def events_and_tasks() -> list[object]:
    signal = AbortController().signal
    return [signal, AbortController(), asyncio.Event(), anyio.Event(), asyncio.current_task()]


TABLE: Final[dict[str, Callable[[], list[object]]]] = {
    "R6": lambda: proxies_too(
        *({"kind": "user", "detail": 1}, {"kind": "user", object(): 1}, {"kind": "user", 0: 1}),
        *({}, {"Kind": "user"}, {"kind ": "user"}, {"reason": "user"}, {b"kind": "user"}),
        *({TextLike("kind"): "user"}, {"kind": "user", "message": "please stop"}),
    ),
    "R7": lambda: proxies_too(
        *({"kind": kind} for kind in ("timeout", "shutdown", "superseded", "disposed", "hook")),
        *({"kind": kind} for kind in ("", "USER", " user", "user\0", None, 1, b"user", ("user",))),
        *({"kind": kind} for kind in (TextLike("user"), KindOfUser.USER, {"kind": "user"})),
    ),
    "R8": lambda: ["user", "parent", "", "stopped by the user", TextLike("user"), b"user"],
    "R9": lambda: [[], ["user"], ("user",), [("kind", "user")], (("kind", "user"),), {"user"}],
    "R10": lambda: [
        *(Cause(), CauseStruct(), CauseTuple(), CauseDict(kind="user"), CauseMapping()),
        *(SimpleNamespace(kind="user"), KindOfUser.USER, object(), Cause, type, len, 0, 1.5, False),
        *(collections.OrderedDict(kind="user"), collections.defaultdict(str, kind="user")),
        *(collections.UserDict(kind="user"), collections.ChainMap({"kind": "user"})),
        *(MappingProxyType(CauseDict(kind="user")), MappingProxyType(CauseMapping())),
    ],
    "R11": lambda: [
        *(Exception("user"), asyncio.CancelledError(), asyncio.CancelledError, Exception),
        *(
            KeyboardInterrupt(),
            TurnAborted({"kind": "user"}),
            BaseExceptionGroup("user", [OSError()]),
        ),
    ],
    "R12": events_and_tasks,
}
"""What each rule refuses."""


# --- the states -----------------------------------------------------------------------------------


@dataclass
class Scene:
    """An agent in one state, and what a valid cancel must lead to from there."""

    rig: Rig
    waiting: list[Prompt]
    finish: Callable[[], Any]
    reason: dict[str, str] | None = None  # of the running turn's signal, once cancelled by a parent

    def facts(self) -> tuple[object, ...]:
        """Everything that a refused cancel must leave as it is."""
        r, loop = self.rig, self.rig.agent._loop
        signals = [(request.signal.aborted, request.signal.reason) for request in r.model.requests]
        queues = (*loop._inbox._queued, "|", *loop._inbox._steering)
        settled = [prompt.is_settled for prompt in self.waiting]
        flags = (r.agent.status, loop._pre_run_cancelled, loop.awaiting, r.agent.unwinding())
        return flags, signals, queues, settled, tuple(r.log), len(r.record.seen)


@asynccontextmanager
async def idle() -> AsyncIterator[Scene]:
    async with rig() as r:

        async def finish() -> None:
            assert await r.agent.send("A").settled() == Completed()

        yield Scene(r, [], finish)


@asynccontextmanager
async def queued() -> AsyncIterator[Scene]:
    async with rig() as r:
        waiting = [r.agent.send("A"), r.agent.steer("S"), r.agent.send("B")]

        async def finish() -> None:
            await r.agent.when_idle()
            assert r.log == []

        yield Scene(r, waiting, finish)


@asynccontextmanager
async def running() -> AsyncIterator[Scene]:
    hang = Hang()
    async with rig(hang) as r:
        prompt = r.agent.send("A")
        await hang.hanging.wait()
        waiting = [r.agent.send("B"), r.agent.steer("S")]

        async def finish() -> None:
            assert await prompt.settled() == Aborted()

        yield Scene(r, waiting, finish, PARENT)


@asynccontextmanager
async def unwinding() -> AsyncIterator[Scene]:
    hang = Hang(is_slow=True)
    async with rig(hang, say("never")) as r:
        prompt = r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel(USER)
        waiting = [r.agent.send("B"), r.agent.steer("S")]

        async def finish() -> None:
            hang.gate.set()
            assert await prompt.settled() == Aborted()

        yield Scene(r, waiting, finish, USER)


@asynccontextmanager
async def disposing() -> AsyncIterator[Scene]:
    hang = Hang(is_slow=True)
    async with rig(hang) as r:
        prompt = r.agent.send("A")
        await hang.hanging.wait()
        r.agent.dispose()

        async def finish() -> None:
            hang.gate.set()
            assert await prompt.settled() == Disposed()

        yield Scene(r, [], finish, DISPOSED)


@asynccontextmanager
async def disposed() -> AsyncIterator[Scene]:
    async with rig() as r:
        await r.agent.dispose()

        async def finish() -> None:
            await r.agent.when_idle()
            assert r.log == []

        yield Scene(r, [], finish)


STATES: Final = [idle, queued, running, unwinding, disposing, disposed]
in_every_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)


def refuse(scene: Scene, value: object) -> None:
    before = scene.facts()
    with pytest.raises(TypeError):
        scene.rig.agent.cancel(value)
    assert scene.facts() == before


async def cancel_and_check(scene: Scene) -> None:
    """A valid cancel still does all it should."""
    scene.rig.agent.cancel(PARENT)
    assert all(prompt.is_settled for prompt in scene.waiting)
    reasons = [request.signal.reason for request in scene.rig.model.requests]
    assert reasons == ([] if scene.reason is None else [scene.reason])
    await scene.finish()
    assert [prompt.outcome for prompt in scene.waiting] == [None] * len(scene.waiting)


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.requirement("R15", "R6", "R7", "R8", "R9", "R10", "R11", "R12", "R16", "R48")
@pytest.mark.parametrize("rule", TABLE)
@in_every_state
async def test_a_bad_cause_is_refused_at_once_and_changes_nothing(state: Any, rule: str) -> None:
    async with state() as scene:
        for value in TABLE[rule]():
            refuse(scene, value)
        await cancel_and_check(scene)


@pytest.mark.requirement("R1", "R3", "R4", "R5", "R17", "R48")
@pytest.mark.parametrize(
    "good",
    [
        *(None, {"kind": "user"}, {"kind": "parent"}, MappingProxyType({"kind": "user"})),
        *(MappingProxyType({"kind": "parent"}), normalize_cancel_cause({"kind": "parent"})),
    ],
    ids=repr,
)
@in_every_state
async def test_a_good_cause_is_taken_in_every_state(state: Any, good: Any) -> None:
    async with state() as scene:
        expected = USER if good is None else dict(good)
        if scene.reason == PARENT:  # the one state in which this cancel is the first
            scene.reason = expected
        scene.rig.agent.cancel(good)
        await cancel_and_check(scene)


@pytest.mark.requirement("R13", "R14", "R16")
@pytest.mark.parametrize("wrap", [dict, MappingProxyType], ids=["dict", "proxy"])
async def test_what_the_signal_carries_is_detached_and_frozen(wrap: Any) -> None:
    async with running() as scene:
        supplied = {"kind": "parent"}
        cause = supplied if wrap is dict else wrap(supplied)
        scene.rig.agent.cancel(cause)
        supplied["kind"] = "user"
        supplied["more"] = "x"
        carried: Any = scene.rig.model.requests[0].signal.reason

        assert carried == PARENT
        assert carried is not cause
        with pytest.raises(TypeError):
            carried["kind"] = "user"
        with pytest.raises(AttributeError):
            carried.clear()
        await scene.finish()


@pytest.mark.requirement("R18")
async def test_a_value_that_changes_between_two_reads_is_never_read() -> None:
    class Shifting(TextLike):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = str.__hash__

        def __str__(self) -> str:
            raise AssertionError("read")

    class ShiftingDict(CauseDict):
        def __getitem__(self, key: str) -> str:
            raise AssertionError("read")

        def __iter__(self) -> Any:
            raise AssertionError("read")

        def items(self) -> Any:
            raise AssertionError("read")

    async with running() as scene:
        for value in (
            *({"kind": Shifting("user")}, {Shifting("kind"): "user"}),
            *(ShiftingDict(kind="user"), MappingProxyType(ShiftingDict(kind="user"))),
        ):
            refuse(scene, value)
        await cancel_and_check(scene)


# --- anything at all ------------------------------------------------------------------------------

GOOD: Final = ({"kind": "user"}, {"kind": "parent"})
near = st.sampled_from(["kind", "Kind", "user", "parent", "disposed", "reason", "", b"kind"])
leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary()),
    *(near, near.map(lambda value: TextLike(value) if type(value) is str else value)),
)
mappings = st.dictionaries(near | st.integers() | st.text(max_size=4), leaves, max_size=3)
anything = st.one_of(
    *(
        leaves,
        mappings,
        mappings.map(MappingProxyType),
        mappings.map(CauseDict),
    ),
    mappings.map(collections.OrderedDict).map(MappingProxyType),
    st.recursive(
        leaves | mappings,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(near, inner, max_size=2)
            | st.dictionaries(near, inner, max_size=2).map(MappingProxyType)
        ),
        max_leaves=8,
    ),
    *(st.from_type(kind) for kind in (complex, frozenset, range, slice, type, BaseException)),
)
free = settings(
    max_examples=200, deadline=None, database=None, suppress_health_check=[*HealthCheck]
)


def is_good(value: object) -> bool:
    """The rule, written once more: exact types all the way."""
    if value is None:
        return True
    if type(value) not in (dict, MappingProxyType):
        return False
    assert isinstance(value, dict | MappingProxyType)
    if type(value) is MappingProxyType and type(value | {}) is not dict:
        return False  # a view of something that is no plain dict
    pairs = list(dict(value).items())
    return (
        len(pairs) == 1 and [type(part) for part in pairs[0]] == [str, str] and dict(value) in GOOD
    )


@pytest.mark.requirement("R4", "R5", "R6", "R7", "R8", "R9", "R10")
@free
@given(anything)
def test_of_all_values_exactly_the_causes_are_causes(value: object) -> None:
    if is_good(value):
        assert normalize_cancel_cause(value) in GOOD
    else:
        with pytest.raises(TypeError):
            normalize_cancel_cause(value)


@pytest.mark.requirement("R15")
@in_every_state
async def test_no_value_but_a_cause_has_any_effect(state: Any) -> None:
    async with state() as scene:

        @free
        @given(anything.filter(lambda value: not is_good(value)))
        def refuse_it(value: object) -> None:
            refuse(scene, value)

        refuse_it()
        await cancel_and_check(scene)


@pytest.mark.requirement("R15")
@in_every_state
async def test_another_thread_is_refused_in_every_state(state: Any) -> None:
    refusals: list[str] = []

    def call_all(agent: Agent) -> None:
        for verb in (
            agent.cancel,
            agent.dispose,
            lambda: agent.send("X"),
            lambda: agent.steer("X"),
        ):
            with pytest.raises(RuntimeError) as refused:
                verb()
            refusals.append(str(refused.value))

    async with state() as scene:
        before = scene.facts()
        thread = threading.Thread(target=call_all, args=(scene.rig.agent,))
        thread.start()
        thread.join()  # the loop stands still meanwhile: what changed, the thread has changed
        assert ["anyio.from_thread.run_sync" in words for words in refusals] == [True] * 4
        assert scene.facts() == before
        await cancel_and_check(scene)
