"""Turn cancellation: the closed causes, a private controller, and the public signal.

One turn owns one `AbortController`. Everything the turn calls receives the controller's
`AbortSignal` as an explicit argument and may look at it, wait for it or listen to it; only the
owner can abort it. Cancellation is cooperative: nothing here cancels foreign work, so a tool that
ignores the signal is waited for, never abandoned. `AbortSignal.scope` is for a *leaf*: the piece
of code that itself owns the one await it gives up.

The reason says who asked and lives only as long as the turn. What is written to the session log
is the outcome, which this module knows nothing about.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Final

import anyio

from agent_core.logs import get_logger

__all__ = [
    "AbortController",
    "AbortSignal",
    "CancelCause",
    "TurnAborted",
    "agent_interrupt_reason_of",
    "is_host_cancellation",
    "normalize_cancel_cause",
]

CancelCause = Mapping[str, str]
"""``{"kind": "user"}`` or ``{"kind": "parent"}``: who asked a turn to stop."""

USER: Final[CancelCause] = MappingProxyType({"kind": "user"})
PARENT: Final[CancelCause] = MappingProxyType({"kind": "parent"})
DISPOSED: Final[CancelCause] = MappingProxyType({"kind": "disposed"})
# DISPOSED is requested by disposal only; the public boundary refuses it.
_PUBLIC: Final = {"user": USER, "parent": PARENT}
_ALL: Final = {**_PUBLIC, "disposed": DISPOSED}

log = get_logger(__name__)


class TurnAborted(Exception):
    """Raised by `AbortSignal.raise_if_aborted`. The loop catches it; tools let it pass."""

    def __init__(self, reason: object) -> None:
        super().__init__("the turn was aborted")
        self.reason = reason


def normalize_cancel_cause(value: object = None) -> CancelCause:
    """Return the canonical, read-only cause for `value`.

    Args:
        value: `None` (means user), or a plain `dict`, or a `types.MappingProxyType` of one, that
            holds exactly the `str` key ``"kind"`` with exactly the `str` ``"user"`` or
            ``"parent"``. Canonical causes are accepted again.

    Returns:
        One of two shared read-only mappings, never `value` itself unless it is one of them.

    Raises:
        TypeError: Anything else, whatever it claims to equal: subclasses, extra or non-string
            fields, unknown kinds, strings, sequences, instances, exceptions, signals.

    Source: RFC "explicit turn cancellation", Decision 1.
    """
    if value is None:
        return USER
    cause = _canonical(value, _PUBLIC)
    if cause is None:
        raise TypeError('a cancel cause is {"kind": "user"} or {"kind": "parent"}, nothing else')
    return cause


def agent_interrupt_reason_of(signal: AbortSignal) -> CancelCause | None:
    """Return why `signal` was aborted, if an agent's cancel or disposal did it.

    Looks at its argument only, never at the ambient agent.

    Returns:
        The canonical ``user``, ``parent`` or ``disposed`` reason; `None` while the signal is not
        aborted, and `None` for a foreign reason such as a deadline's.
    """
    reason = signal.reason
    return None if reason is None else _canonical(reason, _ALL)


def _canonical(value: object, known: Mapping[str, CancelCause]) -> CancelCause | None:
    if type(value) is MappingProxyType:
        # What a proxy shows can be any mapping, with any behaviour; the garbage collector's view
        # is the one way to the object behind it that runs none of that object's code.
        (value,) = gc.get_referents(value)
    if type(value) is not dict or len(value) != 1:
        return None
    ((key, kind),) = value.items()
    if type(key) is not str or key != "kind" or type(kind) is not str:
        return None
    return known.get(kind)


def is_host_cancellation() -> bool:
    """Say whether the `CancelledError` being handled was sent to this task from outside.

    A tool may raise `CancelledError` by itself, for instance by awaiting a cancelled future; that
    leaves both the task's cancel count and its effective deadline untouched.
    """
    if anyio.current_effective_deadline() == -math.inf:
        return True
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AbortSignal:
    """What a turn's callees see of its cancellation. Offers no way to abort.

    Not thread-safe, except that any thread may read `aborted`.

    Source: RFC "explicit turn cancellation", Decisions 3 and 5.
    """

    __slots__ = ("__weakref__", "_event", "_listeners", "_reason")

    def __init__(self) -> None:
        self._reason: object = None
        self._event: anyio.Event | None = None  # made by the first waiter; most signals have none
        # A dict is an ordered set: listeners run in registration order, removal is O(1).
        self._listeners: dict[object, Callable[[object], None]] = {}

    @property
    def reason(self) -> object:
        """The first reason given, or `None` while not aborted."""
        return self._reason

    @property
    def aborted(self) -> bool:
        """`True` from the abort on. It never goes back to `False`."""
        return self._reason is not None

    def raise_if_aborted(self) -> None:
        """Do nothing, unless aborted.

        Raises:
            TurnAborted: The signal was aborted; carries the reason.
        """
        if self._reason is not None:
            raise TurnAborted(self._reason)

    async def wait(self) -> object:
        """Wait for the abort and return its reason; return at once if it already happened.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        if self._reason is None:
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        return self._reason

    def on_abort(self, listener: Callable[[object], None]) -> Callable[[], None]:
        """Call `listener` once with the reason, synchronously, when the signal is aborted.

        Args:
            listener: Must not block. Its exceptions are logged and go no further. It is never
                called if the signal is aborted already; look at `aborted` first.

        Returns:
            A function that removes the listener again; calling it twice is harmless. Callees that
            outlive their call must use it, or the signal keeps them alive.
        """
        if self._reason is not None:
            return _nothing
        key = object()
        self._listeners[key] = listener

        def remove() -> None:
            self._listeners.pop(key, None)

        return remove

    def scope(self, limit_s: float | None = None) -> _AbortScope:
        """Give up the await in the block when the signal fires: ``async with signal.scope():``.

        For a leaf that owns what it awaits: a sleep, one read of a socket it will close, an
        answer from the client. Never around a listener, an adapter or a tool, and never across a
        ``yield``.

        Args:
            limit_s: Seconds after which it is given up, too; `None` for no limit.

        Raises:
            TurnAborted: On entry if aborted already (the block does not run), at the end of the
                block if the signal fired meanwhile.
            TimeoutError: At the end of the block, if it was given up after `limit_s` seconds.
        """
        return _AbortScope(self, limit_s)

    @staticmethod
    def any(*signals: AbortSignal) -> DerivedSignal:
        """Return a signal that fires with the first of `signals`, for use as a context manager.

        It stays private to the leaf that made it; leaving the ``with`` block detaches it.
        """
        return DerivedSignal(signals)

    def _abort(self, reason: object) -> bool:
        if self._reason is not None:
            return False
        self._reason = reason
        if self._event is not None:
            self._event.set()
        while self._listeners:  # one by one: a listener may remove those behind it
            listener = self._listeners.pop(next(iter(self._listeners)))
            try:
                listener(reason)
            except (Exception, asyncio.CancelledError):
                log.exception("abort_listener_failed")
        return True


