"""Where the tests find what others made: `make test` puts it below ``.venv/foreign``.

The versions stand in ``tests/acp_server/foreign``. What is not there is not tried: the test is
skipped and says so.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

__all__ = ["ACPX", "HERE", "PYTHON_SDK", "TYPESCRIPT_SDK", "on_node", "python_sdk_to_come"]

HERE: Final = Path(__file__).parent / "acp_server/foreign"
_PLACE: Final = Path(__file__).parents[1] / ".venv/foreign"
PYTHON_SDK: Final = _PLACE / "python"
TYPESCRIPT_SDK: Final = _PLACE / "node_modules/@agentclientprotocol/sdk"
ACPX: Final = _PLACE / "node_modules/acpx"


def on_node(package: Path) -> Path:
    """Return `package`; skip the test where it cannot run."""
    if shutil.which("node") is None:
        pytest.skip(f"NOT TRIED with {package.name}: node is not installed")
    return _there(package, package / "package.json")


def python_sdk_to_come() -> Path:
    """Return the folder that has the next release of the Python SDK; skip the test without it."""
    return _there(PYTHON_SDK, PYTHON_SDK / "acp/__init__.py")


def _there(place: Path, file: Path) -> Path:
    if not file.is_file():
        pytest.skip(f"NOT TRIED: `make test` did not get to install {place}")
    return place
