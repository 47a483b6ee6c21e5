"""Shell commands that can be found again while they run, whatever they did to get away.

A `Sleeper` sleeps for a number of seconds that nobody else would, so that its processes are known
by their own argument: also those that left the tree, and those of agents that run commands
elsewhere on this machine.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from conformance import processes

__all__ = ["Sleeper"]

SHORTEST_S: Final = 10_000_000  # four months: no process with such an argument ends by itself
POLL_S: Final = 0.01


class Sleeper:
    """A command that sleeps. Made by `asleep`.

    Attributes:
        command: What to have run in a shell: ``sleep`` with a number of its own, in the form that
            was asked for.
    """

    def __init__(self, form: str = "sleep {s}") -> None:
        self._argument = str(SHORTEST_S + secrets.randbelow(80_000_000))
        self.command: Final = form.replace("{s}", self._argument)

    @classmethod
    @contextmanager
    def asleep(cls, form: str = "sleep {s}") -> Iterator[Sleeper]:
        """Make a command; what still runs of it when the block ends is killed.

        Args:
            form: The command, with ``{s}`` wherever it sleeps.
        """
        sleeper = cls(form)
        try:
            yield sleeper
        finally:
            processes.kill(sleeper.running())

    def running(self) -> set[int]:
        """Return the ids of its processes: those that sleep, not the shell around them."""
        return _with_argument(self._argument)

    async def has_started(
        self, timeout_s: float, unless: Callable[[], bool], *, n_processes: int = 1
    ) -> bool:
        """Wait until it sleeps, and say whether it does.

        Cancellation: safe. Concurrency: any number of tasks.

        Args:
            timeout_s: How long to wait.
            unless: Says that it will not start any more.
            n_processes: In how many processes at least.
        """
        with anyio.move_on_after(timeout_s):
            while len(self.running()) < n_processes and not unless():  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(POLL_S)
        return len(self.running()) >= n_processes

    async def is_gone(self, timeout_s: float) -> bool:
        """Wait until nothing of it is left, and say whether nothing is.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        with anyio.move_on_after(timeout_s):
            while self.running():  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(POLL_S)
        return not self.running()


def _with_argument(argument: str) -> set[int]:
    """Return the living processes that were started with exactly this among their arguments."""
    wanted = argument.encode()
    if not processes.PROC.is_dir():
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,args="], capture_output=True, text=True, check=True
        ).stdout
        rows = (line.split() for line in listing.splitlines())
        return {int(pid) for pid, *words in rows if words == ["sleep", argument]}
    found = set()
    for folder in processes.PROC.iterdir():
        if folder.name.isdecimal():
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
            except (*processes.GONE, NotADirectoryError):
                continue
            if wanted in arguments:
                found.add(int(folder.name))
    return found
