"""The suite against agents at their worst: it ends, says what happened, and leaves nothing."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from conformance import processes

AGENT = Path(__file__).with_name("bad_agent.py")
SUITE = [sys.executable, "-m", "conformance", "run"]
SHORT = ["--quick", "--timeout", "1", "--jobs", "2"]


class Ended(NamedTuple):
    code: int
    output: str
    token: str
    rss_bytes: int


def start(way: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    token = f"bad-{secrets.token_hex(8)}"
    agent = [sys.executable, "-S", str(AGENT), way, token]
    suite = subprocess.Popen(
        [*SUITE, *options, "--", *agent],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
    )
    return suite, token


def judged(way: str, *options: str) -> Ended:
    suite, token = start(way, *SHORT, *options)
    assert suite.stdout is not None
    with suite.stdout:
        output = suite.stdout.read()
    _, status, usage = os.wait4(suite.pid, 0)
    suite.returncode = os.waitstatus_to_exitcode(status)
    return Ended(suite.returncode, output, token, usage.ru_maxrss * 1024)


def left(token: str) -> list[str]:
    found = []
    for folder in processes.PROC.iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes()
            except (*processes.GONE, NotADirectoryError):
                continue
            if token.encode() in command:
                found.append(command.decode())
    return found


needs_proc = pytest.mark.skipif(not processes.PROC.is_dir(), reason="looks into /proc")
pytestmark = needs_proc


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("dies", "it ended with 1; the last line on stderr: there is no key"),
        ("hangs", "the response to 1 did not come within 1.0 s"),
        ("floods", "MiB in"),
        ("one endless line", "the agent has written 64 MiB in 0 lines, and goes on"),
    ],
)
def test_an_agent_that_serves_nobody_is_not_judged_and_the_report_says_why(way: str, says: str):
    ended = judged(way, "--only", "INI")

    assert ended.code == 2
    assert says in ended.output
    assert "could not judge" in ended.output
    assert left(ended.token) == []


def test_an_agent_that_never_answers_is_not_waited_for_in_every_scenario():
    ended = judged("hangs", "--all")

    assert ended.code == 2
    assert ended.output.count("initialize was never answered") > 20
    assert left(ended.token) == []


@pytest.mark.parametrize("method", ["session/new", "session/prompt"])
def test_neither_is_one_that_never_answers_a_later_request(method: str, tmp_path: Path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"hello": "Hello."}')

    ended = judged(method, "--all", "--prompts", str(prompts), "--only", "PRM", "--only", "CAN")

    why = {"session/new": "session/new was never answered"}.get(method, "did not come within 1.0 s")
    assert ended.code in (0, 1)
    assert why in ended.output
    assert "not judge" not in ended.output
    assert left(ended.token) == []


@pytest.mark.parametrize(("way", "shown"), [("banner", "Welcome!"), ("latin", "Gr")])
def test_what_is_no_message_on_stdout_is_shown_as_it_came(way: str, shown: str):
    ended = judged(way, "--only", "initialize_is_answered")

    assert ended.code == 1
    assert "FAIL  MSG-01" in ended.output
    assert f"no message: '{shown}" in ended.output


def test_answers_to_notifications_are_not_counted_as_those_of_a_request_before(tmp_path: Path):
    report = tmp_path / "report.json"
    played = ("ids_come_back_unchanged", "many_requests_at_once")
    only = [word for each in played for word in ("--only", each)]
    suite, _ = start("answers notifications", *only, "--jobs", "1", "--json", str(report))
    suite.communicate()

    rules = json.loads(report.read_bytes())["rules"]
    status = {each["rule"]: each["status"] for each in rules}
    assert suite.returncode == 1
    assert {rule: status[rule] for rule in ("FRM-16", "MSG-07", "MSG-08")} == {
        "FRM-16": "pass",
        "MSG-07": "pass",
        "MSG-08": "fail",
    }


def test_a_flood_of_messages_fills_no_memory(tmp_path: Path):
    report = tmp_path / "report.json"

    ended = judged("floods messages", "--only", "initialize_is_answered", "--json", str(report))

    assert ended.rss_bytes < 700 * 1024 * 1024
    assert report.stat().st_size < 1_000_000
    assert json.loads(report.read_bytes())["summary"]["isConformant"] is False
    assert left(ended.token) == []


@pytest.mark.parametrize("way", ["stays", "forks away", "forks away and leaves no mark"])
def test_nothing_is_left_of_an_agent_whatever_it_does_to_get_away(way: str):
    ended = judged(way, "--only", "INI-06")

    assert ended.code in (0, 1)
    assert left(ended.token) == []


def test_the_time_limit_ends_all_and_names_what_was_not_played():
    ended = judged("hangs", "--time-limit", "0.5", "--timeout", "30")

    assert ended.code == 2
    assert "the time was up after 0.5 s, before the end of" in ended.output
    assert left(ended.token) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_suite_and_all_that_it_started(number: signal.Signals):
    suite, token = start("stays", "--timeout", "30")
    while not left(token) or len(left(token)) < 2:  # the suite's own command line has it too
        assert suite.poll() is None
    suite.send_signal(number)
    suite.send_signal(number)  # impatience changes nothing
    output, _ = suite.communicate(timeout=30)

    assert suite.returncode == 2
    assert "interrupted; every process that was started is gone" in output
    assert left(token) == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--", "no-such-agent"], "there is no program no-such-agent; is it installed"),
        (["--", "python agent.py"], "write its words without quotes around"),
        (["--", __file__], "may not be executed"),
        ([], "-- COMMAND, or --url URL"),
        (["--only", "XYZ-1", "--", sys.executable], "no scenario and no rule begins with 'XYZ-1'"),
        (["--prompts", "{map}", "--", sys.executable], "nobody knows the situation 'helo'"),
        (["--url", "tcp://x"], "it begins with ws://"),
    ],
)
def test_a_wrong_command_line_is_an_error_of_usage_with_a_hint(
    arguments: list[str], hint: str, tmp_path: Path
):
    wrong = tmp_path / "prompts.json"
    wrong.write_text('{"helo": "hi"}')
    filled = [each.replace("{map}", str(wrong)) for each in arguments]

    ended = subprocess.run([*SUITE, *filled], capture_output=True, text=True, timeout=30)

    assert ended.returncode == 2
    assert hint in ended.stderr
    assert ended.stderr.count("\n") == 1
