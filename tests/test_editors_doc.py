"""docs/editors.md: its blocks can be read, and start what there is to start."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from acp_server.capabilities import Features
from acp_server.cli import _parser
from acp_server.methods.auth import auth_methods

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/editors.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_the_json_and_python_blocks_can_be_read_and_start_the_server() -> None:
    for kind, block in BLOCKS:
        if kind == "json":
            (server,) = json.loads(block)["agent_servers"].values()
            assert server["command"] == "acp-agent"
            run = _parser().parse_args(server["args"]).run
            assert run.__name__ in ("_run_serve", "_run_connect")
        elif kind == "python":
            ast.parse(block)


@pytest.mark.parametrize("heading", re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
def test_every_client_has_a_command_that_can_be_copied(heading: str) -> None:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]

    assert "acp-agent" in section


@pytest.mark.parametrize(
    "line", sorted(set(re.findall(r"acp-agent ((?:login|logout|check|connect).*)", PAGE)))
)
def test_the_commands_it_names_are_there(line: str) -> None:
    words = re.match(r"[\w -]+", line.split("  ")[0].split("`")[0])
    assert words is not None

    options = _parser().parse_args(words[0].split()[:2])

    assert options.run is not None


def test_it_says_what_each_way_to_authenticate_is_called() -> None:
    for method in auth_methods(Features(runs_logins=True)):
        assert f"**{method['name']}**" in PAGE
    assert 'auth_method = "configured"' in PAGE
