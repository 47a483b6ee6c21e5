"""What the rehearsal model plays: steps, and the files that spell them out call by call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agent_core.content import Usage
from agent_core.models.adapter import FinishReason

__all__ = ["ErrorStep", "Step", "read_script"]


class ErrorStep(Struct, frozen=True, forbid_unknown_fields=True):
    """The model call fails; see `agent_core.errors.ModelError`."""

    code: str
    message: str
    retry_after_s: float | None = None


class Step(Struct, frozen=True, forbid_unknown_fields=True):
    """One thing a model does. Exactly one field is set, apart from `arguments`.

    Attributes:
        text: Say it, in one delta.
        reasoning: Think it, in one delta.
        tool: Call the tool of this name with `arguments`: an object, or text sent as it is.
        sleep_s: Wait so many seconds, or until the turn is aborted.
        stall: Never send another byte.
        ignore_cancel_s: Wait so many seconds without a look at the signal.
        usage: Report these tokens instead of a rough count.
        error: Fail.
        finish: Finish for this reason instead of the obvious one.
    """

    text: str | None = None
    reasoning: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] | str | None = None
    sleep_s: float | None = None
    stall: bool | None = None
    ignore_cancel_s: float | None = None
    usage: Usage | None = None
    error: ErrorStep | None = None
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        kinds = [
            name
            for name in self.__struct_fields__
            if name != "arguments" and getattr(self, name) is not None
        ]
        if len(kinds) != 1:
            raise ValueError(f"a step does one thing, this one does {len(kinds)}")
        if self.arguments is not None and self.tool is None:
            raise ValueError("only a tool takes arguments")
        for wait_s in (self.sleep_s, self.ignore_cancel_s):
            if wait_s is not None and wait_s < 0:
                raise ValueError("a step cannot wait for less than no time")


def read_script(path: Path) -> tuple[tuple[Step, ...], ...]:
    """Read a script: one line of JSON, a list of steps, for each model call of a session.

    Blank lines do not count.

    Raises:
        ValueError: The file cannot be read, or a line is wrong; says which.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise ValueError(f"the rehearsal script cannot be read: {exc.strerror}") from None
    decoder = msgspec.json.Decoder(tuple[Step, ...])
    calls: list[tuple[Step, ...]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            calls.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ValueError(f"line {number} of the rehearsal script is wrong: {exc}") from None
    return tuple(calls)
