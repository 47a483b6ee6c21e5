"""The command line: run, replay, lint, proxy, selftest, list."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from conformance.cli_selftest import add_selftest
from conformance.cli_traces import add_lint, add_proxy
from conformance.manifest import manifest
from conformance.target import SITUATIONS, Target, read_words

if TYPE_CHECKING:
    from conformance.baseline import Expected
    from conformance.verdicts import Report

__all__ = ["main"]

CONFORMANT: Final = 0
NOT_CONFORMANT: Final = 1
NOT_JUDGED: Final = 2
"""Also wrong usage."""
TOO_LITTLE: Final = 3
"""Less was exercised than `--min-exercised` asks for."""

TOKEN_VARIABLE: Final = "ACP_AGENT_TOKEN"

_EPILOGUE: Final = """\
exit code: 0 conformant; 1 not conformant; 2 could not judge, or wrong usage;
3 less exercised than --min-exercised asks for.

To judge what an agent does in a turn, the suite must make it do things. It knows
the words of acp-agent's rehearsal model. For other agents, either have the suite
script the model (--script-model, for agents that can be pointed at an endpoint by
environment variables), or say what to prompt: --prompts FILE, a JSON object from
a situation to a prompt, where {path}, {text} and {command} are filled in:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    # What stands behind -- is the agent's: argparse would look for options of ours in it.
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.agent = given[end + 1 :]
    if options.explain is not None:
        return _explain(parser, options.explain)
    if options.command is None:
        parser.print_help()
        return NOT_JUDGED
    serve: Callable[[argparse.ArgumentParser, argparse.Namespace], int] = options.serve
    return serve(parser, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description="Judge any agent that speaks the Agent Client Protocol.",
        allow_abbrev=False,
    )
    parser.add_argument("--explain", metavar="RULE", help="say what a rule demands, and why")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="judge an agent",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]\n"
        "       %(prog)s [options] --url URL [-- COMMAND [ARGUMENT ...]]",
        description="Judge an agent that is started by COMMAND, or that serves at URL; with both, "
        "COMMAND is started once and serves there.",
        epilog=_EPILOGUE + "\n".join(f"  {name:11} {says}" for name, says in SITUATIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_target(run)
    _add_choice(run)
    _add_reports(run)
    run.set_defaults(serve=_run)
    replay = commands.add_parser(
        "replay",
        help="play what is about one rule, and show all that was said",
        usage="%(prog)s RULE [options] -- COMMAND [ARGUMENT ...]",
        allow_abbrev=False,
    )
    replay.add_argument("rule", metavar="RULE")
    _add_target(replay)
    _add_only(replay)
    replay.add_argument(
        "--script", type=Path, metavar="FILE", help="write what was sent to the agent, line by line"
    )
    replay.set_defaults(serve=_replay)
    lint = commands.add_parser(
        "lint",
        help="judge what was recorded",
        description="Judge traces: what `proxy` kept, or other recorders did.",
        allow_abbrev=False,
    )
    _add_reports(lint)
    add_lint(lint, _conclude)
    proxy = commands.add_parser(
        "proxy",
        help="stand between a client and an agent, and judge what they say",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description="Give an editor this as its agent's command. Nothing is changed on the way.",
        allow_abbrev=False,
    )
    _add_files(proxy)
    add_proxy(proxy, _write)
    selftest = commands.add_parser(
        "selftest",
        help="judge the suite itself",
        description="Play the sound reference agent and mutants of it with one bug each, and count "
        "the mutants that are caught. By default each is played what the record says.",
        allow_abbrev=False,
    )
    add_selftest(selftest, _count)
    listed = commands.add_parser("list", help="list all rules", allow_abbrev=False)
    listed.set_defaults(serve=_list)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("the agent")
    target.add_argument("--url", default="", help="ws://, wss://, http:// or https:// of an agent")
    target.add_argument(
        "--token-env",
        default=TOKEN_VARIABLE,
        metavar="NAME",
        help=f"variable with the token for --url; default {TOKEN_VARIABLE}",
    )
    target.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="add to the agent's environment; may be given again",
    )
    target.add_argument("--cwd", default="", metavar="DIR", help="where the agent starts")
    target.add_argument(
        "--keep-home",
        action="store_true",
        help="give the agent your own home folder, where its login is, not an empty one",
    )
    target.add_argument("--auth-method", default="", metavar="ID", help="log in with it first")
    target.add_argument(
        "--script-model",
        action="store_true",
        help="point the agent at a model of ours by the variables of the usual SDKs; "
        "{model_url} and {model_key} are filled in in --env and COMMAND",
    )
    target.add_argument(
        "--allow-logout", action="store_true", help="log out too, where the agent offers it"
    )
    target.add_argument("--prompts", type=Path, metavar="FILE", help="what to say, as JSON")
    target.add_argument(
        "--timeout", type=_seconds, default=10.0, metavar="S", help="for one answer; default 10"
    )


