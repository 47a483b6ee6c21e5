"""Each judge finds its rule kept in a sound conversation, and broken in one with that one bug."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance import judges
from conformance.conversation import Conversation
from conformance.manifest import manifest
from conformance.trace import Entry, decode

Message = dict[str, Any]
S = "sess-1"


def sent(**message: Any) -> Entry:
    return entry("sent", message)


def got(**message: Any) -> Entry:
    return entry("received", message)


def entry(direction: Any, message: Message) -> Entry:
    raw = json.dumps({"jsonrpc": "2.0"} | message).encode()
    return Entry(0.0, direction, raw, decode(raw))


def noise(raw: bytes) -> Entry:
    return Entry(0.0, "received", raw, decode(raw))


def asks(id: Any, method: str, **params: Any) -> Entry:
    return sent(id=id, method=method, params=params)


def update(what: str, /, session: str = S, **body: Any) -> Entry:
    params = {"sessionId": session, "update": {"sessionUpdate": what, **body}}
    return got(method="session/update", params=params)


def chunk(text: str = "Hi", **body: Any) -> Entry:
    return update("agent_message_chunk", content={"type": "text", "text": text}, **body)


def call(**body: Any) -> Entry:
    return update("tool_call", **({"toolCallId": "c1", "title": "Read", "kind": "read"} | body))


def change(**body: Any) -> Entry:
    return update("tool_call_update", **({"toolCallId": "c1"} | body))


def cost(amount: float) -> Message:
    return {"amount": amount, "currency": "USD"}


def ends(reason: str = "end_turn", id: Any = 3) -> Entry:
    return got(id=id, result={"stopReason": reason})


def permission(id: Any = 1, **changes: Any) -> Entry:
    options = [
        {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
        {"optionId": "no", "name": "No", "kind": "reject_once"},
    ]
    params = {"sessionId": S, "toolCall": {"toolCallId": "c1"}, "options": options} | changes
    return got(id=id, method="session/request_permission", params=params)


def opened(capabilities: Message | None = None, result: Message | None = None) -> list[Entry]:
    return [
        asks(1, "initialize", protocolVersion=1, clientCapabilities=capabilities or {}),
        got(id=1, result={"protocolVersion": 1} | (result or {})),
        asks(2, "session/new", cwd="/tmp", mcpServers=[]),
        got(id=2, result={"sessionId": S}),
        asks(3, "session/prompt", sessionId=S, prompt=[{"type": "text", "text": "Go"}]),
    ]


LENT = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": True}
READS = got(id=1, method="fs/read_text_file", params={"sessionId": S, "path": "/tmp/a", "line": 1})
MAKES = got(
    id=1, method="terminal/create", params={"sessionId": S, "command": "true", "cwd": "/tmp"}
)
MADE = sent(id=1, result={"terminalId": "t1"})
SHOWS = call(content=[{"type": "terminal", "terminalId": "t1"}])
RELEASES = got(id=2, method="terminal/release", params={"sessionId": S, "terminalId": "t1"})
WAITS = got(id=3, method="terminal/wait_for_exit", params={"sessionId": S, "terminalId": "t1"})
FORM = got(
    id=1,
    method="elicitation/create",
    params={
        "sessionId": S,
        "mode": "form",
        "message": "Which?",
        "requestedSchema": {"type": "object", "properties": {}},
    },
)
CHOICE = {
    "id": "y",
    "name": "Y",
    "type": "select",
    "currentValue": "a",
    "options": [{"value": "a", "name": "A"}],
}
SWITCH = {"id": "x", "name": "X", "type": "boolean", "currentValue": True}
SLASHED = {"name": "/plan", "description": "Show a plan"}
ERROR = {"code": -32602, "message": "Invalid params"}

BROKEN: list[tuple[str, list[Entry]]] = [
    ("MSG-01", [noise(b"Listening on stdin")]),
    ("MSG-01", [noise(b'[{"jsonrpc":"2.0","id":9,"result":{}}]')]),
    ("MSG-01", [noise(b'{"a": "\xff"}')]),
    ("MSG-02", [noise(b'{"id": 9, "result": {}}')]),
    ("MSG-02", [got(jsonrpc="1.0", id=9, result={})]),
    ("MSG-03", [got(id=9, result={}, error=ERROR)]),
    ("MSG-03", [got(id=9)]),
    ("MSG-04", [got(id=9, error={"code": "x", "message": "m"})]),
    ("MSG-04", [got(id=9, error="it broke")]),
    ("MSG-05", [got(id=9, error={"code": -1, "message": "one\ntwo"})]),
    ("MSG-05", [got(id=9, error={"code": -1, "message": " "})]),
    (
        "MSG-06",
        [got(id=9, error={"code": -1, "message": "Traceback (most recent call last): x"})],
    ),
    ("MSG-07", [*opened(), ends(), ends()]),
    ("MSG-08", [got(id=77, result={})]),
    ("MSG-08", [*opened(), ends(id="3")]),
    ("MSG-09", [*opened(), call(), permission(1), permission(1)]),
    (
        "MSG-10",
        [*opened(), ends(id=3), asks(4, "session/prompt", sessionId=S), got(id=4, result={})],
    ),
    ("MSG-10", [*opened(), update("agent_message_chunk", content="Hi")]),
    ("MSG-11", [*opened(), ends("because")]),
    ("MSG-11", [*opened(), update("weather_update")]),
    ("MSG-12", [*opened(), chunk(mood="good")]),
    ("MSG-13", [got(method="weather/report", params={})]),
    ("MSG-14", [*opened(), got(id=3, result=None)]),
    ("MSG-15", [*opened(), chunk("x" * 10_000_001)]),
    ("MSG-16", [noise(rb'{"jsonrpc":"2.0","method":"_x","params":{"t":"\ud800"}}')]),
    ("UPD-01", [*opened(), update("plan", session="sess-2", entries=[])]),
    ("UPD-02", [*opened(), ends("cancelled"), chunk()]),
    ("UPD-03", [*opened(), ends(), chunk()]),
    ("UPD-04", [*opened(), update("plan_removed", planId="p")]),
    ("UPD-05", [*opened(), call(locations=[{"path": "a.txt"}])]),
    ("UPD-05", [*opened(), call(content=[{"type": "diff", "path": "a", "newText": ""}])]),
    ("UPD-06", [*opened(), call(locations=[{"path": "/a", "line": 0}])]),
    ("UPD-07", [*opened()[:3], chunk(), got(id=2, result={"sessionId": S})]),
    ("UPD-08", [*opened(), *(chunk(messageId=f"m{n}") for n in range(8))]),
    ("UPD-09", [*opened(), *(update("usage_update", cost=cost(n)) for n in (2, 1))]),
    ("UPD-10", [*opened(), update("available_commands_update", availableCommands=[SLASHED])]),
    ("TUL-01", [*opened(), call(), call()]),
    ("TUL-02", [*opened(), change(status="completed")]),
    ("TUL-03", [*opened(), call(status="completed"), change(status="in_progress")]),
    ("TUL-04", [*opened(), call(status="in_progress"), change(status="pending")]),
    ("TUL-05", [*opened(), call(title="")]),
    ("TUL-07", [*opened(), call(status="completed"), change(title="Another")]),
    ("TUL-06", [*opened(), call(status="in_progress"), ends()]),
    ("TUL-08", [*opened(), call(kind="execute", status="in_progress"), permission()]),
    ("ASK-01", [*opened({"fs": {"writeTextFile": True}}), READS]),
    ("ASK-02", [*opened(), MAKES]),
    ("ASK-03", [*opened({"elicitation": {"url": {}}}), FORM]),
    ("ASK-04", [*opened()[:3], got(id=2, result={"sessionId": S, "configOptions": [SWITCH]})]),
    ("ASK-04", [*opened(), update("config_option_update", configOptions=[SWITCH])]),
    ("ASK-05", opened(result={"authMethods": [{"id": "t", "name": "T", "type": "terminal"}]})),
    ("ASK-06", [*opened(), call(), permission(options=[])]),
    (
        "ASK-06",
        [
            *opened(),
            call(),
            permission(options=[{"optionId": "a", "name": "A", "kind": "allow_once"}] * 2),
        ],
    ),
    ("ASK-07", [*opened(), call(), ends(), permission()]),
    ("ASK-08", [*opened(), permission()]),
    ("TER-01", [*opened(LENT), MAKES, MADE, ends()]),
    ("TER-01", [*opened(LENT), MAKES, MADE, ends(), RELEASES]),
    ("TER-02", [*opened(LENT), MAKES, MADE, RELEASES, WAITS, ends()]),
    ("TER-03", [*opened(LENT), MAKES, MADE, RELEASES, SHOWS]),
    ("TER-03", [*opened(LENT), SHOWS]),
]

SOUND: dict[str, list[Entry]] = {
    "a turn with a tool call": [
        *opened(result={"authMethods": [{"id": "key", "name": "Key"}]}),
        update("available_commands_update", availableCommands=[]),
        update("config_option_update", configOptions=[CHOICE]),
        chunk("é \N{GRINNING FACE}"),
        call(status="pending", locations=[{"path": "/tmp/a", "line": 1}]),
        permission(),
        sent(id=1, result={"outcome": {"outcome": "selected", "optionId": "yes"}}),
        change(status="in_progress"),
        change(status="completed"),
        change(status="completed"),
        ends(),
        update("session_info_update", title="Go"),
        sent(method="session/cancel", params={"sessionId": S}),
        asks(4, "session/prompt", sessionId=S, prompt=[]),
        got(id=4, error=ERROR),
        got(id=None, error={"code": -32700, "message": "Parse error"}),
    ],
    "a cancelled turn, and what is on the way when the next one begins": [
        *opened(),
        chunk(),
        sent(method="session/cancel", params={"sessionId": S}),
        ends("cancelled"),
        asks(4, "session/prompt", sessionId=S, prompt=[{"type": "text", "text": "Go"}]),
        chunk(),
        ends(id=4),
    ],
    "a terminal": [
        *opened(LENT),
        MAKES,
        MADE,
        SHOWS,
        WAITS,
        RELEASES,
        change(status="failed"),
        ends(),
    ],
    "a message of many pieces, and what it cost": [
        *opened(),
        *(chunk(messageId="m1") for _ in range(8)),
        *(update("usage_update", used=1, size=9, cost=cost(n)) for n in (1, 1, 2)),
        ends(),
    ],
    "a terminal that came when the turn was over": [
        *opened(LENT),
        MAKES,
        sent(method="session/cancel", params={"sessionId": S}),
        ends("cancelled"),
        MADE,
        RELEASES,
    ],
    "a form": [*opened({"elicitation": {"form": {}}}), FORM, ends()],
    "a load": [
        *opened(),
        call(status="completed"),
        ends(),
        asks(4, "session/load", sessionId=S, cwd="/tmp", mcpServers=[]),
        chunk(),
        call(status="completed", content=[{"type": "terminal", "terminalId": "gone"}]),
        got(id=4, result={}),
    ],
    "two sessions, ids of every kind": [
        *opened(),
        asks("new", "session/new", cwd="/tmp", mcpServers=[]),
        got(id="new", result={"sessionId": "sess-2"}),
        update("plan", session="sess-2", entries=[]),
        ends(),
        asks("3", "session/list"),
        got(id="3", result={"sessions": []}),
    ],
    "updates that were asked for": [
        *opened({"plan": {}, "session": {"configOptions": {"boolean": {}}}}),
        update("plan_removed", planId="p"),
        update("config_option_update", configOptions=[SWITCH]),
        ends(),
    ],
}


def found(entries: list[Entry], **how: Any) -> list[judges.Finding]:
    return judges.findings(Conversation(entries, **how))


@pytest.mark.parametrize(("rule", "entries"), BROKEN, ids=[rule for rule, _ in BROKEN])
def test_a_broken_rule_is_found_where_it_is_broken(rule: str, entries: list[Entry]) -> None:
    broken = [each for each in found(entries) if each.wrong and each.rule == rule]

    assert broken, found(entries)
    assert 0 <= broken[0].at < len(entries)
    assert "\n" not in broken[0].wrong


@pytest.mark.parametrize("entries", SOUND.values(), ids=SOUND)
def test_nothing_is_found_in_a_sound_conversation(entries: list[Entry]) -> None:
    assert [each for each in found(entries) if each.wrong] == []


def test_every_rule_that_a_judge_knows_is_kept_somewhere_and_broken_somewhere() -> None:
    kept = {each.rule for entries in SOUND.values() for each in found(entries) if not each.wrong}

    assert judges.rules() - kept == set()
    assert judges.rules() - {rule for rule, _ in BROKEN} == {"MSG-17"}  # see below
    assert judges.rules() <= manifest().keys()


def test_an_agent_that_ends_by_itself_owes_its_answers() -> None:
    broken = {each.rule for each in found(opened(), has_died=True) if each.wrong}

    assert broken == {"MSG-07", "MSG-17"}


def test_an_agent_that_ends_at_a_line_that_is_no_message_is_not_blamed_for_its_answers() -> None:
    entries = [*opened(), Entry(0.0, "sent", b"{", None)]

    assert [each for each in found(entries, has_died=True) if each.wrong] == []


def test_a_line_that_was_sent_in_parts_is_one_message() -> None:
    whole = opened()[0]
    parts = [
        Entry(0.0, "sent", whole.raw[:9], None, is_part=True),
        Entry(0.0, "sent", whole.raw[9:], whole.message),
    ]

    assert [each for each in found([*parts, *opened()[1:]]) if each.wrong] == []


def test_judges_survive_whatever_an_agent_says() -> None:
    odd: list[Any] = [None, 0, "", [], {}, [1], {"a": 1}, True, 1e300, "\ud800"]
    entries = opened()
    for value in odd:
        entries += [
            got(id=value, method="session/update", params=value),
            got(method="session/update", params={"sessionId": value, "update": value}),
            got(id=value, result=value),
            got(id=value, error=value),
            got(id=1, method="session/request_permission", params={"options": value}),
            got(id=2, method="terminal/create", params=value),
            update("tool_call", toolCallId=value, content=value, locations=value, status=value),
            update("tool_call_update", toolCallId=value, content=[value], locations=[value]),
            update("config_option_update", configOptions=value),
        ]

    assert found(entries)
