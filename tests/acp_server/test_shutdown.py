"""The end of the process when something is in its way, and what it keeps to itself."""

from __future__ import annotations

import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import termios
import threading
import time
import tty
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from serve_rig import prompt_message, served
from serving import SERVE, ask, environment, line, serving

from acp_server.logs import PatientStream
from conformance.client import Client
from conformance.wire import Wire

PLUGIN = """
import time


def block(runtime):
    async def hold_the_loop(*args):
        print("blocking", flush=True)  # goes to stderr
        while True:
            time.sleep(0.01)

    runtime.hooks.on("tools/pre-execute", hold_the_loop)


def be_impatient(runtime):
    runtime._store._writer._busy_timeout_s = 1.5
"""


@pytest.fixture
def plugins(tmp_path: Path) -> dict[str, str]:
    """The environment in which the plugins of this module can be named."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "in_the_way.py").write_text(PLUGIN)
    before = os.environ.get("PYTHONPATH")
    return environment(PYTHONPATH=os.pathsep.join(filter(None, (os.fspath(folder), before))))


async def blocked(client: Client, cwd: Path) -> None:
    """Start a prompt whose listener holds the event loop, and wait until it does."""
    session = await client.new_session(cwd)
    client.prompt(session, "run true")
    with anyio.fail_after(10):
        while "blocking" not in client.wire.stderr:  # noqa: ASYNC110
            await anyio.sleep(0.01)


BLOCKED = ["--plugin", "in_the_way:block", "--mode", "bypass"]


# --- the event loop is held -------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.only_over("stdio", why="SIGHUP is for the tokens there")
async def test_a_signal_ends_the_process_after_its_grace_though_a_listener_holds_the_loop(
    number, plugins, tmp_path
):
    async with serving(*BLOCKED, "--shutdown-grace", "0.3", env=plugins) as client:
        await blocked(client, tmp_path)

        os.kill(client.wire.pid, number)

        assert await client.wire.exited() == 1
        assert client.wire.descendants() == set()


@pytest.mark.only_over("stdio", why="the test's signals reach the relay")
async def test_a_second_signal_ends_the_process_at_once_though_a_listener_holds_the_loop(
    plugins, tmp_path
):
    async with serving(*BLOCKED, "--shutdown-grace", "600", env=plugins) as client:
        await blocked(client, tmp_path)

        os.kill(client.wire.pid, signal.SIGTERM)
        os.kill(client.wire.pid, signal.SIGINT)

        # Two that come together may be told in either order.
        assert await client.wire.exited() in (128 + signal.SIGTERM, 128 + signal.SIGINT)


async def test_a_signal_before_anything_was_said_ends_the_process(tmp_path):
    async with Wire.spawn(SERVE) as wire:
        await wire.response(wire.request("initialize", {"protocolVersion": 1}))
        wire.terminate()
        assert await wire.exited() == 0


# --- nobody reads -----------------------------------------------------------------------------


@contextmanager
def terminal():
    """A terminal whose other end nobody reads: both descriptors, ours first."""
    ours, theirs = os.openpty()
    tty.setraw(theirs, termios.TCSANOW)
    try:
        yield ours, theirs
    finally:
        for fd in (ours, theirs):
            os.close(fd)


def read_message(fd: int, request_id: int) -> dict[str, Any]:
    """Read from a terminal up to the response to a request."""
    data = b""
    while True:
        data += os.read(fd, 65536)
        for each in data.split(b"\n")[:-1]:
            if (message := json.loads(each)).get("id") == request_id:
                return message


def test_a_terminal_that_is_not_read_holds_up_neither_a_cancel_nor_the_end(tmp_path):
    with terminal() as (ours, theirs):
        process = subprocess.Popen(
            [*SERVE, "--shutdown-grace", "30"], stdin=subprocess.PIPE, stdout=theirs
        )
        assert process.stdin is not None
        try:
            process.stdin.write(line(ask(1, "initialize", {"protocolVersion": 1})))
            params = {"cwd": str(tmp_path), "mcpServers": []}
            process.stdin.write(line(ask(2, "session/new", params)))
            process.stdin.flush()
            session = read_message(ours, 2)["result"]["sessionId"]
            process.stdin.write(line(prompt_message("3", session, "count 100000")))
            process.stdin.flush()
            wait_until_full(theirs)

            process.send_signal(signal.SIGTERM)

            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
            process.stdin.close()


def wait_until_full(fd: int) -> None:
    """Wait until a terminal takes no more.

    It may go on saying that it does when it moved something on after its writer had begun to wait,
    whom it wakes only once it is read; so there is a limit, which is no failure.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    limit_s = time.monotonic() + 3
    while poll.poll(0) and time.monotonic() < limit_s:
        time.sleep(0.01)


def test_two_threads_may_write_to_one_patient_stream():
    reads, writes = os.pipe()
    stream, failures = PatientStream(writes), []

    def write() -> None:
        try:
            for _ in range(3000):
                stream.write("x" * 10)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=write) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(interval)
        os.close(reads)
        os.close(writes)

    assert failures == []


# --- the database is locked -------------------------------------------------------------------


@pytest.mark.only_over("stdio", why="who has left hears no answer there")
async def test_a_database_that_another_process_holds_at_the_end_is_no_failure_of_ours(
    plugins, tmp_path
):
    state = tmp_path / "state"
    flags = ["--state-dir", str(state), "--plugin", "in_the_way:be_impatient"]
    async with serving(*flags, "--shutdown-grace", "2.8", env=plugins) as client:
        session = await client.new_session(tmp_path)
        assert await client.stop_reason(client.prompt(session, "say first")) == "end_turn"
        with closing(sqlite3.connect(state / "sessions.sqlite3", isolation_level=None)) as other:
            other.execute("begin immediate")
            prompt = client.prompt(session, "say second then stall")
            await client.wire.receive(lambda message: "second" in json.dumps(message))

            await client.wire.close_stdin()

            answer = await client.wire.response(prompt)
            assert "locked by another process" in answer["error"]["message"]
            assert await client.wire.exited() == 0, client.wire.transcript()


# --- what it keeps to itself ------------------------------------------------------------------


async def test_no_command_sees_a_key_of_a_model_provider(tmp_path):
    keys = {"OPENAI_API_KEY": "sk-canary-1", "ANTHROPIC_API_KEY": "sk-canary-2"}
    async with served(tmp_path, env={**keys, "HARMLESS": "canary-3"}) as client:
        session = await client.new_session(tmp_path)

        assert await client.stop_reason(client.prompt(session, "run env")) == "end_turn"

        seen = json.dumps(client.wire.updates(session))
        assert "canary-3" in seen
        assert "sk-canary" not in seen
