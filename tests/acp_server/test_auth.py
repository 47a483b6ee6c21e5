"""Authentication, as a client and as a person at a terminal see it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest
from serving import assert_pure, environment
from talking import CWD, talk

from acp_server.config import ModelConfig, ProviderConfig
from acp_server.connection import Connection
from acp_server.methods.auth import auth_methods
from acp_server.stored_keys import keys_file, store_key, stored_keys
from conformance.providers.server import answer, provider_double, status, text
from conformance.wire import Wire

PROGRAM: Final = [sys.executable, "-m", "acp_server"]
LOGINS: Final = {"auth": {"terminal": True}}
NEEDS_KEY: Final[dict[str, Any]] = {"model": "openai:gpt-5.5"}


def methods_of(connection: Connection) -> list[dict[str, Any]]:
    return auth_methods(connection.features)


# --- over the protocol ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "capabilities",
    [
        None,
        {},
        {"auth": {}},
        {"auth": {"terminal": False}},
        {"auth": {"terminal": "yes"}},
        {"auth": {"terminal": {}}},
        {"terminal": True, "_meta": {"terminal-auth": True}},
    ],
    ids=str,
)
@pytest.mark.requirement("ACP-040", "ACP-047")
async def test_a_client_that_cannot_run_a_login_is_offered_none(
    tmp_path: Path, capabilities: object
) -> None:
    async with talk(tmp_path, capabilities=capabilities) as (at, _backend):
        (method,) = methods_of(at.connection)

        assert method["id"] == "configured"
        assert "type" not in method  # an agent's own method
        assert "args" not in method
        # What was not offered is not known either.
        refused = await at.response(at.say("authenticate", methodId="login"))
        assert refused["error"]["code"] == -32602


@pytest.mark.requirement("ACP-040")
async def test_a_client_that_can_run_a_login_is_told_how(tmp_path: Path) -> None:
    async with talk(tmp_path, capabilities=LOGINS) as (at, _backend):
        initialized = at.lines.responses(1)[0]["result"]

        assert initialized["authMethods"] == methods_of(at.connection)
        assert [method["id"] for method in initialized["authMethods"]] == ["configured", "login"]
        login = initialized["authMethods"][1]
        assert (login["type"], login["args"]) == ("terminal", ["login"])
        assert initialized["agentCapabilities"]["auth"] == {"logout": {}}


@pytest.mark.parametrize("params", [{}, {"methodId": None}, {"methodId": 1}, {"methodId": "x"}])
@pytest.mark.requirement("ACP-048")
async def test_an_unknown_method_is_refused(tmp_path: Path, params: dict[str, Any]) -> None:
    async with talk(tmp_path) as (at, _backend):
        refused = await at.response(at.say("authenticate", **params))

        assert refused["error"]["code"] == -32602


@pytest.mark.requirement("ACP-043", "B160")
async def test_a_usable_configuration_needs_no_waiting_and_may_be_checked_again(
    tmp_path: Path,
) -> None:
    async with talk(tmp_path) as (at, _backend):
        for _ in range(2):
            assert await at.result(at.say("authenticate", methodId="configured")) == {}
        assert await at.new_session()


@pytest.mark.requirement("ACP-046", "B160")
async def test_without_a_key_sessions_open_and_the_prompt_says_what_to_do(tmp_path: Path) -> None:
    advice = "set OPENAI_API_KEY, or key under [providers.openai] in "
    async with talk(tmp_path, **NEEDS_KEY) as (at, _backend):
        refused = await at.response(at.say("authenticate", methodId="configured"))
        session_id = await at.new_session()
        failed = await at.response(at.prompt(session_id, "hello"))

        assert refused["error"]["code"] == failed["error"]["code"] == -32000
        assert failed["error"]["data"] == {"code": "NO_KEY"}
        for said in (refused, failed):
            assert advice in said["error"]["message"]
            assert "`acp-agent login openai`" in said["error"]["message"]
        # What needs no model works, and so does another model.
        assert await at.result(at.prompt(session_id, "/help"))
        choose = {"sessionId": session_id, "configId": "model", "value": "rehearsal"}
        await at.response(at.say("session/set_config_option", **choose))
        assert (await at.result(at.load(session_id)))["modes"]


@pytest.mark.requirement("ACP-042", "ACP-043", "ACP-045", "B164")
async def test_a_login_is_enough_and_a_logout_takes_it_back_without_a_restart(
    tmp_path: Path,
) -> None:
    async with provider_double([answer(text("hi"))]) as double:
        settings: dict[str, Any] = {
            "model": "it",
            "models": {"it": ModelConfig("work:any", api="chat")},
            "providers": {"work": ProviderConfig(base_url=double.url, key_variable="WORK_KEY")},
        }
        async with talk(tmp_path, capabilities=LOGINS, **settings) as (at, _backend):
            session_id = await at.new_session()
            assert (await at.response(at.prompt(session_id, "a")))["error"]["code"] == -32000

            store_key("work", "sk-1")
            assert await at.result(at.say("authenticate", methodId="login")) == {}
            assert (await at.result(at.prompt(session_id, "b")))["stopReason"] == "end_turn"

            assert await at.result(at.say("logout")) == {}
            assert stored_keys() == {}
            assert (await at.response(at.prompt(session_id, "c")))["error"]["code"] == -32000
            refused = await at.response(at.say("authenticate", methodId="configured"))
            assert refused["error"]["code"] == -32000
            # What was open stays open, and what was logged out is so twice, too.
            assert await at.result(at.say("logout")) == {}
            assert (await at.result(at.say("session/close", sessionId=session_id))) == {}
        assert len(double.requests) == 1


@pytest.mark.requirement("ACP-015")
async def test_a_refused_key_is_a_matter_of_authentication_too(tmp_path: Path) -> None:
    refusal = status(401, {"message": "no such key", "code": "invalid_api_key"})
    async with provider_double([refusal]) as double:
        provider = ProviderConfig(base_url=double.url, key="sk-old")
        settings: dict[str, Any] = {"model": "work:any", "providers": {"work": provider}}
        async with talk(tmp_path, **settings) as (at, _backend):
            failed = await at.response(at.prompt(await at.new_session(), "hello"))

    assert failed["error"]["code"] == -32000
    assert failed["error"]["data"] == {"code": "AUTH"}
    assert "sk-old" not in str(failed)


async def test_a_logout_that_waits_for_a_login_holds_up_nothing_else(tmp_path: Path) -> None:
    store_key("openai", "sk-1")
    folder = os.open(keys_file().parent, os.O_RDONLY)
    async with talk(tmp_path) as (at, _backend):
        fcntl.flock(folder, fcntl.LOCK_EX)  # as a login that was stopped while it writes
        try:
            logout = at.say("logout")
            await at.result(at.prompt(await at.new_session(), "say hello"))
            assert at.lines.responses(logout) == []
        finally:
            os.close(folder)

        assert await at.result(logout) == {}
    assert stored_keys() == {}


async def test_a_logout_that_fails_says_so(tmp_path: Path) -> None:
    keys_file().parent.parent.mkdir(parents=True, exist_ok=True)
    keys_file().parent.symlink_to(tmp_path)
    async with talk(tmp_path) as (at, _backend):
        refused = await at.response(at.say("logout"))

    assert refused["error"]["code"] == -32603
    assert "keys.toml cannot be used" in refused["error"]["message"]


# --- acp-agent login ------------------------------------------------------------------------


def login(
    *arguments: str, typed: str = "sk-piped\n", **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**environ),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("login", "openai"),
        ("login", "--model", "openai:gpt-5.5"),
        ("serve", "--model", "openai:gpt-5.5", "login"),
        ("serve", "login", "--model", "openai:gpt-5.5"),
    ],
    ids=" ".join,
)
@pytest.mark.requirement("ACP-042")
def test_a_login_reads_the_key_from_a_pipe_and_ends(arguments: tuple[str, ...]) -> None:
    done = login(*arguments)

    assert (done.returncode, done.stderr) == (0, "")
    assert f"The key for openai is stored in {keys_file()}" in done.stdout
    assert "sk-piped" not in done.stdout
    assert stored_keys() == {"openai": "sk-piped"}


def test_a_login_says_what_it_takes_for_the_key_to_be_used() -> None:
    unused = login("login", "openai", OPENAI_API_KEY="sk-variable")
    used = login("login", "openai", "--model", "openai:gpt-5.5")

    assert "It is not used yet: key from OPENAI_API_KEY comes first." in unused.stdout
    assert 'To use it, put model = "openai:NAME" into ' in unused.stdout
    assert len(used.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "typed", "code", "said"),
    [
        (("login", "openai"), "", 1, "no key was given"),
        (("login", "openai"), "  \n", 1, "no key was given"),
        (("login", "openai"), "sk secret\n", 1, "characters that no key has"),
        (("login", "openai"), "s" * 5000, 1, "characters that no key has"),
        (("login", "opanai"), "sk-secret\n", 2, "no provider 'opanai'; there are anthropic,"),
        (("login",), "sk-secret\n", 2, "there are anthropic,"),
        (("login", "--config", "/nowhere"), "sk-secret\n", 2, "no configuration file /nowhere"),
    ],
    ids=str,
)
@pytest.mark.requirement("B163")
def test_a_login_that_does_not_work_stores_nothing(
    arguments: tuple[str, ...], typed: str, code: int, said: str
) -> None:
    done = login(*arguments, typed=typed)

    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr + done.stdout
    assert stored_keys() == {}


def test_a_logout_forgets_one_key_or_all() -> None:
    for provider in ("openai", "anthropic", "deepseek"):
        store_key(provider, "k")

    one, rest, none = login("logout", "openai"), login("logout"), login("logout")

    assert one.stdout == "The key of openai is forgotten.\n"
    assert rest.stdout == "The key of anthropic, deepseek is forgotten.\n"
    assert none.stdout == "No key was stored.\n"
    assert (one.returncode, rest.returncode, none.returncode) == (0, 0, 0)
    assert stored_keys() == {}


def at_a_terminal(*arguments: str, answers: list[tuple[str, str]]) -> tuple[int, str]:
    """Answer each question with what is typed behind it; return the exit code and the screen."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes its terminal
    )
    os.close(theirs)
    screen, deadline = "", time.monotonic() + 60
    try:
        while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                data = os.read(ours, 4096)
            except OSError:
                break
            screen += data.decode()
            if answers and answers[0][0] in screen:
                os.write(ours, answers.pop(0)[1].encode())
        return process.wait(60), screen
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_person_is_asked_for_provider_and_key_and_the_key_is_not_shown() -> None:
    answers = [("deepseek, ", "openai\r"), ("Key for openai (it is not shown): ", "sk-typed\r")]

    code, screen = at_a_terminal("login", answers=answers)

    assert (code, answers) == (0, [])
    assert stored_keys() == {"openai": "sk-typed"}
    assert "sk-typed" not in screen


