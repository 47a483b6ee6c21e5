"""A peer that says over TCP whatever it likes, which no client library would."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
from network_rig import LIMIT_S, Server
from websockets.frames import Frame, Opcode

UPGRADE = (
    "GET /acp HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


class Raw:
    """One connection, and all bytes that came on it. Nothing is read but by `until`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.is_over = False

    async def send(self, data: str | bytes) -> None:
        sent = data.encode() if isinstance(data, str) else data
        await asyncio.get_running_loop().sock_sendall(self.connection, sent)

    async def _receive(self) -> bool:
        data = await asyncio.get_running_loop().sock_recv(self.connection, 1 << 20)
        self.received += data
        return bool(data)

    async def until(self, text: bytes) -> None:
        with anyio.fail_after(LIMIT_S):
            while text not in self.received:
                assert await self._receive(), self.received

    async def until_over(self) -> None:
        """Read to the end, which the server has to make."""
        with anyio.fail_after(LIMIT_S), suppress(ConnectionError):
            while await self._receive():
                pass
        self.is_over = True

    @property
    def status(self) -> int:
        """Of the first answer."""
        return int(self.received.split()[1])

    async def upgrade(self) -> None:
        """Become a WebSocket."""
        await self.send(f"{UPGRADE}\r\n")
        await self.until(b"\r\n\r\n")
        assert self.status == 101
        self.received = self.received.partition(b"\r\n\r\n")[2]

    def frames(self) -> list[tuple[Opcode, bytes]]:
        """What came since the upgrade, frame by frame, as far as it is there."""
        found, data, at = [], self.received, 0
        while len(data) >= at + 2:
            size, start = data[at + 1] & 127, at + 2
            if size >= 126:
                start += 2 if size == 126 else 8
                size = int.from_bytes(data[at + 2 : start])
            if len(data) < start + size:
                break
            found.append((Opcode(data[at] & 15), data[start : start + size]))
            at = start + size
        return found

    @property
    def close_code(self) -> int:
        (closing,) = (data for opcode, data in self.frames() if opcode is Opcode.CLOSE)
        return int.from_bytes(closing[:2])


def frame(opcode: Opcode, data: bytes = b"", *, fin: bool = True, mask: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=mask)


@asynccontextmanager
async def raw(server: Server, *, reads_ahead_bytes: int | None = None) -> AsyncIterator[Raw]:
    """Connect. How much may be on the way to a peer that does not read, it can choose."""
    with socket.socket() as connection:
        if reads_ahead_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, reads_ahead_bytes)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", server.port))
        yield Raw(connection)


async def said_to(server: Server, data: str | bytes) -> Raw:
    """Say something on a connection of its own, and read until the server ends it."""
    async with raw(server) as peer:
        await peer.send(data)
        await peer.until_over()
    return peer
