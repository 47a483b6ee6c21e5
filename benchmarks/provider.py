"""A model endpoint on loopback that speaks the three dialects, in a process of its own.

The last user message says what to do: ``stream N [MS]`` sends N chunks, MS milliseconds apart;
``stall`` sends nothing, ``busy`` answers 503 with a long Retry-After.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

APIS = ("chat", "responses", "anthropic")
CHUNKS_A_WRITE = 20
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BUSY = b"HTTP/1.1 503 Busy\r\nretry-after: 60\r\ncontent-length: 2\r\n\r\n{}"


CONTENT = {"chat": b'"content"', "responses": b".delta", "anthropic": b"text_delta"}
"""What the first event with words has in it, in each dialect."""
PAUSE_S = 0.003
"""What an agent does between an answer's end and its next request takes about as long."""
PATHS = {"chat": "/chat/completions", "responses": "/responses", "anthropic": "/v1/messages"}


@contextmanager
def provider(api: str = "chat") -> Iterator[dict[str, str]]:
    """Run the endpoint; yields the environment of an agent that is to use it with `api`."""
    command = (sys.executable, "-m", "benchmarks.provider")
    name = "anthropic" if api == "anthropic" else "openai"
    with (
        tempfile.TemporaryDirectory(prefix="acp-benchmark-") as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        config = Path(folder) / "config.toml"
        config.write_text(f'[providers.{name}]\napi = "{api}"\n')
        try:
            yield {
                "ACP_AGENT_CONFIG": str(config),
                "ACP_AGENT_MODEL": f"{name}:any",
                f"{name.upper()}_API_KEY": "benchmark",
                f"{name.upper()}_BASE_URL": url if api == "anthropic" else f"{url}/v1",
            }
        finally:
            process.terminate()


def own_times(environ: Mapping[str, str], api: str, times: int) -> list[float]:
    """Return the milliseconds from a request's first byte to its first words, without any library.

    That is the provider's own time, and the loopback's. It rests between two requests as long as
    it does behind an agent: asked without a rest, it answers in a third of the time.
    """
    (base_url,) = (value for name, value in environ.items() if name.endswith("_BASE_URL"))
    url = urlsplit(base_url + PATHS[api])
    message = {"role": "user", "content": "stream 3"}
    body = json.dumps({"messages": [message], "input": [message]}).encode()
    head = f"POST {url.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    taken = []
    with socket.create_connection((url.hostname, url.port)) as connection:
        for _ in range(times):
            time.sleep(PAUSE_S)
            begun, data = time.perf_counter(), b""
            connection.sendall(head.encode() + body)
            while CONTENT[api] not in data:
                data += connection.recv(65536)
            taken.append((time.perf_counter() - begun) * 1000)
            while not data.endswith(b"0\r\n\r\n"):
                data += connection.recv(65536)
    return taken


# --- the dialects ---------------------------------------------------------------------------


def _chat(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "any"}
    return _event(chunk | {"choices": [choice]})


def _named(type: str, **data: Any) -> bytes:
    return _event({"type": type} | data, name=type)


def _event(data: dict[str, Any], name: str = "") -> bytes:
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {json.dumps(data)}\n\n".encode()


def _words(api: str, words: str) -> bytes:
    if api == "chat":
        return _chat({"content": words})
    if api == "responses":
        place = {"item_id": "m", "output_index": 0, "content_index": 0, "sequence_number": 3}
        return _named("response.output_text.delta", delta=words, logprobs=[], **place)
    delta = {"type": "text_delta", "text": words}
    return _named("content_block_delta", index=0, delta=delta)


def _begin(api: str) -> list[bytes]:
    if api == "chat":
        return []
    if api == "responses":
        return [_named("response.created", response={"id": "r", "status": "in_progress"})]
    usage = {"input_tokens": 9, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "usage": usage}
    block = {"type": "text", "text": ""}
    return [
        _named("message_start", message=message),
        _named("content_block_start", index=0, content_block=block),
    ]


def _end(api: str) -> list[bytes]:
    if api == "chat":
        return [_chat({}, "stop"), b"data: [DONE]\n\n"]
    if api == "responses":
        return [_named("response.completed", response={"id": "r", "status": "completed"})]
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    return [
        _named("content_block_stop", index=0),
        _named("message_delta", delta=delta, usage={"output_tokens": 9}),
        _named("message_stop"),
    ]


# --- the server -----------------------------------------------------------------------------


def _joined(events: list[bytes]) -> bytes:
    return b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events])


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            path = head.split(b" ", 2)[1].decode()
            (api,) = (api for api, end in PATHS.items() if path.endswith(end))
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(size))
            await _answer(api, _directive(body), reader, writer)
    writer.close()


def _directive(body: dict[str, Any]) -> list[str]:
    messages = body.get("messages") or body["input"]
    said = [message["content"] for message in messages if message.get("role") == "user"]
    last = said[-1] if isinstance(said[-1], str) else said[-1][-1]["text"]
    words: list[str] = last.split()
    return words


async def _answer(
    api: str, words: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    match words:
        case ["stall"]:
            await reader.read()  # until the client hangs up
        case ["busy"]:
            writer.write(BUSY)
        case ["stream", count, *pause]:
            pause_s = int(pause[0]) / 1000 if pause else 0.0
            writer.write(HEAD + _joined(_begin(api)))
            await _stream(api, int(count), pause_s, writer)
            writer.write(_joined(_end(api)) + b"0\r\n\r\n")
    await writer.drain()


async def _stream(api: str, count: int, pause_s: float, writer: asyncio.StreamWriter) -> None:
    size = 1 if pause_s else CHUNKS_A_WRITE
    for start in range(0, count, size):
        numbers = range(start, min(start + size, count))
        writer.write(_joined([_words(api, f"{number} ") for number in numbers]))
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
