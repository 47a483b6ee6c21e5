from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
from test_chat_app import CTRL_C, CTRL_D, person

from acp_server.chat.forms import Asked, read_form
from acp_server.chat.keyboard import Typed
from agent_core.errors import ToolError

OURS = [sys.executable, "-m", "acp_server", "serve"]


class Terminal:
    """Types the given lines, and keeps what was shown."""

    def __init__(self, typed: Sequence[str | Typed]) -> None:
        self.shown: list[str] = []
        self.interrupts = 0
        self._typed = list(typed)

    def say(self, line: str) -> None:
        self.shown.append(line)

    async def read(self, marker: str) -> str | Typed:
        self.shown.append(marker)
        return self._typed.pop(0)

    def interrupt(self) -> None:
        self.interrupts += 1


async def filled(
    typed: Sequence[str | Typed], required: Sequence[str] = (), **fields: object
) -> tuple[dict[str, Any], Terminal]:
    schema = {"type": "object", "properties": fields, "required": required}
    params = {"mode": "form", "message": "Well?\n\x1b[2JReally?", "requestedSchema": schema}
    terminal = Terminal(typed)
    asked = Asked(read_form(params), terminal.say, terminal.read, terminal.interrupt)
    return await asked.fill(), terminal


@pytest.mark.parametrize(
    ("field", "typed", "value"),
    [
        ({"type": "string"}, " some words ", "some words"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "integer"}, "-3", -3),
        ({"type": "boolean"}, "Y", True),
        ({"type": "boolean"}, "no", False),
        ({"type": "string", "enum": ["a", "b"]}, "2", "b"),
        ({"type": "string", "enum": ["a", "b"]}, "a", "a"),
        ({"type": "string", "oneOf": [{"const": "x", "title": "The x"}]}, "The x", "x"),
        ({"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}, "2, a", ["b", "a"]),
    ],
    ids=str,
)
async def test_a_line_is_read_as_what_its_field_holds(
    field: object, typed: str, value: object
) -> None:
    answer, _terminal = await filled([typed], ["f"], f=field)

    assert answer == {"action": "accept", "content": {"f": value}}


@pytest.mark.requirement("ACP-163")
async def test_a_line_that_does_not_fit_is_asked_for_again() -> None:
    answer, terminal = await filled(
        ["many", "0", "2"], ["n"], n={"type": "integer", "title": "How many", "minimum": 1}
    )

    assert answer["content"] == {"n": 2}
    assert terminal.shown == [
        "? Well?",
        "? Really?",
        "  How many (Enter declines): ",
        "  that is not a number",
        "  How many (Enter declines): ",
        "  that is below 1",
        "  How many (Enter declines): ",
    ]


async def test_nothing_typed_takes_the_default_skips_or_declines() -> None:
    optional, default = {"type": "string"}, {"type": "integer", "default": 7}

    answer, _ = await filled(["", "", "x"], ["b", "c"], a=optional, b=default, c=optional)
    declined, _ = await filled(["x", ""], ["b"], a=optional, b=optional)

    assert answer == {"action": "accept", "content": {"b": 7, "c": "x"}}
    assert declined == {"action": "decline"}


@pytest.mark.parametrize(("typed", "interrupts"), [(Typed.END, 0), (Typed.INTERRUPT, 1)], ids=str)
async def test_what_is_no_line_dismisses_the_question(typed: Typed, interrupts: int) -> None:
    answer, terminal = await filled([typed], ["a"], a={"type": "string"})

    assert (answer, terminal.interrupts) == ({"action": "cancel"}, interrupts)


async def test_a_form_without_fields_asks_for_a_yes() -> None:
    assert (await filled(["y"]))[0] == {"action": "accept", "content": {}}
    assert (await filled(["n"]))[0] == (await filled([""]))[0] == {"action": "decline"}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"mode": "url", "message": "?", "url": "https://example.com", "elicitationId": "1"},
        {"mode": "form", "message": "?", "requestedSchema": {"type": "array"}},
    ],
    ids=str,
)
@pytest.mark.requirement("ACP-162")
def test_what_a_terminal_cannot_ask_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ToolError):
        read_form(params)


def test_a_person_fills_in_a_form_and_the_agent_reads_it() -> None:
    with person(command=OURS) as someone:
        someone.types("ask Which colour?: red | blue\r")
        someone.sees(r"\? Which colour\?(?s:.*)1\) red(?s:.*)2\) blue(?s:.*)\(Enter declines\): ")
        someone.types("green\r")
        someone.sees("that is none of the choices")
        someone.types("2\r")
        someone.sees(r"The answer to .*Which colour\?.* is:")
        someone.sees("blue")
        someone.sees("> ")

        someone.types("ask And now?\r")
        someone.sees(r"\(Enter declines\): ")
        someone.types("\r")
        someone.sees("does not want to answer")
        someone.sees("> ")


def test_ctrl_d_at_a_form_dismisses_it_and_ctrl_c_stops_the_turn() -> None:
    with person(command=OURS) as someone:
        someone.types("ask Which colour?\r")
        someone.sees(r"\(Enter declines\): ")
        someone.types(CTRL_D)
        someone.sees("the person dismissed the question")
        someone.sees("> ")

        someone.types("ask Which colour?\r")
        someone.sees(r"\(Enter declines\): ")
        someone.types(CTRL_C)
        someone.sees("stopping…")
        someone.sees("stopped")
        someone.sees("> ")
        someone.types("count 2\r")
        someone.sees("1 2 ")
