"""Edges of the core that no story leads to: refusals, leftovers, and workers seen from inside."""

from __future__ import annotations

import io
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
import worker_tools
from core_rig import (
    LIMIT_S,
    Rig,
    ScriptedModel,
    Waiting,
    answer_ok,
    call,
    rig,
    runtime_for,
    settle,
    tool,
)

from agent_core import logs
from agent_core.cancellation import AbortController
from agent_core.content import Image, Link, Resource, Text, text_of
from agent_core.errors import AgentDisposed, StoreError, ToolError
from agent_core.events import Aborted, Completed, Disposed, Failed, ModeChanged, ModelRetry
from agent_core.inbox import Prompt
from agent_core.models.adapter import Finish, ModelEvent, ModelRequest, Retrying, TextDelta
from agent_core.permissions import Verdict, decide
from agent_core.sessions.memory import MemoryStore
from agent_core.testing import abort_at_every_await, rehearsal_agent, tool_context
from agent_core.tools import search_worker, worker_main
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Tool, ToolOutput
from agent_core.tools.worker_protocol import Abort, Call, Crash, Failure, Progress, Result, decode

# --- prompts, modes, permissions ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "source"), [(("text",), "user"), ((object(),), "user"), ((Text("A"),), b"user")]
)
async def test_a_prompt_of_what_the_log_cannot_hold_is_refused(content: Any, source: Any) -> None:
    async with rig() as r:
        with pytest.raises(TypeError):
            Prompt(content, source)
        with pytest.raises(TypeError):
            r.agent.send(content, source=source)
        await r.agent.when_idle()

        assert (r.log, r.record.seen) == ([], [])


async def test_a_mode_is_changed_once_and_an_unknown_one_is_refused() -> None:
    async with rig() as r:
        with pytest.raises(ValueError, match="read-only"):
            r.agent.set_mode("nosuch")
        r.agent.set_mode("read-only")
        r.agent.set_mode("read-only")

        assert r.agent.mode == "read-only"
        assert r.log == [ModeChanged("read-only")]


@pytest.mark.parametrize(
    ("mode", "effect", "remembered", "verdict"),
    [
        ("read-only", "read", None, Verdict.ALLOW),
        ("read-only", "edit", True, Verdict.DENY),
        ("bypass", "execute", False, Verdict.ALLOW),
        ("ask", "execute", None, Verdict.ASK),
        ("ask", "execute", True, Verdict.ALLOW),
        ("ask", "execute", False, Verdict.DENY),
        ("accept-edits", "edit", None, Verdict.ALLOW),
        ("accept-edits", "edit", False, Verdict.DENY),
        ("accept-edits", "execute", None, Verdict.ASK),
    ],
)
def test_the_mode_decides_with_what_was_said_always(
    mode: str, effect: Any, remembered: bool | None, verdict: Verdict
) -> None:
    known = {} if remembered is None else {"key": remembered}

    assert decide(mode, effect, known, "key").verdict is verdict


def test_what_is_no_text_is_told_as_text() -> None:
    blocks = (
        Text("look"),
        Link("file:///a", "a"),
        Resource("file:///b", text="inside"),
        Image("aGk=", "image/png"),
    )

    assert text_of(blocks).splitlines() == [
        "look",
        "[a](file:///a)",
        "<resource uri='file:///b'>",
        "inside",
        "</resource>",
        "[image/png: inline]",
    ]


def test_records_below_the_threshold_are_dropped_without_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_threshold", 0)
    monkeypatch.setattr(logs, "_preparations", [])
    prepared: list[str] = []
    logs.before_first_record(lambda: prepared.append("one"), threshold=30)
    logs.before_first_record(lambda: prepared.append("other"), threshold=30)
    logger = logs.get_logger("test")
    logger.info("nobody_hears")
    assert prepared == []
    assert callable(logger.warning)
    assert callable(logger.warning)

    assert prepared == ["other"]


def test_a_program_that_sets_up_no_logs_hears_of_warnings_only() -> None:
    program = (
        "from agent_core.logs import get_logger\n"
        "log = get_logger('test')\n"
        "log.info('turn_ended'), log.warning('turn_still_unwinding')"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )

    assert "turn_still_unwinding" in done.stdout
    assert "turn_ended" not in done.stdout + done.stderr


