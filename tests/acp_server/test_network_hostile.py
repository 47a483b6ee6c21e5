"""Bad input and bad moments on the network: the right status, others undisturbed, nothing lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from http_rig import JSON, http_editor
from network_rig import LIMIT_S, TOKEN, Editor, Server, editor, listening
from raw_rig import UPGRADE, frame, raw, said_to
from websockets.frames import Frame, Opcode

from acp_server.network.listener import FULL, bound
from acp_server.network.protocols import WebSocket

TEXT, CONT, PING, CLOSE = Opcode.TEXT, Opcode.CONT, Opcode.PING, Opcode.CLOSE
EVENTS = {"accept": "text/event-stream"}


@asynccontextmanager
async def undisturbed(server: Server, cwd: Path) -> AsyncIterator[None]:
    """Somebody else's turn runs in the block, and nothing of it is lost or ends early."""
    async with editor(server) as other:
        session = await other.new_session(cwd)
        answer = await other.prompt(
            session, "run while [ ! -e go ]; do sleep 0.02; done; echo gone"
        )
        await other.choose(await other.question(), "allow-once")
        await other.until(lambda: "in_progress" in statuses(other, session))
        try:
            yield
        finally:
            (cwd / "go").touch()
        assert await other.stop_reason(answer) == "end_turn"
        assert statuses(other, session)[-1] == "completed"
        assert other.close_code is None


def statuses(client: Editor, session: str) -> list[str]:
    return [update["status"] for update in client.updates(session) if "status" in update]


