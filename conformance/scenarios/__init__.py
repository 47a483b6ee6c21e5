"""Scenarios: what the suite does with an agent to see whether it keeps the rules.

A module for each area, a function for each scenario. A scenario makes an agent do something and
says what it expects, rule by rule; everything that was said meanwhile is judged besides by
`conformance.judges`. What it could not bring about is inconclusive, and never passed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from conformance.trial import Trial

__all__ = ["SCENARIOS", "Scenario", "load", "scenario"]


Play = Callable[["Trial"], Awaitable[None]]


class Scenario(Struct, frozen=True, kw_only=True):
    """One scenario."""

    name: str
    says: str
    """What it does, in one sentence."""
    play: Play
    rules: tuple[str, ...]
    """All that it may observe something about."""
    is_quick: bool
    """Whether it belongs to the short form of a run."""
    is_on_demand: bool = False
    """Whether it is played only when it, or one of its rules, is named."""
    limit_s: float | None
    """Seconds it may take in all, where the usual limit is not enough."""


SCENARIOS: Final[dict[str, Scenario]] = {}
"""By name. Filled by `load`."""


def scenario(
    *rules: str,
    is_quick: bool = False,
    is_on_demand: bool = False,
    limit_s: float | None = None,
) -> Callable[[Play], Play]:
    """Register a coroutine function as a scenario. Its docstring's first line says what it does.

    Args:
        rules: All that it may observe something about.
        is_quick: Whether it belongs to the short form of a run.
        is_on_demand: Whether it is played only when it, or one of its rules, is named.
        limit_s: Seconds it may take in all, where the usual limit is not enough.
    """

    def register(play: Play) -> Play:
        says = (play.__doc__ or "").strip().partition("\n")[0]
        SCENARIOS[play.__name__] = Scenario(
            name=play.__name__,
            says=says,
            play=play,
            rules=rules,
            is_quick=is_quick,
            is_on_demand=is_on_demand,
            limit_s=limit_s,
        )
        return play

    return register


@cache
def load() -> None:
    """Import every module of scenarios, and read the cases beside them. Again does nothing."""
    from conformance.cases import load_cases

    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    load_cases([Path(__path__[0]) / "cases"])
