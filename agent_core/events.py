"""The events of the session log: what happened, as closed, typed, immutable data.

The log is the only truth about a session; everything people see and everything the model is told
is derived from it. So an event holds facts only: no stack, no signal, no exception, no reason why
somebody cancelled. A cancelled turn ends in ``{"kind": "aborted"}`` and in nothing more; a stored
outcome that carries anything else is refused when it is read.

Decoding is strict on purpose (`decode`): `encode` followed by `decode` is how `Session.append`
checks that an event is lossless JSON before it becomes part of the log.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Struct

from agent_core.content import (
    Block,
    Location,
    Part,
    PlanEntry,
    ToolContent,
    ToolKind,
    Usage,
)
from agent_core.outcomes import (
    Aborted,
    Completed,
    Disposed,
    Failed,
    Interrupted,
    MaxSteps,
    MaxTokens,
    Outcome,
    Refused,
    Rejected,
)

__all__ = [
    "Aborted",
    "AssistantChunk",
    "AssistantMessage",
    "CompactionEnd",
    "CompactionStart",
    "Completed",
    "ContextMessage",
    "Disposed",
    "EffortChanged",
    "Event",
    "EventData",
    "Failed",
    "FileChanged",
    "FilesRestored",
    "Interrupted",
    "MaxSteps",
    "MaxTokens",
    "ModeChanged",
    "ModelChanged",
    "ModelRetry",
    "ModelUsage",
    "Outcome",
    "PermissionAsked",
    "PermissionDecided",
    "PlanWritten",
    "PromptBlocked",
    "Refused",
    "Rejected",
    "RequestHeader",
    "SteeringMessage",
    "StepEnd",
    "StepStart",
    "SubagentUsage",
    "ToolCall",
    "ToolProgress",
    "ToolResult",
    "ToolStart",
    "TurnEnd",
    "TurnStart",
    "UserMessage",
    "decode",
    "encode",
]


# --- what happened --------------------------------------------------------------------------


# Frozen trees cannot be garbage that only a collector finds, and a long session has so many that
# looking at them all would hold everything up.
class _Data(Struct, frozen=True, omit_defaults=True, tag_field="type", gc=False):
    pass


class TurnStart(_Data, frozen=True, tag="turn/start"):
    """A turn begins. From here on a `TurnEnd` is owed, whatever happens."""

    turn: int
    source: str


class TurnEnd(_Data, frozen=True, tag="turn/end"):
    """A turn is over, and how."""

    turn: int
    outcome: Outcome


class StepStart(_Data, frozen=True, tag="step/start"):
    """One model call and its tools begin."""

    turn: int
    step: int


class StepEnd(_Data, frozen=True, tag="step/end"):
    """The step is over."""

    turn: int
    step: int


class UserMessage(_Data, frozen=True, tag="user/message"):
    """A prompt that the model will see. People see `shown` instead, if it is given."""

    id: str
    content: tuple[Block, ...]
    source: str
    shown: tuple[Block, ...] | None = None


class PromptBlocked(_Data, frozen=True, tag="prompt/blocked"):
    """A prompt that no model saw, and the answer given instead."""

    id: str
    content: tuple[Block, ...]
    source: str
    reason: str


class ContextMessage(_Data, frozen=True, tag="context/message"):
    """Something a listener added for the model."""

    content: tuple[Block, ...]
    source: str


class SteeringMessage(_Data, frozen=True, tag="steering/message"):
    """Text that joined the running turn."""

    id: str
    turn: int
    content: tuple[Block, ...]
    source: str


class RequestHeader(_Data, frozen=True, tag="request/header"):
    """What accompanies the messages in model requests from here on. Logged when it changes."""

    model: str
    system: str
    tools: tuple[str, ...]


class AssistantChunk(_Data, frozen=True, tag="assistant/chunk"):
    """A piece of a message as it streamed in."""

    turn: int
    step: int
    text: str
    reasoning: bool = False


class AssistantMessage(_Data, frozen=True, tag="assistant/message"):
    """The message a model call produced. `interrupted`: only what arrived before the cancel."""

    turn: int
    step: int
    content: tuple[Part, ...]
    interrupted: bool = False


class ModelUsage(_Data, frozen=True, tag="model/usage"):
    """What a model call took.

    `context_tokens` is how full the model's context is with this call, of `context_size` where that
    is known. `cost` is that of the session so far, in `currency`; `None` where no price is known.
    """

    turn: int
    step: int
    model: str
    usage: Usage
    context_tokens: int
    context_size: int | None = None
    cost: float | None = None
    currency: str | None = None


class SubagentUsage(_Data, frozen=True, tag="subagent/usage"):
    """What a subagent took that is over now, and all below it. None of it is in the context.

    The other fields are as in `ModelUsage`.
    """

    run_id: str
    usage: Usage
    context_tokens: int
    context_size: int | None = None
    cost: float | None = None
    currency: str | None = None


class ModelRetry(_Data, frozen=True, tag="model/retry"):
    """A model call failed and will be tried again after `delay_s` seconds."""

    turn: int
    step: int
    attempt: int
    delay_s: float
    code: str
    message: str


class ToolCall(_Data, frozen=True, tag="tool/call"):
    """A tool call is announced; nothing has run yet."""

    turn: int
    step: int
    call_id: str
    name: str
    arguments: str
    title: str
    kind: ToolKind = "other"
    locations: tuple[Location, ...] = ()


class ToolStart(_Data, frozen=True, tag="tool/start"):
    """The tool's body was entered: from here on side effects are possible."""

    call_id: str


