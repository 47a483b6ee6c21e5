"""The built-in model: deterministic, offline, and honest about not being one.

It reads the last prompt. Where that starts with one of the verbs of `rehearsal_verbs`, it makes the
tool calls and says the text that a model would, through the same seam; otherwise it says how to
configure a model. With a script it plays the script's lines instead, one for each model call.

It keeps no state about a conversation: how far a prompt has got follows from the messages behind
it. Only a script's progress is counted, for each session.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import msgspec

from agent_core.content import Text, TextPart, Usage
from agent_core.errors import ModelError
from agent_core.models.adapter import (
    Finish,
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
from agent_core.models.rehearsal_script import Step, read_script
from agent_core.models.rehearsal_verbs import steps_for, summary_of
from agent_core.summary import SUMMARISER

__all__ = ["RehearsalModel"]

_EVENTS_PER_CHECKPOINT: Final = 8  # a cancel takes a few turns of the event loop to arrive
_CHARS_PER_TOKEN: Final = 4  # the usual rule of thumb for English


class RehearsalModel:
    """A `ModelAdapter` that needs no network and no key.

    Args:
        info: The name it goes by, and what else there is to say about a model.
        script: A file of JSON lines to play, see `agent_core.models.rehearsal_script`; `None` to
            act on prompts.

    Raises:
        ValueError: The script cannot be read; says which line is wrong.
    """

    def __init__(self, info: ModelInfo | None = None, script: Path | None = None) -> None:
        self._info = info or ModelInfo("rehearsal")
        self._script = None if script is None else read_script(Path(script))
        self._calls: dict[str, int] = {}  # script lines played, by session id

    @property
    def info(self) -> ModelInfo:
        """The name it goes by, and how much it may be told."""
        return self._info

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Play the script's next line, or the next part of what the prompt asks for.

        Cancellation: through ``request.signal``. Concurrency: any number of streams.
        """
        signal = request.signal
        signal.raise_if_aborted()
        steps = self._steps(request)
        finish: FinishReason | None = None
        usage: Usage | None = None
        said_chars = calls = 0
        for index, step in enumerate(steps, 1):
            if step.text is not None:
                said_chars += len(step.text)
                yield TextDelta(step.text)
            elif step.reasoning is not None:
                said_chars += len(step.reasoning)
                yield ReasoningDelta(step.reasoning)
            elif step.tool is not None:
                arguments = _argument_text(step)
                said_chars += len(arguments)
                for delta in _tool_call(calls, step.tool, arguments):
                    yield delta
                    signal.raise_if_aborted()
                calls += 1
            elif step.error is not None:
                error = step.error
                raise ModelError(error.message, code=error.code, retry_after_s=error.retry_after_s)
            else:
                finish = step.finish or finish
                usage = step.usage or usage
                await _wait(step, request)
            if index % _EVENTS_PER_CHECKPOINT == 0:
                await anyio.lowlevel.checkpoint()
            signal.raise_if_aborted()
        yield UsageReport(usage or _rough_usage(request, said_chars))
        signal.raise_if_aborted()
        yield Finish(finish or ("tool_calls" if calls else "stop"))

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""

    def _steps(self, request: ModelRequest) -> Iterable[Step]:
        if self._script is not None:
            return self._next_line(request.session_id)
        if request.system == SUMMARISER:
            return summary_of(request.messages)
        return steps_for(request.messages)

    def _next_line(self, session_id: str) -> Iterable[Step]:
        script = self._script or ()
        done = self._calls.get(session_id, 0)
        if done >= len(script):
            raise ModelError(
                f"the rehearsal script has ended: it has {len(script)} lines, and this session"
                " asked for one more",
                code="PROTOCOL",
            )
        self._calls[session_id] = done + 1
        return script[done]


# --- playing steps --------------------------------------------------------------------------


async def _wait(step: Step, request: ModelRequest) -> None:
    if step.sleep_s is not None:
        async with request.signal.scope():
            await anyio.sleep(step.sleep_s)
    elif step.stall:
        async with request.signal.scope():
            await anyio.sleep_forever()
    elif step.ignore_cancel_s is not None:
        await anyio.sleep(step.ignore_cancel_s)


def _argument_text(step: Step) -> str:
    if isinstance(step.arguments, str):
        return step.arguments
    return msgspec.json.encode(step.arguments or {}).decode()


def _tool_call(index: int, name: str, arguments: str) -> Iterator[ToolCallDelta]:
    """Stream a call in two or three pieces, as providers do."""
    size = max(1, -(-len(arguments) // 3))
    yield ToolCallDelta(index, name=name, arguments=arguments[:size])
    for start in range(size, len(arguments), size):
        yield ToolCallDelta(index, arguments=arguments[start : start + size])


def _rough_usage(request: ModelRequest, said_chars: int) -> Usage:
    read_chars = len(request.system) + sum(_chars(message) for message in request.messages)
    return Usage(
        input_tokens=read_chars // _CHARS_PER_TOKEN + 1,
        output_tokens=said_chars // _CHARS_PER_TOKEN + 1,
    )


def _chars(message: Message) -> int:
    if isinstance(message, ToolTurn):
        return len(message.output)
    return sum(len(part.text) for part in message.content if isinstance(part, Text | TextPart))
