"""Other agents from the configuration: how they are told of, asked for, shown, and stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from talking import Talk, said_by_agent, talk

from acp_server.config import SubagentConfig
from agent_core.agent import Agent
from agent_core.events import RequestHeader, SubagentUsage, ToolResult
from agent_core.permissions import Approval

LIMIT_S = 15
SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_agent.py")))
HEAD = """
import json, sys
def read():
    return json.loads(sys.stdin.readline())
def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def update(what, /, **fields):
    params = {"sessionId": "s", "update": {"sessionUpdate": what, **fields}}
    send(method="session/update", params=params)
def say(text):
    update("agent_message_chunk", content={"type": "text", "text": text})
def ask(title, kind, number=1):
    options = [{"optionId": k, "name": k, "kind": k} for k in
               ("allow_once", "allow_always", "reject_once", "reject_always")]
    call = {"toolCallId": "c", "title": title, "kind": kind}
    call = {name: value for name, value in call.items() if value}
    params = {"sessionId": "s", "toolCall": call, "options": options}
    send(id=number, method="session/request_permission", params=params)
def answer():
    message = read()
    return message.get("result", message.get("error"))
send(id=read()["id"], result={"protocolVersion": 1})
send(id=read()["id"], result={"sessionId": "s"})
request = read()["id"]
"""


def agent_of(code: str) -> tuple[str, ...]:
    done = '\nsend(id=request, result={"stopReason": "end_turn"})'
    return (sys.executable, "-c", HEAD + code + done)


ASKS = """
ask("Delete it", "delete")
say(json.dumps(answer()))
"""


def selected(option: str) -> dict[str, Any]:
    return {"outcome": {"outcome": "selected", "optionId": option}}


class At:
    def __init__(self, client: Talk, agent: Agent) -> None:
        self.client = client
        self.agent = agent

    @property
    def questions(self) -> list[dict[str, Any]]:
        sent = self.client.lines.sent
        return [m for m in sent if m.get("method") == "session/request_permission"]

    def prompt(self, text: str) -> int:
        return self.client.prompt(self.agent.id, text)

    async def asked(self, count: int = 1) -> dict[str, Any]:
        await self.client.lines.until(lambda: len(self.questions) >= count)
        return self.questions[-1]

    def answer(self, question: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        message = {"jsonrpc": "2.0", "id": question["id"], "result": result}
        self.client.connection.receive(json.dumps(message).encode())

    async def say(self, text: str) -> ToolResult:
        """Prompt, and return how the last call ended."""
        await self.client.result(self.prompt(text))
        events = reversed(self.agent.session.events)
        return next(each.data for each in events if isinstance(each.data, ToolResult))


@asynccontextmanager
async def other(
    tmp_path: Path, command: tuple[str, ...], *, mode: str = "ask", **more: Any
) -> AsyncIterator[At]:
    config = SubagentConfig(command, **more)
    with anyio.fail_after(LIMIT_S):
        async with talk(tmp_path, mode=mode, subagents={"other": config}) as (client, backend):
            session_id = await client.new_session()
            yield At(client, backend.runtime.agents[session_id])


@pytest.mark.requirement("B052", "B053")
@pytest.mark.parametrize(
    ("option", "picked"),
    [
        ("allow-once", "allow_once"),
        ("allow-always", "allow_always"),
        ("reject-once", "reject_once"),
        ("reject-always", "reject_always"),
    ],
)
async def test_its_question_goes_to_the_person_with_its_name(
    tmp_path: Path, option: str, picked: str
) -> None:
    async with other(tmp_path, agent_of(ASKS)) as at:
        prompt = at.prompt("delegate to other: x")
        question = await at.asked()
        call = question["params"]["toolCall"]
        (started,) = (u for u in at.client.lines.updates() if u["sessionUpdate"] == "tool_call")

        assert question["params"]["sessionId"] == at.agent.id
        assert (call["toolCallId"], call["status"]) == (started["toolCallId"], "in_progress")
        assert (call["title"], call["kind"]) == ("other › Delete it", "delete")
        names = [each["name"] for each in question["params"]["options"]]
        assert "Always allow “Delete it” of other in this session" in names

        at.answer(question, selected(option))
        await at.client.result(prompt)
        assert f'"optionId": "{picked}"' in said_by_agent(at.client.lines.updates())

        if "always" in option:
            await at.client.result(at.prompt("delegate to other: y"))
        assert len(at.questions) == 1  # an "always" holds for later runs, too


@pytest.mark.parametrize(
    ("mode", "kind", "permissions", "picked"),
    [
        ("bypass", "execute", "ask", "allow_once"),
        ("bypass", "execute", "reject", "reject_once"),
        ("accept-edits", "edit", "ask", "allow_once"),
        ("read-only", "edit", "ask", "reject_once"),
        ("read-only", "edit", "allow", "reject_once"),
        ("read-only", "read", "allow", "allow_once"),
        ("ask", "execute", "allow", "allow_once"),
        ("ask", "read", "reject", "reject_once"),
    ],
)
async def test_the_sessions_mode_is_never_widened(
    tmp_path: Path, mode: str, kind: str, permissions: str, picked: str
) -> None:
    code = f'ask("Do it", {kind!r})\nsay(answer()["outcome"]["optionId"])'
    async with other(tmp_path, agent_of(code), mode=mode, permissions=permissions) as at:
        result = await at.say("delegate to other: x")

        assert result.output == picked
        assert at.questions == []


@pytest.mark.parametrize(("mode", "kind"), [("ask", "read"), ("accept-edits", "execute")])
async def test_what_says_that_it_only_reads_is_asked_about_all_the_same(
    tmp_path: Path, mode: str, kind: str
) -> None:
    async with other(tmp_path, agent_of(f'ask("Do it", {kind!r})\nanswer()'), mode=mode) as at:
        prompt = at.prompt("delegate to other: x")
        at.answer(await at.asked(), selected("reject-once"))
        await at.client.result(prompt)


async def test_a_question_about_a_call_it_showed_before_has_that_calls_title(
    tmp_path: Path,
) -> None:
    code = """
