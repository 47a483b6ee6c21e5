"""The agent from its first byte to its last: sessions kept, clients gone, signals, full disks."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from serving import SERVE, ask, assert_pure, environment, error_of, line, serving, text

from conformance.client import Client
from conformance.processes import cpu_s, rss_bytes
from conformance.wire import Wire, WireError

INITIALIZE = ask(0, "initialize", {"protocolVersion": 1})


async def until(condition, timeout_s: float = 10.0) -> None:
    """Wait for something that announces itself to nobody."""
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def load(client: Client, session_id: str, cwd: object) -> None:
    params = {"sessionId": session_id, "cwd": str(cwd), "mcpServers": []}
    await client.result(client.wire.request("session/load", params))


async def list_page(client: Client, **params: object) -> dict:
    return await client.result(client.wire.request("session/list", params))


async def running_tool(client: Client, session: str, command: str) -> int:
    """Start a prompt whose command runs; return the request's id."""
    request = client.prompt(session, f"run {command}")
    await until(client.wire.descendants)
    return request


def shown(updates: list[dict], kind: str | None = None) -> list[dict]:
    """Updates without those a client gets again for another reason."""
    unwanted = {"user_message_chunk", "available_commands_update"}
    return [
        update
        for update in updates
        if update["sessionUpdate"] not in unwanted and kind in (None, update["sessionUpdate"])
    ]


def exported(session_id: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "acp_server", "sessions", "export", session_id],
        capture_output=True,
        check=True,
        timeout=30,
    )
    return [json.loads(each)["data"] for each in done.stdout.splitlines()[1:]]


# --- the start ------------------------------------------------------------------------------


@pytest.mark.requirement("B144")
def test_nothing_heavy_is_imported_before_initialize_is_answered():
    heavy = [
        *("openai", "httpx2", "pydantic", "rich", "jsonschema", "sqlite3", "structlog"),
        *("argparse", "agent_core.loop", "agent_core.tools", "http", "email"),
    ]
    code = "import acp_server.cli, acp_server.serve, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert not set(heavy) & set(done.stdout.split())


@pytest.mark.requirement("B107", "ACP-001")
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"HOME": None, "XDG_STATE_HOME": None, "XDG_CONFIG_HOME": None}, "é.txt"),
        ({"LC_ALL": "C", "LANG": None, "PYTHONIOENCODING": "cp1252", "TERM": "dumb"}, "é.txt"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "a.txt"),
    ],
)
async def test_a_poor_environment_changes_nothing(changes, name, tmp_path):
    # Without HOME the user database would lead to the real home.
    arguments = ["--state-dir", str(tmp_path / "state")] if "HOME" in changes else []
    env = environment(**changes)
    async with serving(*arguments, permission="allow", env=env) as client:
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, f"write {name}: żółw 😀 then read {name}")

        assert await client.stop_reason(prompt) == "end_turn"
        assert "żółw 😀" in client.text(session)
        assert (tmp_path / name).read_bytes() == "żółw 😀".encode()


@pytest.mark.requirement("B146", "ACP-018")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mode", "yolo"], "yolo"),
        (["--model", "gpt"], "gpt"),
        (["--config", "/dev/null/none.toml"], "/dev/null/none.toml"),
        (["--log-file", "/dev/null/log"], "/dev/null/log"),
        (["--rehearsal-script", "/dev/null/none.jsonl"], "script"),
    ],
)
@pytest.mark.only_over("stdio", why="nothing listens with it")
async def test_a_configuration_that_cannot_be_used_is_said_to_the_client(arguments, said, tmp_path):
    async with serving(*arguments) as client:
        for _time in range(2):
            params = {"cwd": str(tmp_path), "mcpServers": []}
            error = await error_of(client, "session/new", params)
            assert error["code"] == -32603
            assert said in error["message"]
        await client.wire.close_stdin()
        assert await client.wire.exited() == 0


