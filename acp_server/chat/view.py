"""What a person sees of a conversation, printed as it comes.

Everything an agent sends is untrusted: it is stripped of control characters before it is printed,
and whatever has not the expected shape is shown as nothing. Nothing printed is printed again, with
one exception: on a terminal, the line of a tool call that is still the last line changes its mark.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

from msgspec import Struct

from acp_server.chat.calls import DONE, FAILED, RUNNING, ToolCall
from acp_server.chat.text import (
    clean,
    clean_line,
    encodable,
    to_list,
    to_mapping,
    to_string,
    to_text,
)
from acp_server.chat.tree import Tree

__all__ = ["Option", "View"]

DIFF_LINES: Final = 40
OUTPUT_LINES: Final = 20
DIFF_CHARS: Final = 400_000  # difflib is quadratic at worst
QUIET_KINDS: Final = frozenset({"read", "search", "fetch", "think"})
MARKS: Final = {RUNNING: "…", DONE: "✓", FAILED: "✗"}
ASCII_MARKS: Final = {RUNNING: "..", DONE: "ok", FAILED: "x"}
MARK_STYLES: Final = {RUNNING: "dim", DONE: "green", FAILED: "red"}
PLAN_BOXES: Final = {"pending": "[ ]", "in_progress": "[>]", "completed": "[x]"}
KIND_KEYS: Final = {
    "allow_once": "y",
    "allow_always": "a",
    "reject_once": "n",
    "reject_always": "r",
}
STOP_NOTES: Final = {
    "cancelled": "stopped",
    "refusal": "the model refused; this prompt is dropped from the conversation",
    "max_tokens": "ended: the model's token limit was reached",
    "max_turn_requests": "ended: the limit of model calls in one turn was reached",
}


class Option(Struct, frozen=True):
    """One answer to a permission question."""

    key: str
    """What to type: a letter, or the option's number."""
    option_id: str
    kind: str
    name: str


