from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import call, rig
from mcp_double import Double, free_port, is_alive, sdk_server
from structlog.testing import capture_logs

from agent_core.agent import Agent
from agent_core.cancellation import USER, AbortController, AbortSignal, TurnAborted
from agent_core.content import Image, Link, Resource, Text
from agent_core.errors import ToolError
from agent_core.events import Completed
from agent_core.mcp.agent_servers import AgentServers, McpServers, ServerNotice
from agent_core.mcp.servers import HttpServer, Progress, Server, SseServer, StdioServer
from agent_core.mcp.tools import HEAD_CHARS, MAX_SHOWN_CHARS, TAIL_CHARS, make_tools, output_from
from agent_core.models.rehearsal import RehearsalModel
from agent_core.prompt import AssembleContext
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.testing import abort_at_every_await, tool_context
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.tool import ToolOutput

LIMIT_S = 20.0
"""Loading the SDK takes seconds on a busy machine."""


def stdio(double: Double, **environ: str) -> StdioServer:
    command, *args = double.command
    return StdioServer(double.name, command, tuple(args), tuple(environ.items()))


class Host:
    """A runtime whose agents have MCP servers, and what was said of these."""

    def __init__(self, runtime: AgentRuntime, folder: Path, **limits: float) -> None:
        self.runtime = runtime
        self.mcp = McpServers(runtime, identity=("test", "1"), **limits)
        self.notices: list[ServerNotice] = []
        self._folder = folder

    async def agent(self, *servers: Server) -> tuple[Agent, AgentServers]:
        agent = await self.runtime.create(str(self._folder))
        own = self.mcp.of(agent)
        own.observe(self.notices.append)
        own.use(servers)
        return agent, own


@asynccontextmanager
async def host(folder: Path, **limits: float) -> AsyncIterator[Host]:
    with anyio.fail_after(2 * LIMIT_S):
        async with AgentRuntime(
            MemoryStore(),
            model=RehearsalModel(),
            tools=(),
            files=LocalFiles(),
            commands=LocalCommands(),
            mode="bypass",
        ) as runtime:
            yield Host(runtime, folder, **limits)


