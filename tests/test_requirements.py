"""Every rule of the cancellation contract, and of ACP those an agent owes, is named by a test."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from acp_rules import ACP_RULES

TESTS = Path(__file__).parent
RULES = {f"R{number}" for number in range(1, 99)}
OWED = {rule.id for rule in ACP_RULES.values() if rule.who != "client"}


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


def test_every_rule_of_the_protocol_that_an_agent_owes_is_named_by_a_test() -> None:
    assert [ACP_RULES[rule] for rule in sorted(OWED - set(marked()))] == []


def test_no_test_names_a_rule_that_does_not_exist() -> None:
    named = {name for name in marked() if name[0] == "R" or name.startswith("ACP")}

    assert named - RULES - set(ACP_RULES) == set()


def test_the_protocols_rules_are_written_down_once_each_and_completely() -> None:
    assert len(ACP_RULES) == 147
    assert len({rule.says for rule in ACP_RULES.values()}) == len(ACP_RULES)
    for rule in ACP_RULES.values():
        assert rule.level in ("must", "should", "may", "-")
        assert rule.who in ("agent", "client", "both")
        assert rule.says.endswith(".")
