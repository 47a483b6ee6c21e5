"""A Stop over the wire, with subagents at every level: nothing is left when it is answered.

Each test stops the same session again and again in one process. After each stop the agent itself
says which agents and tasks it still has, and the system which processes.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from serve_rig import served, settle_cancelled, tool_calls

from agent_core.events import Aborted, TurnEnd
from agent_core.sessions.sqlite import SqliteStore
from conformance.client import Client

HERE = Path(__file__).parent
PLUGIN = f"--plugin={HERE.joinpath('cascade_plugin.py').stem}:set_up"
LIMIT_S = 20
MOST = 8  # children of one agent that live at once

pytestmark = [pytest.mark.race, pytest.mark.timeout(180)]


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> range:
    """How often a session is stopped; ten times twenty in `make stress`."""
    return range(10 if request.config.getoption("--repeat") > 1 else 2)


# --- what agents are told to do -------------------------------------------------------------

Call = list[Any]


def delegate(*calls: Call) -> Call:
    return ["delegate", {"task": json.dumps(calls)}]


def sleep(folder: Path, name: object) -> Call:
    """A shell that says so once it runs, with a process below it."""
    command = f"(sleep 300; true) & touch {folder}/started-{name}; wait"
    return ["shell", {"command": command}]


def deaf(folder: Path) -> Call:
    return ["deaf", {"folder": str(folder)}]


class Cascade:
    """One session of a real agent, to be stopped again and again."""

    def __init__(self, client: Client, session: str, place: Path) -> None:
        self.client = client
        self.session = session
        self.place = place
        self._before: object = None

    async def census(self) -> dict[str, Any]:
        """Return how many agents there are, and the tasks that run."""
        request_id = self.client.prompt(self.session, json.dumps([["census", {}]]))
        assert await self.client.stop_reason(request_id) == "end_turn"
        *_, call = tool_calls(self.client, self.session).values()
        found: dict[str, Any] = json.loads(call["content"][0]["content"]["text"])
        return found

    async def starts(self, number: int, *calls: Call) -> int:
        """Prompt, and wait until so many leaves have started; return the prompt's id."""
        request_id = self.client.prompt(self.session, json.dumps(calls))
        await self.until(lambda: len(self.started()) >= number)
        return request_id

    def started(self) -> set[str]:
        return {path.name for path in self.place.glob("started-*")}

    async def until(self, condition: Any) -> None:
        with anyio.fail_after(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - other processes
                await anyio.sleep(0.005)

    async def ends(self, request_id: int, before: object) -> None:
        """Check that the stop is answered, and that nothing of the turn is left anywhere."""
        await settle_cancelled(self.client, self.session, request_id)
        assert await self.census() == before
        for path in self.place.iterdir():
            path.unlink()


@asynccontextmanager
async def cascade(tmp_path: Path) -> AsyncIterator[Cascade]:
    place = tmp_path / "place"
    place.mkdir()
    flags = (PLUGIN, "--mode=bypass", f"--state-dir={tmp_path / 'state'}")
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    async with served(tmp_path, *flags, env={"PYTHONPATH": path}) as client:
        yield Cascade(client, await client.new_session(tmp_path), place)


async def ends_of_logs(tmp_path: Path) -> list[list[object]]:
    """Return, for each subagent, the outcomes of its turns."""
    path = tmp_path / "state" / "sessions.sqlite3"
    with sqlite3.connect(path) as connection:
        query = "select id from sessions where depth > 0"
        ids = [row[0] for row in connection.execute(query)]
    connection.close()
    store = SqliteStore(path)
    logs = [(await store.load(session_id))[1] for session_id in ids]
    await store.aclose()
    return [[e.data.outcome for e in log if isinstance(e.data, TurnEnd)] for log in logs]


# --- stops ----------------------------------------------------------------------------------


@pytest.mark.requirement("R68", "R69", "R83", "B047", "B048", "B005")
async def test_a_stop_reaches_the_shell_below_three_subagents(
    tmp_path: Path, rounds: range
) -> None:
    async with cascade(tmp_path) as at:
        before = await at.census()
        assert before["agents"] == 1
        for _ in rounds:
            lowest = sleep(at.place, "low")
            request_id = await at.starts(1, delegate(delegate(delegate(lowest))))
            at.client.cancel(at.session)
            await at.ends(request_id, before)

    assert await ends_of_logs(tmp_path) == [[Aborted()]] * 3 * len(rounds)


@pytest.mark.requirement("R68", "B047", "B048", "B127")
async def test_a_stop_reaches_eight_side_by_side(tmp_path: Path, rounds: range) -> None:
    async with cascade(tmp_path) as at:
        before = await at.census()
        for _ in rounds:
            team = [delegate(sleep(at.place, number)) for number in range(MOST)]
            request_id = await at.starts(MOST, *team)
            at.client.cancel(at.session)
            await at.ends(request_id, before)

    assert await ends_of_logs(tmp_path) == [[Aborted()]] * MOST * len(rounds)


@pytest.mark.requirement("R73", "R74", "B019")
async def test_a_stop_is_not_answered_before_the_one_that_does_not_listen_has_ended(
    tmp_path: Path, rounds: range
) -> None:
    async with cascade(tmp_path) as at:
        before = await at.census()
        for _ in rounds:
            team = [delegate(sleep(at.place, number)) for number in range(MOST - 1)]
            request_id = await at.starts(MOST, delegate(delegate(deaf(at.place))), *team)
            at.client.cancel(at.session)
            await at.until((at.place / "noticed").exists)
            await at.until(lambda: at.client.wire.descendants() == set())
            await at.client.wire.silence()

            assert at.client.wire.responses(request_id) == []

            (at.place / "enough").touch()
            await at.ends(request_id, before)

    assert await ends_of_logs(tmp_path) == [[Aborted()]] * (MOST + 1) * len(rounds)


@pytest.mark.requirement("B050")
@pytest.mark.parametrize("where", ["in front", "in the background"])
async def test_those_that_wait_for_a_place_never_start(
    tmp_path: Path, rounds: range, where: str
) -> None:
    async with cascade(tmp_path) as at:
        before = await at.census()
        for _ in rounds:
            team = [delegate(sleep(at.place, number)) for number in range(MOST + 4)]
            if where == "in the background":  # there they wait for a place, here for their calls
                for call in team:
                    call[1]["background"] = True
                team.append(sleep(at.place, "own"))  # or the turn would end
            n_started = MOST + (where == "in the background")
            request_id = await at.starts(n_started, *team)
            at.client.cancel(at.session)
            await at.client.stop_reason(request_id)

            assert len(at.started()) == n_started

            await at.ends(request_id, before)

    assert await ends_of_logs(tmp_path) == [[Aborted()]] * MOST * len(rounds)


@pytest.mark.requirement("B047", "B049", "B058", "B060")
async def test_a_stop_reaches_those_in_the_background_too(tmp_path: Path, rounds: range) -> None:
    async with cascade(tmp_path) as at:
        before = await at.census()
        for _ in rounds:
            behind = delegate(delegate(sleep(at.place, "behind")))
            behind[1] |= {"background": True, "name": "behind"}
            request_id = await at.starts(2, behind, delegate(sleep(at.place, "front")))
            at.client.cancel(at.session)
            await at.ends(request_id, before)

    assert await ends_of_logs(tmp_path) == [[Aborted()]] * 3 * len(rounds)
