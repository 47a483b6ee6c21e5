"""The life of sessions: new, load, resume, fork, list, close, delete."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from acp_server import types as wire
from acp_server.config_options import config_options, mode_state
from acp_server.errors import INTERNAL_ERROR, INVALID_PARAMS, RpcError, unknown_session
from acp_server.mcp_servers import servers_problem
from acp_server.peer import InFlight
from acp_server.updates import iso_time
from agent_core.agent import Agent
from agent_core.errors import AgentError, SessionNotFound, StoreError
from agent_core.tools.roots import Roots

if TYPE_CHECKING:
    from acp_server.backend import Backend
    from acp_server.connection import Connection
    from acp_server.guest import Guest
    from acp_server.session import ClientSession


async def new(
    connection: Connection, params: wire.NewSessionParams, in_flight: InFlight
) -> dict[str, Any]:
    """Make a session."""
    additional = _checked_places(connection, params)
    backend = await connection.opened()
    owner = connection.guest.owner
    try:
        agent = await backend.runtime.create(params.cwd, additional=additional, owner=owner)
    except AgentError as exc:
        raise RpcError(INTERNAL_ERROR, str(exc)) from None
    return await _begun(connection, backend, agent, params.mcp_servers, in_flight)


async def fork(
    connection: Connection, params: wire.ResumeSessionParams, in_flight: InFlight
) -> dict[str, Any]:
    """Make a session that begins with what another one had come to by its last finished turn."""
    additional = _checked_places(connection, params)
    backend = await connection.opened()
    try:
        agent = await backend.fork(params.session_id, params.cwd, additional, connection.guest)
    except ValueError as exc:
        raise _invalid(str(exc)) from None
    except SessionNotFound:
        raise unknown_session(params.session_id) from None
    except AgentError as exc:
        raise RpcError(INTERNAL_ERROR, str(exc)) from None
    return await _begun(connection, backend, agent, params.mcp_servers, in_flight)


def load(
    connection: Connection, params: wire.LoadSessionParams, in_flight: InFlight
) -> Coroutine[Any, Any, Any]:
    """Open a session and show all that happened in it. It may be prompted from the next line on."""
    return _open(connection, params, in_flight, is_replayed=True)


def resume(
    connection: Connection, params: wire.ResumeSessionParams, in_flight: InFlight
) -> Coroutine[Any, Any, Any]:
    """Open a session and show nothing of it. It may be prompted from the next line on."""
    return _open(connection, params, in_flight, is_replayed=False)


def _open(
    connection: Connection,
    params: wire.LoadSessionParams | wire.ResumeSessionParams,
    in_flight: InFlight,
    *,
    is_replayed: bool,
) -> Coroutine[Any, Any, Any]:
    additional = _checked_places(connection, params)
    session = connection.reserve(params.session_id)
    session.begin_load()
    return _finish_opening(
        connection,
        session,
        (params.cwd, additional),
        params.mcp_servers,
        in_flight,
        is_replayed=is_replayed,
    )


async def _finish_opening(
    connection: Connection,
    session: ClientSession,
    places: tuple[str, tuple[str, ...]],
    servers: Sequence[wire.McpServer] | None,
    in_flight: InFlight,
    *,
    is_replayed: bool,
) -> dict[str, Any]:
    error: AgentError | None = SessionNotFound(session.id)
    try:
        backend = await connection.opened()
        agent = await backend.agent_for(session.id, *places, owner=connection.guest.owner)
        if session.is_closed:
            await agent.dispose()
            raise SessionNotFound(session.id)
    except ValueError as exc:
        raise RpcError(INVALID_PARAMS, "Invalid params", {"reason": str(exc)}) from None
    except SessionNotFound:
        raise unknown_session(session.id) from None
    except AgentError as exc:
        error = exc
        raise RpcError(INTERNAL_ERROR, str(exc)) from None
    else:
        error = None
        agent.roots = Roots(agent.session.cwd, places[1])
        if session.agent is not agent:
            session.detach()
            backend.holders.take(session)
            session.attach(agent)
        session.servers.use(backend.mcp_servers.of(agent), servers)
    finally:
        if session.end_load(error):
            connection.forget(session)
    unseen = backend.holders.take_unseen(session.id)
    if is_replayed:
        await session.replay()
    elif unseen is not None:  # a turn went on while its client was away
        await session.replay(unseen)
    return await _opened(session, agent, in_flight, is_replayed=is_replayed)


async def list_sessions(
    connection: Connection, params: wire.ListSessionsParams, _in_flight: InFlight
) -> dict[str, Any]:
    """List the sessions that had a prompt, the latest first, a page at a time."""
    if params.cwd is not None and not os.path.isabs(params.cwd):
        raise _invalid("cwd must be an absolute path")
    store, owner = (await connection.opened()).store, connection.guest.owner
    try:
        page = await store.list_sessions(cwd=params.cwd, owner=owner, cursor=params.cursor)
    except ValueError:
        raise _invalid("cursor is not one this agent gave") from None
    except StoreError as exc:
        raise RpcError(INTERNAL_ERROR, str(exc)) from None
    result: dict[str, Any] = {
        "sessions": [
            {
                "sessionId": header.id,
                "cwd": header.cwd,
                "title": header.title,
                "updatedAt": iso_time(header.updated_ms),
            }
            for header in page.sessions
        ]
    }
    if page.next_cursor is not None:
        result["nextCursor"] = page.next_cursor
    return result


def close(
    connection: Connection, params: wire.SessionId, _in_flight: InFlight
) -> Coroutine[Any, Any, Any]:
    """Cancel what runs in a session, wait until it is quiet, and let go of it."""
    session = connection.session(params.session_id)
    connection.forget(session)
    session.close()
    return _finish_closing(session)


async def _finish_closing(session: ClientSession) -> dict[str, Any]:
    await session.closed()
    return {}


def delete(
    connection: Connection, params: wire.SessionId, _in_flight: InFlight
) -> Coroutine[Any, Any, Any]:
    """Close a session, if it is open, and forget it for good. Unknown ids are fine."""
    session = connection.sessions.get(params.session_id)
    if session is not None:
        connection.forget(session)
        session.close()
    return _finish_deleting(connection, session, params.session_id)


async def _finish_deleting(
    connection: Connection, session: ClientSession | None, session_id: str
) -> dict[str, Any]:
    backend = await connection.opened()
    owner = connection.guest.owner
    with backend.deleting(session_id, owner):
        if session is not None:
            await session.closed()
        try:
            await backend.delete(session_id, owner)
        except StoreError as exc:
            raise RpcError(INTERNAL_ERROR, str(exc)) from None
    return {}


# --- what they have in common ---------------------------------------------------------------


async def _begun(
    connection: Connection,
    backend: Backend,
    agent: Agent,
    servers: Sequence[wire.McpServer] | None,
    in_flight: InFlight,
) -> dict[str, Any]:
    session = connection.reserve(agent.id)
    backend.holders.take(session)
    session.attach(agent)
    of_agent = backend.mcp_servers.of(agent)
    # Afterwards, because nothing may be said of a session whose id the client does not know yet.
    in_flight.after.append(lambda: session.servers.use(of_agent, servers))
    return {"sessionId": agent.id, **await _opened(session, agent, in_flight)}


async def _opened(
    session: ClientSession, agent: Agent, in_flight: InFlight, *, is_replayed: bool = False
) -> dict[str, Any]:
    with anyio.CancelScope(shield=True):  # a session that is there by now is answered
        await session.commands.look(agent)
    offer = session.commands.offer
    if is_replayed:
        offer()  # a client takes the answer to mean that it has been shown everything
    else:
        in_flight.after.append(offer)
    return {"modes": mode_state(agent), "configOptions": config_options(agent)}


def _checked_places(
    connection: Connection,
    params: wire.NewSessionParams | wire.LoadSessionParams | wire.ResumeSessionParams,
) -> tuple[str, ...]:
    """Return the additional directories, if these and all other places are fine."""
    additional, guest = tuple(params.additional_directories or ()), connection.guest
    _check_directory("cwd", params.cwd, guest)
    for directory in additional:
        _check_directory("every additional directory", directory, guest)
    if (problem := servers_problem(params.mcp_servers or ())) is not None:
        raise _invalid(problem)
    return additional


def _check_directory(name: str, path: str, guest: Guest) -> None:
    if not os.path.isabs(path) or "\0" in path:
        raise _invalid(f"{name} must be an absolute path")
    if not guest.may_open(path):
        raise _invalid(f"{name} is outside of what this server may open")
    if os.path.exists(path) and not os.path.isdir(path):
        raise _invalid(f"{name} is not a directory")


def _invalid(reason: str) -> RpcError:
    return RpcError(INVALID_PARAMS, "Invalid params", {"reason": reason})
