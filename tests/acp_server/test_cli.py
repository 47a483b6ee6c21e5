from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import anyio
import pytest

from acp_server import __version__
from acp_server.cli import main
from acp_server.config import load_config
from agent_core.content import Text, TextPart
from agent_core.events import (
    AssistantMessage,
    Completed,
    Failed,
    ToolCall,
    ToolResult,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from agent_core.sessions.log import Session
from agent_core.sessions.sqlite import SqliteStore
from agent_core.sessions.store import SessionHeader

COMMAND = [sys.executable, "-m", "acp_server"]


def store_session(session_id: str, said: str, *, cwd: str = "/work", time_ms: int = 1) -> None:
    """Keep a session of two turns."""

    async def keep() -> None:
        store = SqliteStore(load_config({}).sessions_path)
        session = await Session.create(SessionHeader(session_id, cwd, time_ms, time_ms), store)
        for data in (
            TurnStart(1, "user"),
            UserMessage("u", (Text(said),), "user"),
            ToolCall(1, 1, "c", "read", "{}", "Read a.txt"),
            ToolResult(1, 1, "c", "no", is_error=True, code="NOT_FOUND"),
            AssistantMessage(1, 1, (TextPart("\x1b[31mred\x1b[0m"),), interrupted=True),
            TurnEnd(1, Completed()),
            TurnStart(2, "user"),
            TurnEnd(2, Failed(1, "AUTH", "No key.")),
        ):
            session.append(data)
        await session.flush()
        await store.aclose()

    anyio.run(keep)


# --- the command line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "acp-agent serve"),
        (["--help"], "acp-agent chat"),
        (["serve", "--help"], "--log-file"),
        (["chat", "--help"], "--yes"),
        (["check", "--help"], "--json"),
        (["sessions"], "export"),
        (["sessions", "list", "--help"], "--cwd"),
        (["sessions", "delete", "-h"], "id"),
    ],
)
def test_help_is_there_wherever_it_is_asked_for(arguments, said, capsys):
    try:
        code = main(arguments)
    except SystemExit as exc:
        code = exc.code

    assert code == 0
    assert said in capsys.readouterr().out


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out == f"acp-agent {__version__}\n"


@pytest.mark.requirement("B168")
@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["--nope"],
        ["serve", "--nope"],
        ["serve", "extra"],
        ["serve", "--log-level", "loud"],
        ["serve", "--shutdown-grace", "soon"],
        ["serve", "--idle-limit-s", "long"],
        ["check", "--nope"],
        ["sessions", "nope"],
        ["sessions", "show"],
        ["sessions", "list", "-n", "many"],
        ["sessions", "list", "--model", "x"],  # which would mean nothing there
        ["login", "--state-dir", "x"],
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_why(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "usage: acp-agent" in captured.err
    assert captured.out == ""


@pytest.mark.requirement("B108")
@pytest.mark.parametrize("arguments", [["--help"], ["check"], ["sessions", "list"]])
def test_every_text_can_be_printed_in_a_poor_encoding(arguments):
    store_session("sess_a", "żółw 😀")
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, timeout=30)

    assert (done.returncode, done.stderr) == (0, b"")


# --- serve ----------------------------------------------------------------------------------


def test_serve_on_a_terminal_says_what_it_is_and_leaves_at_its_end():
    person, terminal = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "serve"], stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.close(terminal)
        hint = process.stderr.readline() + process.stderr.readline()
        os.write(person, b"hello\n\x04")
        out, _err = process.communicate(timeout=20)
    os.close(person)

    assert b"acp-agent chat" in hint
    assert process.returncode == 0
    assert [json.loads(line)["error"]["code"] for line in out.splitlines()] == [-32700]


def test_a_terminal_that_is_hung_up_ends_serve():
    person, terminal = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "serve"], stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.close(terminal)
        process.stderr.readline()
        os.close(person)
        process.communicate(timeout=20)

    assert process.returncode == 0


@pytest.mark.parametrize("missing", ["0<&-", "0<&- 1>&-", "0<&- 1>&- 2>&-"])
def test_serve_without_some_of_its_descriptors_ends_at_once(missing):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m acp_server serve {missing}', sys.executable],
        capture_output=True,
        timeout=20,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# --- sessions -------------------------------------------------------------------------------


def test_without_sessions_list_says_so(capsys):
    assert main(["sessions", "list"]) == 0

    assert capsys.readouterr().out == "No sessions yet.\n"


def test_sessions_are_listed_the_latest_first_and_by_directory(capsys):
    store_session("sess_a", "first prompt", cwd="/one")
    store_session("sess_b", "second prompt", cwd="/two")

    main(["sessions", "list"])
    every = capsys.readouterr().out.splitlines()
    main(["sessions", "list", "--cwd", "/one"])
    one = capsys.readouterr().out.splitlines()
    main(["sessions", "list", "-n", "1"])
    latest = capsys.readouterr().out.splitlines()

    assert sorted(line.split()[0] for line in every) == ["sess_a", "sess_b"]
    assert "/two" in every[0] + every[1]
    assert [line.split()[0] for line in one] == ["sess_a"]
    assert one[0].endswith("/one  first prompt")
    assert latest == every[:1]


