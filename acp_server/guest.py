"""Who a client is to us, and what it may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct

__all__ = ["LOCAL", "Guest"]


def _nothing(_method: str) -> None:
    pass


class Guest(Struct, frozen=True):
    """A client, as its connection sees it.

    Attributes:
        owner: Whose sessions it may name, and who owns those it makes.
        is_remote: Whether it is elsewhere: then what is for this machine's user, such as logging
            in and out, is not offered.
        root: The real path below which every directory of a session has to lie; `None` for any.
        max_prompts: Unanswered prompts that a session may have; 0 for as many as the queue takes.
        admit: Called with the method of every request; raises `RpcError` to refuse it.
    """

    owner: str = ""
    is_remote: bool = False
    root: str | None = None
    max_prompts: int = 0
    admit: Callable[[str], None] = _nothing


LOCAL: Final = Guest()
"""The person whose process this is, on standard input and output."""
