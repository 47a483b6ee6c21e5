"""Commands in the client's terminals, where it offers them.

Whatever happens, a terminal that was made is let go of, and one whose command may still run is
killed before that. Neither needs an answer, so a client that gives none holds nothing up; that the
command has ended is known from the answer to ``terminal/wait_for_exit`` alone.
"""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Literal

import anyio
import msgspec

from acp_server import types as wire
from acp_server.capabilities import Features
from acp_server.client_calls import call_client
from acp_server.peer import Peer
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal, TurnAborted
from agent_core.content import Terminal
from agent_core.errors import ToolError
from agent_core.logs import get_logger
from agent_core.tools.local_commands import MAX_OUTPUT_BYTES, CutOutput
from agent_core.tools.tool import CommandAborted, CommandResult, Commands, Progress

__all__ = ["ClientTerminals", "TerminalsSeen", "lend_terminals"]

EXIT_LIMIT_S: Final = 2.0
"""What a command that was killed has to end, before we go on without knowing."""
LAST_OUTPUT_LIMIT_S: Final = 0.5
"""What the client has to say what a command printed, when the turn is over."""

log = get_logger(__name__)


class TerminalsSeen:
    """The terminals that one session of a client knows.

    Attributes:
        ids: Of all of them, those that are no more too: a client goes on showing them.
        when_all_shown: Waits until the client has been sent all that there is to show.
    """

    def __init__(self, when_all_shown: Callable[[], Awaitable[None]]) -> None:
        self.ids: set[str] = set()
        self.when_all_shown = when_all_shown


def lend_terminals(
    agent: Agent, session_id: str, peer: Peer, features: Features, seen: TerminalsSeen
) -> Callable[[], None]:
    """Have `agent` run commands in the client's terminals, if the client offers them.

    Returns:
        What gives the agent the local commands back, unless others were lent to it since.
    """
    local = agent.commands.local if isinstance(agent.commands, ClientTerminals) else agent.commands
    lent = local
    if features.has_terminals:
        lent = ClientTerminals(session_id, peer, seen, local)
    agent.commands = lent

    def give_back() -> None:
        if agent.commands is lent:
            agent.commands = local

    return give_back


class ClientTerminals:
    """The `Commands` protocol through ``terminal/*``.

    Attributes:
        local: What ran commands before.
    """

    def __init__(self, session_id: str, peer: Peer, seen: TerminalsSeen, local: Commands) -> None:
        self.local = local
        self._session_id = session_id
        self._peer = peer
        self._seen = seen

    async def run(
        self,
        command: str,
        *,
        cwd: str,
        signal: AbortSignal,
        timeout_s: float | None,
        show: Progress,
    ) -> CommandResult:
        """Run `command` to its end in a terminal of the client; see `Commands.run`.

        Only the last 32 KiB of its output are asked for. A client that says nothing any more after
        the abort is waited for 2.5 s at most, and the result says what is not known. So is one
        that was just making the terminal: none is to live on behind the turn.

        Cancellation: safe. Concurrency: any number of commands.
        """
        try:
            terminal = await self._create(command, cwd, signal)
        except TurnAborted:
            text = "[the client was asked to end it, should it have started]"
            raise CommandAborted(CommandResult(None, text)) from None
        try:
            show(terminal.content)
            with suppress(TurnAborted):  # or it could be gone before the client sees it embedded
                async with signal.scope():
                    await self._seen.when_all_shown()
            return await terminal.result(signal, timeout_s)
        finally:
            terminal.release()

    async def _create(self, command: str, cwd: str, signal: AbortSignal) -> _Terminal:
        async with signal.scope():
            await self._seen.when_all_shown()
        params = {
            "sessionId": self._session_id,
            "command": "/bin/sh",
            "args": ["-c", command],
            "cwd": cwd,
            "outputByteLimit": MAX_OUTPUT_BYTES,
        }
        late = _LateTerminal(self._peer, self._session_id)
        try:
            created = await call_client(
                self._peer,
                "terminal/create",
                params,
                wire.CreatedTerminal,
                signal=signal,
                late=late.told,
            )
            terminal_id = created.terminal_id
        except TurnAborted:
            made = await late.terminal_id()  # else it lives on behind the turn's answer
            if made is None:
                raise
            terminal_id = made
        finally:
            late.close()
        self._seen.ids.add(terminal_id)
        return _Terminal(self._peer, self._session_id, terminal_id)


