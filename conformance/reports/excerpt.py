"""The part of a transcript that shows why a verdict is what it is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from msgspec import Struct

from conformance.scenarios import SCENARIOS, load
from conformance.trace import Entry
from conformance.verdicts import Report, Verdict

__all__ = ["Line", "excerpt", "headline", "repro"]

LINES_BEFORE: Final = 30
LINES_BEHIND: Final = 4
LINE_CHARS: Final = 1200


class Line(Struct, frozen=True):
    """One line of a transcript, for people."""

    time_s: float
    direction: str
    """``sent`` to the agent or ``received`` from it."""
    text: str
    is_it: bool
    """Whether this is where it was seen."""


def excerpt(report: Report, verdict: Verdict) -> list[Line]:
    """Return what was said around the place where the verdict was decided, or nothing.

    Home folders are shown as ``~``, and long lines are cut.
    """
    seen = verdict.observations[0] if verdict.observations else None
    transcript = None if seen is None else report.transcripts.get(seen.transcript)
    if seen is None or transcript is None or seen.at is None:
        return []
    first = max(0, seen.at - LINES_BEFORE)
    entries = transcript.entries[first : seen.at + LINES_BEHIND + 1]
    return [_line(entry, index == seen.at) for index, entry in enumerate(entries, first)]


def repro(report: Report, verdict: Verdict) -> str:
    """Return the command that shows the verdict again."""
    agent = report.agent
    whom = f"--url {shlex.quote(agent.url)}" if agent.url else f"-- {shlex.join(agent.command)}"
    load()
    seen = verdict.observations[0].scenario if verdict.observations else ""
    only = f" --only {seen}" if seen in SCENARIOS else ""
    return f"python -m conformance replay {verdict.rule}{only} {whom}"


def headline(report: Report) -> str:
    """Say in one line what the report comes to."""
    if not report.is_judged:
        return "could not judge"
    n_broken = sum(each.status == "fail" and not each.excuse for each in report.verdicts)
    how = "conformant" if report.is_conformant else f"not conformant, {n_broken} broken"
    return f"{how}; {report.n_exercised} of {report.n_applicable} applicable rules exercised"


def _line(entry: Entry, is_it: bool) -> Line:
    text = entry.raw[: 4 * LINE_CHARS].decode("utf-8", "backslashreplace")
    text = text.replace(str(Path.home()), "~")
    if len(text) > LINE_CHARS:
        text = f"{text[:LINE_CHARS]}… ({len(entry.raw)} bytes)"
    return Line(round(entry.time_s, 3), entry.direction, text, is_it)
