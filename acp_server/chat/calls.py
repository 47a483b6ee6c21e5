"""A tool call as far as a person sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from acp_server.chat.text import clean_line, to_string

__all__ = ["DONE", "FAILED", "RUNNING", "ToolCall"]

RUNNING, DONE, FAILED = "running", "completed", "failed"
_ENDED: Final = (DONE, FAILED)


class ToolCall(Struct):
    """What is known of a call so far.

    Attributes:
        indent: What its line begins with; a subagent's stands below its parent's.
        is_announced: By the agent, rather than known from a question only.
    """

    indent: str = ""
    name: str = ""
    title: str = ""
    kind: str = ""
    status: str = RUNNING
    content: list[Any] = []
    is_content_shown: bool = False
    is_announced: bool = False

    def merge(self, fields: Mapping[str, Any]) -> bool:
        """Take over what an update says; say whether its line is another one now."""
        before = (self.title, self.status)
        if title := clean_line(fields.get("title")):
            self.title = title
        if kind := to_string(fields.get("kind")):
            self.kind = kind
        if name := to_string(fields.get("name")):
            self.name = name
        if status := to_string(fields.get("status")):
            self.status = status if status in _ENDED else RUNNING
        if isinstance(fields.get("content"), list):
            is_same = fields["content"] == self.content
            self.is_content_shown = self.is_content_shown and is_same
            self.content = fields["content"]
        return before != (self.title, self.status)
