"""The dialect of Anthropic's messages.

It refuses more than any other: turns must alternate, results come first in the turn behind their
calls, no text may be blank, and thinking goes back signed and unchanged or not at all. So a history
is built anew for each request, from whatever a session holds, in a shape that is never refused.

There are two forms of thinking: the older models take a budget of tokens, the newer a word. The
model's name says which, and a refusal teaches otherwise.

Source: https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from agent_core.content import (
    Block,
    Image,
    Part,
    ReasoningPart,
    Resource,
    TextPart,
    Usage,
    text_of,
)
from agent_core.models.adapter import (
    IMAGE_TYPES,
    AssistantTurn,
    FinishReason,
    Message,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolTurn,
    UsageReport,
)
from agent_core.models.endpoint_model import StreamError
from agent_core.models.history import NO_TEXT, arguments_object, call_name

__all__ = ["Messages"]

# The API demands a limit. Every model since Claude 4 may say as much; a refusal teaches less.
DEFAULT_MAX_TOKENS: Final = 32_000
LEAST_BUDGET_TOKENS: Final = 1024
MAX_NAME_CHARS: Final = 128
NO_OUTPUT: Final = "(no output)"

_FINISH: Final[Mapping[str, FinishReason]] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}
_BUDGETS: Final = {
    "minimal": LEAST_BUDGET_TOKENS,
    "low": 4_000,
    "medium": 10_000,
    "high": 20_000,
    "xhigh": 32_000,
    "max": 48_000,
}
# Claude 3 to 4.5, and no date is taken for a version.
_TAKES_BUDGETS: Final = re.compile(r"claude-(3|(opus|sonnet|haiku)-4(?![-.]([6-9]|\d\d)(?!\d)))")
_THOUGHTS: Final = frozenset({"thinking", "redacted_thinking"})
_ORDER: Final = {"tool_result": 0, "tool_use": 2}  # what is not here is between them

# What refusals teach, by the words in them.
_LESSONS: Final = {
    "limit": re.compile(r"max_tokens: \d+ > (\d+)"),
    "signature": re.compile("signature"),
    "display": re.compile(r"\bdisplay\b"),
    "effort": re.compile(r"\benabled\W{1,3}(is )?(not supported|found)"),
    "budget": re.compile(r"adaptive|output_config(?!\.effort)|effort parameter"),
}


# --- what the endpoint streams --------------------------------------------------------------


class _Usage(Struct):
    """Counts so far; those of the prompt leave out what the cache had or took."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens_details: dict[str, Any] | None = None

    def updated(self, later: _Usage) -> _Usage:
        return _Usage(*(b or a for a, b in zip(astuple(self), astuple(later), strict=True)))

    def to_usage(self) -> Usage:
        cached = self.cache_read_input_tokens or 0
        written = self.cache_creation_input_tokens or 0
        details = self.output_tokens_details or {}
        return Usage(
            input_tokens=(self.input_tokens or 0) + cached + written,
            output_tokens=self.output_tokens or 0,
            cached_tokens=cached,
            reasoning_tokens=details.get("thinking_tokens") or 0,
            cache_write_tokens=written,
        )


class _Start(Struct):
    usage: _Usage | None = None


class _Event(Struct):
    type: str
    index: int = 0
    message: _Start | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: _Usage | None = None


class _Seal(Struct, omit_defaults=True):
    """What `ReasoningPart.opaque` holds, as JSON: the signature, or the thinking itself."""

    signature: str = ""
    redacted: str = ""


class _Call(Struct):
    number: int
    input: Any
    has_arguments: bool = False


