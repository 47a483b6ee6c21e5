"""From the blocks of a client's prompt to ours.

What the schema has receivers be lenient with counts as absent where it is malformed; all else that
does not fit is refused. What is kept may be shown again, so only what is well-formed is.
"""

from __future__ import annotations

import string
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from acp_server import types as wire
from agent_core.content import Block, Image, Link, Resource, Text

__all__ = ["blocks_from"]

_T = TypeVar("_T")
_ROLES: Final = ("assistant", "user")
_MAX_SIZE: Final = 2**63 - 1
_BASE64: Final = f"{string.ascii_letters}{string.digits}+/".encode()


def blocks_from(prompt: list[wire.ContentBlock]) -> tuple[Block, ...]:
    """Translate a prompt.

    Raises:
        ValueError: It is empty, or has a block this agent did not offer to take.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    return tuple(_block_from(block) for block in prompt)


def _block_from(block: wire.ContentBlock) -> Block:
    kept = {"annotations": _annotations(block.annotations), "meta": _object(block.meta)}
    match block:
        case wire.TextBlock():
            return Text(block.text, **kept)
        case wire.LinkBlock():
            mime_type, title = _text(block.mime_type), _text(block.title)
            description, size = _text(block.description), _size(block.size)
            return Link(block.uri, block.name, mime_type, title, description, size, **kept)
        case wire.ResourceBlock(resource=contents):
            if contents.text is None and contents.blob is None:
                raise ValueError("an embedded resource has a text or a blob")
            if contents.blob is not None:
                _check_base64("an embedded resource's blob", contents.blob)
            mime_type, meta = _text(contents.mime_type), _object(contents.meta)
            return Resource(contents.uri, contents.text, contents.blob, mime_type, meta, **kept)
        case wire.ImageBlock():
            if not block.data:
                raise ValueError("an image's data is empty")
            _check_base64("an image's data", block.data)
            return Image(block.data, block.mime_type, _text(block.uri), **kept)
        case wire.AudioBlock():
            raise ValueError("this agent takes no audio")


def _check_base64(name: str, data: str) -> None:
    """Refuse what a provider would refuse: with it the whole history, again and again."""
    digits = data.rstrip("=")
    # A decoder would take four times as long, and the event loop waits.
    has_others = not digits.isascii() or digits.encode().translate(None, _BASE64)
    if has_others or len(data) % 4 or len(data) - len(digits) > 2:
        raise ValueError(f"{name} is not base64")


# --- lenient reading: what is malformed is not there ----------------------------------------


def _annotations(raw: wire.Lenient) -> str | None:
    found = _decoded(raw, wire.Annotations)
    if found is None:
        return None
    audience = _decoded(found.audience, list[Any])
    kept: dict[str, Any] = {
        "audience": None if audience is None else [role for role in audience if role in _ROLES],
        "lastModified": _text(found.last_modified),
        "priority": _decoded(found.priority, float),
    }
    members = {name: value for name, value in kept.items() if value is not None}
    if (meta := _object(found.meta)) is not None:
        members["_meta"] = msgspec.Raw(meta.encode())
    return msgspec.json.encode(members).decode()


def _object(raw: wire.Lenient) -> str | None:
    """Return a JSON object as text, on one line."""
    if raw is UNSET or not bytes(raw).startswith(b"{"):
        return None
    try:
        return msgspec.json.format(bytes(raw), indent=-1).decode()
    except RecursionError:
        return None


def _text(raw: wire.Lenient) -> str | None:
    return _decoded(raw, str)


def _size(raw: wire.Lenient) -> int | None:
    size = _decoded(raw, int)
    return size if size is not None and -_MAX_SIZE - 1 <= size <= _MAX_SIZE else None


def _decoded(raw: wire.Lenient, type: type[_T]) -> _T | None:
    try:
        return None if raw is UNSET else msgspec.json.decode(raw, type=type)
    except (msgspec.MsgspecError, RecursionError):
        return None
