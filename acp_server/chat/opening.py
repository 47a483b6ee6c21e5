"""How a chat comes by its session: a new one, or one of before with the end of what was said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from acp_server.chat.text import clean_line, to_list, to_mapping, to_string, to_text
from acp_server.client import AgentConnection, Params
from acp_server.errors import RemoteError

__all__ = ["LATEST", "Replay", "find_session", "model_note"]

LATEST: Final = ""
"""In place of the beginning of an id: the latest session of the directory."""
SHOWN_LINES: Final = 8
_SAID: Final = ("user_message_chunk", "agent_message_chunk")
_STILL_TRUE: Final = ("available_commands_update", "current_mode_update")


class Replay:
    """What an agent tells of a loaded session, of which the end is kept."""

    def __init__(self) -> None:
        self._n_prompts = 0
        self._said: list[tuple[str, str]] = []

    def take(self, update: Mapping[str, Any]) -> bool:
        """Take an update; say whether it is history, and nothing to be shown now."""
        kind = to_string(update.get("sessionUpdate"))
        if kind in _SAID:
            self._say(kind, to_text(update.get("content")))
        return kind not in _STILL_TRUE

    def _say(self, kind: str, text: str) -> None:
        if kind == _SAID[0] and not (self._said and self._said[-1][0] == kind):
            self._n_prompts += 1
            self._said.clear()
        self._said.append((kind, text))

    def lines(self) -> list[str]:
        """Return how much there was, and the last prompt with the end of its answer."""
        count = f"{self._n_prompts} prompt{'' if self._n_prompts == 1 else 's'} before"
        prompt, answer = ("".join(t for k, t in self._said if k == kind) for kind in _SAID)
        said = answer.strip().splitlines()
        cut = ["…"] if len(said) > SHOWN_LINES else []
        asked = [f"> {clean_line(prompt)[:200]}"] if prompt.strip() else []
        return [f"{count}, the last one:" if asked else count, *asked, *cut, *said[-SHOWN_LINES:]]


async def find_session(
    agent: AgentConnection, hello: Params, start: str, cwd: str
) -> tuple[str, str]:
    """Return id and directory of the session to go on with.

    Cancellation: safe. Concurrency: once.

    Args:
        agent: Whose.
        hello: Its answer to ``initialize``.
        start: The session's id, or its beginning; `LATEST` for the latest one of `cwd`.
        cwd: Where the chat is.

    Raises:
        RemoteError: It is not to be found, or the agent keeps no sessions.
    """
    capabilities = to_mapping(hello.get("agentCapabilities"))
    if capabilities.get("loadSession") is not True:
        raise RemoteError(0, "this agent cannot go on with a session")
    if "list" not in to_mapping(capabilities.get("sessionCapabilities")):
        if start == LATEST:
            raise RemoteError(0, "this agent lists no sessions; name one with --resume ID")
        return start, cwd
    found: list[Mapping[str, Any]] = []
    async for session in _sessions(agent, {"cwd": cwd} if start == LATEST else {}):
        session_id = to_string(session.get("sessionId"))
        if session_id == start:
            found = [session]
            break
        if session_id.startswith(start):
            found.append(session)
    if start == LATEST:
        found = sorted(found, key=lambda each: to_string(each.get("updatedAt")))[-1:]
    if not found:
        there_is = "no session of this directory" if start == LATEST else f"no session {start}"
        raise RemoteError(0, f"there is {there_is}")
    if len(found) > 1:
        raise RemoteError(0, f"{len(found)} sessions begin with {start}; write more of the id")
    return to_string(found[0].get("sessionId")), to_string(found[0].get("cwd")) or cwd


async def _sessions(agent: AgentConnection, params: Params) -> AsyncIterator[Mapping[str, Any]]:
    cursor: dict[str, str] = {}
    while True:
        page = await agent.request("session/list", {**params, **cursor})
        for session in map(to_mapping, to_list(page.get("sessions"))):
            yield session
        if not (following := to_string(page.get("nextCursor"))):
            return
        cursor = {"cursor": following}


def model_note(session: Params) -> str:
    """Say which model a session uses; nothing if the agent does not say so."""
    for option in map(to_mapping, to_list(session.get("configOptions"))):
        if option.get("category") == "model" and (name := clean_line(option.get("currentValue"))):
            if name == "rehearsal":
                return "model: rehearsal, built in and offline; --model names a real one. "
            return f"model: {name}. "
    return ""
