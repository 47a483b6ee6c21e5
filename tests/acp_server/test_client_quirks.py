"""How real clients behave, and what an agent must never do to them.

Each sentence was seen on the wire with at least one client. What a cancel with an open question
has to do is proved in `test_field_reports` and `test_cancel_matrix`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from network_rig import editor, listening
from serve_rig import SERVE, ask_for_permission, chunk_of, follow_up, served, texts, tool_calls
from serving import ask, environment, line

from acp_server.methods import METHODS
from conformance.client import Client
from conformance.providers import chat as chat_double
from conformance.providers.server import Reply, provider_double
from conformance.wire import Wire


@pytest.mark.transports("stdio", "ws")
@pytest.mark.requirement("QUIRK-02")
async def test_a_prompt_without_a_session_is_refused_and_nothing_else_happens(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as client:
        prompt = [{"type": "text", "text": "say hi"}]
        request_id = client.wire.request("session/prompt", {"sessionId": None, "prompt": prompt})

        assert (await client.wire.response(request_id))["error"]["code"] == -32602

        await follow_up(client, await client.new_session(tmp_path))


@pytest.mark.requirement("QUIRK-03", "QUIRK-13")
async def test_an_editor_may_know_no_missing_file_answer_null_and_cancel_with_a_meta(
    tmp_path: Path,
) -> None:
    async with Wire.spawn([*SERVE, "--mode=bypass"], cwd=tmp_path) as wire:
        client = Client(wire)
        await client.initialize({"fs": {"readTextFile": True, "writeTextFile": True}})
        session = await client.new_session(tmp_path)
        wire.answer["fs/read_text_file"] = lambda _params: {"content": ""}
        read = client.prompt(session, "read missing.txt")
        assert await client.stop_reason(read) == "end_turn"

        wire.answer["fs/write_text_file"] = lambda _params: None
        written = client.prompt(session, "write a.txt: x")
        asked = await wire.receive(lambda m: m.get("method") == "fs/write_text_file")
        wire.reply(asked["id"], None)

        assert await client.stop_reason(written) == "end_turn"
        was_read, was_written = tool_calls(client, session).values()
        assert "missing.txt does not exist" in json.dumps(was_read["content"])
        assert was_written["status"] == "completed"
        running = client.prompt(session, "count 100000 slowly")
        await chunk_of(client, session, "2 ")
        wire.notify("session/cancel", {"sessionId": session, "_meta": {}})
        assert await client.stop_reason(running) == "cancelled"


@pytest.mark.transports
@pytest.mark.requirement("QUIRK-04")
async def test_a_prompt_that_comes_without_a_cancel_waits_for_the_turn_that_runs(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        first = client.prompt(session, "count 20 slowly")
        await chunk_of(client, session, "2 ")
        second = client.prompt(session, "say next")

        assert await client.stop_reason(second) == "end_turn"

        assert await client.stop_reason(first) == "end_turn"
        counted = "".join(f"{number} " for number in range(1, 21))
        assert texts(client, session, [first, second]) == [counted, "next", ""]


@pytest.mark.requirement("QUIRK-05")
async def test_capabilities_under_another_name_are_none_and_ids_may_be_text(
    tmp_path: Path,
) -> None:
    (tmp_path / "here.txt").write_text("on disk")
    async with Wire.spawn(SERVE, cwd=tmp_path) as wire:
        offered = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": True}
        opening = {"protocolVersion": 1, "capabilities": offered}
        wire.send(ask("7f1c-a", "initialize", opening))
        await wire.response("7f1c-a")
        wire.send(ask("7f1c-b", "session/new", {"cwd": str(tmp_path), "mcpServers": []}))
        session = (await wire.response("7f1c-b"))["result"]["sessionId"]
        prompt = [{"type": "text", "text": "read here.txt"}]
        wire.send(ask("7f1c-c", "session/prompt", {"sessionId": session, "prompt": prompt}))

        assert (await wire.response("7f1c-c"))["result"]["stopReason"] == "end_turn"

        assert [m["method"] for m in wire.received if "id" in m and "method" in m] == []


@pytest.mark.requirement("QUIRK-06", "QUIRK-20")
async def test_it_starts_with_nothing_but_a_path_and_its_first_line_is_the_answer(
    tmp_path: Path,
) -> None:
    env = {"PATH": os.environ["PATH"], "TERM": "dumb", "XDG_STATE_HOME": str(tmp_path / "state")}
    async with Wire.spawn(SERVE, cwd=tmp_path, env=env) as wire:
        wire.send(ask(1, "initialize", {"protocolVersion": 1}))
        await wire.response(1)
        assert wire.received[0]["id"] == 1
        assert wire.noise == []

        wire.send(ask(2, "session/new", {"cwd": str(tmp_path), "mcpServers": []}))

        assert "result" in await wire.response(2)


@pytest.mark.requirement("QUIRK-07")
async def test_a_client_that_hands_on_no_key_needs_one_in_the_file_and_is_told_so(
    tmp_path: Path,
) -> None:
    names = ("LOGNAME", "PATH", "SHELL", "TERM", "USER")
    handed_on = {name: os.environ[name] for name in names if name in os.environ}
    env = handed_on | {"HOME": str(tmp_path)}
    file = tmp_path / ".config/acp-agent/config.toml"
    file.parent.mkdir(parents=True)
    async with provider_double([Reply(chat_double.last_words())]) as double:
        provider = 'model = "openai:any"\n[providers.openai]\napi = "chat"\n{}\n'
        file.write_text(provider.format(""))
        async with Wire.spawn(SERVE, cwd=tmp_path, env=env) as wire:
            client = Client(wire)
            await client.initialize()
            prompt = client.prompt(await client.new_session(tmp_path), "hello")
            failure = (await wire.response(prompt))["error"]["message"]
            assert "OPENAI_API_KEY" in failure
            assert "[providers.openai] in ~/.config/acp-agent/config.toml" in failure

        file.write_text(provider.format(f'key = "sk-in-the-file"\nbase_url = "{double.url}"'))
        async with Wire.spawn(SERVE, cwd=tmp_path, env=env) as wire:
            client = Client(wire)
            await client.initialize()
            session = await client.new_session(tmp_path)
            assert await client.stop_reason(client.prompt(session, "hello"), 30) == "end_turn"
            assert client.text(session) == "That is all."


@pytest.mark.transports
@pytest.mark.requirement("QUIRK-09", "QUIRK-11")
async def test_stderr_stays_silent_while_all_goes_well(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        for prompt in ("say a", "run echo b", "write c.txt: c", "read c.txt", "nonsense"):
            assert await client.stop_reason(client.prompt(session, prompt)) == "end_turn"

        assert client.wire.stderr == ""


@pytest.mark.requirement("QUIRK-10")
async def test_each_prompt_may_come_from_a_process_of_its_own_that_resumes(tmp_path: Path) -> None:
    async with Wire.spawn(SERVE, cwd=tmp_path) as wire:
        first = Client(wire)
        await first.initialize()
        session = await first.new_session(tmp_path)
        await first.stop_reason(first.prompt(session, "say first"))
        wire.kill()  # as one client ends it each time
        await wire.exited()
    params = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
    for number in range(3):
        async with served(tmp_path) as client:
            await client.result(client.wire.request("session/resume", params))
            await client.stop_reason(client.prompt(session, f"say {number}"))
    async with served(tmp_path) as client:
        await client.result(client.wire.request("session/load", params))
        assert client.text(session) == "first012"


@pytest.mark.transports
@pytest.mark.requirement("QUIRK-12")
async def test_authenticating_is_cheap_and_may_be_done_again_and_again(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        for _ in range(3):
            request_id = client.wire.request("authenticate", {"methodId": "configured"})
            assert (await client.wire.response(request_id))["result"] == {}

        await follow_up(client, await client.new_session(tmp_path))


@pytest.mark.transports
@pytest.mark.requirement("QUIRK-12")
async def test_nothing_that_is_sent_says_null(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "write a.txt: b then run echo c"))
        for method in ("session/load", "session/resume"):
            params = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
            await client.result(client.wire.request(method, params))

        for message in client.wire.received:
            assert "null" not in json.dumps(message).split('"')[2::2], message


@pytest.mark.transports
@pytest.mark.requirement("QUIRK-15")
async def test_the_model_call_of_older_clients_is_an_unknown_method(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        params = {"sessionId": session, "modelId": "smart"}

        response = await client.wire.response(client.wire.request("session/set_model", params))

        assert response["error"]["code"] == -32601
        await follow_up(client, session)


@pytest.mark.requirement("QUIRK-16")
async def test_attachments_are_links_and_an_editor_may_refuse_to_write(tmp_path: Path) -> None:
    async with Wire.spawn(SERVE, cwd=tmp_path) as wire:
        client = Client(wire, permission="hold")
        await client.initialize({"fs": {"readTextFile": True, "writeTextFile": True}})
        session = await client.new_session(tmp_path)
        link = {"type": "resource_link", "uri": f"file://{tmp_path}/data.csv", "name": "data.csv"}
        text = {"type": "text", "text": "write a.ipynb: {}"}
        params = {"sessionId": session, "prompt": [text, link]}
        written = wire.request("session/prompt", params)
        question = await ask_for_permission(client, session)
        wire.answer["fs/read_text_file"] = lambda _params: {"content": ""}
        wire.answer["fs/write_text_file"] = lambda _params: None
        chosen = {"outcome": {"outcome": "selected", "optionId": "allow-once"}}
        wire.reply(question["id"], chosen)
        asked = await wire.receive(lambda m: m.get("method") == "fs/write_text_file")
        error = {"code": -32602, "message": "no notebooks"}
        wire.send({"jsonrpc": "2.0", "id": asked["id"], "error": error})

        assert await client.stop_reason(written) == "end_turn"

        (call,) = tool_calls(client, session).values()
        assert call["status"] == "failed"
        assert "no notebooks" in json.dumps(call["content"])
        refused = client.prompt(session, "write b.txt: x")
        await ask_for_permission(client, session)
        client.cancel(session)  # which answers the question with `cancelled`, too
        assert await client.stop_reason(refused) == "cancelled"


@pytest.mark.requirement("QUIRK-21")
async def test_a_directory_that_is_not_there_is_no_reason_not_to_talk(tmp_path: Path) -> None:
    async with served(tmp_path, "--mode=bypass") as client:
        session = await client.new_session(tmp_path / "workspace")
        assert await client.stop_reason(client.prompt(session, "run pwd")) == "end_turn"

        (call,) = tool_calls(client, session).values()
        assert call["status"] == "failed"
        await follow_up(client, session)


@pytest.mark.requirement("QUIRK-22")
async def test_no_method_is_lost_on_the_way_through_a_websocket(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server) as client:
        unknown = {
            method
            for method in METHODS
            if (await client.response(await client.say(method))).get("error", {}).get("code")
            == -32601
        }

        assert unknown == {"logout"}  # which is for the machine's own user


@pytest.mark.transports
@pytest.mark.requirement("QUIRK-18")
async def test_a_question_that_is_answered_cancelled_ends_the_turn_without_a_cancel(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, permission="cancelled") as client:
        session = await client.new_session(tmp_path)

        assert await client.stop_reason(client.prompt(session, "write no.txt: x")) == "cancelled"

        assert not (tmp_path / "no.txt").exists()
        await follow_up(client, session)


@pytest.mark.requirement("QUIRK-14")
@pytest.mark.parametrize("prompt", ["run true", "write a.txt: b", "/mode ask", "nonsense"])
async def test_a_turn_that_ends_well_says_something(tmp_path: Path, prompt: str) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)

        assert await client.stop_reason(client.prompt(session, prompt)) == "end_turn"

        assert client.text(session) != ""


def write_odd_name(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/odd-\xff.txt")).write_text("needle")


async def test_a_file_name_that_is_not_utf_8_reaches_no_client_as_a_lone_surrogate(
    tmp_path: Path,
) -> None:
    write_odd_name(tmp_path)
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        for prompt in ("list", "search needle", "run ls"):
            assert await client.stop_reason(client.prompt(session, prompt)) == "end_turn"

        for message in client.wire.received:
            json.dumps(message, ensure_ascii=False).encode()  # fails for a lone surrogate


async def test_a_batch_is_refused_whole_and_none_is_ever_sent(tmp_path: Path) -> None:
    async with Wire.spawn(SERVE, cwd=tmp_path, env=environment()) as wire:
        wire.send(ask(1, "initialize", {"protocolVersion": 1}))
        await wire.response(1)

        wire.send_bytes(line([ask(2, "session/list"), ask(3, "session/list")]))
        wire.send(ask(4, "session/list"))

        assert "result" in await wire.response(4)
        assert wire.responses(2) == wire.responses(3) == []
        assert all(isinstance(message, dict) for message in wire.received)


@pytest.mark.transports
async def test_nothing_more_is_said_once_a_load_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        await follow_up(client, session)
        params = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}

        await client.result(client.wire.request("session/load", params))

        assert await client.wire.silence() == []
        kinds = [update["sessionUpdate"] for update in client.wire.updates(session)]
        assert kinds[-1] == "available_commands_update"
