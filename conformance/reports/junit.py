"""A report as JUnit XML: a test suite for each area, a test case for each rule."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree as Xml

from conformance.manifest import manifest
from conformance.reports.excerpt import excerpt, repro
from conformance.verdicts import Report, Verdict

__all__ = ["to_junit"]

_UNSHOWABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]")


def to_junit(report: Report) -> bytes:
    """Return the report as JUnit XML. A broken rule that is excused, or only advised, is skipped.

    CI systems know no more than passed, failed, in error and skipped; the message says the rest.
    """
    root = Xml.Element("testsuites", name="acp-conformance", time=f"{report.duration_s:.3f}")
    suites: dict[str, Xml.Element] = {}
    for verdict in report.verdicts:
        rule = manifest()[verdict.rule]
        suite = suites.get(rule.area)
        if suite is None:
            suite = suites[rule.area] = Xml.SubElement(root, "testsuite", name=rule.area)
        case = Xml.SubElement(
            suite, "testcase", classname=f"acp.{rule.area}", name=f"{rule.id} {rule.says}"
        )
        _put(case, report, verdict)
    for suite in suites.values():
        suite.set("tests", str(len(suite)))
        for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            suite.set(name, str(sum(each.find(kind) is not None for each in suite)))
    Xml.indent(root)
    xml: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return xml + b"\n"


def _put(case: Xml.Element, report: Report, verdict: Verdict) -> None:
    if verdict.status in ("pass", "info"):
        return
    if verdict.status == "error":
        Xml.SubElement(case, "error", message=_clean(verdict.says))
        return
    if verdict.status == "fail" and not verdict.excuse:
        failure = Xml.SubElement(case, "failure", message=_clean(verdict.says))
        lines = [
            f"{line.time_s:8.3f} {'-->' if line.direction == 'sent' else '<--'} {line.text}"
            for line in excerpt(report, verdict)
        ]
        failure.text = _clean("\n".join([repro(report, verdict), *lines]))
        return
    why = f"{verdict.excuse} ({verdict.says})" if verdict.excuse else verdict.says
    Xml.SubElement(case, "skipped", message=_clean(f"{verdict.status}: {why}"))


def _clean(text: str) -> str:
    """Show what XML cannot hold."""
    return _UNSHOWABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
