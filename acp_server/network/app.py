"""The ASGI application: five paths, and the gate in front of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from acp_server import __version__
from acp_server.network.asgi import Headers, Receive, Scope, Send, answer, headers_of, refuse
from acp_server.network.http import Http
from acp_server.network.hub import Hub
from acp_server.network.security import METRICS_NAME, Gate, Principal, Refusal
from acp_server.network.websocket import serve_websocket
from agent_core.errors import StoreError

__all__ = ["App"]

ABOUT: Final = f"""\
acp-agent {__version__}: an agent that speaks the Agent Client Protocol.
Connect an ACP client to /acp, by WebSocket or by Streamable HTTP.
""".encode()

_METRICS_ONLY: Final = Refusal(
    403, "This token is for /metrics and for nothing else.", "metrics_only"
)
_PREFLIGHT: Final = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (
        b"access-control-allow-headers",
        b"authorization, content-type, acp-connection-id, acp-session-id, acp-protocol-version",
    ),
    (b"access-control-max-age", b"600"),
)


class App:
    """What uvicorn calls.

    Args:
        hub: The clients.
        gate: Who may come in.
        metrics: Returns the metrics and their content type; without it there is no ``/metrics``.
    """

    def __init__(
        self, hub: Hub, gate: Gate, metrics: Callable[[], tuple[bytes, bytes]] | None = None
    ) -> None:
        self._hub = hub
        self._gate = gate
        self._metrics = metrics
        self._http = Http(hub)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or serve one WebSocket.

        Cancellation: safe. Concurrency: any number.
        """
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
        elif scope["type"] == "http" and scope["path"] in ("/healthz", "/readyz"):
            if not await _refused_method(scope, send):
                await self._say_how_it_is(scope, send)  # probes know neither tokens nor names
            return
        headers = headers_of(scope)
        if (problem := self._gate.place_problem(headers)) is not None:
            await self._refuse(scope, send, problem)
            return
        send = _with_origin(send, self._gate.allowed_origin(headers))
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            await answer(send, 204, headers=_PREFLIGHT)
        elif scope["type"] == "http" and scope["path"] == "/":
            if not await _refused_method(scope, send):
                await answer(send, 200, ABOUT)
        else:
            await self._let_in(scope, headers, receive, send)

    async def _let_in(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        principal = self._gate.principal(scope, headers)
        if isinstance(principal, Refusal):
            await self._refuse(scope, send, principal)
        elif principal.name == METRICS_NAME and scope["path"] != "/metrics":
            await self._refuse(scope, send, _METRICS_ONLY)
        elif scope["path"] == "/acp":
            await self._serve_acp(principal, scope, receive, send)
        elif scope["path"] == "/metrics" and scope["type"] == "http" and self._metrics is not None:
            body, kind = self._metrics()
            await answer(send, 200, body, kind=kind)
        else:
            await refuse(scope, send, 404, "There is nothing here; the agent is at /acp.")

    async def _refuse(self, scope: Scope, send: Send, refusal: Refusal) -> None:
        self._hub.refused[refusal.reason] += 1
        await refuse(scope, send, refusal.status, refusal.sentence, refusal.headers)

    async def _serve_acp(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] == "http":
            await self._http.serve(principal, scope, receive, send)
        elif (refusal := self._hub.turned_away()) is not None:
            await refuse(scope, send, refusal.status, refusal.sentence)
        else:
            await serve_websocket(self._hub, principal, scope, receive, send)

    async def _say_how_it_is(self, scope: Scope, send: Send) -> None:
        if scope["path"] == "/healthz":
            await answer(send, 200, b"ok\n")
        elif self._hub.draining.is_set():
            await refuse(scope, send, 503, "The server is shutting down.")
        elif self._hub.backend.configuration_problem() is not None:
            await refuse(scope, send, 503, "The configured model cannot be used.")
        else:
            try:
                await self._hub.backend.store.ping()
            except StoreError:
                await refuse(scope, send, 503, "The sessions cannot be read.")
            else:
                await answer(send, 200, b"ready\n")


async def _refused_method(scope: Scope, send: Send) -> bool:
    """Say so, if somebody wants more of a page than to get it."""
    is_refused = scope["type"] == "http" and scope["method"] not in ("GET", "HEAD")
    if is_refused:
        allow = (b"allow", b"GET, HEAD")
        await refuse(scope, send, 405, "There is no such method here.", (allow,))
    return is_refused


def _with_origin(send: Send, origin: bytes | None) -> Send:
    """Let the page at `origin` read what is answered."""
    if origin is None:
        return send
    more = [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"acp-connection-id"),
        (b"vary", b"origin"),
    ]

    def with_headers(message: Any) -> Awaitable[None]:
        if message["type"].endswith("response.start"):
            message = {**message, "headers": [*message["headers"], *more]}
        return send(message)

    return with_headers
