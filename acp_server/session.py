"""One session of one client: prompts in, updates and questions out.

A `ClientSession` exists from the moment the client may name the session, which for
``session/load`` is before its agent does: prompts that arrive meanwhile wait here, and a cancel
finds them here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

import anyio
import msgspec

from acp_server import types as wire
from acp_server.commands import answer_commands
from acp_server.errors import (
    INTERNAL_ERROR,
    REQUEST_CANCELLED,
    RESOURCE_NOT_FOUND,
    PeerClosed,
    RemoteError,
    RpcError,
)
from acp_server.peer import Peer
from acp_server.updates import asked_call, updates_for
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.content import Block, Image, Link, Resource, Text
from agent_core.errors import AgentError, QueueFull, SessionNotFound
from agent_core.events import (
    Completed,
    Event,
    Failed,
    MaxSteps,
    MaxTokens,
    Outcome,
    Refused,
    Rejected,
)
from agent_core.inbox import MAX_QUEUED, Prompt
from agent_core.loop import Allow, Refuse
from agent_core.models.adapter import ModelEvent, ModelRequest
from agent_core.permissions import Approval
from agent_core.tools.pipeline import ToolExecution

__all__ = ["ClientSession", "blocks_from"]

REPLAY_BATCH: Final = 200
"""Events replayed between two looks at everything else the process has to do."""


class ClientSession:
    """A session on this connection."""

    def __init__(self, session_id: str, peer: Peer) -> None:
        self.id = session_id
        self.agent: Agent | None = None
        self._peer = peer
        self._waiting: list[tuple[Prompt, bool]] = []  # for an agent, with: is it steering
        self._loads = 0
        self._has_agent = anyio.Event()  # or will never have one
        self._replays = 0
        self._all_shown = anyio.Event()
        self._all_shown.set()
        self._last_answered = anyio.Event()
        self._last_answered.set()
        # Prompts with the event of the answer before theirs, and of their own.
        self._unanswered: list[tuple[Prompt, anyio.Event, anyio.Event]] = []
        self._detach: list[Callable[[], None]] = []

    # --- the agent comes and goes ------------------------------------------------------------

    def attach(self, agent: Agent) -> None:
        """Give the session its agent, and the agent what waited for it."""
        self.agent = agent
        self._detach = [
            agent.session.observe(self._on_event),
            agent.hooks.on("agent/prompt-submit", self._behind_the_answers),
            agent.hooks.on("agent/prompt-submit", answer_commands),
            agent.hooks.on("approval/request", self._ask),
            agent.hooks.on("llm/stream", self._at_the_clients_pace),
        ]
        for prompt, is_steering in self._waiting:
            self._deliver(agent, prompt, is_steering=is_steering)
        self._waiting.clear()
        self._has_agent.set()

    def detach(self) -> None:
        """Let go of the agent: nothing of it is shown here any more."""
        while self._detach:
            self._detach.pop()()

    def begin_load(self) -> None:
        """A request wants the session loaded; there may be several at once."""
        self._loads += 1

    def end_load(self, error: AgentError | None) -> bool:
        """That request has its agent, or failed with `error`.

        Returns:
            Whether the session is lost: the last load failed, and what waited for it with it.
        """
        self._loads -= 1
        has_agent = self.agent is not None and self.agent.status != "disposed"
        if self._loads or has_agent or error is None:
            return False
        for prompt, _is_steering in self._waiting:
            prompt.settle(None, error)
        self._waiting.clear()
        self._has_agent.set()
        return True

    async def loaded(self) -> Agent | None:
        """Wait for the session's agent; `None` if loading it failed.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        await self._has_agent.wait()
        return self.agent

    # --- prompts -----------------------------------------------------------------------------

    def submit(self, content: tuple[Block, ...], *, is_steering: bool) -> Prompt:
        """Take a prompt; in effect when this returns."""
        prompt = Prompt(content, "user")
        if self.agent is None and len(self._waiting) >= MAX_QUEUED:
            prompt.settle(None, QueueFull(f"{MAX_QUEUED} prompts are waiting already."))
        elif self.agent is None:
            self._waiting.append((prompt, is_steering))
        else:
            self._deliver(self.agent, prompt, is_steering=is_steering)
        return prompt

    def _deliver(self, agent: Agent, prompt: Prompt, *, is_steering: bool) -> None:
        try:
            agent.submit(prompt, is_steering=is_steering)
        except AgentError as exc:
            prompt.settle(None, exc)

    def in_turn(self, prompt: Prompt, *, is_steering: bool) -> tuple[anyio.Event, anyio.Event]:
        """Return the event of the answer before the prompt's, and of the prompt's own.

        Prompts are answered in the order in which they came; steering with the turn it joined.
        """
        before, answered = self._last_answered, anyio.Event()
        if is_steering:
            before = anyio.Event()
            before.set()
        else:
            self._last_answered = answered
        self._unanswered = [entry for entry in self._unanswered if not entry[2].is_set()]
        self._unanswered.append((prompt, before, answered))
        return before, answered

    async def answer_to(self, prompt: Prompt, before: anyio.Event) -> dict[str, str]:
        """Wait for the prompt's end and say how it ended, behind the answers before it.

        Cancellation: safe; the turn goes on. Concurrency: one task a prompt.

        Raises:
            RpcError: The turn failed; the session is usable.
        """
        try:
            outcome = await prompt.settled()
        except SessionNotFound as exc:  # the load that the prompt waited for failed
            data = {"sessionId": exc.session_id}
            raise RpcError(RESOURCE_NOT_FOUND, "Unknown session", data) from None
        except AgentError as exc:
            raise RpcError(INTERNAL_ERROR, str(exc)) from None
        finally:
            await before.wait()
            await self._all_shown.wait()
        return {"stopReason": _stop_reason(outcome)}

    async def _behind_the_answers(
        self,
        _agent: Agent,
        _content: tuple[Block, ...],
        _source: str,
        signal: AbortSignal,
        next_: Callable[[], Awaitable[Allow | Refuse]],
    ) -> Allow | Refuse:
        """Hold a turn until those before it are answered: a client takes what comes for theirs.

        An answer whose own predecessor is not out, such as that of a prompt withdrawn from behind
        this one, waits for this very turn.
        """
        for prompt, before, answered in tuple(self._unanswered):
            if prompt.is_settled and before.is_set():
                async with signal.scope():
                    await answered.wait()
        return await next_()

    def withdraw(self, prompt: Prompt) -> None:
        """Cancel one prompt: take it out of its queue, or stop the turn it is in."""
        self._waiting = [entry for entry in self._waiting if entry[0] is not prompt]
        if self.agent is None:
            prompt.settle(None)
        else:
            self.agent.withdraw(prompt)

    def cancel(self) -> None:
        """Do what ``session/cancel`` asks: stop the turn, forget what is queued."""
        for prompt, _is_steering in self._waiting:
            prompt.settle(None)
        self._waiting.clear()
        if self.agent is not None:
            self.agent.cancel({"kind": "user"})

    # --- updates -----------------------------------------------------------------------------

    async def replay(self) -> None:
        """Show the whole log; what happens meanwhile is shown behind it, once.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        assert self.agent is not None
        events, shown = self.agent.session.events, 0
        n_old = len(events)
        self._replays += 1
        if self._all_shown.is_set():
            self._all_shown = anyio.Event()
        try:
            while shown < len(events):
                self._show(events[shown], is_replay=shown < n_old)
                shown += 1
                if shown % REPLAY_BATCH == 0:
                    await anyio.lowlevel.checkpoint()
                    await self._peer.drained()
        finally:
            for event in events[max(shown, n_old) :]:  # the replay was broken off
                self._show(event)
            self._replays -= 1
            if not self._replays:
                self._all_shown.set()

    def _on_event(self, event: Event) -> None:
        if not self._replays:
            self._show(event)

    def _show(self, event: Event, *, is_replay: bool = False) -> None:
        for update in updates_for(event, is_replay=is_replay):
            self._peer.send(wire.encode_update(self.id, update))

    async def _at_the_clients_pace(
        self,
        request: ModelRequest,
        next_: Callable[[], Awaitable[AsyncGenerator[ModelEvent, None]]],
    ) -> AsyncGenerator[ModelEvent, None]:
        return self._paced(await next_(), request)

    async def _paced(
        self, stream: AsyncGenerator[ModelEvent, None], request: ModelRequest
    ) -> AsyncGenerator[ModelEvent, None]:
        """Take no more from the model than the client reads; memory stays bounded."""
        async with aclosing(stream):
            async for event in stream:
                yield event
                if self._peer.is_congested:
                    async with request.signal.scope():
                        await self._peer.drained()

    # --- questions ---------------------------------------------------------------------------

    async def _ask(self, execution: ToolExecution, _next: object) -> Approval:
        """Ask the client's person. Whatever is not clearly a yes is not one."""
        _key, covers = execution.tool.remember_key(execution.args)
        async with execution.signal.scope():
            await self._all_shown.wait()  # the call is announced before it is asked about
        params = {
            "sessionId": self.id,
            "toolCall": asked_call(execution),
            "options": [
                {"optionId": option, "name": name.format(covers), "kind": kind}
                for option, name, kind, _approval in _OPTIONS
            ],
        }
        try:
            raw = await self._peer.call(
                "session/request_permission", params, signal=execution.signal
            )
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


