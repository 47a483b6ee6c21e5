"""A subagent of its own kind: any ACP agent, as a process or by its address, for one prompt.

The request's signal is the one way to stop it. An abort becomes ``session/cancel`` as the protocol
has it: with the session's id and without a word about who asked. The agent may then answer for a
short time, as whatever it says is worth keeping; after that its process is ended, or the connection
to it is closed, and only then does the run have a result. So a remote agent that dies, floods,
talks nonsense, is silent or ignores the cancel is a failed run, and nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from acp_server.agent_process import open_agent
from acp_server.agent_socket import TokenRefused, reach_agent
from acp_server.client import AgentConnection, AgentGone
from acp_server.config_tables import Permissions
from acp_server.errors import RemoteError
from acp_server.peer import Method
from acp_server.remote_questions import CallShown, Question, RemoteQuestions
from acp_server.remote_updates import (
    Cost,
    Output,
    SpentTokens,
    TextSaid,
    Update,
    lenient,
    update_of,
)
from agent_core.cancellation import TurnAborted
from agent_core.content import text_of
from agent_core.errors import AgentError, ModelError
from agent_core.logs import get_logger
from agent_core.subagents import (
    Capabilities,
    Reason,
    Spent,
    SubagentRequest,
    SubagentResult,
    SubagentRun,
)

if TYPE_CHECKING:
    from agent_core.models.keys import Key
    from agent_core.runtime import AgentRuntime

__all__ = ["RemoteProvider", "without_credentials"]

START_LIMIT_S: Final = 30.0
CANCEL_GRACE_S: Final = 2.0
EXIT_GRACE_S: Final = 2.0
MAX_REASON_CHARS: Final = 200

_CREDENTIAL: Final = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_REASONS: Final[dict[object, Reason]] = {
    "end_turn": "completed",
    "max_tokens": "max_tokens",
    "max_turn_requests": "max_steps",
    "refusal": "refusal",
    "cancelled": "aborted",
}

log = get_logger(__name__)


class RemoteProvider:
    """Runs each request by another ACP agent: a process or connection, one session, one prompt.

    For programs that build on the agent: ``runtime.subagents.register(RemoteProvider(...))``.
    The agent is told the prompt, as text, and the parent's directory, and inherits nothing else;
    variables that look like credentials are withheld from its environment.
    """

    def __init__(
        self,
        runtime: AgentRuntime,
        name: str,
        command: Sequence[str] = (),
        *,
        url: str | None = None,
        token: Key | None = None,
        cwd: str | None = None,
        environ: Mapping[str, str] | None = None,
        permissions: Permissions = "ask",
        start_limit_s: float = START_LIMIT_S,
        cancel_grace_s: float = CANCEL_GRACE_S,
        exit_grace_s: float = EXIT_GRACE_S,
    ) -> None:
        """Make a provider; nothing is started.

        Args:
            runtime: Owns the tasks of its runs, and ends them when it is left.
            name: What requests name it by.
            command: The agent's program and arguments.
            url: Where it is instead, ``ws://`` or ``wss://``.
            token: What it is shown there.
            cwd: Where its process starts, an absolute path; `None` for the parent's directory,
                which is the session's in any case. With `url` it is the session's, over there.
            environ: Variables it gets besides those it inherits, credentials too.
            permissions: Who answers its questions: the parent's person, under its permission mode,
                or nobody and always in the same way; in read-only mode nothing but reads is
                allowed. It offers no files and no terminals to the agent, which has its own.
            start_limit_s: Seconds it has until it can be prompted.
            cancel_grace_s: Seconds it has to answer the prompt after a cancel.
            exit_grace_s: Seconds a process has to leave at the end of its input.

        Raises:
            ValueError: Not one of `command` and `url` is given.
        """
        if bool(command) == bool(url):
            raise ValueError("an agent has a command or a url")
        self._runtime = runtime
        self._name = name
        self.command = tuple(command)
        self.url = url
        self.token = token
        self.cwd = cwd
        self.environ = dict(environ or {})
        self.permissions: Permissions = permissions
        self.start_limit_s = start_limit_s
        self.cancel_grace_s = cancel_grace_s
        self.exit_grace_s = exit_grace_s

    @property
    def name(self) -> str:
        """What requests name it by."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """None: what another agent does cannot be narrowed from here."""
        return Capabilities()

    async def start(self, request: SubagentRequest) -> SubagentRun:
        """Start the process, or connect; what can go wrong afterwards is the run's result.

        Cancellation: through ``request.signal``. Concurrency: any number.

        Raises:
            TurnAborted: The signal fired; nothing is left.
            AgentError: That could not be done, or the runtime is being left.
        """
        request.signal.raise_if_aborted()
        run = _RemoteRun(self, request)
        self._runtime.start_task(run.drive, stop=run.stop, name=f"subagent {run.id}")
        try:
            await run.begun.wait()
        except BaseException:
            run.stop()  # nobody would own it
            raise
        if request.signal.aborted:  # while it was being started
            await run.dispose()
            request.signal.raise_if_aborted()
        if run.problem is not None:
            did = "started" if self.url is None else "reached"
            raise AgentError(f"The subagent {self._name!r} could not be {did}: {run.problem}.")
        return run


class _RemoteRun:
    """One agent at work on its one prompt. `drive` owns the way to it, in one task."""

    def __init__(self, provider: RemoteProvider, request: SubagentRequest) -> None:
        self.id: Final = f"remote_{secrets.token_hex(12)}"
        self.begun: Final = anyio.Event()
        self.problem: str | None = None
        self._provider = provider
        self._show_line = request.show
        self._questions = RemoteQuestions(
            request, self.id, provider.permissions, lambda: self.stop()
        )
        self._signal = request.signal
        self._usage, self._cost = SpentTokens(), Cost()
        self._session_cwd = request.parent.roots.cwd
        if provider.url is not None and provider.cwd is not None:
            self._session_cwd = provider.cwd
        self._text = text_of(request.prompt)
        self._stopping = anyio.Event()
        self._reaching = anyio.CancelScope()
        self._ended = anyio.Event()
        self._agent: AgentConnection | None = None
        self._session_id: str | None = None  # while a prompt is under way in it
        self._output = Output()
        self._result = SubagentResult("error", "", "The subagent failed by a defect of ours.")

    # --- what the parent sees ----------------------------------------------------------------

    async def result(self) -> SubagentResult:
        """See `SubagentRun.result`.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        await self._ended.wait()
        return self._result

    async def dispose(self) -> None:
        """See `SubagentRun.dispose`.

        Cancellation: safe; the disposal goes on. Concurrency: any number of tasks.
        """
        self.stop()
        await self._ended.wait()

    def stop(self, _reason: object = None) -> None:
        """Have the agent stop. Idempotent. Why is nothing that it is told."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._reaching.cancel()
        self._questions.close()
        if self._agent is not None and self._session_id is not None:
            self._agent.notify("session/cancel", {"sessionId": self._session_id})

    # --- the owner's side --------------------------------------------------------------------

    async def drive(self) -> None:
        """Start the agent, prompt it, and end it.

        Cancellation: through the request's signal and `stop`. Concurrency: once.
        """
        remove = self._signal.on_abort(self.stop)
        try:
            if not (self._signal.aborted or self._stopping.is_set()):
                await self._use_agent()
        except AgentGone as gone:  # it could not be started, or reached
            self.problem = str(gone)
        finally:
            remove()
            self.begun.set()
            self._ended.set()

    async def _use_agent(self) -> None:
        async with AsyncExitStack() as stack:
            self._agent = agent = await self._reach(stack)
            self.begun.set()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hang_up_in_time, agent)
                result = await self._converse(agent)
                self._questions.close()
                tasks.cancel_scope.cancel()
        # Not before the process is gone: a parent that has a result has nothing left to wait for.
        self._result = result
        log.info("remote_subagent_ended", run_id=self.id, reason=result.reason)

    async def _reach(self, stack: AsyncExitStack) -> AgentConnection:
        provider = self._provider
        methods = {"session/request_permission": Method(Question, self._questions.decide)}
        notifications = {"session/update": self._collect}
        if provider.url is None:
            process = open_agent(
                provider.command,
                cwd=provider.cwd or self._session_cwd,
                methods=methods,
                notifications=notifications,
                environ=without_credentials(os.environ) | provider.environ,
                grace_s=provider.exit_grace_s,
            )
            return await stack.enter_async_context(process)
        has_other_token = False
        while True:
            token = await self._token(provider.token)
            way = reach_agent(
                provider.url,
                token=token,
                methods=methods,
                notifications=notifications,
                connecting=self._stoppable(),
            )
            try:
                return await stack.enter_async_context(way)
            except TokenRefused:
                may_differ = provider.token is not None and provider.token.refuse(token)
                if has_other_token or not may_differ:
                    raise
                has_other_token = True

    async def _token(self, token: Key | None) -> str | None:
        if token is None:
            return None
        try:
            with self._stoppable():
                return await token.value(self._signal)
        except ModelError as exc:  # what a key is for is a model, most of the time
            raise AgentGone(exc.message) from None
        except TurnAborted:
            pass
        raise AgentGone("it was stopped")

    def _stoppable(self) -> anyio.CancelScope:
        self._reaching = anyio.CancelScope()
        if self._stopping.is_set():
            self._reaching.cancel()
        return self._reaching

    async def _hang_up_in_time(self, agent: AgentConnection) -> None:
        await self._stopping.wait()
        if self._session_id is not None:
            await anyio.sleep(self._provider.cancel_grace_s)
        agent.hang_up()

    async def _converse(self, agent: AgentConnection) -> SubagentResult:
        try:
            with anyio.fail_after(self._provider.start_limit_s):
                session_id = await self._open_session(agent)
            if self._stopping.is_set():
                return self._ending("aborted")
            return await self._prompt(agent, session_id)
        except TimeoutError:
            late = f"it was not ready for a prompt in {self._provider.start_limit_s:g} s"
            return self._ending("error", ": ".join([late, *agent.last_words[-1:]]))
        except RemoteError as error:
            return self._ending("error", error.message)
        except AgentGone as gone:
            return self._ending("error", ": ".join([str(gone), *agent.last_words[-1:]]))

    async def _open_session(self, agent: AgentConnection) -> str:
        await agent.initialize("acp-agent")
        params = {"cwd": self._session_cwd, "mcpServers": []}
        session_id = (await agent.request("session/new", params)).get("sessionId")
        if not isinstance(session_id, str):
            raise RemoteError(0, "it opened a session without an id")
        return session_id

    async def _prompt(self, agent: AgentConnection, session_id: str) -> SubagentResult:
        prompt = [{"type": "text", "text": self._text}]
        self._session_id = session_id
        try:
            answer = await agent.request(
                "session/prompt", {"sessionId": session_id, "prompt": prompt}
            )
        finally:
            self._session_id = None
        self._usage = lenient(answer.get("usage"), SpentTokens)
        stop_reason = answer.get("stopReason")
        reason = _REASONS.get(stop_reason) if isinstance(stop_reason, str) else None
        if reason is None:
            return self._ending("error", f"it stopped without an end: {stop_reason}")
        return self._ending(reason)

    def _ending(self, reason: Reason, problem: str = "") -> SubagentResult:
        if self._stopping.is_set() and reason != "completed":
            return SubagentResult("aborted", str(self._output), spent=self._spent())
        if problem:
            printable = "".join(filter(str.isprintable, problem))[:MAX_REASON_CHARS]
            problem = f"The subagent {self._provider.name!r} failed: {printable}"
        return SubagentResult(reason, str(self._output), problem, self._spent())

    def _spent(self) -> Spent:
        return Spent(self._usage.counted, self._cost.amount, self._cost.currency)

    def _show(self, update: Update) -> None:
        """Show a line for a call, and another one if it fails."""
        if update.title:
            self._show_line("".join(filter(str.isprintable, update.title))[:MAX_REASON_CHARS])
        if update.status == "failed":
            self._show_line("  failed")

    # --- what the agent says --------------------------------------------------------

    def _collect(self, params: bytes | None) -> None:
        try:
            update = update_of(params)
            match update.session_update:
                case "agent_message_chunk":
                    self._output.add(msgspec.json.decode(update.content, type=TextSaid).text)
                case "tool_call" | "tool_call_update":
                    self._questions.note(CallShown(update.tool_call_id, update.title, update.kind))
                    self._show(update)
                case "usage_update":
                    self._cost = lenient(update.cost, Cost)
                case _:
                    pass
        except msgspec.MsgspecError:
            log.debug("remote_update_malformed", run_id=self.id)


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that do not look like credentials."""
    return {name: value for name, value in environ.items() if not _CREDENTIAL.search(name)}
