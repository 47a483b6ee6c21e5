from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from conformance.baseline import excuse, read_baseline
from conformance.manifest import FAILING, Rule, add_rules, manifest
from conformance.verdicts import Agent, Observation, Report, verdicts

MUST = Rule(id="XXA-01", level="must", says="It is so.", source="overview", area="X")
SHOULD = Rule(id="XXA-02", level="should", says="It is nice.", area="X")
INFO = Rule(id="XXA-03", level="info", says="It is interesting.", area="X")
PIPE = Rule(id="XXA-04", level="must", says="It ends.", source="x", transports=("stdio",), area="X")
RULES = {rule.id: rule for rule in (MUST, SHOULD, INFO, PIPE)}


def saw(sight: Any, rule: Rule = MUST, says: str = "") -> Observation:
    return Observation(rule=rule.id, sight=sight, says=says)


def status(*seen: Observation, rule: Rule = MUST, transport: str = "stdio") -> str:
    found = verdicts({rule.id: rule}, seen, transport=transport)
    return found[0].status


def report(*seen: Observation) -> Report:
    return Report(
        agent=Agent(name="a"),
        transport="stdio",
        started="",
        duration_s=1.0,
        verdicts=verdicts(RULES, seen, transport="stdio"),
        transcripts={},
    )


@pytest.mark.parametrize(
    ("rule", "sights", "expected"),
    [
        (MUST, ["kept"], "pass"),
        (MUST, ["kept", "broken", "kept"], "fail"),
        (SHOULD, ["kept", "broken"], "warn"),
        (INFO, ["broken"], "info"),
        (INFO, ["kept"], "info"),
        (INFO, ["unseen"], "inconclusive"),
        (MUST, ["unseen"], "inconclusive"),
        (MUST, [], "inconclusive"),
        (MUST, ["skipped"], "skip"),
        (MUST, ["skipped", "unseen"], "skip"),
        (MUST, ["kept", "unseen"], "pass"),
        (MUST, ["kept", "error"], "error"),
        (MUST, ["broken", "error"], "fail"),
    ],
)
def test_the_worst_that_was_seen_decides(rule: Rule, sights: list[str], expected: str) -> None:
    assert status(*(saw(each, rule) for each in sights), rule=rule) == expected


def test_what_was_not_brought_about_is_never_passed() -> None:
    assert status() == status(saw("unseen")) == "inconclusive"


def test_a_rule_about_processes_is_skipped_on_the_network() -> None:
    assert status(saw("kept", PIPE), rule=PIPE, transport="ws") == "skip"
    assert status(saw("kept", PIPE), rule=PIPE) == "pass"


def test_a_report_says_how_much_was_exercised() -> None:
    made = report(saw("kept"), saw("broken", SHOULD), saw("skipped", PIPE))

    assert (made.n_exercised, made.n_applicable) == (2, 3)
    assert made.is_conformant  # what is only advised does not count


def test_what_the_protocol_demands_decides_about_conformance() -> None:
    assert not report(saw("broken")).is_conformant


def baseline(folder: Path, text: str) -> Path:
    path = folder / "baseline.toml"
    path.write_text(text)
    return path


def test_what_is_in_the_baseline_is_excused_with_its_reason(tmp_path: Path) -> None:
    add_rules(rule for rule in RULES.values() if rule.id not in manifest())
    try:
        text = '[[expected]]\nrule = "XXA-01"\nreason = "until the next release"\n'
        made = report(saw("broken"))

        excuse(made, read_baseline(baseline(tmp_path, text)), date(2026, 1, 1))

        assert made.is_conformant
        assert made.verdicts[0].status == "fail"
        assert made.verdicts[0].excuse == "until the next release"
    finally:
        for rule in RULES:
            manifest().pop(rule, None)


def test_an_excuse_ends_and_an_unexpected_pass_is_said(tmp_path: Path) -> None:
    add_rules(RULES.values())
    try:
        text = '[[expected]]\nrule = "XXA-01"\nreason = "soon"\nuntil = 2026-03-01\n'
        expected = read_baseline(baseline(tmp_path, text))
        late, passing = report(saw("broken")), report(saw("kept"))

        excuse(late, expected, date(2026, 3, 2))
        excuse(passing, expected, date(2026, 3, 1))

        assert not late.is_conformant
        assert "was excused until 2026-03-01" in late.notes[0]
        assert "XXA-01 passes now" in passing.notes[0]
    finally:
        for rule in RULES:
            manifest().pop(rule, None)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[[expected]]\nrule = 1", "is no baseline"),
        ("expected = 3", "is no baseline"),
        ("[", "is no baseline"),
        ('[[expected]]\nrule = "CAN-01"', "is no baseline"),
        ('[[expected]]\nrule = "CAN-01"\nreason = " "', "CAN-01 has no reason"),
        ('[[expected]]\nrule = "NIX-01"\nreason = "x"', "there is no rule NIX-01"),
        ('[[expected]]\nrule = "CAN-01"\nreason = "x"\nwho = "me"', "is no baseline"),
    ],
)
def test_a_wrong_baseline_is_said(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        read_baseline(baseline(tmp_path, text))


def test_every_rule_says_what_it_demands_and_where_that_comes_from() -> None:
    for rule in manifest().values():
        assert rule.says.endswith("."), rule.id
        assert rule.area, rule.id
        assert re.fullmatch(r"[A-Z]{3}-\d{2,3}", rule.id)
        if rule.level in FAILING or rule.level == "should":
            assert rule.source, rule.id
        if rule.level in ("robustness", "interop"):
            assert rule.why, rule.id
        assert not rule.address or rule.address.startswith("https://"), rule.id


def test_every_rule_can_be_judged_and_every_judgement_has_a_rule() -> None:
    from conformance import judges, scenarios
    from conformance.scenarios import SCENARIOS

    scenarios.load()
    told = judges.rules().union(*(each.rules for each in SCENARIOS.values()))

    assert told == manifest().keys()
    assert all(each.says for each in SCENARIOS.values())


def test_pointers_name_definitions_of_the_schema() -> None:
    from conformance.schema import Schema

    known = Schema(is_unstable=True).definitions.keys()
    pointers = {rule.pointer for rule in manifest().values() if rule.pointer}

    assert pointers <= known, pointers - known


def test_two_rules_with_one_id_are_a_mistake_and_so_is_a_failing_one_without_a_source() -> None:
    with pytest.raises(ValueError, match="CAN-01 is there twice"):
        add_rules([Rule(id="CAN-01", level="should", says="x")])
    with pytest.raises(ValueError, match="XXB-01 can fail and has no source"):
        add_rules([Rule(id="XXB-01", level="must", says="x")])
