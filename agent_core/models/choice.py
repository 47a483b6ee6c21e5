"""The models an agent may choose from."""

from __future__ import annotations

from collections.abc import Callable

from agent_core.errors import ModelError
from agent_core.models.adapter import ModelAdapter

__all__ = ["Models"]


class Models:
    """Adapters by the names of their models; the first is the default.

    Args:
        default: The model of sessions that chose none.
        others: What else may be chosen.
        find: Makes an adapter for a name that is none of theirs, or returns `None`; what it made
            is kept.
    """

    def __init__(
        self,
        default: ModelAdapter,
        *others: ModelAdapter,
        find: Callable[[str], ModelAdapter | None] | None = None,
    ) -> None:
        self._adapters = {adapter.info.name: adapter for adapter in (default, *others)}
        self._find = find

    @property
    def default(self) -> str:
        """The name of the model of sessions that chose none."""
        return next(iter(self._adapters))

    @property
    def adapters(self) -> tuple[ModelAdapter, ...]:
        """What can be chosen, the default first."""
        return tuple(self._adapters.values())

    def get(self, name: str) -> ModelAdapter | None:
        """Return the adapter for the model `name`, or `None`."""
        adapter = self._adapters.get(name)
        if adapter is None and self._find is not None:
            adapter = self._find(name)
            if adapter is not None:
                self._adapters[name] = adapter
        return adapter

    def adapter(self, name: str) -> ModelAdapter:
        """Return the adapter for the model `name`.

        Raises:
            ModelError: ``MODEL_NOT_FOUND``.
        """
        adapter = self.get(name)
        if adapter is None:
            raise ModelError(f"no model {name!r} is configured", code="MODEL_NOT_FOUND")
        return adapter

    async def aclose(self) -> None:
        """Close every adapter. Called once, when no stream is open."""
        for adapter in self._adapters.values():
            await adapter.aclose()
