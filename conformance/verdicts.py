"""What was observed, and what follows from it for each rule and for the agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from msgspec import Struct, field

from conformance.manifest import FAILING, Rule
from conformance.trace import Entry

__all__ = [
    "EXERCISED",
    "Agent",
    "Observation",
    "Report",
    "Status",
    "Transcript",
    "Verdict",
    "verdicts",
]

Status = Literal["pass", "fail", "warn", "info", "skip", "inconclusive", "error"]
"""Kept; broken where the protocol demands it; broken elsewhere; recorded; not advertised, or not
for this transport; not brought about; the suite itself failed."""

EXERCISED: Final[frozenset[Status]] = frozenset({"pass", "fail", "warn", "info"})
"""The statuses of rules that the agent was in fact held against."""

Sight = Literal["kept", "broken", "recorded", "skipped", "unseen", "error"]


class Observation(Struct, frozen=True, kw_only=True):
    """One thing that was seen, or could not be."""

    rule: str
    sight: Sight
    says: str = ""
    """What was wrong or noteworthy, in one line; nothing when it was as it should be."""
    scenario: str = ""
    """What was played when it was seen; empty when nobody played anything."""
    transcript: str = ""
    """The key in `Report.transcripts` of what was said meanwhile."""
    at: int | None = None
    """The index there of the entry that shows it."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What the suite says about one rule."""

    rule: str
    status: Status
    says: str = ""
    """Why, in one line; empty for a pass."""
    observations: tuple[Observation, ...] = ()
    """Those that decided it, worst first."""
    excuse: str = ""
    """The reason in the baseline file why this is expected."""


class Transcript(Struct, kw_only=True):
    """What went over one connection."""

    entries: list[Entry] = []
    chapters: list[tuple[int, str]] = []
    """From which entry on it is about which scenario."""
    stderr: str = ""
    exit_code: int | None = None
    """The agent's, `None` if it was still running at the end or is none of ours."""
    has_died: bool = False
    """Whether it ended, or the connection, while nobody had ended it."""

    def scenario_at(self, at: int) -> str:
        """Return the scenario that an entry belongs to, or nothing."""
        return next((name for first, name in reversed(self.chapters) if first <= at), "")


class Agent(Struct, kw_only=True):
    """Who was judged."""

    command: tuple[str, ...] = ()
    url: str = ""
    name: str = ""
    version: str = ""
    protocol_version: int | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)


class Report(Struct, kw_only=True):
    """One run."""

    agent: Agent
    transport: str
    started: str
    """ISO 8601, UTC."""
    duration_s: float
    verdicts: list[Verdict]
    transcripts: dict[str, Transcript]
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    """By what was measured, such as the moment of a cancel."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know: the agent did not start, wants a login, the time was up."""
    is_judged: bool = True
    """Whether there was an agent to judge."""

    def count(self, *statuses: Status) -> int:
        """Return how many rules have one of these statuses."""
        return sum(verdict.status in statuses for verdict in self.verdicts)

    @property
    def n_exercised(self) -> int:
        """How many rules the agent was in fact held against."""
        return self.count(*EXERCISED)

    @property
    def n_applicable(self) -> int:
        """How many rules are about this agent on this transport."""
        return len(self.verdicts) - self.count("skip")

    @property
    def is_conformant(self) -> bool:
        """Whether no rule that the protocol demands was broken, but for excused ones."""
        return not any(each.status == "fail" and not each.excuse for each in self.verdicts)


_WORST_FIRST: Final[tuple[Sight, ...]] = (
    "broken",
    "error",
    "kept",
    "recorded",
    "skipped",
    "unseen",
)


def verdicts(
    rules: Mapping[str, Rule], observations: Iterable[Observation], *, transport: str
) -> list[Verdict]:
    """Return one verdict for each rule, in the rules' order.

    One broken rule outweighs all the times it was kept; a failure of the suite outweighs those too,
    since nobody knows what it hid.
    """
    seen: dict[str, list[Observation]] = defaultdict(list)
    for observation in observations:
        seen[observation.rule].append(observation)
    return [_verdict(rule, seen[rule.id], transport) for rule in rules.values()]


def _verdict(rule: Rule, seen: list[Observation], transport: str) -> Verdict:
    if transport not in rule.transports:
        says = f"is about {', '.join(rule.transports)} only"
        return Verdict(rule=rule.id, status="skip", says=says)
    seen.sort(key=lambda each: _WORST_FIRST.index(each.sight))
    if not seen:
        return Verdict(rule=rule.id, status="inconclusive", says="nothing in this run was about it")
    worst = seen[0]
    deciding = tuple(each for each in seen if each.sight == worst.sight)
    status = _status(rule, worst.sight)
    says = worst.says.encode("utf-8", "backslashreplace").decode()  # half characters can be said
    return Verdict(rule=rule.id, status=status, says=says, observations=deciding)


def _status(rule: Rule, sight: Sight) -> Status:
    if rule.level == "info" and sight in ("kept", "broken", "recorded"):
        return "info"
    match sight:
        case "broken":
            return "fail" if rule.level in FAILING else "warn"
        case "kept" | "recorded":
            return "pass"
        case "skipped":
            return "skip"
        case "unseen":
            return "inconclusive"
        case "error":
            return "error"
