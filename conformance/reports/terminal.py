"""A report on the terminal, and what is going on while it is made."""

from __future__ import annotations

import shlex
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from conformance.manifest import LEVELS, manifest
from conformance.reports.excerpt import excerpt, headline, repro
from conformance.reports.markdown import latency_rows
from conformance.verdicts import Report, Status, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

__all__ = ["ProgressLine", "show", "show_rule"]

STYLES: Final[dict[Status, str]] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "warn": "yellow",
    "info": "cyan",
    "inconclusive": "blue",
    "skip": "dim",
}
_SHOWN_INCONCLUSIVE: Final = 8


class ProgressLine:
    """One line that says how far a run is, while the block runs; nothing where none can be seen."""

    def __init__(self, console: Console, n_scenarios: int) -> None:
        self._console = console
        self._n_scenarios = n_scenarios
        self._running: dict[str, None] = {}
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        if self._console.is_terminal:
            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            ).__enter__()
            self._task = self._progress.add_task("", total=self._n_scenarios)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.__exit__(kind, exc, trace)

    def __call__(self, name: str, is_over: bool) -> None:
        """Take note that a scenario began or ended."""
        if is_over:
            self._running.pop(name, None)
        else:
            self._running[name] = None
        if self._progress is not None:
            doing = next(iter(self._running), "").replace("_", " ")
            self._progress.update(self._task, advance=int(is_over), description=doing)


def show(console: Console, report: Report, *, shows_all: bool = False) -> None:
    """Print the report: what is broken first, then what to know, then what it comes to.

    Args:
        console: Where to.
        report: What to print.
        shows_all: Also list what passed, was skipped or stayed inconclusive.
    """
    if report.is_judged or shows_all:
        _areas(console, report)
    broken: tuple[Status, ...] = ("fail", "error", "warn")
    for status in broken:
        for verdict in report.verdicts:
            if verdict.status == status:
                _verdict(console, report, verdict)
    others: tuple[Status, ...] = ("inconclusive", "info", "skip", "pass")
    for status in others if shows_all else others[: int(report.is_judged)]:
        _list(console, report, status, None if shows_all else _SHOWN_INCONCLUSIVE)
    _latencies(console, report)
    for note in report.notes:
        console.print(_plain("note  ", "bold"), _plain(note), sep="", soft_wrap=True)
    _last_line(console, report)


def show_rule(console: Console, rule_id: str) -> None:
    """Print all there is to know about a rule.

    Raises:
        KeyError: There is none.
    """
    rule = manifest()[rule_id]
    console.print(_plain(f"{rule.id}  {rule.area}", "bold"))
    console.print(_plain(f"  {rule.says}"))
    console.print(_plain(f"  {rule.level}: {LEVELS[rule.level]}"))
    rows = {
        "source": rule.address,
        "schema": rule.pointer,
        "why": rule.why,
        "versions": f"{rule.since} to {rule.until}" if rule.until else f"from {rule.since} on",
        "transports": ", ".join(rule.transports),
    }
    for name, value in rows.items():
        if value:
            console.print(_plain(f"  {name:10}  {value}"), soft_wrap=True)


def _areas(console: Console, report: Report) -> None:
    from rich.table import Table

    counts: dict[str, dict[Status, int]] = {}
    for verdict in report.verdicts:
        area = counts.setdefault(manifest()[verdict.rule].area, dict.fromkeys(STYLES, 0))
        area[verdict.status] += 1
    shown = [status for status in STYLES if report.count(status)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for status in shown:
        table.add_column(status, style=STYLES[status], justify="right")
    for name, area in counts.items():
        table.add_row(name, *(str(area[status] or "") for status in shown))
    console.print(table)
    console.print()


def _verdict(console: Console, report: Report, verdict: Verdict) -> None:
    rule = manifest()[verdict.rule]
    head = _plain(f"{verdict.status.upper():5} {rule.id} ", STYLES[verdict.status])
    console.print(head + _plain(rule.says), soft_wrap=True)
    console.print(_plain(f"      {verdict.says}"), soft_wrap=True)
    if verdict.excuse:
        console.print(_plain(f"      excused: {verdict.excuse}", "dim"), soft_wrap=True)
    why = " · ".join(part for part in (rule.level, rule.address, rule.pointer, rule.why) if part)
    console.print(_plain(f"      {why}", "dim"), soft_wrap=True)
    if verdict.status == "fail":
        for line in excerpt(report, verdict)[-6:]:
            arrow = "-->" if line.direction == "sent" else "<--"
            text = f"      {line.time_s:8.3f} {arrow} {line.text[:160]}"
            console.print(_plain(text, "" if line.is_it else "dim"), soft_wrap=True)
    console.print(_plain(f"      {repro(report, verdict)}", "dim"), soft_wrap=True)
    console.print()


def _list(console: Console, report: Report, status: Status, limit: int | None) -> None:
    rows = [each for each in report.verdicts if each.status == status]
    if not rows:
        return
    console.print(_plain(f"{status} ({len(rows)})", STYLES[status]))
    for verdict in rows[:limit]:
        says = f": {verdict.says}" if verdict.says else ""
        line = f"  {verdict.rule} {manifest()[verdict.rule].says.rstrip('.')}{says}"
        console.print(_plain(line, "dim"), soft_wrap=True)
    if limit is not None and len(rows) > limit:
        console.print(_plain(f"  and {len(rows) - limit} more; --all shows them", "dim"))
    console.print()


def _latencies(console: Console, report: Report) -> None:
    from rich.table import Table

    rows = latency_rows(report)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("cancelled")
    for name in ("times", "median ms", "95 % ms", "worst ms"):
        table.add_column(name, justify="right")
    for what, n_times, *values in rows:
        table.add_row(what, str(n_times), *(f"{each:.1f}" for each in values))
    console.print(table)
    console.print()


def _last_line(console: Console, report: Report) -> None:
    agent = report.agent
    who = " ".join(part for part in (agent.name, agent.version) if part)
    who = who or agent.url or shlex.join(agent.command)
    style = "bold green" if report.is_conformant and report.is_judged else "bold red"
    tail = f" ({report.transport}, {report.duration_s:.1f} s)"
    line = _plain(f"{who}: ") + _plain(headline(report), style) + _plain(tail, "dim")
    console.print(line, soft_wrap=True)


def _plain(text: str, style: str = "") -> Text:
    """Return text that no markup is read from and that moves no cursor."""
    from rich.text import Text

    printable = "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text
    )
    return Text(printable, style=style)
