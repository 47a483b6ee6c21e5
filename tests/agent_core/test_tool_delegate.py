from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from core_rig import Entry, Hang, fail, say, tool

from agent_core.agent import Agent
from agent_core.cancellation import AbortController, TurnAborted
from agent_core.content import Text, Usage
from agent_core.errors import ModelError, ToolError
from agent_core.events import (
    Aborted,
    Completed,
    ModelUsage,
    SubagentUsage,
    ToolCall,
    ToolProgress,
    ToolResult,
    TurnEnd,
)
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    Price,
    ToolCallDelta,
    UsageReport,
    UserTurn,
)
from agent_core.models.rehearsal import RehearsalModel
from agent_core.permissions import Approval
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.sessions.sqlite import SqliteStore
from agent_core.testing import abort_at_every_await, rehearsal_agent, tool_context
from agent_core.tools.delegate import Delegate
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.registry import default_tools
from agent_core.tools.tool import Tool, ToolContext, ToolOutput

LIMIT_S = 10


def delegates(*tasks: str | Mapping[str, Any]) -> Entry:
    """Delegate several tasks in one message."""

    async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        for index, task in enumerate(tasks):
            arguments = {"task": task} if isinstance(task, str) else task
            yield ToolCallDelta(index, "delegate", json.dumps(arguments))
        yield Finish("tool_calls")

    return play


