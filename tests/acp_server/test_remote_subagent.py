from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from remoting import (
    assert_told_nothing_but_the_session,
    delegating,
    each_way,
    group_of,
    outcome_of,
    pid_of,
    received,
    recorded,
    said,
    start,
    until,
)

from acp_server.remote import RemoteProvider
from acp_server.remote_updates import MAX_OUTPUT_BYTES
from agent_core.cancellation import PARENT, USER, AbortController, AbortSignal, TurnAborted
from agent_core.content import Link, Text
from agent_core.errors import AgentDisposed, AgentError
from agent_core.subagents import SubagentRefused, SubagentRequest, SubagentResult, SubagentRun
from agent_core.testing import abort_at_every_await

__all__ = ["each_way"]  # a fixture

OUR_AGENT = [sys.executable, "-m", "acp_server", "serve"]
SCRIPTED = [sys.executable, str(Path(__file__).with_name("scripted_agent.py"))]
HELPERS = """
import json, os, signal, sys, time
def read():
    return json.loads(sys.stdin.readline())
def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def say(text):
    content = {"type": "text", "text": text}
    update = {"sessionUpdate": "agent_message_chunk", "content": content}
    send(method="session/update", params={"sessionId": "s", "update": update})
def prompted():
    send(id=read()["id"], result={"protocolVersion": 1})
    send(id=read()["id"], result={"sessionId": "s"})
    return read()["id"]
"""


def agent_of(code: str) -> list[str]:
    return [sys.executable, "-c", HELPERS + code]


@pytest.mark.usefixtures("each_way")
async def test_our_own_agent_answers_and_is_gone(tmp_path):
    async with delegating(tmp_path, OUR_AGENT) as parent:
        result = await outcome_of(parent, "say from far away")

    assert (result.reason, result.output) == ("completed", "from far away")
    assert result.spent.usage.output_tokens > 0


@pytest.mark.usefixtures("each_way")
@pytest.mark.requirement("R71")
async def test_our_own_agent_is_cancelled_by_its_session_id_alone(tmp_path):
    controller, wire = AbortController(), tmp_path / "wire"
    command = recorded(wire, OUR_AGENT)
    async with delegating(tmp_path, command, permissions="allow") as parent:
        run = await start(parent, "run echo $$ > pid; sleep 60", signal=controller.signal)
        await until((tmp_path / "pid").exists)
        await until((tmp_path / "pid").read_text)
        controller.abort(USER)
        result = await run.result()

        assert group_of(run) == []
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
        await run.dispose()

    assert result.reason == "aborted"
    assert_told_nothing_but_the_session(wire)


@pytest.mark.usefixtures("each_way")
@pytest.mark.race
@pytest.mark.requirement("R71")
@pytest.mark.parametrize("cause", [USER, PARENT])
async def test_an_agent_we_did_not_write_is_cancelled_by_its_session_id_alone(tmp_path, cause):
    controller, wire = AbortController(), tmp_path / "wire"
    async with delegating(tmp_path, recorded(wire, SCRIPTED)) as parent:
        run = await start(parent, "wait", signal=controller.signal)
        await until(lambda: said(run) == "waiting")
        controller.abort(cause)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []

    assert result == SubagentResult("aborted", "waiting")
    assert_told_nothing_but_the_session(wire)


async def test_the_agent_is_told_the_prompt_and_the_place_and_offered_nothing(tmp_path):
    wire, elsewhere = tmp_path / "wire", tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "request = prompted(); say(os.getcwd()); send(id=request, result={'stopReason': "
    command = recorded(wire, agent_of(code + "'end_turn'})"))
    async with delegating(tmp_path, command, cwd=str(elsewhere)) as parent:
        blocks = (Text("look"), Link("file:///x", "x"))
        request = SubagentRequest(blocks, parent, AbortController().signal)
        run = await parent._runtime.subagents.start("remote", request)
        result = await run.result()
        await run.dispose()

    hello, new, prompt = (message["params"] for message in received(wire))
    assert hello["clientCapabilities"] == {}
    assert hello["clientInfo"]["name"] == "acp-agent"
    assert new == {"cwd": str(tmp_path), "mcpServers": []}
    assert prompt["prompt"] == [{"type": "text", "text": "look\n[x](file:///x)"}]
    assert result.output == str(elsewhere)


