from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_library_example_rolls_dice_is_stopped_and_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "library.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert re.sub(r"\d \d", "3 4", done.stdout).splitlines() == [
        "> Roll two dice.",
        "Let me roll. [dice: 3 4] There you are.",
        "(Completed())",
        "> Why?",
        "Let me think about that ...",
        "(Aborted())",
        "> Still there?",
        "I am.",
        "(Completed())",
    ]


def test_a_team_of_three_works_side_by_side_and_the_one_that_is_left_is_stopped(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "team.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("Ann")] == [
        "Ann ... Read notes.txt",
        "Ann ... `notes.txt` begins:",
        "Ann completed: `notes.txt` begins: ``` the answer is 42 ```",
    ]
    assert "Bob completed: `echo hello` printed: ``` hello ```" in lines
    assert lines[-2:] == ["Carl aborted: Well,", "left: 0"]
