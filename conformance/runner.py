"""Plays scenarios, several at a time, and judges all that was said."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import msgspec
from msgspec import Struct

from conformance import judges, scenarios
from conformance.agents import Agents, Shared
from conformance.conversation import Conversation
from conformance.manifest import manifest
from conformance.scenarios import SCENARIOS, Scenario
from conformance.scripted_model import KEY, ScriptedModel
from conformance.target import Prompter, Target
from conformance.trace import WireError
from conformance.trial import NotBroughtAbout, Skipped, Trial
from conformance.verdicts import Agent, Observation, Report, Transcript, verdicts
from conformance.wire import Wire

__all__ = ["LIMIT_S", "Progress", "judge_transcripts", "run", "select"]

LISTEN_LIMIT_S: Final = 20.0
"""Seconds that a server of the agent's has to listen."""
LIMIT_S: Final = 20.0
"""Seconds a scenario may take where it does not say itself."""

Progress = Callable[[str, bool], None]
"""Called with a scenario's name when it begins and, with true, when it has ended."""


class _Run(Struct):
    """What the workers share."""

    agents: Agents
    queue: list[Scenario]
    playing: dict[str, None] = {}
    observations: list[Observation] = []
    latencies_ms: dict[str, list[float]] = {}


def select(words: Sequence[str], *, is_quick: bool = False) -> list[Scenario]:
    """Return the scenarios to play, the long ones first.

    Args:
        words: Names of scenarios, ids of rules or the beginnings of either; all if empty.
        is_quick: Take the short form only.

    Raises:
        ValueError: A word means nothing.
    """
    scenarios.load()
    chosen = [
        each for each in SCENARIOS.values() if each.is_on_demand or each.is_quick or not is_quick
    ]
    for word in words:
        if not any(_is_meant(each, word) for each in chosen):
            raise ValueError(f"no scenario and no rule begins with {word!r}")
    if words:
        chosen = [each for each in chosen if any(_is_meant(each, word) for word in words)]
    else:
        chosen = [each for each in chosen if not each.is_on_demand]
    return sorted(chosen, key=lambda each: -(each.limit_s or 0))


async def run(
    target: Target,
    chosen: Sequence[Scenario],
    *,
    jobs: int | None = None,
    limit_s: float | None = None,
    progress: Progress = lambda name, is_over: None,
) -> Report:
    """Judge an agent.

    Cancellation: safe; every process that was started is ended first.

    Args:
        target: Who is judged.
        chosen: The scenarios to play, in this order.
        jobs: How many scenarios to play at a time.
        limit_s: Seconds for all of it; scenarios that did not begin by then are not played.
        progress: Told what happens.

    Raises:
        WireError: The server that is to be started for the target's address does not listen.
    """
    started, started_s = datetime.now(UTC), time.monotonic()
    notes: list[str] = []
    state: _Run | None = None
    with TemporaryDirectory(prefix="acp-conformance-", ignore_cleanup_errors=True) as name:
        folder = await anyio.Path(name).resolve()
        with anyio.move_on_after(limit_s if limit_s is not None else float("inf")) as scope:
            async with (
                _pointed(target) as (pointed, prompter),
                _served(pointed, Path(folder)),
                anyio.create_task_group() as tasks,
            ):
                state = _Run(Agents(pointed, tasks), list(chosen))
                for index in range(min(jobs or 2 * (os.cpu_count() or 1), len(chosen))):
                    tasks.start_soon(_work, state, Path(folder) / f"{index}", prompter, progress)
        if scope.cancelled_caught:
            notes.append(f"the time was up after {limit_s:g} s, before the end of {_rest(state)}")
    if state is None:
        raise WireError(notes[0])
    if state.agents.left_behind:
        gone_on = ", ".join(map(str, sorted(state.agents.left_behind)))
        notes.append(f"these processes of the agent's could not be ended: {gone_on}")
    report = judge_transcripts(
        state.agents.transcripts,
        target=target,
        observations=state.observations,
        also={rule for each in chosen for rule in each.rules},
    )
    if not report.is_judged and state.agents.first_failure:
        report.notes.append(f"the first time: {state.agents.first_failure}")
    report.started = started.isoformat(timespec="seconds")
    report.duration_s = time.monotonic() - started_s
    report.latencies_ms = state.latencies_ms
    report.notes[:0] = notes
    return report


