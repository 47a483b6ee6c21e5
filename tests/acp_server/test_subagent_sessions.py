"""Subagents as sessions of their own, for clients that asked to see them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from core_rig import Entry, Hang, fail, say
from delegating import Client, alone, calls, client, delegates, runs
from talking import said_by_agent

from agent_core.errors import ModelError
from agent_core.events import Aborted, TurnEnd
from agent_core.models.adapter import ModelRequest

OFFERED: dict[str, object] = {"subagents": {}}
TWO_DOWN: dict[str, Sequence[Entry]] = {
    "go": [delegates("mid")],
    "mid": [delegates("low")],
    "low": [runs("echo hi")],
}


def on(at: Client, session_id: str) -> list[dict[str, Any]]:
    """The updates of one session."""
    sent = (m["params"] for m in at.at.lines.sent if m.get("method") == "session/update")
    return [params["update"] for params in sent if params["sessionId"] == session_id]


def kinds(updates: Sequence[dict[str, Any]]) -> list[str]:
    return [update["sessionUpdate"] for update in updates]


def announced(at: Client, session_id: str) -> dict[str, str]:
    """The sessions of the subagents below one, by their titles."""
    updates = [u for u in on(at, session_id) if u["sessionUpdate"] == "subagent_update"]
    return {u["title"]: u["sessionId"] for u in updates if "title" in u}


def states(at: Client, session_id: str, child: str) -> list[dict[str, str]]:
    updates = [u for u in on(at, session_id) if u["sessionUpdate"] == "subagent_update"]
    return [u["state"] for u in updates if u["sessionId"] == child]


@pytest.mark.requirement("ACP-175", "B059")
async def test_what_a_subagent_is_told_says_and_does_comes_on_its_own_session(
    tmp_path: Path,
) -> None:
    async with client(tmp_path, TWO_DOWN, mode="bypass", capabilities=OFFERED) as at:
        await at.say("go")

        mid = announced(at, at.id)["mid"]
        low = announced(at, mid)["low"]
        assert len({at.id, mid, low}) == 3
        told, *shown = on(at, low)
        assert told == {
            "sessionUpdate": "session_message",
            "messageId": told["messageId"],
            "senderSessionId": mid,
            "recipientSessionId": low,
            "content": [{"type": "text", "text": "low"}],
        }
        assert [u["title"] for u in shown if u["sessionUpdate"] == "tool_call"] == ["Run: echo hi"]
        assert said_by_agent(shown) == "done"
        for parent, child in ((at.id, mid), (mid, low)):
            assert states(at, parent, child) == [
                {"state": "running"},
                {"state": "idle", "stopReason": "end_turn"},
            ]


@pytest.mark.requirement("ACP-175")
async def test_a_session_is_announced_before_anything_is_shown_of_it(tmp_path: Path) -> None:
    async with client(tmp_path, TWO_DOWN, mode="bypass", capabilities=OFFERED) as at:
        await at.say("go")

        known = {at.id}
        for message in at.at.lines.sent:
            if message.get("method") == "session/update":
                params = message["params"]
                assert params["sessionId"] in known
                known |= {params["update"].get("sessionId", at.id)}
                assert {
                    item["sessionId"]
                    for item in params["update"].get("content") or ()
                    if isinstance(item, dict) and item["type"] == "session"
                } <= known
        assert len(known) == 3


async def test_the_call_that_a_subagent_is_links_to_its_session_to_the_end(
    tmp_path: Path,
) -> None:
    async with client(tmp_path, TWO_DOWN, mode="bypass", capabilities=OFFERED) as at:
        await at.say("go")

        link = {"type": "session", "sessionId": announced(at, at.id)["mid"]}

        def contents() -> list[list[dict[str, Any]]]:
            updates = [u for u in on(at, at.id) if u["sessionUpdate"] == "tool_call_update"]
            return [update["content"] for update in updates if "content" in update]

        assert contents()[0] == [link]
        assert [content[0] for content in contents()] == [link] * len(contents())
        assert "done" in str(contents()[-1])

        before = len(contents())
        await at.at.result(at.at.load(at.id))
        assert [content[0] for content in contents()[before:]] == [link] * (before - 1)


@pytest.mark.requirement("ACP-175")
@pytest.mark.parametrize("capabilities", [None, {}, {"subagents": None}, {"subagents": True}])
async def test_who_did_not_ask_sees_calls_and_nothing_else(
    tmp_path: Path, capabilities: object
) -> None:
    async with client(tmp_path, TWO_DOWN, mode="bypass", capabilities=capabilities) as at:
        await at.say("go")

        sent = [m["params"] for m in at.at.lines.sent if m.get("method") == "session/update"]
        assert {params["sessionId"] for params in sent} == {at.id}
        assert not {"subagent_update", "session_message"} & set(kinds(at.updates))
        assert "'session'" not in str([u.get("content") for u in at.updates])


@pytest.mark.race
@pytest.mark.requirement("B057", "R69")
async def test_a_cancel_of_a_subagents_session_stops_it_and_no_other(tmp_path: Path) -> None:
    ann, bob = Hang(), Hang()
    script = {"go": [delegates("ann", "bob")], "ann": [ann], "bob": [bob, say("never")]}
    async with client(tmp_path, script, capabilities=OFFERED) as at:
        request = at.prompt("go")
        await ann.hanging.wait()
        await bob.hanging.wait()
        ids = announced(at, at.id)
        (child,) = (each for each in at.agent.children if each.id == ids["ann"])

        at.at.cancel(ids["ann"])
        await at.at.lines.until(lambda: len(states(at, at.id, ids["ann"])) == 2)

        assert states(at, at.id, ids["ann"])[1] == {"state": "idle", "stopReason": "cancelled"}
        assert child.session.events[-1].data == TurnEnd(1, Aborted())
        assert not bob.noticed.is_set()
        assert states(at, at.id, ids["bob"]) == [{"state": "running"}]
        at.cancel()
        assert await at.stop_reason(request) == "cancelled"
        assert states(at, at.id, ids["bob"])[1] == {"state": "idle", "stopReason": "cancelled"}
        assert alone(at)


@pytest.mark.race
@pytest.mark.requirement("B047", "B048")
async def test_a_stop_ends_all_of_them_before_the_answer_and_nothing_is_shown_afterwards(
    tmp_path: Path,
) -> None:
    hangs = [Hang() for _ in range(8)]
    script: dict[str, Sequence[Entry]] = {"go": [delegates(*(f"c{n}" for n in range(8)))]}
    script |= {f"c{n}": [hang] for n, hang in enumerate(hangs)}
    async with client(tmp_path, script, capabilities=OFFERED) as at:
        request = at.prompt("go")
        for hang in hangs:
            await hang.hanging.wait()
        at.cancel()
        assert await at.stop_reason(request) == "cancelled"

        for child in announced(at, at.id).values():
            assert states(at, at.id, child)[-1] == {"state": "idle", "stopReason": "cancelled"}
        sent = len(at.at.lines.sent)
        await anyio.wait_all_tasks_blocked()
        assert len(at.at.lines.sent) == sent


async def test_one_that_failed_says_so_and_a_cancel_of_its_session_does_nothing(
    tmp_path: Path,
) -> None:
    error = ModelError("The key was refused.", code="AUTH")
    script = {"go": [delegates("bad")], "bad": [fail(error, "half a sen")]}
    async with client(tmp_path, script, capabilities=OFFERED) as at:
        await at.say("go")

        bad = announced(at, at.id)["bad"]
        assert states(at, at.id, bad)[-1] == {"state": "idle", "stopReason": "error"}
        at.at.cancel(bad)
        assert await at.stop_reason(at.prompt("again")) == "end_turn"


async def test_one_in_the_background_is_shown_too_and_outlives_the_turn(tmp_path: Path) -> None:
    hang = Hang()
    script = {"go": [delegates("behind", background=True)], "behind": [hang]}
    async with client(tmp_path, script, capabilities=OFFERED) as at:
        await at.say("go")
        await hang.hanging.wait()
        behind = announced(at, at.id)["behind"]
        assert states(at, at.id, behind) == [{"state": "running"}]

        at.cancel()
        await at.agent.when_idle()
        assert states(at, at.id, behind)[-1] == {"state": "idle", "stopReason": "cancelled"}


async def test_a_long_task_comes_in_pieces(tmp_path: Path) -> None:
    task = "x" * 40_000
    script = {"go": [calls("delegate", {"task": task, "name": "long"})]}
    async with client(tmp_path, script, capabilities=OFFERED) as at:
        await at.say("go")

        shown = on(at, announced(at, at.id)["long"])
        first, *rest = [u for u in shown if u["sessionUpdate"].startswith("session_message")]
        pieces = [*first["content"], *(u["content"] for u in rest)]
        assert "".join(piece["text"] for piece in pieces) == task
        assert {u["messageId"] for u in rest} == {first["messageId"]}


@pytest.mark.parametrize(
    "method", ["session/prompt", "session/load", "session/resume", "session/close"]
)
async def test_nothing_but_a_cancel_reaches_the_session_of_one_at_work(
    tmp_path: Path, method: str
) -> None:
    hang = Hang()
    script = {"go": [delegates("one")], "one": [hang]}
    async with client(tmp_path, script, capabilities=OFFERED) as at:
        request = at.prompt("go")
        await hang.hanging.wait()
        params: dict[str, Any] = {"sessionId": announced(at, at.id)["one"]}
        if method == "session/prompt":
            params["prompt"] = []
        elif method != "session/close":
            params |= {"cwd": "/", "mcpServers": []}

        refused = await at.at.response(at.at.say(method, **params))
        deleted = await at.at.response(at.at.say("session/delete", sessionId=params["sessionId"]))

        assert refused["error"]["code"] == -32002
        assert "at work" in deleted["error"]["message"]
        assert not hang.noticed.is_set()
        at.cancel()
        assert await at.stop_reason(request) == "cancelled"


async def test_a_client_that_does_not_read_holds_a_subagents_model_up(tmp_path: Path) -> None:
    streamed = anyio.Event()

    async def play(request: ModelRequest) -> Any:
        async for event in say(*("word " for _ in range(50)))(request):
            streamed.set()
            yield event

    script: dict[str, Sequence[Entry]] = {"go": [delegates("one")], "one": [play]}
    async with client(tmp_path, script, capabilities=OFFERED) as at:
        begun: list[object] = []

        def congest(*args: object) -> None:
            begun.append(args)
            at.at.lines.is_congested = True

        at.agent.hooks.on("subagent/start", congest)
        request = at.prompt("go")
        await streamed.wait()
        await anyio.wait_all_tasks_blocked()
        one = announced(at, at.id)["one"]
        assert said_by_agent(on(at, one)).count("word") < 50

        at.at.lines.is_congested = False
        at.at.lines.low.set()
        assert await at.stop_reason(request) == "end_turn"
        assert said_by_agent(on(at, one)).count("word") == 50
