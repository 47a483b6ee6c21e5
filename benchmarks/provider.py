"""A model endpoint on loopback that speaks streaming chat completions, in a process of its own.

The last user message says what to do: ``stream N [MS]`` sends N chunks, MS milliseconds apart;
``stall`` sends nothing, ``busy`` answers 503 with a long Retry-After.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

CHUNKS_A_WRITE = 20
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BUSY = b"HTTP/1.1 503 Busy\r\nretry-after: 60\r\ncontent-length: 2\r\n\r\n{}"


@contextmanager
def provider() -> Iterator[dict[str, str]]:
    """Run the endpoint; yields the environment of an agent that is to use it."""
    command = (sys.executable, "-m", "benchmarks.provider")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield {
                "ACP_AGENT_MODEL": "openai:any",
                "OPENAI_API_KEY": "benchmark",
                "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
            }
        finally:
            process.terminate()


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "any"}
    data = b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(size))
            await _answer(_directive(body), reader, writer)
    writer.close()


def _directive(body: dict[str, Any]) -> list[str]:
    said = [message["content"] for message in body["messages"] if message["role"] == "user"]
    words: list[str] = said[-1].split()
    return words


async def _answer(
    words: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    match words:
        case ["stall"]:
            await reader.read()  # until the client hangs up
        case ["busy"]:
            writer.write(BUSY)
        case ["stream", count, *pause]:
            pause_s = int(pause[0]) / 1000 if pause else 0.0
            writer.write(HEAD)
            await _stream(int(count), pause_s, writer)
            end = b"data: [DONE]\n\n"
            writer.write(_event({}, "stop") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))
    await writer.drain()


async def _stream(count: int, pause_s: float, writer: asyncio.StreamWriter) -> None:
    size = 1 if pause_s else CHUNKS_A_WRITE
    for start in range(0, count, size):
        numbers = range(start, min(start + size, count))
        writer.write(b"".join([_event({"content": f"{number} "}) for number in numbers]))
        await writer.drain()
        if pause_s:
            await asyncio.sleep(pause_s)


async def _main() -> None:
    server = await asyncio.start_server(_serve_one, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    os.write(1, b"%d\n" % port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
