from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

import msgspec
import pytest
from msgspec import Meta, Struct

from acp_server import types as wire
from acp_server.commands import COMMANDS
from acp_server.updates import MAX_DIFF_CHARS, MAX_RAW_INPUT_BYTES, MAX_TEXT_CHARS, updates_for
from agent_core import events as log
from agent_core.content import (
    Diff,
    Image,
    Link,
    Location,
    PlanEntry,
    Resource,
    Text,
    TextPart,
    ToolCallPart,
    Usage,
)
from agent_core.events import Event, EventData

# --- the shapes of the protocol, written down a second time and strictly --------------------


class Strict(Struct, rename="camel", forbid_unknown_fields=True):
    pass


class TextShape(Strict, tag_field="type", tag="text"):
    text: str


class ImageShape(Strict, tag_field="type", tag="image"):
    data: str
    mime_type: str
    uri: str = ""


class LinkShape(Strict, tag_field="type", tag="resource_link"):
    uri: str
    name: str
    mime_type: str = ""
    title: str = ""
    description: str = ""
    size: int = 0


class TextResourceShape(Strict):
    uri: str
    text: str = ""
    blob: str = ""
    mime_type: str = ""


class ResourceShape(Strict, tag_field="type", tag="resource"):
    resource: TextResourceShape


Block = TextShape | ImageShape | LinkShape | ResourceShape
Kind = Literal[
    "read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"
]
Status = Literal["pending", "in_progress", "completed", "failed"]


class ContentShape(Strict, tag_field="type", tag="content"):
    content: Block


class DiffShape(Strict, tag_field="type", tag="diff"):
    path: str
    new_text: str
    old_text: str = ""


class LocationShape(Strict):
    path: str
    line: int = 1


class PlanEntryShape(Strict):
    content: str
    priority: Literal["high", "medium", "low"]
    status: Literal["pending", "in_progress", "completed"]


class HintShape(Strict):
    hint: str


class CommandShape(Strict):
    name: str
    description: str
    input: HintShape | msgspec.UnsetType = msgspec.UNSET


class UpdateShape(Strict, tag_field="sessionUpdate"):
    pass


class UserShape(UpdateShape, tag="user_message_chunk"):
    content: Block
    message_id: str


class AgentShape(UpdateShape, tag="agent_message_chunk"):
    content: Block
    message_id: str


class ThoughtShape(UpdateShape, tag="agent_thought_chunk"):
    content: Block
    message_id: str


class CallShape(UpdateShape, tag="tool_call"):
    tool_call_id: str
    title: str
    kind: Kind = "other"
    status: Status = "pending"
    name: str = ""
    content: list[ContentShape | DiffShape] = []
    locations: list[LocationShape] = []
    raw_input: Any = None


class CallUpdateShape(UpdateShape, tag="tool_call_update"):
    tool_call_id: str
    title: str = ""
    kind: Kind = "other"
    status: Status = "pending"
    content: list[ContentShape | DiffShape] = []
    locations: list[LocationShape] = []
    raw_input: Any = None


class PlanShape(UpdateShape, tag="plan"):
    entries: list[PlanEntryShape]


class ModeShape(UpdateShape, tag="current_mode_update"):
    current_mode_id: str


class CostShape(Strict):
    amount: float
    currency: str


class UsageShape(UpdateShape, tag="usage_update"):
    used: Annotated[int, Meta(ge=0)]
    size: Annotated[int, Meta(ge=0)]
    cost: CostShape | None = None


class CompactionShape(UpdateShape, tag="compaction_update"):
    compaction_id: str
    status: Literal["in_progress", "completed", "failed", "cancelled"]
    summary: list[TextShape] | None = None
    error: str | None = None


class CommandsShape(UpdateShape, tag="available_commands_update"):
    available_commands: list[CommandShape]


class ParamsShape(Strict):
    session_id: str
    update: (
        UserShape
        | AgentShape
        | ThoughtShape
        | CallShape
        | CallUpdateShape
        | PlanShape
        | ModeShape
        | UsageShape
        | CompactionShape
        | CommandsShape
    )


class NotificationShape(Strict):
    jsonrpc: Literal["2.0"]
    method: Literal["session/update"]
    params: ParamsShape


