"""The methods a client may call, a module for each group.

To serve another one, write a function ``name(connection, params, in_flight)`` that returns a
coroutine, and give it a line in `METHODS`. An ``async def`` starts when its turn comes; a plain
function takes effect while the line is being received, before the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from acp_server import types as wire
from acp_server.peer import InFlight, Method

if TYPE_CHECKING:
    from acp_server.connection import Connection

__all__ = ["METHODS", "methods_of"]


class Served(Struct, frozen=True):
    """A method: what its params are, and in which module of this package its function is.

    Modules are imported with the first call: a client that only initializes us pays for none.
    """

    params: type
    module: str
    function: str


METHODS: Final[Mapping[str, Served]] = {
    "authenticate": Served(wire.AuthenticateParams, "auth", "authenticate"),
    "logout": Served(wire.LogoutParams, "auth", "logout"),
    "session/new": Served(wire.NewSessionParams, "sessions", "new"),
    "session/load": Served(wire.LoadSessionParams, "sessions", "load"),
    "session/resume": Served(wire.ResumeSessionParams, "sessions", "resume"),
    "session/fork": Served(wire.ResumeSessionParams, "sessions", "fork"),
    "session/list": Served(wire.ListSessionsParams, "sessions", "list_sessions"),
    "session/close": Served(wire.SessionId, "sessions", "close"),
    "session/delete": Served(wire.SessionId, "sessions", "delete"),
    "session/prompt": Served(wire.PromptParams, "prompts", "prompt"),
    "session/set_mode": Served(wire.SetModeParams, "options", "set_mode"),
    "session/set_config_option": Served(wire.SetConfigOptionParams, "options", "set_option"),
}


_LOCAL_ONLY: Final = ("logout",)  # it is for the whole user, not for one of many clients


def methods_of(connection: Connection) -> dict[str, Method]:
    """Return every method, bound to `connection`."""
    return {
        name: Method(served.params, _bound(served, connection))
        for name, served in METHODS.items()
        if not (connection.guest.is_remote and name in _LOCAL_ONLY)
    }


def _bound(
    served: Served, connection: Connection
) -> Callable[[Any, InFlight], Coroutine[Any, Any, Any]]:
    def call(params: Any, in_flight: InFlight) -> Coroutine[Any, Any, Any]:
        module = import_module(f"{__name__}.{served.module}")
        answer: Coroutine[Any, Any, Any] = getattr(module, served.function)(
            connection, params, in_flight
        )
        return answer

    return call
