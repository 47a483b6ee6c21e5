"""Who may reach an agent that listens, and what they see of each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from network_rig import TOKEN, Server, editor, listening
from websockets.exceptions import InvalidStatus

OTHER = "another-token-9876543210"


async def refusal(server: Server, **options: object) -> int:
    with pytest.raises(InvalidStatus) as caught:
        async with editor(server, **options):  # type: ignore[arg-type]
            pass
    status: int = caught.value.response.status_code
    return status


async def answer_to(server: Server, headers: dict[str, str]) -> int:
    async with httpx2.AsyncClient(trust_env=False) as client:
        return (await client.post(f"{server.http}/acp", headers=headers, json={})).status_code


def tokens_in(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"ann:{TOKEN}\nben:{OTHER}\n")
    path.chmod(0o600)
    return path


def test_another_address_without_a_token_is_not_served_and_it_is_said_how(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    environ.pop("ACP_AGENT_TOKEN", None)
    done = subprocess.run(
        [sys.executable, "-m", "acp_server", "serve", "--listen", "0.0.0.0:0"],
        capture_output=True,
        text=True,
        timeout=30,
        env=environ,
    )

    assert done.returncode == 2
    assert "ACP_AGENT_TOKEN" in done.stderr
    assert "--token-file" in done.stderr
    assert done.stdout == ""


async def test_only_whoever_has_the_token_gets_in_and_no_log_shows_it(tmp_path: Path) -> None:
    environ = {"ACP_AGENT_TOKEN": TOKEN}
    async with listening(tmp_path, "--log-level", "debug", env=environ) as server:
        assert await refusal(server) == 401
        assert await refusal(server, token=OTHER) == 401
        assert await refusal(server, token=TOKEN + "x") == 401
        async with editor(server, token=TOKEN) as client:
            session = await client.new_session(tmp_path)
            assert await client.stop_reason(await client.prompt(session, "say in")) == "end_turn"

        assert TOKEN not in server.said
        assert OTHER not in server.said


async def test_a_page_of_a_browser_and_a_rebound_name_are_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as server:
        assert await refusal(server, origin="http://evil.example") == 403
        assert (await answer_to(server, {"Host": "evil.example"})) == 403
        async with editor(server) as client:
            assert await client.new_session(tmp_path)


async def test_a_session_of_another_token_does_not_exist(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, "--token-file", str(tokens_in(tmp_path))) as server,
        editor(server, token=TOKEN) as ann,
        editor(server, token=OTHER) as ben,
    ):
        session = await ann.new_session(tmp_path)
        assert await ann.stop_reason(await ann.prompt(session, "say mine")) == "end_turn"
        running = await ann.prompt(session, "stall")
        places = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}

        assert (await ben.result("session/list"))["sessions"] == []
        for method in ("session/load", "session/resume", "session/fork"):
            assert (await ben.error(method, **places))["code"] == -32002
        assert (await ben.error("session/close", sessionId=session))["code"] == -32002
        assert await ben.result("session/delete", sessionId=session) == {}
        await ben.note("session/cancel", sessionId=session)
        assert ben.text(session) == ""

        listed = [each["sessionId"] for each in (await ann.result("session/list"))["sessions"]]
        assert listed == [session]  # what he did to it came to nothing
        await ann.note("session/cancel", sessionId=session)
        assert await ann.stop_reason(running) == "cancelled"


async def test_tokens_are_read_again_on_a_hangup(tmp_path: Path) -> None:
    tokens = tokens_in(tmp_path)
    flags = ("--token-file", str(tokens), "--log-level", "info")
    async with listening(tmp_path, *flags) as server:
        tokens.write_text(f"ben:{OTHER}\n")
        server.process.send_signal(signal.SIGHUP)
        await server.until_said("tokens_reloaded")

        assert await refusal(server, token=TOKEN) == 401
        async with editor(server, token=OTHER) as client:
            assert await client.new_session(tmp_path)


async def test_no_session_is_opened_outside_of_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    async with listening(tmp_path, "--root", str(root)) as server, editor(server) as client:
        for cwd in (outside, root / "link", root / ".." / "outside", Path("/")):
            error = await client.error("session/new", cwd=str(cwd), mcpServers=[])
            assert error["code"] == -32602, cwd
        error = await client.error(
            "session/new", cwd=str(root), mcpServers=[], additionalDirectories=[str(outside)]
        )
        assert error["code"] == -32602
        assert await client.new_session(root)


async def test_what_is_for_the_whole_user_is_not_offered_to_those_who_are_elsewhere(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as server, editor(server, initialize=False) as client:
        answer = await client.result("initialize", protocolVersion=1)

        assert "logout" not in answer["agentCapabilities"].get("auth", {})
        assert {each.get("type", "agent") for each in answer["authMethods"]} <= {"agent"}
