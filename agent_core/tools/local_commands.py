"""Shell commands on this machine: bounded output, and nothing left running."""

from __future__ import annotations

import codecs
import signal as signals
from typing import Final

import anyio

from agent_core.cancellation import AbortSignal
from agent_core.content import Text
from agent_core.errors import ToolError
from agent_core.tools.processes import ProcessTree, run_to_end
from agent_core.tools.tool import CommandAborted, CommandResult, Progress

__all__ = ["MAX_OUTPUT_BYTES", "CutOutput", "LocalCommands"]

# What a model can make use of: how it began, and above all how it ended.
_HEAD_BYTES: Final = 8 * 1024
_TAIL_BYTES: Final = 24 * 1024
MAX_OUTPUT_BYTES: Final = _HEAD_BYTES + _TAIL_BYTES
_PROGRESS_CHARS: Final = 4096
_REPORT_INTERVAL_S: Final = 0.25
_LONGEST_REPORT_INTERVAL_S: Final = 10.0


class LocalCommands:
    """The `Commands` protocol with ``/bin/sh`` on this machine. Has no state."""

    async def run(
        self,
        command: str,
        *,
        cwd: str,
        signal: AbortSignal,
        timeout_s: float | None,
        show: Progress,
    ) -> CommandResult:
        """Run `command` to its end; see `Commands.run`.

        Output above 32 KiB loses its middle; a note in the text says how much. At a normal end the
        processes that are left have 0.1 s to finish, then they are ended too.

        Cancellation: safe; raises when all processes are gone, 2 s and a little later at most if
        they ignore TERM. Concurrency: any number of commands.
        """
        if signal.aborted:
            raise CommandAborted(CommandResult(-signals.SIGTERM, ""))
        tree = ProcessTree(["/bin/sh", "-c", command], cwd=cwd)
        output = CutOutput()
        async with anyio.create_task_group() as reports:
            reports.start_soon(output.report, show)
            ending, leftovers = await run_to_end(
                tree, signal=signal, timeout_s=timeout_s, on_output=output.feed
            )
            reports.cancel_scope.cancel()
        text = output.text()
        if ending == "timed_out":
            raise ToolError(
                f"the command was ended because it took longer than {timeout_s:g} s; "
                f"its output until then:\n{text or '(none)'}",
                code="TOOL_TIMEOUT",
            )
        result = CommandResult(tree.exit_code, text, output.is_truncated, leftovers)
        if ending == "aborted":
            raise CommandAborted(result)
        return result


class CutOutput:
    """The first and the last of a stream of bytes, as text. Needs at most 100 KiB."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._total_bytes = 0
        self._changed = anyio.Event()

    @property
    def is_truncated(self) -> bool:
        """Whether something was left out."""
        return self._total_bytes > MAX_OUTPUT_BYTES

    def feed(self, chunk: bytes) -> None:
        """Take what came next, of any length."""
        self._total_bytes += len(chunk)
        room = _HEAD_BYTES - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 2 * _TAIL_BYTES:  # not each time: moving the tail costs
            del self._tail[:-_TAIL_BYTES]
        self._changed.set()

    def text(self, *, is_final: bool = True) -> str:
        """Return what there is; unless `is_final`, without the half of a last character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if not self.is_truncated:
            return decoder.decode(bytes(self._head + self._tail), is_final)
        head = decoder.decode(bytes(self._head))
        cut_bytes = len(decoder.getstate()[0])
        tail = bytes(self._tail[-_TAIL_BYTES:])
        # The tail may begin inside of a character: up to three bytes that only continue one.
        begin = next((i for i in range(3) if tail[i] & 0xC0 != 0x80), 3)
        left_out = self._total_bytes - len(self._head) - len(tail) + cut_bytes + begin
        decoder.reset()
        return f"{head}\n[… {left_out} bytes left out …]\n{decoder.decode(tail[begin:], is_final)}"

    async def report(self, show: Progress) -> None:
        """Show how the output ends: 4 times a second at first, later every few seconds.

        Each report stays in the session's log, and a command may run for a day.
        """
        interval_s = _REPORT_INTERVAL_S
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            show((Text(self.text(is_final=False)[-_PROGRESS_CHARS:]),))
            await anyio.sleep(interval_s)
            interval_s = min(1.1 * interval_s, _LONGEST_REPORT_INTERVAL_S)
