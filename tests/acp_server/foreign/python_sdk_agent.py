"""An agent on the official Python SDK: the first word of a prompt says what it does.

Argument: the directory that has the SDK, if it is not the one that is installed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

sys.path[:0] = sys.argv[1:]

import acp  # noqa: E402 - found where the argument says
from acp import schema  # noqa: E402

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
        content = schema.TextContentBlock(type="text", text=text)
        chunk = schema.AgentMessageChunk(session_update="agent_message_chunk", content=content)
        await self.client.session_update("theirs", chunk)

    async def ask(self, session_id: str) -> None:
        call = schema.ToolCallStart(
            session_update="tool_call",
            tool_call_id="c",
            title="Delete it",
            kind="delete",
            status="pending",
        )
        await self.client.session_update(session_id, call)
        about = schema.ToolCallUpdate(tool_call_id="c")
        answer = await self.client.request_permission(
            session_id=session_id, tool_call=about, options=OPTIONS
        )
        await self.say(getattr(answer.outcome, "option_id", answer.outcome.outcome))


if __name__ == "__main__":
    asyncio.run(acp.run_agent(Foreigner()))
