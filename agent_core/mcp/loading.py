"""The MCP SDK, loaded aside: it takes seconds, and most sessions name no server."""

from __future__ import annotations

import asyncio
import importlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["load"]

_loading: Future[ModuleType] | None = None


async def load() -> ModuleType:
    """Return `agent_core.mcp.client`, imported with the SDK in a daemon thread.

    Cancellation: safe; loading goes on. Concurrency: any number of tasks.

    Raises:
        ImportError: The SDK is not there, or broken; so is whatever else its import raises.
    """
    global _loading
    if _loading is None:
        _loading = Future()
        _loading.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        threading.Thread(target=_import, args=(_loading,), name="mcp-import", daemon=True).start()
    return await asyncio.wrap_future(_loading)


def _import(loaded: Future[ModuleType]) -> None:
    try:
        loaded.set_result(importlib.import_module("agent_core.mcp.client"))
    except Exception as exc:
        loaded.set_exception(exc)
    except BaseException as exc:  # or else those who wait would do so for ever
        loaded.set_exception(ImportError(f"mcp ended its import with {type(exc).__name__}"))