# --- in a turn ------------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R34", "R66")
async def test_a_cancel_while_the_model_is_tried_again_does_not_bring_back_what_failed() -> None:
    waiting = anyio.Event()

    async def retry(request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield Retrying(1, 0.5, "OVERLOADED", "The provider is overloaded.")
        waiting.set()
        await request.signal.wait()
        yield TextDelta("too late")
        yield Finish("stop")

    async with rig(retry) as r:
        r.agent.send("A")
        await waiting.wait()
        r.agent.cancel()
        await r.agent.when_idle()

        assert [event.code for event in r.of(ModelRetry)] == ["OVERLOADED"]
        assert "assistant/message" not in r.kinds
        assert r.outcomes == [Aborted()]


@pytest.mark.race
@pytest.mark.requirement("R73", "R75")
async def test_the_result_of_a_finished_call_is_kept_when_the_host_ends_its_neighbour() -> None:
    slow, quick = Waiting(), Waiting()
    quick.gate.set()
    tools = [tool("slow", slow, overlaps=True), tool("quick", quick, overlaps=True)]
    model = ScriptedModel([call("slow", "quick")])
    rigs: list[Rig] = []
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:

            async def own() -> None:
                async with runtime_for(model, tools) as runtime:
                    rigs.append(Rig(runtime, await runtime.create("/"), model))
                    rigs[0].agent.send("A")
                    await anyio.sleep_forever()

            tasks.start_soon(own)
            await slow.entered.wait()
            await settle()
            tasks.cancel_scope.cancel()

    assert [(result.call_id[-1], result.code) for result in rigs[0].results] == [
        ("1", "ABORTED"),
        ("2", None),
    ]
    assert rigs[0].outcomes == [Disposed()]


async def test_calls_that_wait_for_room_do_not_start_once_the_store_has_failed() -> None:
    class Failing(MemoryStore):
        async def flush(self, session_id: str) -> None:
            await anyio.lowlevel.checkpoint()
            raise StoreError("the disk is full")

    body = Waiting()
    async with rig(
        call(*["probe"] * 12),
        store=Failing(),
        tools=[tool("probe", body, does="edit", overlaps=True)],
    ) as r:
        prompt = r.agent.send("A")
        await r.agent.when_idle()

        assert body.times_entered == 0
        assert [result.code for result in r.results] == ["ABORTED_BEFORE_DISPATCH"] * 12
        (outcome,) = r.outcomes
        assert isinstance(outcome, Failed)
        assert isinstance(prompt.error, StoreError)


async def test_a_tool_without_a_body_has_failed_and_harms_nobody() -> None:
    class Empty(Tool):
        name = "empty"
        description = "Forgot to do anything."
        Args = worker_tools.Args
        effect = "none"

        def parse(self, arguments: str) -> Any:
            return None

    async with rig(call("empty"), tools=[Empty()]) as r:
        assert await r.agent.send("A").settled() == Completed()
        assert [result.code for result in r.results] == ["TOOL_CRASHED"]
    with pytest.raises(NotImplementedError):
        Empty().work(None, None)  # type: ignore[arg-type]


async def test_a_runtime_that_is_left_makes_no_more_agents() -> None:
    async with runtime_for(ScriptedModel([])) as runtime:
        pass

    with pytest.raises(AgentDisposed):
        await runtime.create("/")


def test_a_path_with_a_nul_character_is_no_path(tmp_path: Path) -> None:
    roots = Roots(str(tmp_path), ())
    with pytest.raises(ToolError, match="NUL"):
        roots.resolve("a\0b")

    assert roots.show("a\0b") == "a\0b"


# --- for people who test their tools --------------------------------------------------------------


@pytest.mark.requirement("R96")
async def test_a_tool_is_aborted_at_each_of_its_awaits(tmp_path: Path) -> None:
    shown: list[Any] = []
    async with rehearsal_agent(str(tmp_path)) as agent:

        async def work(signal: Any) -> object:
            context = tool_context(agent, signal, shown)
            context.progress(())
            for _ in range(3):
                async with context.signal.scope():
                    await anyio.lowlevel.checkpoint()
            return await answer_ok(context)

        runs = await abort_at_every_await(work)
        assert [run.at_await for run in runs] == list(range(1, len(runs) + 1))
        assert len(runs) >= 3
        assert {type(run.error).__name__ for run in runs} <= {"TurnAborted", "NoneType"}
        assert AbortController().signal.aborted is False


# --- the worker of `isolation = "process"`, in this process ---------------------------------------

TARGET = "worker_tools:Blocking"


def serve(what: str, number: int = 0, target: str = TARGET) -> tuple[Any, list[str]]:
    """Serve one call; return its end and what it showed before."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        report = worker_main._Report(theirs)
        order = Call(os.getcwd(), target, {"what": what, "number": number})
        end = worker_main._serve(order, report)
        worker_main._send(theirs, end)
        theirs.shutdown(socket.SHUT_WR)
        messages = [decode(line) for line in ours.makefile("rb")]
    assert type(messages[-1]) is type(end)
    return end, [m.text for m in messages if isinstance(m, Progress)]


def test_a_served_call_ends_in_its_result_after_what_it_showed() -> None:
    assert serve("count", 2) == (Result(ToolOutput("counted")), ["0 ü", "1 ü"])


def test_a_served_call_that_fails_says_so() -> None:
    end, _shown = serve("fail")
    assert end == Failure("it went wrong", "WRONG")


@pytest.mark.parametrize(
    ("what", "target", "type_name"),
    [
        ("crash", TARGET, "ValueError"),
        ("echo", "worker_tools:Missing", "AttributeError"),
        ("echo", "no_such_module:Tool", "ModuleNotFoundError"),
    ],
)
def test_a_served_call_that_crashes_tells_its_type(what: str, target: str, type_name: str) -> None:
    end, _shown = serve(what, target=target)

    assert isinstance(end, Crash)
    assert end.type_name == type_name
    assert type_name in end.traceback


def test_an_order_to_stop_is_heard_while_a_call_runs_and_the_end_of_orders_is_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    calls: Any = queue.SimpleQueue()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = threading.Thread(target=worker_main._read_orders, args=(theirs, calls))
        reader.start()
        worker_main._send(ours, Call("/", TARGET, {}))  # type: ignore[arg-type]
        order, report = calls.get(timeout=LIMIT_S)
        assert not report.aborted
        worker_main._send(ours, Abort())  # type: ignore[arg-type]
        assert report.abort.wait(LIMIT_S)
        ours.shutdown(socket.SHUT_WR)
        reader.join(LIMIT_S)

    assert order.target == TARGET
    assert report.aborted
    assert ended == [0]


# --- the search, in this process ------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "src/one.py").write_text("alpha\nBeta alpha\r\n", encoding="utf-8")
    (tmp_path / "src/two.txt").write_text("x" * 400 + "alpha" + "y" * 400, encoding="utf-8")
    (tmp_path / ".git/hidden.py").write_text("alpha", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\0alpha")
    (tmp_path / "link").symlink_to(tmp_path / "src/one.py")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def search(
    where: Path, pattern: str, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> list[dict[str, Any]]:
    request = {"path": str(where), "pattern": pattern, "regex": False, "glob": None}
    request |= {"case_sensitive": True, "max_results": 9} | more
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr("sys.stdout", said := io.StringIO())
    search_worker.main()
    return [json.loads(line) for line in said.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, [("one.py", 1), ("one.py", 2), ("two.txt", 1)]),
        ({"glob": "*.py"}, [("one.py", 1), ("one.py", 2)]),
        ({"glob": "src/*.{txt,md}"}, [("two.txt", 1)]),
        ({"glob": "**/[!o]*.???"}, [("two.txt", 1)]),
        ({"regex": True, "pattern": "^beta", "case_sensitive": False}, [("one.py", 2)]),
    ],
)
def test_a_search_finds_lines_of_files_it_should_look_into(
    tree: Path, more: dict[str, Any], found: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = search(tree, more.pop("pattern", "alpha"), monkeypatch, **more)

    matches = [match for match in said if "path" in match]
    assert [(Path(match["path"]).name, match["line"]) for match in matches] == found
    assert all(list(rest) == ["skipped"] for rest in said if rest not in matches)


def test_a_search_cuts_what_is_too_much_and_shows_the_part_around_a_match(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert search(tree, "alpha", monkeypatch, max_results=1)[-1] == {"is_cut": True}
    (match,) = search(tree / "src/two.txt", "alpha", monkeypatch)
    assert match["text"].startswith("…x")
    assert "alpha" in match["text"]
    assert len(match["text"]) < 310


def test_a_search_says_what_is_wrong_with_the_request(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wrong,) = search(tree, "(", monkeypatch, regex=True)
    (missing,) = search(tree / "nosuch", "alpha", monkeypatch)

    assert "pattern is wrong" in wrong["error"]
    assert "does not exist" in missing["error"]
