"""Asking the client's person: a form, an address to open, or a choice shown as a permission.

A client is asked in a way that it offered, and in no other. Whatever is not clearly an answer is
none.

Source: the elicitation section of ACP v1.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct

from acp_server import types as wire
from acp_server.capabilities import Features
from acp_server.client_calls import call_client
from acp_server.peer import Peer
from agent_core.cancellation import AbortSignal
from agent_core.errors import ToolError
from agent_core.forms import Form
from agent_core.questions import Action, Nobody, Reply, Visit, nobody

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["ClientAsk", "lend_person"]

MAX_CHOICES: Final = 6
"""More than that is no list of buttons any more."""
DECLINE: Final = "decline"

_T = TypeVar("_T")


class _Created(Struct, frozen=True):
    action: str
    content: dict[str, Any] | None = None


def lend_person(
    agent: Agent,
    session_id: str,
    peer: Peer,
    features: Features,
    all_shown: Callable[[], Awaitable[object]],
) -> Callable[[], None]:
    """Have `agent` ask the client's person; its subagents made from now on do so, too.

    Returns:
        What takes the person away again, unless the agent was lent another one since.
    """
    lent = agent.ask = ClientAsk(peer, session_id, features, all_shown)

    def take_back() -> None:
        if agent.ask is lent:
            agent.ask = Nobody()

    return take_back


class ClientAsk:
    """The `Ask` of a session with a client.

    Args:
        peer: The client.
        session_id: The session, on which the questions of its subagents are asked, too.
        features: What the client offered.
        all_shown: Waits until the client has been shown all that happened before the question.
    """

    def __init__(
        self,
        peer: Peer,
        session_id: str,
        features: Features,
        all_shown: Callable[[], Awaitable[object]],
    ) -> None:
        self._peer = peer
        self._session_id = session_id
        self._features = features
        self._all_shown = all_shown

    async def form(self, form: Form, signal: AbortSignal, *, call_id: str | None = None) -> Reply:
        """See `agent_core.tools.tool.Ask`.

        Cancellation: safe, through `signal` too; the client is told by ``$/cancel_request``.
        Concurrency: any number of tasks.
        """
        if self._features.shows_forms:
            fields = {"mode": "form", "requestedSchema": form.schema()}
            created = await self._create(form.message, fields, signal, call_id)
            return Reply(_action(created), created.content or {})
        choices = _choices(form)
        if choices is None:
            raise nobody("the client cannot show this question to anybody")
        return await self._choose(form.message, choices, signal, call_id)

    async def url(
        self, message: str, url: str, signal: AbortSignal, *, call_id: str | None = None
    ) -> Visit:
        """See `agent_core.tools.tool.Ask`. There is no other way to ask for this.

        Cancellation: safe, through `signal` too; the client is told by ``$/cancel_request``.
        Concurrency: any number of tasks.
        """
        if not self._features.opens_urls:
            raise nobody("the client cannot open an address for anybody")
        elicitation_id = f"elicitation-{secrets.token_hex(8)}"
        fields = {"mode": "url", "elicitationId": elicitation_id, "url": url}
        created = await self._create(message, fields, signal, call_id)
        done = {"elicitationId": elicitation_id}
        return Visit(_action(created), lambda: self._peer.notify("elicitation/complete", done))

    async def _create(
        self, message: str, fields: Mapping[str, Any], signal: AbortSignal, call_id: str | None
    ) -> _Created:
        params = {"sessionId": self._session_id, "message": message, **fields}
        if call_id is not None:
            params["toolCallId"] = call_id
        return await self._call("elicitation/create", params, _Created, signal)

    async def _choose(
        self,
        message: str,
        choices: list[tuple[str, dict[str, Any]]],
        signal: AbortSignal,
        call_id: str | None,
    ) -> Reply:
        """Ask as if for a permission, which every client can show: a button for each choice.

        No is one of them, since some clients cannot dismiss such a question but by a cancel.
        """
        answers = {f"choice-{at}": content for at, (_title, content) in enumerate(choices, 1)}
        titles = (title for title, _content in choices)
        options = [
            {"optionId": option_id, "name": title, "kind": "allow_once"}
            for option_id, title in zip(answers, titles, strict=True)
        ]
        options.append({"optionId": DECLINE, "name": "None of these", "kind": "reject_once"})
        asked = wire.AskedToolCall(
            call_id or f"question-{secrets.token_hex(8)}",
            message,
            "pending",
            "other",
            "ask",
        )
        params = {"sessionId": self._session_id, "toolCall": asked, "options": options}
        method, answer = "session/request_permission", wire.PermissionAnswer
        outcome = (await self._call(method, params, answer, signal)).outcome
        if outcome.outcome == "cancelled":
            return Reply("cancel")
        if outcome.option_id == DECLINE:
            return Reply("decline")
        if outcome.option_id not in answers:
            raise ToolError("the client chose something that is none of the choices")
        return Reply("accept", answers[outcome.option_id])

    async def _call(self, method: str, params: object, answer: type[_T], signal: AbortSignal) -> _T:
        async with signal.scope():
            await self._all_shown()  # the call is announced before it asks
        # A person may take any time; what ends the wait is the turn.
        return await call_client(
            self._peer, method, params, answer, signal=signal, limit_s=math.inf
        )


def _action(created: _Created) -> Action:
    match created.action:
        case "accept" | "decline" | "cancel" as action:
            return action
    raise ToolError("the client answered the question with something unknown")


def _choices(form: Form) -> list[tuple[str, dict[str, Any]]] | None:
    """Return what one choice answers `form` with, each with its title; `None` if none does."""
    names = form.required or (tuple(form.properties) if len(form.properties) == 1 else ())
    if not form.properties:
        return [("OK", {})]
    if len(names) != 1:
        return None
    name = names[0]
    asked = form.properties[name]
    if asked.type == "boolean":
        return [("Yes", {name: True}), ("No", {name: False})]
    if asked.type != "string" or asked.options is None or len(asked.options) > MAX_CHOICES:
        return None
    return [(option.title, {name: option.value}) for option in asked.options]
