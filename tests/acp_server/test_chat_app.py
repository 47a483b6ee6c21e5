from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

AGENT = [sys.executable, str(Path(__file__).with_name("scripted_agent.py"))]
CTRL_C, CTRL_D = "\x03", "\x04"
LIMIT_S = 20
CHAT = """if True:
    import fcntl, json, os, sys, termios
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal to us
    from acp_server.chat.app import run_chat
    command, options = json.loads(sys.argv[1])
    sys.exit(run_chat(command, **options))
"""


def chat_command(command=AGENT, **options) -> list[str]:
    options.setdefault("cwd", str(Path.cwd()))
    return [sys.executable, "-c", CHAT, json.dumps([command, options])]


def piped(text: str, *, env=None, **options) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
    return subprocess.run(
        chat_command(**options),
        input=text.encode(),
        capture_output=True,
        timeout=LIMIT_S,
        env=environment,
    )


class Person:
    """Someone at a terminal: types, and looks at what is shown."""

    def __init__(self, terminal: int, process: subprocess.Popen) -> None:
        self.terminal = terminal
        self.process = process
        self.screen = ""
        self.seen = 0

    def types(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def sees(self, pattern: str) -> str:
        """Wait until `pattern` is shown after what was seen before."""
        deadline = time.monotonic() + LIMIT_S
        while not (match := re.search(pattern, self.screen[self.seen :])):
            assert self._read(deadline), f"no {pattern!r} in {self.screen!r}"
        self.seen += match.end()
        return match.group()

    def is_left_with(self) -> int:
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT_S)

    def _read(self, deadline: float) -> bool:
        if not select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self.terminal, 65536)
        except OSError:  # the other end is closed
            return False
        self.screen += data.decode("utf-8", "replace")
        return bool(data)


