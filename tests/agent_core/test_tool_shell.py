from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agent_core.cancellation import USER, AbortController
from agent_core.content import Text, ToolContent
from agent_core.errors import ToolError
from agent_core.tools import process_table
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.processes import ProcessTree, run_to_end
from agent_core.tools.roots import Roots
from agent_core.tools.shell import Shell
from agent_core.tools.tool import CommandAborted, CommandResult, ToolContext, ToolOutput


def processes_with(text: str) -> list[int]:
    """Find living processes by their command line or their environment."""
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        folder = Path("/proc", name)
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            data = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if state != "Z" and text.encode() in data and int(name) != os.getpid():
            found.append(int(name))
    return found


def zombies_of_ours() -> list[int]:
    own = os.getpid()
    table, _ = process_table.list_since(b"?", "?", 0)
    return [p.pid for p in table if p.parent == own and p.state == "Z"]


class Running:
    """One command of `LocalCommands`, and a tag that all of its processes carry."""

    def __init__(self, cwd: Path) -> None:
        self.controller = AbortController()
        self.shown: list[str] = []
        self._cwd = str(cwd)
        self._has_shown = anyio.Event()
        self.tag = f"tag-{uuid.uuid4().hex}"

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        return await LocalCommands().run(
            f"export TEST_TAG={self.tag}; {command}",
            cwd=self._cwd,
            signal=self.controller.signal,
            timeout_s=timeout_s,
            show=self._show,
        )

    async def shows(self, text: str) -> None:
        """Wait until the command has printed `text`."""
        while not (self.shown and text in self.shown[-1]):
            self._has_shown = anyio.Event()
            await self._has_shown.wait()

    async def abort_when_ready(self, command: str) -> CommandResult:
        """Run the command, abort it when it has printed "ready", and return what is left of it."""
        results: list[CommandResult] = []

        async def run() -> None:
            with pytest.raises(CommandAborted) as aborted:
                await self.run(command)
            results.append(aborted.value.result)

        with anyio.fail_after(8):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await self.shows("ready")
                self.controller.abort(USER)
        return results[0]

    @property
    def left(self) -> list[int]:
        return processes_with(self.tag)

    def _show(self, content: tuple[ToolContent, ...]) -> None:
        self.shown += [item.text for item in content if isinstance(item, Text)]
        self._has_shown.set()


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path)


# --- what an abort leaves: nothing ----------------------------------------------------------


@pytest.mark.requirement("R73", "R97", "B100", "B101")
@pytest.mark.parametrize(
    "command",
    [
        "echo ready; sleep 1000",
        "echo ready; exec sleep 1000",
        "echo ready; yes | while read l; do sleep 1; done",
        "setsid sleep 1000 & echo ready; wait",
        "nohup sleep 1000 & echo ready; wait",
        "(setsid sh -c 'sleep 1000 & sleep 1001 &' &); echo ready; sleep 1002",
        "(setsid sh -c 'exec >/dev/null 2>&1; sleep 1000 & echo' &); echo ready; sleep 1001",
        "sh -c 'sh -c \"sleep 1000; :\"; :'& echo ready; wait",
        "yes ready",
    ],
)
async def test_an_abort_ends_every_process_of_the_command(running: Running, command: str) -> None:
    result = await running.abort_when_ready(command)

    assert running.left == []
    assert zombies_of_ours() == []
    assert result.output.startswith("ready\n")


@pytest.mark.requirement("R73", "R94")
async def test_what_ignores_term_is_killed(running: Running) -> None:
    result = await running.abort_when_ready("trap '' TERM; echo ready; while :; do sleep 1; done")

    assert running.left == []
    assert result.exit_code == -9


@pytest.mark.requirement("R73")
@pytest.mark.parametrize(
    "command",
    [
        # a daemon that keeps the pipe, then a child that keeps only its parent
        "(env -i setsid sh -c 'sleep SECONDS & :' &); sleep 0.1; echo ready; sleep 1000",
        "env -i setsid sleep SECONDS >/dev/null 2>&1 & sleep 0.1; echo ready; wait",
    ],
)
async def test_what_dropped_its_environment_is_ended_too(running: Running, command: str) -> None:
    seconds = f"1000.{uuid.uuid4().int % 10**9}"

    await running.abort_when_ready(command.replace("SECONDS", seconds))

    assert processes_with(seconds) == []


