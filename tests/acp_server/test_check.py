from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import anyio
import dialects
import pytest

from acp_server import __version__
from acp_server.cli import main
from acp_server.config import load_config
from conformance.providers import chat as chat_double
from conformance.providers.server import Drop, Reply, Stall, provider_double, status

COMMAND = [sys.executable, "-m", "acp_server", "check"]
KEY = "sk-secret-0123456789"
NAMES = ["version", "configuration", "model", "mode", "limits", "sessions", "shell", "sandbox"]


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """Return the exit code of a check and its lines, by the name of what they are about."""
    code = main(["check", *arguments])
    lines = capsys.readouterr().out.splitlines()
    return code, dict(line[9:].split(": ", 1) for line in lines)


async def checked_online(
    *arguments: str, env: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON and standard error of a check that calls the model."""
    command = [*COMMAND, "--online", "--json", *arguments]
    with anyio.fail_after(25):
        done = await anyio.run_process(command, env={**os.environ, **(env or {})}, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr.decode()


def of(body: dict[str, Any], name: str) -> tuple[str, str]:
    """Return state and text of the finding `name`."""
    (finding,) = [each for each in body["findings"] if each["name"] == name]
    return finding["state"], finding["text"]


# --- what is configured ----------------------------------------------------------------------


def test_check_says_what_is_configured_and_where(capsys):
    code, said = checked(capsys)

    assert code == 0
    assert list(said) == NAMES
    assert f"acp-agent {__version__}" in said["version"]
    assert said["model"].startswith("rehearsal (default): built in and offline")
    assert said["mode"] == "ask (default)"
    assert said["limits"] == "max_steps 200 (default), idle_limit_s 300 (default)"
    assert said["sessions"] == f"{load_config({}).sessions_path} (default)"
    assert said["configuration"].endswith("config.toml, which sets nothing")


def test_check_says_where_every_value_came_from(capsys, monkeypatch, tmp_path):
    path = tmp_path / "agent.toml"
    path.write_text("""
        model = "mine"
        mode = "read-only"
        [providers.work]
        base_url = "https://me:pass-word@work.example/v1?token=pass-word"
        key_command = ["echo", "sk-work"]
        [models.mine]
        model = "work:qwen3"
        efforts = ["low", "high"]
        [models.cloud]
        model = "anthropic:claude-opus-5-5"
        [models.other]
        model = "openai:gpt-4o"
    """)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("ACP_AGENT_MAX_STEPS", "7")

    code, said = checked(capsys, "--config", str(path), "--idle-limit-s", "9")

    assert code == 0
    assert said["configuration"] == str(path)
    assert said["model"] == (
        f"mine ({path}): work:qwen3; chat completions at https://work.example/v1; key from "
        f"key_command in {path}; a context of unknown size; effort by default of low, high"
    )
    assert said["model cloud"] == (
        "anthropic:claude-opus-5-5; messages at https://api.anthropic.com; key from "
        "ANTHROPIC_API_KEY; a context of 1000000 tokens; effort medium of low, medium, high, "
        "xhigh, max"
    )
    assert said["model other"] == (
        "The model other needs a key: "
        f"set OPENAI_API_KEY, or key under [providers.openai] in {path}, "
        "or run `acp-agent login openai`."
    )
    assert said["mode"] == f"read-only ({path})"
    assert said["limits"] == "max_steps 7 (ACP_AGENT_MAX_STEPS), idle_limit_s 9 (--idle-limit-s)"


def test_check_says_which_other_agents_there_are(capsys, tmp_path):
    path = tmp_path / "agent.toml"
    path.write_text("""
        [subagents.shell]
        command = ["sh", "-c", "secret-argument"]
        env = {TOKEN = "secret-value"}
        permissions = "reject"
        [subagents.gone]
        command = ["no-such-program"]
        [subagents.far]
        url = "wss://far.example/acp?key=secret"
        token = "secret-token"
        [subagents.asked]
        url = "ws://asked.example"
        token_command = ["pass", "secret-argument"]
        [subagents.unset]
        url = "ws://unset.example"
        token_variable = "UNSET_TOKEN"
    """)

    code, said = checked(capsys, "--config", str(path))

    assert code == 0  # they are not needed for anything else
    assert said["subagent shell"].endswith("/sh; what it asks: always rejected")
    assert said["subagent gone"] == (
        "there is no program 'no-such-program' (subagents.gone.command)"
    )
    asks = "not tried; what it asks: the person decides"
    assert said["subagent far"] == f"wss://far.example/acp, with a token ({path}); {asks}"
    assert (
        said["subagent asked"] == f"ws://asked.example, with the token that 'pass' prints; {asks}"
    )
    assert said["subagent unset"] == (
        f"ws://unset.example, no token, as UNSET_TOKEN is not set; {asks}"
    )
    assert "secret" not in str(said)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OPENAI_API_KEY": KEY}, "key from OPENAI_API_KEY"),
        ({"OPENAI_BASE_URL": "http://localhost:1"}, "no key"),
        ({"OPENAI_CUSTOM_HEADERS": f"Authorization: {KEY}"}, "no key but a header from"),
    ],
)
@pytest.mark.requirement("B163")
def test_check_says_where_the_key_came_from_and_never_the_key(variables, said, capsys, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert main(["check", "--model", "openai:gpt-5"]) == 0

    captured = capsys.readouterr()
    assert said in captured.out
    assert KEY not in captured.out + captured.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-program"], "'no-such-program' prints no key, it cannot be run"),
        (["sh", "-c", "exit 3"], "'sh' prints no key, it ended with status 3"),
        (["true"], "'true' prints no key, it printed nothing"),
        (
            ["sh", "-c", f"echo {KEY}; echo first >&2; echo {KEY} 'is '{'x' * 200} >&2; exit 1"],
            f"it ended with status 1 and said '… is {'x' * 114}…'",
        ),
    ],
)
def test_a_command_that_prints_no_key_is_found_out_without_a_call(capsys, tmp_path, command, said):
    path = tmp_path / "agent.toml"
    table = f"[providers.own]\nbase_url = 'http://127.0.0.1:9'\nkey_command = {json.dumps(command)}"
    path.write_text(f'{table}\n[models.second]\nmodel = "own:y"\n')

    code, told = checked(capsys, "--config", str(path), "--model", "own:x")

    assert code == 1
    assert told["model"].startswith("providers.own.key_command: ")
    assert told["model"].endswith(said)
    assert told["model second"] == told["model"]
    assert KEY not in str(told)


def test_the_command_of_two_models_is_run_once(capsys, tmp_path):
    path = tmp_path / "agent.toml"
    command = ["sh", "-c", f"echo x >> {tmp_path}/runs; echo {KEY}"]
    table = f"[providers.own]\nbase_url = 'http://127.0.0.1:9'\nkey_command = {json.dumps(command)}"
    path.write_text(f'{table}\n[models.second]\nmodel = "own:y"\n')

    code, told = checked(capsys, "--config", str(path), "--model", "own:x")

    assert code == 0
    assert "key from key_command" in told["model"]
    assert (tmp_path / "runs").read_text() == "x\n"


def test_check_as_json_is_one_object(capsys):
    assert main(["check", "--json"]) == 0

    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is True
    assert [each["name"] for each in body["findings"]] == NAMES
    assert {each["name"] for each in body["findings"] if each["state"] != "ok"} == {"model"}
    assert set(body) == {"ok", "findings"}
    assert set(body["findings"][0]) == {"name", "state", "text"}


@pytest.mark.requirement("B160")
@pytest.mark.parametrize(
    ("arguments", "name", "said"),
    [
        (["--model", "openai:gpt-5"], "model", "OPENAI_API_KEY"),
        (["--model", "nope"], "configuration", "nope"),
        (["--mode", "yolo"], "configuration", "yolo"),
        (["--config", "/nonexistent.toml"], "configuration", "/nonexistent.toml"),
        (["--state-dir", "/dev/null/x"], "sessions", "/dev/null/x"),
        (["--rehearsal-script", "/nonexistent"], "model", "script"),
    ],
)
def test_check_fails_with_1_and_says_what_does_not_work(arguments, name, said, capsys):
    assert main(["check", *arguments]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["check", "--json", *arguments]) == 1

    body = json.loads(capsys.readouterr().out)
    (failed,) = [each for each in body["findings"] if each["state"] == "failed"]
    assert body["ok"] is False
    assert failed["name"] == name
    assert said in failed["text"]


def test_check_loads_no_library_of_a_provider_unless_it_calls_one():
    code = (
        "import sys; from acp_server.cli import main; main(['check', '--model', 'ollama:x']);"
        "sys.exit(3 if {'openai', 'anthropic', 'httpx2'} & set(sys.modules) else 0)"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_check_works_without_home():
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}

    done = subprocess.run(COMMAND, env=environ, capture_output=True, timeout=20)

    assert (done.returncode, done.stderr) == (0, b"")


# --- a request -------------------------------------------------------------------------------


@pytest.mark.parametrize("api", dialects.APIS)
async def test_a_check_online_asks_for_one_token_and_says_what_came(api, tmp_path):
    async with provider_double([Reply(dialects.last_words(api))]) as double:
        flags, env = dialects.flags_for(api, double, tmp_path)
        code, body, err = await checked_online(*flags, env=env)

    state, text = of(body, "request")
    assert (code, body["ok"], state, err) == (0, True, "ok", "")
    assert text.startswith("answered in ")
    assert "tokens in" in text
    assert double.violations == []
    (request,) = double.requests
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    assert max(request.get(name, 0) for name in limits) in (1, 16)


@pytest.mark.requirement("B160")
async def test_a_wrong_key_is_named_with_where_to_change_it(tmp_path):
    refusal = status(401, {"message": f"Incorrect API key provided: {KEY}"})
    async with provider_double([refusal]) as double:
        env = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": double.url}
        code, body, err = await checked_online("--model", "openai:x", env=env)

    state, text = of(body, "request")
    assert (code, body["ok"], state, err) == (1, False, "failed", "")
    assert "OPENAI_API_KEY" in text
    assert "[providers.openai]" in text
    assert KEY not in json.dumps(body)
    assert len(double.requests) == 1


@pytest.mark.requirement("B160")
async def test_without_a_key_nothing_is_sent_and_it_is_said_where_to_put_one():
    code, body, _err = await checked_online("--model", "openai:gpt-5")

    state, text = of(body, "model")
    assert (code, state) == (1, "failed")
    assert "set OPENAI_API_KEY, or key under [providers.openai] in " in text
    assert "request" not in [each["name"] for each in body["findings"]]


async def test_where_nobody_answers_it_is_said_where_that_address_came_from(free_tcp_port):
    env = {"OPENAI_BASE_URL": f"http://127.0.0.1:{free_tcp_port}/v1"}

    code, body, err = await checked_online("--model", "openai:x", env=env)

    state, text = of(body, "request")
    assert (code, state, err) == (1, "failed", "")
    assert text.startswith(f"nothing listens at 127.0.0.1:{free_tcp_port}; ")
    assert text.count(str(free_tcp_port)) == 1
    assert "base_url is from OPENAI_BASE_URL, and can be set under [providers.openai] in " in text


async def test_an_address_from_the_file_is_named_with_its_place_once(free_tcp_port, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(f"[providers.own]\nbase_url = 'http://127.0.0.1:{free_tcp_port}/v1'")

    code, body, _err = await checked_online("--config", str(path), "--model", "own:x")

    state, text = of(body, "request")
    assert (code, state) == (1, "failed")
    assert text.endswith(f"; the base_url stands under [providers.own] in {path}")
    assert text.count(str(path)) == 1


async def test_a_model_that_is_not_there_is_said_with_the_address():
    async with provider_double([status(404, {"code": "model_not_found"})]) as double:
        code, body, _err = await checked_online(
            "--model", "openai:x", env={"OPENAI_BASE_URL": double.url}
        )

    state, text = of(body, "request")
    assert (code, state) == (1, "failed")
    assert "no model x" in text
    assert text.count(double.url.split("/")[2]) == 1
    assert "is from OPENAI_BASE_URL" in text


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_call_that_failed_is_tried_once_more_and_no_oftener(failures):
    script = [status(500)] * failures + [Reply(dialects.last_words("chat"))] * (2 - failures)
    async with provider_double(script) as double:
        code, body, err = await checked_online(
            "--model", "openai:x", env={"OPENAI_BASE_URL": double.url}
        )

    assert len(double.requests) == 2
    assert double.violations == []
    assert of(body, "request")[0] == ("ok" if failures == 1 else "failed")
    assert (code, err) == (failures - 1, "")


async def test_a_model_that_asks_for_a_long_wait_is_said_to_and_not_waited_for():
    busy = status(429, {"message": "slow down"}, headers={"Retry-After": "60"})
    async with provider_double([busy]) as double:
        code, body, _err = await checked_online(
            "--model", "openai:x", env={"OPENAI_BASE_URL": double.url}
        )

    state, text = of(body, "request")
    assert (code, state) == (1, "failed")
    assert "limits the rate of calls: slow down; it asks to wait 60 s" in text


async def test_what_a_model_says_cannot_play_tricks_on_the_terminal():
    text = [chat_double.text("\x1b[31m é\n"), chat_double.finish("length")]
    async with provider_double([Reply(text)]) as double:
        _code, body, _err = await checked_online(
            "--model", "openai:x", env={"OPENAI_BASE_URL": double.url}
        )

    assert '"\\u001b[31m \\u00e9\\n"' in of(body, "request")[1]


@pytest.mark.parametrize("step", [Stall(), Drop()])
async def test_ctrl_c_ends_a_check_cleanly(step):
    # Behind a dropped connection it is in the wait before the second call.
    async with provider_double([Reply(before=[step]), Reply(before=[Stall()])]) as double:
        env = {**os.environ, "OPENAI_BASE_URL": double.url}
        command = [*COMMAND, "--online", "--json", "--model", "openai:x"]
        with anyio.fail_after(25):
            async with await anyio.open_process(command, env=env) as process:
                await double.requested(0)
                process.send_signal(signal.SIGINT)
                assert process.stdout is not None
                assert process.stderr is not None
                out = b"".join([chunk async for chunk in process.stdout])
                err = b"".join([chunk async for chunk in process.stderr])
                code = await process.wait()
            await double.disconnected(0)

    assert (code, err) == (1, b"")
    assert of(json.loads(out), "request") == ("failed", "interrupted")


async def test_the_rehearsal_model_is_not_asked():
    code, body, _err = await checked_online()

    assert code == 0
    assert of(body, "request")[0] == "warning"
