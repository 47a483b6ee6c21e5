from __future__ import annotations

import anyio
import pytest
from talking import CWD, Lines, Talk, said_by_agent, talk

from acp_server.connection import STEER_KEY, Connection
from acp_server.session import REPLAY_BATCH

# --- before there are agents ----------------------------------------------------------------


@pytest.mark.requirement("B098", "B144")
async def test_what_is_asked_before_the_agents_side_is_open_waits_for_it(tmp_path):
    async with talk(tmp_path, is_open=False) as (at, backend):
        new = at.say("session/new", cwd=CWD, mcpServers=[])
        listing = at.say("session/list")
        await anyio.wait_all_tasks_blocked()
        assert at.lines.responses(new) == at.lines.responses(listing) == []

        at.connection.open(backend)

        assert (await at.result(new))["sessionId"]
        assert await at.result(listing) == {"sessions": []}


async def test_when_there_will_be_no_agents_every_request_is_told_why(tmp_path):
    async with talk(tmp_path, is_open=False) as (at, _backend):
        waiting = at.say("session/new", cwd=CWD, mcpServers=[])
        at.connection.refuse("The model needs a key.")
        later = at.load("sess_x")
        prompt = at.prompt("sess_x", "say x")

        for request in (waiting, later):
            error = (await at.response(request))["error"]
            assert (error["code"], error["message"]) == (-32603, "The model needs a key.")
        assert (await at.response(prompt))["error"]["code"] == -32002


async def test_what_waits_for_initialize_is_called_once_it_was_answered(tmp_path):
    lines, order = Lines(), []
    async with anyio.create_task_group() as tasks:
        connection = Connection(lines, tasks)
        connection.on_initialized(lambda: order.append(len(lines.sent)))
        at = Talk(connection, lines)
        assert not connection.is_initialized

        await at.result(at.say("initialize", protocolVersion=1))

        assert connection.is_initialized
        assert order == [1]


# --- order ----------------------------------------------------------------------------------


