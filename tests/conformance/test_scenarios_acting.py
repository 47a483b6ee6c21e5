"""The scenarios that make an agent act: sound agents pass, and each bug breaks its own rule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conformance.commands import Sleeper
from conformance.manifest import manifest
from conformance.profiles import profiles, scenario_name
from conformance.runner import run, select
from conformance.scenarios import SCENARIOS, load
from conformance.target import Target, Words
from conformance.verdicts import Report

ROOT = Path(__file__).parents[2]
OURS = (sys.executable, "-m", "acp_server", "serve")
SOUND = (sys.executable, "-m", "conformance.selftest")
AREAS = ("CAN", "PER", "ACT", "HOS", "PRO")
LIMIT_S = 240.0
CHOSEN = (
    "cancel_in_a_long_answer",
    "cancel_while_a_command_runs",
    "cancel_while_it_asks",
    "cancel_in_the_write_of_the_prompt",
    "cancel_where_nothing_fits",
    "permission_is",
    "a_file_is_read",
    "files_are_written_and_edited",
    "an_editor_lends_all_it_has",
    "a_client_refuses",
    "a_client_reads_late",
    "as_toad",
    "as_acp_el",
)

BUGS = {
    "never-final": ("CAN-08", "cancel_while_a_command_runs"),
    "cancel-ends-well": ("CAN-01", "cancel_in_a_long_answer"),
    "cancel-is-an-error": ("CAN-14", "cancel_while_a_command_runs"),
    "cancel-answers-twice": ("CAN-03", "cancel_in_a_long_answer"),
    "speaks-after-the-cancel": ("CAN-02", "cancel_in_a_long_answer"),
    "sticky-cancel": ("CAN-04", "cancel_in_a_long_answer"),
    "cancel-kills-the-session": ("CAN-05", "cancel_in_a_long_answer"),
    "cancels-all-sessions": ("CAN-09", "cancel_one_of_two_sessions"),
    "leaves-the-command": ("CAN-06", "cancel_while_a_command_runs"),
    "leaves-grandchildren": ("CAN-07", "cancel_a_command_that_gets_away"),
    "waits-for-the-answer": ("CAN-12", "cancel_and_answer_late"),
    "late-yes-counts": ("CAN-11", "cancel_and_answer_late"),
    "cancels-later-prompts": ("CAN-26", "cancel_and_prompt_in_one_write"),
    "loose-cancel-request": ("CAN-23", "withdraw_nothing"),
    "takes-unknown-option-for-yes": ("PER-05", "permission_is_answered_wrongly"),
    "takes-cancelled-for-yes": ("PER-03", "permission_is_answered_as_cancelled"),
    "no-options": ("PER-01", "permission_is_waited_for"),
    "acts-before-the-answer": ("PER-10", "permission_to_write_is_waited_for"),
    "once-is-always": ("PER-16", "permission_is_given_once"),
    "runs-before-it-may": ("TUL-08", "permission_is_waited_for"),
    "tool-error-ends-the-session": ("ACT-09", "a_file_is_missing"),
    "client-error-ends-the-turn": ("HOS-01", "a_client_refuses"),
    "keeps-terminals-on-cancel": ("ACT-15", "an_editor_lends_all_it_has"),
}
"""Bugs of the self-test's agent, the rule that each breaks, and the scenario that shows it."""

# What follows are agents with no model and one habit each, in as few lines as they can be.
TALKS = """
import json, sys
def send(**message): print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def say(session): send(method="session/update", params={"sessionId": session, "update": {
    "sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "word "}}})
n = 0
for line in sys.stdin:
    message = json.loads(line)
    method, key, params = message.get("method"), message.get("id"), message.get("params") or {}
    if method == "initialize":
        send(id=key, result={"protocolVersion": 1, "agentInfo": {"name": "a", "version": "1"}})
    elif method == "session/new":
        n += 1
        send(id=key, result={"sessionId": f"s{n}"})
    elif method == "session/prompt":
        HABIT
    elif key is not None and DEAF:
        send(id=key, error={"code": -32601, "message": "Method not found"})
"""
SHORT = """[say(params["sessionId"]), __import__("time").sleep(0.2),
        send(id=key, result={"stopReason": "end_turn"})]"""
