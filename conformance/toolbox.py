"""Which of an agent's own tools does what, told by their names and parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["Tool", "ToolCall", "call_for"]


class Tool(NamedTuple):
    """A tool as an agent offers it to a model."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema of its arguments."""


class ToolCall(NamedTuple):
    """What to call, and with what."""

    name: str
    arguments: dict[str, Any]


class _Kind(NamedTuple):
    """How to know a kind of tool, and which parameter takes what."""

    name: re.Pattern[str]
    parameters: Mapping[str, re.Pattern[str]]


def _kind(name: str, **parameters: str) -> _Kind:
    patterns = {each: re.compile(pattern, re.I) for each, pattern in parameters.items()}
    return _Kind(re.compile(name, re.I), patterns)


_PATH: Final = r"^(absolute_?|file_?|target_?)*(path|file|filename|uri)$"
_KINDS: Final[dict[str, _Kind]] = {
    "command": _kind(
        r"bash|shell|run|exec|terminal|command", command=r"^(command|cmd|script|command_line)$"
    ),
    "read": _kind(r"read|view|cat|open", path=_PATH),
    "write": _kind(r"write|create|save", path=_PATH, text=r"^(content|contents|text|file_text)$"),
    "edit": _kind(
        r"edit|replace|patch|update",
        path=_PATH,
        before=r"^(old|old_?(text|str|string)|search|find)$",
        text=r"^(new|new_?(text|str|string)|replace(ment)?)$",
    ),
    "plan": _kind(r"plan|todo"),
    "delegate": _kind(r"delegate|subagent|agent|task", task=r"^(task|prompt|instructions?)$"),
}
_STEPS: Final = ("look around", "do the work")


def call_for(situation: str, fill: Mapping[str, str], tools: Sequence[Tool]) -> ToolCall | None:
    """Return the call that brings a situation about, or `None` if no tool is for it.

    Args:
        situation: One of `conformance.target.SITUATIONS`.
        fill: What goes into its placeholders.
        tools: What the agent offers.
    """
    kind = _KINDS.get("command" if situation == "permission" else situation)
    if kind is None:
        return None
    values = {"before": "before", **fill}
    if situation == "delegate":
        values["task"] = f'conformance child command {{"command": {json.dumps(fill["command"])}}}'
    for tool in tools:
        if kind.name.search(tool.name) is None:
            continue
        arguments = _arguments(kind, values, tool.schema)
        if arguments is not None:
            return ToolCall(tool.name, arguments)
    return None


def _arguments(
    kind: _Kind, values: Mapping[str, str], schema: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return arguments for a tool, or `None` if it lacks a parameter of its kind."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    arguments: dict[str, Any] = {}
    for what, pattern in kind.parameters.items():
        name = next((each for each in properties if pattern.search(each)), None)
        if name is None:
            return None
        arguments[name] = _as(properties[name], values[what])
    for name in schema.get("required") or ():
        if name not in arguments:
            arguments[name] = _sample(properties.get(name) or {}, name, 0)
    return arguments


def _as(schema: Mapping[str, Any], value: str) -> object:
    """Return a text, or a list or object with it where the tool takes several."""
    if schema.get("type") == "array":
        items: Mapping[str, Any] = schema.get("items") or {}
        if items.get("type") == "object":
            names = items.get("properties") or {}
            text = {
                name: value for name in names if _KINDS["delegate"].parameters["task"].search(name)
            }
            rest = [name for name in items.get("required") or () if name not in text]
            return [{**text, **{name: _sample(names.get(name) or {}, name, 0) for name in rest}}]
        return [value]
    return value


def _sample(schema: Mapping[str, Any], name: str, index: int) -> object:
    """Return some value that a schema takes."""
    if "enum" in schema:
        return schema["enum"][min(index, len(schema["enum"]) - 1)]
    if "const" in schema:
        return schema["const"]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return _sample(schema[key][0], name, index)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) else kind:
        case "array":
            return [_sample(schema.get("items") or {}, name, each) for each in range(2)]
        case "object":
            properties = schema.get("properties") or {}
            wanted = schema.get("required") or properties
            return {each: _sample(properties.get(each) or {}, each, index) for each in wanted}
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
    return _STEPS[index]
