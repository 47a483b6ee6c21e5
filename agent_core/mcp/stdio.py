"""A server that is a process of ours, as the pair of message streams that the SDK works on.

Its end: stdin is closed, and it has a second to leave; then TERM, two seconds, and KILL for it and
all it started. What it says on stderr goes to the debug log, as far as that is of use to anybody;
what it says on stdout and is no message is counted and skipped.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from agent_core.logs import get_logger
from agent_core.mcp.servers import StdioServer
from agent_core.text import printable
from agent_core.tools.processes import LINGER_S, ProcessTree

__all__ = ["Spoken", "stdio_streams"]

MAX_LINE_BYTES: Final = 32 * 1024 * 1024
MAX_NOISE_LINES: Final = 1000
"""A server that writes more lines that are no messages is given up: it is not an MCP server."""
MAX_LOGGED_BYTES: Final = 64 * 1024
EXIT_GRACE_S: Final = 1.0
FLUSH_S: Final = 0.5
_CHUNK_BYTES: Final = 64 * 1024
_FLOOD_PAUSE_S: Final = 0.01
_LAST_WORDS_BYTES: Final = 300

log = get_logger(__name__)


class Spoken:
    """What a server's process said beside its messages, and how it ended.

    Attributes:
        is_dismissed: We are ending it.
        has_left: It ended, or closed its stdout, before that.
        exit_code: Known when it is over.
        fault: What it did that makes it no MCP server.
    """

    def __init__(self, name: str, on_noise: Callable[[], None]) -> None:
        self.is_dismissed = False
        self.has_left = False
        self.exit_code: int | None = None
        self.n_noise = 0
        self.fault: str | None = None
        self._name = name
        self._on_noise = on_noise
        self._logged_bytes = 0
        self._last = b""

    @property
    def last_line(self) -> str:
        """The last line it wrote to stderr, one line of at most 300 characters."""
        lines = [
            line for line in self._last.decode("utf-8", "replace").splitlines() if line.strip()
        ]
        return printable(lines[-1], " ").strip() if lines else ""

    @property
    def is_flooding(self) -> bool:
        """Whether it has written more to stderr than anybody will read."""
        return self._logged_bytes > MAX_LOGGED_BYTES

    def add(self, chunk: bytes) -> None:
        """Take a piece of stderr."""
        self._last = (self._last + chunk)[-_LAST_WORDS_BYTES:]
        if not self.is_flooding:
            self._logged_bytes += len(chunk)
            log.debug("mcp_server_said", server=self._name, text=chunk.decode("utf-8", "replace"))

    def add_noise(self, line: bytes) -> None:
        """Take a line of stdout that is no message."""
        self.n_noise += 1
        if self.n_noise == 1:
            self._on_noise()
        if self.n_noise <= 10:
            log.debug(
                "mcp_server_noise", server=self._name, line=line[:200].decode(errors="replace")
            )
        if self.n_noise > MAX_NOISE_LINES:
            self.fault = "it writes things to its stdout that are not MCP messages"


@asynccontextmanager
async def stdio_streams(
    server: StdioServer, cwd: str, spoken: Spoken
) -> AsyncGenerator[
    tuple[
        MemoryObjectReceiveStream[SessionMessage | Exception],
        MemoryObjectSendStream[SessionMessage],
    ]
]:
    """Start the server and yield the messages from it and to it; end it on leaving.

    The stream from it ends with its stdout. Cancellation: safe; on leaving, nothing it started is
    left, 3.5 s later at the most. Concurrency: once, by one task.

    Raises:
        ToolError: It could not be started.
    """
    tree = ProcessTree(
        [server.command, *server.args],
        cwd=cwd,
        environ={**get_default_environment(), **dict(server.environ)},
        is_spoken_to=True,
        inherits_environ=False,
    )
    to_us, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_us = anyio.create_memory_object_stream[SessionMessage](0)
    writer = _Writer(tree, from_us)
    try:
        async with anyio.create_task_group() as pumps:
            pumps.start_soon(_read_messages, tree, to_us, spoken)
            pumps.start_soon(_read_stderr, tree, spoken)
            pumps.start_soon(writer.run)
            try:
                yield from_server, to_server
            finally:
                spoken.is_dismissed = True
                with anyio.CancelScope(shield=True):
                    from_server.close()
                    to_server.close()
                    await writer.end()
                    await _end(tree)
                pumps.cancel_scope.cancel()
    finally:
        tree.close()
        spoken.exit_code = tree.exit_code
        for stream in (to_us, from_server, to_server, from_us):
            stream.close()


async def _end(tree: ProcessTree) -> None:
    with anyio.move_on_after(EXIT_GRACE_S) as grace:
        await tree.wait_exit()
    await tree.end(linger_s=0.0 if grace.cancelled_caught else LINGER_S)


class _Writer:
    """Writes messages to a server's stdin, and closes it at their end."""

    def __init__(
        self, tree: ProcessTree, messages: MemoryObjectReceiveStream[SessionMessage]
    ) -> None:
        self._tree = tree
        self._fd = tree.pipes[0]
        self._messages = messages
        self._scope = anyio.CancelScope()
        self._is_over = anyio.Event()

    async def run(self) -> None:
        try:
            with self._scope:
                async for message in self._messages:
                    await self._write(message)
        except OSError:
            log.debug("mcp_server_reads_no_more", pid=self._tree.pid)
        finally:
            self._messages.close()  # who wants to send hears of it
            self._tree.close_stdin()
            self._is_over.set()

    async def end(self) -> None:
        """Let what was accepted be written, if the server reads it, and close its stdin."""
        with anyio.move_on_after(FLUSH_S):
            await self._is_over.wait()
        self._scope.cancel()
        await self._is_over.wait()

    async def _write(self, message: SessionMessage) -> None:
        text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
        rest = memoryview(text.encode() + b"\n")
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._fd)


async def _read_messages(
    tree: ProcessTree, to_us: MemoryObjectSendStream[SessionMessage | Exception], spoken: Spoken
) -> None:
    """Hand on messages until stdout ends; when nobody takes them, read on and drop them."""
    buffer = bytearray()
    is_wanted = True
    while chunk := await _read(tree.pipes[1]):
        if not is_wanted:
            continue  # a server that is full of words would not notice that it is to end
        buffer += chunk
        if b"\n" not in chunk and len(buffer) <= MAX_LINE_BYTES:
            continue
        *lines, buffer = buffer.split(b"\n")
        try:
            for line in lines:
                await _hand_on(bytes(line), to_us, spoken)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            is_wanted = False
        if len(buffer) > MAX_LINE_BYTES:
            spoken.fault = f"it wrote a line of more than {MAX_LINE_BYTES // 2**20} MiB"
        if spoken.fault is not None:
            to_us.close()
            is_wanted = False
    spoken.has_left = not spoken.is_dismissed
    to_us.close()


async def _hand_on(
    line: bytes, to_us: MemoryObjectSendStream[SessionMessage | Exception], spoken: Spoken
) -> None:
    if not line.strip() or spoken.fault is not None:
        return
    try:
        message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        spoken.add_noise(line)
        return
    await to_us.send(message)


async def _read_stderr(tree: ProcessTree, spoken: Spoken) -> None:
    while chunk := await _read(tree.pipes[2]):
        spoken.add(chunk)
        if spoken.is_flooding:
            await anyio.sleep(_FLOOD_PAUSE_S)  # it may wait for its reader; we have other work


async def _read(fd: int) -> bytes:
    """Return what there is; nothing at the end."""
    while True:
        await anyio.wait_readable(fd)
        try:
            return os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            continue
