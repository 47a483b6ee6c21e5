"""Every rule of the cancellation contract, and of ACP those an agent owes, is named by a test.

So is what users of other agents reported (B001 to B168), and how clients behave that we met
(QUIRK-01 to QUIRK-23); or it is said here why it has none.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from acp_rules import ACP_RULES

TESTS = Path(__file__).parent
RULES = {f"R{number}" for number in range(1, 99)}
OWED = {rule.id for rule in ACP_RULES.values() if rule.who != "client"}
REPORTS = {f"B{number:03}" for number in range(1, 169)}
QUIRKS = {f"QUIRK-{number:02}" for number in range(1, 24)}

UNPROVEN = {
    "B021": "a matter of time: `make bench` prints how long a cancel takes to be answered",
    "B032": "nothing is computed or asked for at the end of a turn: title and usage are in the log",
    "B040": "a person has no time limit; a question waits until it is answered or withdrawn",
    "B067": "there is one path: every model streams",
    "B142": "the configuration has no MCP servers; all of them are the client's",
    "B145": "a matter of time: `make bench` prints the gap that a load makes in another's stream",
    "QUIRK-08": "what an old library of clients does with updates that came in order (B122)",
    "QUIRK-23": "another program's command has the same name; the package's is its own",
}
"""What no test proves, and why."""


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


def test_every_report_and_every_quirk_is_named_by_a_test_or_has_a_reason() -> None:
    assert sorted((REPORTS | QUIRKS) - set(marked()) - set(UNPROVEN)) == []


def test_what_has_a_test_has_no_reason_for_having_none() -> None:
    assert sorted(set(UNPROVEN) & set(marked())) == []


def test_no_test_names_what_does_not_exist() -> None:
    named = {name for name in marked() if name.startswith(("R", "B", "ACP", "QUIRK"))}

    assert named - RULES - REPORTS - QUIRKS - set(ACP_RULES) == set()


def test_the_protocols_rules_are_written_down_once_each_and_completely() -> None:
    assert len(ACP_RULES) == 147
    assert len({rule.says for rule in ACP_RULES.values()}) == len(ACP_RULES)
    for rule in ACP_RULES.values():
        assert rule.level in ("must", "should", "may", "-")
        assert rule.who in ("agent", "client", "both")
        assert rule.says.endswith(".")
