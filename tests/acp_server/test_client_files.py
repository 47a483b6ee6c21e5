"""The client's files as the tools see them: what it offers, what it answers, what it does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from lending import NEVER, Fails, Lender, lending
from talking import talk

from acp_server import client_calls
from acp_server.capabilities import Features
from acp_server.client_files import ClientFiles
from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.errors import ToolError
from agent_core.tools.local_files import MAX_FILE_BYTES, LocalFiles

READ, WRITE = "fs/read_text_file", "fs/write_text_file"


def files_of(
    lender: Lender, *, reads: bool = True, writes: bool = True
) -> tuple[ClientFiles, AbortController]:
    features = Features(reads_files=reads, writes_files=writes)
    files = ClientFiles(lender.session, lender.at.connection.peer, features, LocalFiles())
    return files, AbortController()


async def failure_of(work: Any) -> ToolError:
    with pytest.raises(ToolError) as raised, anyio.fail_after(5):
        await work
    return raised.value


# --- what is offered ------------------------------------------------------------------------


@pytest.mark.requirement("ACP-130")
@pytest.mark.parametrize("offered", [{}, {"reads": True}, {"writes": True}, {"terminals": True}])
async def test_only_what_the_client_offered_is_asked_for(
    tmp_path: Path, offered: dict[str, bool]
) -> None:
    def written(params: dict[str, Any]) -> None:
        Path(params["path"]).write_text(params["content"])

    answers = {READ: {"content": "as it was\n"}, WRITE: written}
    async with lending(tmp_path, answers, **offered) as lender:
        (tmp_path / "work" / "a").write_text("as it was\n")

        assert await lender.prompt("edit a: was => is then write b: new") == "end_turn"

        asked = {request["method"] for request in lender.asked}
        assert asked == {
            name for name, key in ((READ, "reads"), (WRITE, "writes")) if key in offered
        }
        assert (tmp_path / "work" / "a").read_text() == "as it is\n"
        assert (tmp_path / "work" / "b").read_text() == "new"


@pytest.mark.requirement("ACP-130")
async def test_a_path_outside_never_reaches_the_client(tmp_path: Path) -> None:
    async with lending(tmp_path, {}, reads=True, writes=True) as lender:
        (tmp_path / "secret").write_text("x")
        (tmp_path / "work" / "link").symlink_to(tmp_path / "secret")

        for text in ("read ../secret", "read link", "write link: y"):
            await lender.prompt(text)

        assert lender.asked == []
        assert (tmp_path / "secret").read_text() == "x"
        assert [call["status"] for call in lender.calls()] == ["failed"] * 3


@pytest.mark.requirement("ACP-020")
async def test_the_client_is_asked_for_absolute_real_paths_of_its_session(tmp_path: Path) -> None:
    answers = {READ: {"content": "unsaved"}, WRITE: {}}
    async with lending(tmp_path, answers, reads=True, writes=True) as lender:
        await lender.prompt("write ./new.txt: text")

        path = str(tmp_path / "work" / "new.txt")
        named = {"sessionId": lender.session, "path": path}
        assert {READ: [named], WRITE: [{**named, "content": "text"}]} == {
            method: [request["params"] for request in lender.requests(method)][:1]
            for method in (READ, WRITE)
        }


async def test_the_agent_has_its_own_files_back_when_the_client_lets_go_of_it(
    tmp_path: Path,
) -> None:
    offer = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": True}
    async with talk(tmp_path, capabilities=offer) as (at, backend):
        session = await at.new_session()
        agent = backend.runtime.agents[session]
        assert isinstance(agent.files, ClientFiles)
        client = at.connection.sessions[session]

        client.detach()

        assert isinstance(agent.files, LocalFiles)
        client.attach(agent)
        first = agent.files
        client.attach(agent)  # as another connection would, before this one lets go
        assert agent.files is not first
        assert isinstance(agent.files, ClientFiles)
        assert isinstance(agent.files.local, LocalFiles)
        client.detach()


# --- reading --------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-132")
async def test_unsaved_changes_win_over_the_disk(tmp_path: Path) -> None:
    answers = {READ: {"content": "unsaved\n"}, WRITE: {}}
    async with lending(tmp_path, answers, reads=True, writes=True) as lender:
        (tmp_path / "work" / "a").write_text("saved\n")

        await lender.prompt("read a then edit a: unsaved => changed")

        read, edit = lender.calls()
        assert read["content"][0]["content"]["text"] == "unsaved"
        assert edit["status"] == "completed"
        assert lender.requests(WRITE)[0]["params"]["content"] == "changed\n"


async def test_a_client_that_only_reads_has_its_buffer_edited_onto_the_disk(
    tmp_path: Path,
) -> None:
    async with lending(tmp_path, {READ: {"content": "unsaved\n"}}, reads=True) as lender:
        (tmp_path / "work" / "a").write_text("saved\n")

        await lender.prompt("edit a: unsaved => changed")

        assert (tmp_path / "work" / "a").read_text() == "changed\n"


@pytest.mark.requirement("B112")
@pytest.mark.parametrize("writes", [True, False])
async def test_line_endings_that_the_client_does_not_tell_are_kept(
    tmp_path: Path, writes: bool
) -> None:
    path = tmp_path / "work" / "a"

    def write(params: dict[str, Any]) -> None:
        Path(params["path"]).write_bytes(params["content"].encode())

    answers = {READ: {"content": "one\ntwo\nthree"}, WRITE: write}
    async with lending(tmp_path, answers, reads=True, writes=writes) as lender:
        path.write_bytes("\ufeffone\r\ntwo\nthree".encode())

        await lender.prompt("edit a: two => 2")

        assert path.read_bytes() == "\ufeffone\r\n2\nthree".encode()


@pytest.mark.requirement("ACP-136")
@pytest.mark.parametrize(
    "answer",
    [
        Fails(-32002, "Resource not found"),
        Fails(-32603, "ENOENT: no such file or directory"),
        Fails(-32603, "Internal error"),
        {"content": ""},  # an editor that opens a buffer for any path
    ],
)
async def test_a_file_that_is_not_there_is_told_apart_from_a_failure(
    tmp_path: Path, answer: Any
) -> None:
    async with lending(tmp_path, {READ: answer, WRITE: {}}, reads=True, writes=True) as lender:
        files, controller = files_of(lender)
        path = str(tmp_path / "work" / "new")

        error = await failure_of(files.read(path, controller.signal))

        assert error.code == "NOT_FOUND"
        await lender.prompt("write new: text")
        (call,) = lender.calls()
        assert call["status"] == "completed"
        assert call["content"] == [{"type": "diff", "path": path, "newText": "text"}]


async def test_a_new_buffer_that_was_never_saved_can_be_read(tmp_path: Path) -> None:
    async with lending(tmp_path, {READ: {"content": "draft"}}, reads=True) as lender:
        files, controller = files_of(lender)

        assert await files.read(str(tmp_path / "work" / "new"), controller.signal) == "draft"


async def test_a_file_that_the_client_does_not_know_but_the_disk_has_is_read(
    tmp_path: Path,
) -> None:
    async with lending(tmp_path, {READ: Fails(-32002)}, reads=True) as lender:
        files, controller = files_of(lender)
        path = tmp_path / "work" / "a"
        path.write_text("on disk")

        assert await files.read(str(path), controller.signal) == "on disk"


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (
            Fails(-32603, "the buffer\n\x1b[31mis locked"),
            "CLIENT_ERROR",
            "the buffer [31mis locked",
        ),
        (Fails(-32603, "x" * 5000), "CLIENT_ERROR", "x" * 499 + "…"),
        (Fails(-32603, " \n "), "CLIENT_ERROR", "it does not say why"),
        (Fails(-32800, "Request cancelled"), "CLIENT_ERROR", "Request cancelled"),
        (None, "CLIENT_MALFORMED", "malformed"),
        ({}, "CLIENT_MALFORMED", "malformed"),
        ({"content": None}, "CLIENT_MALFORMED", "malformed"),
        ({"content": ["x"]}, "CLIENT_MALFORMED", "malformed"),
        ("text", "CLIENT_MALFORMED", "malformed"),
        ({"content": "a\0b"}, "NOT_TEXT", "binary"),
        ({"content": "ä" * (MAX_FILE_BYTES // 2 + 1)}, "TOO_LARGE", "10 MiB"),
    ],
)
async def test_a_bad_answer_to_reading_is_told_to_the_model(
    tmp_path: Path, answer: Any, code: str, said: str
) -> None:
    async with lending(tmp_path, {READ: answer}, reads=True) as lender:
        files, controller = files_of(lender)
        path = tmp_path / "work" / "a"
        path.write_text("on disk")

        error = await failure_of(files.read(str(path), controller.signal))

        assert error.code == code
        assert said in error.message
        assert "\n" not in error.message
        assert len(error.message) < 600
        assert await lender.prompt("read a") == "end_turn"
        assert lender.calls()[0]["status"] == "failed"


@pytest.mark.parametrize("kind", ["directory", "fifo", "binary", "latin-1"])
async def test_what_is_no_text_file_is_refused_as_on_the_disk(tmp_path: Path, kind: str) -> None:
    answers = {READ: {"content": "nonsense"}, WRITE: {}}
    async with lending(tmp_path, answers, reads=True, writes=True) as lender:
        files, controller = files_of(lender)
        path = tmp_path / "work" / "a"
        if kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.write_bytes(b"\0" if kind == "binary" else b"\xe9")

        error = await failure_of(files.read(str(path), controller.signal))

        assert error.code == ("NOT_A_FILE" if kind in ("directory", "fifo") else "NOT_TEXT")
        if error.code == "NOT_A_FILE":
            await failure_of(files.write(str(path), "x", controller.signal))
        assert lender.asked == []


# --- writing --------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [{}, None, "written", 7, {"content": 1}])
@pytest.mark.requirement("QUIRK-13")
async def test_any_result_of_writing_is_a_success(tmp_path: Path, answer: Any) -> None:
    async with lending(tmp_path, {WRITE: answer}, writes=True) as lender:
        await lender.prompt("write a: text")

        assert [call["status"] for call in lender.calls()] == ["completed"]


async def test_a_refused_write_is_told_to_the_model(tmp_path: Path) -> None:
    async with lending(tmp_path, {WRITE: Fails(-32603, "it is read-only")}, writes=True) as lender:
        (tmp_path / "work" / "a").write_text("before")

        await lender.prompt("write a: text")

        (call,) = lender.calls()
        assert call["status"] == "failed"
        assert "it is read-only" in call["content"][0]["content"]["text"]
        assert len(lender.requests(WRITE)) == 1
        assert (tmp_path / "work" / "a").read_text() == "before"


@pytest.mark.requirement("ACP-132")
async def test_a_directory_that_the_client_does_not_make_is_made_for_it(tmp_path: Path) -> None:
    def write(params: dict[str, Any]) -> Any:
        try:
            Path(params["path"]).write_text(params["content"])
        except OSError as exc:
            return Fails(-32603, str(exc))
        return {}

    async with lending(tmp_path, {WRITE: write}, writes=True) as lender:
        await lender.prompt("write deep/er/a: text")

        assert (tmp_path / "work" / "deep" / "er" / "a").read_text() == "text"
        assert lender.calls()[0]["status"] == "completed"


async def test_a_text_that_utf_8_cannot_hold_is_not_sent(tmp_path: Path) -> None:
    async with lending(tmp_path, {WRITE: {}}, writes=True) as lender:
        files, controller = files_of(lender)

        error = await failure_of(files.write(str(tmp_path / "a"), "\ud800", controller.signal))

        assert "surrogate" in error.message
        assert lender.asked == []


# --- clients that do not answer -------------------------------------------------------------


@pytest.mark.parametrize("text", ["read a", "write a: text"])
@pytest.mark.requirement("B024")
async def test_a_client_that_does_not_answer_in_time_fails_the_tool(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_calls, "ANSWER_LIMIT_S", 0.05)
    verb = READ if text.startswith("read") else WRITE
    answers = {READ: {"content": "before"}, WRITE: {}, verb: NEVER}
    async with lending(tmp_path, answers, reads=True, writes=True) as lender:
        (tmp_path / "work" / "a").write_text("before")

        assert await lender.prompt(text) == "end_turn"

        (call,) = lender.calls()
        assert call["status"] == "failed"
        assert "did not answer" in call["content"][0]["content"]["text"]
        request = lender.requests(verb)[-1]
        assert lender.withdrawn() == [request["id"]]
        n_sent = len(lender.at.lines.sent)
        lender.answer(request, {"content": "late"})
        assert len(lender.at.lines.sent) == n_sent
        assert await lender.prompt("say ok") == "end_turn"


@pytest.mark.requirement("ACP-110", "R73")
@pytest.mark.parametrize("late", [NEVER, {"content": "late"}, None, Fails(-32800), Fails()])
@pytest.mark.parametrize("text", ["read a", "write a: text"])
async def test_a_cancel_does_not_wait_for_the_client(tmp_path: Path, text: str, late: Any) -> None:
    verb = READ if text.startswith("read") else WRITE
    answers = {READ: {"content": "before"}, WRITE: {}, verb: NEVER}
    async with lending(tmp_path, answers, reads=True, writes=True) as lender:
        (tmp_path / "work" / "a").write_text("before")
        prompt = lender.at.prompt(lender.session, text)
        request = await lender.until_asked(verb)

        lender.at.cancel(lender.session)

        assert (await lender.at.result(prompt))["stopReason"] == "cancelled"
        assert lender.withdrawn() == [request["id"]]
        assert lender.calls()[0]["status"] == "failed"
        n_sent = len(lender.at.lines.sent)
        lender.answer(request, late)
        await anyio.wait_all_tasks_blocked()
        assert len(lender.at.lines.sent) == n_sent
        assert await lender.prompt("say ok") == "end_turn"


async def test_a_client_that_goes_away_fails_the_tool(tmp_path: Path) -> None:
    async with lending(tmp_path, {READ: NEVER}, reads=True) as lender:
        files, controller = files_of(lender)

        async with anyio.create_task_group() as tasks:
            errors: list[ToolError] = []

            async def read() -> None:
                errors.append(await failure_of(files.read("/nowhere", controller.signal)))

            tasks.start_soon(read)
            await lender.until_asked(READ)
            lender.at.connection.peer.close()

        assert [error.code for error in errors] == ["CLIENT_GONE"]
        assert (await failure_of(files.read("/nowhere", controller.signal))).code == "CLIENT_GONE"


async def test_a_signal_that_has_fired_asks_nobody(tmp_path: Path) -> None:
    async with lending(tmp_path, {}, reads=True) as lender:
        files, controller = files_of(lender)
        controller.abort(USER)

        with pytest.raises(TurnAborted):
            await files.read("/nowhere", controller.signal)
        with pytest.raises(TurnAborted):
            await files.write("/nowhere", "x", controller.signal)
        assert lender.asked == []
