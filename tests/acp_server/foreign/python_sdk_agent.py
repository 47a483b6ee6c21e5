"""An agent on the official Python SDK: the first word of a prompt says what it does."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import acp
from acp import schema

OPTIONS = [
    schema.PermissionOption(option_id="go", name="Allow", kind="allow_once"),
    schema.PermissionOption(option_id="no", name="Reject", kind="reject_once"),
]


class Foreigner:
    """Has one session."""

    def on_connect(self, conn: acp.Client) -> None:
        self.client = conn
        self.cancelled = asyncio.Event()

    async def initialize(self, protocol_version: int, **_more: Any) -> schema.InitializeResponse:
        return schema.InitializeResponse(protocol_version=protocol_version)

    async def new_session(self, cwd: str, **_more: Any) -> schema.NewSessionResponse:
        return schema.NewSessionResponse(session_id="theirs")

    async def prompt(self, session_id: str, prompt: list[Any], **_more: Any) -> Any:
        what, _, rest = prompt[0].text.partition(" ")
        if what == "say":
            await self.say(rest)
        elif what == "ask":
            await self.ask(session_id)
        elif what == "die":
            await self.say("dying")
            os._exit(3)
        else:
            await self.say("waiting")
            await self.cancelled.wait()
            if what == "ignore":
                await asyncio.Event().wait()
            return schema.PromptResponse(stop_reason="cancelled")
        return schema.PromptResponse(stop_reason="end_turn")

    async def cancel(self, session_id: str, **_more: Any) -> None:
        self.cancelled.set()

    async def say(self, text: str) -> None:
        await self.client.session_update("theirs", acp.update_agent_message_text(text))

    async def ask(self, session_id: str) -> None:
        call = acp.start_tool_call("c", "Delete it", kind="delete", status="pending")
        await self.client.session_update(session_id, call)
        about = schema.ToolCallUpdate(tool_call_id="c")
        answer = await self.client.request_permission(
            session_id=session_id, tool_call=about, options=OPTIONS
        )
        await self.say(getattr(answer.outcome, "option_id", answer.outcome.outcome))


if __name__ == "__main__":
    asyncio.run(acp.run_agent(Foreigner()))
