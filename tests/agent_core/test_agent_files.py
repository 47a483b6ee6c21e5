"""Subagents described by files: which are found, what a model is told, and what they become."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import say
from structlog.testing import capture_logs

from agent_core.agent import Agent
from agent_core.agent_files import MAX_AGENTS, AgentFile, AgentFiles
from agent_core.cancellation import AbortController, TurnAborted
from agent_core.events import RequestHeader, ToolResult
from agent_core.models.adapter import Finish, ModelEvent, ModelInfo, ModelRequest, ToolCallDelta
from agent_core.models.choice import Models
from agent_core.project_text import split_front_matter
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.testing import abort_at_every_await, rehearsal_agent
from agent_core.tools.delegate import Delegate
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.read import Read
from agent_core.tools.write import Write

REVIEWER = """\
---
name: reviewer
description: Reads a change with fresh eyes
tools: read, list
---
You are a careful reviewer.
"""


def write(place: Path, name: str, text: str = REVIEWER) -> Path:
    path = place / ".agents" / "agents" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


async def found(cwd: Path, user: str = "/no/such") -> dict[str, AgentFile]:
    with anyio.fail_after(5):
        async with rehearsal_agent(str(cwd), user_folder=user) as agent:
            return dict(await AgentFiles().known(agent))


async def test_a_file_says_who_there_is(tmp_path: Path) -> None:
    path = write(tmp_path, "r.md")

    assert await found(tmp_path) == {
        "reviewer": AgentFile(
            "reviewer",
            str(path),
            "Reads a change with fresh eyes",
            "You are a careful reviewer.",
            frozenset({"read", "list"}),
        )
    }


async def test_without_a_name_it_has_that_of_its_file_and_without_tools_all_of_them(
    tmp_path: Path,
) -> None:
    write(tmp_path, "tester.md", "---\ndescription: Tests\nmodel: inherit\n---\nYou test.")

    tester = (await found(tmp_path))["tester"]

    assert (tester.tool_names, tester.model) == (None, None)


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ("tools: read", {"read"}),
        ("tools: read, list ,edit", {"read", "list", "edit"}),
        ("tools: [read, 'list']", {"read", "list"}),
        ("tools: []", set()),
        ("tools:", set()),
        ('tools:\n  - read\n  - "list"', {"read", "list"}),
        ("tools:\n- read # for now", {"read # for now"}),
    ],
)
async def test_tools_are_a_list_in_every_way_that_people_write_one(
    tmp_path: Path, tools: str, names: set[str]
) -> None:
    write(tmp_path, "a.md", f"---\ndescription: D\n{tools}\nmodel: m\n---\nYou are.")

    assert (await found(tmp_path))["a"].tool_names == names


@pytest.mark.parametrize(
    "text",
    [
        "---\ndescription: D\ntools: &all\n---\nYou are.",
        "---\ndescription: D\ntools:\n  read: yes\n---\nYou are.",
        "---\ndescription: D\n---\n",
        "You are.",
        "---\nname: two words\ndescription: D\n---\nYou are.",
        "---\ndescription: D\nYou are.",
        "---\ndescription: D\n---\n" + "x" * 70_000,
    ],
)
async def test_what_is_no_description_is_skipped_with_a_line_in_the_log(
    tmp_path: Path, text: str
) -> None:
    write(tmp_path, "bad.md", text)
    write(tmp_path, "good.md")

    with capture_logs() as records:
        names = list(await found(tmp_path))

    assert names == ["reviewer"]
    (record,) = [each for each in records if each["event"] == "agent_file_skipped"]
    assert record["path"].endswith("bad.md")


async def test_the_nearer_wins_and_the_projects_over_the_persons_own(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    inner, own = tmp_path / "in", tmp_path / "own"
    inner.mkdir()
    text = "---\ndescription: {}\n---\nYou are."
    write(tmp_path, "a.md", text.format("outer"))
    write(inner, "a.md", text.format("inner"))
    for name in ("a.md", "b.md"):
        (own / "agents").mkdir(parents=True, exist_ok=True)
        (own / "agents" / name).write_text(text.format("own"))

    described = {name: each.description for name, each in (await found(inner, str(own))).items()}

    assert described == {"a": "inner", "b": "own"}


async def test_a_link_out_of_the_project_is_not_followed(tmp_path: Path) -> None:
    elsewhere, project = tmp_path / "elsewhere.md", tmp_path / "project"
    elsewhere.write_text(REVIEWER)
    folder = project / ".agents" / "agents"
    folder.mkdir(parents=True)
    (folder / "r.md").symlink_to(elsewhere)

    assert await found(project) == {}


async def test_of_very_many_the_first_are_taken(tmp_path: Path) -> None:
    for number in range(MAX_AGENTS + 3):
        write(tmp_path, f"a{number:03}.md", "---\ndescription: D\n---\nYou are.")

    assert len(await found(tmp_path)) == MAX_AGENTS


def test_front_matter_without_lists_is_read_as_before() -> None:
    assert split_front_matter("---\nname: n\ntools: [a]\nother:\n - x\n---\nb") == (
        {"name": "n"},
        "b",
    )


# --- in use ----------------------------------------------------------------------------------


class Asks:
    """A model that delegates once to `agent`, and otherwise says ``done``."""

    def __init__(self, agent: str, name: str = "asks") -> None:
        self.info = ModelInfo(name)
        self.agent = agent
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.requests.append(request)
        if len(self.requests) == 1 and self.agent:
            arguments = json.dumps({"task": "look", "agent": self.agent})
            yield ToolCallDelta(0, "delegate", arguments)
            yield Finish("tool_calls")
            return
        async with aclosing(say("done")(request)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def agent_with(
    cwd: Path, model: Asks, other: Asks | None = None
) -> AsyncIterator[tuple[Agent, list[Agent]]]:
    models = Models(model) if other is None else Models(model, other)
    with anyio.fail_after(5):
        async with AgentRuntime(
            MemoryStore(),
            model=models,
            tools=(Delegate(), Read(), Write()),
            files=LocalFiles(),
            commands=LocalCommands(),
            mode="bypass",
        ) as runtime:
            AgentFiles().use(runtime)
            agent = await runtime.create(str(cwd))
            made: list[Agent] = []
            runtime.hooks.on("agent/created", made.append)
            yield agent, made


def told_of_delegate(request: ModelRequest) -> str:
    return next(spec.description for spec in request.tools if spec.name == "delegate")


def results_of(agent: Agent) -> list[ToolResult]:
    return [e.data for e in agent.session.events if isinstance(e.data, ToolResult)]


async def test_the_model_is_told_of_them_and_the_one_it_takes_is_who_the_file_says(
    tmp_path: Path,
) -> None:
    write(tmp_path, "r.md")
    model = Asks("reviewer")
    async with agent_with(tmp_path, model) as (agent, made):
        await agent.send("go").settled()

        told = told_of_delegate(model.requests[0])
        assert told.endswith(
            "There are, as `agent`:\n- spawn: knows only what you tell it\n"
            "- fork: knows this conversation\n- reviewer: Reads a change with fresh eyes"
        )
        (child,) = made
        assert set(child.tools) == {"read"}
        assert child.delegation is not None
        assert child.delegation.name == "reviewer"
        (header,) = (e.data for e in child.session.events if isinstance(e.data, RequestHeader))
        assert "You are a careful reviewer." in header.system
        assert results_of(agent)[0].output == "done"


async def test_a_name_that_nobody_has_is_refused_with_those_there_are(tmp_path: Path) -> None:
    write(tmp_path, "r.md")
    async with agent_with(tmp_path, Asks("nobody")) as (agent, made):
        await agent.send("go").settled()

        (result,) = results_of(agent)
        assert result.code == "REFUSED"
        assert "spawn, fork, reviewer" in result.output
        assert made == []


async def test_its_model_is_the_one_of_its_file_and_one_that_is_not_there_is_refused(
    tmp_path: Path,
) -> None:
    head = "---\ndescription: D\nmodel: {}\n---\nYou are."
    write(tmp_path, "a.md", head.format("small"))
    write(tmp_path, "b.md", head.format("none"))
    for name, is_there in (("a", True), ("b", False)):
        small = Asks("", "small")
        async with agent_with(tmp_path, Asks(name), small) as (agent, _made):
            await agent.send("go").settled()

            (result,) = results_of(agent)
            assert len(small.requests) == is_there
            assert result.code == (None if is_there else "REFUSED")


async def test_a_file_that_changes_holds_from_the_next_turn_on(tmp_path: Path) -> None:
    model = Asks("")
    path = write(tmp_path, "r.md")
    async with agent_with(tmp_path, model) as (agent, _made):
        await agent.send("one").settled()
        path.write_text(REVIEWER.replace("fresh eyes", "tired eyes"))
        os.utime(path, ns=(1, 1))
        await agent.send("two").settled()

        assert "fresh eyes" in told_of_delegate(model.requests[0])
        assert "tired eyes" in told_of_delegate(model.requests[1])


async def test_what_is_said_of_them_stays_the_same_for_a_turn(tmp_path: Path) -> None:
    model = Asks("spawn")
    path = write(tmp_path, "r.md")
    async with agent_with(tmp_path, model) as (agent, _made):
        agent._runtime.hooks.on("tools/result", lambda *_args: path.unlink())
        await agent.send("go").settled()

        assert told_of_delegate(model.requests[0]) == told_of_delegate(model.requests[-1])


@pytest.mark.race
async def test_a_look_that_is_aborted_is_not_kept(tmp_path: Path) -> None:
    write(tmp_path, "r.md")
    async with rehearsal_agent(str(tmp_path)) as agent:

        async def look(signal: Any) -> object:
            return await AgentFiles().known(agent, signal)

        runs = await abort_at_every_await(look)
        controller = AbortController()
        controller.abort("before")
        with pytest.raises(TurnAborted):
            await look(controller.signal)

    assert runs
    assert all(isinstance(run.error, TurnAborted) for run in runs)
