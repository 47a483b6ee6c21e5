"""The chat's loop: read a prompt, show the turn, and let Ctrl-C stop it.

The person's side runs in the main thread, where a line editor and signals work as they should; the
agent's side runs on an event loop in a second thread. `Keyboard` is the one thing they share.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

import anyio
import msgspec

from acp_server.agent_process import open_agent
from acp_server.chat.forms import CAPABILITIES
from acp_server.chat.keyboard import Keyboard, Typed
from acp_server.chat.opening import Replay, find_session, model_note
from acp_server.chat.questions import Questions, Turn
from acp_server.chat.text import to_mapping, to_string
from acp_server.chat.view import View
from acp_server.client import AgentGone
from acp_server.errors import INTERNAL_ERROR, METHOD_NOT_FOUND, RemoteError
from acp_server.peer import Method

__all__ = ["run_chat"]

STILL_WAITING_AFTER_S: Final = 2.0
OUR_COMMANDS: Final = ("help", "mode", "quit")
HELP: Final = (
    "/mode NAME  change the session's mode",
    "/quit       leave (also Ctrl-D)",
    "Ctrl-C      stop the turn, or the subagents in the background",
)


def run_chat(
    command: list[str],
    *,
    cwd: str,
    mode: str | None = None,
    permissions: Literal["reject", "allow"] = "reject",
    verbose: bool = False,
    resume: str | None = None,
    place: str | None = None,
) -> int:
    """Talk to an agent until the person leaves or the input ends. Call it in the main thread.

    Without a terminal on stdin each line is a prompt, the output is plain text, and what goes
    wrong is told on stderr.

    Args:
        command: The agent's program and arguments.
        cwd: The session's working directory, an absolute path.
        mode: The session mode to start in, `None` for the agent's own.
        permissions: What to answer to permission questions when nobody can be asked; "allow"
            answers so on a terminal too.
        verbose: Whether to show the agent's stderr.
        resume: The session to go on with, by its id or the beginning of it; ``""`` for the latest
            of `cwd`, `None` for a new one.
        place: Where the agent's process starts, if not in `cwd`, which may be on another computer.

    Returns:
        0; 1 if a prompt failed, the session could not be opened, or the agent died; 128 plus the
        signal's number if a signal ended the chat.
    """
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        import readline  # being imported, it gives `input` an editor

        readline.set_auto_history(False)  # answers to questions are no prompts
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    keyboard = Keyboard(is_interactive)
    chat = _Chat(_make_view(is_interactive, cwd), keyboard, permissions, verbose)
    try:
        with keyboard.signals(), ThreadPoolExecutor(1, thread_name_prefix="chat") as threads:
            place = place or cwd
            running = threads.submit(anyio.run, chat.run, command, place, cwd, mode, resume)
            running.add_done_callback(lambda _: keyboard.close())
            keyboard.serve()
            code = running.result()
    except* OSError:
        chat.has_lost_output, code = True, 1
    if chat.has_lost_output:  # what Python flushes at exit must not fail again
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _make_view(is_interactive: bool, cwd: str) -> View:
    is_plain = os.environ.get("TERM", "dumb") == "dumb" or "NO_COLOR" in os.environ
    is_rich = is_interactive and sys.stdout.isatty() and not is_plain
    return View(sys.stdout, cwd=cwd, errors=None if is_interactive else sys.stderr, is_rich=is_rich)


class _Chat:
    """One session with one agent."""

    def __init__(
        self, view: View, keyboard: Keyboard, permissions: Literal["reject", "allow"], verbose: bool
    ) -> None:
        self._view = view
        self._keyboard = keyboard
        self._permissions = permissions
        self._verbose = verbose
        self._session_id = ""
        self._modes: list[str] = []
        self._turn: Turn | None = None
        self._has_failed = False
        self._signal: int | None = None
        self._is_leaving = False
        self._replay: Replay | None = None
        self.has_lost_output = False
        """Whether nobody reads on (`| head`), or the terminal is gone."""

    async def run(
        self, command: list[str], place: str, cwd: str, mode: str | None, resume: str | None
    ) -> int:
        """Hold the conversation; return the exit code.

        Cancellation: safe. Concurrency: once.
        """
        self._keyboard.attach()
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._hear_signals)  # also while the agent is being ended
            with anyio.CancelScope() as self._talking:
                await self._talk(command, place, cwd, mode, resume)
            tasks.cancel_scope.cancel()
        if self._signal is not None:
            return 128 + self._signal
        return int(self._has_failed or self.has_lost_output)

    async def _talk(
        self, command: list[str], place: str, cwd: str, mode: str | None, resume: str | None
    ) -> None:
        questions = Questions(
            self._view,
            self._keyboard,
            self._permissions,
            lambda: self._turn,
            self._interrupt,
            self._lose_output,
        )
        try:
            async with open_agent(
                command,
                cwd=place,
                methods={
                    "session/request_permission": Method(dict[str, Any], questions.answer),
                    "elicitation/create": Method(dict[str, Any], questions.answer_form),
                },
                notifications={"session/update": self._show},
                on_stderr=self._show_log if self._verbose else None,
            ) as self._agent:
                await self._use_session(cwd, mode, resume)
        except AgentGone as gone:  # it could not be started
            self._fail(str(gone))

    async def _use_session(self, cwd: str, mode: str | None, resume: str | None) -> None:
        try:
            await self._open_session(cwd, mode, resume)
            await self._converse()
        except RemoteError as failure:
            self._fail(_describe(failure))
        except AgentGone as gone:
            self._fail(str(gone))
            if not self._verbose:
                self._view.lines(self._agent.last_words)
        except OSError:
            self._lose_output()
        finally:
            self._is_leaving = True

    async def _open_session(self, cwd: str, mode: str | None, resume: str | None) -> None:
        offered = {"subagents": {}} | (CAPABILITIES if self._keyboard.is_interactive else {})
        try:
            hello = await self._agent.initialize("acp-agent-chat", offered)
        except RemoteError as failure:
            if failure.code != METHOD_NOT_FOUND:
                raise
            problem = "it does not know initialize; is it an ACP agent?"
            raise RemoteError(0, problem) from None
        params = {"cwd": cwd, "mcpServers": []}
        if resume is None:
            session = await self._agent.request("session/new", params)
            self._session_id = str(session.get("sessionId"))
        else:
            self._session_id, params["cwd"] = await find_session(self._agent, hello, resume, cwd)
            params["sessionId"] = self._session_id
            self._replay = Replay()
            session = await self._agent.request("session/load", params)
        self._modes = self._view.open(hello.get("agentInfo"), session.get("modes"))
        if mode is not None:
            await self._set_mode(mode)
        if self._keyboard.is_interactive:
            self._view.header(model_note(session))
        if (replay := self._replay) is not None:
            self._replay = None
            self._view.lines(replay.lines())

    async def _converse(self) -> None:
        has_hinted = False
        while not self._signal:
            typed = await self._read_prompt()
            if typed is Typed.INTERRUPT and self._keyboard.is_interactive and not has_hinted:
                has_hinted = True
                self._stop_background()
                self._view.note("Ctrl-C again or Ctrl-D leaves")
                continue
            has_hinted = False
            if typed is Typed.DISCARDED:
                continue
            if isinstance(typed, Typed):
                is_broken_off = typed is Typed.INTERRUPT and not self._keyboard.is_interactive
                self._signal = signal.SIGINT if is_broken_off else None
                return
            if typed.strip() == "/quit":
                return
            if typed.strip():
                self._keyboard.remember(typed)
                await self._run_line(typed.strip())

    def _stop_background(self) -> None:
        if names := ", ".join(self._view.subagents()):
            self._view.note(f"stopping {names}…")
        # Also without names: one may have started just now and not been heard of yet.
        self._agent.notify("session/cancel", {"sessionId": self._session_id})

    async def _read_prompt(self) -> str | Typed:
        typed: str | Typed | None = None
        self._view.hold()
        async with anyio.create_task_group() as tasks:

            async def leave_when_ended() -> None:
                await self._agent.ended.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(leave_when_ended)
            typed = await self._keyboard.read_line("> ")
            tasks.cancel_scope.cancel()
        self._view.release()
        if typed is None:
            raise self._agent.why_gone()
        return typed

    async def _run_line(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        try:
            if word == "/help":
                self._help()
            elif word == "/mode":
                await self._change_mode(rest.strip())
            elif self._is_unknown(line):
                self._view.note(f"No command {line}; /help lists them.")
            else:
                await self._prompt(line)
        except RemoteError as failure:
            self._fail(_describe(failure))

    def _is_unknown(self, line: str) -> bool:
        is_name = re.fullmatch("/[a-z-]+", line) is not None
        # None at all: they are announced behind the session, or never.
        return is_name and bool(self._view.commands) and line[1:] not in self._view.commands

    def _help(self) -> None:
        for line in HELP:
            self._view.note(line)
        for name, description in self._view.commands.items():
            if name not in OUR_COMMANDS:
                self._view.note(f"/{name:<10} {description}")

    async def _change_mode(self, mode: str) -> None:
        if mode:
            await self._set_mode(mode)
        else:
            self._view.note(f"modes: {', '.join(self._modes) or 'none'}")

    async def _set_mode(self, mode: str) -> None:
        params = {"sessionId": self._session_id, "modeId": mode}
        await self._agent.request("session/set_mode", params)
        self._view.set_mode(mode)

    async def _prompt(self, text: str) -> None:
        turn = self._turn = Turn()
        prompt = [{"type": "text", "text": text}]
        stop_reason: object = None
        try:
            result = await self._agent.request(
                "session/prompt", {"sessionId": self._session_id, "prompt": prompt}
            )
            stop_reason = result.get("stopReason")
        finally:
            self._turn = None
            turn.ended.set()
            self._view.end_turn(stop_reason)
        if turn.interrupts:
            if stop_reason != "cancelled":
                self._view.note("the turn had ended before it could be stopped")
            if not self._keyboard.is_interactive:
                self._signal = signal.SIGINT

    def _show(self, params: bytes | None) -> None:
        fields = to_mapping(msgspec.json.decode(params or b"{}"))
        update = to_mapping(fields.get("update"))
        if self._replay is not None and self._replay.take(update):
            return
        try:
            self._view.update(update, to_string(fields.get("sessionId")))
        except OSError:  # the peer keeps what a handler raises to itself
            self._lose_output()

    def _show_log(self, line: str) -> None:
        self._view.lines([line])

    def _fail(self, text: str) -> None:
        self._has_failed = True
        self._view.error(text)

    async def _hear_signals(self) -> None:
        while True:
            number = await self._keyboard.next_signal()
            try:
                if number == signal.SIGINT:
                    if self._keyboard.is_interactive:
                        self._view.leave_line()
                    self._interrupt()
                else:
                    self._leave(number)
            except OSError:
                self._lose_output()

    def _leave(self, number: int) -> None:
        if self._is_leaving:  # twice is enough for whoever sends signals
            self._agent.terminate()
            os._exit(128 + number)
        self._signal = number
        self._is_leaving = True
        self._talking.cancel()

    def _lose_output(self) -> None:
        """Leave, because nobody reads on, or the terminal is gone."""
        self.has_lost_output = self._is_leaving = True
        self._talking.cancel()

    def _interrupt(self) -> None:
        if self._is_leaving:
            self._leave(signal.SIGINT)
            return
        turn = self._turn
        if turn is None:
            # Between prompts it is too late to stop one turn and too early to stop the next.
            if not (self._session_id and self._keyboard.is_interactive):
                self._leave(signal.SIGINT)
            return
        turn.interrupts += 1
        if turn.interrupts == 1:
            self._stop(turn)
        elif turn.interrupts == 2:
            self._say_what_is_awaited()
        else:
            self._leave(signal.SIGINT)

    def _stop(self, turn: Turn) -> None:
        self._view.note("stopping…")
        for question in turn.questions:
            question.cancel()
        self._agent.notify("session/cancel", {"sessionId": self._session_id})
        self._tasks.start_soon(self._remind, turn)

    async def _remind(self, turn: Turn) -> None:
        with anyio.move_on_after(STILL_WAITING_AFTER_S):
            await turn.ended.wait()
        if not turn.ended.is_set():
            self._say_what_is_awaited()

    def _say_what_is_awaited(self) -> None:
        awaited = ", ".join(self._view.open_calls()) or "the agent's answer"
        self._view.note(f"still waiting for: {awaited} (Ctrl-C again leaves the chat)")


def _describe(failure: RemoteError) -> str:
    if failure.reason:
        return f"{failure.message}: {failure.reason}"
    is_plain = failure.code in (0, INTERNAL_ERROR)  # the message says it all
    return failure.message if is_plain else f"{failure.message} ({failure.code})"
