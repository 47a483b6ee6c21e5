"""Streamable HTTP, on real sockets of the real command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import acp
import anyio
import httpx2
import pytest
from acp import schema
from http_rig import JSON, http_editor
from network_rig import LIMIT_S, listening


async def test_a_turn_by_http_is_shown_and_answered_on_its_sessions_stream(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, http_editor(server) as client:
        session = await client.new_session(tmp_path)
        await client.open(session)
        stream, answer = await client.answer(await client.prompt(session, "say it all"))
        assert (stream, answer["result"]["stopReason"]) == (session, "end_turn")
        assert client.said(session, session).strip() == "it all"
        assert client.said(session, None) == ""


async def test_what_is_said_before_its_stream_is_open_waits_for_it(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, http_editor(server) as client:
        session = await client.new_session(tmp_path)
        request = await client.prompt(session, "say early")
        stream, _ = await client.answer(await client.ask("session/list"))
        assert stream is None
        await client.open(session)
        assert (await client.answer(request))[0] == session
        assert client.said(session, session).strip() == "early"


@pytest.mark.race
@pytest.mark.requirement("R42")
async def test_a_cancel_by_http_stops_the_turn_every_time(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, http_editor(server) as client:
        session = await client.new_session(tmp_path)
        await client.open(session)
        for number in range(10):
            kind = ("stall", "count 1000000", "run sleep 300", "write no.txt: x")[number % 4]
            request = await client.prompt(session, kind)
            note = {
                "jsonrpc": "2.0",
                "method": "session/cancel",
                "params": {"sessionId": session},
            }
            assert (await client.send(note, session)).status_code == 202
            _, answer = await client.answer(request)
            assert answer["result"]["stopReason"] == "cancelled"
    assert not (tmp_path / "no.txt").exists()


async def test_a_question_is_answered_by_a_post(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, http_editor(server) as client:
        session = await client.new_session(tmp_path)
        await client.open(session)
        request = await client.prompt(session, "write yes.txt: x")
        stream, question = await client.until(
            lambda: next(
                (e for e in client.received if e[1].get("method") == "session/request_permission"),
                None,
            )
        )
        assert stream == session
        outcome = {"outcome": {"outcome": "selected", "optionId": "allow-once"}}
        reply = {"jsonrpc": "2.0", "id": question["id"], "result": outcome}
        assert (await client.send(reply)).status_code == 202
        assert (await client.answer(request))[1]["result"]["stopReason"] == "end_turn"
    assert (tmp_path / "yes.txt").exists()


@pytest.mark.parametrize("habit", ["opens the stream first", "waits to be told"])
@pytest.mark.requirement("QUIRK-19")
async def test_both_habits_of_opening_a_session_see_all_of_it_in_order(
    tmp_path: Path, habit: str
) -> None:
    async with listening(tmp_path) as server:
        async with http_editor(server) as client:
            session = await client.new_session(tmp_path)
            await client.open(session)
            await client.answer(await client.prompt(session, "say before"))
        async with http_editor(server) as client:
            is_first = habit == "opens the stream first"
            if is_first:
                await client.open(session)
            params = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
            stream, answer = await client.answer(await client.ask("session/load", **params))
            assert "result" in answer
            assert stream == (session if is_first else None)
            assert client.said(session, stream).strip() == "before"
            if not is_first:
                await client.open(session)
            stream, _ = await client.answer(await client.prompt(session, "say after"))
            assert stream == session
            assert client.said(session, session).strip().endswith("after")


async def test_each_mistake_has_its_status(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, network="max_message_bytes = 1000") as server,
        http_editor(server) as client,
    ):
        http, url, own = client.http, client.url, client.headers()
        events = {"accept": "text/event-stream"}
        session = await client.new_session(tmp_path)
        prompt = {"sessionId": session, "prompt": []}
        request = {"jsonrpc": "2.0", "id": 99, "method": "session/list", "params": {}}
        body = json.dumps(request)

        async def status(method: str, content: str = "", **headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await http.request(method, url, content=content, headers=named)).status_code

        assert await status("POST", body, content_type="text/plain") == 415
        assert await status("POST", "{", **JSON, **own) == 400
        assert await status("POST", "[]", **JSON, **own) == 501
        assert await status("POST", "x" * 1001, **JSON, **own) == 413
        assert await status("POST", body, **JSON) == 400
        assert await status("POST", body, **JSON, acp_connection_id="no") == 404
        assert await status("GET", **own) == 406
        assert await status("GET", **events) == 400
        assert await status("GET", **events, acp_connection_id="no") == 404
        assert await status("GET", **events, **own) == 409
        assert await status("PUT", body, **own) == 405
        assert await status("DELETE") == 400
        assert await status("DELETE", acp_connection_id="no") == 404
        assert (await client.post("initialize", protocolVersion=1)).status_code == 400
        assert (await client.post("session/prompt", **prompt)).status_code == 400
        other = await client.post("session/prompt", session="other", **prompt)
        assert other.status_code == 400
        unknown = {"sessionId": "none", "prompt": []}
        assert (await client.post("session/prompt", session="none", **unknown)).status_code == 404
        assert (await client.answer(await client.ask("session/list")))[1]["result"]


async def test_deleting_a_connection_stops_its_turns_and_keeps_its_sessions(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as server:
        async with http_editor(server) as client:
            session = await client.new_session(tmp_path)
            await client.prompt(session, "write never.txt: x")
            deleted = await client.http.request("DELETE", client.url, headers=client.headers())
            assert deleted.status_code == 202
            assert (await client.post("session/list")).status_code == 404
        async with http_editor(server) as client:
            params = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
            assert "result" in (await client.answer(await client.ask("session/load", **params)))[1]
    assert not (tmp_path / "never.txt").exists()


async def test_a_client_that_reads_no_stream_and_says_nothing_is_lost(tmp_path: Path) -> None:
    flags = ("--log-level", "info")
    async with (
        listening(tmp_path, *flags, network="absent_s = 0.3") as server,
        http_editor(server, initialize=False) as client,
    ):
        await client.initialize()
        await server.until_said("client_disconnected")
        assert (await client.post("session/list")).status_code == 404


async def test_no_client_is_lost_while_its_initialize_is_being_answered(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, network="absent_s = 0.000001") as server,
        http_editor(server, initialize=False) as client,
    ):
        with anyio.fail_after(LIMIT_S):
            assert (await client.initialize())["protocolVersion"] == 1


async def test_a_client_given_up_before_it_is_answered_is_told_so(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, network="handshake_s = 0.000001") as server,
        http_editor(server, initialize=False) as client,
    ):
        with anyio.fail_after(LIMIT_S):
            answer = await client.post("initialize", protocolVersion=1)
        assert answer.status_code == 503
        assert "ended before" in answer.text


# --- the official SDK's clients -------------------------------------------------------------


class SdkEditor(acp.Client):
    """Allows everything, and keeps what it is shown."""

    def __init__(self) -> None:
        self.said = ""

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        if isinstance(update, schema.AgentMessageChunk):
            self.said += update.content.text

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[Any], **kwargs: Any
    ) -> Any:
        chosen = schema.AllowedOutcome(outcome="selected", option_id=options[0].option_id)
        return schema.RequestPermissionResponse(outcome=chosen)


@pytest.mark.parametrize("transport", ["ws", "http"])
async def test_the_official_sdks_remote_client_works(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", httpx2)  # the same interface, under its new name
    from acp.http.client import create_http_stream
    from acp.ws.client import create_websocket_stream

    async with listening(tmp_path) as server, httpx2.AsyncClient(timeout=None) as http:
        if transport == "ws":
            stream = await create_websocket_stream(server.ws)
        else:
            stream = create_http_stream(f"{server.http}/acp", client=http)
        editor = SdkEditor()
        with anyio.fail_after(LIMIT_S):
            connection = acp.connect_to_agent(editor, stream)
            await connection.initialize(protocol_version=1)
            session = await connection.new_session(cwd=str(tmp_path), mcp_servers=[])
            id = session.session_id
            text = [acp.text_block("write sdk.txt: x")]
            answer = await connection.prompt(session_id=id, prompt=text)
            assert answer.stop_reason == "end_turn"
            assert editor.said
            await connection.close()
    assert (tmp_path / "sdk.txt").read_text() == "x"
