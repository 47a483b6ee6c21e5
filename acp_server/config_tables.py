"""The tables of the configuration file, and what is wrong with a value that does not fit."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta, Struct
from msgspec.structs import fields

from agent_core.models.adapter import Price

__all__ = [
    "ModelConfig",
    "Name",
    "NetworkConfig",
    "Permissions",
    "ProviderConfig",
    "SubagentConfig",
    "SubagentName",
    "in_words",
]

_KEY: Final = r"^[!-~]+\Z"
_URL: Final = r"^https?://[!-~]+\Z"
_SOCKET_URL: Final = r"^wss?://(?![^/?#]*@)[!-~]+\Z"
_VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*\Z"
_ABSOLUTE: Final = r"^/[^\0]*\Z"
_HEADER: Final = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z"
_HEADER_VALUE: Final = r"^[ -~]*\Z"
_NAME: Final = r"^(?!rehearsal\Z).*\S"
_SUBAGENT: Final = r"^(?!(?:spawn|fork)\Z)[A-Za-z0-9_-]{1,40}\Z"
_WORDS: Final = {  # what is wrong with a text that does not match
    _KEY: "is empty or has characters that no key has",
    _URL: "must begin with http:// or https://, and have no spaces",
    _SOCKET_URL: "must begin with ws:// or wss://, and have no spaces and no password",
    _VARIABLE: "is no name of an environment variable",
    _HEADER: "has a name that no header has",
    _HEADER_VALUE: "may have printable ASCII only",
    _NAME: "needs names of its own",
    _SUBAGENT: "has a name that is taken, or is not one of letters, digits, - and _",
    _ABSOLUTE: "must be an absolute path",
}
ApiName = Literal["chat", "responses", "anthropic"]
Permissions = Literal["ask", "reject", "allow"]
_CHOICES: Final = {"api": get_args(ApiName), "permissions": get_args(Permissions)}
_UNKNOWN: Final = "Object contains unknown field "
Name = Annotated[str, Meta(pattern=_NAME)]
SubagentName = Annotated[str, Meta(pattern=_SUBAGENT)]
_Positive = Annotated[int, Meta(ge=1)]
_Text = Annotated[str, Meta(min_length=1)]


class ProviderConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of ``[providers]``: where a provider is, and what it is shown.

    Attributes:
        api: What it speaks; by default what the provider of that name is known to, else ``chat``.
        base_url: Where it is, if not where the provider of that name is known to be.
        key: The key itself.
        key_command: A command that prints the key, and its arguments.
        key_variable: The environment variable that has the key; outranks the two above.
        headers: Sent with every request.
    """

    api: ApiName | None = None
    base_url: Annotated[str, Meta(pattern=_URL)] | None = None
    key: Annotated[str, Meta(pattern=_KEY)] | None = None
    key_command: Annotated[tuple[_Text, ...], Meta(min_length=1)] | None = None
    key_variable: Annotated[str, Meta(pattern=_VARIABLE)] | None = None
    headers: dict[
        Annotated[str, Meta(pattern=_HEADER)], Annotated[str, Meta(pattern=_HEADER_VALUE)]
    ] = {}


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of ``[models]``: a model under a name of one's own. What is not given is as known.

    Attributes:
        model: ``provider:id``.
        api: What to speak with this model, if not what its provider speaks.
        sampling: Sent with every request as it is: ``temperature`` and so on.
        context_tokens, max_output_tokens, takes_images, takes_files, efforts, effort, price: See
            `agent_core.models.adapter.ModelInfo`.
    """

    model: str
    api: ApiName | None = None
    sampling: dict[str, Any] = {}
    context_tokens: _Positive | None = None
    max_output_tokens: _Positive | None = None
    takes_images: bool | None = None
    takes_files: bool | None = None
    efforts: tuple[str, ...] | None = None
    effort: str | None = None
    price: Price | None = None


class SubagentConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of ``[subagents]``: another ACP agent that work can be given to, under this name.

    Attributes:
        command: Its program and arguments.
        description: What it is good for, for the model.
        env: Variables its process gets besides those it inherits.
        cwd: Where its process starts, an absolute path; by default the session's directory. With
            a `url` the directory of its session, over there.
        permissions: Who answers when it asks: the person, or nobody and always in the same way.
        url: Where it is, ``ws://`` or ``wss://``, in the place of `command`.
        token: What it is shown there.
        token_command: A command that prints the token, and its arguments.
        token_variable: The environment variable that has the token; outranks the two above.
    """

    command: Annotated[tuple[_Text, ...], Meta(min_length=1)] = ()
    description: str = ""
    env: dict[Annotated[str, Meta(pattern=_VARIABLE)], str] = {}
    cwd: Annotated[str, Meta(pattern=_ABSOLUTE)] | None = None
    permissions: Permissions = "ask"
    url: Annotated[str, Meta(pattern=_SOCKET_URL)] | None = None
    token: Annotated[str, Meta(pattern=_KEY)] | None = None
    token_command: Annotated[tuple[_Text, ...], Meta(min_length=1)] | None = None
    token_variable: Annotated[str, Meta(pattern=_VARIABLE)] | None = None


class NetworkConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The table ``[network]``: who may reach ``serve --listen``, and how much one client may take.

    Attributes:
        origins: Origins, such as ``https://editor.example``, of pages that may connect.
        hosts: The only names the server may be looked up by; by default any, and on loopback those
            of this computer.
        max_message_bytes: Of one message that comes in.
        max_unread_bytes: Of output that a client has not read; it is disconnected above.
        max_connections: Of all clients.
        max_sessions: Open on one connection.
        max_prompts: Unanswered ones of one session.
        max_requests: Served at once on one connection.
        idle_s: How long a client with nothing going may say nothing; 0 for any time.
        keep_s: How long a turn may go on without its client, with ``--on-disconnect keep``.
        absent_s: How long a client by HTTP may say nothing while it reads no stream.
        ping_s: Between two pings; who answers none for twice as long is gone. A stream by HTTP is
            never quiet for longer, nor for more than 15 seconds.
        header_s, body_s: How long a request's headers, and then its body, may take to be there.
        handshake_s: How long a connection may be without ``initialize``.
        proxies: Addresses or networks, such as ``10.0.0.0/8``, of proxies whose
            ``X-Forwarded-For`` says whom they speak for.
    """

    origins: tuple[_Text, ...] = ()
    hosts: tuple[_Text, ...] = ()
    max_message_bytes: _Positive = 64 * 1024 * 1024
    max_unread_bytes: _Positive = 64 * 1024 * 1024
    max_connections: _Positive = 2000
    max_sessions: _Positive = 100
    max_prompts: _Positive = 64
    max_requests: _Positive = 256
    idle_s: Annotated[float, Meta(ge=0)] = 0.0
    keep_s: Annotated[float, Meta(ge=0)] = 3600.0
    absent_s: Annotated[float, Meta(gt=0)] = 30.0
    ping_s: Annotated[float, Meta(gt=0)] = 20.0
    header_s: Annotated[float, Meta(gt=0)] = 20.0
    body_s: Annotated[float, Meta(gt=0)] = 60.0
    handshake_s: Annotated[float, Meta(gt=0)] = 30.0
    proxies: tuple[_Text, ...] = ()


def in_words(problem: str, kind: Any, inner: str) -> str:
    """Say what is wrong with a value, without quoting it, or a pattern.

    Args:
        problem: What msgspec says of it.
        kind: The table it was held against.
        inner: Where in that table it stands, each part behind a dot.
    """
    if problem.startswith("Invalid enum value"):
        problem = f"Expected one of {', '.join(_CHOICES[inner.rpartition('.')[2]])}"
    if problem.startswith(_UNKNOWN):
        return _unknown_key(problem.removeprefix(_UNKNOWN).strip("`"), kind, inner)
    words = (words for pattern, words in _WORDS.items() if repr(pattern) in problem)
    return next(words, problem[0].lower() + problem[1:])


def _unknown_key(name: str, kind: Any, inner: str) -> str:
    from difflib import get_close_matches

    for part in filter(None, inner.split(".")):
        kind = next(field.type for field in fields(kind) if field.name == part)
        kind = next(each for each in (*get_args(kind), kind) if hasattr(each, "__struct_fields__"))
    keys = kind.__struct_fields__
    close = " or ".join(get_close_matches(name, keys, 2))
    meant = f"; did you mean {close}? There" if close else "; there"
    return f"there is no key {name!r}{meant} are {', '.join(keys)}"
