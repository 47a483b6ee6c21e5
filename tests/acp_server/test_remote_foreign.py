"""Agents that were not made by us: on the official SDKs of two languages."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from foreigners import HERE, TYPESCRIPT_SDK, on_node, python_sdk_to_come
from remoting import (
    assert_told_nothing_but_the_session,
    delegating,
    group_of,
    outcome_of,
    pid_of,
    recorded,
    said,
    start,
    until,
)

from agent_core.cancellation import USER, AbortController
from agent_core.permissions import Approval
from agent_core.subagents import SubagentResult
from agent_core.tools.pipeline import ToolExecution

LEAVES_BY_ITSELF: dict[str, Any] = {"exit_grace_s": 60}  # or the test runs into its limit


@pytest.fixture(params=["python", "python to come", "typescript"])
def foreigner(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "typescript":
        return ["node", str(HERE / "typescript_sdk_agent.mjs"), str(on_node(TYPESCRIPT_SDK))]
    sdk = [str(python_sdk_to_come())] if request.param == "python to come" else []
    return [sys.executable, str(HERE / "python_sdk_agent.py"), *sdk]


async def test_it_answers_and_leaves_at_the_end_of_its_input(
    tmp_path: Path, foreigner: list[str]
) -> None:
    async with delegating(tmp_path, foreigner, **LEAVES_BY_ITSELF) as parent:
        result = await outcome_of(parent, "say from far away")

    assert result == SubagentResult("completed", "from far away")


@pytest.mark.parametrize(
    ("permissions", "picked"), [("allow", "go"), ("reject", "no")], ids=["allow", "reject"]
)
async def test_its_question_is_answered_by_policy(
    tmp_path: Path, foreigner: list[str], permissions: str, picked: str
) -> None:
    async with delegating(tmp_path, foreigner, permissions=permissions) as parent:
        parent.set_mode("ask")
        assert (await outcome_of(parent, "ask")).output == picked


async def test_its_question_is_put_to_the_person_with_what_it_is_about(
    tmp_path: Path, foreigner: list[str]
) -> None:
    asked: list[str] = []

    async def answer(execution: ToolExecution, _next: object) -> Approval:
        asked.append(execution.view.title)
        return Approval.ALLOWED

    async with delegating(tmp_path, foreigner) as parent:
        parent.set_mode("ask")
        parent.hooks.on("approval/request", answer)
        assert (await outcome_of(parent, "ask")).output == "go"

    assert asked == ["Delete it"]


@pytest.mark.race
@pytest.mark.requirement("R71")
async def test_a_stop_reaches_it_as_its_sessions_cancel_and_nothing_else(
    tmp_path: Path, foreigner: list[str]
) -> None:
    controller, wire = AbortController(), tmp_path / "wire"
    async with delegating(tmp_path, recorded(wire, foreigner), **LEAVES_BY_ITSELF) as parent:
        run = await start(parent, "wait", signal=controller.signal)
        await until(lambda: said(run) == "waiting")
        controller.abort(USER)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []

    assert result == SubagentResult("aborted", "waiting")
    assert_told_nothing_but_the_session(wire)


async def test_one_that_ignores_the_stop_is_ended(tmp_path: Path, foreigner: list[str]) -> None:
    controller = AbortController()
    async with delegating(tmp_path, foreigner, cancel_grace_s=0.2, exit_grace_s=0.2) as parent:
        run = await start(parent, "ignore", signal=controller.signal)
        await until(lambda: said(run) == "waiting")
        controller.abort(USER)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []

    assert result == SubagentResult("aborted", "waiting")


@pytest.mark.parametrize("how", ["by itself", "killed"])
async def test_one_that_dies_is_a_failed_run(
    tmp_path: Path, foreigner: list[str], how: str
) -> None:
    async with delegating(tmp_path, foreigner) as parent:
        run = await start(parent, "die" if how == "by itself" else "wait")
        if how == "killed":
            await until(lambda: said(run) == "waiting")
            os.kill(pid_of(run), signal.SIGKILL)
        result = await run.result()
        await run.dispose()

        assert group_of(run) == []

    assert result.reason == "error"
    assert result.output == ("waiting" if how == "killed" else "dying")
    assert result.message.startswith("The subagent 'remote' failed: the agent ")
