from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance import processes
from conformance.client import Client
from conformance.conversation import Conversation
from conformance.editor import CAPABILITIES, Editor
from conformance.judges import findings
from conformance.schema import Schema
from conformance.selftest.build import command
from conformance.wire import Wire

SCHEMA = Schema()
UNSTABLE = Schema(is_unstable=True)
ELICITING = {"elicitation": {"form": {}}}
SWITCHES = {"session": {"configOptions": {"boolean": {}}}}
MCP_SERVER = """
import json, sys
with open(sys.argv[1], "a") as seen:
    for line in sys.stdin:
        message = json.loads(line)
        print(message["method"], file=seen, flush=True)
        if "id" in message:
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {}}), flush=True)
"""


def problems(wire: Wire, schema: Schema) -> list[str]:
    """What is wrong with what the agent sent, by the schema."""
    found = [f"noise: {line!r}" for line in wire.noise]
    asked = {
        json.dumps(entry.message["id"]): entry.message["method"]
        for entry in wire.trace
        if entry.direction == "sent" and entry.message and "id" in entry.message
        if isinstance(entry.message.get("method"), str)
    }
    for message in wire.received:
        if message.get("jsonrpc") != "2.0":
            found.append(f"no JSON-RPC 2.0: {message}")
        if "method" in message and not message["method"].startswith("$/"):
            params = message["params"]
            name = schema.params_name("client", message["method"])
            assert name is not None, message
            found += schema.problems(name, params) + schema.strangers(name, params)
        elif "result" in message:
            name = schema.result_name("agent", asked[json.dumps(message["id"])])
            result = message["result"]
            found += schema.problems(name, result) + schema.strangers(name, result)
        elif "error" in message:
            found += schema.problems("Error", message["error"])
    return found


@asynccontextmanager
async def started(
    folder: Path,
    *flags: str,
    schema: Schema = SCHEMA,
    excused: frozenset[str] = frozenset(),
    **variables: str,
) -> AsyncIterator[Wire]:
    """The sound agent with its state in `folder`; at the end all it said must be valid."""
    env = {"PATH": os.environ["PATH"], "ACP_SELFTEST_STATE": str(folder / "state"), **variables}
    async with Wire.spawn(command(None, *flags), env=env, cwd=folder) as wire:
        yield wire
        assert problems(wire, schema) == []
        if schema is SCHEMA:
            broken = [each for each in findings(Conversation(wire.trace)) if each.wrong]
            assert [each for each in broken if each.rule not in excused] == []
        assert wire.stderr == ""


@asynccontextmanager
async def opened(
    folder: Path, capabilities: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Wire, Client, str]]:
    """The agent with one session in `folder`."""
    async with started(folder, **options) as wire:
        client = Client(wire, permission="allow")
        await client.initialize(capabilities)
        yield wire, client, await client.new_session(folder)


async def refusal(wire: Wire, method: str, params: object) -> int:
    response = await wire.response(wire.request(method, params))
    code: int = response["error"]["code"]
    return code


