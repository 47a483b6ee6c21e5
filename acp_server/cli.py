"""The ``acp-agent`` command. Parsing comes first; nothing heavy is imported before it is done."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import argparse

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; `None` for the process's own.

    Returns:
        The exit code: 0 done, 1 it failed, 2 the command line or the configuration is wrong.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A Ctrl-C ends what has not begun, without a word; then who serves or chats hears it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if arguments == ["serve"]:  # what editors start: argparse alone would take as long as the rest
        return _serve({}, level="warning", log_file=None, grace_s=10.0)
    if arguments[:1] == ["conformance"]:  # what comes behind it is the suite's to read
        from acp_server.cli_conformance import run_conformance

        run_conformance(arguments[1:])
    options = _parser().parse_args(arguments)
    options.is_marked = "--" in arguments  # argparse takes it away
    if options.run is None:
        _parser().print_help()
        return 0
    try:
        if argv is None and options.run is not _run_serve:  # a caller's logs are its own
            _log_errors_only()
        if options.run not in (_run_serve, _run_chat):
            _raise_interrupts()
        code: int = options.run(options)
    except KeyboardInterrupt:
        return 130
    return code


def _raise_interrupts() -> None:
    """Have a Ctrl-C raise `KeyboardInterrupt` again, so that what runs can be put away."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _log_errors_only() -> None:
    """Print no record but errors: what went wrong is told in words, and stdout may be JSON."""
    from agent_core.logs import before_first_record

    before_first_record(lambda: _log_to_stderr("error"), threshold=40)


def _parser() -> argparse.ArgumentParser:
    import argparse

    from acp_server import __version__

    parser = argparse.ArgumentParser(
        prog="acp-agent",
        description="An ACP agent for any editor, whose Stop button is provably right.",
        epilog="Start with `acp-agent chat`; put `acp-agent serve` into your editor.",
    )
    parser.add_argument("--version", action="version", version=f"acp-agent {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    configured = _configuration()
    _add_serve(commands, configured)
    _add_chat(commands, configured)
    _add_check(commands, configured)

    from acp_server.cli_conformance import add_conformance_command
    from acp_server.cli_login import add_login_commands
    from acp_server.cli_remote import add_connect_command
    from acp_server.cli_sessions import add_sessions_command

    add_conformance_command(commands)
    add_connect_command(commands)
    add_login_commands(commands, _configuration("--model", "--config"))
    add_sessions_command(commands, _configuration("--config", "--state-dir"))
    return parser


_FLAGS: Final[dict[str, dict[str, Any]]] = {
    "--model": {
        "metavar": "NAME",
        "help": "PROVIDER:NAME (openai:gpt-5.5), one of the file's own, or rehearsal",
    },
    "--mode": {"help": "ask, accept-edits, read-only or bypass; default ask"},
    "--config": {"metavar": "FILE", "help": "not ~/.config/acp-agent/config.toml"},
    "--state-dir": {"metavar": "DIR", "help": "where sessions are kept"},
    "--max-steps": {"type": int, "help": "model calls a turn may have; 0: any"},
    "--idle-limit-s": {"type": float, "help": "seconds a model may say nothing; 0: any"},
    "--unload-after-s": {
        "type": float,
        "help": "unload a session unused for so many seconds; 0: never",
    },
    "--plugin": {
        "dest": "plugins",
        "action": "append",
        "metavar": "MODULE:FUNCTION",
        "help": "load a plugin; may be given again",
    },
    "--rehearsal-script": {"metavar": "FILE", "help": "drives the rehearsal model"},
}


def _configuration(*flags: str) -> argparse.ArgumentParser:
    """Return the configuration's flags: those given, or all."""
    import argparse

    configured = argparse.ArgumentParser(add_help=False)
    where = configured.add_argument_group("configuration")
    for flag in flags or _FLAGS:
        where.add_argument(flag, **_FLAGS[flag])
    return configured


def _add_serve(commands: Any, configured: argparse.ArgumentParser) -> None:
    import argparse

    serve = commands.add_parser(
        "serve",
        parents=[configured],
        help="serve an ACP client on standard input and output, or many on the network",
        description="Serve an ACP client on standard input and output. Editors start this."
        " With --listen, serve any number of clients by WebSocket and HTTP instead.",
    )
    serve.add_argument("--log-file", metavar="FILE", help="write logs here, not to stderr")
    serve.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error")
    )
    serve.add_argument(
        "--shutdown-grace", type=float, default=10.0, metavar="S", help="seconds to stop in"
    )
    _add_network_options(serve)
    # A client appends this to what it starts, in a terminal, to have a person log in.
    serve.add_argument("login", nargs="?", choices=("login",), help=argparse.SUPPRESS)
    serve.set_defaults(run=_run_serve)


