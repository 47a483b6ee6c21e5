"""How the rehearsal model reads a prompt: verbs, what they do, and what to say about results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from agent_core.content import Text, ToolCallPart
from agent_core.models.adapter import AssistantTurn, Message, ToolTurn, UserTurn
from agent_core.models.rehearsal_script import Step

__all__ = ["steps_for", "summary_of"]

_COUNT_PAUSE_S: Final = 0.05
_SHOWN_LINES: Final = 10
_HEADING: Final = re.compile(r"^\[(user|assistant\b.*|(?:result|error) of .*)\]$", re.MULTILINE)
_DONE: Final = re.compile(
    r"^The last request was: (.*)\nOf its calls (\d+) were made\.$", re.MULTILINE
)
_LINE_NUMBER: Final = re.compile(r"^ *\d+\t", re.MULTILINE)  # what `read` puts before each line

_TRY: Final = """\
- `read FILE`, `list [DIR]`, `search TEXT`
- `write FILE: TEXT`, `edit FILE: OLD => NEW`
- `run COMMAND`
- `plan FIRST; SECOND; THIRD`
- `ask QUESTION: A | B`
- `delegate TASK`, such as `delegate run date`
- `say TEXT`, `think TEXT`, `count N [slowly]`, `stall`

Join several with `then`, for example `write hello.txt: Hello! then run cat hello.txt`."""

_HELLO: Final = f"""\
Hello! I am the built-in **rehearsal** model. I work offline and do exactly what you say:

{_TRY}"""

_NOT_CONFIGURED: Final = f"""\
No model is configured, so I cannot answer that: I am the built-in **rehearsal** model.

To talk to a real one, put this into `~/.config/acp-agent/config.toml`:

```toml
model = "openai:gpt-5.5"  # or anthropic:…, deepseek:…, openrouter:…, ollama:…

[providers.openai]
key = "…"
```

or set `OPENAI_API_KEY` and start `acp-agent chat` or `acp-agent serve` with
`--model openai:gpt-5.5`. Then `acp-agent check --online` says whether it works.

Until then you can try what this agent does:

