"""What the provider double says and demands when it speaks OpenAI's Responses API.

Nothing is remembered between a reply and the request behind it: the thinking that a reply carries
is sealed, and a seal says by itself whether its item came back as it was issued.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = [
    "arguments",
    "call_item",
    "call_read",
    "completed",
    "created",
    "error",
    "event",
    "failed",
    "incomplete",
    "item_added",
    "item_done",
    "last_words",
    "reasoning_item",
    "refusal",
    "summary",
    "text",
    "thought",
    "usage",
    "violations",
]


# --- events ---------------------------------------------------------------------------------


def event(kind: str, **fields: Any) -> bytes:
    """Return one event of a stream."""
    data = json.dumps({"type": kind} | fields, ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()


def _response(kind: str, status: str, **fields: Any) -> bytes:
    response = {"id": "resp_double", "object": "response", "status": status, "output": []}
    return event(f"response.{kind}", response=response | fields)


def created() -> bytes:
    """Return the event that begins a stream."""
    return _response("created", "in_progress", usage=None, error=None)


def item_added(at: int, item: Mapping[str, Any]) -> bytes:
    """Return the event that begins item `at` of the output."""
    return event("response.output_item.added", output_index=at, item=item)


def item_done(at: int, item: Mapping[str, Any]) -> bytes:
    """Return the event that ends item `at` of the output and has it whole."""
    return event("response.output_item.done", output_index=at, item=item)


def text(value: str, at: int = 0) -> bytes:
    """Return an event with more text."""
    return event(
        "response.output_text.delta",
        item_id=f"msg_{at}",
        output_index=at,
        content_index=0,
        delta=value,
        logprobs=[],
    )


def refusal(value: str, at: int = 0) -> bytes:
    """Return an event with more of a refusal."""
    return event("response.refusal.delta", output_index=at, content_index=0, delta=value)


def summary(value: str, part: int = 0, at: int = 0) -> bytes:
    """Return an event with more of part `part` of a summary of thinking."""
    return event(
        "response.reasoning_summary_text.delta",
        item_id=f"rs_{at}",
        output_index=at,
        summary_index=part,
        delta=value,
    )


def thought(value: str, at: int = 0) -> bytes:
    """Return an event with more thinking in clear, as open models show it."""
    return event("response.reasoning_text.delta", output_index=at, content_index=0, delta=value)


def arguments(value: str, at: int = 0) -> bytes:
    """Return an event with a fragment of the arguments of the call that is item `at`."""
    return event(
        "response.function_call_arguments.delta",
        item_id=f"fc_{at}",
        output_index=at,
        delta=value,
    )


def usage(input: int, output: int, *, cached: int = 0, thought: int = 0) -> dict[str, Any]:
    """Return the count of tokens that the last event carries."""
    return {
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": input + output,
    }


def completed(usage: Mapping[str, Any] | None = None) -> bytes:
    """Return the event that ends an answer."""
    return _response("completed", "completed", usage=usage, error=None, incomplete_details=None)


def incomplete(reason: str | None, usage: Mapping[str, Any] | None = None) -> bytes:
    """Return the event that ends an answer which was cut short, and says why."""
    details = None if reason is None else {"reason": reason}
    return _response("incomplete", "incomplete", usage=usage, incomplete_details=details)


def failed(code: str | None, message: str = "it broke") -> bytes:
    """Return the event that ends an answer in a failure; `None` says nothing of it."""
    told = None if code is None else {"code": code, "message": message}
    return _response("failed", "failed", usage=None, error=told)


def error(code: str | None, message: str = "it broke") -> bytes:
    """Return the event of a stream that cannot go on."""
    return event("error", code=code, message=message, param=None)


# --- items ----------------------------------------------------------------------------------


def _seal(id: str, parts: Sequence[Mapping[str, Any]]) -> str:
    return base64.b64encode(json.dumps(["sealed", id, parts]).encode()).decode()


def reasoning_item(*summaries: str, id: str = "rs_0") -> dict[str, Any]:
    """Return thinking as an item: sealed, and with its summary."""
    parts = [{"type": "summary_text", "text": value} for value in summaries]
    return {"id": id, "type": "reasoning", "summary": parts, "encrypted_content": _seal(id, parts)}


def call_item(call_id: str, name: str, arguments: str = "", id: str = "fc_0") -> dict[str, Any]:
    """Return a call as an item; without `arguments` it is one that has just begun."""
    return {
        "id": id,
        "type": "function_call",
        "status": "completed" if arguments else "in_progress",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def message_item(id: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": value, "annotations": []} for value in texts]
    return {"id": id, "type": "message", "role": "assistant", "content": content}


def call_read(path: str) -> list[bytes]:
    """Return the events of an answer that thinks, says so and reads `path`."""
    whole = json.dumps({"path": path})
    third = len(whole) // 3
    sealed = reasoning_item("Which file?")
    return [
        created(),
        item_added(0, sealed | {"summary": [], "encrypted_content": "unfinished"}),
        summary("Which "),
        summary("file?"),
        item_done(0, sealed),
        item_added(1, message_item("msg_1")),
        text("Let me ", 1),
        text("look.", 1),
        item_done(1, message_item("msg_1", "Let me look.")),
        item_added(2, call_item("call_read", "read", id="fc_2")),
        arguments(whole[:third], 2),
        arguments(whole[third : 2 * third], 2),
        arguments(whole[2 * third :], 2),
        event("response.function_call_arguments.done", output_index=2, arguments=whole),
        item_done(2, call_item("call_read", "read", whole, id="fc_2")),
        completed(usage(120, 30, cached=100, thought=10)),
    ]


def last_words() -> list[bytes]:
    """Return the events of an answer that says something and ends."""
    return [
        created(),
        item_added(0, message_item("msg_0")),
        text("That is "),
        text("all."),
        item_done(0, message_item("msg_0", "That is all.")),
        completed(usage(150, 4, cached=120)),
    ]


# --- what the API refuses -------------------------------------------------------------------

_FIELDS: Final = frozenset(
    (
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "reasoning",
        "service_tier",
        "store",
        "stream",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_p",
        "truncation",
    )
)
_EFFORTS: Final = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "max"))
_SUMMARIES: Final = frozenset(("auto", "concise", "detailed"))
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_IMAGE: Final = re.compile(r"data:image/(png|jpeg|gif|webp);base64,(.+)", re.DOTALL)
_FILE: Final = re.compile(r"data:application/pdf;base64,(.+)", re.DOTALL)
_MAX_CALL_ID_CHARS: Final = 64


def violations(request: Mapping[str, Any]) -> list[str]:
    """Return what the API would refuse in `request`, as sentences."""
    found = [f"an unknown parameter {name!r}" for name in sorted(request.keys() - _FIELDS)]
    if not isinstance(request.get("model"), str):
        found.append("no model")
    if request.get("store") is not False or request.get("stream") is not True:
        found.append("the answer would be stored, or not streamed")
    if not isinstance(request.get("instructions", ""), str):
        found.append("instructions that are no text")
    limit = request.get("max_output_tokens", 16)
    if not isinstance(limit, int) or limit < 16:
        found.append(f"max_output_tokens {limit!r}")
    if not set(request.get("include", ())) <= {"reasoning.encrypted_content"}:
        found.append(f"include {request['include']!r}")
    found += _reasoning_violations(request.get("reasoning") or {})
    found += _tools_violations(request.get("tools", ()))
    items = request.get("input")
    if not isinstance(items, list) or not items:
        return [*found, "no input"]
    found += _pairing_violations(items)
    for at, item in enumerate(items):
        found += [f"item {at}: {wrong}" for wrong in _item_violations(item, items[at + 1 :])]
    return found


def history_violations(request: Mapping[str, Any]) -> list[str]:
    """Return what every endpoint of the dialect would refuse in the history of `request`."""
    items = request.get("input")
    return _pairing_violations(items) if isinstance(items, list) else []


def _reasoning_violations(reasoning: Mapping[str, Any]) -> list[str]:
    allowed = {"effort": _EFFORTS, "summary": _SUMMARIES}
    return [
        f"reasoning.{name} {value!r}"
        for name, value in reasoning.items()
        if value not in allowed.get(name, ())
    ]


def _tools_violations(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for tool in tools:
        schema = tool.get("parameters")
        if tool.get("type") != "function" or not _is_name(tool.get("name")):
            found.append(f"a malformed tool {tool}")
        elif not isinstance(schema, dict) or schema.get("type") != "object":
            found.append(f"parameters of {tool['name']}")
        elif tool.get("strict") is not False:
            found.append(f"{tool['name']} would be held to a strict schema")
    names = Counter(tool.get("name") for tool in tools)
    return found + [f"{n} tools named {name}" for name, n in names.items() if n > 1]


def _pairing_violations(items: Sequence[Mapping[str, Any]]) -> list[str]:
    found: list[str] = []
    seen: set[object] = set()
    owed: set[object] = set()
    for at, item in enumerate(items):
        call_id = item.get("call_id")
        if item.get("type") == "function_call":
            if call_id in seen:
                found.append(f"item {at}: another call {call_id!r}")
            seen.add(call_id)
            owed.add(call_id)
        elif item.get("type") == "function_call_output":
            if call_id not in owed:
                found.append(f"item {at}: an output for {call_id!r}, which nobody owes")
            owed.discard(call_id)
    return found + [f"no output for {call_id!r}" for call_id in owed]


def _item_violations(item: Mapping[str, Any], rest: Sequence[Mapping[str, Any]]) -> list[str]:
    kind = item.get("type")
    if kind == "message":
        return _message_violations(item)
    if kind == "reasoning":
        return _thought_violations(item, rest)
    if kind not in ("function_call", "function_call_output"):
        return [f"type {kind!r}"]
    found = []
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= _MAX_CALL_ID_CHARS:
        found.append(f"call_id {call_id!r}")
    if kind == "function_call_output" and not isinstance(item.get("output"), str):
        found.append("an output that is no text")
    if kind == "function_call" and not _is_name(item.get("name")):
        found.append(f"name {item.get('name')!r}")
    if kind == "function_call" and not _is_json_object(item.get("arguments")):
        found.append(f"arguments {item.get('arguments')!r}")
    return found


def _thought_violations(item: Mapping[str, Any], rest: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    if item.keys() != {"id", "type", "summary", "encrypted_content"}:
        found.append(f"thinking with the fields {sorted(item)}")
    elif item["encrypted_content"] != _seal(item["id"], item["summary"]):
        found.append("thinking that was not issued like that")
    follower = next((other for other in rest if other.get("type") != "reasoning"), {})
    is_call = follower.get("type") == "function_call"
    if not is_call and follower.get("role") != "assistant":
        found.append("thinking without what it led to")
    return found


def _message_violations(item: Mapping[str, Any]) -> list[str]:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        return [f"role {role!r}"]
    if not isinstance(content, list) or not content:
        return ["an empty message"]
    return [f"{part}" for part in content if not _is_part(part, role)]


def _is_part(part: Mapping[str, Any], role: str) -> bool:
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        is_spoken = kind == "output_text"
        return bool(part.get("text")) and is_spoken == (role == "assistant")
    if kind == "input_image" and role == "user":
        return _is_data(_IMAGE.fullmatch(part.get("image_url", "")))
    if kind == "input_file" and role == "user":
        return bool(part.get("filename")) and _is_data(_FILE.fullmatch(part.get("file_data", "")))
    return False


def _is_data(url: re.Match[str] | None) -> bool:
    try:
        return url is not None and bool(base64.b64decode(url[url.re.groups], validate=True))
    except binascii.Error:
        return False


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_json_object(value: object) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False
