from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from worker_tools import Args, Blocking

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import Text, ToolContent
from agent_core.errors import ToolError
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Tool, ToolContext, ToolOutput
from agent_core.tools.worker import run_in_worker


class Call:
    """One call by hand: its controller, what it showed, and events for what it shows."""

    def __init__(self, place: Path) -> None:
        self.controller = AbortController()
        self.shown: list[str] = []
        self.has_shown = anyio.Event()
        agent: Any = SimpleNamespace()
        roots, files, commands = Roots(str(place)), LocalFiles(), LocalCommands()
        self.context = ToolContext(
            agent, "call", self.controller.signal, roots, files, commands, self._progress
        )

    def _progress(self, content: tuple[ToolContent, ...]) -> None:
        self.shown += [item.text for item in content if isinstance(item, Text)]
        self.has_shown.set()


async def abort_once_it_shows(tool: Tool, args: Args, call: Call) -> ToolOutput | BaseException:
    outcome: list[ToolOutput | BaseException] = []

    async def run() -> None:
        try:
            outcome.append(await tool.run(args, call.context))
        except (ToolError, TurnAborted) as exc:
            outcome.append(exc)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await call.has_shown.wait()
            call.controller.abort(USER)
    return outcome[0]


def pids_with(argument: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in words:
            found.append(int(pid))
    return found


def children() -> set[int]:
    """Our own workers; tests beside these have others."""
    found = set()
    for pid in pids_with("agent_core.tools.worker_main"):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
            found.add(pid)
    return found


@pytest.fixture
def no_worker_left() -> Callable[[], None]:
    before = children()

    def check() -> None:
        assert children() <= before

    return check


async def test_arguments_and_result_travel_and_the_next_call_finds_the_worker_warm(
    tmp_path: Path, no_worker_left: Callable[[], None]
) -> None:
    tool = Blocking()

    first = (await tool.run(Args("echo", 1), Call(tmp_path).context)).output.split()
    second = (await tool.run(Args("echo", 2), Call(tmp_path).context)).output.split()

    assert (first[1], second[1]) == ("1", "2")
    assert first[0] == second[0] != str(os.getpid())
    await tool.aclose()
    no_worker_left()


async def test_progress_arrives_in_order(tmp_path: Path) -> None:
    tool, call = Blocking(), Call(tmp_path)

    output = await tool.run(Args("count", 500), call.context)

    assert output.output == "counted"
    assert call.shown == [f"{number} ü" for number in range(500)]
    await tool.aclose()


@pytest.mark.requirement("R94", "B019")
@pytest.mark.parametrize("what", ["spin", "stuck_in_c"])
async def test_work_that_looks_at_nothing_is_ended_by_the_abort(
    what: str, tmp_path: Path, no_worker_left: Callable[[], None]
) -> None:
    tool, call = Blocking(), Call(tmp_path)

    outcome = await abort_once_it_shows(tool, Args(what), call)

    assert isinstance(outcome, TurnAborted)
    no_worker_left()
    again = await tool.run(Args("echo", 3), Call(tmp_path).context)
    assert again.output.endswith(" 3")
    await tool.aclose()


@pytest.mark.requirement("R94")
async def test_what_the_work_started_ends_with_it(tmp_path: Path) -> None:
    tool, call, number = Blocking(), Call(tmp_path), 71_000 + os.getpid() % 1000

    outcome = await abort_once_it_shows(tool, Args("with_child", number), call)

    assert isinstance(outcome, TurnAborted)
    assert pids_with(str(number)) == []


async def test_work_that_looks_at_the_abort_ends_in_peace_and_keeps_its_worker(
    tmp_path: Path,
) -> None:
    tool = Blocking()
    pid = (await tool.run(Args("echo"), Call(tmp_path).context)).output.split()[0]

    outcome = await abort_once_it_shows(tool, Args("polite"), Call(tmp_path))
    after = (await tool.run(Args("echo"), Call(tmp_path).context)).output.split()[0]

    assert isinstance(outcome, ToolOutput)
    assert outcome.output == "stopped by itself"
    assert after == pid
    await tool.aclose()


async def test_a_worker_that_dies_is_the_failure_of_that_call_only(
    tmp_path: Path, no_worker_left: Callable[[], None]
) -> None:
    tool = Blocking()

    with pytest.raises(ToolError) as died:
        await tool.run(Args("die"), Call(tmp_path).context)
    after = await tool.run(Args("echo", 4), Call(tmp_path).context)

    assert died.value.code == "WORKER_DIED"
    assert after.output.endswith(" 4")
    await tool.aclose()
    no_worker_left()


async def test_a_crash_tells_its_type_and_nothing_else(tmp_path: Path) -> None:
    tool = Blocking()

    with pytest.raises(ToolError) as crash:
        await tool.run(Args("crash"), Call(tmp_path).context)
    with pytest.raises(ToolError) as failure:
        await tool.run(Args("fail"), Call(tmp_path).context)

    assert crash.value.message == "The tool failed unexpectedly (ValueError)."
    assert (failure.value.code, failure.value.message) == ("WRONG", "it went wrong")
    await tool.aclose()


async def test_what_the_work_prints_neither_blocks_it_nor_reaches_anybody(tmp_path: Path) -> None:
    tool = Blocking()

    with anyio.fail_after(10):
        output = await tool.run(Args("noise"), Call(tmp_path).context)

    assert output.output == "quiet"
    await tool.aclose()


async def test_calls_at_the_same_time_have_a_worker_each(tmp_path: Path) -> None:
    tool = Blocking()
    pids: set[str] = set()

    async def run() -> None:
        pids.add((await tool.run(Args("echo"), Call(tmp_path).context)).output.split()[0])

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(run)

    assert len(pids) == 3
    await tool.aclose()


async def test_a_cancelled_host_ends_the_worker_first(
    tmp_path: Path, no_worker_left: Callable[[], None]
) -> None:
    tool, call = Blocking(), Call(tmp_path)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tool.run, Args("spin"), call.context)
            await call.has_shown.wait()
            tasks.cancel_scope.cancel()

    no_worker_left()


