"""Loggers that cost nothing until they are used.

structlog takes longer to import than the whole handshake may take, so a module asks for its logger
here and structlog arrives with the first record.
"""

from __future__ import annotations

from typing import Any

__all__ = ["get_logger"]


class _LazyLogger:
    """Stands in for a structlog logger; becomes one at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        import structlog

        return getattr(structlog.get_logger().bind(logger=self._name), method)


def get_logger(name: str) -> Any:
    """Return a structlog logger that puts `name` into each record's ``logger`` field."""
    return _LazyLogger(name)
