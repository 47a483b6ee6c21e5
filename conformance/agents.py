"""Starts agents, remembers what was said to each, and lends one to many scenarios."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

from conformance.client import Client, PermissionPolicy
from conformance.target import Target
from conformance.trace import Message, WireError
from conformance.verdicts import Transcript
from conformance.wire import Wire

__all__ = ["AUTH_REQUIRED", "Agents", "Shared", "initialize"]

AUTH_REQUIRED: Final = -32000


class Agents:
    """All agents of a run. Each lives in a task of its own, so that they may end in any order.

    Args:
        target: Who is judged.
        tasks: Where the agents live.

    Attributes:
        target: Who is judged.
        transcripts: What was said, by a key for each agent; complete once the agent has ended.
    """

    def __init__(self, target: Target, tasks: anyio.abc.TaskGroup) -> None:
        self.target: Final = target
        self.transcripts: Final[dict[str, Transcript]] = {}
        self._tasks = tasks
        self._hosted: dict[str, tuple[anyio.Event, anyio.Event]] = {}

    async def start(
        self,
        key: str,
        *,
        home: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        is_bare: bool = False,
    ) -> Wire:
        """Start an agent, or connect to it.

        Cancellation: safe. Concurrency: any number of tasks.

        Args:
            key: Whom it is for; made unique by a number.
            home: Its home folder.
            cwd: Where it starts, rather than where the target says or we were started.
            env: Added to its environment.
            is_bare: Whether that is all it gets of ours, but for what a program needs to start.

        Raises:
            WireError: It cannot be started or reached.
        """
        environment = {**self.target.environment(home, is_bare=is_bare), **(env or {})}
        where = str(cwd or self.target.cwd) or None
        key = self._unique(key)
        self.transcripts[key] = Transcript(chapters=[(0, key)])
        wire: Wire = await self._tasks.start(self._host, key, where, environment)
        return wire

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
            await initialize(client, self._agents.target)
        wire, self._client.permission = self._client.wire, permission
        self._agents.transcripts[wire.key].chapters.append((len(wire.trace), scenario))
        return self._client

    async def end(self) -> None:
        """End the agent, if there is one.

        Cancellation: it ends nevertheless. Concurrency: one task.
        """
        client, self._client, self.is_spoilt = self._client, None, False
        if client is not None:
            await self._agents.end(client.wire)


async def initialize(
    client: Client, target: Target, capabilities: Message | None = None
) -> Message:
    """Initialize the agent, log in where the target says how, and return ``initialize``'s result.

    Cancellation: safe.

    Raises:
        WireError: No answer, or an error.
    """
    result = await client.initialize(capabilities, target.timeout_s)
    if target.auth_method:
        request = client.wire.request("authenticate", {"methodId": target.auth_method})
        await client.result(request, target.timeout_s)
    return result
