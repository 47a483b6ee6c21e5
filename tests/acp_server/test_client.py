from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from acp_server.agent_process import open_agent
from acp_server.client import CANCELLED, AgentGone, selected
from acp_server.errors import RemoteError
from acp_server.peer import Method

AGENT = [sys.executable, str(Path(__file__).with_name("scripted_agent.py"))]


class Recorder:
    """What the agent sent, and what to answer to its questions."""

    def __init__(self, answer=CANCELLED) -> None:
        self.updates = []
        self.answer = answer

    def update(self, params) -> None:
        self.updates.append(json.loads(params)["update"])

    async def decide(self, params, _in_flight):
        assert params["sessionId"] == "s1"
        if self.answer is None:
            await anyio.sleep_forever()
        return self.answer

    @property
    def text(self) -> str:
        return "".join(
            update["content"]["text"]
            for update in self.updates
            if update["sessionUpdate"] == "agent_message_chunk"
        )


@asynccontextmanager
async def connected(recorder=None, *, command=AGENT, **options):
    recorder = recorder or Recorder()
    with anyio.fail_after(15):
        async with open_agent(
            command,
            cwd=str(Path.cwd()),
            methods={"session/request_permission": Method(dict, recorder.decide)},
            notifications={"session/update": recorder.update},
            **options,
        ) as agent:
            yield agent


async def prompt(agent, text):
    blocks = [{"type": "text", "text": text}]
    return await agent.request("session/prompt", {"sessionId": "s1", "prompt": blocks})