class ToolProgress(_Data, frozen=True, tag="tool/progress"):
    """What a running tool shows meanwhile. Each replaces the one before."""

    call_id: str
    title: str | None = None
    content: tuple[ToolContent, ...] | None = None


class ToolResult(_Data, frozen=True, tag="tool/result"):
    """The one result of a call. `output` is what the model reads; people see `content`, if any."""

    turn: int
    step: int
    call_id: str
    output: str
    is_error: bool = False
    code: str | None = None
    content: tuple[ToolContent, ...] = ()
    locations: tuple[Location, ...] | None = None
    title: str | None = None


class PermissionAsked(_Data, frozen=True, tag="permission/asked"):
    """A person is asked about a call."""

    call_id: str


class PermissionDecided(_Data, frozen=True, tag="permission/decided"):
    """And what came of it. `remember` names what an "always" covers, for the whole session."""

    call_id: str
    outcome: str
    remember: str | None = None


class FileChanged(_Data, frozen=True, tag="file/changed"):
    """A tool is about to write a file: what it held, for whoever wants it back.

    Nobody but `agent_core.undo` looks at it: neither models nor clients are told, and no fork
    takes it over.

    Attributes:
        call_id: Which call.
        path: The file's, absolute.
        after: The hash of what is written.
        before: The text that was there, `None` if there was no file.
        follows: Whether that text is what the turn's last `FileChanged` of the file had written;
            then `before` is left out.
        lost: Why `before` is not kept, if it is not.
    """

    call_id: str
    path: str
    after: str
    before: str | None = None
    follows: bool = False
    lost: str = ""


class FilesRestored(_Data, frozen=True, tag="files/restored"):
    """A person took back what `turn` did to the files `paths`; no fork takes it over.

    `notice` is what people are told where a cancel left no answer that could have said it.
    """

    turn: int
    paths: tuple[str, ...]
    notice: str = ""


class PlanWritten(_Data, frozen=True, tag="plan/written"):
    """The whole plan; the last one counts."""

    entries: tuple[PlanEntry, ...]


class ModeChanged(_Data, frozen=True, tag="mode/changed"):
    """The session's permission mode from here on."""

    mode: str


class ModelChanged(_Data, frozen=True, tag="model/changed"):
    """The session's model from its next call on."""

    model: str


class EffortChanged(_Data, frozen=True, tag="effort/changed"):
    """How hard the session's model is to think from its next call on."""

    effort: str


class CompactionStart(_Data, frozen=True, tag="compaction/start"):
    """The history is being replaced by a summary. A `CompactionEnd` is owed."""

    id: str


class CompactionEnd(_Data, frozen=True, tag="compaction/end"):
    """The compaction is over.

    ``completed``: `summary` stands for everything before, but what people said in the turn that
    runs. ``failed`` (for the reason `error`) and ``cancelled``: the history is as it was.
    """

    id: str
    status: Literal["completed", "failed", "cancelled"]
    summary: str = ""
    error: str = ""


EventData = (
    TurnStart
    | TurnEnd
    | StepStart
    | StepEnd
    | UserMessage
    | PromptBlocked
    | ContextMessage
    | SteeringMessage
    | RequestHeader
    | AssistantChunk
    | AssistantMessage
    | ModelUsage
    | SubagentUsage
    | ModelRetry
    | ToolCall
    | ToolStart
    | ToolProgress
    | ToolResult
    | PermissionAsked
    | PermissionDecided
    | FileChanged
    | FilesRestored
    | PlanWritten
    | ModeChanged
    | ModelChanged
    | EffortChanged
    | CompactionStart
    | CompactionEnd
)


class Event(Struct, frozen=True, gc=False):
    """One entry of the log: contiguous `seq` from 0, `time_ms` since the epoch, and the facts."""

    seq: int
    time_ms: int
    data: EventData


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(EventData).decode


def encode(data: EventData) -> bytes:
    """Return `data` as UTF-8 JSON without newlines.

    Raises:
        TypeError: Something in it is not JSON, such as an exception or a signal.
    """
    return _encode(data)


def decode(body: bytes) -> EventData:
    """Read what `encode` wrote.

    Raises:
        msgspec.ValidationError: Unknown event, wrong shape, or an outcome that carries more than
            its kind allows.
    """
    return _decode(body)
