"""Every message by itself: JSON-RPC, and the published schema."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from conformance.conversation import Conversation
from conformance.judges import Finding, judge
from conformance.schema import Schema


@cache
def _schema() -> Schema:
    return Schema(is_unstable=True)


@judge("MSG-01")
def results_agree_with_the_schema(conversation: Conversation) -> Iterator[Finding]:
    """Hold results against the schema."""
    schema = _schema()
    known = set(schema.methods("agent"))
    for call in conversation.calls:
        if call.is_agents or call.method not in known or call.end is None:
            continue
        result = (call.response or {}).get("result")
        if result is None:
            continue
        problems = schema.result_problems("agent", call.method, result)
        yield Finding("MSG-01", call.end, problems[0] if problems else "")
