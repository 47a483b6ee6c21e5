"""Rules of the protocol that no other test is about, each tried on a conversation of its own."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from serving import serving, text
from talking import CWD, DRAFTS, SCHEMA, Talk, said_by_agent, talk

from acp_server import errors
from agent_core.models.adapter import ModelEvent, ModelRequest, TextDelta

ASK = "session/request_permission"
RESERVED_META = {"traceparent", "tracestate", "baggage"}


def answer(at: Talk, question: dict[str, Any], **result_or_error: object) -> None:
    message = {"jsonrpc": "2.0", "id": question["id"], **result_or_error}
    at.connection.receive(json.dumps(message).encode())


async def asked(at: Talk, method: str = ASK) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [m for m in at.lines.sent if m.get("method") == method]

    await at.lines.until(found)
    return found()[-1]


async def session_in(at: Talk, cwd: object) -> str:
    result = await at.result(at.say("session/new", cwd=str(cwd), mcpServers=[]))
    session_id: str = result["sessionId"]
    return session_id


def told(at: Talk, kind: str) -> list[dict[str, Any]]:
    return [update for update in at.lines.updates() if update["sessionUpdate"] == kind]


def statuses(at: Talk) -> list[str]:
    """Of the last tool call, in the order in which they were told."""
    calls = [u for u in at.lines.updates() if u["sessionUpdate"].startswith("tool_call")]
    return [
        u["status"] for u in calls if u["toolCallId"] == calls[-1]["toolCallId"] and "status" in u
    ]


def initialized(at: Talk) -> dict[str, Any]:
    result: dict[str, Any] = at.lines.sent[0]["result"]
    return result


# --- the connection -------------------------------------------------------------------------


@pytest.mark.requirement("ACP-006", "ACP-007")
async def test_a_conversation_is_the_same_over_stdio_and_over_another_transport(tmp_path):
    requests = [
        ("session/new", {"cwd": str(tmp_path), "mcpServers": []}),
        ("session/prompt", {"prompt": text("say hello then plan one; two")}),
        ("session/prompt", {"prompt": []}),
        ("_unknown", {}),
        ("session/close", {}),
    ]

    def alike(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Without what differs from one session to the next."""
        kept = [m for m in messages if "agentInfo" not in m.get("result", {})]
        plain = re.sub(r'"(sess_\w+|\d{4}-\d\d-\d\dT[^"]+|turn-\w+)"', '"…"', json.dumps(kept))
        plain = re.sub(r'"id": \d+, ', "", plain)
        alike: list[dict[str, Any]] = json.loads(plain)
        return alike

    async with serving() as client:
        session = {}
        for method, params in requests:
            response = await client.wire.response(client.wire.request(method, params | session))
            session = session or {"sessionId": response["result"]["sessionId"]}
            await client.wire.silence("session/list")
        on_stdio = [m for m in client.wire.received if m.get("result") != {"sessions": []}]
    async with talk(tmp_path) as (at, _backend):
        session = {}
        for method, params in requests:
            response = await at.response(at.say(method, **params, **session))
            session = session or {"sessionId": response["result"]["sessionId"]}
            await anyio.wait_all_tasks_blocked()

    listings = '"sessions"'
    assert alike([m for m in on_stdio if listings not in json.dumps(m)]) == alike(at.lines.sent)


@pytest.mark.requirement("ACP-017")
def test_every_error_code_of_ours_is_one_that_the_protocol_has():
    codes = {value for value in vars(errors).values() if isinstance(value, int)}
    known = {each["const"] for each in SCHEMA.definitions["ErrorCode"]["anyOf"] if "const" in each}

    assert codes
    assert codes <= known