def _add_choice(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_argument_group("what to play")
    choice.add_argument("--quick", action="store_true", help="the short form")
    _add_only(choice)
    choice.add_argument(
        "--as",
        action="append",
        default=[],
        dest="clients",
        metavar="CLIENT",
        help="only talk as this client does, such as zed or toad; may be given again",
    )
    choice.add_argument(
        "--cases",
        action="append",
        type=Path,
        default=[],
        metavar="PATH",
        help="play cases of your own too: a JSON file, or a folder; may be given again",
    )
    choice.add_argument("--jobs", type=_count, metavar="N", help="scenarios at a time")
    choice.add_argument(
        "--time-limit", type=_seconds, default=300.0, metavar="S", help="for all; default 300"
    )


def _add_only(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORD",
        help="rules or scenarios that begin with it; may be given again",
    )


def _add_reports(parser: argparse.ArgumentParser) -> None:
    reports = parser.add_argument_group("reports")
    reports.add_argument("--all", action="store_true", help="list also what passed")
    _add_files(reports)
    reports.add_argument(
        "--baseline", type=Path, metavar="FILE", help="rules known to be broken, as TOML"
    )
    reports.add_argument(
        "--min-exercised",
        type=_percent,
        default=0.0,
        metavar="PERCENT",
        help="exit with 3 if less of the applicable rules was exercised",
    )


def _add_files(parser: argparse._ActionsContainer) -> None:
    for name in ("json", "junit", "markdown", "html", "badge"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write it as {name} too")


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from rich.console import Console

    from conformance.baseline import read_baseline
    from conformance.cases import load_cases
    from conformance.playing import play
    from conformance.runner import select

    try:
        target = _target(options)
        load_cases(options.cases)
        chosen = select([*options.only, *_clients(options.clients)], is_quick=options.quick)
        expected = [] if options.baseline is None else read_baseline(options.baseline)
    except (ValueError, OSError) as exc:
        _refuse(parser, str(exc))
    report = play(target, chosen, Console(), jobs=options.jobs, limit_s=options.time_limit)
    return NOT_JUDGED if report is None else _conclude(options, report, expected)


def _clients(names: Sequence[str]) -> list[str]:
    """Return the scenarios that play these clients.

    Raises:
        ValueError: Nobody knows one of them.
    """
    from conformance.profiles import profiles, scenario_name

    for name in names:
        if name not in profiles():
            raise ValueError(f"nobody knows the client {name!r}; there are {', '.join(profiles())}")
    return [scenario_name(name) for name in names]


def _conclude(
    options: argparse.Namespace, report: Report, expected: Sequence[Expected] | None = None
) -> int:
    """Show a report, write it where it was asked for, and return the exit code."""
    from rich.console import Console

    from conformance.baseline import excuse, read_baseline
    from conformance.reports.terminal import show

    try:
        if expected is None and options.baseline is not None:
            expected = read_baseline(options.baseline)
        excuse(report, expected or (), datetime.now(UTC).date())
        show(Console(), report, shows_all=options.all)
        _write(options, report)
    except (ValueError, OSError) as exc:
        sys.stderr.write(f"{exc}\n")
        return NOT_JUDGED
    if not report.is_judged or report.count("error"):
        return NOT_JUDGED
    if not report.is_conformant:
        return NOT_CONFORMANT
    exercised = 100 * report.n_exercised / max(1, report.n_applicable)
    return TOO_LITTLE if exercised < options.min_exercised else CONFORMANT


def _write(options: argparse.Namespace, report: Report) -> None:
    from conformance.reports import badge, data, junit, markdown, page

    if options.json is not None:
        options.json.write_bytes(data.to_json(report))
    if options.junit is not None:
        options.junit.write_bytes(junit.to_junit(report))
    if options.markdown is not None:
        _write_text(options.markdown, markdown.to_markdown(report))
    if options.html is not None:
        _write_text(options.html, page.to_html(report))
    if options.badge is not None:
        options.badge.write_bytes(badge.to_badge(report))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # agents say half characters


def _replay(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from rich.console import Console

    from conformance.playing import play, show_transcripts, write_script
    from conformance.reports.terminal import show, show_rule
    from conformance.runner import select

    rule = _known_rule(parser, options.rule)
    try:
        target = _target(options)
        chosen = select(options.only or [rule])
    except (ValueError, OSError) as exc:
        _refuse(parser, str(exc))
    console = Console()
    show_rule(console, rule)
    report = play(target, chosen, console, jobs=1, limit_s=None)
    if report is None:
        return NOT_JUDGED
    report.verdicts = [each for each in report.verdicts if each.rule == rule]
    show_transcripts(console, report)
    show(console, report, shows_all=True)
    if options.script is not None:
        write_script(report, options.script)
    return CONFORMANT if report.is_conformant else NOT_CONFORMANT


def _list(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    for rule in manifest().values():
        sys.stdout.write(f"{rule.id}  {rule.level:15}  {rule.says}\n")
    return CONFORMANT


def _explain(parser: argparse.ArgumentParser, word: str) -> int:
    from rich.console import Console

    from conformance.reports.terminal import show_rule

    show_rule(Console(), _known_rule(parser, word))
    return CONFORMANT


def _target(options: argparse.Namespace) -> Target:
    """Read who is judged from the options.

    Raises:
        ValueError: They do not say, or contradict each other; says how to put it right.
        OSError: A file cannot be read.
    """
    command = tuple(options.agent)
    if not command and not options.url:
        raise ValueError("say who is to be judged: -- COMMAND, or --url URL")
    if options.url and options.url.partition("://")[0] not in ("ws", "wss", "http", "https"):
        raise ValueError(f"--url {options.url}: it begins with ws://, wss://, http:// or https://")
    if options.script_model and (options.prompts is not None or options.url):
        raise ValueError("--script-model goes with a COMMAND, and without --prompts")
    env = {}
    for pair in options.env:
        name, is_there, value = pair.partition("=")
        if not name or not is_there:
            raise ValueError(f"--env {pair}: it looks like NAME=VALUE")
        env[name] = value
    if options.cwd and not Path(options.cwd).is_dir():
        raise ValueError(f"--cwd {options.cwd}: there is no such folder")
    _must_be_a_program(command, Path(options.cwd), env.get("PATH"))
    return Target(
        command=command,
        url=options.url,
        token=os.environ.get(options.token_env, "") if options.url else "",
        env=env,
        cwd=options.cwd,
        keeps_home=options.keep_home,
        scripts_model=options.script_model,
        auth_method=options.auth_method,
        may_log_out=options.allow_logout,
        words=None if options.prompts is None else read_words(options.prompts),
        timeout_s=options.timeout,
    )


def _must_be_a_program(command: Sequence[str], cwd: Path, path: str | None) -> None:
    """Look for the program before anything is played.

    Raises:
        ValueError: There is none; says what may be meant.
    """
    if not command:
        return
    program = command[0]
    where = str(cwd / program) if os.sep in program else program
    if shutil.which(where, path=path) is not None:
        return
    if " " in program:
        raise ValueError(f"there is no program {program!r}; write its words without quotes around")
    if Path(where).is_file():
        raise ValueError(f"{program} may not be executed; chmod +x, or begin with its interpreter")
    raise ValueError(f"there is no program {program}; is it installed, and on PATH?")


def _known_rule(parser: argparse.ArgumentParser, word: str) -> str:
    rules = manifest()
    if word.upper() in rules:
        return word.upper()
    near = get_close_matches(word.upper(), rules, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else "; `list` lists them"
    _refuse(parser, f"there is no rule {shlex.quote(word)}{hint}")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    sys.stderr.write(f"{parser.prog}: {message}\n")
    raise SystemExit(NOT_JUDGED)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("it is a number of seconds above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("it is at least 1")
    return value


def _percent(text: str) -> float:
    value = float(text.removesuffix("%"))
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError("it is a number from 0 to 100")
    return value