@contextmanager
def person(*, env=None, command=AGENT, **options):
    ours, theirs = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment = {**inherited, "TERM": "xterm-256color", **(env or {})}
    process = subprocess.Popen(
        chat_command(command, **options),
        start_new_session=True,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    someone = Person(ours, process)
    try:
        someone.sees("> ")
        yield someone
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_each_line_of_a_pipe_is_a_prompt_and_the_output_is_plain():
    done = piped("count 3\n\ncount 2\n")

    assert done.stdout == b"1 2 3 \n1 2 \n"
    assert done.stderr == b""
    assert done.returncode == 0


def test_a_failed_prompt_on_a_pipe_is_told_and_the_rest_goes_on():
    done = piped("fail\ncount 1\n")

    assert done.stdout == b"1 \n"
    assert done.stderr == b"error: the model is on holiday\n"
    assert done.returncode == 1


@pytest.mark.parametrize(("permissions", "said"), [("reject", "no"), ("allow", "go")])
def test_permissions_on_a_pipe_follow_the_flag(permissions, said):
    done = piped("ask\n", permissions=permissions)

    assert done.stdout.decode().endswith(f"outcome {said}\n")
    assert done.returncode == 0


def test_that_nobody_can_be_asked_on_a_pipe_is_said_once():
    done = piped("ask\nask\n")

    assert done.stdout.count(b"nobody can be asked here; --yes or --mode allows it") == 1
    assert done.stdout.count(b"outcome no") == 2


def test_what_is_no_agent_is_said_to_be_none():
    done = piped("hello\n", command=["cat"])

    said = b"error: it does not know initialize; is it an ACP agent?\n"
    assert (done.stdout, done.stderr, done.returncode) == (b"", said, 1)


def test_a_tool_call_on_a_pipe_has_no_escape_sequences():
    done = piped("tools\nevil\n")

    assert b"\x1b" not in done.stdout
    assert b"\r" not in done.stdout


@pytest.mark.requirement("B108")
def test_a_locale_without_marks_gets_ascii():
    done = piped("tools\n", env={"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"})

    assert done.returncode == 0
    assert b"ok Edit hello.py" in done.stdout


def test_an_agent_that_dies_is_told_with_its_last_words():
    done = piped("die\ncount 1\n")

    assert done.stderr.startswith(b"error: the agent ended with exit code 3\n")
    assert done.stdout == b"    last words\n"
    assert done.returncode == 1


def test_an_agent_that_cannot_be_started_is_told():
    done = piped("x\n", command=["/no/such/agent"])

    assert done.stderr == b"error: cannot start /no/such/agent: No such file or directory\n"
    assert done.returncode == 1


def test_a_mode_that_the_agent_does_not_know_ends_the_chat():
    done = piped("count 1\n", mode="nope")

    assert done.stderr == b"error: no such mode (-32602)\n"
    assert (done.stdout, done.returncode) == (b"", 1)


def test_a_reader_that_has_enough_ends_the_chat_quietly():
    process = subprocess.Popen(
        chat_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        process.stdout.close()
        process.stdin.write(b"count 3\n")
        process.stdin.close()

        assert process.stderr.read() == b""
        assert process.wait(LIMIT_S) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_chat_and_its_agent(number):
    process = subprocess.Popen(
        chat_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        process.stdin.write(b"orphan\nwait\n")
        process.stdin.flush()
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        while b"waiting" not in process.stdout.read1():
            pass
        (agent,) = children(process.pid)

        process.send_signal(number)

        assert process.wait(LIMIT_S) == 128 + number
        with pytest.raises(ProcessLookupError):
            os.kill(agent, 0)
        assert process.stderr.read() == b""


def children(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    rows = [tuple(map(int, line.split())) for line in listing.splitlines()]
    return [child for child, parent in rows if parent == pid]


def test_a_person_sees_who_answers_and_leaves_with_ctrl_d():
    with person() as someone:
        assert "Scripted agent 1.0" in someone.screen
        assert "mode: ask" in someone.screen

        someone.types("count 3\r")
        someone.sees("1 2 3 \r\n.*> ")
        someone.types(CTRL_D)

        assert someone.is_left_with() == 0


def test_a_person_answers_a_question_by_key_or_number():
    with person() as someone:
        someone.types("ask\r")
        someone.sees(r"3\) Reject \[n\]")
        someone.sees(r"\[y/a/n\]: ")
        someone.types("what?\r")
        someone.sees(r"\[y/a/n\]: ")
        someone.types("Y\r")
        someone.sees("outcome go\r\n.*> ")

        someone.types("ask\r")
        someone.sees(r"\[y/a/n\]: ")
        someone.types("2\r")
        someone.sees("outcome always\r\n.*> ")


def test_ctrl_c_stops_the_turn_and_the_chat_goes_on():
    with person() as someone:
        someone.types("wait\r")
        someone.sees("waiting")
        someone.types(CTRL_C)
        someone.sees("\r\n.*stopping…")
        someone.sees("✗ Sleep")
        someone.sees("stopped")
        someone.sees("> ")

        someone.types("count 2\r")
        someone.sees("1 2 ")


@pytest.mark.requirement("ACP-092")
def test_ctrl_c_at_a_question_stops_the_turn_and_answers_it_with_cancelled():
    with person() as someone:
        someone.types("ask\r")
        someone.sees(r"\[y/a/n\]: ")
        someone.types("y")
        someone.sees("y")
        someone.types(CTRL_C)
        someone.sees("stopping…")
        someone.sees("outcome cancelled")
        someone.sees("stopped")
        someone.sees("> ")


@pytest.mark.requirement("ACP-092")
def test_ctrl_c_answers_the_questions_that_wait_for_their_turn_too():
    with person() as someone:
        someone.types("pair\r")
        someone.sees(r"\[y/a/n\]: ")
        someone.types(CTRL_C)
        someone.sees(r"outcomes \['cancelled', 'cancelled'\]")
        someone.sees("> ")

        assert "? two" not in someone.screen


def test_what_was_typed_before_a_question_was_shown_does_not_answer_it(tmp_path):
    with person() as someone:
        someone.types(f"gate {tmp_path}/open\r")
        someone.sees("soon")
        someone.types("y\r")
        someone.sees("y\r\n")
        (tmp_path / "open").touch()
        someone.sees(r"\[y/a/n\]: ")
        someone.types("n\r")
        someone.sees("outcome no")


def test_a_question_that_the_agent_withdraws_goes_away():
    with person() as someone:
        someone.types("withdraw\r")
        someone.sees("withdrawn -32800")
        someone.sees("> ")

        someone.types("count 2\r")
        someone.sees("1 2 ")


def test_an_agent_that_does_not_stop_is_named_and_can_be_left():
    with person() as someone:
        someone.types("deaf\r")
        someone.sees("Ponder")
        someone.types(CTRL_C)
        someone.sees("stopping…")
        someone.types(CTRL_C)
        someone.sees(r"still waiting for: Ponder \(Ctrl-C again leaves the chat\)")
        someone.types(CTRL_C)

        assert someone.is_left_with() == 130


def test_ctrl_c_at_the_prompt_drops_the_line_then_hints_then_leaves():
    with person() as someone:
        someone.types("half a line")
        someone.sees("half a line")
        someone.types(CTRL_C)
        someone.sees("\n.*> ")
        someone.types(CTRL_C)
        someone.sees("Ctrl-C again or Ctrl-D leaves")
        someone.sees("> ")
        someone.types(CTRL_C)

        assert someone.is_left_with() == 0


def test_an_agent_that_dies_while_a_person_types_is_told_at_once():
    with person() as someone:
        (agent,) = children(someone.process.pid)
        someone.types("half a l")
        someone.sees("half a l")
        os.kill(agent, signal.SIGKILL)
        someone.sees("error: the agent was ended by SIGKILL")

        assert someone.is_left_with() == 1


def test_modes_and_help_are_there_and_other_commands_go_to_the_agent():
    with person() as someone:
        someone.types("/mode auto\r")
        someone.sees("mode: auto")
        someone.types("/mode nope\r")
        someone.sees("error: no such mode")
        someone.types("/mode\r")
        someone.sees("modes: ask, auto")
        someone.types("/help\r")
        someone.sees("/hi +Say hi")
        someone.types("/hi\r")
        someone.sees("slash command")
        someone.types("/quit\r")

        assert someone.is_left_with() == 1  # a command failed


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_a_terminal_that_wants_no_colours_gets_none(env):
    with person(env=env) as someone:
        someone.types("tools\r")
        someone.sees("done")

        shown = someone.screen.replace("\x1b[?2004h", "").replace("\x1b[?2004l", "")
        assert "\x1b" not in shown


def test_answers_to_questions_are_not_in_the_history():
    with person() as someone:
        someone.types("ask\r")
        someone.sees(r"\[y/a/n\]: ")
        someone.types("y\r")
        someone.sees("outcome go\r\n.*> ")
        someone.types("\x1b[A\r")
        someone.sees(r"\[y/a/n\]: ")


# --- with our own agent: subagents ------------------------------------------------------------

OURS = [sys.executable, "-m", "acp_server", "serve"]


def test_what_subagents_do_is_shown_below_their_calls(tmp_path):
    done = piped(
        "delegate delegate run echo deep\n", command=OURS, cwd=str(tmp_path), permissions="allow"
    )

    lines = done.stdout.decode().splitlines()
    assert lines[0] == "… subagent: delegate run echo deep"
    assert "  … subagent › subagent: run echo deep" in lines
    assert "    ✓ subagent › subagent › Run: echo deep" in lines
    assert "✓ subagent: delegate run echo deep" in lines


@pytest.mark.requirement("B047")
def test_ctrl_c_stops_subagents_at_every_level(tmp_path):
    with person(command=OURS, cwd=str(tmp_path), permissions="allow") as someone:
        someone.types(f"delegate delegate run echo $$ > {tmp_path}/pid; sleep 60\n")
        someone.sees("subagent › subagent › Run: ")
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.005)
        someone.types(CTRL_C)
        someone.sees("stopping")
        someone.sees("stopped")
        someone.sees("> ")
        someone.types(CTRL_D)
        assert someone.is_left_with() == 0

    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.requirement("B047", "B058")
def test_ctrl_c_at_the_prompt_stops_what_is_in_the_background(tmp_path):
    with person(command=OURS, cwd=str(tmp_path), permissions="allow") as someone:
        someone.types("delegate count 5000 slowly in the background\n")
        someone.sees("> ")
        someone.types(CTRL_C)  # perhaps before the chat has heard of the subagent
        someone.sees("leaves")
        someone.sees("> ")
        someone.types("/agents\n")
        someone.sees("- subagent: stop(ping|ped)")
        someone.sees("> ")
        someone.types(CTRL_D)
        assert someone.is_left_with() == 0


def test_ctrl_c_at_the_prompt_names_whom_it_stops_in_the_background(tmp_path):
    with person(command=OURS, cwd=str(tmp_path), permissions="allow") as someone:
        someone.types("delegate count 5000 slowly in the background\n")
        while True:
            someone.sees("> ")
            someone.types("/agents\n")
            doing = someone.sees(r"- subagent: running \([^\r\n]*")
            if "waiting" not in doing:  # it has started, and the chat has heard of it
                break
        someone.sees("> ")
        someone.types(CTRL_C)
        someone.sees("stopping subagent…")
        someone.sees("> ")
        someone.types(CTRL_D)
        assert someone.is_left_with() == 0


def test_an_unknown_command_is_answered_here():
    with person() as someone:
        someone.types("/nosuch\r")
        someone.sees("No command /nosuch; /help lists them.")


def test_a_letter_that_the_locale_cannot_write_is_no_end_of_the_chat():
    code = "from acp_server.chat.keyboard import Keyboard; Keyboard(True).remember('\\xfc')"
    command = [sys.executable, "-W", "ignore", "-c", code]

    done = subprocess.run(
        command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, timeout=LIMIT_S
    )

    assert (done.returncode, done.stderr) == (0, b"")


OURS = [sys.executable, "-m", "acp_server", "serve"]


def test_output_that_goes_away_in_a_turn_ends_the_chat():
    process = subprocess.Popen(
        chat_command(OURS, permissions="allow"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        process.stdin.write(b"run seq 1 100\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()

        assert process.wait(LIMIT_S) == 1
        assert process.stderr.read() == b""


def test_a_session_of_before_is_gone_on_with(tmp_path):
    piped("say hello\nsay again\n", command=OURS, cwd=str(tmp_path))

    done = piped("say third\n", command=OURS, cwd=str(tmp_path), resume="")

    shown = "    2 prompts before, the last one:\n    > say again\n    again\nthird\n"
    assert done.stdout.decode() == shown
    missing = piped("say x\n", command=OURS, cwd=str(tmp_path), resume="nope")
    assert missing.stderr == b"error: there is no session nope\n"


def test_an_agent_that_keeps_no_sessions_is_said_to_keep_none():
    assert (
        piped("count 1\n", resume="x").stderr == b"error: this agent cannot go on with a session\n"
    )
