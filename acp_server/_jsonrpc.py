"""The one place that knows jsonrpcserver: it looks a method up, calls it, and keeps its result.

Only `dispatch_request` is used. The package's own entry points validate with jsonschema (a third
of a second to import) and gather their calls, which loses answers under cancellation. So it is
entered by its modules, as is oslash, of which it uses one: an empty stand-in for the package itself
spares its `__init__`.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

__all__ = ["Method", "dispatch", "failure", "method", "success"]

Method = Callable[[Any, Any], Awaitable[Any]]


def _enter_by_modules(name: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{name} is not installed")
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules[name] = package


_enter_by_modules("jsonrpcserver")
_enter_by_modules("oslash")

from jsonrpcserver.async_dispatcher import dispatch_request  # noqa: E402
from jsonrpcserver.request import Request  # noqa: E402
from jsonrpcserver.result import Error as failure  # noqa: E402
from jsonrpcserver.result import Success as success  # noqa: E402
from jsonrpcserver.sentinels import NODATA  # noqa: E402
from oslash.either import Left  # noqa: E402

_SIGNATURE = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("context", "payload")]
)


def method(call: Method) -> Method:
    """Prepare `call` for the method table: half of a dispatch is spent on its signature."""
    call.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
    return call


async def dispatch(
    methods: dict[str, Method], name: str, payload: object, request_id: object
) -> tuple[Any, tuple[int, str, Any] | None]:
    """Call the method `name` with `payload`.

    Cancellation: reaches the method. Concurrency: any number of tasks.

    Returns:
        The method's result and `None`, or `None` and an error's code, message and data.
    """
    _request, result = await dispatch_request(methods, None, Request(name, [payload], request_id))
    if isinstance(result, Left):
        error = result._error
        return None, (error.code, error.message, None if error.data is NODATA else error.data)
    return result._value.result, None
