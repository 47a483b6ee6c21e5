"""Which processes an agent started, what they use, and how to end them.

Reads ``/proc``. Where there is none, the process tree comes from `ps` and markers are not seen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

__all__ = ["MARKER", "cpu_s", "kill", "living_family", "orphans_ended", "rss_bytes", "starved_s"]

MARKER: Final = "ACP_WIRE_MARKER"
PROC: Final = Path("/proc")
SET_CHILD_SUBREAPER: Final = 36
ORPHANS_LIMIT_S: Final = 5.0
GONE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


def living_family(roots: set[int], marker: str) -> set[int]:
    """Return the living among `roots`, the processes below them, and those with `marker`.

    Args:
        roots: Process ids.
        marker: ``NAME=VALUE``, as it stands in the environment a process was started with.
    """
    parents = _parents()
    family = roots | {pid for pid in parents if _has_marker(pid, marker)}
    while below := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= below
    return family & parents.keys()


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each."""
    for pid in pids:
        # It ended meanwhile, which is what we want; or it has become somebody else's.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def orphans_ended() -> Iterator[None]:
    """End, with the block, every process below this one, whatever it did to get away.

    Where Linux lets us, whoever loses its parent meanwhile becomes a child of ours, so that also
    those are found that left the tree and dropped the marker. For programs that have no other
    children.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        until_s = time.monotonic() + ORPHANS_LIMIT_S
        while (left := _below(os.getpid())) and time.monotonic() < until_s:
            kill(left)
            time.sleep(0.01)


def _below(pid: int) -> set[int]:
    return living_family({pid}, f"{MARKER}=none") - {pid}


def cpu_s(pid: int) -> float:
    """Return user and system time of the process itself, in seconds."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def starved_s(pid: int) -> float:
    """Return the seconds for which the process could have run and had to wait for a processor.

    Of its first thread; 0 where the system does not say.
    """
    with suppress(*GONE, ValueError, IndexError):
        return int((PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9
    return 0.0


def rss_bytes(pid: int) -> int:
    """Return the resident memory of the process itself."""
    n_pages = int((PROC / str(pid) / "statm").read_text().split()[1])
    return n_pages * os.sysconf("SC_PAGE_SIZE")


def _parents() -> dict[int, int]:
    """Return the parent of each living process; the dead that wait to be reaped do not count."""
    if not PROC.is_dir():
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split() for line in listing.splitlines()]
        return {int(pid): int(parent) for pid, parent, state in rows if state[0] != "Z"}
    parents = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(*GONE):
                state, parent, *_ = _stat(int(folder.name))
                if state not in "ZX":
                    parents[int(folder.name)] = int(parent)
    return parents


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on."""
    # The name before it is in parentheses and may hold anything, also spaces and parentheses.
    return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _has_marker(pid: int, marker: str) -> bool:
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except (*GONE, NotADirectoryError):
        return False
    return marker.encode() in environment.split(b"\0")
