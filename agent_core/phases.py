"""The phases of a turn's life as data; the tables and pictures in docs/ are made from it.

`agent_core.loop` does what is said here, in this order, and names each phase beside the line.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from agent_core.hooks import HOOKS

__all__ = ["PHASES", "Phase", "phase_picture", "phase_table"]


class Phase(Struct, frozen=True):
    """One phase: its name, what happens, its hooks, and where the loop looks at the signal.

    `label` is what the picture calls it; empty leaves it out. `check` is when the signal is looked
    at; empty means not at all.
    """

    name: str
    what: str
    hooks: tuple[str, ...] = ()
    check: str = ""
    label: str = ""


_P = Phase

PHASES: Final = (
    _P("L0", "park until a prompt waits or the agent is disposed", label="parked"),
    _P("L1", "take the pre-run marker; nothing queued: idle"),
    _P("L2", "**install the holder**: one controller, one signal", label="holder installed"),
    _P("L3", "status running", ("agent/status",)),
    _P("L4", "a listener cancelled: drop the holder, a replacement gets a fresh one", check="✓"),
    _P("T0", "claim one prompt"),
    _P("L5", "number the turn after the last one in the log"),
    _P("T1", "log `turn/start`; from here a `turn/end` is owed", check="✓", label="turn/start"),
    _P(
        "T2",
        "may this prompt run, and as what?",
        ("agent/prompt-submit",),
        "✓",
        "prompt submission",
    ),
    _P("T3", "refused: log `prompt/blocked`, end as `rejected`"),
    _P("S1", "next step; steering and injected context join", check="✓", label="step"),
    _P(
        "S2",
        "the system prompt and the tools",
        ("system-prompt/assemble",),
        "✓",
        "prompt assembly",
    ),
    _P(
        "S3",
        "once: messages before the history; kept only if not interrupted",
        ("agent/session-prefix",),
        "✓",
        "session prefix",
    ),
    _P("S4", "the last chance to change the history", ("agent/pre-step",), "✓", "pre-step"),
    _P("S5", "take the history for this request"),
    _P("S6", "log `step/start`", check="✓"),
    _P("S7", "the model and its sampling", ("agent/request",), "✓", "request"),
    _P("S8", "log `request/header` if it changed", check="✓"),
    _P("S9", "stream; log each `assistant/chunk`", ("llm/stream",), "✓ each", "model stream"),
    _P("S10", "no finish, or one that says aborted: an error"),
    _P("S11", "look at the whole message", ("agent/step-result",), "✓", "step result"),
    _P("S12", "log `assistant/message`"),
    _P(
        "S13",
        "each tool call, in the model's order",
        (
            "tools/pre-execute",
            "approval/request",
            "tools/execute",
            "tools/post-execute",
            "tools/result",
        ),
        "✓ each",
        "tool execution",
    ),
    _P("S14", "log what listeners add behind the results"),
    _P("S15", "whatever was raised: the step is closed", ("agent/error",)),
    _P("S16", "steering that came meanwhile; log `step/end`", check="✓"),
    _P("S17", "shall another step follow?", ("agent/turn-continuation",), "✓", "continuation"),
    _P("S18", "the last word on stopping", ("agent/turn-stop",), "✓", "terminal stop"),
    _P("T8", "log `turn/end`; the outcome is now a fact", label="turn/end"),
    _P("T9", "wait until the log survives a power cut (the store's flush)", label="flush"),
    _P("L7", "**clear the holder**, by identity", label="holder cleared"),
    _P("L8", "late steering becomes prompts, unless S18 stopped the turn"),
    _P("L9", "nothing queued: idle; waiters first, then the announcement", ("agent/status",)),
)


def phase_table() -> str:
    """Return the phases as the Markdown table of docs/architecture.md."""
    rows = ["| phase | what happens | hooks | ✓ |", "|---|---|---|---|"]
    for phase in PHASES:
        hooks = ", ".join(f"`{name}` ({HOOKS[name].kind})" for name in phase.hooks)
        rows.append(f"| {phase.name} | {phase.what} | {hooks} | {phase.check} |")
    return "\n".join(rows) + "\n"


def phase_picture() -> str:
    """Return the turn's life as the picture of docs/cancellation.md.

    The bar is where the signal is alive: a cancel there reaches whatever is running.
    """
    lines: list[str] = []
    is_alive = False
    for phase in PHASES:
        is_alive = is_alive or phase.name == "L2"
        if phase.label:
            bar = "┃" if is_alive else " "
            lines.append(f"{phase.name:>4}  {bar}  {phase.label}{'  ✓' if phase.check else ''}")
        is_alive = is_alive and phase.name != "L7"
    return "\n".join(line.rstrip() for line in lines) + "\n"
