"""What agents run on, put together from the configuration: store, model, tools, runtime."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from acp_server.config import Config, ConfigError
from agent_core.agent import Agent
from agent_core.errors import SessionNotFound, StoreError
from agent_core.logs import get_logger
from agent_core.models.adapter import ModelAdapter
from agent_core.models.rehearsal import RehearsalModel
from agent_core.models.retry import RetryingModel
from agent_core.plugins import PluginError, load_plugins
from agent_core.runtime import AgentRuntime
from agent_core.sessions.log import Session
from agent_core.sessions.sqlite import SqliteStore
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.registry import default_tools

__all__ = ["Backend", "make_model", "open_backend"]

log = get_logger(__name__)


class Backend:
    """One process's agents, shared by its connections."""

    def __init__(self, config: Config, runtime: AgentRuntime, store: SqliteStore) -> None:
        self.runtime = runtime
        self.store = store
        self._config = config
        self._loading: dict[str, anyio.Lock] = {}

    def configuration_problem(self) -> str | None:
        """Return why the configured model cannot be used, in words, or `None`."""
        return model_problem(self._config)

    async def agent_for(self, session_id: str, cwd: str) -> Agent:
        """Return the session's agent, loading the session unless it is loaded.

        Cancellation: safe. Concurrency: any number of tasks; a session is loaded once.

        Raises:
            SessionNotFound: There is no such session.
            StoreError: It cannot be read.
            ValueError: `cwd` is not the session's directory.
        """
        lock = self._loading.setdefault(session_id, anyio.Lock())
        try:
            async with lock:
                agent = self.runtime.agents.get(session_id)
                if agent is not None:
                    _check_place(agent.session, cwd)
                    if not await self._is_behind(agent):
                        return agent
                    await agent.dispose()
                session = await Session.load(session_id, self.store)
                _check_place(session, cwd)
                return self.runtime.adopt(session)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._loading.pop(session_id, None)

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
    model = make_model(config)
    try:
        async with AgentRuntime(
            store,
            model=model,
            tools=default_tools(),
            files=LocalFiles(),
            commands=LocalCommands(),
            mode=config.mode,
            max_steps=config.max_steps,
        ) as runtime:
            try:
                load_plugins(runtime, config.plugins)
            except PluginError as exc:
                raise ConfigError(str(exc)) from None
            yield Backend(config, runtime, store)
    finally:
        with anyio.CancelScope(shield=True):
            await model.aclose()
            try:
                await store.aclose()
            except StoreError as exc:  # whoever was waiting for it has been told
                log.error("session_store_not_closed", error=str(exc))


def make_model(config: Config) -> ModelAdapter:
    """Return the configured model, with retries.

    Raises:
        ConfigError: The rehearsal script cannot be used.
    """
    if config.model == "rehearsal":
        script = None if config.rehearsal_script is None else Path(config.rehearsal_script)
        try:
            return RetryingModel(RehearsalModel(script=script))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"The rehearsal script cannot be used: {exc}") from None
    from agent_core.models.openai import OpenAIModel

    endpoint = config.openai
    return RetryingModel(
        OpenAIModel(
            config.model.partition(":")[2],
            api_key=endpoint.api_key,
            base_url=endpoint.base_url,
            idle_limit_s=config.idle_limit_s,
            headers=endpoint.headers,
        )
    )


def _check_place(session: Session, cwd: str) -> None:
    if os.path.realpath(session.cwd) != os.path.realpath(cwd):
        raise ValueError("cwd is not the directory this session was made in")


def model_problem(config: Config) -> str | None:
    """Return what is missing for the configured model, in words, or `None`."""
    if config.model == "rehearsal" or config.openai.api_key or config.openai.base_url:
        return None
    return (
        f"The model {config.model} needs a key: set OPENAI_API_KEY, or api_key under [openai] in "
        "~/.config/acp-agent/config.toml."
    )
