"""Loggers that cost nothing until they are used.

structlog takes longer to import than the whole handshake may take, so a module asks for its logger
here and structlog arrives with the first record that is to be written. A program that sets nothing
up is told of warnings and errors only; `before_first_record` lets it hear more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

__all__ = ["before_first_record", "get_logger"]

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30}  # what others write is never dropped
_preparations: list[Callable[[], None]] = []
_threshold = 30


class _LazyLogger:
    """Stands in for a structlog logger; becomes one at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if _LEVELS.get(method, _threshold) < _threshold:
            return _drop
        import structlog

        while _preparations:
            _preparations.pop()()
        return getattr(structlog.get_logger().bind(logger=self._name), method)


def before_first_record(set_up: Callable[[], None], *, threshold: int = 0) -> None:
    """Call `set_up` when the next record is about to be made, so that it can configure structlog.

    Without it, records made before the program has configured structlog look as structlog likes.

    Args:
        set_up: Takes the place of one that was not called yet.
        threshold: Records below this level, a number of `logging`, are dropped without a look.
    """
    global _threshold
    _threshold = threshold
    _preparations[:] = [set_up]


def _drop(*_args: object, **_fields: object) -> None:
    pass


def get_logger(name: str) -> Any:
    """Return a structlog logger that puts `name` into each record's ``logger`` field."""
    return _LazyLogger(name)
