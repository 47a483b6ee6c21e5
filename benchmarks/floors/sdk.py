"""The same agent on the official Python SDK, ``agent-client-protocol``: what it gives and costs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from acp import (
    PROTOCOL_VERSION,
    InitializeResponse,
    NewSessionResponse,
    PromptResponse,
    run_agent,
    update_agent_message_text,
)


class OnTheSdk:
    """The part of `acp.Agent` that is called; the SDK looks methods up by their names."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Task[None]] = {}

    def on_connect(self, conn: Any) -> None:
        """Keep the connection."""
        self._client = conn

    async def initialize(self, protocol_version: int, **_more: Any) -> InitializeResponse:
        """Offer nothing."""
        return InitializeResponse(protocol_version=PROTOCOL_VERSION)

    async def new_session(self, cwd: str, **_more: Any) -> NewSessionResponse:
        """Make up an id."""
        return NewSessionResponse(session_id=f"session-{len(self._turns)}")

    async def prompt(self, session_id: str, prompt: list[Any], **_more: Any) -> PromptResponse:
        """Run a turn, and say how it ended."""
        _verb, count = prompt[0].text.split()
        turn = self._turns[session_id] = asyncio.create_task(self._count(session_id, int(count)))
        try:
            await turn
        except asyncio.CancelledError:
            return PromptResponse(stop_reason="cancelled")
        return PromptResponse(stop_reason="end_turn")

    async def cancel(self, session_id: str, **_more: Any) -> None:
        """Cancel the turn."""
        self._turns[session_id].cancel()

    async def _count(self, session_id: str, count: int) -> None:
        for number in range(1, count + 1):
            update = update_agent_message_text(f"{number} ")
            await self._client.session_update(session_id=session_id, update=update)


if __name__ == "__main__":
    asyncio.run(run_agent(cast("Any", OnTheSdk())))
