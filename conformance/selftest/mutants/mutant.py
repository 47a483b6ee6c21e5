"""What a mutant is."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Mutant", "mutant"]


class Mutant(NamedTuple):
    """The sound agent with one bug.

    Attributes:
        name: What it goes by.
        bug: What is wrong with it, in one sentence.
        expects: The areas of the rules that must notice it, of which one is enough; a rule by its id
            is the one that it was made for.
        changes: Module of the agent, text that stands in it exactly once, and what to put there.
        flags: Flags of the agent without which the bug does not show.
    """

    name: str
    bug: str
    expects: tuple[str, ...]
    changes: tuple[tuple[str, str, str], ...]
    flags: tuple[str, ...] = ()


def mutant(
    name: str, bug: str, expects: str, *changes: tuple[str, str, str], flags: str = ""
) -> Mutant:
    """Return a mutant; `expects` and `flags` are words with spaces between them."""
    return Mutant(name, bug, tuple(expects.split()), changes, tuple(flags.split()))