async def first_update(wire: Wire, session: str, kind: str, status: str | None = None) -> Any:
    def fits(message: dict[str, Any]) -> bool:
        if message.get("method") != "session/update":
            return False
        update = message["params"]["update"]
        return (
            message["params"]["sessionId"] == session
            and update["sessionUpdate"] == kind
            and (status is None or update.get("status") == status)
        )

    return (await wire.receive(fits))["params"]["update"]


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what nothing tells of."""
    with anyio.fail_after(10):
        while not is_so():  # noqa: ASYNC110
            await anyio.sleep(0.01)


def statuses(wire: Wire, session: str) -> list[str]:
    return [
        update["status"]
        for update in wire.updates(session)
        if update["sessionUpdate"].startswith("tool_call") and "status" in update
    ]


def replayed(wire: Wire, session: str, kind: str) -> str:
    return "".join(
        update["content"]["text"]
        for update in wire.updates(session)
        if update["sessionUpdate"] == kind
    )


# --- framing and errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"jsonrpc":', -32700),
        (b"\xff\xfe", -32700),
        (
            b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":NaN}}',
            -32700,
        ),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"n":1e999}}', -32700),
        (b"[" * 100_000, -32700),
        (b"null", -32600),
        (b"[]", -32600),
        (b'[{"jsonrpc":"2.0","id":1,"method":"initialize"}]', -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"initialize"}', -32600),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"initialize"}', -32600),
    ],
)
async def test_a_line_that_is_no_message_gets_an_error_without_id(tmp_path, line, code):
    async with started(tmp_path) as wire:
        wire.send_bytes(line + b"\n")

        response = await wire.receive(lambda message: "error" in message)

        assert (response["id"], response["error"]["code"]) == (None, code)
        assert (await wire.response(wire.request("initialize", {"protocolVersion": 1})))["result"]


async def test_ids_come_back_by_value_and_type(tmp_path):
    async with started(tmp_path) as wire:
        ids = [0, -1, 2**53 + 1, 10**30, "", "0", "ü", "x" * 1000, None]
        for each in ids:
            wire.send({"jsonrpc": "2.0", "id": each, "method": "nothing/here"})
        await wire.response(wire.request("initialize", {"protocolVersion": 1}))

        assert [len(wire.responses(each)) for each in ids] == [1] * len(ids)


async def test_odd_but_legal_bytes_are_understood(tmp_path):
    def initialize(key: str) -> bytes:
        params = {"protocolVersion": 1}
        message = {"jsonrpc": "2.0", "id": key, "method": "initialize", "params": params}
        return json.dumps(message, ensure_ascii=False).encode()

    second = initialize("ü")
    middle = second.index("ü".encode()) + 1
    async with Wire.spawn(command(), env={"ACP_SELFTEST_STATE": str(tmp_path / "state")}) as wire:
        first = b"\xef\xbb\xbf\r\n  \n" + initialize("first") + b"\r\n"
        wire.send_bytes(first + second[:middle])
        assert (await wire.response("first"))["result"]  # so the half of the character was read
        wire.send_bytes(second[middle:] + b"\n")

        assert (await wire.response("ü"))["result"]["protocolVersion"] == 1
        assert len(wire.received) == 2


async def test_requests_that_make_no_sense_get_the_right_codes(tmp_path):
    place = {"cwd": str(tmp_path), "mcpServers": []}
    async with started(tmp_path) as wire:
        assert await refusal(wire, "session/new", place) == -32600
        for version in ("1", 65536, -1, None, 1.0, True):
            assert await refusal(wire, "initialize", {"protocolVersion": version}) == -32602
        client = Client(wire)
        await client.initialize()
        session = await client.new_session(tmp_path)

        def prompt(*blocks: object) -> dict[str, object]:
            return {"sessionId": session, "prompt": list(blocks)}

        wrong: list[tuple[str, object]] = [
            ("session/new", {"cwd": "relative", "mcpServers": []}),
            ("session/new", {"cwd": str(tmp_path)}),
            ("session/new", [1]),
            ("session/new", {**place, "additionalDirectories": ["x"]}),
            ("session/new", {**place, "mcpServers": [{"name": "x"}]}),
            ("session/new", {**place, "mcpServers": [{"type": "http", "name": "x", "url": "y"}]}),
            ("session/load", {"sessionId": session, "cwd": "/", "mcpServers": []}),
            ("session/prompt", prompt()),
            ("session/prompt", prompt({"type": "text"})),
            ("session/prompt", prompt({"type": "zzz"})),
            ("session/prompt", prompt({"type": "audio", "data": "", "mimeType": "audio/wav"})),
            ("session/prompt", {"prompt": []}),
            ("session/set_mode", {"sessionId": session, "modeId": "nothing"}),
            ("session/set_config_option", {"sessionId": session, "configId": "x", "value": "y"}),
            ("session/set_config_option", {"sessionId": session, "configId": "mode", "value": "y"}),
            ("session/list", {"cursor": "bogus"}),
            ("session/list", {"cwd": "x"}),
            ("authenticate", {"methodId": "x"}),
        ]
        for method, params in wrong:
            assert await refusal(wire, method, params) == -32602, (method, params)
        for method in ("nothing/here", "_vendor/x", "session/fork", "session/cancel"):
            assert await refusal(wire, method, {"sessionId": session}) == -32601
        for stranger in ("nobody", "../state/x", f"../state/{session}"):
            gone = {"sessionId": stranger, **place}
            for method in ("session/load", "session/resume", "session/close"):
                assert await refusal(wire, method, gone) == -32002
        assert await refusal(wire, "initialize", {"protocolVersion": 1}) == -32600


async def test_notifications_and_stray_responses_are_never_answered(tmp_path):
    async with opened(tmp_path) as (wire, _, session):
        n_before = len(wire.received)
        for method in ("foo", "_foo", "$/foo", "session/cancel", "$/cancel_request"):
            for params in (
                {"sessionId": session},
                {"requestId": 99},
                {"requestId": True},
                [],
                None,
            ):
                wire.notify(method, params)
        wire.send({"jsonrpc": "2.0", "id": 1, "result": {}})
        wire.send({"jsonrpc": "2.0", "id": "x", "error": {"code": 1, "message": ""}})

        said = await wire.silence()

        assert [each.get("id") for each in said if "method" not in each] == []
        assert all("method" in each or "error" in each for each in wire.received[n_before:])


# --- the handshake ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 2, 65535])
async def test_every_version_is_answered_with_the_one_it_speaks(tmp_path, version):
    async with started(tmp_path) as wire:
        capabilities = {"fs": "yes", "terminal": {}, "future": {"x": 1}, "session": None}
        params = {"protocolVersion": version, "clientCapabilities": capabilities}

        result = (await wire.response(wire.request("initialize", params)))["result"]

        assert result["protocolVersion"] == 1
        assert result["agentInfo"]["name"]


async def test_a_login_is_asked_for_when_told_so(tmp_path):
    place = {"cwd": str(tmp_path), "mcpServers": []}
    async with started(tmp_path, "--auth") as wire:
        client = Client(wire)
        methods = (await client.initialize())["authMethods"]
        assert await refusal(wire, "session/new", place) == -32000

        assert (
            await client.result(wire.request("authenticate", {"methodId": methods[0]["id"]})) == {}
        )
        await client.new_session(tmp_path)
        assert await client.result(wire.request("logout", {})) == {}
        assert await refusal(wire, "session/new", place) == -32000


# --- sessions -----------------------------------------------------------------------------------


async def test_what_was_said_outlives_kill_9_and_comes_again_before_the_answer(tmp_path):
    async with opened(tmp_path) as (wire, client, session):
        await client.stop_reason(client.prompt(session, "write a.txt: x then say Done"))
        client.prompt(session, "run sleep 60")
        await first_update(wire, session, "tool_call_update", "in_progress")
        await first_update(wire, session, "tool_call_update", "in_progress")
        wire.kill()
        await wire.exited()
    with (tmp_path / "state" / f"{session}.jsonl").open("a") as log:
        log.write('spoilt\n{"torn')
    (tmp_path / "state" / "0.jsonl").write_text("spoilt\n")

    place = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
    async with started(tmp_path) as wire:
        client = Client(wire)
        await client.initialize()
        await client.result(wire.request("session/load", place))

        response = next(i for i, each in enumerate(wire.received) if each.get("id") == 2)
        replay = wire.received[:response]
        assert replayed(wire, session, "user_message_chunk") == (
            "write a.txt: x then say Donerun sleep 60"
        )
        kinds = [update["sessionUpdate"].split("_")[0] for update in wire.updates(session)]
        assert [kind for kind, _ in itertools.groupby(kinds)] == [
            *("user", "tool", "agent", "user", "tool", "available")
        ][: 5 + ("available" in kinds)]
        assert replayed(wire, session, "agent_message_chunk").endswith("Done")
        assert statuses(wire, session) == [
            *("pending", "in_progress", "completed"),
            *("pending", "in_progress", "failed"),
        ]
        await wire.silence()
        updates = [each for each in wire.received if each.get("method") == "session/update"]
        later = [
            each["params"]["update"]["sessionUpdate"] for each in updates if each not in replay
        ]
        assert later == ["available_commands_update"]
        listed = (await client.result(wire.request("session/list", {})))["sessions"]
        assert [each["sessionId"] for each in listed] == [session]
        assert await client.stop_reason(client.prompt(session, "hello")) == "end_turn"

    async with started(tmp_path) as wire:
        client = Client(wire)
        await client.initialize()
        await client.result(wire.request("session/resume", place))
        await wire.silence()
        kinds = [update["sessionUpdate"] for update in wire.updates(session)]
        assert kinds == ["available_commands_update"]


async def test_the_list_has_pages_a_filter_and_no_deleted_sessions(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    async with opened(tmp_path) as (wire, client, first):
        ids = {first} | {await client.new_session(tmp_path) for _ in range(41)}
        mine = await client.new_session(other)
        assert len(ids) == 42

        pages: list[list[str]] = []
        params: dict[str, str] = {"cwd": str(tmp_path)}
        while True:
            result = await client.result(wire.request("session/list", params))
            pages.append([each["sessionId"] for each in result["sessions"]])
            if "nextCursor" not in result:
                break
            params = {**params, "cursor": result["nextCursor"]}
        assert [len(page) for page in pages] == [20, 20, 2]
        assert {each for page in pages for each in page} == ids

        for _ in range(2):
            assert await client.result(wire.request("session/delete", {"sessionId": mine})) == {}
        filtered = await client.result(wire.request("session/list", {"cwd": str(other)}))
        assert filtered["sessions"] == []
        assert (
            await refusal(
                wire,
                "session/prompt",
                {"sessionId": mine, "prompt": [{"type": "text", "text": "x"}]},
            )
            == -32002
        )


async def test_closing_cancels_what_runs_and_the_session_can_be_loaded_again(tmp_path):
    async with opened(tmp_path) as (wire, client, session):
        running, queued = client.prompt(session, "stall"), client.prompt(session, "hello")

        await client.result(wire.request("session/close", {"sessionId": session}))

        assert await client.stop_reason(running) == await client.stop_reason(queued) == "cancelled"
        place = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
        result = await client.result(wire.request("session/load", place))
        assert result["modes"]["currentModeId"] == "ask"
        assert await client.stop_reason(client.prompt(session, "hello")) == "end_turn"


async def test_a_fork_has_the_history_and_a_life_of_its_own(tmp_path):
    async with started(tmp_path, "--fork", schema=UNSTABLE) as wire:
        client = Client(wire)
        result = await client.initialize()
        assert result["agentCapabilities"]["sessionCapabilities"]["fork"] == {}
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say one"))

        params = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
        fork = (await client.result(wire.request("session/fork", params)))["sessionId"]
        await client.stop_reason(client.prompt(fork, "say two"))
        await client.result(wire.request("session/load", {**params, "sessionId": fork}))

        assert replayed(wire, fork, "user_message_chunk") == "say onesay two"


async def test_two_sessions_run_at_once_and_are_cancelled_one_by_one(tmp_path):
    async with opened(tmp_path) as (wire, client, first):
        stalled = client.prompt(first, "stall")
        second = await client.new_session(tmp_path)
        counting = client.prompt(second, "count 5 slowly")
        await first_update(wire, second, "agent_message_chunk")

        client.cancel(first)

        assert await client.stop_reason(stalled) == "cancelled"
        assert await client.stop_reason(counting) == "end_turn"
        assert client.text(second) == "1 2 3 4 5 "


# --- modes and options --------------------------------------------------------------------------


async def test_modes_and_options_follow_each_other_and_are_kept(tmp_path):
    async with opened(tmp_path, SWITCHES) as (wire, client, session):
        at = {"sessionId": session}
        await client.result(wire.request("session/set_mode", {**at, "modeId": "auto"}))
        shown = (await first_update(wire, session, "config_option_update"))["configOptions"]
        assert shown[0]["currentValue"] == "auto"

        for changes in (
            {"configId": "mode", "value": "read"},
            {"configId": "model", "value": "selftest-huge"},
            {"configId": "aloud", "type": "boolean", "value": True},
        ):
            params = {**at, **changes}
            result = await client.result(wire.request("session/set_config_option", params))
        assert [each["currentValue"] for each in result["configOptions"]] == [
            *("read", "selftest-huge", True)
        ]
        mode = await first_update(wire, session, "current_mode_update")
        assert mode["currentModeId"] == "read"
        await client.result(wire.request("session/close", at))

        place = {"cwd": str(tmp_path), "mcpServers": []}
        result = await client.result(wire.request("session/resume", {**at, **place}))
        assert result["modes"]["currentModeId"] == "read"
        assert [each["currentValue"] for each in result["configOptions"]] == [
            *("read", "selftest-huge", True)
        ]


async def test_a_client_that_takes_no_switches_is_shown_none(tmp_path):
    async with opened(tmp_path) as (wire, _, session):
        params = {"sessionId": session, "configId": "aloud", "type": "boolean", "value": True}
        assert await refusal(wire, "session/set_config_option", params) == -32602


# --- turns and tools ----------------------------------------------------------------------------


NOTHING: dict[str, Any] = {
    "fs": {"readTextFile": "yes", "writeTextFile": 1},
    "terminal": {},
    "elicitation": {},
}


@pytest.mark.parametrize(
    "capabilities", [{}, NOTHING, CAPABILITIES, {**CAPABILITIES, **ELICITING, **SWITCHES}]
)
async def test_each_word_does_what_it_says_with_and_without_an_editor(tmp_path, capabilities):
    async with (
        opened(tmp_path, capabilities) as (wire, client, session),
        Editor.beside(wire) as editor,
    ):
        wire.answer["elicitation/create"] = lambda _: {
            "action": "accept",
            "content": {"answer": "B"},
        }
        for text, reason, said in (
            ("hello", "end_turn", "Hello!"),
            ("count 3", "end_turn", "1 2 3"),
            ("anything else", "end_turn", "You said: anything else"),
            ("write a.txt: one\\ntwo", "end_turn", "wrote a.txt"),
            ("edit a.txt: two => three", "end_turn", "wrote a.txt"),
            ("read a.txt then say Read.", "end_turn", "one\nthree"),
            ("run cat a.txt; exit 3", "end_turn", "exit code 3"),
            ("list", "end_turn", "a.txt"),
            ("search three", "end_turn", "a.txt:2: three"),
            ("plan A; B", "end_turn", "the plan is written"),
            ("delegate run echo deep", "end_turn", "deep"),
            ("ask Which?: A | B", "end_turn", "B" if capabilities.get("elicitation") else "cannot"),
            ("/count 2", "end_turn", "1 2"),
            ("read ../secret", "end_turn", "outside"),
            (f"read ../{tmp_path.name}x/secret", "end_turn", "outside"),
            ("edit this", "end_turn", "not clear"),
            ("think so", "end_turn", ""),
            ("refuse", "refusal", ""),
        ):
            n_before = len(client.text(session))
            assert await client.stop_reason(client.prompt(session, text)) == reason
            assert said in client.text(session)[n_before:], text

        assert (tmp_path / "a.txt").read_text() == "one\nthree"
        assert not editor.terminals
        has_editor = capabilities.get("terminal") is True
        assert {each.partition("/")[0] for each in editor.asked} == (
            {"fs", "terminal"} if has_editor else set()
        )
        if not has_editor:
            command = "run (setsid sleep 60 &); sleep 60 & echo ok"
            assert await client.stop_reason(client.prompt(session, command)) == "end_turn"
            assert wire.descendants() == set()
        plans = [each for each in wire.updates(session) if each["sessionUpdate"] == "plan"]
        assert [[entry["status"] for entry in plan["entries"]] for plan in plans] == [
            ["in_progress", "pending"],
            ["completed", "in_progress"],
            ["completed", "completed"],
        ]


async def test_content_that_was_offered_is_taken_and_comes_again(tmp_path):
    blocks = [
        {"type": "text", "text": "hello", "future": 1},
        {"type": "image", "data": "", "mimeType": "image/png", "annotations": "junk"},
        {"type": "resource_link", "uri": "file:///x", "name": "x"},
        {"type": "resource", "resource": {"uri": "file:///y", "text": "é😀"}},
    ]
    async with opened(tmp_path) as (wire, client, session):
        prompt = {"sessionId": session, "prompt": blocks}
        assert await client.stop_reason(wire.request("session/prompt", prompt)) == "end_turn"
        place = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
        await client.result(wire.request("session/load", place))

        kinds = [
            update["content"]["type"]
            for update in wire.updates(session)
            if update["sessionUpdate"] == "user_message_chunk"
        ]
        assert kinds == ["text", "image", "resource_link", "resource"]


@pytest.mark.parametrize(
    "answer",
    [
        {"outcome": {"outcome": "selected", "optionId": "reject"}},
        {"outcome": {"outcome": "selected", "optionId": "no such option"}},
        {"outcome": {"outcome": "selected"}},
        {"outcome": "selected"},
        {},
    ],
)
async def test_nothing_but_an_allowing_option_is_a_permission(tmp_path, answer):
    async with opened(tmp_path) as (wire, client, session):
        client.permission = lambda _: answer

        assert await client.stop_reason(client.prompt(session, "write a.txt: x")) == "end_turn"

        assert not (tmp_path / "a.txt").exists()
        assert statuses(wire, session) == ["pending", "failed"]


async def test_an_error_is_no_permission_and_the_mode_that_refuses_changes_asks_nobody(tmp_path):
    async with opened(tmp_path) as (wire, client, session):
        ask = wire.answer.pop("session/request_permission")  # such a request is an error now
        assert await client.stop_reason(client.prompt(session, "write a.txt: x")) == "end_turn"
        wire.answer["session/request_permission"] = ask
        params = {"sessionId": session, "modeId": "read"}
        await client.result(wire.request("session/set_mode", params))
        assert await client.stop_reason(client.prompt(session, "write a.txt: x")) == "end_turn"
        assert not (tmp_path / "a.txt").exists()
        params = {"sessionId": session, "modeId": "auto"}
        await client.result(wire.request("session/set_mode", params))
        assert await client.stop_reason(client.prompt(session, "write a.txt: x")) == "end_turn"

        assert (tmp_path / "a.txt").exists()
        asked = [each for each in wire.received if each.get("method", "").startswith("session/req")]
        assert len(asked) == 1


async def test_a_decision_for_good_is_not_asked_for_again(tmp_path):
    def answers(option: str) -> Any:
        return lambda _: {"outcome": {"outcome": "selected", "optionId": option}}

    async with opened(tmp_path) as (_, client, session):
        for text, option in (("write a.txt: x", "always"), ("run touch b.txt", "never")):
            client.permission = answers(option)
            await client.stop_reason(client.prompt(session, text))
            client.permission = "cancelled"
            assert await client.stop_reason(client.prompt(session, text)) == "end_turn"

        assert (tmp_path / "a.txt").exists()
        assert not (tmp_path / "b.txt").exists()


async def test_a_permission_answered_as_cancelled_ends_the_turn_so(tmp_path):
    async with opened(tmp_path) as (wire, client, session):
        client.permission = "cancelled"

        assert await client.stop_reason(client.prompt(session, "run touch b.txt")) == "cancelled"

        assert statuses(wire, session) == ["pending", "failed"]


async def test_a_client_that_fails_or_answers_null_fails_the_tool_alone(tmp_path):
    async with opened(tmp_path, CAPABILITIES) as (wire, client, session):
        answered = iter(["fs/read_text_file", "fs/write_text_file", "terminal/create"])
        for method in answered:

            def null(params: dict[str, Any], method: str = method) -> None:
                request_id = next(
                    message["id"]
                    for message in reversed(wire.received)
                    if message.get("method") == method
                )
                wire.send({"jsonrpc": "2.0", "id": request_id, "result": None})

            wire.answer[method] = null
        assert await client.stop_reason(client.prompt(session, "read a.txt")) == "end_turn"
        assert await client.stop_reason(client.prompt(session, "run echo x")) == "end_turn"
        assert statuses(wire, session) == ["pending", "in_progress", "failed"] * 2
        assert await client.stop_reason(client.prompt(session, "write a.txt: x")) == "end_turn"
        assert statuses(wire, session)[6:] == ["pending", "in_progress", "completed"]
        del wire.answer["fs/read_text_file"]
        assert await client.stop_reason(client.prompt(session, "read a.txt")) == "end_turn"
        assert statuses(wire, session)[9:] == ["pending", "in_progress", "failed"]


async def test_a_secret_of_the_environment_reaches_no_command(tmp_path):
    async with opened(tmp_path, OPENAI_API_KEY="canary-1") as (wire, client, session):
        await client.stop_reason(client.prompt(session, "run env; echo end"))

        assert "end" in client.text(session)
        assert "canary" not in wire.transcript()


async def test_mcp_servers_are_greeted_and_end_with_their_session(tmp_path):
    (tmp_path / "server.py").write_text(MCP_SERVER)
    python = command()[0]
    servers = [
        {"name": "ok", "command": python, "args": ["server.py", "seen"], "env": []},
        {"name": "missing", "command": "/no/such/program", "args": [], "env": []},
    ]
    async with started(tmp_path) as wire:
        client = Client(wire)
        await client.initialize()
        params = {"cwd": str(tmp_path), "mcpServers": servers}
        session = (await client.result(wire.request("session/new", params)))["sessionId"]
        assert (tmp_path / "seen").read_text().split() == [
            *("initialize", "notifications/initialized", "tools/list")
        ]
        assert len(wire.descendants()) == 1

        await client.result(wire.request("session/close", {"sessionId": session}))
        assert wire.descendants() == set()


# --- cancellation -------------------------------------------------------------------------------


async def settled(wire: Wire, session: str, request: int) -> None:
    """The prompt was answered once as cancelled, nothing is left, and the next one works."""
    client = Client(wire, permission="allow")
    assert await client.stop_reason(request) == "cancelled"
    assert [each for each in await wire.silence() if each.get("method") == "session/update"] == []
    assert len(wire.responses(request)) == 1
    assert wire.descendants() == set()
    open_calls = {"pending": 1, "in_progress": 0, "failed": -1, "completed": -1}
    assert sum(open_calls[status] for status in statuses(wire, session)) == 0
    n_before = len(client.text(session))
    assert await client.stop_reason(client.prompt(session, "count 4 slowly")) == "end_turn"
    assert client.text(session)[n_before:] == "1 2 3 4 "


@pytest.mark.parametrize("n_cancels", [1, 3])
@pytest.mark.parametrize("text", ["stall", "count 100 slowly", "run sleep 60", "delegate stall"])
async def test_a_cancel_settles_a_turn_at_whatever_it_is(tmp_path, text, n_cancels):
    async with opened(tmp_path) as (wire, client, session):
        request = client.prompt(session, text)
        await first_update(wire, session, "session_info_update")
        if text.startswith("count"):
            await first_update(wire, session, "agent_message_chunk")
        elif text != "stall":
            await first_update(wire, session, "tool_call_update", "in_progress")

        for _ in range(n_cancels):
            client.cancel(session)

        await settled(wire, session, request)


async def test_a_cancel_with_the_prompt_in_one_write_settles_it(tmp_path):
    async with opened(tmp_path) as (wire, client, session):
        for _ in range(10):
            request = client.prompt(session, "run sleep 60")
            client.cancel(session)

            await settled(wire, session, request)


async def test_a_cancel_settles_all_prompts_that_wait_and_none_that_comes_after(tmp_path):
    async with opened(tmp_path) as (_, client, session):
        requests = [client.prompt(session, "stall"), client.prompt(session, "say no")]
        client.cancel(session)
        later = client.prompt(session, "say yes")

        assert [await client.stop_reason(each) for each in requests] == ["cancelled"] * 2
        assert await client.stop_reason(later) == "end_turn"
        assert client.text(session) == "yes"


@pytest.mark.parametrize("permission", ["hold", "never"])
async def test_a_cancel_settles_a_turn_that_asks(tmp_path, permission):
    async with opened(tmp_path) as (wire, client, session):
        client.permission = permission
        request = client.prompt(session, "run touch b.txt")
        question = await wire.receive(
            lambda message: message.get("method") == "session/request_permission"
        )

        client.cancel(session)

        await settled(wire, session, request)
        wire.reply(question["id"], {"outcome": {"outcome": "selected", "optionId": "allow"}})
        await wire.silence()
        assert not (tmp_path / "b.txt").exists()


async def test_what_left_the_process_group_is_killed_as_well(tmp_path):
    async with opened(tmp_path) as (wire, client, session):
        request = client.prompt(session, "run (setsid sleep 60 &) ; setsid sleep 60 & sleep 60")
        await first_update(wire, session, "tool_call_update", "in_progress")
        await until(lambda: len(wire.descendants()) >= 4)

        client.cancel(session)

        await settled(wire, session, request)


async def test_a_terminal_of_the_client_is_killed_and_released_on_cancel(tmp_path):
    async with (
        opened(tmp_path, CAPABILITIES) as (wire, client, session),
        Editor.beside(wire) as editor,
    ):
        request = client.prompt(session, "run sleep 60")
        await wire.receive(lambda message: message.get("method") == "terminal/wait_for_exit")

        client.cancel(session)

        assert await client.stop_reason(request) == "cancelled"
        assert editor.asked[-2:] == ["terminal/kill", "terminal/release"]
        assert not editor.terminals


async def test_a_terminal_that_is_made_late_is_released_late(tmp_path):
    late = frozenset({"TER-01"})  # nobody can release in its turn what is made after it
    async with opened(tmp_path, CAPABILITIES, excused=late) as (wire, client, session):
        for method in ("terminal/create", "terminal/kill", "terminal/release"):
            wire.answer[method] = lambda _: None
        request = client.prompt(session, "run sleep 60")
        made = await wire.receive(lambda message: message.get("method") == "terminal/create")
        client.cancel(session)
        assert await client.stop_reason(request) == "cancelled"

        wire.reply(made["id"], {"terminalId": "late"})

        released = await wire.receive(lambda each: each.get("method") == "terminal/release")
        assert released["params"]["terminalId"] == "late"


@pytest.mark.parametrize("text", ["stall", "run sleep 60"])
async def test_a_cancel_request_for_a_prompt_settles_that_one_alone(tmp_path, text):
    async with opened(tmp_path) as (wire, client, session):
        request, queued = client.prompt(session, text), client.prompt(session, "hello")
        for stranger in (str(request), 999, None):
            wire.notify("$/cancel_request", {"requestId": stranger})
        await wire.silence()
        assert not wire.responses(request)

        wire.notify("$/cancel_request", {"requestId": request})

        assert await client.stop_reason(request) == "cancelled"
        assert await client.stop_reason(queued) == "end_turn"


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "stall", "run setsid sleep 60 & sleep 60", "ask"])
@pytest.mark.parametrize("end", ["eof", "term"])
async def test_it_ends_at_once_with_all_that_it_started(tmp_path, text, end):
    async with opened(tmp_path) as (wire, client, session):
        request = None
        if text == "ask":
            client.permission = "never"
            request = client.prompt(session, "run sleep 60")
            await first_update(wire, session, "tool_call", "pending")
        elif text is not None:
            request = client.prompt(session, text)
            await first_update(wire, session, "session_info_update")
            if text != "stall":
                await first_update(wire, session, "tool_call_update", "in_progress")
        family = wire.descendants()

        if end == "eof":
            await wire.close_stdin()
        else:
            wire.terminate()

        assert await wire.exited() == 0
        assert processes.living_family(family, "NO=marker") == set()
        if request is not None:
            assert len(wire.responses(request)) == 1


async def test_it_starts_without_home_or_anything_else(tmp_path):
    async with Wire.spawn(command(), env={"ACP_SELFTEST_STATE": str(tmp_path / "s")}) as wire:
        assert await Client(wire).initialize()


async def test_a_client_that_does_not_read_loses_nothing_and_can_still_end_it(tmp_path):
    process = await anyio.open_process(
        command(), env={"ACP_SELFTEST_STATE": str(tmp_path / "s")}, cwd=tmp_path
    )
    async with process:
        assert process.stdin is not None
        assert process.stdout is not None

        async def send(request_id: int, method: str, params: object) -> None:
            message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
            await process.stdin.send(json.dumps(message).encode() + b"\n")

        await send(1, "initialize", {"protocolVersion": 1})
        await send(2, "session/new", {"cwd": str(tmp_path), "mcpServers": []})
        received = b""
        with anyio.fail_after(10):
            while b'"id":2' not in received:
                received += await process.stdout.receive()
        session = json.loads(next(x for x in received.split(b"\n") if b'"id":2' in x))["result"]
        prompt = [{"type": "text", "text": "count 3000"}]
        await send(3, "session/prompt", {"sessionId": session["sessionId"], "prompt": prompt})
        state = tmp_path / "s" / f"{session['sessionId']}.jsonl"
        await until(lambda: b'"text": "1800 "' in state.read_bytes())
        received = b""
        with anyio.fail_after(20):
            while b'"id":3' not in received:
                received += await process.stdout.receive()
        numbers = [int(found) for found in re.findall(rb'"text":"(\d+) "', received)]
        assert numbers == list(range(1, 3001))

        await send(4, "session/prompt", {"sessionId": session["sessionId"], "prompt": prompt})
        await until(lambda: state.read_bytes().count(b'"text": "1800 "') == 2)
        with anyio.fail_after(10):
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
