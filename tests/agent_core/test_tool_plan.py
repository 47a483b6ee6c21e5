from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent_core.cancellation import AbortController
from agent_core.content import PlanEntry
from agent_core.errors import ToolError
from agent_core.events import EventData, PlanWritten
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.plan import Plan
from agent_core.tools.registry import default_tools
from agent_core.tools.roots import Roots
from agent_core.tools.tool import ToolContext


def context_of(log: list[EventData]) -> ToolContext:
    agent: Any = SimpleNamespace(session=SimpleNamespace(append=log.append))
    return ToolContext(
        agent=agent,
        call_id="call_1",
        signal=AbortController().signal,
        roots=Roots("/"),
        files=LocalFiles(),
        commands=LocalCommands(),
        progress=lambda content: None,
    )


async def test_a_plan_is_appended_to_the_log() -> None:
    log: list[EventData] = []
    plan = Plan()

    output = await plan.run(
        plan.parse(
            '{"entries": [{"content": "look", "priority": "high", "status": "completed"},'
            ' {"content": "change"}]}'
        ),
        context_of(log),
    )

    assert log == [
        PlanWritten((PlanEntry("look", "high", "completed"), PlanEntry("change"))),
    ]
    assert output.output == "the plan has 2 entries, 1 completed"


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"entries": [{"content": "a", "status": "done"}]}',
        '{"entries": [{}]}',
        '{"entries": [], "note": ""}',
    ],
)
def test_a_malformed_plan_is_refused(arguments: str) -> None:
    with pytest.raises(ToolError) as error:
        Plan().parse(arguments)

    assert error.value.code == "BAD_ARGUMENTS"


def test_the_plan_touches_nothing_and_is_thinking() -> None:
    plan = Plan()

    assert (plan.effect, plan.kind) == ("none", "think")
    assert plan.view(plan.parse('{"entries": []}'), Roots("/")).title == "Update the plan"


def test_the_built_in_tools_have_a_name_each() -> None:
    names = sorted(tool.name for tool in default_tools())

    assert names == [
        "agents",
        "ask",
        "delegate",
        "edit",
        "list",
        "plan",
        "read",
        "search",
        "shell",
        "write",
    ]


def test_every_tool_takes_one_described_object_without_references() -> None:
    for spec in (tool.spec() for tool in default_tools()):
        assert spec.parameters["type"] == "object"
        assert spec.parameters["additionalProperties"] is False
        assert "$ref" not in repr(spec.parameters)
        assert spec.description
