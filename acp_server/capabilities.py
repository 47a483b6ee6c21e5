"""What a client offered in ``initialize``. Anything malformed counts as not offered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

__all__ = ["Features", "features_of"]


class Features(Struct, frozen=True):
    """What this client can handle beyond the baseline.

    Attributes:
        reads_files: ``fs/read_text_file``.
        writes_files: ``fs/write_text_file``.
        has_terminals: The ``terminal/*`` methods.
        shows_forms: ``elicitation/create`` with a form.
        opens_urls: ``elicitation/create`` with a URL.
        knows_compaction: Compaction updates.
        knows_notices: Notice updates.
        shows_subagents: The sessions of subagents.
        runs_logins: Authentication methods of the type ``terminal``.
    """

    reads_files: bool = False
    writes_files: bool = False
    has_terminals: bool = False
    shows_forms: bool = False
    opens_urls: bool = False
    knows_compaction: bool = False
    knows_notices: bool = False
    shows_subagents: bool = False
    runs_logins: bool = False


def features_of(capabilities: bytes) -> Features:
    """Read ``clientCapabilities``."""
    try:
        offered = msgspec.json.decode(capabilities)
    except msgspec.MsgspecError:
        offered = None
    return Features(
        reads_files=_at(offered, "fs", "readTextFile") is True,
        writes_files=_at(offered, "fs", "writeTextFile") is True,
        has_terminals=_at(offered, "terminal") is True,
        shows_forms=isinstance(_at(offered, "elicitation", "form"), Mapping),
        opens_urls=isinstance(_at(offered, "elicitation", "url"), Mapping),
        knows_compaction=isinstance(_at(offered, "session", "compaction"), Mapping),
        knows_notices=isinstance(_at(offered, "session", "notices"), Mapping),
        shows_subagents=isinstance(_at(offered, "subagents"), Mapping),
        runs_logins=_at(offered, "auth", "terminal") is True,
    )


def _at(value: Any, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    found: object = value
    return found
