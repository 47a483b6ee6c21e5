"""What goes wrong at a provider and on the way there, in words that say what to change.

Providers agree on little: an error has a status, or none in a stream; a code, a type, both, or one
that says less than its message; and a page of a proxy has none of them. The kind of a failure is
looked for in that order: the provider's own names, the status, telling words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from agent_core.errors import ModelError
from agent_core.text import printable

__all__ = ["Failures", "Names", "Refusal", "StreamError", "retry_after_s"]

MAX_DETAIL_CHARS: Final = 300
MAX_CAUSES: Final = 20

# --- kinds of failure, each with the code of its `ModelError` and its words ------------------

_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "AUTH": ("AUTH", "the key for {provider} was refused by {host}; {advice}"),
    "BAD_REQUEST": ("BAD_REQUEST", "{host} refused the request"),
    "BROKE_OFF": ("TRANSPORT", "the connection to {host} failed in the midst of the answer"),
    "CONTEXT_TOO_LONG": ("CONTEXT_TOO_LONG", "the conversation is too long for {model}"),
    "FORBIDDEN": ("AUTH", "{host} does not allow this with the key for {provider}; {advice}"),
    "HEADER": (
        "NOT_CONFIGURED",
        "the key or a header for {provider} has characters that cannot be sent; {advice}",
    ),
    "MODEL_NOT_FOUND": ("MODEL_NOT_FOUND", "{host} has no model {model}"),
    "MOVED": ("NOT_CONFIGURED", "{host} sends calls elsewhere: is its base URL {url} right?"),
    "NO_CONNECTION": ("TRANSPORT", "{host}{proxy} did not take the connection in time"),
    "NO_HOST": ("TRANSPORT", "nobody knows a host {host}{proxy}; is there a network?"),
    "NO_URL": ("NOT_CONFIGURED", "the base URL {url} of {provider} is none"),
    "NOBODY": ("TRANSPORT", "nothing listens at {host}{proxy}"),
    # No network, or a resolver at fault, is "try again" (EAI_AGAIN): that may pass, this does not.
    "UNKNOWN_HOST": (
        "NOT_CONFIGURED",
        "nobody knows a host {host}{proxy}; is its base URL {url} right?",
    ),
    "NO_TLS": (
        "NOT_CONFIGURED",
        "{host} does not speak TLS as it should; is its base URL {url} right?",
    ),
    "OVERLOADED": ("OVERLOADED", "{host} is overloaded"),
    "PROTOCOL": ("PROTOCOL", "{host} sent something that is no stream of {dialect}"),
    "PROXY": ("TRANSPORT", "the proxy before {host} did not let the call through"),
    "QUOTA": (
        "BAD_REQUEST",
        "the account at {host} has no quota left; look at its plan and billing",
    ),
    "RATE_LIMIT": ("RATE_LIMIT", "{host} limits the rate of calls"),
    "SERVER": ("SERVER", "{host} failed"),
    "TIMEOUT": ("TIMEOUT", "{host} did not answer in time"),
    "TRANSPORT": ("TRANSPORT", "the connection to {host} failed"),
    "UNTRUSTED": (
        "NOT_CONFIGURED",
        "the certificate of {host} is not trusted; set SSL_CERT_FILE to its authority's",
    ),
    "WRONG_URL": ("NOT_CONFIGURED", "{host} knows no such call; is its base URL {url} right?"),
}
_BY_STATUS: Final = {
    401: "AUTH",
    402: "QUOTA",
    403: "FORBIDDEN",
    404: "WRONG_URL",
    405: "WRONG_URL",
    407: "PROXY",
    408: "TIMEOUT",
    413: "CONTEXT_TOO_LONG",
    429: "RATE_LIMIT",
    503: "OVERLOADED",
    529: "OVERLOADED",
}
_BY_NAME: Final = {  # the provider's own `code` or `type`
    "authentication_error": "AUTH",
    "billing_error": "QUOTA",
    "context_length_exceeded": "CONTEXT_TOO_LONG",
    "exceed_context_size_error": "CONTEXT_TOO_LONG",
    "insufficient_quota": "QUOTA",
    "invalid_api_key": "AUTH",
    "invalid_prompt": "BAD_REQUEST",
    "model_not_found": "MODEL_NOT_FOUND",
    "overloaded_error": "OVERLOADED",
    "permission_error": "FORBIDDEN",
    "rate_limit_error": "RATE_LIMIT",
    "rate_limit_exceeded": "RATE_LIMIT",
    "request_too_large": "CONTEXT_TOO_LONG",
    "server_error": "SERVER",
    "server_is_overloaded": "OVERLOADED",
    "slow_down": "OVERLOADED",
    "timeout_error": "TIMEOUT",
}
_BY_WORDS: Final = tuple(
    (frozenset(kinds.split()), re.compile(words, re.IGNORECASE), kind)
    for kinds, words, kind in (
        (
            "BAD_REQUEST SERVER",
            r"(exceed|overflow|maximum|too (long|large)|longer than|of only).{0,80}\bcontext\b"
            r"|\bcontext\b.{0,80}(exceed|overflow|maximum|too (long|small)|of only)"
            r"|(prompt|input) is too long|maximum (prompt|model) length|\bn_ctx\b"
            r"|exceeds the maximum number of tokens",
            "CONTEXT_TOO_LONG",
        ),
        ("BAD_REQUEST", r"credit balance is too low|insufficient (balance|credit)", "QUOTA"),
        (
            "BAD_REQUEST",
            r"model\b.{0,80}\b(not (exist|found)|unknown)|not a valid model",
            "MODEL_NOT_FOUND",
        ),
        ("WRONG_URL", r"\bmodels?\b", "MODEL_NOT_FOUND"),
        ("BAD_REQUEST SERVER", r"^(unexpected endpoint|invalid url)\b", "WRONG_URL"),
    )
)
# How much a model holds, never how much it was sent.
_HOLDS: Final = tuple(
    re.compile(words, re.IGNORECASE)
    for words in (
        r"\bn_ctx\W{0,4}(\d{1,12})",
        r"> (\d[\d,]{0,12})",
        r"(?:maximum (?:context|prompt|model) length|context (?:length|window|size|limit))"
        r"[ (:=]*(?:(?:is|of|only|at most)[ (:=]*)*(\d[\d,]{0,12})",
        r"(\d[\d,]{0,12})(?: tokens?)? maximum context length",
        r"maximum number of tokens allowed \((\d[\d,]{0,12})\)",
    )
)
_SECRET: Final = re.compile(r"\bsk-[\w*.-]+")


class Names(Struct, frozen=True):
    """What messages to people call a model: `model` in full, `id` at its provider, its dialect."""

    model: str
    id: str
    dialect: str


class Refusal(Exception):
    """A response that is no success; as a string, the endpoint's own words.

    Attributes:
        status: Its status code.
        headers: Its headers; names in any case.
        body: The begin of it, bounded.
    """

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(body.decode("utf-8", "replace"))
        self.status = status
        self.headers = headers
        self.body = body


class StreamError(Exception):
    """An event of the stream says that the call failed. Raised by readers too.

    Attributes:
        error: What it says: ``code`` or ``type``, and ``message``.
    """

    def __init__(self, error: object) -> None:
        super().__init__("an error event")
        self.error = error


class Failures:
    """Tells of the failures of one endpoint.

    Args:
        provider: Its name in the configuration.
        url: Its base URL.
        host: The host of that.
        advice: What to do about the key.
        secrets: Returns what must not be in a message.
    """

    def __init__(
        self,
        provider: str,
        *,
        url: str,
        host: str,
        advice: str,
        secrets: Callable[[], Iterable[str | None]],
    ) -> None:
        # Who is named before an @, and what is asked behind a ?, is for the host alone.
        userinfo = re.split(r"[/?#]", url.partition("://")[2])[0].rpartition("@")[0]
        shown = re.split(r"[?#]", url.replace(f"{userinfo}@", "", 1))[0]
        self._words = {"provider": provider, "url": shown, "host": host, "advice": advice}
        self._scheme = url.partition("://")[0]
        self._userinfo = userinfo.split(":")
        self._secrets = secrets

    def of(self, exc: Exception, names: Names) -> ModelError:
        """Return what an exception of the SDKs, of their HTTP library or of ours comes to.

        Args:
            exc: The exception; what caused it counts as well.
            names: What messages to people call the model.
        """
        causes = tuple(_causes(exc))
        for cause in causes:
            if isinstance(cause, Refusal):
                return self._of_refusal(cause, names)
            if isinstance(cause, StreamError):
                return self._reported(500, cause.error, names)
        # OpenSSL's own words say whether a certificate is unknown, too old or another host's.
        details = (getattr(cause, "verify_message", "") for cause in causes)
        return self.error(_kind_of(causes), names, next(filter(None, details), ""))

    def of_page(self, head: bytes, names: Names) -> ModelError:
        """Return what a body comes to that was no stream: it may well be an error after all."""
        told = _told(head)
        if told.get("message") and head.lstrip().startswith((b"{", b"[")):
            return self._reported(500, told, names)
        return self.error("PROTOCOL", names)

    def error(self, kind: str, names: Names, detail: str = "", **facts: Any) -> ModelError:
        """Return the error of `kind` in words for people, `detail` behind them.

        `facts` are further fields of a `ModelError`.
        """
        code, words = _KINDS[kind]
        message = words.format(
            **self._words, model=names.id, dialect=names.dialect, proxy=self._proxy()
        )
        return ModelError(f"{message}: {detail}" if detail else message, code=code, **facts)

    def _of_refusal(self, refusal: Refusal, names: Names) -> ModelError:
        if refusal.status < 400:
            return self.error("MOVED", names)
        after_s = retry_after_s(refusal.headers)
        return self._reported(refusal.status, refusal.body, names, after_s)

    def _reported(
        self, status: int, body: object, names: Names, after_s: float | None = None
    ) -> ModelError:
        """Return what the provider itself reported, in its own words as far as they are safe."""
        told = _told(body)
        detail = _detail(told, (*self._secrets(), *self._userinfo))
        kind = _kind_told(status, told, detail)
        held = _held_tokens(told, detail) if kind == "CONTEXT_TOO_LONG" else None
        if kind == "AUTH":
            detail = ""  # such messages quote the key
        detail = detail[:MAX_DETAIL_CHARS]
        return self.error(kind, names, detail, retry_after_s=after_s, context_tokens=held)

    def _proxy(self) -> str:
        from urllib.request import getproxies, proxy_bypass

        proxies = getproxies()
        if not (self._scheme in proxies or "all" in proxies) or proxy_bypass(self._words["host"]):
            return ""
        return " (or the proxy that the environment names)"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds a response asks to wait: so many, so many ms, or until a date.

    Source: RFC 9110, section 10.2.3; ``retry-after-ms`` is what both SDKs look for first.
    """
    for name, per_s in (("retry-after-ms", 1000), ("retry-after", 1)):
        value = headers.get(name, "").strip()
        if re.fullmatch(r"\d{1,12}(\.\d*)?", value):
            return float(value) / per_s
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    zoned = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (zoned - datetime.now(UTC)).total_seconds())


