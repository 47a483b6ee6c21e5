"""``authenticate`` and ``logout``: there is nothing to log in to but the configured model.

A session can be opened without a key: it may only be read, or use another model. What needs a key
and has none is a prompt, and its answer says so by `AUTH_REQUIRED`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread

from acp_server import types as wire
from acp_server.capabilities import Features
from acp_server.errors import AUTH_REQUIRED, INTERNAL_ERROR, INVALID_PARAMS, RpcError
from acp_server.peer import InFlight

if TYPE_CHECKING:
    from acp_server.connection import Connection

CONFIGURED: Final = {
    "id": "configured",
    "name": "Use the configured model",
    "description": "Checks that the model acp-agent was configured with can be used.",
}
LOGIN: Final = {
    "id": "login",
    "type": "terminal",
    "name": "Store a key",
    "description": "Asks for the key of the model's provider, and stores it.",
    "args": ["login"],
}


def auth_methods(features: Features) -> list[dict[str, Any]]:
    """Return what to offer a client. There is always one: without, registries list no agent."""
    return [CONFIGURED, LOGIN] if features.runs_logins else [CONFIGURED]


async def authenticate(
    connection: Connection, params: wire.AuthenticateParams, _in_flight: InFlight
) -> dict[str, Any]:
    """Say whether the configured model can be used; also after a login in a terminal."""
    known = [method["id"] for method in auth_methods(connection.features)]
    if params.method_id not in known:
        reason = f"there are {' and '.join(map(repr, known))}"
        raise RpcError(INVALID_PARAMS, "Unknown authentication method", {"reason": reason})
    if (problem := (await connection.opened()).configuration_problem()) is not None:
        raise RpcError(AUTH_REQUIRED, problem)
    return {}


async def logout(
    connection: Connection, _params: wire.LogoutParams, _in_flight: InFlight
) -> dict[str, Any]:
    """Forget the keys that a login stored. No turn is stopped; its next model call has no key."""
    from acp_server.stored_keys import KeysUnusable, forget_keys

    await connection.opened()
    try:
        await anyio.to_thread.run_sync(forget_keys)  # it waits for a login that is writing
    except KeysUnusable as exc:
        raise RpcError(INTERNAL_ERROR, str(exc)) from None
    return {}
