"""Reach OpenAI, and every endpoint that speaks its chat completions, through the official SDK.

The SDK carries the HTTP, the pool and the event stream; its generated types are left out. Checking
a history of 600 messages against them takes 230 ms with the event loop held up, building one typed
chunk 200 µs (measured; this module takes 13 ms and 70 µs), and they refuse much that compatible
endpoints send. So requests go through the SDK's documented `post`, and chunks are read into
lenient Structs.

Every await that can take long is one leaf await under the turn's signal and an idle limit. The
limit counts events, not bytes: a stalled endpoint may well send keep-alive comments for ever.

What is sent and read, as data, is in `agent_core.models.openai_wire`.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from agent_core.cancellation import AbortSignal, TurnAborted
from agent_core.errors import ModelError
from agent_core.logs import get_logger
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelRequest,
)
from agent_core.models.openai_wire import Answer, to_wire

if TYPE_CHECKING:
    import ssl
    from types import ModuleType

    from openai import AsyncOpenAI, AsyncStream

__all__ = ["OpenAIModel", "prewarm"]

CONNECT_LIMIT_S: Final = 10.0
# Behind the finish reason only the token count is still to come, and some endpoints send none.
TRAILING_LIMIT_S: Final = 2.0
MAX_DETAIL_CHARS: Final = 300
# One read can bring hundreds of chunks, which the SDK then hands out without giving way.
CHUNKS_PER_CHECKPOINT: Final = 8
_DEFAULT_URL: Final = "https://api.openai.com/v1"
_CONFIG_FILE: Final = "~/.config/acp-agent/config.toml"
_END: Final = object()
_T = TypeVar("_T")

_KIND_BY_STATUS: Final = {
    401: "AUTH",
    402: "QUOTA",
    403: "AUTH",
    404: "MODEL_NOT_FOUND",
    408: "TIMEOUT",
    413: "CONTEXT_TOO_LONG",
    429: "RATE_LIMIT",
    529: "OVERLOADED",
}
_KIND_BY_NAME: Final = {  # the provider's own `code` or `type`; outranks the status
    "context_length_exceeded": "CONTEXT_TOO_LONG",
    "exceed_context_size_error": "CONTEXT_TOO_LONG",
    "insufficient_quota": "QUOTA",
    "model_not_found": "MODEL_NOT_FOUND",
    "overloaded_error": "OVERLOADED",
    "rate_limit_exceeded": "RATE_LIMIT",
}
_TOO_LONG: Final = re.compile(r"context (length|window|size)|maximum context|prompt is too long")
_WORDS: Final = {
    "AUTH": f"OPENAI_API_KEY was refused by {{host}}; change it in the environment or"
    f" in {_CONFIG_FILE}",
    "BAD_REQUEST": "{host} refused the request",
    "CONTEXT_TOO_LONG": "the conversation is too long for {model}",
    "MODEL_NOT_FOUND": "{host} has no model {model}, or its base URL is wrong",
    "OVERLOADED": "{host} is overloaded",
    "PROTOCOL": "{host} sent something that is no stream of chat completions",
    "QUOTA": "the account at {host} has no quota left; look at its plan and billing",
    "RATE_LIMIT": "{host} limits the rate of calls",
    "SERVER": "{host} failed",
    "TIMEOUT": "{host} did not answer in time",
    "TRANSPORT": "the connection to {host} failed",
}
_SECRET: Final = re.compile(r"\bsk-[\w*.-]+")

log = get_logger(__name__)


# --- the SDK, loaded aside ------------------------------------------------------------------

_loading: Future[tuple[ModuleType, ssl.SSLContext]] | None = None


def prewarm(when_loaded: Callable[[], object] | None = None) -> None:
    """Begin to load the SDK in a daemon thread, unless that has begun. Returns at once.

    Args:
        when_loaded: Called in that thread when it is loaded, or cannot be.
    """
    loading = _load()
    if when_loaded is not None:
        loading.add_done_callback(lambda _loaded: when_loaded())


def _load() -> Future[tuple[ModuleType, ssl.SSLContext]]:
    global _loading
    if _loading is None:
        _loading = Future()
        _loading.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        threading.Thread(
            target=_import, args=(_loading,), name="openai-import", daemon=True
        ).start()
    return _loading


def _import(loaded: Future[tuple[ModuleType, ssl.SSLContext]]) -> None:
    try:
        import httpx2
        import openai

        # The certificates take 30 ms, and the loop is not to wait for them either.
        loaded.set_result((openai, httpx2.create_ssl_context()))
    except Exception as exc:
        loaded.set_exception(exc)


# --- the adapter ----------------------------------------------------------------------------


class OpenAIModel:
    """A `ModelAdapter` for one model of one endpoint, with one pool of connections.

    It learns what the endpoint is particular about: whether it counts tokens in a stream, and
    whether it wants the thinking back that belongs to tool calls.

    Args:
        name: The model as the endpoint knows it.
        api_key: `None` is fine for an endpoint with a `base_url`; local ones need none.
        base_url: Where ``/chat/completions`` is; `None` for OpenAI itself.
        idle_limit_s: Seconds the endpoint may say nothing, before its headers too; 0 for no limit.
        headers: Sent with every request.
    """

    def __init__(
        self,
        name: str,
        *,
        api_key: str | None,
        base_url: str | None = None,
        idle_limit_s: float = 300.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._api_key = api_key
        self._base_url = base_url
        self._idle_limit_s = idle_limit_s or None
        self._headers = dict(headers or {})
        # Never fails, unlike a parser: a URL that is none shows when the model is called.
        self._host = re.split(r"[/?#]", (base_url or _DEFAULT_URL).partition("://")[2])[0]
        self._host = self._host.rpartition("@")[2] or str(base_url)
        self._client: AsyncOpenAI | None = None
        self._counts_tokens = True
        self._wants_reasoning = False

    @property
    def model(self) -> str:
        """The model's name as people write it."""
        return f"openai:{self._name}"

    async def aclose(self) -> None:
        """Close pooled connections. Called once, when no stream is open."""
        if self._client is not None:
            await self._client.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model; see `ModelAdapter.stream`. Never retries a failed call.

        Raises:
            ModelError: ``NOT_CONFIGURED`` without a key or with an SDK that cannot be loaded;
                otherwise what the endpoint, or the way to it, did.
            TurnAborted: The signal fired; the connection is closed.
        """
        client = await self._connected(request.signal)
        answer = Answer()
        n_chunks = 0
        try:
            # The response is closed before the last event is yielded, and on every other way out.
            async with AsyncExitStack() as stack:
                stream = await self._open(client, request, stack)
                while (chunk := await self._next(stream, request.signal, answer)) is not _END:
                    for event in answer.read(chunk):
                        yield event
                    self._wants_reasoning |= answer.returns_reasoning
                    n_chunks += 1
                    if n_chunks % CHUNKS_PER_CHECKPOINT == 0:
                        await anyio.lowlevel.checkpoint()
                media_type = stream.response.headers.get("content-type", "text/event-stream")
        except (ModelError, TurnAborted):
            raise
        except Exception as exc:
            request.signal.raise_if_aborted()
            raise self._error(exc) from None
        reason = answer.finish()
        if reason is None:
            is_stream = media_type.startswith("text/event-stream")
            raise self._model_error("TRANSPORT" if is_stream else "PROTOCOL")
        yield Finish(reason)

    async def _connected(self, signal: AbortSignal) -> AsyncOpenAI:
        if self._client is not None:
            return self._client
        if self._api_key is None and self._base_url is None:
            raise ModelError(
                f"no key for {self.model}: set OPENAI_API_KEY, or api_key in {_CONFIG_FILE}",
                code="NOT_CONFIGURED",
            )
        try:
            sdk, certificates = await _leaf(signal, None, lambda: asyncio.wrap_future(_load()))
            if self._client is None:
                self._client = self._new_client(sdk, certificates)
        except TurnAborted:
            raise
        except Exception as exc:
            log.warning("openai_client_failed", error=type(exc).__name__)
            raise ModelError(
                f"the client for {self.model} cannot be set up: is the openai package installed,"
                f" and is {self._host!r} a host?",
                code="NOT_CONFIGURED",
            ) from None
        return self._client

    def _new_client(self, sdk: ModuleType, certificates: ssl.SSLContext) -> AsyncOpenAI:
        client: AsyncOpenAI = sdk.AsyncOpenAI(
            api_key=self._api_key or "none",
            base_url=self._base_url or _DEFAULT_URL,
            default_headers=self._headers,
            max_retries=0,
            timeout=sdk.Timeout(None, connect=CONNECT_LIMIT_S),
            http_client=sdk.DefaultAsyncHttpxClient(verify=certificates),
        )
        return client

    async def _open(
        self, client: AsyncOpenAI, request: ModelRequest, stack: AsyncExitStack
    ) -> AsyncStream[object]:
        """Send the request; once more if the endpoint refuses what it need not be sent."""
        from openai import AsyncStream, BadRequestError

        async def post() -> AsyncStream[object]:
            stream = await client.post(
                "/chat/completions",
                body=self._body(request),
                cast_to=object,
                stream=True,
                stream_cls=AsyncStream[object],
            )
            # Entered before anything can intervene: from here on nothing can leave it open.
            return await stack.enter_async_context(stream)

        has_flipped = False
        while True:
            counts_tokens, wants_reasoning = self._counts_tokens, self._wants_reasoning
            try:
                return await _leaf(request.signal, self._idle_limit_s, post)
            except BadRequestError as exc:
                refusal = str(exc.body)
                if counts_tokens and "stream_options" in refusal:
                    self._counts_tokens = False
                elif "reasoning_content" in refusal and not has_flipped:
                    self._wants_reasoning = not wants_reasoning
                    has_flipped = True
                else:
                    raise

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        messages = [to_wire(message, self._wants_reasoning) for message in request.messages]
        if request.system:
            messages.insert(0, {"role": "system", "content": request.system})
        is_ours = request.model == self.model
        body: dict[str, Any] = {
            "model": self._name if is_ours else request.model.removeprefix("openai:"),
            "messages": [message for message in messages if message is not None],
            "stream": True,
        }
        if self._counts_tokens:
            body["stream_options"] = {"include_usage": True}
        if request.tools:
            body["tools"] = [
                {"type": "function", "function": msgspec.to_builtins(tool)}
                for tool in request.tools
            ]
        return body | dict(request.sampling)

    async def _next(
        self, stream: AsyncStream[object], signal: AbortSignal, answer: Answer
    ) -> object:
        """Return the next chunk, or `_END`. What fails behind the finish reason is the end too."""
        limit_s = self._idle_limit_s
        if answer.reason is None:
            return await _leaf(signal, limit_s, lambda: anext(stream, _END))
        try:
            limit_s = min(limit_s or TRAILING_LIMIT_S, TRAILING_LIMIT_S)
            return await _leaf(signal, limit_s, lambda: anext(stream, _END))
        except TurnAborted:
            raise
        except Exception as exc:
            log.info("model_stream_broke_after_finish", error=type(exc).__name__)
            return _END

    # --- failures: every foreign exception becomes one of our codes -------------------------

    def _error(self, exc: Exception) -> ModelError:
        import openai

        if isinstance(exc, TimeoutError | openai.APITimeoutError):
            return self._model_error("TIMEOUT")
        if isinstance(exc, openai.APIStatusError):
            retry_after_s = _retry_after_s(exc.response.headers)
            return self._reported(exc, exc.status_code, retry_after_s)
        if isinstance(exc, openai.APIConnectionError):
            return self._model_error("TRANSPORT")
        if isinstance(exc, openai.APIError):  # an error event in the stream
            code = exc.code or ""
            return self._reported(exc, int(code) if code.isdecimal() else 500)
        # Left over: neither JSON nor UTF-8, JSON of another shape, or what nobody thought of.
        log.info("model_call_broke", model=self.model, error=type(exc).__name__)
        return self._model_error("PROTOCOL")

    def _reported(self, exc: Any, status: int, retry_after_s: float | None = None) -> ModelError:
        """Return what the endpoint itself reported, in its own words as far as they are safe."""
        detail = self._detail(exc.body)
        kind = _KIND_BY_NAME.get(str(exc.code)) or _KIND_BY_NAME.get(str(exc.type))
        if kind is None:
            kind = _KIND_BY_STATUS.get(status, "SERVER" if status >= 500 else "BAD_REQUEST")
        if kind == "BAD_REQUEST" and _TOO_LONG.search(detail):
            kind = "CONTEXT_TOO_LONG"
        if status == 401:
            detail = ""  # such messages quote the key
        return self._model_error(kind, detail, retry_after_s)

    def _model_error(
        self, kind: str, detail: str = "", retry_after_s: float | None = None
    ) -> ModelError:
        message = _WORDS[kind].format(host=self._host, model=self._name)
        code = "BAD_REQUEST" if kind == "QUOTA" else kind
        message = f"{message}: {detail}" if detail else message
        return ModelError(message, code=code, retry_after_s=retry_after_s)

    def _detail(self, body: object) -> str:
        if isinstance(body, Mapping):
            body = body.get("message") or body.get("detail")
        if not isinstance(body, str) or "<html" in body.lower():
            return ""
        for secret in (self._api_key, *self._headers.values()):
            if secret and len(secret) >= 8:  # shorter ones are placeholders
                body = body.replace(secret, "***")
        return " ".join(_SECRET.sub("***", body).split())[:MAX_DETAIL_CHARS]


async def _leaf(
    signal: AbortSignal, limit_s: float | None, call: Callable[[], Awaitable[_T]]
) -> _T:
    """Await ``call()``; give it up when the signal fires or `limit_s` seconds have passed.

    Raises:
        TurnAborted: The signal fired.
        TimeoutError: The time ran out.
    """
    async with signal.scope():
        with anyio.fail_after(limit_s):
            result = await call()
    return result


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read a Retry-After header: seconds, or an HTTP date.

    Source: RFC 9110, section 10.2.3.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    zoned = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (zoned - datetime.now(UTC)).total_seconds())
