"""Our types against the published schema: what we must understand, and what we say."""

from __future__ import annotations

import base64
import json
from typing import Any

import dialects
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model_rig import a_request, collect, served
from msgspec import inspect as shapes
from talking import CWD, DRAFTS, SCHEMA, talk
from wire_values import JUNK, values_of

from acp_server import types as wire
from acp_server.blocks import blocks_from
from acp_server.capabilities import Features, features_of
from acp_server.elicitation import _Created
from acp_server.methods import METHODS
from acp_server.updates import updates_for
from agent_core import events
from agent_core.content import Image, Link, Resource, Text
from agent_core.events import Event, EventData, UserMessage
from agent_core.models.adapter import UserTurn
from conformance.providers.server import Reply

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)

PARAMS = {name: served.params for name, served in METHODS.items()}
PARAMS |= {"initialize": wire.InitializeParams, "session/cancel": wire.SessionId}
STABLE = sorted(PARAMS.keys() & set(SCHEMA.methods("agent")))

ANSWERS = {
    "session/request_permission": wire.PermissionAnswer,
    "fs/read_text_file": wire.FileText,
    "terminal/create": wire.CreatedTerminal,
    "terminal/output": wire.TerminalOutput,
    "terminal/wait_for_exit": wire.TerminalExit,
    "elicitation/create": _Created,
}
EMPTY_ANSWERS = {"fs/write_text_file", "terminal/kill", "terminal/release"}


# --- what we read ---------------------------------------------------------------------------


def test_every_stable_method_is_served_and_every_answer_is_read():
    assert set(STABLE) == set(SCHEMA.methods("agent"))
    asked = {m for m in SCHEMA.methods("client") if not SCHEMA.is_notification("client", m)}
    assert asked == ANSWERS.keys() | EMPTY_ANSWERS


@pytest.mark.parametrize("is_bent", [False, True], ids=["valid", "bent where that is allowed"])
@pytest.mark.parametrize("method", STABLE)
def test_params_that_the_schema_has_us_take_are_taken(method, is_bent):
    @SETTINGS
    @given(values_of(SCHEMA.params_name("agent", method), is_bent=is_bent))
    def check(params: Any) -> None:
        taken = msgspec.json.decode(json.dumps(params), type=PARAMS[method])

        for name in params.keys() & {"sessionId", "cwd", "modeId", "configId", "value"}:
            field = next(f for f in msgspec.structs.fields(taken) if f.encode_name == name)
            assert getattr(taken, field.name) == params[name]

    check()


@pytest.mark.parametrize("is_bent", [False, True], ids=["valid", "bent where that is allowed"])
@pytest.mark.parametrize("method", ANSWERS)
def test_answers_that_the_schema_has_us_take_are_taken(method, is_bent):
    @SETTINGS
    @given(values_of(SCHEMA.result_name("client", method), is_bent=is_bent))
    def check(result: Any) -> None:
        msgspec.json.decode(json.dumps(result), type=ANSWERS[method])

    check()


@pytest.mark.requirement("ACP-029", "ACP-030")
@given(values_of("ClientCapabilities", is_bent=True) | JUNK)
@SETTINGS
def test_what_a_client_offers_is_read_flag_by_flag_and_all_else_is_not_offered(offered):
    features = features_of(json.dumps(offered).encode())

    def at(*path: str) -> Any:
        value = offered
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    assert features.reads_files is (at("fs", "readTextFile") is True)
    assert features.writes_files is (at("fs", "writeTextFile") is True)
    assert features.has_terminals is (at("terminal") is True)
    assert features.runs_logins is (at("auth", "terminal") is True)
    assert features.shows_forms is isinstance(at("elicitation", "form"), dict)
    assert features.opens_urls is isinstance(at("elicitation", "url"), dict)
    assert features.knows_compaction is isinstance(at("session", "compaction"), dict)
    assert features.knows_notices is isinstance(at("session", "notices"), dict)


# --- what people send comes back ------------------------------------------------------------


