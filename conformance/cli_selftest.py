"""The command that judges the suite itself: selftest."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

import anyio

from conformance.manifest import FAILING, manifest

if TYPE_CHECKING:
    from rich.console import Console

    from conformance.selftest.kills import Kill
    from conformance.selftest.score import Score

__all__ = ["add_selftest", "show_score"]

GOOD_RATE: Final = 0.95
PASSED: Final = 0
NOT_PASSED: Final = 1
NOT_JUDGED: Final = 2
_SAYS_CHARS: Final = 90


def add_selftest(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Add the arguments of ``selftest``; `count` reads a number from 1."""
    parser.add_argument("mutants", nargs="*", metavar="MUTANT", help="these only")
    parser.add_argument(
        "--all",
        action="store_true",
        help="play everything to mutants that the record does not catch, and write the record",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the record as a table, and play nothing"
    )
    parser.add_argument("--jobs", type=count, metavar="N", help="mutants at a time")
    parser.set_defaults(serve=_selftest)


def _selftest(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from rich.console import Console

    from conformance.selftest.kills import read_kills, to_markdown, write_kills
    from conformance.selftest.mutants import MUTANTS

    for name in options.mutants:
        if name not in MUTANTS:
            near = get_close_matches(name, MUTANTS, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            sys.stderr.write(f"{parser.prog}: there is no mutant {name!r}{hint}\n")
            return NOT_JUDGED
    try:
        record = read_kills()
    except FileNotFoundError:
        record = {}
    except (ValueError, OSError) as exc:
        sys.stderr.write(f"{parser.prog}: the record cannot be read: {exc}\n")
        return NOT_JUDGED
    if options.markdown:
        sys.stdout.write(to_markdown(record))
        return PASSED
    console = Console()
    score = _play(console, options.mutants or list(MUTANTS), record, options)
    if score is None:
        console.print("interrupted; every process that was started is gone", style="bold")
        return NOT_JUDGED
    if options.all:
        kept = {name: kill for name, kill in record.items() if name not in score.played}
        write_kills(kept | score.kills)
    return show_score(console, score, is_whole=not options.mutants)


def show_score(console: Console, score: Score, *, is_whole: bool) -> int:
    """Print what came of the mutants, and return the exit code.

    Args:
        console: Where to.
        score: What came of them.
        is_whole: Whether all mutants were played, so that every rule must have caught one.
    """
    from rich.table import Table
    from rich.text import Text

    from conformance.selftest.kills import uncaught

    table = Table("mutant", "caught by", "level", "what was said", box=None, header_style="bold")
    for name in score.played:
        kill = score.kills.get(name)
        if kill is None:
            table.add_row(Text(name), Text("nobody", style="bold red"))
        else:
            says = Text(kill.says[:_SAYS_CHARS], style="dim")
            table.add_row(Text(name), kill.rule, manifest()[kill.rule].level, says)
    console.print(table)
    idle = uncaught(score.kills) if is_whole else []
    if idle:
        console.print(f"\nrules that caught no mutant: {', '.join(idle)}", style="yellow")
    for rule, wrong in score.sound.items():
        console.print(Text(f"\nthe sound agent breaks {rule}: {wrong}", style="bold red"))
    levels = sum(manifest()[kill.rule].level in FAILING for kill in score.kills.values())
    console.print(
        f"\n{len(score.kills)} of {len(score.played)} mutants caught ({score.rate:.1%}), "
        f"{levels} of them by rules that the protocol demands",
        style="bold",
    )
    return NOT_PASSED if score.rate < GOOD_RATE or idle or score.sound else PASSED


def _play(
    console: Console, names: Sequence[str], record: dict[str, Kill], options: argparse.Namespace
) -> Score | None:
    """Play mutants while a line says how far it is; `None` if a person or SIGTERM interrupts."""
    from conformance.reports.terminal import ProgressLine
    from conformance.selftest.score import score

    async def playing() -> Score | None:
        result: Score | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on_signal, tasks.cancel_scope)
            with ProgressLine(console, len(names)) as line:
                result = await score(
                    names,
                    record,
                    plays_all=options.all,
                    jobs=options.jobs,
                    progress=lambda name, kill: line(name, True),
                )
            tasks.cancel_scope.cancel()
        return result

    return anyio.run(playing)


async def _stop_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return
