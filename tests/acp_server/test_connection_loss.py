"""What becomes of a session whose client is gone, and of one that another client opens."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from network_rig import Editor, Server, editor, listening


async def until_lost(server: Server) -> None:
    """Wait until the server has noticed that a client is gone."""
    await server.until_said("client_disconnected")


def tool_statuses(client: Editor, session: str) -> list[str]:
    """The last status of each tool call that the client knows of."""
    last: dict[str, str] = {}
    for update in client.updates(session):
        if "toolCallId" in update and "status" in update:
            last[update["toolCallId"]] = update["status"]
    return list(last.values())


@pytest.mark.requirement("B155")
async def test_a_turn_is_cancelled_when_its_client_is_lost_and_the_session_can_be_loaded(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path, "--log-level", "info") as server:
        async with editor(server) as first:
            session = await first.new_session(tmp_path)
            await first.prompt(session, "run sleep 300")
            question = await first.question()
            await first.choose(question, "allow-once")
            await first.until(lambda: "in_progress" in tool_statuses(first, session))
            first.vanish()
        await until_lost(server)

        async with editor(server) as second:
            await second.load(session, tmp_path)
            assert tool_statuses(second, session) == ["failed"]
            assert await second.stop_reason(await second.prompt(session, "say on")) == "end_turn"


async def test_a_question_pending_when_its_client_is_lost_is_never_an_approval(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path, "--log-level", "info") as server:
        async with editor(server) as first:
            session = await first.new_session(tmp_path)
            await first.prompt(session, "write never.txt: x")
            await first.question()
            first.vanish()
        await until_lost(server)

        async with editor(server) as second:
            await second.load(session, tmp_path)
            assert tool_statuses(second, session) == ["failed"]
            assert second.questions() == []
    assert not (tmp_path / "never.txt").exists()


@pytest.mark.parametrize("how", ["load", "resume"])
async def test_a_kept_turn_finishes_and_whoever_comes_back_sees_what_was_missed_once(
    tmp_path: Path, how: str
) -> None:
    flags = ("--on-disconnect", "keep", "--log-level", "info")
    async with listening(tmp_path, *flags) as server:
        async with editor(server) as first:
            session = await first.new_session(tmp_path)
            await first.prompt(session, "run touch begun; while [ ! -e go ]; do sleep 0.02; done")
            await first.choose(await first.question(), "allow-once")
            await first.until(lambda: "in_progress" in tool_statuses(first, session))
            first.vanish()
        await until_lost(server)
        (tmp_path / "go").touch()

        async with editor(server) as second:
            await second.load(session, tmp_path, how)
            await second.until(lambda: tool_statuses(second, session) == ["completed"])

            both = first.updates(session) + second.updates(session)
            seen = second.updates(session) if how == "load" else both
            ends = [u for u in seen if u.get("status") == "completed"]
            prompts = [u for u in seen if u["sessionUpdate"] == "user_message_chunk"]
            assert len(ends) == 1
            assert len(prompts) == (1 if how == "load" else 0)
            starts = [u for u in seen if u["sessionUpdate"] == "tool_call"]
            assert len(starts) == 1


async def test_a_kept_turns_question_is_withdrawn_and_asked_again_of_whoever_comes_next(
    tmp_path: Path,
) -> None:
    flags = ("--on-disconnect", "keep", "--log-level", "info")
    async with listening(tmp_path, *flags) as server:
        async with editor(server) as first:
            session = await first.new_session(tmp_path)
            await first.prompt(session, "write later.txt: x")
            await first.question()
            first.vanish()
        await until_lost(server)
        assert not (tmp_path / "later.txt").exists()

        async with editor(server) as second:
            await second.load(session, tmp_path)
            question = await second.question()
            assert not (tmp_path / "later.txt").exists()
            await second.choose(question, "allow-once")
            await second.until(lambda: tool_statuses(second, session) == ["completed"])
    assert (tmp_path / "later.txt").read_text() == "x"


async def test_a_kept_turn_that_nobody_comes_back_for_is_stopped_in_the_end(
    tmp_path: Path,
) -> None:
    flags = ("--on-disconnect", "keep", "--log-level", "info")
    async with listening(tmp_path, *flags, network="keep_s = 0.2") as server:
        async with editor(server) as first:
            session = await first.new_session(tmp_path)
            await first.prompt(session, "write never.txt: x")
            await first.question()
            first.vanish()
        await until_lost(server)

        await server.until_said("kept_session_let_go")

        async with editor(server) as second:
            await second.load(session, tmp_path)
            assert tool_statuses(second, session) == ["failed"]
            assert second.questions() == []
    assert not (tmp_path / "never.txt").exists()


async def test_a_second_client_takes_a_session_over_and_the_first_gets_its_answer(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as server, editor(server) as first, editor(server) as second:
        session = await first.new_session(tmp_path)
        answer = await first.prompt(session, "write taken.txt: x")
        question = await first.question()

        await second.load(session, tmp_path)
        again = await second.question()
        withdrawn = {"requestId": question["id"]}
        await first.until(
            lambda: [m for m in first.received if m.get("method") == "$/cancel_request"]
        )
        assert first.received[-1]["params"] == withdrawn
        await first.choose(question, "allow-once")  # too late: it counts for nothing
        assert (await first.error("session/prompt", sessionId=session, prompt=[]))["code"] == -32002
        assert not (tmp_path / "taken.txt").exists()

        n_shown = len(first.updates(session))
        await second.choose(again, "allow-once")
        assert await first.stop_reason(answer) == "end_turn"
        await second.until(lambda: tool_statuses(second, session) == ["completed"])
        assert len(first.updates(session)) == n_shown
        assert (tmp_path / "taken.txt").read_text() == "x"


async def test_a_stop_of_the_client_before_still_stops_its_prompt(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, editor(server) as first, editor(server) as second:
        session = await first.new_session(tmp_path)
        answer = await first.prompt(session, "stall")
        await second.load(session, tmp_path)

        await first.note("session/cancel", sessionId=session)

        assert await first.stop_reason(answer) == "cancelled"


async def test_what_the_first_client_leaves_behind_does_not_touch_the_second(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path, "--log-level", "info") as server, editor(server) as second:
        async with editor(server) as first:
            session = await first.new_session(tmp_path)
            await first.prompt(session, "write kept.txt: x")
            await first.question()
            await second.load(session, tmp_path)
            question = await second.question()
            first.vanish()
        await until_lost(server)

        await second.choose(question, "allow-once")
        await second.until(lambda: tool_statuses(second, session) == ["completed"])


@pytest.mark.requirement("B155")
async def test_a_server_that_was_killed_in_a_turn_has_the_session_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path, must_end_well=False) as server, editor(server) as client:
        session = await client.new_session(tmp_path)
        await client.prompt(session, "write never.txt: x")
        await client.question()
        server.process.send_signal(signal.SIGKILL)
        await client.until(lambda: client.close_code is not None)

    async with listening(tmp_path) as server, editor(server) as client:
        await client.load(session, tmp_path)
        # Before a side effect nothing has to be durable, so the call itself may be lost.
        assert tool_statuses(client, session) in ([], ["failed"])
        assert await client.stop_reason(await client.prompt(session, "say back")) == "end_turn"
    assert not (tmp_path / "never.txt").exists()
