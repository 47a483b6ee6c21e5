"""A plugin whose listener forwards the turn's signal to a database query.

It looks the prompt up in a table of notes and hands what it finds to the model. The query runs in a
thread, which nobody can cancel; SQLite's own `interrupt` ends it, and the signal calls that.

    NOTES=notes.sqlite3 acp-agent chat --plugin examples.database:set_up
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio.to_thread

from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.content import Block, Text, text_of
from agent_core.loop import Allow, Refuse
from agent_core.runtime import AgentRuntime

LOOK_UP = "select text from notes where ? like '%' || word || '%' limit 5"


def set_up(runtime: AgentRuntime) -> None:
    """Add the listener to every agent."""
    listener = partial(add_notes, os.environ.get("NOTES", "notes.sqlite3"))
    runtime.hooks.on("agent/prompt-submit", listener)


async def add_notes(
    path: str,
    _agent: Agent,
    content: tuple[Block, ...],
    _source: str,
    signal: AbortSignal,
    next_: Callable[[], Awaitable[Allow | Refuse]],
) -> Allow | Refuse:
    """Add notes that fit the prompt to what the model is told."""
    verdict = await next_()
    if isinstance(verdict, Refuse):
        return verdict
    rows = await query(path, LOOK_UP, (text_of(content),), signal)
    notes = tuple(Text(text) for (text,) in rows)
    return Allow(verdict.content, (*verdict.context, *notes))


async def query(
    path: str, sql: str, parameters: tuple[Any, ...], signal: AbortSignal
) -> list[tuple[Any, ...]]:
    """Run one query; end it when the signal fires.

    Cancellation: through the signal. Concurrency: any number, each on its own connection.

    Raises:
        TurnAborted: The signal fired; the query has ended.
        sqlite3.Error: The query failed by itself.
    """
    signal.raise_if_aborted()
    connection = sqlite3.connect(path, check_same_thread=False)
    remove = signal.on_abort(lambda _reason: connection.interrupt())
    try:
        return await anyio.to_thread.run_sync(
            lambda: connection.execute(sql, parameters).fetchall()
        )
    except sqlite3.OperationalError:
        signal.raise_if_aborted()  # it was interrupted, not wrong
        raise
    finally:
        remove()
        connection.close()
