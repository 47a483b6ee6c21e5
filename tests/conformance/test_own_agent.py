"""Our own agent under the suite: the short form of what `make conformance` does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)
SERVE = [sys.executable, "-m", "acp_server", "serve"]


def judged(folder: Path, *options: str, agent: list[str]) -> dict[str, Any]:
    path = folder / "report.json"
    command = [sys.executable, "-m", "conformance", "run", "--time-limit", "150"]
    done = subprocess.run(
        [*command, "--json", str(path), *options, "--", *agent],
        capture_output=True,
        text=True,
        timeout=170,  # it ends before, and ends what it started
        check=False,
    )
    assert path.exists(), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    assert wrong(report) == [], done.stdout
    assert done.returncode == 0, done.stdout
    return report


def wrong(report: dict[str, Any]) -> list[str]:
    return [
        f"{each['status']} {each['rule']}: {each['why']}"
        for each in report["rules"]
        if each["status"] in ("fail", "warn", "error")
    ]


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


def test_our_agent_breaks_nothing_and_almost_all_is_exercised(tmp_path: Path) -> None:
    summary = judged(tmp_path, "--quick", agent=SERVE)["summary"]

    assert summary["nExercised"] >= 0.95 * summary["nApplicable"]
    assert summary["nApplicable"] > 120


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_our_agent_on_the_network_breaks_nothing_either(tmp_path: Path, scheme: str) -> None:
    place = f"127.0.0.1:{port()}"

    report = judged(
        tmp_path, "--quick", "--url", f"{scheme}://{place}/acp", agent=[*SERVE, "--listen", place]
    )

    summary = report["summary"]
    assert report["transport"] == scheme
    assert summary["nExercised"] >= 0.95 * summary["nApplicable"]
    assert summary["nApplicable"] > 100


CHAT = '[models.it]\nmodel = "openai:any"\napi = "chat"\n'


@pytest.mark.parametrize("model", ["openai:any", "anthropic:any", "it"])
def test_no_cancel_leaves_a_model_at_work_or_a_history_that_it_refuses(
    tmp_path: Path, model: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CHAT)
    agent = [*SERVE, "--config", str(config), "--model", model]

    report = judged(tmp_path, "--only", "MOD", "--script-model", agent=agent)

    about = {each["rule"]: each["status"] for each in report["rules"] if each["rule"][:3] == "MOD"}
    assert set(about.values()) == {"pass"}, about
    assert len(about) >= 5
