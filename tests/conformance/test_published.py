"""What others build on: the report's schema, the GitHub Action."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from conformance.cli import _parser
from conformance.reports import data

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "conformance/reports/schema.json"
ACTION = ROOT / "conformance/action/action.yml"
AGENT = Path(__file__).with_name("bad_agent.py")


def test_the_published_schema_is_that_of_the_reports() -> None:
    assert json.loads(SCHEMA.read_bytes()) == json.loads(json.dumps(data.schema()))


def test_a_real_report_fits_the_published_schema(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "conformance", "run", "--only", "initialize_is_answered"]
    subprocess.run(
        [*command, "--json", str(report), "--", sys.executable, str(AGENT), "sound"],
        timeout=50,
        check=True,
        stdout=subprocess.DEVNULL,
    )

    jsonschema.validate(json.loads(report.read_bytes()), json.loads(SCHEMA.read_bytes()))


@pytest.fixture
def action() -> Any:
    return yaml.safe_load(ACTION.read_text(encoding="utf-8"))


def judging(action: Any) -> Any:
    return next(step for step in action["runs"]["steps"] if step.get("name") == "Judge the agent")


def test_every_flag_of_the_action_is_one_of_the_suites(action: Any) -> None:
    script = judging(action)["run"]
    flags = set(re.findall(r"(?<![\w-])--[a-z-]+", script.partition(" -- bash")[0]))

    for flag in flags:
        with_value = [flag, *(["1"] if flag not in ("--script-model", "--quick") else [])]
        assert _parser().parse_args(["run", *with_value]).command == "run"
    assert len(flags) == 10


def test_every_input_of_the_action_is_used_and_none_becomes_part_of_a_script(action: Any) -> None:
    steps = [step for step in action["runs"]["steps"] if "run" in step]
    used = re.findall(r"inputs\.([\w-]+)", json.dumps([step["env"] for step in steps]))

    assert sorted(used) == sorted(action["inputs"])
    assert all("${{" not in step["run"] for step in steps)


@pytest.mark.parametrize(("way", "code"), [("sound", 3), ("banner", 1)])
def test_the_actions_script_judges_and_writes_what_is_uploaded(
    action: Any, way: str, code: int, tmp_path: Path
) -> None:
    step = judging(action)
    python = tmp_path / "acp-conformance/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    inputs = {name: each.get("default", "") for name, each in action["inputs"].items()}
    inputs |= {"command": f"'{sys.executable}' '{AGENT}' {way}", "quick": "true"}
    inputs["min-exercised"] = "99"
    env = {
        name: inputs[re.findall(r"inputs\.([\w-]+)", value)[0]]
        for name, value in step["env"].items()
    }
    there = {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    ended = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env, **there},
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert ended.returncode == code, ended.stdout + ended.stderr
    written = {path.name for path in (tmp_path / "acp-conformance").iterdir()}
    assert written >= {"junit.xml", "report.html", "report.json", "badge.json"}
    assert "INI" in (tmp_path / "summary.md").read_text()