def known_part(schema: dict[str, Any], value: Any) -> Any:
    """Return `value` without nulls and without members that the schema does not know."""
    parts = list(SCHEMA._parts(schema, value))
    if isinstance(value, list):
        item = next((part["items"] for part in parts if "items" in part), {})
        return [known_part(item, each) for each in value]
    known = {name: each for part in parts for name, each in part.get("properties", {}).items()}
    if not isinstance(value, dict) or not known:
        return value
    return {
        name: known_part(known[name], each)
        for name, each in value.items()
        if name in known and each is not None
    }


def shown_again(prompt: list[Any]) -> list[Any]:
    """Take a prompt in, keep it in a log, read that log again, and replay it."""
    blocks = blocks_from(msgspec.json.decode(json.dumps(prompt), type=list[wire.ContentBlock]))
    data = events.decode(events.encode(UserMessage("m", blocks, "user")))
    updates = updates_for(Event(1, 1, data), is_replay=True)
    lines = [json.loads(wire.encode_update("s", update))["params"] for update in updates]
    assert [SCHEMA.problems("SessionNotification", line) for line in lines] == [[]] * len(lines)
    return [line["update"]["content"] for line in lines]


BLOCK = {"$ref": "#/$defs/ContentBlock"}


def can_be_shown(block: Any) -> bool:
    return block["type"] != "audio" and block.get("text") != ""


def with_data(block: Any) -> Any:
    """Return `block` with base64 in the places for it: the schema says so in words only."""
    for holder, name in ((block, "data"), (block.get("resource"), "blob")):
        if isinstance(holder, dict) and isinstance(value := holder.get(name), str):
            holder[name] = base64.b64encode(value.encode() or b"x").decode()
    return block


def shown_blocks(*, is_bent: bool = False) -> st.SearchStrategy[list[Any]]:
    blocks = values_of("ContentBlock", is_bent=is_bent).filter(can_be_shown).map(with_data)
    return st.lists(blocks, min_size=1, max_size=4)


@given(shown_blocks())
@SETTINGS
def test_a_prompt_comes_back_in_replay_with_its_annotations_and_its_meta(prompt):
    assert shown_again(prompt) == [known_part(BLOCK, block) for block in prompt]


@given(shown_blocks(is_bent=True))
@SETTINGS
def test_of_a_bent_prompt_all_that_is_well_formed_comes_back(prompt):
    for block, shown in zip(prompt, shown_again(prompt), strict=True):
        assert SCHEMA.strangers("ContentBlock", shown) == []
        for name in shown.keys() - {"annotations", "resource"}:
            assert shown[name] == block[name]
        for name in block.keys() - shown.keys() - {"x-unknown"}:
            value = block[name]
            if isinstance(value, int) and abs(value) >= 2**63:
                continue  # the schema's format says so, and no check of ours looks at that
            assert value is None or SCHEMA.problems("ContentBlock", {**shown, name: value})


def test_annotations_are_kept_as_far_as_they_are_well_formed():
    bent = {
        "type": "text",
        "text": "hello",
        "annotations": {
            "audience": ["user", "nobody", 5, ["user"]],
            "lastModified": 5,
            "priority": "high",
            "_meta": {"a": [1e400 > 0]},
            "x": 1,
        },
        "_meta": [],
    }
    garbage = {"type": "text", "text": "hello", "annotations": "mine", "_meta": "mine"}

    assert shown_again([bent, garbage]) == [
        {
            "type": "text",
            "text": "hello",
            "annotations": {"audience": ["user"], "_meta": {"a": [True]}},
        },
        {"type": "text", "text": "hello"},
    ]


def test_no_depth_and_no_number_in_meta_is_too_much_for_the_log_or_breaks_a_line():
    meta = '{ "deep":\n' + "[" * 900 + "]" * 900 + ',"long":' + "9" * 5000 + ',"wide": 1e999 }'
    raw = '[{"type":"text","text":"x","_meta":' + meta + "}]"
    blocks = blocks_from(msgspec.json.decode(raw, type=list[wire.ContentBlock]))

    data = events.decode(events.encode(UserMessage("m", blocks, "user")))
    (update,) = updates_for(Event(1, 1, data), is_replay=True)
    line = wire.encode_update("s", update)

    assert "".join(meta.split()).encode() in line.replace(b" ", b"")
    assert b"\n" not in line