@pytest.mark.requirement("ACP-031")
async def test_a_client_that_is_capable_of_nothing_can_make_prompt_and_cancel_a_session(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()

        assert (await at.result(at.prompt(session, "say hello")))["stopReason"] == "end_turn"
        assert said_by_agent(at.lines.updates()) == "hello"
        stalled = at.prompt(session, "stall")
        at.cancel(session)
        assert (await at.result(stalled))["stopReason"] == "cancelled"


@pytest.mark.requirement("ACP-035")
async def test_the_version_that_was_agreed_on_stays_and_nothing_newer_is_spoken(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        again = await at.result(at.say("initialize", protocolVersion=2))
        session = await at.new_session()
        late = await at.response(at.say("initialize", protocolVersion=2))

        assert again["protocolVersion"] == 1
        assert late["error"]["code"] == -32600
        result = await at.result(at.prompt(session, "say still one"))
        assert result["stopReason"] == "end_turn"  # in the answer, as version 1 has it


@pytest.mark.requirement("ACP-036", "ACP-170", "ACP-174", "ACP-151")
async def test_what_is_our_own_in_a_conversation_stands_below_meta_and_is_called_ours(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    everything = {"session": {"compaction": {}, "notices": {}}, "plan": {}, "subagents": {}}
    prompts = [
        "say a",
        "think b then say c",
        "plan c; d",
        "read a.txt",
        "edit a.txt: one => two",
        "run true",
    ]
    async with talk(tmp_path, mode="bypass", capabilities=everything) as (at, _backend):
        session = await session_in(at, tmp_path)
        for said in [*prompts, "/compact", "/help", "/mode ask", "write b.txt: x"]:
            prompt = at.prompt(session, said)
            if said.startswith("write"):
                answer(at, await asked(at), error={"code": -32603, "message": "no"})
            await at.result(prompt)
        places = {"cwd": str(tmp_path), "mcpServers": []}
        await at.result(at.say("session/load", sessionId=session, **places))
        await at.result(at.say("session/list"))

        strangers = []
        for message in at.lines.sent:
            if "method" in message:
                name = DRAFTS.params_name("client", message["method"])
                assert name or message["method"].startswith("_"), message["method"]
                strangers += DRAFTS.strangers(name, message["params"]) if name else []
            else:
                method = at.lines.asked[message["id"]]
                strangers += DRAFTS.strangers(
                    DRAFTS.result_name("agent", method), message["result"]
                )
        assert strangers == []
        for update in told(at, "session_info_update"):
            assert update.keys() <= {"sessionUpdate", "title", "updatedAt", "_meta"}
        ours = {key for message in at.lines.sent for key in meta_keys(message)}
        assert not ours & RESERVED_META
        assert {key for key in meta_keys(initialized(at)) if "/" not in key} == set()


def meta_keys(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(meta_keys, value))
    if not isinstance(value, dict):
        return set()
    return set(value.get("_meta") or ()).union(*map(meta_keys, value.values()))


# --- sessions and paths ---------------------------------------------------------------------


@pytest.mark.requirement("ACP-020", "ACP-052")
async def test_relative_paths_begin_at_the_sessions_directory_and_are_told_as_absolute(tmp_path):
    (tmp_path / "a.txt").write_text("text of a\n")
    async with talk(tmp_path, mode="bypass") as (at, _backend):
        session = await session_in(at, tmp_path)
        for said in ("read a.txt", "write sub/b.txt: x", "edit a.txt: of => about", "run pwd"):
            await at.result(at.prompt(session, said))

        calls = [u for u in at.lines.updates() if u["sessionUpdate"].startswith("tool_call")]
        places = [place for call in calls for place in call.get("locations", ())]
        diffs = [each for call in calls for each in call.get("content", ()) if "path" in each]
        assert {place["path"] for place in (*places, *diffs)} == {
            str(tmp_path / "a.txt"),
            str(tmp_path / "sub" / "b.txt"),
        }
        assert all(place["line"] >= 1 for place in places if "line" in place)
        assert (tmp_path / "a.txt").read_text() == "text about a\n"
        assert f"{tmp_path}" in json.dumps(calls[-1]["content"])


@pytest.mark.requirement("ACP-073")
async def test_a_session_that_was_listed_is_no_more_open_than_before(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        await at.result(at.prompt(session, "say hello"))
    async with talk(tmp_path) as (at, backend):
        page = await at.result(at.say("session/list"))
        again = await at.result(at.say("session/list"))

        assert [each["sessionId"] for each in page["sessions"]] == [session]
        assert again == page
        assert not backend.runtime.agents
        assert (await at.response(at.prompt(session, "say x")))["error"]["code"] == -32002


@pytest.mark.requirement("ACP-088")
async def test_a_mode_that_is_set_between_turns_is_told_at_once(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        await at.result(at.say("session/set_mode", sessionId=session, modeId="read-only"))

        assert [u["currentModeId"] for u in told(at, "current_mode_update")] == ["read-only"]


# --- prompts --------------------------------------------------------------------------------

BLOCKS = {
    "image": {"type": "image", "data": "AA==", "mimeType": "image/png"},
    "audio": {"type": "audio", "data": "AA==", "mimeType": "audio/wav"},
    "embeddedContext": {"type": "resource", "resource": {"uri": "file:///x", "text": "x"}},
}


@pytest.mark.requirement("ACP-033")
@pytest.mark.parametrize("kind", BLOCKS)
async def test_what_a_prompt_may_hold_is_what_initialize_says(tmp_path, kind):
    async with talk(tmp_path) as (at, _backend):
        offered = initialized(at)["agentCapabilities"]["promptCapabilities"].get(kind, False)
        session = await at.new_session()
        prompt = at.say("session/prompt", sessionId=session, prompt=[BLOCKS[kind], *text("say x")])

        response = await at.response(prompt)

        assert ("result" in response) is offered
        assert offered or response["error"]["code"] == -32602


@pytest.mark.requirement("ACP-082")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ([{"text": "x"}, {"finish": "length"}], "max_tokens"),
        ([{"text": "x"}, {"finish": "refusal"}], "refusal"),
        ([{"tool": "plan", "arguments": {"entries": []}}], "max_turn_requests"),
        ([{"text": "x"}], "end_turn"),
    ],
)
async def test_a_turn_that_ends_early_says_why(tmp_path, line, reason):
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps(line) + "\n")
    async with talk(tmp_path, rehearsal_script=str(script), max_steps=1) as (at, _backend):
        session = await at.new_session()

        assert (await at.result(at.prompt(session, "go")))["stopReason"] == reason


@pytest.mark.requirement("ACP-077")
async def test_a_system_prompt_that_was_not_offered_is_not_followed(tmp_path):
    async with talk(tmp_path) as (at, backend):
        offered = initialized(at)["agentCapabilities"]["sessionCapabilities"]
        request = at.say("session/new", cwd=CWD, mcpServers=[], systemPrompt="Be a pirate.")
        session = (await at.result(request))["sessionId"]
        await at.result(at.prompt(session, "say x"))

        assert "systemPrompt" not in offered
        events = backend.runtime.agents[session].session.events
        assert "pirate" not in repr([event.data for event in events])


# --- cancelling -----------------------------------------------------------------------------


@pytest.mark.requirement("ACP-095")
async def test_what_fails_because_it_is_cancelled_does_not_change_the_answer(tmp_path):
    async def fail_when_stopped(
        request: ModelRequest, next_: Any
    ) -> AsyncGenerator[ModelEvent, None]:
        return failing(request, await next_())

    async def failing(
        request: ModelRequest, stream: AsyncGenerator[ModelEvent, None]
    ) -> AsyncGenerator[ModelEvent, None]:
        async with aclosing(stream):
            yield TextDelta("begun")
            await request.signal.wait()
            raise RuntimeError("the connection was reset")

    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        backend.runtime.agents[session].hooks.on("llm/stream", fail_when_stopped)
        prompt = at.prompt(session, "say x")
        await at.lines.until(lambda: said_by_agent(at.lines.updates()) == "begun")

        at.cancel(session)

        assert await at.result(prompt) == {"stopReason": "cancelled"}


@pytest.mark.requirement("ACP-105")
async def test_cancelling_a_request_that_has_taken_effect_leaves_it_its_result(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        setting = at.say("session/set_mode", sessionId=session, modeId="read-only")
        at.note("$/cancel_request", requestId=setting)

        assert await at.result(setting) == {}
        assert backend.runtime.agents[session].mode == "read-only"


@pytest.mark.requirement("ACP-107")
async def test_cancelling_the_request_of_a_prompt_cancels_what_the_turn_asked_the_client(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await session_in(at, tmp_path)
        prompt = at.prompt(session, "write a.txt: x")
        question = await asked(at)

        at.note("$/cancel_request", requestId=prompt)

        withdrawn = await asked(at, "$/cancel_request")
        assert withdrawn["params"] == {"requestId": question["id"]}
        assert (await at.result(prompt))["stopReason"] == "cancelled"
        assert statuses(at)[-1] == "failed"


# --- tool calls, questions, plans -----------------------------------------------------------


@pytest.mark.requirement("ACP-115", "ACP-117", "ACP-122", "B128")
async def test_a_call_is_reported_then_asked_about_then_run_then_done(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await session_in(at, tmp_path)
        prompt = at.prompt(session, "write a.txt: x")
        question = (await asked(at))["params"]
        assert statuses(at) == ["pending"]
        options = {each["kind"]: each["optionId"] for each in question["options"]}
        assert len({each["optionId"] for each in question["options"]}) == len(question["options"])
        assert question["toolCall"]["toolCallId"] == told(at, "tool_call")[0]["toolCallId"]

        outcome = {"outcome": "selected", "optionId": options["allow_once"]}
        answer(at, await asked(at), result={"outcome": outcome})

        await at.result(prompt)
        assert statuses(at) == ["pending", "in_progress", "completed"]
        assert (tmp_path / "a.txt").read_text() == "x"


NOT_A_YES = {
    "rejected": {"result": {"outcome": {"outcome": "selected", "optionId": "reject-once"}}},
    "cancelled": {"result": {"outcome": {"outcome": "cancelled"}}},
    "an error": {"error": {"code": -32603, "message": "no"}},
    "an error of no known kind": {"error": {"code": 77, "message": "no"}},
    "a malformed error": {"error": "no"},
    "an option nobody offered": {
        "result": {"outcome": {"outcome": "selected", "optionId": "allow"}}
    },
    "another outcome": {"result": {"outcome": {"outcome": "approved", "optionId": "allow-once"}}},
    "no option": {"result": {"outcome": {"outcome": "selected"}}},
    "an option that is no text": {
        "result": {"outcome": {"outcome": "selected", "optionId": ["allow-once"]}}
    },
    "just the option": {"result": {"optionId": "allow-once"}},
    "the option as outcome": {"result": {"outcome": "allow-once"}},
    "nothing": {"result": {}},
    "null": {"result": None},
    "yes": {"result": True},
    "an error beside a yes": {
        "result": {"outcome": {"outcome": "selected", "optionId": "allow-once"}},
        "error": {"code": -32603, "message": "no"},
    },
}


@pytest.mark.requirement("ACP-120", "ACP-124")
@pytest.mark.parametrize("said", NOT_A_YES)
async def test_what_is_not_clearly_a_yes_is_a_no(tmp_path, said):
    async with talk(tmp_path) as (at, _backend):
        session = await session_in(at, tmp_path)
        prompt = at.prompt(session, "write a.txt: x")
        answer(at, await asked(at), **NOT_A_YES[said])

        reason = (await at.result(prompt))["stopReason"]

        assert reason == ("cancelled" if said == "cancelled" else "end_turn")
        assert statuses(at) == ["pending", "failed"]
        assert not (tmp_path / "a.txt").exists()


@pytest.mark.requirement("ACP-140", "ACP-141")
async def test_a_plan_may_grow_and_shrink_and_is_always_told_whole(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        for said in ("plan a; b", "plan a; b; c; d", "plan d"):
            await at.result(at.prompt(session, said))

        plans = [[entry["content"] for entry in u["entries"]] for u in told(at, "plan")]
        assert plans == [["a", "b"], ["a", "b", "c", "d"], ["d"]]


# --- options --------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-144", "ACP-145", "ACP-146", "ACP-147", "ACP-148")
async def test_every_option_has_a_value_and_each_can_be_set_by_its_id_alone(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        new = await at.result(at.say("session/new", cwd=CWD, mcpServers=[]))
        session, options = new["sessionId"], new["configOptions"]

        assert [option["category"] for option in options][:2] == ["mode", "model"]
        for option in options:
            values = [choice["value"] for choice in option["options"]]
            assert option["type"] == "select"  # this client knows no others
            assert option["currentValue"] in values
            for value in (*values, option["currentValue"]):
                request = {"sessionId": session, "configId": option["id"], "value": value}
                answered = await at.result(at.say("session/set_config_option", **request))
                listed = {each["id"]: each["currentValue"] for each in answered["configOptions"]}
                assert listed.keys() == {each["id"] for each in options}
                assert listed[option["id"]] == value
                if option["id"] == "mode":
                    updates = told(at, "current_mode_update")
                    assert not updates or updates[-1]["currentModeId"] == value