{_TRY}"""


class _Verb(NamedTuple):
    """What can be said behind a verb, and what it comes to.

    `report` opens the answer to a tool's result, with the verb's first argument in it; where it
    ends in a colon the output follows. Verbs without a report call no tool.
    """

    usage: str
    pattern: str
    steps: Callable[[re.Match[str]], Iterable[Step]]
    report: str | None = None


class _Segment(NamedTuple):
    """One verb of a prompt with its arguments; `None`: they make no sense."""

    verb: _Verb
    arguments: re.Match[str] | None


def steps_for(messages: tuple[Message, ...]) -> Iterator[Step]:
    """Yield what a model does next for the last prompt: up to its next tool call, or to its end."""
    before, prompt, behind = _last_prompt(messages)
    segments = _parse(prompt)
    if not segments:
        yield from _say(_NOT_CONFIGURED)
        return
    unclear = next((verb for verb, arguments in segments if arguments is None), None)
    if unclear is not None:  # said before anything is done
        yield from _say(f"I did nothing, because one part is not clear to me: `{unclear.usage}`")
        return
    has_spoken = False
    done, result = _progress(segments, behind, _made_before(before, prompt))
    if result is not None:
        yield from _say(_report(segments[done - 1], result, len(segments) - done))
        if result.is_error:
            return
        has_spoken = True
    elif done == len(segments):
        yield from _say("All of it is done.")
    for verb, arguments in segments[done:]:
        assert arguments is not None
        for index, step in enumerate(verb.steps(arguments)):
            if index == 0 and step.text is not None and has_spoken:
                yield Step(text="\n\n")
            has_spoken = has_spoken or step.text is not None
            yield step
        if verb.report is not None:
            return


def summary_of(messages: tuple[Message, ...]) -> Iterator[Step]:
    """Yield what a model writes when it is asked for the notes on a conversation.

    They say how far the last request has got, for `steps_for` to go on from there.
    """
    _before, text, _behind = _last_prompt(messages)
    parts = _HEADING.split(text)[1:]
    asked, made, noted = "", 0, None
    for who, body in zip(parts[::2], parts[1::2], strict=True):
        if body.strip().startswith("<summary"):
            noted = _DONE.search(body)
        elif who == "user" and not body.strip().startswith("<context"):
            asked = _first_line(body)
            made = int(noted[2]) if noted is not None and noted[1] == asked else 0
        elif ", calling " in who:
            made += 1
    if parts and parts[-2].startswith("assistant"):  # its last words: nothing goes on from there
        made = 0
    yield from _say(f"{len(parts) // 2} entries.")
    yield Step(text=f"\nThe last request was: {asked}\nOf its calls {made} were made.")


def _last_prompt(
    messages: tuple[Message, ...],
) -> tuple[tuple[Message, ...], str, tuple[Message, ...]]:
    """Return the text of the last prompt, and the messages before and behind it."""
    for index in range(len(messages) - 1, -1, -1):
        if isinstance(messages[index], UserTurn):
            text = _said(messages[index])
            if not text.startswith(("<context", "<summary")):
                return messages[:index], text, messages[index + 1 :]
    return (), "", ()


def _said(message: Message) -> str:
    if not isinstance(message, UserTurn):
        return ""
    return "\n".join(block.text for block in message.content if isinstance(block, Text))


def _made_before(before: tuple[Message, ...], prompt: str) -> int:
    """Return how many calls of `prompt` a summary right before it says were made."""
    for message in reversed(before):
        if not isinstance(message, UserTurn):
            break
        found = _DONE.search(_said(message))
        if found is not None and found[1] == _first_line(prompt):
            return int(found[2])
    return 0


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def _parse(prompt: str) -> list[_Segment]:
    """Take `prompt` apart; nothing if it does not start with a verb."""
    segments: list[_Segment] = []
    text = prompt.strip()
    while start := _VERB.match(text):
        name = start[0].lower()
        # A command may well hold "then", and a task is a prompt itself: only a new line ends them.
        end = (_NEXT_LINE if name in ("run", "delegate") else _NEXT).search(text, start.end())
        argument = text[start.end() : end.start() if end else len(text)].strip()
        verb = _VERBS[name]
        segments.append(_Segment(verb, re.fullmatch(verb.pattern, argument, re.DOTALL)))
        text = text[end.end() :] if end else ""
    return segments


def _progress(
    segments: list[_Segment], behind: tuple[Message, ...], made_before: int
) -> tuple[int, ToolTurn | None]:
    """Return how many segments are done and the last one's result, if it is still known."""
    calls = made_before + sum(
        isinstance(part, ToolCallPart)
        for message in behind
        if isinstance(message, AssistantTurn)
        for part in message.content
    )
    result = next((item for item in reversed(behind) if isinstance(item, ToolTurn)), None)
    ends = [index for index, (verb, _) in enumerate(segments, 1) if verb.report is not None]
    if not 0 < calls <= len(ends):
        return 0, None
    return ends[calls - 1], result


def _report(segment: _Segment, result: ToolTurn, n_left: int) -> str:
    output = result.output.strip("\n")
    if result.name == "read":
        output = _LINE_NUMBER.sub("", output)
    if result.is_error:
        left = f" I stop here; {n_left} more to do." if n_left else ""
        return f"`{result.name}` did not work: {_shown(output)}{left}"
    verb, arguments = segment
    what = arguments[1] if arguments and arguments.re.groups else ""
    opening = (verb.report or "").format(_code(what or "."))
    if not opening.endswith(":"):
        return opening
    return f"{opening}\n\n{_block(output)}" if output else f"{opening} nothing."


def _shown(output: str) -> str:
    return f"\n\n{_block(output)}\n\n" if "\n" in output else output


def _block(output: str) -> str:
    lines = output.split("\n")
    fence = _fence(output, 3)
    shown = "\n".join((fence, *lines[:_SHOWN_LINES], fence))
    n_more = len(lines) - _SHOWN_LINES
    return f"{shown}\n({n_more} more lines)" if n_more > 0 else shown


def _code(text: str) -> str:
    line, _, more = text.partition("\n")
    fence = _fence(line, 1)
    return f"{fence}{line}{' …' if more else ''}{fence}"


def _fence(text: str, least: int) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)


