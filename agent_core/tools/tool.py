"""The seam to a tool: typed arguments and a context in, an output for the model and people out.

A tool is a leaf. It gets the turn's own signal in its context and passes it on to what it calls;
it is never cancelled from outside, and what it started has ended when it returns. To add a tool,
write one module with one `Tool` subclass and name it in `agent_core.tools.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Struct

from agent_core.cancellation import AbortSignal
from agent_core.content import Block, Location, ToolContent, ToolKind
from agent_core.errors import ToolError
from agent_core.forms import Form
from agent_core.models.adapter import ToolSpec
from agent_core.questions import Reply, Visit
from agent_core.tools.roots import Roots

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = [
    "Ask",
    "CommandAborted",
    "CommandResult",
    "Commands",
    "Effect",
    "Files",
    "Isolation",
    "Progress",
    "Report",
    "Tool",
    "ToolContext",
    "ToolOutput",
    "ToolView",
]

Effect = Literal["read", "edit", "execute", "none"]
"""What a call may do to the world: permission modes decide by it. ``none`` touches nothing."""


class ToolView(Struct, frozen=True):
    """How a call is announced to people before it runs."""

    title: str
    locations: tuple[Location, ...] = ()


class ToolOutput(Struct, frozen=True):
    """What a finished call gives.

    `output` is what the model reads. `content` is what people see; empty means `output` as text.
    `is_error` marks a failure that is an answer, such as a command with a non-zero exit code.
    `context` is what a ``tools/post-execute`` listener tells the model besides.
    """

    output: str
    content: tuple[ToolContent, ...] = ()
    is_error: bool = False
    code: str | None = None
    locations: tuple[Location, ...] | None = None
    context: tuple[Block, ...] = ()


Isolation = Literal["none", "process"]

Progress = Callable[[tuple[ToolContent, ...]], None]
"""Shows what a running tool has so far; each call replaces the content before."""


class Files(Protocol):
    """Whole text files, through the local disk or an editor's buffers.

    Paths are absolute and were checked against the session's roots by the caller.
    """

    async def read(self, path: str, signal: AbortSignal) -> str:
        """Return the file's text with its line endings as they are.

        Raises:
            ToolError: Missing, not a regular file, too large, or not UTF-8 text.
            TurnAborted: The signal fired.
        """
        ...

    async def write(self, path: str, text: str, signal: AbortSignal) -> None:
        """Replace or create the file and its parent directories; whole or not at all.

        Raises:
            ToolError: It cannot be written.
            TurnAborted: The signal fired before anything was written, or while an editor was
                asked to, which may still do it.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What became of a command.

    `exit_code` is negative for a signal, as in `subprocess`, and `None` where nobody said it.
    `content` is what people see; empty means the output as text.
    """

    exit_code: int | None
    output: str
    is_truncated: bool = False
    ended_leftovers: int = 0
    content: tuple[ToolContent, ...] = ()


class Commands(Protocol):
    """Shell commands, run locally or in an editor's terminal."""

    async def run(
        self,
        command: str,
        *,
        cwd: str,
        signal: AbortSignal,
        timeout_s: float | None,
        show: Progress,
    ) -> CommandResult:
        """Run `command` to its end.

        When this returns or raises, no process that the command started is left; an editor's
        terminal is killed and let go of, and what it left of the command is the editor's doing.

        Args:
            command: For ``/bin/sh -c``.
            cwd: Absolute.
            signal: Ends the command: TERM to all its processes, after 2 s KILL.
            timeout_s: Ends the command likewise after so many seconds; `None` for no limit.
            show: Called now and then with the output so far, or once with the terminal.

        Raises:
            ToolError: It could not be started, or ran out of time (code ``TOOL_TIMEOUT``).
            CommandAborted: The signal fired; carries the output so far.
        """
        ...


class Ask(Protocol):
    """The person in front of the client. Tools go through `agent_core.questions`, which checks."""

    async def form(self, form: Form, signal: AbortSignal, *, call_id: str | None = None) -> Reply:
        """Ask for the fields of `form`, without a limit of time.

        Args:
            form: What to ask.
            signal: Withdraws the question; a later answer is dropped.
            call_id: The tool call that asks.

        Returns:
            What the person said, not held against the form.

        Raises:
            ToolError: Nobody saw the question (code ``NOBODY_TO_ASK``), or no answer came.
            TurnAborted: The signal fired.
        """
        ...

    async def url(
        self, message: str, url: str, signal: AbortSignal, *, call_id: str | None = None
    ) -> Visit:
        """Ask the person to open `url`, and say what for. Arguments and errors: as `form`."""
        ...


