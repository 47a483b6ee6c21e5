"""All processes of one command: started as one tree, watched, and ended to the last one.

The rules:
1. A member is whoever is in the first process's group or session, descends from a member, or
   carries the command's id in its environment or its pipe as stdout. These find daemons that left
   the group and lost their parent.
2. `end` returns when no member is left: TERM to those there are, 2 s, then KILL until none turns
   up. It never waits for the pipe to close, which a process that is not ours to end could hold.
3. The first process is reaped last. Until then its pid, and with it the group's, cannot be reused.

What escapes is a process that left the group, lost its parent, hides or drops its environment *and*
closed its stdout; and one of another user, which only that user may end (it is logged). Without
``/proc`` (macOS) members are known by group and descent only.
"""

from __future__ import annotations

import os
import signal as signals
import subprocess
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

import anyio

from agent_core.cancellation import AbortSignal, TurnAborted
from agent_core.errors import ToolError
from agent_core.logs import get_logger
from agent_core.tools import process_table
from agent_core.tools.process_table import Process

__all__ = ["Ending", "ProcessTree", "kill_all", "run_to_end"]

TERM_GRACE_S: Final = 2.0
# What ends by itself right behind the shell, like the `tee` of a process substitution, may finish.
LINGER_S: Final = 0.1
_ID_VARIABLE: Final = "ACP_AGENT_COMMAND"
_CHUNK_BYTES: Final = 65536  # the capacity of a pipe: one read takes what there is
_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.02
_LOOKS: Final = 3  # at the table: a process may start another one behind our back

Ending = Literal["exited", "aborted", "timed_out"]
"""Why a command ended: the first process exited, the signal fired, or time ran out."""

log = get_logger(__name__)

_live: weakref.WeakSet[ProcessTree] = weakref.WeakSet()


def kill_all() -> None:
    """Kill every member of every tree that has not ended, and whatever else descends from us.

    For a process that exits at once. Blocks, but for a second for each at the most.
    """
    for tree in tuple(_live):
        tree.kill()
    # What is in no tree has its turn, too: a signal may come between a start and `_live.add`.
    groups: set[int] = set()
    _repeat(lambda: any(_kill_descendants(groups) for _ in range(_LOOKS)))


async def run_to_end(
    tree: ProcessTree,
    *,
    signal: AbortSignal,
    timeout_s: float | None,
    on_output: Callable[[bytes], None],
) -> tuple[Ending, int]:
    """Read `tree`'s output until it ends, or end it; then close it.

    Cancellation: safe; returns or raises only when no member is left. Concurrency: once per tree.

    Args:
        tree: Just started.
        signal: Ends it.
        timeout_s: Ends it likewise after so many seconds; `None` for no limit.
        on_output: Called with each piece of output as it arrives, 1 to 65,536 bytes.

    Returns:
        Why it ended, and how many members outlived the first process and had to be ended.
    """
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tree.pump, on_output)
            linger_s = 0.0
            try:
                ending = await _ending(tree, signal, timeout_s)
                linger_s = LINGER_S if ending == "exited" else 0.0
            finally:
                # The pump still runs: what handles TERM may have much to say before it exits.
                with anyio.CancelScope(shield=True):
                    leftovers = await tree.end(linger_s=linger_s)
            tasks.cancel_scope.cancel()
        tree.drain(on_output)
    finally:
        tree.close()
    return ending, leftovers


async def _ending(tree: ProcessTree, signal: AbortSignal, timeout_s: float | None) -> Ending:
    with anyio.move_on_after(timeout_s) as limit:
        try:
            async with signal.scope():
                await tree.wait_exit()
        except TurnAborted:
            return "aborted"
    return "timed_out" if limit.cancelled_caught else "exited"


