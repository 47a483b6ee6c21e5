"""What a client may send by mistake or in malice: one clear answer, and the agent lives on."""

from __future__ import annotations

import json

import pytest
from serving import SERVE, ask, assert_pure, error_of, line, serving, text

from conformance.client import Client
from conformance.wire import Wire


async def prompt_works(client: Client, session_id: str) -> None:
    assert await client.stop_reason(client.prompt(session_id, "say fine")) == "end_turn"
    assert client.text(session_id).endswith("fine")


# --- lines ----------------------------------------------------------------------------------

NO_BASE64 = ["", "AA=", "A===", "AA==\n", "\u00e9\u00e9==", "data:,AA==", "AA,A"]

BAD_LINES = [
    (b'{"jsonrpc":"2.0",', -32700),
    (b"{", -32700),
    (b"nope", -32700),
    (b"Last login: today on ttys001", -32700),
    (b"\x00", -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"\xff\xfe"}', -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":NaN}}', -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":-Infinity}}', -32700),
    (b"[" * 20_000 + b"]" * 20_000, -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"m","params":' + b"[" * 20_000 + b"]" * 20_000, -32700),
    (b"null", -32600),
    (b"42", -32600),
    (b'"text"', -32600),
    (b"[]", -32600),
    (line([ask(1, "session/list"), ask(2, "session/list")]).strip(), -32600),
    (b'{"jsonrpc":"2.0","id":1.5,"method":"session/list"}', -32600),
    (b'{"jsonrpc":"2.0","id":true,"method":"session/list"}', -32600),
    (b'{"jsonrpc":"2.0","id":{},"method":"session/list"}', -32600),
]


@pytest.mark.requirement("ACP-001", "ACP-012", "ACP-013", "ACP-019", "B110", "B117")
@pytest.mark.only_over("stdio", why="a close code or a status says so")
async def test_each_bad_line_gets_one_error_without_an_id_and_the_next_request_is_served():
    async with serving() as client:
        wire = client.wire
        for raw, code in BAD_LINES:
            before = len(wire.responses(None))
            wire.send_bytes(raw + b"\n")
            await wire.silence("session/list")

            errors = [response["error"] for response in wire.responses(None)[before:]]
            assert [error["code"] for error in errors] == [code], raw[:60]


@pytest.mark.only_over("stdio", "ws", why="a status says so")
async def test_the_id_of_a_bad_request_is_salvaged():
    async with serving() as client:
        client.wire.send_bytes(b'{"jsonrpc":"2.0","id":70,"method":5}\n{"id":71,"method":"x"}\n')

        for request_id in (70, 71):
            assert (await client.wire.response(request_id))["error"]["code"] == -32600


async def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_tolerated():
    async with serving() as client:
        client.wire.send_bytes(b"\n\r\n \n" + b"\xef\xbb\xbf" + line(ask("crlf", "session/list")))
        client.wire.send_bytes(line(ask("lf", "session/list")).rstrip() + b"\r\n\r\n")

        assert "result" in await client.wire.response("crlf")
        assert "result" in await client.wire.response("lf")
        assert client.wire.responses(None) == []


@pytest.mark.requirement("ACP-002", "B106")
async def test_a_prompt_sent_byte_by_byte_arrives_character_for_character(tmp_path):
    said = "é\u2028ℤ😀"
    async with serving() as client:
        session = await client.new_session(tmp_path)
        params = {"sessionId": session, "prompt": text(f"say {said}")}
        for byte in line(ask("bytes", "session/prompt", params)):
            client.wire.send_bytes(bytes([byte]))

        assert (await client.wire.response("bytes"))["result"]["stopReason"] == "end_turn"
        assert client.text(session) == said


async def test_an_escaped_lone_surrogate_does_no_harm(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        params = {"sessionId": session, "prompt": text("say a\ud800b \ud83d\ude00")}
        client.wire.send_bytes(json.dumps(ask("s", "session/prompt", params)).encode() + b"\n")

        assert (await client.wire.response("s"))["result"]["stopReason"] == "end_turn"
        assert client.text(session) == "a�b 😀"


@pytest.mark.requirement("B103")
@pytest.mark.only_over("stdio", why="a close code or a status says so")
async def test_a_prompt_of_twenty_megabytes_is_taken_and_one_above_the_limit_is_refused(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        big = client.prompt(session, "é" * (10 * 2**20))
        assert await client.stop_reason(big, timeout_s=40) == "end_turn"

        client.wire.send_bytes(b'{"jsonrpc":"2.0","id":"big","params":"')
        for _megabyte in range(65):
            client.wire.send_bytes(b"x" * 2**20)
        client.wire.send_bytes(b'"}\n')
        await client.wire.silence("session/list", timeout_s=40)

        (refusal,) = client.wire.responses(None)
        assert refusal["error"] == {"code": -32600, "message": "The message is too long"}
        await prompt_works(client, session)


# --- ids ------------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-010", "B116")
async def test_every_id_comes_back_with_its_value_and_type():
    ids = [0, "", "7000", 7000, -1, "é", 2**53 + 1, -(2**63), 2**70, None]
    async with serving() as client:
        for request_id in ids:
            before = len(client.wire.responses(request_id))
            client.wire.send_bytes(line(ask(request_id, "session/list")))
            await client.wire.silence("session/list")

            assert len(client.wire.responses(request_id)) == before + 1, request_id


@pytest.mark.requirement("ACP-010", "B116")
async def test_an_id_used_again_while_open_is_refused_and_the_first_is_answered(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        params = {"sessionId": session, "prompt": text("stall")}
        client.wire.send_bytes(line(ask("p", "session/prompt", params)) * 2)

        assert (await client.wire.response("p"))["error"]["code"] == -32600
        client.cancel(session)
        await client.wire.receive(lambda m: m.get("result", {}).get("stopReason") == "cancelled")
        await prompt_works(client, session)


# --- methods --------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-014", "ACP-171", "ACP-172", "B118")
@pytest.mark.parametrize("is_open", [False, True], ids=["before a session", "in a session"])
async def test_unknown_requests_are_refused_and_unknown_notifications_ignored(is_open, tmp_path):
    async with serving() as client:
        if is_open:
            await client.new_session(tmp_path)
            await client.wire.silence()
        for method in ("nope", "_ext/thing", "session/set_model", ""):
            error = await error_of(client, method, {})
            assert (error["code"], error["data"]) == (-32601, {"method": method})
        for method in ("nope", "_ext/thing", "$/x", "session/prompt", "initialize"):
            client.wire.notify(method, {})
        client.wire.send({"jsonrpc": "2.0", "id": 99, "result": {}})
        client.wire.send({"jsonrpc": "2.0", "id": None, "error": {"code": 1, "message": "x"}})

        assert await client.wire.silence() == []


@pytest.mark.requirement("ACP-009")
async def test_session_cancel_with_an_id_is_no_method_and_cancels_nothing(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, "count 3 slowly")

        error = await error_of(client, "session/cancel", {"sessionId": session})

        assert error["code"] == -32601
        assert await client.stop_reason(prompt) == "end_turn"


# --- initialize -----------------------------------------------------------------------------


@pytest.mark.requirement("ACP-034")
async def test_nothing_is_served_before_initialize(tmp_path):
    async with Wire.spawn(SERVE) as wire:
        client = Client(wire)
        for method in ("session/new", "session/prompt", "session/list", "authenticate", "nope"):
            error = await error_of(client, method, {"cwd": str(tmp_path), "mcpServers": []})
            assert error["code"] == -32600
        wire.notify("session/cancel", {"sessionId": "x"})
        wire.notify("nope", {})

        await client.initialize()
        await prompt_works(client, await client.new_session(tmp_path))
        assert_pure(wire)
        assert wire.stderr == ""


@pytest.mark.requirement("ACP-021")
@pytest.mark.only_over("stdio", "ws", why="it makes a connection there")
async def test_initialize_may_be_repeated_until_something_else_was_asked(tmp_path):
    async with serving() as client:
        again = await client.initialize()
        session = await client.new_session(tmp_path)
        error = await error_of(client, "initialize", {"protocolVersion": 1})

        assert again["protocolVersion"] == 1
        assert error["code"] == -32600
        await prompt_works(client, session)


@pytest.mark.requirement("ACP-023", "ACP-024", "ACP-026", "ACP-027", "B115")
async def test_the_version_is_negotiated_and_never_echoed():
    async with Wire.spawn(SERVE) as wire:
        for version in (0, 1, 1.0, 2, 99, 65535):  # JSON has one kind of number
            response = await wire.response(wire.request("initialize", {"protocolVersion": version}))
            assert response["result"]["protocolVersion"] == 1
            assert response["result"]["agentInfo"]["name"]
        for version in ("1", "2024-11-05", 65536, -1, 1.5, None, True, {}):
            response = await wire.response(wire.request("initialize", {"protocolVersion": version}))
            assert response["error"]["code"] == -32602, version
        response = await wire.response(wire.request("initialize", {}))
        assert response["error"]["code"] == -32602
        assert "protocolVersion" in response["error"]["data"]["reason"]
        assert_pure(wire)


@pytest.mark.requirement("ACP-029", "ACP-030", "B146")
@pytest.mark.parametrize(
    "capabilities", [None, 5, {"fs": 7, "terminal": "yes", "x": {}}, {"fs": None, "terminal": []}]
)
async def test_garbage_in_the_capabilities_offers_nothing(capabilities, tmp_path):
    (tmp_path / "a.txt").write_text("content")
    async with Wire.spawn(SERVE) as wire:
        client = Client(wire)
        params = {"protocolVersion": 1, "clientCapabilities": capabilities, "clientInfo": 5}
        await client.result(wire.request("initialize", params))
        session = await client.new_session(tmp_path)

        assert await client.stop_reason(client.prompt(session, "read a.txt")) == "end_turn"

        assert not [m for m in wire.received if m.get("method", "").startswith(("fs/", "term"))]
        assert_pure(wire)


@pytest.mark.requirement("ACP-043", "ACP-047", "ACP-048")
@pytest.mark.only_over("stdio", "ws", why="initialize makes a connection there")
async def test_authenticate_takes_the_advertised_method_only():
    async with serving() as client:
        methods = (await client.initialize())["authMethods"]
        for method in methods:
            request = client.wire.request("authenticate", {"methodId": method["id"]})
            assert await client.wire.response(request) == {
                "jsonrpc": "2.0",
                "id": request,
                "result": {},
            }
        for params in ({"methodId": "nope"}, {"methodId": None}, {}):
            assert (await error_of(client, "authenticate", params))["code"] == -32602


# --- session/new ----------------------------------------------------------------------------


@pytest.mark.requirement("ACP-051", "ACP-015")
async def test_a_directory_that_is_not_absolute_is_refused(tmp_path):
    async with serving() as client:
        for cwd in ("relative", "", ".", "~", "file:///x", "/nul\0byte", None, 5):
            error = await error_of(client, "session/new", {"cwd": cwd, "mcpServers": []})
            assert error["code"] == -32602, cwd
        assert "cwd" in (await error_of(client, "session/new", {}))["data"]["reason"]
        await prompt_works(client, await client.new_session(tmp_path))


@pytest.mark.requirement("B114", "B119")
async def test_mcp_servers_may_be_left_out_and_have_any_known_shape(tmp_path):
    good = [
        {},
        {"mcpServers": None},
        {"mcpServers": []},
        {"mcpServers": [{"name": "a", "command": "/bin/true", "args": [], "env": []}]},
        {"mcpServers": [{"name": "a", "command": "/bin/true"}]},
        {"mcpServers": [{"name": "a", "type": "stdio", "command": "/bin/true", "unknown": 1}]},
        {"mcpServers": [{"name": "a", "type": "http", "url": "http://x", "headers": []}]},
    ]
    async with serving() as client:
        for servers in good:
            params = {"cwd": str(tmp_path), **servers}
            result = await client.result(client.wire.request("session/new", params))
            await prompt_works(client, result["sessionId"])


@pytest.mark.requirement("ACP-015", "B119")
async def test_malformed_mcp_servers_are_refused_with_the_entry(tmp_path):
    bad = [
        5,
        {},
        [5],
        [{"name": "a"}],
        [{"command": "x"}],
        [{"name": "a", "type": "http"}],
        [{"name": "a", "type": "carrier-pigeon", "url": "x"}],
        [{"name": "a", "command": "x", "args": "y"}],
    ]
    async with serving() as client:
        for servers in bad:
            params = {"cwd": str(tmp_path), "mcpServers": servers}
            error = await error_of(client, "session/new", params)
            assert error["code"] == -32602, servers
            assert "mcpServers" in error["data"]["reason"] or "'a'" in error["data"]["reason"]


# --- sessions that are not there, and prompts that are none ---------------------------------


@pytest.mark.requirement("ACP-076", "B083")
@pytest.mark.only_over("stdio", "ws", why="a status says so")
async def test_an_unknown_session_is_named_by_every_method(tmp_path):
    requests = [
        ("session/load", {"cwd": str(tmp_path), "mcpServers": []}),
        ("session/prompt", {"prompt": text("hello")}),
        ("session/set_mode", {"modeId": "ask"}),
    ]
    async with serving() as client:
        for session_id in ("sess_nope", "", "../../etc/passwd", "\0", "é" * 1000):
            for method, params in requests:
                error = await error_of(client, method, {"sessionId": session_id, **params})
                assert error["code"] == -32002
                assert error["data"] == {"sessionId": session_id}
        for method, params in requests:
            for session_id in (None, 5, [], {}):
                error = await error_of(client, method, {"sessionId": session_id, **params})
                assert error["code"] == -32602
            error = await error_of(client, method, params)
            assert "sessionId" in error["data"]["reason"]


@pytest.mark.requirement("ACP-009", "ACP-098")
async def test_a_cancel_that_means_nothing_is_silent(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        await client.wire.silence()
        for params in ({"sessionId": session}, {"sessionId": "nope"}, {"sessionId": None}, {}, 5):
            client.wire.notify("session/cancel", params)
        for params in ({"requestId": 1}, {"requestId": None}, {}, [], {"requestId": 1.0}):
            client.wire.notify("$/cancel_request", params)

        assert await client.wire.silence() == []
        await prompt_works(client, session)


@pytest.mark.requirement("ACP-080", "ACP-015")
@pytest.mark.only_over("stdio", "ws", why="initialize makes a connection there")
async def test_a_prompt_must_hold_something_the_agent_offered_to_take(tmp_path):
    async with serving() as client:
        offered = (await client.initialize())["agentCapabilities"]["promptCapabilities"]
        session = await client.new_session(tmp_path)
        bad = [
            [],
            None,
            5,
            "text",
            [5],
            [{}],
            [{"type": "text"}],
            [{"type": "text", "text": 5}],
            [{"type": "hologram", "data": "x"}],
            [{"type": "audio", "data": "AA==", "mimeType": "audio/wav"}],
            [{"type": "image", "data": "AA=="}],
            *([{"type": "image", "data": data, "mimeType": "image/png"}] for data in NO_BASE64),
            *([{"type": "resource", "resource": {"uri": "u", "blob": b}}] for b in NO_BASE64[1:]),
            [{"type": "resource", "resource": {}}],
            [{"type": "resource_link", "uri": "file:///x"}],
        ]
        for prompt in bad:
            error = await error_of(
                client, "session/prompt", {"sessionId": session, "prompt": prompt}
            )
            assert error["code"] == -32602, prompt

        good = [
            {"type": "resource_link", "uri": "file:///x", "name": "x"},
            {"type": "resource", "resource": {"uri": "file:///x", "text": "x"}},
            {"type": "image", "data": "AA==", "mimeType": "image/png"},
            {"type": "text", "text": "say fine", "annotations": {}, "_meta": {"a": 1}},
        ]
        assert offered == {"image": True, "embeddedContext": True}
        params = {"sessionId": session, "prompt": good, "_meta": None}
        assert await client.stop_reason(client.wire.request("session/prompt", params)) == "end_turn"
        await prompt_works(client, session)


@pytest.mark.requirement("ACP-142", "ACP-143", "ACP-149")
async def test_an_unknown_mode_is_refused_and_changes_nothing(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        for mode in ("yolo", "", None, 5):
            params = {"sessionId": session, "modeId": mode}
            assert (await error_of(client, "session/set_mode", params))["code"] == -32602
        await client.stop_reason(client.prompt(session, "/mode"))
        assert "`ask` (now)" in client.text(session)

        params = {"sessionId": session, "modeId": "bypass"}
        assert await client.result(client.wire.request("session/set_mode", params)) == {}
        assert {"sessionUpdate": "current_mode_update", "currentModeId": "bypass"} in (
            client.wire.updates(session)
        )
