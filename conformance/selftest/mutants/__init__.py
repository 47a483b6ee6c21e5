"""The mutants, by name. Each has one bug that was seen in an agent or that a tool has missed."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants import (
    cancelling,
    clients,
    handshake,
    messages,
    models,
    processes,
    sessions,
    stored,
    tools,
    turns,
)
from conformance.selftest.mutants.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

_ALL: Final = (
    *messages.MUTANTS,
    *handshake.MUTANTS,
    *sessions.MUTANTS,
    *stored.MUTANTS,
    *turns.MUTANTS,
    *tools.MUTANTS,
    *clients.MUTANTS,
    *cancelling.MUTANTS,
    *models.MUTANTS,
    *processes.MUTANTS,
)
MUTANTS: Final[dict[str, Mutant]] = {each.name: each for each in _ALL}
