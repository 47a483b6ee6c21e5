"""Logging: JSON lines on stderr or in a file, never in anybody's way.

Some clients hand us a pipe as stderr and never read it, so a write that would block is dropped
instead. By default only warnings are written: a few clients show every line as an error.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import MutableMapping
from typing import Any, BinaryIO, Final, TextIO, cast

from agent_core.logs import before_first_record, get_logger

__all__ = ["quiet_streams", "set_up_logs"]

LEVELS: Final = ("debug", "info", "warning", "error")
_MAX_CAUSES: Final = 10


class PatientStream:
    """A text stream that drops what would block. Stands in for `sys.stderr` and `sys.stdout`."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, text: str | bytes) -> int:
        """Write what fits now; return the length of `text` all the same."""
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        try:
            # A pipe that polls as writable takes PIPE_BUF bytes without blocking, no more.
            for start in range(0, len(data), select.PIPE_BUF):
                if not self._is_writable():
                    break
                os.write(self._fd, data[start : start + select.PIPE_BUF])
        except OSError:
            pass  # nobody is left to be told
        return len(text)

    def _is_writable(self) -> bool:
        poll = select.poll()  # one each: two threads may be writing
        poll.register(self._fd, select.POLLOUT)
        return any(events & select.POLLOUT for _fd, events in poll.poll(0))

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def isatty(self) -> bool:
        """Return whether a person watches."""
        return os.isatty(self._fd)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd


def quiet_streams() -> None:
    """Make `print` and tracebacks harmless: they go to stderr, and are dropped if it is full."""
    sys.stderr = sys.stdout = cast(TextIO, PatientStream(2))


def set_up_logs(level: str = "warning", path: str | None = None) -> None:
    """Send structlog's and the standard library's records to stderr, or to the file at `path`.

    Args:
        level: One of `LEVELS`.
        path: Appended to; created with rights for its owner only.

    Raises:
        OSError: The file cannot be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # A log on a full disk is no reason to fail either.
    stream = cast(BinaryIO, PatientStream(2 if path is None else os.open(path, flags, 0o600)))
    threshold = getattr(logging, level.upper())
    before_first_record(lambda: _configure(stream, threshold), threshold=threshold)
    # A library may set a level of its own, of which the root's knows nothing: Anthropic's SDK, told
    # to by a variable, writes down whole requests with the key.
    bridge = _Bridge(max(threshold, logging.WARNING))
    logging.basicConfig(level=bridge.level, handlers=[bridge], force=True)


def _configure(stream: BinaryIO, threshold: int) -> None:
    import msgspec
    import structlog

    encode = msgspec.json.Encoder(enc_hook=repr).encode
    # What an exception says may be anything, also what somebody has said in confidence. Where it
    # was raised is ours to tell.
    tell_exception = structlog.processors.ExceptionRenderer(_traced)
    if threshold <= logging.DEBUG:
        tell_exception = structlog.processors.format_exc_info

    def render(_logger: object, _method: str, record: MutableMapping[str, Any]) -> bytes:
        return encode(record)

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _add_turn,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            tell_exception,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.BytesLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )


def _add_turn(
    _logger: object, _method: str, record: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Say in whose turn a record was made. Looked up here, so that a turn pays nothing for it."""
    from agent_core import execution

    frame = execution.current()
    if frame is not None:
        agent = frame.agent
        record.setdefault("session_id", agent.id)
        if agent.turn is not None:
            record.setdefault("turn", agent.turn)
        for label, value in agent.root.labels.items():
            record.setdefault(label, value)
    return record


def _traced(exc_info: tuple[Any, BaseException, Any]) -> str:
    """Return the types of an exception and of those behind it, and where each was raised."""
    import textwrap
    import traceback

    told: list[str] = []
    exc: BaseException | None = exc_info[1]
    while exc is not None and len(told) < _MAX_CAUSES:
        lines = "".join(traceback.format_tb(exc.__traceback__))
        inner = exc.exceptions if isinstance(exc, BaseExceptionGroup) else ()
        parts = (textwrap.indent(_traced((type(each), each, None)), "  | ") for each in inner)
        told.append("\n".join([f"{lines}{type(exc).__qualname__}", *parts]))
        exc = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    return "\n\nled to\n\n".join(reversed(told))


class _Bridge(logging.Handler):
    """Hands records of the standard library to structlog, by their logger's name."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on."""
        try:
            logger = get_logger(record.name)
            logger.log(record.levelno, record.getMessage(), exc_info=record.exc_info)
        except Exception:
            self.handleError(record)  # a library's bad record is not its caller's failure