def shown(*data: EventData, **options: bool) -> list[dict[str, Any]]:
    """What a client is told, after a check of every line."""
    lines = [
        wire.encode_update("sess", update)
        for seq, each in enumerate(data)
        for update in updates_for(Event(seq, 1, each), **options)
    ]
    for line in lines:
        assert b"\n" not in line
        assert b":null" not in line
        msgspec.json.decode(line, type=NotificationShape)
    return [json.loads(line)["params"]["update"] for line in lines]


BLOCKS = (
    Text("look"),
    Link("file:///a", "a"),
    Link("file:///b", "b", "text/plain", "B", "the b", 7),
    Resource("file:///c", text="sea"),
    Resource("file:///d", blob="AA==", mime_type="image/png"),
    Image("AA==", "image/png"),
    Image("AA==", "image/png", "file:///e"),
)
RECORDED: tuple[EventData, ...] = (
    log.RequestHeader("m", "system", ("read",)),
    log.TurnStart(1, "user"),
    log.UserMessage("u1", BLOCKS, "user"),
    log.ContextMessage((Text("<context/>"),), "listener"),
    log.StepStart(1, 1),
    log.ModelRetry(1, 1, 1, 0.25, "RATE_LIMIT", "Too many requests."),
    log.AssistantChunk(1, 1, "hmm", reasoning=True),
    log.AssistantChunk(1, 1, "I read."),
    log.AssistantMessage(1, 1, (TextPart("I read."), ToolCallPart("c1", "read", "{}"))),
    log.ModelUsage(1, 1, "m", Usage(90, 20), 110, 100, 0.25, "EUR"),
    log.ModelUsage(1, 1, "m", Usage(90, 20), 110),
    log.SubagentUsage("r1", Usage(900, 20), 110, 100, 0.5, "EUR"),
    log.ContextMessage((Text("The subagent ann has finished.\nAll is well."),), "subagents"),
    log.ToolCall(1, 1, "c1", "read", '{"path": "/a"}', "Read a", "read", (Location("/a", 3),)),
    log.PermissionAsked("c1"),
    log.PermissionDecided("c1", "allowed"),
    log.ToolStart("c1"),
    log.ToolProgress("c1", title="Reading", content=(Text("half"),)),
    log.ToolProgress("c1", title="Waiting"),
    log.ToolResult(1, 1, "c1", "text", locations=(Location("/a", 3),)),
    log.ToolCall(1, 1, "c2", "edit", "not json", "Edit b", "edit"),
    log.ToolResult(
        1, 1, "c2", "cut", is_error=True, code="ABORTED", content=(Diff("/b", "old", "new"),)
    ),
    log.FileChanged("c2", "/b", "0f", "old"),
    log.FilesRestored(1, ("/b",)),
    log.PlanWritten((PlanEntry("one", "high", "in_progress"), PlanEntry("two"))),
    log.SteeringMessage("s1", 1, (Text("hurry"),), "user"),
    log.StepEnd(1, 1),
    log.TurnEnd(1, log.Aborted()),
    log.TurnStart(2, "user"),
    log.PromptBlocked("u2", (Text("/help"),), "user", "These commands"),
    log.TurnEnd(2, log.Rejected("These commands")),
    log.ModeChanged("bypass"),
    log.ModelChanged("other"),
    log.EffortChanged("high"),
    log.TurnStart(3, "user"),
    log.CompactionStart("k1"),
    log.CompactionEnd("k1", "failed", error="the summary was empty"),
    log.CompactionStart("k2"),
    log.CompactionEnd("k2", "completed", "All of it."),
    log.TurnEnd(3, log.Completed()),
)


def test_the_recorded_log_has_every_kind_of_event():
    assert {type(data) for data in RECORDED} == set(get_args(EventData))


@pytest.mark.requirement("ACP-061", "ACP-083", "B075", "B076", "B077", "B113", "B118")
def test_replay_shows_what_was_shown_live_and_what_the_user_said():
    live, replayed = shown(*RECORDED), shown(*RECORDED, is_replay=True)

    said = [update for update in replayed if update["sessionUpdate"] == "user_message_chunk"]
    assert [update for update in replayed if update not in said] == live
    assert [update["messageId"] for update in said] == ["u1"] * len(BLOCKS) + ["s1", "u2"]
    assert not any(update["sessionUpdate"] == "user_message_chunk" for update in live)


