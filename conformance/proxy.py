"""Between a client and an agent: passes every byte on, and keeps what was said.

An editor starts it as its agent's command. It adds nothing and takes nothing away; what it finds
goes to files, since stdout is the protocol's and stderr is the agent's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Final, Literal

from conformance.trace import Entry, decode

__all__ = ["relay"]

CHUNK_BYTES: Final = 65536
DRAIN_LIMIT_S: Final = 2.0


def relay(command: Sequence[str], note: Callable[[Entry], None]) -> int:
    """Run an agent between our own stdin and stdout until it ends; return its exit code.

    Blocks. Signals that ask us to end are passed on.

    Args:
        command: The agent's program and arguments.
        note: Called with each line of either side, one at a time, behind its being passed on.

    Raises:
        OSError: The agent cannot be started.
    """
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin is not None
    assert agent.stdout is not None
    started_s, lock = time.monotonic(), threading.Lock()

    def take(direction: Literal["sent", "received"], line: bytes) -> None:
        with lock:
            note(Entry(time.monotonic() - started_s, direction, line, decode(line)))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: agent.send_signal(received))
    to_agent = threading.Thread(
        target=_pump, args=(sys.stdin.fileno(), agent.stdin, "sent", take), daemon=True
    )
    to_client = threading.Thread(
        target=_pump, args=(agent.stdout.fileno(), sys.stdout.buffer, "received", take), daemon=True
    )
    to_agent.start()
    to_client.start()
    code = agent.wait()
    to_client.join(DRAIN_LIMIT_S)  # a child of the agent's may hold the pipe for ever
    with lock:
        return code if code >= 0 else 128 - code


def _pump(source: int, sink: BinaryIO, direction: Any, take: Callable[[Any, bytes], None]) -> None:
    """Pass on bytes as they come; tell of each line when it is complete."""
    rest = b""
    while chunk := os.read(source, CHUNK_BYTES):
        try:
            sink.write(chunk)
            sink.flush()
        except OSError:
            return  # whoever should read it is gone, and will be noticed by its end
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            take(direction, line)
    if rest:
        take(direction, rest)
    if direction == "sent":
        sink.close()
