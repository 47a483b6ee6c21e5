from __future__ import annotations

import json
from io import StringIO
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from conformance.manifest import manifest
from conformance.reports import badge, data, junit, markdown, page, terminal
from conformance.trace import Entry, decode
from conformance.verdicts import Agent, Observation, Report, Transcript, verdicts

NASTY = 'a"b<script>alert(1)</script>|`*_[x](y)\x1b[31m\x07 \ud800 é'


def entry(direction: Any, text: str) -> Entry:
    raw = text.encode("utf-8", "surrogatepass")
    return Entry(1.5, direction, raw, decode(raw))


@pytest.fixture
def report() -> Report:
    ids = ["CAN-01", "CAN-04", "MSG-05", "INI-01", "INI-02"]
    at = {"scenario": "cancel_in_a_long_answer", "transcript": "t", "at": 1}
    seen = [
        Observation(rule="CAN-01", sight="broken", says=f"it said {NASTY}", **at),
        Observation(rule="CAN-04", sight="kept"),
        Observation(rule="MSG-05", sight="broken", says="two lines"),
        Observation(rule="INI-02", sight="error", says="the suite failed"),
    ]
    rules = {key: manifest()[key] for key in ids}
    entries = [
        entry("sent", '{"id":1}'),
        entry("received", f'{{"x":"{NASTY}"}}'),
        entry("sent", "z"),
    ]
    return Report(
        agent=Agent(command=("my agent", "--x"), name=f"Agent {NASTY}", version="1"),
        transport="stdio",
        started="2026-12-01T00:00:00+00:00",
        duration_s=1.25,
        verdicts=verdicts(rules, seen, transport="stdio"),
        transcripts={"t": Transcript(entries=entries)},
        latencies_ms={"in an answer": [1.0, 2.0, 30.0], "once": [4.0]},
        notes=[f"note {NASTY}"],
    )


def shown(report: Report, **how: Any) -> str:
    console = Console(record=True, width=100, file=StringIO(), force_terminal=False)
    terminal.show(console, report, **how)
    return console.export_text()


def test_the_terminal_says_what_is_broken_why_and_how_to_see_it_again(report: Report) -> None:
    text = shown(report)

    assert "FAIL  CAN-01" in text
    assert "WARN  MSG-05" in text
    assert "https://agentclientprotocol.com/protocol/v1/prompt-turn#cancellation" in text
    assert (
        "python -m conformance replay CAN-01 --only cancel_in_a_long_answer -- 'my agent' --x"
        in text.replace("\n", " ")
    )
    assert "not conformant, 1 broken; 3 of 5 applicable rules exercised" in text.replace("\n", " ")
    assert "\x1b" not in text
    assert "\x07" not in text


def test_all_that_passed_is_listed_when_asked_for(report: Report) -> None:
    assert "CAN-04" not in shown(report)
    assert "CAN-04" in shown(report, shows_all=True)


def test_the_json_says_the_same_as_the_verdicts(report: Report) -> None:
    read = json.loads(data.to_json(report))

    assert read["format"] == data.FORMAT
    assert read["summary"]["isConformant"] is False
    assert read["summary"]["counts"] == {
        "fail": 1,
        "pass": 1,
        "warn": 1,
        "error": 1,
        "inconclusive": 1,
    }
    (row,) = [each for each in read["rules"] if each["rule"] == "CAN-01"]
    assert row["status"] == "fail"
    assert [line["is_it"] for line in row["excerpt"]] == [False, True, False]


def test_the_json_fits_its_schema(report: Report) -> None:
    from jsonschema import Draft202012Validator

    schema = data.schema()
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(json.loads(data.to_json(report)))


def test_junit_has_a_case_for_each_rule_and_fails_those_that_the_protocol_demands(
    report: Report,
) -> None:
    root = ElementTree.fromstring(junit.to_junit(report))

    cases = {case.get("name", "")[:6]: case for case in root.iter("testcase")}
    assert cases.keys() == {each.rule for each in report.verdicts}
    assert cases["CAN-01"].find("failure") is not None
    assert cases["CAN-04"].find("failure") is None
    assert cases["MSG-05"].find("skipped") is not None
    assert cases["INI-02"].find("error") is not None
    assert sum(int(suite.get("failures", "")) for suite in root.iter("testsuite")) == 1


def test_an_excused_rule_does_not_fail_a_job(report: Report) -> None:
    import msgspec

    report.verdicts[0] = msgspec.structs.replace(report.verdicts[0], excuse="known")
    root = ElementTree.fromstring(junit.to_junit(report))

    assert not list(root.iter("failure"))
    assert report.is_conformant


def test_markdown_says_what_is_broken_and_nothing_of_the_agents_is_markup(report: Report) -> None:
    text = markdown.to_markdown(report)

    assert "### FAIL CAN-01" in text
    assert "<script>" not in text.replace("\\<script\\>", "").partition("```")[0]
    assert "| in an answer | 3 | 2.0 |" in text


def test_the_page_loads_nothing_and_nothing_of_the_agents_is_markup(report: Report) -> None:
    text = page.to_html(report)

    assert "<script>alert(1)" not in text
    assert text.count("<script>") == 1
    assert "src=" not in text
    assert "default-src 'none'" in text
    assert 'id="CAN-01" data-status="fail"' in text


def test_the_badge_says_how_much_was_exercised(report: Report) -> None:
    assert json.loads(badge.to_badge(report)) == {
        "schemaVersion": 1,
        "label": "ACP",
        "message": "not conformant, 3/5 exercised",
        "color": "red",
    }


@pytest.mark.parametrize(
    "write", [data.to_json, junit.to_junit, markdown.to_markdown, page.to_html, badge.to_badge]
)
def test_every_form_can_say_that_there_was_nobody_to_judge(write: Any) -> None:
    nobody = Report(
        agent=Agent(command=("x",)),
        transport="stdio",
        started="",
        duration_s=0.0,
        verdicts=verdicts({"INI-01": manifest()["INI-01"]}, [], transport="stdio"),
        transcripts={},
        notes=["the agent never answered initialize"],
        is_judged=False,
    )

    assert write(nobody)
    assert "could not judge" in shown(nobody)