def _rest(state: _Run | None) -> str:
    if state is None:
        return "its own start"
    return ", ".join([*state.playing, *(each.name for each in state.queue)])


@asynccontextmanager
async def _pointed(target: Target) -> AsyncIterator[tuple[Target, Prompter | None]]:
    """Point the agent at a model of ours while the block runs, if that is wanted."""
    if not target.scripts_model:
        yield target, None
        return
    async with ScriptedModel.serving() as model:

        def fill(text: str) -> str:
            return text.replace("{model_url}", model.url).replace("{model_key}", KEY)

        env = {**model.env, **{name: fill(value) for name, value in target.env.items()}}
        command = tuple(fill(word) for word in target.command)
        yield msgspec.structs.replace(target, env=env, command=command), model


@asynccontextmanager
async def _served(target: Target, folder: Path) -> AsyncIterator[None]:
    """Have what serves at the target's address run while the block does, if it is ours to start.

    Raises:
        WireError: It ends at once, or does not listen in time.
    """
    if not target.url or not target.command:
        yield
        return
    if await _listens(target.url):
        raise WireError(f"something else listens at {target.url}")
    home = folder / "home of the server"
    home.mkdir()
    command, env = target.command, target.environment(home)
    async with Wire.spawn(command, cwd=target.cwd or None, env=env) as server:
        with anyio.move_on_after(LISTEN_LIMIT_S):
            while server.exit_code is None and not await _listens(target.url):  # noqa: ASYNC110
                await anyio.sleep(0.05)  # nobody tells when it does
        if server.exit_code is not None or not await _listens(target.url):
            raise WireError(f"nothing listens at {target.url}: {server.stderr.strip()[-200:]}")
        yield


async def _listens(url: str) -> bool:
    place = urlsplit(url)
    port = place.port or (443 if place.scheme in ("wss", "https") else 80)
    try:
        stream = await anyio.connect_tcp(place.hostname or "localhost", port)
    except OSError:
        return False
    await stream.aclose()
    return True


def judge_transcripts(
    transcripts: dict[str, Transcript],
    *,
    target: Target | None = None,
    observations: Sequence[Observation] = (),
    also: AbstractSet[str] = frozenset(),
) -> Report:
    """Judge what was said, whoever recorded it. Pure.

    Args:
        transcripts: By a name for each connection.
        target: Who was judged, where that is known.
        observations: What was seen besides.
        also: Rules to speak of besides those that the judges know.
    """
    target = target or Target()
    agent = _agent(target, transcripts.values())
    rules = {key: rule for key, rule in manifest().items() if key in also or key in judges.rules()}
    seen = [*observations, *_judged(transcripts)]
    is_judged = agent.protocol_version is not None or (
        bool(target.url or _spoke(transcripts.values()))  # frames and statuses are no transcript
        and any(each.sight == "kept" for each in seen)
    )
    return Report(
        agent=agent,
        transport=target.transport,
        started="",
        duration_s=0.0,
        verdicts=verdicts(rules, seen, transport=target.transport),
        transcripts=transcripts,
        notes=[] if is_judged else [_silence(transcripts.values())],
        is_judged=is_judged,
    )


async def _work(state: _Run, folder: Path, prompter: Prompter | None, progress: Progress) -> None:
    """Play what is in the queue, until it is empty."""
    shared = Shared(state.agents, folder)
    try:
        while state.queue:
            scenario = state.queue.pop(0)
            progress(scenario.name, False)
            state.playing[scenario.name] = None
            trial = Trial(
                scenario, state.agents, folder / scenario.name, shared=shared, prompter=prompter
            )
            await _play(trial)
            state.observations.extend(trial.observations)
            for what, times_ms in trial.latencies_ms.items():
                state.latencies_ms.setdefault(what, []).extend(times_ms)
            if shared.is_spoilt or not shared.is_as_it_was:  # one mistake is not blamed on many
                await shared.end()
            progress(scenario.name, True)
            del state.playing[scenario.name]
    finally:
        await shared.end()


