"""Tools that cannot cooperate, for test_tool_worker.py. Importable, as a worker demands."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import Any, ClassVar, Literal

from msgspec import Struct

from agent_core.errors import ToolError
from agent_core.tools.tool import Report, Tool, ToolOutput


class Args(Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    number: int = 0


class Blocking(Tool):
    """Does what `what` says, without an await anywhere."""

    name: ClassVar[str] = "blocking"
    description: ClassVar[str] = "Blocks."
    Args: ClassVar[type[Struct]] = Args
    isolation: ClassVar[Literal["none", "process"]] = "process"

    def work(self, args: Args, report: Report) -> ToolOutput:
        doing: Any = getattr(self, f"_{args.what}")
        return ToolOutput(str(doing(args, report)))

    def _echo(self, args: Args, report: Report) -> str:
        return f"{os.getpid()} {args.number}"

    def _place(self, args: Args, report: Report) -> str:
        return f"{os.getpid()} {os.getcwd()}"

    def _count(self, args: Args, report: Report) -> str:
        for number in range(args.number):
            report.show(f"{number} ü")
        return "counted"

    def _spin(self, args: Args, report: Report) -> str:
        report.show("spinning")
        while True:
            pass

    def _stuck_in_c(self, args: Args, report: Report) -> str:
        report.show("stuck")
        ctypes.PyDLL(None).pause()  # holds the interpreter's lock: no thread of it runs
        return "never"

    def _polite(self, args: Args, report: Report) -> str:
        report.show("working")
        while not report.aborted:
            time.sleep(0.001)
        return "stopped by itself"

    def _with_child(self, args: Args, report: Report) -> str:
        subprocess.Popen(["setsid", "sleep", str(args.number)])
        report.show("child started")
        return self._spin(args, report)

    def _die(self, args: Args, report: Report) -> str:
        os._exit(7)

    def _crash(self, args: Args, report: Report) -> str:
        raise ValueError("SECRET-in-a-crash")

    def _fail(self, args: Args, report: Report) -> str:
        raise ToolError("it went wrong", code="WRONG")

    def _noise(self, args: Args, report: Report) -> str:
        sys.stdout.write("x" * 1_000_000)
        sys.stdout.flush()
        return "quiet"
