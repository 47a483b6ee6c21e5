"""Spans of a real agent, as a collector gets them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from network_rig import editor, listening
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from serve_rig import served

from conformance.client import Client
from conformance.providers.chat import text, tool_call, usage
from conformance.providers.server import answer, provider_double, status

KEY = "collector-key-0123456789"
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
WORDS = "canary-of-words"


class Collector:
    """Takes spans, as OTLP by HTTP brings them; answers nothing if it is `deaf`."""

    def __init__(self, url: str, over: threading.Event) -> None:
        self.url = url
        self.over = over
        self.raw = b""
        self.keys: set[str | None] = set()
        self.resource: dict[str, str] = {}
        self.spans: list[Span] = []

    @property
    def env(self) -> dict[str, str]:
        headers = f"x-key={KEY}"
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_EXPORTER_OTLP_HEADERS": headers}

    def take(self, key: str | None, body: bytes) -> None:
        self.raw += body
        self.keys.add(key)
        for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource |= {a.key: a.value.string_value for a in of_process.resource.attributes}
            for scope in of_process.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def only(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    def path(self, span: Span) -> list[str]:
        """The names from a trace's first span of ours down to this one."""
        above = {each.span_id: each for each in self.spans}
        names = [span.name]
        while (span := above.get(span.parent_span_id)) is not None:
            names.insert(0, span.name)
        return names


