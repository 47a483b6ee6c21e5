"""One look into a project for everybody: when it begins, for whom it counts, and what it costs."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from core_rig import Rig, ScriptedModel, call, runtime_for, tool

import agent_core.project_files
from agent_core.agent_files import AgentFiles
from agent_core.cancellation import TurnAborted
from agent_core.content import Text
from agent_core.events import Completed
from agent_core.knowledge import Knowledge
from agent_core.loop import Allow
from agent_core.project_files import Look, ProjectFiles
from agent_core.testing import abort_at_every_await
from agent_core.tools.delegate import Delegate
from agent_core.tools.roots import Roots
from agent_core.tools.tool import ToolContext, ToolOutput

SKILL = "---\nname: release\ndescription: Makes a release\n---\nHow to.\n"
REVIEWER = "---\nname: reviewer\ndescription: Reads a change\n---\nYou read.\n"


class Looks:
    """Counts the looks; `begun` is set in the thread when one begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self._look = agent_core.project_files._look
        monkeypatch.setattr(agent_core.project_files, "_look", self)

    def __call__(self, user_folder: str, roots: Roots) -> Look:
        self.n += 1
        self.begun.set()
        assert self.go_on.wait(5)
        return self._look(user_folder, roots)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the project's files, as they are opened."""
    names: list[str] = []
    real_open = os.open

    def noting(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(f"{tmp_path}/"):
            names.append(os.path.basename(path))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", noting)
    return names


@asynccontextmanager
async def working(cwd: Path, *script: Any, tools: Iterable[Any] = ()) -> AsyncGenerator[Rig]:
    model = ScriptedModel(script)
    with anyio.fail_after(5):
        async with runtime_for(model, (Delegate(), *tools)) as runtime:
            runtime.project_files.listen(runtime.hooks)
            Knowledge().listen(runtime.hooks)
            AgentFiles().use(runtime)
            agent = await runtime.create(str(cwd))
            yield Rig(runtime, agent, model, [])


def filled(project: Path) -> Path:
    """Give a project a file of each kind."""
    (project / "AGENTS.md").write_text("use tabs")
    for path, text in (("skills/release/SKILL.md", SKILL), ("agents/reviewer.md", REVIEWER)):
        (project / ".agents" / path).parent.mkdir(parents=True)
        (project / ".agents" / path).write_text(text)
    return project


async def told(rig: Rig, prompt: str = "go") -> str:
    """Run a turn; return all that its last call told the model of files."""
    assert await rig.agent.send(prompt).settled() == Completed()
    request = rig.model.requests[-1]
    return "\n".join((request.system, *(spec.description for spec in request.tools)))


def tells_all(text: str) -> bool:
    return all(word in text for word in ("use tabs", "release: Makes", "reviewer: Reads"))


async def test_a_turn_has_one_look_whatever_its_steps_and_whoever_reads(
    tmp_path: Path, looks: Looks
) -> None:
    async def ok(_context: ToolContext) -> ToolOutput:
        return ToolOutput("ok")

    async with working(filled(tmp_path), call("ok"), tools=[tool("ok", ok)]) as rig:
        first = await told(rig)
        after_two_steps = looks.n
        second = await told(rig)

    assert tells_all(first)
    assert tells_all(second)
    assert (after_two_steps, looks.n) == (1, 2)


async def test_what_has_not_changed_is_opened_once(tmp_path: Path, opened: list[str]) -> None:
    async with working(filled(tmp_path)) as rig:
        await told(rig)
        first = sorted(opened)
        await told(rig)
        unchanged = sorted(opened)
        (tmp_path / ".agents" / "agents" / "reviewer.md").write_text(REVIEWER + "Slowly.")
        await told(rig)

    assert first == ["AGENTS.md", "SKILL.md", "reviewer.md"]
    assert unchanged == first
    assert sorted(opened) == [*first, "reviewer.md"]  # and nothing of the other kinds


async def test_without_files_nothing_is_read_in_any_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_args: object) -> None:
        raise AssertionError("there is nothing to read")

    monkeypatch.setattr(anyio.to_thread, "run_sync", fail)

    async with working(tmp_path) as rig:
        assert "nstructions" not in await told(rig)


