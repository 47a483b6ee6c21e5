"""The dialect of OpenAI's Responses API. Nothing is kept there: each request has it all.

A model's thinking comes sealed; it goes back as it came, for the model thinks better with it. The
ids of other items stay away: the API holds whoever names one to all that it came with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from agent_core.content import (
    Block,
    Image,
    Part,
    ReasoningPart,
    Resource,
    TextPart,
    ToolCallPart,
    Usage,
    text_of,
)
from agent_core.models.adapter import (
    IMAGE_TYPES,
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
from agent_core.models.chat_completions import MAX_NAME_CHARS
from agent_core.models.endpoint_model import StreamError
from agent_core.models.history import NO_TEXT, arguments_object, call_name, data_url

__all__ = ["Responses"]

MIN_OUTPUT_TOKENS: Final = 16  # the API refuses to be held to less
_PDF: Final = "application/pdf"
_PARAGRAPH: Final = "\n\n"

_REFUSED: Final[Mapping[str, tuple[str, ...]]] = {
    # Summaries are for verified organisations only.
    "summary": ("reasoning.summary", "reasoning summar"),
    # The model does not think, or not under seal.
    "include": ("'include'", "encrypted content is not supported"),
    # A seal is good for one organisation only, and the key may be another one's by now.
    "thinking": ("encrypted_content", "could not be verified", "'reasoning'"),
}
"""What a request may have to go without, and how the API says so, in lower case."""


# --- what is streamed -----------------------------------------------------------------------


class _Event(Struct):
    type: str = ""


class _Delta(Struct):
    delta: str = ""
    item_id: str | None = None
    output_index: int | None = None
    summary_index: int | None = None
    content_index: int | None = None


class _ItemEvent(Struct):
    item: dict[str, Any]
    output_index: int | None = None


class _CallItem(Struct):
    id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Thought(Struct, tag_field="type", tag="reasoning"):
    """Thinking as it comes and goes: no field but those that the API takes back."""

    summary: list[Any]
    encrypted_content: str
    id: str | UnsetType = UNSET


class _InputDetails(Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _OutputDetails(Struct):
    reasoning_tokens: int | None = None


class _Usage(Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None

    def to_usage(self) -> Usage:
        told = self.input_tokens_details or _InputDetails()
        said = self.output_tokens_details or _OutputDetails()
        return Usage(
            input_tokens=self.input_tokens or 0,
            output_tokens=self.output_tokens or 0,
            cached_tokens=told.cached_tokens or 0,
            reasoning_tokens=said.reasoning_tokens or 0,
            cache_write_tokens=told.cache_write_tokens or 0,
        )


class _Incomplete(Struct):
    reason: str | None = None


class _Response(Struct):
    error: dict[str, Any] | None = None
    incomplete_details: _Incomplete | None = None
    usage: _Usage | None = None


class _LastEvent(Struct):
    response: _Response


class _OpenCall(Struct):
    at: int
    is_named: bool = False
    n_chars: int = 0


_Key = int | str | None


class _Answer:
    """Turns events of the API into ours, and remembers what was said."""

    def __init__(self, dialect: Responses) -> None:
        self.has_ended = False
        self._dialect = dialect
        self._cut: str | None = None  # why the answer is incomplete
        self._is_refusal = False
        self._n_calls = 0
        self._open_calls: dict[_Key, _OpenCall] = {}
        self._paragraph: tuple[int | None, ...] = ()

    def read(self, data: object) -> Iterable[ModelEvent]:
        """Return what one decoded event says.

        Raises:
            StreamError: It says that the call failed.
            msgspec.ValidationError: It is no event of this API.
        """
        match msgspec.convert(data, _Event).type:
            case "response.output_text.delta":
                return self._text(data)
            case "response.function_call_arguments.delta":
                return self._arguments(data)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                return self._thinking(data)
            case "response.refusal.delta":
                self._is_refusal = True
                return self._text(data)
            case "response.output_item.added":
                return self._item(data, is_whole=False)
            case "response.output_item.done":
                return self._item(data, is_whole=True)
            case "response.completed" | "response.incomplete" | "response.failed" as kind:
                return self._end(kind, msgspec.convert(data, _LastEvent, strict=False).response)
            case "error":
                told = msgspec.convert(data, dict[str, Any])
                inner = told.get("error")  # some endpoints say it there, as in a refusal
                raise StreamError(inner if isinstance(inner, dict) else told)
            case _:
                return ()

    def finish(self) -> FinishReason | None:
        """Return how the answer ended; `None` if it broke off."""
        if not self.has_ended:
            return None
        if self._is_refusal or self._cut == "content_filter":
            return "refusal"
        if self._cut is not None:
            return "length"
        return "tool_calls" if self._n_calls else "stop"

    @staticmethod
    def _text(data: object) -> Iterable[ModelEvent]:
        text = msgspec.convert(data, _Delta, strict=False).delta
        return (TextDelta(text),) if text else ()

    def _thinking(self, data: object) -> Iterable[ModelEvent]:
        said = msgspec.convert(data, _Delta, strict=False)
        if not said.delta:
            return ()
        paragraph = (said.output_index, said.summary_index, said.content_index)
        is_next = self._paragraph not in ((), paragraph)
        self._paragraph = paragraph
        return (ReasoningDelta(_PARAGRAPH * is_next + said.delta),)

    def _arguments(self, data: object) -> Iterable[ModelEvent]:
        said = msgspec.convert(data, _Delta, strict=False)
        call = self._call(said.item_id if said.output_index is None else said.output_index)
        call.n_chars += len(said.delta)
        return (ToolCallDelta(call.at, "", said.delta),)

    def _item(self, data: object, *, is_whole: bool) -> Iterable[ModelEvent]:
        event = msgspec.convert(data, _ItemEvent, strict=False)
        kind = event.item.get("type")
        if kind == "function_call":
            item = msgspec.convert(event.item, _CallItem, strict=False)
            key = item.id if event.output_index is None else event.output_index
            return self._whole_call(key, item) if is_whole else self._named_call(key, item)
        # Before it is whole, its seal may be that of a part only.
        if kind == "reasoning" and is_whole and event.item.get("encrypted_content"):
            told = {name: value for name, value in event.item.items() if value is not None}
            thought = msgspec.convert({"summary": []} | told, _Thought, strict=False)
            return (self._dialect.sealed(thought),)
        return ()

    def _named_call(self, key: _Key, item: _CallItem) -> Iterable[ModelEvent]:
        call = self._call(key)
        name = "" if call.is_named else item.name or ""
        call.is_named = call.is_named or bool(name)
        return (ToolCallDelta(call.at, name),)

    def _whole_call(self, key: _Key, item: _CallItem) -> Iterable[ModelEvent]:
        yield from self._named_call(key, item)
        arguments = item.arguments or ""
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        call = self._open_calls.pop(key)
        if rest := arguments[call.n_chars :]:
            yield ToolCallDelta(call.at, "", rest)

    def _call(self, key: _Key) -> _OpenCall:
        call = self._open_calls.get(key)
        if call is None:
            call = self._open_calls[key] = _OpenCall(self._n_calls)
            self._n_calls += 1
        return call

    def _end(self, kind: str, response: _Response) -> Iterable[ModelEvent]:
        if kind == "response.failed":
            raise StreamError(response.error or {})
        if kind == "response.incomplete":
            self._cut = (response.incomplete_details or _Incomplete()).reason or "unknown"
        self.has_ended = True
        return () if response.usage is None else (UsageReport(response.usage.to_usage()),)


# --- what is sent ---------------------------------------------------------------------------


class Responses:
    """The Responses API, for one model. It learns what the API will not have from it.

    Args:
        info: The model.
        id: Its name at the provider.
    """

    name = "responses"
    path = "/responses"

    def __init__(self, info: ModelInfo, id: str) -> None:
        self._info = info
        self._id = id
        self._left_out: set[str] = set()
        # Once the API refused thinking of before, only what it said since then goes back.
        self._trusted: set[str] = set()

    def body(self, request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.body`."""
        body: dict[str, Any] = {
            "model": self._id,
            "input": [item for message in request.messages for item in self._items(message)],
            "stream": True,
            "store": False,
        }
        if request.system:
            body["instructions"] = request.system
        if "include" not in self._left_out:
            body["include"] = ["reasoning.encrypted_content"]
        if request.tools:
            body["tools"] = [
                {"type": "function", "strict": False} | msgspec.structs.asdict(tool)
                for tool in request.tools
            ]
        if request.effort is not None:
            summary = {} if "summary" in self._left_out else {"summary": "auto"}
            body["reasoning"] = {"effort": request.effort} | summary
        if (limit := request.max_output_tokens) is not None:
            body["max_output_tokens"] = max(limit, MIN_OUTPUT_TOKENS)
        return body

    def reader(self) -> _Answer:
        """See `Dialect.reader`."""
        return _Answer(self)

    def amend(self, refusal: str, tried: set[str], body: Mapping[str, Any]) -> bool:
        """See `Dialect.amend`."""
        words = refusal.lower()
        for what, signs in _REFUSED.items():
            if what not in tried and any(sign in words for sign in signs):
                tried.add(what)
                self._left_out.add(what)
                if what == "thinking":
                    self._trusted.clear()
                return True
        return False

    def sealed(self, thought: _Thought) -> ReasoningDelta:
        """Return the event that ends thinking, with what only this model can read."""
        opaque = msgspec.json.encode(thought).decode()
        if "thinking" in self._left_out:
            self._trusted.add(opaque)
        return ReasoningDelta("", self._info.name, opaque)

    def _items(self, message: Message) -> Iterator[dict[str, Any]]:
        if isinstance(message, UserTurn):
            content = [part for block in message.content if (part := self._block(block))]
            nothing = {"type": "input_text", "text": NO_TEXT}
            yield {"type": "message", "role": "user", "content": content or [nothing]}
        elif isinstance(message, ToolTurn):
            yield {
                "type": "function_call_output",
                "call_id": message.call_id,
                "output": message.output,
            }
        else:
            yield from self._said(message.content)

    def _said(self, parts: tuple[Part, ...]) -> Iterator[dict[str, Any]]:
        thoughts: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, ReasoningPart):
                thoughts += self._thought(part)
            elif isinstance(part, ToolCallPart) or part.text:
                # Thinking goes back with what it led to: the API may refuse it without.
                yield from thoughts
                thoughts.clear()
                yield _said_to_wire(part)

    def _thought(self, part: ReasoningPart) -> Iterator[dict[str, Any]]:
        is_ours = part.opaque and part.origin == self._info.name
        if is_ours and ("thinking" not in self._left_out or part.opaque in self._trusted):
            try:
                thought = msgspec.json.decode(part.opaque, type=_Thought)
            except msgspec.DecodeError:
                return  # the model's name stood for one of another dialect then
            yield msgspec.to_builtins(thought)

    def _block(self, block: Block) -> dict[str, Any] | None:
        """Return a block as the API takes it, or `None` for one that says nothing."""
        if isinstance(block, Image) and self._takes(block):
            url = data_url(block.mime_type, block.data)
            return {"type": "input_image", "image_url": url, "detail": "auto"}
        if isinstance(block, Resource) and block.blob and self._takes(block):
            name = block.uri.rpartition("/")[2] or "file.pdf"
            data = data_url(_PDF, block.blob)
            return {"type": "input_file", "filename": name, "file_data": data}
        text = text_of((block,))  # the mention of it, if it is something else
        return {"type": "input_text", "text": text} if text else None

    def _takes(self, block: Image | Resource) -> bool:
        if isinstance(block, Image):
            return self._info.takes_images and block.mime_type in IMAGE_TYPES
        return self._info.takes_files and block.mime_type == _PDF


def _said_to_wire(part: TextPart | ToolCallPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        content = [{"type": "output_text", "text": part.text}]
        return {"type": "message", "role": "assistant", "content": content}
    return {
        "type": "function_call",
        "call_id": part.id,
        "name": call_name(part, MAX_NAME_CHARS) or "unnamed",
        "arguments": arguments_object(part),
    }
