"""The client's end of a WebSocket: one text frame is one message, in both directions.

Why a connection cannot be made, or is over, is said in words for people, and never with the token.
Pings find out that the other side is gone. What is not read here holds the other side back: whoever
does not read for long is taken for gone by it, as its pings wait behind what is unread.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import anyio
from anyio.abc import TaskGroup

from acp_server.framing import MAX_LINE_BYTES
from acp_server.network.outbox import MessageQueue
from agent_core.logs import get_logger
from agent_core.text import printable, shortened

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.exceptions import InvalidStatus

__all__ = ["Socket", "SocketError", "open_socket", "shown_url"]

OPEN_LIMIT_S: Final = 10.0
CLOSE_LIMIT_S: Final = 2.0
LAST_WORDS_S: Final = 1.0
"""How long a server that does not read may hold up the end."""
PING_S: Final = 20.0
PONG_LIMIT_S: Final = 20.0
MAX_WAITING: Final = 4
"""Messages of any size that may have come and wait to be read."""
MAX_UNSENT_BYTES: Final = 2 * MAX_LINE_BYTES
MAX_FOREIGN_CHARS: Final = 200

_TOKEN: Final = re.compile(r"[!-~]+\Z")
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_REFUSALS: Final = {
    404: "there is no agent at this path",
    407: "the proxy wants a password",
    429: "too many wrong tokens came from here; try again in a minute",
}
_ENDINGS: Final = {
    1000: "the agent closed the connection",
    1001: "the agent's server is shutting down",
    1003: "the agent cannot use what it was sent",
    1006: "the connection to the agent was lost",
    1008: "the agent's server ended the connection",
    1011: "the agent's server failed",
    1012: "the agent's server restarts",
    1013: "the agent's server has too much to do",
}

log = get_logger(__name__)


class SocketError(Exception):
    """There is no connection, or not any more; the message says why.

    Attributes:
        is_final: Whether trying again would end in the same way.
        is_about_token: Whether the token is missing, or not accepted.
    """

    def __init__(
        self, message: str, *, is_final: bool = False, is_about_token: bool = False
    ) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.is_about_token = is_about_token


def shown_url(url: str) -> str:
    """Return an address without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@asynccontextmanager
async def open_socket(
    url: str, *, token: str | None = None, connecting: anyio.CancelScope | None = None
) -> AsyncIterator[Socket]:
    """Connect; at the end of the block send what is queued, say goodbye and close.

    Certificates are checked against those of the system, or SSL_CERT_FILE; a proxy is used if the
    environment names one, but not for addresses of this computer.
    Cancellation: safe; the connection is closed first. Concurrency: any number.

    Args:
        url: ``ws://`` or ``wss://``.
        token: Shown as ``Authorization: Bearer``.
        connecting: What to cancel to give up before there is a connection.

    Raises:
        SocketError: There is no connection.
    """
    connection: ClientConnection | None = None
    with connecting or anyio.CancelScope():
        connection = await _connected(url, token)
    if connection is None:
        raise SocketError("it was given up", is_final=True)
    async with anyio.create_task_group() as tasks:
        socket = Socket(connection, tasks)
        for work in (socket._write, socket._keep_alive):
            tasks.start_soon(work)
        try:
            yield socket
        finally:
            with anyio.CancelScope(shield=True):
                await socket._close()
            tasks.cancel_scope.cancel()


class Socket:
    """One open connection. Made by `open_socket`.

    Attributes:
        outbox: What is to be sent.
        ended: Set when the connection is over.
        problem: Why it is; of use when it is.
    """

    def __init__(self, connection: ClientConnection, tasks: TaskGroup) -> None:
        self.outbox: Final = MessageQueue(MAX_UNSENT_BYTES, self._give_up_sending)
        self.ended: Final = anyio.Event()
        self.problem = SocketError("the connection to the agent is closed")
        self._connection = connection
        self._tasks = tasks
        self._hearing = anyio.CancelScope()
        self._is_paused = False
        self._own_problem: str | None = None

    def listen(self, receive: Callable[[bytes], None], pace: Callable[[], Awaitable[None]]) -> None:
        """Begin to read; to be called once.

        Args:
            receive: Called with each message, UTF-8.
            pace: Awaited before more is read.
        """
        self._tasks.start_soon(self._read, receive, pace)

    def abort(self, problem: str) -> None:
        """Be over at once, and because of `problem`."""
        self._own_problem = problem
        self._connection.transport.abort()

    async def _read(
        self, receive: Callable[[bytes], None], pace: Callable[[], Awaitable[None]]
    ) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            with self._hearing:
                while True:
                    message = await self._connection.recv()
                    if isinstance(message, str):
                        receive(message.encode())
                    else:
                        log.info("binary_frame_ignored")
                    self._is_paused = True
                    await pace()
                    self._is_paused = False
            while True:  # or the goodbye would not be read
                await self._connection.recv()
        except ConnectionClosed as closed:
            self.problem = SocketError(self._own_problem or _why_closed(closed))
        finally:
            self.outbox.lose()
            self.ended.set()

    async def _write(self) -> None:
        from websockets.exceptions import ConnectionClosed

        async def write(batch: list[bytes]) -> None:
            for message in batch:
                await self._connection.send(message, text=True)

        with suppress(ConnectionClosed):  # the reader says why
            await self.outbox.run(write)

    async def _keep_alive(self) -> None:
        from websockets.exceptions import ConnectionClosed

        while True:
            await anyio.sleep(PING_S)
            with anyio.move_on_after(PONG_LIMIT_S) as limit:
                try:
                    # A future that the connection sets, which a cancel of ours must not touch.
                    await asyncio.shield(await self._connection.ping())
                except ConnectionClosed:
                    return
            # While nothing is read here, its pong waits behind what is unread.
            if limit.cancelled_caught and not self._is_paused:
                self.abort("the agent's server does not answer any more")

    async def _close(self) -> None:
        self._hearing.cancel()
        try:
            with anyio.move_on_after(LAST_WORDS_S):
                await self.outbox.flushed()
            with anyio.move_on_after(CLOSE_LIMIT_S):
                await self._connection.close()
        finally:
            self._connection.transport.abort()

    def _give_up_sending(self) -> None:
        self.abort("the agent's server does not read what it is sent")


