"""What the client's person is asked, in every way a client may have offered to ask."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import pytest
from talking import Talk, said_by_agent, talk

from acp_server import client_calls
from agent_core.agent import Agent
from agent_core.cancellation import AbortController, AbortSignal, TurnAborted
from agent_core.errors import ToolError
from agent_core.questions import Reply, ask_form, ask_url

FORMS: Final[dict[str, Any]] = {"elicitation": {"form": {}}}
URLS: Final[dict[str, Any]] = {"elicitation": {"url": {}}}
PLACE: Final = "https://example.com/agree?state=x"
ANSWER: Final = {"properties": {"answer": {"type": "string"}}, "required": ["answer"]}


async def asked(at: Talk, method: str = "elicitation/create", nth: int = 1) -> dict[str, Any]:
    """Wait for the agent's `nth` request of a method."""

    def requests() -> list[dict[str, Any]]:
        return [m for m in at.lines.sent if m.get("method") == method and "id" in m]

    await at.lines.until(lambda: len(requests()) >= nth)
    return requests()[nth - 1]


def respond(at: Talk, request: dict[str, Any], response: dict[str, Any]) -> None:
    message = {"jsonrpc": "2.0", "id": request["id"], **response}
    at.connection.receive(json.dumps(message).encode())


def answer(at: Talk, request: dict[str, Any], result: object) -> None:
    respond(at, request, {"result": result})


def call_of(at: Talk, **fields: object) -> dict[str, Any]:
    """Return the last update of a tool call with these fields."""
    updates = at.lines.updates()
    found = [u for u in updates if "toolCallId" in u and fields.items() <= u.items()]
    assert found, updates
    return found[-1]


def said_to_the_model(at: Talk) -> str:
    content = call_of(at, sessionUpdate="tool_call_update")["content"]
    return "".join(block["content"]["text"] for block in content)


# --- forms ----------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-155", "ACP-157")
async def test_a_client_with_forms_is_asked_by_a_form_on_the_tool_call(tmp_path: Any) -> None:
    async with talk(tmp_path, capabilities=FORMS) as (at, _backend):
        session_id = await at.new_session()
        prompt = at.prompt(session_id, "ask Which colour?: red | blue")

        request = await asked(at)
        call = call_of(at, sessionUpdate="tool_call")
        assert (call["title"], call["kind"], call["name"]) == ("Which colour?", "other", "ask")
        assert request["params"] == {
            "sessionId": session_id,
            "toolCallId": call["toolCallId"],
            "mode": "form",
            "message": "Which colour?",
            "requestedSchema": {
                "type": "object",
                "properties": {
                    "answer": {"type": "string", "title": "Answer", "enum": ["red", "blue"]}
                },
                "required": ["answer"],
            },
        }
        answer(at, request, {"action": "accept", "content": {"answer": "blue"}})

        assert (await at.result(prompt))["stopReason"] == "end_turn"
        assert call_of(at, sessionUpdate="tool_call_update", status="completed")
        assert said_to_the_model(at) == "blue"
        assert "blue" in said_by_agent(at.lines.updates())


@pytest.mark.requirement("ACP-155")
@pytest.mark.parametrize("capabilities", [FORMS, None], ids=["form", "choices"])
async def test_a_person_has_more_time_than_a_client(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capabilities: Any
) -> None:
    monkeypatch.setattr(client_calls, "ANSWER_LIMIT_S", 0.0)
    async with talk(tmp_path, capabilities=capabilities) as (at, _backend):
        prompt = at.prompt(await at.new_session(), "ask Which colour?: red | blue")

        if capabilities is FORMS:
            answer(at, await asked(at), {"action": "accept", "content": {"answer": "blue"}})
        else:
            request = await asked(at, "session/request_permission")
            option = {"outcome": "selected", "optionId": "choice-2"}
            answer(at, request, {"outcome": option})

        await at.result(prompt)
        assert said_to_the_model(at) == "blue"


