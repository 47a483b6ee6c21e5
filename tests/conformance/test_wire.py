from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from conformance import processes
from conformance.client import Client
from conformance.wire import Wire, WireError

AGENT = [sys.executable, str(Path(__file__).parents[1] / "acp_server" / "scripted_agent.py")]


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


async def open_session(wire: Wire, **options) -> tuple[Client, str]:
    client = Client(wire, **options)
    await client.initialize()
    return client, await client.new_session(Path.cwd())


def is_alive(pid: int) -> bool:
    return bool(processes.living_family({pid}, "NO=marker"))


async def test_a_prompt_is_answered_after_all_its_updates():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire)

        reason = await client.stop_reason(client.prompt(session, "count 3"))

        assert reason == "end_turn"
        assert client.text(session) == "1 2 3 "


async def test_the_trace_holds_every_line_of_both_directions_in_order():
    async with Wire.spawn(AGENT) as wire:
        request_id = wire.request("initialize", {})
        response = await wire.response(request_id)

        sent, received = wire.trace

        assert (sent.direction, received.direction) == ("sent", "received")
        assert sent.message == {
            "jsonrpc": "2.0",
            "id": request_id,
            "method": "initialize",
            "params": {},
        }
        assert received.message == response
        assert sent.time_s <= received.time_s


async def test_bytes_are_sent_as_they_are():
    echo = python("import sys; sys.stdout.write(repr(sys.stdin.buffer.readline()) + '\\n')")
    async with Wire.spawn(echo) as wire:
        wire.send_bytes(b"\xff{\n")

        assert await wire.exited() == 0
        with pytest.raises(WireError):
            await wire.receive(lambda message: True)
        assert wire.noise == [rb"b'\xff{\n'"]
        assert wire.received == []


async def test_a_line_of_ten_megabytes_is_one_message():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire)

        await client.stop_reason(client.prompt(session, "big 10000000"), timeout_s=30)

        assert client.text(session) == "x" * 10_000_000


async def test_receive_returns_each_message_once_and_sees_earlier_ones():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire)
        await client.stop_reason(client.prompt(session, "count 2"))

        def is_chunk(message):
            return message.get("method") == "session/update" and "content" in str(message)

        first = await wire.receive(is_chunk)
        second = await wire.receive(is_chunk)

        assert first["params"]["update"]["content"]["text"] == "1 "
        assert second["params"]["update"]["content"]["text"] == "2 "
        with pytest.raises(WireError, match="did not come"):
            await wire.receive(is_chunk, timeout_s=0.01)


async def test_ids_are_matched_by_value_and_json_type():
    code = """if True:
        import sys
        sys.stdin.readline()
        for id in ('"1"', '1.0', 'true', '1', '1'):
            print('{"jsonrpc":"2.0","id":%s,"result":{"id":"%s"}}' % (id, id.strip('"')))
    """
    async with Wire.spawn(python(code)) as wire:
        response = await wire.response(wire.request("x", {}))
        await wire.exited()

        assert response["id"] == 1
        assert type(response["id"]) is int
        assert len(wire.responses("1")) == 1


async def test_a_response_that_does_not_come_shows_the_transcript():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire)
        request_id = client.prompt(session, "wait")

        with pytest.raises(WireError) as caught:
            await wire.response(request_id, timeout_s=0.2)

        assert f"the response to {request_id} did not come within 0.2 s" in str(caught.value)
        assert '"text":"wait"' in str(caught.value)
        assert "the agent runs" in str(caught.value)


async def test_an_agent_that_dies_ends_every_wait_and_shows_its_last_words():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire)

        with pytest.raises(WireError) as caught:
            await client.stop_reason(client.prompt(session, "die"))

        assert "cannot come any more" in str(caught.value)
        assert await wire.exited() == 3
        assert wire.stderr == "last words\n"
        assert "stderr  last words" in wire.transcript()


async def test_a_child_that_holds_stdout_open_does_not_hide_the_death_of_the_agent():
    code = "import subprocess, os; subprocess.Popen(['sleep', '60']); os._exit(4)"
    async with Wire.spawn(python(code)) as wire:
        with pytest.raises(WireError, match="cannot come any more"):
            await wire.response(wire.request("x", {}))

        assert await wire.exited() == 4


