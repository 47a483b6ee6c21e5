"""``acp-agent conformance``: hands over to the conformance suite, which knows nothing of us."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["add_conformance_command", "run_conformance"]


def add_conformance_command(commands: Any) -> None:
    """List the command. What stands behind it is the suite's to read."""
    commands.add_parser(
        "conformance",
        add_help=False,
        help="judge any ACP agent: acp-agent conformance run -- COMMAND",
    )


def run_conformance(arguments: Sequence[str]) -> NoReturn:
    """Become the suite."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "conformance", *arguments])
