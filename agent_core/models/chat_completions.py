"""The dialect of OpenAI's chat completions, which most compatible endpoints speak.

Lenient where endpoints differ: an index may be missing, an id may repeat, a call may come whole or
in pieces, and what nobody needs is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from agent_core.content import (
    Block,
    Image,
    ReasoningPart,
    Resource,
    TextPart,
    ToolCallPart,
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
    UserTurn,
)
from agent_core.models.history import NO_TEXT, arguments_object, call_name, data_url, is_object

__all__ = ["MAX_NAME_CHARS", "ChatCompletions"]

MAX_NAME_CHARS: Final = 64

_FINISH: Final[Mapping[str, FinishReason]] = {
    "length": "length",
    "content_filter": "refusal",
}


# --- what endpoints stream ------------------------------------------------------------------


class _Function(Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[_Call] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None

    def to_usage(self) -> Usage:
        prompt = self.prompt_tokens_details or _Details()
        completion = self.completion_tokens_details or _Details()
        return Usage(
            input_tokens=self.prompt_tokens or 0,
            output_tokens=self.completion_tokens or 0,
            cached_tokens=prompt.cached_tokens or 0,
            reasoning_tokens=completion.reasoning_tokens or 0,
        )


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


class _OpenCall(Struct):
    id: str | None
    name: str = ""
    arguments: str = ""


class _Answer:
    """Turns chunks into events, and remembers what was said."""

    def __init__(self, dialect: ChatCompletions) -> None:
        self.has_ended = False
        self._dialect = dialect
        self._reason: str | None = None
        self._has_text = False
        self._is_refusal = False
        self._usage: Usage | None = None
        self._calls: list[_OpenCall] = []
        self._by_index: dict[int, int] = {}

    def read(self, data: object) -> Iterator[ModelEvent]:
        """Yield what one decoded chunk says.

        Raises:
            msgspec.ValidationError: It is no chunk of chat completions.
        """
        chunk = msgspec.convert(data, _Chunk, strict=False)
        for choice in (chunk.choices or ())[:1]:
            self._reason = choice.finish_reason or self._reason
            self.has_ended = self._reason is not None
            if choice.delta is not None:
                yield from self._delta(choice.delta)
        if chunk.usage is not None and (usage := chunk.usage.to_usage()) != self._usage:
            self._usage = usage
            yield UsageReport(usage)

    def finish(self) -> FinishReason | None:
        """Return how the answer ended; `None` if it broke off.

        Some endpoints give no reason behind a text. Behind calls its absence means that there may
        be more of them, or more of their arguments: such calls must not run.
        """
        if self._reason is None and (self._calls or not self._has_text):
            return None
        reason = _FINISH.get(self._reason or "")
        if reason is not None:
            return reason
        if self._is_refusal:
            return "refusal"
        return "tool_calls" if self._calls else "stop"

    def _delta(self, delta: _Delta) -> Iterator[ModelEvent]:
        self._dialect.wants_reasoning |= isinstance(delta.reasoning_content, str)
        thought = delta.reasoning_content or delta.reasoning
        if thought and isinstance(thought, str):
            yield ReasoningDelta(thought)
        text = delta.content or delta.refusal
        if text:
            self._has_text = True
            self._is_refusal |= not delta.content
            yield TextDelta(text)
        for call in delta.tool_calls or ():
            yield self._call(call, call.function or _Function())

    def _call(self, call: _Call, function: _Function) -> ToolCallDelta:
        arguments = function.arguments or ""
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        at = self._place(call)
        if at is None or self._is_another(self._calls[at], call, function):
            at = len(self._calls)
            self._calls.append(_OpenCall(call.id))
            if call.index is not None:
                self._by_index[call.index] = at
        opened = self._calls[at]
        name = "" if opened.name else function.name or ""
        opened.name += name
        opened.arguments += arguments
        return ToolCallDelta(at, name, arguments)

    def _place(self, call: _Call) -> int | None:
        """Return which call a fragment belongs to by its index, else its id, else its place."""
        if call.index is not None:
            return self._by_index.get(call.index)
        for at in reversed(range(len(self._calls))):
            if not call.id or self._calls[at].id == call.id:
                return at
        return None

    @staticmethod
    def _is_another(known: _OpenCall, call: _Call, function: _Function) -> bool:
        """Say whether a fragment in the place of `known` is a whole call of its own after all.

        Some endpoints send whole calls that all have the index 0, or none, or one id in common;
        others repeat id and name in every fragment of one call.
        """
        if not function.name or not known.name:
            return False
        if function.name != known.name or (call.id and known.id and call.id != known.id):
            return True
        return bool(function.arguments) and is_object(known.arguments)


# --- what endpoints are sent ----------------------------------------------------------------


_LEARNT: Final = ("stream_options", "reasoning_content", "max_completion_tokens")


class ChatCompletions:
    """Chat completions, for one model. It learns what the endpoint is particular about.

    Args:
        info: The model.
        id: Its name at the provider.
        limit_name: What the endpoint calls the limit of an answer's length: OpenAI itself
            ``max_completion_tokens``, the others ``max_tokens``.

    Attributes:
        wants_reasoning: Whether the thinking that led to tool calls goes back.
    """

    name = "chat completions"
    path = "/chat/completions"

    def __init__(self, info: ModelInfo, id: str, *, limit_name: str = "max_tokens") -> None:
        self.wants_reasoning = False
        self._info = info
        self._id = id
        self._limit_name = limit_name
        self._counts_tokens = True

    def body(self, request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.body`."""
        messages = [self._message(message) for message in request.messages]
        if request.system:
            messages.insert(0, {"role": "system", "content": request.system})
        body: dict[str, Any] = {
            "model": self._id,
            "messages": [message for message in messages if message is not None],
            "stream": True,
        }
        if self._counts_tokens:
            body["stream_options"] = {"include_usage": True}
        if request.tools:
            body["tools"] = [
                {"type": "function", "function": msgspec.structs.asdict(tool)}
                for tool in request.tools
            ]
        if request.effort is not None:
            body["reasoning_effort"] = request.effort
        # Not the most the model can say: some endpoints want to be paid for that in advance.
        if (limit := request.max_output_tokens) is not None:
            body[self._limit_name] = limit
        return body

    def reader(self) -> _Answer:
        """See `Dialect.reader`."""
        return _Answer(self)

    def amend(self, refusal: str, tried: set[str], body: Mapping[str, Any]) -> bool:
        """See `Dialect.amend`."""
        named = (name for name in _LEARNT if name in refusal and name not in tried)
        lesson = next(named, "")
        if lesson == "stream_options":
            self._counts_tokens = False
        elif lesson == "reasoning_content":  # demanded, or not wanted: the other way, then
            self.wants_reasoning = not any(lesson in message for message in body["messages"])
        elif lesson == "max_completion_tokens" and "max_tokens" in body:
            self._limit_name = lesson
        else:
            return False
        tried.add(lesson)
        return True

    def _message(self, message: Message) -> dict[str, Any] | None:
        """Return a message as endpoints take it, or `None` for one that says nothing."""
        if isinstance(message, UserTurn):
            return {"role": "user", "content": self._user_content(message.content)}
        return _to_wire(message, self.wants_reasoning)

    def _user_content(self, blocks: tuple[Block, ...]) -> str | list[dict[str, Any]]:
        content = [self._block(block) for block in blocks]
        if all(part["type"] == "text" for part in content):
            text = text_of(blocks)
            return text if text.strip() else NO_TEXT
        return [part for part in content if part.get("text", "it").strip()]

    def _block(self, block: Block) -> dict[str, Any]:
        takes_images = self._info.takes_images
        if isinstance(block, Image) and takes_images and block.mime_type in IMAGE_TYPES:
            url = data_url(block.mime_type, block.data)
            return {"type": "image_url", "image_url": {"url": url}}
        if isinstance(block, Resource) and block.blob and self._info.takes_files:
            data = data_url(block.mime_type, block.blob)
            name = block.uri.rpartition("/")[2] or "file"
            return {"type": "file", "file": {"filename": name, "file_data": data}}
        return {"type": "text", "text": text_of((block,))}


def _to_wire(message: AssistantTurn | ToolTurn, with_reasoning: bool) -> dict[str, Any] | None:
    if isinstance(message, ToolTurn):
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.output}
    parts = message.content
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    calls = [_call_to_wire(part) for part in parts if isinstance(part, ToolCallPart)]
    if not text and not calls:
        return None  # only thinking, or nothing: providers refuse an empty message
    wire: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        wire["tool_calls"] = calls
        if with_reasoning:
            thoughts = (part.text for part in parts if isinstance(part, ReasoningPart))
            wire["reasoning_content"] = "".join(thoughts)
    return wire


def _call_to_wire(part: ToolCallPart) -> dict[str, Any]:
    name = call_name(part, MAX_NAME_CHARS) or "unnamed"
    function = {"name": name, "arguments": arguments_object(part)}
    return {"id": part.id, "type": "function", "function": function}
