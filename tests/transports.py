"""The black-box tests' agent over every transport: the same wire, whatever is in between.

A test with the mark ``transports`` runs once over stdio, once by WebSocket and once by HTTP.
``make transports`` runs all of them by WebSocket, and then by HTTP; those that cannot be, for what
they are about is another thing there, say so with the mark ``only_over``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from conformance.wire import Wire

__all__ = ["TRANSPORTS", "spawn"]

TRANSPORTS = ("stdio", "ws", "http")
RELAY = str(Path(__file__).with_name("over_network.py"))

current = "stdio"


class NetworkWire(Wire):
    """A wire to a relay, whose one child is the server."""

    def descendants(self) -> set[int]:
        """What the server started."""
        return super().descendants() - self._server()

    def kill(self) -> None:
        """Kill the server; the relay ends with it."""
        for pid in self._server():
            os.kill(pid, signal.SIGKILL)

    def _server(self) -> set[int]:
        return {pid for pid in super().descendants() if _parent_of(pid) == self.pid}


def spawn(
    command: Sequence[str],
    *flags: str,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> AbstractAsyncContextManager[Wire]:
    """Start ``acp-agent serve`` with flags, over the transport of the test."""
    if current == "stdio" or list(command[1:]) != ["-m", "acp_server", "serve"]:
        return Wire.spawn([*command, *flags], cwd=cwd, env=env)
    return NetworkWire.spawn([sys.executable, RELAY, current, *flags], cwd=cwd, env=env)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
