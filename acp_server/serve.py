"""``acp-agent serve``: one client on stdio, from the first byte to the last process stopped.

The first line is answered before the agent's side is even imported. End of input, or the first
SIGTERM, SIGINT or SIGHUP, disposes everything, waits, sends the last answers, and exits 0. A second
signal, or the end of the grace time, ends the process at once: here, and only here.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import anyio

from acp_server.connection import Connection
from acp_server.logs import quiet_streams
from acp_server.transports.stdio import FdOutbox, claim_stdio, read_lines

if TYPE_CHECKING:
    from acp_server.config import Config

__all__ = ["Grace", "hear_signals", "serve_stdio"]

LAST_WORDS_S: Final = 1.0
"""How long a client that does not read may hold up our exit."""


def serve_stdio(configure: Callable[[], Config], *, grace_s: float) -> int:
    """Serve one client on standard input and output until it leaves or a signal comes.

    Args:
        configure: Called after ``initialize`` was answered; raises `ConfigError`.
        grace_s: Seconds that what is running has to stop.

    Returns:
        The exit code, 0.
    """
    reads, writes = claim_stdio()
    quiet_streams()
    anyio.run(_serve, reads, writes, configure, grace_s)
    _begin_collecting()  # with an SDK loaded, a last look for garbage takes the interpreter 0.2 s
    return 0


async def _serve(reads: int, writes: int, configure: Callable[[], Config], grace_s: float) -> None:
    begun, over, grace = anyio.Event(), anyio.Event(), Grace(grace_s)
    async with anyio.create_task_group() as tasks:
        outbox = FdOutbox(writes)
        connection = Connection(outbox, tasks)

        def end() -> None:
            begun.set()
            over.set()
            grace.begin()

        async def read() -> None:
            await read_lines(reads, connection.receive)
            end()

        connection.on_initialized(begun.set)
        tasks.start_soon(outbox.run, end, name="write")
        hear_signals(end, grace)
        tasks.start_soon(read, name="read")
        await begun.wait()
        if connection.is_initialized:
            await _run_agents(connection, configure, over)
        with anyio.move_on_after(LAST_WORDS_S):
            await connection.peer.answered()
            await outbox.flushed()
        connection.peer.close()
        grace.cancel()
        tasks.cancel_scope.cancel()


async def _run_agents(
    connection: Connection, configure: Callable[[], Config], over: anyio.Event
) -> None:
    from acp_server.backend import open_backend
    from acp_server.config import ConfigError

    try:
        config = configure()
        async with open_backend(config) as backend:
            connection.open(backend)
            if (library := backend.library) is not None:
                from agent_core.models.sdk import prewarm

                prewarm(library, _begin_collecting)
            else:
                _begin_collecting()
            await over.wait()
    except ConfigError as exc:
        connection.refuse(str(exc))
        _begin_collecting()
        await over.wait()


def _begin_collecting() -> None:
    """Look for garbage from now on, but not in what is loaded, which stays."""
    gc.freeze()  # a full look through an SDK takes 0.2 s
    gc.enable()


class Grace:
    """The time that what is running has to stop in, from the first call of `begin` on.

    A thread counts it, because what does not stop may be holding the event loop.
    """

    def __init__(self, limit_s: float) -> None:
        self._timer = threading.Timer(limit_s, _end_at_once, args=(1,))
        self._timer.daemon = True
        self._has_begun = False

    def begin(self) -> None:
        """Start to count. Idempotent."""
        if not self._has_begun:
            self._has_begun = True
            self._timer.start()

    def cancel(self) -> None:
        """Count no more."""
        self._timer.cancel()


def hear_signals(
    end: Callable[[], None],
    grace: Grace,
    numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
) -> None:
    """Let the first signal `end` everything, and the second end the process at once.

    Plain handlers, not the event loop's: they are heard also while something holds the loop.
    """
    loop = asyncio.get_running_loop()
    is_ending = False

    def hear(number: int, _frame: object) -> None:
        nonlocal is_ending
        if is_ending:
            _end_at_once(128 + number)
        is_ending = True
        grace.begin()
        loop.call_soon_threadsafe(end)

    for number in numbers:
        signal.signal(number, hear)


def _end_at_once(code: int) -> None:
    from agent_core.tools.processes import kill_all

    kill_all()
    os._exit(code)