def _add_chat(commands: Any, configured: argparse.ArgumentParser) -> None:
    chat = commands.add_parser(
        "chat",
        parents=[configured],
        help="talk to an agent in the terminal",
        description="Talk to this agent, or to any other ACP agent, in the terminal.",
        epilog="example: acp-agent chat -- some-other-agent --acp",
    )
    chat.add_argument("--cwd", metavar="DIR", help="the session's directory; default: this one")
    chat.add_argument(
        "--url",
        metavar="URL",
        help="talk to the agent at ws://HOST:PORT/acp; its token is ACP_AGENT_TOKEN, and --cwd is"
        " a directory over there",
    )
    before = chat.add_mutually_exclusive_group()
    before.add_argument(
        "--resume", metavar="ID", help="go on with this session; the beginning of its id is enough"
    )
    before.add_argument(
        "--continue",
        dest="resume",
        action="store_const",
        const="",
        help="go on with the latest session of the directory",
    )
    chat.add_argument("--yes", action="store_true", help="allow everything the agent asks for")
    chat.add_argument("agent", nargs="*", metavar="AGENT", help="after --: the agent's command")
    chat.set_defaults(run=_run_chat)


def _add_check(commands: Any, configured: argparse.ArgumentParser) -> None:
    check = commands.add_parser(
        "check",
        parents=[configured],
        help="show what is configured and whether it works",
        description="Show what is configured and whether it works; exit code 1 if it does not.",
    )
    check.add_argument(
        "--online", action="store_true", help="send the model a request for one token, too"
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(run=_run_check)


def _add_network_options(serve: argparse.ArgumentParser) -> None:
    network = serve.add_argument_group("network")
    network.add_argument(
        "--listen", metavar="HOST:PORT", help="serve clients there; PORT alone: this computer's"
    )
    network.add_argument(
        "--token-file", metavar="FILE", help="NAME:TOKEN lines; or set ACP_AGENT_TOKEN"
    )
    network.add_argument("--root", metavar="DIR", help="sessions may be opened in there only")
    network.add_argument(
        "--origin",
        dest="origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of https://HOST connect; may be given again",
    )
    network.add_argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a name the server is looked up by; may be given again",
    )
    network.add_argument(
        "--on-disconnect",
        choices=("cancel", "keep"),
        default="cancel",
        help="what becomes of a turn whose client is lost; default cancel",
    )
    network.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    network.add_argument("--tls-key", metavar="FILE", help="its key, unless it is in the same file")
    network.add_argument(
        "--drain",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds that running turns have after SIGTERM; default 10",
    )


def configuration_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration's flags as `load_config` takes them; `None` where not given."""
    names = (
        "model",
        "mode",
        "config",
        "state_dir",
        "max_steps",
        "idle_limit_s",
        "unload_after_s",
        "rehearsal_script",
        "plugins",
    )
    return {name: getattr(options, name, None) for name in names}  # a command may have only some


def _run_serve(options: argparse.Namespace) -> int:
    if options.login:
        from acp_server.cli_login import run_login

        _raise_interrupts()
        return run_login(configuration_flags(options))
    if options.listen is not None:
        return _serve_network(options)
    return _serve(
        configuration_flags(options),
        level=options.log_level,
        log_file=options.log_file,
        grace_s=options.shutdown_grace,
    )


