"""Every parameter malformed in every way, and every request at every wrong time.

What has to be refused follows from the schema: what it does not allow, unless it has receivers be
lenient there. An answer may be an error, but never one of ours (-32603), never with something in it
that the client did not send, and the next request is always answered.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import ask, assert_pure, line, serving
from talking import CWD, DRAFTS, SCHEMA, Talk, talk
from wire_values import JUNK, values_of

from acp_server.config import ProviderConfig
from acp_server.methods import METHODS

SECRET: Final = "sk-malformed-0123456789"
SETTINGS: Final[dict[str, Any]] = {"providers": {"openai": ProviderConfig(key=SECRET)}}
NOT_OURS: Final = ("Traceback", 'File "', SECRET, str(Path(__file__).parents[2]))

WRONG: Final = {
    "null": None,
    "a boolean": True,
    "a number": 7,
    "a fraction": 1.5,
    "a huge number": 2**70,
    "an empty text": "",
    "a text": "@ \0 \u2028 …",
    "a list": [[], {}, None],
    "an object": {"type": "x", "": {}},
}
RAW: Final = {
    "a lone surrogate": '"\\ud800"',
    "a number out of range": "1e999",
    "a number of many digits": "9" * 5_000,
    "deep nesting": "[" * 500 + "]" * 500,
}
NO_JSON: Final = {"NaN": "NaN", "Infinity": "-Infinity", "nesting without end": "[" * 100_000}

SERVER: Final = {
    "name": "a",
    "command": "/bin/false",
    "args": ["x"],
    "env": [{"name": "A", "value": "b"}],
}
REMOTE: Final = {
    "type": "http",
    "name": "b",
    "url": "http://localhost:1/",
    "headers": [{"name": "A", "value": "b"}],
}
PLACES: Final = {"cwd": CWD, "mcpServers": [], "additionalDirectories": ["/"]}
PROMPT: Final = [
    {"type": "text", "text": "say x", "annotations": {"audience": ["user"]}, "_meta": {}},
    {"type": "resource_link", "uri": "file:///x", "name": "x", "size": 1, "title": "t"},
    {"type": "resource", "resource": {"uri": "file:///x", "text": "x", "mimeType": "text/plain"}},
    {"type": "image", "data": "AA==", "mimeType": "image/png", "uri": "file:///x"},
]
UNKNOWN: Final = "sess_nobody"


def good(session: str) -> dict[str, dict[str, Any]]:
    """Params for every method that are fine. No MCP server of theirs is ever started."""
    elsewhere = {**PLACES, "mcpServers": [SERVER, REMOTE], "sessionId": UNKNOWN}
    there = {"sessionId": session}
    return {
        "authenticate": {"methodId": "configured"},
        "logout": {},
        "session/new": PLACES,
        "session/load": elsewhere,
        "session/resume": elsewhere,
        "session/fork": elsewhere,
        "session/list": {"cwd": CWD, "cursor": None},
        "session/close": {"sessionId": UNKNOWN},
        "session/delete": {"sessionId": UNKNOWN},
        "session/prompt": {**there, "prompt": PROMPT, "_meta": {}},
        "session/set_mode": {**there, "modeId": "ask"},
        "session/set_config_option": {**there, "configId": "mode", "value": "ask"},
    }


# --- what is wrong with it ------------------------------------------------------------------

MISSING: Final = object()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in `value`, and of one more member of each object."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*path, key))
        yield (*path, "_meta")
        yield (*path, "unknown")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from places(each, (*path, index))


def with_at(value: Any, path: tuple[Any, ...], new: object) -> Any:
    """Return `value` with `new` at `path`, or without what is there."""
    if not path:
        return new
    members = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    key = path[0]
    members[key] = with_at(members.get(key), path[1:], new)
    if members[key] is MISSING:
        del members[key]
    return members if isinstance(value, dict) else list(members.values())


def parts_of(schema: dict[str, Any], value: Any) -> Iterator[dict[str, Any]]:
    """Yield what a schema is made of, without alternatives that have another tag than `value`."""
    yield schema
    if "$ref" in schema:
        yield from parts_of(DRAFTS.definitions[schema["$ref"].rpartition("/")[2]], value)
    for part in schema.get("allOf", ()):
        yield from parts_of(part, value)
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        tags = {name: each.get("const") for name, each in part.get("properties", {}).items()}
        if all(tag in (None, value.get(name)) for name, tag in tags.items()):
            yield from parts_of(part, value)


def lenient(schema: dict[str, Any], value: Any) -> Any:
    """Return `value` without what a receiver takes for absent."""
    if not isinstance(value, dict):
        items = next((p["items"] for p in parts_of(schema, {}) if "items" in p), None)
        is_list = isinstance(value, list) and items is not None
        return [lenient(items, each) for each in value] if is_list else value
    known = [part.get("properties", {}) for part in parts_of(schema, value)]
    members = {name: each for properties in known for name, each in properties.items()}
    kept = {}
    for name, each in value.items():
        inner = members.get(name, {})
        left = lenient(inner, each)
        if each is None and inner.get("x-deserialize-default-on-null"):
            continue
        is_spared = inner.get("x-deserialize-default-on-error")
        if not is_spared or DRAFTS._validator(inner).is_valid(left):
            kept[name] = left
    return kept


def must_be_refused(method: str, params: Any) -> bool:
    """Say whether the schema leaves no other answer than -32602."""
    if not isinstance(params, dict):
        return params is not None
    taken = lenient({"$ref": f"#/$defs/{DRAFTS.params_name('agent', method)}"}, params)
    if isinstance(servers := taken.setdefault("mcpServers", []), list):  # beyond the schema
        empty: dict[str, Any] = {"args": [], "env": [], "headers": []}
        taken["mcpServers"] = [
            {**empty, **each} if isinstance(each, dict) else each for each in servers
        ]
    return DRAFTS.params_problems("agent", method, taken) != []


def check_answer(response: dict[str, Any], sent: object, *, is_refused: bool) -> None:
    error = response.get("error")
    code = None if error is None else error["code"]
    assert code in ((-32602,) if is_refused else (None, -32602, -32002)), f"{response}\n{sent}"
    if error is not None:
        said = json.dumps(error)
        assert "\n" not in error["message"]
        assert not [word for word in NOT_OURS if word in said]


_ids: Final = itertools.count(1)


def send(at: Talk, method: str, params: object, *, put: str = "") -> str:
    """Send a request with any params at all, with `put` for each text that is just "@@"."""
    request = f"request-{next(_ids)}"
    at.lines.asked[request] = method
    message = {"jsonrpc": "2.0", "id": request, "method": method, "params": params}
    at.connection.receive(json.dumps(message).replace('"@@"', put).encode())
    return request


# --- every parameter ------------------------------------------------------------------------


@pytest.mark.requirement("ACP-015", "ACP-018")
@pytest.mark.parametrize("method", METHODS)
async def test_every_parameter_may_be_wrong_in_every_way(method, tmp_path):
    async with talk(tmp_path, **SETTINGS) as (at, _backend):
        session = await at.new_session()
        params = good(session)[method]
        wrong = [with_at(params, path, new) for path in places(params) for new in WRONG.values()]
        wrong += [with_at(params, path, MISSING) for path in places(params)]
        wrong += [*WRONG.values()]
        for start in range(0, len(wrong), 40):  # no more than the queue of prompts has room for
            batch = [(send(at, method, each), each) for each in wrong[start : start + 40]]
            at.cancel(session)  # not every prompt that is fine need run
            for request, each in batch:
                is_refused = must_be_refused(method, each)
                check_answer(await at.response(request), each, is_refused=is_refused)

        assert await at.result(at.prompt(session, "say fine"))


@pytest.mark.parametrize("method", METHODS)
async def test_no_number_no_depth_and_no_text_is_too_much(method, tmp_path):
    async with talk(tmp_path, **SETTINGS) as (at, _backend):
        session = await at.new_session()
        params = good(session)[method]
        for path in [*places(params), ()]:
            for raw in RAW.values():
                request = send(at, method, with_at(params, path, "@@"), put=raw)
                at.cancel(session)
                check_answer(await at.response(request), (path, raw[:20]), is_refused=False)
            for raw in NO_JSON.values():
                before = len(at.lines.responses(None))
                send(at, method, with_at(params, path, "@@"), put=raw)
                (response,) = at.lines.responses(None)[before:]
                assert response["error"]["code"] == -32700

        assert await at.result(at.prompt(session, "say fine"))


MESSAGES: Final = st.one_of(
    *(
        st.tuples(st.just(method), values_of(name, is_bent=True) | JUNK)
        for method in METHODS
        if (name := SCHEMA.params_name("agent", method)) is not None
    )
)


@given(st.lists(MESSAGES, min_size=20, max_size=40))
@settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_any_requests_one_behind_the_other_are_each_answered(tmp_path_factory, messages):
    async def play() -> None:
        async with talk(tmp_path_factory.mktemp("sweep"), **SETTINGS) as (at, _backend):
            session = await at.new_session()
            sent = []
            for method, params in messages:
                params = without_servers(params, session)
                sent.append((send(at, method, params), method, params))
            for request, method, params in sent:
                refused = must_be_refused(method, params)
                check_answer(await at.response(request), params, is_refused=refused)
            assert (await at.result(at.say("session/list"))).keys() >= {"sessions"}

    anyio.run(play)


def without_servers(params: Any, session: str) -> Any:
    """Name a session that is there, and no program that would be started."""
    if not isinstance(params, dict):
        return params
    named = {"sessionId": session} if isinstance(params.get("sessionId"), str) else {}
    servers = {"mcpServers": []} if isinstance(params.get("mcpServers"), list) else {}
    places = {"cwd": CWD} if isinstance(params.get("cwd"), str) else {}
    return {**params, **named, **servers, **places}


# --- every request at every wrong time ------------------------------------------------------


async def before_initialize(at: Talk, session: str) -> None:
    at.connection.is_initialized = False


async def after_close(at: Talk, session: str) -> None:
    await at.result(at.say("session/close", sessionId=session))


async def while_closing(at: Talk, session: str) -> None:
    at.prompt(session, "count 3 slowly")
    at.say("session/close", sessionId=session)


async def after_delete(at: Talk, session: str) -> None:
    await at.result(at.say("session/delete", sessionId=session))


async def while_deleting(at: Talk, session: str) -> None:
    at.prompt(session, "count 3 slowly")
    at.say("session/delete", sessionId=session)


async def while_loading(at: Talk, session: str) -> None:
    await at.result(at.say("session/close", sessionId=session))
    at.load(session)


async def in_a_turn(at: Talk, session: str) -> None:
    at.prompt(session, "count 3 slowly")


async def after_a_refused_prompt(at: Talk, session: str) -> None:
    await at.response(at.say("session/prompt", sessionId=session, prompt=[]))


OPENING: Final = ("session/load", "session/resume", "session/fork")
NEEDS_IT_OPEN: Final = (
    "session/prompt",
    "session/close",
    "session/set_mode",
    "session/set_config_option",
)
FINE: Final = dict.fromkeys(METHODS, (None,))
CLOSED: Final = FINE | dict.fromkeys(NEEDS_IT_OPEN, (-32002,))
DELETED: Final = CLOSED | dict.fromkeys(OPENING, (-32002,))
MOMENTS: Final = {
    before_initialize: dict.fromkeys(METHODS, (-32600,)),
    after_close: CLOSED,
    while_closing: CLOSED,
    after_delete: DELETED,
    while_deleting: DELETED,
    while_loading: FINE,
    in_a_turn: FINE,
    after_a_refused_prompt: FINE,
}


@pytest.mark.requirement("ACP-034", "ACP-076")
@pytest.mark.parametrize("method", METHODS)
async def test_every_request_at_every_wrong_time_has_its_answer_and_so_has_its_twin(
    method, tmp_path
):
    async with talk(tmp_path, **SETTINGS) as (at, _backend):
        for moment, codes_of in MOMENTS.items():
            session = await at.new_session()
            await at.result(at.prompt(session, "say hello"))
            params = good(session)[method]
            if "sessionId" in params:
                params = {**params, "sessionId": session}
            if method in OPENING:
                params = {**params, "mcpServers": []}
            await moment(at, session)

            first, second = send(at, method, params), send(at, method, params)

            for request in (first, second):
                response = await at.response(request)
                codes = codes_of[method]
                if method == "session/close" and request == second:
                    codes += (-32002,)
                error = response.get("error", {})
                assert error.get("code") in codes, (moment, response)
                if error.get("code") == -32002:
                    assert error["data"] == {"sessionId": session}
            at.connection.is_initialized = True
            at.cancel(session)
            await at.connection.peer.answered()
            if moment in (after_delete, while_deleting):
                listing = await at.result(at.say("session/list"))
                assert session not in [each["sessionId"] for each in listing["sessions"]]

        assert await at.result(at.prompt(await at.new_session(), "say fine"))


@pytest.mark.parametrize("method", ["session/cancel", "$/cancel_request", "_any", "session/new"])
async def test_no_malformed_notification_is_answered_or_does_anything(method, tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        prompt = at.prompt(session, "say still here")
        for params in (
            *WRONG.values(),
            {"sessionId": None},
            {"requestId": [1]},
            {"requestId": 1.0},
        ):
            message = {"jsonrpc": "2.0", "method": method, "params": params}
            at.connection.receive(json.dumps(message).encode())

        assert (await at.result(prompt))["stopReason"] == "end_turn"
        answers = [m for m in at.lines.sent if "method" not in m]
        assert len(answers) == 3  # to initialize, session/new and the prompt


# --- the same from outside ------------------------------------------------------------------


@pytest.mark.requirement("ACP-003")
@pytest.mark.only_over("stdio", "ws", why="a status says some of it")
async def test_nothing_that_is_malformed_makes_a_process_say_anything_but_answers(tmp_path):
    async with serving() as client:
        session = await client.new_session(tmp_path)
        expected = {}
        for method in METHODS:
            for name, new in WRONG.items():
                for key in good(session)[method]:
                    request = f"{method} {key} {name}"
                    params = {**good(session)[method], key: new}
                    expected[request] = must_be_refused(method, params), params
                    client.wire.send_bytes(line(ask(request, method, params)))
            for request, (is_refused, params) in expected.items():
                response = await client.wire.response(request)
                check_answer(response, params, is_refused=is_refused)
            expected.clear()
        for at, raw in enumerate((*RAW.values(), *NO_JSON.values())):
            for key in ("cwd", "mcpServers", "_meta"):
                message = line(ask(f"raw {at} {key}", "session/new", {**PLACES, key: "@@"}))
                client.wire.send_bytes(message.replace(b'"@@"', raw.encode()))

        assert await client.stop_reason(client.prompt(session, "say fine")) == "end_turn"
        assert client.wire.stderr == ""
        assert_pure(client.wire)