async def test_credentials_are_withheld_unless_they_are_given(tmp_path, monkeypatch):
    for name in ("OPENAI_API_KEY", "my_token", "DB_PASSWORD", "Secret_x", "CREDENTIALS", "PLAIN"):
        monkeypatch.setenv(name, "inherited")
    code = "request = prompted(); say(json.dumps(dict(os.environ))); send(id=request, result={})"
    async with delegating(tmp_path, agent_of(code), environ={"GIVEN_KEY": "given"}) as parent:
        result = await outcome_of(parent, "x")

    environ = json.loads(result.output)
    assert environ["PLAIN"] == "inherited"
    assert environ["GIVEN_KEY"] == "given"
    assert {"OPENAI_API_KEY", "my_token", "DB_PASSWORD", "Secret_x", "CREDENTIALS"}.isdisjoint(
        environ
    )


@pytest.mark.parametrize(
    ("stop_reason", "reason", "message"),
    [
        ("end_turn", "completed", ""),
        ("max_tokens", "max_tokens", ""),
        ("refusal", "refusal", ""),
        ("cancelled", "aborted", ""),
        ("max_turn_requests", "max_steps", ""),
        (["x"], "error", "it stopped without an end: ['x']"),
    ],
)
async def test_stop_reasons_become_reasons(tmp_path, stop_reason, reason, message):
    code = f"send(id=prompted(), result={{'stopReason': {stop_reason!r}}}); read()"
    async with delegating(tmp_path, agent_of(code)) as parent:
        result = await outcome_of(parent, "x")

    assert result.reason == reason
    assert result.message.endswith(message)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(("permissions", "picked"), [("reject", "no"), ("allow", "go")])
async def test_questions_are_answered_by_policy(tmp_path, permissions, picked):
    async with delegating(tmp_path, SCRIPTED, permissions=permissions) as parent:
        result = await outcome_of(parent, "ask")

    assert result.output == f"outcome {picked}"


@pytest.mark.usefixtures("each_way")
async def test_a_question_without_a_fitting_option_is_cancelled(tmp_path):
    code = """
request = prompted()
options = [{"optionId": "always", "name": "Always", "kind": "allow_always"}]
send(id=7, method="session/request_permission", params={"options": options})
say(json.dumps(read()["result"]))
send(id=request, result={"stopReason": "end_turn"})
"""
    async with delegating(tmp_path, agent_of(code), permissions="reject") as parent:
        result = await outcome_of(parent, "x")

    assert json.loads(result.output) == {"outcome": {"outcome": "cancelled"}}


@pytest.mark.usefixtures("each_way")
async def test_a_question_that_comes_after_a_cancel_is_never_allowed(tmp_path):
    controller, gate = AbortController(), tmp_path / "gate"
    async with delegating(tmp_path, SCRIPTED, permissions="allow") as parent:
        run = await start(parent, f"gate {gate}", signal=controller.signal)
        await until(lambda: said(run) == "soon")
        controller.abort(USER)
        gate.touch()
        result = await run.result()
        await run.dispose()

    assert result == SubagentResult("aborted", "soonoutcome cancelled")


@pytest.mark.parametrize("method", ["fs/read_text_file", "terminal/create", "_own/thing"])
async def test_other_requests_are_refused(tmp_path, method):
    async with delegating(tmp_path, SCRIPTED) as parent:
        result = await outcome_of(parent, f"call {method}")

    assert result.output == "code -32601"


async def test_an_agent_that_dies_is_a_failed_run_that_says_how(tmp_path):
    async with delegating(tmp_path, SCRIPTED) as parent:
        result = await outcome_of(parent, "die")
        after = await outcome_of(parent, "count 1")

    assert result.reason == "error"
    assert result.message == (
        "The subagent 'remote' failed: the agent ended with exit code 3: last words"
    )
    assert after.reason == "completed"


@pytest.mark.usefixtures("each_way")
async def test_an_error_answer_is_a_failed_run_with_its_message_and_what_was_said(tmp_path):
    code = "request = prompted(); say('so far'); send(id=request, error={'code': 1, 'message': "
    async with delegating(tmp_path, agent_of(code + "'no\\x1b[2J money'}); read()")) as parent:
        result = await outcome_of(parent, "x")

    assert result == SubagentResult("error", "so far", "The subagent 'remote' failed: no[2J money")


