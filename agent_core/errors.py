"""What can go wrong in the agent, by what happened.

```text
AgentError
├── AgentDisposed     the agent no longer takes work
├── QueueFull         more prompts are waiting than the inbox holds
├── StoreError        the session store could not keep or find something
│   ├── SessionNotFound
│   └── SessionCorrupt    the stored log breaks its own rules
├── ToolError         a tool call failed; told to the model, the turn goes on
└── ModelError        a model call failed; see agent_core.models.adapter
```

Messages are fit to be shown to people: no stack, no secret. A cancelled turn is not an error.
"""

from __future__ import annotations

__all__ = [
    "AgentDisposed",
    "AgentError",
    "ModelError",
    "QueueFull",
    "SessionCorrupt",
    "SessionNotFound",
    "StoreError",
    "ToolError",
]


class AgentError(Exception):
    """Base of all errors the agent raises on purpose."""


class AgentDisposed(AgentError):
    """The agent was disposed and takes no more work."""


class QueueFull(AgentError):
    """The inbox holds as many prompts as it may."""


class StoreError(AgentError):
    """The session store could not do what was asked."""


class SessionNotFound(StoreError):
    """No session has this id."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"no session {session_id}")
        self.session_id = session_id


class SessionCorrupt(StoreError):
    """The stored log cannot be read without guessing."""


class ToolError(AgentError):
    """A tool call failed. `message` is told to the model; `code` tells programs which failure."""

    def __init__(self, message: str, *, code: str = "TOOL_FAILED") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class ModelError(AgentError):
    """A model call failed.

    Args:
        message: For people; says what to change where something can be changed.
        code: ``RATE_LIMIT``, ``OVERLOADED``, ``SERVER``, ``TRANSPORT``, ``TIMEOUT``,
            ``EMPTY_RESPONSE`` (these may be retried), ``AUTH``, ``MODEL_NOT_FOUND``,
            ``CONTEXT_TOO_LONG``, ``BAD_REQUEST``, ``NO_KEY``, ``NOT_CONFIGURED``, ``PROTOCOL``.
        retry_after_s: How long the provider asked us to wait, if it did.
        context_tokens: How many tokens the model holds, if the provider said so.
    """

    RETRYABLE = frozenset(
        {"RATE_LIMIT", "OVERLOADED", "SERVER", "TRANSPORT", "TIMEOUT", "EMPTY_RESPONSE"}
    )

    def __init__(
        self,
        message: str,
        *,
        code: str,
        retry_after_s: float | None = None,
        context_tokens: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s
        self.context_tokens = context_tokens

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.code in self.RETRYABLE