class _LateTerminal:
    """The terminal that the client makes, or does not, though its answer is not waited for."""

    def __init__(self, peer: Peer, session_id: str) -> None:
        self._peer = peer
        self._session_id = session_id
        self._is_known = anyio.Event()
        self._terminal_id: str | None = None
        self._is_closed = False

    async def terminal_id(self) -> str | None:
        """Wait until it is known, for `EXIT_LIMIT_S` at most, and return its id if it was made.

        Cancellation: safe.
        """
        with anyio.move_on_after(EXIT_LIMIT_S):
            await self._is_known.wait()
        terminal_id, self._terminal_id = self._terminal_id, None
        return terminal_id

    def close(self) -> None:
        """Release by itself what nobody has taken, or what is made later still."""
        self._is_closed = True
        if self._terminal_id is not None:
            _Terminal(self._peer, self._session_id, self._terminal_id).release()

    def told(self, result: bytes | None) -> None:
        """Take the client's answer; see `Peer.call`."""
        self._is_known.set()
        if result is None:
            return
        try:
            terminal_id = msgspec.json.decode(result, type=wire.CreatedTerminal).terminal_id
        except (msgspec.MsgspecError, RecursionError):
            log.info("late_terminal_malformed")
            return
        if self._is_closed:
            _Terminal(self._peer, self._session_id, terminal_id).release()
        else:
            self._terminal_id = terminal_id


class _Terminal:
    """One command in one terminal, from its creation to its release."""

    def __init__(self, peer: Peer, session_id: str, terminal_id: str) -> None:
        self.content = (Terminal(terminal_id),)
        self._peer = peer
        self._name = {"sessionId": session_id, "terminalId": terminal_id}
        self._exit: wire.TerminalExit | None = None
        self._is_killed = False

    async def result(self, signal: AbortSignal, timeout_s: float | None) -> CommandResult:
        """Wait for the end of the command and return what became of it; see `Commands.run`."""
        ending = await self._end(signal, timeout_s)
        text, is_truncated = await self._output(signal)
        if isinstance(ending, ToolError):
            raise ToolError(
                f"{ending.message}, so how the command ended is not known; its output:\n{text}",
                code=ending.code,
            )
        if ending == "timed_out":
            raise ToolError(
                f"the command was ended because it took longer than {timeout_s:g} s; "
                f"its output until then:\n{text or '(none)'}",
                code="TOOL_TIMEOUT",
            )
        result = CommandResult(_exit_code(self._exit), text, is_truncated, content=self.content)
        if ending == "aborted":
            raise CommandAborted(result)
        return result

    def release(self) -> None:
        """Let go of the terminal, after killing the command unless it has ended."""
        if self._exit is None:
            self._kill()
        self._peer.post("terminal/release", self._name)

    def _kill(self) -> None:
        if not self._is_killed:
            self._is_killed = True
            self._peer.post("terminal/kill", self._name)

    async def _end(
        self, signal: AbortSignal, timeout_s: float | None
    ) -> Literal["exited", "aborted", "timed_out"] | ToolError:
        """Wait for the command's end; kill it when the signal fires or the time is up."""
        killed_for: Literal["aborted", "timed_out"] | None = None
        failure: ToolError | None = None

        async def kill_when_due() -> None:
            nonlocal killed_for
            with anyio.move_on_after(timeout_s):
                await signal.wait()
            if self._exit is None and failure is None:
                killed_for = "aborted" if signal.aborted else "timed_out"
                self._kill()
                await anyio.sleep(EXIT_LIMIT_S)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_when_due)
            try:
                self._exit = await call_client(
                    self._peer,
                    "terminal/wait_for_exit",
                    self._name,
                    wire.TerminalExit,
                    signal=None,
                    limit_s=math.inf,
                )
            except ToolError as exc:
                failure = exc
            tasks.cancel_scope.cancel()
        return killed_for or failure or "exited"

    async def _output(self, signal: AbortSignal) -> tuple[str, bool]:
        """Return the text for the model, and whether something of it is missing."""
        notes = [] if self._exit is not None else [_NOT_KNOWN]
        is_over = signal.aborted
        try:
            answer = await call_client(
                self._peer,
                "terminal/output",
                self._name,
                wire.TerminalOutput,
                signal=None if is_over else signal,
                limit_s=LAST_OUTPUT_LIMIT_S if is_over else None,
            )
        except TurnAborted:
            return "\n".join(["[its output was not waited for]", *notes]), True
        except ToolError as exc:
            return "\n".join([f"[its output is not known: {exc.message}]", *notes]), True
        kept = CutOutput()
        kept.feed(answer.output.replace("\r\n", "\n").encode())
        text = kept.text()
        if answer.truncated:
            text = f"[… the beginning was left out …]\n{text}"
        text = "\n".join([text.removesuffix("\n"), *notes]) if notes else text
        return text, answer.truncated or kept.is_truncated


_NOT_KNOWN: Final = "[the client did not say that the command has ended]"


def _exit_code(status: wire.TerminalExit | None) -> int | None:
    if status is None:
        return None
    number = _signal_number(status.signal) if isinstance(status.signal, str) else None
    if number is not None:
        return -number
    return status.exit_code if type(status.exit_code) is int else None


def _signal_number(name: str) -> int | None:
    """Return the number of a signal by any of its names: ``SIGTERM``, ``Terminated``, ``15``."""
    wanted = name.strip().upper().removeprefix("SIG")
    for known in signals.Signals:
        words = signals.strsignal(known) or ""
        if wanted in (known.name.removeprefix("SIG"), words.upper(), str(known.value)):
            return known.value
    return None
