"""``session/set_mode`` and ``session/set_config_option``: what is chosen holds at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from acp_server import types as wire
from acp_server.config_options import config_options, set_config_option
from acp_server.errors import INTERNAL_ERROR, INVALID_PARAMS, RpcError, unknown_session
from acp_server.peer import InFlight, ready
from agent_core.errors import AgentError, SessionNotFound

if TYPE_CHECKING:
    from acp_server.connection import Connection
    from agent_core.agent import Agent


def set_mode(
    connection: Connection, params: wire.SetModeParams, _in_flight: InFlight
) -> Coroutine[Any, Any, Any]:
    """Change the permission mode."""

    def change(agent: Agent) -> dict[str, Any]:
        agent.set_mode(params.mode_id)
        return {}

    return _choose(connection, params.session_id, change)


def set_option(
    connection: Connection, params: wire.SetConfigOptionParams, _in_flight: InFlight
) -> Coroutine[Any, Any, Any]:
    """Change one option; the answer has the complete list."""

    def change(agent: Agent) -> dict[str, Any]:
        set_config_option(agent, params.config_id, params.value)
        return {"configOptions": config_options(agent)}

    return _choose(connection, params.session_id, change)


def _choose(
    connection: Connection, session_id: str, change: Callable[[Agent], dict[str, Any]]
) -> Coroutine[Any, Any, Any]:
    """Let `change` have the session's agent: now, for a prompt may be on the next line."""
    session = connection.session(session_id)
    if session.agent is not None:
        return ready(_changed(change, session.agent))

    async def change_later() -> dict[str, Any]:
        try:
            agent = await session.loaded()
        except SessionNotFound:
            raise unknown_session(session_id) from None
        except AgentError as exc:
            raise RpcError(INTERNAL_ERROR, str(exc)) from None
        return _changed(change, agent)

    return change_later()


def _changed(change: Callable[[Agent], dict[str, Any]], agent: Agent) -> dict[str, Any]:
    try:
        return change(agent)
    except ValueError as exc:
        raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": str(exc)}) from None
