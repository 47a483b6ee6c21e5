"""What agents run on, put together from the configuration: store, model, tools, runtime."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

import anyio
import anyio.lowlevel

from acp_server import __version__
from acp_server.config import Config, ConfigError, config_dir
from acp_server.guest import Guest
from acp_server.holders import Holders
from acp_server.models import library_of, make_models, model_problem
from acp_server.stored_keys import keys_stamp
from acp_server.tracing import open_tracing
from agent_core.agent import Agent
from agent_core.agent_files import AgentFiles
from agent_core.errors import SessionNotFound, StoreError
from agent_core.events import Event, FileChanged, FilesRestored, TurnEnd
from agent_core.knowledge import Knowledge
from agent_core.logs import get_logger
from agent_core.mcp.agent_servers import McpServers
from agent_core.models.sdk import Library
from agent_core.plugins import PluginError, load_plugins
from agent_core.runtime import AgentRuntime
from agent_core.sessions.log import Session
from agent_core.sessions.sqlite import SqliteStore
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.registry import default_tools

__all__ = ["Backend", "open_backend"]

_COPIED_PER_CHECKPOINT: Final = 100

log = get_logger(__name__)


class Backend:
    """One process's agents, shared by its connections."""

    def __init__(self, config: Config, runtime: AgentRuntime, store: SqliteStore) -> None:
        self.runtime = runtime
        self.store = store
        self._config = config
        self.mcp_servers = McpServers(runtime, identity=("acp-agent", __version__))
        self._loading: dict[str, anyio.Lock] = {}
        self._deleting: set[tuple[str, str]] = set()  # with whose it is
        self.holders = Holders()
        self._keys_stamp: tuple[object, ...] = ()
        self._problem: str | None = None

    @property
    def library(self) -> Library | None:
        """The library that the configured model needs, `None` if it needs none."""
        return library_of(self._config)

    def configuration_problem(self) -> str | None:
        """Return why the configured model cannot be used, in words, or `None`.

        Cheap while the stored keys stay as they are: probes ask for it.
        """
        if (stamp := keys_stamp()) != self._keys_stamp:
            self._problem = model_problem(self._config)
            self._keys_stamp = stamp
        return self._problem

    def provider_of(self, model: str) -> str:
        """Return the provider behind the name of a model: one that is configured, or ``other``."""
        try:
            return "rehearsal" if model == "rehearsal" else self._config.target(model).provider
        except ConfigError:  # a plugin's
            return "other"

    async def agent_for(
        self, session_id: str, cwd: str, additional: tuple[str, ...] = (), *, owner: str = ""
    ) -> Agent:
        """Return the session's agent, loading the session unless it is loaded.

        Cancellation: safe. Concurrency: any number of tasks; a session is loaded once.

        Args:
            session_id: Whose.
            cwd: The session's directory.
            additional: The further directories its tools may touch, unless the session is loaded.
            owner: Whose it has to be.

        Raises:
            SessionNotFound: There is none, it is another's, or a subagent is at work in it.
            StoreError: It cannot be read.
            ValueError: `cwd` is not the session's directory.
        """
        lock = self._loading.setdefault(session_id, anyio.Lock())
        try:
            async with lock:
                agent = self.runtime.agents.get(session_id)
                is_anothers = agent is not None and agent.session.owner != owner
                if is_anothers or (session_id, owner) in self._deleting:
                    raise SessionNotFound(session_id)
                if agent is not None and agent.parent is not None:
                    raise SessionNotFound(session_id)
                if agent is not None and agent.status == "disposed":
                    await agent.dispose()  # it was closed just now
                elif agent is not None:
                    _check_place(agent.session, cwd)
                    is_behind = await self._is_behind(agent)
                    # Meanwhile the client before, which was lost, may have let go of it.
                    if not is_behind and agent.status != "disposed":
                        return agent
                    await agent.dispose()
                session = await Session.load(session_id, self.store, owner=owner)
                _check_place(session, cwd)
                return self.runtime.adopt(session, additional=additional)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._loading.pop(session_id, None)

    async def fork(
        self, session_id: str, cwd: str, additional: tuple[str, ...], guest: Guest
    ) -> Agent:
        """Make a session that begins with all of another one up to its last finished turn.

        Cancellation: safe; nothing is published. Concurrency: any number of tasks.

        Args:
            session_id: The other one.
            cwd: The directory of the new one.
            additional: Its further ones.
            guest: Who asks; it owns both.

        Raises:
            SessionNotFound: The guest has no such session.
            StoreError: It cannot be read, or the new one not be kept.
            ValueError: The other one lies where the guest may not open a session.
        """
        owner = guest.owner
        if (session_id, owner) in self._deleting:
            raise SessionNotFound(session_id)
        header, events = await self.store.load(session_id)
        if header.owner != owner:
            raise SessionNotFound(session_id)
        if not guest.may_open(header.cwd):
            raise ValueError("the session is outside of what this server may open")
        ends = (at for at in range(len(events), 0, -1) if isinstance(events[at - 1].data, TurnEnd))
        agent = await self.runtime.create(cwd, additional=additional, owner=owner)
        try:
            await _copy(events[: next(ends, 0)], agent.session)
        except BaseException:  # half a fork is none, and nobody has its id
            with anyio.CancelScope(shield=True), suppress(StoreError):
                await agent.dispose()
                await self.store.delete(agent.id)
            raise
        return agent

    @contextmanager
    def deleting(self, session_id: str, owner: str) -> Generator[None, None, None]:
        """In the block the session is being deleted, and `owner` may open it no more."""
        self._deleting.add((session_id, owner))
        try:
            yield
        finally:
            self._deleting.discard((session_id, owner))

    async def delete(self, session_id: str, owner: str) -> None:
        """Dispose the session's agent, if there is one, and forget the session for good.

        Another's session is as unknown as one that is not there.

        Cancellation: safe. Concurrency: any number of tasks. Unknown ids are fine.

        Raises:
            StoreError: It could not be deleted, or a subagent is at work in it.
        """
        with suppress(SessionNotFound):
            if (await self.store.header(session_id)).owner != owner:
                return
        agent = self.runtime.agents.get(session_id)
        if agent is not None and agent.parent is not None:
            raise StoreError("A subagent is at work in this session.")
        if agent is not None:
            await agent.dispose()
        await self.store.delete(session_id)

    async def _is_behind(self, agent: Agent) -> bool:
        """Say whether another process went on with the session, or deleted it."""
        if agent.status != "idle":
            return False
        try:
            _header, events = await self.store.load(agent.id)
            is_behind = len(events) > len(agent.session.events)
        except SessionNotFound:
            is_behind = True
        return is_behind and agent.status == "idle"  # a turn may have begun meanwhile


