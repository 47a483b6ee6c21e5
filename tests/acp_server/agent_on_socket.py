"""Lets an agent that speaks on stdio be reached by WebSocket: a process of it for each connection.

``agent_on_socket.py TOKEN COMMAND...`` prints its port. One text frame is one line, both ways. When
a connection ends its process is killed; when a process ends its connection is gone without a word.
With a TOKEN that is not empty, whoever does not show it is refused.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from http import HTTPStatus

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

TOKEN, COMMAND = sys.argv[1], sys.argv[2:]


async def connected(socket: ServerConnection) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=-1, stdout=-1, start_new_session=True, limit=2**26
    )
    assert process.stdin is not None

    async def read() -> None:
        assert process.stdout is not None
        with suppress(ConnectionClosed):
            while line := await process.stdout.readline():
                await socket.send(line.rstrip(b"\n"), text=True)
        socket.transport.abort()

    reading = asyncio.create_task(read())
    with suppress(ConnectionClosed, ConnectionError):
        async for message in socket:
            process.stdin.write(str(message).encode() + b"\n")
            await process.stdin.drain()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    await reading


def refuse(socket: ServerConnection, request: Request) -> Response | None:
    if TOKEN and request.headers.get("authorization") != f"Bearer {TOKEN}":
        return socket.respond(HTTPStatus.UNAUTHORIZED, "A token is needed.\n")
    return None


async def main() -> None:
    options = {"max_size": None, "compression": None, "process_request": refuse}
    async with serve(connected, "127.0.0.1", 0, **options) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


asyncio.run(main())