class _Answer:
    """Turns events of the stream into ours, and remembers which blocks are open."""

    def __init__(self, origin: str) -> None:
        self.has_ended = False
        self._origin = origin
        self._reason: str | None = None
        self._usage = _Usage()
        self._n_calls = 0
        self._calls: dict[int, _Call] = {}  # by the index of their blocks, like the next
        self._seals: dict[int, _Seal] = {}

    def read(self, chunk: object) -> Iterator[ModelEvent]:
        """See `Reader.read`."""
        event = msgspec.convert(chunk, _Event)
        match event.type:
            case "message_start":
                yield from self._count((event.message or _Start()).usage)
            case "content_block_start":
                yield from self._open(event.index, event.content_block or {})
            case "content_block_delta":
                yield from self._continue(event.index, event.delta or {})
            case "content_block_stop":
                yield from self._close(event.index)
            case "message_delta":
                self._reason = (event.delta or {}).get("stop_reason") or self._reason
                self.has_ended = self._reason is not None
                yield from self._count(event.usage)
            case "error":
                raise StreamError(chunk)
            case _:
                pass  # its end, and what may be invented yet

    def finish(self) -> FinishReason | None:
        """See `Reader.finish`."""
        if self._reason is None:
            return None
        return _FINISH.get(self._reason) or ("tool_calls" if self._n_calls else "stop")

    def _count(self, usage: _Usage | None) -> Iterator[ModelEvent]:
        if usage is not None:
            self._usage = self._usage.updated(usage)
            yield UsageReport(self._usage.to_usage())

    def _open(self, at: int, block: dict[str, Any]) -> Iterator[ModelEvent]:
        match block:
            case {"type": "thinking"}:
                self._seals[at] = _Seal(block.get("signature") or "")
            case {"type": "redacted_thinking", "data": str(data)}:
                self._seals[at] = _Seal(redacted=data)
            case {"type": "tool_use", "name": str(name)}:
                self._calls[at] = _Call(self._n_calls, block.get("input") or {})
                yield ToolCallDelta(self._n_calls, name)
                self._n_calls += 1
            case _:
                pass
        # Some begin a block with the first of what is in it.
        yield from self._continue(at, block | {"type": f"{block.get('type')}_delta"})

    def _continue(self, at: int, delta: dict[str, Any]) -> Iterator[ModelEvent]:
        match delta:
            case {"type": "text_delta", "text": str(text)} if text:
                yield TextDelta(text)
            case {"type": "thinking_delta", "thinking": str(thought)} if thought:
                yield ReasoningDelta(thought)
            case {"type": "signature_delta", "signature": str(signature)} if at in self._seals:
                self._seals[at].signature += signature
            case {"type": "input_json_delta", "partial_json": str(piece)} if at in self._calls:
                if piece:
                    self._calls[at].has_arguments = True
                    yield ToolCallDelta(self._calls[at].number, arguments=piece)
            case _:
                pass

    def _close(self, at: int) -> Iterator[ModelEvent]:
        seal, call = self._seals.pop(at, _Seal()), self._calls.pop(at, None)
        if seal != _Seal():
            yield ReasoningDelta("", self._origin, msgspec.json.encode(seal).decode())
        if call is not None and not call.has_arguments:
            yield ToolCallDelta(call.number, arguments=msgspec.json.encode(call.input).decode())


# --- what the endpoint is sent --------------------------------------------------------------


