"""How a turn ended: a closed vocabulary, coarse on purpose.

A cancelled turn ends in ``{"kind": "aborted"}`` and in nothing more; a stored outcome that carries
anything else is refused when it is read.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "Aborted",
    "Completed",
    "Disposed",
    "Failed",
    "Interrupted",
    "MaxSteps",
    "MaxTokens",
    "Outcome",
    "Refused",
    "Rejected",
    "kind_of",
]


class _Outcome(Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    pass


class Completed(_Outcome, frozen=True, tag="completed"):
    """The model finished."""


class MaxTokens(_Outcome, frozen=True, tag="max_tokens"):
    """The model hit its output limit in this turn and nothing worse happened."""


class MaxSteps(_Outcome, frozen=True, tag="max_steps"):
    """The turn had as many model calls as one may have."""


class Refused(_Outcome, frozen=True, tag="refused"):
    """The model, or its provider's filter, refused to answer."""


class Aborted(_Outcome, frozen=True, tag="aborted"):
    """Somebody cancelled the turn. Who is not a fact of the log."""


class Disposed(_Outcome, frozen=True, tag="disposed"):
    """The agent was disposed while the turn ran."""


class Rejected(_Outcome, frozen=True, tag="rejected"):
    """A policy refused the prompt before any model saw it."""

    reason: str


class Failed(_Outcome, frozen=True, tag="error"):
    """The turn could not go on. `message` is fit for people; `code` is for programs."""

    step: int
    code: str
    message: str


class Interrupted(_Outcome, frozen=True, tag="interrupted"):
    """The process died in the turn. Written by repair when the log is loaded, never live."""


Outcome = (
    Completed
    | MaxTokens
    | MaxSteps
    | Refused
    | Aborted
    | Disposed
    | Rejected
    | Failed
    | Interrupted
)


def kind_of(outcome: Outcome) -> str:
    """Return what the log calls an outcome: ``completed``, ``aborted``, ``error`` and so on."""
    return str(outcome.__struct_config__.tag)