update("tool_call", toolCallId="c", title="Burn\\x1b[2J it", kind="delete", status="pending")
ask(None, None)
answer()
"""
    async with other(tmp_path, agent_of(code)) as at:
        prompt = at.prompt("delegate to other: x")
        question = await at.asked()
        assert question["params"]["toolCall"]["title"] == "other › Burn[2J it"
        assert question["params"]["toolCall"]["kind"] == "delete"
        at.answer(question, selected("reject-once"))
        await at.client.result(prompt)


@pytest.mark.race
@pytest.mark.requirement("B035", "B051")
async def test_its_question_is_withdrawn_with_the_turn_and_never_allowed_late(
    tmp_path: Path,
) -> None:
    async with other(tmp_path, agent_of(ASKS)) as at:
        prompt = at.prompt("delegate to other: x")
        question = await at.asked()
        at.client.cancel(at.agent.id)
        at.answer(question, selected("allow-once"))

        assert (await at.client.result(prompt))["stopReason"] == "cancelled"
        assert not at.client.connection.peer._pending
        assert "allow" not in str(at.agent.session.messages)


@pytest.mark.requirement("B041")
async def test_dismissing_its_question_stops_the_turn(tmp_path: Path) -> None:
    async with other(tmp_path, agent_of(ASKS)) as at:
        prompt = at.prompt("delegate to other: x")
        at.answer(await at.asked(), {"outcome": {"outcome": "cancelled"}})

        assert (await at.client.result(prompt))["stopReason"] == "cancelled"


async def test_a_question_it_takes_back_is_taken_back_from_the_person(tmp_path: Path) -> None:
    code = """