STOPS = """say(params["sessionId"])
        is_long = "talk" in line
        while is_long and json.loads(sys.stdin.readline()).get("method") != "session/cancel": pass
        send(id=key, result={"stopReason": "cancelled" if is_long else "end_turn"})"""
WORDS = Words({"hello": "hello", "long": "talk on and on"})


def talking(habit: str, *, is_deaf: bool = False) -> Target:
    code = TALKS.replace("HABIT", habit).replace("DEAF", str(not is_deaf))
    return Target(command=(sys.executable, "-c", code), words=WORDS)


async def judged(command: tuple[str, ...], *words: str) -> Report:
    target = Target(command=command, env={"PYTHONPATH": str(ROOT)})
    return await run(target, select(words), limit_s=LIMIT_S)


def statuses(report: Report, *of: str) -> dict[str, str]:
    return {each.rule: each.says for each in report.verdicts if each.status in of}


def test_every_rule_of_these_areas_has_a_scenario_and_every_scenario_a_rule():
    load()
    told = {rule for each in SCENARIOS.values() for rule in each.rules}

    assert {rule for rule in manifest() if rule.startswith(AREAS)} == {
        rule for rule in told if rule.startswith(AREAS)
    }


@pytest.mark.parametrize("command", [OURS, SOUND], ids=["ours", "sound"])
async def test_a_sound_agent_breaks_none_of_what_was_chosen(command):
    report = await judged(command, *CHOSEN)

    assert statuses(report, "fail", "warn", "error") == {}
    named = {rule for each in select(CHOSEN) for rule in each.rules}
    assert named & statuses(report, "inconclusive", "skip").keys() == set()


@pytest.mark.parametrize("bug", BUGS)
async def test_a_bug_breaks_its_rule(bug):
    rule, scenario = BUGS[bug]

    report = await judged((*SOUND, bug), scenario)

    assert rule in statuses(report, "fail", "warn")


async def test_the_time_that_a_cancel_took_is_recorded_by_its_moment():
    report = await judged(SOUND, "cancel_in_a_long_answer", "cancel_while_a_command_runs")

    assert {moment: len(times) for moment, times in report.latencies_ms.items()} == {
        "in an answer": 1,
        "while a command runs": 1,
    }


async def test_an_answer_that_was_over_anyway_is_no_wrong_reason():
    report = await run(talking(SHORT), select(["cancel_in_a_long_answer"]), limit_s=LIMIT_S)

    assert "CAN-01" in statuses(report, "inconclusive")
    assert "too short" in statuses(report, "inconclusive")["CAN-01"]


async def test_an_agent_that_answers_no_method_it_does_not_know_is_not_said_to_speak_late():
    report = await run(
        talking(STOPS, is_deaf=True), select(["cancel_in_a_long_answer"]), limit_s=LIMIT_S
    )

    assert statuses(report, "pass").keys() >= {"CAN-01", "CAN-02", "CAN-03", "CAN-04"}


def test_each_client_has_a_rule_and_a_scenario_of_its_own():
    load()
    rules = [each.rule for each in profiles().values()]

    assert len(set(rules)) == len(rules)
    for name, profile in profiles().items():
        assert SCENARIOS[scenario_name(name)].rules == (profile.rule,)
        assert manifest()[profile.rule].level == "interop"


def test_a_client_that_nobody_knows_is_wrong_usage():
    done = subprocess.run(
        [sys.executable, "-m", "conformance", "run", "--as", "ed", "--", "true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert "nobody knows the client 'ed'; there are acp.el, " in done.stderr


@pytest.mark.parametrize(
    "form", ["sleep {s}", "setsid sleep {s} & sleep {s}", "trap '' TERM; sleep {s}; true"]
)
async def test_a_sleeping_command_is_found_whatever_it_does_and_killed_at_the_end(form):
    n_processes = form.count("{s}")
    with Sleeper.asleep(form) as sleeper:
        assert sleeper.running() == set()
        shell = subprocess.Popen(["/bin/sh", "-c", sleeper.command])  # noqa: ASYNC220 - at once
        assert await sleeper.has_started(20.0, lambda: False, n_processes=n_processes)
        assert len(sleeper.running()) == n_processes
        shell.kill()

    assert await sleeper.is_gone(20.0)
    shell.wait(20)


async def test_a_sleeping_command_is_not_waited_for_when_it_cannot_start():
    with Sleeper.asleep() as sleeper:
        assert not await sleeper.has_started(60.0, lambda: True)
