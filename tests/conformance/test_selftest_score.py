from __future__ import annotations

from io import StringIO
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from conformance import judges, scenarios
from conformance.cli import main
from conformance.cli_selftest import GOOD_RATE, show_score
from conformance.manifest import FAILING, manifest
from conformance.runner import select
from conformance.scenarios import SCENARIOS
from conformance.selftest import build
from conformance.selftest import score as scoring
from conformance.selftest.kills import Kill, read_kills, to_markdown, uncaught, write_kills
from conformance.selftest.mutants import MUTANTS
from conformance.selftest.score import Score, likely, score, settings_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
MARKERS = "<!-- kills -->", "<!-- /kills -->"
LIMIT_S = 120.0


@pytest.fixture
def record() -> dict[str, Kill]:
    scenarios.load()
    return read_kills()


def sample(record: dict[str, Kill]) -> list[str]:
    """One mutant for each area of rules: the first that a quick scenario catches, if one does."""
    chosen: dict[str, str] = {}
    for name, kill in sorted(record.items(), key=lambda each: not is_quick(each[1])):
        chosen.setdefault(manifest()[kill.rule].area, name)
    return list(chosen.values())


def is_quick(kill: Kill) -> bool:
    return SCENARIOS[kill.scenario].is_quick and kill.setting == "words"


def play(names: list[str], record: dict[str, Kill], *, plays_all: bool = False) -> Score:
    async def playing() -> Score:
        with anyio.fail_after(LIMIT_S):
            return await score(names, record, plays_all=plays_all)

    return anyio.run(playing)


def shown(result: Score, *, is_whole: bool = False) -> tuple[int, str]:
    out = StringIO()
    code = show_score(Console(file=out, width=120), result, is_whole=is_whole)
    return code, out.getvalue()


def test_a_mutant_of_each_area_is_caught_by_what_the_record_says(record):
    names = sample(record)
    assert len(names) >= 15
    result = play(names, record)
    assert result.sound == {}
    assert {name: kill.rule for name, kill in result.kills.items()} == {
        name: record[name].rule for name in names
    }
    assert result.rate == 1.0
    code, text = shown(result)
    assert code == 0
    assert "100.0%" in text


def test_the_sound_agent_in_the_place_of_mutants_survives(record, monkeypatch):
    monkeypatch.setattr(scoring, "command", lambda name, *flags: build.command(None, *flags))
    names = [name for name in sample(record) if is_quick(record[name])][:6]
    result = play(names, record)
    assert result.survivors == names
    code, text = shown(result)
    assert code == 1
    assert text.count("nobody") == len(names)


def test_a_mutant_that_the_record_does_not_have_survives_until_everything_is_played(record):
    name = "banner"
    assert play([name], {}).survivors == [name]
    wrong = Kill(rule="PRM-01", scenario="prompts_one_after_another")
    assert play([name], {name: wrong}).survivors == [name]
    assert play([name], {name: Kill(rule="PRM-01", scenario="is_gone")}).survivors == [name]
    found = play([name], {}, plays_all=True)
    assert found.kills.keys() == {name}
    assert found.sound == {}


def test_the_record_names_what_there_is_and_what_can_be_seen(record):
    for name, kill in record.items():
        assert name in MUTANTS
        assert kill.setting in settings_of(MUTANTS[name])
        named = {*SCENARIOS[kill.scenario].rules, *judges.rules()}
        assert {kill.rule, *kill.also} <= named
        assert all(manifest()[rule].level != "info" for rule in (kill.rule, *kill.also))


def test_nearly_every_mutant_is_in_the_record(record):
    assert len(record) / len(MUTANTS) >= GOOD_RATE


def test_every_rule_that_can_fail_an_agent_catches_a_mutant(record):
    assert uncaught(record) == []
    some = next(rule.id for rule in manifest().values() if rule.level in FAILING)
    left = {name: kill for name, kill in record.items() if some not in (kill.rule, *kill.also)}
    assert uncaught(left) == [some]


def test_the_record_is_read_as_it_was_written(record, tmp_path):
    path = tmp_path / "kills.toml"
    write_kills(record, path)
    assert read_kills(path) == record
    path.write_text("[banner]\nrule = 3\n", encoding="utf-8")
    with pytest.raises(ValueError, match="rule"):
        read_kills(path)


def test_what_a_mutant_is_about_is_played_first():
    for name, module in (("ignores-cancel", "cancel"), ("mode-in-vain", "options")):
        first = likely(MUTANTS[name])
        assert module in first[0].play.__module__
        assert len(first) == len(select(()))


def test_a_score_is_good_only_if_the_sound_agent_is_and_enough_is_caught(record):
    whole = Score(played=list(MUTANTS), kills=dict(record))
    assert shown(whole, is_whole=True)[0] == 0
    whole.sound = {"CAN-01": "it was not cancelled"}
    code, text = shown(whole, is_whole=True)
    assert code == 1
    assert "the sound agent breaks CAN-01" in text
    few = Score(played=list(MUTANTS), kills=dict(list(record.items())[: len(MUTANTS) // 2]))
    assert shown(few)[0] == 1


def test_the_document_has_the_table_of_the_record(record, capsys):
    assert main(["selftest", "--markdown"]) == 0
    table = capsys.readouterr().out
    assert table == to_markdown(record)
    begin, end = MARKERS
    shown = DOCUMENT.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    assert shown.strip() == table.strip()


def test_a_mutant_that_is_not_there_is_a_wrong_usage_with_a_hint(capsys):
    assert main(["selftest", "baner"]) == 2
    assert "did you mean banner" in capsys.readouterr().err
