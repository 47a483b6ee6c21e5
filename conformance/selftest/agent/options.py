"""The options of a session: two lists to choose from, and a switch for clients that take one."""

from __future__ import annotations

from typing import Final

from conformance.selftest.agent.checks import invalid
from conformance.selftest.agent.permissions import MODES
from conformance.selftest.agent.rpc import Message

__all__ = ["Options"]

MODELS: Final = {
    "small": ("Small", (("selftest-small", "Small"),)),
    "large": ("Large", (("selftest-large", "Large"), ("selftest-huge", "Huge"))),
}


class Options:
    """The values of one session's options, but for the mode, which permissions hold.

    Args:
        has_booleans: Whether the client takes options that are switches.

    Attributes:
        values: By id.
    """

    def __init__(self, *, has_booleans: bool) -> None:
        self.values: Final[dict[str, str | bool]] = {"model": "selftest-small", "aloud": False}
        self._has_booleans = has_booleans

    def shown(self, mode: str) -> list[Message]:
        """Return all options with their values."""
        modes = [{"value": key, "name": name} for key, (name, _) in MODES.items()]
        models = [
            {
                "group": group,
                "name": name,
                "options": [{"value": key, "name": label} for key, label in members],
            }
            for group, (name, members) in MODELS.items()
        ]
        options: list[Message] = [
            {
                "id": "mode",
                "name": "Mode",
                "category": "mode",
                "type": "select",
                "currentValue": mode,
                "options": modes,
            },
            {
                "id": "model",
                "name": "Model",
                "category": "model",
                "type": "select",
                "currentValue": self.values["model"],
                "options": models,
            },
        ]
        if self._has_booleans:
            options.append(
                {
                    "id": "aloud",
                    "name": "Think aloud",
                    "type": "boolean",
                    "currentValue": self.values["aloud"],
                }
            )
        return options

    def checked(self, key: str, params: Message) -> str | bool:
        """Return the value that ``session/set_config_option`` gives to the option `key`.

        Raises:
            RpcError: There is no such option, or it does not take this value.
        """
        value = params.get("value")
        if key == "aloud" and self._has_booleans:
            if params.get("type") != "boolean" or not isinstance(value, bool):
                raise invalid("value", "must be true or false, with the type boolean")
            return value
        choices = {"mode": list(MODES), "model": _models()}.get(key)
        if choices is None:
            raise invalid("configId", "there is no such option")
        if not isinstance(value, str) or value not in choices:
            raise invalid("value", "is none of the choices")
        return value


def _models() -> list[str]:
    return [key for _, members in MODELS.values() for key, _ in members]
