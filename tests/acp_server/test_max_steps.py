from __future__ import annotations

import pytest
from serve_rig import served, write_script

LOOP = [{"tool": "plan", "arguments": {"entries": []}}]


@pytest.mark.parametrize("by", ["flag", "variable"])
async def test_a_turn_that_calls_the_model_too_often_ends_and_says_why(by, tmp_path):
    script = write_script(tmp_path, *[LOOP] * 10)
    flags = ["--max-steps", "3"] if by == "flag" else []
    env = {"ACP_AGENT_MAX_STEPS": "3"} if by == "variable" else {}
    async with served(tmp_path, script, *flags, env=env) as client:
        session = await client.new_session(tmp_path)

        assert await client.stop_reason(client.prompt(session, "go")) == "max_turn_requests"
        plans = [u for u in client.wire.updates(session) if u["sessionUpdate"] == "plan"]
        assert len(plans) == 3
        assert await client.stop_reason(client.prompt(session, "go")) == "max_turn_requests"