class View:
    """Prints one conversation. All methods are synchronous; not thread-safe.

    Args:
        stream: Where to print. Characters it cannot encode are replaced.
        errors: Where errors go; `stream` by default.
        is_rich: Whether to use colours and to rewrite a tool call's line.
        cwd: Paths below it are shown relative to it.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        cwd: str,
        errors: TextIO | None = None,
        is_rich: bool = False,
    ) -> None:
        self._stream = stream
        self._errors = errors
        self._cwd = cwd
        marks = "".join(MARKS.values())
        self._marks = MARKS if encodable(stream, marks) == marks else ASCII_MARKS
        self._console: Any = None
        if is_rich:
            from rich.console import Console

            self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._held: list[tuple[str, str]] | None = None
        self._is_at_line_start = True
        self._block = ""  # what kind of text is being streamed
        self._open_line = ""  # the tool call whose line is unfinished
        self._calls: dict[str, ToolCall] = {}
        self._tree = Tree(self._show_call)
        self._plan: list[str] = []
        self._agent = self._mode = ""
        self.commands: dict[str, str] = {}
        """Name and description of the agent's slash commands."""

    def open(self, agent_info: object, modes: object) -> list[str]:
        """Learn who is talking, from `initialize` and `session/new`; return the modes' ids."""
        info, state = to_mapping(agent_info), to_mapping(modes)
        name = clean_line(info.get("title")) or clean_line(info.get("name")) or "agent"
        self._agent = f"{name} {clean_line(info.get('version'))}".rstrip()
        self._mode = clean_line(state.get("currentModeId"))
        available = map(to_mapping, to_list(state.get("availableModes")))
        return [clean_line(mode.get("id")) for mode in available]

    def header(self, model: str = "") -> None:
        """Print who is talking, with which `model` if that is known, and how to leave."""
        self._print_line(self._agent, "bold")
        mode = f"mode: {self._mode}. " if self._mode else ""
        self.note(f"{model}{mode}/help lists what you can type, Ctrl-D leaves.")

    def set_mode(self, mode: str) -> None:
        """Print the session's mode if it is a new one."""
        if mode != self._mode:
            self._mode = mode
            self.note(f"mode: {mode}")

    def hold(self) -> None:
        """Keep what is printed from now on, so that it does not mix with what a person types."""
        self._end_line()
        self._held = []

    def release(self) -> None:
        """Print what was kept since `hold`, and print directly again."""
        held, self._held = self._held or [], None
        for text, style in held:
            self._put(text, style)

    def leave_line(self) -> None:
        """Take note that the terminal has put something (``^C``) on the current line."""
        self._is_at_line_start = False

    def note(self, text: str) -> None:
        """Print a line of ours."""
        self._print_line(text, "dim")

    def error(self, text: str) -> None:
        """Print one line about a failure."""
        line = f"error: {clean_line(text)}"
        if self._errors is None:
            self._print_line(line, "bold red")
        else:
            self._errors.write(encodable(self._errors, line + "\n"))
            self._errors.flush()

    def lines(self, lines: Iterable[str]) -> None:
        """Print foreign lines, cleaned and indented."""
        for line in lines:
            self._print_line("    " + clean(line).replace("\n", " "), "dim")

    def update(self, update: Mapping[str, Any], session_id: str = "") -> None:
        """Print what a ``session/update`` says; unknown kinds are not shown.

        Args:
            update: The update.
            session_id: Whose it is: the conversation's, or that of a subagent.
        """
        if self._tree.take(session_id, update):
            return
        show = self._SHOW.get(to_string(update.get("sessionUpdate")))
        if show is not None:
            show(self, update)

    def ask(self, params: Mapping[str, Any]) -> list[Option]:
        """Print a ``session/request_permission`` question with its numbered options.

        Returns:
            The options in the order shown; empty if there is nothing to choose from.
        """
        self._show_question(params)
        options = _options(params)
        for number, option in enumerate(options, 1):
            self._print_line(f"   {number}) {option.name} [{option.key}]")
        return options

    def decide(self, params: Mapping[str, Any], kinds: Sequence[str]) -> Option | None:
        """Take the first option of the first kind there is, and print question and choice.

        Returns:
            The option; `None` if there is none of these kinds.
        """
        self._show_question(params)
        options = _options(params)
        for kind in kinds:
            for option in options:
                if option.kind == kind:
                    self._print_line(f"   {option.name}")
                    return option
        return None

    def _show_question(self, params: Mapping[str, Any]) -> None:
        fields = to_mapping(params.get("toolCall"))
        call_id = to_string(fields.get("toolCallId"))
        call = self._calls.setdefault(call_id, ToolCall())
        asked = ToolCall()
        asked.merge(fields)
        if call.is_announced and asked.title not in ("", call.title):
            self._show_asked(asked)  # about something below the call, whose own line stays
            if asked.is_content_shown:
                call.content, call.is_content_shown = asked.content, True
            return
        call.merge(fields)
        if self._open_line == call_id:
            self._take_back_line()
        self._show_asked(call)

    def _show_asked(self, call: ToolCall) -> None:
        self._print_line(f"? {call.title or 'May the agent go on?'}", "bold yellow")
        self._show_content(call)

    def open_calls(self) -> list[str]:
        """Return the titles of the tool calls that have not ended."""
        return [call.title for _, call in self._running()]

    def subagents(self) -> list[str]:
        """Return the names of the subagents that are at work."""
        return self._tree.at_work

    def end_turn(self, stop_reason: object) -> None:
        """Finish the turn's output; say why it stopped, unless it simply ended."""
        for call_id, call in self._running():
            call.status = FAILED
            self._show_call(call_id, call)
        self._calls.clear()
        self._end_line()
        if note := STOP_NOTES.get(to_string(stop_reason)):
            self.note(note)

    def _running(self) -> list[tuple[str, ToolCall]]:
        calls = self._calls.items()
        return [(i, call) for i, call in calls if call.is_announced and call.status == RUNNING]

    def _show_message(self, update: Mapping[str, Any]) -> None:
        self._say("message", to_text(update.get("content")))

    def _show_thought(self, update: Mapping[str, Any]) -> None:
        text = to_text(update.get("content"))
        if self._console is None and self._block != "thought" and text:
            text = f"(thinking) {text}"
        self._say("thought", text, "dim italic")

    def _show_tool_call(self, update: Mapping[str, Any]) -> None:
        call_id = to_string(update.get("toolCallId"))
        call = self._calls.setdefault(call_id, ToolCall())
        is_new = not call.is_announced
        call.is_announced = True
        if call.merge(update) or is_new:
            self._show_call(call_id, call)
        self._tree.show_progress(call_id, call)
        if call.status != RUNNING:
            self._show_content(call)

    def _show_plan(self, update: Mapping[str, Any]) -> None:
        entries = map(to_mapping, to_list(update.get("entries")))
        plan = [
            f"   {PLAN_BOXES.get(to_string(e.get('status')), '[ ]')} {clean_line(e.get('content'))}"
            for e in entries
        ]
        if plan == self._plan:
            return
        self._plan = plan
        self._print_line("plan:", "bold")
        for line in plan:
            self._print_line(line)

    def _show_mode(self, update: Mapping[str, Any]) -> None:
        self.set_mode(clean_line(update.get("currentModeId")))

    def _keep_commands(self, update: Mapping[str, Any]) -> None:
        commands = [to_mapping(command) for command in to_list(update.get("availableCommands"))]
        self.commands = {
            clean_line(command.get("name")): clean_line(command.get("description"))
            for command in commands
        }

    _SHOW: Final[dict[str, Callable[[View, Mapping[str, Any]], None]]] = {
        "agent_message_chunk": _show_message,
        "agent_thought_chunk": _show_thought,
        "tool_call": _show_tool_call,
        "tool_call_update": _show_tool_call,
        "plan": _show_plan,
        "current_mode_update": _show_mode,
        "available_commands_update": _keep_commands,
    }

    def _show_call(self, call_id: str, call: ToolCall) -> None:
        line = f"{call.indent}{self._marks[call.status]} {call.title}"
        style = MARK_STYLES[call.status]
        if self._console is None or self._held is not None:
            self._print_line(line, style)
            return
        if self._open_line == call_id:
            self._take_back_line()
        else:
            self._end_line()
        # A line that wraps could not be taken back.
        self._put(_cut(line, self._console.width - 1), style)
        self._open_line = call_id
        self._is_at_line_start = False
        if call.status != RUNNING:
            self._end_line()

    def _take_back_line(self) -> None:
        self._put("\r\x1b[K")
        self._open_line = ""
        self._is_at_line_start = True

    def _show_content(self, call: ToolCall) -> None:
        if call.is_content_shown or (call.kind in QUIET_KINDS and call.status != FAILED):
            return
        for item in map(to_mapping, call.content):
            call.is_content_shown = True
            if item.get("type") == "diff":
                self._show_diff(item)
            elif item.get("type") == "content":
                self._show_output(to_text(item.get("content")))

    def _show_output(self, text: str) -> None:
        lines = text.strip("\n").split("\n") if text.strip() else []
        if len(lines) > 1 and lines[0].startswith("```") and lines[-1] == "```":
            lines = lines[1:-1]  # a fence is for clients that render Markdown
        if len(lines) > OUTPUT_LINES:
            self._print_line(f"    ({len(lines) - OUTPUT_LINES} lines before)", "dim")
        for line in lines[-OUTPUT_LINES:]:
            self._print_line(f"    {line}")

    def _show_diff(self, diff: Mapping[str, Any]) -> None:
        old, new = clean(diff.get("oldText")), clean(diff.get("newText"))
        path = clean_line(diff.get("path")).removeprefix(self._cwd.rstrip(os.sep) + os.sep)
        if len(old) + len(new) > DIFF_CHARS:
            self._print_line(f"    {path}: too large to compare", "dim")
            return
        before = path if isinstance(diff.get("oldText"), str) else "/dev/null"
        texts = old.splitlines(), new.splitlines()
        lines = list(difflib.unified_diff(*texts, before, path, lineterm=""))
        for line in lines[:DIFF_LINES]:
            self._print_line(f"    {line}", _diff_style(line))
        if len(lines) > DIFF_LINES:
            self._print_line(f"    ({len(lines) - DIFF_LINES} lines more)", "dim")

    def _say(self, block: str, text: str, style: str = "") -> None:
        if self._block != block:
            text = text.lstrip("\n")
        if not text:
            return
        if self._block != block:
            self._end_line()
            self._block = block
        self._put(text, style)
        self._is_at_line_start = text.endswith("\n")

    def _print_line(self, text: str, style: str = "") -> None:
        self._end_line()
        self._put(f"{text}\n", style)

    def _end_line(self) -> None:
        if not self._is_at_line_start:
            self._put("\n")
        self._is_at_line_start = True
        self._open_line = self._block = ""

    def _put(self, text: str, style: str = "") -> None:
        if self._held is not None:
            self._held.append((text, style))
            return
        text = encodable(self._stream, text)
        if self._console is not None and style:
            from rich.text import Text

            # Console.print would wrap and expand tabs; only the colour is wanted.
            self._console.print(Text(text, style, tab_size=1), end="", soft_wrap=True)
        else:
            self._stream.write(text)
        self._stream.flush()


def _options(params: Mapping[str, Any]) -> list[Option]:
    options: list[Option] = []
    for number, fields in enumerate(map(to_mapping, to_list(params.get("options"))), 1):
        kind = to_string(fields.get("kind"))
        letter = KIND_KEYS.get(kind, str(number))
        key = str(number) if letter in {option.key for option in options} else letter
        option_id, name = to_string(fields.get("optionId")), clean_line(fields.get("name"))
        options.append(Option(key, option_id, kind, name))
    return options


def _diff_style(line: str) -> str:
    if line.startswith(("+++", "---")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")


def _cut(line: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    return line if cell_len(line) <= width else set_cell_size(line, width)
