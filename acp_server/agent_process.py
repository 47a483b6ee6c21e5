"""An agent as a child process, spoken to over its stdio; for what is said see `client`.

An agent that does not read is not read. At the end nothing is left of it, or of what it started.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio
from anyio.abc import TaskGroup

from acp_server.client import AgentConnection, AgentGone
from acp_server.peer import Method
from acp_server.transports.stdio import FdOutbox, read_lines
from agent_core.logs import get_logger

__all__ = ["AgentProcess", "open_agent"]

TERMINATE_LIMIT_S: Final = 2.0
LAST_WORDS_S: Final = 1.0
"""How long an agent that does not read may hold up the end of its input."""
POLL_S: Final = 0.02

log = get_logger(__name__)


@asynccontextmanager
async def open_agent(
    command: Sequence[str],
    *,
    cwd: str,
    methods: Mapping[str, Method],
    notifications: Mapping[str, Callable[[bytes | None], None]],
    on_stderr: Callable[[str], None] | None = None,
    environ: Mapping[str, str] | None = None,
    grace_s: float = 5.0,
) -> AsyncIterator[AgentProcess]:
    """Start the agent in a session of its own and connect to it; end it when the block ends.

    A Ctrl-C in our terminal does not reach the agent. Ending it means: end of its input, then
    `grace_s` later SIGTERM, then SIGKILL, each to its process group, of which nothing is left.
    Cancellation: safe; the agent is ended first. Concurrency: any number of agents.

    Args:
        command: Program and arguments.
        cwd: Where the agent's process starts, an absolute path.
        methods: The requests it may make of us, as `Peer` takes them.
        notifications: What it may tell us, likewise. What these raise is logged and goes no
            further.
        on_stderr: Called with each line the agent logs, without its end of line.
        environ: Its whole environment; `None` for ours.
        grace_s: Seconds the agent has to leave by itself.

    Raises:
        AgentGone: The agent could not be started.
    """
    process = _start(command, cwd, environ)
    async with anyio.create_task_group() as tasks:
        agent = AgentProcess(process, tasks, methods, notifications, on_stderr)
        tasks.start_soon(agent._run, name=f"agent {process.pid}")
        try:
            yield agent
        finally:
            agent.hang_up()
            with anyio.CancelScope(shield=True):
                await agent._end(grace_s)
            tasks.cancel_scope.cancel()


class AgentProcess(AgentConnection):
    """A connection to one agent process. Made by `open_agent`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        tasks: TaskGroup,
        methods: Mapping[str, Method],
        notifications: Mapping[str, Callable[[bytes | None], None]],
        on_stderr: Callable[[str], None] | None,
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._outbox = FdOutbox(self._stdin.fileno())
        super().__init__(self._outbox, tasks, methods, notifications)
        self._on_stderr = on_stderr
        # Ended by `_end` alone, which needs them until the process is gone.
        self._running = anyio.CancelScope(shield=True)
        self._writing = anyio.CancelScope()
        self._stdout_closed, self._stderr_closed = anyio.Event(), anyio.Event()
        self._exited = anyio.Event()
        self._failures: ExceptionGroup | None = None

    @property
    def pid(self) -> int:
        """The agent's process id, which is also its process group's."""
        return self._process.pid

    def terminate(self) -> None:
        """Tell its process group to end, without a wait: for who cannot stay until it has."""
        self._signal_group(signal.SIGTERM)

    def why_gone(self) -> AgentGone:
        """Say how the agent ended; meant for after `ended`."""
        code = self._process.returncode
        if code is None:
            return AgentGone("the agent closed its output")
        if code < 0:
            return AgentGone(f"the agent was ended by {_signal_name(-code)}")
        return AgentGone(f"the agent ended with exit code {code}")

    # --- the process -------------------------------------------------------------------------

    async def _run(self) -> None:
        with self._running:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._use_streams)
                tasks.start_soon(self._watch_exit)
        if self._failures is not None:
            raise self._failures

    async def _use_streams(self) -> None:
        # What fails here must not take the watch over the process along: `_end` waits for that.
        try:
            async with anyio.create_task_group() as tasks:
                for work in (self._write, self._read_stdout, self._read_stderr):
                    tasks.start_soon(work)
        except ExceptionGroup as failures:
            self._failures = failures
            self._stdout_closed.set()
            self._stderr_closed.set()
            self._settle()

    async def _write(self) -> None:
        # Whoever waits for an answer hears of a lost agent from `ended`, with the exit code.
        with self._stdin, self._writing:
            await self._outbox.run(lambda: log.debug("agent_closed_its_input", pid=self.pid))

    async def _read_stdout(self) -> None:
        with self._stdout:
            await read_lines(self._stdout.fileno(), self._receive, pace=self._pace)
        self._stdout_closed.set()
        # An agent that ends closes its output first; its exit code is worth a short wait.
        with anyio.move_on_after(TERMINATE_LIMIT_S):
            await self._exited.wait()
            await self._stderr_closed.wait()
        self._settle()

    async def _pace(self) -> None:
        if self._outbox.is_congested:
            await self._outbox.drained()

    async def _read_stderr(self) -> None:
        with self._stderr:
            await read_lines(self._stderr.fileno(), self._log)
        self._stderr_closed.set()

    async def _watch_exit(self) -> None:
        await _exit_of(self._process)
        # What it started may finish, and then goes too. It is reaped last: until then no other
        # process group can have its number.
        with anyio.move_on_after(TERMINATE_LIMIT_S):
            await self._stdout_closed.wait()
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        with anyio.move_on_after(TERMINATE_LIMIT_S):  # dead ones stay where nobody reaps orphans
            while self._signal_group(0):  # noqa: ASYNC110 - there is nothing to wait on
                await anyio.sleep(POLL_S)
        self._exited.set()
        if not self._stdout_closed.is_set():  # held open by what left the group
            self._settle()

    async def _end(self, grace_s: float) -> None:
        with anyio.move_on_after(LAST_WORDS_S):
            await self._outbox.flushed()
        self._writing.cancel()  # which closes its input
        for limit_s, number in ((grace_s, signal.SIGTERM), (TERMINATE_LIMIT_S, signal.SIGKILL)):
            with anyio.move_on_after(limit_s):
                await self._exited.wait()
            if not self._exited.is_set():
                self._signal_group(number)
        await self._exited.wait()
        self._running.cancel()

    def _signal_group(self, number: int) -> bool:
        """Send a signal, 0 for none, to the agent's group; say whether there is such a group."""
        try:
            os.killpg(self.pid, number)
            return True
        except (ProcessLookupError, PermissionError):
            # macOS says "not permitted" of a group that holds only zombies.
            return False

    def _log(self, line: bytes | None) -> None:
        if line:
            kept = self._keep("", line)
            if self._on_stderr is not None:
                self._on_stderr(kept)


def _start(
    command: Sequence[str], cwd: str, environ: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise AgentGone(f"cannot start {error.filename or command[0]}: {error.strerror}") from error
    except ValueError as error:  # a NUL character
        raise AgentGone(f"cannot start {command[0]}: {error}") from error
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
    return process


async def _exit_of(process: subprocess.Popen[bytes]) -> None:
    """Wait for the exit; where there are pidfds, the process is not reaped by it."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        while process.poll() is None:  # noqa: ASYNC110 - there is nothing to wait on
            await anyio.sleep(POLL_S)
        return
    try:
        await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
