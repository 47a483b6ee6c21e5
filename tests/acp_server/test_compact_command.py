from __future__ import annotations

import pytest
from talking import Talk, said_by_agent, talk


def told(at: Talk, kind: str) -> list[dict]:
    return [update for update in at.lines.updates() if update["sessionUpdate"] == kind]


async def a_long_session(at: Talk) -> str:
    session = await at.new_session()
    await at.result(at.prompt(session, f"say {'long ' * 2_000}"))
    return session


@pytest.mark.requirement("ACP-175", "ACP-176")
async def test_a_client_that_asked_for_it_sees_the_compaction_and_its_end(tmp_path):
    async with talk(tmp_path, capabilities={"session": {"compaction": {}}}) as (at, _backend):
        session = await a_long_session(at)

        await at.result(at.prompt(session, "/compact"))

        begun, ended = told(at, "compaction_update")
        assert (begun["status"], ended["status"]) == ("in_progress", "completed")
        assert begun["compactionId"] == ended["compactionId"]
        assert "Compacted: about " in said_by_agent(at.lines.updates())


async def test_another_client_is_told_in_a_line(tmp_path):
    async with talk(tmp_path) as (at, _backend):
        session = await a_long_session(at)

        await at.result(at.prompt(session, "/compact"))

        assert told(at, "compaction_update") == []
        assert "summarised" in told(at, "agent_thought_chunk")[-1]["content"]["text"]


async def test_with_nothing_to_compact_nothing_happens(tmp_path):
    async with talk(tmp_path, capabilities={"session": {"compaction": {}}}) as (at, _backend):
        session = await at.new_session()

        await at.result(at.prompt(session, "/compact"))

        assert said_by_agent(at.lines.updates()) == "There is nothing to compact."
        assert told(at, "compaction_update") == []


@pytest.mark.requirement("ACP-083")
async def test_a_loaded_session_shows_the_compaction_as_it_was_shown(tmp_path):
    offered = {"session": {"compaction": {}}}
    async with talk(tmp_path, capabilities=offered) as (at, _backend):
        session = await a_long_session(at)
        await at.result(at.prompt(session, "/compact"))
        live = told(at, "compaction_update")

    async with talk(tmp_path, capabilities=offered) as (at, _backend):
        await at.result(at.load(session))

        assert told(at, "compaction_update") == live
