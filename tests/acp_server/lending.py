"""A client that lends its files and terminals, and answers in every way a test can think of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from talking import Talk, talk

__all__ = ["NEVER", "Fails", "Lender", "lending"]

NEVER: Final = object()
"""An answer that does not come."""

TERMINAL: Final[Mapping[str, Any]] = {
    "terminal/create": {"terminalId": "t1"},
    "terminal/wait_for_exit": {"exitCode": 0},
    "terminal/output": {"output": "printed\n", "truncated": False},
    "terminal/kill": {},
    "terminal/release": {},
}


class Fails:
    """An answer that is an error."""

    def __init__(self, code: int = -32603, message: str = "it went wrong") -> None:
        self.error = {"code": code, "message": message}


class Lender:
    """Answers the agent's requests one after the other, as `answers` says by method.

    An answer is a result, a `Fails`, `NEVER`, or a function from the params to one of these.

    Attributes:
        at: The connection.
        session: A session in the test's folder.
        asked: The requests so far, as they came, those for `session/…` aside.
        before: Called with each request before it is answered.
    """

    def __init__(self, at: Talk, session: str, answers: Mapping[str, Any]) -> None:
        self.at = at
        self.session = session
        self.answers = dict(answers)
        self.asked: list[dict[str, Any]] = []
        self._has_asked = anyio.Event()
        self.before: Callable[[dict[str, Any]], object] = lambda _request: None

    async def serve(self) -> None:
        """Answer what comes, until cancelled."""
        at, sent = 0, self.at.lines.sent
        while True:
            while at < len(sent):
                request = sent[at]
                at += 1
                if "id" in request and request.get("method", "").startswith(("fs/", "terminal/")):
                    self.asked.append(request)
                    self._has_asked.set()
                    self._has_asked = anyio.Event()
                    self.before(request)
                    self.answer(request, self.answers.get(request["method"], Fails(-32601)))
            await self.at.lines._changed.wait()

    def answer(self, request: dict[str, Any], answer: Any) -> None:
        """Answer one request."""
        if callable(answer):
            answer = answer(request["params"])
        if answer is NEVER:
            return
        body = {"error": answer.error} if isinstance(answer, Fails) else {"result": answer}
        message = {"jsonrpc": "2.0", "id": request["id"], **body}
        self.at.connection.receive(json.dumps(message).encode())

    def requests(self, method: str) -> list[dict[str, Any]]:
        return [request for request in self.asked if request["method"] == method]

    @property
    def methods(self) -> list[str]:
        return [request["method"].partition("/")[2] for request in self.asked]

    async def until_asked(self, method: str, times: int = 1) -> dict[str, Any]:
        """Wait for the request, and return it."""
        with anyio.fail_after(5):
            while len(self.requests(method)) < times:
                await self._has_asked.wait()
        return self.requests(method)[times - 1]

    def withdrawn(self) -> list[int]:
        """The ids of the requests that the agent waits for no more."""
        return [
            message["params"]["requestId"]
            for message in self.at.lines.sent
            if message.get("method") == "$/cancel_request"
        ]

    async def prompt(self, text: str) -> str:
        """Have a turn, and return why it stopped."""
        result = await self.at.result(self.at.prompt(self.session, text))
        reason: str = result["stopReason"]
        return reason

    def calls(self) -> list[dict[str, Any]]:
        """What the client knows of each tool call, all updates applied."""
        known: dict[str, dict[str, Any]] = {}
        for update in self.at.lines.updates():
            if update["sessionUpdate"] in ("tool_call", "tool_call_update"):
                known.setdefault(update["toolCallId"], {}).update(update)
        return list(known.values())


@asynccontextmanager
async def lending(
    tmp_path: Any,
    answers: Mapping[str, Any],
    *,
    reads: bool = False,
    writes: bool = False,
    terminals: bool = False,
) -> AsyncIterator[Lender]:
    """Yield a client that offers what is asked for and answers by `answers`."""
    capabilities = {
        "fs": {"readTextFile": reads, "writeTextFile": writes},
        "terminal": terminals,
    }
    folder = tmp_path / "work"
    folder.mkdir(exist_ok=True)
    async with (
        talk(tmp_path / "state", capabilities=capabilities, mode="bypass") as (at, _backend),
        anyio.create_task_group() as tasks,
    ):
        made = await at.result(at.say("session/new", cwd=str(folder), mcpServers=[]))
        lender = Lender(at, made["sessionId"], answers)
        tasks.start_soon(lender.serve)
        yield lender
        tasks.cancel_scope.cancel()
