from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from acp_server.chat.client import METHOD_NOT_FOUND, AgentGone, RequestFailed, open_agent

AGENT = [sys.executable, str(Path(__file__).with_name("scripted_agent.py"))]
INITIALIZE = {"protocolVersion": 1, "clientCapabilities": {}}


class Recorder:
    """What the agent sent, and what to answer."""

    def __init__(self, result=None) -> None:
        self.notifications = []
        self.requests = []
        self.result = result
        self.has_asked = anyio.Event()
        self.was_withdrawn = False

    def on_notification(self, method, params) -> None:
        self.notifications.append((method, params))

    async def on_request(self, method, params):
        self.requests.append((method, params))
        self.has_asked.set()
        if self.result is None:
            raise RequestFailed(METHOD_NOT_FOUND, "Method not found")
        if self.result == "never":
            try:
                await anyio.sleep_forever()
            finally:
                self.was_withdrawn = True
        return self.result

    @property
    def text(self) -> str:
        updates = [params["update"] for _, params in self.notifications]
        return "".join(
            u["content"]["text"] for u in updates if u["sessionUpdate"] == "agent_message_chunk"
        )


@asynccontextmanager
async def connected(recorder=None, *, command=AGENT, **options):
    recorder = recorder or Recorder()
    with anyio.fail_after(15):
        async with open_agent(
            command,
            cwd=str(Path.cwd()),
            on_notification=recorder.on_notification,
            on_request=recorder.on_request,
            **options,
        ) as agent:
            yield agent


async def prompt(agent, text):
    blocks = [{"type": "text", "text": text}]
    return await agent.request("session/prompt", {"sessionId": "s1", "prompt": blocks})


async def test_what_was_said_before_an_answer_is_handed_on_before_it():
    recorder = Recorder()
    async with connected(recorder) as agent:
        hello = await agent.request("initialize", INITIALIZE)
        result = await prompt(agent, "count 3")

        assert hello["agentInfo"]["name"] == "scripted"
        assert result == {"stopReason": "end_turn"}
        assert recorder.text == "1 2 3 "


async def test_an_error_answer_is_raised_and_the_connection_goes_on():
    async with connected() as agent:
        with pytest.raises(RequestFailed, match="on holiday") as caught:
            await prompt(agent, "fail")

        assert caught.value.code == -32603
        assert await prompt(agent, "count 1") == {"stopReason": "end_turn"}


@pytest.mark.requirement("ACP-014")
async def test_a_request_that_is_refused_is_answered_with_its_code():
    recorder = Recorder()
    async with connected(recorder) as agent:
        await prompt(agent, "call fs/read_text_file")

        assert recorder.text == "code -32601"


@pytest.mark.requirement("ACP-106")
async def test_a_request_that_the_agent_withdraws_is_cancelled_and_answered():
    recorder = Recorder("never")
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
        await agent.notify("session/cancel", {"sessionId": "s1"})

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
            await agent.request("initialize", INITIALIZE)
        await agent.notify("session/cancel", {"sessionId": "s1"})


async def test_a_signal_that_ended_the_agent_is_named():
    async with connected() as agent:
        await agent.request("initialize", INITIALIZE)
        os.kill(agent.pid, signal.SIGKILL)
        await agent.ended.wait()

        assert str(agent.why_gone()) == "the agent was ended by SIGKILL"


async def test_a_child_that_holds_stdout_does_not_hide_the_death_of_the_agent():
    code = "import subprocess, os; subprocess.Popen(['sleep', '60'], stderr=-3); os._exit(5)"
    async with connected(command=[sys.executable, "-c", code]) as agent:
        try:
            with pytest.raises(AgentGone, match="exit code 5"):
                await agent.request("initialize", INITIALIZE)
        finally:
            os.killpg(agent.pid, signal.SIGKILL)


async def test_an_agent_that_cannot_be_started_is_named():
    with pytest.raises(AgentGone, match="cannot start /no/such/agent: No such file"):
        async with connected(command=["/no/such/agent"]):
            pass


async def test_the_agent_has_a_process_group_of_its_own_and_is_gone_afterwards():
    async with connected() as agent:
        await agent.request("initialize", INITIALIZE)
        assert os.getpgid(agent.pid) == agent.pid != os.getpgid(0)

    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)


async def test_an_agent_that_ignores_the_end_of_its_input_and_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr("acp_server.chat.client.TERMINATE_LIMIT_S", 0.1)
    async with connected(command=[*AGENT, "--stubborn"], grace_s=0.1) as agent:
        await agent.request("initialize", INITIALIZE)

    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)


async def test_an_agent_is_ended_when_the_block_is_cancelled():
    with anyio.CancelScope() as scope:
        async with connected() as agent:
            await agent.request("initialize", INITIALIZE)
            scope.cancel()
            await anyio.sleep_forever()

    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)