async def test_an_agent_that_is_never_ready_is_a_failed_run_that_shows_its_last_line(tmp_path):
    code = "print('please log in', file=sys.stderr, flush=True); time.sleep(60)"
    options = {"start_limit_s": 0.5, "exit_grace_s": 0.0}
    async with delegating(tmp_path, agent_of(code), **options) as parent:
        result = await outcome_of(parent, "x")

    assert result.reason == "error"
    assert result.message.endswith("it was not ready for a prompt in 0.5 s: please log in")


@pytest.mark.usefixtures("each_way")
async def test_a_session_without_an_id_is_a_failed_run(tmp_path):
    code = "send(id=read()['id'], result={'protocolVersion': 1}); send(id=read()['id'], result=1)"
    async with delegating(tmp_path, agent_of(code + "; read()")) as parent:
        result = await outcome_of(parent, "x")

    assert result.message.endswith("it opened a session without an id")


@pytest.mark.usefixtures("each_way")
async def test_garbage_between_messages_changes_nothing(tmp_path):
    code = r"""
request = prompted()
garbage = [b"hello", b"{", b"[]", b"1", b'{"jsonrpc":"2.0"}', b"[" * 100_000,
    b'{"jsonrpc":"2.0","id":99,"result":1}', b'{"jsonrpc":"2.0","id":1.5,"result":1}',
    b'{"jsonrpc":"2.0","method":"session/update","params":[]}',
    b'{"jsonrpc":"2.0","method":"session/update","params":{"update":{"sessionUpdate":'
    b'"agent_message_chunk","content":7}}}',
    b'{"jsonrpc":"2.0","method":"session/update"}', b'{"jsonrpc":"2.0","method":"x"}']
for line in garbage:
    sys.stdout.buffer.write(line + b"\n")
sys.stdout.buffer.flush()
say("sorry")
send(id=request, result={"stopReason": "end_turn"})
"""
    async with delegating(tmp_path, agent_of(code)) as parent:
        result = await outcome_of(parent, "x")

    assert result == SubagentResult("completed", "sorry")


async def test_a_line_that_is_no_text_changes_nothing(tmp_path):
    code = r"""
request = prompted()
sys.stdout.buffer.write(b"\xff\xfe\n")
sys.stdout.buffer.flush()
send(id=request, result={"stopReason": "end_turn"})
"""
    async with delegating(tmp_path, agent_of(code)) as parent:
        assert await outcome_of(parent, "x") == SubagentResult("completed", "")


@pytest.mark.usefixtures("each_way")
async def test_of_a_long_output_the_end_is_kept_and_the_cut_is_told(tmp_path):
    code = """
request = prompted()
for number in range(500):
    say("é" * 5000)
say("the end")
send(id=request, result={"stopReason": "end_turn"})
"""
    async with delegating(tmp_path, agent_of(code)) as parent:
        result = await outcome_of(parent, "x")

    note, _, text = result.output.partition("\n")
    assert note == f"(the first {500 * 10_000 + 7 - MAX_OUTPUT_BYTES} bytes are left out)"
    assert MAX_OUTPUT_BYTES - 1 <= len(text.encode()) <= MAX_OUTPUT_BYTES
    assert text.endswith("éthe end")


@pytest.mark.usefixtures("each_way")
async def test_an_endless_flood_is_bounded_and_can_be_cancelled(tmp_path):
    controller = AbortController()
    code = "prompted()\nwhile True: say('x' * 50000); print('y' * 5000, file=sys.stderr)"
    options = {"cancel_grace_s": 0.1, "exit_grace_s": 0.1}
    async with delegating(tmp_path, agent_of(code), **options) as parent:
        run = await start(parent, "x", signal=controller.signal)
        await until(lambda: len(said(run)) > MAX_OUTPUT_BYTES)
        controller.abort(USER)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []

    assert result.reason == "aborted"
    assert len(result.output) < MAX_OUTPUT_BYTES + 100


