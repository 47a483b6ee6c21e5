"""`pytest --acp-agent COMMAND`: a test for each rule, in anybody's project."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

AGENT = Path(__file__).with_name("bad_agent.py")
OWN_TEST = """
import json, subprocess

def test_it_answers(acp_agent):
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}
    ended = subprocess.run(
        acp_agent, input=json.dumps(request), capture_output=True, text=True, timeout=30
    )
    assert json.loads(ended.stdout)["result"]["protocolVersion"] == 1
"""


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    registered = [each.value for each in entry_points(group="pytest11")]
    is_installed = "conformance.pytest_plugin" in registered
    plugin = [] if is_installed else ["-p", "conformance.pytest_plugin"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *plugin, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=55,
    )
    return ended.returncode, ended.stdout + ended.stderr


def agent(way: str) -> str:
    return shlex.join([sys.executable, str(AGENT), way])


def test_each_rule_is_a_test_and_a_broken_one_fails_with_its_evidence(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "--acp-agent", agent("banner"), "--acp-quick")

    assert code == 1
    assert "FAILED acp-agent::MSG-01" in output
    assert "no message: 'Welcome!'" in output
    assert "PASSED acp-agent::INI-06" in output
    assert "inconclusive: nobody said how to bring" in output


def test_tests_of_ones_own_get_the_agents_command(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(OWN_TEST)

    code, output = run_pytest(
        tmp_path, "--acp-agent", agent("sound"), "--acp-quick", "-k", "answers or INI-06"
    )

    assert code == 0, output
    assert "PASSED test_mine.py::test_it_answers" in output


def test_without_an_agent_nothing_is_added(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(OWN_TEST)

    code, output = run_pytest(tmp_path)

    assert code == 0
    assert "1 skipped" in output


@pytest.mark.parametrize("wrong", ["no-such-file.json"])
def test_a_wrong_map_is_an_error_of_usage(tmp_path: Path, wrong: str) -> None:
    code, output = run_pytest(tmp_path, "--acp-agent", agent("sound"), "--acp-prompts", wrong)

    assert code != 0
    assert f"--acp-prompts: [Errno 2] No such file or directory: '{wrong}'" in output