async def _connected(url: str, token: str | None) -> ClientConnection:
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake, InvalidProxy, InvalidStatus, InvalidURI

    class Connect(connect):
        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc  # whoever was trusted with a token is not asked where else it may go

    place = shown_url(url)
    try:
        if "@" in urlsplit(url).netloc:
            raise SocketError(f"{place}: an address holds no password here", is_final=True)
        if token is not None and not _TOKEN.match(token):
            problem = "the token has characters that no token has"
            raise SocketError(f"{place}: {problem}", is_final=True, is_about_token=True)
        return await Connect(
            url,
            additional_headers={} if token is None else {"Authorization": f"Bearer {token}"},
            proxy=None if urlsplit(url).hostname in _LOCAL else True,
            compression=None,
            open_timeout=OPEN_LIMIT_S,
            close_timeout=CLOSE_LIMIT_S,
            ping_interval=None,
            max_size=MAX_LINE_BYTES,
            max_queue=MAX_WAITING,
        )
    except InvalidStatus as refusal:
        raise _refused(place, refusal, has_token=token is not None) from None
    except TimeoutError:
        raise SocketError(f"{place} did not answer within {OPEN_LIMIT_S:g} s") from None
    except (InvalidProxy, ImportError) as exc:
        raise SocketError(f"the proxy cannot be used: {exc}", is_final=True) from None
    except (InvalidHandshake, EOFError):
        raise SocketError(f"{place} does not answer as a WebSocket") from None
    except OSError as exc:  # some are a ValueError, too
        raise _unreachable(place, exc) from None
    except (InvalidURI, ValueError):
        raise SocketError(f"{place} is no ws:// or wss:// address", is_final=True) from None


def _unreachable(place: str, exc: OSError) -> SocketError:
    import ssl

    if isinstance(exc, ssl.SSLCertVerificationError):
        reason = f"its certificate is not trusted, {exc.verify_message}"
        return SocketError(f"cannot connect to {place}: {reason}", is_final=True)
    if isinstance(exc, ssl.SSLError):
        return SocketError(f"cannot connect to {place}: it does not speak TLS as it should")
    # Of several addresses each has its own reason, and asyncio writes them into one text.
    known = os.strerror(exc.errno) if exc.errno is not None and exc.errno > 0 else exc.strerror
    why = known or "none of its addresses can be reached"
    return SocketError(f"cannot connect to {place}: {why}")


def _refused(place: str, refusal: InvalidStatus, *, has_token: bool) -> SocketError:
    status = refusal.response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        why = "it does not accept the token" if has_token else "it asks for a token"
    elif 300 <= status < 400:
        why = "it points to another address; use that one"
    else:
        said = refusal.response.body.decode("utf-8", "replace").strip().partition("\n")[0]
        why = _REFUSALS.get(status) or _foreign(said) or "it does not say why"
    return SocketError(
        f"{place} refused the connection: {why.rstrip('.')} (HTTP {status})",
        is_final=status < 500 and status not in (408, 425, 429),
        is_about_token=status == HTTPStatus.UNAUTHORIZED,
    )


def _why_closed(closed: Exception) -> str:
    from websockets.exceptions import ConnectionClosed

    assert isinstance(closed, ConnectionClosed)
    if closed.sent is not None and not closed.rcvd_then_sent:  # we found something wrong first
        if closed.sent.code == 1009:
            return f"the agent sent a message of over {MAX_LINE_BYTES // 2**20} MiB"
        if closed.sent.code in (1002, 1007):
            return "the agent sent what no WebSocket may"
    if closed.rcvd is None:
        return _ENDINGS[1006]
    if closed.rcvd.code == 1009:
        return "the agent takes no message as long as the one it was sent"
    why = _ENDINGS.get(closed.rcvd.code, f"the connection was closed with code {closed.rcvd.code}")
    said = _foreign(closed.rcvd.reason)
    return f"{why}: {said}" if said and closed.rcvd.code not in (1000, 1001) else why


def _foreign(text: str) -> str:
    """Return what a server says, fit to be shown."""
    return shortened(printable(text, " "), MAX_FOREIGN_CHARS)
