"""One address of a provider, reached through its official SDK, with one pool of connections.

The SDK makes the client and sends the request; its generated types and its decoder are left out.
Checking a history of 600 messages against them takes 230 ms with the event loop held up, building
one typed chunk 200 µs (measured; ours take 13 ms and 50 µs), and they refuse much that compatible
endpoints send. So requests go through the SDKs' documented `post` as bytes, and their response
comes back as it is.

Every await that can take long is one leaf await under the turn's signal and an idle limit. The
limit counts events, not bytes: a stalled endpoint may well send keep-alive comments for ever. Both
SDKs' own retries and time limits are off: retrying and waiting are ours.

What goes out is the request and nothing else: every header is ours, one of `_KEPT`, or HTTP's. The
SDKs would add what they know of this machine, and what they find in its environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agent_core.cancellation import AbortSignal, TurnAborted
from agent_core.errors import ModelError
from agent_core.logs import get_logger
from agent_core.models.failures import Failures, Names, Refusal, StreamError
from agent_core.models.keys import Key
from agent_core.models.sdk import CertificatesUnreadable, Library, load
from agent_core.models.sse import EventStream
from agent_core.text import replace_surrogates

if TYPE_CHECKING:
    import httpx2

__all__ = ["END", "Endpoint", "RequestRefused"]

CONNECT_LIMIT_S: Final = 10.0
KEPT_ALIVE_S: Final = 60.0
"""How long an idle connection is kept: a tool call between two requests may well take as long."""
# Behind the mark that ends a stream only the end of the response is to come, with the same packet.
DRAIN_LIMIT_S: Final = 0.1
MAX_ERROR_BYTES: Final = 2**16
END: Final = object()
"""What `Endpoint.next` returns behind the last event."""
_DONE: Final = b"[DONE]"
_KEPT: Final = frozenset(
    ("accept", "anthropic-version", "authorization", "content-type", "x-api-key")
)

log = get_logger(__name__)


class RequestRefused(Exception):
    """The endpoint understood the request and does not want it so: a status of 400 or 422.

    Attributes:
        detail: Its own words.
        error: What it comes to, if the request cannot be made otherwise.
    """

    def __init__(self, detail: str, error: ModelError) -> None:
        super().__init__(detail)
        self.detail = detail
        self.error = error


class Endpoint:
    """A provider's address. Any number of models share it, and its connections.

    Args:
        provider: Its name in the configuration.
        library: The SDK that reaches it.
        base_url: What the SDK's paths come behind.
        key: What it is shown.
        needs_key: Whether it is of no use without one.
        headers: Sent with every request; they outrank the key's own.
        idle_limit_s: Seconds it may say nothing, before its headers too; 0 for no limit.
    """

    def __init__(
        self,
        provider: str,
        *,
        library: Library,
        base_url: str,
        key: Key,
        needs_key: bool = False,
        headers: Mapping[str, str] | None = None,
        idle_limit_s: float = 300.0,
    ) -> None:
        self.provider = provider
        self.base_url = base_url
        self.idle_limit_s = idle_limit_s or None
        self._library: Library = library
        self._key = key
        self._needs_key = needs_key
        self._headers = dict(headers or {})
        # Never fails, unlike a parser: a URL that is none shows when the model is called.
        host = re.split(r"[/?#]", base_url.partition("://")[2])[0]
        self.host = host.rpartition("@")[2] or base_url
        self._failures = Failures(
            provider,
            url=base_url,
            host=self.host,
            advice=key.advice,
            secrets=lambda: (key.secret, *self._headers.values()),
        )
        self._client: Any = None

    async def aclose(self) -> None:
        """Close pooled connections. Harmless twice; called when no stream is open."""
        if self._client is not None:
            await self._client.close()

    async def open(
        self,
        path: str,
        body: Mapping[str, Any],
        signal: AbortSignal,
        stack: AsyncExitStack,
        names: Names,
    ) -> EventStream:
        """Send a request and return the stream of events that answers it.

        Cancellation: through `signal`. Concurrency: any number of tasks.

        Args:
            path: Behind the base URL.
            body: JSON.
            signal: The turn's.
            stack: Closes the stream. It is entered before anything can intervene.
            names: What messages to people call the model.

        Raises:
            ModelError: ``NO_KEY`` without a key; ``NOT_CONFIGURED`` with a command that gives none,
                or with an SDK that cannot be loaded; ``AUTH`` with a key that is refused.
            RequestRefused: It wants the request otherwise.
            TurnAborted: The signal fired; the connection is closed.
            Exception: Anything else that happens; hand it to `error`.
        """
        if self._needs_key and not self._key.is_given:
            advice = self._key.advice
            raise ModelError(f"no key for {names.model}: {advice}", code="NO_KEY")
        client, sdk = await self._connected(signal, names)
        url = self.base_url.rstrip("/") + path  # whole: the SDK takes longer to put one together
        content = _encoded(body)
        while True:
            is_known = self._key.secret is not None
            key = await self._key.value(signal)
            headers = self._shown(key, sdk.Omit())
            try:
                async with signal.scope(self.idle_limit_s):
                    return await _post(client, url, content, headers, stack)
            except TurnAborted:
                raise
            except Exception as exc:
                error = self._refused(exc, names)
                # A key that a command printed long ago may just have run out.
                if error.code != "AUTH" or not self._key.refuse(key) or not is_known:
                    raise error from None

    def _refused(self, exc: Exception, names: Names) -> ModelError:
        """Return what kept a request from being answered.

        Raises:
            RequestRefused: It was its form.
        """
        error = self.error(exc, names)
        refusal = exc.__cause__ or exc
        is_about_form = isinstance(refusal, Refusal) and refusal.status in (400, 422)
        if is_about_form and error.code == "BAD_REQUEST":
            raise RequestRefused(str(refusal), error) from None
        return error

    async def next(self, stream: EventStream, signal: AbortSignal, limit_s: float | None) -> object:
        """Return the stream's next event, decoded, or `END`.

        Cancellation: through `signal`. Concurrency: one task a stream.

        Raises:
            StreamError: It says that the call failed.
            TurnAborted: The signal fired.
            TimeoutError: `limit_s` seconds brought nothing.
            Exception: Anything else that happens; hand it to `error`.
        """
        data = stream.pop()
        if data is None:
            async with signal.scope(limit_s):
                data = await stream.next()
        else:
            signal.raise_if_aborted()
        if data is None:
            return END
        if data.startswith(_DONE):
            await self._drain(stream, signal)
            return END
        event = _decoded(data)
        if isinstance(event, dict) and event.get("error"):
            raise StreamError(event["error"])
        return event

    async def _drain(self, stream: EventStream, signal: AbortSignal) -> None:
        """Read what is left of a response that is complete, for its connection to be used again."""
        try:
            async with signal.scope(DRAIN_LIMIT_S):
                await stream.drain()
        except TurnAborted:
            raise
        except Exception as exc:
            log.info("model_stream_broke_after_end", error=type(exc).__name__)

    # --- the client --------------------------------------------------------------------------

    def _shown(self, key: str | None, nothing: object) -> dict[str, object]:
        """Return the headers that show the key, or keep the SDK from showing one of its own."""
        shown: dict[str, object] = {"Authorization": nothing, "X-Api-Key": nothing}
        if key is not None:
            key.encode("ascii")  # what it raises otherwise is told like other wrong characters
            if self._library == "anthropic":
                shown["X-Api-Key"] = key
            else:
                shown["Authorization"] = f"Bearer {key}"
        return shown | {"Content-Type": "application/json"}

    async def _connected(self, signal: AbortSignal, names: Names) -> tuple[Any, Any]:
        try:
            sdk, certificates = await load(self._library, signal)
            if self._client is None:
                self._client = self._new_client(sdk, certificates)
        except TurnAborted:
            raise
        except Exception as exc:
            log.warning("model_client_failed", library=self._library, error=type(exc).__name__)
            raise ModelError(self._why_not(exc, names), code="NOT_CONFIGURED") from None
        return self._client, sdk

    def _why_not(self, exc: Exception, names: Names) -> str:
        name = self._library
        if isinstance(exc, CertificatesUnreadable):
            return f"{names.model} cannot be reached: {exc}"
        if isinstance(exc, ModuleNotFoundError) and exc.name == name:
            return f"{names.model} needs the package {name}: pip install {name}"
        if isinstance(exc, ImportError) and "socks" in str(exc).lower():
            return (
                "the environment names a SOCKS proxy, for which a package is missing: "
                "pip install 'httpx2[socks]'"
            )
        return (
            f"the client for {names.model} cannot be set up: is the {name} package whole,"
            f" is {self.host!r} a host, and is the proxy that the environment may name?"
        )

    def _new_client(self, sdk: Any, certificates: Any) -> Any:
        options = {
            "api_key": "none",  # each request has its own, for a command may print another one
            "base_url": self.base_url,
            "max_retries": 0,
            "timeout": sdk.Timeout(None, connect=CONNECT_LIMIT_S),
            "http_client": self._new_http_client(sdk, certificates),
        }
        if self._library == "openai":
            return sdk.AsyncOpenAI(**options)
        return sdk.AsyncAnthropic(**options, open_telemetry=False)

    def _new_http_client(self, sdk: Any, certificates: Any) -> httpx2.AsyncClient:
        import httpx2

        ours = {"connection": "keep-alive", "user-agent": _user_agent()}
        ours |= {name.lower(): value for name, value in self._headers.items()}
        parsed = cache(httpx2.URL)  # they are few

        class Client(sdk.DefaultAsyncHttpxClient):  # type: ignore[misc]
            """The SDK's. Its requests have what they need, and are built in a third of the time."""

            def build_request(
                self, method: str, url: Any, *, headers: Any, timeout: Any, **options: Any
            ) -> httpx2.Request:
                given = headers.items() if isinstance(headers, Mapping) else headers
                kept = {name.lower(): value for name, value in given if name.lower() in _KEPT}
                encodings = {"accept-encoding": self.headers["accept-encoding"]}
                return httpx2.Request(
                    method,
                    parsed(url) if isinstance(url, str) else url,
                    headers=encodings | kept | ours,
                    extensions={"timeout": httpx2.Timeout(timeout).as_dict()},
                    **options,
                )

        return Client(
            verify=certificates,
            event_hooks={"response": [_refuse]},
            limits=httpx2.Limits(keepalive_expiry=KEPT_ALIVE_S),
        )

    # --- failures: every foreign exception becomes one of our codes ----------------------------

    def error(self, exc: Exception, names: Names) -> ModelError:
        """Return what happened as a `ModelError`; what is one already stays as it is."""
        if isinstance(exc, ModelError):
            return exc
        error = self._failures.of(exc, names)
        if error.code == "PROTOCOL":
            log.info("model_call_broke", model=names.model, error=type(exc).__name__)
        return error

    def broke_off(self, stream: EventStream, names: Names) -> ModelError:
        """Return the error of a stream that is over before the answer is."""
        if stream.is_stream:
            return self._failures.error("BROKE_OFF", names)
        return self._failures.of_page(stream.head, names)


async def _post(
    client: Any, url: str, content: bytes, headers: Mapping[str, object], stack: AsyncExitStack
) -> EventStream:
    import httpx2

    response: httpx2.Response = await client.post(
        url, content=content, options={"headers": headers}, cast_to=httpx2.Response, stream=True
    )
    return EventStream(response, stack)


async def _refuse(response: httpx2.Response) -> None:
    """Stop at a response that is no success, before anybody reads or follows it.

    It may have no end, or lead elsewhere and take the key along.
    """
    if response.is_success:
        return
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) >= MAX_ERROR_BYTES:
            break
    raise Refusal(response.status_code, response.headers, body[:MAX_ERROR_BYTES])


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return msgspec.json.encode(replace_surrogates(body))


def _decoded(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        # Half of a surrogate pair is no UTF-8, but some endpoints cut an emoji apart.
        return json.loads(data)


@cache
def _user_agent() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"acp-agent/{version('acp-agent-server')}"
    except PackageNotFoundError:
        return "acp-agent"
