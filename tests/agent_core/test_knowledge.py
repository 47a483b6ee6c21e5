"""What the model is told of AGENTS.md files and skills, and how a project is kept in its bounds."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import Held, Rig, ScriptedModel, call, runtime_for, tool
from structlog.testing import capture_logs

from agent_core.cancellation import AbortController
from agent_core.events import Aborted, Completed, RequestHeader, TurnEnd
from agent_core.knowledge import MAX_INSTRUCTION_BYTES, MAX_SKILLS, Knowledge
from agent_core.project_files import ProjectFiles
from agent_core.project_text import split_front_matter
from agent_core.testing import abort_at_every_await
from agent_core.tools.tool import ToolContext, ToolOutput

SKILL = "---\nname: {0}\ndescription: Does {0}\n---\nHow to.\n"


@asynccontextmanager
async def knowing(
    cwd: Path, *script: Any, additional: tuple[str, ...] = (), tools: Any = ()
) -> AsyncGenerator[Rig]:
    model = ScriptedModel(script)
    with capture_logs() as records, anyio.fail_after(5):
        async with runtime_for(model, tools) as runtime:
            runtime.project_files = ProjectFiles(str(cwd / "no/such/folder"))
            Knowledge().listen(runtime.hooks)
            agent = await runtime.create(str(cwd), additional=additional)
            yield Rig(runtime, agent, model, records)


async def told(rig: Rig) -> str:
    """Run a turn; return the system prompt of its last call."""
    await rig.agent.send("go").settled()
    return rig.model.requests[-1].system


def skipped(rig: Rig, event: str) -> list[str]:
    return [str(each["reason"]) for each in rig.records if each["event"] == event]


def repository(at: Path) -> Path:
    """Make a repository with a directory two levels below; return that."""
    below = at / "repo" / "one" / "two"
    below.mkdir(parents=True)
    (at / "repo" / ".git").mkdir()
    return below


async def test_the_model_is_told_every_file_from_the_repositorys_root_down_the_nearest_last(
    tmp_path: Path,
) -> None:
    here = repository(tmp_path)
    (tmp_path / "AGENTS.md").write_text("above the repository")
    (tmp_path / "repo" / "AGENTS.md").write_text("use tabs")
    (here / "AGENTS.md").write_text("use spaces")

    async with knowing(here) as rig:
        system = await told(rig)

    assert system.index("use tabs") < system.index("use spaces")
    assert f'<instructions path="{tmp_path}/repo/AGENTS.md">' in system
    assert f'<instructions path="{here}/AGENTS.md">' in system
    assert "above the repository" not in system


async def test_outside_of_a_repository_only_the_directory_itself_counts(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("above")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "AGENTS.md").write_text("here")

    async with knowing(tmp_path / "sub") as rig:
        system = await told(rig)

    assert "here" in system
    assert "above" not in system


async def test_the_persons_own_file_comes_first_and_may_be_a_link_to_anywhere(
    tmp_path: Path,
) -> None:
    for name in ("own", "dotfiles", "project"):
        (tmp_path / name).mkdir()
    (tmp_path / "dotfiles" / "mine.md").write_text("call me Ada")
    (tmp_path / "own" / "AGENTS.md").symlink_to(tmp_path / "dotfiles" / "mine.md")
    (tmp_path / "project" / "AGENTS.md").write_text("use tabs")

    async with knowing(tmp_path / "project") as rig:
        rig.runtime.project_files = ProjectFiles(str(tmp_path / "own"))
        known = await Knowledge().known(rig.agent)

    assert [each.text for each in known.instructions] == ["call me Ada", "use tabs"]


async def test_without_any_file_the_prompt_says_nothing_of_it(tmp_path: Path) -> None:
    async with knowing(tmp_path / "not" / "there") as rig:
        system = await told(rig)

    assert "nstructions" not in system
    assert "Skills" not in system
    assert skipped(rig, "instructions_skipped") == []


async def test_a_changed_file_is_told_in_the_next_turn_and_not_in_the_one_that_runs(
    tmp_path: Path,
) -> None:
    file = tmp_path / "AGENTS.md"
    file.write_text("first")

    async def change(_context: ToolContext) -> ToolOutput:
        file.write_text("second, which is longer")
        return ToolOutput("ok")

    async with knowing(tmp_path, call("change"), tools=(tool("change", change),)) as rig:
        await told(rig)
        during = [request.system for request in rig.model.requests]
        after = await told(rig)
        file.unlink()
        gone = await told(rig)

    assert ["first" in system for system in during] == [True, True]
    assert "second" in after
    assert "nstructions" not in gone
    assert len(rig.of(RequestHeader)) == 3


async def test_too_much_is_cut_where_it_is_farthest_away_and_the_prompt_says_so(
    tmp_path: Path,
) -> None:
    here = repository(tmp_path)
    (tmp_path / "repo" / "AGENTS.md").write_text("é" * MAX_INSTRUCTION_BYTES)
    (here / "AGENTS.md").write_text("near" * 1000)

    async with knowing(here) as rig:
        known = await Knowledge().known(rig.agent)
        system = await told(rig)

    far, near = known.instructions
    assert near.text == "near" * 1000
    assert far.cut_from_bytes == 2 * MAX_INSTRUCTION_BYTES
    assert len((far.text + near.text).encode()) <= MAX_INSTRUCTION_BYTES
    assert f"of {2 * MAX_INSTRUCTION_BYTES} bytes are shown]" in system
    assert "\ufffd" not in system


def _binary(path: Path) -> None:
    path.write_bytes(b"abc\0def")


def _latin(path: Path) -> None:
    path.write_bytes("é".encode("latin-1"))


def _link_out(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text("the password")
    path.symlink_to(secret)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_binary, _latin, _link_out, _loop, _fifo, _directory])
async def test_what_is_no_text_of_the_project_is_left_out_with_a_line_in_the_log(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    here = tmp_path / "project"
    here.mkdir()
    make(here / "AGENTS.md")

    async with knowing(here) as rig:
        system = await told(rig)
        await told(rig)

    assert "nstructions" not in system
    assert "password" not in system
    assert rig.outcomes == [Completed(), Completed()]
    assert len(skipped(rig, "instructions_skipped")) == 1  # once, and not in every turn


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_an_unreadable_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("x")
    (tmp_path / "AGENTS.md").chmod(0)

    async with knowing(tmp_path) as rig:
        await told(rig)

    assert skipped(rig, "instructions_skipped") == ["Permission denied"]


async def test_a_link_to_a_file_next_to_it_is_followed_and_told_once(tmp_path: Path) -> None:
    here = repository(tmp_path)
    (here / "CLAUDE.md").write_text("use tabs")
    (here / "AGENTS.md").symlink_to("CLAUDE.md")

    async with knowing(here) as rig:
        system = await told(rig)

    assert system.count("use tabs") == 1


async def test_wherever_a_cancel_meets_the_reading_the_turns_work_stops_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "AGENTS.md").write_text("use tabs")

    async with knowing(tmp_path) as rig:
        knowledge = Knowledge()
        runs = await abort_at_every_await(lambda signal: knowledge.known(rig.agent, signal))

    assert runs
    assert {type(run.error).__name__ for run in runs} == {"TurnAborted"}


async def test_a_turn_that_is_cancelled_at_the_prompt_asks_no_model_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    (tmp_path / "AGENTS.md").write_text("use tabs")

    async with knowing(tmp_path) as rig:
        held = Held(rig.agent, "system-prompt/assemble")
        prompt = rig.agent.send("go")
        await held.reached.wait()
        rig.agent.cancel()
        outcome = await prompt.settled()
        asked = len(rig.model.requests)
        system = await told(rig)

    assert outcome == Aborted()
    assert asked == 0
    assert "use tabs" in system
    assert [type(end) for end in rig.of(TurnEnd)] == [TurnEnd, TurnEnd]


async def test_an_aborted_signal_reads_nothing(tmp_path: Path) -> None:
    controller = AbortController()
    controller.abort({"kind": "user"})

    async with knowing(tmp_path) as rig:
        with pytest.raises(Exception, match="abort"):
            await Knowledge().known(rig.agent, controller.signal)


# --- skills ---------------------------------------------------------------------------------


def skill(root: Path, folder: str, text: str) -> Path:
    path = root / ".agents" / "skills" / folder / "SKILL.md"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


async def test_skills_of_all_the_sessions_directories_are_listed_by_name(tmp_path: Path) -> None:
    here, also = tmp_path / "a", tmp_path / "b"
    for place in (here, also):
        place.mkdir()
    first = skill(here, "release", SKILL.format("release"))
    second = skill(also, "audit", '---\ndescription: "Looks: closely"\nmetadata:\n  v: 1\n---\n')

    async with knowing(here, additional=(str(also),)) as rig:
        system = await told(rig)

    assert f"- audit: Looks: closely ({second})\n- release: Does release ({first})" in system
    assert "How to." not in system


async def test_skills_that_say_nothing_or_lead_elsewhere_are_left_out(tmp_path: Path) -> None:
    here, out = tmp_path / "here", tmp_path / "out"
    out.mkdir()
    (out / "SKILL.md").write_text(SKILL.format("stolen"))
    skill(here, "no-head", "Just text")
    skill(here, "open", "---\nname: x\n")
    skill(here, "odd", SKILL.format("a `b`"))
    skill(here, "wrong", "---\nwhat is this\n---\n")
    good = skill(here, "good", SKILL.format("good"))
    folder = here / ".agents" / "skills"
    (folder / "linked").symlink_to(out)
    (folder / "loop").symlink_to(folder)
    (folder / "itself").symlink_to("itself")
    (folder / "file").write_text("not a directory")

    async with knowing(here) as rig:
        system = await told(rig)

    assert system.endswith(f"\n- good: Does good ({good})")
    assert len(skipped(rig, "skill_skipped")) == 6


async def test_a_folder_of_skills_that_is_a_link_out_of_the_project_is_not_entered(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    skill(tmp_path / "out", "stolen", SKILL.format("stolen"))
    (here / ".agents").symlink_to(tmp_path / "out" / ".agents")

    async with knowing(here) as rig:
        system = await told(rig)

    assert "stolen" not in system
    assert len(skipped(rig, "project_folder_skipped")) >= 1


async def test_of_very_many_skills_some_are_listed(tmp_path: Path) -> None:
    for number in range(300):
        skill(tmp_path, f"s{number:03}", SKILL.format(f"s{number:03}"))

    async with knowing(tmp_path) as rig:
        known = await Knowledge().known(rig.agent)

    assert len(known.skills) == MAX_SKILLS
    assert known.skills[0].name == "s000"


# --- front matter ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings", "body"),
    [
        ("just text", {}, "just text"),
        ("", {}, ""),
        ("---\n---\n", {}, ""),
        ("---\na: 1\nb-c: 'x: y'\n\n# no\n---\n\nbody\n---\nmore", {"a": "1", "b-c": "x: y"}, None),
        ("---\r\na: 1\r\n---\r\nbody", {"a": "1"}, "body"),
        ("---\na: |\n  long\n  text\nb: 2\n---\n", {"b": "2"}, ""),
        ("---\na: [x]\nb:\n- 1\nc: {d: 1}\n---\n", {}, ""),
        ("---\na: one\n  and more\n---\n", {}, ""),
        ("---\na: *x\nb: &y z\nc: !t u\n---\n", {}, ""),
    ],
)
def test_front_matter_gives_plain_values_and_nothing_else(
    text: str, settings: dict[str, str], body: str | None
) -> None:
    found, rest = split_front_matter(text)

    assert found == settings
    assert rest == ("body\n---\nmore" if body is None else body)


@pytest.mark.parametrize("text", ["---\na: 1\n", "---\nno pair\n---\n", "---\n: x\n---\n"])
def test_front_matter_that_is_none_of_it_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="front matter"):
        split_front_matter(text)