@asynccontextmanager
async def open_backend(config: Config) -> AsyncGenerator[Backend, None]:
    """Open everything; on leaving, dispose every agent, wait until all are quiet, and close.

    Cancellation: the agents are disposed all the same. Concurrency: once for a process.
    """
    store = SqliteStore(config.sessions_path)
    models = make_models(config)
    try:
        async with (
            open_tracing(config.trace_headers) as tracing,
            AgentRuntime(
                store,
                model=models,
                tools=default_tools(),
                files=LocalFiles(),
                commands=LocalCommands(),
                mode=config.mode,
                max_steps=config.max_steps,
                user_folder=str(config_dir()),
            ) as runtime,
        ):
            if tracing is not None:
                tracing.follow(runtime)
            runtime.project_files.listen(runtime.hooks)
            Knowledge().listen(runtime.hooks)
            AgentFiles().use(runtime)
            _register_agents(runtime, config)
            try:
                load_plugins(runtime, config.plugins)
            except PluginError as exc:
                raise ConfigError(str(exc)) from None
            backend = Backend(config, runtime, store)
            if config.unload_after_s:
                from acp_server.unloading import Unloading

                Unloading(backend, config.unload_after_s).start()
            yield backend
    finally:
        with anyio.CancelScope(shield=True):
            await models.aclose()
            try:
                await store.aclose()
            except StoreError as exc:  # whoever was waiting for it has been told
                log.error("session_store_not_closed", error=str(exc))


def _register_agents(runtime: AgentRuntime, config: Config) -> None:
    if not config.subagents:
        return
    from acp_server.config import table_name
    from acp_server.remote import RemoteProvider  # nobody else needs it, and it takes a while
    from agent_core.models.keys import Key

    for name, each in config.subagents.items():
        provider = RemoteProvider(
            runtime,
            name,
            each.command,
            url=each.url,
            token=Key(
                each.token,
                command=each.token_command or (),
                advice=f"set token under [{table_name('subagents', name)}] in {config.file}",
            ),
            cwd=each.cwd,
            environ=each.env,
            permissions=each.permissions,
        )
        runtime.subagents.register(provider, each.description)


async def _copy(events: Sequence[Event], session: Session) -> None:
    for number, event in enumerate(events, 1):
        if not isinstance(event.data, FileChanged | FilesRestored):  # not the fork's own doing
            session.append(event.data)
        if number % _COPIED_PER_CHECKPOINT == 0:
            await anyio.lowlevel.checkpoint()  # other sessions go on
    await session.flush()


def _check_place(session: Session, cwd: str) -> None:
    if os.path.realpath(session.cwd) != os.path.realpath(cwd):
        raise ValueError("cwd is not the directory this session was made in")
