"""Subagents as sessions of their own, for clients that asked to see them.

One is announced on its parent's session before anything is shown of it; what it is told, says and
does comes on its own session, and the call that it is links to it. A client may cancel one by its
session's id. Those in processes of their own have no session here: their calls say what they do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

from msgspec import UNSET, Raw, Struct, structs

from acp_server import types as wire
from acp_server.capabilities import Features
from acp_server.peer import Peer
from acp_server.updates import contents, updates_for
from agent_core.agent import Agent
from agent_core.events import Event, UserMessage
from agent_core.models.adapter import ModelEvent, ModelRequest

__all__ = ["SubagentSessions"]

Pace = Callable[
    [ModelRequest, Callable[[], Awaitable[AsyncGenerator[ModelEvent, None]]]],
    Awaitable[AsyncGenerator[ModelEvent, None]],
]
"""A listener of ``llm/stream``."""

_MAY_CANCEL: Final = wire.SubagentSessionCapabilities(cancel=Raw(b"{}"))
_STOP_REASONS: Final = {
    "completed": "end_turn",
    "max_tokens": "max_tokens",
    "max_steps": "max_turn_requests",
    "refusal": "refusal",
    "aborted": "cancelled",
}

_Update = TypeVar("_Update", bound=wire.Update)


class _Shown(Struct):
    """A subagent that is not quiet yet, and how to let go of it."""

    agent: Agent
    detach: list[Callable[[], None]]


class SubagentSessions:
    """What one client sees of the subagents below one session.

    Args:
        peer: The client.
        features: What it offered.
        pace: Keeps a model from saying more than the client reads.
        is_replaying: Says whether what is shown of the session lags behind what happens in it.
    """

    def __init__(
        self, peer: Peer, features: Features, pace: Pace, is_replaying: Callable[[], bool]
    ) -> None:
        self._peer = peer
        self._features = features
        self._pace = pace
        self._is_replaying = is_replaying
        self._shown: dict[str, _Shown] = {}
        self._links: dict[tuple[str, str], str] = {}  # of calls, by their session and id

    def follow(self, agent: Agent) -> Callable[[], None]:
        """Show the subagents of `agent` from now on; return what puts an end to it."""
        if not self._features.shows_subagents:
            return lambda: None
        for child in agent.children:  # at work for whoever showed the session before
            self._announce(agent, child)
        detach = (
            agent.hooks.on("subagent/start", self._begin),
            agent.hooks.on("subagent/end", self._end),
        )

        def stop() -> None:
            for each in detach:
                each()
            for shown in tuple(self._shown.values()):
                if shown.agent.parent is agent:
                    self._let_go(shown)

        return stop

    def cancel(self, session_id: str) -> None:
        """Cancel the subagent of that session, if it is one of these."""
        shown = self._shown.get(session_id)
        if shown is not None:
            shown.agent.cancel({"kind": "user"})

    def linked(self, session_id: str, update: _Update) -> _Update:
        """Return an update as it shows a call that is a subagent: with a link to its session."""
        if not isinstance(update, wire.ToolCallUpdate) or update.content is UNSET:
            return update
        child_id = self._links.get((session_id, update.tool_call_id))
        if child_id is None:
            return update
        content = (wire.ToolContentSession(child_id), *update.content)
        return structs.replace(update, content=content)

    def _begin(self, parent: Agent, run_id: str, _provider: str) -> None:
        for child in parent.children:  # none where it is a process of its own
            if child.id == run_id and run_id not in self._shown:
                self._announce(parent, child)
                self._link(parent, child)

    def _link(self, parent: Agent, child: Agent) -> None:
        """Have the call link to the session at once, unless the client may not know it yet."""
        call_id = child.delegation.call_id if child.delegation is not None else ""
        if call_id and not self._is_replaying():
            update = wire.ToolCallUpdate(call_id, content=())
            self._send(parent.id, self.linked(parent.id, update))

    def _announce(self, parent: Agent, child: Agent) -> None:
        delegation = child.delegation
        assert delegation is not None
        state = wire.SubagentState("running")
        announcement = wire.SubagentUpdate(
            child.id, delegation.name, _MAY_CANCEL, state, child.roots.cwd
        )
        self._send(parent.id, announcement)
        self._links[parent.id, delegation.call_id] = child.id
        self._shown[child.id] = _Shown(
            child,
            [
                child.session.observe(lambda event: self._show(child, event)),
                child.hooks.on("llm/stream", self._pace),
                self.follow(child),
            ],
        )

    def _end(self, parent: Agent, run_id: str, reason: str) -> None:
        shown = self._shown.get(run_id)
        if shown is not None:
            state = wire.SubagentState("idle", _STOP_REASONS.get(reason, "error"))
            self._send(parent.id, wire.SubagentUpdate(run_id, state=state))
            self._let_go(shown)

    def _let_go(self, shown: _Shown) -> None:
        self._shown.pop(shown.agent.id, None)
        while shown.detach:
            shown.detach.pop()()

    def _show(self, child: Agent, event: Event) -> None:
        if isinstance(event.data, UserMessage) and child.parent is not None:
            self._show_message(child.parent, child, event.data)
            return
        for update in updates_for(event, knows_compaction=self._features.knows_compaction):
            self._send(child.id, self.linked(child.id, update))

    def _show_message(self, parent: Agent, child: Agent, message: UserMessage) -> None:
        """Show what the parent tells its subagent; a long text goes on in chunks."""
        first, *rest = contents(message.content)
        told = wire.SessionMessage(message.id, parent.id, child.id, (first,))
        self._send(child.id, told)
        for content in rest:
            self._send(child.id, wire.SessionMessageChunk(message.id, content))

    def _send(self, session_id: str, update: wire.Update) -> None:
        self._peer.send(wire.encode_update(session_id, update))
