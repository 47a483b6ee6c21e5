"""Names for parameters that stay the same from one process to the next."""

from __future__ import annotations

import re

__all__ = ["plain"]


def plain(value: object) -> str:
    """Return what `repr` does, without addresses: workers must agree on the names of tests."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
