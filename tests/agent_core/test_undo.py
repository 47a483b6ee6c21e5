"""Taking back what a turn did to files: to what, how far, and when not."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent_core.agent import Agent
from agent_core.cancellation import AbortController, AbortSignal
from agent_core.content import Text, text_of
from agent_core.errors import ToolError
from agent_core.events import (
    Aborted,
    ContextMessage,
    FileChanged,
    FilesRestored,
    RequestHeader,
    TurnStart,
)
from agent_core.loop import Refuse
from agent_core.models.adapter import UserTurn
from agent_core.models.rehearsal import RehearsalModel
from agent_core.runtime import AgentRuntime
from agent_core.sessions.log import Session
from agent_core.sessions.memory import MemoryStore
from agent_core.subagents import SubagentRequest
from agent_core.tools.kept_files import MAX_FILE_BYTES, MAX_TURN_BYTES, KeptFiles
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.registry import default_tools
from agent_core.tools.roots import Roots
from agent_core.undo import undo


class At:
    """An agent that takes ``/undo`` as the front end does, in the directory `path`."""

    def __init__(self, agent: Agent, path: Path, runtime: AgentRuntime) -> None:
        self.agent = agent
        self.path = path
        self.runtime = runtime
        self.answer = ""
        agent.hooks.on("agent/prompt-submit", self._submit)

    async def _submit(
        self, agent: Agent, content: Any, _source: str, signal: AbortSignal, next_: Any
    ) -> Any:
        if text_of(content) != "/undo":
            return await next_()
        self.answer = await undo(agent, signal)
        return Refuse(self.answer)

    async def does(self, *prompts: str) -> None:
        for prompt in prompts:
            await self.agent.send(prompt).settled()

    async def undoes(self) -> str:
        await self.does("/undo")
        return self.answer

    def of(self, kind: type[Any]) -> list[Any]:
        return [each.data for each in self.agent.session.events if isinstance(each.data, kind)]

    def __truediv__(self, name: str) -> Path:
        return self.path / name


@asynccontextmanager
async def at_work(
    path: Path, *, mode: str = "bypass", store: MemoryStore | None = None, load: str = ""
) -> AsyncGenerator[At]:
    store = store or MemoryStore()
    with anyio.fail_after(10):
        async with AgentRuntime(
            store,
            model=RehearsalModel(),
            tools=default_tools(),
            files=LocalFiles(),
            commands=LocalCommands(),
            mode=mode,
        ) as runtime:
            if load:
                agent = runtime.adopt(await Session.load(load, store))
            else:
                agent = await runtime.create(str(path))
            yield At(agent, path, runtime)


async def test_an_edited_file_is_put_back_and_a_new_one_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")

    async with at_work(tmp_path) as at:
        await at.does("edit a.txt: one => 1 then edit a.txt: two => 2 then write sub/b.txt: new")
        changed = (tmp_path / "a.txt").read_text()
        answer = await at.undoes()

    assert "1" in changed
    assert (tmp_path / "a.txt").read_bytes() == b"one\r\ntwo"
    assert os.listdir(tmp_path / "sub") == []
    assert answer.splitlines() == [
        "Taking back the changes of turn 1:",
        "",
        "- `a.txt`: restored",
        "- `sub/b.txt`: deleted, it was new",
    ]


async def test_undo_again_goes_a_turn_further_back_and_ends_where_nothing_is_left(
    tmp_path: Path,
) -> None:
    async with at_work(tmp_path) as at:
        await at.does("write a: 1", "read a", "write a: 2", "say hello")
        seen = [(tmp_path / "a").read_text()]
        first = await at.undoes()
        seen.append((tmp_path / "a").read_text())
        second = await at.undoes()
        last = await at.undoes()

    assert seen == ["2", "1"]
    assert not (tmp_path / "a").exists()
    assert "turn 3" in first
    assert "turn 1" in second
    assert "nothing to undo" in last


async def test_a_file_that_somebody_changed_since_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("old")

    async with at_work(tmp_path) as at:
        await at.does("write a: 1 then write b: 2 then write c: 3 then write d: 4")
        (tmp_path / "a").write_text("mine")
        (tmp_path / "c").unlink()
        (tmp_path / "d").unlink()
        (tmp_path / "d").mkdir()
        answer = await at.undoes()
        again = await at.undoes()

    assert (tmp_path / "a").read_text() == "mine"
    assert (tmp_path / "b").read_text() == "old"
    assert (tmp_path / "d").is_dir()
    assert "`a`: left as it is: it was changed since" in answer
    assert "`c`: already as it was" in answer
    assert "`d`: left as it is" in answer
    assert "nothing to undo" in again


async def test_a_deleted_file_that_was_edited_is_not_brought_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    async with at_work(tmp_path) as at:
        await at.does("write a: new")
        (tmp_path / "a").unlink()
        answer = await at.undoes()

    assert "it was deleted since" in answer
    assert not (tmp_path / "a").exists()


async def test_what_a_command_did_between_two_edits_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    async with at_work(tmp_path) as at:
        signal = AbortController().signal
        at.agent.session.append(TurnStart(1, "user"))
        await KeptFiles(LocalFiles(), at.agent.session, "c1").write(
            str(tmp_path / "a"), "1", signal
        )
        (tmp_path / "a").write_text("2")
        await KeptFiles(LocalFiles(), at.agent.session, "c2").write(
            str(tmp_path / "a"), "3", signal
        )
        await undo(at.agent, signal)

    assert (tmp_path / "a").read_text() == "2"


async def test_undo_works_in_a_session_that_was_loaded_again(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "a").write_text("old")
    async with at_work(tmp_path, store=store) as at:
        await at.does("write a: 1", "write a: 2", "/undo")
        session_id = at.agent.id

    async with at_work(tmp_path, store=store, load=session_id) as at:
        answer = await at.undoes()
        again = await at.undoes()

    assert "turn 1" in answer
    assert (tmp_path / "a").read_text() == "old"
    assert "nothing" in again


async def test_no_permission_is_asked_for_what_the_person_takes_back(tmp_path: Path) -> None:
    async with at_work(tmp_path) as at:
        await at.does("write a: 1")
        at.agent.set_mode("read-only")
        await at.undoes()

    assert not (tmp_path / "a").exists()


async def test_the_model_is_told_what_was_taken_back_and_never_what_was_kept_for_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").write_text("the secret of the file")

    async with at_work(tmp_path) as at:
        await at.does("write a: 1", "/undo", "say hi")
        messages = at.agent.session.messages

    (told,) = at.of(ContextMessage)
    assert told.source == "undo"
    assert str(tmp_path / "a") in text_of(told.content)
    assert any(isinstance(m, UserTurn) and "took back" in text_of(m.content) for m in messages)
    assert "secret" not in repr(messages)
    assert "secret" not in repr(at.of(RequestHeader))


async def test_nothing_is_told_where_nothing_was_taken_back(tmp_path: Path) -> None:
    async with at_work(tmp_path) as at:
        await at.does("/undo", "write a: 1")
        (tmp_path / "a").write_text("mine")
        await at.undoes()

    assert at.of(ContextMessage) == []


async def test_a_file_too_large_to_keep_is_said_and_passed_over(tmp_path: Path) -> None:
    (tmp_path / "large").write_text("x" * (MAX_FILE_BYTES + 1))
    (tmp_path / "fits").write_text("x" * MAX_FILE_BYTES)

    async with at_work(tmp_path) as at:
        await at.does("write large: 1 then write fits: 2 then edit large: 1 => 3")
        answer = await at.undoes()

    assert "`large`: left as it is: it was larger than 1 MiB" in answer
    assert "`fits`: restored" in answer
    assert (tmp_path / "large").read_text() == "3"


async def test_a_turn_keeps_so_much_and_the_next_one_anew(tmp_path: Path) -> None:
    n_fit = MAX_TURN_BYTES // MAX_FILE_BYTES
    names = [f"f{n:02}" for n in range(n_fit + 1)]
    for name in names:
        (tmp_path / name).write_text("x" * MAX_FILE_BYTES)

    async with at_work(tmp_path) as at:
        await at.does(" then ".join(f"write {name}: 1" for name in names))
        kept = [bool(change.before) for change in at.of(FileChanged)]
        await at.does(f"write {names[-1]}: {'y' * 10}", f"write {names[-1]}: 3")

    assert kept == [True] * n_fit + [False]
    assert [change.before for change in at.of(FileChanged)[-2:]] == ["1", "y" * 10]


async def test_what_was_there_but_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\0\1\2")

    async with at_work(tmp_path) as at:
        await at.does("write a: text")
        answer = await at.undoes()

    assert "left as it is" in answer
    assert "binary" in answer
    assert (tmp_path / "a").read_text() == "text"


async def test_a_write_that_failed_leaves_nothing_to_put_back(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")

    class Failing(LocalFiles):
        async def write(self, path: str, text: str, signal: AbortSignal) -> None:
            raise ToolError("the disk is full")

    async with at_work(tmp_path) as at:
        at.agent.files = Failing()
        await at.does("write a: 1")
        at.agent.files = LocalFiles()
        answer = await at.undoes()

    assert file.read_text() == "old"
    assert "already as it was" in answer


async def test_a_write_that_fails_on_top_of_another_hides_neither(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    async with at_work(tmp_path) as at:
        signal = AbortController().signal
        kept = KeptFiles(LocalFiles(), at.agent.session, "c1")
        at.agent.session.append(TurnStart(1, "user"))
        await kept.write(str(tmp_path / "a"), "1", signal)
        await kept.write(str(tmp_path / "a"), "2", signal)
        (tmp_path / "a").write_text("1")  # as if the second write had never come there
        answer = await undo(at.agent, signal)

    assert "restored" in answer
    assert (tmp_path / "a").read_text() == "old"


async def test_a_restore_that_fails_is_tried_again_by_the_next_undo(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").write_text("old")

    class Full(LocalFiles):
        async def write(self, path: str, text: str, signal: AbortSignal) -> None:
            if path.endswith("a"):
                raise ToolError("the disk is full")
            await super().write(path, text, signal)

    async with at_work(tmp_path) as at:
        await at.does("write a: 1 then write b: 2")
        at.agent.files = Full()
        first = await at.undoes()
        at.agent.files = LocalFiles()
        second = await at.undoes()

    assert "`a`: not restored, the disk is full" in first
    assert "`b`: restored" in first
    assert "`b`" not in second
    assert [(tmp_path / name).read_text() for name in "ab"] == ["old", "old"]


async def test_a_cancel_between_two_files_is_said_logged_and_gone_on_from(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("old")

    class Stopping(LocalFiles):  # and one that looks at no signal
        async def read(self, path: str, signal: AbortSignal) -> str:
            return await super().read(path, AbortController().signal)

        async def write(self, path: str, text: str, signal: AbortSignal) -> None:
            await super().write(path, text, AbortController().signal)
            at.agent.cancel()

    async with at_work(tmp_path) as at:
        await at.does("write a: 1 then write b: 2 then write c: 3")
        at.agent.files = Stopping()
        outcome = await at.agent.send("/undo").settled()
        at.agent.files = LocalFiles()
        seen = [(tmp_path / name).read_text() for name in "abc"]
        (stopped,) = at.of(FilesRestored)
        answer = await at.undoes()

    assert outcome == Aborted()
    assert seen == ["old", "2", "3"]
    assert stopped.paths == (str(tmp_path / "a"),)
    assert "`a`: restored" in stopped.notice
    assert "2 files to go" in stopped.notice
    assert len(at.of(ContextMessage)) == 2
    assert "`a`" not in answer
    assert [(tmp_path / name).read_text() for name in "abc"] == ["old"] * 3


@pytest.mark.parametrize("elsewhere", ["out", "here/other"])
async def test_a_path_that_leads_elsewhere_now_is_not_followed(
    elsewhere: str, tmp_path: Path
) -> None:
    here, out = tmp_path / "here", tmp_path / elsewhere
    for place in (here / "sub", out):
        place.mkdir(parents=True)
        (place / "a").write_text("old")

    async with at_work(here) as at:
        await at.does("write sub/a: 1")
        (here / "sub" / "a").unlink()
        (here / "sub").rmdir()
        (out / "a").write_text("1")
        (here / "sub").symlink_to(out)
        answer = await at.undoes()

    assert "left as it is" in answer
    assert (out / "a").read_text() == "1"


async def test_a_directory_that_is_none_of_the_sessions_any_more_is_not_touched(
    tmp_path: Path,
) -> None:
    here, also = tmp_path / "here", tmp_path / "also"
    here.mkdir()
    also.mkdir()

    async with at_work(here) as at:
        at.agent.roots = Roots(str(here), (str(also),))
        await at.does(f"write {also}/a: 1")
        at.agent.roots = Roots(str(here))
        answer = await at.undoes()

    assert "outside of this session's directories" in answer
    assert (also / "a").exists()


async def test_files_go_through_whatever_the_agent_reads_and_writes_with(tmp_path: Path) -> None:
    buffers = {str(tmp_path / "a"): "unsaved"}

    class Editor:
        async def read(self, path: str, signal: AbortSignal) -> str:
            if path not in buffers:
                raise ToolError("no such file", code="NOT_FOUND")
            return buffers[path]

        async def write(self, path: str, text: str, signal: AbortSignal) -> None:
            buffers[path] = text

    async with at_work(tmp_path) as at:
        at.agent.files = Editor()
        await at.does("write a: 1 then write new: 2")
        answer = await at.undoes()

    assert buffers[str(tmp_path / "a")] == "unsaved"
    assert "`new`: not restored, it cannot be deleted" in answer  # it is on no disk of ours


async def test_what_a_subagent_wrote_is_the_turns_own_doing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    async with at_work(tmp_path) as at:
        await at.does("say hi")
        request = SubagentRequest((Text("write a: 1"),), at.agent, AbortController().signal)
        run = await at.runtime.subagents.start("spawn", request)
        await run.result()
        await run.dispose()
        changed = (tmp_path / "a").read_text()
        await at.undoes()

    assert changed == "1"
    assert (tmp_path / "a").read_text() == "old"


async def test_a_fork_takes_over_nothing_to_undo(tmp_path: Path) -> None:
    async with at_work(tmp_path) as at:
        await at.does("write a: 1", "write a: 2", "/undo")
        request = SubagentRequest((Text("say hi"),), at.agent, AbortController().signal)
        run = await at.runtime.subagents.start("fork", request)
        child = at.runtime.agents[run.id]
        await run.result()
        kinds = {type(event.data) for event in child.session.events}
        await run.dispose()

    assert not kinds & {FileChanged, FilesRestored}


async def test_odd_names_are_shown_in_one_piece(tmp_path: Path) -> None:
    async with at_work(tmp_path) as at:
        at.agent.session.append(TurnStart(1, "user"))
        kept = KeptFiles(LocalFiles(), at.agent.session, "c1")
        signal = AbortController().signal
        await kept.write(str(tmp_path / "a\n`b"), "x", signal)
        answer = await undo(at.agent, signal)

    assert answer.splitlines()[-1] == "- `` a\ufffd`b ``: deleted, it was new"


async def test_writing_the_same_again_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    async with at_work(tmp_path) as at:
        await at.does("write a: old")

    assert at.of(FileChanged) == []


@pytest.mark.parametrize("answer", ["ABORTED", "TOOL_CRASHED"])
async def test_what_was_there_is_in_the_log_before_the_file_is_touched(
    answer: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("old")
    logged: list[int] = []

    class Looking(LocalFiles):
        async def write(self, path: str, text: str, signal: AbortSignal) -> None:
            logged.append(len(at.of(FileChanged)))
            if answer == "ABORTED":
                at.agent.cancel()
                signal.raise_if_aborted()
            raise OSError("gone")

    async with at_work(tmp_path) as at:
        at.agent.files = Looking()
        await at.does("write a: 1")

    assert logged == [1]
    assert (tmp_path / "a").read_text() == "old"
