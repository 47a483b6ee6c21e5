"""What the log of a server says of whose work it was, and what it never says."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from http_rig import http_editor
from mcp_double import Double
from network_rig import TOKEN, Server, editor, listening
from serve_rig import served
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from conformance.providers.chat import text, tool_call
from conformance.providers.server import answer, provider_double, status

SECRETS = {
    "token": TOKEN,
    "guess": "wrong-guess-0123456789",
    "browser": "browser-guess-0123456789",
    "query": "query-guess-0123456789",
    "key": "sk-model-key-0123456789",
    "mcp": "mcp-secret-0123456789",
}
SAID = {
    "prompt": "canary-of-a-prompt",
    "thought": "canary-of-an-answer",
    "argument": "canary-of-an-argument",
    "output": "canary-of-" + "output",
    "file": "canary-of-a-file",
    "crash": "canary-of-a-crash",
    "provider": "canary-of-a-provider",
}
PLUGIN = """
from agent_core.tools.tool import Tool
import msgspec

class Arguments(msgspec.Struct, forbid_unknown_fields=True):
    text: str

class Crash(Tool):
    name, description, Args, effect = "crash", "It crashes.", Arguments, "none"
    async def run(self, args, context):
        try:
            raise KeyError(args.text)
        except KeyError:
            raise ValueError(args.text)

def load(runtime):
    runtime.add_tool(Crash())
"""


def records(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.said.splitlines() if line.startswith("{")]


def named(server: Server, event: str) -> list[dict[str, Any]]:
    return [record for record in records(server) if record["event"] == event]


async def turned_away(server: Server) -> None:
    """Try each way to show a token that is wrong."""
    encoded = base64.urlsafe_b64encode(SECRETS["browser"].encode()).rstrip(b"=").decode()
    for options in (
        {"additional_headers": {"Authorization": f"Bearer {SECRETS['guess']}"}},
        {"subprotocols": ["acp", f"acp.bearer.{encoded}"]},
    ):
        with pytest.raises(InvalidStatus, match="401"):
            async with connect(server.ws, proxy=None, **options):
                pass
    async with httpx2.AsyncClient() as http:
        asked = await http.get(f"{server.http}/acp", params={"token": SECRETS["query"]})
        assert asked.status_code == 401


@pytest.mark.requirement("B158", "B163")
@pytest.mark.parametrize("level", ["info", "debug"])
async def test_a_whole_session_leaves_no_secret_in_the_log_and_no_words_above_debug(
    tmp_path: Path, level: str
) -> None:
    (tmp_path / "leaky.py").write_text(PLUGIN)
    (tmp_path / "notes.txt").write_text(SAID["file"])
    halves = SAID["output"][:10], SAID["output"][10:]
    command = json.dumps({"command": f": {SAID['argument']}; echo {halves[0]}{halves[1]}"})
    calls = (
        tool_call(0, "c1", "shell", command),
        tool_call(1, "c2", "read", json.dumps({"path": "notes.txt"})),
        tool_call(2, "c3", "crash", json.dumps({"text": SAID["crash"]})),
        tool_call(3, "c4", "mcp__double__echo", json.dumps({"text": SAID["argument"]})),
    )
    replies = [
        status(429, {"message": SAID["provider"]}, headers={"retry-after": "0"}),
        answer(text(SAID["thought"]), *calls, reason="tool_calls"),
        answer(text(SAID["thought"])),
        status(401, {"message": f"{SAID['provider']} {SECRETS['key']}", "code": "bad_key"}),
    ]
    double = Double(tmp_path)
    secret = {"name": "SECRET", "value": SECRETS["mcp"]}
    async with provider_double(replies) as provider:
        env = {
            "ACP_AGENT_TOKEN": TOKEN,
            "OPENAI_API_KEY": SECRETS["key"],
            "OPENAI_BASE_URL": provider.url,
            "PYTHONPATH": str(tmp_path),
        }
        flags = ("--model", "openai:any", "--mode", "bypass", "--plugin", "leaky:load")
        flags += ("--log-level", level)
        async with listening(tmp_path, *flags, env=env, must_end_well=level == "info") as server:
            await turned_away(server)
            async with editor(server, token=TOKEN) as client:
                servers = [double.wire(env=[secret])]
                opened = await client.result("session/new", cwd=str(tmp_path), mcpServers=servers)
                session = opened["sessionId"]
                prompt = await client.prompt(session, SAID["prompt"])
                assert await client.stop_reason(prompt) == "end_turn", server.said
                await client.response(await client.prompt(session, SAID["prompt"]))
                shown = json.dumps(client.updates(session))
                assert SAID["output"] in shown
                assert SAID["file"] in shown
    assert named(server, "tool_call_crashed")[0]["exception"]
    assert {"wrong_token_refused", "model_call_failed", "turn_ended", "turn_failed"} <= {
        record["event"] for record in records(server)
    }
    for secret_name, value in SECRETS.items():
        assert value not in server.said, secret_name
    assert [record["logger"] for record in records(server) if "uvicorn" in record["logger"]] == []
    for words_name, value in SAID.items():
        assert level == "debug" or value not in server.said, words_name


async def test_records_of_a_turn_name_its_connection_session_and_number(tmp_path: Path) -> None:
    flags = ("--mode", "bypass", "--log-level", "info")
    async with (
        listening(tmp_path, *flags) as server,
        editor(server) as first,
        editor(server) as second,
    ):
        one, other = await first.new_session(tmp_path), await second.new_session(tmp_path)
        for client, session in ((first, one), (second, other), (first, one)):
            await client.stop_reason(await client.prompt(session, "say it"))
        await second.stop_reason(await second.prompt(other, "delegate say it"))
    whose = [(r["connection"], r["session_id"], r["turn"]) for r in named(server, "turn_ended")]
    child = whose[3][1]
    assert child not in (one, other)
    assert whose == [(1, one, 1), (2, other, 1), (1, one, 2), (2, child, 1), (2, other, 2)]
    assert [r["outcome"] for r in named(server, "turn_ended")] == ["completed"] * 5


async def test_records_of_a_request_by_http_name_its_connection(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, "--log-level", "info") as server,
        editor(server),
        http_editor(server) as client,
    ):
        session = await client.new_session(tmp_path)
        await client.open(session)
        note = {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": 1}}
        assert (await client.send(note, session)).status_code == 202
        await client.answer(await client.prompt(session, "say it"))
    assert [r["connection"] for r in named(server, "session_cancel_malformed")] == [2]
    assert [r["connection"] for r in named(server, "turn_ended")] == [2]


async def test_a_session_that_another_client_takes_over_is_logged_as_that_ones(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, "--log-level", "info") as server,
        editor(server) as first,
        editor(server) as second,
    ):
        session = await first.new_session(tmp_path)
        await first.stop_reason(await first.prompt(session, "say it"))
        await second.load(session, tmp_path)
        await second.stop_reason(await second.prompt(session, "say it"))
    assert [r["connection"] for r in named(server, "turn_ended")] == [1, 2]


@pytest.mark.only_over("stdio", why="it says so")
async def test_over_stdio_a_turns_records_name_its_session_and_number(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with served(tmp_path, "--log-level", "info", "--log-file", str(log)) as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say it"))
    lines = map(json.loads, log.read_text().splitlines())
    (record,) = [each for each in lines if each["event"] == "turn_ended"]
    assert (record["session_id"], record["turn"]) == (session, 1)
    assert "connection" not in record
