"""Params of every wrong type, made from the published schema."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from conformance.scenarios import scenario
from conformance.schema import Schema
from conformance.steps import error_code, is_error, offers, serves
from conformance.trace import Message, WireError
from conformance.trial import Trial
from conformance.wire import Wire

BASELINE: Final = ("session/new", "session/prompt")
OPTIONAL: Final = (
    "session/load",
    "session/resume",
    "session/list",
    "session/close",
    "session/delete",
)
LENIENT: Final = frozenset({("session/new", "mcpServers"), ("session/load", "mcpServers")})
"""Members that implementations of the protocol themselves let be absent or null."""
WRONG: Final[dict[str, tuple[object, ...]]] = {
    "string": (5, True, ["a"], {"a": 1}),
    "array": ("a", 5, {"a": 1}),
    "object": ("a", 5, ["a"]),
}
POSITIONAL: Final[tuple[object, ...]] = (["a"], "a", 5)


@cache
def _schema() -> Schema:
    return Schema()


@scenario("FRM-22", "FRM-34")
async def params_of_the_wrong_type(trial: Trial) -> None:
    """For each method that is offered, leave out each required member, and send wrong types."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    methods = [*BASELINE, *(each for each in OPTIONAL if offers(wire, each))]
    asked: list[tuple[str, int]] = []
    for method in methods:
        for what, params in _malformed(method, session_id, str(trial.folder)):
            asked.append((f"{method} with {what}", wire.request(method, params)))
    answers: list[tuple[str, Message]] = []
    with trial.expect("FRM-34"):
        for what, request in asked:
            answers.append((what, await _answer(trial, wire, what, request)))
        await serves(trial, wire, "params of wrong types")
    with trial.expect("FRM-22") as it:
        trial.brought_about(answers, "nothing was answered")
        for what, response in answers:
            it.that(is_error(response), f"{what} succeeded")
            code = error_code(response)
            it.that(code == -32602, f"{what} was answered with {code}")


async def _answer(trial: Trial, wire: Wire, what: str, request: int) -> Message:
    try:
        return await wire.response(request, trial.target.timeout_s)
    except WireError:
        raise WireError(f"{what} was not answered") from None


def _malformed(method: str, session_id: str, cwd: str) -> Iterator[tuple[str, object]]:
    """Yield wrong params of a method, each with what is wrong about it."""
    sound: dict[str, object] = {
        "sessionId": session_id,
        "cwd": cwd,
        "mcpServers": [],
        "prompt": [{"type": "text", "text": "hello"}],
    }
    name = _schema().params_name("agent", method)
    assert name is not None
    definition = _schema().definitions[name]
    required: list[str] = definition.get("required", [])
    params = {key: sound[key] for key in required}
    for member in required:
        others = {key: value for key, value in params.items() if key != member}
        if (method, member) not in LENIENT:
            yield f"no {member}", others
            yield f"{member} null", {**others, member: None}
        for wrong in WRONG.get(_type(definition["properties"][member]), ()):
            yield f"{member} {_kind(wrong)}", {**others, member: wrong}
    if required:
        for positional in POSITIONAL:
            yield f"params {_kind(positional)}", positional


def _type(schema: dict[str, Any]) -> str:
    """Return the type that a member must have, or nothing where there are several."""
    for part in schema.get("allOf", ()):
        schema = _schema().definitions[part["$ref"].rpartition("/")[2]]
    kind = schema.get("type")
    return kind if isinstance(kind, str) else ""


def _kind(value: object) -> str:
    names = {str: "a text", int: "a number", bool: "true", list: "a list", dict: "an object"}
    return names[type(value)]
