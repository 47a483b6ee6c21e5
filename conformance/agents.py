"""Starts agents, remembers what was said to each, and lends one to many scenarios."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

from conformance.client import Client, PermissionPolicy
from conformance.target import Target
from conformance.trace import Message, WireError
from conformance.verdicts import Transcript
from conformance.wire import Wire

__all__ = ["AUTH_REQUIRED", "LOGIN_WANTED", "Agents", "Shared"]

AUTH_REQUIRED: Final = -32000
ENOUGH: Final = 3
"""How often something is tried that has never worked, before nobody tries it any more."""
ENOUGH_PROMPTS: Final = 6
"""The same for prompts; some are left without an answer on purpose."""
MOST_BYTES: Final = 512 * 1024 * 1024
"""How much all agents of a run may write before no more are started."""
LOGIN_WANTED: Final = "the agent wants a login first; see --auth-method, --keep-home"


class Agents:
    """All agents of a run. Each lives in a task of its own, so that they may end in any order.

    Args:
        target: Who is judged.
        tasks: Where the agents live.

    Attributes:
        target: Who is judged.
        transcripts: What was said, by a key for each agent; complete once the agent has ended.
        first_failure: Why the first agent that did not start, or served nobody, did not.
        left_behind: Ids of processes of agents that could not be ended.
    """

    def __init__(self, target: Target, tasks: anyio.abc.TaskGroup) -> None:
        self.target: Final = target
        self.transcripts: Final[dict[str, Transcript]] = {}
        self._tasks = tasks
        self._n_in_vain = {"initialize": 0, "session/new": 0}
        self._n_bytes = 0
        self._ended: list[str] = []
        self._has_answered = False
        self.first_failure = ""
        self.left_behind: Final[set[int]] = set()
        self._hosted: dict[str, tuple[anyio.Event, anyio.Event]] = {}

    async def start(
        self,
        key: str,
        *,
        home: Path,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        is_bare: bool = False,
    ) -> Wire:
        """Start an agent, or connect to it.

        Cancellation: safe. Concurrency: any number of tasks.

        Args:
            key: Whom it is for; made unique by a number.
            home: Its home folder.
            cwd: Where it starts, rather than where the target says or we were started.
            env: Added to its environment; what is `None` is taken out.
            is_bare: Whether that is all it gets of ours, but for what a program needs to start.

        Raises:
            WireError: It cannot be started or reached.
        """
        merged = {**self.target.environment(home, is_bare=is_bare), **(env or {})}
        environment = {name: value for name, value in merged.items() if value is not None}
        where = str(cwd or self.target.cwd) or None
        key = self._unique(key)
        self.transcripts[key] = Transcript(chapters=[(0, key)])
        with self._counted("initialize", counts_success=False):
            wire: Wire = await self._tasks.start(self._host, key, where, environment)
        return wire

    async def initialize(self, client: Client, capabilities: Message | None = None) -> None:
        """Initialize an agent, and log in where the target says how.

        Cancellation: safe. Concurrency: any number of tasks, each with a client of its own.

        Raises:
            WireError: No answer, or an error.
        """
        with self._counted("initialize"):
            await client.initialize(capabilities, self.target.timeout_s)
        if self.target.auth_method:
            params = {"methodId": self.target.auth_method}
            request = client.wire.request("authenticate", params)
            await client.result(request, self.target.timeout_s)

    async def new_session(self, client: Client, cwd: Path) -> Message:
        """Ask for a session, and return the whole response.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            WireError: No answer.
        """
        request = client.wire.request("session/new", {"cwd": str(cwd), "mcpServers": []})
        with self._counted("session/new"):
            return await client.wire.response(request, self.target.timeout_s)

    def in_vain(self, method: str) -> str:
        """Say why it is no use to try a method again, or nothing while it is.

        An agent that never answers is not waited for in every scenario.

        Args:
            method: ``initialize``, ``session/new`` or ``session/prompt``.
        """
        if self._n_bytes > MOST_BYTES:
            return f"the agents have written {self._n_bytes >> 20} MiB by now"
        if method == "session/prompt":
            is_vain = len(self._ended) >= ENOUGH_PROMPTS and not self._answers_prompts()
            return "no prompt was ever answered" if is_vain else ""
        is_vain = self._n_in_vain[method] >= ENOUGH
        return f"{method} was never answered" if is_vain else ""

    def _answers_prompts(self) -> bool:
        """Say whether a prompt was ever answered, or few enough were left without an answer."""
        if not self._has_answered:
            told = {key: _answers_prompts(each) for key, each in self.transcripts.items()}
            self._has_answered = True in told.values()
            n_in_vain = sum(told[key] is False for key in self._ended)
            return self._has_answered or n_in_vain < ENOUGH_PROMPTS
        return True

    @contextmanager
    def _counted(self, method: str, *, counts_success: bool = True) -> Iterator[None]:
        """Count the failures of what never worked."""
        try:
            yield
        except WireError as exc:
            self._n_in_vain[method] += 1
            self.first_failure = self.first_failure or exc.reason
            raise
        if counts_success:
            self._n_in_vain[method] = -sys.maxsize

    async def end(self, wire: Wire) -> None:
        """End an agent and wait until nothing of it is left. Again does nothing.

        Cancellation: it ends nevertheless. Concurrency: any number of tasks.
        """
        leave, has_ended = self._hosted[wire.key]
        leave.set()
        await has_ended.wait()

    async def _host(
        self,
        key: str,
        cwd: str | None,
        env: Mapping[str, str],
        *,
        task_status: anyio.abc.TaskStatus[Wire],
    ) -> None:
        transcript = self.transcripts[key]
        leave, has_ended = anyio.Event(), anyio.Event()
        try:
            opened = (
                Wire.connect(self.target.url, self.target.token)
                if self.target.url
                else Wire.spawn(self.target.command, cwd=cwd, env=env)
            )
            async with opened as wire:
                wire.key = key
                transcript.entries = wire.trace
                self._hosted[key] = leave, has_ended
                task_status.started(wire)
                await leave.wait()
                transcript.has_died = wire.has_died
            transcript.stderr, transcript.exit_code = wire.stderr, wire.exit_code
            self.left_behind.update(wire.left_behind)
            self._n_bytes += sum(len(entry.raw) for entry in wire.trace)
            self._ended.append(key)
        except OSError as exc:
            raise WireError(f"the agent cannot be started: {exc}") from exc
        finally:
            has_ended.set()

    def _unique(self, key: str) -> str:
        if key not in self.transcripts:
            return key
        return next(name for n in range(2, 10**6) if (name := f"{key}-{n}") not in self.transcripts)


class Shared:
    """An agent that scenarios use one after another, each in sessions of its own.

    It saves them the agent's start. Whoever finds something wrong has it replaced, so that one
    mistake is not blamed on many. Belongs to one task.
    """

    def __init__(self, agents: Agents, folder: Path) -> None:
        self.is_spoilt = False
        self._agents = agents
        self._folder = folder
        self._client: Client | None = None
        self._n_started = 0

    async def client(self, scenario: str, permission: PermissionPolicy) -> Client:
        """Return a client of the agent, initialized without capabilities.

        Cancellation: safe. Concurrency: one task.

        Args:
            scenario: Who uses it from now on.
            permission: What it answers to requests for permission.

        Raises:
            WireError: It does not start or does not answer.
        """
        if self._client is None:
            self._n_started += 1
            home = self._folder / f"home-{self._n_started}"
            home.mkdir(parents=True)
            client = Client(await self._agents.start("several scenarios", home=home))
            self._client = client
            await self._agents.initialize(client)
        wire, self._client.permission = self._client.wire, permission
        self._agents.transcripts[wire.key].chapters.append((len(wire.trace), scenario))
        return self._client

    @property
    def is_as_it_was(self) -> bool:
        """Whether the agent lives, and nothing that the last scenario asked of it is still open."""
        if self._client is None:
            return True
        wire = self._client.wire
        since, _ = self._agents.transcripts[wire.key].chapters[-1]
        return not wire.has_died and not wire.has_open_requests(since)

    async def end(self) -> None:
        """End the agent, if there is one.

        Cancellation: it ends nevertheless. Concurrency: one task.
        """
        client, self._client, self.is_spoilt = self._client, None, False
        if client is not None:
            await self._agents.end(client.wire)


def _answers_prompts(transcript: Transcript) -> bool | None:
    """Say whether a prompt was answered; `None` if there was none."""
    told = [(each.direction, each.message) for each in transcript.entries if each.message]
    prompts = {
        message["id"]
        for direction, message in told
        if direction == "sent"
        and message.get("method") == "session/prompt"
        and isinstance(message.get("id"), int | str)
    }
    if not prompts:
        return None
    return any(
        direction == "received" and "method" not in message and message.get("id") in prompts
        for direction, message in told
        if isinstance(message.get("id"), int | str)
    )
