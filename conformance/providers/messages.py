"""What the provider double says and demands when it speaks Anthropic's messages.

An answer is a list of steps, one for each event of the stream, so that a test can put a gate or a
failure between any two of them:

```python
Reply(message(thinking(0, "hm"), text(1, "Hel", "lo"), input=12, output=3))
```
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = [
    "block_delta",
    "block_start",
    "block_stop",
    "call_read",
    "delta_end",
    "error_event",
    "event",
    "last_words",
    "message",
    "ping",
    "redacted",
    "signature_of",
    "start",
    "stop",
    "text",
    "thinking",
    "tool_use",
    "violations",
]

Block = Mapping[str, Any]

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_ID: Final = re.compile(r"[a-zA-Z0-9_-]+")
_MEDIA_TYPES: Final = {
    "image": {"image/jpeg", "image/png", "image/gif", "image/webp"},
    "document": {"application/pdf"},
}
_EFFORTS: Final = {"low", "medium", "high", "xhigh", "max"}
_THOUGHTS: Final = {"thinking", "redacted_thinking"}
_FIELDS: Final = {
    "user": {"text", "image", "document", "tool_result"},
    "assistant": {"text", "tool_use", *_THOUGHTS},
}
_TOP: Final = {
    *("model", "messages", "max_tokens", "stream", "system", "tools", "thinking"),
    *("output_config", "temperature", "top_p", "top_k", "stop_sequences", "metadata"),
    *("tool_choice", "service_tier"),
}
_MAX_CACHE_MARKS: Final = 4
_LEAST_BUDGET: Final = 1024


# --- the events of a stream -----------------------------------------------------------------


def event(type: str, **data: Any) -> bytes:
    """Return an event with a name and, beside that name, `data`."""
    body = json.dumps({"type": type} | data, ensure_ascii=False)
    return f"event: {type}\ndata: {body}\n\n".encode()


def start(*, input: int = 10, cached: int = 0, written: int = 0) -> bytes:
    """Return the first event: tokens of the prompt, without those that the cache had or took."""
    usage = {
        "input_tokens": input,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": 1,
    }
    head = {"id": "msg_double", "type": "message", "role": "assistant", "model": "double"}
    end = {"stop_reason": None, "stop_sequence": None, "usage": usage}
    return event("message_start", message={**head, "content": [], **end})


def block_start(index: int, **block: Any) -> bytes:
    """Return the event that opens block number `index`."""
    return event("content_block_start", index=index, content_block=block)


def block_delta(index: int, type: str, **delta: Any) -> bytes:
    """Return an event with more of block number `index`."""
    return event("content_block_delta", index=index, delta={"type": type} | delta)


def block_stop(index: int) -> bytes:
    """Return the event that closes block number `index`."""
    return event("content_block_stop", index=index)


def delta_end(reason: str | None = "end_turn", *, output: int = 5, **usage: Any) -> bytes:
    """Return the event that says why the model ended; `usage` counts besides the output."""
    delta = {"stop_reason": reason, "stop_sequence": None}
    return event("message_delta", delta=delta, usage={"output_tokens": output} | usage)


def stop() -> bytes:
    """Return the last event."""
    return event("message_stop")


def ping() -> bytes:
    """Return what keeps a connection busy without saying anything."""
    return event("ping")


def error_event(type: str, message: str) -> bytes:
    """Return an error in the midst of a stream."""
    return event("error", error={"type": type, "message": message})


# --- whole blocks, and whole answers --------------------------------------------------------


def text(index: int, *pieces: str) -> list[bytes]:
    """Return block number `index`, of text that comes in `pieces`."""
    deltas = [block_delta(index, "text_delta", text=piece) for piece in pieces]
    return [block_start(index, type="text", text=""), *deltas, block_stop(index)]


def signature_of(thought: str) -> str:
    """Return the signature this double gives `thought`, and demands back with it."""
    return "sig+/" + hashlib.sha256(thought.encode()).hexdigest() + "=="


def thinking(index: int, *pieces: str) -> list[bytes]:
    """Return block number `index`, of thinking that comes in `pieces` and is signed."""
    signature = signature_of("".join(pieces))
    return [
        block_start(index, type="thinking", thinking="", signature=""),
        *(block_delta(index, "thinking_delta", thinking=piece) for piece in pieces),
        block_delta(index, "signature_delta", signature=signature),
        block_stop(index),
    ]


def redacted(index: int, thought: str = "hidden") -> list[bytes]:
    """Return block number `index`, of thinking that nobody but the provider can read."""
    data = "red+/" + hashlib.sha256(thought.encode()).hexdigest()
    return [block_start(index, type="redacted_thinking", data=data), block_stop(index)]


def tool_use(index: int, name: str, *fragments: str, id: str = "toolu_1") -> list[bytes]:
    """Return block number `index`, a tool call whose arguments come in `fragments`."""
    deltas = [block_delta(index, "input_json_delta", partial_json=part) for part in fragments]
    head = block_start(index, type="tool_use", id=id, name=name, input={})
    return [head, *deltas, block_stop(index)]


def message(
    *blocks: Sequence[bytes], reason: str = "end_turn", output: int = 5, **counts: int
) -> list[bytes]:
    """Return a whole answer of `blocks`; `counts` are those of `start`."""
    steps = [step for block in blocks for step in block]
    return [start(**counts), *steps, delta_end(reason, output=output), stop()]


def call_read(path: str) -> list[bytes]:
    """Return an answer that thinks, says a word and calls the tool ``read`` with `path`."""
    arguments = json.dumps({"path": path})
    return message(
        thinking(0, "I have to ", "look"),
        text(1, "Let me see."),
        tool_use(2, "read", "", arguments[:4], arguments[4:9], arguments[9:]),
        reason="tool_use",
        input=20,
        cached=100,
        output=30,
    )


def last_words() -> list[bytes]:
    """Return an answer that says something and ends the turn."""
    return message(text(0, "All ", "done."), input=15, cached=120, output=8)


# --- what the provider refuses --------------------------------------------------------------


def violations(request: Mapping[str, Any]) -> list[str]:
    """Return what a strict provider would refuse in `request`, as sentences."""
    return [
        *(f"{name}: extra inputs are not permitted" for name in sorted(request.keys() - _TOP)),
        *_limit_violations(request),
        *_tools_violations(request.get("tools", ())),
        *_system_violations(request.get("system")),
        *_cache_violations(request),
        *_messages_violations(request.get("messages") or []),
        *_thinking_violations(request),
    ]


def history_violations(request: Mapping[str, Any]) -> list[str]:
    """Return what every provider of the dialect would refuse in the history of `request`."""
    return list(_messages_violations(request.get("messages") or []))


def _limit_violations(request: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(request.get("model"), str) or not request["model"]:
        yield "no model"
    limit = request.get("max_tokens")
    if type(limit) is not int or limit < 1:
        yield f"max_tokens {limit!r}"


def _tools_violations(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = [tool.get("name") for tool in tools]
    if len(set(names)) != len(names):
        yield f"tool names {names} are not unique"
    for tool in tools:
        if not _NAME.fullmatch(str(tool.get("name", ""))):
            yield f"tool name {tool.get('name')!r}"
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            yield f"tool schema {schema!r}"
        for name in sorted(tool.keys() - {"name", "description", "input_schema", "cache_control"}):
            yield f"tool field {name}: extra inputs are not permitted"


def _system_violations(system: object) -> Iterator[str]:
    if system is None:
        return
    if not isinstance(system, list):
        yield "system is no list of blocks"
        return
    for block in system:
        if block.get("type") != "text" or not str(block.get("text", "")).strip():
            yield f"system block {block!r}"


def _cache_violations(request: Mapping[str, Any]) -> Iterator[str]:
    marked = list(_marked(request))
    if len(marked) > _MAX_CACHE_MARKS:
        yield f"{len(marked)} blocks with cache_control"
    for block in marked:
        if block["cache_control"] != {"type": "ephemeral"}:
            yield f"cache_control {block['cache_control']!r}"
        if block.get("type") in _THOUGHTS:
            yield "cache_control on thinking"


def _marked(value: object) -> Iterator[Block]:
    """Give every block with a mark; arguments of calls and schemas are not looked into."""
    if isinstance(value, Mapping):
        if "cache_control" in value:
            yield value
        for key, inner in value.items():
            if key not in ("input", "input_schema"):
                yield from _marked(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _marked(inner)


def _messages_violations(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not messages:
        yield "no messages"
        return
    seen: set[str] = set()
    owed: list[str] = []
    for at, message in enumerate(messages):
        role = message.get("role")
        if role != ("assistant" if at % 2 else "user"):
            yield f"message {at}: role {role!r}"
            return
        content = message.get("content")
        if not isinstance(content, list) or not content:
            yield f"message {at}: content {content!r}"
            return
        found = [*_content_violations(role, content), *_result_violations(content, owed)]
        owed = [block["id"] for block in content if block.get("type") == "tool_use"]
        found += [f"the id {id!r} again" for id in owed if id in seen or owed.count(id) > 1]
        seen.update(owed)
        yield from (f"message {at}: {wrong}" for wrong in found)
    if owed:
        yield f"results are owed for {owed}"
    last = messages[-1]["content"][-1]
    if messages[-1]["role"] == "assistant" and last.get("text", "").endswith((" ", "\n", "\t")):
        yield "the final assistant message ends with white space"


def _content_violations(role: str, content: Sequence[Block]) -> Iterator[str]:
    for block in content:
        kind = block.get("type")
        if kind not in _FIELDS[role]:
            yield f"a block of type {kind!r} from the {role}"
        else:
            yield from _CHECKS[kind](block)
    if role == "assistant" and content[-1].get("type") in _THOUGHTS:
        yield "the final block is thinking"


def _result_violations(content: Sequence[Block], owed: Sequence[str]) -> Iterator[str]:
    """Check that `content` begins with exactly the results that are `owed`."""
    given = [block["tool_use_id"] for block in content if block.get("type") == "tool_result"]
    if sorted(given) != sorted(owed):
        yield f"results for {given}, but owed are {owed}"
    if any(block.get("type") != "tool_result" for block in content[: len(given)]):
        yield "results are not first"


def _text_violations(block: Block) -> Iterator[str]:
    if not isinstance(block.get("text"), str) or not block["text"].strip():
        yield f"blank text {block.get('text')!r}"


def _source_violations(block: Block) -> Iterator[str]:
    source = block.get("source", {})
    if source.get("type") != "base64" or not source.get("data"):
        yield f"source {source!r}"
    if source.get("media_type") not in _MEDIA_TYPES[block["type"]]:
        yield f"media type {source.get('media_type')!r} of a {block['type']}"


def _tool_use_violations(block: Block) -> Iterator[str]:
    if not _ID.fullmatch(str(block.get("id", ""))):
        yield f"tool_use id {block.get('id')!r}"
    if not _NAME.fullmatch(str(block.get("name", ""))):
        yield f"tool_use name {block.get('name')!r}"
    if not isinstance(block.get("input"), Mapping):
        yield f"tool_use input {block.get('input')!r}"


def _tool_result_violations(block: Block) -> Iterator[str]:
    content = block.get("content")
    if content is None and block.get("is_error"):
        yield "an error without content"
    if content is not None and not (isinstance(content, str) and content.strip()):
        yield f"tool_result content {content!r}"


def _thought_violations(block: Block) -> Iterator[str]:
    if block.keys() != {"type", "thinking", "signature"}:
        yield f"a thinking block with {sorted(block)}"
    elif block["signature"] != signature_of(block["thinking"]):
        yield f"an invalid signature in the thinking block {block['thinking']!r}"


def _redacted_violations(block: Block) -> Iterator[str]:
    if block.keys() != {"type", "data"} or not re.fullmatch(r"red\+/[0-9a-f]{64}", block["data"]):
        yield f"invalid data in the redacted_thinking block {block!r}"


_CHECKS: Final = {
    "text": _text_violations,
    "image": _source_violations,
    "document": _source_violations,
    "tool_use": _tool_use_violations,
    "tool_result": _tool_result_violations,
    "thinking": _thought_violations,
    "redacted_thinking": _redacted_violations,
}


def _thinking_violations(request: Mapping[str, Any]) -> Iterator[str]:
    effort = request.get("output_config", {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        yield f"effort {effort!r}"
    config = request.get("thinking") or {"type": "disabled"}
    if config["type"] == "enabled":
        budget = config.get("budget_tokens")
        if type(budget) is not int or not _LEAST_BUDGET <= budget < request.get("max_tokens", 0):
            yield f"budget_tokens {budget!r} with max_tokens {request.get('max_tokens')!r}"
        if not _begins_with_thinking(request.get("messages") or []):
            yield "the assistant message before the last results does not start with thinking"
    elif config["type"] not in ("adaptive", "disabled"):
        yield f"thinking of type {config['type']!r}"
    elif "budget_tokens" in config:
        yield f"budget_tokens with {config['type']} thinking"


def _begins_with_thinking(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether the calls that the last message answers, if any, were thought about."""
    if len(messages) < 2 or messages[-1].get("role") != "user":
        return True
    if not any(block.get("type") == "tool_result" for block in messages[-1]["content"]):
        return True
    return messages[-2]["content"][0].get("type") in _THOUGHTS