@pytest.mark.requirement("B121", "B120", "ACP-050", "ACP-142")
async def test_commands_are_offered_behind_the_answer_to_new_and_before_that_to_load(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        new_answer = at.lines.sent[1]
        loaded = await at.result(at.load(session))
        await at.lines.until(lambda: len(at.lines.sent) == 5)

        kinds = [m.get("method", "answer") for m in at.lines.sent]
        assert kinds == ["answer", "answer", "session/update", "session/update", "answer"]
        assert [u["sessionUpdate"] for u in at.lines.updates()] == ["available_commands_update"] * 2
        assert loaded["modes"] == new_answer["result"]["modes"]
        modes = loaded["modes"]
        assert modes["currentModeId"] in [mode["id"] for mode in modes["availableModes"]]


@pytest.mark.race
@pytest.mark.requirement("B006", "ACP-094", "ACP-098")
async def test_a_cancel_read_together_with_its_prompt_finds_it(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()

        prompt = at.prompt(session, "count 100000")
        at.cancel(session)
        after = at.prompt(session, "say after")

        assert (await at.result(prompt))["stopReason"] == "cancelled"
        assert (await at.result(after))["stopReason"] == "end_turn"
        assert said_by_agent(at.lines.updates()) == "after"


@pytest.mark.requirement("B068", "ACP-081", "ACP-084", "B069", "B071")
async def test_prompts_are_answered_in_the_order_in_which_they_came(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        prompts = [at.prompt(session, f"say {n}") for n in range(5)]

        for prompt in prompts:
            await at.result(prompt)

        answers = [m["id"] for m in at.lines.sent if "method" not in m][2:]
        assert answers == prompts
        assert said_by_agent(at.lines.updates()) == "01234"


@pytest.mark.requirement("ACP-100", "B070")
async def test_a_cancel_answers_the_queue_too_behind_the_turn_that_ran(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        running = at.prompt(session, "stall")
        queued = [at.prompt(session, f"say {n}") for n in range(2)]
        await anyio.wait_all_tasks_blocked()

        at.cancel(session)

        for prompt in (running, *queued):
            assert (await at.result(prompt))["stopReason"] == "cancelled"
        answers = [m["id"] for m in at.lines.sent if "method" not in m][2:]
        assert answers == [running, *queued]
        assert said_by_agent(at.lines.updates()) == ""


@pytest.mark.requirement("B069", "B071")
async def test_a_client_that_sends_without_end_is_told_that_the_queue_is_full(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        prompts = [at.prompt(session, "stall")]
        await anyio.wait_all_tasks_blocked()
        prompts += [at.prompt(session, "say x") for _n in range(65)]
        at.cancel(session)

        answers = [await at.response(prompt) for prompt in prompts]

        assert [a.get("result", {}).get("stopReason") for a in answers[:65]] == ["cancelled"] * 65
        error = answers[65]["error"]
        assert (error["code"], error["data"]) == (-32600, {"reason": "busy"})
        assert "waiting already" in error["message"]


@pytest.mark.requirement("ACP-111", "ACP-109")
async def test_cancelling_the_request_of_a_prompt_ends_it_as_cancelled(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        running = at.prompt(session, "stall")
        queued = at.prompt(session, "say queued")
        last = at.prompt(session, "say last")
        await anyio.wait_all_tasks_blocked()

        at.note("$/cancel_request", requestId=queued)
        at.note("$/cancel_request", requestId=str(last))
        at.note("$/cancel_request", requestId=running)

        assert (await at.result(running))["stopReason"] == "cancelled"
        assert (await at.result(queued))["stopReason"] == "cancelled"
        answer = await at.result(last)  # withdrawn with the turn, or run: cleared means cancelled
        assert answer["stopReason"] in ("cancelled", "end_turn")


async def test_steering_joins_the_running_turn_and_is_answered_with_it(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        running = at.prompt(session, "say one then count 3 slowly")
        steering = at.prompt(session, "say two", _meta={STEER_KEY: True})

        assert (await at.result(running))["stopReason"] == "end_turn"
        assert (await at.result(steering))["stopReason"] == "end_turn"


# --- load -----------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-061", "ACP-062", "B080")
async def test_what_happens_during_a_long_replay_is_shown_behind_it_once(tmp_path):
    n_chunks = REPLAY_BATCH * 3
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        await at.result(at.prompt(session, f"count {n_chunks}"))
    async with talk(tmp_path) as (at, _backend):
        at.lines.is_congested = True  # the replay waits for the client
        loading = at.load(session)
        prompt = at.prompt(session, "say new")
        await anyio.wait_all_tasks_blocked()
        assert at.lines.responses(loading) == []

        at.lines.is_congested = False
        at.lines.low.set()

        assert (await at.result(prompt))["stopReason"] == "end_turn"
        await at.result(loading)
        updates = at.lines.updates()
        users = [u["content"]["text"] for u in updates if "user" in u["sessionUpdate"]]
        counted = "".join(f"{n} " for n in range(1, n_chunks + 1))
        assert said_by_agent(updates) == f"{counted}new"
        assert users == [f"count {n_chunks}"]


async def test_two_loads_at_once_each_replay_everything_from_one_agent(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        await at.result(at.prompt(session, "say kept"))
    async with talk(tmp_path) as (at, backend):
        loads = [at.load(session), at.load(session)]
        for loading in loads:
            await at.result(loading)

        assert said_by_agent(at.lines.updates()) == "keptkept"
        assert list(backend.runtime.agents) == [session]
        await at.result(at.prompt(session, "say once"))
        assert said_by_agent(at.lines.updates()) == "keptkeptonce"


async def test_a_load_that_is_cancelled_leaves_no_session_behind(tmp_path):
    async with talk(tmp_path, is_open=False) as (at, backend):
        loading = at.load("sess_x")
        prompt = at.prompt("sess_x", "say x")
        await anyio.wait_all_tasks_blocked()

        at.note("$/cancel_request", requestId=loading)

        assert (await at.response(loading))["error"]["code"] == -32800
        assert (await at.response(prompt))["error"]["code"] == -32002
        at.connection.open(backend)
        late = await at.response(at.prompt("sess_x", "say x"))
        assert late["error"]["code"] == -32002


async def test_a_session_whose_agent_is_gone_gets_a_new_one_with_the_next_load(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        await at.result(at.prompt(session, "say kept"))
        await backend.runtime.agents[session].dispose()
        gone = await at.response(at.prompt(session, "say x"))
        assert gone["error"]["code"] == -32603

        await at.result(at.load(session))

        assert (await at.result(at.prompt(session, "say again")))["stopReason"] == "end_turn"
        assert said_by_agent(at.lines.updates()) == "keptkeptagain"


# --- the client's pace ----------------------------------------------------------------------


@pytest.mark.requirement("B105", "ACP-094")
async def test_a_model_is_held_back_while_the_client_does_not_read_and_a_cancel_still_works(
    tmp_path,
):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        at.lines.is_congested = True
        prompt = at.prompt(session, "count 100000")
        await anyio.wait_all_tasks_blocked()
        held_at = len(at.lines.updates())

        at.cancel(session)

        assert (await at.result(prompt))["stopReason"] == "cancelled"
        assert held_at < 10
