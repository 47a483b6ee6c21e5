"""What may run: decisions of listeners, answers of people, and what both were shown."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import Rig, answer_ok, call, rig, tool

from agent_core.agent import Agent
from agent_core.content import Diff, Text
from agent_core.events import Completed, ToolResult, ToolStart
from agent_core.models.rehearsal import RehearsalModel
from agent_core.permissions import Approval, Decision
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.pipeline import ToolExecution
from agent_core.tools.registry import default_tools

# --- what a policy decided --------------------------------------------------------------------

MALFORMED: list[Any] = [
    Decision("deny", "no"),  # type: ignore[arg-type]
    Decision("allow", "yes"),  # type: ignore[arg-type]
    Decision("DENY", "no"),  # type: ignore[arg-type]
    Decision(None, "no"),  # type: ignore[arg-type]
    Decision(False, "no"),  # type: ignore[arg-type]
    Decision(True, "yes"),  # type: ignore[arg-type]
    None,
    False,
    True,
    "allow",
    0,
]


@pytest.mark.parametrize("decision", MALFORMED, ids=repr)
async def test_what_is_no_valid_decision_denies(decision: Any) -> None:
    async with rig(call("act"), tools=[tool("act", answer_ok, does="execute")]) as at:

        async def decide(*_args: Any) -> Any:
            return decision

        at.agent.hooks.on("tools/pre-execute", decide)

        outcome = await at.agent.send("go").settled()

        assert isinstance(outcome, Completed)
        assert_denied(at)
        assert [r["event"] for r in at.records if r["log_level"] == "error"] == [
            "decision_malformed"
        ]


async def test_a_policy_that_fails_denies() -> None:
    async with rig(call("act"), tools=[tool("act", answer_ok, does="execute")]) as at:

        async def decide(*_args: Any) -> Any:
            raise RuntimeError("the policy is broken")

        at.agent.hooks.on("tools/pre-execute", decide)

        await at.agent.send("go").settled()

        assert at.of(ToolStart) == []
        assert at.results[0].is_error


@pytest.mark.parametrize("answer", [None, True, "allowed", 1], ids=repr)
async def test_what_is_no_valid_answer_to_a_question_is_not_a_yes(answer: Any) -> None:
    asks = [tool("act", answer_ok, does="execute")]
    async with rig(call("act"), tools=asks, mode="ask") as at:

        async def reply(*_args: Any) -> Any:
            return answer

        at.agent.hooks.on("approval/request", reply)

        await at.agent.send("go").settled()

        assert at.of(ToolStart) == []
        assert at.results[0].is_error


def assert_denied(at: Rig) -> None:
    assert at.of(ToolStart) == []
    assert [result.code for result in at.results] == ["DENIED"]


# --- what a person was shown ------------------------------------------------------------------

Ask = Callable[[ToolExecution], Awaitable[Approval]]


async def one_prompt(place: Path, prompt: str, ask: Ask) -> ToolResult:
    """Let the rehearsal agent do what `prompt` says; return the result of its one call."""
    async with AgentRuntime(
        MemoryStore(),
        model=RehearsalModel(),
        tools=default_tools(),
        files=LocalFiles(),
        commands=LocalCommands(),
        mode="ask",
    ) as runtime:
        agent: Agent = await runtime.create(str(place))

        async def answer(execution: ToolExecution, _next: object) -> Approval:
            return await ask(execution)

        agent.hooks.on("approval/request", answer)
        with anyio.fail_after(5):
            assert isinstance(await agent.send(prompt).settled(), Completed)
        events = [event.data for event in agent.session.events]
    (result,) = [data for data in events if isinstance(data, ToolResult)]
    assert any(isinstance(data, ToolStart) for data in events) != result.is_error
    return result


@pytest.mark.parametrize(
    ("prompt", "meanwhile"),
    [
        ("edit a.txt: old => new", "old and more\n"),
        ("edit a.txt: old => new", "something else\n"),
        ("write a.txt: new", "somebody's work\n"),
        ("write a.txt: new", None),
        ("write b.txt: new", "somebody's work\n"),
    ],
)
async def test_what_changed_while_the_question_was_open_is_left_alone(
    prompt: str, meanwhile: str | None, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("old\n")
    target = tmp_path / prompt.split()[1].removesuffix(":")

    async def change_and_allow(_execution: ToolExecution) -> Approval:
        if meanwhile is None:
            target.unlink()
        else:
            target.write_text(meanwhile)
        return Approval.ALLOWED

    result = await one_prompt(tmp_path, prompt, change_and_allow)

    assert result.is_error
    if "something else" not in (meanwhile or ""):  # there, nothing is left to be replaced
        assert result.code == "CHANGED"
    assert (target.read_text() if target.exists() else None) == meanwhile


async def test_what_did_not_change_is_done_as_it_was_shown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old\n")
    shown: list[Any] = []

    async def allow(execution: ToolExecution) -> Approval:
        shown.extend(execution.preview)
        return Approval.ALLOWED

    result = await one_prompt(tmp_path, "edit a.txt: old => new", allow)

    assert not result.is_error
    assert list(result.content) == shown
    assert (tmp_path / "a.txt").read_text() == "new\n"


@pytest.mark.parametrize(
    ("content", "why"), [(b"\x89PNG\0\0precious", "binary"), (b"x" * (10 * 2**20 + 1), "10 MiB")]
)
async def test_a_file_that_cannot_be_shown_is_not_shown_as_a_new_one(
    content: bytes, why: str, tmp_path: Path
) -> None:
    (tmp_path / "logo.png").write_bytes(content)
    shown: list[Any] = []

    async def allow(execution: ToolExecution) -> Approval:
        shown.extend(execution.preview)
        return Approval.ALLOWED

    result = await one_prompt(tmp_path, "write logo.png: new", allow)

    assert result.output.startswith("replaced logo.png")
    for (said,) in (shown, result.content):
        assert isinstance(said, Text)
        assert why in said.text
        assert "replaced" in said.text
    assert (tmp_path / "logo.png").read_text() == "new"


async def test_a_new_file_is_shown_as_one(tmp_path: Path) -> None:
    shown: list[Any] = []

    async def allow(execution: ToolExecution) -> Approval:
        shown.extend(execution.preview)
        return Approval.ALLOWED

    result = await one_prompt(tmp_path, "write new.txt: new", allow)

    assert result.output.startswith("created new.txt")
    assert shown == [Diff(os.fspath(tmp_path / "new.txt"), None, "new")]