def _serve_network(options: argparse.Namespace) -> int:
    from acp_server.network.serve import NetworkOptions, parse_address, serve_network

    try:
        host, port = parse_address(options.listen)
    except ValueError as exc:
        sys.stderr.write(f"acp-agent: --listen: {exc}\n")
        return 2
    network = NetworkOptions(
        host,
        port,
        token_file=options.token_file,
        root=options.root,
        origins=tuple(options.origins),
        hosts=tuple(options.hosts),
        keeps=options.on_disconnect == "keep",
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        drain_s=options.drain,
    )
    configure = _configuring(
        configuration_flags(options), level=options.log_level, log_file=options.log_file
    )
    return serve_network(configure, network, grace_s=options.shutdown_grace)


def _serve(flags: dict[str, Any], *, level: str, log_file: str | None, grace_s: float) -> int:
    gc.disable()  # until all is loaded: to look for garbage meanwhile takes a tenth of the start
    from acp_server.serve import serve_stdio
    from agent_core.logs import before_first_record

    before_first_record(lambda: _log_to_stderr(level))
    if sys.stdin is not None and sys.stdin.isatty():
        sys.stderr.write(
            "This is an ACP agent: it waits for an editor's JSON on standard input.\n"
            "To talk to it yourself, run `acp-agent chat`. To leave, press Ctrl-D.\n"
        )

    configure = _configuring(flags, level=level, log_file=log_file)
    return serve_stdio(configure, grace_s=grace_s)


def _configuring(flags: dict[str, Any], *, level: str, log_file: str | None) -> Callable[[], Any]:
    def configure() -> Any:
        from acp_server.config import ConfigError, load_config
        from acp_server.logs import set_up_logs
        from acp_server.models import hide_variables

        try:
            set_up_logs(level, log_file)
        except OSError as exc:
            raise ConfigError(
                f"The log file {log_file} cannot be opened: {exc.strerror}."
            ) from None
        config = load_config(flags)
        hide_variables(config)
        return config

    return configure


def _log_to_stderr(level: str) -> None:
    from acp_server.logs import set_up_logs

    set_up_logs(level)


def _run_chat(options: argparse.Namespace) -> int:
    from acp_server.chat.app import run_chat

    if options.agent and not options.is_marked:
        words = " ".join(options.agent)
        sys.stderr.write(
            f"acp-agent: prompts are typed or piped in; to talk to another agent, put its command"
            f" behind --, as in: acp-agent chat -- {words}\n"
        )
        return 2
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    if options.url is not None:
        from acp_server.cli_remote import run_chat_at

        return run_chat_at(options)
    try:
        cwd = os.path.abspath(options.cwd or os.getcwd())
    except FileNotFoundError:
        sys.stderr.write("acp-agent: the current directory is not there any more\n")
        return 2
    if not os.path.isdir(cwd):
        sys.stderr.write(f"acp-agent: {cwd} is not a directory\n")
        return 2
    command = options.agent or [sys.executable, "-m", "acp_server", *_serve_arguments(options)]
    return run_chat(
        command,
        cwd=cwd,
        mode=options.mode if options.agent else None,  # our own agent starts in it
        permissions="allow" if options.yes else "reject",
        resume=options.resume,
    )


def _serve_arguments(options: argparse.Namespace) -> list[str]:
    words = ["serve"]
    flags = configuration_flags(options)
    for plugin in flags.pop("plugins") or ():
        words += ("--plugin", plugin)
    for name, value in flags.items():
        if value is not None:
            words += (f"--{name.replace('_', '-')}", str(value))
    return words


def _run_check(options: argparse.Namespace) -> int:
    from acp_server.cli_check import run_check
    from acp_server.logs import set_up_logs

    if options.online:
        set_up_logs("error")  # what went wrong is a finding; standard output may be JSON
    return run_check(configuration_flags(options), online=options.online, as_json=options.json)
