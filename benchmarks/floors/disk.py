"""No agent: SQLite alone, one commit after the other, each synced to the disk.

A cancel is answered when the turn's end survives a power cut, so its answer waits for one of these.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

PAUSE_S = 0.005
"""Between two commits, so that the disk's queue is as empty as it is between two turns."""


def commits(place: Path, n: int) -> list[float]:
    """Commit `n` times on the file system of `place`; return the milliseconds each one took."""
    taken = []
    with (
        tempfile.TemporaryDirectory(dir=place) as folder,
        closing(sqlite3.connect(Path(folder) / "floor.db", isolation_level=None)) as db,
    ):
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = full")
        db.execute("create table events (seq integer primary key, body blob)")
        for _ in range(n):
            time.sleep(PAUSE_S)
            begun = time.perf_counter()
            db.execute("insert into events (body) values (?)", (b"x" * 200,))  # a commit by itself
            taken.append((time.perf_counter() - begun) * 1000)
    return taken
