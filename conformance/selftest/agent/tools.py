"""The tools: each call is announced, allowed, run, and ended by exactly one final status."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from conformance.selftest.agent.files import ToolError
from conformance.selftest.agent.loop import Cancelled
from conformance.selftest.agent.permissions import TurnEnded
from conformance.selftest.agent.rpc import Message, RpcError
from conformance.selftest.agent.shell import run_command
from conformance.selftest.agent.store import new_id
from conformance.selftest.agent.words import Result, play

if TYPE_CHECKING:
    from conformance.selftest.agent.session import Session

__all__ = ["ARGUMENTS", "Call", "make_call"]

TITLE_CHARS: Final = 100

ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "read": ("path",),
    "list": ("path",),
    "search": ("pattern",),
    "write": ("path", "content"),
    "edit": ("path", "old_text", "new_text"),
    "run": ("command",),
    "ask": ("question", "choices"),
    "plan": ("entries",),
    "delegate": ("task",),
}
"""The arguments of each tool: strings, but for `choices` and `entries`, which are lists of them."""

_KINDS: Final = {
    "read": "read",
    "list": "read",
    "search": "search",
    "write": "edit",
    "edit": "edit",
    "run": "execute",
}
_LISTS: Final = ("choices", "entries")


class Call:
    """One tool call, and what the client knows of it."""

    def __init__(self, session: Session, name: str, arguments: Message) -> None:
        self.session: Final = session
        self.arguments: Final = arguments
        self.name: Final = name
        self.call_id: Final = f"call-{new_id()}"
        self.is_open = False

    def announce(self, locations: list[Message]) -> None:
        """Tell that there will be this call."""
        self.is_open = True
        self.session.update({"sessionUpdate": "tool_call", **self.shown(locations)})

    def shown(self, locations: list[Message]) -> Message:
        """Return the call as it is before it runs."""
        subject = self.arguments.get(ARGUMENTS[self.name][0]) if self.name in ARGUMENTS else ""
        shown: Message = {
            "toolCallId": self.call_id,
            "title": " ".join(f"{self.name} {subject}".split())[:TITLE_CHARS],
            "kind": _KINDS.get(self.name, "other"),
            "status": "pending",
            "rawInput": self.arguments,
        }
        return {**shown, "locations": locations} if locations else shown

    def progress(self, *, is_kept: bool = True, **changes: object) -> None:
        """Tell that it runs, or how far it got."""
        self._change({"status": "in_progress", **changes}, is_kept=is_kept)

    def finish(self, result: Result, **changes: object) -> None:
        """Tell how it ended; only the first call counts."""
        if not self.is_open:
            return
        self.is_open = False
        status = "failed" if result.is_error else "completed"
        if result.text:
            changes.setdefault("content", [text_content(result.text)])
        self._change({"status": status, **changes})

    def _change(self, changes: Message, *, is_kept: bool = True) -> None:
        update = {"sessionUpdate": "tool_call_update", "toolCallId": self.call_id, **changes}
        self.session.update(update, is_kept=is_kept)


async def make_call(session: Session, name: str, arguments: Message) -> Result:
    """Make a call from its announcement to its end.

    Cancellation: safe; the call is ended as failed, and nothing of it runs on.

    Raises:
        TurnEnded: The client said that the turn was cancelled.
    """
    call = Call(session, name, arguments)
    try:
        _check(name, arguments)
        path = session.files.place(arguments["path"]) if "path" in arguments else None
    except ToolError as error:
        call.announce([])
        result = Result(str(error), is_error=True)
        call.finish(result)
        return result
    locations: list[Message] = [] if path is None else [{"path": path, "line": 1}]
    call.announce(locations)
    try:
        if name in _ASKED and not await _is_allowed(call, locations):
            raise ToolError("it was not allowed")
        call.progress()
        result = await _TOOLS[name](call, path or "")
    except ToolError as error:
        result = Result(str(error), is_error=True)
    except BaseException as stop:
        told = "it was cancelled" if isinstance(stop, Cancelled | TurnEnded) else "it broke"
        call.finish(Result(told, is_error=True))
        raise
    call.finish(result)
    return result


def text_content(text: str) -> Message:
    """Return the content of a tool call that is text."""
    return {"type": "content", "content": {"type": "text", "text": text}}


def _check(name: str, arguments: Message) -> None:
    if name not in ARGUMENTS:
        raise ToolError("there is no such tool")
    for key in ARGUMENTS[name]:
        value = arguments.get(key)
        items = value if key in _LISTS and isinstance(value, list) else [value]
        if (key in _LISTS) != isinstance(value, list) or not all(map(_is_text, items)):
            raise ToolError(f"the argument {key} is missing or wrong")


def _is_text(value: object) -> bool:
    """Say whether it is a string that the system takes as a path or a command."""
    return isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value)


async def _is_allowed(call: Call, locations: list[Message]) -> bool:
    if call.name == "run":
        subject = f"run {call.arguments['command']}"
    else:
        subject = f"{call.name} {locations[0]['path']}"
    return await call.session.permissions.is_allowed(subject, call.shown(locations))


# --- one function for each tool -----------------------------------------------------------------


async def _read(call: Call, path: str) -> Result:
    return Result(await call.session.files.read(path))


async def _list(call: Call, path: str) -> Result:
    return Result("\n".join(call.session.files.names(path)))


async def _search(call: Call, path: str) -> Result:
    return Result("\n".join(call.session.files.matches(call.arguments["pattern"])))


async def _write(call: Call, path: str) -> Result:
    try:
        old: str | None = await call.session.files.read(path)
    except ToolError:
        old = None
    return await _replace(call, path, old, call.arguments["content"])


async def _edit(call: Call, path: str) -> Result:
    old = await call.session.files.read(path)
    if old.count(call.arguments["old_text"]) != 1:
        raise ToolError("the old text must be there exactly once")
    new = old.replace(call.arguments["old_text"], call.arguments["new_text"])
    return await _replace(call, path, old, new)


async def _replace(call: Call, path: str, old: str | None, new: str) -> Result:
    await call.session.files.write(path, new)
    diff: Message = {"type": "diff", "path": path, "newText": new}
    if old is not None:
        diff["oldText"] = old
    result = Result(f"wrote {os.path.basename(path)}")
    call.finish(result, content=[diff])
    return result


async def _run(call: Call, path: str) -> Result:
    return await run_command(call)


async def _ask(call: Call, path: str) -> Result:
    session = call.session
    if not session.can_elicit:
        raise ToolError("this client cannot be asked")
    answer: Message = {"type": "string", "title": call.arguments["question"]}
    if call.arguments["choices"]:
        answer["enum"] = call.arguments["choices"]
    params = {
        "sessionId": session.id,
        "toolCallId": call.call_id,
        "mode": "form",
        "message": call.arguments["question"],
        "requestedSchema": {
            "type": "object",
            "properties": {"answer": answer},
            "required": ["answer"],
        },
    }
    reply = session.connection.request("elicitation/create", params)
    try:
        result = await reply
    except RpcError:
        raise ToolError("there was no answer") from None
    finally:
        session.connection.abandon(reply)
    content = result.get("content") if isinstance(result, dict) else None
    text = content.get("answer") if isinstance(content, dict) else None
    if not isinstance(text, str) or result.get("action") != "accept":
        return Result("no answer was given")
    if call.arguments["choices"] and text not in call.arguments["choices"]:
        raise ToolError("the answer is none of the choices")
    return Result(text)


async def _plan(call: Call, path: str) -> Result:
    entries = call.arguments["entries"]
    for n_done in range(len(entries) + 1):
        call.session.plan(entries, n_done)
        await call.session.connection.drained()
    return Result("the plan is written")


class _Listener:
    """Keeps what a delegated task says."""

    def __init__(self, session: Session) -> None:
        self.text = ""
        self._session = session

    async def say(self, text: str) -> None:
        self.text += text
        await self._session.connection.drained()

    async def think(self, text: str) -> None:
        await self._session.connection.drained()


async def _delegate(call: Call, path: str) -> Result:
    session, listener = call.session, _Listener(call.session)

    async def make(name: str, arguments: Message) -> Result:
        if name == "delegate":
            raise ToolError("what was delegated is not delegated further")
        return await make_call(session, name, arguments)

    await play(call.arguments["task"], listener, make, session.loop)
    return Result(listener.text.strip())


_TOOLS: Final[dict[str, Callable[[Call, str], Awaitable[Result]]]] = {
    "read": _read,
    "list": _list,
    "search": _search,
    "write": _write,
    "edit": _edit,
    "run": _run,
    "ask": _ask,
    "plan": _plan,
    "delegate": _delegate,
}
_ASKED: Final = ("write", "edit", "run")