# --- list -----------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-068", "ACP-069", "ACP-070", "ACP-071", "ACP-072", "B081", "B082")
async def test_sixty_sessions_in_two_directories_are_listed_page_by_page(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    async with serving() as client:
        assert await list_page(client) == {"sessions": []}
        made: dict[str, list[str]] = {str(folder): [] for folder in folders}
        for n in range(60):
            session = await client.new_session(folders[n % 2])
            made[str(folders[n % 2])].append(session)
            await client.stop_reason(client.prompt(session, f"say {n}"))
        await client.new_session(folders[0])  # had no prompt

        pages, cursor = [], {}
        while True:
            page = await list_page(client, **cursor)
            pages.append([(each["cwd"], each["sessionId"]) for each in page["sessions"]])
            if "nextCursor" not in page:
                break
            cursor = {"cursor": page["nextCursor"]}

        listed = [each for page in pages for each in page]
        assert len(pages) == 2
        assert len(listed) == 60
        assert {(cwd, session) for cwd in made for session in made[cwd]} == set(listed)
        for cwd, sessions in made.items():
            page = await list_page(client, cwd=cwd)
            assert [each["sessionId"] for each in page["sessions"]] == sessions[::-1]
            assert "nextCursor" not in page
            assert page["sessions"][0]["title"].startswith("say ")
        assert await list_page(client, cwd=str(tmp_path)) == {"sessions": []}
        for bad in ({"cursor": "abc"}, {"cursor": ""}, {"cursor": 5}, {"cwd": "relative"}):
            assert (await error_of(client, "session/list", bad))["code"] == -32602


@pytest.mark.requirement("B084")
async def test_sessions_without_a_prompt_are_not_listed_but_can_be_loaded(tmp_path):
    async with serving() as client:
        sessions = [await client.new_session(tmp_path) for _n in range(5)]
    async with serving() as client:
        assert await list_page(client) == {"sessions": []}
        await load(client, sessions[0], tmp_path)


# --- load -----------------------------------------------------------------------------------


@pytest.mark.requirement(
    *(
        "ACP-060",
        "ACP-061",
        "ACP-062",
        "ACP-073",
        "ACP-120",
        "B075",
        "B076",
        "B077",
        "B080",
        "B083",
    ),
)
@pytest.mark.requirement("QUIRK-17")
async def test_a_loaded_session_shows_what_was_shown_live_and_goes_on(tmp_path):
    said = [
        "think hard then say hello",
        "write a.txt: one\\ntwo then edit a.txt: two => three then read a.txt",
        "plan one; two then run echo out; echo err >&2",
        "read nothing.txt",
        "/status",
        f"say {'long é ' * 10_000}",
    ]
    async with serving(permission="allow") as client:
        session = await client.new_session(tmp_path)
        for prompt in said:
            await client.stop_reason(client.prompt(session, prompt))
        live = client.wire.updates(session)

    async with serving(permission="allow") as client:
        listed = await list_page(client)
        assert client.wire.updates(session) == []  # listing loads nothing
        params = {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []}
        request = client.wire.request("session/load", params)
        result = await client.result(request)
        replayed = client.wire.updates(session)
        answer = client.wire.responses(request)[0]
        position = client.wire.received.index(answer)
        behind = client.wire.received[position + 1 :]

        assert shown(replayed) == shown(live)
        prompts: dict[str, str] = {}
        for update in replayed:
            if update["sessionUpdate"] == "user_message_chunk":
                message_id = update["messageId"]
                prompts[message_id] = prompts.get(message_id, "") + update["content"]["text"]
        assert list(prompts.values()) == said
        assert not [m for m in behind if "chunk" in m["params"]["update"]["sessionUpdate"]]
        assert set(result) == {"modes", "configOptions"}
        assert [each["sessionId"] for each in listed["sessions"]] == [session]
        assert await client.stop_reason(client.prompt(session, "say on we go")) == "end_turn"
        assert client.text(session).endswith("on we go")


@pytest.mark.requirement("ACP-076", "B083", "B025")
@pytest.mark.only_over("stdio", "ws", why="a status says so")
async def test_what_cannot_be_loaded_is_refused_and_leaves_no_session_behind(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say kept"))
    async with serving() as client:
        elsewhere = {"sessionId": session, "cwd": "/", "mcpServers": []}
        relative = {"sessionId": session, "cwd": ".", "mcpServers": []}
        for params in (elsewhere, relative):
            assert (await error_of(client, "session/load", params))["code"] == -32602
        prompt = {"sessionId": session, "prompt": text("say x")}
        assert (await error_of(client, "session/prompt", prompt))["code"] == -32002
        assert client.wire.updates(session) == []

        link = tmp_path.parent / f"{tmp_path.name}-link"
        link.symlink_to(tmp_path)
        await load(client, session, link)
        assert client.text(session) == "kept"


@pytest.mark.only_over("stdio", "ws", why="a status says so")
async def test_a_prompt_right_behind_a_load_that_fails_fails_with_it(tmp_path):
    async with serving() as client:
        loads = {"sessionId": "sess_nope", "cwd": str(tmp_path), "mcpServers": []}
        prompts = {"sessionId": "sess_nope", "prompt": text("say x")}
        requests = ask("load", "session/load", loads), ask("prompt", "session/prompt", prompts)
        client.wire.send_bytes(b"".join(map(line, requests)))

        for request_id in ("load", "prompt"):
            error = (await client.wire.response(request_id))["error"]
            assert (error["code"], error["data"]) == (-32002, {"sessionId": "sess_nope"})


@pytest.mark.race
@pytest.mark.requirement("B006", "B007", "ACP-094")
@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "let run"])
async def test_a_prompt_in_the_same_write_as_the_load_belongs_to_it(is_cancelled, tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "count 500"))
    async with serving() as client:
        named = {"sessionId": session}
        loads = {**named, "cwd": str(tmp_path), "mcpServers": []}
        cancel = {"jsonrpc": "2.0", "method": "session/cancel", "params": named}
        said = "count 100000 slowly" if is_cancelled else "say new"
        lines = [
            ask("load", "session/load", loads),
            ask("prompt", "session/prompt", {**named, "prompt": text(said)}),
            *([cancel] if is_cancelled else []),
        ]
        client.wire.send_bytes(b"".join(map(line, lines)))

        reason = (await client.wire.response("prompt"))["result"]["stopReason"]

        assert reason == ("cancelled" if is_cancelled else "end_turn")
        assert "result" in await client.wire.response("load")
        assert client.text(session).startswith("".join(f"{n} " for n in range(1, 501)))
        users = [u for u in client.wire.updates(session) if "user" in u["sessionUpdate"]]
        assert [u["content"]["text"] for u in users] == ["count 500"]  # not what was just typed
        assert await client.stop_reason(client.prompt(session, "say next")) == "end_turn"


