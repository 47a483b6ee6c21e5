"""``acp-agent chat --url``: the terminal client and an agent on the network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from network_rig import TOKEN, listening

LIMIT_S = 30
CHAT = [sys.executable, "-m", "acp_server", "chat"]


async def chatted(
    text: str, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Give lines to a chat on a pipe."""

    def run() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*CHAT, *arguments],
            input=text.encode(),
            capture_output=True,
            timeout=LIMIT_S,
            env={**os.environ, **(env or {})},
        )

    return await anyio.to_thread.run_sync(run)


async def test_a_chat_talks_to_an_agent_on_the_network(tmp_path: Path) -> None:
    token = {"ACP_AGENT_TOKEN": TOKEN}
    async with listening(tmp_path, env=token) as server:
        arguments = ("--yes", "--cwd", str(tmp_path), "--mode", "ask", "--url", server.ws)
        done = await chatted("count 3\nwrite a.txt: x\n", *arguments, env=token)
        assert done.stdout.startswith(b"1 2 3 \n")
        assert (done.stderr, done.returncode) == (b"", 0)
        assert (tmp_path / "a.txt").read_text() == "x"

        again = await chatted("say more\n", "--continue", *arguments, env=token)
        assert b"more" in again.stdout
        assert again.returncode == 0


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("", "it asks for a token (HTTP 401)"),
        ("a-wrong-token-0123456789", "it does not accept the token (HTTP 401)"),
    ],
)
async def test_a_server_that_refuses_is_said(tmp_path: Path, token: str, said: str) -> None:
    async with listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}) as server:
        done = await chatted("count 3\n", "--url", server.ws, env={"ACP_AGENT_TOKEN": token})

        refused = f"{server.ws} refused the connection: {said}"
        assert done.stderr.decode() == f"error: No connection to the agent: {refused}\n"
        assert (done.stdout, done.returncode) == (b"", 1)


async def test_an_agent_that_is_nowhere_is_said() -> None:
    done = await chatted("count 3\n", "--url", "ws://127.0.0.1:9/acp")

    assert done.stderr == (
        b"error: No connection to the agent: cannot connect to ws://127.0.0.1:9/acp:"
        b" Connection refused\n"
    )
    assert done.returncode == 1


async def test_a_turn_whose_connection_is_lost_is_said_and_the_chat_goes_on(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, must_end_well=False) as server,
        await anyio.open_process([*CHAT, "--cwd", str(tmp_path), "--url", server.ws]) as chat,
    ):
        assert chat.stdin is not None
        assert chat.stdout is not None
        assert chat.stderr is not None
        await chat.stdin.send(b"count 1000000 slowly\nsay after\n")
        await chat.stdin.aclose()
        assert await chat.stdout.receive()

        server.process.kill()

        said = b""
        with anyio.fail_after(LIMIT_S):
            async for data in chat.stderr:
                said += data
            assert await chat.wait() == 1
        first, second = said.decode().splitlines()
        assert first == "error: No answer will come: the connection to the agent was lost"
        assert second.startswith("error: No connection to the agent: cannot connect to ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--url", "http://h/acp"), b"the address of an agent begins with ws:// or wss://"),
        (("--url", "ws://h/acp", "--", "agent"), b"give --url or an agent's command, not both"),
        (("--url", "ws://h/acp", "--cwd", "x"), b"with --url, --cwd is an absolute path"),
    ],
)
async def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], said: bytes) -> None:
    done = await chatted("", *arguments)

    assert (done.stderr, done.returncode) == (b"acp-agent: " + said + b"\n", 2)
