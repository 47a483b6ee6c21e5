"""A scripted ACP client on a `Wire`: the few steps that every scenario needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from conformance.wire import DEFAULT_TIMEOUT_S, Message, Wire, WireError

__all__ = ["Client", "Permission", "PermissionPolicy"]

PROTOCOL_VERSION: Final = 1
CANCELLED: Final[Message] = {"outcome": {"outcome": "cancelled"}}
POLICY_KINDS: Final = {"allow": "allow_once", "reject": "reject_once"}

Permission = Literal["allow", "reject", "cancelled", "hold", "never"]
PermissionPolicy = Permission | Callable[[Message], Message | None]
"""What to answer to permission requests: the first option of that kind; that the turn was
cancelled; that, but only when `Client.cancel` is called; nothing ever; or what a function from the
params to the result (`None`: nothing ever) says."""


class Client:
    """A client that does what it is told. Answers permission requests by `permission`.

    Args:
        wire: The agent to talk to. Its ``answer`` table stays open to further methods.
        permission: The first policy; it may be changed at any time.
    """

    def __init__(self, wire: Wire, *, permission: PermissionPolicy = "reject") -> None:
        self.wire: Final = wire
        self.permission: PermissionPolicy = permission
        wire.answer["session/request_permission"] = self._answer_permission

    async def initialize(
        self, capabilities: Message | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Message:
        """Send ``initialize`` and return its result.

        Cancellation: safe.

        Args:
            capabilities: The ``clientCapabilities``; none by default.
            timeout_s: Seconds to wait for the response.

        Raises:
            WireError: No response, or an error.
        """
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "clientCapabilities": capabilities or {},
            "clientInfo": {"name": "conformance", "version": "1"},
        }
        return await self.result(self.wire.request("initialize", params), timeout_s)

    async def new_session(self, cwd: object, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Open a session and return its id.

        Cancellation: safe. Concurrency: any number of tasks.

        Args:
            cwd: An absolute path, as a string or a `Path`.
            timeout_s: Seconds to wait for the response.

        Raises:
            WireError: No response, or an error.
        """
        request_id = self.wire.request("session/new", {"cwd": str(cwd), "mcpServers": []})
        result = await self.result(request_id, timeout_s)
        session_id: str = result["sessionId"]
        return session_id

    def prompt(self, session_id: str, text: str) -> int:
        """Send a prompt and return the request's id, without waiting."""
        prompt = [{"type": "text", "text": text}]
        return self.wire.request("session/prompt", {"sessionId": session_id, "prompt": prompt})

    def cancel(self, session_id: str, params: Message | None = None) -> None:
        """Send ``session/cancel``, and answer the permission requests that are held for it.

        Args:
            session_id: The session.
            params: The notification's params; just the session by default.
        """
        self.wire.notify("session/cancel", params or {"sessionId": session_id})
        if self.permission != "hold":
            return
        for request_id, request in list(self.wire.unanswered.items()):
            params = request.get("params", {})
            if (request["method"], params.get("sessionId")) == (
                "session/request_permission",
                session_id,
            ):
                self.wire.reply(request_id, CANCELLED)

    async def stop_reason(self, request_id: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Wait for the response to a prompt and return why the turn stopped.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            WireError: No response, or an error.
        """
        reason: str = (await self.result(request_id, timeout_s))["stopReason"]
        return reason

    async def result(self, request_id: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> Message:
        """Wait for a response and return its result.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            WireError: No response, or an error.
        """
        response = await self.wire.response(request_id, timeout_s)
        if "error" in response:
            raise WireError(f"an error: {response['error']}\n{self.wire.transcript()}")
        result: Any = response.get("result")
        return result if isinstance(result, dict) else {}

    def text(self, session_id: str) -> str:
        """Return what the agent said in the session so far."""
        return "".join(
            update["content"].get("text", "")
            for update in self.wire.updates(session_id)
            if update["sessionUpdate"] == "agent_message_chunk"
        )

    def _answer_permission(self, params: Message) -> Message | None:
        policy = self.permission
        if callable(policy):
            return policy(params)
        if policy == "cancelled":
            return CANCELLED
        if policy in ("hold", "never"):
            return None
        for option in params["options"]:
            if option["kind"] == POLICY_KINDS[policy]:
                return {"outcome": {"outcome": "selected", "optionId": option["optionId"]}}
        return CANCELLED
