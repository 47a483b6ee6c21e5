from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp_double import PNG, Double
from serve_rig import (
    Client,
    follow_up,
    served,
    settle_cancelled,
    tool_calls,
    tool_update,
    write_script,
)
from serving import serving
from talking import CWD, Talk, talk

from acp_server import types as wire
from acp_server.mcp_servers import servers_from, servers_problem
from agent_core.mcp.servers import HttpServer, SseServer, StdioServer

LIMIT_S = 20.0
"""Loading the SDK takes seconds on a busy machine."""


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another process does; there is nothing to wait on."""
    with anyio.fail_after(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def new_session(client: Client, cwd: Path, *doubles: Double) -> str:
    params = {"cwd": str(cwd), "mcpServers": [double.wire() for double in doubles]}
    result = await client.result(client.wire.request("session/new", params))
    session: str = result["sessionId"]
    return session


def calling(tool: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"tool": f"mcp__double__{tool}", "arguments": arguments}]


OK = [{"text": "ok"}]


# --- what a client may name -----------------------------------------------------------------


async def test_all_three_kinds_are_advertised(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        capabilities = at.lines.responses(1)[0]["result"]["agentCapabilities"]

        assert capabilities["mcpCapabilities"] == {"http": True, "sse": True}


def test_each_kind_becomes_its_value():
    header = wire.EnvVariable("A", "b")
    named = [
        wire.McpServer("one", command="npx", args=["-y", "it"], env=[header]),
        wire.McpServer("two", type="http", url="https://a.b/mcp", headers=[header]),
        wire.McpServer("three", type="sse", url="http://localhost:1/sse"),
    ]

    assert servers_problem(named) is None
    assert servers_from(named) == (
        StdioServer("one", "npx", ("-y", "it"), (("A", "b"),)),
        HttpServer("two", "https://a.b/mcp", (("A", "b"),)),
        SseServer("three", "http://localhost:1/sse"),
    )


def header(name: str, value: str) -> dict[str, Any]:
    named = {"name": name, "value": value}
    return {"name": "a", "type": "http", "url": "http://x", "headers": [named]}


@pytest.mark.requirement("ACP-015", "ACP-058")
@pytest.mark.parametrize(
    "servers",
    [
        [{"name": "", "command": "x"}],
        [{"name": " ", "command": "x"}],
        [{"name": "a", "command": ""}],
        [{"name": "a", "command": "x\0"}],
        [{"name": "a", "command": "x", "args": ["\0"]}],
        [{"name": "a", "command": "x", "env": [{"name": "", "value": "1"}]}],
        [{"name": "a", "command": "x", "env": [{"name": "A=B", "value": "1"}]}],
        [{"name": "a", "command": "x", "env": [{"name": "A", "value": "\0"}]}],
        [{"name": "a", "command": "x"}, {"name": "a", "command": "y"}],
        [{"name": "a", "type": "http", "url": "ftp://x"}],
        [{"name": "a", "type": "http", "url": "/mcp"}],
        [{"name": "a", "type": "http", "url": "http://"}],
        [{"name": "a", "type": "http", "url": "http://x:port"}],
        [{"name": "a", "type": "sse", "url": "http://x/\n"}],
        [header("a b", "1")],
        [header("", "1")],
        [header("Authorization", "Bearer x\r\nEvil: 1")],
    ],
)
@pytest.mark.parametrize("method", ["session/new", "session/load", "session/resume"])
async def test_what_cannot_be_a_server_is_refused(tmp_path, method, servers):
    async with talk(tmp_path) as (at, _backend):
        params = {"cwd": CWD, "mcpServers": servers}
        if method != "session/new":
            params["sessionId"] = "sess_x"
        error = (await at.response(at.say(method, **params)))["error"]

        assert error["code"] == -32602
        assert "mcpServers" in error["data"]["reason"] or "'a'" in error["data"]["reason"]


# --- a session with servers -----------------------------------------------------------------


@pytest.mark.requirement("ACP-056", "ACP-059", "B141")
async def test_the_first_prompt_uses_the_tools_of_the_clients_server(tmp_path):
    double = Double(tmp_path)
    script = write_script(tmp_path, calling("echo", text="hi"), calling("count"), OK)
    asked: list[Any] = []

    def allow(params: Any) -> Any:
        asked.append(params["toolCall"])
        return {"outcome": {"outcome": "selected", "optionId": "allow-once"}}

    async with served(tmp_path, script, permission=allow) as client:
        session = await new_session(client, tmp_path, double)
        assert await client.stop_reason(client.prompt(session, "go"), 30) == "end_turn"

        echo, count = tool_calls(client, session).values()
        assert (echo["title"], echo["status"]) == ("Echo it (double)", "completed")
        assert json.loads(echo["content"][0]["content"]["text"]) == {"text": "hi"}
        assert count["status"] == "completed"
        assert [call["title"] for call in asked] == ["count (double)"]  # reading needs no leave
    assert double.alive == []


async def test_images_and_resources_of_a_result_are_shown(tmp_path):
    double = Double(tmp_path)
    script = write_script(tmp_path, calling("blocks"), OK)
    async with served(tmp_path, script) as client:
        session = await new_session(client, tmp_path, double)
        await client.stop_reason(client.prompt(session, "go"), 30)

        (call,) = tool_calls(client, session).values()
        shown = [item["content"] for item in call["content"]]
        assert shown[0] == {"type": "text", "text": "words"}
        assert shown[1] == {"type": "image", "data": PNG, "mimeType": "image/png"}
        assert [item["type"] for item in shown[3:6]] == ["resource_link", "resource", "resource"]


@pytest.mark.requirement("B130", "B133", "R73")
async def test_stop_reaches_the_server_and_the_session_goes_on(tmp_path):
    double = Double(tmp_path)
    script = write_script(tmp_path, calling("sleep"), OK, calling("count"), OK)
    async with served(tmp_path, script) as client:
        session = await new_session(client, tmp_path, double)
        prompt = client.prompt(session, "go")
        await until(lambda: double.got("tools/call"))
        client.cancel(session)
        with anyio.fail_after(1):
            await until(lambda: double.got("notifications/cancelled"))

        assert await client.stop_reason(prompt) == "cancelled"
        (cancelled,) = double.got("notifications/cancelled")
        assert cancelled["params"]["requestId"] == double.got("tools/call")[0]["id"]
        (call,) = tool_calls(client, session).values()
        assert call["status"] == "failed"
        await follow_up(client, session)
        await client.stop_reason(client.prompt(session, "go"))
        assert "1 by" in json.dumps(list(tool_calls(client, session).values())[-1])
        assert len(double.pids) == 1


@pytest.mark.requirement("B132", "B134")
async def test_a_server_that_dies_in_a_call_fails_the_call_and_not_the_turn(tmp_path):
    double = Double(tmp_path)
    script = write_script(tmp_path, calling("die"), OK)
    async with served(tmp_path, script) as client:
        session = await new_session(client, tmp_path, double)
        prompt = client.prompt(session, "go")
        update = await tool_update(client, session, "ended before it answered")

        assert update["status"] == "failed"
        assert await client.stop_reason(prompt, 30) == "end_turn"
        assert client.text(session) == "ok"


@pytest.mark.requirement("B139", "B140")
async def test_servers_that_cannot_be_had_are_named_and_hold_nothing_up(tmp_path):
    dead = Double(tmp_path, "dead", die_at="initialize")
    async with served(tmp_path) as client:
        named = [dead.wire(), {"name": "typo", "command": "no-such-command", "args": []}]
        params = {"cwd": str(tmp_path), "mcpServers": named}
        result = await client.result(client.wire.request("session/new", params), 5)
        session = result["sessionId"]
        await until(lambda: not dead.alive and dead.pids)
        assert await client.stop_reason(client.prompt(session, "say hi"), 30) == "end_turn"
        assert client.text(session) == "hi"
        await client.stop_reason(client.prompt(session, "say hi"))

        thoughts = [
            update["content"]["text"]
            for update in client.wire.updates(session)
            if update["sessionUpdate"] == "agent_thought_chunk"
        ]
        assert sum("'dead' is not available" in text for text in thoughts) == 1
        assert sum("'typo' is not available" in text for text in thoughts) == 1
        assert any("exit code 3" in text and "Look at its command" in text for text in thoughts)


@pytest.mark.requirement("ACP-175", "B140")
async def test_a_client_that_takes_notices_gets_one_for_each_fault(tmp_path):
    typo = {"name": "typo", "command": "no-such-command", "args": []}
    async with talk(tmp_path, capabilities={"session": {"notices": {}}}) as (at, _backend):
        await at.result(at.say("session/new", cwd=CWD, mcpServers=[typo]))
        await at.lines.until(lambda: notices(at))  # from now on the SDK is loaded
        new = at.say("session/new", cwd=CWD, mcpServers=[typo])
        session = (await at.result(new))["sessionId"]
        await at.lines.until(lambda: len(notices(at)) == 2)

        notice = notices(at)[1]
        assert (notice["severity"], notice["title"]) == (
            "warning",
            "The MCP server 'typo' is not available.",
        )
        assert "'no-such-command'" in notice["description"]
        answered = at.lines.sent.index(at.lines.responses(new)[0])
        said = [m for m in at.lines.sent[:answered] if session in json.dumps(m)]
        assert said == [], "the client did not know the session yet"
        await at.result(at.prompt(session, "say hi"))
        assert len(notices(at)) == 2


def notices(at: Talk) -> list[dict[str, Any]]:
    return [update for update in at.lines.updates() if update["sessionUpdate"] == "notice"]


@pytest.mark.requirement("B139", "B141")
async def test_a_server_that_needs_twelve_seconds_is_waited_for_ten(tmp_path):
    double = Double(tmp_path, delay_s=12)
    script = write_script(tmp_path, OK, calling("echo", text="hi"), OK)
    async with served(tmp_path, script) as client:
        session = await new_session(client, tmp_path, double)
        prompt = client.prompt(session, "go")
        assert await client.stop_reason(prompt, 11.9) == "end_turn"
        assert "still connecting" in json.dumps(client.wire.updates(session))

        await until(lambda: double.got("tools/list"))
        await client.stop_reason(client.prompt(session, "go"))
        (call,) = tool_calls(client, session).values()
        assert call["status"] == "completed"


@pytest.mark.requirement("B139", "R73")
async def test_stop_ends_the_wait_for_servers_at_once(tmp_path):
    double = Double(tmp_path, hang_at="initialize")
    async with served(tmp_path) as client:
        session = await new_session(client, tmp_path, double)
        prompt = client.prompt(session, "say hi")
        await until(lambda: double.got("initialize"))
        client.cancel(session)

        assert await client.stop_reason(prompt, 1) == "cancelled"
        await follow_up(client, session)


async def test_two_sessions_have_two_servers(tmp_path):
    double = Double(tmp_path)
    async with served(tmp_path) as client:
        for _ in range(2):
            session = await new_session(client, tmp_path, double)
            await client.stop_reason(client.prompt(session, "say hi"), 30)
        assert len(double.alive) == 2
    assert double.alive == []


# --- loading --------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-064", "B143")
@pytest.mark.parametrize("method", ["session/load", "session/resume"])
async def test_a_loaded_sessions_new_list_replaces_the_old_one(tmp_path, method):
    kept, dropped, added = (Double(tmp_path, name) for name in ("kept", "dropped", "added"))
    async with served(tmp_path) as client:
        session = await new_session(client, tmp_path, kept, dropped)
        await client.stop_reason(client.prompt(session, "say hi"), 30)
        named = [kept.wire(), added.wire()]
        params = {"cwd": str(tmp_path), "sessionId": session, "mcpServers": named}
        await client.result(client.wire.request(method, params))
        await client.stop_reason(client.prompt(session, "say hi"), 30)

        await until(lambda: not dropped.alive)
        assert (len(kept.pids), len(kept.alive), len(added.alive)) == (1, 1, 1)


async def test_a_session_of_another_day_and_a_fork_get_their_servers(tmp_path):
    double = Double(tmp_path)
    async with served(tmp_path) as client:
        session = await new_session(client, tmp_path)
        await client.stop_reason(client.prompt(session, "say hi"))
        assert double.pids == []
    async with served(tmp_path) as client:
        params = {"cwd": str(tmp_path), "sessionId": session, "mcpServers": [double.wire()]}
        await client.result(client.wire.request("session/load", params))
        forked = await client.result(client.wire.request("session/fork", params))
        for each in (session, forked["sessionId"]):
            await client.stop_reason(client.prompt(each, "say hi"), 30)

        assert len(double.alive) == 2


# --- the end --------------------------------------------------------------------------------


@pytest.mark.requirement("B129", "B092")
@pytest.mark.parametrize("method", ["session/close", "session/delete"])
async def test_a_closed_session_has_no_servers_left(tmp_path, method):
    names = ("one", "two", "three")
    doubles = [Double(tmp_path, name, has_child=True, lingers_s=0.5) for name in names]
    async with served(tmp_path) as client:
        session = await new_session(client, tmp_path, *doubles)
        await client.stop_reason(client.prompt(session, "say hi"), 30)
        await client.result(client.wire.request(method, {"sessionId": session}))

        assert [pid for double in doubles for pid in double.alive] == []
        assert client.wire.descendants() == set()


@pytest.mark.requirement("B129", "B137")
@pytest.mark.parametrize("stage", ["initialize", "list", "call"])
@pytest.mark.parametrize("end", ["eof", "term"])
async def test_no_server_outlives_the_agent(tmp_path, stage, end):
    double = Double(tmp_path, hang_at=stage, has_child=True)
    script = write_script(tmp_path, calling("count"), OK)
    reached = {"initialize": "initialize", "list": "tools/list", "call": "tools/call"}[stage]
    async with served(tmp_path, script) as client:
        session = await new_session(client, tmp_path, double, Double(tmp_path, "other"))
        client.prompt(session, "go")
        await until(lambda: double.got(reached))
        if end == "term":
            os.kill(client.wire.pid, signal.SIGTERM)
        await client.wire.close_stdin()
        assert await client.wire.exited() == 0
    assert double.alive == []


async def test_a_second_signal_kills_stubborn_servers_too(tmp_path):
    double = Double(tmp_path, stays=True, has_child=True)
    async with serving() as client:
        session = await new_session(client, tmp_path, double)
        await client.stop_reason(client.prompt(session, "say hi"), 30)
        os.kill(client.wire.pid, signal.SIGTERM)
        await until(lambda: any("event" in line for line in double.lines))  # its stdin was closed
        os.kill(client.wire.pid, signal.SIGTERM)
        assert await client.wire.exited() == 128 + signal.SIGTERM
        await until(lambda: not double.alive)


async def test_a_killed_agents_servers_see_the_end_of_their_input(tmp_path):
    double = Double(tmp_path)
    async with serving() as client:
        session = await new_session(client, tmp_path, double)
        await client.stop_reason(client.prompt(session, "say hi"), 30)
        client.wire.kill()
        await until(lambda: not double.alive)


async def test_stop_then_close_in_a_call_is_quiet(tmp_path):
    double = Double(tmp_path)
    script = write_script(tmp_path, calling("sleep"), OK)
    async with served(tmp_path, script) as client:
        session = await new_session(client, tmp_path, double)
        prompt = client.prompt(session, "go")
        await until(lambda: double.got("tools/call"))
        closing = client.wire.request("session/close", {"sessionId": session})
        await client.result(closing)
        await settle_cancelled(client, session, prompt)

        assert double.got("notifications/cancelled")
        assert double.alive == []


# --- a server asks --------------------------------------------------------------------------


async def asked_by_the_server(at: Talk, tmp_path: Path, double: Double) -> tuple[int, dict]:
    """Prompt until the server's question is before the client; return the prompt's id and it."""
    params = {"cwd": str(tmp_path), "mcpServers": [double.wire()]}
    session = (await at.result(at.say("session/new", **params)))["sessionId"]
    prompt = at.prompt(session, "go")

    def questions() -> list[dict[str, Any]]:
        return [m for m in at.lines.sent if m.get("method") == "elicitation/create"]

    await at.lines.until(questions, LIMIT_S)
    return prompt, questions()[0]


@pytest.mark.requirement("ACP-155")
async def test_a_servers_question_reaches_the_person_by_its_name_and_the_answer_the_server(
    tmp_path,
):
    double = Double(tmp_path)
    script = write_script(tmp_path, calling("ask"), OK)
    offered = {"elicitation": {"form": {}}}
    settings = {"mode": "bypass", "rehearsal_script": script.partition("=")[2]}
    async with talk(tmp_path, capabilities=offered, **settings) as (at, _backend):
        prompt, question = await asked_by_the_server(at, tmp_path, double)
        content = {"colour": "green"}
        at.answer(question, {"action": "accept", "content": content})
        await at.result(prompt)

        assert question["params"]["message"] == "double: Really?"
        (answer,) = [m for m in double.lines if m.get("id") == question_id(double)]
        assert answer["result"] == {"action": "accept", "content": content}


@pytest.mark.race
async def test_stop_while_the_server_asks_ends_the_question_and_the_call(tmp_path):
    double = Double(tmp_path)
    script = write_script(tmp_path, calling("ask"), OK)
    offered = {"elicitation": {"form": {}}}
    settings = {"mode": "bypass", "rehearsal_script": script.partition("=")[2]}
    async with talk(tmp_path, capabilities=offered, **settings) as (at, _backend):
        prompt, question = await asked_by_the_server(at, tmp_path, double)

        at.cancel(question["params"]["sessionId"])

        assert (await at.result(prompt))["stopReason"] == "cancelled"
        at.answer(question, {"action": "accept", "content": {"colour": "late"}})
        answers = [m for m in double.lines if m.get("id") == question_id(double)]
        assert [m["result"]["action"] for m in answers] in ([], ["cancel"])


def question_id(double: Double) -> str:
    (call,) = double.got("tools/call")
    return f"q-{call['id']}"
