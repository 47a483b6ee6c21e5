"""Who may come in: tokens, the page that a browser came from, and the name it looked us up by.

An ACP agent runs commands for whoever reaches it, and a web page reaches every port of the
computer it is shown on. Therefore a foreign ``Origin`` is refused, and so is, on loopback, a
``Host`` that is no name of this computer: the page may have pointed a name of its own here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from acp_server.config import ConfigError
from agent_core.logs import get_logger

__all__ = ["METRICS_NAME", "SUBPROTOCOL", "Gate", "Principal", "Refusal", "Tokens", "is_loopback"]

MIN_TOKEN_CHARS: Final = 16
MAX_GUESSES: Final = 20
"""Wrong tokens an address may show in `GUESS_WINDOW_S`; what it shows then is not looked at."""
GUESS_WINDOW_S: Final = 60.0
SUBPROTOCOL: Final = "acp"
TOKEN_SUBPROTOCOL: Final = "acp.bearer."
"""Followed by the token in unpadded base64url: browsers can set no other header."""
DEFAULT_NAME: Final = "token"
METRICS_NAME: Final = "metrics"
"""A token of this name reads ``/metrics`` and does nothing else."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_TOKEN: Final = re.compile(r"[!-~]+\Z")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?\Z")
_HOST: Final = re.compile(r"[a-z0-9._-]+\Z|[0-9a-f:.]+\Z")
_MAX_ADDRESSES: Final = 10_000
_BEARER: Final = ((b"www-authenticate", b"Bearer"),)

log = get_logger(__name__)

Scope = MutableMapping[str, Any]


class Principal(Struct, frozen=True):
    """Who a client is: the name of its token, empty where none is asked for.

    `digest` is the token's; when it is not among the tokens any more, the client has to leave.
    """

    name: str = ""
    digest: bytes = b""


class Refusal(Struct, frozen=True):
    """An HTTP status, one sentence, and a word for who counts them; nothing of what was shown."""

    status: int
    sentence: str
    reason: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Tokens:
    """The tokens that are good, each with a name. Several may have the same one.

    Args:
        from_environment: A token, or `None`.
        path: A file with one ``name:token`` a line, or with one token; `None` for no file.

    Raises:
        ConfigError: The file cannot be read, or a token is not usable.
    """

    def __init__(self, from_environment: str | None, path: str | None) -> None:
        self._from_environment = from_environment
        self._path = path
        self._digests: dict[bytes, str] = {}
        self.reload()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def reload(self) -> None:
        """Read the file again. If it cannot be used, everything stays as it is.

        Raises:
            ConfigError: Why it cannot.
        """
        lines: list[tuple[str, str]] = []
        if self._from_environment:
            lines.append(("ACP_AGENT_TOKEN", f"{DEFAULT_NAME}:{self._from_environment}"))
        if self._path is not None:
            lines += _lines_of(self._path)
            if not any(place != "ACP_AGENT_TOKEN" for place, _ in lines):
                raise ConfigError(f"The token file {self._path} has no token.")
        digests: dict[bytes, str] = {}
        for place, line in lines:
            name, token = _parsed(place, line)
            if digests.setdefault(_digest(token), name) != name:
                raise ConfigError(f"{place}: the same token has two names.")
        self._digests = digests

    def principal(self, token: str) -> Principal | None:
        """Return whose token this is; takes the same time for every token of a length."""
        shown, found = _digest(token), None
        for digest, name in self._digests.items():
            if hmac.compare_digest(digest, shown):
                found = Principal(name, digest)
        return found

    def has(self, principal: Principal) -> bool:
        """Return whether the token that somebody came with is still good."""
        return self._digests.get(principal.digest) == principal.name