class Messages:
    """Anthropic's messages, for one model. It learns what the endpoint is particular about.

    Args:
        info: The model.
        id: Its name at the provider.
    """

    name = "messages"
    path = "/v1/messages"

    def __init__(self, info: ModelInfo, id: str) -> None:
        self._info = info
        self._id = id
        self._takes_budgets = _TAKES_BUDGETS.search(id) is not None
        self._has_display = True
        self._trusts_signatures = True
        self._most_tokens: int | None = None

    def body(self, request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.body`."""
        limit = request.max_output_tokens or self._info.max_output_tokens or DEFAULT_MAX_TOKENS
        limit = min(limit, self._most_tokens or limit)
        messages = self._messages(request.messages)
        _mark(messages[-1]["content"])
        body = {"model": self._id, "max_tokens": limit, "stream": True, "messages": messages}
        if request.system.strip():
            body["system"] = _mark([_text(request.system)])
        if request.tools:
            body["tools"] = _mark([_tool(**msgspec.structs.asdict(tool)) for tool in request.tools])
        return body | self._thinking(request.effort, limit, messages)

    def reader(self) -> _Answer:
        """See `Dialect.reader`."""
        return _Answer(self._info.name)

    def amend(self, refusal: str, tried: set[str], body: Mapping[str, Any]) -> bool:
        """See `Dialect.amend`. Setting, not toggling: several requests may learn the same."""
        found = ((name, pattern.search(refusal)) for name, pattern in _LESSONS.items())
        lesson, words = next(((name, match) for name, match in found if match), ("", None))
        if words is None or lesson in tried:
            return False
        tried.add(lesson)
        match lesson:
            case "limit":
                self._most_tokens = int(words[1])
            case "signature":  # another account's, or another model's by the same name
                self._trusts_signatures = False
            case "display":
                self._has_display = False
            case _:
                self._takes_budgets = lesson == "budget"
        return True

    def _thinking(
        self, effort: str | None, limit: int, messages: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return what makes the model think as hard as `effort` says, as far as it may."""
        if effort is None:
            return {}
        if effort == "none":
            return {"thinking": {"type": "disabled"}}
        shown = {"display": "summarized"} if self._has_display else {}
        if not self._takes_budgets:
            return {"thinking": {"type": "adaptive", **shown}, "output_config": {"effort": effort}}
        # A quarter is left for the answer itself.
        budget = min(_BUDGETS.get(effort, _BUDGETS["high"]), limit - limit // 4)
        if budget < LEAST_BUDGET_TOKENS or not _can_go_on_thinking(messages):
            return {}
        return {"thinking": {"type": "enabled", "budget_tokens": budget, **shown}}

    # --- the history -------------------------------------------------------------------------

    def _messages(self, history: Sequence[Message]) -> list[dict[str, Any]]:
        """Return `history` as turns that alternate and begin with the user's."""
        wire: list[dict[str, Any]] = []
        for message in history:
            role = "assistant" if isinstance(message, AssistantTurn) else "user"
            content = self._content(message)
            if wire and wire[-1]["role"] == role:
                wire[-1]["content"] = _in_order(wire[-1]["content"] + content)
            elif content:
                wire.append({"role": role, "content": content})
        if not wire or wire[0]["role"] != "user":
            wire.insert(0, {"role": "user", "content": [_text(NO_TEXT)]})
        return wire

    def _content(self, message: Message) -> list[dict[str, Any]]:
        """Return a message's blocks; none for an assistant's that says nothing."""
        if isinstance(message, ToolTurn):
            return [_result(message)]
        if isinstance(message, AssistantTurn):
            return self._said(message.content)
        blocks = [wire for block in message.content if (wire := self._block(block)) is not None]
        return blocks or [_text(NO_TEXT)]

    def _said(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        content = _in_order([wire for part in parts if (wire := self._part(part)) is not None])
        while content and content[-1]["type"] in _THOUGHTS:
            content.pop()  # thinking may not be the last that was said
        if content and content[-1]["type"] == "text":
            content[-1]["text"] = content[-1]["text"].rstrip()
        return content

    def _part(self, part: Part) -> dict[str, Any] | None:
        if isinstance(part, ReasoningPart):
            return self._thought(part)
        if isinstance(part, TextPart):
            return _text_or_none(part.text)
        name = call_name(part, MAX_NAME_CHARS) or "unknown"
        input = msgspec.json.decode(arguments_object(part))
        return {"type": "tool_use", "id": part.id, "name": name, "input": input}

    def _thought(self, part: ReasoningPart) -> dict[str, Any] | None:
        """Return thinking as this model sealed it; `None` if it did not, or was interrupted."""
        if part.origin != self._info.name or not self._trusts_signatures:
            return None
        try:
            seal = msgspec.json.decode(part.opaque or "{}", type=_Seal)
        except msgspec.DecodeError:
            return None  # from before the model of this name spoke this dialect
        if seal.redacted:
            return {"type": "redacted_thinking", "data": seal.redacted}
        if not seal.signature:
            return None
        return {"type": "thinking", "thinking": part.text, "signature": seal.signature}

    def _block(self, block: Block) -> dict[str, Any] | None:
        match block:
            case Image(mime_type=kind) if self._info.takes_images and kind in IMAGE_TYPES:
                return {"type": "image", "source": _source(kind, block.data)}
            case Resource(mime_type="application/pdf", blob=str(data)) if (
                data and self._info.takes_files
            ):
                return {"type": "document", "source": _source("application/pdf", data)}
        return _text_or_none(text_of((block,)))


def _mark(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Have the provider keep everything up to the end of `blocks`: the next request begins so."""
    blocks[-1]["cache_control"] = {"type": "ephemeral"}
    return blocks


def _in_order(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(content, key=lambda block: _ORDER.get(block["type"], 1))


def _can_go_on_thinking(messages: Sequence[dict[str, Any]]) -> bool:
    """Say whether thinking by budget is not refused: it cannot begin between call and result."""
    if messages[-1]["content"][0]["type"] != "tool_result":
        return True
    return messages[-2]["content"][0]["type"] in _THOUGHTS


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _text_or_none(text: str) -> dict[str, Any] | None:
    return _text(text) if text.strip() else None


def _source(mime_type: str, data: str) -> dict[str, Any]:
    return {"type": "base64", "media_type": mime_type, "data": data}


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": description, "input_schema": parameters}


def _result(turn: ToolTurn) -> dict[str, Any]:
    content = turn.output if turn.output.strip() else NO_OUTPUT
    result = {"type": "tool_result", "tool_use_id": turn.call_id, "content": content}
    return result | ({"is_error": True} if turn.is_error else {})
