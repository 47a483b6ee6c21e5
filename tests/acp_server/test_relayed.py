"""What passes through a relay, and what becomes of it when a connection is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from acp_server.message import Response
from acp_server.relayed import Relayed

PERMISSION = "session/request_permission"


class Ends:
    """A relay, and what came out at both ends."""

    def __init__(self) -> None:
        self.agent: list[bytes] = []
        self.editor: list[bytes] = []
        self.relayed = Relayed(self.agent.append, self.editor.append)

    def says(self, **parts: Any) -> None:
        self.relayed.from_editor(json.dumps({"jsonrpc": "2.0", **parts}).encode())

    def hears(self, **parts: Any) -> None:
        self.relayed.from_agent(json.dumps({"jsonrpc": "2.0", **parts}).encode())

    def round(self, request_id: object, method: str, params: Any, result: Any) -> None:
        self.says(id=request_id, method=method, params=params)
        self.hears(id=request_id, result=result)

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.editor]

    def passed(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.agent]


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.mark.parametrize(
    "message",
    [
        b'{"jsonrpc":"2.0","id":1,"method":"_vendor/x","params":{"a":1.50},"extra":[null]}',
        b'{ "jsonrpc" : "2.0", "method":"_vendor/y" }',
        b'{"id":1e3,"jsonrpc":"2.0","result":{"\\u00e9":"\\ud800"}}',
        b'{"jsonrpc":"2.0","id":"x","error":{"code":1,"message":"m","data":{}}}',
        b'{"jsonrpc":"2.0","id":null,"method":"initialize"}',
    ],
)
def test_a_message_passes_as_it_is_in_both_directions(ends: Ends, message: bytes) -> None:
    ends.relayed.from_editor(message)
    ends.relayed.from_agent(message)

    assert ends.agent == [message]
    assert ends.editor == ([] if b"1e3" in message else [message])


def test_what_is_wrong_passes_to_the_agent_which_says_so(ends: Ends) -> None:
    for line in (b"{", b"[]", b'{"jsonrpc":"1.0"}', b"7"):
        ends.relayed.from_editor(line)

    assert ends.agent == [b"{", b"[]", b'{"jsonrpc":"1.0"}', b"7"]


def test_a_line_that_no_frame_can_hold_is_answered_here_and_a_blank_one_is_not(ends: Ends) -> None:
    ends.relayed.from_editor(b'{"x":"\xff"}')
    ends.relayed.from_editor(b"  ")

    assert ends.agent == []
    (answer,) = ends.told()
    assert (answer["id"], answer["error"]["code"]) == (None, -32700)


def test_a_message_of_several_lines_becomes_one_and_no_message_is_dropped(ends: Ends) -> None:
    ends.relayed.from_agent(b'{\r\n"jsonrpc":"2.0",\n"method":"x"\n}')
    ends.relayed.from_agent(b"hello")

    (line,) = ends.editor
    assert b"\n" not in line
    assert json.loads(line)["method"] == "x"


def test_a_loss_answers_each_request_once_and_says_why(ends: Ends) -> None:
    ends.round(1, "session/new", {}, {})
    for request_id in (2, "2", None):
        ends.says(id=request_id, method="session/prompt", params={})
    ends.editor.clear()

    ends.relayed.lose("it broke")
    ends.relayed.lose("again")

    assert [answer["id"] for answer in ends.told()] == [2, "2", None]
    error = ends.told()[0]["error"]
    assert error == {"code": -32603, "message": "No answer will come: it broke"}
    assert ends.relayed.is_answered


def test_a_loss_withdraws_what_the_agent_asked_before_anything_is_answered(ends: Ends) -> None:
    ends.says(id=1, method="session/prompt", params={"sessionId": "s"})
    ends.hears(id=7, method=PERMISSION, params={})
    ends.hears(id="q", method=PERMISSION, params={})
    ends.says(id="q", result={})
    ends.editor.clear()

    ends.relayed.lose("it broke")

    withdrawn, answer = ends.told()
    assert withdrawn["method"] == "$/cancel_request"
    assert withdrawn["params"] == {"requestId": 7}
    assert answer["id"] == 1


@pytest.mark.parametrize("late", [True, False])
def test_a_late_answer_is_never_taken_for_the_answer_to_a_new_question(
    ends: Ends, late: bool
) -> None:
    ends.hears(id=1, method=PERMISSION, params={"about": "old"})
    ends.relayed.lose("it broke")
    ends.hears(id=1, method=PERMISSION, params={"about": "new"})
    old, _withdrawn, new = ends.told()
    assert old["id"] == 1
    assert new["params"] == {"about": "new"}
    assert new["id"] != 1

    ends.says(id=old["id"] if late else new["id"], result={"outcome": "go"})

    expected = [] if late else [{"jsonrpc": "2.0", "id": 1, "result": {"outcome": "go"}}]
    assert ends.passed() == expected


def test_a_question_of_a_later_connection_is_withdrawn_by_the_id_that_the_editor_knows(
    ends: Ends,
) -> None:
    ends.relayed.lose("it broke")
    ends.hears(id=1, method=PERMISSION, params={})
    ends.hears(method="$/cancel_request", params={"requestId": 1, "_meta": {}})

    asked, withdrawn = ends.told()
    assert asked["id"] != 1
    assert withdrawn["params"] == {"requestId": asked["id"], "_meta": {}}


def test_the_sessions_that_are_open_are_known_with_what_opened_them(ends: Ends) -> None:
    place = {"cwd": "/x", "mcpServers": [{"name": "m"}], "_meta": {"a": 1}}
    ends.round(1, "session/new", place, {"sessionId": "new"})
    ends.round(2, "session/load", {**place, "sessionId": "loaded"}, {})
    ends.round(3, "session/resume", {**place, "sessionId": "resumed"}, {})
    ends.round(4, "session/fork", {**place, "sessionId": "new"}, {"sessionId": "forked"})
    ends.round(5, "session/close", {"sessionId": "loaded"}, {})
    ends.round(6, "session/delete", {"sessionId": "resumed"}, {})
    ends.says(id=7, method="session/load", params={**place, "sessionId": "failed"})
    ends.hears(id=7, error={"code": -32002, "message": "no"})
    ends.says(id=8, method="session/new", params=place)

    assert list(ends.relayed.sessions) == ["new", "forked"]
    opened = {name: json.loads(bytes(v)) for name, v in ends.relayed.sessions["forked"].items()}
    assert opened == {**place, "sessionId": "forked"}


@pytest.mark.parametrize(
    ("capabilities", "method"),
    [
        ({"loadSession": True, "sessionCapabilities": {"resume": {}}}, "session/resume"),
        ({"loadSession": True, "sessionCapabilities": {"resume": None}}, "session/load"),
        ({"loadSession": True}, "session/load"),
        ({"loadSession": 1}, None),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_a_session_is_opened_again_in_the_way_that_the_agent_offers(
    ends: Ends, capabilities: Any, method: str | None
) -> None:
    ends.round(1, "initialize", {"protocolVersion": 1}, {"agentCapabilities": capabilities})
    ends.round(2, "session/new", {"cwd": "/x"}, {"sessionId": "s"})
    ends.relayed.lose("it broke")
    ends.agent.clear()
    answers: list[Response] = []

    assert ends.relayed.reopen("s", answers.append) is (method is not None)

    if method is None:
        assert ends.agent == []
        return
    (request,) = ends.passed()
    assert request["method"] == method
    assert request["params"] == {"cwd": "/x", "sessionId": "s"}
    told = len(ends.editor)
    ends.hears(id=request["id"], result={})
    assert len(answers) == 1
    assert len(ends.editor) == told


def test_history_that_is_told_again_is_passed_over_and_how_things_are_is_not(ends: Ends) -> None:
    ends.round(1, "initialize", {}, {"agentCapabilities": {"loadSession": True}})
    for name in ("s", "t"):
        ends.round(name, "session/new", {}, {"sessionId": name})
    ends.relayed.lose("it broke")
    ends.relayed.reopen("s", lambda _answer: None)
    request = ends.passed()[-1]
    ends.editor.clear()

    def update(session: str, kind: str) -> None:
        params = {"sessionId": session, "update": {"sessionUpdate": kind}}
        ends.hears(method="session/update", params=params)

    for kind in ("user_message_chunk", "agent_message_chunk", "tool_call", "plan"):
        update("s", kind)
    update("t", "agent_message_chunk")
    update("s", "available_commands_update")
    ends.hears(id=request["id"], result={})
    update("s", "agent_message_chunk")

    shown = [(m["params"]["sessionId"], m["params"]["update"]) for m in ends.told()]
    assert [(at, update["sessionUpdate"]) for at, update in shown] == [
        ("t", "agent_message_chunk"),
        ("s", "available_commands_update"),
        ("s", "agent_message_chunk"),
    ]


def test_a_session_that_cannot_be_opened_again_is_forgotten(ends: Ends) -> None:
    ends.round(1, "initialize", {}, {"agentCapabilities": {"loadSession": True}})
    ends.round(2, "session/new", {}, {"sessionId": "s"})
    ends.relayed.lose("it broke")
    ends.relayed.reopen("s", lambda _answer: None)
    ends.hears(id=ends.passed()[-1]["id"], error={"code": -32002, "message": "no"})

    assert ends.relayed.sessions == {}
    assert ends.relayed.replaying == set()


def test_a_login_is_remembered_until_the_logout(ends: Ends) -> None:
    ends.round(1, "authenticate", {"methodId": "m"}, {})
    assert ends.relayed.authenticate == b'{"methodId": "m"}'

    ends.round(2, "logout", {}, {})
    assert ends.relayed.authenticate is None


def test_all_turns_that_run_can_be_stopped(ends: Ends) -> None:
    for session in ("a", "b"):
        ends.says(id=session, method="session/prompt", params={"sessionId": session})
    ends.says(id=3, method="session/list", params={})
    ends.hears(id="a", result={})

    (stop,) = ends.relayed.stops()
    assert json.loads(stop) == {
        "jsonrpc": "2.0",
        "method": "session/cancel",
        "params": {"sessionId": "b"},
    }
