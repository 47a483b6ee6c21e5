"""The adapter for every model behind an `Endpoint`: one call, from request to last event.

What differs from provider to provider, as data, is a `Dialect`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final, Protocol

import anyio.lowlevel
from msgspec import structs

from agent_core.cancellation import AbortSignal, TurnAborted
from agent_core.errors import ModelError
from agent_core.logs import get_logger
from agent_core.models.adapter import Finish, FinishReason, ModelEvent, ModelInfo, ModelRequest
from agent_core.models.endpoint import END, Endpoint, RequestRefused
from agent_core.models.failures import Names, StreamError
from agent_core.models.sse import EventStream

__all__ = ["Dialect", "EndpointModel", "Reader", "StreamError"]

# Behind the finish reason only the token count is still to come, and some endpoints send none.
TRAILING_LIMIT_S: Final = 2.0
# One read can bring hundreds of chunks, which are then handed out without giving way.
CHUNKS_PER_CHECKPOINT: Final = 8
# A dialect learns a handful of things about an endpoint at most, each from one refusal.
MAX_AMENDMENTS: Final = 4

log = get_logger(__name__)


class Reader(Protocol):
    """Turns one answer's decoded chunks into events.

    Attributes:
        has_ended: Whether all that matters has come; only counts of tokens may follow.
    """

    has_ended: bool

    def read(self, chunk: object) -> Iterable[ModelEvent]:
        """Return what one chunk says.

        Raises:
            StreamError: It says that the call failed.
            msgspec.ValidationError: It is no chunk of this dialect.
        """
        ...

    def finish(self) -> FinishReason | None:
        """Return how the answer ended; `None` if it broke off."""
        ...


class Dialect(Protocol):
    """How requests and answers look with one kind of provider, for one model.

    Attributes:
        name: What people call it.
        path: Where requests go, behind the base URL.
    """

    name: str
    path: str

    def body(self, request: ModelRequest) -> dict[str, Any]:
        """Return a request as JSON, without sampling."""
        ...

    def reader(self) -> Reader:
        """Return what reads one answer."""
        ...

    def amend(self, refusal: str, tried: set[str], body: Mapping[str, Any]) -> bool:
        """Learn from a request that was refused.

        Args:
            refusal: The endpoint's words.
            tried: What was learnt from this request before; to be added to.
            body: What was refused; others may have been learnt from meanwhile.

        Returns:
            Whether to send it again: its body is another one now.
        """
        ...


class EndpointModel:
    """A `ModelAdapter` for one model of one endpoint.

    Args:
        info: What is known of it. It learns its context's size from the endpoint's errors.
        id: Its name at the provider.
        endpoint: Where it is; `aclose` closes that.
        dialect: How to speak with it.
        sampling: Sent with every request; what a request itself says outranks it.
        max_output_tokens: Bounds the answers to requests that do not say how long one may be.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        id: str,
        endpoint: Endpoint,
        dialect: Dialect,
        sampling: Mapping[str, Any] | None = None,
        max_output_tokens: int | None = None,
    ) -> None:
        self._info = info
        self._names = Names(info.name, id, dialect.name)
        self._endpoint = endpoint
        self._dialect = dialect
        self._sampling = dict(sampling or {})
        self._max_output_tokens = max_output_tokens

    @property
    def info(self) -> ModelInfo:
        """What is known of the model by now."""
        return self._info

    async def aclose(self) -> None:
        """Close the endpoint's pooled connections. Called when no stream is open."""
        await self._endpoint.aclose()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model; see `ModelAdapter.stream`. Never retries a failed call.

        Raises:
            ModelError: ``NOT_CONFIGURED`` without a key or with an SDK that cannot be loaded;
                otherwise what the endpoint, or the way to it, did.
            TurnAborted: The signal fired; the connection is closed.
        """
        if request.max_output_tokens is None:
            request = replace(request, max_output_tokens=self._max_output_tokens)
        signal, reader, n_chunks = request.signal, self._dialect.reader(), 0
        try:
            # The response is closed before the last event is yielded, and on every other way out.
            async with AsyncExitStack() as stack:
                stream = await self._open(request, stack)
                while (chunk := await self._next(stream, signal, reader)) is not END:
                    for event in reader.read(chunk):
                        yield event
                    if n_chunks % CHUNKS_PER_CHECKPOINT == 0:  # behind the first one, too
                        await anyio.lowlevel.checkpoint()
                    n_chunks += 1
        except TurnAborted:
            raise
        except Exception as exc:
            signal.raise_if_aborted()
            raise self._learnt(exc) from None
        reason = reader.finish()
        if reason is None:
            raise self._learnt(self._endpoint.broke_off(stream, self._names))
        yield Finish(reason)

    async def _open(self, request: ModelRequest, stack: AsyncExitStack) -> EventStream:
        """Send the request; again if the endpoint refuses what it need not be sent."""
        tried: set[str] = set()
        n_left = MAX_AMENDMENTS
        while True:
            body = self._dialect.body(request) | self._sampling | dict(request.sampling)
            try:
                return await self._endpoint.open(
                    self._dialect.path, body, request.signal, stack, self._names
                )
            except RequestRefused as refused:
                if n_left == 0 or not self._dialect.amend(refused.detail, tried, body):
                    raise refused.error from None
                n_left -= 1

    async def _next(self, stream: EventStream, signal: AbortSignal, reader: Reader) -> object:
        """Return the next chunk, or `END`. What fails behind the finish reason is the end too."""
        limit_s = self._endpoint.idle_limit_s
        if not reader.has_ended:
            return await self._endpoint.next(stream, signal, limit_s)
        try:
            limit_s = min(limit_s or TRAILING_LIMIT_S, TRAILING_LIMIT_S)
            return await self._endpoint.next(stream, signal, limit_s)
        except TurnAborted:
            raise
        except Exception as exc:
            log.info("model_stream_broke_after_finish", error=type(exc).__name__)
            return END

    def _learnt(self, exc: Exception) -> ModelError:
        error = self._endpoint.error(exc, self._names)
        if error.context_tokens is not None:
            self._info = structs.replace(self._info, context_tokens=error.context_tokens)
        return error
