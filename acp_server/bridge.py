"""``acp-agent connect URL``: an agent somewhere else for an editor that knows only stdio.

Lines of the editor become text frames, and the other way round; see `relayed` for what is looked
at. Whoever does not read is not read for. A connection that is lost is made again, for as long as
the editor is there: initialized as the editor did, with the editor's sessions open. What the editor
asks for in between waits a while. The end of the input, or a signal, stops the editor's turns and
closes the connection.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import anyio
from msgspec import Raw

from acp_server.errors import INVALID_REQUEST
from acp_server.message import Notification, Request, Response, error_of, parse
from acp_server.relayed import Relayed, error_answer, session_of
from acp_server.transports.stdio import FdOutbox, claim_stdio, read_lines
from acp_server.transports.websocket import Socket, SocketError, open_socket
from agent_core.logs import get_logger

__all__ = ["HOLD_S", "run_bridge"]

HOLD_S: Final = 10.0
"""So long a request waits for a connection, before it is answered that there is none."""
HELD_BYTES: Final = 1024 * 1024
"""So much may wait, before no more is read."""
RESTORE_LIMIT_S: Final = 30.0
LAST_WORDS_S: Final = 1.0
FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 5.0
STEADY_S: Final = 10.0
"""A connection that lasted longer was a good one, and is looked for again without delay."""

log = get_logger(__name__)


def run_bridge(url: str, token: str | None, *, hold_s: float = HOLD_S) -> int:
    """Relay between standard input and output and an agent, until the editor leaves.

    Args:
        url: ``ws://`` or ``wss://``.
        token: What the agent's server is shown.
        hold_s: Seconds that a request waits for a connection.

    Returns:
        0; 1 if there was no connection at the end, and standard error says why.
    """
    reads, writes = claim_stdio()
    bridge = _Bridge(url, token, hold_s, writes)
    anyio.run(bridge.run, reads)
    if bridge.problem is None:
        return 0
    sys.stderr.write(f"acp-agent: {bridge.problem}\n")
    return 1


class _Bridge:
    """One editor, and its connections to the agent, one after the other."""

    def __init__(self, url: str, token: str | None, hold_s: float, writes: int) -> None:
        self.problem: str | None = None
        self._url = url
        self._token = token
        self._hold_s = hold_s
        self._editor = FdOutbox(writes)
        self._relayed = Relayed(self._send, self._editor.send)
        self._socket: Socket | None = None
        self._is_ready = False  # the agent knows of the editor's sessions
        self._refusal: SocketError | None = None  # too young to try again
        self._held: deque[tuple[float, bytes]] = deque()
        self._n_held_bytes = 0
        self._stops: dict[str, bytes] = {}  # a cancel that could not wait, by session
        self._changed = anyio.Event()
        self._has_left = anyio.Event()
        self._hurries = False  # nobody waits for answers

    async def run(self, reads: int) -> None:
        """Relay until the editor leaves.

        Cancellation: safe; the connection is closed. Concurrency: once.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._hear_signal, number)
        async with anyio.create_task_group() as writing:
            writing.start_soon(self._editor.run, self._leave_now, name="write")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, reads, name="read")
                tasks.start_soon(self._stay_connected, name="connect")
                await self._has_left.wait()
                await self._settle()
                tasks.cancel_scope.cancel()
            with anyio.move_on_after(LAST_WORDS_S):
                await self._editor.flushed()
            writing.cancel_scope.cancel()

    # --- the end -----------------------------------------------------------------------------

    def _hear_signal(self, number: int) -> None:
        if self._hurries:  # twice is enough for whoever sends signals
            os._exit(128 + number)
        self._leave_now()

    def _leave_now(self) -> None:
        self._hurries = True
        self._has_left.set()
        self._note_change()

    async def _settle(self) -> None:
        """Send what the editor said last, stop its turns, and wait a little for the answers."""
        while self._held and not self._hurries:
            await self._changed.wait()
        for stop in tuple(self._relayed.stops()):
            self._send(stop)
        with anyio.move_on_after(LAST_WORDS_S):
            while not self._relayed.is_answered:
                await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # --- the editor --------------------------------------------------------------------------

    async def _read(self, reads: int) -> None:
        await read_lines(reads, self._take, pace=self._pace_editor)
        self._has_left.set()

    async def _pace_editor(self) -> None:
        while self._n_held_bytes > HELD_BYTES:
            await self._changed.wait()
        socket = self._socket
        if socket is not None and socket.outbox.is_congested:
            await socket.outbox.drained()

    def _take(self, line: bytes | None) -> None:
        if line is None:
            self._editor.send(error_answer(None, "The message is too long", code=INVALID_REQUEST))
        elif self._is_ready:
            self._relayed.from_editor(line)
        elif self._refusal is not None:
            self._turn_away(line, self._refusal)
        else:
            self._held.append((time.monotonic(), line))
            self._n_held_bytes += len(line)
            self._note_change()

    def _turn_away(self, line: bytes, problem: SocketError) -> None:
        match parse(line):
            case Request(request_id):
                self._editor.send(
                    error_answer(request_id, f"No connection to the agent: {problem}")
                )
            case Notification("session/cancel", params) if session_id := session_of(params):
                self._stops[session_id] = line
            case _:
                log.info("line_dropped_without_a_connection")

    def _turn_away_late(self, problem: SocketError) -> None:
        latest_s = time.monotonic() - self._hold_s
        self._release(
            lambda since_s: problem.is_final or since_s <= latest_s,
            lambda line: self._turn_away(line, problem),
        )

    def _next_due_s(self) -> float:
        """Return in how many seconds somebody has waited long enough."""
        if not self._held:
            return float("inf")
        return max(FIRST_DELAY_S, self._held[0][0] + self._hold_s - time.monotonic())

    def _release(self, is_due: Callable[[float], bool], take: Callable[[bytes], None]) -> None:
        """Hand what is held, and due by the time it came, to `take`."""
        held, self._held = self._held, deque()
        for since_s, line in held:
            if is_due(since_s):
                self._n_held_bytes -= len(line)
                take(line)
            else:
                self._held.append((since_s, line))
        self._note_change()

    # --- the agent ---------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            began_s = time.monotonic()
            problem = await self._connect()
            if time.monotonic() - began_s > STEADY_S:
                delay_s = FIRST_DELAY_S
            self.problem = str(problem)
            log.info("not_connected", problem=self.problem)
            self._turn_away_late(problem)
            if problem.is_final:
                self._refusal = problem
                await anyio.sleep(LONGEST_DELAY_S)  # wrong tokens are counted over there
                self._refusal = None
                while not self._held:
                    await self._changed.wait()
            else:
                await anyio.sleep(min(delay_s, self._next_due_s()))
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _connect(self) -> SocketError:
        """Be connected for as long as it lasts; return why no more."""
        try:
            async with open_socket(self._url, token=self._token) as socket:
                self._socket = socket
                socket.listen(self._hear, self._pace_agent)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._get_ready, socket, name="restore")
                    await socket.ended.wait()
                    tasks.cancel_scope.cancel()
                self._socket = None
                self._is_ready = False
                self._relayed.lose(str(socket.problem))
                return socket.problem
        except SocketError as exc:
            return exc

    def _hear(self, message: bytes) -> None:
        self._relayed.from_agent(message)
        self._note_change()

    async def _pace_agent(self) -> None:
        if self._editor.is_congested:
            await self._editor.drained()

    def _send(self, message: bytes) -> None:
        if self._socket is not None:
            self._socket.outbox.send(message)

    async def _get_ready(self, socket: Socket) -> None:
        """Tell the agent what it was told before, then what was said in between."""
        if self._relayed.initialize is not None:
            with anyio.move_on_after(RESTORE_LIMIT_S) as limit:
                if not await self._introduce():
                    socket.abort("the agent does not want to go on with this editor")
                    return
                await self._reopen_sessions()
            if limit.cancelled_caught:
                socket.abort("the agent does not open the editor's sessions again")
                return
        self._is_ready = True
        self.problem = None
        for stop in self._stops.values():
            self._send(stop)
        self._stops.clear()
        self._release(lambda _since_s: True, self._relayed.from_editor)

    async def _introduce(self) -> bool:
        told = {
            "initialize": self._relayed.initialize,
            "authenticate": self._relayed.authenticate,
        }
        for method, params in told.items():
            if params is not None:
                answers: list[Response] = []
                self._relayed.ask(method, Raw(params), answers.append)
                while not answers:
                    await self._changed.wait()
                if answers[0].error is not None:
                    log.warning("not_introduced_again", method=method, code=error_of(answers[0])[0])
                    return False
        return True

    async def _reopen_sessions(self) -> None:
        answers: list[Response] = []
        session_ids = tuple(self._relayed.sessions)
        n_asked = sum(self._relayed.reopen(each, answers.append) for each in session_ids)
        while len(answers) < n_asked:
            await self._changed.wait()
