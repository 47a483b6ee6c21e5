"""Python that cannot cooperate, behind a boundary that can be ended: a worker process.

A tool with ``isolation = "process"`` has its `work` called in a process of its own. Arguments and
result travel as JSON lines over a socket pair, progress comes back the same way. An abort is first
a polite request, then TERM, then KILL, and always a reaped process; a worker that dies is the
failure of that one call. A worker that ended its call in peace is kept for the next one, so that
starting Python is paid once.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref
from typing import Any, Final

import anyio
import msgspec

from agent_core.cancellation import TurnAborted
from agent_core.content import Text
from agent_core.errors import ToolError
from agent_core.logs import get_logger
from agent_core.tools.processes import ProcessTree
from agent_core.tools.tool import Tool, ToolContext, ToolOutput
from agent_core.tools.worker_protocol import Abort, Call, Crash, Failure, Progress, Result, decode

__all__ = ["end_workers", "run_in_worker"]

POLITE_S: Final = 0.25
"""What a call that looks at `Report.aborted` has to end by itself."""
MAX_IDLE: Final = 2
"""Idle workers kept for one tool; each costs what a Python process costs."""

_MAIN: Final = "agent_core.tools.worker_main"
_idle: weakref.WeakKeyDictionary[Tool, list[_Worker]] = weakref.WeakKeyDictionary()

log = get_logger(__name__)


async def run_in_worker(tool: Tool, args: Any, context: ToolContext) -> ToolOutput:
    """Call ``tool.work(args, report)`` in a worker and return what it returned.

    Cancellation: through ``context.signal``; a cancelled task ends the worker, too. Returns or
    raises only when the worker is idle or gone. Concurrency: any number; each has its own worker.

    Raises:
        ToolError: The call failed, or the worker died (code ``WORKER_DIED``).
        TurnAborted: The signal fired.
        TypeError: The tool's class cannot be imported by a worker.
    """
    context.signal.raise_if_aborted()
    target = _target(type(tool))
    idle = _idle.setdefault(tool, [])
    worker = idle.pop() if idle else _Worker(context.roots.cwd)
    try:
        output = await worker.call(target, args, context)
    finally:
        if worker.is_idle and len(idle) < MAX_IDLE:
            idle.append(worker)
        else:
            with anyio.CancelScope(shield=True):
                await worker.end()
    return output


async def end_workers(tool: Tool) -> None:
    """End the idle workers of `tool`.

    Cancellation: wants a shield. Concurrency: once, when no call is running.
    """
    for worker in _idle.pop(tool, []):
        await worker.end()


class _Worker:
    """One worker process and our end of its socket."""

    def __init__(self, cwd: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._tree = ProcessTree(
                    # -P: what lies in the session's directory is no module of ours.
                    [sys.executable, "-P", "-m", _MAIN, str(theirs.fileno())],
                    cwd=cwd,
                    environ={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._socket = ours
        self._unread = b""
        self.is_idle = True

    async def call(self, target: str, args: Any, context: ToolContext) -> ToolOutput:
        self.is_idle = False
        call, signal = Call(context.roots.cwd, target, args), context.signal
        try:
            async with signal.scope():
                await self._send(call)
                output = await self._outcome(context)
            return output
        except TurnAborted:
            with anyio.move_on_after(POLITE_S):
                await self._send(Abort())
                return await self._outcome(context)
            raise

    async def _outcome(self, context: ToolContext) -> ToolOutput:
        """Pass progress on until the call has ended, which leaves the worker idle."""
        while isinstance(message := await self._receive(), Progress):
            context.progress((Text(message.text),))
        if message is None:
            words: list[bytes] = []
            self._tree.drain(words.append)  # what Python said, if it could not even start
            log.warning("worker_died", said=b"".join(words)[-4000:].decode(errors="replace"))
            raise ToolError("The worker process of the tool died.", code="WORKER_DIED")
        self.is_idle = True
        if isinstance(message, Failure):
            raise ToolError(message.message, code=message.code)
        if isinstance(message, Crash):
            log.error("tool_work_crashed", tool_traceback=message.traceback)
            text = f"The tool failed unexpectedly ({message.type_name})."
            raise ToolError(text, code="TOOL_CRASHED")
        return message.output

    async def _send(self, message: Call | Abort) -> None:
        data = memoryview(msgspec.json.encode(message) + b"\n")
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError:
                return  # it died; receiving says so

    async def _receive(self) -> Progress | Result | Failure | Crash | None:
        while b"\n" not in self._unread:
            await anyio.wait_readable(self._socket)
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                continue
            except OSError:
                return None
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message: Progress | Result | Failure | Crash = decode(line)
        return message

    async def end(self) -> None:
        """End the process; close everything."""
        self.is_idle = False
        self._socket.close()
        try:
            await self._tree.end()
        finally:
            self._tree.close()


def _target(cls: type[Tool]) -> str:
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise TypeError(f"{cls.__qualname__} must be importable to run in a worker process")
    return f"{cls.__module__}:{cls.__qualname__}"
