"""A report as Markdown, for the summary page of a CI job."""

from __future__ import annotations

from statistics import quantiles

from conformance.manifest import manifest
from conformance.reports.excerpt import excerpt, headline, repro
from conformance.verdicts import Report, Status, Verdict

__all__ = ["latency_rows", "to_markdown"]

_COLUMNS: tuple[Status, ...] = ("pass", "fail", "warn", "info", "inconclusive", "skip", "error")


def to_markdown(report: Report) -> str:
    """Return the report as GitHub's Markdown."""
    agent = report.agent
    who = f"{agent.name or 'unnamed agent'} {agent.version}".rstrip()
    parts = [
        f"## ACP conformance: {_cell(who)}",
        f"**{headline(report)}** · protocol {agent.protocol_version or '?'} · {report.transport} · "
        f"{report.duration_s:.1f} s",
        *(f"> {_cell(note)}" for note in report.notes),
        _areas(report),
        *(_broken(report, each) for each in report.verdicts if each.status in ("fail", "error")),
        _list(report, "warn", "Warnings"),
        _list(report, "inconclusive", "Inconclusive"),
        _latencies(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def latency_rows(report: Report) -> list[tuple[str, int, float, float, float]]:
    """Return for each thing measured: what, how often, median, 95 % and worst, in milliseconds."""
    rows = []
    for what, times in report.latencies_ms.items():
        cuts = quantiles(times, n=20, method="inclusive") if len(times) > 1 else times * 19
        rows.append((what, len(times), cuts[9], cuts[18], max(times)))
    return rows


def _areas(report: Report) -> str:
    counts: dict[str, dict[str, int]] = {}
    for verdict in report.verdicts:
        area = counts.setdefault(manifest()[verdict.rule].area, dict.fromkeys(_COLUMNS, 0))
        area[verdict.status] += 1
    rows = [f"| area | {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * len(_COLUMNS)]
    for name, row in counts.items():
        rows.append(f"| {name} | {' | '.join(str(row[each] or '') for each in _COLUMNS)} |")
    return "\n".join(rows)


def _broken(report: Report, verdict: Verdict) -> str:
    rule = manifest()[verdict.rule]
    excused = f" (excused: {_cell(verdict.excuse)})" if verdict.excuse else ""
    lines = [
        f"{'→' if line.direction == 'sent' else '←'} {line.text}"
        for line in excerpt(report, verdict)
    ]
    told = "\n".join(lines).replace("```", "` ` `")
    shown = f"\n\n<details><summary>what was said</summary>\n\n```\n{told}\n```\n</details>"
    source = f" · [{rule.level}]({rule.address})" if rule.address else f" · {rule.level}"
    return (
        f"### {verdict.status.upper()} {rule.id}: {rule.says}{excused}\n\n{_cell(verdict.says)}"
        f"{source}\n\n`{repro(report, verdict)}`{shown if lines else ''}"
    )


def _list(report: Report, status: Status, title: str) -> str:
    rows = [
        f"- **{each.rule}** {manifest()[each.rule].says} {_cell(each.excuse or each.says)}"
        for each in report.verdicts
        if each.status == status
    ]
    if not rows:
        return ""
    return (
        f"<details><summary>{title} ({len(rows)})</summary>\n\n" + "\n".join(rows) + "\n</details>"
    )


def _latencies(report: Report) -> str:
    rows = latency_rows(report)
    if not rows:
        return ""
    head = ["| cancelled | times | median ms | 95 % ms | worst ms |", "|---|---:|---:|---:|---:|"]
    body = [f"| {w} | {n} | {a:.1f} | {b:.1f} | {c:.1f} |" for w, n, a, b, c in rows]
    return "\n".join([*head, *body])


def _cell(text: str) -> str:
    """Keep what an agent said from being Markdown or HTML."""
    for mark in "\\`*_<>|[]":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
