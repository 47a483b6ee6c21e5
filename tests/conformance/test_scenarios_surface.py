"""The scenarios about an agent's surface: sound agents pass, and each bug breaks its own rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance.manifest import manifest
from conformance.runner import run, select
from conformance.scenarios import SCENARIOS, load
from conformance.target import Target
from conformance.verdicts import Report

ROOT = Path(__file__).parents[2]
OURS = (sys.executable, "-m", "acp_server", "serve")
SOUND = (sys.executable, "-m", "conformance.selftest")
AREAS = ("INI", "FRM", "SES", "STO", "PRM", "CFG", "ELI", "PRC", "SEC")
LIMIT_S = 240.0

BUGS = {
    "banner": "FRM-01",
    "dies-on-bad-json": "FRM-10",
    "breaks-split-characters": "FRM-04",
    "answers-blank-lines": "FRM-08",
    "unknown-method-is-internal": "FRM-19",
    "bad-params-are-internal": "FRM-22",
    "echoes-version": "INI-02",
    "serves-before-initialize": "INI-11",
    "takes-relative-cwd": "SES-03",
    "list-ignores-filter": "SES-25",
    "load-drops-user-messages": "STO-01",
    "replay-after-the-answer": "STO-02",
    "resume-replays": "STO-08",
    "own-stop-reason": "PRM-01",
    "refuses-links": "PRM-02",
    "partial-options": "CFG-05",
    "forms-for-the-empty-offer": "ELI-01",
    "bad-exit-code": "PRC-01",
    "secrets-in-updates": "SEC-05",
    "reads-outside": "SEC-02",
}
"""Bugs of the self-test's agent, and the rule that each is about."""


async def judged(command: tuple[str, ...], *words: str) -> Report:
    target = Target(command=command, env={"PYTHONPATH": str(ROOT)}, timeout_s=15.0)
    return await run(target, select(words), limit_s=LIMIT_S)


def broken(report: Report) -> dict[str, str]:
    statuses = ("fail", "warn", "error")
    return {each.rule: each.says for each in report.verdicts if each.status in statuses}


def test_every_rule_of_these_areas_has_a_scenario_and_every_scenario_a_rule():
    load()
    told = {rule for each in SCENARIOS.values() for rule in each.rules}

    assert {rule for rule in manifest() if rule.startswith(AREAS)} == {
        rule for rule in told if rule.startswith(AREAS)
    }


def test_about_a_third_of_the_scenarios_is_quick_and_each_says_what_it_does():
    load()

    assert all(each.says.endswith(".") for each in SCENARIOS.values())
    assert any(each.is_quick for each in SCENARIOS.values())
    assert not all(each.is_quick for each in SCENARIOS.values())


@pytest.mark.parametrize("command", [OURS, SOUND], ids=["ours", "sound"])
async def test_a_sound_agent_breaks_no_rule(command):
    report = await judged(command, *AREAS)

    assert report.is_judged
    assert broken(report) == {}
    assert report.n_exercised > 0.9 * report.n_applicable


@pytest.mark.parametrize(("bug", "rule"), BUGS.items())
async def test_a_bug_breaks_the_rule_that_is_about_it(bug, rule):
    report = await judged((*SOUND, bug), rule)

    assert rule in broken(report)