def test_ctrl_c_at_the_question_stores_nothing() -> None:
    code, screen = at_a_terminal("login", "openai", answers=[("not shown): ", "sk-half\x03")])

    assert code == 130
    assert "Traceback" not in screen
    assert stored_keys() == {}


# --- as the registry looks at it --------------------------------------------------------------


@pytest.mark.requirement("ACP-040", "ACP-047")
async def test_with_an_empty_home_the_first_line_is_an_answer_with_a_method(tmp_path: Path) -> None:
    unset = dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME"))
    env = environment(HOME=str(tmp_path), TERM="dumb", **unset)
    offered = {
        "fs": {"readTextFile": True, "writeTextFile": True},
        "terminal": True,
        "_meta": {"terminal_output": True, "terminal-auth": True},
    }
    async with Wire.spawn([*PROGRAM, "serve"], env=env) as wire:
        params = {"protocolVersion": 1, "clientCapabilities": offered}
        first = await wire.response(wire.request("initialize", params))

        assert wire.received[0] == first
        methods = first["result"]["authMethods"]
        assert [method.get("type", "agent") for method in methods] == ["agent"]
        params = {"cwd": CWD, "mcpServers": []}
        assert "result" in await wire.response(wire.request("session/new", params))
    assert_pure(wire)
