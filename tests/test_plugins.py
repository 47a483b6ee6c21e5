from __future__ import annotations

import sqlite3
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import Text
from agent_core.errors import AgentError
from agent_core.events import Aborted, Completed, ContextMessage, StepEnd, TurnEnd
from agent_core.plugins import PluginError, load_plugins
from agent_core.runtime import AgentRuntime
from agent_core.testing import abort_at_every_await, rehearsal_agent, tool_context
from agent_core.tools.read import Read
from agent_core.tools.tool import Tool, ToolContext, ToolOutput

ROOT = Path(__file__).parent.parent
ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


async def test_the_policy_ends_a_turn_between_two_steps(tmp_path: Path) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:
        load_plugins(runtime_of(agent), ["examples.policy:set_up"])

        prompt = agent.send("list then list then list then list then list")
        with anyio.fail_after(5):
            outcome = await prompt.settled()

        ends = [event.data for event in agent.session.events if isinstance(event.data, StepEnd)]
        assert (outcome, len(ends)) == (Completed(), 3)


async def test_notes_that_fit_reach_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notes.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("create table notes (word, text)")
        connection.execute("insert into notes values ('tea', 'Tea is at four.')")
    connection.close()
    monkeypatch.setenv("NOTES", str(path))
    async with rehearsal_agent(str(tmp_path)) as agent:
        load_plugins(runtime_of(agent), ["examples.database:set_up"])

        with anyio.fail_after(5):
            await agent.send("say tea").settled()

        added = [e.data for e in agent.session.events if isinstance(e.data, ContextMessage)]
        assert [message.content for message in added] == [(Text("Tea is at four."),)]


async def test_a_query_that_never_ends_is_ended_by_the_signal(tmp_path: Path) -> None:
    from examples.database import query

    controller = AbortController()

    async def run() -> None:
        with pytest.raises(TurnAborted):
            await query(str(tmp_path / "db"), ENDLESS, (), controller.signal)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            controller.abort(USER)


async def test_a_cancel_reaches_the_database_through_the_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import database

    monkeypatch.setattr(database, "LOOK_UP", f"select ({ENDLESS}) where ? is not null")
    monkeypatch.setenv("NOTES", str(tmp_path / "db"))
    async with rehearsal_agent(str(tmp_path)) as agent:
        load_plugins(runtime_of(agent), ["examples.database:set_up"])
        prompt = agent.send("say tea")
        await anyio.wait_all_tasks_blocked()

        agent.cancel()
        with anyio.fail_after(5):
            outcome = await prompt.settled()

        assert outcome == Aborted()
        assert [type(event.data) for event in agent.session.events][-1] is TurnEnd


async def test_an_installed_plugin_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed_plugin.py").write_text(
        "def set_up(runtime):\n    runtime.found = True\n"
    )
    info = tmp_path / "installed_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[acp_agent.plugins]\nx = installed_plugin:set_up\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with rehearsal_agent(str(tmp_path)) as agent:
        load_plugins(runtime_of(agent), [])

        assert runtime_of(agent).found  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["no_such_module:set_up", "examples.policy:nothing", "policy"])
async def test_a_plugin_that_cannot_be_loaded_is_named(name: str, tmp_path: Path) -> None:
    async with rehearsal_agent(str(tmp_path)) as agent:
        with pytest.raises(PluginError, match=name):
            load_plugins(runtime_of(agent), [name])


def test_what_a_plugin_raises_is_an_agent_error() -> None:
    assert issubclass(PluginError, AgentError)


async def test_a_tool_that_a_plugin_adds_is_offered_to_the_next_agent(tmp_path: Path) -> None:
    class Shout(Read):
        name = "shout"

    async with rehearsal_agent(str(tmp_path)) as agent:
        runtime = runtime_of(agent)
        runtime.add_tool(Shout())
        later = await runtime.create(str(tmp_path))

        assert "shout" in later.tools
        assert "shout" not in agent.tools


async def test_a_tool_is_aborted_at_each_of_its_awaits(tmp_path: Path) -> None:
    class Sleeps(Tool):
        async def run(self, args: object, context: ToolContext) -> ToolOutput:
            for _ in range(3):
                async with context.signal.scope():
                    await anyio.lowlevel.checkpoint()
            return ToolOutput("done")

    async with rehearsal_agent(str(tmp_path)) as agent:
        runs = await abort_at_every_await(
            lambda signal: Sleeps().run(None, tool_context(agent, signal))
        )

    assert [run.at_await for run in runs] == [1, 2, 3]
    assert all(isinstance(run.error, TurnAborted) for run in runs)


async def test_a_tool_that_ignores_its_signal_is_found_out(tmp_path: Path) -> None:
    class Deaf(Tool):
        async def run(self, args: object, context: ToolContext) -> ToolOutput:
            await anyio.sleep(3600)
            return ToolOutput("done")

    async with rehearsal_agent(str(tmp_path)) as agent:
        with pytest.raises(TimeoutError):
            await abort_at_every_await(
                lambda signal: Deaf().run(None, tool_context(agent, signal)), limit_s=0.01
            )


async def test_a_tool_that_leaves_a_task_behind_is_found_out(tmp_path: Path) -> None:
    import asyncio

    left: list[asyncio.Task[None]] = []

    class Leaks(Tool):
        async def run(self, args: object, context: ToolContext) -> ToolOutput:
            left.append(asyncio.ensure_future(asyncio.sleep(3600)))
            async with context.signal.scope():
                await anyio.lowlevel.checkpoint()
            return ToolOutput("done")

    async with rehearsal_agent(str(tmp_path)) as agent:
        with pytest.raises(AssertionError, match="behind"):
            await abort_at_every_await(
                lambda signal: Leaks().run(None, tool_context(agent, signal))
            )
    left[0].cancel()


def runtime_of(agent: object) -> AgentRuntime:
    runtime = agent._runtime  # type: ignore[attr-defined]
    assert isinstance(runtime, AgentRuntime)
    return runtime
