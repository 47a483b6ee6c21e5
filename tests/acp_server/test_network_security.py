"""Who may come in, and what somebody who did may reach: each line of it, from outside."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import httpx2
import pytest
from network_rig import TOKEN, editor, listening
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from acp_server.config import ConfigError
from acp_server.network.security import MAX_GUESSES, Gate, Principal, Refusal, Tokens, is_loopback

OTHER = "another-token-0123456789"


def refused_start(tmp_path: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "acp_server", "serve", "--state-dir", str(tmp_path), *flags]
    environ = {name: value for name, value in os.environ.items() if name != "ACP_AGENT_TOKEN"}
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2
    assert "listening" not in done.stderr
    return done.stderr


async def status_of(url: str, **options: object) -> int:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, proxy=None, **options):
            pass
    return caught.value.response.status_code


# --- nothing listens before everything was checked ------------------------------------------


@pytest.mark.requirement("B158")
@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0", "example.org:0"])
def test_an_address_that_others_reach_is_refused_without_a_token(
    tmp_path: Path, address: str
) -> None:
    said = refused_start(tmp_path, "--listen", address)
    assert "ACP_AGENT_TOKEN" in said
    assert "--token-file" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--listen", "nowhere"), "HOST:PORT"),
        (("--listen", "127.0.0.1:0", "--token-file", "/none"), "cannot be read"),
        (("--listen", "127.0.0.1:0", "--root", "/none"), "not a directory"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "/none"), "certificate"),
        (("--listen", "127.0.0.1:0", "--mode", "odd"), "mode"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_listens(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    assert words in refused_start(tmp_path, *flags)


@pytest.mark.parametrize("line", ["short:abc", "a name:0123456789abcdef", "name:has space 0123456"])
def test_a_token_that_is_not_usable_is_not_quoted(tmp_path: Path, line: str) -> None:
    (tmp_path / "tokens").write_text(f"# mine\n\n{line}\n")
    with pytest.raises(ConfigError, match="line 3") as caught:
        Tokens(None, str(tmp_path / "tokens"))
    assert line.partition(":")[2] not in str(caught.value)


def test_loopback_is_what_only_this_computer_reaches() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.7", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "a.org")] == [False] * 4


# --- tokens ---------------------------------------------------------------------------------


@pytest.mark.requirement("B158", "B159")
async def test_without_the_right_token_nothing_but_the_probes_answers(tmp_path: Path) -> None:
    env = {"ACP_AGENT_TOKEN": TOKEN}
    async with listening(tmp_path, listen="0.0.0.0:0", env=env) as server:
        assert await status_of(server.ws) == 401
        wrong = {"Authorization": "Bearer wrong-token-wrong"}
        assert await status_of(server.ws, additional_headers=wrong) == 401
        async with httpx2.AsyncClient() as http:
            assert (await http.get(f"{server.http}/healthz")).status_code == 200
            assert (await http.get(f"{server.http}/readyz")).status_code == 200
            for path in ("/acp", "/metrics", "/elsewhere"):
                assert (await http.get(f"{server.http}{path}")).status_code == 401
            refused = await http.post(f"{server.http}/acp", json={}, headers=wrong)
            assert refused.status_code == 401
            assert "wrong-token" not in refused.text
        async with editor(server, token=TOKEN) as client:
            assert "sessions" in await client.result("session/list")
    assert "wrong-token" not in server.said
    assert TOKEN not in server.said


async def test_a_browser_shows_its_token_as_a_subprotocol_which_is_not_echoed(
    tmp_path: Path,
) -> None:
    shown = base64.urlsafe_b64encode(TOKEN.encode()).rstrip(b"=").decode()
    async with listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}) as server:
        offered = ["acp", f"acp.bearer.{shown}"]
        async with connect(server.ws, proxy=None, subprotocols=offered) as socket:
            assert socket.subprotocol == "acp"
        assert await status_of(server.ws, subprotocols=["acp", "acp.bearer.abcd"]) == 401


async def test_tokens_are_read_again_on_sighup_and_who_lost_his_has_to_leave(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann:{TOKEN}\nbob:{OTHER}\n")
    async with (
        listening(tmp_path, "--token-file", str(tokens)) as server,
        editor(server, token=TOKEN) as ann,
        editor(server, token=OTHER) as bob,
    ):
        tokens.write_text("nonsense")
        server.process.send_signal(signal.SIGHUP)
        await server.until_said("tokens_not_reloaded")
        await ann.result("session/list")

        tokens.write_text(f"bob:{OTHER}\n")
        server.process.send_signal(signal.SIGHUP)
        await ann.until(lambda: ann.close_code)
        assert ann.close_code == 1008
        assert await status_of(server.ws, additional_headers=_bearer(TOKEN)) == 401
        await bob.result("session/list")


def test_guesses_are_limited_for_their_address_and_for_a_time() -> None:
    now = [0.0]
    gate = Gate(Tokens(TOKEN, None), clock=lambda: now[0])

    def shown(token: str, address: str) -> Principal | Refusal:
        headers = {b"authorization": f"Bearer {token}".encode()}
        return gate.principal({"client": (address, 1)}, headers)

    for number in range(MAX_GUESSES):
        refusal = shown(f"guess-{number}", "1.1.1.1")
        assert isinstance(refusal, Refusal)
        assert refusal.status == 401
    limited = shown(TOKEN, "1.1.1.1")
    assert isinstance(limited, Refusal)
    assert limited.status == 429
    assert isinstance(shown(TOKEN, "2.2.2.2"), Principal)
    now[0] = 61.0
    assert isinstance(shown(TOKEN, "1.1.1.1"), Principal)


async def test_commands_do_not_see_the_token(tmp_path: Path) -> None:
    env = {"ACP_AGENT_TOKEN": TOKEN}
    flags = ("--mode", "bypass")
    async with (
        listening(tmp_path, *flags, env=env) as server,
        editor(server, token=TOKEN) as client,
    ):
        session = await client.new_session(tmp_path)
        answer = await client.prompt(session, "run env > seen.txt")
        assert await client.stop_reason(answer) == "end_turn"
        assert TOKEN not in (tmp_path / "seen.txt").read_text()


# --- pages and names ------------------------------------------------------------------------


@pytest.mark.requirement("B158")
async def test_a_page_of_a_foreign_origin_is_refused_and_one_of_ours_is_not(
    tmp_path: Path,
) -> None:
    good, bad = "https://editor.example", "https://evil.example"
    async with listening(tmp_path, "--origin", good) as server:
        for origin in (bad, "null", f"http://127.0.0.1:{server.port}"):
            assert await status_of(server.ws, origin=origin) == 403
        async with connect(server.ws, proxy=None, origin=good):
            pass
        async with httpx2.AsyncClient() as http:
            for path in ("/acp", "/"):
                refused = await http.get(f"{server.http}{path}", headers={"origin": bad})
                assert refused.status_code == 403
            preflight = await http.request("OPTIONS", f"{server.http}/acp", headers={"origin": bad})
            assert preflight.status_code == 403
            allowed = await http.request("OPTIONS", f"{server.http}/acp", headers={"origin": good})
            assert allowed.headers["access-control-allow-origin"] == good


async def test_a_name_pointed_at_this_computer_by_somebody_else_is_refused(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, "--host", "mine.example") as server,
        httpx2.AsyncClient() as http,
    ):
        for host, status in (
            ("evil.example", 403),
            (f"evil.example:{server.port}", 403),
            ("127.0.0.1.evil.example", 403),
            ("localhost", 200),
            (f"LOCALHOST:{server.port}", 200),
            (f"[::1]:{server.port}", 200),
            ("mine.example", 200),
        ):
            answer = await http.get(f"{server.http}/", headers={"host": host})
            assert answer.status_code == status, host


# --- what somebody may reach ----------------------------------------------------------------


async def test_another_ones_session_is_as_if_it_did_not_exist(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann:{TOKEN}\nbob:{OTHER}\n")
    async with (
        listening(tmp_path, "--token-file", str(tokens)) as server,
        editor(server, token=TOKEN) as ann,
        editor(server, token=OTHER) as bob,
    ):
        session = await ann.new_session(tmp_path)
        await ann.stop_reason(await ann.prompt(session, "say mine"))
        running = await ann.prompt(session, "stall")

        for target in (session, "sess_none"):
            place = {"sessionId": target, "cwd": str(tmp_path), "mcpServers": []}
            for method in ("session/load", "session/resume", "session/fork"):
                error = await bob.error(method, **place)
                assert (error["code"], error["message"]) == (-32002, "Unknown session")
                assert error["data"] == {"sessionId": target}
            error = await bob.error("session/prompt", sessionId=target, prompt=[])
            assert error["code"] == -32002
            assert (await bob.error("session/close", sessionId=target))["code"] == -32002
            assert await bob.result("session/delete", sessionId=target) == {}
            await bob.note("session/cancel", sessionId=target)
        assert (await bob.result("session/list"))["sessions"] == []

        listed = (await ann.result("session/list"))["sessions"]
        assert [each["sessionId"] for each in listed] == [session]
        assert [m for m in ann.received if m.get("id") == running] == []
        await ann.note("session/cancel", sessionId=session)
        assert await ann.stop_reason(running) == "cancelled"

        await ann.result("session/close", sessionId=session)  # now it is in the store only
        place = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
        for method in ("session/load", "session/resume", "session/fork"):
            assert (await bob.error(method, **place))["code"] == -32002
        await bob.result("session/delete", sessionId=session)
        await ann.result("session/load", **place)


async def test_no_session_is_opened_outside_of_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "root-not"
    (root / "in").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    async with listening(tmp_path, "--root", str(root)) as server, editor(server) as client:
        await client.new_session(root)
        session = await client.new_session(root / "in")
        for place in (outside, tmp_path, root / "link", root / "in" / ".." / "..", Path("/")):
            params = {"cwd": str(place), "mcpServers": []}
            for method in ("session/new", "session/load", "session/resume", "session/fork"):
                error = await client.error(method, sessionId=session, **params)
                assert error["code"] == -32602
                assert str(root) not in error["data"]["reason"]
            more = {"additionalDirectories": [str(place)], "cwd": str(root), "mcpServers": []}
            assert (await client.error("session/new", **more))["code"] == -32602


async def test_a_certificate_is_used(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += ["-keyout", key, "-out", cert, "-subj", "/CN=localhost"]
    await anyio.run_process([*make, "-addext", "subjectAltName=DNS:localhost"])
    import ssl

    context = ssl.create_default_context(cafile=cert)
    async with listening(tmp_path, "--tls-cert", cert, "--tls-key", key) as server:
        url = f"wss://localhost:{server.port}/acp"
        async with connect(url, proxy=None, ssl=context):
            pass


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
