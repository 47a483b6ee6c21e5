from __future__ import annotations

import json
from typing import Any

import pytest

from agent_core.cancellation import AbortController
from agent_core.errors import ToolError
from agent_core.forms import Form, form_from
from agent_core.questions import Nobody, Reply, Visit, ask_form, ask_url


def shown(form: Form) -> Any:
    return json.loads(json.dumps(form.schema()))


def form(**properties: dict[str, Any]) -> Form:
    return form_from("?", {"type": "object", "properties": properties, "required": [*properties]})


def test_every_kind_of_field_is_read_and_shown_as_it_is() -> None:
    properties: dict[str, Any] = {
        "text": {
            "type": "string",
            "title": "T",
            "description": "d",
            "minLength": 1,
            "maxLength": 9,
            "pattern": "a+",
            "format": "email",
            "default": "a@b",
        },
        "number": {"type": "number", "minimum": 0.5, "maximum": 2},
        "integer": {"type": "integer", "minimum": 1, "default": 3},
        "boolean": {"type": "boolean", "default": False},
        "plain": {"type": "string", "enum": ["a", "b"]},
        "titled": {"type": "string", "oneOf": [{"const": "a", "title": "A"}]},
        "several": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "several_titled": {
            "type": "array",
            "items": {"anyOf": [{"const": "a", "title": "A"}]},
            "minItems": 1,
            "maxItems": 2,
        },
    }

    read = form_from("?", {"type": "object", "properties": properties, "required": ["text", "x"]})

    assert shown(read) == {"type": "object", "properties": properties, "required": ["text"]}


def test_what_no_client_knows_is_left_out() -> None:
    read = form(
        old={"type": "string", "enum": ["a"], "enumNames": ["A"]},
        odd={"type": "string", "format": "hostname", "minimum": 3, "x": 1, "title": None},
        wrong={"type": "integer", "default": "three"},
    )

    assert shown(read)["properties"] == {
        "old": {"type": "string", "oneOf": [{"const": "a", "title": "A"}]},
        "odd": {"type": "string"},
        "wrong": {"type": "integer"},
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"properties": {"a": {"type": "object", "properties": {}}}},
        {"properties": {"a": {}}},
        {"properties": {"a": {"type": ["string", "null"]}}},
        {"properties": {"a": {"type": "array", "items": {"type": "number"}}}},
        {"properties": {"a": {"type": "array"}}},
        {"properties": {"a": {"type": "string", "enum": []}}},
        {"properties": {"a": {"type": "string", "enum": [1]}}},
        {"properties": {str(at): {"type": "string"} for at in range(21)}},
        {"properties": []},
    ],
    ids=str,
)
def test_a_form_that_is_not_flat_and_small_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match="this form cannot be shown") as refused:
        form_from("?", schema)

    assert refused.value.code == "BAD_FORM"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ({"type": "string"}, ["", "x"], [1, True, ["x"], {}]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
        ({"type": "string", "format": "email"}, ["a@b"], ["a", "a b@c"]),
        ({"type": "string", "format": "uri"}, ["https://a", "urn:x"], ["a", "//a", "a:"]),
        ({"type": "string", "format": "date"}, ["2026-12-02"], ["2026-13-02", "today"]),
        (
            {"type": "string", "format": "date-time"},
            ["2026-12-02T01:02:03Z"],
            ["2026-12-02", "T", "now"],
        ),
        ({"type": "number"}, [1, 1.5, -1], ["1", True, float("inf"), float("nan")]),
        ({"type": "number", "minimum": 1, "maximum": 2}, [1, 2], [0.5, 2.5]),
        ({"type": "integer"}, [1, 2.0], [1.5, True, "1"]),
        ({"type": "boolean"}, [True, False], [0, 1, "true"]),
        ({"type": "string", "enum": ["a"]}, ["a"], ["b", "", "A", 1]),
        ({"type": "string", "oneOf": [{"const": "a", "title": "A"}]}, ["a"], ["A"]),
        (
            {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "minItems": 1},
            [["a"], ["b", "a"]],
            [[], ["c"], "a", [1], [["a"]]],
        ),
    ],
    ids=str,
)
@pytest.mark.requirement("ACP-163")
def test_an_answer_is_held_against_its_form(
    field: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    asked = form(a=field)

    assert [asked.checked({"a": value}) for value in good] == [{"a": value} for value in good]
    for value in bad:
        with pytest.raises(ToolError) as refused:
            asked.checked({"a": value})
        assert refused.value.code == "BAD_ANSWER"


def test_a_field_that_is_not_required_may_be_missing_but_not_wrong() -> None:
    asked = form_from("?", {"properties": {"a": {"type": "integer"}}})

    assert asked.checked({}) == asked.checked({"a": None}) == {}
    with pytest.raises(ToolError):
        asked.checked({"a": "x"})


class Client(Nobody):
    """An `Ask` that says yes to everything."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.completed = 0

    async def form(self, form: Form, signal: object, *, call_id: str | None = None) -> Reply:
        self.asked.append(form)
        return Reply("accept", {"a": 1, "b": 2})

    async def url(
        self, message: str, url: str, signal: object, *, call_id: str | None = None
    ) -> Visit:
        self.asked.append(url)

        def complete() -> None:
            self.completed += 1

        return Visit("accept", complete)


class Agent:
    """As much of an agent as asking takes."""

    def __init__(self) -> None:
        self.ask = Client()


async def test_somebody_elses_schema_is_asked_for_and_its_answer_checked() -> None:
    agent: Any = Agent()
    signal = AbortController().signal

    reply = await ask_form(agent, "?", {"properties": {"a": {"type": "integer"}}}, signal)

    assert reply == Reply("accept", {"a": 1})
    with pytest.raises(ToolError, match="'b' is not a text"):
        await ask_form(agent, "?", {"properties": {"b": {"type": "string"}}}, signal)
    with pytest.raises(ToolError, match="secrets are asked for by nobody"):
        await ask_form(agent, "?", {"properties": {"secret": {"type": "string"}}}, signal)


async def test_a_visit_is_completed_once() -> None:
    agent: Any = Agent()

    visit = await ask_url(agent, "?", "https://example.com/x", AbortController().signal)
    visit.complete()
    visit.complete()

    assert (visit.action, agent.ask.completed) == ("accept", 1)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "http://example.com/",
        "javascript:alert(1)",
        "file:///etc/passwd",
        "https://",
        "https://me:word@example.com/",
        "https://example.com/?api_key=x",
        "https://example.com/?a=1&accessToken=x",
        "https://example.com/ x",
        "https://example.com/\n",
        "https://[",
    ],
)
@pytest.mark.requirement("ACP-161")
async def test_an_address_with_a_secret_or_without_encryption_is_shown_to_nobody(url: str) -> None:
    agent: Any = Agent()

    with pytest.raises(ToolError, match="this address cannot be shown") as refused:
        await ask_url(agent, "?", url, AbortController().signal)

    assert refused.value.code == "BAD_URL"
    assert agent.ask.asked == []


async def test_an_address_on_this_machine_needs_no_encryption() -> None:
    agent: Any = Agent()

    await ask_url(agent, "?", "http://localhost:8080/login?state=x", AbortController().signal)

    assert agent.ask.asked == ["http://localhost:8080/login?state=x"]
