"""One run of one scenario: the agents it starts, and what it sees."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio

from conformance.agents import AUTH_REQUIRED, LOGIN_WANTED, Agents, Shared
from conformance.client import Client, PermissionPolicy
from conformance.scenarios import Scenario
from conformance.scripted_model import ScriptedModel
from conformance.target import REHEARSAL, Prompter, Words
from conformance.trace import Message, WireError
from conformance.verdicts import Observation, Sight
from conformance.wire import Wire

__all__ = ["Check", "NotBroughtAbout", "Skipped", "Trial"]

FIRST_RULE: Final = "INI-01"
"""The one that tells of an agent that does not even answer initialize."""
ACTS_ON_WORDS: Final = frozenset({"acp-agent", "acp-reference-agent"})


class Skipped(Exception):
    """The agent does not offer what the scenario is about."""


class NotBroughtAbout(Exception):
    """The agent did not do what the scenario needs it to do."""


class _Wrong(Exception):
    """A check failed; everything behind it in its block is moot."""


class Check:
    """What a block of a scenario holds the agent to. Made by `Trial.expect`."""

    def that(self, is_so: object, otherwise: str) -> None:
        """Go on if `is_so`; else the rule is broken, and `otherwise` says how in one line."""
        if not is_so:
            raise _Wrong(otherwise)


class Trial:
    """What a scenario works with. Belongs to one task.

    Nothing that it starts outlives it, and all of its coroutines may be cancelled.

    Attributes:
        target: Who is judged.
        folder: An empty folder of this trial's: its files, and where its sessions are.
        home: The home folder of the agents that this trial starts.
        observations: What was seen so far.
        latencies_ms: What was measured, by what it is.
    """

    def __init__(
        self,
        scenario: Scenario,
        agents: Agents,
        folder: Path,
        *,
        shared: Shared,
        prompter: Prompter | None = None,
    ) -> None:
        self.scenario: Final = scenario
        self.target: Final = agents.target
        self.folder: Final = folder / "work"
        self.home: Final = folder / "home"
        self.observations: Final[list[Observation]] = []
        self.latencies_ms: Final[dict[str, list[float]]] = {}
        self._agents = agents
        self._shared = shared
        self._prompter = prompter or self.target.words
        self._wires: list[Wire] = []
        self._wire: Wire | None = None  # the one that was opened or borrowed last
        self.folder.mkdir(parents=True)
        self.home.mkdir()

    # Agents

    async def wire(
        self,
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        is_bare: bool = False,
    ) -> Wire:
        """Start an agent of this trial's own, or connect to it, and say nothing.

        Args:
            env: Added to its environment, where it is ours to start; what is `None` is taken out.
            cwd: Where it starts, rather than where the target says or we were started.
            is_bare: Whether that is all it gets of ours, but for what a program needs to start.

        Raises:
            WireError: It cannot be started or reached.
        """
        if FIRST_RULE not in self.scenario.rules:
            self._must_not_be_vain("initialize")
        wire = await self._agents.start(
            self.scenario.name, home=self.home, cwd=cwd, env=env, is_bare=is_bare
        )
        self._wires.append(wire)
        self._wire = wire
        Client(wire)  # every client answers requests for permission, whatever else it offers
        return wire

    async def client(
        self,
        capabilities: Message | None = None,
        *,
        permission: PermissionPolicy = "allow",
        env: Mapping[str, str] | None = None,
    ) -> Client:
        """Start an agent of this trial's own and initialize it.

        Raises:
            WireError: It does not start or does not answer.
        """
        client = Client(await self.wire(env=env), permission=permission)
        await self._agents.initialize(client, capabilities)
        return client

    async def session(
        self, capabilities: Message | None = None, *, permission: PermissionPolicy = "allow"
    ) -> tuple[Client, str]:
        """Start an agent of this trial's own and open a session in the trial's folder.

        Raises:
            WireError: It does not start or does not answer.
            NotBroughtAbout: It wants a login that nobody gave us.
        """
        client = await self.client(capabilities, permission=permission)
        return client, await self.open_session(client)

    async def shared_client(self, *, permission: PermissionPolicy = "allow") -> Client:
        """Borrow an agent that other scenarios use too, initialized without capabilities.

        For scenarios that leave it as it was. Its other sessions are none of theirs.

        Raises:
            WireError: It does not start or does not answer.
        """
        self._must_not_be_vain("initialize")
        client = await self._shared.client(self.scenario.name, permission)
        self._wire = client.wire
        return client

    async def shared_session(self, *, permission: PermissionPolicy = "allow") -> tuple[Client, str]:
        """Borrow an agent that other scenarios use too, and open a session in the trial's folder.

        Raises:
            WireError: It does not start or does not answer.
            NotBroughtAbout: It wants a login that nobody gave us.
        """
        client = await self.shared_client(permission=permission)
        return client, await self.open_session(client)

    async def open_session(self, client: Client, cwd: Path | None = None) -> str:
        """Open a session, in the trial's folder by default.

        Raises:
            WireError: No answer, or an error.
            NotBroughtAbout: The agent wants a login that nobody gave us.
        """
        self._must_not_be_vain("session/new")
        response = await self._agents.new_session(client, cwd or self.folder)
        error, result = response.get("error"), response.get("result")
        if isinstance(error, dict) and error.get("code") == AUTH_REQUIRED:
            raise NotBroughtAbout(LOGIN_WANTED)
        session_id = result.get("sessionId") if isinstance(result, dict) else None
        if not isinstance(session_id, str):
            raise WireError(f"session/new was answered with {response}")
        return session_id

    async def leave(self, client: Client) -> None:
        """End an agent of this trial's own: close its input, then kill what is left of it."""
        await self._agents.end(client.wire)

    # What to say, and what is needed

    def say(self, situation: str, **fill: object) -> str:
        """Return a prompt that brings the situation about; see `conformance.target.SITUATIONS`.

        Call it once an agent of this trial's was initialized: some are known to act on words.

        Raises:
            NotBroughtAbout: Nobody told us how.
        """
        self._must_not_be_vain("session/prompt")
        prompter = self._prompter
        if prompter is None and self._agents_name() in ACTS_ON_WORDS:
            prompter = Words(REHEARSAL)
        filled = {name: str(value) for name, value in fill.items()}
        said = None if prompter is None else prompter.say(situation, self.scenario.name, filled)
        if said is None:
            raise NotBroughtAbout(f"nobody said how to bring {situation!r} about; see --prompts")
        return said

    @property
    def model(self) -> ScriptedModel:
        """The model behind the agent, where that is ours.

        Raises:
            NotBroughtAbout: It is not.
        """
        if not isinstance(self._prompter, ScriptedModel):
            raise NotBroughtAbout("the model is not the suite's own; see --script-model")
        return self._prompter

    def needs(self, holds: object, what: str) -> None:
        """Go on if the agent offers what the scenario is about.

        Raises:
            Skipped: It does not.
        """
        if not holds:
            raise Skipped(f"the agent does not offer {what}")

    def brought_about(self, is_so: object, otherwise: str) -> None:
        """Go on if the agent did what the scenario needs; `otherwise` says what it did not do.

        Raises:
            NotBroughtAbout: It did not.
        """
        if not is_so:
            raise NotBroughtAbout(otherwise)

    # What is seen

    @contextmanager
    def expect(self, rule: str) -> Iterator[Check]:
        """Hold the agent to a rule: kept if the block ends, broken if a check or a wait fails.

        The scenario goes on behind the block either way. A `NotBroughtAbout` or `Skipped` inside
        goes through, and nothing was seen then.
        """
        try:
            yield Check()
        except _Wrong as exc:
            self.see(rule, "broken", str(exc))
        except WireError as exc:
            self.see(rule, "broken", exc.reason)
        else:
            self.see(rule, "kept")

    def see(self, rule: str, sight: Sight, says: str = "") -> None:
        """Record something that was seen, with the place that the conversation has reached.

        Raises:
            ValueError: The scenario did not name the rule among its own.
        """
        if rule not in self.scenario.rules:
            raise ValueError(f"{self.scenario.name} does not name {rule}")
        wire = self._wire
        self.observations.append(
            Observation(
                rule=rule,
                sight=sight,
                says=says,
                scenario=self.scenario.name,
                transcript="" if wire is None else wire.key,
                at=None if wire is None else len(wire.trace) - 1,
            )
        )

    def spoil(self) -> None:
        """Have the shared agent replaced: it may not be as it was."""
        self._shared.is_spoilt = True

    def see_rest(self, sight: Sight, says: str) -> None:
        """Record the same for every rule of the scenario that nothing was seen about yet."""
        seen = {observation.rule for observation in self.observations}
        for rule in self.scenario.rules:
            if rule not in seen:
                self.see(rule, sight, says)

    def measure(self, what: str, started_s: float) -> None:
        """Record the milliseconds since `started_s`, a time of `time.monotonic`."""
        self.latencies_ms.setdefault(what, []).append((time.monotonic() - started_s) * 1000)

    async def end(self) -> None:
        """End the agents of this trial's own.

        Cancellation: they end nevertheless.
        """
        async with anyio.create_task_group() as tasks:
            for wire in self._wires:
                tasks.start_soon(self._agents.end, wire)

    def _must_not_be_vain(self, method: str) -> None:
        if why := self._agents.in_vain(method):
            raise NotBroughtAbout(why)

    def _agents_name(self) -> str:
        for message in self._wire.received if self._wire is not None else ():
            result = message.get("result")
            info = result.get("agentInfo") if isinstance(result, dict) else None
            if isinstance(info, dict):
                return str(info.get("name"))
        return ""
