"""Sessions that nobody uses for a while give their agent back; the next use loads it again.

What stays is what the client may name: the `ClientSession`, a few kilobytes. The agent with its
history and its MCP servers goes. Nobody is told, for nothing has changed for them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from acp_server.session import ClientSession
from agent_core.errors import AgentDisposed, AgentError, SessionNotFound, StoreError
from agent_core.logs import get_logger

if TYPE_CHECKING:
    from acp_server.backend import Backend

__all__ = ["Unloading"]

_LOOKS_PER_LIMIT: Final = 4
_WENT_ON: Final = "another process went on with this session; load it again to go on"

log = get_logger(__name__)


class _Unloaded(NamedTuple):
    """What it takes to load an agent again, and to know that it is the same."""

    cwd: str
    additional: tuple[str, ...]
    owner: str
    n_events: int
    quiet: anyio.Event
    """Set when nothing is left of the agent that was unloaded."""


class Unloading:
    """Unloads the sessions of a backend.

    Args:
        backend: Whose.
        after_s: How long a session is unused before.
    """

    def __init__(self, backend: Backend, after_s: float) -> None:
        self._backend = backend
        self._after_s = after_s
        self._over = anyio.Event()

    def start(self) -> None:
        """Look for unused sessions from now on, until the runtime is left."""
        self._backend.runtime.start_task(self._run, stop=self._over.set, name="unload sessions")

    async def _run(self) -> None:
        while not self._over.is_set():
            await self.unload_unused()
            with anyio.move_on_after(self._after_s / _LOOKS_PER_LIMIT):
                await self._over.wait()

    async def unload_unused(self) -> None:
        """Unload every session that was not used for so long, and wait until they are quiet.

        Cancellation: safe; what is unloaded stays so. Concurrency: one task.
        """
        async with anyio.create_task_group() as tasks:
            for session in self._backend.holders.sessions:
                if session.unused_s >= self._after_s and session.is_at_rest:
                    tasks.start_soon(self._unload, session)

    async def _unload(self, session: ClientSession) -> None:
        agent = session.agent
        assert agent is not None
        try:
            await agent.session.flush()
        except StoreError as exc:
            log.warning("session_not_unloaded", session_id=session.id, reason=str(exc))
            return
        if session.agent is not agent or not session.is_at_rest:
            return  # somebody came meanwhile
        unloaded = _Unloaded(
            agent.session.cwd,
            agent.roots.additional,
            agent.session.owner,
            len(agent.session.events),
            anyio.Event(),
        )
        session.unload(partial(self._begin_loading, session, unloaded))
        try:
            await agent.dispose()
            await session.servers.ended()
        finally:
            unloaded.quiet.set()
        log.info("session_unloaded", session_id=session.id)

    # --- and back ----------------------------------------------------------------------------

    def _begin_loading(self, session: ClientSession, unloaded: _Unloaded) -> None:
        session.begin_load()
        try:
            self._backend.runtime.start_task(
                partial(self._load, session, unloaded), stop=_nothing, name=f"load {session.id}"
            )
        except AgentDisposed as exc:
            session.end_load(exc)

    async def _load(self, session: ClientSession, unloaded: _Unloaded) -> None:
        error: AgentError | None = StoreError("The session could not be loaded again.")
        try:
            await unloaded.quiet.wait()
            await self._attach(session, unloaded)
            error = None
        except AgentError as exc:
            log.warning("session_not_loaded_again", session_id=session.id, reason=str(exc))
            error = exc
        finally:
            session.end_load(error)
            if session.agent is None:  # the next use tries again
                session.load_when_used(partial(self._begin_loading, session, unloaded))

    async def _attach(self, session: ClientSession, unloaded: _Unloaded) -> None:
        """Give the session its agent, unless a load of the client's was faster."""
        if not self._lacks_agent(session):
            return
        agent = await self._backend.agent_for(
            session.id, unloaded.cwd, unloaded.additional, owner=unloaded.owner
        )
        try:
            if not self._lacks_agent(session):
                return
            if len(agent.session.events) != unloaded.n_events:
                raise StoreError(_WENT_ON)
        except StoreError:
            if self._backend.holders.is_free_for(session):
                agent.dispose()
            raise
        session.attach(agent)
        session.servers.use_again(self._backend.mcp_servers.of(agent))

    def _lacks_agent(self, session: ClientSession) -> bool:
        """Return whether it is still to get one.

        Raises:
            SessionNotFound: It was closed, or is another client's by now.
        """
        if session.is_closed or not self._backend.holders.holds(session):
            raise SessionNotFound(session.id)
        return session.agent is None


def _nothing() -> None:
    pass  # a load ends soon by itself
