"""What the agent and a worker process say to each other: one JSON object a line."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from agent_core.tools.tool import ToolOutput

__all__ = ["Abort", "Call", "Crash", "Failure", "Progress", "Result", "decode", "decode_order"]


class Call(Struct, frozen=True, tag="call"):
    """Go to `cwd`, make the tool ``module:Class`` and call its `work` with `args`."""

    cwd: str
    target: str
    args: Any


class Abort(Struct, frozen=True, tag="abort"):
    """Please stop."""


class Progress(Struct, frozen=True, tag="progress"):
    """What there is so far."""

    text: str


class Result(Struct, frozen=True, tag="result"):
    """The call has ended with this."""

    output: ToolOutput


class Failure(Struct, frozen=True, tag="failure"):
    """The call has ended with a `ToolError`."""

    message: str
    code: str


class Crash(Struct, frozen=True, tag="crash"):
    """The call has ended with another exception. `traceback` is for the log alone."""

    type_name: str
    traceback: str


decode: Final = msgspec.json.Decoder(Progress | Result | Failure | Crash).decode
decode_order: Final = msgspec.json.Decoder(Call | Abort).decode
