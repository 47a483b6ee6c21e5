from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import fits, read_case

AGENT = [sys.executable, "-m", "conformance.selftest"]
OPEN: list[dict[str, Any]] = [
    {"request": "session/new", "params": {"cwd": "{folder}", "mcpServers": []}, "as": "new"},
    {"answer": "new", "is": {"result": {"sessionId": {"$type": "string"}}}},
]


def prompt(text: str, name: str = "turn") -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    params = {"sessionId": "{new.sessionId}", "prompt": content}
    return {"request": "session/prompt", "params": params, "as": name}


def case(folder: Path, *steps: dict[str, Any], **more: Any) -> Path:
    own = {"id": "OWN-01", "level": "should", "says": "It does as I say.", "source": "https://a.b"}
    body = {"case": "my_case", "says": "Try it.", "own_rules": [own], "steps": steps} | more
    path = folder / "case.json"
    path.write_text(json.dumps(body))
    return path


def played(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    report = path.with_name("report.json")
    command = [
        sys.executable,
        "-m",
        "conformance",
        "run",
        "--cases",
        str(path),
        "--only",
        "my_case",
    ]
    done = subprocess.run(
        [*command, "--json", str(report), *options, "--", *AGENT],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert report.exists(), done.stderr + done.stdout
    rules = {each["rule"]: each for each in json.loads(report.read_text())["rules"]}
    return done.returncode, rules["OWN-01"]


@pytest.mark.parametrize(
    ("steps", "status"),
    [
        (
            [
                *OPEN,
                prompt("{say hello}"),
                {
                    "message": {
                        "method": "session/update",
                        "params": {"sessionId": "{new.sessionId}"},
                    }
                },
                {"answer": "turn", "is": {"result": {"stopReason": "end_turn"}}, "rule": "OWN-01"},
            ],
            "pass",
        ),
        (
            [
                *OPEN,
                prompt("{say hello}"),
                {"answer": "turn", "is": {"result": {"stopReason": "refusal"}}, "rule": "OWN-01"},
            ],
            "warn",
        ),
        (
            [
                *OPEN,
                prompt("run echo hi"),
                {"message": {"method": "session/request_permission"}},
                {"reply": {"outcome": {"outcome": "selected", "optionId": "nothing"}}},
                {"answer": "turn", "is": {"result": {"$type": "object"}}, "rule": "OWN-01"},
            ],
            "pass",
        ),
        (
            [
                {"notify": "session/cancel", "params": {"sessionId": "none"}},
                {"silence": {"method": {"$type": "string"}}, "rule": "OWN-01"},
            ],
            "pass",
        ),
        (
            [
                {"request": "_mine", "as": "x"},
                {"answer": "x", "is": {"result": {}}},
                {"silence": {}, "rule": "OWN-01"},
            ],
            "inconclusive",
        ),
    ],
    ids=["kept", "broken", "with-an-answer-of-ours", "silence", "not-brought-about"],
)
def test_a_case_of_ones_own_is_judged(
    tmp_path: Path, steps: list[dict[str, Any]], status: str
) -> None:
    code, row = played(case(tmp_path, *steps))

    assert (row["status"], code) == (status, 0), row


def test_a_case_that_needs_what_the_agent_lacks_is_skipped(tmp_path: Path) -> None:
    path = case(tmp_path, *OPEN, {"silence": {}, "rule": "OWN-01"}, needs=["sessionCapabilities.x"])

    assert played(path)[1]["status"] == "skip"


@pytest.mark.parametrize(
    ("pattern", "value", "expected"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {}, False),
        ({"a": {"$absent": True}}, {"b": 1}, True),
        ({"a": {"$absent": True}}, {"a": None}, False),
        ({"$type": "integer"}, True, False),
        ({"$type": "number"}, 1.5, True),
        ({"$type": "null"}, None, True),
        ({"$in": ["a", 1]}, True, False),
        ({"$in": ["a", 1]}, 1, True),
        ({"$match": "^a+$"}, "aaa", True),
        ({"$match": "^a+$"}, 3, False),
        ({"$each": {"id": {"$type": "string"}}}, [{"id": "a"}, {"id": "b"}], True),
        ({"$each": {"id": {"$type": "string"}}}, [{"id": "a"}, {}], False),
        ([1, {"$type": "string"}], [1, "x", 3], True),
        ([1, 2], [1], False),
        ("a", "a", True),
        (None, None, True),
        (None, 0, False),
    ],
)
def test_a_pattern_fits_what_has_at_least_its_members(
    pattern: object, value: object, expected: bool
) -> None:
    assert fits(pattern, value) is expected


@pytest.mark.parametrize(
    ("steps", "more", "wrong"),
    [
        ([{"answer": "new"}], {}, "no request before is named new"),
        ([{"request": "a", "notify": "b"}], {}, "step 1 does request and notify"),
        ([{"params": {}}], {}, "step 1 does nothing"),
        ([{"silence": {}, "rule": "NIX-01"}], {}, "there is no rule NIX-01"),
        ([{"shout": 1}], {}, "is no case"),
        ([], {"case": "my case"}, "is no name"),
        ([], {"steps": 3}, "is no case"),
    ],
)
def test_a_file_that_is_no_case_is_said(
    tmp_path: Path, steps: list[dict[str, Any]], more: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        read_case(case(tmp_path, *steps, **more))


def test_a_wrong_case_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text("{")

    done = subprocess.run(
        [sys.executable, "-m", "conformance", "run", "--cases", str(path), "--", "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert "is no case" in done.stderr
    assert "Traceback" not in done.stderr
