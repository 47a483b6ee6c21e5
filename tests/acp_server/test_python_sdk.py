"""The official Python SDK as a client: what an editor built on it does, from start to end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import acp
import anyio
import pytest
from acp import schema
from foreigners import python_sdk_to_come
from serve_rig import SERVE

LIMIT_S = 20


class Editor(acp.Client):
    """Keeps what it is shown, and answers every question with an option of `permission`'s kind."""

    def __init__(self, permission: str = "allow_once") -> None:
        self.permission = permission
        self.updates: list[Any] = []
        self.asked: list[schema.ToolCallUpdate] = []
        self._changed = anyio.Event()

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        self.updates.append(update)
        self._changed.set()
        self._changed = anyio.Event()

    async def request_permission(
        self,
        session_id: str,
        tool_call: schema.ToolCallUpdate,
        options: list[schema.PermissionOption],
        **kwargs: Any,
    ) -> schema.RequestPermissionResponse:
        self.asked.append(tool_call)
        option = next(option for option in options if option.kind == self.permission)
        outcome = schema.AllowedOutcome(outcome="selected", option_id=option.option_id)
        return schema.RequestPermissionResponse(outcome=outcome)

    @property
    def text(self) -> str:
        """All that the agent said."""
        return "".join(
            update.content.text
            for update in self.updates
            if isinstance(update, schema.AgentMessageChunk)
        )

    def statuses(self) -> list[str]:
        """The last status of each tool call."""
        calls: dict[str, str] = {}
        for update in self.updates:
            if isinstance(update, schema.ToolCallStart | schema.ToolCallProgress):
                calls[update.tool_call_id] = update.status or calls.get(update.tool_call_id, "")
        return list(calls.values())

    async def seen(self, is_there: Callable[[], bool]) -> None:
        """Wait until the updates so far make `is_there` true."""
        while not is_there():
            await self._changed.wait()


@asynccontextmanager
async def connected(editor: Editor, cwd: Path) -> AsyncIterator[Any]:
    """An initialized connection of the SDK to the real command; no wait is longer than 20 s."""
    with anyio.fail_after(LIMIT_S):
        async with acp.spawn_agent_process(
            editor, SERVE[0], *SERVE[1:], env=dict(os.environ), cwd=cwd
        ) as (connection, process):
            answer = await connection.initialize(
                protocol_version=acp.PROTOCOL_VERSION,
                client_info=schema.Implementation(name="tests", version="1"),
            )
            assert answer.protocol_version == acp.PROTOCOL_VERSION
            assert answer.agent_capabilities.load_session
            yield connection
        assert process.returncode == 0


async def prompt(connection: Any, session: str, text: str) -> str:
    answer = await connection.prompt(
        session_id=session, prompt=[schema.TextContentBlock(type="text", text=text)]
    )
    return str(answer.stop_reason)


@pytest.mark.requirement("ACP-081", "ACP-084")
async def test_a_session_through_the_sdk_reads_writes_and_runs(tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("what it holds\n")
    editor = Editor()
    async with connected(editor, tmp_path) as connection:
        session = (await connection.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id

        for text in ("say hello", "read here.txt", "write there.txt: new", "run echo printed"):
            assert await prompt(connection, session, text) == "end_turn"

        assert editor.statuses() == ["completed"] * 3
        assert [call.kind for call in editor.asked] == ["edit", "execute"]
        assert (tmp_path / "there.txt").read_text() == "new"
        for word in ("hello", "what it holds", "Wrote", "printed"):
            assert word in editor.text


async def test_a_rejected_question_leaves_the_file_alone(tmp_path: Path) -> None:
    editor = Editor("reject_once")
    async with connected(editor, tmp_path) as connection:
        session = (await connection.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id

        assert await prompt(connection, session, "write never.txt: x") == "end_turn"

        assert editor.statuses() == ["failed"]
        assert not (tmp_path / "never.txt").exists()


@pytest.mark.requirement("ACP-094", "ACP-099", "ACP-100")
@pytest.mark.parametrize("text", ["count 100000 slowly", "run sleep 300", "stall"])
async def test_a_cancel_through_the_sdk_stops_the_turn_and_the_session_goes_on(
    tmp_path: Path, text: str
) -> None:
    editor = Editor()
    async with connected(editor, tmp_path) as connection:
        session = (await connection.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        reasons: list[str] = []

        async def run() -> None:
            reasons.append(await prompt(connection, session, text))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            if text.startswith("count"):
                await editor.seen(lambda: "2 " in editor.text)
            elif text.startswith("run"):
                await editor.seen(lambda: editor.statuses() == ["in_progress"])
            else:
                await connection.list_sessions()  # the prompt was read before this
            await connection.cancel(session_id=session)

        assert reasons == ["cancelled"]
        assert all(status == "failed" for status in editor.statuses())
        assert await prompt(connection, session, "say ok") == "end_turn"
        assert editor.text.endswith("ok")


@pytest.mark.requirement("ACP-062", "ACP-068", "ACP-069")
async def test_a_session_is_listed_and_loaded_by_the_next_process(tmp_path: Path) -> None:
    before, after = Editor(), Editor()
    async with connected(before, tmp_path) as connection:
        session = (await connection.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        await prompt(connection, session, "say remembered then run echo done")
    async with connected(after, tmp_path) as connection:
        listed = await connection.list_sessions(cwd=str(tmp_path))
        await connection.load_session(cwd=str(tmp_path), session_id=session, mcp_servers=[])

        assert [entry.session_id for entry in listed.sessions] == [session]
        await after.seen(lambda: after.text == before.text)
        assert after.statuses() == before.statuses() == ["completed"]
        users = [u for u in after.updates if isinstance(u, schema.UserMessageChunk)]
        assert [update.content.text for update in users] == ["say remembered then run echo done"]
        assert await prompt(connection, session, "say ok") == "end_turn"


@pytest.mark.timeout(180)
def test_all_of_this_holds_with_the_sdk_to_come(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--python-sdk") is not None:
        assert Path(acp.__file__).is_relative_to(python_sdk_to_come())
        return
    others = "test_client_terminals.py::test_a_client_on_the_python_sdk_lends_its_tools"
    command = [sys.executable, "-m", "pytest", "-q", "--python-sdk", str(python_sdk_to_come())]

    done = subprocess.run(
        [*command, __file__, str(Path(__file__).with_name(others))],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout.splitlines()[-1], done.stdout
