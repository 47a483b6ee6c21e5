"""What an agent's authors know already: rules that it breaks for now, each with a reason."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec
from msgspec import Struct

from conformance.manifest import manifest
from conformance.verdicts import Report

__all__ = ["Expected", "excuse", "read_baseline"]


class Expected(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule that is known to be broken."""

    rule: str
    reason: str
    owner: str = ""
    until: date | None = None
    """The last day on which it counts; for ever without one."""


class _File(Struct, forbid_unknown_fields=True):
    expected: list[Expected] = []


def read_baseline(path: Path) -> list[Expected]:
    """Read a baseline: TOML with ``[[expected]]`` tables of rule, reason, owner and until.

    Raises:
        ValueError: It is none, names a rule that nobody knows, or gives no reason; says which.
        OSError: It cannot be read.
    """
    try:
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as exc:
        raise ValueError(f"{path} is no baseline: {exc}") from None
    for each in file.expected:
        if each.rule not in manifest():
            raise ValueError(f"{path}: there is no rule {each.rule}")
        if not each.reason.strip():
            raise ValueError(f"{path}: {each.rule} has no reason")
    return file.expected


def excuse(report: Report, expected: Sequence[Expected], today: date) -> None:
    """Excuse what was expected; note what was expected and passes, or is excused no longer."""
    by_rule = {each.rule: each for each in expected}
    for index, verdict in enumerate(report.verdicts):
        known = by_rule.get(verdict.rule)
        if known is None:
            continue
        if verdict.status not in ("fail", "warn"):
            if verdict.status == "pass":
                report.notes.append(
                    f"{verdict.rule} passes now; take it out of the baseline ({known.reason})"
                )
        elif known.until is not None and known.until < today:
            report.notes.append(f"{verdict.rule} was excused until {known.until}: {known.reason}")
        else:
            report.verdicts[index] = msgspec.structs.replace(verdict, excuse=known.reason)
