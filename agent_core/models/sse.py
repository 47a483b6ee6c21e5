"""Server-sent events: the bytes of a response in, the data of each event out.

The SDKs' own decoders are not used. They disagree with each other about events without a name,
bytes that are no UTF-8 and lines without end, and cost a quarter more (measured).

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

from collections import deque
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import httpx2

__all__ = ["EventParser", "EventStream"]

MAX_EVENT_BYTES: Final = 64 * 2**20
MAX_HEAD_BYTES: Final = 2**16
_BOM: Final = b"\xef\xbb\xbf"


class EventParser:
    """Puts lines and events together, wherever the network cut them.

    Comments, pings, ids and events without data are left out; so is one that nothing has ended.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # the pieces of a line that has not ended yet
        self._data: list[bytes] = []  # the lines of data of an event that has not ended yet
        self._is_ping = False
        self._is_first = True
        self._skips_lf = False  # the CR before it has ended the line
        self._n_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that ends in `data`, in their order.

        Raises:
            ValueError: An event is longer than `MAX_EVENT_BYTES`.
        """
        if self._skips_lf and data:
            data, self._skips_lf = data.removeprefix(b"\n"), False
        events: list[bytes] = []
        for piece in data.splitlines(keepends=True):  # of bytes: it knows CR, LF and CRLF only
            self._n_bytes += len(piece)
            self._line.append(piece)
            if piece.endswith((b"\r", b"\n")):
                line = b"".join(self._line).rstrip(b"\r\n")
                self._line.clear()
                events += self._take(line)
        if self._n_bytes > MAX_EVENT_BYTES:
            raise ValueError("an event without end")
        self._skips_lf = self._skips_lf or data.endswith(b"\r")
        return events

    def _take(self, line: bytes) -> list[bytes]:
        """Take in a line; an empty one ends an event, whose data is returned."""
        if self._is_first:
            self._is_first, line = False, line.removeprefix(_BOM)
        if not line:
            data, is_ping = b"\n".join(self._data), self._is_ping
            self._data.clear()
            self._is_ping, self._n_bytes = False, 0
            return [data] if data and not is_ping else []
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._is_ping = value.strip() == b"ping"
        return []


class EventStream:
    """The events of one response. For one task.

    Args:
        response: Not read yet.
        stack: Closes the response.

    Attributes:
        is_stream: Whether it says that it is a stream of events.
        head: The begin of the body of one that does not: an error page, perhaps.
    """

    def __init__(self, response: httpx2.Response, stack: AsyncExitStack) -> None:
        media_type = response.headers.get("content-type", "text/event-stream")
        self.is_stream = media_type.strip().lower().startswith("text/event-stream")
        self.head = b""
        self._chunks = response.aiter_bytes()
        stack.push_async_callback(response.aclose)
        stack.push_async_callback(self._chunks.aclose)
        self._parser = EventParser()
        self._events: deque[bytes] = deque()

    def pop(self) -> bytes | None:
        """Return the data of the next event if it is here already."""
        return self._events.popleft() if self._events else None

    async def next(self) -> bytes | None:
        """Return the data of the next event; `None` behind the last.

        Cancellation: safe, and nothing can be read afterwards. Concurrency: one task.

        Raises:
            ValueError: An event is too long.
            httpx2.HTTPError: The connection broke off.
        """
        while not self._events:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                return None
            if not self.is_stream and len(self.head) < MAX_HEAD_BYTES:
                self.head += chunk[:MAX_HEAD_BYTES]
            self._events.extend(self._parser.feed(chunk))
        return self._events.popleft()

    async def drain(self) -> None:
        """Read to the end of the response; see `next`."""
        while await self.next() is not None:
            self._events.clear()
