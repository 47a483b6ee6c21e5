"""Stop, pressed at every moment there is, on the real command over stdio.

Every test ends in `settle_cancelled` and `follow_up`: one answer, ``cancelled``; nothing said or
running after it; the session works. `served` judges the whole conversation besides.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import transports
from serve_rig import (
    ask_for_permission,
    cancel_message,
    chunk_of,
    follow_up,
    prompt_message,
    send_together,
    served,
    settle_cancelled,
    texts,
    tool_calls,
    tool_update,
    write_script,
)

from conformance.client import Client
from conformance.providers.server import (
    Gate,
    ProviderDouble,
    Reply,
    Stall,
    answer,
    provider_double,
    status,
    text,
    tool_call,
)
from conformance.wire import Message

pytestmark = pytest.mark.transports
ENDLESS = ("count 1000000", "run sleep 300", "write never.txt: x", "stall")
LATE: tuple[Message, ...] = (
    {"result": {"outcome": {"outcome": "selected", "optionId": "allow-once"}}},
    {"result": {"outcome": {"outcome": "selected", "optionId": "allow-always"}}},
    {"error": {"code": -32800, "message": "cancelled"}},
    {"error": {"code": -32603, "message": "broken"}},
    {"result": {"outcome": {"outcome": "cancelled"}}},
)


def write_call(name: str) -> Message:
    return {"tool": "write", "arguments": {"path": name, "content": "x"}}


# --- prompt and cancel at once --------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("B006", "R42", "ACP-094", "ACP-100")
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh sessions", "one session"])
async def test_a_prompt_and_its_cancel_in_one_write_are_cancelled_every_time(
    tmp_path: Path, is_fresh: bool
) -> None:
    # On the network two messages may come apart, and what ends by itself may then have ended.
    is_one_write = transports.current == "stdio"
    kinds = ("say never", *ENDLESS) if is_one_write else ENDLESS
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        for number in range(25):
            if is_fresh:
                session = await client.new_session(tmp_path)
            prompt = prompt_message(f"p{number}", session, kinds[number % len(kinds)])
            send_together(client, prompt, cancel_message(session))

            await settle_cancelled(client, session, f"p{number}")

            calls = tool_calls(client, session)
            assert {call["status"] for call in calls.values()} <= {"failed"}
            assert not (is_one_write and calls)
        assert not (tmp_path / "never.txt").exists()
        await follow_up(client, session)


@pytest.mark.requirement("R46", "ACP-100", "B009", "B010")
async def test_a_prompt_in_the_same_write_behind_a_cancel_is_not_cancelled(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        ids: list[Any] = []
        for number in range(10):
            old, new = client.prompt(session, "count 100000 slowly"), f"new{number}"
            await chunk_of(client, session, "1 ")
            prompt = prompt_message(new, session, "say replacement")
            ids += [old, new]

            send_together(client, cancel_message(session), prompt)

            assert await client.stop_reason(old) == "cancelled"
            assert await client.stop_reason(new) == "end_turn"
            assert texts(client, session, ids)[-3:] == ["1 ", "replacement", ""]


# --- while it streams -----------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("ACP-094", "ACP-096", "ACP-100", "B018")
@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        ("count 100000 slowly", (1, 2, 3, 5, 7)),
        ("count 1000000", (1, 17, 150, 600, 2000)),
    ],
)
async def test_a_stream_stops_at_whichever_chunk_the_cancel_comes(
    tmp_path: Path, prompt: str, chunks: Sequence[int]
) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        for chunk in chunks:
            request_id = client.prompt(session, prompt)
            await chunk_of(client, session, f"{chunk} ")

            client.cancel(session)

            await settle_cancelled(client, session, request_id)
            await follow_up(client, session)


@pytest.mark.requirement("B018", "ACP-081")
async def test_repeated_cancels_are_one(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "count 100000 slowly")
        await chunk_of(client, session, "2 ")

        for _ in range(5):
            client.cancel(session)

        await settle_cancelled(client, session, request_id)
        client.cancel(session)
        await follow_up(client, session)


@pytest.mark.requirement("B011", "ACP-098")
async def test_a_cancel_for_a_session_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "count 8 slowly")
        await chunk_of(client, session, "1 ")

        client.cancel("sess_unknown")
        for params in ({}, {"sessionId": 7}, {"sessionId": None}, None, []):
            client.wire.notify("session/cancel", params)

        assert await client.stop_reason(request_id) == "end_turn"
        assert client.text(session) == "1 2 3 4 5 6 7 8 "


@pytest.mark.requirement("B011", "R60")
async def test_a_cancel_stops_its_own_session_and_no_other(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        sessions = [await client.new_session(tmp_path) for _ in range(3)]
        first, second = (client.prompt(session, "count 10 slowly") for session in sessions[:2])
        for session in sessions[:2]:
            await chunk_of(client, session, "2 ")
        third = prompt_message("third", sessions[2], "count 10 slowly")

        send_together(client, cancel_message(sessions[1]), third)

        await settle_cancelled(client, sessions[1], second)
        for session, request_id in ((sessions[0], first), (sessions[2], "third")):
            assert await client.stop_reason(request_id) == "end_turn"
            assert client.text(session) == "1 2 3 4 5 6 7 8 9 10 "
        await follow_up(client, sessions[1])


# --- with prompts behind it -----------------------------------------------------------------


@pytest.mark.requirement("B072", "R43", "ACP-084")
async def test_a_cancel_at_the_third_of_five_prompts_cancels_the_rest_in_order(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        texts = ("say one", "say two", "count 100000 slowly", "say four", "write five.txt: x")
        ids = [client.prompt(session, text) for text in texts]
        await chunk_of(client, session, "2 ")

        client.cancel(session)

        await settle_cancelled(client, session, ids[-1])
        reasons = [await client.stop_reason(request_id) for request_id in ids]
        assert reasons == ["end_turn", "end_turn", "cancelled", "cancelled", "cancelled"]
        answers = [message["id"] for message in client.wire.received if message.get("id") in ids]
        assert answers == ids
        assert "four" not in client.text(session)
        assert not (tmp_path / "five.txt").exists()
        await follow_up(client, session)


@pytest.mark.requirement("ACP-106", "ACP-111")
async def test_a_queued_prompt_can_be_taken_back_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        running = client.prompt(session, "count 8 slowly")
        queued = client.prompt(session, "write never.txt: x")
        last = client.prompt(session, "say last")
        await chunk_of(client, session, "1 ")

        client.wire.notify("$/cancel_request", {"requestId": queued})

        assert await client.stop_reason(running) == "end_turn"
        assert await client.stop_reason(queued) == "cancelled"
        assert await client.stop_reason(last) == "end_turn"
        assert client.text(session) == "1 2 3 4 5 6 7 8 last"
        assert not (tmp_path / "never.txt").exists()


@pytest.mark.requirement("ACP-106", "ACP-111")
async def test_a_prompt_taken_back_from_behind_another_holds_nothing_up(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        ids = [client.prompt(session, text) for text in ("count 8 slowly", "say two", "say never")]
        await chunk_of(client, session, "1 ")

        client.wire.notify("$/cancel_request", {"requestId": ids[2]})

        reasons = [await client.stop_reason(prompt) for prompt in ids]
        assert reasons == ["end_turn", "end_turn", "cancelled"]
        assert client.text(session) == "1 2 3 4 5 6 7 8 two"
        await follow_up(client, session)


@pytest.mark.requirement("ACP-106", "ACP-111", "ACP-109", "B025")
async def test_the_running_prompt_can_be_cancelled_by_its_request(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "count 100000 slowly")
        await chunk_of(client, session, "1 ")
        for stranger in (str(request_id), request_id + 1000, None, float(request_id)):
            client.wire.notify("$/cancel_request", {"requestId": stranger})
        client.wire.notify("$/cancel_request", {})
        await chunk_of(client, session, "3 ")

        client.wire.notify("$/cancel_request", {"requestId": request_id})

        await settle_cancelled(client, session, request_id)
        await follow_up(client, session)


# --- while a command runs -------------------------------------------------------------------


@pytest.mark.requirement("R73", "ACP-093", "ACP-099")
@pytest.mark.parametrize(
    "command",
    [
        "echo ready; sleep 300",
        "echo ready; yes | while read l; do sleep 1; done",
        "trap '' TERM; echo ready; while :; do sleep 1; done",
        "setsid sleep 300 & echo ready; sleep 300",
        "(setsid sh -c 'trap \"\" TERM; sleep 300 & exit'); echo ready; sleep 300",
        "sleep 300 & sleep 300 & (sleep 300 &) ; echo ready; wait",
        "yes ready",
    ],
    ids=[
        "sleep",
        "pipeline",
        "ignores TERM",
        "grandchild in a session of its own that holds the pipe",
        "orphan that ignores TERM",
        "background children",
        "flood",
    ],
)
async def test_a_command_and_all_it_started_are_gone_at_the_answer(
    tmp_path: Path, command: str
) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, f"run {command}")
        await tool_update(client, session, "ready")
        assert client.wire.descendants()

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        (call,) = tool_calls(client, session).values()
        assert call["status"] == "failed"
        assert "ready" in call["content"][0]["content"]["text"]
        await follow_up(client, session)


@pytest.mark.requirement("B018", "ACP-099")
async def test_commands_are_cancelled_again_and_again_in_one_session(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        for _ in range(10):
            request_id = client.prompt(session, "run sleep 300")
            await tool_update(client, session, "in_progress")

            client.cancel(session)

            await settle_cancelled(client, session, request_id)
        await follow_up(client, session)


# --- while a person is asked ----------------------------------------------------------------


@pytest.mark.requirement("B035", "ACP-092", "ACP-094", "ACP-110", "QUIRK-01")
@pytest.mark.parametrize("permission", ["never", "hold"])
async def test_an_open_question_ends_with_the_cancel_whether_it_is_answered_or_not(
    tmp_path: Path, permission: Any
) -> None:
    async with served(tmp_path, permission=permission) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "write never.txt: x")
        await ask_for_permission(client, session)

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        assert not (tmp_path / "never.txt").exists()
        await follow_up(client, session)


@pytest.mark.requirement("B035", "ACP-092")
@pytest.mark.parametrize("is_at_once", [True, False], ids=["in one write", "after the answer"])
async def test_an_answer_behind_the_cancel_is_too_late(tmp_path: Path, is_at_once: bool) -> None:
    async with served(tmp_path, permission="never") as client:
        session = await client.new_session(tmp_path)
        for late in LATE:
            request_id = client.prompt(session, "write never.txt: x")
            question = await ask_for_permission(client, session)
            reply = {"jsonrpc": "2.0", "id": question["id"], **late}

            if is_at_once:
                send_together(client, cancel_message(session), reply)
                await settle_cancelled(client, session, request_id)
            else:
                client.cancel(session)
                await settle_cancelled(client, session, request_id)
                client.wire.send(reply)
                assert await client.wire.silence() == []
            assert not (tmp_path / "never.txt").exists()


@pytest.mark.requirement("ACP-094")
@pytest.mark.parametrize(
    "dismissal",
    [
        {"result": {"outcome": {"outcome": "cancelled"}}},
        {"error": {"code": -32800, "message": "cancelled"}},
    ],
    ids=["cancelled", "request cancelled"],
)
async def test_a_dismissed_question_cancels_the_turn_and_no_later_call_starts(
    tmp_path: Path, dismissal: Message
) -> None:
    script = write_script(tmp_path, [write_call("a.txt"), write_call("b.txt")], [{"text": "ok"}])
    async with served(tmp_path, script, permission="never") as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "go")
        question = await ask_for_permission(client, session)

        client.wire.send({"jsonrpc": "2.0", "id": question["id"], **dismissal})

        await settle_cancelled(client, session, request_id)
        calls = tool_calls(client, session).values()
        assert [call["status"] for call in calls] == ["failed", "failed"]
        assert not (tmp_path / "a.txt").exists()
        assert not (tmp_path / "b.txt").exists()
        await follow_up(client, session)


@pytest.mark.requirement("B039")
async def test_a_question_that_fails_is_a_no_and_the_turn_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path, permission="never") as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "write never.txt: x")
        question = await ask_for_permission(client, session)

        error = {"code": -32603, "message": "no window"}
        client.wire.send({"jsonrpc": "2.0", "id": question["id"], "error": error})

        assert await client.stop_reason(request_id) == "end_turn"
        asked = [m for m in client.wire.received if m.get("method") == question["method"]]
        assert asked == [question]  # and nobody is asked again
        assert not (tmp_path / "never.txt").exists()
        await follow_up(client, session)


@pytest.mark.requirement("B037", "B038", "ACP-099", "ACP-110")
async def test_thirty_calls_of_one_step_all_end_with_the_cancel(tmp_path: Path) -> None:
    names = [f"{number}.txt" for number in range(30)]
    script = write_script(tmp_path, [write_call(name) for name in names], [{"text": "ok"}])
    async with served(tmp_path, script, permission="hold") as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, "go")
        await ask_for_permission(client, session)

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        calls = tool_calls(client, session).values()
        assert [call["status"] for call in calls] == ["failed"] * 30
        assert not any((tmp_path / name).exists() for name in names)
        await follow_up(client, session)


# --- while the model keeps us waiting -------------------------------------------------------


@pytest.mark.requirement("B029", "R34")
@pytest.mark.parametrize("prompt", ["stall", "say hm then stall", "think hm then stall"])
async def test_a_model_that_never_sends_another_byte_is_left(tmp_path: Path, prompt: str) -> None:
    async with served(tmp_path) as client:
        session = await client.new_session(tmp_path)
        request_id = client.prompt(session, prompt)
        if "hm" in prompt:
            await chunk_of(client, session, "hm", is_thought="think" in prompt)
        else:
            await client.wire.silence()

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        await follow_up(client, session)


@asynccontextmanager
async def served_by(
    folder: Path, *script: Reply, permission: Any = "allow"
) -> AsyncIterator[tuple[Client, ProviderDouble, str]]:
    """A session whose model is the double. Every request it got was one that providers take."""
    with anyio.fail_after(30):
        async with provider_double(script) as double:
            env = {"OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": double.url}
            async with served(
                folder, "--model=openai:any", env=env, permission=permission
            ) as client:
                yield client, double, await client.new_session(folder)
            assert double.violations == []
            assert len(double.requests) == len(script)


async def next_request(client: Client, double: ProviderDouble, session: str) -> list[Message]:
    """Prompt once more; return the messages that the model is sent."""
    before = len(client.text(session))
    assert await client.stop_reason(client.prompt(session, "go on")) == "end_turn"
    assert client.text(session)[before:] == "ok"
    return list(double.requests[-1]["messages"])


@pytest.mark.requirement("B029", "ACP-093")
async def test_a_model_that_sends_no_headers_is_hung_up_on(tmp_path: Path) -> None:
    script = (Reply(before=[Stall()]), answer(text("ok")))
    async with served_by(tmp_path, *script) as (client, double, session):
        request_id = client.prompt(session, "first")
        await double.requested(0)

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        await double.disconnected(0)
        messages = await next_request(client, double, session)
        assert [message["role"] for message in messages[1:]] == ["user", "user"]


@pytest.mark.requirement("B029", "ACP-093")
async def test_what_a_model_said_before_the_cancel_is_in_the_next_request(tmp_path: Path) -> None:
    script = (answer(text("one "), text("two "), text("three"), Stall()), answer(text("ok")))
    async with served_by(tmp_path, *script) as (client, double, session):
        request_id = client.prompt(session, "first")
        await chunk_of(client, session, "three")

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        await double.disconnected(0)
        messages = await next_request(client, double, session)
        assert messages[-2]["role"] == "assistant"
        assert messages[-2]["content"].startswith("one two three")


@pytest.mark.requirement("B061", "ACP-099")
async def test_a_tool_call_that_has_half_arrived_is_forgotten(tmp_path: Path) -> None:
    half = tool_call(0, "c1", "write", '{"path": "never.txt", "conte')
    script = (answer(text("I write"), half, text(" it"), Stall()), answer(text("ok")))
    async with served_by(tmp_path, *script) as (client, double, session):
        request_id = client.prompt(session, "first")
        await chunk_of(client, session, " it")

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        await double.disconnected(0)
        assert tool_calls(client, session) == {}
        messages = await next_request(client, double, session)
        assert messages[-2]["content"].startswith("I write it")
        assert not messages[-2].get("tool_calls")
        assert not (tmp_path / "never.txt").exists()


@pytest.mark.requirement("R72")
async def test_a_model_that_waits_to_try_again_stops_waiting(tmp_path: Path) -> None:
    busy = status(429, {"message": "slow down"}, headers={"Retry-After": "60"})
    async with served_by(tmp_path, busy, answer(text("ok"))) as (client, double, session):
        request_id = client.prompt(session, "first")
        await chunk_of(client, session, "Trying again", is_thought=True)

        client.cancel(session)

        await settle_cancelled(client, session, request_id)
        assert len(double.requests) == 1
        await next_request(client, double, session)


def call(index: int, name: str, **arguments: str) -> bytes:
    return tool_call(index, f"c{index}", name, json.dumps(arguments))


@pytest.mark.requirement("B061", "R72", "ACP-099")
async def test_every_call_has_one_result_in_the_request_after_a_cancel(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    calls = (
        call(0, "read", path="a.txt"),
        call(1, "read", path="b.txt"),
        call(2, "shell", command="echo ready; sleep 300"),
        call(3, "write", path="never.txt", content="x"),
    )
    gate = Gate()
    script = (
        answer(text("reading"), *calls, reason="tool_calls"),
        answer(text("ok")),
        answer(call(0, "write", path="never.txt", content="x"), reason="tool_calls"),
        answer(text("ok")),
        answer(call(0, "read", path="a.txt"), reason="tool_calls"),
        answer(gate, text("never")),
        answer(text("ok")),
    )
    async with served_by(tmp_path, *script) as (client, double, session):
        request_id = client.prompt(session, "while a call runs, with two done and one to come")
        await ask_for_permission(client, session)
        await tool_update(client, session, "ready")
        client.cancel(session)
        await settle_cancelled(client, session, request_id)
        messages = await next_request(client, double, session)
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert "text of a.txt" in results[0]
        assert "text of b.txt" in results[1]
        assert "ready" in results[2]
        assert "no effect" in results[3]

        client.permission = "never"
        request_id = client.prompt(session, "before a call runs")
        await ask_for_permission(client, session)
        client.cancel(session)
        await settle_cancelled(client, session, request_id)
        messages = await next_request(client, double, session)
        assert messages[-2]["role"] == "tool"
        assert "no effect" in messages[-2]["content"]

        request_id = client.prompt(session, "when all calls are done")
        await gate.reached.wait()
        client.cancel(session)
        await settle_cancelled(client, session, request_id)
        await double.disconnected(5)
        messages = await next_request(client, double, session)
        assert messages[-2]["role"] == "tool"
        assert "text of a.txt" in messages[-2]["content"]
    assert not (tmp_path / "never.txt").exists()