ask("Never mind", "execute", 7)
send(method="$/cancel_request", params={"requestId": 7})
say(str(answer()["code"]))
"""
    async with other(tmp_path, agent_of(code)) as at:
        result = await at.say("delegate to other: x")

        assert result.output == "-32800"
        assert not at.client.connection.peer._pending


async def test_one_that_dies_with_a_question_open_takes_it_along(tmp_path: Path) -> None:
    code = 'ask("Do it", "execute")\nimport time; time.sleep(0.3); sys.exit(3)'
    async with other(tmp_path, agent_of(code)) as at:
        result = await at.say("delegate to other: x")

        assert "exit code 3" in result.output
        assert not at.client.connection.peer._pending


@pytest.mark.race
@pytest.mark.requirement("R94")
@pytest.mark.parametrize("how", ["it dies", "cancel"])
async def test_whoever_answers_is_told_by_the_signal_and_what_they_say_then_counts_for_nothing(
    tmp_path: Path, how: str
) -> None:
    asked, told, gone = anyio.Event(), anyio.Event(), tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(gone)!r}): time.sleep(0.01)\n"
    code = f'ask("Do it", "execute")\n{wait}sys.exit(3)'

    async def late(execution: Any, _next: Any) -> Approval:
        asked.set()
        await execution.signal.wait()
        told.set()  # and was not cancelled
        return Approval.ALLOWED_ALWAYS

    async with other(tmp_path, agent_of(code)) as at:
        for remove in at.agent.hooks._listeners["approval/request"].copy():
            del at.agent.hooks._listeners["approval/request"][remove]
        at.agent.hooks.on("approval/request", late)
        prompt = at.prompt("delegate to other: x")
        await asked.wait()
        if how == "cancel":
            at.client.cancel(at.agent.id)
        gone.touch()
        await at.client.result(prompt)

        assert told.is_set()
        assert at.agent.session.state.remembered == {}


async def test_what_it_does_is_shown_line_by_line_on_the_call(tmp_path: Path) -> None:
    async with other(tmp_path, SCRIPTED) as at:
        await at.say("delegate to other: tools")

        shown = [
            u["content"][0]["content"]["text"]
            for u in at.client.lines.updates()
            if u["sessionUpdate"] == "tool_call_update" and "content" in u
        ]
        assert any("Edit hello.py\nRun tests\n  failed" in each for each in shown)
        assert said_by_agent(at.client.lines.updates()).strip().endswith("done\n```")


@pytest.mark.requirement("B151")
async def test_what_it_took_is_counted(tmp_path: Path) -> None:
    code = """
update("usage_update", used=5, size=10, cost={"amount": 0.5, "currency": "EUR"})
usage = {"totalTokens": 12, "inputTokens": 5, "outputTokens": 7, "thoughtTokens": 3}
send(id=request, result={"stopReason": "end_turn", "usage": usage})
read()
"""
    async with other(tmp_path, agent_of(code)) as at:
        await at.say("delegate to other: x")

        (spent,) = (e.data for e in at.agent.session.events if isinstance(e.data, SubagentUsage))
        assert (spent.usage.input_tokens, spent.usage.output_tokens) == (5, 7)
        assert (spent.cost, spent.currency) == (0.5, "EUR")


async def test_numbers_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    code = """
update("usage_update", used=5, size=10, cost={"amount": -1, "currency": 7})
send(id=request, result={"stopReason": "end_turn", "usage": {"inputTokens": "many"}})
read()
"""
    async with other(tmp_path, agent_of(code)) as at:
        result = await at.say("delegate to other: x")

        assert not result.is_error
        assert not [e for e in at.agent.session.events if isinstance(e.data, SubagentUsage)]


async def test_what_it_had_said_before_it_failed_is_kept(tmp_path: Path) -> None:
    async with other(tmp_path, agent_of('say("half a sen")\nsys.exit(1)')) as at:
        result = await at.say("delegate to other: x")

        assert (result.is_error, result.code) == (True, "SUBAGENT_FAILED")
        assert result.output.endswith("What it had said by then:\nhalf a sen")


async def test_it_gets_its_variables_and_its_place(tmp_path: Path) -> None:
    code = 'import os\nsay(os.getcwd() + " " + os.environ["WHERE"])'
    place = tmp_path / "there"
    place.mkdir()
    more = {"cwd": str(place), "env": {"WHERE": "x"}}
    async with other(tmp_path, agent_of(code), **more) as at:
        assert (await at.say("delegate to other: x")).output == f"{place} x"


async def test_the_model_is_told_what_it_is_good_for(tmp_path: Path) -> None:
    async with other(tmp_path, SCRIPTED, description="knows all about hats") as at:
        told: list[str] = []

        async def look(assembly: Any, _context: Any, next_: Any) -> Any:
            result = await next_()
            told.append(next(s.description for s in result.tools if s.name == "delegate"))
            return result

        at.agent.hooks.on("system-prompt/assemble", look)
        await at.client.result(at.prompt("say x"))

        assert told[0].endswith("- other: knows all about hats")
        assert any(isinstance(e.data, RequestHeader) for e in at.agent.session.events)
