"""Subagents in a conversation: what each of them does, as lines below the call that it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct, field

from acp_server.chat.calls import DONE, FAILED, RUNNING, ToolCall
from acp_server.chat.text import clean_line, to_list, to_mapping, to_string, to_text

__all__ = ["Tree"]

_CALLS: Final = ("tool_call", "tool_call_update")
_DELEGATE: Final = "delegate"


class _Subagent(Struct):
    path: str
    depth: int
    is_a_call: bool = False  # whose line says how it ended
    calls: dict[str, ToolCall] = field(default_factory=dict)


class Tree:
    """The subagents at work, by their sessions.

    Args:
        show: Prints the line of a call; told a key of it, and the call.
    """

    def __init__(self, show: Callable[[str, ToolCall], None]) -> None:
        self._show = show
        self._subagents: dict[str, _Subagent] = {}
        self._said: dict[str, list[str]] = {}

    @property
    def at_work(self) -> list[str]:
        """The names of those right below the conversation's own agent."""
        return [each.path for each in self._subagents.values() if each.depth == 1]

    def take(self, session_id: str, update: Mapping[str, Any]) -> bool:
        """Show an update if it is about a subagent; say whether it is about nothing else."""
        kind = to_string(update.get("sessionUpdate"))
        if kind == "subagent_update":
            self._note(session_id, update)
            return True
        if kind in _CALLS:
            self._note_links(update)
        subagent = self._subagents.get(session_id)
        if subagent is None:
            return False
        if kind in _CALLS:
            self._show_call(session_id, subagent, update)
        return True

    def show_progress(self, call_id: str, call: ToolCall) -> None:
        """Print what a call has added, where it is a subagent without a session of its own."""
        if call.name != _DELEGATE:
            return
        if call.status != RUNNING:
            self._said.pop(call_id, None)
            return
        items = [to_mapping(item) for item in call.content]
        if any(item.get("type") == "session" for item in items):
            return
        lines = [
            line
            for item in items
            for line in to_text(item.get("content")).split("\n")
            if line.strip() and not line.startswith("```")
        ]
        for line in _added(self._said.get(call_id, []), lines):
            self._show(f"{call_id}\n{line}", ToolCall("  ", title=clean_line(line)))
        self._said[call_id] = lines

    def _note(self, session_id: str, update: Mapping[str, Any]) -> None:
        child_id = to_string(update.get("sessionId"))
        if child_id not in self._subagents:
            above = self._subagents.get(session_id)
            name = clean_line(update.get("title")) or "subagent"
            path = name if above is None else f"{above.path} › {name}"
            self._subagents[child_id] = _Subagent(path, 1 if above is None else above.depth + 1)
        state = to_mapping(update.get("state"))
        if state.get("state") == "idle":
            subagent = self._subagents.pop(child_id)
            if not subagent.is_a_call:
                status = DONE if state.get("stopReason") == "end_turn" else FAILED
                self._show(child_id, ToolCall(title=subagent.path, status=status))

    def _note_links(self, update: Mapping[str, Any]) -> None:
        for item in map(to_mapping, to_list(update.get("content"))):
            subagent = self._subagents.get(to_string(item.get("sessionId")))
            if subagent is not None:
                subagent.is_a_call = True

    def _show_call(self, session_id: str, subagent: _Subagent, update: Mapping[str, Any]) -> None:
        call_id = to_string(update.get("toolCallId"))
        call = subagent.calls.setdefault(call_id, ToolCall("  " * subagent.depth))
        if call.merge(update):
            shown = ToolCall(
                call.indent, title=f"{subagent.path} › {call.title}", status=call.status
            )
            self._show(f"{session_id} {call_id}", shown)


def _added(before: list[str], after: list[str]) -> list[str]:
    """Return the lines behind those of `before`, the first of which may be gone."""
    for gone in range(len(before) + 1):
        if after[: len(before) - gone] == before[gone:]:
            return after[len(before) - gone :]
    return after
