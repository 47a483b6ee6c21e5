"""A form that an agent wants filled in, one line for each field."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from acp_server.chat.keyboard import Typed
from acp_server.chat.text import clean, clean_line, to_mapping
from agent_core.errors import ToolError
from agent_core.forms import Form, Property, form_from

__all__ = ["CAPABILITIES", "DISMISSED", "Asked", "read_form"]

CAPABILITIES: Final[dict[str, Any]] = {"elicitation": {"form": {}}}
"""What a chat offers an agent if there is a person."""
DISMISSED: Final[dict[str, Any]] = {"action": "cancel"}
DECLINED: Final[dict[str, Any]] = {"action": "decline"}

_YES_NO: Final = {"y": True, "yes": True, "n": False, "no": False}


def read_form(params: Mapping[str, Any]) -> Form:
    """Return the form of an ``elicitation/create``.

    Raises:
        ToolError: It is none, or has fields that cannot be filled in here.
    """
    if params.get("mode") != "form":
        raise ToolError("This client shows forms only", code="BAD_FORM")
    return form_from(clean(params.get("message")), to_mapping(params.get("requestedSchema")))


class Asked:
    """One form on its way through the terminal.

    Args:
        form: What is asked.
        say: Prints a line.
        read: Prints a marker and reads a line.
        interrupt: Called when a person typed Ctrl-C instead.
    """

    def __init__(
        self,
        form: Form,
        say: Callable[[str], None],
        read: Callable[[str], Awaitable[str | Typed]],
        interrupt: Callable[[], None],
    ) -> None:
        self._form = form
        self._say = say
        self._read = read
        self._interrupt = interrupt

    async def fill(self) -> dict[str, Any]:
        """Return the answer to the ``elicitation/create``.

        Nothing for a field that is needed declines; Ctrl-D dismisses the question, and so does
        Ctrl-C.
        Cancellation: safe. Concurrency: one form at a time.
        """
        for line in self._form.message.splitlines():
            self._say(f"? {line}")
        try:
            return await self._filled()
        except _NoLine:
            return DISMISSED

    async def _filled(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        if not self._form.properties:
            is_fine = await self._value("Fine", Property("boolean"), is_needed=True)
            return {"action": "accept", "content": {}} if is_fine else DECLINED
        for name, field in self._form.properties.items():
            is_needed = name in self._form.required
            value = await self._value(clean_line(field.title or name), field, is_needed=is_needed)
            if value is not None:
                content[name] = value
            elif is_needed:
                return DECLINED
        return {"action": "accept", "content": content}

    async def _value(self, title: str, field: Property, *, is_needed: bool) -> Any:
        """Ask until there is a value for the field, or nothing is typed."""
        if field.description is not None:
            self._say(f"  {clean_line(field.description)}")
        for number, option in enumerate(field.options or (), 1):
            self._say(f"   {number}) {clean_line(option.title)}")
        nothing = "declines" if is_needed else "for none"
        if field.default is not None:
            nothing = f"for {clean_line(str(field.default))}"
        while typed := await self._line(f"  {title}{_hint(field)} (Enter {nothing}): "):
            value = _value_of(typed, field)
            if (problem := field.problem(value)) is None:
                return value
            self._say(f"  that {problem}")
        return field.default

    async def _line(self, marker: str) -> str:
        typed = await self._read(marker)
        if isinstance(typed, str):
            return typed.strip()
        if typed is not Typed.END:
            self._interrupt()
        raise _NoLine


class _NoLine(Exception):
    """The person typed something that is no line, and so dismisses the question."""


def _hint(field: Property) -> str:
    if field.type == "boolean":
        return " [y/n]"
    return " [numbers, with commas]" if field.type == "array" else ""


def _value_of(typed: str, field: Property) -> object:
    """Return what was typed as the kind of value the field has; anything else as it is."""
    if field.type == "boolean":
        return _YES_NO.get(typed.lower(), typed)
    if field.type == "array":
        return [_chosen(each.strip(), field) for each in typed.split(",")]
    if field.options is not None:
        return _chosen(typed, field)
    if field.type == "string":
        return typed
    for number in (int, float):
        try:
            return number(typed)
        except ValueError:
            continue
    return typed


def _chosen(typed: str, field: Property) -> str:
    """Return the value of the option with this number, title or value."""
    for number, option in enumerate(field.options or (), 1):
        if typed in (str(number), option.title, option.value):
            return option.value
    return typed