REFUSALS: Final = [
    ({"result": {"action": "decline"}}, "the person does not want to answer this question"),
    ({"result": {"action": "cancel"}}, "the person dismissed the question"),
    ({"result": {"action": "cancel", "content": {"answer": "red"}}}, "the person dismissed"),
    ({"result": {"action": "accept"}}, "is no answer to the question: 'answer' is missing"),
    ({"result": {"action": "accept", "content": None}}, "'answer' is missing"),
    ({"result": {"action": "accept", "content": {"answer": "green"}}}, "none of the choices"),
    ({"result": {"action": "accept", "content": {"answer": ["red"]}}}, "is not a text"),
    ({"result": {"action": "accept", "content": "red"}}, "is malformed"),
    ({"result": {"action": "agree", "content": {"answer": "red"}}}, "something unknown"),
    ({"result": {"action": None}}, "is malformed"),
    ({"result": {}}, "is malformed"),
    ({"result": None}, "is malformed"),
    ({"result": "red"}, "is malformed"),
    ({"error": {"code": -32603, "message": "out\nof paper"}}, "refused elicitation/create: out of"),
    ({"error": {"code": -32601, "message": "no such method"}}, "the client refused"),
    ({"error": {"code": -32800, "message": "cancelled"}}, "the client refused"),
    ({"error": {}}, "the client refused"),
]


@pytest.mark.parametrize(("response", "told"), REFUSALS, ids=str)
@pytest.mark.requirement("ACP-159", "ACP-163")
async def test_what_is_no_answer_fails_the_call_and_the_turn_goes_on(
    tmp_path: Any, response: dict[str, Any], told: str
) -> None:
    async with talk(tmp_path, capabilities=FORMS) as (at, _backend):
        session_id = await at.new_session()
        prompt = at.prompt(session_id, "ask Which colour?: red | blue")

        respond(at, await asked(at), response)

        assert (await at.result(prompt))["stopReason"] == "end_turn"
        assert call_of(at, sessionUpdate="tool_call_update", status="failed")
        assert told in said_to_the_model(at)


@pytest.mark.parametrize("capabilities", [FORMS, None], ids=["form", "permission"])
@pytest.mark.requirement("R73", "ACP-110")
async def test_a_cancel_withdraws_the_question_and_a_late_answer_changes_nothing(
    tmp_path: Any, capabilities: object
) -> None:
    method = "elicitation/create" if capabilities else "session/request_permission"
    late: dict[str, Any] = {"action": "accept", "content": {"answer": "red"}}
    if not capabilities:
        late = {"outcome": {"outcome": "selected", "optionId": "choice-1"}}
    async with talk(tmp_path, capabilities=capabilities) as (at, _backend):
        session_id = await at.new_session()
        prompt = at.prompt(session_id, "ask Which colour?: red | blue")
        request = await asked(at, method)

        at.cancel(session_id)

        assert (await at.result(prompt))["stopReason"] == "cancelled"
        notice = {"requestId": request["id"]}
        assert [m["params"] for m in at.lines.sent if m.get("method") == "$/cancel_request"] == [
            notice
        ]
        n_sent = len(at.lines.sent)
        answer(at, request, late)
        assert (await at.result(at.prompt(session_id, "say on we go")))["stopReason"] == "end_turn"
        assert said_by_agent(at.lines.updates()[-3:]) == "on we go"
        assert not [
            m
            for m in at.lines.sent[n_sent:]
            if m.get("params", {}).get("update", {}).get("toolCallId")
        ]


async def test_a_second_answer_to_a_question_is_dropped(tmp_path: Any) -> None:
    async with talk(tmp_path, capabilities=FORMS) as (at, _backend):
        session_id = await at.new_session()
        prompt = at.prompt(session_id, "ask Which colour?: red | blue")
        request = await asked(at)

        answer(at, request, {"action": "accept", "content": {"answer": "red"}})
        answer(at, request, {"action": "accept", "content": {"answer": "blue"}})

        await at.result(prompt)
        assert said_to_the_model(at) == "red"


async def test_two_sessions_questions_are_answered_each_by_its_own(tmp_path: Any) -> None:
    async with talk(tmp_path, capabilities=FORMS) as (at, _backend):
        first, second = await at.new_session(), await at.new_session()
        prompts = [at.prompt(each, "ask Which colour?") for each in (first, second)]
        requests = [await asked(at, nth=nth) for nth in (1, 2)]
        assert {request["params"]["sessionId"] for request in requests} == {first, second}

        for request in reversed(requests):
            content = {"answer": f"of {request['params']['sessionId']}"}
            answer(at, request, {"action": "accept", "content": content})

        for prompt in prompts:
            await at.result(prompt)
        for session_id in (first, second):
            told = [
                m["params"]["update"]["content"][0]["content"]["text"]
                for m in at.lines.sent
                if m.get("params", {}).get("sessionId") == session_id
                and m["params"].get("update", {}).get("status") == "completed"
            ]
            assert told == [f"of {session_id}"]


