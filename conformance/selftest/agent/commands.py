"""Local commands: started in a session of their own, ended with all that they started."""

from __future__ import annotations

import os
import signal as signals
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final

from conformance.selftest.agent.loop import READ, Loop

if TYPE_CHECKING:
    import subprocess

__all__ = ["Command", "child_environment", "end_all"]

MARK: Final = "ACP_SELFTEST_COMMAND"
OUTPUT_BYTES: Final = 64 * 1024
END_LIMIT_S: Final = 2.0
PROC: Final = "/proc"
SECRET_WORDS: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")

_running: set[Command] = set()


class Command:
    """A program and whatever it starts, also what leaves its process group.

    Its descendants are known by the process tree, by their session, and by a mark in their
    environment, which cannot be read in the instant in which a process becomes another program.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        loop: Loop,
        arguments: list[str],
        cwd: str,
        *,
        env: Mapping[str, str] | None = None,
        has_input: bool = False,
    ) -> None:
        import subprocess

        self._loop = loop
        self._mark = f"{MARK}={os.urandom(8).hex()}"
        name, _, value = self._mark.partition("=")
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            arguments,
            cwd=cwd,
            env={**child_environment(), **(env or {}), name: value},
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if has_input else subprocess.STDOUT,
            start_new_session=True,
        )
        self.output = bytearray()
        self.is_cut = False
        os.set_blocking(self.stdout.fileno(), False)
        _running.add(self)

    @property
    def stdout(self) -> IO[bytes]:
        """What it prints."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; `None` while it runs."""
        return self._process.returncode

    def write(self, data: bytes) -> None:
        """Give it input. Only for what is small enough for a pipe."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    async def run(self, on_output: Callable[[], None]) -> None:
        """Wait until it ended, and then end what it left behind. May be cancelled: it runs on.

        Args:
            on_output: Called whenever there is more in ``output``.
        """
        fd = self.stdout.fileno()

        def take() -> None:
            if self._take():
                on_output()
            else:
                self._loop.unwatch(fd)

        self._loop.watch(fd, READ, take)
        try:
            await self._loop.exited(self._process.poll)
        finally:
            self._loop.unwatch(fd)
        await self.end()

    async def end(self) -> None:
        """Kill it with all that it started, and wait until nothing of it is left."""
        if self not in _running:
            return
        for _ in range(int(END_LIMIT_S * 100)):
            if not self.kill():
                break
            await self._loop.sleep(0.01)
        while self._take():  # what it printed last; nobody is left to print more
            pass
        self.stdout.close()
        _running.discard(self)

    def kill(self) -> int:
        """Send SIGKILL to all that is left; return how many there were."""
        family = self._family()
        for pid in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signals.SIGKILL)
        self._process.poll()
        return len(family)

    def _take(self) -> bool:
        """Take what it printed; say whether there may be more."""
        try:
            chunk = os.read(self.stdout.fileno(), OUTPUT_BYTES)
        except BlockingIOError:
            return False
        self.output += chunk
        if len(self.output) > OUTPUT_BYTES:
            del self.output[: len(self.output) - OUTPUT_BYTES]
            self.is_cut = True
        return bool(chunk)

    def _family(self) -> set[int]:
        if not os.path.isdir(PROC):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signals.SIGKILL)
            return {self._process.pid} if self._process.poll() is None else set()
        alive = list(filter(None, map(_status, filter(str.isdecimal, os.listdir(PROC)))))
        parents = {pid: parent for pid, parent, _session in alive}
        own = self._process.pid  # of the session, too
        family = {pid for pid, _, session in alive if session == own or self._is_marked(pid)} | {
            own
        }
        while below := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= below
        return family & parents.keys()

    def _is_marked(self, pid: int) -> bool:
        try:
            with open(f"{PROC}/{pid}/environ", "rb") as file:
                return self._mark.encode() in file.read().split(b"\0")
        except OSError:
            return False


def child_environment() -> dict[str, str]:
    """Return our environment without what looks like a secret."""
    return {
        name: value
        for name, value in os.environ.items()
        if not any(word in name.upper() for word in SECRET_WORDS)
    }


def end_all() -> None:
    """Kill all commands that still run; give up after a while. Blocks: for the end of all."""
    limit = time.monotonic() + END_LIMIT_S
    while sum(command.kill() for command in _running) and time.monotonic() < limit:
        time.sleep(0.01)


def _status(pid: str) -> tuple[int, int, int] | None:
    """Return the process, its parent and its session; `None` if it is dead."""
    try:
        with open(f"{PROC}/{pid}/stat", "rb") as file:
            state, parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
    except OSError:
        return None
    return None if state in b"ZX" else (int(pid), int(parent), int(session))