async def test_a_signal_that_fired_before_starts_nothing(
    tmp_path: Path, no_worker_left: Callable[[], None]
) -> None:
    tool, call = Blocking(), Call(tmp_path)
    call.controller.abort(USER)

    with pytest.raises(TurnAborted):
        await tool.run(Args("echo"), call.context)

    no_worker_left()


async def test_a_class_no_worker_could_import_is_refused(tmp_path: Path) -> None:
    class Local(Blocking):
        pass

    with pytest.raises(TypeError, match="importable"):
        await run_in_worker(Local(), Args("echo"), Call(tmp_path).context)


async def test_a_worker_that_serves_two_sessions_works_in_the_directory_of_each(
    tmp_path: Path,
) -> None:
    tool, places = Blocking(), [tmp_path / "one", tmp_path / "two"]
    answers = []
    for place in (*places, places[0]):
        place.mkdir(exist_ok=True)
        answers.append((await tool.run(Args("place"), Call(place).context)).output.split())
    await tool.aclose()

    assert [place for _pid, place in answers] == [str(places[0]), str(places[1]), str(places[0])]
    assert len({pid for pid, _place in answers}) == 1


async def test_a_directory_that_is_gone_fails_the_call_and_not_the_worker(tmp_path: Path) -> None:
    tool, gone = Blocking(), tmp_path / "gone"
    pid, _place = (await tool.run(Args("place"), Call(tmp_path).context)).output.split()

    with pytest.raises(ToolError):
        await tool.run(Args("place"), Call(gone).context)

    again, place = (await tool.run(Args("place"), Call(tmp_path).context)).output.split()
    await tool.aclose()
    assert (again, place) == (pid, str(tmp_path))
