"""What is asked again and again: whether the server lives, is ready, and what it is."""

from __future__ import annotations

import os
from pathlib import Path

import httpx2
import pytest
from network_rig import TOKEN, listening

from acp_server import backend as backends
from acp_server.backend import open_backend
from acp_server.config import load_config
from acp_server.stored_keys import forget_keys, keys_file, keys_stamp, store_key

KEY = "sk-stored-key"


async def test_a_server_is_ready_once_its_model_has_a_key_and_no_longer_than_that(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, "--model", "openai:any") as server,
        httpx2.AsyncClient(base_url=server.http) as http,
    ):
        assert (await http.get("/healthz")).status_code == 200
        waiting = await http.get("/readyz")
        assert (waiting.status_code, "model" in waiting.text) == (503, True)
        store_key("openai", KEY)
        assert (await http.get("/readyz")).status_code == 200
        forget_keys("openai")
        assert (await http.get("/readyz")).status_code == 503
        assert KEY not in waiting.text


async def test_a_probe_reads_the_keys_only_when_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []
    look = backends.model_problem
    monkeypatch.setattr(
        backends, "model_problem", lambda config: (reads.append(1), look(config))[1]
    )
    config = load_config({"model": "openai:any", "state_dir": str(tmp_path)}, dict(os.environ))
    async with open_backend(config) as backend:
        for _ in range(3):
            assert backend.configuration_problem() is not None
        assert len(reads) == 1
        store_key("openai", KEY)
        for _ in range(3):
            assert backend.configuration_problem() is None
        assert len(reads) == 2


def test_the_stamp_of_the_keys_changes_with_their_text_their_rights_and_their_folder() -> None:
    stamps = [keys_stamp()]
    store_key("openai", KEY)
    stamps.append(keys_stamp())
    store_key("openai", KEY[::-1])
    stamps.append(keys_stamp())
    keys_file().chmod(0o644)
    stamps.append(keys_stamp())
    keys_file().parent.rename(keys_file().parent.with_name("elsewhere"))
    keys_file().parent.symlink_to("elsewhere")
    stamps.append(keys_stamp())
    assert len(set(stamps)) == len(stamps)
    assert keys_stamp() == stamps[-1]


async def test_the_root_says_what_is_here_to_everybody_who_may_reach_it(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}) as server,
        httpx2.AsyncClient(base_url=server.http) as http,
    ):
        said = await http.get("/")
        assert said.status_code == 200
        assert "acp-agent" in said.text
        assert "/acp" in said.text
        assert (await http.get("/", headers={"host": "rebound.example"})).status_code == 403
