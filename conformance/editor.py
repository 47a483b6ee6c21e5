"""What an editor lends its agent, backed by real things: open buffers, files and terminals.

An `Editor` answers the ``fs/*`` and ``terminal/*`` requests that come over a `Wire`. It does what
it is asked and keeps a record, so that a test can see what was left behind.
"""

from __future__ import annotations

import os
import signal as signals
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
import anyio.abc

from conformance.wire import Message, Wire

__all__ = ["CAPABILITIES", "Editor", "EditorTerminal"]

CAPABILITIES: Final[Message] = {
    "fs": {"readTextFile": True, "writeTextFile": True},
    "terminal": True,
}
RESOURCE_NOT_FOUND: Final = -32002
INTERNAL_ERROR: Final = -32603


class _Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class EditorTerminal:
    """One command, in a session of its own, and the end of what it printed."""

    def __init__(self, process: anyio.abc.Process, limit_bytes: int | None) -> None:
        self.has_ended: Final = anyio.Event()
        self._process = process
        self._limit_bytes = limit_bytes
        self._output = b""
        self._is_truncated = False

    @property
    def is_running(self) -> bool:
        """Whether the command itself has not ended."""
        return self._process.returncode is None

    async def follow(self) -> None:
        """Keep what the command prints, until it has ended.

        Cancellation: safe.
        """
        assert self._process.stdout is not None
        async for chunk in self._process.stdout:
            self._output += chunk
            if self._limit_bytes is not None and len(self._output) > self._limit_bytes:
                self._output = self._output[len(self._output) - self._limit_bytes :]
                while self._output and self._output[0] & 0xC0 == 0x80:
                    self._output = self._output[1:]
                self._is_truncated = True
        await self._process.wait()
        self.has_ended.set()

    def kill(self) -> None:
        """End the command and all that it started in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signals.SIGKILL)

    def output(self) -> Message:
        """Return the result of ``terminal/output``."""
        text = self._output.decode("utf-8", "replace")
        shown: Message = {"output": text, "truncated": self._is_truncated}
        return shown if self.is_running else {**shown, "exitStatus": self.status()}

    def status(self) -> Message:
        """Return how the command ended."""
        code = self._process.returncode
        assert code is not None
        return {"exitCode": code} if code >= 0 else {"signal": signals.Signals(-code).name}


class Editor:
    """Serves the agent on one wire. Made by `beside`.

    Attributes:
        buffers: Unsaved text by path; what is written goes there too, if the file is open.
        terminals: Those that were not released yet, by id.
        asked: The methods of all requests so far, in order.
    """

    def __init__(self, wire: Wire, tasks: anyio.abc.TaskGroup) -> None:
        self.buffers: Final[dict[str, str]] = {}
        self.terminals: Final[dict[str, EditorTerminal]] = {}
        self.asked: Final[list[str]] = []
        self._wire = wire
        self._tasks = tasks
        self._n_made = 0
        methods: dict[str, Callable[[Message], Awaitable[Message]]] = {
            "fs/read_text_file": self._read,
            "fs/write_text_file": self._write,
            "terminal/create": self._create,
            "terminal/output": self._show,
            "terminal/wait_for_exit": self._wait,
            "terminal/kill": self._kill,
            "terminal/release": self._release,
        }
        for method, serve in methods.items():
            wire.answer[method] = self._answer_with(method, serve)

    @classmethod
    @asynccontextmanager
    async def beside(cls, wire: Wire) -> AsyncIterator[Editor]:
        """Serve the wire's agent while the block runs; then end every command.

        Cancellation: safe.
        """
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            editor = cls(wire, tasks)
            try:
                yield editor
            except Exception as error:
                failure = error  # raised outside the group, which would wrap it
            finally:
                for terminal in editor.terminals.values():
                    terminal.kill()
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def _answer_with(
        self, method: str, serve: Callable[[Message], Awaitable[Message]]
    ) -> Callable[[Message], None]:
        def answer(params: Message) -> None:
            self.asked.append(method)
            self._tasks.start_soon(self._serve, serve, params)

        return answer

    async def _serve(self, serve: Callable[[Message], Awaitable[Message]], params: Message) -> None:
        try:
            body: Message = {"result": await serve(params)}
        except _Refused as exc:
            body = {"error": {"code": exc.code, "message": str(exc)}}
        for request_id, request in list(self._wire.unanswered.items()):
            if request.get("params") is params:
                del self._wire.unanswered[request_id]
                self._wire.send({"jsonrpc": "2.0", "id": request_id, **body})

    async def _read(self, params: Message) -> Message:
        path = params["path"]
        try:
            text = self.buffers.get(path)
            if text is None:
                text = (await anyio.Path(path).read_bytes()).decode()
        except FileNotFoundError:
            raise _Refused(RESOURCE_NOT_FOUND, f"{path} does not exist") from None
        except (OSError, UnicodeDecodeError) as exc:
            raise _Refused(INTERNAL_ERROR, str(exc)) from None
        first, limit = params.get("line", 1) - 1, params.get("limit")
        lines = text.splitlines(keepends=True)
        return {"content": "".join(lines[first : None if limit is None else first + limit])}

    async def _write(self, params: Message) -> Message:
        try:
            await anyio.Path(params["path"]).write_bytes(params["content"].encode())
        except OSError as exc:
            raise _Refused(INTERNAL_ERROR, str(exc)) from None
        if params["path"] in self.buffers:
            self.buffers[params["path"]] = params["content"]
        return {}

    async def _create(self, params: Message) -> Message:
        variables = {each["name"]: each["value"] for each in params.get("env", [])}
        try:
            process = await anyio.open_process(
                [params["command"], *params.get("args", [])],
                cwd=params.get("cwd"),
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            raise _Refused(INTERNAL_ERROR, str(exc)) from None
        self._n_made += 1
        terminal_id = f"terminal-{self._n_made}"
        terminal = EditorTerminal(process, params.get("outputByteLimit"))
        self.terminals[terminal_id] = terminal
        self._tasks.start_soon(terminal.follow)
        return {"terminalId": terminal_id}

    async def _show(self, params: Message) -> Message:
        return self._terminal(params).output()

    async def _wait(self, params: Message) -> Message:
        terminal = self._terminal(params)
        await terminal.has_ended.wait()
        return terminal.status()

    async def _kill(self, params: Message) -> Message:
        self._terminal(params).kill()
        return {}

    async def _release(self, params: Message) -> Message:
        self._terminal(params).kill()
        del self.terminals[params["terminalId"]]
        return {}

    def _terminal(self, params: Message) -> EditorTerminal:
        terminal = self.terminals.get(params["terminalId"])
        if terminal is None:
            raise _Refused(RESOURCE_NOT_FOUND, f"there is no terminal {params['terminalId']}")
        return terminal
