"""``acp-agent connect`` and ``acp-agent chat --url``: agents on the network."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

__all__ = ["add_connect_command", "run_chat_at"]

_NO_ADDRESS = "the address of an agent begins with ws:// or wss://"


def add_connect_command(commands: Any) -> None:
    """Add ``connect``."""
    connect = commands.add_parser(
        "connect",
        help="let an editor use an agent somewhere else",
        description="Relay between standard input and output and an agent that is reached by"
        " WebSocket. An editor starts this in the place of an agent.",
    )
    connect.add_argument("url", metavar="URL", help="ws://HOST:PORT/acp, or wss://…")
    connect.add_argument(
        "--token-file", metavar="FILE", help="a file with the token; or set ACP_AGENT_TOKEN"
    )
    connect.add_argument(
        "--wait",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds a request waits while there is no connection; default 10",
    )
    connect.set_defaults(run=_run_connect)


def _run_connect(options: argparse.Namespace) -> int:
    from acp_server.bridge import run_bridge

    token = os.environ.get("ACP_AGENT_TOKEN")
    if not _is_address(options.url):
        return _refused(_NO_ADDRESS)
    if options.token_file is not None:
        try:
            with open(options.token_file, encoding="utf-8") as file:
                token = file.read()
        except (OSError, UnicodeDecodeError):
            return _refused(f"the token file {options.token_file} cannot be read")
    return run_bridge(options.url, (token or "").strip() or None, hold_s=options.wait)


def run_chat_at(options: argparse.Namespace) -> int:
    """Chat with the agent at an address, through a relay that takes up what was lost.

    Returns:
        The exit code.
    """
    from acp_server.chat.app import run_chat

    if options.agent:
        return _refused("give --url or an agent's command, not both")
    if options.cwd is not None and not os.path.isabs(options.cwd):
        return _refused("with --url, --cwd is an absolute path")  # as it is over there
    if not _is_address(options.url):
        return _refused(_NO_ADDRESS)
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = "/"
    return run_chat(
        [sys.executable, "-m", "acp_server", "connect", "--wait", "1", options.url],
        cwd=options.cwd or here,
        place=here,
        mode=options.mode,
        permissions="allow" if options.yes else "reject",
        resume=options.resume,
    )


def _is_address(url: str) -> bool:
    return url.startswith(("ws://", "wss://"))


def _refused(problem: str) -> int:
    sys.stderr.write(f"acp-agent: {problem}\n")
    return 2