def request(method: str, request_id: Any = 1, **params: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


# --- frames ---------------------------------------------------------------------------------

BAD_FRAMES = {
    "a frame without a mask": (frame(TEXT, b"{}", mask=False), 1002),
    "a reserved bit": (bytes([0xC1]) + frame(TEXT, b"{}")[1:], 1002),
    "an opcode that nobody knows": (bytes([0x83]) + frame(TEXT, b"{}")[1:], 1002),
    "the rest of nothing": (frame(CONT, b"{}"), 1002),
    "a ping in pieces": (bytes([0x09]) + frame(PING, b"x")[1:], 1002),
    "a message within another": (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
    "a close code that does not exist": (frame(CLOSE, b"\x03\xed"), 1002),
    "text that is no UTF-8": (frame(TEXT, b"\xff\xfe"), 1007),
    "text that is no UTF-8 in the second piece": (
        frame(TEXT, b"\xc3", fin=False) + frame(CONT, b"("),
        1007,
    ),
    "more than a message may have": (frame(TEXT, b"x" * 10_001), 1009),
    "more in pieces than a message may have": (
        frame(TEXT, b"x" * 9_000, fin=False) + frame(CONT, b"x" * 9_000),
        1009,
    ),
    "a message of which much more is on its way": (frame(TEXT, b"x" * 30_000_000), 1009),
}


async def test_each_mistake_in_a_frame_has_its_close_code_and_costs_nobody_else(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, network="max_message_bytes = 10000") as server,
        undisturbed(server, tmp_path),
    ):
        for mistake, (sent, code) in BAD_FRAMES.items():
            async with raw(server) as peer:
                await peer.upgrade()
                await peer.send(sent)
                await peer.until_over()
                assert peer.close_code == code, mistake


async def test_a_bad_frame_costs_its_client_the_connection_and_no_session(tmp_path: Path) -> None:
    async with listening(tmp_path) as server:
        async with editor(server) as client:
            session = await client.new_session(tmp_path)
            await client.stop_reason(await client.prompt(session, "say kept"))
            running = await client.prompt(session, "stall")
            await client.socket.send(b"\xff", text=True)
            await client.until(lambda: client.close_code)
            assert client.close_code == 1007
            assert [m for m in client.received if m.get("id") == running] == []
        async with editor(server) as client:
            await client.load(session, tmp_path)
            assert client.text(session).startswith("kept")
            assert await client.stop_reason(await client.prompt(session, "say on")) == "end_turn"


def test_pieces_of_a_message_cost_what_they_hold_and_empty_ones_nothing() -> None:
    protocol = WebSocket.__new__(WebSocket)
    protocol.frames = [b"a"]
    for _ in range(1000):
        protocol.handle_cont(Frame(CONT, b"", fin=False))
        protocol.handle_cont(Frame(CONT, b"b", fin=False))
    assert [len(piece) for piece in protocol.frames] == [1001]


async def test_a_peer_that_pings_and_does_not_read_gets_only_the_latest_pong(
    tmp_path: Path,
) -> None:
    n_pings = 120_000  # three times what the system keeps for either direction
    pings = [frame(PING, f"{number:0125}".encode()) for number in range(n_pings)]
    async with (
        listening(tmp_path) as server,
        undisturbed(server, tmp_path),
        raw(server, reads_ahead_bytes=1 << 17) as peer,
    ):
        await peer.upgrade()
        with anyio.fail_after(50):
            for at in range(0, n_pings, 500):
                await peer.send(b"".join(pings[at : at + 500]))
        await peer.until(f"{n_pings - 1:0125}".encode())
        pongs = [data for opcode, data in peer.frames() if opcode is Opcode.PONG]
        assert len(pongs) < n_pings
        assert pongs == sorted(pongs)


async def test_a_peer_that_vanishes_without_a_word_is_noticed_and_its_turn_is_stopped(
    tmp_path: Path,
) -> None:
    flags = ("--log-level", "info", "--mode", "bypass")
    async with listening(tmp_path, *flags, network="ping_s = 1") as server:
        async with raw(server) as peer:
            await peer.upgrade()
            await peer.send(frame(TEXT, request("initialize", protocolVersion=1).encode()))
            place = {"cwd": str(tmp_path), "mcpServers": []}
            await peer.send(frame(TEXT, request("session/new", 3, **place).encode()))
            await peer.until(b"sessionId")
            (made,) = (data for _, data in peer.frames() if b'"result":{"sessionId"' in data)
            session = json.loads(made)["result"]["sessionId"]
            text = [{"type": "text", "text": "run touch begun; sleep 300"}]
            prompt = request("session/prompt", 2, sessionId=session, prompt=text)
            await peer.send(frame(TEXT, prompt.encode()))
            # From here on nothing of it is heard any more, neither pongs nor the end.
            await server.until_said("client_disconnected")
        async with editor(server) as client:
            await client.load(session, tmp_path)
            assert statuses(client, session)[-1] == "failed"
            assert await client.stop_reason(await client.prompt(session, "say on")) == "end_turn"


async def test_a_client_that_asks_without_end_and_never_reads_is_let_go(tmp_path: Path) -> None:
    network = "max_unread_bytes = 2000000\nmax_message_bytes = 100000"
    flags = ("--log-level", "info")
    question = frame(TEXT, request("nothing", "x" * 50_000).encode())
    async with (
        listening(tmp_path, *flags, network=network) as server,
        undisturbed(server, tmp_path),
        raw(server) as peer,
    ):
        await peer.upgrade()
        with anyio.fail_after(LIMIT_S):
            while "client_disconnected" not in server.said:
                with suppress(ConnectionError):
                    await peer.send(question)
        assert "flooded" in server.said


# --- upgrades -------------------------------------------------------------------------------

BAD_UPGRADES = {
    "no key": (UPGRADE.replace("Sec-WebSocket-Key", "X"), 400),
    "a key that is none": (UPGRADE.replace("dGhlIHNhbXBsZSBub25jZQ==", "short"), 400),
    "a version of its own": (UPGRADE.replace("Version: 13", "Version: 8"), 400),
    "another method": (UPGRADE.replace("GET", "POST"), 405),
    "another path": (UPGRADE.replace("/acp", "/elsewhere"), 404),
    "the page that says what we are": (UPGRADE.replace("/acp", "/"), 404),
    "a probe": (UPGRADE.replace("/acp", "/healthz"), 404),
    "a foreign name": (UPGRADE.replace("localhost", "evil.example"), 403),
    "a foreign page": (f"{UPGRADE}Origin: https://evil.example\r\n", 403),
    "headers without end": (UPGRADE + "".join(f"X-{n}: y\r\n" for n in range(300)), 431),
    "a header that is too long": (f"{UPGRADE}X: {'y' * 20_000}\r\n", 431),
    "a path that is too long": (UPGRADE.replace("/acp", "/acp?" + "y" * 20_000), 414),
}


async def test_each_bad_upgrade_has_its_status_and_its_connection_ends(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, undisturbed(server, tmp_path):
        for mistake, (head, status) in BAD_UPGRADES.items():
            peer = await said_to(server, f"{head}\r\n")
            assert peer.status == status, mistake


async def test_an_upgrade_that_is_never_followed_by_initialize_is_let_go(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, network="handshake_s = 2") as server,
        editor(server) as good,
        editor(server, initialize=False) as silent,
    ):
        await silent.until(lambda: silent.close_code)
        assert silent.close_code == 1008
        await good.result("session/list")


# --- HTTP -----------------------------------------------------------------------------------


def head(*lines: str) -> str:
    return "\r\n".join((*lines, "Host: localhost", "", ""))


BAD_REQUESTS = {
    "nonsense": ("nonsense\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 300, 400),
    "no host": ("GET / HTTP/1.1\r\n\r\n", 400),
    "two lengths": (
        head("POST /acp HTTP/1.1", "Content-Length: 1", "Content-Length: 2"),
        400,
    ),
    "a length that is none": (head("POST /acp HTTP/1.1", "Content-Length: -1"), 400),
    "a header that is folded": (head("GET / HTTP/1.1", "X: y", " z: w\0"), 400),
    "a header with a control character": (head("GET / HTTP/1.1", "X: a\x01\x00b"), 400),
    "a header that is too long": (head("GET / HTTP/1.1", "X: " + "y" * 200_000), 400),
    "headers without end": (head("GET / HTTP/1.1", *(f"X{n}: y" for n in range(20_000))), 400),
    "a path without end": (head(f"GET /{'y' * 200_000} HTTP/1.1"), 400),
}


async def test_what_is_no_http_is_told_so_and_its_connection_ends(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, undisturbed(server, tmp_path):
        for mistake, (sent, status) in BAD_REQUESTS.items():
            peer = await said_to(server, sent)
            assert peer.status == status, mistake


async def test_nonsense_behind_a_request_that_was_refused_ends_its_connection(
    tmp_path: Path,
) -> None:
    chunked = ("POST /acp HTTP/1.1", "Transfer-Encoding: chunked")
    refused = head(*chunked, "Content-Type: text/plain")
    taken = head(*chunked, "Content-Type: application/json")
    async with listening(tmp_path) as server, undisturbed(server, tmp_path):
        async with raw(server) as peer:
            await peer.send(refused)
            await peer.until(b"application/json.\n")
            await peer.send("no chunk\r\n")
            await peer.until_over()
            assert (peer.status, peer.received.count(b"HTTP/1.1")) == (415, 1)
        async with raw(server) as peer:
            await peer.send(f"{taken}5\r\n{{    \r\nno chunk\r\n")
            await peer.until_over()
            assert (peer.status, peer.received.count(b"HTTP/1.1")) == (400, 1)


async def test_a_wrong_method_is_refused_on_every_path_and_the_right_ones_are_named(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as server, httpx2.AsyncClient() as http:
        for path, methods, allowed in (
            ("/", ("POST", "PUT", "DELETE"), "GET, HEAD"),
            ("/healthz", ("POST", "DELETE"), "GET, HEAD"),
            ("/readyz", ("PUT",), "GET, HEAD"),
            ("/acp", ("PUT", "PATCH", "HEAD", "TRACE"), "GET, POST, DELETE"),
        ):
            for method in methods:
                answer = await http.request(method, server.http + path)
                assert (answer.status_code, answer.headers["allow"]) == (405, allowed), (
                    method,
                    path,
                )
        assert (await http.get(f"{server.http}/acp/elsewhere")).status_code == 404
        assert (await http.post(f"{server.http}/elsewhere")).status_code == 404


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_above_the_limit_is_told_so_also_while_it_is_still_being_sent(
    tmp_path: Path, is_announced: bool
) -> None:
    size = 20_000_000

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size // 100_000):
            yield b"x" * 100_000

    async with (
        listening(tmp_path, network="max_message_bytes = 10000") as server,
        undisturbed(server, tmp_path),
        http_editor(server) as client,
    ):
        headers = JSON | client.headers()
        if is_announced:
            headers["content-length"] = str(size)
        refused = await client.http.post(client.url, content=body(), headers=headers)
        assert (refused.status_code, refused.text) == (413, "A message may have 10000 bytes.\n")
        assert (await client.answer(await client.ask("session/list")))[1]["result"]


@pytest.mark.parametrize(
    "begun", ["", "GET / HTTP/1.1\r\nX: ", "GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"]
)
async def test_who_sends_a_request_byte_by_byte_is_cut_off(tmp_path: Path, begun: str) -> None:
    async with (
        listening(tmp_path, network="header_s = 2") as server,
        undisturbed(server, tmp_path),
        raw(server) as peer,
        anyio.create_task_group() as tasks,
    ):

        async def drip() -> None:
            with suppress(ConnectionError):
                await peer.send(begun)
                while begun:
                    await peer.send("a")
                    await anyio.sleep(0.05)  # the pace, not a wait for anything

        tasks.start_soon(drip)
        await peer.until_over()
        assert b"400" not in peer.received
        tasks.cancel_scope.cancel()


async def test_a_body_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, network="body_s = 0.3") as server,
        undisturbed(server, tmp_path),
    ):
        announced = head(
            "POST /acp HTTP/1.1", "Content-Type: application/json", "Content-Length: 100"
        )
        peer = await said_to(server, announced + '{"jsonrpc":')
        assert peer.status == 408


async def test_a_second_reader_of_a_stream_is_refused_and_the_first_misses_nothing(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as server, http_editor(server) as client:
        session = await client.new_session(tmp_path)
        await client.open(session)
        for named in (client.headers(), client.headers(session)):
            second = await client.http.get(client.url, headers=named | EVENTS)
            assert second.status_code == 409
        stream, answer = await client.answer(await client.prompt(session, "say all"))
        assert (stream, answer["result"]["stopReason"]) == (session, "end_turn")
        assert client.said(session, session).strip() == "all"


async def test_the_id_of_anothers_connection_is_as_unknown_as_one_that_does_not_exist(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann:{TOKEN}\nbob:another-{TOKEN}\n")
    async with (
        listening(tmp_path, "--token-file", str(tokens)) as server,
        http_editor(server, token=TOKEN) as ann,
        http_editor(server, token=f"another-{TOKEN}") as bob,
    ):
        session = await ann.new_session(tmp_path)
        answers = []
        for stolen in (ann.id, "none"):
            headers = {"acp-connection-id": stolen}
            posted = await bob.http.post(
                bob.url, content=request("session/list"), headers=JSON | headers
            )
            read = await bob.http.get(bob.url, headers=EVENTS | headers)
            deleted = await bob.http.request("DELETE", bob.url, headers=headers)
            answers.append([(each.status_code, each.text) for each in (posted, read, deleted)])
        assert answers[0] == answers[1] == [(404, "There is no such connection.\n")] * 3

        prompt = {"sessionId": session, "prompt": [{"type": "text", "text": "say stolen"}]}
        assert (await bob.post("session/prompt", session=session, **prompt)).status_code == 404
        await ann.open(session)
        _, answer = await ann.answer(await ann.prompt(session, "say mine"))
        assert answer["result"]["stopReason"] == "end_turn"


# --- too many -------------------------------------------------------------------------------


async def test_hundreds_who_come_when_it_is_full_get_503_and_those_who_are_in_do_not_notice(
    tmp_path: Path,
) -> None:
    statuses: list[int] = []
    async with (
        listening(tmp_path, network="max_connections = 1") as server,
        undisturbed(server, tmp_path),
        httpx2.AsyncClient(timeout=LIMIT_S) as http,
    ):
        n_turned_away = 300

        async def come(number: int) -> None:
            if number % 2:
                statuses.append((await said_to(server, f"{UPGRADE}\r\n")).status)
            else:
                begun = request("initialize", protocolVersion=1)
                answer = await http.post(f"{server.http}/acp", content=begun, headers=JSON)
                statuses.append(answer.status_code)

        async with anyio.create_task_group() as tasks:
            for number in range(n_turned_away):
                tasks.start_soon(come, number)
        assert statuses == [503] * n_turned_away


async def test_connections_without_end_leave_descriptors_for_those_who_are_in(
    tmp_path: Path,
) -> None:
    under = ("sh", "-c", 'ulimit -n 200; exec "$@"', "sh")
    async with (
        listening(tmp_path, "--mode", "bypass", under=under) as server,
        editor(server) as client,
    ):
        session = await client.new_session(tmp_path)
        streams = [await anyio.connect_tcp("127.0.0.1", server.port) for _ in range(400)]
        try:
            answer = await client.prompt(session, "run echo still > here.txt")
            assert await client.stop_reason(answer) == "end_turn"
            assert (tmp_path / "here.txt").read_text() == "still\n"
            with anyio.fail_after(LIMIT_S):
                answers = [await stream.receive() for stream in streams[-100:]]
        finally:
            for stream in streams:
                await stream.aclose()
        assert {answer.split()[1] for answer in answers} == {b"503"}
        assert FULL in answers[0].decode()
        await client.new_session(tmp_path)
        assert server.said.count("connections_turned_away") >= 1


async def test_there_is_room_again_when_somebody_leaves() -> None:
    with bound("127.0.0.1", 0) as listener:
        listener.setblocking(False)
        listener.max_open = 2
        async with await asyncio.start_server(_echo, sock=listener):
            port = listener.getsockname()[1]
            first, second = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2)]
            for stream in (first, second):
                await stream.send(b"x")
                assert await stream.receive() == b"x"
            for _ in range(1000):
                async with await anyio.connect_tcp("127.0.0.1", port) as third:
                    with anyio.fail_after(LIMIT_S):
                        assert (await third.receive()).startswith(b"HTTP/1.1 503")
            await _leave(first)
            third = await anyio.connect_tcp("127.0.0.1", port)
            for stream in (second, third):
                await stream.send(b"x")
                assert await stream.receive() == b"x"
                await _leave(stream)


async def _leave(stream: anyio.abc.SocketStream) -> None:
    await stream.send_eof()
    with anyio.fail_after(LIMIT_S), pytest.raises(anyio.EndOfStream):
        await stream.receive()
    await stream.aclose()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


def test_the_limit_of_descriptors_is_raised_and_what_it_allows_is_heeded() -> None:
    look = (
        "import resource as r; from acp_server.network.listener import room_for;"
        "r.setrlimit(r.RLIMIT_NOFILE, ({0}, {1}));"
        "print(room_for(10), r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )

    def seen(soft: int, hard: int) -> list[int]:
        command = [sys.executable, "-c", look.format(soft, hard)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return [int(word) for word in done.stdout.split()]

    assert seen(100, 1000) == [276, 552]
    assert seen(100, 100) == [50, 100]


async def test_more_requests_at_once_than_a_connection_may_have_are_refused(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, network="max_requests = 2") as server,
        editor(server) as client,
        editor(server) as other,
    ):
        sessions = [await client.new_session(tmp_path) for _ in range(3)]
        running = [await client.prompt(session, "stall") for session in sessions[:2]]
        refused = await client.response(await client.prompt(sessions[2], "say x"))
        assert refused["error"]["message"] == "2 requests are being served already"
        await other.result("session/list")
        for session in sessions:
            await client.note("session/cancel", sessionId=session)
        assert [await client.stop_reason(each) for each in running] == ["cancelled"] * 2
        assert await client.stop_reason(await client.prompt(sessions[2], "say x")) == "end_turn"


# --- readers --------------------------------------------------------------------------------


async def test_a_stream_that_is_not_read_holds_up_its_own_turn_and_no_other_clients(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path) as server,
        http_editor(server) as slow,
        raw(server) as stream,
        editor(server) as quick,
    ):
        session = await slow.new_session(tmp_path)
        named = "".join(f"{name}: {value}\r\n" for name, value in slow.headers(session).items())
        await stream.send(
            f"GET /acp HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n{named}\r\n"
        )
        await stream.until(b": alive")
        await slow.prompt(session, "count 1000000")  # more than all buffers on the way hold

        mine = await quick.new_session(tmp_path)
        for _ in range(5):
            assert await quick.stop_reason(await quick.prompt(mine, "count 500")) == "end_turn"

        note = {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": session}}
        assert (await slow.send(note, session)).status_code == 202
        await stream.until(b'"stopReason":"cancelled"')


# --- the end of the process -----------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ws", "http"])
async def test_after_kill_9_in_a_turn_everything_that_was_answered_is_there(
    tmp_path: Path, transport: str
) -> None:
    async with listening(tmp_path, must_end_well=False) as server:
        if transport == "ws":
            async with editor(server) as client:
                session = await client.new_session(tmp_path)
                await client.stop_reason(await client.prompt(session, "say whole"))
                await client.prompt(session, "count 1000000")
                await client.until(lambda: "100 " in client.text(session))
                server.process.send_signal(signal.SIGKILL)
                await client.until(lambda: client.close_code is not None)
        else:
            async with http_editor(server) as web:
                session = await web.new_session(tmp_path)
                await web.open(session)
                await web.answer(await web.prompt(session, "say whole"))
                await web.prompt(session, "count 1000000")
                await web.until(lambda: "100 " in web.said(session, session))
                server.process.send_signal(signal.SIGKILL)
                web.leave()
        await server.process.wait()

    async with listening(tmp_path) as server, editor(server) as client:
        await client.load(session, tmp_path)
        assert client.text(session).startswith("whole")
        prompts = client.updates(session, "user_message_chunk")
        assert prompts[0]["content"]["text"] == "say whole"
        assert await client.stop_reason(await client.prompt(session, "say back")) == "end_turn"
        assert client.text(session).endswith("back")