# --- what an exception means ----------------------------------------------------------------


def _causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what it came from, and so on: the reason is at the bottom."""
    waiting, n_seen = [exc], 0
    while waiting and n_seen < MAX_CAUSES:
        exc, n_seen = waiting.pop(0), n_seen + 1
        yield exc
        if isinstance(exc, BaseExceptionGroup):
            waiting += exc.exceptions
        if (cause := exc.__cause__ or exc.__context__) is not None:
            waiting.append(cause)


def _host_kind(causes: tuple[BaseException, ...]) -> str:
    import socket

    numbers = {cause.errno for cause in causes if isinstance(cause, socket.gaierror)}
    return "UNKNOWN_HOST" if socket.EAI_NONAME in numbers else "NO_HOST"


def _kind_of(causes: tuple[BaseException, ...]) -> str:
    import socket
    import ssl

    import anyio
    import httpx2

    if type(causes[0]) is TimeoutError:
        return "TIMEOUT"  # the idle limit's; others are a connection's
    for foreign, kind in (
        (httpx2.ConnectTimeout, "NO_CONNECTION"),
        (ssl.SSLCertVerificationError, "UNTRUSTED"),
        ((ssl.SSLEOFError, ssl.SSLZeroReturnError), "TRANSPORT"),  # hung up on
        (ssl.SSLError, "NO_TLS"),
        (socket.gaierror, _host_kind(causes)),
        (ConnectionRefusedError, "NOBODY"),
        (httpx2.ProxyError, "PROXY"),
        ((httpx2.UnsupportedProtocol, httpx2.InvalidURL), "NO_URL"),
        ((httpx2.LocalProtocolError, UnicodeEncodeError), "HEADER"),
        ((httpx2.TransportError, anyio.EndOfStream, OSError), "TRANSPORT"),
    ):
        if any(isinstance(cause, foreign) for cause in causes):
            return kind
    # Left over: neither JSON nor UTF-8, JSON of another shape, or what nobody thought of.
    return "PROTOCOL"


# --- what a provider means ------------------------------------------------------------------


def _told(body: object) -> Mapping[str, Any]:
    """Return the error in what a provider sent, be it wrapped, bare, in a list, or only words."""
    if isinstance(body, bytes):
        body = _parsed(body)
    if isinstance(body, list):
        body = body[0] if body else None
    if isinstance(body, Mapping):
        inner = body.get("error") or body.get("detail")
        body = inner if isinstance(inner, Mapping | str) else body
    if isinstance(body, str):
        return {"message": body}
    return _unwrapped(body) if isinstance(body, Mapping) else {}


def _parsed(body: bytes) -> object:
    """Return a body as JSON, else as text, unless it is a page for browsers or binary."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        text = body.decode("utf-8", "replace")
    is_text = not re.search(r"<(html|!doctype|body)|\ufffd|\0", text, re.IGNORECASE)
    return text if is_text else None


