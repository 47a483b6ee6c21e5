"""Every rule the suite judges by: what it says, how strictly, and where that is written.

The rules stand in ``rules/*.toml``, a file for each area, so that they can be read and added to
without Python. Who judges by them: the functions of `conformance.judges` over what was said, and
those of `conformance.scenarios`, which make an agent do things.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Final, Literal

import msgspec
from msgspec import Struct

__all__ = [
    "FAILING",
    "LEVELS",
    "SPECIFICATION",
    "Level",
    "Rule",
    "Transport",
    "add_rules",
    "manifest",
]

SPECIFICATION: Final = "https://agentclientprotocol.com/protocol/v1/"

Level = Literal["must", "capability-must", "should", "robustness", "interop", "info"]
"""How strictly: the protocol demands it of everybody; of those who say they can do it; it advises
it; no text demands it but users suffer without; a known client breaks without; only recorded."""

LEVELS: Final[dict[Level, str]] = {
    "must": "the protocol demands it",
    "capability-must": "the protocol demands it of an agent that advertises the capability",
    "should": "the protocol advises it",
    "robustness": "no text demands it, but people suffer where it is missing",
    "interop": "a real client breaks where it is missing",
    "info": "recorded, never judged",
}
FAILING: Final[frozenset[Level]] = frozenset({"must", "capability-must"})
"""The levels at which an agent that breaks a rule does not conform."""

Transport = Literal["stdio", "ws", "http"]


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule."""

    id: str
    """Stable for ever: an area's three letters and a number."""
    level: Level
    says: str
    """One sentence of what an agent does that keeps it."""
    source: str = ""
    """The page and section below `SPECIFICATION`, or a whole address."""
    pointer: str = ""
    """The definition in the schema, such as ``PromptResponse``."""
    since: str = "1"
    """The first protocol version that has it."""
    until: str = ""
    """The last one; empty while it holds."""
    transports: tuple[Transport, ...] = ("stdio", "ws", "http")
    why: str = ""
    """Who suffers, for rules that stand in no specification."""
    area: str = ""

    @property
    def address(self) -> str:
        """Where to read it, or nothing."""
        if not self.source or "://" in self.source:
            return self.source
        return SPECIFICATION + self.source


class _Area(Struct, forbid_unknown_fields=True):
    area: str
    rule: list[Rule]


@cache
def manifest() -> dict[str, Rule]:
    """Return all rules by id, in the order of the files and in them.

    Raises:
        ValueError: Two rules have one id, or a rule that can fail does not say where it is written.
    """
    rules: dict[str, Rule] = {}
    folder = files(__package__) / "rules"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        if not file.name.endswith(".toml"):
            continue
        area = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), _Area)
        _add(rules, [msgspec.structs.replace(rule, area=area.area) for rule in area.rule])
    return rules


def add_rules(rules: Iterable[Rule]) -> None:
    """Add rules that somebody's cases bring along.

    Raises:
        ValueError: A rule is there already, or can fail and does not say where it is written.
    """
    _add(manifest(), rules)


def _add(rules: dict[str, Rule], more: Iterable[Rule]) -> None:
    for rule in more:
        if rule.id in rules:
            raise ValueError(f"the rule {rule.id} is there twice")
        if rule.level in FAILING and not rule.source:
            raise ValueError(f"the rule {rule.id} can fail and has no source")
        rules[rule.id] = rule
