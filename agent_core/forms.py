"""Forms: a flat object of plain fields, in the part of JSON Schema that ACP and MCP share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field

from agent_core.errors import ToolError

__all__ = ["Form", "Option", "Options", "Property", "form_from"]

MAX_FIELDS: Final = 20
MAX_OPTIONS: Final = 200
MAX_MESSAGE_CHARS: Final = 4_000


class Option(Struct, frozen=True, omit_defaults=True):
    """One value of a choice, and what people see for it."""

    value: str = field(name="const")
    title: str


class Options(Struct, frozen=True, rename="camel", omit_defaults=True):
    """What a field of several choices chooses from; one of the two is given."""

    any_of: tuple[Option, ...] | None = None
    type: Literal["string"] | None = None
    enum: tuple[str, ...] | None = None


class Property(Struct, frozen=True, rename="camel", omit_defaults=True):
    """One field of a form. A string with `enum` or `one_of` is a choice, an array several.

    `pattern` is for the client alone: a foreign expression can take for ever, and is not run here.
    """

    type: Literal["string", "number", "integer", "boolean", "array"]
    title: str | None = None
    description: str | None = None
    enum: tuple[str, ...] | None = None
    one_of: tuple[Option, ...] | None = None
    items: Options | None = None
    minimum: int | float | None = None
    maximum: int | float | None = None
    min_length: int | None = None
    max_length: int | None = None
    min_items: int | None = None
    max_items: int | None = None
    pattern: str | None = None
    format: str | None = None
    default: Any = None

    @property
    def options(self) -> tuple[Option, ...] | None:
        """What there is to choose from; `None` if it is no choice."""
        source = self.items if self.type == "array" else self
        if source is None:
            return None
        titled = source.any_of if isinstance(source, Options) else source.one_of
        if titled is not None:
            return titled
        return None if source.enum is None else tuple(Option(v, v) for v in source.enum)

    @property
    def is_typed(self) -> bool:
        """Whether people write the value, rather than choose it."""
        return self.type in ("string", "number", "integer") and self.options is None

    def problem(self, value: object) -> str | None:
        """Say why `value` is none for this field, or return `None`."""
        match self.type:
            case "boolean":
                return None if isinstance(value, bool) else "is not true or false"
            case "number" | "integer":
                return self._number_problem(value)
            case "array":
                return self._several_problem(value)
            case "string":
                return self._text_problem(value)

    def _number_problem(self, value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "is not a number"
        if not math.isfinite(value):
            return "is not a number"
        if self.type == "integer" and value != int(value):
            return "is not a whole number"
        return _bounds_problem(value, self.minimum, self.maximum, "is")

    def _text_problem(self, value: object) -> str | None:
        if not isinstance(value, str):
            return "is not a text"
        if (options := self.options) is not None:
            is_one = any(option.value == value for option in options)
            return None if is_one else "is none of the choices"
        if (fits := _FORMATS.get(self.format or "")) is not None and not fits(value):
            return f"is not in the format {self.format}"
        return _bounds_problem(len(value), self.min_length, self.max_length, "has a length")

    def _several_problem(self, value: object) -> str | None:
        known = {option.value for option in self.options or ()}
        if not isinstance(value, list | tuple):
            return "is not a list"
        if not all(isinstance(each, str) and each in known for each in value):
            return "has something that is none of the choices"
        return _bounds_problem(len(value), self.min_items, self.max_items, "has a length")


class Form(Struct, frozen=True):
    """A question: what is asked in words, and the fields of the answer by name."""

    message: str
    properties: Mapping[str, Property] = {}
    required: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """Return the form as the JSON schema of its answer."""
        schema: dict[str, Any] = {"type": "object", "properties": self.properties}
        if self.required:
            schema["required"] = self.required
        built: dict[str, Any] = msgspec.to_builtins(schema)
        return built

    def checked(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that were asked for, in order.

        Raises:
            ToolError: It is no answer to this form (code ``BAD_ANSWER``).
        """
        answer: dict[str, Any] = {}
        for name, each in self.properties.items():
            value = content.get(name)
            if value is None:
                problem = "is missing" if name in self.required else None
            elif (problem := each.problem(value)) is None:
                answer[name] = value
            if problem is not None:
                raise ToolError(
                    f"what came back is no answer to the question: {name!r} {problem}",
                    code="BAD_ANSWER",
                )
        return answer