@pytest.mark.requirement("ACP-083", "ACP-084")
async def test_an_active_session_may_be_loaded_again_even_while_a_turn_runs(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say first"))
        prompt = client.prompt(session, "count 1000 slowly")
        await client.wire.receive(lambda m: "2 " in str(m.get("params")))
        before = len(client.wire.updates(session))

        await load(client, session, tmp_path)
        client.cancel(session)

        assert await client.stop_reason(prompt) == "cancelled"
        again = client.wire.updates(session)[before:]
        numbers = "".join(u["content"]["text"] for u in shown(again, "agent_message_chunk"))
        count = len(numbers.split())
        assert numbers == "first" + "".join(f"{n} " for n in range(1, count + 1))


# --- the end --------------------------------------------------------------------------------


@pytest.mark.requirement("B087", "B088", "B097", "B102")
@pytest.mark.parametrize("state", ["before initialize", "idle", "streaming", "in a tool", "asking"])
async def test_at_the_end_of_input_everything_stops_and_the_exit_code_is_0(state, tmp_path):
    async with Wire.spawn(SERVE) as wire:
        client = Client(wire, permission="never" if state == "asking" else "allow")
        prompt = session = None
        if state != "before initialize":
            await client.initialize()
            session = await client.new_session(tmp_path)
        if state == "streaming":
            prompt = client.prompt(session, "count 100000 slowly")
            await wire.receive(lambda m: "2 " in str(m.get("params")))
        elif state == "in a tool":
            prompt = await running_tool(client, session, "sleep 60 | sleep 60")
        elif state == "asking":
            prompt = client.prompt(session, "run sleep 60")
            await wire.receive(lambda m: m.get("method") == "session/request_permission")

        await wire.close_stdin()

        assert await wire.exited() == 0
        assert wire.descendants() == set()
        if prompt is not None:
            assert await client.stop_reason(prompt) == "cancelled"
        assert_pure(wire)
        assert wire.stderr == ""
    if prompt is not None:
        ends = [data for data in exported(session) if data["type"] == "turn/end"]
        assert ends == [{"type": "turn/end", "turn": 1, "outcome": {"kind": "disposed"}}]


async def test_a_last_line_without_its_newline_is_served_or_refused_and_then_all_ends():
    async with Wire.spawn(SERVE) as wire:
        wire.send_bytes(line(INITIALIZE).rstrip())
        await wire.close_stdin()
        assert await wire.exited() == 0
        assert "result" in wire.responses(0)[0]
    async with Wire.spawn(SERVE) as wire:
        wire.send_bytes(line(INITIALIZE) + b'{"jsonrpc":"2.0",')
        await wire.close_stdin()
        assert await wire.exited() == 0
        assert [m["error"]["code"] for m in wire.responses(None)] == [-32700]


async def test_whatever_comes_in_one_write_with_the_end_of_input_is_answered_in_words(tmp_path):
    async with Wire.spawn(SERVE) as wire:
        params = {"cwd": str(tmp_path), "mcpServers": []}
        requests = INITIALIZE, ask(1, "session/new", params), ask(2, "session/list")
        wire.send_bytes(b"".join(map(line, requests)))
        await wire.close_stdin()

        assert await wire.exited() == 0
        for request_id in (1, 2):
            (answer,) = wire.responses(request_id)
            assert answer.get("error", {}).get("message") != "Internal error"
        assert wire.stderr == ""


@pytest.mark.requirement("B089")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.only_over("stdio", why="SIGHUP is for the tokens there")
async def test_a_signal_ends_everything_as_the_end_of_input_does(number, tmp_path):
    async with serving(permission="allow") as client:
        session = await client.new_session(tmp_path)
        prompt = await running_tool(client, session, "sleep 60")

        os.kill(client.wire.pid, number)

        assert await client.wire.exited() == 0
        assert await client.stop_reason(prompt) == "cancelled"
        assert client.wire.descendants() == set()


async def end_by_two_signals(wire: Wire) -> None:
    os.kill(wire.pid, signal.SIGTERM)
    os.kill(wire.pid, signal.SIGHUP)
    assert await wire.exited(5) in (128 + signal.SIGTERM, 128 + signal.SIGHUP)


@pytest.mark.requirement("B089")
@pytest.mark.only_over("stdio", why="SIGHUP is for the tokens there")
async def test_a_second_signal_ends_the_process_and_its_children_at_once(tmp_path):
    async with serving(permission="allow") as client:
        session = await client.new_session(tmp_path)
        await running_tool(client, session, "trap '' TERM; while :; do sleep 1; done")

        await end_by_two_signals(client.wire)

        await until(lambda: not client.wire.descendants(), 2)


STARTING_SLOWLY = """if True:
    import os, sys, time
    from acp_server.cli import main
    from agent_core.tools import process_table
    start_of = process_table.start_of
    def start_of_slowly(pid):  # called for a command that runs and is in no list yet
        for _ in range(0 if pid == os.getpid() else 1000):
            time.sleep(0.01)  # in pieces: another thread may be the one that gets the signal
        return start_of(pid)
    process_table.start_of = start_of_slowly
    sys.exit(main(["serve"]))
"""


@pytest.mark.race
@pytest.mark.requirement("B089")
@pytest.mark.only_over("stdio", why="SIGHUP is for the tokens there")
async def test_a_second_signal_also_ends_a_command_in_the_moment_of_its_start(tmp_path):
    async with Wire.spawn([sys.executable, "-c", STARTING_SLOWLY]) as wire:
        client = Client(wire, permission="allow")
        await client.initialize()
        session = await client.new_session(tmp_path)
        await running_tool(client, session, "trap '' TERM; sleep 60 & wait")

        await end_by_two_signals(wire)

        assert wire.descendants() == set()


@pytest.mark.requirement("B089")
@pytest.mark.only_over("stdio", why="SIGHUP is for the tokens there")
async def test_a_second_signal_also_ends_a_command_that_is_to_print_a_key(tmp_path):
    asks = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    config = tmp_path / "agent.toml"
    own = f"[providers.own]\nbase_url = 'http://127.0.0.1:9'\nkey_command = {json.dumps(asks)}"
    config.write_text(own)
    async with serving("--config", str(config), "--model", "own:x") as client:
        await running_tool(client, await client.new_session(tmp_path), "say it")

        await end_by_two_signals(client.wire)

        await until(lambda: not client.wire.descendants(), 2)


# --- a client that does not read ------------------------------------------------------------


async def start_raw(*arguments: str, **options) -> anyio.abc.Process:
    """Start the agent on bare pipes that nobody reads."""
    return await anyio.open_process([*SERVE, *arguments], **options)


async def next_line(process: anyio.abc.Process, rest: bytearray) -> dict:
    while b"\n" not in rest:
        rest += await process.stdout.receive()
    raw, _, behind = bytes(rest).partition(b"\n")
    rest[:] = behind
    return json.loads(raw)


async def open_raw(process: anyio.abc.Process, cwd: Path, rest: bytearray) -> str:
    await process.stdin.send(line(INITIALIZE))
    await process.stdin.send(line(ask(1, "session/new", {"cwd": str(cwd), "mcpServers": []})))
    while (message := await next_line(process, rest)).get("id") != 1:
        pass
    return message["result"]["sessionId"]


async def until_at_rest(pid: int) -> None:
    """Wait until the process uses no more processor time."""
    used = -1.0
    while used != (used := cpu_s(pid)):  # noqa: ASYNC110
        await anyio.sleep(0.3)


@pytest.mark.requirement("B105", "B126", "ACP-094", "ACP-096")
async def test_output_nobody_reads_is_bounded_and_later_complete_and_can_be_cancelled(
    tmp_path,
):
    async with await start_raw() as process:
        rest = bytearray()
        with anyio.fail_after(30):
            session = await open_raw(process, tmp_path, rest)
            before = rss_bytes(process.pid)
            prompt = {"sessionId": session, "prompt": text("count 9000000")}
            await process.stdin.send(line(ask(2, "session/prompt", prompt)))
            await until_at_rest(process.pid)
            assert rss_bytes(process.pid) < before + 60 * 2**20

            cancel = {
                "jsonrpc": "2.0",
                "method": "session/cancel",
                "params": {"sessionId": session},
            }
            await process.stdin.send(line(cancel))
            said = []
            while (message := await next_line(process, rest)).get("id") != 2:
                update = message["params"]["update"]
                if update["sessionUpdate"] == "agent_message_chunk":
                    said.append(update["content"]["text"])

        assert message["result"]["stopReason"] == "cancelled"
        assert said == [f"{n} " for n in range(1, len(said) + 1)]
        assert len(said) > 1000
        await process.stdin.aclose()
        with anyio.fail_after(5):
            assert await process.wait() == 0


@pytest.mark.requirement("B015")
def test_a_client_that_closes_its_ear_ends_the_agent(tmp_path):
    with subprocess.Popen(SERVE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as agent:
        new = ask(1, "session/new", {"cwd": str(tmp_path), "mcpServers": []})
        agent.stdin.write(line(INITIALIZE) + line(new))
        while (message := json.loads(agent.stdout.readline())).get("id") != 1:
            pass
        prompt = {"sessionId": message["result"]["sessionId"], "prompt": text("count 9999 slowly")}
        agent.stdin.write(line(ask(2, "session/prompt", prompt)))
        agent.stdout.readline()
        agent.stdout.close()

        assert agent.wait(20) == 0


async def test_the_end_of_input_is_not_held_up_by_output_that_nobody_reads(tmp_path):
    async with await start_raw() as process:
        rest = bytearray()
        with anyio.fail_after(20):
            session = await open_raw(process, tmp_path, rest)
            prompt = {"sessionId": session, "prompt": text("count 100000")}
            await process.stdin.send(line(ask(2, "session/prompt", prompt)))
            await next_line(process, rest)
            await process.stdin.aclose()

            assert await process.wait() == 0


@pytest.mark.requirement("ACP-004", "B150")
async def test_a_stderr_that_is_never_drained_holds_nothing_up(tmp_path):
    async with await start_raw("--log-level", "debug") as process:
        rest = bytearray()
        with anyio.fail_after(30):
            session = await open_raw(process, tmp_path, rest)
            noise = line({"jsonrpc": "2.0", "method": "_noise", "params": {}})
            for _time in range(10):
                await process.stdin.send(noise * 500)
            prompt = {"sessionId": session, "prompt": text("say heard")}
            await process.stdin.send(line(ask(2, "session/prompt", prompt)))
            while (message := await next_line(process, rest)).get("id") != 2:
                pass

        assert message["result"]["stopReason"] == "end_turn"
        await process.stdin.aclose()
        with anyio.fail_after(5):
            assert await process.wait() == 0


# --- stdout ---------------------------------------------------------------------------------

LEAK = """
import os
for fd in [0, 1, 2, *range(3, 64)]:
    try:
        os.write(fd, b"leak\\n")
    except OSError:
        pass
for fd in (0, 1):
    try:
        os.write(os.open(f"/proc/{os.getppid()}/fd/{fd}", os.O_WRONLY), b"leak\\n")
    except OSError:
        pass
"""


@pytest.mark.requirement("ACP-003", "B109")
@pytest.mark.only_over("stdio", why="it says so")
async def test_nothing_a_tools_child_writes_reaches_stdout_and_it_cannot_read_our_stdin(tmp_path):
    (tmp_path / "leak.py").write_text(LEAK)
    async with serving(permission="allow") as client:
        session = await client.new_session(tmp_path)

        leak = client.prompt(session, f"run exec {sys.executable} leak.py")
        assert await client.stop_reason(leak) == "end_turn"
        eat = client.prompt(session, "run cat; read line; echo got $line")
        assert await client.stop_reason(eat) == "end_turn"
        assert client.text(session).count("leak") >= 2  # the child's own stdout and stderr
        assert client.text(session).rstrip("`\n ").endswith("got")


CHATTY = """
import warnings
from acp_server.config import load_config
from acp_server.serve import serve_stdio

def configure():
    print("x" * 1_000_000)
    warnings.warn("x" * 1_000_000)
    return load_config({})

serve_stdio(configure, grace_s=5)
"""


@pytest.mark.requirement("ACP-003", "ACP-004", "B109")
def test_what_a_library_prints_while_serving_neither_blocks_nor_reaches_stdout():
    reads, writes = os.pipe()  # a stderr that nobody reads
    with subprocess.Popen(
        [sys.executable, "-c", CHATTY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writes,
    ) as agent:
        out, _err = agent.communicate(line(INITIALIZE) + line(ask(1, "session/list")), timeout=20)
    os.close(writes)
    os.close(reads)

    assert agent.returncode == 0
    assert sorted(json.loads(each)["id"] for each in out.splitlines()) == [0, 1]


# --- kill -9 --------------------------------------------------------------------------------


@pytest.mark.requirement("B062", "B090")
async def test_a_turn_that_was_answered_survives_a_kill(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say acknowledged"))
        client.wire.kill()
        await client.wire.exited()
    async with serving() as client:
        await load(client, session, tmp_path)

        assert client.text(session) == "acknowledged"
        assert await client.stop_reason(client.prompt(session, "say next")) == "end_turn"
    ends = [data["outcome"] for data in exported(session) if data["type"] == "turn/end"]
    assert ends == [{"kind": "completed"}, {"kind": "completed"}]


@pytest.mark.requirement("B062", "B078", "B090", "B127", "R68")
@pytest.mark.parametrize("state", ["streaming", "in a tool"])
async def test_a_turn_that_was_killed_is_closed_as_interrupted_and_the_next_works(state, tmp_path):
    async with serving(permission="allow") as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say acknowledged"))
        if state == "streaming":
            client.prompt(session, "count 100000 slowly")
            await client.wire.receive(lambda m: "3 " in str(m.get("params")))
        else:
            await running_tool(client, session, "sleep 60")
        client.wire.kill()
        await client.wire.exited()
    async with serving(permission="allow") as client:
        await load(client, session, tmp_path)
        updates = client.wire.updates(session)
        announced = [u["toolCallId"] for u in updates if u["sessionUpdate"] == "tool_call"]
        final = [u["toolCallId"] for u in updates if u.get("status") in ("completed", "failed")]

        assert client.text(session).startswith("acknowledged")
        assert announced == final
        assert len(announced) == (0 if state == "streaming" else 1)
        assert await client.stop_reason(client.prompt(session, "run echo next")) == "end_turn"
    ends = [data["outcome"] for data in exported(session) if data["type"] == "turn/end"]
    assert ends == [{"kind": "completed"}, {"kind": "interrupted"}, {"kind": "completed"}]


# --- a store that fails ---------------------------------------------------------------------


def database() -> Path:
    return Path(os.environ["XDG_STATE_HOME"]) / "acp-agent" / "sessions.sqlite3"


@pytest.mark.requirement("ACP-018", "B094")
async def test_a_database_locked_by_another_process_is_said_and_nothing_is_lost(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say first"))
        other = sqlite3.connect(database(), isolation_level=None)
        other.execute("begin immediate")

        prompt = client.prompt(session, "say second")
        response = await client.wire.response(prompt, timeout_s=20)
        other.execute("rollback")
        other.close()

        assert response["error"]["code"] == -32603
        assert "locked by another process" in response["error"]["message"]
        assert await client.stop_reason(client.prompt(session, "say third")) == "end_turn"
    async with serving() as client:
        await load(client, session, tmp_path)
        assert client.text(session) == "firstsecondthird"


@pytest.mark.requirement("ACP-018", "B094")
@pytest.mark.only_over("stdio", why="the test would limit the relay")
async def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(client.prompt(session, "say first"))
        files = [database(), *database().parent.glob("*-wal")]
        limit = max(path.stat().st_size for path in files)
        hard = resource.prlimit(client.wire.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(client.wire.pid, resource.RLIMIT_FSIZE, (limit, hard))

        response = await client.wire.response(client.prompt(session, "say second"))
        new = await error_of(client, "session/new", {"cwd": str(tmp_path), "mcpServers": []})
        resource.prlimit(client.wire.pid, resource.RLIMIT_FSIZE, (hard, hard))

        assert response["error"]["code"] == new["code"] == -32603
        assert "disk" in response["error"]["message"]
        assert "disk" in new["message"]
        assert await client.stop_reason(client.prompt(session, "say third")) == "end_turn"
    async with serving() as client:
        await load(client, session, tmp_path)
        assert client.text(session) == "firstsecondthird"


@pytest.mark.requirement("ACP-018")
@pytest.mark.only_over("stdio", why="nothing listens with it")
async def test_a_state_folder_that_cannot_be_made_is_said_and_the_agent_lives(tmp_path):
    (tmp_path / "file").write_text("in the way")
    async with serving("--state-dir", str(tmp_path / "file" / "state")) as client:
        for method in ("session/new", "session/list", "session/load"):
            params = {"cwd": str(tmp_path), "mcpServers": [], "sessionId": "sess_x"}
            error = await error_of(client, method, params)
            assert error["code"] == -32603
            assert "database cannot be opened" in error["message"]


@pytest.mark.only_over("stdio", why="nothing listens with it")
async def test_a_file_that_is_no_database_is_said_and_left_alone(tmp_path):
    (tmp_path / "sessions.sqlite3").write_text("precious notes, not a database at all" * 50)
    before = (tmp_path / "sessions.sqlite3").read_bytes()
    async with serving("--state-dir", str(tmp_path)) as client:
        error = await error_of(client, "session/new", {"cwd": str(tmp_path), "mcpServers": []})

        assert "not a session database" in error["message"]
        assert (tmp_path / "sessions.sqlite3").read_bytes() == before


@pytest.mark.requirement("B023")
async def test_the_wire_of_these_tests_would_see_an_answer_that_never_comes(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        prompt = client.prompt(session, "stall")

        with pytest.raises(WireError, match="did not come"):
            await client.stop_reason(prompt, timeout_s=0.1)
        client.cancel(session)
        assert await client.stop_reason(prompt) == "cancelled"


# --- garbage ----------------------------------------------------------------------------------

COLLECTING = """
import gc


def load(runtime):
    async def say(*args):
        print(f"collecting={gc.isenabled()} kept={gc.get_freeze_count() > 0}", flush=True)  # stderr
        return await args[-1]()

    runtime.hooks.on("agent/prompt-submit", say)
"""


@pytest.mark.only_over("stdio", why="all is loaded first there")
async def test_garbage_is_looked_for_again_once_all_is_loaded_and_not_in_what_is_loaded(tmp_path):
    (tmp_path / "collecting.py").write_text(COLLECTING)

    async with serving("--plugin", "collecting:load", env=environment(PYTHONPATH=tmp_path)) as at:
        session = await at.new_session(tmp_path)
        assert await at.stop_reason(at.prompt(session, "say hello")) == "end_turn"
        await until(lambda: "collecting=" in at.wire.stderr)
        told = at.wire.stderr

    assert "collecting=True kept=True" in told