def about(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@contextmanager
def collector(*, deaf: bool = False) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if deaf:
                taken.over.wait()
                return
            assert self.path == "/v1/traces"
            taken.take(self.headers["x-key"], body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        taken = Collector(f"http://127.0.0.1:{server.server_port}", threading.Event())
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield taken
        finally:
            taken.over.set()
            server.shutdown()
            thread.join()


def prompt(client: Client, session: str, said: str, **meta: Any) -> int:
    params = {"sessionId": session, "prompt": [{"type": "text", "text": said}], "_meta": meta}
    return client.wire.request("session/prompt", params)


async def test_a_turn_its_calls_and_its_subagents_are_one_tree_below_the_callers_span(
    tmp_path: Path,
) -> None:
    (tmp_path / f"{WORDS}.txt").write_text(WORDS)
    with collector() as taken:
        async with served(tmp_path, "--mode", "bypass", env=taken.env) as client:
            session = await client.new_session(tmp_path)
            said = f"read {WORDS}.txt then delegate run echo {WORDS}"
            traceparent = f"00-{TRACE}-{CALLER}-01"
            assert (
                await client.stop_reason(
                    prompt(client, session, said, traceparent=traceparent, tracestate="a=b")
                )
                == "end_turn"
            )
    assert {span.trace_id.hex() for span in taken.spans} == {TRACE}
    assert {span.trace_state for span in taken.spans} == {"a=b"}
    turn = next(span for span in taken.named("turn") if span.kind == Span.SPAN_KIND_SERVER)
    assert turn.parent_span_id.hex() == CALLER
    assert about(turn)["gen_ai.conversation.id"] == session
    assert about(turn)["acp_agent.outcome"] == "completed"
    paths = sorted(" > ".join(taken.path(span)) for span in taken.spans)
    below = "turn > execute_tool delegate > subagent > turn"
    assert set(paths) == {
        "turn",
        "turn > chat",
        "turn > execute_tool read",
        "turn > execute_tool delegate",
        "turn > execute_tool delegate > subagent",
        below,
        f"{below} > chat",
        f"{below} > execute_tool shell",
    }
    read = taken.only("execute_tool read")
    assert read.status.code == Status.STATUS_CODE_UNSET
    assert about(read)["gen_ai.tool.name"] == "read"
    assert [event.name for event in taken.only("execute_tool shell").events] == ["started"]
    assert about(taken.only("subagent"))["acp_agent.provider"] == "spawn"
    for span in taken.spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    assert taken.resource["service.name"] == "acp-agent"
    assert WORDS.encode() not in taken.raw


async def test_a_model_request_tells_its_tokens_retries_and_failure_and_no_words(
    tmp_path: Path,
) -> None:
    replies = [
        status(429, {"message": WORDS}, headers={"retry-after": "0"}),
        answer(text(WORDS), tool_call(0, "c1", f"made-up-{WORDS}", "{}"), reason="tool_calls"),
        answer(text(WORDS), usage(11, 7)),
        status(404, {"message": WORDS, "code": "model_not_found"}),
    ]
    with collector() as taken:
        async with provider_double(replies) as double:
            env = {"OPENAI_API_KEY": "sk-canary", "OPENAI_BASE_URL": double.url, **taken.env}
            flags = ("--model", "openai:any")
            async with listening(tmp_path, *flags, env=env) as server, editor(server) as client:
                session = await client.new_session(tmp_path)
                await client.stop_reason(await client.prompt(session, WORDS))
                await client.response(await client.prompt(session, WORDS))
    first, second, third = sorted(taken.named("chat"), key=lambda each: each.start_time_unix_nano)
    assert about(first)["gen_ai.request.model"] == "openai:any"
    (retry,) = first.events
    assert {a.key: a.value.string_value for a in retry.attributes}["error.type"] == "RATE_LIMIT"
    assert about(second)["gen_ai.usage.input_tokens"] == 11
    assert about(second)["gen_ai.usage.output_tokens"] == 7
    assert third.status.code == Status.STATUS_CODE_ERROR
    assert about(third)["error.type"] == "MODEL_NOT_FOUND"
    turns = sorted(taken.named("turn"), key=lambda each: each.start_time_unix_nano)
    assert [about(turn)["acp_agent.outcome"] for turn in turns] == ["completed", "error"]
    assert turns[0].trace_id != turns[1].trace_id
    assert about(taken.only("execute_tool unknown"))["error.type"] == "UNKNOWN_TOOL"
    for word in (WORDS, "sk-canary"):
        assert word.encode() not in taken.raw


def is_shown_at_work(message: dict[str, Any]) -> bool:
    """Whether a call shows what its subagent does."""
    update = message.get("params", {}).get("update", {})
    is_call = update.get("sessionUpdate") == "tool_call_update"
    return is_call and "sleep 300" in json.dumps(update.get("content"))


async def test_a_stopped_turn_ends_all_of_its_spans(tmp_path: Path) -> None:
    with collector() as taken:
        async with served(tmp_path, "--mode", "bypass", env=taken.env) as client:
            session = await client.new_session(tmp_path)
            request = prompt(client, session, "delegate run sleep 300", traceparent="nonsense")
            await client.wire.receive(is_shown_at_work)
            client.cancel(session)
            assert await client.stop_reason(request) == "cancelled"
    outcomes = [about(span)["acp_agent.outcome"] for span in taken.named("turn")]
    assert outcomes == ["aborted", "aborted"]
    assert about(taken.only("subagent"))["acp_agent.outcome"] == "aborted"
    code = about(taken.only("execute_tool shell"))["error.type"]
    assert code in ("ABORTED", "ABORTED_BEFORE_DISPATCH")
    assert len({span.trace_id for span in taken.spans}) == 1


async def test_what_the_collector_is_shown_no_command_sees_and_no_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--mode", "bypass", "--log-level", "debug", "--log-file", str(log))
    with collector() as taken:
        async with served(tmp_path, *flags, env=taken.env) as client:
            session = await client.new_session(tmp_path)
            await client.stop_reason(client.prompt(session, "run env"))
            assert "PATH=" in json.dumps(client.wire.received)
            assert KEY not in json.dumps(client.wire.received)
    assert taken.keys == {KEY}
    assert KEY not in log.read_text()


async def test_a_collector_that_does_not_answer_holds_up_no_turn_and_no_end(
    tmp_path: Path,
) -> None:
    with collector(deaf=True) as taken:
        async with served(tmp_path, env=taken.env) as client:
            session = await client.new_session(tmp_path)
            assert await client.stop_reason(client.prompt(session, "say it")) == "end_turn"
    assert taken.spans == []


WITHOUT = """
import sys
for name in {missing}:
    sys.modules[name] = None
from acp_server.cli import main
code = main({arguments})
print("sdk" if sys.modules.get("opentelemetry.sdk") else "no sdk", file=sys.stderr)
sys.exit(code)
"""
CONVERSATION = (
    {"id": 1, "method": "initialize", "params": {"protocolVersion": 1}},
    {"id": 2, "method": "session/list", "params": {}},
)


@pytest.mark.parametrize(
    ("missing", "env", "said"),
    [
        (["opentelemetry.sdk"], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "[otel]"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_SDK_DISABLED": "true"}, ""),
        ([], {}, ""),
    ],
)
def test_an_agent_without_spans_runs_as_ever_and_says_what_is_missing_if_they_were_wanted(
    tmp_path: Path, missing: list[str], env: dict[str, str], said: str
) -> None:
    arguments = ["serve", "--state-dir", str(tmp_path), "--log-level", "warning"]
    lines = [json.dumps({"jsonrpc": "2.0", **message}) for message in CONVERSATION]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing, arguments=arguments)],
        input="\n".join([*lines, ""]),
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [("result" in each, each["id"]) for each in answers] == [(True, 1), (True, 2)]
    assert "no sdk" in done.stderr
    assert ("tracing_not_started" in done.stderr) == bool(said)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
