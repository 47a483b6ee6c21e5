"""A model of our own behind somebody else's agent: it does what a scenario needs to be done.

Agents that can be pointed at an endpoint are pointed at ours. A prompt then carries what is to
happen, and the model makes it happen with the tools that the agent itself offers. It speaks the
dialect that it is spoken to: chat completions, OpenAI's responses, Anthropic's messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import anyio

from conformance.dialects import Dialect, dialect_of
from conformance.providers.server import (
    Drop,
    Gate,
    ProviderDouble,
    Reply,
    Stall,
    provider_double,
    status,
)
from conformance.toolbox import call_for

__all__ = ["BROKEN_OFF", "KEY", "ModelCall", "ScriptedModel"]

KEY: Final = "sk-conformance-0123456789"
BROKEN_OFF: Final = "Half of"
"""All that is said of an answer that breaks off."""
PIECES: Final = 4000
PIECE_EVERY_S: Final = 0.02
_LATER: Final = {"retry-after": "60"}
_ORDER: Final = re.compile(r"conformance (\w+) (\w+) (?=\{)")


class ModelCall(NamedTuple):
    """One request that the agent made of the model."""

    n: int
    """Its number, from 0, among all requests."""
    problems: list[str]
    """What every provider would refuse in the history that it carries."""


class _Order(NamedTuple):
    """What a prompt says is to happen."""

    key: str
    situation: str
    fill: dict[str, str]
    n_results: int
    """How many tool results stand behind it already."""


class ScriptedModel:
    """Plays the model for every agent of a run. Made by `serving`.

    A `Prompter`: what it returns as a prompt is an order to itself.
    """

    def __init__(self) -> None:
        self._calls: dict[str, list[int]] = {}
        self._put_off: dict[str, Gate] = {}
        self._was_called = anyio.Event()
        self._double: ProviderDouble | None = None

    @classmethod
    @asynccontextmanager
    async def serving(cls) -> AsyncIterator[ScriptedModel]:
        """Serve on the loopback interface while the block runs.

        Cancellation: safe.
        """
        model = cls()
        async with provider_double(model._reply, is_strict=False) as double:
            model._double = double
            yield model

    @property
    def env(self) -> dict[str, str]:
        """The variables by which agents and SDKs are pointed at an endpoint."""
        root = self.url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_BASE": self.url,
            "OPENAI_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": KEY,
        }

    @property
    def url(self) -> str:
        """Where it is, with the version that OpenAI's paths begin with."""
        return self._served.url

    def say(self, situation: str, key: str, fill: Mapping[str, str]) -> str | None:
        """Return the prompt that orders a situation."""
        return f"conformance {key} {situation} {json.dumps(dict(fill))}"

    def calls(self, key: str) -> list[ModelCall]:
        """Return the requests that were made for a trial so far, in order."""
        served = self._served
        return [
            ModelCall(n, dialect.problems(served.requests[n]))
            for n in self._calls.get(key, ())
            if (dialect := dialect_of(served.paths[n])) is not None
        ]

    async def called(self, key: str, timeout_s: float, *, n: int = 1) -> bool:
        """Wait until `n` requests were made for a trial; say whether they were.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        with anyio.move_on_after(timeout_s):
            while len(self._calls.get(key, ())) < n:
                await self._was_called.wait()
            return True
        return False

    async def hung_up(self, call: ModelCall, timeout_s: float) -> bool:
        """Wait until the connection that carried a request is closed; say whether it was.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        with anyio.move_on_after(timeout_s):
            await self._served.disconnected(call.n)
            return True
        return False

    def told(self, call: ModelCall) -> str:
        """Return all text of the conversation that a request carries."""
        served = self._served
        dialect = dialect_of(served.paths[call.n])
        turns = [] if dialect is None else dialect.turns(served.requests[call.n])
        return "\n".join(text for _, text in turns)

    async def put_off(self, key: str, timeout_s: float) -> bool:
        """Wait until a request for a trial was told to come again later; say whether one was.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        with anyio.move_on_after(timeout_s):
            while key not in self._put_off:
                await self._was_called.wait()
            await self._put_off[key].reached.wait()
            return True
        return False

    @property
    def _served(self) -> ProviderDouble:
        assert self._double is not None
        return self._double

    def _reply(self, path: str, request: Mapping[str, Any], n: int) -> Reply:
        dialect = dialect_of(path)
        if dialect is None:
            return status(404, {"message": f"nothing of a model is at {path}"})
        try:
            return self._played(dialect, request, n)
        except (AttributeError, KeyError, TypeError) as exc:
            return status(400, {"message": f"no request of a model: {type(exc).__name__} {exc}"})

    def _played(self, dialect: Dialect, request: Mapping[str, Any], n: int) -> Reply:
        order = _order_in(dialect.turns(request))
        if order is None:
            return dialect.says(["Hello."])
        self._calls.setdefault(order.key, []).append(n)
        if order.situation == "busy":
            self._put_off.setdefault(order.key, Gate()).opened.set()
        self._was_called.set()
        self._was_called = anyio.Event()
        match order.situation:
            case "stall":
                return Reply([dialect.begins(), Stall()])
            case "long":
                return dialect.says(["word "] * PIECES, every_s=PIECE_EVERY_S)
            case "refusal":
                return dialect.refuses()
            case "hello":
                return dialect.says(["Hel", "lo."])
            case "failure":
                return status(401, {"message": "The key is not valid.", "type": "invalid_key"})
            case "cut":
                return _cut(dialect.says([BROKEN_OFF, "."]))
            case "busy":
                busy = status(429, {"message": "Too many requests."}, headers=_LATER)
                return replace(busy, after=[self._put_off[order.key]])
        if order.n_results:
            return dialect.says(["Do", "ne."])
        call = call_for(order.situation, order.fill, dialect.tools(request))
        if call is None:
            return dialect.says([f"There is no tool for {order.situation}."])
        return dialect.calls(call.name, json.dumps(call.arguments), f"call_{n}")


def _order_in(turns: Sequence[tuple[str, str]]) -> _Order | None:
    """Return the last order that a user gave, and how far it has got."""
    n_results = 0
    for role, text in reversed(turns):
        found = list(_ORDER.finditer(text)) if role == "user" else []
        if found:
            try:
                fill, _ = json.JSONDecoder().raw_decode(text, found[-1].end())
            except ValueError:
                return None  # somebody cut it
            return _Order(found[-1][1], found[-1][2], fill, n_results)
        if role == "tool":
            n_results += 1
    return None


def _cut(reply: Reply) -> Reply:
    """Return an answer that breaks off behind its first piece of text."""
    steps = list(reply.body)
    end = next(
        index
        for index, step in enumerate(steps)
        if isinstance(step, bytes) and BROKEN_OFF.encode() in step
    )
    return replace(reply, body=[*steps[: end + 1], Drop()])
