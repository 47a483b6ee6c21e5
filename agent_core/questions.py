"""Questions to the person in front of the client.

Secrets are asked for by nobody: what a person types here ends up in the model's context and in the
session log. What comes back is held against the form; whatever does not fit is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from msgspec import Struct, structs

from agent_core.cancellation import AbortSignal
from agent_core.errors import ToolError
from agent_core.forms import Form, form_from

if TYPE_CHECKING:
    from agent_core.agent import Agent

__all__ = ["Action", "Nobody", "OnBehalf", "Reply", "Visit", "ask", "ask_form", "ask_url", "nobody"]

Action = Literal["accept", "decline", "cancel"]
"""Answered; said no to being asked; or dismissed the question without saying anything."""


class Reply(Struct, frozen=True):
    """What came of a question. `content` is the answer's fields, of an ``accept`` only."""

    action: Action
    content: Mapping[str, Any] = {}


class Visit:
    """What came of asking a person to open an address.

    Attributes:
        action: ``accept`` means that they agreed to open it, not that anything is done there.
    """

    def __init__(self, action: Action, complete: Callable[[], None]) -> None:
        self.action: Final = action
        self._complete: Callable[[], None] | None = complete

    def complete(self) -> None:
        """Tell the client that what the person was to do there is done. Once is enough."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()


class Nobody:
    """The `Ask` of an agent without a person."""

    async def form(self, form: Form, signal: AbortSignal, *, call_id: str | None = None) -> Reply:
        """Say that there is nobody."""
        raise nobody("nobody can be asked here")

    async def url(
        self, message: str, url: str, signal: AbortSignal, *, call_id: str | None = None
    ) -> Visit:
        """Say that there is nobody."""
        raise nobody("nobody can be asked here")


class OnBehalf:
    """The `Ask` of a subagent: the person of whoever it works for, who is told that it asks."""

    def __init__(self, parent: Agent, name: str) -> None:
        self._parent = parent
        self._name = name

    async def form(self, form: Form, signal: AbortSignal, *, call_id: str | None = None) -> Reply:
        """Ask above, without the call's id: nobody there knows it.

        Cancellation: through `signal`. Concurrency: any number of tasks.
        """
        named = structs.replace(form, message=f"{self._name}: {form.message}")
        return await self._parent.ask.form(named, signal)

    async def url(
        self, message: str, url: str, signal: AbortSignal, *, call_id: str | None = None
    ) -> Visit:
        """As `form`.

        Cancellation: through `signal`. Concurrency: any number of tasks.
        """
        return await self._parent.ask.url(f"{self._name}: {message}", url, signal)


def nobody(why: str) -> ToolError:
    """Return the failure of a question that nobody will see."""
    return ToolError(
        f"{why}; decide this yourself, or stop and say what you need to know",
        code="NOBODY_TO_ASK",
    )


# --- asking ---------------------------------------------------------------------------------


async def ask(
    agent: Agent, form: Form, signal: AbortSignal, *, call_id: str | None = None
) -> Reply:
    """Ask the person of `agent`, and hold the answer against the form.

    Cancellation: through `signal`. Concurrency: any number of tasks.

    Args:
        agent: Whose person.
        form: What to ask.
        signal: The turn's.
        call_id: The tool call that asks, one of `agent`'s own.

    Raises:
        ToolError: Nobody can be asked (``NOBODY_TO_ASK``), the form asks for a secret
            (``SECRET``), no answer came, or one that does not fit (``BAD_ANSWER``).
        TurnAborted: The signal fired; whatever is answered later is dropped.
    """
    _refuse_secrets(form)
    reply = await agent.ask.form(form, signal, call_id=call_id)
    return Reply("accept", form.checked(reply.content)) if reply.action == "accept" else reply


async def ask_form(
    agent: Agent,
    message: str,
    schema: Mapping[str, Any],
    signal: AbortSignal,
    *,
    call_id: str | None = None,
) -> Reply:
    """Ask what somebody else's JSON schema describes, such as an MCP server's.

    Cancellation and concurrency: as `ask`.

    Raises:
        ToolError: As `ask`; or it is not a flat form (``BAD_FORM``).
        TurnAborted: The signal fired.
    """
    return await ask(agent, form_from(message, schema), signal, call_id=call_id)


async def ask_url(
    agent: Agent, message: str, url: str, signal: AbortSignal, *, call_id: str | None = None
) -> Visit:
    """Ask the person of `agent` to open an address. What they do there is not seen here.

    Cancellation: through `signal`. Concurrency: any number of tasks.

    Raises:
        ToolError: The address is none to show (``BAD_URL``), or as `ask`.
        TurnAborted: The signal fired.
    """
    if (problem := _url_problem(url)) is not None:
        raise ToolError(f"this address cannot be shown to anybody: {problem}", code="BAD_URL")
    return await agent.ask.url(message, url, signal, call_id=call_id)


# --- what is refused ------------------------------------------------------------------------

_SECRET: Final = (
    r"(?:pass ?(?:words?|phrases?|codes?)|passwd|pwd|secrets?|credentials?"
    r"|token(?! (?:count|limit|budget|size|number))|(?:api|access|auth|bearer) tokens?"
    r"|(?:api|access|auth|private|secret|ssh|gpg|signing|encryption|license|recovery) ?keys?"
    r"|pin (?:code|number)|cvv|cvc|otp|one time code|seed phrase|recovery codes?)"
)
_NAMES_SECRET: Final = re.compile(rf"\b{_SECRET}\b|^(?:key|pin)$")
_ASKS_FOR_SECRET: Final = re.compile(
    r"\b(?:your|what is|what s|enter|type|paste|provide|give|send|share|tell)\b"
    rf"(?: \w+){{0,6}} {_SECRET}\b"
)


def _refuse_secrets(form: Form) -> None:
    typed = {name: each for name, each in form.properties.items() if each.is_typed}
    names = [text for name, each in typed.items() for text in (name, each.title or "")]
    asks = typed and any(
        _ASKS_FOR_SECRET.search(_words(text))
        for text in (form.message, *(each.description or "" for each in typed.values()))
    )
    if asks or any(_NAMES_SECRET.search(_words(name)) for name in names):
        raise ToolError(
            "this asks for a secret, and secrets are asked for by nobody here; say where the"
            " person can put it instead, such as an environment variable or a file",
            code="SECRET",
        )


def _words(text: str) -> str:
    """Return a name or a sentence as lower-case words: ``apiKey`` and ``API_KEY`` are the same."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return " ".join(re.findall(r"[^\W_]+", spaced.lower()))


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return "it is none"
    is_local = host in ("localhost", "127.0.0.1", "::1")
    if not host or not url.isprintable() or " " in url:
        return "it is none"
    if parts.scheme != "https" and not (parts.scheme == "http" and is_local):
        return "it does not begin with https://"
    if "@" in parts.netloc:
        return "it has a name or password in it"
    if any(_NAMES_SECRET.search(_words(name)) for name, _value in parse_qsl(parts.query)):
        return "it has a secret in it"
    return None
