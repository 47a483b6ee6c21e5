"""The WebSocket transport, on a real socket of the real command."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import anyio
import pytest
from network_rig import editor, listening
from websockets.asyncio.client import connect

KINDS = ("count 1000000", "say never", "run sleep 300", "write never.txt: x", "stall")


async def test_initialize_offers_nothing_that_is_for_the_machines_own_user(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server, initialize=False) as client:
        assert client.socket.response is not None
        assert len(client.socket.response.headers["Acp-Connection-Id"]) >= 22
        offered = {"auth": {"terminal": True}}
        result = await client.result("initialize", protocolVersion=1, clientCapabilities=offered)
        assert "logout" not in result["agentCapabilities"]["auth"]
        assert [method["id"] for method in result["authMethods"]] == ["configured"]
        assert (await client.error("logout"))["code"] == -32601


async def test_the_first_message_has_to_be_initialize(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server, initialize=False) as client:
        assert (await client.error("session/list"))["code"] == -32600
        assert (await client.result("initialize", protocolVersion=1))["protocolVersion"] == 1


@pytest.mark.race
@pytest.mark.requirement("R42", "B006")
async def test_a_prompt_and_its_cancel_sent_at_once_are_cancelled_every_time(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as server, editor(server) as client:
        session = await client.new_session(tmp_path)
        for number in range(25):
            prompt = client.prompt_and_cancel(session, KINDS[number % len(KINDS)])

            assert await client.stop_reason(prompt) == "cancelled"
        assert client.updates(session, "tool_call") == []
    assert not (tmp_path / "never.txt").exists()


@pytest.mark.race
@pytest.mark.requirement("R42")
async def test_a_stream_that_is_stopped_says_nothing_behind_its_answer(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server) as client:
        session = await client.new_session(tmp_path)
        for _ in range(10):
            n_before = len(client.updates(session, "agent_message_chunk"))
            prompt = await client.prompt(session, "count 1000000")
            await client.until(
                lambda n=n_before: len(client.updates(session, "agent_message_chunk")) > n + 5
            )
            await client.note("session/cancel", sessionId=session)
            assert await client.stop_reason(prompt) == "cancelled"
            n_messages = len(client.received)
            await client.result("session/list")
            assert len(client.received) == n_messages + 1


async def test_binary_frames_are_passed_over_and_two_messages_in_a_frame_are_none(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as server, editor(server) as client:
        message = json.dumps({"jsonrpc": "2.0", "id": "b", "method": "session/list", "params": {}})
        await client.socket.send(message.encode())
        await client.socket.send(f"{message}\n{message}")
        await client.until(lambda: client.received[-1].get("error"))
        assert client.received[-1]["error"]["code"] == -32700
        await client.result("session/list")
        assert [m for m in client.received if m.get("id") == "b"] == []


async def test_a_message_in_one_byte_fragments_is_a_message(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server) as client:
        message = json.dumps({"jsonrpc": "2.0", "id": 9, "method": "session/list", "params": {}})
        await client.socket.send(iter(message))
        assert "result" in await client.response(9)


@pytest.mark.requirement("B111")
async def test_a_message_above_the_limit_closes_with_1009_and_costs_nobody_else(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, network="max_message_bytes = 10000") as server,
        editor(server) as client,
        editor(server) as other,
    ):
        await client.socket.send("x" * 10_001)
        await client.until(lambda: client.close_code)
        assert client.close_code == 1009
        assert "sessions" in await other.result("session/list")


async def test_bad_utf_8_closes_with_1007(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server) as client:
        await client.socket.send(b"\xff\xfe", text=True)
        await client.until(lambda: client.close_code)
        assert client.close_code == 1007


async def test_the_same_ids_on_two_connections_do_not_meet(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server) as one, editor(server) as other:
        sessions = [await client.new_session(tmp_path) for client in (one, other)]
        assert sessions[0] != sessions[1]
        answers = [await one.prompt(sessions[0], "say one")]
        answers.append(await other.prompt(sessions[1], "say other"))
        assert answers[0] == answers[1]
        assert await one.stop_reason(answers[0]) == "end_turn"
        assert await other.stop_reason(answers[1]) == "end_turn"
        assert one.text(sessions[0]).strip() == "one"
        assert other.text(sessions[1]).strip() == "other"
        assert (await one.error("session/prompt", sessionId=sessions[1], prompt=[]))[
            "code"
        ] == -32002


async def test_a_reader_that_does_not_read_holds_up_its_own_turn_and_no_other(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path) as server,
        editor(server) as quick,
        connect(server.ws, proxy=None, max_queue=1) as slow,
    ):
        await slow.send(_request(1, "initialize", protocolVersion=1))
        await slow.recv()
        params = {"cwd": str(tmp_path), "mcpServers": []}
        await slow.send(_request(2, "session/new", **params))
        while "result" not in (answer := json.loads(await slow.recv())):
            pass
        session = answer["result"]["sessionId"]
        text = [{"type": "text", "text": "count 1000000"}]
        await slow.send(_request(3, "session/prompt", sessionId=session, prompt=text))

        mine = await quick.new_session(tmp_path)
        for _ in range(5):
            assert await quick.stop_reason(await quick.prompt(mine, "count 500")) == "end_turn"

        await slow.send(json.dumps(_note("session/cancel", sessionId=session)))
        with anyio.fail_after(20):
            while json.loads(await slow.recv()).get("id") != 3:
                pass


async def test_a_hundred_connections_stream_at_once_and_each_gets_its_own(tmp_path: Path) -> None:
    async with listening(tmp_path) as server:

        async def one(number: int) -> None:
            async with editor(server) as client:
                session = await client.new_session(tmp_path)
                answer = await client.prompt(session, f"say from {number}")
                assert await client.stop_reason(answer) == "end_turn"
                assert client.text(session).strip() == f"from {number}"

        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                for number in range(100):
                    tasks.start_soon(one, number)


@pytest.mark.requirement("B154")
async def test_a_peer_that_answers_no_ping_is_gone(tmp_path: Path) -> None:
    flags = ("--log-level", "info")
    async with listening(tmp_path, *flags, network="ping_s = 0.1") as server:
        upgrade = (
            f"GET /acp HTTP/1.1\r\nHost: localhost:{server.port}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port)) as half_open:
            half_open.sendall(upgrade.encode())
            await server.until_said("client_disconnected")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /acp HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade", 400),
        ("GET /acp HTTP/1.1\r\nHost: localhost", 406),
        ("PUT /acp HTTP/1.1\r\nHost: localhost", 405),
        ("GET /elsewhere HTTP/1.1\r\nHost: localhost", 404),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nX: " + "y" * 200_000, 400),
        ("nonsense", 400),
    ],
)
async def test_a_request_that_makes_no_sense_gets_its_status(
    tmp_path: Path, head: str, status: int
) -> None:
    async with listening(tmp_path) as server:
        async with await anyio.connect_tcp("127.0.0.1", server.port) as stream:
            with anyio.fail_after(10):
                await stream.send(f"{head}\r\n\r\n".encode())
                assert (await stream.receive()).split()[1] == str(status).encode()
        async with editor(server) as client:
            await client.result("session/list")


async def test_limits_refuse_what_is_too_much_and_nothing_is_lost(tmp_path: Path) -> None:
    network = "max_sessions = 2\nmax_prompts = 2\nmax_connections = 1"
    async with listening(tmp_path, network=network) as server, editor(server) as client:
        session = await client.new_session(tmp_path)
        await client.new_session(tmp_path)
        params = {"cwd": str(tmp_path), "mcpServers": []}
        assert "2 sessions" in (await client.error("session/new", **params))["message"]

        waiting = [await client.prompt(session, "stall"), await client.prompt(session, "say x")]
        third = await client.response(await client.prompt(session, "say y"))
        assert "2 prompts" in third["error"]["message"]
        with pytest.raises(Exception, match="503"):
            async with editor(server):
                pass
        await client.note("session/cancel", sessionId=session)
        assert [await client.stop_reason(each) for each in waiting] == ["cancelled"] * 2


@pytest.mark.requirement("B156")
async def test_a_client_that_says_nothing_is_let_go_but_not_one_whose_turn_runs(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, network="idle_s = 0.3") as server,
        editor(server) as busy,
        editor(server) as idle,
    ):
        session = await busy.new_session(tmp_path)
        await busy.prompt(session, "stall")
        await idle.until(lambda: idle.close_code)
        assert idle.close_code == 1008
        await busy.note("session/cancel", sessionId=session)
        assert busy.close_code is None


async def test_a_signal_answers_what_runs_closes_with_1001_and_leaves_with_0(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, "--drain", "0", must_end_well=False) as server,
        editor(server) as client,
    ):
        session = await client.new_session(tmp_path)
        answer = await client.prompt(session, "stall")
        await client.result("session/list")  # the prompt was read, too
        server.process.terminate()
        assert await client.stop_reason(answer) == "cancelled"
        await client.until(lambda: client.close_code)
        assert client.close_code == 1001
        with anyio.fail_after(20):
            assert await server.process.wait() == 0


def _request(request_id: int, method: str, **params: object) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def _note(method: str, **params: object) -> dict[str, object]:
    return {"jsonrpc": "2.0", "method": method, "params": params}
