from __future__ import annotations

from typing import Any

import pytest

from conformance.target import SITUATIONS, read_words
from conformance.toolbox import Tool, ToolCall, call_for

TEXT = {"type": "string"}


def tool(name: str, *required: str, **properties: Any) -> Tool:
    return Tool(name, {"type": "object", "properties": properties, "required": list(required)})


FILL = {"path": "/a", "text": "new", "command": "true"}


@pytest.mark.parametrize(
    ("situation", "offered", "arguments"),
    [
        ("command", tool("Bash", "command", command=TEXT), {"command": "true"}),
        ("permission", tool("run_shell", cmd=TEXT), {"cmd": "true"}),
        ("read", tool("view_file", file_path=TEXT, limit={"type": "integer"}), {"file_path": "/a"}),
        ("write", tool("create", path=TEXT, file_text=TEXT), {"path": "/a", "file_text": "new"}),
        (
            "edit",
            tool("str_replace", absolute_path=TEXT, old_string=TEXT, new_string=TEXT),
            {"absolute_path": "/a", "old_string": "before", "new_string": "new"},
        ),
        (
            "command",
            tool("exec", "command", "why", "n", command=TEXT, why=TEXT, n={"type": "integer"}),
            {"command": "true", "why": "look around", "n": 1},
        ),
        (
            "plan",
            tool(
                "todo_write",
                "todos",
                todos={
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"content": TEXT, "status": {"enum": ["pending", "done"]}},
                        "required": ["content", "status"],
                    },
                },
            ),
            {
                "todos": [
                    {"content": "look around", "status": "pending"},
                    {"content": "do the work", "status": "done"},
                ]
            },
        ),
    ],
)
def test_a_tool_is_known_by_its_name_and_parameters(
    situation: str, offered: Tool, arguments: dict[str, Any]
) -> None:
    others = [tool("search", query=TEXT), tool("read_mail", id=TEXT)]

    assert call_for(situation, FILL, [*others, offered]) == ToolCall(offered.name, arguments)


def test_without_a_fitting_tool_nothing_is_called() -> None:
    assert call_for("write", FILL, [tool("write", where=TEXT), tool("read", path=TEXT)]) is None
    assert call_for("hello", FILL, [tool("bash", command=TEXT)]) is None


def test_a_subagent_is_ordered_to_run_the_command() -> None:
    several = {"type": "array", "items": {"type": "object", "properties": {"prompt": TEXT}}}

    one = call_for("delegate", FILL, [tool("task", prompt=TEXT)])
    many = call_for("delegate", FILL, [tool("delegate", tasks=several)])

    assert one is not None
    assert one.arguments["prompt"] == 'conformance child command {"command": "true"}'
    assert many is None or '"command": "true"' in str(many.arguments)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[]", "is no JSON object of prompts"),
        ('{"hello": 1}', "is no JSON object of prompts"),
        ('{"hallo": "x"}', "nobody knows the situation 'hallo'; there are hello, long"),
        ('{"read": "read {file}"}', r"read takes \{path\}, not \{file\}"),
        ('{"hello": "say {text}"}', "hello takes no placeholder"),
        ('{"read": "read {path"}', "expected '}'"),
    ],
)
def test_a_wrong_map_of_prompts_is_said(tmp_path: Any, text: str, wrong: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=wrong):
        read_words(path)


def test_a_map_fills_in_what_the_situation_has(tmp_path: Any) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('{"write": "Please put {text} into {path}."}')
    words = read_words(path)

    fill = {"path": "/a/{text}", "text": "x"}
    assert words.say("write", "any", fill) in (
        "Please put x into /a/{text}.",
        "Please put x into /a/x.",
    )
    assert words.say("read", "any", fill) is None
    assert words.prompts.keys() <= SITUATIONS.keys()