async def test_a_stopped_process_is_woken_to_end(running: Running) -> None:
    result = await running.abort_when_ready("trap 'echo bye; exit' TERM; echo ready; kill -STOP $$")

    assert result.output == "ready\nbye\n"


async def test_what_handles_term_may_clean_up_and_say_so(running: Running) -> None:
    result = await running.abort_when_ready(
        "trap 'sleep 0.1; head -c 300000 /dev/zero; echo bye; exit 7' TERM; echo ready; "
        "while :; do sleep 0.05; done"
    )

    assert result.output.endswith("bye\n")
    assert result.exit_code == 7
    assert running.left == []


@pytest.mark.requirement("B101")
async def test_a_shell_whose_child_is_ended_does_not_go_on_to_its_next_command(
    running: Running, tmp_path: Path
) -> None:
    await running.abort_when_ready("echo ready; sleep 1000; touch went-on")

    assert os.listdir(tmp_path) == []


async def test_a_signal_that_fired_before_starts_nothing(running: Running, tmp_path: Path) -> None:
    running.controller.abort(USER)

    with pytest.raises(CommandAborted):
        await running.run("touch started")

    assert os.listdir(tmp_path) == []


@pytest.mark.requirement("R73", "B101")
async def test_cancelling_the_host_task_ends_every_process_first(running: Running) -> None:
    task = asyncio.create_task(running.run("setsid sleep 1000 & echo ready; sleep 1001"))
    with anyio.fail_after(5):
        await running.shows("ready")

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert running.left == []


async def test_a_second_cancel_of_the_host_task_kills_at_once(running: Running) -> None:
    task = asyncio.create_task(
        running.run("trap 'echo asked' TERM; echo ready; while :; do sleep 0.02; done")
    )
    with anyio.fail_after(1.9):  # less than what TERM is given
        await running.shows("ready")
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
        assert not task.done()

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert running.left == []
    assert zombies_of_ours() == []


async def test_a_cancelled_scope_of_the_caller_ends_every_process(
    running: Running, tmp_path: Path
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            running.run,
            "trap 'sleep 0.1; touch cleaned-up; exit' TERM; sleep 1000 & echo ready; "
            "while :; do sleep 0.05; done",
        )
        with anyio.fail_after(5):
            await running.shows("ready")
        tasks.cancel_scope.cancel()

    assert running.left == []
    assert os.listdir(tmp_path) == ["cleaned-up"]


async def test_without_proc_the_group_and_the_descendants_end(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_table, "start_of", lambda pid: -1)

    await running.abort_when_ready("setsid sleep 1000 & sleep 1001 & echo ready; wait")

    assert running.left == []


# --- what a normal end leaves: nothing ------------------------------------------------------


@pytest.mark.requirement("R73")
@pytest.mark.parametrize(
    ("command", "leftovers"),
    [
        ("sleep 1000 & echo started", 1),
        ("setsid sleep 1000 & echo started", 1),
        ("(setsid sh -c 'sleep 1000 & sleep 1001 &' &); sleep 0.1; echo started", 2),
        ("setsid sleep 1000 >/dev/null 2>&1 & echo started", 1),
    ],
)
async def test_background_processes_are_ended_with_the_command(
    running: Running, command: str, leftovers: int
) -> None:
    with anyio.fail_after(5):
        result = await running.run(command)

    assert running.left == []
    assert (result.output, result.exit_code) == ("started\n", 0)
    assert result.ended_leftovers == leftovers


async def test_a_leftover_that_floods_the_pipe_is_ended_too(running: Running) -> None:
    with anyio.fail_after(5):
        result = await running.run("yes & sleep 0.1")

    assert running.left == []
    assert result.ended_leftovers == 1


async def test_what_ends_by_itself_right_behind_the_shell_is_no_leftover(running: Running) -> None:
    with anyio.fail_after(5):
        result = await running.run("(sleep 0.03; echo late) & echo early")

    assert result == CommandResult(0, "early\nlate\n")