async def test_requests_of_the_agent_without_an_answer_in_the_table_are_refused():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire)

        await client.stop_reason(client.prompt(session, "call fs/read_text_file"))

        assert client.text(session) == "code -32601"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("allow", "outcome go"),
        ("reject", "outcome no"),
        ("cancelled", "outcome cancelled"),
        (lambda params: {"outcome": {"outcome": "selected", "optionId": "7"}}, "outcome 7"),
    ],
)
async def test_permissions_are_answered_by_the_policy(policy, said):
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire, permission=policy)

        await wire.response(client.prompt(session, "ask"))

        assert client.text(session) == said


@pytest.mark.requirement("ACP-092")
async def test_held_permissions_are_answered_when_the_turn_is_cancelled():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire, permission="hold")
        request_id = client.prompt(session, "ask")
        await wire.receive(lambda m: m.get("method") == "session/request_permission")

        client.cancel(session)

        assert await client.stop_reason(request_id) == "cancelled"
        assert wire.unanswered == {}


async def test_a_permission_that_is_never_answered_stays_open_after_a_cancel():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire, permission="never")
        request_id = client.prompt(session, "ask")
        await wire.receive(lambda m: m.get("method") == "session/request_permission")

        client.cancel(session)
        await wire.silence()

        assert wire.responses(request_id) == []
        assert len(wire.unanswered) == 1


async def test_silence_returns_what_came_before_the_barrier_and_nothing_older():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire)
        await client.stop_reason(client.prompt(session, "count 2"))

        wire.request("session/set_mode", {"sessionId": session, "modeId": "nope"})
        before = await wire.silence()

        assert [message["error"]["code"] for message in before] == [-32602]
        assert await wire.silence() == []


async def test_closing_stdin_lets_the_agent_leave():
    async with Wire.spawn(AGENT) as wire:
        await wire.close_stdin()

        assert await wire.exited() == 0


async def test_input_that_is_not_read_does_not_block_the_sender():
    async with Wire.spawn(["sleep", "60"]) as wire:
        wire.send_bytes(b"x" * 5_000_000)

        with pytest.raises(WireError, match="did not read its input"):
            await wire.close_stdin(timeout_s=0.1)


async def test_requests_that_come_after_stdin_was_closed_are_left_alone():
    code = """if True:
        import sys
        sys.stdin.read()
        print('{"jsonrpc":"2.0","id":1,"method":"late"}')
    """
    async with Wire.spawn(python(code)) as wire:
        await wire.close_stdin()
        late = await wire.receive(lambda message: True)

        assert late["method"] == "late"
        assert await wire.exited() == 0


async def test_signals_reach_the_agent():
    async with Wire.spawn(AGENT) as wire:
        await Client(wire).initialize()
        wire.terminate()

        assert await wire.exited() == -signal.SIGTERM


async def test_stderr_is_bounded():
    code = "import sys; [sys.stderr.write('x' * 9999 + '\\n') for _ in range(300)]"
    async with Wire.spawn(python(code)) as wire:
        assert await wire.exited() == 0
        with pytest.raises(WireError):
            await wire.receive(lambda message: True)

        assert 256 * 1024 <= len(wire.stderr) <= 400_000


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="markers are found in /proc")
async def test_a_grandchild_in_a_session_of_its_own_is_seen_and_ended():
    async with Wire.spawn(AGENT) as wire:
        client, session = await open_session(wire)
        await client.stop_reason(client.prompt(session, "orphan"))
        pid = int(client.text(session))
        assert pid in wire.descendants()

        await wire.close_stdin()
        await wire.exited()
        assert wire.descendants() == {pid}

    assert not is_alive(pid)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
async def test_a_stubborn_agent_is_ended_even_when_the_test_fails():
    pids = []

    async def fail() -> None:
        async with Wire.spawn([*AGENT, "--stubborn"]) as wire:
            pids.append(wire.pid)
            await Client(wire).initialize()
            raise RuntimeError("the test failed")

    with pytest.raises(RuntimeError, match="the test failed"):
        await fail()

    assert not is_alive(pids[0])


async def test_the_agent_gets_the_environment_and_folder_it_is_given(tmp_path):
    code = "import os, json; print(json.dumps({'a': os.environ.get('A'), 'cwd': os.getcwd()}))"
    async with Wire.spawn(python(code), cwd=tmp_path, env={**os.environ, "A": "b"}) as wire:
        assert await wire.receive(lambda message: True) == {"a": "b", "cwd": str(tmp_path)}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
async def test_what_the_agent_uses_can_be_measured():
    async with Wire.spawn(AGENT) as wire:
        await Client(wire).initialize()

        assert wire.rss_bytes() > 1_000_000
        assert wire.cpu_s() >= 0.0
