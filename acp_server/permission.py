"""Asking a client's person whether a tool call may run."""

from __future__ import annotations

from typing import Final

import msgspec

from acp_server import types as wire
from acp_server.errors import REQUEST_CANCELLED, PeerClosed, RemoteError
from acp_server.peer import Peer
from agent_core.permissions import Approval
from agent_core.tools.pipeline import ToolExecution

__all__ = ["ask_permission"]


async def ask_permission(
    peer: Peer, session_id: str, call: wire.AskedToolCall, execution: ToolExecution
) -> Approval:
    """Send ``session/request_permission``. Whatever is not clearly a yes is not one.

    Cancellation: through ``execution.signal``; a late answer counts for nothing.
    Concurrency: any number of questions.
    """
    _key, covers = execution.tool.remember_key(execution.args)
    params = {
        "sessionId": session_id,
        "toolCall": call,
        "options": [
            {"optionId": option, "name": name.format(covers), "kind": kind}
            for option, name, kind, _approval in _OPTIONS
        ],
    }
    try:
        raw = await peer.call("session/request_permission", params, signal=execution.signal)
        outcome = msgspec.json.decode(raw, type=wire.PermissionAnswer).outcome
    except RemoteError as exc:
        is_cancelled = exc.code == REQUEST_CANCELLED
        return Approval.CANCELLED if is_cancelled else Approval.UNAVAILABLE
    except (PeerClosed, msgspec.MsgspecError):
        return Approval.UNAVAILABLE
    if outcome.outcome == "cancelled":
        return Approval.CANCELLED
    approvals = {option: approval for option, _name, _kind, approval in _OPTIONS}
    return approvals.get(outcome.option_id or "", Approval.UNAVAILABLE)


_OPTIONS: Final = (
    ("allow-once", "Allow", "allow_once", Approval.ALLOWED),
    ("allow-always", "Always allow {} in this session", "allow_always", Approval.ALLOWED_ALWAYS),
    ("reject-once", "Reject", "reject_once", Approval.REJECTED),
    ("reject-always", "Never allow {} in this session", "reject_always", Approval.REJECTED_ALWAYS),
)
