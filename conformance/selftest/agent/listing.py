"""The list of sessions, in pages. A cursor says which one came last, so that none comes twice."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from conformance.selftest.agent import checks
from conformance.selftest.agent.rpc import Message
from conformance.selftest.agent.store import Summary

__all__ = ["page_of"]

PAGE_SESSIONS: Final = 20


def page_of(summaries: list[Summary], params: Message) -> Message:
    """Return the result of ``session/list``.

    Args:
        summaries: All sessions, the newest first.
        params: Of the request.

    Raises:
        RpcError: The folder or the cursor makes no sense.
    """
    cwd = None if params.get("cwd") is None else checks.absolute(params, "cwd")
    last = _from_cursor(params["cursor"]) if params.get("cursor") is not None else None
    found = [each for each in summaries if cwd is None or each.cwd == cwd]
    if last is not None:
        found = [each for each in found if (each.created, each.session_id) < last]
    page: list[Message] = []
    for each in found[:PAGE_SESSIONS]:
        updated = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each.updated))
        shown: Message = {"sessionId": each.session_id, "cwd": each.cwd, "updatedAt": updated}
        if each.title is not None:
            shown["title"] = each.title
        if each.directories:
            shown["additionalDirectories"] = each.directories
        page.append(shown)
    if len(found) <= PAGE_SESSIONS:
        return {"sessions": page}
    last_shown = found[PAGE_SESSIONS - 1]
    cursor = _to_cursor(last_shown.created, last_shown.session_id)
    return {"sessions": page, "nextCursor": cursor}


def _to_cursor(created: float, session_id: str) -> str:
    return f"{created!r} {session_id}".encode().hex()


def _from_cursor(cursor: object) -> tuple[float, str]:
    with suppress(ValueError):
        created, session_id = bytes.fromhex(str(cursor)).decode().split(" ")
        return float(created), session_id
    raise checks.invalid("cursor", "was not given out here")
