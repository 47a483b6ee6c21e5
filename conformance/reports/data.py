"""A report as JSON, in a published form: ``schema.json`` beside this module.

Fields are added, never renamed, while `FORMAT` stays.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from msgspec import Struct

from conformance.manifest import manifest
from conformance.reports.excerpt import Line, excerpt, repro
from conformance.verdicts import Agent, Report, Verdict

__all__ = ["FORMAT", "ReportFile", "schema", "to_json"]

FORMAT: Final = 1


class Row(Struct, kw_only=True, rename="camel"):
    """One rule and its verdict."""

    rule: str
    area: str
    level: str
    says: str
    source: str
    pointer: str
    status: str
    why: str
    excuse: str
    scenarios: list[str]
    repro: str
    excerpt: list[Line]


class Summary(Struct, kw_only=True, rename="camel"):
    """What it comes to."""

    is_judged: bool
    is_conformant: bool
    n_exercised: int
    n_applicable: int
    counts: dict[str, int]
    """Rules by status."""


class ReportFile(Struct, kw_only=True, rename="camel"):
    """The whole file."""

    format: int
    agent: Agent
    transport: str
    started: str
    duration_s: float
    summary: Summary
    rules: list[Row]
    latencies_ms: dict[str, list[float]]
    notes: list[str]


def to_json(report: Report) -> bytes:
    """Return the report as indented JSON."""
    # With every character escaped, since agents can say halves of one.
    text = json.dumps(msgspec.to_builtins(_file(report)), indent=1)
    return text.encode() + b"\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of what `to_json` returns."""
    return msgspec.json.schema(ReportFile)


def _file(report: Report) -> ReportFile:
    counts: dict[str, int] = {}
    for verdict in report.verdicts:
        counts[verdict.status] = counts.get(verdict.status, 0) + 1
    return ReportFile(
        format=FORMAT,
        agent=report.agent,
        transport=report.transport,
        started=report.started,
        duration_s=round(report.duration_s, 3),
        summary=Summary(
            is_judged=report.is_judged,
            is_conformant=report.is_conformant,
            n_exercised=report.n_exercised,
            n_applicable=report.n_applicable,
            counts=counts,
        ),
        rules=[_row(report, each) for each in report.verdicts],
        latencies_ms={
            what: [round(each, 3) for each in times] for what, times in report.latencies_ms.items()
        },
        notes=report.notes,
    )


def _row(report: Report, verdict: Verdict) -> Row:
    rule = manifest()[verdict.rule]
    is_shown = verdict.status in ("fail", "warn", "error")
    scenarios = dict.fromkeys(each.scenario for each in verdict.observations if each.scenario)
    return Row(
        rule=rule.id,
        area=rule.area,
        level=rule.level,
        says=rule.says,
        source=rule.address,
        pointer=rule.pointer,
        status=verdict.status,
        why=verdict.says,
        excuse=verdict.excuse,
        scenarios=list(scenarios),
        repro=repro(report, verdict),
        excerpt=excerpt(report, verdict) if is_shown else [],
    )