async def test_all_output_of_a_command_that_ends_at_once_is_read(running: Running) -> None:
    for n_bytes in (0, 1, 4096, 30_000):
        result = await running.run(f"head -c {n_bytes} /dev/zero | tr '\\0' x")

        assert result.output == "x" * n_bytes


async def test_no_descriptor_is_left_after_many_runs(running: Running) -> None:
    await running.run("true")
    before = os.listdir("/proc/self/fd")

    for number in range(50):
        assert (await running.run(f"exit {number}")).exit_code == number

    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert zombies_of_ours() == []


# --- how a command ends ---------------------------------------------------------------------


async def test_an_unknown_command_exits_with_127(running: Running) -> None:
    result = await running.run("there-is-no-such-command")

    assert result.exit_code == 127
    assert "not found" in result.output


async def test_a_command_has_no_input_and_stderr_is_output(running: Running) -> None:
    assert (await running.run("cat; echo oops >&2")).output == "oops\n"


async def test_a_directory_that_is_missing_is_a_tool_error(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="could not be started"):
        await Running(tmp_path / "missing").run("true")


async def test_a_command_with_a_nul_character_is_a_tool_error(running: Running) -> None:
    with pytest.raises(ToolError, match="null byte"):
        await running.run("echo \0")


async def test_a_command_that_takes_too_long_is_ended_and_its_output_told(
    running: Running,
) -> None:
    with anyio.fail_after(5), pytest.raises(ToolError, match=r"0\.2 s(.|\n)*so far") as error:
        await running.run("echo so far; sleep 1000 & sleep 1001", timeout_s=0.2)

    assert error.value.code == "TOOL_TIMEOUT"
    assert running.left == []


# --- output ---------------------------------------------------------------------------------


@pytest.mark.requirement("B106")
async def test_characters_split_across_reads_stay_whole(running: Running) -> None:
    result = await running.run(
        r"for b in 303 251 342 202 254 360 237 231 202; do printf \\$b; sleep 0.02; done"
    )

    assert result.output == "é€🙂"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in running.shown)


async def test_bytes_that_are_no_text_are_replaced(running: Running) -> None:
    assert (await running.run(r"printf 'a\377b'")).output == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.requirement("B104")
async def test_of_a_flood_the_first_and_the_last_is_kept(running: Running) -> None:
    n_turns = 0

    async def count_turns() -> None:
        nonlocal n_turns
        while True:
            await anyio.lowlevel.checkpoint()
            n_turns += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_turns)
        result = await running.run(
            "echo first; head -c 50000000 /dev/zero | tr '\\0' x; echo; echo last"
        )
        tasks.cancel_scope.cancel()

    assert n_turns > 700  # at most 64 KiB were read in each turn of the event loop
    assert result.is_truncated
    assert result.output.startswith("first\nxxx")
    assert result.output.endswith("xxx\nlast\n")
    left_out = 6 + 50_000_000 + 6 - 32 * 1024
    assert f"\n[… {left_out} bytes left out …]\n" in result.output
    assert len(result.output) < 33 * 1024


async def test_cut_output_is_cut_between_characters(running: Running) -> None:
    result = await running.run("printf x; yes 🙂 | head -n 20000 | tr -d '\\n'")

    head, _, rest = result.output.partition("\n[… ")
    left_out, _, tail = rest.partition(" bytes left out …]\n")
    assert set(head) == {"x", "🙂"}
    assert set(tail) == {"🙂"}
    assert len((head + tail).encode()) + int(left_out) == 1 + 4 * 20000


async def test_output_is_shown_while_the_command_runs(running: Running) -> None:
    result = await running.abort_when_ready("echo one; sleep 0.5; echo two; echo ready; sleep 1000")

    assert running.shown[0] == "one\n"
    assert running.shown[-1] == result.output == "one\ntwo\nready\n"


# --- processes ------------------------------------------------------------------------------


async def test_a_tree_gives_its_input_to_the_first_process(tmp_path: Path) -> None:
    pieces: list[bytes] = []
    tree = ProcessTree(["/bin/cat"], cwd=str(tmp_path), stdin=b"hello")

    ending = await run_to_end(
        tree, signal=AbortController().signal, timeout_s=5, on_output=pieces.append
    )

    assert (ending, pieces, tree.exit_code) == (("exited", 0), [b"hello"], 0)


