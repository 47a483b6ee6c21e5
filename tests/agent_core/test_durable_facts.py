"""What a cancelled turn leaves in the log: what happened, and not a word of who, why or how.

That a stored outcome which says more is refused when it is read is proven in test_session_log.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from core_rig import (
    PARENT,
    STAGES,
    USER,
    GatedStore,
    Hang,
    Held,
    Rig,
    Waiting,
    answer_ok,
    call,
    fail,
    rig,
    say,
    tool,
)

from agent_core import agent, loop, runtime, sessions
from agent_core.cancellation import AbortController, TurnAborted
from agent_core.errors import StoreError
from agent_core.events import (
    Aborted,
    Completed,
    EventData,
    Failed,
    Outcome,
    StepStart,
    ToolCall,
    ToolStart,
    TurnEnd,
    TurnStart,
    UserMessage,
    decode,
    encode,
)
from agent_core.models.adapter import ModelEvent, ModelRequest, TextDelta
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore
from agent_core.sessions.store import SessionHeader
from agent_core.tools.tool import ToolOutput

# --- the same log, whoever asked ------------------------------------------------------------------

SEAMS = [stage for stage in STAGES if "/" in stage]
COMMITS = [TurnStart, UserMessage, StepStart, ToolCall, ToolStart]
MOMENTS = [
    *(*STAGES, "tools/pre-execute", "tools/execute", "tools/post-execute", "a permission"),
    *("two calls", "steering and a queue", "turn end", "flush"),
    *(kind.__name__ for kind in COMMITS),
]


async def stored(cause: dict[str, str], moment: str) -> list[bytes]:
    """Return the log of a turn that was cancelled at `moment`, byte by byte, without ids."""
    hang, body, store = Hang(), Waiting(is_cooperative=True), GatedStore()
    is_in_tool = moment in ("tool execution", "two calls")
    if not is_in_tool:
        body.gate.set()
    calls = ("probe", "probe") if moment == "two calls" else ("probe",)
    at_model = moment in ("model stream", "steering and a queue")
    mode = "ask" if moment == "a permission" else "bypass"
    effect: Any = "execute" if moment == "a permission" else "none"
    tools = [tool("probe", body, does=effect)]
    script = hang if at_model else call(*calls, text="I look.")
    async with rig(script, say("done"), tools=tools, store=store, mode=mode) as r:
        entered = await_moment(r, moment, hang, body, store, lambda: r.agent.cancel(cause))
        prompts = [r.agent.send("A")]
        await entered()
        if moment == "steering and a queue":
            prompts += [r.agent.steer("S"), r.agent.send("B")]
        r.agent.cancel(cause)
        store.gate.set()
        await r.agent.when_idle()
        prompts.append(r.agent.send("and on"))
        await r.agent.when_idle()

        assert r.outcomes[0] == (Completed() if moment in ("turn end", "flush") else Aborted())
        assert r.outcomes[1:] == [Completed()]
        bodies = [body for _time_ms, body in store._sessions[r.agent.id].events]
        for number, prompt in enumerate(prompts):
            bodies = [line.replace(prompt.id.encode(), b"prompt-%d" % number) for line in bodies]
        return bodies


def await_moment(
    r: Rig, moment: str, hang: Hang, body: Waiting, store: GatedStore, cancel: Callable[[], None]
) -> Callable[[], Any]:
    """Prepare for `moment`; return what waits until it has come."""
    if moment in ("model stream", "steering and a queue"):
        return hang.hanging.wait
    if moment in ("tool execution", "two calls"):
        return body.entered.wait
    if moment == "flush":
        store.close_gate()
        return store.flushing.wait
    if moment == "a permission":
        held = Held(r.agent, "approval/request")
        return held.reached.wait
    if moment in SEAMS or moment.startswith("tools/"):
        return Held(r.agent, moment).reached.wait
    kinds = {kind.__name__: kind for kind in COMMITS} | {"turn end": TurnEnd}
    r.on_event(kinds[moment], cancel)
    return r.agent.when_idle


@pytest.mark.requirement("R2", "R19", "R20", "R21", "R22", "R78", "R91")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_log_of_a_turn_is_the_same_whether_a_user_or_a_parent_stopped_it(
    moment: str,
) -> None:
    by_user = await stored(USER, moment)
    by_parent = await stored(PARENT, moment)

    assert by_user == by_parent
    (end, _next) = [body for body in by_user if b'"turn/end"' in body]
    kind = b"completed" if moment in ("turn end", "flush") else b"aborted"
    assert end == b'{"type":"turn/end","turn":1,"outcome":{"kind":"%s"}}' % kind
    assert b"parent" not in b"".join(by_user)
    for body in by_user:  # where `user` does stand, it says whose words these are
        data = json.loads(body)
        assert "user" not in [value for key, value in data.items() if key not in ("source", "type")]


# --- reading it back ------------------------------------------------------------------------------


@pytest.mark.requirement("R21", "R79", "R98")
@pytest.mark.parametrize("moment", ["model stream", "two calls", "agent/pre-step", "a permission"])
async def test_a_cancelled_session_survives_json_and_needs_no_repair(moment: str) -> None:
    bodies = await stored(PARENT, moment)
    store, header = MemoryStore(), SessionHeader("s", "/", 1, 1)
    session = await Session.create(header, store)
    for seq, body in enumerate(bodies):
        rewritten = json.dumps(json.loads(body), indent=1).encode()  # anybody's JSON
        assert encode(decode(rewritten)) == body
        store.append("s", seq, seq, rewritten)
    again = await Session.load("s", store)

    assert [encode(event.data) for event in again.events] == bodies
    for body in bodies:
        session.append(decode(body))
    assert again.messages == session.messages
    assert vars(again.state) == vars(session.state)


@pytest.mark.requirement("R98")
def test_sessions_know_nothing_of_cancellation() -> None:
    for path in Path(str(sessions.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "agent_core.cancellation", path.name
                assert "Aborted" not in [alias.name for alias in node.names], path.name


@pytest.mark.requirement("R19", "R22", "R24", "R26", "R91", "R98")
def test_the_vocabulary_of_the_log_has_no_place_for_a_cause() -> None:
    tags = [str(kind.__struct_config__.tag) for kind in get_args(EventData)]
    assert not [tag for tag in tags if re.search("cancel|abort|interrupt|signal|cause", tag)]
    fields = {kind.__name__: kind.__struct_fields__ for kind in get_args(Outcome)}
    assert fields["Aborted"] == fields["Disposed"] == fields["Interrupted"] == ()
    assert TurnEnd.__struct_fields__ == ("turn", "outcome")
    assert all(kind.__struct_config__.forbid_unknown_fields for kind in get_args(Outcome))


@pytest.mark.requirement("R26", "R90")
def test_no_public_verb_takes_words_about_a_cancel() -> None:
    verbs: list[Any] = [agent.Agent.cancel, agent.Agent.dispose, agent.Agent.withdraw]
    parameters = [list(inspect.signature(verb).parameters) for verb in verbs]

    assert parameters == [["self", "cause"], ["self"], ["self", "prompt"]]


@pytest.mark.requirement("R2")
def test_the_loop_hands_no_reason_to_the_log() -> None:
    """`reason` is read by the classification, through its one function, and by nobody else."""
    reads = [
        node.attr
        for module in (loop, agent, runtime)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and node.attr == "reason"
    ]

    assert reads == ["reason", "reason"]  # of a `Refuse`: the answer to a prompt


# --- canaries -------------------------------------------------------------------------------------

CANARY = "CANARY-7f3a"


class Private(Exception):
    """What a backend might raise: its text, its attributes and its cause all hold secrets."""

    def __init__(self) -> None:
        super().__init__(f"{CANARY} at {__file__}")
        self.request = f"{CANARY}-request"
        self.signal = AbortController().signal
        self.add_note(f"{CANARY}-note")
        self.__cause__ = OSError(2, CANARY, f"/home/{CANARY}/.netrc")


def explode(depth: int = 4) -> None:
    if depth:
        explode(depth - 1)
    raise Private


LEAKS = (CANARY, "Traceback", ".py", "line ", "Signal object", "0x", "TurnAborted", "/home")
NEVER = re.compile("|".join(map(re.escape, LEAKS)))


def assert_no_leak(r: Rig) -> None:
    texts = [encode(data).decode() for data in r.log]
    texts += [str(msgspec.to_builtins(request.messages)) for request in r.model.requests]
    texts += [str(outcome) for outcome in r.outcomes]
    for text in texts:
        assert not NEVER.search(text), text


FAILING = [
    *SEAMS,
    *("llm/stream", "tools/pre-execute", "tools/execute", "tools/post-execute"),
    *("approval/request", "model stream", "tool execution", "tool view", "tool key", "preview"),
]


async def with_failure_at(where: str, *, cancels: bool) -> None:
    entered = Waiting()

    async def blow(signal: Any) -> None:
        entered.entered.set()
        if cancels:
            await signal.wait()
        explode()

    async def body(context: Any) -> ToolOutput:
        if where == "tool execution":
            await blow(context.signal)
        return ToolOutput("fine")

    probe: Any = tool("probe", body, does="execute" if "pre" in where or "app" in where else "none")
    if where == "tool view":
        probe.view = lambda *_args: explode()
    elif where == "tool key":
        probe.remember_key = lambda *_args: explode()
    elif where == "preview":

        async def preview(_args: Any, context: Any) -> Any:
            await blow(context.signal)

        probe.preview = preview

    async def play(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield TextDelta("so far")
        await blow(request.signal)

    async def listen(*args: Any) -> Any:
        carrier = next((arg for arg in reversed(args) if hasattr(arg, "signal")), None)
        await blow(args[-2] if carrier is None else carrier.signal)

    async def listen_serially(*args: Any) -> Any:
        await blow(args[-1])

    script = play if where == "model stream" else call("probe")
    mode = "ask" if where in ("approval/request", "preview") else "bypass"
    async with rig(script, say("done"), tools=[probe], mode=mode) as r:
        if where in ("agent/pre-step", "agent/turn-stop"):
            r.agent.hooks.on(where, listen_serially)
        elif "/" in where:
            r.agent.hooks.on(where, listen)
        r.agent.send("A")
        if cancels:
            await entered.entered.wait()
            r.agent.cancel()
        await r.agent.when_idle()

        assert r.model.requests or where in STAGES[:5] or where == "llm/stream"
        assert_no_leak(r)
        if cancels:
            assert r.outcomes == [Aborted()]
            assert r.record.given("agent/error") == []
        else:
            assert type(r.outcomes[0]) in (Completed, Failed)


@pytest.mark.requirement("R23", "R25", "R27", "R67")
@pytest.mark.parametrize("where", FAILING)
async def test_nothing_of_a_foreign_failure_gets_into_the_log(where: str) -> None:
    await with_failure_at(where, cancels=False)


@pytest.mark.requirement("R23", "R24", "R25", "R27", "R66")
@pytest.mark.parametrize("where", [at for at in FAILING if at not in ("tool view", "tool key")])
async def test_nothing_of_a_failure_that_the_abort_caused_gets_into_the_log(where: str) -> None:
    await with_failure_at(where, cancels=True)


@pytest.mark.requirement("R24", "R27")
@pytest.mark.parametrize("smuggled", ["output", "content", "context", "code", "progress"])
async def test_what_is_no_data_does_not_get_into_the_log_by_way_of_a_tool(smuggled: str) -> None:
    async def body(context: Any) -> Any:
        thing: Any = Private() if smuggled != "content" else (Private(),)
        if smuggled == "progress":
            context.progress((context.signal,))
        elif smuggled == "context":
            return ToolOutput("fine", context=(thing,))
        else:
            return ToolOutput(**{"output": "fine", smuggled: thing})

    async with rig(call("probe"), say("done"), tools=[tool("probe", body)]) as r:
        r.agent.send("A")
        await r.agent.when_idle()

        assert_no_leak(r)
        assert len(r.results) == 1
        assert r.kinds.count("step/start") == r.kinds.count("step/end")
        assert r.kinds[-1] == "turn/end"


@pytest.mark.requirement("R25", "R27")
async def test_a_store_that_fails_leaves_no_word_of_it_in_the_log() -> None:
    class Failing(MemoryStore):
        async def flush(self, session_id: str) -> None:
            raise StoreError(f"cannot write /home/{CANARY}/log.db")

    store = Failing()
    async with rig(store=store) as r:
        prompt = r.agent.send("A")
        with pytest.raises(StoreError):
            await prompt.settled()

        assert_no_leak(r)


@pytest.mark.requirement("R24", "R25")
@pytest.mark.parametrize("raised", [TurnAborted(CANARY), asyncio.CancelledError(CANARY)])
async def test_an_abort_of_ones_own_says_nothing_of_its_reason(raised: BaseException) -> None:
    async def body(_context: Any) -> ToolOutput:
        raise raised

    async with rig(call("probe"), fail(raised), tools=[tool("probe", body)]) as r:
        r.agent.send("A")
        await r.agent.when_idle()

        assert [result.code for result in r.results] == ["TOOL_CANCELLED"]
        assert_no_leak(r)


async def test_the_canary_is_found_where_it_is_let_through() -> None:
    """The search itself works: what a tool says on purpose is in the log, of course."""

    async def body(_context: Any) -> ToolOutput:
        return ToolOutput(CANARY)

    async with rig(call("probe"), tools=[tool("probe", body), tool("other", answer_ok)]) as r:
        r.agent.send("A")
        await r.agent.when_idle()

        with pytest.raises(AssertionError):
            assert_no_leak(r)
