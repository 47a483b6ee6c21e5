"""Permission modes, and what a mode says about a call. Pure functions over closed values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from agent_core.tools.tool import Effect

__all__ = ["MODES", "Approval", "Decision", "ModeInfo", "Verdict", "decide"]


class ModeInfo(Struct, frozen=True):
    """A permission mode as people choose it."""

    id: str
    name: str
    description: str


MODES: Final[dict[str, ModeInfo]] = {
    mode.id: mode
    for mode in (
        ModeInfo("ask", "Ask", "Reads run; edits and commands ask first."),
        ModeInfo("accept-edits", "Accept edits", "Reads and edits run; commands ask first."),
        ModeInfo("read-only", "Read only", "Reads run; edits and commands are refused."),
        ModeInfo("bypass", "Bypass permissions", "Everything runs unasked."),
    )
}


class Verdict(enum.StrEnum):
    """What policy says about a call."""

    ALLOW = "allow"
    DENY = "deny"
    ASK = "ask"


class Decision(Struct, frozen=True):
    """A verdict, and for a denial the reason the model is told."""

    verdict: Verdict
    reason: str = ""


class Approval(enum.StrEnum):
    """What came of asking a person. Everything but the first two means: do not run it."""

    ALLOWED = "allowed"
    ALLOWED_ALWAYS = "allowed_always"
    REJECTED = "rejected"
    REJECTED_ALWAYS = "rejected_always"
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"

    @property
    def is_allowed(self) -> bool:
        """Whether the call may run."""
        return self in (Approval.ALLOWED, Approval.ALLOWED_ALWAYS)

    @property
    def is_remembered(self) -> bool:
        """Whether the answer stands for the rest of the session."""
        return self in (Approval.ALLOWED_ALWAYS, Approval.REJECTED_ALWAYS)


def decide(mode: str, effect: Effect, remembered: Mapping[str, bool], key: str) -> Decision:
    """Return what `mode` says about a call with `effect`, given earlier "always" answers.

    Read-only wins over anything remembered: nobody who chose it expects an old answer to write.
    """
    if effect in ("none", "read") or mode == "bypass":
        return Decision(Verdict.ALLOW)
    if mode == "read-only":
        return Decision(Verdict.DENY, "the session is in read-only mode")
    if key in remembered:
        if remembered[key]:
            return Decision(Verdict.ALLOW)
        return Decision(Verdict.DENY, "the user said never to do this in this session")
    if mode == "accept-edits" and effect == "edit":
        return Decision(Verdict.ALLOW)
    return Decision(Verdict.ASK)
