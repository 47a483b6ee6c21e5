"""docs/conformance.md: every command in it is run, every file in it is read, the example runs."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conformance.cases import read_case
from conformance.cli import _parser
from conformance.manifest import LEVELS
from conformance.target import read_words

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)(?: (\S+))?\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ")
    for kind, _, block in BLOCKS
    if kind == "console"
    for line in block.splitlines()
]
SHORT = "--only initialize_is_answered"
CASE = "--only greets"
HELLO = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page, and an agent named my-agent on PATH."""
    for _, name, block in BLOCKS:
        if name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(block)
    agent = tmp_path / "bin" / "my-agent"
    agent.parent.mkdir()
    agent.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec {sys.executable} -m conformance.selftest\n'
    )
    agent.chmod(0o755)
    (tmp_path / "session.jsonl").write_text("")
    return tmp_path


def run(folder: Path, command: list[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=55,
    )


def words(command: str) -> list[str]:
    """Split a command; a run is cut down to one scenario, so that the test is quick."""
    if " run " in command and CASE not in command:
        command = command.replace(" run ", f" run {SHORT} ")
    if command.startswith("pytest"):
        command = f"{command} -p no:cacheprovider"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        command = command.replace("7451", str(free.getsockname()[1]))
    first, *rest = shlex.split(command)
    return [sys.executable, *(["-m", "pytest"] if first == "pytest" else []), *rest]


@pytest.mark.parametrize("command", [each for each in COMMANDS if " lint " not in each])
def test_every_command_does_what_the_page_says(command: str, folder: Path) -> None:
    # Cut down to one scenario, hardly anything is exercised: that is what 3 says.
    expected = 3 if "--min-exercised" in command else 0

    ended = run(folder, words(command), json.dumps(HELLO) + "\n")

    assert ended.returncode == expected, ended.stdout + ended.stderr
    for option in re.findall(r"--(?:junit|html|markdown|badge|trace|script) (\S+)", command):
        assert (folder / option).stat().st_size, option


def test_what_the_proxy_kept_can_be_linted(folder: Path) -> None:
    proxy, lint = (next(c for c in COMMANDS if name in c) for name in (" proxy ", " lint "))
    run(folder, words(proxy), json.dumps(HELLO) + "\n")

    ended = run(folder, words(lint))

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "conformant" in ended.stdout


def test_every_file_on_the_page_can_be_read(folder: Path) -> None:
    assert read_words(folder / "prompts.json").prompts
    assert read_case(folder / "cases/greets.json").case == "greets"
    (workflow,) = (block for kind, _, block in BLOCKS if kind == "yaml")
    steps = yaml.safe_load(workflow)["jobs"]["acp"]["steps"]
    action = yaml.safe_load((ROOT / "conformance/action/action.yml").read_text())
    assert steps[-1]["with"].keys() <= action["inputs"].keys()


def test_the_example_of_the_library_runs(folder: Path) -> None:
    (example,) = (block for kind, _, block in BLOCKS if kind == "python")
    ast.parse(example)

    ended = run(folder, [sys.executable, "-c", example])

    assert ended.stdout.startswith("end_turn\n"), ended.stderr
    assert ended.stdout.endswith("0 of them no message\n")


def test_every_level_and_every_report_is_explained() -> None:
    assert all(f"| {level} |" in PAGE for level in LEVELS)
    for option in ("junit", "html", "markdown", "badge", "json"):
        assert f"--{option}" in PAGE
        assert _parser().parse_args(["run", f"--{option}", "x"])
