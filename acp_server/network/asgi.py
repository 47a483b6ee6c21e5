"""The little of ASGI that we use: types, plain answers, and a body of limited size and time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import anyio

__all__ = ["Headers", "Receive", "Scope", "Send", "answer", "headers_of", "read_body", "refuse"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Mapping[bytes, bytes]
Pair = tuple[bytes, bytes]


class BodyProblem(Exception):
    """A request's body cannot be had; `status` says why."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def headers_of(scope: Scope) -> Headers:
    """Return the headers by their lower-case names; of several with one name the first."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), value)
    return headers


async def answer(
    send: Send,
    status: int,
    body: bytes = b"",
    *,
    kind: bytes = b"text/plain; charset=utf-8",
    headers: Iterable[Pair] = (),
) -> None:
    """Answer an HTTP request. Cancellation: safe. Concurrency: once a request."""
    length = (b"content-length", str(len(body)).encode())
    about = [(b"content-type", kind)] if body else []
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [*about, length, (b"cache-control", b"no-store"), *headers]})
    await send({"type": "http.response.body", "body": body})


async def refuse(
    scope: Scope, send: Send, status: int, sentence: str, headers: Iterable[Pair] = ()
) -> None:
    """Answer a request, or an upgrade to WebSocket, with a status and one sentence.

    Cancellation: safe. Concurrency: once a request.
    """
    body = sentence.encode() + b"\n"
    if scope["type"] == "http":
        await answer(send, status, body, headers=headers)
        return
    kind = (b"content-type", b"text/plain; charset=utf-8")
    start = {"type": "websocket.http.response.start", "status": status}
    await send({**start, "headers": [kind, *headers]})
    await send({"type": "websocket.http.response.body", "body": body})


async def read_body(receive: Receive, headers: Headers, limit_bytes: int, limit_s: float) -> bytes:
    """Read the body of a request.

    Cancellation: safe. Concurrency: once a request.

    Raises:
        BodyProblem: It is too long or too slow, or the client left.
    """
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyProblem(413, f"A message may have {limit_bytes} bytes.")
    parts: list[bytes] = []
    size = 0
    with anyio.move_on_after(limit_s):
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise BodyProblem(400, "The body is not complete.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit_bytes:
                raise BodyProblem(413, f"A message may have {limit_bytes} bytes.")
            if not message.get("more_body", False):
                return b"".join(parts)
    raise BodyProblem(408, "The body did not come in time.")
