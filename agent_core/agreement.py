"""Whether an answer agrees with a JSON schema, found out in a process that can be ended.

A schema comes from a model, and a pattern in it can take for ever. Python's regexes cannot be
interrupted and let nothing else run, so neither they nor anything else of a check is in this
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import anyio
import msgspec
from msgspec import Struct

from agent_core.cancellation import AbortSignal
from agent_core.errors import ToolError
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Isolation, Report, Tool, ToolContext, ToolOutput

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["disagreement", "schema_problem"]

LIMIT_S: Final = 10.0
"""For one check, with the start of its process."""
MAX_PROBLEM_CHARS: Final = 200


async def schema_problem(
    schema: Mapping[str, Any], agent: Agent, signal: AbortSignal
) -> str | None:
    """Return why `schema` is no JSON schema, `None` if it is one.

    Cancellation: through `signal`; the process is gone then. Concurrency: any number of tasks.

    Raises:
        TurnAborted: The signal fired.
    """
    return await _problem(_Args(dict(schema)), agent, signal)


async def disagreement(
    output: str, schema: Mapping[str, Any], agent: Agent, signal: AbortSignal
) -> str | None:
    """Return why `output` is not what `schema` demands, `None` if it is.

    Cancellation: through `signal`; the process is gone then. Concurrency: any number of tasks.

    Raises:
        TurnAborted: The signal fired.
    """
    return await _problem(_Args(dict(schema), output), agent, signal)


async def _problem(args: _Args, agent: Agent, signal: AbortSignal) -> str | None:
    check = _Check()
    context = ToolContext(
        agent, "", signal, Roots("/"), agent.files, agent.commands, lambda _content: None
    )
    try:
        with anyio.move_on_after(LIMIT_S):
            return (await check.run(args, context)).output or None
    except ToolError as exc:
        return f"it could not be checked: {exc.message}"
    finally:
        with anyio.CancelScope(shield=True):
            await check.aclose()
    return f"it could not be checked in {LIMIT_S:g} s"


class _Args(Struct, frozen=True):
    schema: dict[str, Any]
    output: str | None = None


class _Check(Tool):
    """Is offered to no model. Its output is what is wrong, or empty."""

    name: ClassVar[str] = "agreement"
    Args: ClassVar[type[Struct]] = _Args
    isolation: ClassVar[Isolation] = "process"

    def work(self, args: _Args, report: Report) -> ToolOutput:
        """Check the schema, or the output."""
        if args.output is None:
            return ToolOutput(_wrong_with(args.schema))
        return ToolOutput(_wrong_with_output(args.output, args.schema))


def _wrong_with(schema: Mapping[str, Any]) -> str:
    from jsonschema import Draft202012Validator, FormatChecker, SchemaError

    try:
        checker = FormatChecker(formats=["regex"])
        Draft202012Validator.check_schema(schema, format_checker=checker)
    except SchemaError as exc:
        return _told(exc.json_path, exc.message)
    except RecursionError:
        return "it is nested too deeply"
    return ""


def _wrong_with_output(output: str, schema: Mapping[str, Any]) -> str:
    from jsonschema import Draft202012Validator, ValidationError
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    # With a registry of its own a schema cannot have anything fetched from the network.
    registry: Registry[Any] = Registry()
    try:
        value = msgspec.json.decode(output)
        Draft202012Validator(schema, registry=registry).validate(value)
    except msgspec.DecodeError as exc:
        return f"it is not JSON ({exc})"
    except ValidationError as exc:
        return _told(exc.json_path, exc.message)
    except Unresolvable as exc:
        return f"the schema refers to {exc.ref}, which is not in it"
    except RecursionError:
        return "it is nested too deeply, or the schema refers to itself without end"
    return ""


def _told(path: str, message: str) -> str:
    return f"{path}: {message[:MAX_PROBLEM_CHARS]}"
