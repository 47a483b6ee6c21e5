"""What /metrics says of what happened, and to whom."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import httpx2
import pytest
from http_rig import http_editor
from network_rig import TOKEN, Server, editor, listening
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import InvalidStatus

from conformance.providers.chat import text
from conformance.providers.server import answer, provider_double, status

SCRAPER = "metrics-token-0123456789"

Figures = dict[tuple[str, ...], float]


async def scraped(server: Server, token: str | None = None) -> tuple[str, Figures]:
    """The page, and its figures by the name and the values of the labels, sorted by the labels."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx2.AsyncClient(headers=headers) as http:
        page = await http.get(f"{server.http}/metrics")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/plain; version=")
    figures = {
        (sample.name.removeprefix("acp_agent_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }
    return page.text, figures


async def test_turns_stops_and_model_requests_are_counted_by_how_they_ended(tmp_path: Path) -> None:
    async with listening(tmp_path, "--mode", "bypass") as server, editor(server) as client:
        session = await client.new_session(tmp_path)
        await client.stop_reason(await client.prompt(session, "say one"))
        await client.stop_reason(await client.prompt(session, "delegate say two"))
        _, before = await scraped(server)
        assert before["stop_seconds_count",] == 0
        for how in ("count 1000000", "run sleep 300"):
            n_shown = len(client.updates(session))
            prompt = await client.prompt(session, how)
            waiting = await client.prompt(session, "say never")
            await client.until(lambda n=n_shown: len(client.updates(session)) > n)
            await client.note("session/cancel", sessionId=session)
            assert await client.stop_reason(prompt) == "cancelled"
            assert await client.stop_reason(waiting) == "cancelled"
        page, after = await scraped(server)
    assert before["turns_total", "person", "completed"] == 2
    assert before["turns_total", "subagent", "completed"] == 1
    assert before["subagents_ended_total", "completed"] == 1
    assert after["turns_total", "person", "aborted"] == 2
    assert after["stop_seconds_count",] == 4
    assert 0 < after["stop_seconds_sum",] < 20
    assert before["model_request_seconds_count", "completed", "rehearsal"] == 4
    assert before["model_first_event_seconds_count", "rehearsal"] == 4
    assert after["model_request_seconds_count", "cancelled", "rehearsal"] == 1
    assert session not in page
    assert client.socket.response is not None
    assert client.socket.response.headers["acp-connection-id"] not in page


async def test_what_is_live_is_what_there_is_when_somebody_asks(tmp_path: Path) -> None:
    async with listening(tmp_path, "--mode", "bypass") as server:
        _, idle = await scraped(server)
        async with editor(server) as client, http_editor(server) as other:
            session = await client.new_session(tmp_path)
            await other.new_session(tmp_path)
            prompt = await client.prompt(session, "delegate run sleep 300")
            await client.prompt(session, "say never")
            await client.until(lambda: "sleep 300" in str(client.updates(session)))
            _, busy = await scraped(server)
            await client.note("session/cancel", sessionId=session)
            await client.stop_reason(prompt)
            _, calm = await scraped(server)
    names = ("sessions", "subagents", "turns_running", "prompts_queued")
    assert [idle[name,] for name in names] == [0, 0, 0, 0]
    assert [busy[name,] for name in names] == [2, 1, 1, 1]
    assert [calm[name,] for name in names] == [2, 0, 0, 0]
    for transport in ("websocket", "http"):
        assert idle["connections", transport] == 0
        assert busy["connections", transport] == 1
        assert busy["connections_opened_total", transport] == 1
        assert busy["received_bytes_total", transport] > 100
        assert busy["sent_bytes_total", transport] > 100
    assert idle["ready",] == 1
    assert [name for name in idle if name[0] == "build_info"]
    assert idle["process_resident_memory_bytes",] > 1e6


@pytest.mark.requirement("B093")
async def test_sessions_that_nobody_uses_are_unloaded_used_again_and_gone_with_their_client(
    tmp_path: Path,
) -> None:
    async def sessions(server: Server, n_open: int, n_unloaded: int) -> None:
        with anyio.fail_after(10):
            while True:
                _, figures = await scraped(server)
                if (figures["sessions",], figures["sessions_unloaded",]) == (n_open, n_unloaded):
                    return
                await anyio.sleep(0.02)

    async with listening(tmp_path, "--unload-after-s", "0.2") as server:
        async with editor(server) as client:
            session = await client.new_session(tmp_path)
            for said in ("say one", "say two"):
                prompt = await client.prompt(session, said)
                assert await client.stop_reason(prompt) == "end_turn"
                await sessions(server, 1, 1)
            assert "onetwo" in client.text(session)
        await sessions(server, 0, 0)


async def test_failures_of_a_model_are_counted_by_their_code_also_when_it_was_called_again(
    tmp_path: Path,
) -> None:
    slow = status(429, {"message": "Slow down"}, headers={"retry-after": "0"})
    wrong = status(404, {"message": "No such model", "code": "model_not_found"})
    async with provider_double([slow, answer(text("there")), wrong]) as double:
        env = {"OPENAI_API_KEY": "sk-canary", "OPENAI_BASE_URL": double.url}
        flags = ("--model", "openai:any")
        async with listening(tmp_path, *flags, env=env) as server, editor(server) as client:
            session = await client.new_session(tmp_path)
            await client.stop_reason(await client.prompt(session, "one"))
            failed = await client.response(await client.prompt(session, "two"))
            assert "error" in failed
            _, figures = await scraped(server)
    assert figures["model_failures_total", "RATE_LIMIT"] == 1
    assert figures["model_failures_total", "MODEL_NOT_FOUND"] == 1
    assert figures["model_request_seconds_count", "completed", "openai"] == 1
    assert figures["model_request_seconds_count", "failed", "openai"] == 1
    assert figures["turns_total", "person", "error"] == 1


async def test_a_model_that_a_client_names_adds_no_label(tmp_path: Path) -> None:
    flags = ("--model", "openai:any")
    env = {"OPENAI_API_KEY": "sk-canary", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    async with listening(tmp_path, *flags, env=env) as server, editor(server) as client:
        session = await client.new_session(tmp_path)
        option = {"sessionId": session, "configId": "model", "value": "openai:chosen-by-client"}
        await client.response(await client.say("session/set_config_option", **option))
        prompt = await client.prompt(session, "hello")
        await client.until(lambda: client.updates(session, "agent_thought_chunk"))
        await client.note("session/cancel", sessionId=session)
        await client.stop_reason(prompt)
        page, _ = await scraped(server)
    assert "chosen-by-client" not in page
    assert 'provider="openai"' in page
    assert "openai:any" not in page


# --- who may read it ------------------------------------------------------------------------


async def test_a_token_named_metrics_reads_the_metrics_and_nothing_else(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"me:{TOKEN}\nmetrics:{SCRAPER}\n")
    flags = ("--token-file", str(tokens))
    async with listening(tmp_path, *flags) as server:
        await scraped(server, TOKEN)
        await scraped(server, SCRAPER)
        shown = {"authorization": f"Bearer {SCRAPER}"}
        initialize = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
        async with httpx2.AsyncClient() as http:
            assert (await http.get(f"{server.http}/metrics")).status_code == 401
            elsewhere = {"host": "rebound.example"}
            assert (await http.get(f"{server.http}/metrics", headers=elsewhere)).status_code == 403
            refused = await http.post(
                f"{server.http}/acp",
                content=json.dumps(initialize),
                headers=shown | {"content-type": "application/json"},
            )
            assert (refused.status_code, "metrics" in refused.text) == (403, True)
        with pytest.raises(InvalidStatus, match="403"):
            async with editor(server, token=SCRAPER):
                pass


async def test_who_is_turned_away_is_counted_by_the_reason(tmp_path: Path) -> None:
    env = {"ACP_AGENT_TOKEN": TOKEN}
    network = "max_connections = 1"
    async with listening(tmp_path, env=env, network=network) as server:
        shown = {"authorization": f"Bearer {TOKEN}"}
        for headers in (
            {},
            {"authorization": "Bearer wrong-wrong-wrong-wrong"},
            shown | {"origin": "https://evil.example"},
            shown | {"host": "rebound.example"},
        ):
            async with httpx2.AsyncClient(headers=headers) as http:
                await http.get(f"{server.http}/metrics")
        async with editor(server, token=TOKEN):
            with pytest.raises(InvalidStatus, match="503"):
                async with editor(server, token=TOKEN):
                    pass
            _, figures = await scraped(server, TOKEN)
        _, after = await scraped(server, TOKEN)
    reasons = ("no_token", "wrong_token", "origin", "host", "full")
    assert [figures["refused_total", reason] for reason in reasons] == [1] * 5
    assert after["connections_ended_total", "left"] == 1