class Report(Protocol):
    """What `Tool.work` has of its call, in the worker process."""

    @property
    def aborted(self) -> bool:
        """Whether the call should stop. Who looks ends in peace; who does not is ended."""
        ...

    def show(self, text: str) -> None:
        """Show `text` as what there is so far; each replaces the one before."""
        ...


class CommandAborted(Exception):
    """The signal ended a command. `result` holds what it printed until then."""

    def __init__(self, result: CommandResult) -> None:
        super().__init__("the command was ended by an abort")
        self.result = result


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may use. Valid only while its `run` is running.

    `signal` is the turn's own. `progress` shows what there is so far.
    """

    agent: Agent
    call_id: str
    signal: AbortSignal
    roots: Roots
    files: Files
    commands: Commands
    progress: Progress


class Tool:
    """Base of all tools: subclass it, set the class attributes, write `view` and `run`.

    Attributes:
        name: What the model calls.
        description: For the model.
        Args: A Struct with ``forbid_unknown_fields``; its JSON schema is the tool's.
        kind: For the icon people see.
        effect: For the permission policy.
        is_parallel: Whether calls may overlap with other such calls; only for pure reads.
        isolation: ``none``: `run` runs on the event loop and cooperates with its signal.
            ``process``: `work` runs in a worker process, which can be ended whatever it does.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    Args: ClassVar[type[Struct]]
    kind: ClassVar[ToolKind] = "other"
    effect: ClassVar[Effect] = "execute"
    is_parallel: ClassVar[bool] = False
    isolation: ClassVar[Isolation] = "none"

    def spec(self) -> ToolSpec:
        """Return the tool as models are told of it."""
        return ToolSpec(self.name, self.description, _schema(self.Args))

    def parse(self, arguments: str) -> Any:
        """Decode the model's argument text.

        Raises:
            ToolError: It is not the JSON object this tool takes (code ``BAD_ARGUMENTS``); the
                message tells the model what is wrong.
        """
        try:
            return msgspec.json.decode(arguments or "{}", type=self.Args)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise ToolError(
                f"the arguments of {self.name} are wrong: {exc}", code="BAD_ARGUMENTS"
            ) from None

    def view(self, args: Any, roots: Roots) -> ToolView:
        """Say how the call is announced. Must not touch anything."""
        return ToolView(self.name)

    def remember_key(self, args: Any) -> tuple[str, str]:
        """Return what an "always" answer covers: a key for the log, and words for people."""
        return self.name, f"{self.name} calls"

    async def preview(self, args: Any, context: ToolContext) -> tuple[ToolContent, ...]:
        """Return what a person should see before allowing the call. Must not change anything.

        Cancellation: through ``context.signal``.

        Raises:
            ToolError: The call would fail anyway; nobody is asked then.
        """
        return ()

    async def run(self, args: Any, context: ToolContext) -> ToolOutput:
        """Do it.

        Cancellation: through ``context.signal`` only. Raise `TurnAborted` (or let it pass) when it
        fired; return normally if the work was done anyway.

        Raises:
            ToolError: It failed; the model is told.
        """
        if self.isolation == "process":
            from agent_core.tools.worker import run_in_worker

            return await run_in_worker(self, args, context)
        raise NotImplementedError

    def work(self, args: Any, report: Report) -> ToolOutput:
        """Do it, in a worker process: blocking code, C code, anything that has no await.

        The class must be importable by its module's name and need no argument to be made. `args`
        arrives, and the output leaves, as JSON.

        Raises:
            ToolError: It failed; the model is told.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Release what is kept between calls. Called once, when no call is running."""
        if self.isolation == "process":
            from agent_core.tools.worker import end_workers

            await end_workers(self)


@cache  # half a millisecond each, and every model call sends them all
def _schema(args: type[Struct]) -> Mapping[str, Any]:
    """Return the JSON schema of `args` as one object without references to itself."""
    schema = msgspec.json.schema(args)
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inline(definitions[value["$ref"].rsplit("/", 1)[1]])
            return {key: inline(item) for key, item in value.items()}
        return [inline(item) for item in value] if isinstance(value, list) else value

    resolved = inline(schema)
    resolved.pop("title", None)
    return dict(resolved)