async def _play(trial: Trial) -> None:
    """Play one scenario to its end, whatever the agent does."""
    limit_s = trial.scenario.limit_s or LIMIT_S
    try:
        with anyio.move_on_after(limit_s) as scope:
            await trial.scenario.play(trial)
        if scope.cancelled_caught:
            trial.see_rest("unseen", f"the scenario did not come to its end within {limit_s:g} s")
            trial.spoil()
    except Skipped as exc:
        trial.see_rest("skipped", str(exc))
    except NotBroughtAbout as exc:
        trial.see_rest("unseen", str(exc))
    except WireError as exc:
        trial.see_rest("unseen", f"it did not get that far: {exc.reason}")
    except Exception as exc:  # whatever a scenario meets, the others are played
        where = _place(exc)
        trial.see_rest("error", f"the suite failed in {where}: {type(exc).__name__}: {exc}")
    else:
        trial.see_rest("unseen", "the scenario ended before it could tell")
    finally:
        await trial.end()
    if any(each.sight in ("broken", "error") for each in trial.observations):
        trial.spoil()


def _place(exc: Exception) -> str:
    """Return file and line of the innermost frame."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        "nowhere"
        if trace is None
        else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
    )


def _judged(transcripts: dict[str, Transcript]) -> Iterable[Observation]:
    for key, transcript in transcripts.items():
        for finding in judges.findings(
            Conversation(transcript.entries, has_died=transcript.has_died)
        ):
            yield Observation(
                rule=finding.rule,
                sight="broken" if finding.wrong else "kept",
                says=finding.wrong,
                scenario=transcript.scenario_at(finding.at),
                transcript=key,
                at=finding.at,
            )


def _agent(target: Target, transcripts: Iterable[Transcript]) -> Agent:
    """Say who was judged, by its own first words."""
    agent = Agent(command=target.command, url=target.url)
    for transcript in transcripts:
        call = Conversation(transcript.entries).initialized
        if call is None or call.result is None:
            continue
        info, version = call.result.get("agentInfo"), call.result.get("protocolVersion")
        names: dict[str, Any] = info if isinstance(info, dict) else {}
        agent.name, agent.version = str(names.get("name", "")), str(names.get("version", ""))
        agent.protocol_version = version if isinstance(version, int) else None
        capabilities = call.result.get("agentCapabilities")
        agent.capabilities = capabilities if isinstance(capabilities, dict) else {}
        if agent.protocol_version is not None:
            return agent
    return agent


def _spoke(transcripts: Iterable[Transcript]) -> bool:
    """Say whether the agent has said anything in JSON-RPC."""
    return any(
        entry.direction == "received" and entry.message is not None and "jsonrpc" in entry.message
        for transcript in transcripts
        for entry in transcript.entries
    )


def _silence(transcripts: Iterable[Transcript]) -> str:
    """Say why there was nobody to judge."""
    for transcript in transcripts:
        if transcript.exit_code is not None and transcript.has_died:
            logged = transcript.stderr.strip().splitlines()[-1:]
            last = f"; the last line on stderr: {logged[0]}" if logged else ""
            return (
                f"the agent never answered initialize; it ended with {transcript.exit_code}{last}"
            )
    return "the agent never answered initialize"


def _is_meant(scenario: Scenario, word: str) -> bool:
    """Say whether a scenario can tell about a word; what is judged anyway, every one can."""
    rules = (*scenario.rules, *(() if scenario.is_on_demand else judges.rules()))
    return scenario.name.startswith(word) or any(each.startswith(word.upper()) for each in rules)