def test_a_turn_is_told_in_the_order_in_which_it_happened():
    assert [(update["sessionUpdate"], update.get("status")) for update in shown(*RECORDED)] == [
        ("agent_thought_chunk", None),
        ("agent_thought_chunk", None),
        ("agent_message_chunk", None),
        ("usage_update", None),
        ("usage_update", None),
        ("tool_call", "completed"),
        ("tool_call", "pending"),
        ("tool_call_update", "in_progress"),
        ("tool_call_update", None),
        ("tool_call_update", None),
        ("tool_call_update", "completed"),
        ("tool_call", "pending"),
        ("tool_call_update", "failed"),
        ("plan", None),
        ("agent_message_chunk", None),
        ("current_mode_update", None),
        ("agent_thought_chunk", None),
        ("agent_thought_chunk", None),
        ("agent_thought_chunk", None),
    ]


@pytest.mark.requirement("B123")
def test_the_end_of_a_subagent_in_the_background_is_a_call_of_its_own():
    text = "The subagent ann has finished.\nAll is well."
    (call,) = shown(log.ContextMessage((Text(text),), "subagents"))

    assert call == {
        "sessionUpdate": "tool_call",
        "toolCallId": "ended-0",
        "title": "The subagent ann has finished.",
        "status": "completed",
        "kind": "other",
        "name": "agents",
        "content": [{"type": "content", "content": {"type": "text", "text": "All is well."}}],
    }


@pytest.mark.requirement("B151")
def test_what_a_subagent_took_is_in_the_cost_and_not_in_the_context():
    (update,) = shown(log.SubagentUsage("r1", Usage(900, 20), 110, 1000, 0.5, "EUR"))

    assert (update["used"], update["size"], update["cost"]["amount"]) == (110, 1000, 0.5)


@pytest.mark.requirement("ACP-032")
def test_every_block_of_a_prompt_comes_back_as_it_was():
    chunks = shown(log.UserMessage("u", BLOCKS, "user"), is_replay=True)

    assert [chunk["content"] for chunk in chunks] == [
        {"type": "text", "text": "look"},
        {"type": "resource_link", "uri": "file:///a", "name": "a"},
        {
            "type": "resource_link",
            "uri": "file:///b",
            "name": "b",
            "mimeType": "text/plain",
            "title": "B",
            "description": "the b",
            "size": 7,
        },
        {"type": "resource", "resource": {"uri": "file:///c", "text": "sea"}},
        {
            "type": "resource",
            "resource": {"uri": "file:///d", "blob": "AA==", "mimeType": "image/png"},
        },
        {"type": "image", "data": "AA==", "mimeType": "image/png"},
        {"type": "image", "data": "AA==", "mimeType": "image/png", "uri": "file:///e"},
    ]


@pytest.mark.requirement("ACP-116", "ACP-118", "ACP-119")
def test_a_tool_call_has_its_title_kind_places_and_input():
    (call,) = shown(
        log.ToolCall(1, 1, "c", "read", '{\n "path": "/a"}', "Read a", "read", (Location("/a", 3),))
    )

    assert call == {
        "sessionUpdate": "tool_call",
        "toolCallId": "c",
        "title": "Read a",
        "status": "pending",
        "kind": "read",
        "name": "read",
        "locations": [{"path": "/a", "line": 3}],
        "rawInput": {"path": "/a"},
    }


@pytest.mark.parametrize(
    "arguments",
    ["", "{", "not json", "NaN", r'"\ud800"', "[" * 20_000, f'"{"x" * MAX_RAW_INPUT_BYTES}"'],
)
def test_input_that_is_no_json_or_too_long_is_left_out(arguments):
    (call,) = shown(log.ToolCall(1, 1, "c", "read", arguments, "Read"))

    assert "rawInput" not in call


def test_a_new_file_is_a_diff_without_an_old_text():
    (update,) = shown(log.ToolResult(1, 1, "c", "", content=(Diff("/a", None, "new"),)))

    assert update["content"] == [{"type": "diff", "path": "/a", "newText": "new"}]


def test_an_emptied_file_is_a_diff_with_an_old_text():
    (update,) = shown(log.ToolResult(1, 1, "c", "", content=(Diff("/a", "", "x"),)))

    assert update["content"][0]["oldText"] == ""


def test_a_big_diff_is_cut_to_the_lines_that_changed():
    before = [f"line {number}\n" for number in range(10_000)]
    after = [*before[:5000], "changed\n", *before[5001:]]
    diff = Diff("/a", "".join(before), "".join(after))

    (update,) = shown(log.ToolResult(1, 1, "c", "", content=(diff,)))

    (shown_diff,) = update["content"]
    assert shown_diff["oldText"] == "".join(before[4997:5004])
    assert shown_diff["newText"] == "".join(after[4997:5004])


