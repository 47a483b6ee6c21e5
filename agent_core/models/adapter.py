"""The seam to a model: one request value in, an asynchronous stream of model events out.

An adapter is a leaf. It gets the turn's signal inside the request, gives up its own awaits when the
signal fires (`AbortSignal.scope` around one await, never across a ``yield``), closes its connection
before it returns, and turns every foreign failure into a `ModelError`. Nobody cancels it from
outside; its consumers close its generator with `contextlib.aclosing`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from msgspec import Struct

from agent_core.cancellation import AbortSignal
from agent_core.content import Block, Part, Usage

__all__ = [
    "IMAGE_TYPES",
    "AssistantTurn",
    "Finish",
    "FinishReason",
    "Message",
    "ModelAdapter",
    "ModelEvent",
    "ModelInfo",
    "ModelRequest",
    "Price",
    "ReasoningDelta",
    "RequestConfig",
    "Retrying",
    "TextDelta",
    "ToolCallDelta",
    "ToolSpec",
    "ToolTurn",
    "UsageReport",
    "UserTurn",
]


# --- the conversation as a model is told it -------------------------------------------------


class UserTurn(Struct, frozen=True, tag="user"):
    """What a person, or a listener on a person's behalf, said."""

    content: tuple[Block, ...]


class AssistantTurn(Struct, frozen=True, tag="assistant"):
    """What the model said. `interrupted`: the rest never arrived."""

    content: tuple[Part, ...]
    interrupted: bool = False


class ToolTurn(Struct, frozen=True, tag="tool"):
    """The result of one tool call. Every `ToolCallPart` is followed by exactly one."""

    call_id: str
    name: str
    output: str
    is_error: bool = False


Message = UserTurn | AssistantTurn | ToolTurn


IMAGE_TYPES: Final = frozenset({"image/gif", "image/jpeg", "image/png", "image/webp"})
"""The images that providers take. Any other would have them refuse the whole history."""


# --- the model ------------------------------------------------------------------------------


class Price(Struct, frozen=True, forbid_unknown_fields=True):
    """What a model costs, per million tokens. What is not given costs as much as `input`."""

    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None
    currency: str = "USD"

    def of(self, usage: Usage) -> float:
        """Return what a call costs."""
        plain = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
        cached = self.input if self.cached is None else self.cached
        written = self.input if self.cache_write is None else self.cache_write
        cost = max(0, plain) * self.input + usage.output_tokens * self.output
        return (cost + usage.cached_tokens * cached + usage.cache_write_tokens * written) / 1e6


class ModelInfo(Struct, frozen=True):
    """What is known of a model. `name` is as people write it, ``provider:name`` or one they gave.

    `context_tokens` is what prompt and answer may have together, `None` where nobody knows.
    `efforts` are the words for how hard it may think, least first; `effort` is its default.
    """

    name: str
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    takes_images: bool = True
    takes_files: bool = False
    efforts: tuple[str, ...] = ()
    effort: str | None = None
    price: Price | None = None


# --- the request ----------------------------------------------------------------------------


class ToolSpec(Struct, frozen=True):
    """A tool as a model is told of it. `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class RequestConfig(Struct, frozen=True):
    """What the ``agent/request`` hook may change about a request.

    `model` is the name of any model of the runtime, `effort` one of that model's, or `None`.
    `sampling` is passed on to the provider as it is: ``temperature``, ``top_p`` and so on.
    """

    model: str
    effort: str | None = None
    sampling: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Everything one model call needs. Frozen; `signal` is the turn's own.

    `max_output_tokens` bounds the answer; `None` leaves it to the model.
    """

    model: str
    messages: tuple[Message, ...]
    system: str
    tools: tuple[ToolSpec, ...]
    session_id: str
    signal: AbortSignal
    sampling: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    max_output_tokens: int | None = None


# --- the answer -----------------------------------------------------------------------------


class TextDelta(Struct, frozen=True):
    """More text."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """More thinking. One with `opaque` ends its part; see `ReasoningPart`."""

    text: str
    origin: str = ""
    opaque: str = ""


class ToolCallDelta(Struct, frozen=True):
    """More of tool call number `index`: its `name` once, its `arguments` in pieces."""

    index: int
    name: str = ""
    arguments: str = ""


class UsageReport(Struct, frozen=True):
    """Tokens of this call so far; the last report counts."""

    usage: Usage


class Retrying(Struct, frozen=True):
    """This attempt failed before it said anything; the next follows after `delay_s` seconds."""

    attempt: int
    delay_s: float
    code: str
    message: str


FinishReason = Literal["stop", "tool_calls", "length", "refusal", "aborted"]


class Finish(Struct, frozen=True):
    """The model's last word; nothing follows."""

    reason: FinishReason


ModelEvent = TextDelta | ReasoningDelta | ToolCallDelta | UsageReport | Retrying | Finish


class ModelAdapter(Protocol):
    """A way to reach a model."""

    @property
    def info(self) -> ModelInfo:
        """What is known of the model; it may learn more with every call."""
        ...

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model.

        Cancellation: through ``request.signal``; close the generator with `aclosing`.
        Concurrency: any number of streams.

        Returns:
            An asynchronous generator of events that ends with one `Finish`.

        Raises:
            ModelError: While iterating, when the call failed.
            TurnAborted: While iterating, when the signal fired.
        """
        ...

    async def aclose(self) -> None:
        """Close pooled connections. Called once, when no stream is open."""
        ...