# --- somebody else's schema ------------------------------------------------------------------


def form_from(message: str, schema: Mapping[str, Any]) -> Form:
    """Read a form from somebody else's JSON schema.

    Raises:
        ToolError: It is not a flat object of plain fields, or too large (``BAD_FORM``).
    """
    try:
        read = msgspec.convert(schema, _Schema)
        properties = {name: _tidied(each) for name, each in read.properties.items()}
    except (msgspec.ValidationError, ValueError) as exc:
        raise ToolError(f"this form cannot be shown: {exc}", code="BAD_FORM") from None
    required = tuple(name for name in properties if name in (read.required or ()))
    if len(properties) > MAX_FIELDS or len(message) > MAX_MESSAGE_CHARS:
        raise ToolError("this form cannot be shown: it is too large", code="BAD_FORM")
    return Form(message, properties, required)


class _Read(Property, frozen=True, rename="camel"):
    enum_names: tuple[str, ...] | None = None  # MCP's first way to give choices a title


class _Schema(Struct, frozen=True):
    type: Literal["object"] = "object"
    properties: dict[str, _Read] = {}
    required: tuple[str, ...] | None = None


def _tidied(read: _Read) -> Property:
    """Return a field with what this kind of field has, and a default only if it is one.

    Raises:
        ValueError: There is nothing, or too much, to choose from.
    """
    names = _FIELDS_OF[read.type]
    fields: dict[str, Any] = {name: getattr(read, name) for name in names}
    if read.type == "string" and read.enum and read.enum_names and not read.one_of:
        titled = zip(read.enum, read.enum_names, strict=False)
        fields |= {"enum": None, "one_of": tuple(Option(*each) for each in titled)}
    if fields.get("format") not in _FORMATS:  # no client knows it
        fields.pop("format", None)
    made = Property(**fields)
    options = made.options
    n_options = None if options is None else len(options)
    if n_options is None and read.type == "array":
        n_options = 0
    if n_options is not None and not 0 < n_options <= MAX_OPTIONS:
        raise ValueError(f"a choice needs between 1 and {MAX_OPTIONS} options")
    if made.default is not None and made.problem(made.default) is not None:
        made = msgspec.structs.replace(made, default=None)
    return made


_COMMON: Final = ("type", "title", "description", "default")
_FIELDS_OF: Final = {
    "string": (*_COMMON, "enum", "one_of", "min_length", "max_length", "pattern", "format"),
    "number": (*_COMMON, "minimum", "maximum"),
    "integer": (*_COMMON, "minimum", "maximum"),
    "boolean": _COMMON,
    "array": (*_COMMON, "items", "min_items", "max_items"),
}


# --- what a value has to be -----------------------------------------------------------------


def _bounds_problem(value: float, least: float | None, most: float | None, what: str) -> str | None:
    if least is not None and value < least:
        return f"{what} below {least:g}"
    return f"{what} above {most:g}" if most is not None and value > most else None


def _is_date(text: str, read: Callable[[str], object]) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


_FORMATS: Final[Mapping[str, Callable[[str], bool]]] = {
    "email": lambda text: re.fullmatch(r"[^\s@]+@[^\s@]+", text) is not None,
    "uri": lambda text: re.match(r"[A-Za-z][A-Za-z0-9+.-]*:\S", text) is not None,
    "date": lambda text: _is_date(text, date.fromisoformat),
    "date-time": lambda text: "T" in text.upper() and _is_date(text, datetime.fromisoformat),
}
