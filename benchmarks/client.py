"""A client that costs next to nothing: a process on two pipes, blocking, in plain bytes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
READ_BYTES = 2**20
TAG = "ACP_BENCHMARK_RUN"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")

ANSWERED = b'"stopReason"'
"""What the answer to a prompt holds, and nothing else of what agents send here."""

PYTHON = sys.executable
OURS = (PYTHON, "-m", "acp_server", "serve")
SCRIPT = (str(Path(PYTHON).with_name("acp-agent")), "serve")
BARE = (PYTHON, "-m", "benchmarks.floors.bare")
SDK = (PYTHON, "-m", "benchmarks.floors.sdk")

Message = dict[str, Any]


class AgentDied(Exception):
    """The agent closed its output; the message holds what it wrote to stderr."""


class AgentProcess:
    """An agent, started by the constructor. Messages are read in the order they came.

    Attributes:
        spawned: When it was started, `time.perf_counter` seconds.
        place: Its home: state, configuration, and the directory of its sessions.
    """

    def __init__(
        self, command: Sequence[str], place: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self.place = place
        self._tag = uuid.uuid4().hex
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._parts: list[bytes] = []
        self._lines: list[bytes] = []
        self._last_id = 0
        own = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            TAG: self._tag,
        }
        self.spawned = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            cwd=place,
            env=own | dict(environ or {}),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)

    # --- messages ----------------------------------------------------------------------------

    def initialize(self) -> float:
        """Shake hands; return the seconds from the start of the process to the answer."""
        self.result(self.request("initialize", protocolVersion=1, clientCapabilities={}))
        return time.perf_counter() - self.spawned

    def new_session(self) -> str:
        """Make a session; return its id."""
        result = self.result(self.request("session/new", cwd=str(self.place), mcpServers=[]))
        session_id: str = result["sessionId"]
        return session_id

    def prompt(self, session_id: str, text: str) -> int:
        """Send a prompt; return its id at once."""
        block = {"type": "text", "text": text}
        return self.request("session/prompt", sessionId=session_id, prompt=[block])

    def cancel(self, session_id: str) -> None:
        """Send ``session/cancel``."""
        self._send({"method": "session/cancel", "params": {"sessionId": session_id}})

    def request(self, method: str, **params: Any) -> int:
        """Send a request; return its id at once."""
        self._last_id += 1
        self._send({"id": self._last_id, "method": method, "params": params})
        return self._last_id

    def result(self, request_id: int) -> Message:
        """Wait for an answer; whatever comes before it is dropped."""
        answer = self.wait_for(lambda message: message.get("id") == request_id)
        if "result" not in answer:
            raise AgentDied(f"the agent answered with an error: {answer}")
        result: Message = answer["result"]
        return result

    def wait_for(self, is_it: Callable[[Message], bool]) -> Message:
        """Return the first message that `is_it` accepts; those before it are dropped."""
        while True:
            message = json.loads(self.next_line())
            if is_it(message):
                accepted: Message = message
                return accepted

    def next_line(self) -> bytes:
        """Return the next message as it came, without its newline."""
        while not self._lines:
            *complete, rest = self.read().split(b"\n")
            if complete:
                complete[0] = b"".join((*self._parts, complete[0]))
                self._parts.clear()
                complete.reverse()
                self._lines = complete
            self._parts.append(rest)
        return self._lines.pop()

    def lines_until(self, mark: bytes) -> int:
        """Read up to the first piece of output that holds `mark`, and count lines, nothing more."""
        waiting = b"\n".join((*reversed(self._lines), b"".join(self._parts)))
        self._lines, self._parts = [], []
        count, tail = waiting.count(b"\n"), waiting
        while mark not in tail:
            data = self.read()
            count += data.count(b"\n")
            tail = tail[-len(mark) :] + data
        return count

    def read(self) -> bytes:
        """Return what the agent wrote, as soon as there is anything."""
        if not self._poll.poll(LIMIT_S * 1000):
            raise TimeoutError(f"the agent said nothing for {LIMIT_S:.0f} s")
        data = os.read(self._out.fileno(), READ_BYTES)
        if not data:
            self._process.wait(LIMIT_S)
            self._stderr.seek(0)
            raise AgentDied(self._stderr.read().decode(errors="replace")[-2000:])
        return data

    def _send(self, body: Message) -> None:
        self._in.write(json.dumps({"jsonrpc": "2.0", **body}).encode() + b"\n")

    # --- the process -------------------------------------------------------------------------

    def leave(self) -> float:
        """Close its input and wait until it is gone; return the seconds that took."""
        begun = time.perf_counter()
        self._in.close()
        while self._poll.poll(LIMIT_S * 1000) and os.read(self._out.fileno(), READ_BYTES):
            pass
        self._process.wait(LIMIT_S)
        return time.perf_counter() - begun

    def cpu_s(self) -> float:
        """Processor time so far, of all threads, in user and kernel mode."""
        fields = self._proc("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND

    def rss_mb(self) -> float:
        """Memory that is resident now, shared pages included."""
        return int(self._status("VmRSS")) / 1024

    def threads(self) -> int:
        """Count its threads."""
        return int(self._status("Threads"))

    def processes(self) -> list[int]:
        """Return the pids of all that live of what this agent started, itself included."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_ours(path)]

    def said(self) -> bytes:
        """Return what it wrote to stderr so far."""
        return os.pread(self._stderr.fileno(), READ_BYTES, 0)

    def end(self) -> None:
        """Kill what is left. Harmless when nothing is."""
        for pid in self.processes():
            os.kill(pid, 9)
        self._process.wait()
        self._stderr.close()
        self._in.close()
        self._out.close()

    def _is_ours(self, path: Path) -> bool:
        try:
            return f"{TAG}={self._tag}".encode() in (path / "environ").read_bytes()
        except OSError:
            return False  # gone meanwhile, a zombie, or somebody else's

    def _status(self, field: str) -> str:
        lines = dict(line.split(":", 1) for line in self._proc("status").splitlines())
        return lines[field].split()[0]

    def _proc(self, name: str) -> str:
        return Path(f"/proc/{self._process.pid}/{name}").read_text()


@contextmanager
def agent(
    command: Sequence[str] = OURS,
    environ: Mapping[str, str] | None = None,
    *,
    place: Path | None = None,
) -> Iterator[AgentProcess]:
    """Run an agent, in a home of its own unless `place` is given."""
    with tempfile.TemporaryDirectory(prefix="acp-benchmark-") as folder:
        process = AgentProcess(command, place or Path(folder), environ)
        try:
            yield process
        finally:
            process.end()


def is_update(message: Message) -> bool:
    return message.get("method") == "session/update"


def is_text(message: Message) -> bool:
    """Whether the message carries a piece of the model's answer."""
    return is_update(message) and (
        message["params"]["update"]["sessionUpdate"] == "agent_message_chunk"
    )
