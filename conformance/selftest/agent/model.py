"""Answers from an endpoint that speaks OpenAI's chat completions, streamed.

The conversation is in the session's log. Every request tells all of it, and every call in it has a
result, whatever happened. A turn that is cancelled closes the connection at once.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

from conformance.selftest.agent.http import Response, post
from conformance.selftest.agent.loop import Loop
from conformance.selftest.agent.rpc import INTERNAL_ERROR, Message, RpcError
from conformance.selftest.agent.tools import ARGUMENTS

if TYPE_CHECKING:
    from conformance.selftest.agent.session import Session

__all__ = ["Model"]

REQUEST_LIMIT: Final = 25
TRIES: Final = 3
RETRY_S: Final = 0.5
RETRY_LIMIT_S: Final = 10.0
SYSTEM: Final = "You work in a folder on a person's computer. Use the tools for what you are asked."
OFFERED: Final = ("read", "list", "search", "write", "edit", "run", "plan")
_STRING: Final = {"type": "string"}
_STRINGS: Final = {"type": "array", "items": _STRING}


class _Reply:
    """What came of one answer so far."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[int, Message] = {}
        self.finish: str | None = None

    def take_calls(self, deltas: object) -> None:
        for delta in deltas if isinstance(deltas, list) else ():
            call = self.calls.setdefault(
                delta.get("index", 0), {"id": "", "name": "", "arguments": ""}
            )
            function = delta.get("function") or {}
            call["id"] += delta.get("id") or ""
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def message(self, *, is_whole: bool) -> Message | None:
        """Return it as a message of the conversation; without the calls if it broke off."""
        message: Message = {"role": "assistant", "content": self.text or None}
        if is_whole and self.calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in self.calls.values()
            ]
        return message if self.text or "tool_calls" in message else None


class Model:
    """One endpoint.

    Args:
        loop: What it runs on.
        url: Where it is, without ``/chat/completions``; only ``http:``.
    """

    def __init__(self, loop: Loop, url: str) -> None:
        self._loop = loop
        self._url = f"{url.rstrip('/')}/chat/completions"

    async def answer(self, session: Session, blocks: list[Message]) -> str:
        """Answer a prompt with as many tool calls as it takes; return the stop reason.

        Cancellation: safe; what was said until then stays in the conversation.

        Raises:
            RpcError: The model does not work; the session does.
        """
        session.remember({"role": "user", "content": "\n\n".join(map(_told, blocks))})
        for _ in range(REQUEST_LIMIT):
            reply = await self._ask(session)
            if reply.finish == "length":
                return "max_tokens"
            if reply.finish == "content_filter":
                session.forget_turn()
                return "refusal"
            if not reply.calls:
                return "end_turn"
            for call in reply.calls.values():
                result = await session.call(call["name"], _arguments(call["arguments"]))
                text = f"Error: {result.text}" if result.is_error else result.text
                session.remember({"role": "tool", "tool_call_id": call["id"], "content": text})
        return "max_turn_requests"

    async def _ask(self, session: Session) -> _Reply:
        for tries in range(TRIES):
            reply = _Reply()
            try:
                response = await self._request(session)
                try:
                    if response.status == 200 and await self._read(response, session, reply):
                        return reply
                finally:
                    response.close()
                if 400 <= response.status < 500 and response.status != 429:
                    raise RpcError(INTERNAL_ERROR, f"the model refused: HTTP {response.status}")
                wait_s = _retry_after_s(response, RETRY_S * 2**tries)
            except OSError:
                wait_s = RETRY_S * 2**tries
            if reply.text:
                break  # what was said is said: a second try would say it twice
            if tries < TRIES - 1:
                await self._loop.sleep(wait_s)
        raise RpcError(INTERNAL_ERROR, "the model could not be reached, or broke off")

    async def _request(self, session: Session) -> Response:
        body = {
            "model": os.environ.get("OPENAI_MODEL") or session.options.values["model"],
            "messages": [{"role": "system", "content": SYSTEM}, *session.history()],
            "tools": [_tool(name) for name in OFFERED],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await post(self._loop, self._url, headers, json.dumps(body).encode())

    async def _read(self, response: Response, session: Session, reply: _Reply) -> bool:
        """Take a streamed answer; say whether it came to its end."""
        is_whole = False
        try:
            while (line := await response.line()) is not None:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data == b"[DONE]":
                    break
                if line.startswith(b"data:"):
                    await _take(_object(data), session, reply)
            is_whole = reply.finish is not None
        finally:
            message = reply.message(is_whole=is_whole)
            if message is not None:
                session.remember(message)
        return is_whole


async def _take(event: Message, session: Session, reply: _Reply) -> None:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return
    delta = choices[0].get("delta") or {}
    if isinstance(text := delta.get("content"), str) and text:
        reply.text += text
        await session.say(text)
    reply.take_calls(delta.get("tool_calls"))
    reply.finish = choices[0].get("finish_reason") or reply.finish


def _object(data: bytes) -> Message:
    try:
        value = json.loads(data)
    except ValueError:
        raise OSError("the stream is no JSON") from None
    return value if isinstance(value, dict) else {}


def _arguments(text: str) -> Message:
    try:
        value: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}  # the tool will say what is missing
    return value if isinstance(value, dict) else {}


def _retry_after_s(response: Response, default_s: float) -> float:
    try:
        return min(max(0.0, float(response.headers["retry-after"])), RETRY_LIMIT_S)
    except (KeyError, ValueError):
        return default_s


def _tool(name: str) -> Message:
    properties = {key: _STRINGS if key == "entries" else _STRING for key in ARGUMENTS[name]}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} something in the folder.",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    }


def _told(block: Message) -> str:
    """Put a block of a prompt in words."""
    if block["type"] == "resource":
        resource = block["resource"]
        return f"{resource['uri']}:\n{resource.get('text', '(no text)')}"
    return str(block.get("text") or block.get("uri") or f"({block['type']})")
