"""The conversation with a model, made from the events of a session."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.selftest.agent.rpc import Message

__all__ = ["history_of"]


def history_of(events: list[Message]) -> list[Message]:
    """Return the messages so far, without what was refused; each tool call has a result."""
    messages: list[Message] = []
    for event in events:
        if "message" in event:
            messages.append(event["message"])
        elif "forget" in event:
            while messages and messages.pop()["role"] != "user":
                pass
    return list(_with_results(messages))


def _with_results(messages: list[Message]) -> Iterator[Message]:
    """Yield the messages, with a result for each call that has none."""
    missing: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            missing.remove(message["tool_call_id"])
        else:
            yield from map(_interrupted, missing)
            missing = [call["id"] for call in message.get("tool_calls", ())]
        yield message
    yield from map(_interrupted, missing)


def _interrupted(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": "The call was interrupted."}
