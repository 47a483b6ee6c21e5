"""Tool calls: announced once, moving forward only, over before the turn is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from conformance.conversation import Conversation, Update
from conformance.judges import Finding, judge

FINAL: Final = ("completed", "failed")
ACTS: Final = ("edit", "delete", "move", "execute")
"""Kinds of calls that do one thing, which is what is asked about."""
UNCHANGING: Final = frozenset({"sessionUpdate", "toolCallId", "status", "_meta"})
STEPS: Final = ("pending", "in_progress", *FINAL)


class _ToolCall(Struct):
    at: int
    status: str
    title: object


@judge("TUL-01", "TUL-02", "TUL-03", "TUL-04", "TUL-05", "TUL-07")
def tool_calls_live_once(conversation: Conversation) -> Iterator[Finding]:
    """A call is announced, goes forward, and does not change when it is over."""
    known: dict[tuple[str, str], _ToolCall] = {}
    loads = [call.at for call in conversation.asked("session/load")]
    n_loads = 0
    for update in conversation.updates:
        if update.kind not in ("tool_call", "tool_call_update"):
            continue
        while n_loads < len(loads) and loads[n_loads] < update.at:
            known.clear()  # a replay announces them again
            n_loads += 1
        call_id = update.body.get("toolCallId")
        if not isinstance(call_id, str):
            continue  # the schema's judge says so
        key = update.session_id, call_id
        if update.kind == "tool_call":
            is_twice = key in known
            yield Finding("TUL-01", update.at, f"{key[1]!r} is announced twice" if is_twice else "")
            known[key] = _ToolCall(update.at, "pending", update.body.get("title"))
            title = update.body.get("title")
            has_title = isinstance(title, str) and bool(title.strip())
            yield Finding("TUL-05", update.at, "" if has_title else f"the title is {title!r}")
        elif key not in known:
            yield Finding("TUL-02", update.at, f"nobody announced {key[1]!r}")
            known[key] = _ToolCall(update.at, "pending", None)
        else:
            yield Finding("TUL-02", update.at)
        yield from _judge_change(known[key], update)
        yield from _judge_step(known[key], update)


def _judge_change(call: _ToolCall, update: Update) -> Iterator[Finding]:
    """Find what an update changes of a call that is over."""
    if call.status in FINAL and update.kind == "tool_call_update":
        changed = ", ".join(key for key in update.body if key not in UNCHANGING)
        yield Finding("TUL-07", update.at, f"{changed} after {call.status}" if changed else "")
    elif update.body.get("status") in FINAL:
        yield Finding("TUL-07", update.at)


def _judge_step(call: _ToolCall, update: Update) -> Iterator[Finding]:
    status = update.body.get("status")
    if status not in STEPS:
        return
    before, call.status = call.status, str(status)
    if before in FINAL and status != before:
        yield Finding("TUL-03", update.at, f"{status} after {before}")
        return
    yield Finding("TUL-03", update.at)
    is_backwards = STEPS.index(str(status)) < STEPS.index(before)
    yield Finding("TUL-04", update.at, f"{status} after {before}" if is_backwards else "")


@judge("TUL-08")
def tool_calls_wait_for_the_permission(conversation: Conversation) -> Iterator[Finding]:
    """A call does not run while the person is asked whether it may."""
    status: dict[tuple[str | None, str], object] = {}
    acts: set[tuple[str | None, str]] = set()  # others may ask about a part of what they do
    updates = iter([*conversation.updates])
    update = next(updates, None)
    for question in conversation.asked("session/request_permission", of_agent=False):
        while update is not None and update.at < question.at:
            key: tuple[str | None, str] = update.session_id, str(update.body.get("toolCallId"))
            if update.kind in ("tool_call", "tool_call_update"):
                status[key] = update.body.get("status", status.get(key))
                if update.body.get("kind") in ACTS:
                    acts.add(key)
            update = next(updates, None)
        asked = question.params.get("toolCall")
        call_id = asked.get("toolCallId") if isinstance(asked, dict) else None
        key = question.session_id, str(call_id)
        is_running = key in acts and status.get(key) == "in_progress"
        wrong = f"{call_id!r} is in_progress while it is asked about" if is_running else ""
        yield Finding("TUL-08", question.at, wrong)


@judge("TUL-06")
def tool_calls_end_before_the_turn(conversation: Conversation) -> Iterator[Finding]:
    """When the turn is answered, none of its calls is open."""
    for turn in conversation.asked("session/prompt"):
        if turn.end is None or turn.result is None:
            continue
        open_calls: dict[str, int] = {}
        n_calls = 0
        for update in conversation.updates_of(turn):
            call_id, status = update.body.get("toolCallId"), update.body.get("status")
            if not isinstance(call_id, str):
                continue
            if update.kind == "tool_call":
                open_calls[call_id] = update.at
                n_calls += 1
            if update.kind in ("tool_call", "tool_call_update") and status in FINAL:
                open_calls.pop(call_id, None)
        if n_calls:
            left = ", ".join(repr(each) for each in open_calls)
            yield Finding("TUL-06", turn.end, f"the turn is over, {left} is not" if left else "")
