"""The tool that runs commands: in a terminal of the client if it has them, else by ourselves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from conformance.selftest.agent.commands import OUTPUT_BYTES, Command
from conformance.selftest.agent.files import ToolError
from conformance.selftest.agent.loop import Future
from conformance.selftest.agent.rpc import Message, RpcError
from conformance.selftest.agent.words import Result

if TYPE_CHECKING:
    from conformance.selftest.agent.tools import Call

__all__ = ["run_command"]

CLIENT_LIMIT_S: Final = 2.0
"""How long a client may take to end a terminal before we go on without its word."""
SHOW_EVERY_S: Final = 0.1
SHOWN_CHARS: Final = 2000


async def run_command(call: Call) -> Result:
    """Run the call's command in the session's folder.

    Cancellation: safe; it is killed, with all that it started, before this returns.

    Raises:
        ToolError: It could not be started.
    """
    if call.session.has_terminals:
        return await _run_at_client(call)
    try:
        arguments = ["/bin/sh", "-c", call.arguments["command"]]
        command = Command(call.session.loop, arguments, call.session.cwd)
    except OSError as error:
        raise ToolError(f"it cannot be started: {error.strerror}") from None
    last_shown_s = 0.0

    def show() -> None:
        nonlocal last_shown_s
        if time.monotonic() - last_shown_s >= SHOW_EVERY_S:
            last_shown_s = time.monotonic()
            text = command.output.decode("utf-8", "replace")
            call.progress(is_kept=False, content=_content(text))

    try:
        await command.run(show)
    finally:
        await command.end()
    text = command.output.decode("utf-8", "replace")
    return _result(text, command.code)


async def _run_at_client(call: Call) -> Result:
    terminal = _Terminal(call)
    try:
        await terminal.create()
        call.progress(content=[{"type": "terminal", "terminalId": terminal.terminal_id}])
        status = await terminal.ask("terminal/wait_for_exit")
        terminal.has_ended = True
        shown = await terminal.ask("terminal/output")
    except RpcError:
        raise ToolError("the client's terminal did not work") from None
    finally:
        await terminal.release()
    text = shown.get("output") if isinstance(shown, dict) else None
    code = status.get("exitCode") if isinstance(status, dict) else None
    result = _result(text if isinstance(text, str) else "", code if type(code) is int else None)
    call.finish(Result("", result.is_error), rawOutput=result.text)  # the terminal stays in view
    return result


class _Terminal:
    """A terminal of the client: whatever happens, it is released."""

    def __init__(self, call: Call) -> None:
        self.terminal_id = ""
        self.has_ended = False
        self._session = call.session
        self._command = call.arguments["command"]
        self._created = Future()

    async def create(self) -> None:
        params = {
            "sessionId": self._session.id,
            "command": "/bin/sh",
            "args": ["-c", self._command],
            "cwd": self._session.cwd,
            "outputByteLimit": OUTPUT_BYTES,
        }
        self._created = self._session.connection.request("terminal/create", params)
        self._take(await self._created)

    async def ask(self, method: str) -> Any:
        reply = self._request(method)
        try:
            return await reply
        finally:
            self._session.connection.abandon(reply)

    async def release(self) -> None:
        """Kill and release it. If it was not made yet, that is done as soon as it is."""
        if not await self._session.loop.within(CLIENT_LIMIT_S, self._created):
            self._session.loop.spawn(self._release_later())
            return
        try:
            self._take(await self._created)
        except RpcError:
            return
        if not self.has_ended:
            self._request("terminal/kill")
        released = self._request("terminal/release")
        await self._session.loop.within(CLIENT_LIMIT_S, released)

    async def _release_later(self) -> None:
        try:
            self._take(await self._created)
        except RpcError:
            return
        self._request("terminal/kill")
        self._request("terminal/release")

    def _take(self, created: object) -> None:
        terminal_id = created.get("terminalId") if isinstance(created, dict) else None
        if not isinstance(terminal_id, str):
            raise RpcError(0, "the client named no terminal")
        self.terminal_id = terminal_id

    def _request(self, method: str) -> Future:
        params = {"sessionId": self._session.id, "terminalId": self.terminal_id}
        return self._session.connection.request(method, params)


def _result(text: str, code: int | None) -> Result:
    shown = text.strip()[-SHOWN_CHARS:]
    if code == 0:
        return Result(shown)
    ended = "it was killed" if code is None or code < 0 else f"it ended with exit code {code}"
    return Result(f"{shown}\n{ended}".strip(), is_error=True)


def _content(text: str) -> list[Message]:
    shown = text[-SHOWN_CHARS:]
    return [{"type": "content", "content": {"type": "text", "text": shown}}]
