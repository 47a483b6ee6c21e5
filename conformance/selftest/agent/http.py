"""One HTTP request over one connection, which is closed with the response."""

from __future__ import annotations

import os
import re
import socket
from typing import Final

from conformance.selftest.agent.loop import READ, WRITE, Loop

__all__ = ["Response", "post"]

HEAD_LIMIT_BYTES: Final = 64 * 1024
READ_BYTES: Final = 64 * 1024
_URL: Final = re.compile(r"http://(\[[^\]]+\]|[^/:]+)(?::(\d+))?(/.*)?")


class Response:
    """What the server answers; read it line by line, and close it.

    Attributes:
        status: The status code.
        headers: By lower-case name.
    """

    def __init__(self, loop: Loop, connection: socket.socket) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._loop = loop
        self._connection = connection
        self._raw = bytearray()
        self._body = bytearray()
        self._is_over = False
        self._left: int | None = None  # of the body, where its length is known

    async def read_head(self) -> None:
        """Take the status and the headers. May be cancelled.

        Raises:
            OSError: There are none.
        """
        while (end := self._raw.find(b"\r\n\r\n")) < 0:
            if len(self._raw) > HEAD_LIMIT_BYTES or not await self._receive():
                raise OSError("the server does not speak HTTP")
        first, *lines = self._raw[:end].decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        status = re.match(r"HTTP/1\.\d (\d{3})", first)
        if status is None:
            raise OSError("the server does not speak HTTP")
        self.status = int(status[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        length = self.headers.get("content-length", "")
        self._left = int(length) if length.isdecimal() else None

    async def line(self) -> bytes | None:
        """Return the next line of the body without its end; `None` after the last.

        Cancellation: safe; what came stays.
        """
        while True:
            line, found, _ = bytes(self._body).partition(b"\n")
            if found:
                del self._body[: len(line) + 1]
                return line.rstrip(b"\r")
            if self._is_over:
                return None
            await self._more()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def _more(self) -> None:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            size = int(await self._take_line() or b"0", 16)
            self._body += await self._take(size)
            await self._take(2)
            self._is_over = size == 0
            return
        if self._left == 0 or (not self._raw and not await self._receive()):
            self._is_over = True
            return
        part = self._raw[: self._left]
        del self._raw[: len(part)]
        self._body += part
        if self._left is not None:
            self._left -= len(part)

    async def _take_line(self) -> bytes:
        while b"\n" not in self._raw:
            if not await self._receive():
                return b""
        line = bytes(self._raw.partition(b"\n")[0])
        del self._raw[: len(line) + 1]
        return line.partition(b";")[0].strip()

    async def _take(self, size: int) -> bytes:
        while len(self._raw) < size and await self._receive():
            pass
        part = bytes(self._raw[:size])
        del self._raw[:size]
        return part

    async def _receive(self) -> bool:
        await self._loop.is_ready(self._connection.fileno(), READ)
        chunk = self._connection.recv(READ_BYTES)
        self._raw += chunk
        return bool(chunk)


async def post(loop: Loop, url: str, headers: dict[str, str], body: bytes) -> Response:
    """Send a POST request of JSON and return the response, its head read.

    Cancellation: safe; the connection is closed at once.

    Raises:
        OSError: There is no server, or it does not speak HTTP.
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise OSError("only http: is spoken here")
    host, port, path = found[1].strip("[]"), int(found[2] or 80), found[3] or "/"
    head = [f"POST {path} HTTP/1.1", f"Host: {found[1]}:{port}", "Connection: close"]
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    connection = await _connect(loop, host, port)
    try:
        await _send(loop, connection, "\r\n".join([*head, "", ""]).encode() + body)
        response = Response(loop, connection)
        await response.read_head()
    except BaseException:
        connection.close()
        raise
    return response


async def _connect(loop: Loop, host: str, port: int) -> socket.socket:
    failure = OSError("there is no such host")
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind)
        try:
            connection.setblocking(False)
            connection.connect_ex(address)
            await loop.is_ready(connection.fileno(), WRITE)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except BaseException:
            connection.close()
            raise
        if code == 0:
            return connection
        connection.close()
        failure = OSError(code, os.strerror(code))
    raise failure


async def _send(loop: Loop, connection: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left:
        await loop.is_ready(connection.fileno(), WRITE)
        left = left[connection.send(left) :]