async def test_a_listener_that_fails_leaves_no_process(tmp_path: Path) -> None:
    def fail(_piece: bytes) -> None:
        raise RuntimeError("broken")

    tree = ProcessTree(["/bin/sh", "-c", "echo; sleep 1000"], cwd=str(tmp_path))
    with anyio.fail_after(5), pytest.raises(ExceptionGroup):
        await run_to_end(tree, signal=AbortController().signal, timeout_s=None, on_output=fail)

    assert processes_with(tree.id) == []


# --- the tool -------------------------------------------------------------------------------


class Shown:
    """Runs the tool with what it needs, and keeps what it showed."""

    def __init__(self, cwd: Path) -> None:
        self.progress: list[tuple[ToolContent, ...]] = []
        self.controller = AbortController()
        self.on_progress: Callable[[], object] = lambda: None
        self.context = ToolContext(
            agent=None,  # type: ignore[arg-type]
            call_id="call_1",
            signal=self.controller.signal,
            roots=Roots(str(cwd)),
            files=LocalFiles(),
            commands=LocalCommands(),
            progress=self._progress,
        )

    def run(self, arguments: str) -> Awaitable[ToolOutput]:
        shell = Shell()
        return shell.run(shell.parse(arguments), self.context)

    def _progress(self, content: tuple[ToolContent, ...]) -> None:
        self.progress.append(content)
        self.on_progress()


async def test_the_tool_runs_in_the_cwd(tmp_path: Path) -> None:
    output = await Shown(tmp_path).run('{"command": "pwd"}')

    assert output == ToolOutput(f"{tmp_path}")


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("echo no; exit 3", "no\n[exit code 3]"),
        ("exit 1", "(no output)\n[exit code 1]"),
        ("kill -KILL $$", "(no output)\n[ended by signal SIGKILL]"),
    ],
)
async def test_a_failed_command_is_an_error_with_its_exit_code(
    tmp_path: Path, command: str, output: str
) -> None:
    result = await Shown(tmp_path).run(f'{{"command": "{command}"}}')

    assert result == ToolOutput(output, is_error=True, code="EXIT")


async def test_the_tool_says_that_it_ended_leftovers(tmp_path: Path) -> None:
    output = await Shown(tmp_path).run('{"command": "sleep 1000 & echo hi"}')

    assert output == ToolOutput("hi\n[1 background process(es) it left were ended]")


@pytest.mark.requirement("R73")
async def test_an_aborted_command_gives_what_it_printed(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    shown.on_progress = lambda: shown.controller.abort(USER)

    with anyio.fail_after(5):
        output = await shown.run('{"command": "echo half; sleep 1000"}')

    assert output.output == "half\n[stopped before it was done]"
    assert (output.is_error, output.code) == (True, "ABORTED")


async def test_progress_shows_the_end_of_the_output_only(tmp_path: Path) -> None:
    shown = Shown(tmp_path)

    await shown.run('{"command": "head -c 9000 /dev/zero | tr \'\\\\0\' x; echo end; sleep 0.3"}')

    (content,) = shown.progress[-1]
    assert isinstance(content, Text)
    assert content.text == "x" * 4092 + "end\n"


@pytest.mark.parametrize("arguments", ["{}", '{"command": ""}', '{"command": "a", "timeout_s": 0}'])
def test_wrong_arguments_are_refused(arguments: str) -> None:
    with pytest.raises(ToolError) as error:
        Shell().parse(arguments)

    assert error.value.code == "BAD_ARGUMENTS"


def test_a_command_is_announced_on_one_short_line(tmp_path: Path) -> None:
    args: Any = Shell().parse('{"command": "echo a;\\n  echo b"}')
    long: Any = Shell().parse(f'{{"command": "{"x" * 500}"}}')

    assert Shell().view(args, Roots(str(tmp_path))).title == "Run: echo a; echo b"
    assert Shell().view(long, Roots(str(tmp_path))).title == f"Run: {'x' * 99}…"


def test_always_covers_the_exact_command_only() -> None:
    args: Any = Shell().parse('{"command": "ls"}')

    assert Shell().remember_key(args) == ("shell:ls", "this exact command")
