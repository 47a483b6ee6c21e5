"""A client on a WebSocket that costs next to nothing: a blocking socket, in plain bytes."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.client import LIMIT_S, OURS, READ_BYTES, AgentProcess, Message, agent

TEXT, CLOSE, PING = 0x81, 0x88, 0x89
_LISTENS = re.compile(rb"listening on http://127\.0\.0\.1:(\d+)/")


class Socket:
    """One connection. Messages are read in the order they came; pings are not answered."""

    def __init__(self, port: int, cwd: Path) -> None:
        self.cwd = cwd
        self._last_id = 0
        self._data = bytearray()
        self.raw = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = base64.b64encode(os.urandom(16)).decode()
        self.raw.sendall(
            f"GET /acp HTTP/1.1\r\nHost: localhost:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        while b"\r\n\r\n" not in self._data:
            self._read()
        head, _, rest = bytes(self._data).partition(b"\r\n\r\n")
        if b" 101 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(head.decode())
        self._data = bytearray(rest)

    def initialize(self) -> Socket:
        """Shake hands."""
        self.result(self.request("initialize", protocolVersion=1, clientCapabilities={}))
        return self

    def new_session(self) -> str:
        """Make a session; return its id."""
        result = self.result(self.request("session/new", cwd=str(self.cwd), mcpServers=[]))
        session_id: str = result["sessionId"]
        return session_id

    def prompt(self, session_id: str, text: str) -> int:
        """Send a prompt; return its id at once."""
        block = {"type": "text", "text": text}
        return self.request("session/prompt", sessionId=session_id, prompt=[block])

    def cancel(self, session_id: str) -> None:
        """Send ``session/cancel``."""
        self.send({"method": "session/cancel", "params": {"sessionId": session_id}})

    def request(self, method: str, **params: Any) -> int:
        """Send a request; return its id at once."""
        self._last_id += 1
        self.send({"id": self._last_id, "method": method, "params": params})
        return self._last_id

    def result(self, request_id: int) -> Message:
        """Wait for an answer; whatever comes before it is dropped."""
        mark = b'"id":%d' % request_id
        while True:
            message = self.next_message()
            if mark in message and (answer := json.loads(message)).get("id") == request_id:
                if "result" not in answer:
                    raise RuntimeError(f"the agent answered with an error: {answer}")
                result: Message = answer["result"]
                return result

    def wait_for(self, mark: bytes) -> int:
        """Read up to the message that holds `mark`; return how many came, it included."""
        count = 1
        while mark not in self.next_message():
            count += 1
        return count

    def next_message(self) -> bytes:
        """Return the next message as it came."""
        while True:
            frame = self._frame()
            if frame is None:
                self._read()
            elif frame[0] == CLOSE:
                raise RuntimeError(f"the connection was closed: {frame[1]!r}")
            elif frame[0] == TEXT:
                return frame[1]

    def _frame(self) -> tuple[int, bytes] | None:
        data = self._data
        if len(data) < 2:
            return None
        head, length = 2, data[1]
        if length == 126:
            head = 4
            length = int.from_bytes(data[2:4]) if len(data) >= head else READ_BYTES
        elif length == 127:
            head = 10
            length = int.from_bytes(data[2:10]) if len(data) >= head else READ_BYTES
        if len(data) < head + length:
            return None
        kind, payload = data[0], bytes(data[head : head + length])
        del data[: head + length]
        return kind, payload

    def _read(self) -> None:
        data = self.raw.recv(READ_BYTES)
        if not data:
            raise RuntimeError("the connection is gone")
        self._data += data

    def send(self, body: Message) -> None:
        """Send one message, masked with zeros."""
        payload = json.dumps({"jsonrpc": "2.0", **body}).encode()
        size = len(payload)
        head = struct.pack("!BB", TEXT, 0x80 | size) if size < 126 else b""
        head = head or struct.pack("!BBH", TEXT, 0xFE, size)
        self.raw.sendall(head + bytes(4) + payload)

    def close(self) -> None:
        """Say goodbye, and wait until the server has."""
        self.raw.sendall(bytes([CLOSE, 0x80]) + bytes(4))
        while self.raw.recv(READ_BYTES):
            pass
        self.raw.close()


class Listening:
    """A server: its process, and sockets to it."""

    def __init__(self, process: AgentProcess, port: int) -> None:
        self.process = process
        self.port = port

    def connect(self) -> Socket:
        """Connect, and shake hands."""
        return Socket(self.port, self.process.place).initialize()


_CONFIG = "[network]\nping_s = 3600.0\n"
"""Nobody here answers pings."""


@contextmanager
def listening(
    *flags: str, environ: Mapping[str, str] | None = None, place: Path | None = None
) -> Iterator[Listening]:
    """Run a server on the loopback interface, which has run a turn."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(_CONFIG)
        config.flush()
        flags = ("--listen", "127.0.0.1:0", "--config", config.name, *flags)
        with agent((*OURS, *flags), environ, place=place) as process:
            yield _warm(process, "stream 3" if environ else "say hello")


def _warm(process: AgentProcess, text: str) -> Listening:
    until = time.monotonic() + LIMIT_S
    while (said := _LISTENS.search(process.said())) is None:
        if time.monotonic() > until:
            raise TimeoutError(process.said().decode())
        time.sleep(0.01)
    server = Listening(process, int(said[1]))
    warm = server.connect()
    warm.result(warm.prompt(warm.new_session(), text))
    warm.close()
    return server