def is_gone(pid: int) -> bool:
    """Whether a process is dead; one that is not ours to reap may be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.requirement("B125")
async def test_what_was_said_before_an_answer_is_handed_on_before_it():
    recorder = Recorder()
    async with connected(recorder) as agent:
        hello = await agent.initialize("test")
        result = await prompt(agent, "count 3")

        assert hello["agentInfo"]["name"] == "scripted"
        assert result == {"stopReason": "end_turn"}
        assert recorder.text == "1 2 3 "


async def test_an_error_answer_is_raised_and_the_connection_goes_on():
    async with connected() as agent:
        with pytest.raises(RemoteError, match="on holiday") as caught:
            await prompt(agent, "fail")

        assert caught.value.code == -32603
        assert await prompt(agent, "count 1") == {"stopReason": "end_turn"}


@pytest.mark.requirement("ACP-014")
async def test_a_request_that_we_do_not_serve_is_answered_with_its_code():
    recorder = Recorder()
    async with connected(recorder) as agent:
        await prompt(agent, "call fs/read_text_file")

        assert recorder.text == "code -32601"


async def test_a_question_is_answered_with_the_option_that_was_picked():
    recorder = Recorder(selected("always"))
    async with connected(recorder) as agent:
        await prompt(agent, "ask")

        assert recorder.text == "outcome always"


@pytest.mark.requirement("ACP-106")
async def test_a_request_that_the_agent_withdraws_is_cancelled_and_answered():
    recorder = Recorder(None)
    async with connected(recorder) as agent:
        await prompt(agent, "withdraw")

        assert recorder.text == "withdrawn -32800"


async def test_a_notification_overtakes_an_open_request():
    async with connected() as agent, anyio.create_task_group() as tasks:
        results = []

        async def wait():
            results.append(await prompt(agent, "wait"))

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        agent.notify("session/cancel", {"sessionId": "s1"})

    assert results == [{"stopReason": "cancelled"}]


async def test_messages_of_any_size_pass():
    recorder = Recorder()
    async with connected(recorder) as agent:
        await prompt(agent, "big 3000000")

        assert len(recorder.text) == 3_000_000


async def test_a_line_that_is_no_message_is_kept_and_skipped():
    async with connected() as agent:
        assert await prompt(agent, "noise") == {"stopReason": "end_turn"}

        assert agent.last_words == ["not a message: hello from a print"]


async def test_the_death_of_the_agent_ends_what_waits_and_says_how():
    lines = []
    async with connected(on_stderr=lines.append) as agent:
        with pytest.raises(AgentGone, match="ended with exit code 3"):
            await prompt(agent, "die")

        assert agent.last_words == lines == ["last words"]
        with pytest.raises(AgentGone):
            await agent.initialize("test")
        agent.notify("session/cancel", {"sessionId": "s1"})


async def test_a_signal_that_ended_the_agent_is_named():
    async with connected() as agent:
        await agent.initialize("test")
        os.kill(agent.pid, signal.SIGKILL)
        await agent.ended.wait()

        assert str(agent.why_gone()) == "the agent was ended by SIGKILL"


async def test_what_an_agent_left_in_its_group_goes_with_it():
    code = (
        "import subprocess, sys, os;"
        "child = subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3);"
        "print(child.pid, file=sys.stderr, flush=True);"
        "os._exit(5)"
    )
    async with connected(command=[sys.executable, "-c", code]) as agent:
        with pytest.raises(AgentGone, match="exit code 5"):
            await agent.initialize("test")

        assert is_gone(int(agent.last_words[0]))


async def test_a_process_that_holds_stdout_does_not_hide_the_death_of_the_agent(monkeypatch):
    monkeypatch.setattr("acp_server.agent_process.TERMINATE_LIMIT_S", 0.1)
    code = (
        "import subprocess, sys, os;"
        "child = subprocess.Popen(['sleep', '60'], stderr=-3, start_new_session=True);"
        "print(child.pid, file=sys.stderr, flush=True);"
        "os._exit(5)"
    )
    async with connected(command=[sys.executable, "-c", code]) as agent:
        try:
            with pytest.raises(AgentGone, match="exit code 5"):
                await agent.initialize("test")
        finally:
            os.kill(int(agent.last_words[0]), signal.SIGKILL)


async def test_an_agent_that_cannot_be_started_is_named():
    with pytest.raises(AgentGone, match="cannot start /no/such/agent: No such file"):
        async with connected(command=["/no/such/agent"]):
            pass


async def test_the_agent_has_a_process_group_of_its_own_and_is_gone_afterwards():
    async with connected() as agent:
        await agent.initialize("test")
        assert os.getpgid(agent.pid) == agent.pid != os.getpgid(0)

    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)


async def test_an_agent_that_ignores_the_end_of_its_input_and_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr("acp_server.agent_process.TERMINATE_LIMIT_S", 0.1)
    async with connected(command=[*AGENT, "--stubborn"], grace_s=0.1) as agent:
        await agent.initialize("test")

    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)


async def test_a_stubborn_agent_is_ended_when_the_block_is_cancelled(monkeypatch):
    monkeypatch.setattr("acp_server.agent_process.TERMINATE_LIMIT_S", 0.1)
    with anyio.CancelScope() as scope:
        async with connected(command=[*AGENT, "--stubborn"], grace_s=0.1) as agent:
            await agent.initialize("test")
            scope.cancel()
            await anyio.sleep_forever()

    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)


async def test_another_protocol_version_is_refused():
    answer = {"jsonrpc": "2.0", "id": 1, "result": {"protocolVersion": 2}}
    code = f"input(); print('{json.dumps(answer)}', flush=True); input()"
    async with connected(command=[sys.executable, "-c", code]) as agent:
        with pytest.raises(RemoteError, match="the agent speaks protocol version 2, not 1"):
            await agent.initialize("test")


async def test_what_was_sent_before_hanging_up_arrives_and_nothing_after_it(tmp_path):
    heard = tmp_path / "heard"
    async with connected(command=["tee", str(heard)]) as agent:
        agent.notify("first", {"long": "x" * 300_000})
        agent.hang_up()
        agent.notify("second", {})
        with pytest.raises(AgentGone):
            await agent.request("third", {})

    (message,) = heard.read_text().splitlines()
    assert json.loads(message)["params"] == {"long": "x" * 300_000}


async def test_an_agent_that_asks_and_never_reads_is_not_read_any_more(monkeypatch):
    monkeypatch.setattr("acp_server.transports.stdio.HIGH_WATER_BYTES", 65536)
    code = (
        "import sys, itertools;"
        'ask = \'{"jsonrpc":"2.0","id":%d,"method":"x"}\';'
        "[print(ask % n, end=chr(10)) for n in itertools.count()]"
    )
    async with connected(command=[sys.executable, "-c", code], grace_s=0) as agent:
        while not agent._outbox.is_congested:
            await anyio.lowlevel.checkpoint()
        queued = agent._outbox._unread_bytes
        for _ in range(50):
            await anyio.wait_all_tasks_blocked()

        assert agent._outbox._unread_bytes < queued + 2 * 256 * 1024


async def test_only_the_environment_that_was_given_is_handed_on():
    code = "import os, sys; print(sorted(os.environ), file=sys.stderr)"
    environ = {"ONLY": "1", "LC_ALL": "C.UTF-8"}
    async with connected(command=[sys.executable, "-c", code], environ=environ) as agent:
        await agent.ended.wait()

        assert agent.last_words == ["['LC_ALL', 'ONLY']"]


async def test_a_failure_of_ours_still_ends_the_agent():
    def fail(_line: str) -> None:
        raise BrokenPipeError

    with anyio.fail_after(20), pytest.raises(ExceptionGroup) as failure:  # noqa: PT012
        async with open_agent(
            AGENT, cwd="/", methods={}, notifications={}, on_stderr=fail
        ) as agent:
            await agent.initialize("test")
            session = await agent.request("session/new", {"cwd": "/", "mcpServers": []})
            prompt = [{"type": "text", "text": "die"}]
            params = {"sessionId": session["sessionId"], "prompt": prompt}
            with pytest.raises(AgentGone):
                await agent.request("session/prompt", params)

    assert failure.group_contains(BrokenPipeError)
    assert is_gone(agent.pid)