def _say(text: str) -> Iterator[Step]:
    for word in re.findall(r"\s*\S+", text):
        yield Step(text=word)


def _think(text: str) -> Iterator[Step]:
    for word in re.findall(r"\s*\S+", text):
        yield Step(reasoning=word)


def _count(arguments: re.Match[str]) -> Iterator[Step]:
    for number in range(1, int(arguments[1]) + 1):
        if arguments[2] and number > 1:
            yield Step(sleep_s=_COUNT_PAUSE_S)
        yield Step(text=f"{number} ")


def _call(tool: str, **arguments: Any) -> tuple[Step]:
    return (Step(tool=tool, arguments=arguments),)


def _plan(text: str) -> tuple[Step]:
    entries = [
        {"content": content, "status": "pending", "priority": "medium"}
        for content in map(str.strip, text.split(";"))
        if content
    ]
    return _call("plan", entries=entries)


def _ask(question: str, choices: str | None) -> tuple[Step]:
    if choices is None:
        return _call("ask", question=question)
    return _call("ask", question=question, choices=[each.strip() for each in choices.split("|")])


def _delegate(task: str, agent: str, *, is_background: bool) -> tuple[Step]:
    more = {"background": True} if is_background else {}
    return _call("delegate", task=task, agent=agent, **more)


def _lines(text: str) -> str:
    return text.replace("\\n", "\n")


_VERBS: Final = {
    "read": _Verb("read FILE", "(.+)", lambda a: _call("read", path=a[1]), "{} begins:"),
    "list": _Verb("list [DIR]", "(.*)", lambda a: _call("list", path=a[1] or "."), "{} holds:"),
    "search": _Verb(
        "search TEXT",
        "(.+)",
        lambda a: _call("search", pattern=a[1], path="."),
        "Looking for {} gave:",
    ),
    "write": _Verb(
        "write FILE: TEXT",
        r"([^:\n]+):\s?(.*)",
        lambda a: _call("write", path=a[1].strip(), content=_lines(a[2])),
        "Wrote {}.",
    ),
    "edit": _Verb(
        "edit FILE: OLD => NEW",
        r"([^:\n]+):\s?(.+?) =>(?: (.*))?",
        lambda a: _call(
            "edit", path=a[1].strip(), old_text=_lines(a[2]), new_text=_lines(a[3] or "")
        ),
        "Wrote {}.",
    ),
    "run": _Verb("run COMMAND", "(.+)", lambda a: _call("shell", command=a[1]), "{} printed:"),
    "plan": _Verb(
        "plan FIRST; SECOND; THIRD", r"(.*[^;\s].*)", lambda a: _plan(a[1]), "The plan is written."
    ),
    "ask": _Verb(
        "ask QUESTION: A | B",
        r"(.+?)(?::([^:]*\|[^:]*))?",
        lambda a: _ask(a[1], a[2]),
        "The answer to {} is:",
    ),
    "delegate": _Verb(
        "delegate [to AGENT:] TASK [in the background]",
        r"(?:to\s+([\w-]+):\s*)?(.+?)(\s+in the background)?",
        lambda a: _delegate(a[2], a[1] or "spawn", is_background=a[3] is not None),
        "The subagent answered:",
    ),
    "think": _Verb("think TEXT", "(.+)", lambda a: _think(a[1])),
    "say": _Verb("say TEXT", "(.+)", lambda a: _say(a[1])),
    "count": _Verb("count N [slowly]", r"(\d{1,9})(\s+slowly)?", _count),
    "stall": _Verb("stall", ".*", lambda _: (Step(stall=True),)),
    "hello": _Verb("hello", ".*", lambda _: _say(_HELLO)),
    "help": _Verb("help", ".*", lambda _: _say(_HELLO)),
}
_VERB: Final = re.compile(rf"(?:{'|'.join(_VERBS)})(?=[\s!,.?:]|$)", re.IGNORECASE)
_NEXT: Final = re.compile(rf"(?:\s+then\s+|\s*\n\s*)(?={_VERB.pattern})", re.IGNORECASE)
_NEXT_LINE: Final = re.compile(rf"\s*\n\s*(?:then\s+)?(?={_VERB.pattern})", re.IGNORECASE)