class ProcessTree:
    """A command's processes. Starting one takes about a millisecond of the caller's thread.

    Attributes:
        id: Found in the environment of every member that did not drop it.
        pid: The first process, which leads a session and group of its own.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        stdin: bytes = b"",
        environ: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        is_spoken_to: bool = False,
        inherits_environ: bool = True,
    ) -> None:
        """Start `argv` with stdout and stderr in one pipe.

        Args:
            argv: The program and its arguments.
            cwd: Absolute.
            stdin: What it reads, at most 64 KiB.
            environ: Variables it gets besides ours.
            pass_fds: Descriptors it inherits, under the same numbers.
            is_spoken_to: Leave stdin open and give stderr a pipe of its own; see `pipes`.
            inherits_environ: Whether it gets our variables at all.

        Raises:
            ToolError: It cannot be started.
        """
        self.id = uuid.uuid4().hex
        # An agent inside an agent's command keeps the outer id, so that the outer one finds all.
        ids = f"{os.environ.get(_ID_VARIABLE, '')} {self.id}".strip()
        inherited = os.environ if inherits_environ else {}
        try:
            self._process = subprocess.Popen(
                argv,
                cwd=cwd,
                env={**inherited, **(environ or {}), _ID_VARIABLE: ids},
                pass_fds=pass_fds,
                stdin=subprocess.PIPE if stdin or is_spoken_to else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if is_spoken_to else subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:  # ValueError: a NUL character
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise ToolError(f"the command could not be started in {cwd}: {reason}") from exc
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._pidfd = _open_pidfd(self.pid)
        self._start = process_table.start_of(self.pid)
        self._pipe = f"pipe:[{os.fstat(self._output.fileno()).st_ino}]"
        _live.add(self)
        self._seen: set[int] = set()
        self._foreign: set[int] = set()
        self._has_ended = False
        if is_spoken_to:
            for fd in self.pipes:
                os.set_blocking(fd, False)
        elif self._process.stdin is not None:
            try:
                self._process.stdin.write(stdin)
            except BrokenPipeError:
                log.debug("command_closed_its_stdin", pid=self.pid)  # its exit code says why
            self._process.stdin.close()

    @property
    def pipes(self) -> tuple[int, int, int]:
        """The descriptors of our ends of stdin, stdout and stderr of one that is spoken to."""
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        return self._process.stdin.fileno(), self._output.fileno(), self._process.stderr.fileno()

    def close_stdin(self) -> None:
        """Let it read the end of its input. Nobody may be waiting for the pipe."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    @property
    def exit_code(self) -> int:
        """The first process's, negative for a signal. Known once the tree is closed."""
        return -signals.SIGKILL if self._process.returncode is None else self._process.returncode

    async def wait_exit(self) -> None:
        """Wait until the first process has exited. It is not reaped.

        Cancellation: safe. Concurrency: one task at a time.
        """
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
        while not self._has_exited():  # noqa: ASYNC110 - there is nothing to wait on
            await anyio.sleep(_LONGEST_PAUSE_S)

    async def pump(self, on_output: Callable[[bytes], None]) -> None:
        """Hand on output until the pipe is closed by all who hold it.

        Each piece is one turn of the event loop, so that a flood starves nobody.
        Cancellation: safe. Concurrency: one task.
        """
        while True:
            await anyio.wait_readable(self._output)
            if not self._read(on_output):
                return

    def drain(self, on_output: Callable[[bytes], None]) -> None:
        """Hand on what is in the pipe now."""
        # Bounded, because a process that is not ours to end may be writing still.
        for _ in range(64):
            try:
                if not self._read(on_output):
                    return
            except BlockingIOError:
                return

    async def end(self, *, linger_s: float = 0.0) -> int:
        """End all members and wait until they are gone.

        Cancellation: wants a shield; after an interruption `close` kills what is left.
        Concurrency: once.

        Args:
            linger_s: How long they may take to end by themselves.

        Returns:
            How many did not; 0 if they were given no time.
        """
        lingering = await self._left_after(linger_s) if linger_s else []
        if lingering or not linger_s:
            self._terminate()
            if await self._left_after(TERM_GRACE_S):
                while self._kill():
                    await self._pause(_LONGEST_PAUSE_S)
        self._has_ended = True
        return len(lingering)

    def kill(self) -> None:
        """Kill what is left, unless `end` has finished. Blocks, but for a second at the most."""
        if not self._has_ended:
            _repeat(self._kill)

    def close(self) -> None:
        """Reap the first process and let go of the pipe. If `end` did not finish, kill first."""
        self.kill()
        _live.discard(self)
        if self._has_exited():
            self._process.wait()
        else:
            log.error("process_not_ended", pid=self.pid)
        for pipe in (self._process.stdin, self._output, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _read(self, on_output: Callable[[bytes], None]) -> bool:
        chunk = os.read(self._output.fileno(), _CHUNK_BYTES)
        if chunk:
            on_output(chunk)
        return bool(chunk)

    def _has_exited(self) -> bool:
        if self._process.returncode is not None:
            return True
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    async def _left_after(self, limit_s: float) -> list[Process]:
        """Wait until all members are gone, or else return those that are there in `limit_s`."""
        deadline = anyio.current_time() + limit_s
        pause_s = _SHORTEST_PAUSE_S
        while (members := self._members()) and anyio.current_time() < deadline:
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return members

    async def _pause(self, limit_s: float) -> None:
        if self._has_exited():
            await anyio.sleep(limit_s)
            return
        with anyio.move_on_after(limit_s):
            await self.wait_exit()

    def _terminate(self) -> None:
        """Send TERM once to each member there is; what their clean-up starts is left to work."""
        members = self._members()  # before any of them dies and its children are nobody's
        # The group first and as one: if a child died before its shell got the signal, the shell
        # would go on to its next command.
        self._send_group(signals.SIGTERM)
        for member in members:
            if member.group != self.pid:
                self._send(member.pid, signals.SIGTERM)
            if member.state == "T":  # a stopped process acts on nothing but KILL
                self._send(member.pid, signals.SIGCONT)

    def _kill(self) -> bool:
        """Send KILL to every member; say whether there was one."""
        members = self._members()
        if members:
            self._send_group(signals.SIGKILL)
        for member in members:
            self._send(member.pid, signals.SIGKILL)
        return bool(members)

    def _send_group(self, number: signals.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            # Nobody is left but the zombie of the first process (macOS), or members of other
            # users, which are met one by one.
            log.debug("group_not_signalled", pid=self.pid)

    def _send(self, pid: int, number: signals.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it was faster
        except PermissionError:
            if pid != self.pid:  # the first process is waited for, whoever it became
                self._foreign.add(pid)
            log.warning("process_of_another_user_not_ended", pid=pid)

    def _members(self) -> list[Process]:
        """Return the members that are alive."""
        members: list[Process] = []
        for _ in range(_LOOKS):
            processes, is_exact = process_table.list_since(
                self.id.encode(), self._pipe, self._start
            )
            members = self._select(processes)
            # A zombie may have had a child after the list was made, like one that vanished.
            has_zombie = any(p.state == "Z" and p.pid != self.pid for p in processes)
            if members or (is_exact and not has_zombie):
                break
        if not self._has_exited() and all(member.pid != self.pid for member in members):
            members.append(Process(self.pid, os.getpid(), self.pid, self.pid, "R"))
        return members

    def _select(self, processes: Iterable[Process]) -> list[Process]:
        found = process_table.families(processes, self._is_root)
        # Remembered, because a member may lose the parent that made it one.
        self._seen = {process.pid for process in found}
        for process in found:
            if process.state == "Z" and process.pid != self.pid and process.parent == os.getpid():
                _reap(process.pid)  # an orphan came to us: we run as the init of a container
        return [p for p in found if p.state not in "ZX" and p.pid not in self._foreign]

    def _is_root(self, process: Process) -> bool:
        return (
            process.group == self.pid
            or process.session == self.pid
            or process.pid in self._seen
            or process.is_marked
        )


def _repeat(kill: Callable[[], bool]) -> None:
    """Call `kill` until it says that it met nobody. Blocks, but for a second at the most."""
    for _ in range(1000):
        if not kill():
            return
        time.sleep(_SHORTEST_PAUSE_S)


def _kill_descendants(groups: set[int]) -> bool:
    """Send KILL to every process that descends from us; say whether it reached one.

    Args:
        groups: Where earlier calls found descendants, to which this one adds. Who is in one counts,
            because its parent may be gone.
    """
    us = os.getpid()
    processes, _ = process_table.list_since(b"", "", process_table.start_of(us))
    family = process_table.families(processes, lambda p: p.parent == us or p.group in groups)
    groups |= {process.group for process in family} - {os.getpgrp()}
    is_reached = False
    for process in family:
        if process.state not in "ZX":
            try:
                os.kill(process.pid, signals.SIGKILL)
                is_reached = True
            except (ProcessLookupError, PermissionError):
                log.debug("descendant_not_killed", pid=process.pid)
    return is_reached


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # macOS, or a kernel or sandbox without it: exits are polled for


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        log.debug("orphan_already_reaped", pid=pid)