class Gate:
    """Decides who may come in.

    Args:
        tokens: Those that are good; without any, everybody who reaches us may come in.
        origins: The origins, such as ``https://editor.example``, of pages that may reach us.
        hosts: The only names we may be looked up by, without ports; `None` for any.
        proxies: Networks of proxies that say in ``X-Forwarded-For`` whom they speak for.
        clock: Seconds.

    Raises:
        ConfigError: Something here is no origin, no name of a host, or no network.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        origins: Iterable[str] = (),
        hosts: Iterable[str] | None = None,
        proxies: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens = tokens
        self._origins = frozenset(_checked_origin(origin) for origin in origins)
        self._hosts = None if hosts is None else frozenset(_checked_host(host) for host in hosts)
        self._proxies = tuple(_network(proxy) for proxy in proxies)
        self._clock = clock
        self._guesses: dict[str, deque[float]] = {}

    def place_problem(self, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Return what is wrong with where a request came from, or went to."""
        if self._hosts is not None and _host_of(headers) not in self._hosts:
            return Refusal(403, "This server is not known by that name.", "host")
        origin = headers.get(b"origin")
        if origin is not None and self.allowed_origin(headers) is None:
            log.warning("foreign_origin_refused", origin=origin.decode("latin-1")[:200])
            return Refusal(403, "Pages of this origin may not use this server.", "origin")
        return None

    def allowed_origin(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the origin of the page that a request came from, if it is one of ours."""
        origin = headers.get(b"origin")
        if origin is None or origin.decode("latin-1").rstrip("/").lower() not in self._origins:
            return None
        return origin

    def principal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Principal | Refusal:
        """Return who a request is from, or why it may not come in."""
        if not self.tokens:
            return Principal()
        token = _shown_token(headers, scope.get("subprotocols") or ())
        if token is None:
            return Refusal(401, "A token is needed.", "no_token", _BEARER)
        address = self._address(scope, headers)
        if self._is_guessing(address):
            retry = (b"retry-after", str(int(GUESS_WINDOW_S)).encode())
            sentence = "Too many wrong tokens came from this address."
            return Refusal(429, sentence, "guessing", (retry,))
        principal = self.tokens.principal(token)
        if principal is None:
            self._note_guess(address)
            log.warning("wrong_token_refused", address=address)
            return Refusal(401, "The token is wrong.", "wrong_token", _BEARER)
        return principal

    def _address(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Return where a request is from: of IPv6 the network, which one person has all of."""
        address = str((scope.get("client") or ("",))[0])
        hops = headers.get(b"x-forwarded-for", b"").decode("latin-1").split(",")
        while hops and self._is_proxy(address):
            address = hops.pop().strip()
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return address[:64]
        if ip.version == 6 and ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((ip, 64), strict=False))
        return str(ip)

    def _is_proxy(self, address: str) -> bool:
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip in network for network in self._proxies)

    def _is_guessing(self, address: str) -> bool:
        guesses = self._guesses.get(address)
        if guesses is None:
            return False
        while guesses and guesses[0] <= self._clock() - GUESS_WINDOW_S:
            guesses.popleft()
        if not guesses:
            del self._guesses[address]
        return len(guesses) >= MAX_GUESSES

    def _note_guess(self, address: str) -> None:
        self._guesses.setdefault(address, deque(maxlen=MAX_GUESSES)).append(self._clock())
        while len(self._guesses) > _MAX_ADDRESSES:
            del self._guesses[next(iter(self._guesses))]


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this computer only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked_origin(text: str) -> str:
    origin = text.rstrip("/").lower()
    if not _ORIGIN.match(origin):
        raise ConfigError(
            f"{text!r} is no origin; one is a scheme and a host, and perhaps a port:"
            " https://editor.example, http://localhost:3000."
        )
    return origin


def _checked_host(text: str) -> str:
    host = text.lower().removeprefix("[").removesuffix("]")
    if not _HOST.match(host):
        raise ConfigError(f"{text!r} is no name of a host; no port belongs to it: agent.example.")
    return host


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ConfigError(f"{text!r} is no address and no network of proxies.") from None


def _lines_of(path: str) -> list[tuple[str, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise ConfigError(f"The token file {path} cannot be read: {reason}.") from None
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(f"{path}, line {n}", line) for n, line in lines if line and not line.startswith("#")]


def _parsed(place: str, line: str) -> tuple[str, str]:
    """Return the name and the token of a line. What is wrong with it is said without quoting it."""
    name, colon, token = line.partition(":")
    if not colon:
        name, token = DEFAULT_NAME, line
    if not _NAME.match(name):
        raise ConfigError(f"{place}: a name has letters, digits, dot, - and _, at most 64.")
    if len(token) < MIN_TOKEN_CHARS or not _TOKEN.match(token):
        raise ConfigError(
            f"{place}: a token has at least {MIN_TOKEN_CHARS} characters of printable ASCII without"
            " spaces; `openssl rand -hex 32` makes a good one."
        )
    return name, token


def _shown_token(headers: Mapping[bytes, bytes], subprotocols: Iterable[str]) -> str | None:
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    for subprotocol in subprotocols:
        if subprotocol.startswith(TOKEN_SUBPROTOCOL):
            encoded = subprotocol.removeprefix(TOKEN_SUBPROTOCOL)
            try:
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            except (binascii.Error, ValueError):
                return ""
    return None


def _host_of(headers: Mapping[bytes, bytes]) -> str:
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
