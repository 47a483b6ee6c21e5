"""One session of one client: prompts in, updates and questions out.

A `ClientSession` exists from the moment the client may name the session, which for
``session/load`` is before its agent does: prompts that arrive meanwhile wait here, and a cancel
finds them here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Final

import anyio

from acp_server import types as wire
from acp_server.capabilities import Features
from acp_server.client_files import lend_files
from acp_server.client_terminals import TerminalsSeen, lend_terminals
from acp_server.commands import SessionCommands
from acp_server.config_options import config_options
from acp_server.elicitation import lend_person
from acp_server.errors import (
    AUTH_REQUIRED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    RESOURCE_NOT_FOUND,
    RpcError,
)
from acp_server.holders import Holders
from acp_server.mcp_servers import SessionServers
from acp_server.peer import Peer
from acp_server.permission import ask_permission
from acp_server.session_peer import SessionPeer
from acp_server.spending import Spending
from acp_server.subagent_sessions import SubagentSessions
from acp_server.updates import announced, asked_call, iso_time, updates_for
from agent_core.agent import Agent
from agent_core.background import BackgroundChild
from agent_core.cancellation import AbortSignal
from agent_core.content import Block
from agent_core.errors import AgentError, QueueFull, SessionNotFound
from agent_core.events import (
    Completed,
    EffortChanged,
    Event,
    Failed,
    MaxSteps,
    MaxTokens,
    ModeChanged,
    ModelChanged,
    Outcome,
    PromptBlocked,
    Refused,
    Rejected,
    UserMessage,
)
from agent_core.inbox import MAX_QUEUED, Prompt
from agent_core.logs import get_logger
from agent_core.loop import Allow, Refuse
from agent_core.models.adapter import ModelEvent, ModelRequest
from agent_core.permissions import Approval
from agent_core.tools.pipeline import ToolExecution

__all__ = ["ClientSession"]

log = get_logger(__name__)

REPLAY_BATCH: Final = 200
"""Events replayed between two looks at everything else the process has to do."""


class ClientSession:
    """A session on this connection."""

    def __init__(
        self, session_id: str, peer: Peer, features: Features, number: int | None = None
    ) -> None:
        self.id = session_id
        self._number = number  # of the connection, in the log
        self.agent: Agent | None = None
        self.commands = SessionCommands(self._offer_commands)
        self._peer = peer = SessionPeer(peer, session_id)
        self.holders: Holders | None = None  # once it is, or was, one of them
        self._waiting: list[tuple[Prompt, bool]] = []  # for an agent, with: is it steering
        self._loads = 0
        self._has_agent = anyio.Event()  # or will never have one
        self._load_again: Callable[[], None] | None = None  # there while it is unloaded
        self._load_error: AgentError = SessionNotFound(session_id)
        self._used_s = time.monotonic()
        self._replays = 0
        self._all_shown = anyio.Event()
        self._all_shown.set()
        self._last_answered = anyio.Event()
        self._last_answered.set()
        # Prompts with the event of the answer before theirs, and of their own.
        self._unanswered: list[tuple[Prompt, anyio.Event, anyio.Event]] = []
        self._stopped_s: dict[str, float] = {}  # when, by the id of the prompt
        self._features = features
        self._spending = Spending()
        self._told_title: str | None = None
        self._terminals = TerminalsSeen(self._when_all_shown)
        self.servers = SessionServers(session_id, peer, features)
        self.subagents = SubagentSessions(
            peer, features, self._at_the_clients_pace, lambda: self._replays > 0
        )
        self._detach: list[Callable[[], None]] = []
        self.is_closed = False

    # --- the agent comes and goes ------------------------------------------------------------

    def attach(self, agent: Agent) -> None:
        """Give the session its agent, and the agent what waited for it."""
        self.agent = agent
        self._load_again = None
        self._used_s = time.monotonic()
        if self._number is not None:
            agent.labels["connection"] = self._number
        self._told_title = agent.session.state.title
        self._detach = [
            agent.session.observe(self._on_event),
            agent.hooks.on("agent/prompt-submit", self._behind_the_answers),
            self.servers.attach(agent),
            agent.hooks.on("agent/prompt-submit", self.commands.submit),
            agent.hooks.on("approval/request", self._ask),
            agent.hooks.on("llm/stream", self._at_the_clients_pace),
            self.subagents.follow(agent),
            agent.background.on_slow(self._show_slow),
            lend_files(agent, self.id, self._peer, self._features),
            lend_terminals(agent, self.id, self._peer, self._features, self._terminals),
            lend_person(agent, self.id, self._peer, self._features, self._when_all_shown),
        ]
        for prompt, is_steering in self._waiting:
            self._deliver(agent, prompt, is_steering=is_steering)
        self._waiting.clear()
        self._has_agent.set()

    def detach(self) -> None:
        """Let go of the agent for good: nothing of it is shown here any more."""
        self._let_go()
        if self.holders is not None:
            self.holders.leave(self)

    def _let_go(self) -> None:
        while self._detach:
            self._detach.pop()()

    # --- nobody uses it for a while ----------------------------------------------------------

    @property
    def unused_s(self) -> float:
        """How long nothing has happened in the session."""
        return time.monotonic() - self._used_s

    @property
    def is_at_rest(self) -> bool:
        """Whether it has an agent that nothing goes on in, and nothing is owed to the client."""
        agent = self.agent
        if agent is None or self.is_closed or self.is_handed_over:
            return False
        n_events = len(agent.session.events)
        is_busy = (
            self._loads
            or self._replays
            or self.n_unanswered
            or self._peer.awaits_client
            or self._peer.first_unsent(n_events) < n_events
        )
        return agent.is_at_rest and self.servers.are_named and not is_busy

    def unload(self, load_again: Callable[[], None]) -> None:
        """Give the agent back, which is at rest; the client may go on to name the session.

        Args:
            load_again: Called when something needs an agent again, to begin a load.
        """
        agent = self.agent
        assert agent is not None
        self._let_go()
        self.agent = None
        self.load_when_used(load_again)
        agent.dispose()

    def load_when_used(self, load_again: Callable[[], None]) -> None:
        """Be without an agent until something needs one; see `unload`."""
        self._has_agent = anyio.Event()
        self._load_again = load_again

    def _need_agent(self) -> None:
        load_again, self._load_again = self._load_again, None
        if load_again is not None:
            load_again()

    # --- the client comes and goes -----------------------------------------------------------

    @property
    def is_handed_over(self) -> bool:
        """Whether the session is another client's by now. What was prompted here is answered."""
        return self._peer.is_released

    def hand_over(self) -> None:
        """Let another client have the agent. Questions to this one's person are withdrawn."""
        self._peer.release()
        observe_spending = None if self.agent is None else self._count_spending(self.agent)
        self.detach()
        if observe_spending is not None:
            self._detach.append(observe_spending)

    def note_unseen(self) -> None:
        """Remember for whoever resumes the session what this client was not sent."""
        if self.agent is not None and self.holders is not None:
            n_events = len(self.agent.session.events)
            self.holders.note_unseen(self.id, self._peer.first_unsent(n_events))

    def leave_behind(self) -> None:
        """Go on without a client: the turn finishes, questions wait for whoever comes next."""
        self._peer.release()

    async def ended(self, keep_s: float) -> None:
        """Let go of the agent of a client that was lost, when it has finished.

        Cancellation: the agent stays. Concurrency: once, behind `close` or `leave_behind`.

        Args:
            keep_s: How long what was left behind may take.
        """
        if self.holders is None or not self.holders.holds(self):
            return
        if self.agent is None:  # it was unloaded
            self.detach()
            return
        if not self.is_closed:
            with anyio.move_on_after(keep_s):
                await self._idle_or_taken(self.agent)
            if not self.holders.holds(self):
                return
            self.close()
            log.info("kept_session_let_go", session_id=self.id)
        await self.agent.dispose()
        await self.servers.ended()
        self.detach()

    async def _idle_or_taken(self, agent: Agent) -> None:
        holders = self.holders
        assert holders is not None
        async with anyio.create_task_group() as tasks:

            async def taken() -> None:
                await holders.other_than(self)
                tasks.cancel_scope.cancel()

            tasks.start_soon(taken)
            await agent.when_idle()
            tasks.cancel_scope.cancel()

    def _count_spending(self, agent: Agent) -> Callable[[], None]:
        return agent.session.observe(lambda event: self._spending.count(event.data))

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
        self._load_error = error
        self._has_agent.set()
        return True

    async def loaded(self) -> Agent:
        """Wait for the session's agent.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            AgentError: It could not be loaded.
        """
        self._need_agent()
        await self._has_agent.wait()
        if self.agent is None:
            raise self._load_error
        return self.agent

    def close(self) -> None:
        """Do what ``session/close`` asks, as far as it takes effect at once."""
        self.is_closed = True
        self.cancel()
        if self.agent is not None:
            self.agent.dispose()

    async def closed(self) -> None:
        """Wait until what ran in the session is quiet and every prompt of it answered.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        if self.agent is not None:
            await self.agent.dispose()
        await self.servers.ended()
        for _prompt, _before, answered in tuple(self._unanswered):
            await answered.wait()
        self.detach()

    # --- prompts -----------------------------------------------------------------------------

    def submit(
        self, content: tuple[Block, ...], *, is_steering: bool, trace: Mapping[str, str]
    ) -> Prompt:
        """Take a prompt; in effect when this returns."""
        prompt = Prompt(content, "user", trace)
        self._used_s = time.monotonic()
        if self.agent is None and len(self._waiting) >= MAX_QUEUED:
            prompt.settle(None, QueueFull(f"{MAX_QUEUED} prompts are waiting already."))
        elif self.agent is None:
            self._waiting.append((prompt, is_steering))
            self._need_agent()
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
        self._spending.expect(prompt.id)
        return before, answered

    async def answer_to(self, prompt: Prompt, before: anyio.Event) -> wire.PromptResult:
        """Wait for the prompt's end and say how it ended, behind the answers before it.

        What was stopped with it in the background is waited for.

        Cancellation: safe; the turn goes on. Concurrency: one task a prompt.

        Raises:
            RpcError: The turn failed; the session is usable.
        """
        try:
            outcome = await prompt.settled()
        except SessionNotFound as exc:  # the load that the prompt waited for failed
            data = {"sessionId": exc.session_id}
            raise RpcError(RESOURCE_NOT_FOUND, "Unknown session", data) from None
        except QueueFull as exc:
            raise RpcError(INVALID_REQUEST, str(exc), {"reason": "busy"}) from None
        except AgentError as exc:
            raise RpcError(INTERNAL_ERROR, str(exc)) from None
        finally:
            if self.agent is not None:  # a Stop reaches those in the background, too
                await self.agent.background.when_stopped()
            usage = self._spending.take(prompt.id)
            await before.wait()
            await self._when_all_shown()
        return wire.PromptResult(_stop_reason(outcome), usage)

    async def _behind_the_answers(
        self,
        agent: Agent,
        _content: tuple[Block, ...],
        _source: str,
        signal: AbortSignal,
        next_: Callable[[], Awaitable[Allow | Refuse]],
    ) -> Allow | Refuse:
        """Hold a turn until those before it are answered: a client takes what comes for theirs.

        An answer whose own predecessor is not out, such as that of a prompt withdrawn from behind
        this one, waits for this very turn. In a session that another process has gone on with
        nothing is done.
        """
        async with signal.scope():
            await agent.session.check()
        for prompt, before, answered in tuple(self._unanswered):
            if prompt.is_settled and before.is_set():
                async with signal.scope():
                    await answered.wait()
        return await next_()

    def withdraw(self, prompt: Prompt) -> None:
        """Cancel one prompt: take it out of its queue, or stop the turn it is in."""
        self._stopped_s.setdefault(prompt.id, time.monotonic())
        self._waiting = [entry for entry in self._waiting if entry[0] is not prompt]
        if self.agent is None:
            prompt.settle(None)
        else:
            self.agent.withdraw(prompt)

    def stopping_s(self, prompt: Prompt) -> float | None:
        """Return how long ago a prompt was stopped, once; `None` if nobody stopped it."""
        stopped_s = self._stopped_s.pop(prompt.id, None)
        return None if stopped_s is None else time.monotonic() - stopped_s

    def cancel(self) -> None:
        """Do what ``session/cancel`` asks: stop the turn, forget what is queued."""
        now_s = time.monotonic()
        for prompt, _before, answered in self._unanswered:
            if not answered.is_set():
                self._stopped_s.setdefault(prompt.id, now_s)
        for prompt, _is_steering in self._waiting:
            prompt.settle(None)
        self._waiting.clear()
        if self.agent is not None:
            self.agent.cancel({"kind": "user"})

    # --- updates -----------------------------------------------------------------------------

    @property
    def n_unanswered(self) -> int:
        """How many prompts of this client have no answer yet."""
        return sum(not answered.is_set() for _prompt, _before, answered in self._unanswered)

    async def replay(self, first: int = 0) -> None:
        """Show the log; what happens meanwhile is shown behind it, once.

        Cancellation: safe. Concurrency: any number of tasks.

        Args:
            first: The event to begin with.
        """
        assert self.agent is not None
        events, shown = self.agent.session.events, first
        self._told_title = None
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

    async def _when_all_shown(self) -> None:
        await self._all_shown.wait()

    def _offer_commands(self, commands: tuple[wire.AvailableCommand, ...]) -> None:
        update = wire.AvailableCommandsUpdate(commands)
        self._peer.send(wire.encode_update(self.id, update))

    def _on_event(self, event: Event) -> None:
        self._used_s = time.monotonic()
        self._spending.count(event.data)
        if not self._replays:
            self._show(event)

    def _show(self, event: Event, *, is_replay: bool = False) -> None:
        for update in updates_for(
            event,
            is_replay=is_replay,
            knows_compaction=self._features.knows_compaction,
            terminals=() if is_replay else self._terminals.ids,
        ):
            self._peer.send(wire.encode_update(self.id, self.subagents.linked(self.id, update)))
        if self.agent is None:
            return
        if isinstance(event.data, _OPTION_CHANGES) and not is_replay:
            options = wire.ConfigOptionUpdate(config_options(self.agent))
            self._peer.send(wire.encode_update(self.id, options))
        title = self.agent.session.state.title
        if isinstance(event.data, _NAMING) and title is not None and title != self._told_title:
            self._told_title = title
            info = wire.SessionInfoUpdate(title, iso_time(event.time_ms))
            self._peer.send(wire.encode_update(self.id, info))
        self._peer.mark(event.seq)

    def _show_slow(self, child: BackgroundChild) -> None:
        """Show that one in the background was told to stop and has not, as a call of its own."""
        call_id = f"stopping-{child.name}"
        update: wire.Update = wire.ToolCallUpdate(
            call_id, status="completed", title=f"{child.name} has stopped"
        )
        if child.result is None:
            title = f"Waiting for {child.name} to stop"
            update = wire.ToolCallStart(call_id, title, "in_progress", "other", "agents")
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
        """Ask the client's person, for this agent or a subagent below it.

        A question that this client cannot answer any more, because it was lost or has handed the
        session over, is asked of the next one.
        """
        approval = Approval.UNAVAILABLE
        if not self._peer.is_released:
            approval = await self._ask_client(execution)
        if not self._peer.is_released or self.holders is None:
            return approval
        async with execution.signal.scope():
            holder = await self.holders.other_than(self)
        return await holder._ask(execution, _next)

    async def _ask_client(self, execution: ToolExecution) -> Approval:
        async with execution.signal.scope():
            await self._when_all_shown()  # the call is announced before it is asked about
        call = asked_call(execution)
        is_known = self.agent is None or call.tool_call_id in self.agent.running_calls
        if not is_known:  # the call that started it in the background is over
            self._peer.send(wire.encode_update(self.id, announced(call)))
        approval = Approval.CANCELLED
        try:
            approval = await ask_permission(self._peer, self.id, call, execution)
        finally:
            if is_known:
                self._restore_title(call)
            else:
                status = "completed" if approval.is_allowed else "failed"
                update = wire.ToolCallUpdate(call.tool_call_id, status=status)
                self._peer.send(wire.encode_update(self.id, update))
        return approval

    def _restore_title(self, call: wire.AskedToolCall) -> None:
        """Call a call by its own name again, after a question of the subagent that it is."""
        title = None if self.agent is None else self.agent.running_calls.get(call.tool_call_id)
        if title is not None and title != call.title:
            update = wire.ToolCallUpdate(call.tool_call_id, title=title)
            self._peer.send(wire.encode_update(self.id, update))


_OPTION_CHANGES: Final = (ModeChanged, ModelChanged, EffortChanged)
_NAMING: Final = (UserMessage, PromptBlocked)


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
        case Failed(code="AUTH" | "NO_KEY" as code, message=message):
            raise RpcError(AUTH_REQUIRED, message, {"code": code})  # a login may help
        case Failed(code=code, message=message):
            raise RpcError(INTERNAL_ERROR, message, {"code": code})
        case _:  # aborted, disposed, or no turn ever took it
            return "cancelled"
