"""A subagent in a process of its own: any ACP agent, started for one prompt and ended after it.

The request's signal is the one way to stop it. An abort becomes ``session/cancel`` as the protocol
has it: with the session's id and without a word about who asked. The agent may then answer for a
short time, as whatever it says is worth keeping; after that its process is ended, and only then
does the run have a result. So a remote agent that dies, floods, talks nonsense, is silent or
ignores the cancel is a failed run, and nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import anyio
import msgspec
from msgspec import Meta, Raw, Struct

from acp_server.client import AgentConnection, AgentGone, open_agent
from acp_server.config_tables import Permissions
from acp_server.errors import RemoteError
from acp_server.peer import Method
from acp_server.remote_questions import CallShown, Question, RemoteQuestions
from agent_core.content import Usage, text_of
from agent_core.errors import AgentError
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
    from agent_core.runtime import AgentRuntime

__all__ = ["RemoteProvider", "without_credentials"]

START_LIMIT_S: Final = 30.0
CANCEL_GRACE_S: Final = 2.0
EXIT_GRACE_S: Final = 2.0
MAX_OUTPUT_BYTES: Final = 1024 * 1024
"""Of what an agent says the end is kept: its conclusion stands there."""
MAX_REASON_CHARS: Final = 200

_CREDENTIAL: Final = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_REASONS: Final[dict[object, Reason]] = {
    "end_turn": "completed",
    "max_tokens": "max_tokens",
    "max_turn_requests": "max_steps",
    "refusal": "refusal",
    "cancelled": "aborted",
}

_T = TypeVar("_T")
_Count = Annotated[int, Meta(ge=0)]

log = get_logger(__name__)


class RemoteProvider:
    """Runs each request by another ACP agent: a fresh process, one session, one prompt.

    For programs that build on the agent: ``runtime.subagents.register(RemoteProvider(...))``.
    The agent is told the prompt, as text, and the parent's directory, and inherits nothing else;
    variables that look like credentials are withheld from its environment.
    """

    def __init__(
        self,
        runtime: AgentRuntime,
        name: str,
        command: Sequence[str],
        *,
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
            cwd: Where its process starts, an absolute path; `None` for the parent's directory,
                which is the session's in any case.
            environ: Variables it gets besides those it inherits, credentials too.
            permissions: Who answers its questions: the parent's person, under its permission mode,
                or nobody and always in the same way; in read-only mode nothing but reads is
                allowed. It offers no files and no terminals to the agent, which has its own.
            start_limit_s: Seconds it has until it can be prompted.
            cancel_grace_s: Seconds it has to answer the prompt after a cancel.
            exit_grace_s: Seconds it has to leave at the end of its input.
        """
        self._runtime = runtime
        self._name = name
        self.command = tuple(command)
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
        """Start the process; all that can go wrong afterwards is the run's result.

        Cancellation: through ``request.signal``. Concurrency: any number.

        Raises:
            TurnAborted: The signal fired; nothing is left.
            AgentError: The process could not be started, or the runtime is being left.
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
            raise AgentError(f"The subagent {self._name!r} could not be started: {run.problem}.")
        return run


class _RemoteRun:
    """One agent process at work on its one prompt. `drive` owns it, in one task."""

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
        self._usage, self._cost = _Usage(), _Cost()
        self._session_cwd = request.parent.roots.cwd
        self._text = text_of(request.prompt)
        self._stopping = anyio.Event()
        self._ended = anyio.Event()
        self._agent: AgentConnection | None = None
        self._session_id: str | None = None  # while a prompt is under way in it
        self._output = _Output()
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
        except AgentGone as gone:  # it could not be started
            self.problem = str(gone)
        finally:
            remove()
            self.begun.set()
            self._ended.set()

    async def _use_agent(self) -> None:
        provider = self._provider
        async with open_agent(
            provider.command,
            cwd=provider.cwd or self._session_cwd,
            methods={"session/request_permission": Method(Question, self._questions.decide)},
            notifications={"session/update": self._collect},
            environ=without_credentials(os.environ) | provider.environ,
            grace_s=provider.exit_grace_s,
        ) as self._agent:
            self.begun.set()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hang_up_in_time, self._agent)
                result = await self._converse(self._agent)
                self._questions.close()
                tasks.cancel_scope.cancel()
        # Not before the process is gone: a parent that has a result has nothing left to wait for.
        self._result = result
        log.info("remote_subagent_ended", run_id=self.id, reason=result.reason)

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
        self._usage = _read(answer.get("usage"), _Usage)
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

    def _show(self, update: _Update) -> None:
        """Show a line for a call, and another one if it fails."""
        if update.title:
            self._show_line("".join(filter(str.isprintable, update.title))[:MAX_REASON_CHARS])
        if update.status == "failed":
            self._show_line("  failed")

    # --- what the agent says --------------------------------------------------------

    def _collect(self, params: bytes | None) -> None:
        try:
            update = msgspec.json.decode(params or b"{}", type=_UpdateParams).update
            match update.session_update:
                case "agent_message_chunk":
                    self._output.add(msgspec.json.decode(update.content, type=_Text).text)
                case "tool_call" | "tool_call_update":
                    self._questions.note(CallShown(update.tool_call_id, update.title, update.kind))
                    self._show(update)
                case "usage_update":
                    self._cost = _read(update.cost, _Cost)
                case _:
                    pass
        except msgspec.MsgspecError:
            log.debug("remote_update_malformed", run_id=self.id)


def _read(value: object, kind: type[_T]) -> _T:
    """Return what an agent says of its tokens or its cost; nothing, if that makes no sense."""
    try:
        return msgspec.convert(value or {}, kind)
    except msgspec.ValidationError:
        return kind()


class _Output:
    """The end of a text of any length."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._dropped_bytes = 0

    def add(self, text: str) -> None:
        self._kept += text.encode()
        if len(self._kept) > 2 * MAX_OUTPUT_BYTES:  # seldom: each time moves all that is kept
            self._trim()

    def _trim(self) -> None:
        surplus = max(0, len(self._kept) - MAX_OUTPUT_BYTES)
        del self._kept[:surplus]
        self._dropped_bytes += surplus

    def __str__(self) -> str:
        self._trim()
        text = self._kept.decode("utf-8", "ignore")  # the first character may be cut in two
        if not self._dropped_bytes:
            return text
        return f"(the first {self._dropped_bytes} bytes are left out)\n{text}"


class _Text(Struct):
    text: str = ""


class _Update(Struct, rename="camel"):
    session_update: str
    content: Raw = Raw(b"{}")
    tool_call_id: str = ""
    title: str | None = None
    kind: str | None = None
    status: str | None = None
    cost: object = None


class _Usage(Struct, rename="camel"):
    input_tokens: _Count = 0
    output_tokens: _Count = 0
    thought_tokens: _Count | None = None
    cached_read_tokens: _Count | None = None
    cached_write_tokens: _Count | None = None

    @property
    def counted(self) -> Usage:
        return Usage(
            self.input_tokens,
            self.output_tokens,
            self.cached_read_tokens or 0,
            self.thought_tokens or 0,
            self.cached_write_tokens or 0,
        )


class _Cost(Struct):
    amount: Annotated[float, Meta(ge=0)] | None = None
    currency: str | None = None


class _UpdateParams(Struct):
    update: _Update


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that do not look like credentials."""
    return {name: value for name, value in environ.items() if not _CREDENTIAL.search(name)}
