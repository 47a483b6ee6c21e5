from __future__ import annotations

import anyio
import pytest
from serving import text
from talking import CWD, Talk, said_by_agent, talk


def told(at: Talk, kind: str, session: str | None = None) -> list[dict]:
    return [
        m["params"]["update"]
        for m in at.lines.sent
        if m.get("method") == "session/update"
        and m["params"]["update"]["sessionUpdate"] == kind
        and session in (None, m["params"]["sessionId"])
    ]


def close(at: Talk, session: str) -> int:
    return at.say("session/close", sessionId=session)


def delete(at: Talk, session: str) -> int:
    return at.say("session/delete", sessionId=session)


def resume(at: Talk, session: str, **more: object) -> int:
    return at.say("session/resume", sessionId=session, cwd=CWD, **more)


async def listed(at: Talk) -> list[str]:
    page = await at.result(at.say("session/list"))
    return [each["sessionId"] for each in page["sessions"]]


async def error_code(at: Talk, request: int) -> int:
    return (await at.response(request))["error"]["code"]


async def a_used_session(at: Talk, said: str = "say hello") -> str:
    session = await at.new_session()
    await at.result(at.prompt(session, said))
    return session


# --- what is offered ------------------------------------------------------------------------


async def test_what_initialize_offers_is_served(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        offered = at.lines.sent[0]["result"]["agentCapabilities"]["sessionCapabilities"]
        for name in offered.keys() - {"additionalDirectories"}:
            error = (await at.response(at.say(f"session/{name}", nonsense=1))).get("error", {})

            assert error.get("code") != -32601, name


# --- resume ---------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-063", "ACP-064")
async def test_resume_shows_nothing_of_the_past_and_the_session_goes_on(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await a_used_session(at)

    async with talk(tmp_path) as (at, _backend):
        result = await at.result(resume(at, session))
        assert told(at, "agent_message_chunk") == told(at, "user_message_chunk") == []
        await at.result(at.prompt(session, "say again"))

        assert said_by_agent(at.lines.updates()) == "again"
        assert set(result) == {"modes", "configOptions"}


@pytest.mark.race
async def test_a_prompt_and_a_cancel_read_right_behind_a_resume_find_each_other(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await a_used_session(at)

    async with talk(tmp_path) as (at, _backend):
        opened = resume(at, session)
        prompt = at.prompt(session, "count 100000 slowly")
        at.cancel(session)
        after = at.prompt(session, "say after")

        await at.result(opened)
        assert (await at.result(prompt))["stopReason"] == "cancelled"
        assert (await at.result(after))["stopReason"] == "end_turn"


@pytest.mark.requirement("ACP-076")
@pytest.mark.parametrize("method", ["session/load", "session/resume", "session/fork"])
async def test_an_unknown_session_is_not_found(tmp_path, method):
    async with talk(tmp_path) as (at, _backend):
        request = at.say(method, sessionId="sess_nobody", cwd=CWD, mcpServers=[])

        error = (await at.response(request))["error"]
        assert (error["code"], error["data"]) == (-32002, {"sessionId": "sess_nobody"})


# --- close ----------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("ACP-066", "B025")
async def test_close_answers_what_runs_and_what_waits_as_cancelled_before_itself(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session = await at.new_session()
        running = at.prompt(session, "count 100000 slowly")
        waiting = at.prompt(session, "say never")
        await at.lines.until(lambda: told(at, "agent_message_chunk"))

        closing = close(at, session)

        await at.result(closing)
        answers = [m["id"] for m in at.lines.sent if m.get("id") in (running, waiting, closing)]
        assert answers == [running, waiting, closing]
        assert (await at.result(running))["stopReason"] == "cancelled"
        assert (await at.result(waiting))["stopReason"] == "cancelled"
        assert session not in backend.runtime.agents
        n_sent = len(at.lines.sent)
        assert await error_code(at, at.prompt(session, "say x")) == -32002
        assert len(at.lines.sent) == n_sent + 1


@pytest.mark.requirement("ACP-067", "ACP-076")
async def test_a_closed_session_can_be_loaded_again_and_closed_no_more(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await a_used_session(at)
        closing = close(at, session)
        opening = at.load(session)
        prompt = at.prompt(session, "say again")

        await at.result(closing)
        await at.result(opening)
        assert (await at.result(prompt))["stopReason"] == "end_turn"
        await at.result(close(at, session))

        assert await error_code(at, close(at, session)) == -32002


@pytest.mark.race
async def test_close_while_the_session_is_loading_leaves_nothing_behind(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await a_used_session(at)

    async with talk(tmp_path) as (at, backend):
        opening = at.load(session)
        prompt = at.prompt(session, "say never")
        closing = close(at, session)

        assert await error_code(at, opening) == -32002
        assert (await at.result(prompt))["stopReason"] == "cancelled"
        await at.result(closing)
        assert session not in backend.runtime.agents
        assert said_by_agent(at.lines.updates()) == ""


async def test_close_waits_for_a_tool_that_does_not_obey(tmp_path):
    async with talk(tmp_path, mode="bypass") as (at, backend):
        session = await at.new_session()
        prompt = at.prompt(session, "run trap '' TERM; echo up; while :; do sleep 0.1; done")
        await at.lines.until(
            lambda: any(
                each.get("status") == "in_progress" for each in told(at, "tool_call_update")
            )
        )

        closing = close(at, session)
        await anyio.wait_all_tasks_blocked()
        assert at.lines.responses(closing) == []

        await at.result(closing)
        assert (await at.result(prompt))["stopReason"] == "cancelled"
        assert not backend.runtime.agents


# --- delete ---------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-074", "ACP-075")
async def test_a_deleted_session_is_gone_for_good(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        kept, gone = await a_used_session(at), await a_used_session(at)

        assert await at.result(delete(at, gone)) == {}
        assert await at.result(delete(at, gone)) == {}
        assert await at.result(delete(at, "sess_never")) == {}

        assert await listed(at) == [kept]
        assert await error_code(at, at.load(gone)) == -32002
        assert await error_code(at, at.prompt(gone, "say x")) == -32002

    async with talk(tmp_path) as (at, _backend):
        assert await listed(at) == [kept]
        assert await error_code(at, at.load(gone)) == -32002


@pytest.mark.race
@pytest.mark.requirement("ACP-075")
async def test_delete_in_mid_turn_cancels_it_and_no_late_save_brings_it_back(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await at.new_session()
        prompt = at.prompt(session, "count 100000 slowly")
        await at.lines.until(lambda: told(at, "agent_message_chunk"))

        await at.result(delete(at, session))

        assert (await at.result(prompt))["stopReason"] == "cancelled"
        assert await listed(at) == []

    async with talk(tmp_path) as (at, _backend):
        assert await listed(at) == []
        assert await error_code(at, at.load(session)) == -32002


# --- fork -----------------------------------------------------------------------------------


async def test_a_fork_has_the_finished_turns_and_a_life_of_its_own(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await a_used_session(at, "say one")
        running = at.prompt(session, "count 100000 slowly")
        await at.lines.until(lambda: "1" in said_by_agent(at.lines.updates()))

        request = at.say("session/fork", sessionId=session, cwd=CWD, mcpServers=[])
        fork = (await at.result(request))["sessionId"]
        await at.result(at.prompt(fork, "say two"))
        at.cancel(session)
        await at.result(running)
        await at.result(at.load(fork))

        assert fork != session
        replayed = [each["content"]["text"] for each in told(at, "user_message_chunk", fork)]
        assert replayed == ["say one", "say two"]
        assert set(await listed(at)) == {session, fork}


@pytest.mark.parametrize("method", ["session/new", "session/fork"])
async def test_a_session_whose_making_was_cancelled_is_whole_or_not_there(tmp_path, method):
    async with talk(tmp_path) as (at, backend):
        source = await a_used_session(at)
        more = {} if method == "session/new" else {"sessionId": source}
        request = at.say(method, cwd=CWD, mcpServers=[], **more)
        backend.runtime.hooks.on(
            "agent/created", lambda _agent: at.note("$/cancel_request", requestId=request)
        )

        response = await at.response(request)
        known = {source, response.get("result", {}).get("sessionId", source)}
        assert set(backend.runtime.agents) == set(at.connection.sessions) == known
        assert set(await listed(at)) <= known


# --- titles ---------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-083")
async def test_the_first_prompt_names_the_session_once(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await a_used_session(at, "say hello")
        await at.result(at.prompt(session, "say more"))

        (info,) = told(at, "session_info_update")
        assert info["title"] == "say hello"
        assert info["updatedAt"].endswith("Z")
        page = await at.result(at.say("session/list"))
        assert page["sessions"][0]["title"] == info["title"]


# --- additional directories -----------------------------------------------------------------


@pytest.mark.requirement("ACP-053", "ACP-055")
async def test_additional_directories_are_open_while_they_are_given_and_no_longer(tmp_path):
    project, more, other = (tmp_path / name for name in ("project", "more", "other"))
    for directory in (project, more, other):
        directory.mkdir()
        (directory / "a.txt").write_text(f"text of {directory.name}")

    async def read(at: Talk, session: str, path: object) -> str:
        n_calls = len(told(at, "tool_call_update"))
        await at.result(at.prompt(session, f"read {path}"))
        return str(told(at, "tool_call_update")[n_calls:])

    async with talk(tmp_path) as (at, _backend):
        places = {"cwd": str(project), "mcpServers": []}
        new = at.say("session/new", additionalDirectories=[str(more)], **places)
        session = (await at.result(new))["sessionId"]

        assert "text of more" in await read(at, session, more / "a.txt")
        assert "text of other" not in await read(at, session, other / "a.txt")

        again = {"sessionId": session, **places}
        await at.result(at.say("session/resume", additionalDirectories=[str(other)], **again))
        assert "text of more" not in await read(at, session, more / "a.txt")
        assert "text of other" in await read(at, session, other / "a.txt")

        await at.result(at.say("session/load", **again))
        assert "text of other" not in await read(at, session, other / "a.txt")
        assert "text of project" in await read(at, session, project / "a.txt")


@pytest.mark.parametrize("directory", ["relative", "", "/dev/null", "/a\0b"])
async def test_a_directory_that_cannot_be_one_is_refused(tmp_path, directory):
    async with talk(tmp_path) as (at, _backend):
        request = at.say("session/new", cwd=CWD, mcpServers=[], additionalDirectories=[directory])

        assert await error_code(at, request) == -32602


async def test_two_loads_of_a_session_leave_one_agent_that_answers(tmp_path):
    async with talk(tmp_path) as (at, backend):
        session = await a_used_session(at)
    async with talk(tmp_path) as (at, backend):
        first, second = at.load(session), resume(at, session)
        prompt = at.say("session/prompt", sessionId=session, prompt=text("say x"))

        await at.result(first)
        await at.result(second)
        await at.result(prompt)
        assert list(backend.runtime.agents) == [session]