class AbortController:
    """The owner's side of one `AbortSignal`. A turn's controller never leaves the loop."""

    __slots__ = ("signal",)

    def __init__(self) -> None:
        self.signal: Final = AbortSignal()

    def abort(self, reason: object) -> bool:
        """Abort the signal: set its state, then run its listeners in registration order.

        A listener that looks at the signal, or aborts again, sees it as already aborted.

        Args:
            reason: Anything but `None`. The first reason wins; later ones are dropped.

        Returns:
            `True` if this call aborted the signal, `False` if it already was.
        """
        if reason is None:
            raise TypeError("an abort needs a reason")
        return self.signal._abort(reason)


class DerivedSignal(AbortSignal):
    """A signal that follows others. Made by `AbortSignal.any`."""

    __slots__ = ("_removers",)

    def __init__(self, sources: tuple[AbortSignal, ...]) -> None:
        super().__init__()
        self._removers: list[Callable[[], None]] = []
        for source in sources:
            if source.aborted:
                self._abort(source.reason)
                return
        self._removers = [source.on_abort(self._follow) for source in sources]

    def _follow(self, reason: object) -> None:
        self.detach()
        self._abort(reason)

    def detach(self) -> None:
        """Stop following; the signal keeps the state it has."""
        while self._removers:
            self._removers.pop()()

    def __enter__(self) -> DerivedSignal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


class _AbortScope:
    """See `AbortSignal.scope`."""

    __slots__ = ("_limit_s", "_remove", "_scope", "_signal")

    def __init__(self, signal: AbortSignal, limit_s: float | None) -> None:
        self._signal = signal
        self._limit_s = limit_s

    async def __aenter__(self) -> None:
        self._signal.raise_if_aborted()
        limit_s = self._limit_s
        deadline = math.inf if limit_s is None else anyio.current_time() + limit_s
        self._scope = anyio.CancelScope(deadline=deadline)
        self._scope.__enter__()
        self._remove = self._signal.on_abort(self._cancel)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()
        is_given_up = self._scope.__exit__(exc_type, exc, traceback)
        if exc is None or is_given_up:
            self._signal.raise_if_aborted()
        if is_given_up:
            raise TimeoutError

    def _cancel(self, _reason: object) -> None:
        self._scope.cancel()


def _nothing() -> None:
    pass