# --- without forms --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capabilities",
    [
        None,
        {},
        {"elicitation": {}},
        {"elicitation": None},
        {"elicitation": {"form": None}},
        {"elicitation": {"form": True}},
        URLS,
    ],
    ids=str,
)
@pytest.mark.requirement("ACP-155", "ACP-156")
async def test_a_client_without_forms_is_asked_as_for_a_permission(
    tmp_path: Any, capabilities: object
) -> None:
    async with talk(tmp_path, capabilities=capabilities) as (at, _backend):
        session_id = await at.new_session()
        prompt = at.prompt(session_id, "ask Which colour?: red | blue")

        request = await asked(at, "session/request_permission")
        call = call_of(at, sessionUpdate="tool_call")
        assert request["params"]["toolCall"]["toolCallId"] == call["toolCallId"]
        assert request["params"]["toolCall"]["title"] == "Which colour?"
        assert request["params"]["options"] == [
            {"optionId": "choice-1", "name": "red", "kind": "allow_once"},
            {"optionId": "choice-2", "name": "blue", "kind": "allow_once"},
            {"optionId": "decline", "name": "None of these", "kind": "reject_once"},
        ]
        answer(at, request, {"outcome": {"outcome": "selected", "optionId": "choice-2"}})

        await at.result(prompt)
        assert said_to_the_model(at) == "blue"
        assert not [m for m in at.lines.sent if m.get("method", "").startswith("elicitation/")]


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ({"outcome": "selected", "optionId": "decline"}, "does not want to answer"),
        ({"outcome": "cancelled"}, "the person dismissed the question"),
        ({"outcome": "selected", "optionId": "red"}, "none of the choices"),
        ({"outcome": "selected"}, "none of the choices"),
        ({"outcome": "perhaps"}, "is malformed"),
        ({}, "is malformed"),
    ],
    ids=str,
)
@pytest.mark.requirement("ACP-159")
async def test_what_is_no_choice_fails_the_call_and_the_turn_goes_on(
    tmp_path: Any, outcome: dict[str, Any], told: str
) -> None:
    async with talk(tmp_path) as (at, _backend):
        session_id = await at.new_session()
        prompt = at.prompt(session_id, "ask Which colour?: red | blue")

        answer(at, await asked(at, "session/request_permission"), {"outcome": outcome})

        assert (await at.result(prompt))["stopReason"] == "end_turn"
        assert told in said_to_the_model(at)


@pytest.mark.parametrize("question", ["Which colour?", "Which?: 1 | 2 | 3 | 4 | 5 | 6 | 7"])
@pytest.mark.requirement("ACP-156")
async def test_what_no_buttons_can_answer_is_said_to_the_model(
    tmp_path: Any, question: str
) -> None:
    async with talk(tmp_path) as (at, _backend):
        session_id = await at.new_session()

        result = await at.result(at.prompt(session_id, f"ask {question}"))

        assert result["stopReason"] == "end_turn"
        assert said_to_the_model(at).startswith("the client cannot show this question to anybody")
        assert not [m for m in at.lines.sent if "id" in m and "method" in m]


# --- from other code ------------------------------------------------------------------------


@asynccontextmanager
async def agent_of(
    tmp_path: Any, capabilities: object
) -> AsyncIterator[tuple[Talk, str, Agent, AbortController]]:
    async with talk(tmp_path, capabilities=capabilities) as (at, backend):
        session_id = await at.new_session()
        yield at, session_id, backend.runtime.agents[session_id], AbortController()


