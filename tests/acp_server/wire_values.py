"""Values made from the published schema: valid ones, and such as a receiver must put up with."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from talking import SCHEMA

__all__ = ["JUNK", "Values", "values_of"]

Value = st.SearchStrategy[Any]

_TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JUNK: Final = st.sampled_from(
    [None, True, 0, -1, 2**70, 1.5, "", "\0", "é\u2028", [], [None], {}, {"": [{}]}]
)
"""One value of each kind there is in JSON."""
_OBJECTS: Final = st.dictionaries(_TEXT, JUNK, max_size=2)
_KINDS: Final = {
    "null": st.none(),
    "boolean": st.booleans(),
    "integer": st.integers(-(2**63), 2**63 - 1),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    "string": _TEXT,
    "object": _OBJECTS,
}


class Values:
    """Strategies for the definitions of the schema, made when they are first asked for.

    Args:
        is_bent: Whether what receivers must be lenient with may be malformed.
    """

    def __init__(self, *, is_bent: bool = False) -> None:
        self._is_bent = is_bent
        self._made: dict[str, Value] = {}

    def of(self, name: str) -> Value:
        if name not in self._made:
            self._made[name] = st.deferred(lambda: self._value(SCHEMA.definitions[name]))
        return self._made[name]

    def _value(self, schema: dict[str, Any]) -> Value:
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        parts = [self._value(part) for part in schema.get("allOf", ())]
        if "$ref" in schema:
            parts.append(self.of(schema["$ref"].rpartition("/")[2]))
        if branches := (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            parts.append(st.one_of(*map(self._value, branches)))
        if "properties" in schema:
            parts.append(self._members(schema))
        elif "type" in schema and not parts:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            parts.append(st.one_of(*(self._kind(kind, schema) for kind in kinds)))
        value = parts[0] if len(parts) == 1 else st.tuples(*parts).map(_together)
        return value.filter(_validator(schema).is_valid) if "not" in schema else value

    def _kind(self, kind: str, schema: dict[str, Any]) -> Value:
        if kind == "array":
            items = self._value(schema["items"])
            if self._is_bent and schema.get("x-deserialize-skip-invalid-items"):
                items |= JUNK
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)
        if kind == "integer" and "minimum" in schema:
            bits = 16 if schema.get("format") == "uint16" else 32
            return st.integers(schema["minimum"], 2**bits - 1)
        if kind == "string" and "minLength" in schema:
            return _TEXT.filter(lambda text: len(text) >= schema["minLength"])
        if kind == "object" and isinstance(more := schema.get("additionalProperties"), dict):
            return st.dictionaries(_TEXT, self._value(more), max_size=2)
        return _KINDS[kind]

    def _members(self, schema: dict[str, Any]) -> Value:
        members = {name: self._member(each) for name, each in schema["properties"].items()}
        required = {name: members.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional={**members, "x-unknown": JUNK})

    def _member(self, schema: dict[str, Any]) -> Value:
        value = self._value(schema)
        if self._is_bent and schema.get("x-deserialize-default-on-error"):
            value |= JUNK
        if self._is_bent and schema.get("x-deserialize-default-on-null"):
            value |= st.none()
        return value


def values_of(name: str, *, is_bent: bool = False) -> Value:
    """Return a strategy for a definition of the schema; `is_bent` as in `Values`."""
    return Values(is_bent=is_bent).of(name)


def _together(parts: tuple[Any, ...]) -> Any:
    if all(isinstance(part, dict) for part in parts):
        return {key: value for part in parts for key, value in part.items()}
    return parts[-1]


def _validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({"$defs": SCHEMA.definitions, **schema})
