"""The worker process: ``python -m agent_core.tools.worker_main FD``.

The main thread works; a second thread reads orders, so that an abort is heard while it does. The
end of the socket is the end of the worker, and so is the end of the agent, however it came about.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import msgspec

from agent_core.errors import ToolError
from agent_core.tools.tool import Tool
from agent_core.tools.worker_protocol import Call, Crash, Failure, Progress, Result, decode_order

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


class _Report:
    """See `agent_core.tools.tool.Report`."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self.abort = threading.Event()

    @property
    def aborted(self) -> bool:
        return self.abort.is_set()

    def show(self, text: str) -> None:
        _send(self._peer, Progress(text))


def main(fd: int) -> None:
    """Serve calls until the other end is closed."""
    if sys.platform == "linux":  # a tight loop never reads the end of its socket
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What the work prints belongs to nobody, and a pipe that nobody reads would stop it.
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    peer = socket.socket(fileno=fd)
    calls: queue.SimpleQueue[tuple[Call, _Report]] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(peer, calls), daemon=True).start()
    while True:
        call, report = calls.get()
        _send(peer, _serve(call, report))


def _read_orders(peer: socket.socket, calls: queue.SimpleQueue[tuple[Call, _Report]]) -> None:
    report = _Report(peer)
    for line in peer.makefile("rb"):
        order = decode_order(line)
        if isinstance(order, Call):
            report = _Report(peer)
            calls.put((order, report))
        else:
            report.abort.set()
    os._exit(0)


def _serve(call: Call, report: _Report) -> Result | Failure | Crash:
    try:
        os.chdir(call.cwd)  # a worker serves one session after another
        tool = _make(call.target)
        return Result(tool.work(msgspec.convert(call.args, type(tool).Args), report))
    except ToolError as exc:
        return Failure(exc.message, exc.code)
    except Exception as exc:
        return Crash(type(exc).__name__, "".join(traceback.format_exception(exc)))


def _make(target: str) -> Tool:
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    tool: Tool = found()
    return tool


def _send(peer: socket.socket, message: Progress | Result | Failure | Crash) -> None:
    peer.sendall(msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
