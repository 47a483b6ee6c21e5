"""The methods a client may call, a module for each group.

To serve another one, write a function ``name(connection, params, in_flight)`` that returns a
coroutine, and give it a line in `METHODS`. An ``async def`` starts when its turn comes; a plain
function takes effect while the line is being received, before the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
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


class _Methods(Mapping[str, Method]):
    """Every method of one connection, bound to it when it is first called.

    Few connections call many of them, and there may be a thousand connections.
    """

    __slots__ = ("_bound", "_connection")

    def __init__(self, connection: Connection, bound: dict[str, Method]) -> None:
        self._connection = connection
        self._bound = bound

    def __getitem__(self, name: str) -> Method:
        method = self._bound.get(name)
        if method is None:
            if not self._has(name):
                raise KeyError(name)
            served = METHODS[name]
            method = Method(served.params, _bound(served, self._connection))
            self._bound[name] = method
        return method

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._bound, *filter(self._has, METHODS)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _has(self, name: str) -> bool:
        return name in METHODS and not (name in _LOCAL_ONLY and self._connection.guest.is_remote)


def methods_of(connection: Connection, **own: Method) -> Mapping[str, Method]:
    """Return every method, bound to `connection`, and its own."""
    return _Methods(connection, own)


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
