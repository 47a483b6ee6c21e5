"""Figures, what they are held against, and the one table they are printed in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

HEADINGS = ("figure", "ours", "against", "ratio", "budget", "verdict")


@dataclass(frozen=True)
class Budget:
    """A limit for a figure or, with `is_ratio`, for its ratio to what it is held against."""

    limit: float
    is_ratio: bool = False
    is_minimum: bool = False

    def __str__(self) -> str:
        return f"{'>=' if self.is_minimum else '<='} {number(self.limit)}{'x' * self.is_ratio}"


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: What was measured, and how often.
        ours: Our figure, in `unit`.
        unit: Such as ``ms``.
        against: The same figure of something else, in `unit`.
        other: What that is.
        budget: What `ours` has to keep; `None` for a figure that is only shown.
    """

    name: str
    ours: float
    unit: str
    against: float | None = None
    other: str = ""
    budget: Budget | None = None

    @property
    def ratio(self) -> float | None:
        """Ours by the other, `None` without another."""
        return None if not self.against else self.ours / self.against

    @property
    def is_met(self) -> bool | None:
        """Whether the budget is kept; `None` without one."""
        if self.budget is None:
            return None
        value = self.ratio if self.budget.is_ratio else self.ours
        if value is None or math.isnan(value):
            return False
        limit = self.budget.limit
        return value >= limit if self.budget.is_minimum else value <= limit

    def cells(self) -> tuple[str, ...]:
        """The line, in the order of `HEADINGS`."""
        against = f"{number(self.against)} {self.unit} ({self.other})" if self.against else "-"
        return (
            self.name,
            f"{number(self.ours)} {self.unit}".rstrip(),
            against,
            "-" if self.ratio is None else f"{self.ratio:.2f}x",
            "-" if self.budget is None else str(self.budget),
            {True: "meets", False: "misses", None: "-"}[self.is_met],
        )


def at_most(limit: float) -> Budget:
    return Budget(limit)


def at_least(limit: float) -> Budget:
    return Budget(limit, is_minimum=True)


def ratio_at_least(limit: float) -> Budget:
    return Budget(limit, is_ratio=True, is_minimum=True)


def ratio_at_most(limit: float) -> Budget:
    return Budget(limit, is_ratio=True)


def number(value: float) -> str:
    """Three digits that matter, without an exponent."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else math.nan


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that so many percent do not exceed."""
    if not samples:
        return math.nan
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def render(figures: Sequence[Figure]) -> str:
    rows = [HEADINGS, *(figure.cells() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
