"""The documents say what the code does, where that can be compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent_core.hooks import HOOKS, hook_table
from agent_core.phases import PHASES, phase_picture, phase_table

DOCS = Path(__file__).parent.parent


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
