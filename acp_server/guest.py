"""Who a client is to us, and what it may do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from msgspec import Struct

__all__ = ["LOCAL", "Guest"]


def _nothing(_value: object) -> None:
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
        number: What the connection is called in the log; `None` for the only one there is.
        on_stopped: Called for every prompt that the client stopped, with the seconds from then to
            its answer.
    """

    owner: str = ""
    is_remote: bool = False
    root: str | None = None
    max_prompts: int = 0
    admit: Callable[[str], None] = _nothing
    number: int | None = None
    on_stopped: Callable[[float], None] = _nothing

    def may_open(self, path: str) -> bool:
        """Return whether a session may lie in a directory, wherever links lead."""
        return (
            self.root is None
            or os.path.commonpath((self.root, os.path.realpath(path))) == self.root
        )


LOCAL: Final = Guest()
"""The person whose process this is, on standard input and output."""
