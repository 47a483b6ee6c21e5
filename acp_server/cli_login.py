"""``acp-agent login`` and ``acp-agent logout``: keep a provider's key, or forget it.

A client that can open a terminal runs the login there, either as ``acp-agent login`` or with
``login`` behind what it starts the agent with; both do the same, and an exit code of 0 means that
it worked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import argparse

    from acp_server.config import Config

__all__ = ["add_login_commands", "run_login"]

MAX_KEY_CHARS: Final = 4096
INTERRUPTED: Final = 130


def add_login_commands(commands: Any, configured: argparse.ArgumentParser) -> None:
    """Add both commands to the parser.

    Args:
        commands: What ``add_subparsers`` returned.
        configured: A parser of the configuration's flags.
    """
    login = commands.add_parser(
        "login",
        parents=[configured],
        help="store the key of a provider",
        description="Store the key of a provider, where you alone can read it. It is asked for, "
        "or read from standard input.",
        epilog="example: pass show openai | acp-agent login openai",
    )
    login.add_argument(
        "provider", nargs="?", help="anthropic, openai, …; default: the configured model's"
    )
    login.set_defaults(run=_login)

    logout = commands.add_parser(
        "logout",
        help="forget a stored key",
        description="Forget the keys that `acp-agent login` stored.",
    )
    logout.add_argument("provider", nargs="?", help="default: all of them")
    logout.set_defaults(run=_logout)


def run_login(flags: Mapping[str, Any], provider: str | None = None) -> int:
    """Ask for the key of a provider, or read it, and store it.

    Args:
        flags: As for `load_config`.
        provider: Whose key; `None` for the configured model's provider, or to ask.

    Returns:
        0 if it was stored; 1 if not; 2 if the command line or the configuration is wrong; 130 if
        a person pressed Ctrl-C.
    """
    from acp_server.config import ConfigError, load_config
    from acp_server.stored_keys import KeysUnusable, store_key

    try:
        config = load_config(flags)
        provider = _checked_provider(config, provider or _configured_provider(config))
        key = _read_key(provider)
        store_key(provider, key)
    except ConfigError as exc:
        return _failed(str(exc), 2)
    except (KeysUnusable, ValueError) as exc:
        return _failed(str(exc), 1)
    except EOFError:
        return _failed("no key was given, and none was stored", 1)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    sys.stdout.write(_what_now(config, provider))
    return 0


def _login(options: argparse.Namespace) -> int:
    from acp_server.cli import configuration_flags

    return run_login(configuration_flags(options), options.provider)


def _logout(options: argparse.Namespace) -> int:
    from acp_server.stored_keys import KeysUnusable, forget_keys

    try:
        forgotten = forget_keys(options.provider)
    except KeysUnusable as exc:
        return _failed(str(exc), 1)
    if options.provider is not None and not forgotten:
        kept = ", ".join(sorted(_stored())) or "none"
        return _failed(f"no key of {options.provider!r} is stored; stored keys: {kept}", 1)
    whose = ", ".join(forgotten)
    sys.stdout.write(f"The key of {whose} is forgotten.\n" if forgotten else "No key was stored.\n")
    return 0


def _stored() -> list[str]:
    from acp_server.stored_keys import KeysUnusable, stored_keys

    try:
        return list(stored_keys())
    except KeysUnusable:
        return []


def _configured_provider(config: Config) -> str:
    if config.model != "rehearsal":
        return config.target(config.model).provider
    if not sys.stdin.isatty():
        return ""
    return input(f"Provider ({', '.join(_providers(config))}): ").strip()


def _checked_provider(config: Config, provider: str) -> str:
    from acp_server.config import ConfigError

    there_are = _providers(config)
    if provider not in there_are:
        problem = f"no provider {provider!r}" if provider else "name a provider"
        raise ConfigError(f"{problem}; there are {', '.join(there_are)}")
    return provider


def _providers(config: Config) -> list[str]:
    from agent_core.models.providers import PROVIDERS

    return sorted({*PROVIDERS, *config.providers})


def _read_key(provider: str) -> str:
    """Return the key that a person types unseen, or the first line of the input.

    Raises:
        EOFError: There is none.
        ValueError: It is none. The message does not quote it.
    """
    if sys.stdin.isatty():
        from getpass import getpass

        key = getpass(f"Key for {provider} (it is not shown): ").strip()
    else:
        key = sys.stdin.readline().strip()
    if not key:
        raise EOFError
    if len(key) > MAX_KEY_CHARS or re.fullmatch("[!-~]+", key) is None:
        raise ValueError("that has characters that no key has, or too many; nothing was stored")
    return key


def _what_now(config: Config, provider: str) -> str:
    """Say where the key is, and what else it takes for it to be used."""
    from acp_server.config import table_name
    from acp_server.stored_keys import keys_file

    said = [f"The key for {provider} is stored in {keys_file()}, which only you can read."]
    settings, table = config.provider(provider), table_name("providers", provider)
    for field in ("key", "key_command"):
        if getattr(settings, field) is not None:
            source = config.sources.get(f"{table}.{field}", config.file)
            said.append(f"It is not used yet: {field} from {source} comes first.")
    if config.model == "rehearsal":
        said.append(f'To use it, put model = "{provider}:NAME" into {config.file}.')
    return "\n".join(said) + "\n"


def _failed(problem: str, code: int) -> int:
    sys.stderr.write(f"acp-agent: {problem}\n")
    return code