def test_show_prints_a_session_as_a_person_reads_it(capsys):
    store_session("sess_a", "look\nhere")

    assert main(["sessions", "show", "sess_a"]) == 0

    assert capsys.readouterr().out == (
        "sess_a  /work\n"
        "\n> look\nhere\n"
        "* Read a.txt\n"
        "  failed: NOT_FOUND\n"
        "[31mred[0m [interrupted]\n"
        "[completed]\n"
        "[error: No key.]\n"
    )


def test_export_prints_the_log_as_json_lines(capsys):
    store_session("sess_a", "hello")

    assert main(["sessions", "export", "sess_a"]) == 0

    header, *events = map(json.loads, capsys.readouterr().out.splitlines())
    assert (header["id"], header["cwd"], header["title"]) == ("sess_a", "/work", "hello")
    assert [event["seq"] for event in events] == list(range(8))
    assert events[-1]["data"]["outcome"] == {"kind": "error", "step": 1} | {
        "code": "AUTH",
        "message": "No key.",
    }


def test_delete_forgets_one_session_for_good(capsys):
    store_session("sess_a", "one")
    store_session("sess_b", "two")

    assert main(["sessions", "delete", "sess_a"]) == 0
    assert main(["sessions", "show", "sess_a"]) == 1
    capsys.readouterr()
    main(["sessions", "list"])

    assert "sess_a" not in capsys.readouterr().out


def test_the_beginning_of_an_id_is_enough_if_it_fits_one_session(capsys):
    store_session("sess_abc", "one")
    store_session("sess_abd", "two")

    assert main(["sessions", "show", "sess_abd"]) == 0
    capsys.readouterr()
    assert main(["sessions", "delete", "sess_ab"]) == 1
    assert "2 sessions begin with sess_ab" in capsys.readouterr().err
    assert main(["sessions", "export", "sess_abc"]) == 0
    assert main(["sessions", "show", "nope"]) == 1
    assert "acp-agent: no session nope" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["list"], ["show", "x"], ["export", "x"], ["delete", "x"]])
def test_a_wrong_configuration_is_2_and_a_store_that_fails_is_1(verb, capsys):
    assert main(["sessions", *verb, "--config", "/nonexistent.toml"]) == 2
    assert "acp-agent: There is no configuration file" in capsys.readouterr().err
    assert main(["sessions", *verb, "--state-dir", "/dev/null/x"]) == 1
    assert "acp-agent: the session database cannot be opened" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error():
    for n in range(3):
        store_session(f"sess_{n}", "x" * 100)
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [*COMMAND, "sessions", "export", "sess_1"], stdout=writes, stderr=subprocess.PIPE
    )
    os.close(writes)

    assert done.stderr == b""


def test_a_session_without_a_prompt_is_shown_by_its_whole_id(capsys):
    async def keep() -> None:
        store = SqliteStore(load_config({}).sessions_path)
        await store.create(SessionHeader("sess_none_yet", "/work", 1, 1))
        await store.create(SessionHeader("sess_child", "/work", 1, 1, "t", "sess_none_yet", 1))
        await store.aclose()

    anyio.run(keep)

    for session_id in ("sess_none_yet", "sess_child"):
        assert main(["sessions", "show", session_id]) == 0
        assert session_id in capsys.readouterr().out
    assert main(["sessions", "show", "sess_none"]) == 1
    assert "acp-agent: no session sess_none" in capsys.readouterr().err


def test_a_full_disk_behind_the_output_is_told():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "sessions", "list"], stdout=full, stderr=subprocess.PIPE, check=False
        )

    assert done.returncode == 1
    assert done.stderr == b"acp-agent: standard output: No space left on device\n"


def test_a_look_at_the_sessions_makes_no_file(capsys):
    assert main(["sessions", "list"]) == 0
    assert not load_config({}).sessions_path.parent.exists()


def test_no_sessions_at_all_cannot_be_listed():
    with pytest.raises(SystemExit, match="2"):
        main(["sessions", "list", "-n", "0"])


def test_a_chat_from_a_directory_that_is_gone_says_so(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert main(["chat"]) == 2
    assert "not there any more" in capsys.readouterr().err


def test_a_key_that_is_not_stored_cannot_be_forgotten(capsys):
    assert main(["logout", "opnai"]) == 1
    assert "no key of 'opnai'" in capsys.readouterr().err


def test_the_command_of_another_agent_stands_behind_its_mark(capsys):
    assert main(["chat", "hello", "there"]) == 2

    said = capsys.readouterr().err
    assert said.startswith("acp-agent: prompts are typed or piped in; ")
    assert said.endswith("as in: acp-agent chat -- hello there\n")


# --- Ctrl-C before anything has begun ---------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
left = int(sys.argv.pop(1))

def interrupt(event, _details):
    global left
    if event == "import":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)

from acp_server.cli import main
sys.addaudithook(interrupt)
sys.exit(main())
"""
"""The command, interrupted at its nth import: the one clock that its start-up has."""


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["serve", "--log-level", "info"]])
def test_ctrl_c_while_a_command_starts_leaves_no_word(command, tmp_path):
    initialize = {"protocolVersion": 1}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": initialize}
    said = b"say hi\n" if command == ["chat"] else json.dumps(message).encode() + b"\n"
    for at in (1, 10, 70, 130, 160, 190, 220):
        done = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, str(at), *command],
            input=said,
            capture_output=True,
            timeout=30,
            cwd=tmp_path,
        )

        assert done.stderr == b"", at
        assert done.returncode in (0, -signal.SIGINT, 128 + signal.SIGINT), at
