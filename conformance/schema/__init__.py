"""The published JSON schemas of ACP, and what a message must be to agree with them.

``v1.json`` is the stable schema, ``v1.unstable.json`` has the drafts in it, and one part of a
draft that is newer than that file: a tool call's reference to a session. Both are without their
prose. Senders must agree with the schema as it stands: its notes on leniency are for receivers.

Source: https://agentclientprotocol.com, schema of version 1 (Apache-2.0).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from importlib.resources import files
from typing import Any, Final, Literal, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

__all__ = ["Schema", "Side", "Violation"]

Side = Literal["agent", "client"]
"""Who serves a method."""

_EITHER: Final = "protocol"


class Violation(NamedTuple):
    """One way in which a value does not agree with a definition."""

    place: str
    """A JSON path."""
    says: str
    is_unknown_word: bool
    """Whether the value is merely not among the words that the schema has for that place; a newer
    schema may have it."""

    def __str__(self) -> str:
        return f"{self.place}: {self.says}"


class Schema:
    """One of the published schemas.

    Args:
        is_unstable: Whether drafts count.
    """

    def __init__(self, *, is_unstable: bool = False) -> None:
        name = "v1.unstable.json" if is_unstable else "v1.json"
        self._schema: dict[str, Any] = json.loads(
            files(__package__).joinpath(name).read_text(encoding="utf-8")
        )
        self.definitions: dict[str, Any] = self._schema["$defs"]
        self._validators: dict[str, Draft202012Validator] = {}
        self._names = {
            (definition["x-side"], definition["x-method"], _kind(name)): name
            for name, definition in self.definitions.items()
            if "x-method" in definition
        }

    def methods(self, side: Side) -> tuple[str, ...]:
        """Return the methods that `side` serves, requests and notifications."""
        return tuple(dict.fromkeys(method for where, method, _ in self._names if where == side))

    def is_notification(self, side: Side, method: str) -> bool:
        """Say whether nobody answers `method`."""
        return self._name(side, method, "Notification") is not None

    def params_name(self, side: Side, method: str) -> str | None:
        """Return the definition of the params of a method that `side` serves, if there is one."""
        request = self._name(side, method, "Request")
        return request or self._name(side, method, "Notification")

    def result_name(self, side: Side, method: str) -> str:
        """Return the definition of the result of a method that `side` serves.

        Raises:
            KeyError: The schema has no such method, or nobody answers it.
        """
        name: str = self._names[side, method, "Response"]
        return name

    def params_problems(self, side: Side, method: str, params: object) -> list[str]:
        """Return what is wrong with the params of a method that `side` serves.

        Raises:
            KeyError: The schema has no such method.
        """
        name = self.params_name(side, method)
        if name is None:
            raise KeyError(method)
        return self.problems(name, {} if params is None else params)

    def result_problems(self, side: Side, method: str, result: object) -> list[str]:
        """Return what is wrong with the result of a method that `side` serves.

        Raises:
            KeyError: The schema has no such method, or nobody answers it.
        """
        return self.problems(self.result_name(side, method), result)

    def problems(self, name: str, value: object) -> list[str]:
        """Return what is wrong with `value` as the definition `name`, each with its place."""
        return [str(each) for each in self.violations(name, value)]

    def violations(self, name: str, value: object) -> list[Violation]:
        """Return what is wrong with `value` as the definition `name`."""
        validator = self._validators.get(name)
        if validator is None:
            validator = self._validator({"$ref": f"#/$defs/{name}"})
            self._validators[name] = validator
        return [_told(error) for error in validator.iter_errors(value)]

    @cached_property
    def words(self) -> frozenset[str]:
        """All texts that a place in the schema may be bound to, such as the names of statuses."""
        return frozenset(_words(self.definitions))

    def strangers(self, name: str, value: object) -> list[str]:
        """Return the places of members that the definition `name` does not know.

        They break no rule of JSON schema, but one of ACP: what is an agent's own stands in `_meta`.
        """
        return list(self._strangers({"$ref": f"#/$defs/{name}"}, value, "$"))

    def _strangers(self, schema: dict[str, Any], value: object, path: str) -> Iterator[str]:
        parts = list(self._parts(schema, value))
        if isinstance(value, list):
            items = [part["items"] for part in parts if "items" in part]
            for index, each in enumerate(value):
                for item in items:
                    yield from self._strangers(item, each, f"{path}[{index}]")
        if not isinstance(value, dict) or any(part.get("additionalProperties") for part in parts):
            return
        known = {key: known for part in parts for key, known in part.get("properties", {}).items()}
        for key, each in value.items():
            if key in known:
                yield from self._strangers(known[key], each, f"{path}.{key}")
            elif known:  # a place without any is free: a tool's raw input
                yield f"{path}.{key}"

    def _parts(self, schema: dict[str, Any], value: object) -> Iterator[dict[str, Any]]:
        """Yield `schema` and what it is made of, as far as that is about `value`."""
        yield schema
        if "$ref" in schema:
            yield from self._parts(self.definitions[schema["$ref"].rpartition("/")[2]], value)
        for part in schema.get("allOf", ()):
            yield from self._parts(part, value)
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            if self._validator(part).is_valid(value):
                yield from self._parts(part, value)

    def _validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        return Draft202012Validator({"$defs": self.definitions, **schema})

    def _name(self, side: Side, method: str, kind: str) -> str | None:
        return self._names.get((side, method, kind)) or self._names.get((_EITHER, method, kind))


def _told(error: ValidationError) -> Violation:
    """Put an error in words; of alternatives, the one whose constants fit says most."""
    while error.context:
        branches: dict[object, list[ValidationError]] = defaultdict(list)
        for inner in error.context:
            branches[inner.schema_path[0]].append(inner)
        fitting = min(branches.values(), key=lambda found: sum(_is_tag(each) for each in found))
        error = max(fitting, key=lambda inner: len(inner.absolute_path))
    is_unknown_word = error.validator in ("const", "enum") and isinstance(error.instance, str)
    return Violation(error.json_path, error.message[:300], is_unknown_word)


def _words(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "const" and isinstance(value, str):
                yield value
            elif key == "enum" and isinstance(value, list):
                yield from (each for each in value if isinstance(each, str))
            else:
                yield from _words(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _words(each)


def _is_tag(error: ValidationError) -> bool:
    """Say whether the value names another alternative: a constant right below it differs."""
    return error.validator == "const" and len(error.relative_path) == 1


def _kind(name: str) -> str:
    return next(kind for kind in ("Request", "Response", "Notification") if name.endswith(kind))
