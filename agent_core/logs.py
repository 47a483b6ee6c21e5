"""Loggers that cost nothing until they are used.

structlog takes longer to import than the whole handshake may take, so a module asks for its logger
here and structlog arrives with the first record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["before_first_record", "get_logger"]

_preparations: list[Callable[[], None]] = []


class _LazyLogger:
    """Stands in for a structlog logger; becomes one at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        import structlog

        while _preparations:
            _preparations.pop()()
        return getattr(structlog.get_logger().bind(logger=self._name), method)


def before_first_record(set_up: Callable[[], None]) -> None:
    """Call `set_up` when the next record is about to be made, so that it can configure structlog.

    Without it, records made before the program has configured structlog look as structlog likes.
    """
    _preparations.append(set_up)


def get_logger(name: str) -> Any:
    """Return a structlog logger that puts `name` into each record's ``logger`` field."""
    return _LazyLogger(name)
