"""The documents say what the code does, where that can be compared."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from acp_server.capabilities import Features, features_of
from acp_server.connection import _INITIALIZE_RESULT
from acp_server.methods import METHODS
from acp_server.types import Update
from agent_core.hooks import HOOKS, hook_table
from agent_core.phases import PHASES, phase_picture, phase_table

DOCS = Path(__file__).parent.parent
PROTOCOL = (DOCS / "docs/protocol.md").read_text()


def test_the_table_of_hooks_is_the_one_the_code_has() -> None:
    assert (DOCS / "docs/hooks.md").read_text().endswith("\n\n" + hook_table())


def test_the_tables_and_the_picture_of_the_turns_life_are_those_the_code_has() -> None:
    assert phase_table() in (DOCS / "docs/architecture.md").read_text()
    assert f"```text\n{phase_picture()}```" in (DOCS / "docs/cancellation.md").read_text()


def test_the_loop_says_at_each_phase_which_one_it_is() -> None:
    code = (DOCS / "agent_core/loop.py").read_text()

    assert [p.name for p in PHASES if not re.search(rf"#.*\b{p.name}\b", code)] == []


def test_every_hook_of_a_phase_exists() -> None:
    assert {name for phase in PHASES for name in phase.hooks} <= set(HOOKS)


def test_the_turns_life_names_every_hook() -> None:
    text = (DOCS / "docs/architecture.md").read_text()

    assert [name for name in HOOKS if f"`{name}`" not in text] == []


def method_table() -> str:
    rows = ["| method | params | what it does |", "|---|---|---|"]
    for name, served in METHODS.items():
        module = import_module(f"acp_server.methods.{served.module}")
        says, _, _ = (getattr(module, served.function).__doc__ or "").partition("\n")
        params = [
            f"`{field.encode_name}`{'' if field.required else '?'}"
            for field in msgspec.structs.fields(served.params)
        ]
        rows.append(f"| `{name}` | {', '.join(params)} | {says} |")
    return "\n".join(rows)


def test_the_table_of_methods_is_the_one_the_code_has() -> None:
    assert method_table() in PROTOCOL


def test_the_capabilities_that_the_protocols_page_shows_are_those_that_are_offered() -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", PROTOCOL, re.DOTALL)

    assert json.loads(shown) == _INITIALIZE_RESULT["agentCapabilities"]


def test_the_table_of_updates_has_each_that_the_code_has() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PROTOCOL.partition("| update | when |")[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    tags = {each.__struct_config__.tag for each in Update.__args__}

    assert tags <= named
    assert {name for name in named if name.endswith(("_update", "_chunk"))} <= tags


def test_each_capability_of_a_client_that_is_heeded_has_its_row() -> None:
    table = PROTOCOL.partition("| a client that offers |")[2].partition("\n\n")[0]
    heeded = set()
    for path in re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE):
        found = set()
        for leaf in (True, {}):
            offered: object = leaf
            for name in reversed(path.split(".")):
                offered = {name: offered}
            features = features_of(json.dumps(offered).encode())
            found |= {name for name in Features.__struct_fields__ if getattr(features, name)}
        assert len(found) == 1, path
        heeded |= found

    assert heeded == set(Features.__struct_fields__)


@pytest.mark.parametrize(
    "page", ["README.md", "AGENTS.md", *(f"docs/{path.name}" for path in (DOCS / "docs").iterdir())]
)
def test_links_and_files_that_a_page_names_are_there(page: str) -> None:
    text = (DOCS / page).read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    files = re.findall(r"`((?:agent_core|acp_server|conformance|docs|tests)/[\w/.]+)`", text)

    missing = [link for link in links if not (DOCS / page).parent.joinpath(link).exists()]
    missing += [file for file in files if not (DOCS / file).exists()]

    assert missing == []


def test_agents_md_is_short_enough_to_be_read() -> None:
    assert len((DOCS / "AGENTS.md").read_text().splitlines()) <= 100