@pytest.mark.parametrize("api", dialects.APIS)
async def test_no_model_sees_annotations_or_meta(api):
    note = {"annotations": '{"audience":["user"],"_meta":{"k":"hidden"}}', "meta": '{"k":"hidden"}'}
    blocks = (
        Text("seen", **note),
        Image("AA==", "image/png", **note),
        Link("file:///x", "x", **note),
        Resource("file:///y", text="y", contents_meta='{"k":"hidden"}', **note),
    )
    model = {"api": api, "facts": {"takes_images": True, "takes_files": True}}
    async with served(Reply(dialects.last_words(api)), **model) as (adapter, double):
        _events, error = await collect(adapter, a_request(UserTurn(blocks)))

    assert error is None
    said = str(double.requests)
    assert "seen" in said
    assert not [word for word in ("hidden", "annotations", "audience", "_meta") if word in said]


# --- what we send ---------------------------------------------------------------------------

_WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_SPECIAL = {
    "annotations": st.sampled_from([None, "{}", '{"audience":["user"],"priority":0.5}']),
    "meta": st.sampled_from([None, '{"a":{"b":[1]}}']),
    "contents_meta": st.sampled_from([None, "{}"]),
    "arguments": st.sampled_from(["{}", '{"path": "a"}', "[1]", "not JSON", '{"a": NaN}', ""]),
}


def is_sound(value: object) -> bool:
    return not isinstance(value, Resource) or (value.text or value.blob) is not None


def instances(shape: shapes.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type as msgspec sees it."""
    match shape:
        case shapes.StructType(cls=cls, fields=fields):
            members = {
                f.name: _SPECIAL[f.name] if f.name in _SPECIAL else instances(f.type)
                for f in fields
            }
            return st.builds(cls, **members).filter(is_sound)
        case shapes.UnionType(types=types):
            return st.one_of(*map(instances, types))
        case shapes.VarTupleType(item_type=item):
            return st.lists(instances(item), max_size=3).map(tuple)
        case shapes.LiteralType(values=values):
            return st.sampled_from(values)
        case shapes.StrType():
            return _WORDS
        case shapes.IntType():
            return st.integers(0, 2**40)
        case shapes.FloatType():
            return st.floats(0, 1e6)
        case shapes.BoolType():
            return st.booleans()
        case shapes.NoneType():
            return st.none()
    raise AssertionError(shape)


@pytest.mark.requirement("ACP-083")
@pytest.mark.parametrize("kind", EventData.__args__, ids=lambda kind: kind.__name__)
def test_whatever_is_in_the_log_is_told_as_the_schema_has_it(kind):
    @SETTINGS
    @given(instances(shapes.type_info(kind)), st.booleans(), st.booleans())
    def check(data: Any, is_replay: bool, knows: bool) -> None:
        for update in updates_for(Event(1, 1, data), is_replay=is_replay, knows_compaction=knows):
            params = json.loads(wire.encode_update("s", update))["params"]
            schema = SCHEMA if is_stable(params["update"]["sessionUpdate"]) else DRAFTS
            assert schema.problems("SessionNotification", params) == []
            assert schema.strangers("SessionNotification", params) == []

    check()


def is_stable(kind: str) -> bool:
    kinds = SCHEMA.definitions["SessionUpdate"]["oneOf"]
    return kind in [each["properties"]["sessionUpdate"]["const"] for each in kinds]


async def test_what_initialize_offers_is_valid_whatever_the_client_is(tmp_path):
    everything = {
        "fs": {"readTextFile": True, "writeTextFile": True},
        "terminal": True,
        "subagents": {},
        "auth": {"terminal": True},
        "elicitation": {"form": {}, "url": {}},
        "session": {"compaction": {}, "notices": {}, "configOptions": {"boolean": {}}},
    }
    features = features_of(json.dumps(everything).encode())
    flags = (getattr(features, f.name) for f in msgspec.structs.fields(Features))
    assert all(flags)
    for capabilities in (None, everything):
        async with talk(tmp_path, capabilities=capabilities) as (at, _backend):
            result = at.lines.sent[0]["result"]
            assert SCHEMA.problems("InitializeResponse", result) == []
            new = at.say("session/new", cwd=CWD, mcpServers=[])
            assert SCHEMA.problems("NewSessionResponse", await at.result(new)) == []
