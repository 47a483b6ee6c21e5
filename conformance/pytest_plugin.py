"""A pytest plugin: ``pytest --acp-agent "COMMAND"`` has a test for each rule.

The agent is judged once, when the first of these tests runs. A rule that the protocol demands fails
its test when it is broken; one that is advised, and what could not be brought about, is skipped
with the reason, or fails too with ``--acp-strict``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from conformance.target import Target
    from conformance.verdicts import Report, Verdict

__all__ = ["acp_agent"]

_REPORT: Final[pytest.StashKey[Report]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("acp", "Agent Client Protocol conformance")
    group.addoption("--acp-agent", metavar="COMMAND", help="judge the agent that this starts")
    group.addoption("--acp-prompts", metavar="FILE", help="what to say to it, as JSON")
    group.addoption("--acp-quick", action="store_true", help="the short form")
    group.addoption(
        "--acp-strict", action="store_true", help="what is only advised fails its test as well"
    )


@pytest.fixture(scope="session")
def acp_agent(request: pytest.FixtureRequest) -> list[str]:
    """The command of the agent that is judged, for tests of your own with `conformance.wire`."""
    command = request.config.getoption("--acp-agent")
    if not command:
        pytest.skip("no --acp-agent was given")
    return shlex.split(command)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each rule, if an agent was named."""
    if not config.getoption("--acp-agent"):
        return
    _target(config)  # what is wrong with the options is said before anything runs
    collector: _Agent = _Agent.from_parent(session, name="acp-agent", nodeid="acp-agent")
    items.extend(collector.collect())


class _Agent(pytest.Collector):
    """The agent that was named."""

    def collect(self) -> Iterator[_RuleItem]:
        from conformance import judges
        from conformance.manifest import manifest
        from conformance.runner import select

        chosen = select([], is_quick=self.config.getoption("--acp-quick"))
        wanted = judges.rules().union(*(each.rules for each in chosen))
        for rule in manifest().values():
            if rule.id in wanted:
                yield _RuleItem.from_parent(self, name=rule.id)

    def report(self) -> Report:
        """Judge the agent, or return what that came to."""
        import anyio

        from conformance.runner import run, select

        found = self.config.stash.get(_REPORT, None)
        if found is None:
            chosen = select([], is_quick=self.config.getoption("--acp-quick"))
            target = _target(self.config)
            found = anyio.run(lambda: run(target, chosen))
            self.config.stash[_REPORT] = found
        return found


class _RuleItem(pytest.Item):
    """One rule."""

    def runtest(self) -> None:
        assert isinstance(self.parent, _Agent)
        report = self.parent.report()
        if not report.is_judged:
            pytest.fail("; ".join(report.notes), pytrace=False)
        verdict = next(each for each in report.verdicts if each.rule == self.name)
        if verdict.status == "error" or verdict.status == "fail":
            pytest.fail(_told(report, verdict), pytrace=False)
        if verdict.status == "warn" and self.config.getoption("--acp-strict"):
            pytest.fail(_told(report, verdict), pytrace=False)
        if verdict.status in ("warn", "skip", "inconclusive"):
            pytest.skip(f"{verdict.status}: {verdict.says}")

    def reportinfo(self) -> tuple[str, int | None, str]:
        from conformance.manifest import manifest

        return "acp-agent", None, f"{self.name} {manifest()[self.name].says}"


def _target(config: pytest.Config) -> Target:
    from pathlib import Path

    from conformance.target import Target, read_words

    prompts: Any = config.getoption("--acp-prompts")
    try:
        words = None if prompts is None else read_words(Path(prompts))
    except (ValueError, OSError) as exc:
        raise pytest.UsageError(f"--acp-prompts: {exc}") from None
    return Target(command=tuple(shlex.split(config.getoption("--acp-agent"))), words=words)


def _told(report: Report, verdict: Verdict) -> str:
    """Say what is wrong, with what was said and how to see it again."""
    from conformance.manifest import manifest
    from conformance.reports.excerpt import excerpt, repro

    rule = manifest()[verdict.rule]
    lines = [
        f"{line.time_s:8.3f} {'-->' if line.direction == 'sent' else '<--'} {line.text}"
        for line in excerpt(report, verdict)
    ]
    return "\n".join(
        [f"{rule.id} {rule.says}", verdict.says, rule.address, repro(report, verdict), *lines]
    )
