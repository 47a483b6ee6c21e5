"""Playing scenarios from the command line: progress, interruption, transcripts."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from conformance import processes
from conformance.reports.terminal import ProgressLine
from conformance.runner import run
from conformance.scenarios import Scenario
from conformance.target import Target
from conformance.trace import WireError
from conformance.verdicts import Report

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["play", "show_transcripts", "write_script"]

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def play(
    target: Target,
    chosen: Sequence[Scenario],
    console: Console,
    *,
    jobs: int | None,
    limit_s: float | None,
) -> Report | None:
    """Judge an agent while a line says how far it is.

    Returns:
        The report; `None`, when it was said why, if there is nobody to judge, or if a signal
        interrupted it. Nothing of any agent is left.
    """

    async def playing() -> Report | WireError | None:
        report: Report | WireError | None = None
        # A second signal while all is being ended must not end us first.
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stop_on, signals, tasks.cancel_scope)
                with ProgressLine(console, len(chosen)) as progress:
                    try:
                        report = await run(
                            target, chosen, jobs=jobs, limit_s=limit_s, progress=progress
                        )
                    except WireError as exc:
                        report = exc
                tasks.cancel_scope.cancel()
        return report

    with processes.orphans_ended():
        report = anyio.run(playing)
    if isinstance(report, WireError):
        console.print(report.reason, style="bold", markup=False)
        return None
    if report is None:
        console.print("interrupted; every process that was started is gone", style="bold")
    return report


def show_transcripts(console: Console, report: Report) -> None:
    """Print all that was said, and what the agents logged."""
    from rich.text import Text

    for key, transcript in report.transcripts.items():
        console.print(Text(key.replace("_", " "), style="bold"))
        for entry in transcript.entries:
            arrow = "-->" if entry.direction == "sent" else "<--"
            line = entry.raw.decode("utf-8", "backslashreplace")
            console.print(Text(f"{entry.time_s:8.3f} {arrow} {line}"), soft_wrap=True)
        for line in transcript.stderr.splitlines():
            console.print(Text(f"  stderr {line}", style="dim"), soft_wrap=True)
        console.print()


def write_script(report: Report, path: Path) -> None:
    """Write what was sent on the last connection, to be piped into an agent by hand.

    Answers in it fit the ids of the agent's requests only if it asks the same again.

    Raises:
        OSError: It cannot be written.
    """
    last = list(report.transcripts.values())[-1:]
    sent = [entry.raw for each in last for entry in each.entries if entry.direction == "sent"]
    path.write_bytes(b"".join(raw if raw.endswith(b"\n") else raw + b"\n" for raw in sent))


async def _stop_on(signals: AsyncIterator[signal.Signals], scope: anyio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()
        return
