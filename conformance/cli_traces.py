"""The commands that judge what others said: lint and proxy."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from conformance.trace import Entry
from conformance.verdicts import Report, Transcript

__all__ = ["add_lint", "add_proxy"]

NOT_JUDGED: Final = 2


def add_lint(
    parser: argparse.ArgumentParser, conclude: Callable[[argparse.Namespace, Report], int]
) -> None:
    """Add the arguments of ``lint``; `conclude` shows a report and returns the exit code."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")

    def lint(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
        from conformance.runner import judge_transcripts
        from conformance.traces import read_trace

        started_s, transcripts = time.monotonic(), {}
        for path in options.traces:
            try:
                entries = read_trace(path)
            except (ValueError, OSError) as exc:
                sys.stderr.write(f"{parser.prog}: {exc}\n")
                return NOT_JUDGED
            transcripts[str(path)] = Transcript(entries=entries)
        report = judge_transcripts(transcripts)
        report.duration_s = time.monotonic() - started_s
        return conclude(options, report)

    parser.set_defaults(serve=lint)


def add_proxy(
    parser: argparse.ArgumentParser, write: Callable[[argparse.Namespace, Report], None]
) -> None:
    """Add the arguments of ``proxy``; `write` writes a report to the files that were asked for."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep what was said, for `lint`")

    def proxy(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
        from conformance.proxy import relay
        from conformance.traces import to_line

        if not options.agent:
            sys.stderr.write(f"{parser.prog}: say what the agent's command is: -- COMMAND\n")
            return NOT_JUDGED
        entries: list[Entry] = []
        try:
            trace = None if options.trace is None else _opened(options.trace)
        except OSError as exc:
            sys.stderr.write(f"{parser.prog}: {exc}\n")
            return NOT_JUDGED

        def note(entry: Entry) -> None:
            entries.append(entry)
            if trace is not None:
                trace.write(to_line(entry))
                trace.flush()
            if _is_end_of_turn(entry):
                write(options, _report(entries))

        try:
            code = relay(options.agent, note)
        except OSError as exc:
            sys.stderr.write(f"{parser.prog}: the agent cannot be started: {exc}\n")
            return NOT_JUDGED
        write(options, _report(entries))
        return code

    parser.set_defaults(serve=proxy)


def _opened(path: Path) -> BinaryIO:
    return path.open("wb")


def _report(entries: list[Entry]) -> Report:
    from conformance.runner import judge_transcripts

    report = judge_transcripts({"the session": Transcript(entries=list(entries))})
    report.started = datetime.now(UTC).isoformat(timespec="seconds")
    report.duration_s = entries[-1].time_s if entries else 0.0
    return report


def _is_end_of_turn(entry: Entry) -> bool:
    """Say whether the entry answers a prompt: a good moment to write what was found so far."""
    result = None if entry.message is None else entry.message.get("result")
    return isinstance(result, dict) and "stopReason" in result