def test_a_big_diff_that_only_adds_at_the_end_shows_what_was_added():
    old = "x\n" * MAX_DIFF_CHARS
    (update,) = shown(log.ToolResult(1, 1, "c", "", content=(Diff("/a", old, old + "end\n"),)))

    assert update["content"][0]["newText"] == "x\nx\nx\nend\n"


@pytest.mark.requirement("ACP-085", "B103")
def test_a_long_text_is_sent_in_pieces_of_one_message():
    text = "ab😀" * MAX_TEXT_CHARS
    chunks = shown(log.AssistantChunk(1, 1, text))

    assert "".join(chunk["content"]["text"] for chunk in chunks) == text
    assert all(len(chunk["content"]["text"]) <= MAX_TEXT_CHARS for chunk in chunks)
    assert len({chunk["messageId"] for chunk in chunks}) == 1


@pytest.mark.requirement("ACP-085")
def test_thoughts_and_steps_are_messages_of_their_own():
    chunks = shown(
        log.AssistantChunk(1, 1, "a"),
        log.AssistantChunk(1, 1, "b"),
        log.AssistantChunk(1, 1, "c", reasoning=True),
        log.AssistantChunk(1, 2, "d"),
        log.AssistantChunk(2, 1, "e"),
    )

    ids = [chunk["messageId"] for chunk in chunks]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


def test_the_output_of_a_command_stays_in_lines():
    (update,) = shown(log.ToolResult(1, 1, "c", "one\ntwo ```\n"))

    assert update["content"][0]["content"]["text"] == "````\none\ntwo ```\n````"


def test_a_result_without_output_shows_nothing():
    (update,) = shown(log.ToolResult(1, 1, "c", ""))

    assert update["content"] == []


@pytest.mark.requirement("ACP-140")
def test_a_plan_is_always_told_whole():
    (plan,) = shown(log.PlanWritten((PlanEntry("one", "high", "in_progress"), PlanEntry("two"))))

    assert plan["entries"] == [
        {"content": "one", "priority": "high", "status": "in_progress"},
        {"content": "two", "priority": "medium", "status": "pending"},
    ]


@pytest.mark.requirement("ACP-150")
def test_commands_are_offered_by_the_protocols_shape():
    update = wire.AvailableCommandsUpdate(tuple(command.offer for command in COMMANDS))

    line = wire.encode_update("sess", update)

    msgspec.json.decode(line, type=NotificationShape)
    assert b":null" not in line


@pytest.mark.requirement("ACP-087", "B151")
def test_the_context_is_never_shown_fuller_than_full():
    used, known = (log.ModelUsage(1, 1, "m", Usage(), at, 100) for at in (110, 30))

    assert [(update["used"], update["size"]) for update in shown(used, known)] == [
        (100, 100),
        (30, 100),
    ]


@pytest.mark.requirement("ACP-087", "B153")
def test_without_the_size_of_the_context_no_usage_is_told():
    assert shown(log.ModelUsage(1, 1, "m", Usage(90, 20), 110)) == []


@pytest.mark.requirement("ACP-087")
def test_a_known_cost_is_told_with_its_currency():
    (update,) = shown(log.ModelUsage(1, 1, "m", Usage(90, 20), 110, 1000, 0.25, "EUR"))

    assert update["cost"] == {"amount": 0.25, "currency": "EUR"}


@pytest.mark.requirement("ACP-175", "ACP-176")
def test_a_compaction_is_told_to_a_client_that_asked_and_is_a_line_to_the_others():
    events = (
        log.CompactionStart("k1"),
        log.CompactionEnd("k1", "failed", error="too long"),
        log.CompactionStart("k2"),
        log.CompactionEnd("k2", "completed", "All of it."),
        log.CompactionStart("k3"),
        log.CompactionEnd("k3", "cancelled"),
    )

    told = shown(*events, knows_compaction=True)
    lines = shown(*events)

    assert [(update["compactionId"], update["status"]) for update in told] == [
        ("k1", "in_progress"),
        ("k1", "failed"),
        ("k2", "in_progress"),
        ("k2", "completed"),
        ("k3", "in_progress"),
        ("k3", "cancelled"),
    ]
    assert told[1]["error"] == "too long"
    assert told[3]["summary"] == [{"type": "text", "text": "All of it."}]
    assert {update["sessionUpdate"] for update in lines} == {"agent_thought_chunk"}
    assert "too long" in lines[1]["content"]["text"]