@pytest.mark.race
async def test_an_agent_that_ignores_the_cancel_and_sigterm_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("acp_server.agent_process.TERMINATE_LIMIT_S", 0.1)
    controller, wire = AbortController(), tmp_path / "wire"
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
prompted()
say("deaf")
open(sys.argv[1], "w").write(sys.stdin.read())
while True: time.sleep(1)
"""
    options = {"cancel_grace_s": 0.05, "exit_grace_s": 0.1}
    async with delegating(tmp_path, [*agent_of(code), str(wire)], **options) as parent:
        run = await start(parent, "x", signal=controller.signal)
        await until(lambda: said(run) == "deaf")
        controller.abort(USER)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []

    assert result == SubagentResult("aborted", "deaf")
    assert [message["method"] for message in received(wire)] == ["session/cancel"]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    ("last_act", "reason"),
    [
        ("send(id=request, result={'stopReason': 'end_turn'})", "completed"),
        ("send(id=request, result={'stopReason': 'max_tokens'})", "aborted"),
        ("send(id=request, error={'code': 1, 'message': 'interrupted'})", "aborted"),
        ("os._exit(9)", "aborted"),
        ("os.kill(os.getpid(), 9)", "aborted"),
    ],
)
async def test_a_cancelled_run_is_aborted_unless_it_had_completed(tmp_path, last_act, reason):
    controller = AbortController()
    code = f"request = prompted(); say('on it'); read(); {last_act}"
    async with delegating(tmp_path, agent_of(code)) as parent:
        run = await start(parent, "x", signal=controller.signal)
        await until(lambda: said(run) == "on it")
        controller.abort(USER)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []

    assert result == SubagentResult(reason, "on it")


@pytest.mark.usefixtures("each_way")
async def test_a_signal_that_fires_after_the_end_changes_nothing(tmp_path):
    controller = AbortController()
    async with delegating(tmp_path, SCRIPTED) as parent:
        run = await start(parent, "count 1", signal=controller.signal)
        await run.result()
        controller.abort(USER)
        await run.dispose()
        await run.dispose()

        assert (await run.result()).reason == "completed"


async def test_a_signal_that_fired_before_starts_nothing(tmp_path):
    controller = AbortController()
    controller.abort(USER)
    async with delegating(tmp_path, ["touch", str(tmp_path / "started")]) as parent:
        with pytest.raises(TurnAborted):
            await start(parent, "x", signal=controller.signal)
        provider = RemoteProvider(parent._runtime, "r", ["touch", str(tmp_path / "started")])
        with pytest.raises(TurnAborted):
            await provider.start(SubagentRequest((Text("x"),), parent, controller.signal))

    assert not (tmp_path / "started").exists()


@pytest.mark.usefixtures("each_way")
@pytest.mark.race
@pytest.mark.parametrize("seen", ["", "initialize", "session/new"])
async def test_an_abort_before_the_prompt_ends_the_agent_at_once_and_is_not_told(tmp_path, seen):
    controller, wire = AbortController(), tmp_path / "wire"
    code = """
with open(sys.argv[1], "w", buffering=1) as wire:
    for line in sys.stdin:
        wire.write(line)
        if '"initialize"' in line and sys.argv[2] == "session/new":
            send(id=1, result={"protocolVersion": 1})
"""
    command = [*agent_of(code), str(wire), seen]
    async with delegating(tmp_path, command, start_limit_s=60, cancel_grace_s=60) as parent:
        run = await start(parent, "x", signal=controller.signal)
        await until(lambda: (wire.exists() and f'"{seen}"' in wire.read_text()) or not seen)
        controller.abort(USER)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []

    assert result == SubagentResult("aborted", "")
    assert not seen or received(wire)[-1]["method"] == seen


@pytest.mark.race
async def test_an_abort_right_behind_the_opened_session_sends_no_prompt(tmp_path):
    controller, wire = AbortController(), tmp_path / "wire"
    code = """
