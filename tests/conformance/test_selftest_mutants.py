from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.selftest.build import command, mutated, source_of
from conformance.selftest.mutants import MUTANTS, Mutant

HELLO = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}
DEAF = {"silent-initialize"}
FAILING = {"needs-capabilities"}
ROOT = Path(__file__).parents[2]


def first_answer(mutant: Mutant, folder: Path) -> str:
    """What the mutant writes until it has answered initialize."""
    said = ""
    process = subprocess.Popen(
        command(mutant.name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"HOME": str(folder), "ACP_SELFTEST_STATE": str(folder / "state")},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(HELLO).encode() + b"\n")
        process.stdin.flush()
        if mutant.name in DEAF:
            process.stdin.close()
        for line in process.stdout:
            said += line.decode("utf-8", "replace")
            if '"protocolVersion"' in said or '"error"' in said:
                break
        process.kill()
    return said


def test_there_are_many_and_each_says_what_is_wrong_and_who_must_notice():
    assert len(MUTANTS) >= 250
    for name, mutant in MUTANTS.items():
        assert name == mutant.name
        assert mutant.bug.endswith(".")
        assert mutant.expects
        assert mutant.changes
    assert len({mutant.bug for mutant in MUTANTS.values()}) == len(MUTANTS)
    sources = [tuple(sorted(mutated(mutant).items())) for mutant in MUTANTS.values()]
    assert len(set(sources)) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_each_is_the_sound_agent_with_its_change_alone(mutant):
    for module, source in mutated(mutant).items():
        assert source != source_of(module)
        compile(source, module, "exec")


def test_a_change_that_fits_nowhere_is_an_error():
    for old in ("no such text", "import"):
        change = ("loop", old, "x")
        with pytest.raises(ValueError, match="in loop"):
            mutated(Mutant("broken", "It is broken.", ("x",), (change,)))


def test_each_starts_and_answers_unless_that_is_its_bug(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        said = dict(
            zip(
                MUTANTS,
                pool.map(lambda mutant: first_answer(mutant, tmp_path), MUTANTS.values()),
                strict=True,
            )
        )
    silent = {name for name, text in said.items() if "protocolVersion" not in text}
    assert silent == DEAF | FAILING
    assert all("error" in said[name] for name in FAILING)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conformance.selftest", *arguments],
        input="",
        capture_output=True,
        text=True,
        timeout=30,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_the_command_serves_lists_and_refuses(tmp_path):
    assert (run(cwd=tmp_path).returncode, run("banner", cwd=tmp_path).stdout) == (
        0,
        "Self-test agent 1.0\n",
    )
    listed = run("--list", cwd=tmp_path).stdout.splitlines()
    assert listed == [f"{name}: {mutant.bug}" for name, mutant in MUTANTS.items()]
    for wrong in (["nobody"], ["--what"], ["banner", "crlf"]):
        refused = run(*wrong, cwd=tmp_path)
        assert refused.returncode == 2
        assert refused.stdout == ""
        assert "--list" in refused.stderr