def calls(name: str) -> Entry:
    async def play(_request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield ToolCallDelta(0, name, "{}")
        yield Finish("tool_calls")

    return play


class ByTask:
    """A model that plays, for each task, its entries one after the other, then says ``done``."""

    def __init__(self, script: Mapping[str, Sequence[Entry]], info: ModelInfo | None = None):
        self.info = info or ModelInfo("by-task")
        self.tasks: list[str] = []
        self.requests: list[ModelRequest] = []
        self._script = script
        self._played: dict[tuple[str, str], int] = {}

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        task = said_to(request)
        self.requests.append(request)
        number = self._played.get((request.session_id, task), 0)
        self._played[request.session_id, task] = number + 1
        if number == 0:
            self.tasks.append(task)
        entries = self._script.get(task, ())
        entry = entries[number] if number < len(entries) else say("done")
        async with aclosing(entry(request)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        pass


def said_to(request: ModelRequest) -> str:
    """The first line of the last prompt that is not context."""
    for message in reversed(request.messages):
        if isinstance(message, UserTurn) and isinstance(message.content[0], Text):
            text = message.content[0].text
            if not text.startswith("<"):
                return text.partition("\n")[0]
    raise AssertionError("nobody asked for anything")


@asynccontextmanager
async def team(
    script: Mapping[str, Sequence[Entry]],
    *tools: Tool,
    mode: str = "bypass",
    model: Any = None,
    store: Any = None,
    cwd: str = "/",
) -> AsyncIterator[tuple[Agent, ByTask]]:
    model = model or ByTask(script)
    with anyio.fail_after(LIMIT_S):
        async with AgentRuntime(
            store or MemoryStore(),
            model=model,
            tools=(Delegate(), *tools),
            files=LocalFiles(),
            commands=LocalCommands(),
            mode=mode,
        ) as runtime:
            yield await runtime.create(cwd), model


def results_of(agent: Agent) -> list[ToolResult]:
    return [each.data for each in agent.session.events if isinstance(each.data, ToolResult)]


def outcomes_of(agent: Agent) -> list[object]:
    return [each.data.outcome for each in agent.session.events if isinstance(each.data, TurnEnd)]


def children_made(agent: Agent) -> list[Agent]:
    """All agents that are made from now on."""
    made: list[Agent] = []
    agent._runtime.hooks.on("agent/created", made.append)
    return made


def sleeping(seconds: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if line[:2] == [b"sleep", seconds.encode()]:
                found.append(int(entry.name))
    return found


# --- a Stop that reaches all of them ---------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R19", "R22", "R62", "R69", "R83", "B047", "B048", "B060")
@pytest.mark.parametrize("levels", [2, 3])
async def test_a_stop_reaches_the_shell_at_the_bottom_and_leaves_no_word_of_who_asked(
    tmp_path: Path, levels: int
) -> None:
    store = SqliteStore(tmp_path / "s.sqlite3")
    seconds = f"60.{os.getpid()}{levels}"
    tools = tuple(each for each in default_tools() if each.name == "shell")
    async with team({}, *tools, model=RehearsalModel(), store=store) as (root, _model):
        made = [root]
        root._runtime.hooks.on("agent/created", made.append)
        prompt = root.send(f"{'delegate ' * levels}run sleep {seconds}")
        while not sleeping(seconds):  # noqa: ASYNC110 - another process
            await anyio.sleep(0.005)

        root.cancel()
        assert await prompt.settled() == Aborted()

        assert sleeping(seconds) == []
        assert list(root._runtime.agents) == [root.id]
        assert len(made) == levels + 1
        for agent in made:
            _header, events = await store.load(agent.id)
            assert events[-1].data == TurnEnd(1, Aborted())
    await store.aclose()
    assert_nobody_is_named(tmp_path / "s.sqlite3")


def assert_nobody_is_named(path: Path) -> None:
    """Of ``user`` and ``parent`` nothing is on disk but where prompts came from."""
    with sqlite3.connect(path) as connection:
        bodies = [bytes(body) for (body,) in connection.execute("select body from events")]
    connection.close()
    allowed = rb'"source":"(user|parent)"|"type":"user/message"'
    assert bodies
    for body in bodies:
        assert not re.search(rb"\b(user|parent)\b", re.sub(allowed, b"", body)), body
    written = b"".join(each.read_bytes() for each in path.parent.iterdir())
    assert b'"aborted"' in written
    assert not re.search(rb'"kind": ?"(user|parent)', written)


@pytest.mark.race
@pytest.mark.requirement("R73", "R74", "B050")
async def test_eight_are_stopped_at_once_and_the_one_that_does_not_listen_is_waited_for() -> None:
    hangs = {f"t{n}": Hang(is_slow=n == 5) for n in range(12)}
    script: dict[str, Sequence[Entry]] = {name: [hang] for name, hang in hangs.items()}
    async with team({"go": [delegates(*hangs)], **script}) as (root, model):
        made = children_made(root)
        prompt = root.send("go")
        for name in list(hangs)[:8]:
            await hangs[name].hanging.wait()

        root.cancel()
        await hangs["t5"].noticed.wait()
        await anyio.wait_all_tasks_blocked()

        assert [child.status for child in made].count("disposed") == 7
        assert (root.status, prompt.is_settled) == ("running", False)
        assert isinstance(root.session.events[-1].data, ToolResult | SubagentUsage)

        hangs["t5"].gate.set()
        assert await prompt.settled() == Aborted()
        assert list(root._runtime.agents) == [root.id]

    assert model.tasks == ["go", *list(hangs)[:8]]  # the others never started
    codes = [result.code for result in results_of(root)]
    assert codes == ["SUBAGENT_FAILED"] * 8 + ["ABORTED_BEFORE_DISPATCH"] * 4
    assert [outcomes_of(child) for child in made] == [[Aborted()]] * 8


@pytest.mark.race
@pytest.mark.requirement("B050")
async def test_those_that_wait_for_a_place_never_start_after_a_stop() -> None:
    hangs = {f"t{n}": Hang() for n in range(7)}
    script: dict[str, Sequence[Entry]] = {name: [hang] for name, hang in hangs.items()}
    async with team({"go": [delegates(*hangs)], **script}) as (root, model):
        root.subagents.max_live = 2
        made = children_made(root)
        prompt = root.send("go")
        for name in ("t0", "t1"):
            await hangs[name].hanging.wait()
        await anyio.wait_all_tasks_blocked()
        root.cancel()
        assert await prompt.settled() == Aborted()

        assert model.tasks == ["go", "t0", "t1"]
        assert len(made) == 2
        assert [r.code for r in results_of(root)] == ["SUBAGENT_FAILED"] * 2 + ["ABORTED"] * 5


@pytest.mark.race
async def test_a_delegation_aborted_at_any_await_leaves_no_agent_and_no_task(
    tmp_path: Path,
) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:

        async def call(signal: Any) -> ToolOutput:
            args = Delegate().parse('{"task": "delegate say deep"}')
            try:
                return await Delegate().run(args, tool_context(agent, signal))
            finally:
                assert list(agent._runtime.agents) == [agent.id]
                await anyio.lowlevel.checkpoint()  # drivers that are quiet get to their last line

        with anyio.fail_after(30):
            runs = await abort_at_every_await(call)

    assert len(runs) >= 3  # the subagents have tasks of their own
    for run in runs:
        assert run.result is not None or run.error is not None
        if isinstance(run.result, ToolOutput) and not run.result.is_error:
            assert "deep" in run.result.output


@pytest.mark.race
@pytest.mark.requirement("B056")
async def test_a_child_that_finished_before_the_stop_stays_finished() -> None:
    over, hang = anyio.Event(), Hang()
    async with team({"go": [delegates("quick", "slow")], "slow": [hang]}) as (root, _model):
        root.hooks.on("subagent/end", lambda *args: over.set() if args[2] == "completed" else None)
        prompt = root.send("go")
        await over.wait()
        await hang.hanging.wait()
        root.cancel()
        await prompt.settled()

        quick, slow = results_of(root)
        assert (quick.output, quick.is_error) == ("done", False)
        assert slow.output == "The subagent was stopped.\nWhat it had said by then:\none two "


@pytest.mark.requirement("B049")
async def test_leaving_the_runtime_ends_all_levels() -> None:
    hang = Hang()
    script = {"go": [delegates("mid", "other")], "mid": [delegates("low")], "low": [hang]}
    async with team(script) as (root, _model):
        made = children_made(root)
        root.send("go")
        await hang.hanging.wait()

    assert root._runtime.agents == {}
    assert {agent.status for agent in made} == {"disposed"}


# --- what comes of it ------------------------------------------------------------------------


async def test_one_that_fails_leaves_the_others_alone_and_the_model_is_told_which() -> None:
    error = ModelError("The key was refused.", code="AUTH")
    script = {"go": [delegates("a", "b", "c")], "b": [fail(error, "half a sen")]}
    async with team(script) as (root, _model):
        assert await root.send("go").settled() == Completed()

        told = [(r.output, r.code) for r in results_of(root)]
        assert told[0] == told[2] == ("done", None)
        assert told[1] == (
            "The key was refused.\nWhat it had said by then:\nhalf a sen",
            "SUBAGENT_FAILED",
        )


@pytest.mark.requirement("B059")
async def test_progress_of_children_side_by_side_goes_to_their_own_calls() -> None:
    gates = {name: anyio.Event() for name in ("left", "right")}

    async def body(context: ToolContext) -> ToolOutput:
        name = context.agent.delegation.name  # type: ignore[union-attr]
        other = gates["right" if name == "left" else "left"]
        gates[name].set()
        await other.wait()  # so both are in the middle of it
        return ToolOutput(f"{name} looked")

    tasks = [{"task": name, "name": name} for name in gates]
    script = {"go": [delegates(*tasks)], **{name: [calls("look")] for name in gates}}
    async with team(script, tool("look", body, title="Look around", overlaps=True)) as (root, _m):
        await root.send("go").settled()

        titles = {
            e.data.call_id: e.data.title
            for e in root.session.events
            if isinstance(e.data, ToolCall)
        }
        assert list(titles.values()) == ["left: left", "right: right"]
        shown: dict[str, list[str]] = {call_id: [] for call_id in titles}
        for event in root.session.events:
            if isinstance(event.data, ToolProgress):
                (content,) = event.data.content or ()
                assert isinstance(content, Text)
                shown[event.data.call_id].append(content.text)
        assert all(lines == ["Look around", "Look around\ndone"] for lines in shown.values())


async def test_the_model_is_told_how_deep_subagents_go() -> None:
    levels = {f"l{n}": [delegates(f"l{n + 1}")] for n in range(4)}
    async with team(levels) as (root, model):
        made = children_made(root)
        assert await root.send("l0").settled() == Completed()

        assert model.tasks == ["l0", "l1", "l2", "l3"]
        (refused,) = results_of(made[-1])
        assert (refused.code, made[-1].depth) == ("REFUSED", 3)
        assert "3 levels deep" in refused.output


async def test_who_there_is_none_of_is_refused_with_the_names_there_are() -> None:
    async with team({"go": [delegates({"task": "x", "agent": "nobody"})]}) as (root, model):
        await root.send("go").settled()

        (refused,) = results_of(root)
        assert refused.code == "REFUSED"
        assert "'nobody'" in refused.output
        assert "spawn, fork" in refused.output
        assert model.tasks == ["go"]


async def test_a_fork_knows_the_conversation_and_a_spawned_one_does_not() -> None:
    tasks = [{"task": "f", "agent": "fork"}, {"task": "s"}]
    async with team({"first": [say("the secret is 7")], "go": [delegates(*tasks)]}) as (
        root,
        model,
    ):
        await root.send("first").settled()
        await root.send("go").settled()

        known = {said_to(r): str(r.messages) for r in model.requests}
        assert "the secret is 7" in known["f"]
        assert "delegate" not in known["f"]  # nor what is going on just now
        assert "the secret is 7" not in known["s"]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
AGAIN = "That does not agree with the schema"


@pytest.mark.parametrize(
    ("answers", "output", "is_error"),
    [
        (['{"n": 1}'], '{"n": 1}', False),
        (['```json\n{"n": 1}\n```'], '{"n": 1}', False),
        (["one", '{"n": 1}'], '{"n": 1}', False),
        (['{"n": "one"}', '{"n": 2}'], '{"n": 2}', False),
        (["one", "two"], "it is not JSON", True),
        (['{"n": "x"}', "{}"], "'n' is a required property", True),
    ],
)
async def test_an_answer_is_held_against_its_schema_and_asked_for_twice_at_most(
    answers: list[str], output: str, is_error: bool
) -> None:
    class Says(ByTask):
        async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
            if said_to(request) == "go":
                async for event in super().stream(request):
                    yield event
                return
            self.tasks.append(said_to(request))
            async for event in say(answers[len(self.tasks) - 2])(request):
                yield event

    model = Says({"go": [delegates({"task": "count", "output_schema": SCHEMA})]})
    async with team({}, model=model) as (root, _model):
        await root.send("go").settled()

        (result,) = results_of(root)
        assert result.is_error == is_error
        assert output in result.output if is_error else result.output == output
        assert len(model.tasks) == 1 + len(answers)
        if len(answers) == 2:
            assert model.tasks[2].startswith(AGAIN)


async def test_a_schema_that_is_none_starts_nothing() -> None:
    task = {"task": "count", "output_schema": {"type": "thing"}}
    async with team({"go": [delegates(task)]}) as (root, model):
        await root.send("go").settled()

        (result,) = results_of(root)
        assert result.code == "REFUSED"
        assert "That is no JSON schema" in result.output
        assert model.tasks == ["go"]


async def test_a_pattern_that_is_none_is_refused_before_anything_starts() -> None:
    task = {"task": "count", "output_schema": {"pattern": "("}}
    async with team({"go": [delegates(task)]}) as (root, model):
        await root.send("go").settled()

        (result,) = results_of(root)
        assert result.code == "REFUSED"
        assert model.tasks == ["go"]


ENDLESS = {"task": "count", "output_schema": {"pattern": "^(a+)+$"}}
"""Nothing finds out in a lifetime that this does not match."""
MANY = json.dumps("a" * 40 + "!")


def checks_under_way() -> list[str]:
    """The processes below this one that hold answers against schemas."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) and b"worker_main" in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except (OSError, IndexError):
            continue
    return found


async def test_an_endless_pattern_holds_nothing_up_and_ends_with_a_stop() -> None:
    async with team({"go": [delegates(ENDLESS)], "count": [say(MANY)]}) as (root, _model):
        said = anyio.Event()
        root.hooks.on("subagent/start", lambda *_args: said.set())
        prompt = root.send("go")
        await said.wait()
        while not checks_under_way():  # noqa: ASYNC110 - another process makes it true
            await anyio.sleep(0.005)
        root.cancel()
        assert await prompt.settled() == Aborted()

        assert checks_under_way() == []
        (result,) = results_of(root)
        assert result.output == f"The subagent was stopped.\nWhat it had said by then:\n{MANY}"


async def test_an_answer_that_cannot_be_checked_in_time_does_not_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent_core.agreement.LIMIT_S", 3)
    async with team({"go": [delegates(ENDLESS)], "count": [say(MANY)]}) as (root, model):
        await root.send("go").settled()

        assert model.tasks[2] == f"{AGAIN}: it could not be checked in 3 s"
        assert checks_under_way() == []


async def test_what_a_schema_refers_to_is_never_fetched() -> None:
    visitors: list[object] = []

    async def visit(stream: anyio.abc.SocketStream) -> None:
        visitors.append(stream)
        await stream.aclose()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        schema = {"$ref": f"http://127.0.0.1:{port}/x"}
        script = {
            "go": [delegates({"task": "count", "output_schema": schema})],
            "count": [say("1")],
        }
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, visit)
            async with team(script) as (root, model):
                await root.send("go").settled()

                assert results_of(root)[0].is_error
                assert "which is not in it" in model.tasks[2]
            tasks.cancel_scope.cancel()
    assert visitors == []


# --- questions -------------------------------------------------------------------------------


TWO_DOWN: dict[str, Sequence[Entry]] = {
    "go": [delegates({"task": "mid", "name": "mid"})],
    "mid": [delegates({"task": "low", "name": "low"})],
    "low": [calls("touch")],
}


def touching() -> tuple[Tool, list[str]]:
    touched: list[str] = []

    async def body(context: ToolContext) -> ToolOutput:
        touched.append(context.agent.id)
        return ToolOutput("touched")

    return tool("touch", body, does="execute"), touched


@pytest.mark.requirement("B052")
@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_question_two_levels_down_is_asked_above_and_its_answer_is_told_below(
    is_allowed: bool,
) -> None:
    touch, touched = touching()
    asked: list[list[str]] = []

    async def answer(execution: Any, _next: Any) -> Approval:
        agent, names = execution.agent, []
        while agent.parent is not None:
            names.insert(0, agent.delegation.name)
            agent = agent.parent
        asked.append(names)
        return Approval.ALLOWED if is_allowed else Approval.REJECTED

    async with team(TWO_DOWN, touch, mode="ask") as (root, _model):
        made = children_made(root)
        root.hooks.on("approval/request", answer)
        assert await root.send("go").settled() == Completed()

        assert asked == [["mid", "low"]]
        assert len(touched) == is_allowed
        (result,) = results_of(made[1])
        assert result.code == (None if is_allowed else "DENIED")


@pytest.mark.race
@pytest.mark.requirement("B035", "B051")
async def test_a_question_two_levels_down_is_given_up_with_the_turn() -> None:
    touch, touched = touching()
    asking = anyio.Event()

    async def never(execution: Any, _next: Any) -> Approval:
        asking.set()
        async with execution.signal.scope():
            await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async with team(TWO_DOWN, touch, mode="ask") as (root, _model):
        made = [root, *(children := children_made(root))]
        root.hooks.on("approval/request", never)
        prompt = root.send("go")
        await asking.wait()
        root.cancel()

        assert await prompt.settled() == Aborted()
        made += children
        assert [outcomes_of(agent) for agent in made] == [[Aborted()]] * 3
        assert touched == []
        assert results_of(made[2])[0].code == "ABORTED_BEFORE_DISPATCH"


@pytest.mark.requirement("B041")
async def test_a_question_that_is_dismissed_two_levels_down_stops_the_whole_turn() -> None:
    touch, touched = touching()

    async def dismiss(_execution: Any, _next: Any) -> Approval:
        return Approval.CANCELLED

    async with team(TWO_DOWN, touch, mode="ask") as (root, model):
        root.hooks.on("approval/request", dismiss)
        assert await root.send("go").settled() == Aborted()

        assert touched == []
        assert model.tasks == ["go", "mid", "low"]
        assert len(model.requests) == 3


@pytest.mark.requirement("B053")
async def test_an_always_holds_for_all_children_of_the_session_and_for_later_ones() -> None:
    touch, touched = touching()
    asked: list[str] = []

    async def always(execution: Any, _next: Any) -> Approval:
        asked.append(execution.agent.delegation.name)
        return Approval.ALLOWED_ALWAYS

    script = {
        "go": [delegates("first"), delegates("second", "third")],
        **{name: [calls("touch")] for name in ("first", "second", "third", "again")},
        "more": [delegates("again")],
    }
    async with team(script, touch, mode="ask") as (root, _model):
        root.hooks.on("approval/request", always)
        await root.send("go").settled()
        await root.send("more").settled()

        assert len(touched) == 4
        assert asked == ["subagent"]


async def test_the_persons_question_is_asked_with_the_name_of_who_asks() -> None:
    from agent_core.forms import Form
    from agent_core.questions import Reply, ask

    seen: list[tuple[str, str | None]] = []

    class Person:
        async def form(self, form: Any, signal: Any, *, call_id: str | None = None) -> Reply:
            seen.append((form.message, call_id))
            return Reply("decline")

        async def url(self, message: str, url: str, signal: Any, **more: Any) -> Any:
            raise ToolError("no")

    async def body(context: ToolContext) -> ToolOutput:
        reply = await ask(context.agent, Form("Which?"), context.signal, call_id=context.call_id)
        return ToolOutput(reply.action)

    async with team(TWO_DOWN, tool("touch", body)) as (root, _model):
        root.ask = Person()
        await root.send("go").settled()

        assert seen == [("mid: low: Which?", None)]


# --- what it takes ---------------------------------------------------------------------------


PRICED = ModelInfo("by-task", context_tokens=1000, price=Price(input=1e6, output=0.0))


def costs(tokens: int, then: Entry) -> Entry:
    async def play(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        async with aclosing(then(request)) as events:
            async for event in events:
                if isinstance(event, Finish):
                    yield UsageReport(Usage(input_tokens=tokens))
                yield event

    return play


@pytest.mark.requirement("B151")
async def test_what_all_below_took_is_summed_into_the_cost_and_no_part_of_the_context() -> None:
    script = {
        "go": [costs(1, delegates("mid", "other")), costs(2, say("so"))],
        "mid": [costs(100, delegates("low")), costs(100, say("m"))],
        "low": [costs(50, say("l"))],
        "other": [costs(7, say("o"))],
    }
    async with team({}, model=ByTask(script, PRICED)) as (root, _model):
        await root.send("go").settled()

        facts = [event.data for event in root.session.events]
        spent = {each.usage.input_tokens for each in facts if isinstance(each, SubagentUsage)}
        assert spent == {250, 7}
        assert [e.context_tokens for e in facts if isinstance(e, SubagentUsage)] == [1, 1]
        assert [e.context_tokens for e in facts if isinstance(e, ModelUsage)] == [1, 2]
        assert root.session.state.counted_tokens == 2
        assert root.session.state.cost == pytest.approx(1 + 2 + 250 + 7)


async def test_what_a_stopped_child_took_is_counted_too_and_a_forks_past_is_not() -> None:
    hang = Hang()

    async def half(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield UsageReport(Usage(input_tokens=30))
        async with aclosing(hang(request)) as events:
            async for event in events:
                yield event

    script = {
        "first": [costs(1000, delegates("x"))],
        "x": [costs(500, say("x"))],
        "go": [costs(1, delegates({"task": "f", "agent": "fork"}))],
        "f": [half],
    }
    async with team({}, model=ByTask(script, PRICED)) as (root, _model):
        await root.send("first").settled()
        prompt = root.send("go")
        await hang.hanging.wait()
        root.cancel()
        await prompt.settled()

        facts = [event.data for event in root.session.events]
        spent = [each.usage.input_tokens for each in facts if isinstance(each, SubagentUsage)]
        assert spent == [500, 30]
        assert root.session.state.cost == pytest.approx(1000 + 500 + 1 + 30)


async def test_a_veto_against_the_count_does_no_harm() -> None:
    def veto(event: Any) -> None:
        if isinstance(event.data, SubagentUsage):
            raise ValueError("no")

    async with team({"go": [delegates("x")], "x": [costs(5, say("y"))]}) as (root, _model):
        root.session.validate(veto)
        assert await root.send("go").settled() == Completed()
        assert results_of(root)[0].output == "y"


async def test_a_signal_that_fired_before_is_no_refusal(tmp_path: Path) -> None:
    controller = AbortController()
    controller.abort("deadline")
    async with rehearsal_agent(str(tmp_path)) as agent:
        args = Delegate().parse('{"task": "say x"}')
        with pytest.raises(TurnAborted):
            await Delegate().run(args, tool_context(agent, controller.signal))


def test_a_title_names_the_subagent_and_is_short() -> None:
    parse, view = Delegate().parse, Delegate().view
    long = json.dumps({"task": f"\n{'x' * 200}\nmore", "agent": "reviewer"})

    assert view(parse('{"task": "t", "name": "Ann"}'), None).title == "Ann: t"  # type: ignore[arg-type]
    title = view(parse(long), None).title  # type: ignore[arg-type]
    assert title.startswith("reviewer: xxx")
    assert len(title) == 80
