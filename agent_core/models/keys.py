"""A provider's key: given, or what a command prints."""

from __future__ import annotations

import os
import signal as signals
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Final

import anyio

from agent_core.cancellation import AbortSignal
from agent_core.errors import ModelError
from agent_core.logs import get_logger

__all__ = ["Key", "key_from"]

COMMAND_LIMIT_S: Final = 30.0
# Less than any pipe holds: nobody need read while the command runs.
MAX_OUTPUT_BYTES: Final = 2**12

log = get_logger(__name__)


class Key:
    """What a provider is shown, and how people are told to change it. Never in a log or message.

    Args:
        value: The key; `None` if there is none, or a command has it.
        command: Arguments of a command that prints the key. It is run when the key is first
            needed, and again after the provider refused what it printed. What it writes to stderr
            is dropped: it may well have the key in it.
        look_up: Where there may be a key if there is neither: asked each time, so that what changes
            there counts at once.
        advice: What to do about a key that is missing or refused, as the end of a sentence:
            ``set OPENAI_API_KEY``.
    """

    def __init__(
        self,
        value: str | None = None,
        *,
        command: Sequence[str] = (),
        look_up: Callable[[], str | None] = lambda: None,
        advice: str,
    ) -> None:
        self.advice = advice
        self._command = tuple(command)
        self._value = value
        self._look_up = look_up if value is None and not command else None
        self._asking = anyio.Lock()

    def __repr__(self) -> str:
        return "Key(***)"

    @property
    def is_given(self) -> bool:
        """Whether there is a key, or a command to ask for one."""
        self._find()
        return self._value is not None or bool(self._command)

    @property
    def secret(self) -> str | None:
        """The key as far as it is known by now; for blanking it out of foreign words."""
        return self._value

    async def value(self, signal: AbortSignal) -> str | None:
        """Return the key; `None` if there is none.

        Cancellation: through `signal`; the command and all it started are killed.
        Concurrency: any number of tasks; one of them runs the command for all.

        Raises:
            ModelError: ``NOT_CONFIGURED``: the command failed.
            TurnAborted: The signal fired.
        """
        self._find()
        if self._value is None and self._command:
            async with signal.scope(), self._asking:
                if self._value is None:
                    self._value = await self._ask()
        return self._value

    def refuse(self, key: str | None) -> bool:
        """Forget `key`, which the provider refused, if a command printed it.

        Returns:
            Whether there may be another one: the next `value` asks for it.
        """
        if self._command and self._value == key:
            self._value = None
        return bool(self._command)

    def _find(self) -> None:
        if self._look_up is not None:
            self._value = self._look_up()

    async def _ask(self) -> str:
        program = self._command[0]
        key, problem = await key_from(self._command)
        if problem:
            log.warning("key_command_failed", program=program, problem=problem)
            raise ModelError(
                f"the key's command {program!r} failed, {problem}; {self.advice}",
                code="NOT_CONFIGURED",
            )
        return key


async def key_from(
    command: Sequence[str], errors: int | IO[bytes] = subprocess.DEVNULL
) -> tuple[str, str]:
    """Run a command that prints a key.

    Cancellation: safe; the command and all it started are killed. Concurrency: any number of tasks.

    Args:
        command: Program and arguments.
        errors: What takes its stderr.

    Returns:
        The key, and what is wrong with it or the command; if that is empty, nothing is.
    """
    try:
        with anyio.fail_after(COMMAND_LIMIT_S):
            status, output = await _run(command, errors)
        key = output.decode("ascii").strip()
        return key, f"it ended with status {status}" if status else _problem(key)
    except UnicodeDecodeError:
        return "", "it printed something that is no key"
    except OSError as exc:  # a TimeoutError is one, too
        is_late = isinstance(exc, TimeoutError)
        return "", f"it took over {COMMAND_LIMIT_S:.0f} s" if is_late else "it cannot be run"


def _problem(key: str) -> str:
    if not key:
        return "it printed nothing"
    return "" if key.isprintable() and " " not in key else "it printed something that is no key"


async def _run(command: Sequence[str], errors: int | IO[bytes]) -> tuple[int, bytes]:
    """Run a command in a process group of its own; return its status and what it printed.

    What a daemon that it left behind may print later is not waited for.
    """
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        try:
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=errors,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            status = await process.wait()
        except BaseException:
            with suppress(ProcessLookupError, PermissionError):  # only zombies are left
                os.killpg(process.pid, signals.SIGKILL)
            with anyio.CancelScope(shield=True):
                await process.wait()
            raise
        try:
            return status, os.read(reading, MAX_OUTPUT_BYTES)
        except BlockingIOError:  # it printed nothing, and a daemon holds the pipe open
            return status, b""
    finally:
        os.close(reading)
