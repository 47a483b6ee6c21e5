"""Every rule of the cancellation contract is named by a test."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
RULES = {f"R{number}" for number in range(1, 99)}


def marked() -> dict[str, set[str]]:
    """Return the files that name each requirement in a `requirement` mark."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "requirement":
                for value in node.args:
                    if isinstance(value, ast.Constant):  # computed names do not count
                        found[str(value.value)].add(path.name)
    return found


def test_every_rule_is_named_by_a_test() -> None:
    assert sorted(RULES - set(marked()), key=lambda rule: int(rule[1:])) == []


def test_no_test_names_a_rule_that_does_not_exist() -> None:
    named = {name for name in marked() if name[0] == "R"}

    assert named - RULES == set()
