"""The MCP servers a session may name, as values: equal ones are the same server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from msgspec import Struct

__all__ = [
    "Answer",
    "HttpServer",
    "Progress",
    "Question",
    "Server",
    "SseServer",
    "StdioServer",
]


class StdioServer(Struct, frozen=True):
    """A program of this machine. `environ` is what it gets besides a few harmless variables."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


class HttpServer(Struct, frozen=True):
    """A server at an address, by streamable HTTP."""

    name: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()


class SseServer(Struct, frozen=True):
    """A server at an address, by the older transport of server-sent events."""

    name: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()


Server = StdioServer | HttpServer | SseServer


class Question(Struct, frozen=True):
    """What a server wants to know of a person: a flat form, or that they open an address.

    `visit_id` is the server's name for the visit; it says later that what was to be done is done.
    """

    message: str
    schema: Mapping[str, Any] | None = None
    url: str | None = None
    visit_id: str = ""


Answer = tuple[Literal["accept", "decline", "cancel"], Mapping[str, Any]]
"""What came of a question, and the form's fields."""


class Progress(Protocol):
    """Told how far a call is."""

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        """Take what is done, of how much if that is known, and in words if there are any."""
        ...
