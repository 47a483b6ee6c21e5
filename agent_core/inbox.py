"""What waits for an agent: prompts, each a turn of its own, and steering for the turn that runs."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import anyio

from agent_core.content import Block
from agent_core.errors import AgentError, QueueFull
from agent_core.events import Outcome

__all__ = ["MAX_QUEUED", "Inbox", "Prompt"]

_NO_TRACE: Final[Mapping[str, str]] = MappingProxyType({})
MAX_QUEUED: Final = 64
"""What may wait in one inbox; a person never gets near, a broken client does."""


def check_content(content: tuple[Block, ...], source: str) -> None:
    """Raise `TypeError` unless the log can hold this."""
    if type(source) is not str or not all(isinstance(block, Block) for block in content):
        raise TypeError("content is a tuple of content blocks, and its source has a name")


class Prompt:
    """Work sent to an agent, and what became of it.

    Attributes:
        id: Unique; the log's messages carry it.
        content: What was said.
        source: Who said it: ``user`` or a listener's name.
        trace: The W3C trace it is part of, ``traceparent`` and perhaps ``tracestate``, or nothing.
        outcome: How its turn ended; `None` before, and for ever if no turn took it.
        error: What the log does not know of: it was not taken, or its end could not be saved.
    """

    __slots__ = ("_settled", "content", "error", "id", "outcome", "source", "trace")

    def __init__(
        self, content: tuple[Block, ...], source: str, trace: Mapping[str, str] = _NO_TRACE
    ) -> None:
        """Make a prompt.

        Raises:
            TypeError: Something in it is not what the log can hold.
        """
        check_content(content, source)
        self.id: Final = uuid.uuid4().hex
        self.content: Final = content
        self.source: Final = source
        self.trace: Final = trace
        self.outcome: Outcome | None = None
        self.error: AgentError | None = None
        self._settled = anyio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether `outcome` and `error` are final."""
        return self._settled.is_set()

    async def settled(self) -> Outcome | None:
        """Wait until the turn is over, quiet and flushed.

        Cancellation: safe. Concurrency: any number of tasks.

        Returns:
            Its outcome, or `None` if a cancel or disposal came before any turn took it.

        Raises:
            AgentError: The prompt could not be taken, or its turn's end could not be saved.
        """
        await self._settled.wait()
        if self.error is not None:
            raise self.error
        return self.outcome

    def settle(self, outcome: Outcome | None, error: AgentError | None = None) -> None:
        """Make the result final. For the loop only; the first call counts."""
        if not self._settled.is_set():
            self.outcome, self.error = outcome, error
            self._settled.set()


class Inbox:
    """First in, first out: prompts, steering, context. Synchronous; the loop owns the instance.

    Context asks for nothing, so a cancel leaves it: it joins whatever runs next.
    """

    def __init__(self) -> None:
        self._queued: deque[Prompt] = deque()
        self._steering: deque[Prompt] = deque()
        self._context: list[tuple[tuple[Block, ...], str]] = []

    @property
    def has_queued(self) -> bool:
        """Whether a prompt waits for a turn of its own."""
        return bool(self._queued)

    @property
    def n_queued(self) -> int:
        """How many prompts wait for a turn of their own."""
        return len(self._queued)

    @property
    def has_steering(self) -> bool:
        """Whether steering waits for the turn that runs."""
        return bool(self._steering)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, parked context included."""
        return not (self._queued or self._steering or self._context)

    def send(self, prompt: Prompt) -> None:
        """Queue `prompt` for a turn of its own.

        Raises:
            QueueFull: `MAX_QUEUED` are waiting.
        """
        self._check_room()
        self._queued.append(prompt)

    def steer(self, prompt: Prompt) -> None:
        """Queue `prompt` for the turn that runs.

        Raises:
            QueueFull: `MAX_QUEUED` are waiting.
        """
        self._check_room()
        self._steering.append(prompt)

    def inject(self, content: tuple[Block, ...], source: str) -> None:
        """Park context for the next step there is, of this turn or another.

        Raises:
            QueueFull: `MAX_QUEUED` are waiting.
        """
        self._check_room()
        self._context.append((content, source))

    def take_context(self) -> list[tuple[tuple[Block, ...], str]]:
        """Take all parked context, oldest first, each with its source."""
        taken, self._context = self._context, []
        return taken

    def claim(self) -> Prompt:
        """Take the oldest prompt."""
        return self._queued.popleft()

    def take_steering(self) -> list[Prompt]:
        """Take all steering, oldest first."""
        taken = list(self._steering)
        self._steering.clear()
        return taken

    def requeue_steering(self) -> None:
        """Turn steering that came too late for its turn into prompts, before all others."""
        self._queued.extendleft(reversed(self.take_steering()))

    def remove(self, prompt: Prompt) -> bool:
        """Take `prompt` out; return whether it was there."""
        for queue in (self._queued, self._steering):
            if prompt in queue:
                queue.remove(prompt)
                return True
        return False

    def clear(self) -> list[Prompt]:
        """Take what a cancel removes: all that was to run, in the order in which it was to."""
        taken = [*self.take_steering(), *self._queued]
        self._queued.clear()
        return taken

    def _check_room(self) -> None:
        if len(self._queued) + len(self._steering) + len(self._context) >= MAX_QUEUED:
            raise QueueFull(f"{MAX_QUEUED} prompts are waiting already.")
