"""What a prompt makes this agent do: verbs at its start, joined by `then` or by a new line.

    hello | help | say TEXT | think TEXT | count N [slowly] | stall | refuse
    read FILE | list [DIR] | search TEXT | write FILE: TEXT | edit FILE: OLD => NEW
    run COMMAND | plan FIRST; SECOND; THIRD | ask QUESTION: A | B | delegate TASK

Anything else is said again. `refuse` ends the turn with the stop reason `refusal`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol

from conformance.selftest.agent.loop import Future, Loop
from conformance.selftest.agent.rpc import Message

__all__ = ["HELLO", "Result", "Speaker", "play"]

COUNT_PAUSE_S: Final = 0.05
ECHO_CHARS: Final = 500
HELLO: Final = "Hello! I do what you say: read, list, search, write, edit, run, plan, ask, count."

_PATTERNS: Final = {
    "read": r"(?P<path>.+)",
    "list": r"(?P<path>.*)",
    "search": r"(?P<pattern>.+)",
    "write": r"(?P<path>[^:\n]+?)\s*:\s?(?P<content>.*)",
    "edit": r"(?P<path>[^:\n]+?)\s*:\s?(?P<old_text>.+?) =>(?: (?P<new_text>.*))?",
    "run": r"(?P<command>.+)",
    "plan": r"(?P<entries>.*[^;\s].*)",
    "ask": r"(?P<question>.+?)(?::(?P<choices>[^:]*\|[^:]*))?",
    "delegate": r"(?:to\s+[\w-]+:\s*)?(?P<task>.+?)",
    "think": r"(?P<text>.+)",
    "say": r"(?P<text>.+)",
    "count": r"(?P<n>\d{1,9})(?P<slowly>\s+slowly)?",
    "stall": r".*",
    "hello": r".*",
    "help": r".*",
    "refuse": r".*",
}
_VERB: Final = re.compile(rf"/?({'|'.join(_PATTERNS)})(?=[\s!,.?:]|$)", re.IGNORECASE)
_NEXT: Final = re.compile(rf"(?:\s+then\s+|\s*\n\s*)(?={_VERB.pattern})", re.IGNORECASE)
_NEXT_LINE: Final = re.compile(rf"\s*\n\s*(?:then\s+)?(?={_VERB.pattern})", re.IGNORECASE)
_LINES: Final = ("content", "old_text", "new_text")


class Result(NamedTuple):
    """What a tool call came to."""

    text: str
    is_error: bool = False


class Speaker(Protocol):
    """Who plays a prompt: what it says goes to the client, or to whoever delegated."""

    async def say(self, text: str) -> None:
        """Say a part of the answer."""

    async def think(self, text: str) -> None:
        """Think aloud."""


async def play(
    text: str,
    speaker: Speaker,
    call: Callable[[str, Message], Awaitable[Result]],
    loop: Loop,
) -> str:
    """Do what a prompt says; return the stop reason. May be cancelled.

    Args:
        text: The prompt.
        speaker: Who says it.
        call: Makes a tool call: the tool's name and its arguments.
        loop: What waits wait on.
    """
    steps = _parse(text)
    if not steps:
        await _say(speaker, f"You said: {text[:ECHO_CHARS]}")
    for name, arguments in steps:
        if arguments is None:
            await _say(speaker, f"I did nothing, because this is not clear to me: {name}")
            return "end_turn"
    for name, arguments in steps:
        assert arguments is not None
        if name == "refuse":
            return "refusal"
        if not await _do(name, arguments, speaker, call, loop):
            break
    return "end_turn"


async def _do(
    name: str,
    arguments: dict[str, str],
    speaker: Speaker,
    call: Callable[[str, Message], Awaitable[Result]],
    loop: Loop,
) -> bool:
    """Do one step; say whether to go on."""
    if name in ("hello", "help"):
        await _say(speaker, HELLO)
    elif name == "say":
        await _say(speaker, arguments["text"])
    elif name == "think":
        for word in re.findall(r"\s*\S+", arguments["text"]):
            await speaker.think(word)
    elif name == "count":
        for number in range(1, int(arguments["n"]) + 1):
            if arguments["slowly"] and number > 1:
                await loop.sleep(COUNT_PAUSE_S)
            await speaker.say(f"{number} ")
    elif name == "stall":
        await Future()
    else:
        result = await call(name, _tool_arguments(name, arguments))
        if result.is_error:
            await _say(speaker, f"`{name}` did not work: {result.text}")
            return False
        await _say(speaker, f"`{name}` gave: {result.text or 'nothing'}\n")
    return True


async def _say(speaker: Speaker, text: str) -> None:
    for word in re.findall(r"\s*\S+\s*?", text):
        await speaker.say(word)


def _tool_arguments(name: str, arguments: dict[str, str]) -> Message:
    if name == "plan":
        parts = map(str.strip, arguments["entries"].split(";"))
        return {"entries": [part for part in parts if part]}
    if name == "ask":
        choices = [each.strip() for each in arguments["choices"].split("|")]
        return {"question": arguments["question"], "choices": [each for each in choices if each]}
    if name == "list":
        return {"path": arguments["path"] or "."}
    return {
        key: value.replace("\\n", "\n") if key in _LINES else value
        for key, value in arguments.items()
    }


def _parse(prompt: str) -> list[tuple[str, dict[str, str] | None]]:
    """Take a prompt apart; nothing if it does not start with a verb."""
    steps: list[tuple[str, dict[str, str] | None]] = []
    text = prompt.strip()
    while start := _VERB.match(text):
        name = start[1].lower()
        # A command may well hold "then", and a task is a prompt itself: only a new line ends them.
        end = (_NEXT_LINE if name in ("run", "delegate") else _NEXT).search(text, start.end())
        argument = text[start.end() : end.start() if end else len(text)].strip()
        found = re.fullmatch(_PATTERNS[name], argument, re.DOTALL)
        steps.append((name, found.groupdict("") if found else None))
        text = text[end.end() :] if end else ""
    return steps
