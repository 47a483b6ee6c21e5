"""A report as one HTML file that can be sent to a colleague: nothing is loaded from elsewhere."""

from __future__ import annotations

import shlex
from html import escape
from importlib.resources import files
from string import Template
from typing import Final

from conformance.manifest import manifest
from conformance.reports.excerpt import excerpt, headline, repro
from conformance.reports.markdown import latency_rows
from conformance.verdicts import Report, Status, Verdict

__all__ = ["to_html"]

ORDER: Final[tuple[Status, ...]] = (
    "fail",
    "error",
    "warn",
    "inconclusive",
    "info",
    "pass",
    "skip",
)


def to_html(report: Report) -> str:
    """Return the page."""
    agent = report.agent
    who = " ".join(part for part in (agent.name, agent.version) if part) or "An unnamed agent"
    facts = (
        f"ACP {agent.protocol_version or '?'} over {report.transport} · {report.started} · "
        f"{report.duration_s:.1f} s · {agent.url or shlex.join(agent.command)}"
    )
    counts = {status: report.count(status) for status in ORDER if report.count(status)}
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"ACP conformance of {who}"),
        who=escape(who),
        facts=escape(facts),
        headline=escape(headline(report).capitalize()),
        counts=escape(" · ".join(f"{count} {status}" for status, count in counts.items())),
        meter="".join(
            f'<i style="flex:{count};background:var(--{status})"></i>'
            for status, count in counts.items()
        ),
        notes="".join(f"<p>{escape(note)}</p>" for note in report.notes),
        buttons="".join(
            f'<button type="button" value="{status}" aria-pressed="false">{status} {count}</button>'
            for status, count in counts.items()
        ),
        rules=_areas(report),
        latencies=_latencies(report),
    )


def _areas(report: Report) -> str:
    areas: dict[str, list[Verdict]] = {}
    for verdict in report.verdicts:
        areas.setdefault(manifest()[verdict.rule].area, []).append(verdict)
    parts = []
    for area, rows in sorted(areas.items(), key=lambda each: min(map(_rank, each[1]))):
        rows.sort(key=_rank)
        shown = "\n".join(_rule(report, each) for each in rows)
        parts.append(f"<section><h2>{escape(area)}</h2>\n{shown}\n</section>")
    return "\n".join(parts)


def _rank(verdict: Verdict) -> int:
    return ORDER.index(verdict.status)


def _rule(report: Report, verdict: Verdict) -> str:
    rule = manifest()[verdict.rule]
    why = f'<span class="why">{escape(verdict.says)}</span>' if verdict.says else ""
    facts = [escape(rule.level)]
    if rule.address:
        facts.append(f'<a href="{escape(rule.address)}">specification</a>')
    if rule.pointer:
        facts.append(f"schema {escape(rule.pointer)}")
    if rule.why:
        facts.append(escape(rule.why))
    if verdict.excuse:
        facts.append(f"excused: {escape(verdict.excuse)}")
    seen = dict.fromkeys(each.scenario for each in verdict.observations if each.scenario)
    if seen:
        facts.append(escape("seen in " + ", ".join(each.replace("_", " ") for each in seen)))
    is_open = " open" if verdict.status in ("fail", "error") and not verdict.excuse else ""
    return (
        f'<details class="rule" id="{rule.id}" data-status="{verdict.status}" '
        f'style="--tone:var(--{verdict.status})"{is_open}><summary>'
        f'<span class="mark">{verdict.status}</span><span class="id">{rule.id}</span>'
        f'<span class="says">{escape(rule.says)}</span>{why}</summary>'
        f'<div class="more"><p class="soft">{" · ".join(facts)}</p>'
        f"<pre>{escape(repro(report, verdict))}</pre>{_excerpt(report, verdict)}</div></details>"
    )


def _excerpt(report: Report, verdict: Verdict) -> str:
    lines = [
        f'<span class="{line.direction}{" it" if line.is_it else ""}">'
        f"{line.time_s:8.3f} {'→' if line.direction == 'sent' else '←'} {escape(line.text)}</span>"
        for line in excerpt(report, verdict)
    ]
    if not lines:
        return ""
    return f"<details><summary>What was said</summary><pre>{''.join(lines)}</pre></details>"


def _latencies(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(what)}</td><td>{n}</td><td>{a:.1f}</td><td>{b:.1f}</td><td>{c:.1f}</td></tr>"
        for what, n, a, b, c in latency_rows(report)
    )
    if not rows:
        return ""
    names = ("cancelled", "times", "median ms", "95 % ms", "worst ms")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        "<h2>From cancel to answer</h2>"
        f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
    )