@pytest.mark.race
async def test_the_look_begins_when_the_prompt_comes_and_not_when_it_is_needed(
    tmp_path: Path, looks: Looks
) -> None:
    async def wait_for_the_look(*args: Any) -> Allow:
        await anyio.to_thread.run_sync(partial(looks.begun.wait, 5))
        allowed: Allow = await args[-1]()
        return allowed

    async with working(filled(tmp_path)) as rig:
        rig.agent.hooks.on("agent/prompt-submit", wait_for_the_look)
        prompt = rig.agent.send("go")
        # The driver has not run yet, so nobody can have needed it.
        has_begun = looks.begun.wait(5)
        await prompt.settled()

    assert has_begun
    assert looks.n == 1


async def test_a_prompt_behind_another_one_sees_what_that_one_changed(
    tmp_path: Path, looks: Looks
) -> None:
    async def change(_context: ToolContext) -> ToolOutput:
        (tmp_path / "AGENTS.md").write_text("use spaces, and no tabs any more")
        return ToolOutput("ok")

    async with working(filled(tmp_path), call("change"), tools=[tool("change", change)]) as rig:
        first, second = rig.agent.send("first"), rig.agent.send("second")
        await first.settled()
        await second.settled()
        during, after = rig.model.requests[1].system, rig.model.requests[2].system

    assert "use tabs" in during
    assert "use spaces" in after
    assert looks.n == 2


async def test_a_look_for_a_prompt_that_was_taken_back_does_not_count_for_the_next(
    tmp_path: Path, looks: Looks
) -> None:
    async with working(filled(tmp_path)) as rig:
        rig.agent.withdraw(rig.agent.send("never mind"))
        assert await anyio.to_thread.run_sync(partial(looks.begun.wait, 5))
        (tmp_path / "AGENTS.md").write_text("use spaces, and no tabs any more")
        system = await told(rig)

    assert "use spaces" in system


async def test_a_new_look_in_a_turn_sees_what_is_new_and_leaves_the_turns_own(
    tmp_path: Path,
) -> None:
    seen: list[Look] = []

    async def change(context: ToolContext) -> ToolOutput:
        files, agent = rig.runtime.project_files, rig.agent
        seen.append(await files.look(agent, context.signal))
        (tmp_path / "AGENTS.md").unlink()
        seen.append(await files.look_again(agent, context.signal))
        seen.append(await files.look(agent, context.signal))
        return ToolOutput("ok")

    async with working(filled(tmp_path), call("change"), tools=[tool("change", change)]) as rig:
        await told(rig)

    before, again, after = seen
    assert len(before.instructions) == 1
    assert again.instructions == ()
    assert after is before


@pytest.mark.race
async def test_who_gives_up_waiting_for_a_look_does_not_take_it_from_the_others(
    tmp_path: Path, looks: Looks
) -> None:
    looks.go_on.clear()

    async with working(filled(tmp_path)) as rig:
        prompt = rig.agent.send("go")
        assert looks.begun.wait(5)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rig.runtime.project_files.look, rig.agent)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
        looks.go_on.set()
        outcome = await prompt.settled()

    assert scope.cancelled_caught
    assert outcome == Completed()
    assert tells_all(rig.model.requests[0].system + str(rig.model.requests[0].tools))


async def test_wherever_a_cancel_meets_a_look_the_turns_work_stops_there(tmp_path: Path) -> None:
    async with working(filled(tmp_path)) as rig:
        files = rig.runtime.project_files
        runs = await abort_at_every_await(lambda signal: files.look_again(rig.agent, signal))

    assert runs
    assert {type(run.error) for run in runs} == {TurnAborted}


async def test_two_looks_are_equal_until_something_changes(tmp_path: Path) -> None:
    async with working(filled(tmp_path)) as rig:
        files = ProjectFiles()
        looks = [await files.look(rig.agent), await files.look(rig.agent)]
        os.utime(tmp_path / "AGENTS.md", ns=(1, 1))
        looks.append(await files.look(rig.agent))
        (tmp_path / "AGENTS.md").rename(tmp_path / "old.md")
        looks.append(await files.look(rig.agent))

    assert looks[0] == looks[1]
    assert len(set(looks)) == 3
    assert {look.skills for look in looks} == {looks[0].skills}


async def test_a_subagent_is_told_what_its_parent_read_without_another_look_at_the_files(
    tmp_path: Path, opened: list[str]
) -> None:
    async with working(filled(tmp_path)) as rig:
        await told(rig)
        before = list(opened)
        child = await rig.runtime.create_child(rig.agent)
        await child.send("help").settled()
        asked = rig.model.requests[-1].messages[-1].content

    assert asked == (Text("help"),)
    assert "use tabs" in rig.model.requests[-1].system
    assert opened == before