send(id=read()["id"], result={"protocolVersion": 1})
sys.stdout = open(1, "w", buffering=65536, closefd=False)
flush, sys.stdout.flush = sys.stdout.flush, lambda: None
send(id=read()["id"], result={"sessionId": "s"})
say("here")
flush()
read()
"""
    command = recorded(wire, agent_of(code))
    async with delegating(tmp_path, command, cancel_grace_s=60) as parent:
        run: Any = await start(parent, "x", signal=controller.signal)
        # Both lines come in one piece: the owner has its session and has not gone on yet.
        run._run._output.add = lambda _text: controller.abort(USER)
        result = await run.result()
        await run.dispose()

    assert result.reason == "aborted"
    assert [message["method"] for message in received(wire)] == ["initialize", "session/new"]


async def test_an_abort_between_the_start_and_its_return_leaves_nothing(tmp_path):
    controller = AbortController()

    class Aborting(RemoteProvider):
        @property
        def start_limit_s(self) -> float:  # looked at when the process has been started
            controller.abort(USER)
            return 60

        @start_limit_s.setter
        def start_limit_s(self, value: float) -> None:
            pass

    async with delegating(tmp_path, SCRIPTED) as parent:
        provider = Aborting(parent._runtime, "r", SCRIPTED)
        with pytest.raises(TurnAborted):
            await provider.start(SubagentRequest((Text("x"),), parent, controller.signal))

        assert parent._runtime._stops == {}


@pytest.mark.usefixtures("each_way")
@pytest.mark.race
async def test_an_abort_at_any_await_leaves_no_process_and_no_task(tmp_path):
    async with delegating(tmp_path, SCRIPTED) as parent:
        runs: list[SubagentRun] = []

        async def call(signal: AbortSignal) -> SubagentResult:
            run = await start(parent, "count 2", signal=signal)
            runs.append(run)
            try:
                return await run.result()
            finally:
                await run.dispose()

        ended = await abort_at_every_await(call)

        assert len(ended) >= 2
        assert [group_of(run) for run in runs] == [[]] * len(runs)


async def test_a_caller_that_is_cancelled_while_it_starts_one_leaves_nothing(tmp_path):
    async with delegating(tmp_path, SCRIPTED) as parent:
        provider = RemoteProvider(parent._runtime, "r", SCRIPTED)
        before = asyncio.all_tasks()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await provider.start(SubagentRequest((Text("wait"),), parent, AbortController().signal))
        await until(lambda: asyncio.all_tasks() == before)

        assert scope.cancelled_caught


async def test_an_agent_that_cannot_be_started_is_told_and_leaves_nothing(tmp_path):
    async with delegating(tmp_path, ["/no/such/agent"]) as parent:
        before = asyncio.all_tasks()
        with pytest.raises(AgentError, match=r"'remote' could not be started: cannot start /no/"):
            await start(parent, "x")

        assert asyncio.all_tasks() == before
        assert parent._runtime._stops == {}


async def test_what_another_agent_cannot_honour_is_refused(tmp_path):
    async with delegating(tmp_path, SCRIPTED) as parent:
        with pytest.raises(SubagentRefused, match="persona"):
            await start(parent, "x", persona="a poet")
        with pytest.raises(SubagentRefused, match="tool_names"):
            await start(parent, "x", tool_names=frozenset({"read"}))


@pytest.mark.usefixtures("each_way")
async def test_leaving_the_runtime_ends_what_nobody_disposed(tmp_path):
    async with delegating(tmp_path, SCRIPTED) as parent:
        run = await start(parent, "wait")
        await until(lambda: said(run) == "waiting")

    assert group_of(run) == []
    assert await run.result() == SubagentResult("aborted", "waiting")
    with pytest.raises(AgentDisposed):
        await start(parent, "x")


@pytest.mark.usefixtures("each_way")
async def test_disposal_stops_a_run_and_leaves_no_task(tmp_path):
    async with delegating(tmp_path, SCRIPTED) as parent:
        before = asyncio.all_tasks()
        run = await start(parent, "wait")
        await until(lambda: said(run) == "waiting")
        await run.dispose()

        assert group_of(run) == []
        assert asyncio.all_tasks() == before
        assert (await run.result()).reason == "aborted"


@pytest.mark.race
async def test_eight_at_once_are_cancelled_together_and_one_that_died_takes_none_along(tmp_path):
    controller = AbortController()
    async with delegating(tmp_path, SCRIPTED) as parent:
        before = asyncio.all_tasks()
        runs: list[SubagentRun] = []

        async def begin() -> None:
            runs.append(await start(parent, "wait", signal=controller.signal))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(begin)
        for run in runs:
            await until(lambda run=run: said(run) == "waiting")
        os.kill(pid_of(runs[3]), 9)
        died = await runs[3].result()
        assert [said(run) for run in runs] == ["waiting"] * 8
        controller.abort(USER)
        results = [await run.result() for run in runs]
        for run in runs:
            await run.dispose()

        assert [group_of(run) for run in runs] == [[]] * 8
        assert asyncio.all_tasks() == before

    assert died.reason == "error"
    assert "SIGKILL" in died.message
    assert [result.reason for result in results] == ["aborted"] * 3 + ["error"] + ["aborted"] * 4