async def connected(servers: AgentServers) -> None:
    with anyio.fail_after(LIMIT_S):
        for connection in tuple(servers._connections.values()):
            await connection.settled.wait()


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another process does; there is nothing to wait on."""
    with anyio.fail_after(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def use(
    agent: Agent, name: str, signal: AbortSignal | None = None, shown: Any = None, **arguments: Any
) -> ToolOutput:
    tool = agent.tools[name]
    context = tool_context(agent, signal or AbortController().signal, shown)
    return await tool.run(tool.parse(json.dumps(arguments)), context)


def offered(agent: Agent) -> set[str]:
    return {name for name in agent.tools if name.startswith("mcp__")}


# --- tools ----------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-056", "ACP-059")
async def test_a_servers_tools_are_its_agents_and_nobody_elses(tmp_path):
    double = Double(tmp_path)
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        other, _none = await at.agent()
        await connected(servers)

        echo, sleep = agent.tools["mcp__double__echo"], agent.tools["mcp__double__sleep"]
        assert echo.spec().description == "Says it again."
        assert echo.spec().parameters["properties"] == {"text": {"type": "string"}}
        assert (echo.effect, echo.is_parallel) == ("read", True)
        assert (sleep.effect, sleep.is_parallel) == ("execute", False)
        assert echo.view({}, agent.roots).title == "Echo it (double)"
        assert not offered(other)
        assert at.notices == []
        assert [each["params"]["clientInfo"]["name"] for each in double.got("initialize")] == [
            "test"
        ]


async def test_arguments_reach_the_server_as_they_are(tmp_path):
    double = Double(tmp_path)
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)

        given = {"text": "ü\u2028 \n", "deep": [{"a": None}, 1.5, True], "unknown": {}}
        output = await use(agent, "mcp__double__echo", **given)

        assert json.loads(output.output) == given
        assert double.got("tools/call")[0]["params"]["arguments"] == given
        with pytest.raises(ToolError, match="are wrong") as failed:
            agent.tools["mcp__double__echo"].parse("[1]")
        assert failed.value.code == "BAD_ARGUMENTS"


async def test_results_are_words_for_the_model_and_content_for_people(tmp_path):
    double = Double(tmp_path)
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)

        blocks = await use(agent, "mcp__double__blocks")
        structured = await use(agent, "mcp__double__structured")
        failed = await use(agent, "mcp__double__fail")
        with pytest.raises(ToolError, match="not like this") as refused:
            await use(agent, "mcp__double__refuse")

        assert "words\n[image image/png" in blocks.output
        assert "[resource file:///b]\ninside" in blocks.output
        assert [type(item) for item in blocks.content] == [
            Text,
            Image,
            Text,
            Link,
            Resource,
            Resource,
            Text,
            Text,
        ]
        assert structured.output == '{"answer":42}'
        assert (failed.output, failed.is_error) == ("no luck", True)
        assert refused.value.code == "MCP_ERROR"


def test_what_a_result_says_and_shows_is_bounded():
    text = "a" * HEAD_CHARS + "b" * 1000 + "c" * TAIL_CHARS
    image = {"type": "image", "data": "x" * (MAX_SHOWN_CHARS // 2 + 1), "mimeType": "image/png"}
    output = output_from({"content": [{"type": "text", "text": text}, image, image]})
    many = output_from({"content": [{"type": "text", "text": "x"}] * 1000})

    assert len(output.output) < HEAD_CHARS + TAIL_CHARS + 100
    assert "characters left out" in output.output
    assert [type(item) for item in output.content] == [Text, Image, Text]
    assert "936 more parts left out" in many.output
    assert output_from({}).output == "(no output)"
    assert output_from({"content": "garbage"}).output == "(no output)"


class NoServer:
    """A caller that is not there, for looking at its tools; or raises what it is given."""

    def __init__(self, name: str = "srv", raising: BaseException | None = None) -> None:
        self.name = name
        self._raising = raising or RuntimeError("nobody calls")

    async def call(
        self, tool: str, arguments: dict[str, Any], *, signal: AbortSignal, on_progress: Progress
    ) -> dict[str, Any]:
        raise self._raising


def listed(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "inputSchema": {"type": "object"}} for name in names]


def test_names_are_what_every_provider_takes_and_stay_the_same():
    names = ["get.weather", "get weather", "ü" * 80, "x" * 80, "x" * 79 + "y", "ok-1"]

    tools, left_out = make_tools(NoServer("my server"), listed(*names), {"mcp__my_server__ok-1"})
    again, _ = make_tools(NoServer("my server"), listed(*names), {"mcp__my_server__ok-1"})

    assert len(tools) == len(names)
    assert list(tools) == list(again)
    assert left_out == {}
    assert "mcp__my_server__get_weather" in tools
    assert all(len(name) <= 64 and name.isascii() for name in tools)
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in tools)
    assert {tool.remember_key({})[0] for tool in tools.values()} == {
        f"mcp:my server:{name}" for name in names
    }


@pytest.mark.parametrize(
    "schema",
    [
        None,
        [],
        "object",
        {},
        {"type": "string"},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": "string"}},
        {"type": "object", "properties": {"a": {"type": "strin"}}},
        {"type": "object", "properties": {"a": {"anyOf": {}}}},
        {"type": "object", "required": "a"},
        {"type": "object", "properties": {"a": {"enum": "x"}}},
        {"type": "object", "description": "x" * 40_000},
    ],
)
def test_a_broken_schema_leaves_out_its_tool_only(schema):
    bad = {"name": "bad", "inputSchema": schema}

    tools, left_out = make_tools(NoServer(), [bad, 5, *listed("good", "good")], ())

    assert list(tools) == ["mcp__srv__good"]
    assert set(left_out) == {"bad", "number 2", "good"}


def test_a_schema_without_end_is_no_schema():
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}

    tools, left_out = make_tools(NoServer(), [{"name": "bad", "inputSchema": schema}], ())

    assert tools == {}
    assert "no JSON schema" in left_out["bad"]


async def test_people_are_told_once_of_tools_that_are_left_out(tmp_path):
    double = Double(tmp_path, tools=[{"name": "bad"}, *listed("change", "good")])
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)
        await use(agent, "mcp__double__change")
        await until(lambda: "mcp__double__new_one" in agent.tools)

        assert len(at.notices) == 1
        assert "'double'" in at.notices[0].title
        assert "'bad' (its schema is not that of an object)" in at.notices[0].description


@pytest.mark.requirement("B167")
async def test_of_three_hundred_tools_as_many_are_there_as_a_provider_takes(tmp_path):
    double = Double(tmp_path, tools=listed(*(f"t{number}" for number in range(300))))
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)

        assert len(offered(agent)) == 256
        (notice,) = at.notices
        assert "these are more than 256" in notice.description
        assert await agent.send("say ok").settled() == Completed()


async def test_progress_is_shown(tmp_path):
    double = Double(tmp_path)
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)
        shown: list[Any] = []

        await use(agent, "mcp__double__progress", shown=shown)

        await until(lambda: shown)
        assert shown == [Text("1 of 3 halfway")]


async def test_a_server_is_told_the_roots_and_gets_neither_answers_nor_samples(tmp_path):
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(Double(tmp_path)))
        await connected(servers)

        roots = json.loads((await use(agent, "mcp__double__roots")).output)
        asked = json.loads((await use(agent, "mcp__double__ask")).output)
        sampled = json.loads((await use(agent, "mcp__double__sample")).output)

        assert [root["uri"] for root in roots["roots"]] == [tmp_path.as_uri()]
        assert asked == {"action": "decline"}
        assert "error" in sampled


async def test_a_changed_list_changes_the_tools(tmp_path):
    double = Double(tmp_path)
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)
        before = offered(agent)

        await use(agent, "mcp__double__change")

        await until(lambda: offered(agent) == before | {"mcp__double__new_one"})
        assert len(double.got("tools/list")) == 2


async def test_a_server_gets_harmless_variables_and_its_own_but_none_of_our_keys(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(Double(tmp_path), MINE="yes"))
        await connected(servers)

        environ = json.loads((await use(agent, "mcp__double__environ")).output)

        assert environ["MINE"] == "yes"
        assert environ["PATH"]
        assert "secret" not in json.dumps(environ)


@pytest.mark.requirement("B143")
async def test_two_agents_have_two_connections_each_with_its_own_state(tmp_path):
    double = Double(tmp_path)
    async with host(tmp_path) as at:
        (one, first), (two, second) = [await at.agent(stdio(double)) for _ in range(2)]
        await connected(first)
        await connected(second)

        said = [(await use(agent, "mcp__double__count")).output for agent in (one, one, two)]

        assert [text.split()[0] for text in said] == ["1", "2", "1"]
        assert len(set(double.pids)) == 2


# --- cancel ---------------------------------------------------------------------------------


@pytest.mark.requirement("B130", "B133", "R73")
async def test_a_cancel_names_the_call_on_the_wire_and_frees_it(tmp_path):
    double = Double(tmp_path)
    async with host(tmp_path) as at, anyio.create_task_group() as tasks:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)
        controller, over = AbortController(), anyio.Event()

        async def sleep() -> None:
            with pytest.raises(TurnAborted):
                await use(agent, "mcp__double__sleep", controller.signal)
            over.set()

        tasks.start_soon(sleep)
        await until(lambda: double.got("tools/call"))
        controller.abort(USER)
        with anyio.fail_after(1):
            await until(lambda: double.got("notifications/cancelled"))
        assert not over.is_set()  # the server may still say how it ended
        (asked,) = double.got("tools/call")
        (cancelled,) = double.got("notifications/cancelled")
        assert cancelled["params"]["requestId"] == asked["id"]
        with anyio.fail_after(4):
            await over.wait()
        assert (await use(agent, "mcp__double__count")).output.startswith("1 ")


@pytest.mark.requirement("B130", "B131")
async def test_what_a_cancelled_call_still_says_is_its_result(tmp_path):
    double = Double(tmp_path, on_cancel="answer")
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)
        controller = AbortController()

        async def abort() -> None:
            await until(lambda: double.got("tools/call"))
            controller.abort(USER)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort)
            output = await use(agent, "mcp__double__sleep", controller.signal)

        assert output.output == "stopped halfway"


async def test_an_abort_at_any_await_ends_the_call_and_leaves_nothing(tmp_path):
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(Double(tmp_path)))
        await connected(servers)

        runs = await abort_at_every_await(
            lambda signal: use(agent, "mcp__double__count", signal), limit_s=5
        )

        assert runs
        assert all(run.result or isinstance(run.error, TurnAborted) for run in runs)


@pytest.mark.requirement("B132", "B135")
async def test_a_cancelled_error_of_the_sdk_is_that_calls_failure():
    tools, _ = make_tools(NoServer(raising=asyncio.CancelledError()), listed("odd"), ())
    (tool,) = tools.values()
    async with rig(call(tool.name), tools=[tool], mode="bypass") as at:
        outcome = await at.agent.send("go").settled()

        (result,) = at.results
        assert (result.is_error, result.code) == (True, "TOOL_CANCELLED")
        assert type(outcome).__name__ == "Completed"


# --- death ----------------------------------------------------------------------------------


@pytest.mark.requirement("B132", "B134")
async def test_a_death_in_a_call_fails_that_call_and_nothing_else(tmp_path):
    double, other = Double(tmp_path, "double"), Double(tmp_path, "other")
    async with host(tmp_path) as at:
        one, first = await at.agent(stdio(double), stdio(other))
        two, second = await at.agent(stdio(double))
        await connected(first)
        await connected(second)
        kept = one.tools["mcp__double__count"]

        with pytest.raises(ToolError) as failed:
            await use(one, "mcp__double__die")

        assert failed.value.code == "MCP_SERVER_GONE"
        assert (await use(two, "mcp__double__count")).output.startswith("1 ")
        await until(lambda: not any("double" in name for name in offered(one)))
        assert (await use(one, "mcp__other__count")).output.startswith("1 ")
        await until(lambda: at.notices)
        (notice,) = at.notices
        assert "'double' is not available" in notice.title
        assert "exit code 7; it said: I have lost my will to live" in notice.description
        with pytest.raises(ToolError, match="is gone"):
            await kept.run({}, tool_context(one, AbortController().signal))


@pytest.mark.requirement("B139", "B140")
@pytest.mark.parametrize("stage", ["initialize", "list"])
async def test_a_server_that_dies_while_it_starts_is_named(tmp_path, stage):
    async with host(tmp_path) as at:
        agent, servers = await at.agent(
            stdio(Double(tmp_path, die_at=stage, last_words="no such database")),
            stdio(Double(tmp_path, "good")),
        )
        await connected(servers)

        assert {name.split("__")[1] for name in offered(agent)} == {"good"}
        (notice,) = at.notices
        assert "'double'" in notice.title
        assert "exit code 3; it said: no such database" in notice.description
        assert "Look at its command" in notice.description


@pytest.mark.requirement("B139", "B140", "B099")
@pytest.mark.parametrize("stage", ["initialize", "list"])
async def test_a_server_that_says_nothing_is_given_up_and_ended(tmp_path, stage):
    async with host(tmp_path) as warm:
        await connected((await warm.agent(stdio(Double(tmp_path, "warm"))))[1])
    double = Double(tmp_path, hang_at=stage)
    async with host(tmp_path, connect_s=1.0) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)

        (notice,) = at.notices
        assert "not ready within 1 s" in notice.description
        assert not offered(agent)
        await until(lambda: not double.alive)


@pytest.mark.requirement("B139", "B140")
async def test_a_command_that_does_not_exist_is_named(tmp_path):
    async with host(tmp_path) as at:
        _agent, servers = await at.agent(StdioServer("typo", "no-such-command-anywhere"))
        await connected(servers)

        (notice,) = at.notices
        assert "'typo'" in notice.title
        assert "could not be started" in notice.description
        assert "'no-such-command-anywhere'" in notice.description


async def test_lines_that_are_no_messages_are_skipped_and_said_once(tmp_path):
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(Double(tmp_path, noise=5)))
        await connected(servers)

        assert (await use(agent, "mcp__double__count")).output.startswith("1 ")
        (notice,) = at.notices
        assert "not MCP messages" in notice.description


async def test_a_program_that_only_talks_is_given_up(tmp_path):
    async with host(tmp_path) as at:
        agent, servers = await at.agent(StdioServer("chatty", "yes"))
        await connected(servers)

        assert not offered(agent)
        assert "not MCP messages" in at.notices[-1].description


@pytest.mark.usefixtures("every_record")
async def test_a_flood_on_stderr_holds_nothing_up_and_fills_no_log(tmp_path):
    with capture_logs() as logs:
        async with host(tmp_path) as at:
            agent, servers = await at.agent(stdio(Double(tmp_path, floods_stderr=True)))
            await connected(servers)

            assert (await use(agent, "mcp__double__count")).output.startswith("1 ")
    said = [entry["text"] for entry in logs if entry["event"] == "mcp_server_said"]
    assert 0 < len("".join(said)) <= 2 * 64 * 1024
    assert at.notices == []


# --- the end --------------------------------------------------------------------------------


@pytest.mark.requirement("B129")
@pytest.mark.parametrize("order", tuple(itertools.permutations(range(3))))
async def test_servers_end_in_any_order_without_a_word(tmp_path, order):
    doubles = [Double(tmp_path, f"s{number}") for number in range(3)]
    all_of_them = [stdio(double) for double in doubles]
    with capture_logs() as logs:
        async with host(tmp_path) as at:
            _agent, servers = await at.agent(*all_of_them)
            await connected(servers)
            left = dict(enumerate(all_of_them))
            for number in order:
                del left[number]
                servers.use(tuple(left.values()))
                await servers.ended()
                assert not doubles[number].alive
    assert at.notices == []
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []


@pytest.mark.requirement("B129", "B134")
@pytest.mark.parametrize("stage", ["start", "initialize", "list", "call", "ready"])
async def test_an_agent_that_is_disposed_at_any_stage_takes_its_servers_along(tmp_path, stage):
    double = Double(tmp_path, hang_at=stage, has_child=True)
    reached = {"initialize": "initialize", "list": "tools/list", "call": "tools/call"}
    async with host(tmp_path) as at, anyio.create_task_group() as tasks:
        agent, servers = await at.agent(stdio(double))
        if stage in ("call", "ready"):
            await connected(servers)
        if stage == "call":

            async def hang() -> None:
                with pytest.raises(ToolError, match="ended before it answered"):
                    await use(agent, "mcp__double__count")

            tasks.start_soon(hang)
        if stage in reached:
            await until(lambda: double.got(reached[stage]))
        await agent.dispose()
        with anyio.fail_after(6):
            await servers.ended()

        assert double.alive == []
        assert at.notices == []


@pytest.mark.requirement("B137", "B096")
async def test_a_stubborn_server_and_its_child_are_killed(tmp_path):
    double = Double(tmp_path, stays=True, has_child=True)
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)
        assert len(double.alive) == 2

        await agent.dispose()
        with anyio.fail_after(6):
            await servers.ended()

        assert double.alive == []


async def test_a_server_that_does_not_leave_by_itself_is_told_to_before_it_is_killed(tmp_path):
    double = Double(tmp_path, lingers_s=100, notes_term=True)
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)

        await agent.dispose()
        await servers.ended()

        said = [line["event"] for line in double.lines if "event" in line]
        assert said == ["end of input", "term"]


@pytest.mark.requirement("B092")
async def test_fifty_sessions_leave_no_process(tmp_path):
    doubles = [Double(tmp_path, f"s{number}", has_child=True) for number in range(50)]
    async with host(tmp_path) as at:
        for start in range(0, len(doubles), 10):
            batch = doubles[start : start + 10]
            opened = [await at.agent(stdio(double)) for double in batch]
            for number, (agent, servers) in enumerate(opened):
                if number % 2:
                    await connected(servers)
                agent.dispose()
            for agent, servers in opened:
                await agent.dispose()
                await servers.ended()
            assert [pid for double in batch for pid in double.alive] == []
    assert sum(len(double.pids) for double in doubles) >= 50


async def test_leaving_the_runtime_ends_every_server(tmp_path):
    double = Double(tmp_path, has_child=True)
    async with host(tmp_path) as at:
        _agent, servers = await at.agent(stdio(double))
        await connected(servers)
        assert double.alive
    assert double.alive == []


# --- another list ---------------------------------------------------------------------------


async def test_a_new_list_keeps_equal_servers_and_replaces_the_others(tmp_path):
    kept, changed, dropped = (Double(tmp_path, name) for name in ("kept", "changed", "dropped"))
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(kept), stdio(changed), stdio(dropped))
        await connected(servers)
        await use(agent, "mcp__kept__count")

        servers.use((stdio(kept), stdio(changed, NEW="1")))
        await servers.ended()
        await connected(servers)

        assert {name.split("__")[1] for name in offered(agent)} == {"kept", "changed"}
        assert (await use(agent, "mcp__kept__count")).output.startswith("2 ")
        assert [len(set(double.pids)) for double in (kept, changed, dropped)] == [1, 2, 1]
        assert dropped.alive == []
        assert at.notices == []


@pytest.mark.requirement("B099")
async def test_a_server_that_is_over_is_started_again_by_the_same_list(tmp_path):
    double = Double(tmp_path)
    async with host(tmp_path) as at:
        agent, servers = await at.agent(stdio(double))
        await connected(servers)
        with pytest.raises(ToolError):
            await use(agent, "mcp__double__die")
        await until(lambda: not offered(agent))

        servers.use((stdio(double),))
        await connected(servers)

        assert (await use(agent, "mcp__double__count")).output.startswith("1 ")


# --- the first prompt -----------------------------------------------------------------------


@pytest.mark.requirement("B141")
async def test_the_first_prompt_has_the_tools_of_servers_that_get_ready_in_time(tmp_path):
    async with host(tmp_path) as at:
        agent, _servers = await at.agent(stdio(Double(tmp_path, delay_s=0.5)))

        await agent.send("say hi").settled()

        header = next(
            e.data for e in agent.session.events if type(e.data).__name__ == "RequestHeader"
        )
        assert "mcp__double__echo" in header.tools
        assert "not available" not in header.system


@pytest.mark.requirement("B140", "B141")
async def test_a_slow_server_is_not_waited_for_and_the_model_knows(tmp_path):
    async with host(tmp_path, wait_s=0.1) as at:
        agent, servers = await at.agent(stdio(Double(tmp_path, delay_s=1)))

        await agent.send("say hi").settled()

        headers = [e.data for e in agent.session.events if type(e.data).__name__ == "RequestHeader"]
        assert "MCP servers are not available now" in headers[0].system
        assert "double" in headers[0].system
        (notice,) = at.notices
        assert "still connecting" in notice.title
        await connected(servers)
        await agent.send("say hi").settled()
        headers = [e.data for e in agent.session.events if type(e.data).__name__ == "RequestHeader"]
        assert "mcp__double__echo" in headers[-1].tools
        assert "not available" not in headers[-1].system


@pytest.mark.requirement("B139")
async def test_a_cancel_ends_the_wait_for_servers(tmp_path):
    double = Double(tmp_path, hang_at="initialize")
    async with host(tmp_path) as at:
        agent, _servers = await at.agent(stdio(double))
        prompt = agent.send("say hi")
        await until(lambda: double.got("initialize"))

        agent.cancel()
        with anyio.fail_after(1):
            outcome = await prompt.settled()

        assert type(outcome).__name__ == "Aborted"
        with anyio.fail_after(1):
            await agent.send("say hi").settled()  # the wait is over for good


async def test_assembling_outside_of_a_turn_names_the_missing(tmp_path):
    async with host(tmp_path) as at:
        agent, servers = await at.agent(StdioServer("gone", "no-such-command"))
        await connected(servers)

        assembly = await agent.system_prompt.assemble(AssembleContext(agent), (), agent.hooks)

        assert "gone" in assembly.sections["mcp"]


# --- servers made with the SDK --------------------------------------------------------------


@asynccontextmanager
async def sdk_process(transport: str) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    process = subprocess.Popen(  # noqa: ASYNC220
        sdk_server(transport, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with anyio.fail_after(LIMIT_S):
            while True:
                try:
                    stream = await anyio.connect_tcp("127.0.0.1", port)
                except OSError:
                    await anyio.sleep(0.05)
                else:
                    await stream.aclose()
                    break
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


async def test_an_sdk_server_on_stdio_works_and_stops_a_cancelled_call(tmp_path):
    command, *args = sdk_server("stdio")
    note = tmp_path / "note"
    async with host(tmp_path) as at:
        agent, servers = await at.agent(StdioServer("sdk", command, tuple(args)))
        await connected(servers)
        assert (await use(agent, "mcp__sdk__add", a=2, b=3)).output == "5"

        await cancel_the_wait(agent, note)

        assert (await use(agent, "mcp__sdk__add", a=2, b=3)).output == "5"


async def cancel_the_wait(agent: Agent, note: Path) -> None:
    controller = AbortController()

    async def wait() -> None:
        with pytest.raises(TurnAborted):
            await use(agent, "mcp__sdk__wait", controller.signal, path=str(note))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await until(note.exists)
        controller.abort(USER)
        with anyio.fail_after(1):
            await until(lambda: note.read_text() == "cancelled")


@pytest.mark.requirement("ACP-057", "ACP-058", "B130", "B132")
@pytest.mark.parametrize(
    ("transport", "kind", "path"),
    [("streamable-http", HttpServer, "/mcp"), ("sse", SseServer, "/sse")],
)
async def test_a_server_at_an_address_works_is_cancelled_and_dies(tmp_path, transport, kind, path):
    with capture_logs() as logs:
        async with sdk_process(transport) as (address, process), host(tmp_path) as at:
            agent, servers = await at.agent(kind("sdk", address + path))
            await connected(servers)
            assert at.notices == []
            assert (await use(agent, "mcp__sdk__add", a=2, b=3)).output == "5"
            await cancel_the_wait(agent, tmp_path / "note")
            assert (await use(agent, "mcp__sdk__add", a=2, b=3)).output == "5"

            async def wait() -> None:
                with pytest.raises(ToolError) as failed:
                    await use(agent, "mcp__sdk__wait", path=str(tmp_path / "second"))
                assert failed.value.code == "MCP_SERVER_GONE"

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await until((tmp_path / "second").exists)
                process.kill()
            with pytest.raises((ToolError, KeyError)):
                await use(agent, "mcp__sdk__add", a=2, b=3)
            await until(lambda: not offered(agent))
            assert "'sdk' is not available" in at.notices[-1].title
            assert (
                f"Look at its address, {address}{path}".replace(
                    f":{address.rpartition(':')[2]}", ""
                )
                in at.notices[-1].description
            )
    assert [entry for entry in logs if entry["log_level"] == "error"] == []


@pytest.mark.requirement("ACP-057")
async def test_leaving_a_server_at_an_address_is_quick_and_without_a_word(tmp_path):
    async with sdk_process("streamable-http") as (address, _process), host(tmp_path) as at:
        agent, servers = await at.agent(HttpServer("sdk", f"{address}/mcp"))
        await connected(servers)

        await agent.dispose()
        with anyio.fail_after(3):
            await servers.ended()

        assert at.notices == []


@pytest.mark.requirement("B139", "B140")
@pytest.mark.parametrize("kind", [HttpServer, SseServer])
async def test_an_address_that_never_answers_is_given_up_and_named(tmp_path, kind):
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, host(tmp_path, connect_s=3.0) as at, anyio.create_task_group() as tasks:
        port = listener.extra_attributes[anyio.abc.SocketAttribute.local_port]()

        async def never_answer(stream: anyio.abc.SocketStream) -> None:
            async with stream:
                await anyio.sleep_forever()

        tasks.start_soon(listener.serve, never_answer)
        agent, servers = await at.agent(kind("mute", f"http://127.0.0.1:{port}/mcp?key=secret"))
        await connected(servers)

        (notice,) = at.notices
        assert "'mute'" in notice.title
        assert "not ready within 3 s" in notice.description
        assert "secret" not in notice.description
        assert not offered(agent)
        tasks.cancel_scope.cancel()


@pytest.mark.requirement("B139", "B140")
@pytest.mark.parametrize("kind", [HttpServer, SseServer])
async def test_an_address_where_nobody_is_is_named(tmp_path, kind):
    async with host(tmp_path) as at:
        _agent, servers = await at.agent(kind("nobody", f"http://127.0.0.1:{free_port()}/mcp"))
        await connected(servers)

        (notice,) = at.notices
        assert "'nobody' is not available" in notice.title
        assert "whether it is running" in notice.description


def test_the_double_is_seen_to_be_alive():
    process = subprocess.Popen(["sleep", "100"])
    assert is_alive(process.pid)
    process.kill()
    process.wait()
    assert not is_alive(process.pid)
