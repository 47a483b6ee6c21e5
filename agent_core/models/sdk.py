"""The providers' libraries, loaded aside: they take a second or more, and most starts need none."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

from agent_core.cancellation import AbortSignal

if TYPE_CHECKING:
    import ssl
    from types import ModuleType

__all__ = ["CertificatesUnreadable", "Library", "load", "prewarm"]

Library = Literal["openai", "anthropic"]
"""The name of a provider's library, as it is imported."""


class CertificatesUnreadable(Exception):
    """The certificates that the environment names cannot be read."""


_loading: dict[Library, Future[tuple[ModuleType, ssl.SSLContext]]] = {}


def prewarm(library: Library, when_loaded: Callable[[], object] | None = None) -> None:
    """Begin to load `library` in a daemon thread, unless that has begun. Returns at once.

    Args:
        library: Which.
        when_loaded: Called in that thread when it is loaded, or cannot be.
    """
    loading = _begin(library)
    if when_loaded is not None:
        loading.add_done_callback(lambda _loaded: when_loaded())


async def load(library: Library, signal: AbortSignal) -> tuple[ModuleType, ssl.SSLContext]:
    """Return the library and the certificates to trust.

    Cancellation: through `signal`; loading goes on. Concurrency: any number of tasks.

    Raises:
        ImportError: It is not there, or broken; so is whatever else its import raises.
        CertificatesUnreadable: Those that the environment names.
        TurnAborted: The signal fired.
    """
    loading = _begin(library)
    if loading.done():
        return loading.result()
    async with signal.scope():
        loaded = await asyncio.wrap_future(loading)
    return loaded


def _begin(library: Library) -> Future[tuple[ModuleType, ssl.SSLContext]]:
    loading = _loading.get(library)
    if loading is None:
        loading = _loading[library] = Future()
        loading.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        threading.Thread(
            target=_import, args=(library, loading), name=f"{library}-import", daemon=True
        ).start()
    return loading


def _import(library: Library, loaded: Future[tuple[ModuleType, ssl.SSLContext]]) -> None:
    try:
        module = importlib.import_module(library)
        # The client's class and its resources are loaded when first looked at.
        _ = module.AsyncOpenAI if library == "openai" else module.AsyncAnthropic
        # The certificates take 30 ms, and the loop is not to wait for them either.
        loaded.set_result((module, _certificates()))
    except Exception as exc:
        loaded.set_exception(exc)
    except BaseException as exc:  # or else those who wait would do so for ever
        loaded.set_exception(ImportError(f"{library} ended its import with {type(exc).__name__}"))


def _certificates() -> ssl.SSLContext:
    import httpx2

    try:
        return httpx2.create_ssl_context()
    except OSError as exc:  # an SSLError is one, too
        named = " and ".join(
            name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ
        )
        raise CertificatesUnreadable(
            f"the certificates to trust cannot be read, look at {named or 'those of the system'}"
        ) from exc