def _unwrapped(error: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put in the words of the provider behind a router: OpenRouter has them in ``metadata.raw``."""
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    inner = _told(raw.encode("utf-8", "replace") if isinstance(raw, str) else raw)
    return {**error, **{name: inner[name] for name in ("message", "n_ctx") if inner.get(name)}}


def _detail(told: Mapping[str, Any], secrets: Iterable[str | None]) -> str:
    """Return the words in one printable line, with secrets blanked out."""
    words = told.get("message")
    if not isinstance(words, str):
        return ""
    for secret in secrets:
        if secret and len(secret) >= 8:  # shorter ones are placeholders
            words = words.replace(secret, "***")
    line = " ".join(_SECRET.sub("***", words).split())
    return printable(line)


def _kind_told(status: int, told: Mapping[str, Any], detail: str) -> str:
    code, type = str(told.get("code")), str(told.get("type"))
    if re.fullmatch(r"[45]\d\d", code):
        status = int(code)
    kind = _BY_NAME.get(code) or _BY_NAME.get(type) or _BY_STATUS.get(status)
    is_failure = status >= 500 and "invalid_request_error" not in (code, type)
    kind = kind or ("SERVER" if is_failure else "BAD_REQUEST")
    for kinds, words, better in _BY_WORDS:
        if kind in kinds and words.search(detail):
            return better
    return kind


def _held_tokens(told: Mapping[str, Any], detail: str) -> int | None:
    held = told.get("n_ctx")
    if isinstance(held, int) and held > 0:
        return held
    matches = (words.search(detail) for words in _HOLDS)
    return next((int(match[1].replace(",", "")) for match in matches if match), None)
