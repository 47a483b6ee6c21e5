"""Who may come in, and what somebody who did may reach: each line of it, from outside.

`SAFETY` is the list: what a server on the network promises, and what proves it.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
import shutil
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
from acp_server.network.serve import parse_address

OTHER = "another-token-0123456789"


SAFETY = {
    "Only this computer reaches it, unless it is told otherwise.": (
        "test_network_security::test_a_port_alone_is_one_that_only_this_computer_reaches",
        "test_network_security::test_loopback_is_what_only_this_computer_reaches",
    ),
    "An address that others reach needs a token; without, it does not start and says how.": (
        "test_network_security::test_an_address_that_others_reach_is_refused_without_a_token",
    ),
    "Nothing listens before everything was checked.": (
        "test_network_security::test_what_is_wrong_is_said_before_anything_is_bound",
        "test_network_security::test_the_watch_over_what_is_bound_sees_a_start_that_is_good",
    ),
    "Tokens come from the environment or a file, are several, and have names.": (
        "test_network_security::test_the_token_of_the_environment_and_those_of_a_file_are_all_good",
    ),
    "A token is compared in the same time, whatever it is.": (
        "test_network_security::test_every_token_is_compared_with_every_one_that_is_good",
    ),
    "Tokens are read again on SIGHUP.": (
        "test_network_security::test_tokens_are_read_again_on_sighup_and_who_lost_his_has_to_leave",
    ),
    "A token is shown by Authorization, or by a browser as a subprotocol.": (
        "test_network_security::test_without_the_right_token_nothing_but_the_probes_answers",
        "test_network_security::"
        "test_a_browser_shows_its_token_as_a_subprotocol_which_is_not_echoed",
    ),
    "Who guesses tokens is slowed down, and no guess is in the log.": (
        "test_network_security::test_guesses_are_limited_for_their_address_and_for_a_time",
        "test_network_security::test_who_guesses_is_told_to_wait_and_no_guess_is_in_the_log",
        "test_network_security::test_behind_a_proxy_it_is_the_guesser_who_has_to_wait",
    ),
    "Pages of origins that are not allowed get 403.": (
        "test_network_security::test_a_page_of_a_foreign_origin_is_refused_and_one_of_ours_is_not",
    ),
    "A name that somebody pointed at this computer gets 403.": (
        "test_network_security::test_a_name_pointed_at_this_computer_by_somebody_else_is_refused",
        "test_network_hostile::test_each_bad_upgrade_has_its_status_and_its_connection_ends",
    ),
    "The size of a message is limited.": (
        "test_websocket::test_a_message_above_the_limit_closes_with_1009_and_costs_nobody_else",
        "test_network_hostile::"
        "test_each_mistake_in_a_frame_has_its_close_code_and_costs_nobody_else",
        "test_network_hostile::"
        "test_a_body_above_the_limit_is_told_so_also_while_it_is_still_being_sent",
    ),
    "Connections are limited.": (
        "test_network_hostile::"
        "test_hundreds_who_come_when_it_is_full_get_503_and_those_who_are_in_do_not_notice",
        "test_network_hostile::test_connections_without_end_leave_descriptors_for_those_who_are_in",
    ),
    "Sessions and queued prompts are limited.": (
        "test_websocket::test_limits_refuse_what_is_too_much_and_nothing_is_lost",
    ),
    "Requests of a connection are limited.": (
        "test_network_hostile::test_more_requests_at_once_than_a_connection_may_have_are_refused",
    ),
    "Time is limited: to say something, to send a request, to be idle.": (
        "test_websocket::test_a_client_that_says_nothing_is_let_go_but_not_one_whose_turn_runs",
        "test_network_hostile::test_who_sends_a_request_byte_by_byte_is_cut_off",
        "test_network_hostile::test_a_body_that_does_not_come_is_given_up",
        "test_network_hostile::test_an_upgrade_that_is_never_followed_by_initialize_is_let_go",
    ),
    "Who reads slowly holds up his own turn and costs nobody else.": (
        "test_websocket::test_a_reader_that_does_not_read_holds_up_its_own_turn_and_no_other",
        "test_network_hostile::"
        "test_a_stream_that_is_not_read_holds_up_its_own_turn_and_no_other_clients",
        "test_network_hostile::test_a_client_that_asks_without_end_and_never_reads_is_let_go",
        "test_network_hostile::test_a_peer_that_pings_and_does_not_read_gets_only_the_latest_pong",
    ),
    "TLS by a certificate and its key.": ("test_network_security::test_a_certificate_is_used",),
    "No session is opened outside of the root.": (
        "test_network_security::test_no_session_is_opened_outside_of_the_root",
        "test_network_security::"
        "test_a_session_made_outside_of_the_root_before_there_was_one_stays_closed",
    ),
    "Sessions belong to the token that made them.": (
        "test_network_security::test_another_ones_session_is_as_if_it_did_not_exist",
        "test_network_hostile::"
        "test_the_id_of_anothers_connection_is_as_unknown_as_one_that_does_not_exist",
    ),
    "Commands do not see the token.": (
        "test_network_security::test_commands_do_not_see_the_token",
    ),
}


@pytest.mark.parametrize("promise", SAFETY)
def test_every_promise_has_its_proof(promise: str) -> None:
    for proof in SAFETY[promise]:
        file, _, name = proof.partition("::")
        text = (Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), proof


WATCHED = """
import sys
sys.addaudithook(lambda event, _: print("BOUND", file=sys.stderr) if event == "socket.bind" else 0)
from acp_server.cli import main
sys.exit(main(sys.argv[1:]))
"""


def refused_start(tmp_path: Path, *flags: str, token: str | None = None) -> str:
    command = [sys.executable, "-c", WATCHED, "serve", "--state-dir", str(tmp_path), *flags]
    environ = {name: value for name, value in os.environ.items() if name != "ACP_AGENT_TOKEN"}
    if token is not None:
        environ["ACP_AGENT_TOKEN"] = token
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "listening" not in done.stderr
    assert "BOUND" not in done.stderr
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


MISTAKES = {
    "no address": (("--listen", "nowhere"), "HOST:PORT"),
    "no port": (("--listen", "127.0.0.1:99999"), "HOST:PORT"),
    "a token file that is not there": (("--token-file", "none"), "cannot be read"),
    "a token file that is a folder": (("--token-file", "."), "cannot be read"),
    "a token file without a token": (("--token-file", "empty"), "has no token"),
    "a token file with a bad token": (("--token-file", "short"), "line 1: a token has"),
    "one token with two names": (("--token-file", "twice"), "two names"),
    "a token file that is no text": (("--token-file", "bytes"), "not UTF-8"),
    "a root that is not there": (("--root", "none"), "not a directory"),
    "a root that is a file": (("--root", "empty"), "not a directory"),
    "a certificate that is not there": (("--tls-cert", "none"), "certificate"),
    "a certificate that is none": (("--tls-cert", "empty"), "certificate"),
    "a certificate without its key": (("--tls-cert", "cert"), "certificate"),
    "another certificate's key": (("--tls-cert", "cert", "--tls-key", "other-key"), "certificate"),
    "a key with a password": (("--tls-cert", "cert", "--tls-key", "locked-key"), "password"),
    "a key without a certificate": (("--tls-key", "key"), "--tls-cert"),
    "an origin without a scheme": (("--origin", "editor.example"), "is no origin"),
    "an origin with a path": (("--origin", "https://editor.example/app"), "is no origin"),
    "an origin for everybody": (("--origin", "*"), "is no origin"),
    "a name with a port": (("--host", "agent.example:8080"), "no name of a host"),
    "a mode that does not exist": (("--mode", "odd"), "mode"),
    "an origin in the file": (("--config", "origin.toml"), "is no origin"),
    "a proxy in the file": (("--config", "proxy.toml"), "proxies"),
    "a limit in the file": (("--config", "limit.toml"), "max_sessions"),
    "a place for sessions that is a file": (("--state-dir", "empty"), "session database"),
}


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty").touch()
    (folder / "short").write_text("ann:short")
    (folder / "twice").write_text(f"ann:{TOKEN}\nbob:{TOKEN}\n")
    (folder / "bytes").write_bytes(b"\xff\xfe")
    (folder / "origin.toml").write_text('[network]\norigins = ["nonsense"]\n')
    (folder / "proxy.toml").write_text('[network]\nproxies = ["nonsense"]\n')
    (folder / "limit.toml").write_text("[network]\nmax_sessions = 0\n")
    make_certificate(folder / "cert", folder / "key")
    make_certificate(folder / "other-cert", folder / "other-key")
    lock = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", str(folder / "key")]
    done = [*lock, "-out", str(folder / "locked-key")]
    subprocess.run(done, check=True, capture_output=True, timeout=20)
    return folder


def make_certificate(cert: Path, key: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(make, check=True, capture_output=True, timeout=20)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_is_said_before_anything_is_bound(
    tmp_path: Path, mistake: str, wrong_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, words = MISTAKES[mistake]
    monkeypatch.chdir(wrong_files)
    said = refused_start(tmp_path, "--listen", "127.0.0.1:0", *flags)
    assert words in said
    assert said.count("\n") == 1
    assert TOKEN not in said


def test_a_token_in_the_environment_that_is_not_usable_is_refused_and_not_quoted(
    tmp_path: Path,
) -> None:
    said = refused_start(tmp_path, "--listen", "0.0.0.0:0", token="a bad one")
    assert "ACP_AGENT_TOKEN" in said
    assert "a bad one" not in said


def test_the_watch_over_what_is_bound_sees_a_start_that_is_good(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED, "serve", "--state-dir", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--listen", "0"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stderr is not None
        assert started.stderr.readline() == "BOUND\n"
        assert "listening on http://127.0.0.1:" in started.stderr.readline()
        started.terminate()
        assert started.wait(20) == 0


def test_a_port_alone_is_one_that_only_this_computer_reaches() -> None:
    assert parse_address("8080") == ("127.0.0.1", 8080)
    assert parse_address(":8080") == ("0.0.0.0", 8080)
    assert parse_address("[::1]:8080") == ("::1", 8080)


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


async def test_who_guesses_is_told_to_wait_and_no_guess_is_in_the_log(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, "--log-level", "debug", env={"ACP_AGENT_TOKEN": TOKEN}) as server,
        editor(server, token=TOKEN) as inside,
        httpx2.AsyncClient() as http,
    ):
        for number in range(MAX_GUESSES):
            guess = _bearer(f"guessed-token-{number:04}")
            assert (await http.post(f"{server.http}/acp", headers=guess)).status_code == 401
        for shown in ("guessed-token-again", TOKEN):
            limited = await http.post(f"{server.http}/acp", headers=_bearer(shown))
            assert limited.status_code == 429
            assert int(limited.headers["retry-after"]) > 0
        assert await status_of(server.ws, additional_headers=_bearer(TOKEN)) == 429
        assert "sessions" in await inside.result("session/list")
    assert server.said.count("wrong_token_refused") == MAX_GUESSES
    assert "guessed-token" not in server.said
    assert TOKEN not in server.said


def test_behind_a_proxy_it_is_the_guesser_who_has_to_wait() -> None:
    gate = Gate(Tokens(TOKEN, None), proxies=("10.0.0.0/8", "::1"))

    def status(token: str, came_from: str, forwarded: str = "") -> int:
        headers = {b"authorization": f"Bearer {token}".encode()}
        if forwarded:
            headers[b"x-forwarded-for"] = forwarded.encode()
        answer = gate.principal({"client": (came_from, 1)}, headers)
        return answer.status if isinstance(answer, Refusal) else 200

    for number in range(MAX_GUESSES):
        assert status("a-guess", "10.0.0.7", f"9.9.9.{number}, 1.1.1.1, 10.0.0.8") == 401
    assert status(TOKEN, "10.0.0.7", "1.1.1.1") == 429
    assert status(TOKEN, "10.0.0.7", "2.2.2.2") == 200
    assert status(TOKEN, "10.0.0.7") == 200
    # Who is no proxy says nothing by this header: neither for itself nor against others.
    for number in range(MAX_GUESSES):
        assert status("a-guess", "3.3.3.3", f"4.4.4.{number}") == 401
    assert status(TOKEN, "3.3.3.3", "5.5.5.5") == 429
    assert status(TOKEN, "10.0.0.7", "4.4.4.1") == 200
    # Of IPv6 a person has a whole network.
    for number in range(MAX_GUESSES):
        assert status("a-guess", f"2001:db8::{number:x}") == 401
    assert status(TOKEN, "2001:db8::ffff:1") == 429
    assert status(TOKEN, "2001:db8:0:1::1") == 200


def test_the_token_of_the_environment_and_those_of_a_file_are_all_good(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# two\nann:{OTHER}\nann:{OTHER}-new\n")
    tokens = Tokens(TOKEN, str(tmp_path / "tokens"))
    shown = (TOKEN, OTHER, f"{OTHER}-new", "none-of-those-tokens")
    assert [(found := tokens.principal(each)) and found.name for each in shown] == [
        "token",
        "ann",
        "ann",
        None,
    ]


def test_every_token_is_compared_with_every_one_that_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens").write_text(f"ann:{TOKEN}\nbob:{OTHER}\ncarl:{OTHER}-2\n")
    tokens = Tokens(None, str(tmp_path / "tokens"))
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for shown in (TOKEN, f"{OTHER}-2", "x", "y" * 1000):
        compared.clear()
        tokens.principal(shown)
        assert compared == [32, 32, 32]


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


async def test_a_session_made_outside_of_the_root_before_there_was_one_stays_closed(
    tmp_path: Path,
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root, outside):
        folder.mkdir()
    async with listening(tmp_path) as server, editor(server) as client:
        session = await client.new_session(outside)
        await client.stop_reason(await client.prompt(session, "say secret"))
    async with listening(tmp_path, "--root", str(root)) as server, editor(server) as client:
        (root / "link").symlink_to(outside)
        for place in (outside, root, root / "link"):
            for method in ("session/load", "session/resume", "session/fork"):
                error = await client.error(method, sessionId=session, cwd=str(place), mcpServers=[])
                assert error["code"] == -32602, (method, place)
        assert client.updates(session) == []


async def test_a_certificate_is_used(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    await anyio.to_thread.run_sync(make_certificate, cert, key)
    import ssl

    context = ssl.create_default_context(cafile=str(cert))
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    async with listening(tmp_path, *flags) as server:
        url = f"wss://localhost:{server.port}/acp"
        async with connect(url, proxy=None, ssl=context):
            pass


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
