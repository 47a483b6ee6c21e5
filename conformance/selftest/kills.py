"""Which rule catches which mutant: the record, and the table of it in the documentation."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from conformance.manifest import FAILING, manifest
from conformance.selftest.mutants import MUTANTS

__all__ = ["RECORD", "Kill", "Setting", "read_kills", "to_markdown", "uncaught", "write_kills"]

RECORD: Final = Path(__file__).with_name("kills.toml")
_HEADER: Final = """\
# Which rule catches which mutant, and what to play for it. Written by
# `python -m conformance selftest --all`; `also` is what the same play shows besides.
"""

Setting = Literal["words", "model", "login"]
"""How a mutant is reached: by the words that it acts on; with a model of ours behind it; with a
login first, as it demands."""


class Kill(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a mutant was caught."""

    rule: str
    """The id of the rule that it breaks and the sound agent keeps."""
    scenario: str
    """What to play so that it shows."""
    setting: Setting = "words"
    also: tuple[str, ...] = ()
    """Other rules that it breaks there."""
    says: str = ""
    """What the suite said of it; not in the record, since it differs from time to time."""


def read_kills(path: Path = RECORD) -> dict[str, Kill]:
    """Return the record by mutant.

    Raises:
        ValueError: It is no record.
        OSError: It cannot be read.
    """
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, Kill])


def write_kills(kills: Mapping[str, Kill], path: Path = RECORD) -> None:
    """Write the record, the mutants in their usual order.

    Raises:
        OSError: It cannot be written.
    """
    sections = [_section(name, kills[name]) for name in MUTANTS if name in kills]
    path.write_text("\n".join([_HEADER, *sections]), encoding="utf-8")


def uncaught(kills: Mapping[str, Kill]) -> list[str]:
    """Return the rules whose breach is a failure and that no mutant has been seen to break.

    Mutants are reached over stdio, so that rules for other transports are not among them.
    """
    broken = {rule for kill in kills.values() for rule in (kill.rule, *kill.also)}
    return [
        rule.id
        for rule in manifest().values()
        if rule.level in FAILING and "stdio" in rule.transports and rule.id not in broken
    ]


def to_markdown(kills: Mapping[str, Kill]) -> str:
    """Return the record as a table with a line about it."""
    n_caught = sum(name in kills for name in MUTANTS)
    lines = [
        f"{n_caught} of {len(MUTANTS)} mutants are caught ({100 * n_caught / len(MUTANTS):.1f} %).",
        "",
        "| mutant | its bug | caught by | level |",
        "|---|---|---|---|",
    ]
    for name, mutant in MUTANTS.items():
        kill = kills.get(name)
        caught = "nobody | " if kill is None else f"{kill.rule} | {manifest()[kill.rule].level}"
        lines.append(f"| `{name}` | {mutant.bug} | {caught} |")
    return "\n".join(lines) + "\n"


def _section(name: str, kill: Kill) -> str:
    lines = [f"[{name}]", f'rule = "{kill.rule}"', f'scenario = "{kill.scenario}"']
    if kill.setting != "words":
        lines.append(f'setting = "{kill.setting}"')
    if kill.also:
        lines.append("also = [" + ", ".join(f'"{rule}"' for rule in kill.also) + "]")
    return "\n".join(lines) + "\n"