@pytest.mark.parametrize(
    ("schema", "answers"),
    [
        ({}, [{}]),
        ({"properties": {"a": {"type": "boolean"}}}, [{"a": True}, {"a": False}]),
        (
            {
                "properties": {
                    "a": {"type": "string", "oneOf": [{"const": "x", "title": "X"}]},
                    "b": {"type": "string"},
                },
                "required": ["a"],
            },
            [{"a": "x"}],
        ),
    ],
    ids=["confirm", "boolean", "one required choice"],
)
async def test_a_form_that_one_choice_answers_is_shown_as_choices(
    tmp_path: Any, schema: dict[str, Any], answers: list[dict[str, Any]]
) -> None:
    async with agent_of(tmp_path, None) as (at, _session_id, agent, controller):
        for number, content in enumerate(answers, 1):
            replies: list[Reply] = []

            async def ask(replies: list[Reply] = replies) -> None:
                replies.append(await ask_form(agent, "Fine?", schema, controller.signal))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                request = await asked(at, "session/request_permission", number)
                option = {"outcome": "selected", "optionId": f"choice-{number}"}
                answer(at, request, {"outcome": option})
            assert replies == [Reply("accept", content)]


@pytest.mark.requirement("ACP-160")
async def test_every_visit_has_an_id_of_its_own_and_is_completed_by_it(tmp_path: Any) -> None:
    async with agent_of(tmp_path, URLS) as (at, session_id, agent, controller):
        ids = []
        for number, action in enumerate(("accept", "decline"), 1):
            async with anyio.create_task_group() as tasks:

                async def visit(action: str = action) -> None:
                    asked_for = await ask_url(agent, "Agree?", PLACE, controller.signal)
                    assert asked_for.action == action
                    if action == "accept":
                        asked_for.complete()

                tasks.start_soon(visit)
                request = await asked(at, nth=number)
                ids.append(request["params"].pop("elicitationId"))
                assert request["params"] == {
                    "sessionId": session_id,
                    "mode": "url",
                    "message": "Agree?",
                    "url": PLACE,
                }
                answer(at, request, {"action": action})

        completed = [
            m["params"] for m in at.lines.sent if m.get("method") == "elicitation/complete"
        ]
        assert completed == [{"elicitationId": ids[0]}]
        assert ids[0] != ids[1]


@pytest.mark.parametrize("capabilities", [None, {"elicitation": {}}, FORMS], ids=str)
@pytest.mark.requirement("ACP-155", "ACP-158")
async def test_a_visit_is_never_asked_for_in_another_way(tmp_path: Any, capabilities: Any) -> None:
    async with agent_of(tmp_path, capabilities) as (at, _session_id, agent, controller):
        with pytest.raises(ToolError, match="cannot open an address") as refused:
            await ask_url(agent, "Agree?", PLACE, controller.signal)

        assert refused.value.code == "NOBODY_TO_ASK"
        assert not [m for m in at.lines.sent if "id" in m and "method" in m]


async def test_an_aborted_visit_is_withdrawn_and_asks_for_nothing_more(tmp_path: Any) -> None:
    async with agent_of(tmp_path, URLS) as (at, _session_id, agent, controller):

        async def visit(signal: AbortSignal) -> None:
            with pytest.raises(TurnAborted):
                await ask_url(agent, "Agree?", PLACE, signal)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(visit, controller.signal)
            request = await asked(at)
            controller.abort("enough")

        withdrawn = at.lines.sent[-1]
        assert (withdrawn["method"], withdrawn["params"]) == (
            "$/cancel_request",
            {"requestId": request["id"]},
        )


@pytest.mark.requirement("ACP-157")
async def test_a_client_that_goes_away_has_answered_nothing(tmp_path: Any) -> None:
    async with agent_of(tmp_path, FORMS) as (at, _session_id, agent, controller):

        async def ask() -> None:
            with pytest.raises(ToolError, match="the client went away") as failed:
                await ask_form(agent, "Name?", ANSWER, controller.signal)
            assert failed.value.code == "CLIENT_GONE"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await asked(at)
            at.connection.peer.close()


@pytest.mark.requirement("ACP-157")
async def test_a_session_that_was_let_go_of_asks_its_former_client_nothing(tmp_path: Any) -> None:
    async with agent_of(tmp_path, FORMS) as (at, session_id, agent, controller):
        at.connection.sessions[session_id].detach()

        with pytest.raises(ToolError, match="nobody can be asked here"):
            await ask_form(agent, "Name?", ANSWER, controller.signal)
