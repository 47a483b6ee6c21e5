"""Who may do what: the mode, what was decided for good, and otherwise the person."""

from __future__ import annotations

from typing import Final

from conformance.selftest.agent.loop import Cancelled
from conformance.selftest.agent.rpc import Connection, Message, RpcError

__all__ = ["MODES", "Permissions", "TurnEnded"]

MODES: Final = {
    "ask": ("Ask", "Reads run; edits and commands ask first."),
    "auto": ("Auto", "All runs."),
    "read": ("Read", "Reads run; edits and commands are refused."),
}
OPTIONS: Final = (
    ("allow", "Allow", "allow_once"),
    ("always", "Always allow", "allow_always"),
    ("reject", "Reject", "reject_once"),
    ("never", "Never allow", "reject_always"),
)
KINDS: Final = {option_id: kind for option_id, _, kind in OPTIONS}


class TurnEnded(Exception):
    """The turn ends here, for the stop reason it holds."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason: Final = reason


class Permissions:
    """The permissions of one session.

    Attributes:
        mode: One of `MODES`.
    """

    def __init__(self, connection: Connection, session_id: str) -> None:
        self.mode = "ask"
        self._connection = connection
        self._session_id = session_id
        self._decided: dict[str, bool] = {}

    async def is_allowed(self, subject: str, call: Message) -> bool:
        """Say whether a call may be made; ask the person if nothing else says so.

        Cancellation: safe; the question is withdrawn, and a late answer is dropped.

        Args:
            subject: What "always" is about.
            call: The tool call as the client knows it.

        Raises:
            TurnEnded: The client said that the turn was cancelled.
        """
        if self.mode != "ask":
            return self.mode == "auto"
        if subject in self._decided:
            return self._decided[subject]
        options = [{"optionId": key, "name": name, "kind": kind} for key, name, kind in OPTIONS]
        params = {"sessionId": self._session_id, "toolCall": call, "options": options}
        reply = self._connection.request("session/request_permission", params)
        try:
            answer = await reply
        except Cancelled:
            self._connection.abandon(reply)
            raise
        except RpcError:
            return False
        kind = _chosen(answer)
        if kind == "cancelled":
            raise TurnEnded("cancelled")
        if kind in ("allow_always", "reject_always"):
            self._decided[subject] = kind == "allow_always"
        return kind in ("allow_once", "allow_always")


def _chosen(answer: object) -> str | None:
    """Return the kind of the option that was chosen; `None` if the answer makes no sense."""
    outcome = answer.get("outcome") if isinstance(answer, dict) else None
    if not isinstance(outcome, dict):
        return None
    if outcome.get("outcome") == "cancelled":
        return "cancelled"
    option_id = outcome.get("optionId")
    if outcome.get("outcome") != "selected" or not isinstance(option_id, str):
        return None
    return KINDS.get(option_id)
