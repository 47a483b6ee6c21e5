"""Makes an agent on the network look like one on stdio, for tests from outside.

``over_network.py ws|http FLAG...`` starts ``acp-agent serve --listen`` with the flags, as its one
child, and relays: each line is a text frame, or a POST of its own, one after the other; what comes
back, on any stream, is a line. At the end of the input the connection is closed and the server told
to end, unless a signal told it before; its exit code is ours. What it logs is on stderr, but for
where it listens.

This is a client of its own, on nothing of what it tests. By HTTP it does what the official SDKs do:
it opens a session's stream when it first hears of the session, and names the session in a header.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

SERVE = [sys.executable, "-m", "acp_server", "serve", "--listen", "127.0.0.1:0", "--drain", "0"]
OPENS = ("session/load", "session/resume")


def say(message: bytes) -> None:
    view = memoryview(message + b"\n")
    while view:
        view = view[os.write(1, view) :]


async def lines() -> AsyncIterator[bytes]:
    """What the test says, line by line, of any length."""
    reader = asyncio.StreamReader(limit=2**27)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.rstrip(b"\n")


def decoded(message: bytes) -> dict[str, Any]:
    try:
        found = json.loads(message)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def by_websocket(port: int) -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    async with connect(
        f"ws://127.0.0.1:{port}/acp", compression=None, max_size=None, proxy=None
    ) as socket:

        async def read() -> None:
            with suppress(ConnectionClosed):
                while True:
                    say(await socket.recv(decode=False))

        reading = asyncio.create_task(read())
        async for line in lines():
            await socket.send(line, text=True)
        await socket.close()
        await reading


class Http:
    """One connection by Streamable HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.id = ""
        self.streams: dict[str, asyncio.Task[None]] = {}

    async def request(
        self, method: str, session: str = "", body: bytes | None = None
    ) -> tuple[int, dict[str, str], asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**27)
        head = [f"{method} /acp HTTP/1.1", f"host: 127.0.0.1:{self.port}", "connection: close"]
        head += [f"acp-connection-id: {self.id}"] if self.id else []
        head += [f"acp-session-id: {session}"] if session else []
        head += ["accept: text/event-stream"] if method == "GET" else []
        if body is not None:
            head += ["content-type: application/json", f"content-length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + (body or b""))
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, reader, writer

    async def post(self, line: bytes) -> None:
        message = decoded(line)
        params = message.get("params")
        session = params.get("sessionId") if isinstance(params, dict) else None
        session = session if isinstance(session, str) else ""
        if message.get("method") in OPENS and session:
            await self.open(session)
        status, headers, reader, writer = await self.request("POST", session, line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        writer.close()
        if status == 200:
            self.id = headers.get("acp-connection-id", "")
            await self.open("")
            say(body)
        elif status != 202:
            sys.stderr.write(f"HTTP {status}: {body.decode()}")
            sys.stderr.flush()

    async def open(self, session: str) -> None:
        if session in self.streams or not self.id:
            return
        status, _headers, reader, writer = await self.request("GET", session)
        if status == 200:
            reading = self.read(reader, writer)
            self.streams[session] = asyncio.create_task(reading)

    async def read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = b""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while size := int(await reader.readline(), 16):
                *events, rest = (rest + await reader.readexactly(size)).split(b"\n\n")
                await reader.readline()
                for event in events:
                    if event.startswith(b"data: "):
                        await self.hear(event[6:])
        writer.close()

    async def hear(self, message: bytes) -> None:
        if b'"sessionId"' in message:
            told = decoded(message)
            for part in (told.get("result"), told.get("params")):
                if isinstance(part, dict) and isinstance(part.get("sessionId"), str):
                    await self.open(part["sessionId"])
        say(message)


async def by_http(port: int) -> None:
    http = Http(port)
    async for line in lines():
        if line.strip():
            await http.post(line)
    if http.id:
        await http.request("DELETE")
    for stream in http.streams.values():
        await stream


async def main() -> int:
    server = await asyncio.create_subprocess_exec(*SERVE, *sys.argv[2:], stderr=-1, stdin=-3)
    assert server.stderr is not None
    while found := (await server.stderr.readline()).decode():
        if where := re.search(r"listening on http://\S+?:(\d+)/acp", found):
            break
        sys.stderr.write(found)
    else:
        return await server.wait()

    async def log() -> None:
        assert server.stderr is not None
        while data := await server.stderr.read(2**16):
            os.write(2, data)

    logging = asyncio.create_task(log())
    is_told = False

    def tell(number: signal.Signals) -> None:
        nonlocal is_told
        is_told = True
        with suppress(ProcessLookupError):
            server.send_signal(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number)
    relay = by_websocket if sys.argv[1] == "ws" else by_http
    relaying = asyncio.create_task(relay(int(where[1])))
    ended = asyncio.create_task(server.wait())
    await asyncio.wait([relaying, ended], return_when=asyncio.FIRST_COMPLETED)
    if relaying.done():
        await relaying  # what went wrong there is to be seen
        if not is_told:
            tell(signal.SIGTERM)
    code = await ended
    await logging
    sys.stderr.flush()
    os._exit(code)


sys.exit(asyncio.run(main()))
