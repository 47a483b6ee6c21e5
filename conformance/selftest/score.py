"""How good the suite is: which mutants of the sound agent it tells from the sound agent."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Final

import anyio
import msgspec
from msgspec import Struct

from conformance.manifest import FAILING, manifest
from conformance.runner import run, select
from conformance.scenarios import SCENARIOS, Scenario, load
from conformance.selftest.build import command
from conformance.selftest.kills import Kill, Setting
from conformance.selftest.mutants import MUTANTS, Mutant
from conformance.target import Target
from conformance.verdicts import Report

__all__ = ["Baseline", "Score", "likely", "play_mutant", "score", "settings_of"]

TIMEOUT_S: Final = 4.0
"""For one answer of a mutant. Many a mutant is one because it never answers."""
PATIENT_S: Final = 10.0
"""For one answer of the sound agent."""
MORE_PLAYS: Final = 12
"""How many scenarios more a mutant that was caught is played for the rule that it was made for."""
LOGIN: Final = "local"
MODEL_AREAS: Final = frozenset({"history", "model", "model-connection", "retry"})
_RULE: Final = re.compile(r"[A-Z]{3}-\d\d")

Progress = Callable[[str, Kill | None], None]
"""Called with a mutant and how it was caught, if it was."""


class Baseline(Struct, frozen=True):
    """What the sound agent came to, in one setting."""

    kept: frozenset[str]
    """Also the rules that are about what it does not offer."""
    broken: dict[str, str]
    """What the suite says against it, by rule. A mistake of the suite's, or of that agent's."""


class Score(Struct, kw_only=True):
    """What came of the mutants."""

    played: list[str]
    kills: dict[str, Kill]
    sound: dict[str, str] = {}
    """What the suite said against the sound agent, by rule."""

    @property
    def survivors(self) -> list[str]:
        """The mutants that nobody caught."""
        return [name for name in self.played if name not in self.kills]

    @property
    def rate(self) -> float:
        """The part of the mutants that was caught, from 0 to 1."""
        return len(self.kills) / max(1, len(self.played))


def settings_of(mutant: Mutant) -> tuple[Setting, ...]:
    """Return the settings in which its bug may show, the likeliest first."""
    if mutant.flags:
        return ("login", "words")
    return ("model", "words") if MODEL_AREAS & set(mutant.expects) else ("words",)


def likely(mutant: Mutant) -> list[Scenario]:
    """Return the scenarios of a run, those first that are about what the mutant is about.

    First come those that tell about a rule that the mutant names, then those in whose words the
    areas are found that it names, and of equals the quick ones.
    """
    return sorted(select(()), key=lambda each: -_likeness(mutant, each))


async def score(
    names: Sequence[str],
    record: Mapping[str, Kill],
    *,
    plays_all: bool = False,
    jobs: int | None = None,
    progress: Progress = lambda name, kill: None,
) -> Score:
    """Play the sound agent, then mutants, several at a time.

    Cancellation: safe; every process that was started is ended first.

    Args:
        names: Mutants.
        record: What to play for each. Those that it does not have survive, unless `plays_all`.
        plays_all: Play everything to whom the record does not catch, until something does.
        jobs: How many mutants at a time.
        progress: Told of each mutant when it is through.
    """
    load()
    result = Score(played=list(names), kills={})
    is_whole = plays_all or set(names) == set(MUTANTS)
    baselines: dict[tuple[tuple[str, ...], Setting], Baseline] = {}
    for (flags, setting), chosen in _wanted(names, record, is_whole=is_whole).items():
        baseline = baselines[flags, setting] = await _baseline(flags, setting, chosen)
        result.sound |= baseline.broken
    queue = list(names)

    async def work() -> None:
        while queue:
            name = queue.pop(0)
            mutant = MUTANTS[name]
            kept = {
                setting: baselines[mutant.flags, setting].kept
                for setting in settings_of(mutant)
                if (mutant.flags, setting) in baselines
            }
            kill = await play_mutant(mutant, record.get(name), kept, plays_all=plays_all)
            if kill is not None:
                result.kills[name] = kill
            progress(name, kill)

    async with anyio.create_task_group() as tasks:
        for _ in range(min(jobs or 2 * (os.cpu_count() or 1), len(queue))):
            tasks.start_soon(work)
    return result


async def play_mutant(
    mutant: Mutant,
    recorded: Kill | None,
    kept: Mapping[Setting, frozenset[str]],
    *,
    plays_all: bool = False,
) -> Kill | None:
    """Play a mutant until it is caught.

    Cancellation: safe.

    Args:
        mutant: Who is played.
        recorded: What caught it before; played first.
        kept: The rules that the sound agent keeps, by setting.
        plays_all: Play everything else if that does not catch it. What then catches it has to do so
            twice, and must not catch the sound agent.

    Returns:
        What caught it, or `None`.
    """
    load()
    if recorded is not None and recorded.scenario in SCENARIOS and recorded.setting in kept:
        scenario, setting = SCENARIOS[recorded.scenario], recorded.setting
        report = await _play(mutant.name, (), scenario, setting)
        kill = _kill(report, scenario, setting, kept[setting], (recorded.rule,))
        if kill is not None and kill.rule == recorded.rule:
            return kill
    if not plays_all:
        return None
    wanted = tuple(word for word in mutant.expects if _RULE.fullmatch(word))
    found: Kill | None = None
    n_more = MORE_PLAYS if wanted else 0
    for setting, rules in kept.items():
        for scenario in likely(mutant):
            if found is not None and n_more <= 0:
                return found
            n_more -= found is not None
            report = await _play(mutant.name, (), scenario, setting)
            kill = _kill(report, scenario, setting, rules, wanted)
            if kill is None or (found is not None and kill.rule not in wanted):
                continue
            kill = await _confirmed(mutant, kill, rules)
            if kill is not None and kill.rule in wanted:
                return kill
            found = found or kill
    return found


async def _confirmed(mutant: Mutant, kill: Kill, kept: frozenset[str]) -> Kill | None:
    """Return what shows again, and not with the sound agent: the machine may just be slow."""
    scenario, setting, wanted = SCENARIOS[kill.scenario], kill.setting, (kill.rule,)
    control = await _play(None, mutant.flags, scenario, setting)
    if _kill(control, scenario, setting, kept, wanted) is not None:
        return None
    again = await _play(mutant.name, (), scenario, setting)
    second = _kill(again, scenario, setting, kept, wanted)
    if second is None or second.rule != kill.rule:
        return None
    both = tuple(rule for rule in kill.also if rule in second.also)
    return msgspec.structs.replace(kill, also=both)


def _wanted(
    names: Sequence[str], record: Mapping[str, Kill], *, is_whole: bool
) -> dict[tuple[tuple[str, ...], Setting], list[Scenario]]:
    """Return what is to be played to the sound agent, by its flags and the setting."""
    if is_whole:
        return {
            (MUTANTS[name].flags, setting): select(())
            for name in names
            for setting in settings_of(MUTANTS[name])
        }
    wanted: dict[tuple[tuple[str, ...], Setting], dict[str, Scenario]] = {}
    for name in names:
        kill = record.get(name)
        if kill is not None and kill.scenario in SCENARIOS:
            chosen = wanted.setdefault((MUTANTS[name].flags, kill.setting), {})
            chosen[kill.scenario] = SCENARIOS[kill.scenario]
    return {key: list(chosen.values()) for key, chosen in wanted.items()}


async def _baseline(
    flags: tuple[str, ...], setting: Setting, chosen: Sequence[Scenario]
) -> Baseline:
    with _target(None, flags, setting) as target:
        patient = msgspec.structs.replace(target, timeout_s=PATIENT_S)
        report = await run(patient, chosen)
    broken = {
        each.rule: each.says for each in report.verdicts if each.status in ("fail", "warn", "error")
    }
    return Baseline(
        frozenset(each.rule for each in report.verdicts if each.status in ("pass", "skip")), broken
    )


async def _play(
    name: str | None, flags: tuple[str, ...], scenario: Scenario, setting: Setting
) -> Report:
    """Play one scenario to a mutant, or to the sound agent, with the patience for mutants."""
    with _target(name, flags, setting) as target:
        return await run(target, [scenario], jobs=1)


@contextmanager
def _target(name: str | None, flags: tuple[str, ...], setting: Setting) -> Iterator[Target]:
    """Yield how to reach a mutant, or the sound agent; it starts in a folder that goes away."""
    with TemporaryDirectory(prefix="acp-selftest-", ignore_cleanup_errors=True) as folder:
        yield Target(
            command=tuple(command(name, *flags)),
            cwd=folder,
            scripts_model=setting == "model",
            auth_method=LOGIN if setting == "login" else "",
            may_log_out=setting == "login",
            timeout_s=TIMEOUT_S,
        )


def _kill(
    report: Report,
    scenario: Scenario,
    setting: Setting,
    kept: frozenset[str],
    wanted: Sequence[str],
) -> Kill | None:
    """Return what is broken here that the sound agent keeps: what was wanted, or the worst."""
    broken = {
        each.rule: each.says
        for each in report.verdicts
        if each.status in ("fail", "warn") and each.rule in kept
    }
    if not broken:
        return None
    rule = min(
        broken,
        key=lambda each: (
            each not in wanted,
            manifest()[each].level not in FAILING,
            each not in scenario.rules,
            each,
        ),
    )
    also = tuple(sorted(broken.keys() - {rule}))
    return Kill(rule=rule, scenario=scenario.name, setting=setting, also=also, says=broken[rule])


def _likeness(mutant: Mutant, scenario: Scenario) -> float:
    told = " ".join(
        (
            scenario.play.__module__.rpartition(".")[2],
            scenario.name,
            scenario.says,
            *(f"{manifest()[rule].area} {manifest()[rule].says}" for rule in scenario.rules),
        )
    )
    words = {word.rstrip("s") for word in re.findall("[a-z]+", told.lower())}
    likeness = 0.5 * scenario.is_quick - (scenario.limit_s or 0) / 1000
    for word in mutant.expects:
        if word in scenario.rules:
            likeness += 100
        likeness += sum(part.rstrip("s") in words for part in word.lower().split("-"))
    return likeness
