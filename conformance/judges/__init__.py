"""Judges of what was said: pure functions from a conversation to findings.

A module for each area. A judge names the rules it may find about and yields a finding for each time
that it could tell: kept or broken. What a conversation does not have, nobody finds anything about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Final, NamedTuple

from conformance.conversation import Conversation

__all__ = ["JUDGES", "Finding", "Judge", "findings", "judge", "load", "rules"]


class Finding(NamedTuple):
    """One rule, kept or broken at one place."""

    rule: str
    at: int
    """The index of the entry that shows it."""
    wrong: str = ""
    """What is wrong, in one line; empty when the rule is kept."""


Judge = Callable[[Conversation], Iterable[Finding]]

JUDGES: Final[dict[str, tuple[Judge, tuple[str, ...]]]] = {}
"""Judges and the rules they may find about, by the judge's name. Filled by `load`."""


def judge(*rules: str) -> Callable[[Judge], Judge]:
    """Register a function as a judge by these rules."""

    def register(function: Judge) -> Judge:
        JUDGES[function.__name__] = (function, rules)
        return function

    return register


def load() -> None:
    """Import every module of judges. Again does nothing."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


def rules() -> set[str]:
    """Return the ids of all rules that a judge may find about."""
    load()
    return {rule for _, named in JUDGES.values() for rule in named}


def findings(conversation: Conversation) -> list[Finding]:
    """Return what all judges find, each broken rule at each place and each kept rule once.

    Args:
        conversation: What was said on one connection, as far as it went.
    """
    load()
    found: list[Finding] = []
    for function, _ in JUDGES.values():
        kept: set[str] = set()
        for finding in function(conversation):
            if finding.wrong:
                found.append(finding)
            elif finding.rule not in kept:
                kept.add(finding.rule)
                found.append(finding)
    return found