def _stop_reason(outcome: Outcome | None) -> str:
    match outcome:
        case Completed() | Rejected():
            return "end_turn"
        case MaxTokens():
            return "max_tokens"
        case MaxSteps():
            return "max_turn_requests"
        case Refused():
            return "refusal"
        case Failed(code=code, message=message):
            raise RpcError(INTERNAL_ERROR, message, {"code": code})
        case _:  # aborted, disposed, or no turn ever took it
            return "cancelled"


def blocks_from(prompt: list[wire.ContentBlock]) -> tuple[Block, ...]:
    """Translate a prompt.

    Raises:
        ValueError: It is empty, or has a block this agent did not offer to take.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    return tuple(_block_from(block) for block in prompt)


def _block_from(block: wire.ContentBlock) -> Block:
    match block:
        case wire.TextBlock():
            return Text(block.text)
        case wire.LinkBlock():
            size = block.size
            return Link(
                block.uri, block.name, block.mime_type, block.title, block.description, size
            )
        case wire.ResourceBlock(resource=resource):
            return Resource(resource.uri, resource.text, resource.blob, resource.mime_type)
        case wire.ImageBlock():
            return Image(block.data, block.mime_type, block.uri)
        case wire.AudioBlock():
            raise ValueError("this agent takes no audio")
