from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import pytest

from conformance.client import Client
from conformance.selftest.build import command
from conformance.wire import Wire

Answer = Callable[[anyio.abc.SocketStream], Any]


class Endpoint:
    """Answers each request with the next of its answers, and keeps what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.closed = anyio.Event()
        self._answers = list(answers)

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += await stream.receive()
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            while len(body) < length:
                body += await stream.receive()
            self.asked.append(json.loads(body))
            key = head.decode().partition("Authorization: ")[2].partition("\r\n")[0]
            self.keys.add(key)
            await self._answers.pop(0)(stream)
            try:
                await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                self.closed.set()


def event(**choice: Any) -> bytes:
    data = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def stream_of(*events: bytes, end: bytes = DONE) -> Answer:
    async def answer(stream: anyio.abc.SocketStream) -> None:
        raw = b"".join([HEAD, *events, end])
        for start in range(0, len(raw), 7):  # in pieces that end anywhere
            await stream.send(raw[start : start + 7])

    return answer


def saying(text: str) -> Answer:
    return stream_of(event(delta={"content": text}), event(delta={}, finish_reason="stop"))


def calls(*pairs: tuple[str, object]) -> list[bytes]:
    parts = []
    for index, (name, arguments) in enumerate(pairs):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": name, "arguments": text[:5]}
        first = {"index": index, "id": f"c{index}", "type": "function", "function": function}
        rest = {"index": index, "function": {"arguments": text[5:]}}
        parts += [event(delta={"tool_calls": [each]}) for each in (first, rest)]
    return parts


def calling(*pairs: tuple[str, object]) -> Answer:
    return stream_of(*calls(*pairs), event(delta={}, finish_reason="tool_calls"))


def failing(status: str) -> Answer:
    async def answer(stream: anyio.abc.SocketStream) -> None:
        await stream.send(
            f"HTTP/1.1 {status}\r\ncontent-length: 2\r\nretry-after: 0\r\n\r\n{{}}".encode()
        )

    return answer


async def stalling(stream: anyio.abc.SocketStream) -> None:
    await stream.send(HEAD + event(delta={"content": "Well"}))


@asynccontextmanager
async def opened(
    folder: Any, *answers: Answer
) -> AsyncIterator[tuple[Wire, Client, str, Endpoint]]:
    endpoint = Endpoint(*answers)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        env = {
            "ACP_SELFTEST_STATE": str(folder / "state"),
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
            "OPENAI_API_KEY": "canary-1",
        }
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, endpoint.serve)
            async with Wire.spawn(command(), env=env) as wire:
                client = Client(wire, permission="allow")
                await client.initialize()
                yield wire, client, await client.new_session(folder), endpoint
                assert (wire.noise, wire.stderr) == ([], "")
            tasks.cancel_scope.cancel()


def judge_history(messages: list[dict[str, Any]]) -> None:
    """Each call has exactly one result, right behind it; nothing is empty."""
    expected: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            expected.remove(message["tool_call_id"])
            continue
        assert expected == []
        assert message["content"] or message.get("tool_calls")
        expected = [call["id"] for call in message.get("tool_calls", ())]
    assert expected == []


async def test_a_model_says_and_calls_what_it_likes_and_is_told_the_results(tmp_path):
    first = calling(("write", {"path": "a.txt", "content": "x"}), ("read", "{broken"), ("fly", {}))
    async with opened(tmp_path, first, saying("All done.")) as (_, client, session, endpoint):
        assert await client.stop_reason(client.prompt(session, "Go")) == "end_turn"

        assert client.text(session) == "All done."
        assert (tmp_path / "a.txt").read_text() == "x"
        names = {tool["function"]["name"] for tool in endpoint.asked[0]["tools"]}
        assert {"read", "write", "edit", "run"} <= names
        messages = endpoint.asked[1]["messages"]
        judge_history(messages)
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert results[0] == "wrote a.txt"
        assert all(result.startswith("Error: ") for result in results[1:])


@pytest.mark.parametrize("at", ["first words", "call", "permission", "retry"])
async def test_a_cancel_closes_the_connection_and_leaves_a_history_that_is_valid(tmp_path, at):
    run = calling(("run", {"command": "sleep 60"}), ("read", {"path": "x"}))

    async def busy(stream: anyio.abc.SocketStream) -> None:
        await stream.send(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nretry-after: 9\r\n\r\n")

    answer = {"first words": stalling, "retry": busy}.get(at, run)
    async with opened(tmp_path, answer, saying("Yes")) as (wire, client, session, endpoint):
        client.permission = "never" if at == "permission" else "allow"
        request = client.prompt(session, "Go")
        if at == "retry":
            await wire.silence()
            with anyio.fail_after(10):
                await endpoint.closed.wait()
        else:
            sign = {"first words": "Well", "call": "in_progress", "permission": "pending"}[at]
            await wire.receive(lambda message: sign in json.dumps(message))
        client.cancel(session)

        assert await client.stop_reason(request) == "cancelled"
        with anyio.fail_after(10):
            await endpoint.closed.wait()
        assert wire.descendants() == set()
        assert await client.stop_reason(client.prompt(session, "And now?")) == "end_turn"
        judge_history(endpoint.asked[1]["messages"])
        users = [
            each["content"] for each in endpoint.asked[1]["messages"] if each["role"] == "user"
        ]
        assert users == ["Go", "And now?"]
        if at == "first words":
            assert {"role": "assistant", "content": "Well"} in endpoint.asked[1]["messages"]


async def test_a_failure_is_tried_again_and_then_told_and_the_session_lives(tmp_path):
    cut = stream_of(calls(("read", {"path": "x"}))[0], end=b"0\r\n\r\n")
    answers = [failing("429 Slow"), cut, saying("ok"), failing("401 No"), *[failing("500 No")] * 3]
    async with opened(tmp_path, *answers) as (wire, client, session, endpoint):
        assert await client.stop_reason(client.prompt(session, "one")) == "end_turn"
        assert "toolCallId" not in json.dumps(wire.updates(session))
        assert [each["role"] for each in endpoint.asked[2]["messages"]] == ["system", "user"]
        for text, n_asked in (("two", 4), ("three", 7)):
            response = await wire.response(client.prompt(session, text))
            assert response["error"]["code"] == -32603
            assert len(endpoint.asked) == n_asked
            judge_history(endpoint.asked[-1]["messages"])
        assert endpoint.keys == {"Bearer canary-1"}
        assert all(b"canary" not in entry.raw for entry in wire.trace)


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_tokens"), ("content_filter", "refusal")]
)
async def test_how_a_model_ends_is_how_the_turn_stops(tmp_path, finish, reason):
    end = stream_of(event(delta={"content": "x"}), event(delta={}, finish_reason=finish))
    async with opened(tmp_path, end, saying("ok")) as (_, client, session, endpoint):
        assert await client.stop_reason(client.prompt(session, "one")) == reason
        await client.stop_reason(client.prompt(session, "two"))

        told = [message["content"] for message in endpoint.asked[1]["messages"][1:]]
        assert told == (["two"] if reason == "refusal" else ["one", "x", "two"])


async def test_a_model_that_calls_for_ever_is_stopped(tmp_path):
    answers = [calling(("list", {"path": "."}))] * 25
    async with opened(tmp_path, *answers) as (_, client, session, endpoint):
        assert await client.stop_reason(client.prompt(session, "one")) == "max_turn_requests"
        assert len(endpoint.asked) == 25
