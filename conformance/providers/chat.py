"""What the provider double says and demands when it speaks chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = [
    "DONE",
    "call_read",
    "chunk",
    "comment",
    "error_event",
    "finish",
    "history_violations",
    "last_words",
    "reasoning",
    "text",
    "tool_call",
    "usage",
    "violations",
]

DONE: Final = b"data: [DONE]\n\n"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


# --- events ---------------------------------------------------------------------------------


def chunk(
    delta: Mapping[str, Any] | None = None, *, reason: str | None = None, **extra: Any
) -> bytes:
    """Return one event of a stream with `delta`; `extra` goes beside its choices."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    body = {
        "id": "chatcmpl-double",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "double",
        "choices": choices,
    }
    return b"data: " + json.dumps(body | extra, ensure_ascii=False).encode() + b"\n\n"


def text(value: str) -> bytes:
    """Return an event with more text."""
    return chunk({"content": value})


def reasoning(value: str, *, key: str = "reasoning_content") -> bytes:
    """Return an event with more thinking, in the field an endpoint uses for it."""
    return chunk({key: value})


def tool_call(
    index: int | None = 0, id: str | None = None, name: str | None = None, arguments: str = ""
) -> bytes:
    """Return an event with a fragment of a tool call; what is `None` is left out."""
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    call: dict[str, Any] = {"function": function, "type": "function"}
    call |= {} if index is None else {"index": index}
    call |= {} if id is None else {"id": id}
    return chunk({"tool_calls": [call]})


def finish(reason: str) -> bytes:
    """Return the event that says why the model ended."""
    return chunk({}, reason=reason)


def usage(prompt: int, completion: int, *, cached: int = 0, thought: int = 0) -> bytes:
    """Return the event that counts tokens."""
    return chunk(
        usage={
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }
    )


def error_event(**error: Any) -> bytes:
    """Return an error in the midst of a stream."""
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def comment(words: str = "keep-alive") -> bytes:
    """Return what keeps a connection busy without saying anything."""
    return f": {words}\n\n".encode()


# --- answers --------------------------------------------------------------------------------


def call_read(path: str) -> list[bytes]:
    """Return the events of an answer that thinks, says so and reads `path`."""
    whole = json.dumps({"path": path})
    third = len(whole) // 3
    return [
        chunk({"role": "assistant", "content": ""}),
        reasoning("Which "),
        reasoning("file?"),
        text("Let me "),
        text("look."),
        tool_call(0, "call_read", "read"),
        tool_call(0, arguments=whole[:third]),
        tool_call(0, arguments=whole[third : 2 * third]),
        tool_call(0, arguments=whole[2 * third :]),
        finish("tool_calls"),
        usage(120, 30, cached=100, thought=10),
        DONE,
    ]


def last_words() -> list[bytes]:
    """Return the events of an answer that says something and ends."""
    return [
        chunk({"role": "assistant", "content": ""}),
        text("That is "),
        text("all."),
        finish("stop"),
        usage(150, 4, cached=120),
        DONE,
    ]


# --- what strict endpoints refuse -----------------------------------------------------------


def violations(request: Mapping[str, Any]) -> list[str]:
    """Return what a strict endpoint would refuse in `request`, as sentences."""
    return history_violations(request.get("messages", ()))


def history_violations(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a strict provider would refuse in `messages`, as sentences."""
    found: list[str] = []
    owed: list[str] = []
    for at, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            call_id = message.get("tool_call_id")
            if call_id not in owed:
                found.append(f"message {at}: a result for {call_id!r}, which nobody owes")
            else:
                owed.remove(call_id)
            continue
        if owed:
            found.append(f"message {at}: {role} while results are owed for {owed}")
            owed = []
        if role == "assistant":
            owed = [call.get("id") for call in message.get("tool_calls") or ()]
            found += [f"message {at}: {wrong}" for wrong in _assistant_violations(message)]
        elif role == "system":
            found += [f"message {at}: system after others"] if at else []
        elif role != "user":
            found.append(f"message {at}: role {role!r}")
        elif not message.get("content"):
            found.append(f"message {at}: an empty user message")
    found += [f"results are owed for {owed}"] if owed else []
    if not messages or messages[-1].get("role") not in ("user", "tool"):
        found.append("the last message is neither a user's nor a tool's")
    return found


def _assistant_violations(message: Mapping[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    found = ["an empty list of tool calls"] if calls == [] else []
    if not message.get("content") and not calls:
        found.append("an empty assistant message")
    ids = [call.get("id") for call in calls or ()]
    if len(set(ids)) != len(ids) or not all(isinstance(id, str) and id for id in ids):
        found.append(f"tool call ids {ids}")
    for call in calls or ():
        function = call.get("function", {})
        if call.get("type") != "function" or not _NAME.fullmatch(function.get("name", "")):
            found.append(f"a malformed tool call {call}")
        elif not _is_json_object(function.get("arguments")):
            found.append(f"arguments {function.get('arguments')!r}")
    return found


def _is_json_object(value: object) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False
