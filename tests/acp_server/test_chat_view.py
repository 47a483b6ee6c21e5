from __future__ import annotations

import io
import re

import pytest

from acp_server.chat.text import clean, clean_line
from acp_server.chat.view import View


class Screen(io.TextIOWrapper):
    """A stream that remembers, in any encoding."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n")

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def view(screen):
    return View(screen, cwd="/project")


@pytest.fixture
def rich_view(screen, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return View(screen, cwd="/project", is_rich=True)


def chunk(text, kind="agent_message_chunk"):
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}}


def call(call_id="c", **fields):
    return {"sessionUpdate": "tool_call", "toolCallId": call_id, **fields}


def call_update(call_id="c", **fields):
    return {"sessionUpdate": "tool_call_update", "toolCallId": call_id, **fields}


def content(text):
    return [{"type": "content", "content": {"type": "text", "text": text}}]


QUESTION = {
    "sessionId": "s",
    "toolCall": {"toolCallId": "c", "title": "Run: make", "kind": "execute"},
    "options": [
        {"optionId": "1st", "name": "Allow", "kind": "allow_once"},
        {"optionId": "2nd", "name": "Allow make", "kind": "allow_always"},
        {"optionId": "3rd", "name": "Allow all", "kind": "allow_always"},
        {"optionId": "4th", "name": "No", "kind": "reject_once"},
    ],
}


def test_text_is_printed_as_it_comes(view, screen):
    view.update(chunk("Hel"))
    assert screen.text == "Hel"

    view.update(chunk("lo"))
    view.end_turn("end_turn")

    assert screen.text == "Hello\n"


def test_a_thought_is_told_from_what_is_said(view, screen):
    view.update(chunk("hm", "agent_thought_chunk"))
    view.update(chunk(", well", "agent_thought_chunk"))
    view.update(chunk("\n\nyes"))
    view.end_turn("end_turn")

    assert screen.text == "(thinking) hm, well\nyes\n"


@pytest.mark.parametrize(
    "attack",
    [
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\x1b]8;;http://x\x1b\\",
        "\x1bP+q\x1b\\",
        "\x9b31m",
        "\x9d0;title\x9c",
        "\x1b(0",
        "\x1bc",
        "\x08\x7f\x00",
        "\u202e\u2066",
    ],
)
def test_nothing_an_agent_sends_can_steer_the_terminal(attack):
    assert clean(f"a{attack}b") == "ab"


def test_a_sequence_cut_in_two_leaves_harmless_text():
    assert clean("a\x1b") + clean("[2Jb") == "a[2Jb"


def test_an_unfinished_sequence_hides_no_more_than_its_line():
    assert clean("a\x1b]0;hidden\nb") == "a\nb"


def test_a_carriage_return_cannot_overwrite_what_was_shown():
    assert clean("rm -rf /\rls\r\n") == "rm -rf /\nls\n"


def test_titles_are_one_line():
    assert clean_line("Run:\n  a\tb\x1b[1A ") == "Run: a b"


def test_a_tool_call_is_one_line_when_it_starts_and_one_when_it_ends(view, screen):
    view.update(call(title="Read a.py", kind="read", status="pending"))
    view.update(call_update(status="in_progress"))
    view.update(call_update(status="completed", content=content("secret of the file")))
    view.end_turn("end_turn")

    assert screen.text == "… Read a.py\n✓ Read a.py\n"


def test_on_a_terminal_the_line_of_a_tool_call_changes_its_mark(rich_view, screen):
    rich_view.update(call(title="Run: make", kind="execute", status="in_progress"))
    rich_view.update(call_update(status="failed"))
    rich_view.end_turn("end_turn")

    assert screen.text.count("\n") == 1
    assert re.sub(r"\x1b\[\d+m", "", screen.text) == "… Run: make\r\x1b[K✗ Run: make\n"


def test_on_a_terminal_a_tool_call_that_is_no_longer_last_gets_a_new_line(rich_view, screen):
    rich_view.update(call(title="Run: make", status="in_progress"))
    rich_view.update(chunk("meanwhile"))
    rich_view.update(call_update(status="completed"))

    assert re.sub(r"\x1b\[\d+m", "", screen.text) == "… Run: make\nmeanwhile\n✓ Run: make\n"


def test_a_title_wider_than_the_terminal_is_cut_so_that_it_can_be_taken_back(rich_view, screen):
    rich_view.update(call(title="x" * 100, status="in_progress"))

    assert len(re.sub(r"\x1b\[\d+m", "", screen.text)) == 39


def test_of_a_long_output_the_end_is_shown_without_its_fence(view, screen):
    lines = "\n".join(["```", *map(str, range(1, 31)), "```"])
    view.update(call(title="Run", kind="execute", status="completed", content=content(lines)))

    assert "(10 lines before)\n    11\n" in screen.text
    assert screen.text.endswith("    30\n")
    assert "```" not in screen.text


def test_the_content_of_a_failed_read_is_shown(view, screen):
    view.update(call(title="Read", kind="read", status="failed", content=content("no such file")))

    assert "    no such file\n" in screen.text


def test_a_diff_is_shown_once_relative_to_the_session_and_cut(view, screen):
    new = "".join(f"{number}\n" for number in range(100))
    diff = [{"type": "diff", "path": "/project/src/a.py", "oldText": None, "newText": new}]
    view.update(call(title="Write", kind="edit", status="in_progress", content=diff))
    view.update(call_update(status="completed", content=diff))
    view.update(call_update(rawOutput={}))

    shown = [line for line in screen.text.splitlines() if line.startswith("    ")]
    assert shown[:4] == ["    --- /dev/null", "    +++ src/a.py", "    @@ -0,0 +1,100 @@", "    +0"]
    assert len(shown) == 41
    assert shown[-1] == "    (63 lines more)"


def test_a_diff_of_huge_texts_is_not_computed(view, screen):
    diff = [{"type": "diff", "path": "/project/a", "oldText": "x" * 500_000, "newText": "y"}]
    view.update(call(title="Write", kind="edit", status="completed", content=diff))

    assert "    a: too large to compare\n" in screen.text


@pytest.mark.requirement("ACP-140")
def test_a_plan_is_a_checklist_and_replaces_the_one_before(view, screen):
    entries = [
        {"content": "look", "status": "completed"},
        {"content": "edit", "status": "in_progress"},
        {"content": "test", "status": "pending"},
    ]
    plan = {"sessionUpdate": "plan", "entries": entries}
    view.update(plan)
    view.update(plan)

    assert screen.text == "plan:\n   [x] look\n   [>] edit\n   [ ] test\n"


def test_a_question_shows_its_options_and_every_one_has_a_key_of_its_own(view, screen):
    options = view.ask(QUESTION)

    assert [(option.key, option.option_id) for option in options] == [
        ("y", "1st"),
        ("a", "2nd"),
        ("3", "3rd"),
        ("n", "4th"),
    ]
    assert screen.text.startswith("? Run: make\n   1) Allow [y]\n")


def test_a_question_shows_the_diff_it_is_about(view, screen):
    diff = [{"type": "diff", "path": "/project/a", "oldText": "1", "newText": "2"}]
    view.update(call(title="Edit a", kind="edit", status="pending"))
    view.ask({**QUESTION, "toolCall": {"toolCallId": "c", "content": diff}})

    assert "? Edit a\n    --- a\n    +++ a\n" in screen.text


def test_what_a_question_showed_is_not_shown_again_at_the_end(view, screen):
    diff = [{"type": "diff", "path": "/project/a", "oldText": "1", "newText": "2"}]
    view.update(call(title="edit", kind="edit", status="pending"))
    view.ask({**QUESTION, "toolCall": {"toolCallId": "c", "title": "Edit a?", "content": diff}})
    view.update(call_update("c", status="completed", content=diff))

    assert screen.text.count("+++ a") == 1


def test_a_question_about_what_is_below_a_call_leaves_the_calls_own_lines_alone(view, screen):
    asked = {"toolCallId": "d", "title": "gem › Run: make", "status": "in_progress"}
    view.update(call("d", name="delegate", title="gem: look", status="in_progress"))
    view.update(call_update("d", content=content("Read a")))
    view.ask({**QUESTION, "toolCall": asked})
    view.update(call_update("d", title="gem: look", status="in_progress"))
    view.update(call_update("d", content=content("Read a\nRun: make")))
    view.update(call_update("d", status="completed", content=content("done")))

    lines = screen.text.splitlines()
    assert [line for line in lines if " [" not in line] == [
        "… gem: look",
        "  … Read a",
        "? gem › Run: make",
        "  … Run: make",
        "✓ gem: look",
        "    done",
    ]


def test_a_decision_is_made_for_a_kind_and_shown(view, screen):
    option = view.decide(QUESTION, ["reject_always", "reject_once"])

    assert option is not None
    assert option.option_id == "4th"
    assert screen.text == "? Run: make\n   No\n"
    assert view.decide(QUESTION, ["reject_always"]) is None


@pytest.mark.requirement("ACP-091")
def test_what_was_still_running_when_the_turn_ended_is_marked_failed(view, screen):
    view.update(call(title="Run: make", status="in_progress"))
    assert view.open_calls() == ["Run: make"]

    view.end_turn("cancelled")

    assert screen.text == "… Run: make\n✗ Run: make\nstopped\n"
    assert view.open_calls() == []


def test_a_call_known_from_a_question_only_is_not_said_to_have_failed(view, screen):
    view.ask(QUESTION)
    before = screen.text

    view.end_turn("end_turn")

    assert screen.text == before


def test_what_comes_while_a_person_types_is_shown_afterwards(view, screen):
    view.hold()
    view.update(chunk("late"))
    view.note("news")
    assert screen.text == ""

    view.release()

    assert screen.text == "late\nnews\n"


def test_an_error_is_one_line(view, screen):
    view.error("it broke\nbadly\x1b[2J")

    assert screen.text == "error: it broke badly\n"


def test_errors_can_go_elsewhere(screen):
    errors = Screen()
    View(screen, cwd="/", errors=errors).error("no")

    assert (screen.text, errors.text) == ("", "error: no\n")


@pytest.mark.requirement("B108")
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "cp437"])
def test_no_character_is_too_much_for_any_encoding(encoding):
    screen = Screen(encoding)
    view = View(screen, cwd="/")

    view.update(call(title="Grüße 語 🎉", status="in_progress"))
    view.update(call_update(status="completed"))
    view.update(chunk("語 \ud800"))
    view.note("stopping…")
    view.error("ä ✗")

    assert "stopping..." in screen.text
    assert screen.text.startswith(".. Gr")


@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [None], {"type": 3}])
def test_updates_of_any_shape_are_survived(view, value):
    keys = ["content", "toolCallId", "title", "status", "entries", "currentModeId"]
    kinds = ["agent_message_chunk", "tool_call", "tool_call_update", "plan", "current_mode_update"]
    for kind in [*kinds, "available_commands_update", value]:
        view.update({"sessionUpdate": kind, **dict.fromkeys(keys, value)})
        view.update({"sessionUpdate": kind, "availableCommands": value, "content": [value]})
    view.ask({"toolCall": value, "options": value})
    view.open(value, value)
    view.end_turn(value)


def test_a_mode_is_told_when_it_changes(view, screen):
    modes = {"currentModeId": "ask", "availableModes": [{"id": "ask"}, {"id": "auto"}]}
    assert view.open({"name": "bot", "version": "2"}, modes) == ["ask", "auto"]

    view.update({"sessionUpdate": "current_mode_update", "currentModeId": "ask"})
    view.update({"sessionUpdate": "current_mode_update", "currentModeId": "auto"})
    view.set_mode("auto")

    assert screen.text == "mode: auto\n"


# --- subagents -------------------------------------------------------------------------------


def subagent(session_id, title=None, **state):
    named = {} if title is None else {"title": title}
    update = {"sessionUpdate": "subagent_update", "sessionId": session_id, **named}
    return {**update, "state": state or {"state": "running"}}


ENDED = {"state": "idle", "stopReason": "end_turn"}
STOPPED = {"state": "idle", "stopReason": "cancelled"}


def link(session_id):
    return [{"type": "session", "sessionId": session_id}]


def test_what_subagents_do_stands_below_their_calls_with_their_names(view, screen):
    view.update(call("d", name="delegate", title="rev: look", status="in_progress"), "s")
    view.update(subagent("a", "rev"), "s")
    view.update(call_update("d", content=link("a")), "s")
    view.update(chunk("not shown, it is in the answer"), "a")
    view.update(call("c", title="delegate it", status="in_progress"), "a")
    view.update(subagent("b", "helper"), "a")
    view.update(call_update("c", content=link("b")), "a")
    view.update(call("c", title="Run: make", kind="execute", status="pending"), "b")
    view.update(call_update("c", status="failed", content=content("not shown")), "b")
    view.update(subagent("b", **ENDED), "a")
    view.update(call_update("c", status="completed"), "a")
    view.update(subagent("a", **ENDED), "s")
    answer = [*link("a"), *content("all is well")]
    view.update(call_update("d", status="completed", content=answer), "s")
    view.end_turn("end_turn")

    assert screen.text.splitlines() == [
        "… rev: look",
        "  … rev › delegate it",
        "    … rev › helper › Run: make",
        "    ✗ rev › helper › Run: make",
        "  ✓ rev › delegate it",
        "✓ rev: look",
        "    all is well",
    ]
    assert view.subagents() == []


def test_subagents_side_by_side_are_told_apart_by_their_names(view, screen):
    for session_id, name in (("a", "ann"), ("b", "bob")):
        view.update(subagent(session_id, name), "s")
        view.update(call("c", title="Read x", status="pending"), session_id)
    view.update(call_update("c", status="completed"), "a")

    assert screen.text.splitlines() == [
        "  … ann › Read x",
        "  … bob › Read x",
        "  ✓ ann › Read x",
    ]


def test_one_in_the_background_outlives_the_turn_and_has_a_line_for_its_end(view, screen):
    view.update(subagent("a", "ann"), "s")
    view.update(call("c", title="Read x", status="pending"), "a")
    view.end_turn("end_turn")
    assert view.subagents() == ["ann"]
    assert "✗" not in screen.text

    view.update(call_update("c", status="failed"), "a")
    view.update(subagent("a", **STOPPED), "s")

    assert screen.text.splitlines() == ["  … ann › Read x", "  ✗ ann › Read x", "✗ ann"]
    assert view.subagents() == []


def test_what_a_subagent_without_a_session_does_is_shown_as_it_comes(view, screen):
    view.update(call("d", name="delegate", title="gem: look", status="in_progress"))
    for shown in ("Read a", "```\nRead a\nRun b\n```", "```\nRun b\n  failed\nRead a\n```"):
        view.update(call_update("d", content=content(shown)))
    view.update(call_update("d", status="completed", content=content("done")))

    assert screen.text.splitlines() == [
        "… gem: look",
        "  … Read a",
        "  … Run b",
        "  … failed",
        "  … Read a",
        "✓ gem: look",
        "    done",
    ]


def test_what_other_calls_print_on_the_way_is_not_repeated_line_by_line(view, screen):
    view.update(call("c", name="shell", title="Run: make", kind="execute", status="in_progress"))
    view.update(call_update("c", content=content("one")))
    view.update(call_update("c", status="completed", content=content("```\none\ntwo\n```")))

    assert screen.text == "… Run: make\n✓ Run: make\n    one\n    two\n"


def test_on_a_terminal_lines_of_subagents_take_back_nothing_but_themselves(rich_view, screen):
    rich_view.update(call("d", name="delegate", title="gem: look", status="in_progress"))
    rich_view.update(call_update("d", content=content("Read a")))
    rich_view.update(subagent("a", "ann"))
    rich_view.update(call("c", title="Read x", status="pending"), "a")
    rich_view.update(call_update("c", status="completed"), "a")
    rich_view.update(subagent("a", **ENDED))

    assert re.sub(r"\x1b\[\d+m", "", screen.text) == (
        "… gem: look\n  … Read a\n  … ann › Read x\r\x1b[K  ✓ ann › Read x\n✓ ann\n"
    )


@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [None]])
def test_updates_about_subagents_of_any_shape_are_survived(view, value):
    keys = ["sessionId", "title", "state", "toolCallId", "content", "status", "name"]
    for kind in ("subagent_update", "tool_call", "tool_call_update", "session_message"):
        for session_id in ("", "x"):
            view.update({"sessionUpdate": kind, **dict.fromkeys(keys, value)}, session_id)
            view.update({"sessionUpdate": kind, "sessionId": "x", "state": {"state": value}})
