from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from agent_core.cancellation import AbortController, AbortSignal, TurnAborted
from agent_core.content import Image, Text, TextPart, ToolCallPart, Usage
from agent_core.errors import ModelError
from agent_core.models.adapter import (
    AssistantTurn,
    Finish,
    Message,
    ModelAdapter,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolTurn,
    UsageReport,
    UserTurn,
)
from agent_core.models.rehearsal import RehearsalModel


def asked(prompt: str) -> UserTurn:
    return UserTurn((Text(prompt),))


def request_of(
    messages: Sequence[Message], signal: AbortSignal | None = None, session_id: str = "s"
) -> ModelRequest:
    return ModelRequest(
        model="rehearsal",
        messages=tuple(messages),
        system="",
        tools=(),
        session_id=session_id,
        signal=signal or AbortController().signal,
    )


async def answer(
    messages: Sequence[Message] | str,
    *,
    model: ModelAdapter | None = None,
    session_id: str = "s",
) -> list[ModelEvent]:
    if isinstance(messages, str):
        messages = [asked(messages)]
    model = model or RehearsalModel()
    with anyio.fail_after(10):
        async with aclosing(model.stream(request_of(messages, session_id=session_id))) as stream:
            return [event async for event in stream]


def text_in(events: list[ModelEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def reasoning_in(events: list[ModelEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta))


def calls_in(events: list[ModelEvent]) -> list[tuple[str, object]]:
    calls: dict[int, list[ToolCallDelta]] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            calls.setdefault(event.index, []).append(event)
    return [
        (
            "".join(delta.name for delta in deltas),
            json.loads("".join(delta.arguments for delta in deltas)),
        )
        for deltas in calls.values()
    ]


async def converse(prompt: str, *results: ToolTurn) -> tuple[str, list[tuple[str, object]]]:
    """Play the loop: answer the model's calls with `results` until it stops."""
    messages: list[Message] = [asked(prompt)]
    said, calls = "", []
    waiting = list(results)
    while True:
        events = await answer(messages)
        said += text_in(events)
        new = calls_in(events)
        calls += new
        if events[-1] == Finish("stop"):
            assert waiting == []
            return said, calls
        assert events[-1] == Finish("tool_calls")
        ((name, arguments),) = new
        part = ToolCallPart(f"c{len(calls)}", name, json.dumps(arguments))
        messages += [AssistantTurn((TextPart("x"), part)), waiting.pop(0)]


def result(name: str, output: str, *, is_error: bool = False) -> ToolTurn:
    return ToolTurn("c", name, output, is_error)


# --- verbs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "name", "arguments"),
    [
        ("read a b.txt", "read", {"path": "a b.txt"}),
        ("  READ a.txt \n", "read", {"path": "a.txt"}),
        ("list", "list", {"path": "."}),
        ("list src", "list", {"path": "src"}),
        ("search to do", "search", {"pattern": "to do", "path": "."}),
        ("write a.txt: one\\ntwo: 2", "write", {"path": "a.txt", "content": "one\ntwo: 2"}),
        ("write a.txt:\nkeep\n  this", "write", {"path": "a.txt", "content": "keep\n  this"}),
        ("write a.txt:", "write", {"path": "a.txt", "content": ""}),
        ("write a.txt: {} \"'`", "write", {"path": "a.txt", "content": "{} \"'`"}),
        ("edit a: x => y", "edit", {"path": "a", "old_text": "x", "new_text": "y"}),
        ("edit a: f(x) => x", "edit", {"path": "a", "old_text": "f(x)", "new_text": "x"}),
        ("edit a: x =>", "edit", {"path": "a", "old_text": "x", "new_text": ""}),
        ("run make test", "shell", {"command": "make test"}),
        ("run echo now then read a", "shell", {"command": "echo now then read a"}),
        (
            "run for x in 1 2\ndo echo $x\ndone",
            "shell",
            {"command": "for x in 1 2\ndo echo $x\ndone"},
        ),
        (
            "plan A; B b;; ",
            "plan",
            {
                "entries": [
                    {"content": "A", "status": "pending", "priority": "medium"},
                    {"content": "B b", "status": "pending", "priority": "medium"},
                ]
            },
        ),
    ],
)
async def test_a_tool_verb_calls_its_tool_in_fragments(
    prompt: str, name: str, arguments: object
) -> None:
    events = await answer(prompt)

    assert calls_in(events) == [(name, arguments)]
    assert 2 <= sum(isinstance(event, ToolCallDelta) for event in events) <= 3
    assert text_in(events) == ""
    assert events[-1] == Finish("tool_calls")


async def test_text_verbs_say_and_think() -> None:
    assert text_in(await answer("say Hello, you two")) == "Hello, you two"
    assert text_in(await answer("count 12")) == "1 2 3 4 5 6 7 8 9 10 11 12 "
    events = await answer("think first things first then say done")
    assert (reasoning_in(events), text_in(events)) == ("first things first", "done")
    assert events[-1] == Finish("stop")


@pytest.mark.parametrize("prompt", ["hello", "Hello!", "help", "help me, please", "hello there"])
async def test_a_greeting_is_answered_with_the_verbs(prompt: str) -> None:
    said = text_in(await answer(prompt))

    assert said.startswith("Hello!")
    for verb in ("read", "list", "search", "write", "edit", "run", "plan", "count", "stall"):
        assert f"`{verb}" in said


@pytest.mark.parametrize(
    "prompt",
    ["What is 2 + 2?", "", "reading is fun", "fix it\nread a.txt", "sayonara", "then read a.txt"],
)
async def test_anything_else_gets_an_honest_answer_that_says_what_to_do(prompt: str) -> None:
    events = await answer(prompt)

    said = text_in(events)
    assert said.startswith("No model is configured")
    for line in (
        "--model openai:gpt-5.5",
        "OPENAI_API_KEY",
        "~/.config/acp-agent/config.toml",
        'model = "openai:gpt-5.5"',
        "[providers.openai]",
        'key = "…"',
        "ollama:…",
        "acp-agent check --online",
        "`read FILE`",
    ):
        assert line in said
    assert calls_in(events) == []
    assert events[-1] == Finish("stop")


@pytest.mark.parametrize(
    "prompt",
    ["read", "write a.txt", "edit a: b", "count many", "run", "plan ;", "say hi then read", "say"],
)
async def test_a_prompt_with_an_unclear_part_does_nothing_but_say_so(prompt: str) -> None:
    events = await answer(prompt)

    assert text_in(events).startswith("I did nothing")
    assert calls_in(events) == []
    assert events[-1] == Finish("stop")


async def test_segments_are_joined_by_then_and_by_lines_only_before_a_verb() -> None:
    said, calls = await converse(
        "say now and then some\nmore text\nwrite f: a then b then run echo then read\nthen list",
        result("write", "ok"),
        result("shell", "then read\n"),
        result("list", "f"),
    )

    assert said.startswith("now and then some\nmore text")
    assert calls == [
        ("write", {"path": "f", "content": "a then b"}),
        ("shell", {"command": "echo then read"}),
        ("list", {"path": "."}),
    ]


async def test_the_model_says_what_came_of_each_call_and_goes_on() -> None:
    said, calls = await converse(
        "write a.txt: x then read a.txt then run cat a.txt\nplan A; B then say done",
        result("write", "wrote 1 bytes"),
        result("read", "1\tfirst\n2\tsecond\n"),
        result("shell", "x"),
        result("plan", "ok"),
    )

    assert [name for name, _ in calls] == ["write", "read", "shell", "plan"]
    assert said == (
        "Wrote `a.txt`."
        "`a.txt` begins:\n\n```\nfirst\nsecond\n```"
        "`cat a.txt` printed:\n\n```\nx\n```"
        "The plan is written.\n\ndone"
    )


async def test_long_output_is_cut_and_fences_are_kept_whole() -> None:
    said, _ = await converse("run seq 12", result("shell", "```\n" + "\n".join("abcdefghijkl")))

    assert said == (
        "`seq 12` printed:\n\n````\n```\n" + "\n".join("abcdefghi") + "\n````\n(3 more lines)"
    )


async def test_a_command_without_output_is_reported_as_such() -> None:
    said, _ = await converse("run true", result("shell", ""))

    assert said == "`true` printed: nothing."


@pytest.mark.parametrize("output", ["The user does not allow this.", "exit code 1\nno such file"])
async def test_a_failed_or_denied_call_is_told_and_ends_the_rest(output: str) -> None:
    said, calls = await converse(
        "run false then x\nread a.txt\nsay done", result("shell", output, is_error=True)
    )

    assert len(calls) == 1
    assert "`shell` did not work" in said
    assert output in said
    assert "2 more to do" in said
    assert "done" not in said


async def test_only_the_last_prompt_counts() -> None:
    history: list[Message] = [
        asked("read old.txt then say old"),
        AssistantTurn((ToolCallPart("c1", "read", "{}"),)),
        result("read", "boom", is_error=True),
        AssistantTurn((TextPart("It fail"),), interrupted=True),
    ]

    assert calls_in(await answer([*history, asked("read new.txt")])) == [
        ("read", {"path": "new.txt"})
    ]


async def test_context_behind_a_prompt_does_not_replace_it() -> None:
    context = asked("<context source='clock'>\nsay nonsense\n</context>")
    history: list[Message] = [asked("list then say done"), context]
    first = await answer(history)
    history += [
        AssistantTurn((ToolCallPart("c1", "list", "{}"),)),
        result("list", "a"),
        context,
    ]
    second = await answer(history)

    assert calls_in(first) == [("list", {"path": "."})]
    assert text_in(second).endswith("done")


async def test_steering_replaces_the_prompt() -> None:
    history: list[Message] = [
        asked("list then say done"),
        AssistantTurn((ToolCallPart("c1", "list", "{}"),)),
        result("list", "a"),
        asked("say something else"),
    ]

    assert text_in(await answer(history)) == "something else"


async def test_the_texts_of_a_prompt_are_joined_and_other_blocks_left_out() -> None:
    prompt = UserTurn((Text("say one"), Image("AAAA", "image/png"), Text("two")))

    assert text_in(await answer([prompt])) == "one\ntwo"


async def test_the_same_messages_give_the_same_events() -> None:
    messages = [asked("think a then say b then write c: d")]

    assert await answer(messages) == await answer(messages)


async def test_usage_is_reported_once_before_the_finish() -> None:
    events = await answer("say " + "word " * 40)

    assert isinstance(events[-2], UsageReport)
    assert events[-2].usage.input_tokens > 10
    assert events[-2].usage.output_tokens > 10
    assert sum(isinstance(event, UsageReport) for event in events) == 1


# --- the signal ------------------------------------------------------------------------------


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("prompt", ["stall", "count 1000000 slowly", "think x then stall"])
async def test_a_waiting_model_gives_up_when_the_turn_is_aborted(prompt: str) -> None:
    controller = AbortController()
    stream = RehearsalModel().stream(request_of([asked(prompt)], controller.signal))
    raised: list[object] = []

    async def consume() -> None:
        async with aclosing(stream):
            try:
                async for _ in stream:
                    pass
            except TurnAborted as exc:
                raised.append(exc.reason)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            await anyio.wait_all_tasks_blocked()
            controller.abort("stop")

    assert raised == ["stop"]


async def test_an_aborted_turn_gets_no_event_at_all() -> None:
    controller = AbortController()
    controller.abort("stop")

    with pytest.raises(TurnAborted):
        await anext(RehearsalModel().stream(request_of([asked("say a")], controller.signal)))


@pytest.mark.parametrize("prompt", ["count 1000000", "say " + "a " * 100, "read a.txt"])
async def test_nothing_follows_the_event_after_which_the_turn_was_aborted(prompt: str) -> None:
    controller = AbortController()
    stream = RehearsalModel().stream(request_of([asked(prompt)], controller.signal))
    async with aclosing(stream):
        await anext(stream)
        controller.abort("stop")

        with pytest.raises(TurnAborted):
            await anext(stream)


async def test_counting_fast_gives_other_tasks_a_chance() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        events = await answer("count 1000")
        group.cancel_scope.cancel()

    assert len(events) == 1002
    assert turns >= 10


async def test_a_stream_may_be_closed_at_any_event() -> None:
    stream = RehearsalModel().stream(request_of([asked("count 1000 slowly")]))
    async with aclosing(stream):
        assert await anext(stream) == TextDelta("1 ")


# --- scripts ---------------------------------------------------------------------------------


def script(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "script.jsonl"
    path.write_text(
        "\n".join(item if isinstance(item, str) else json.dumps(item) for item in lines)
    )
    return path


async def test_a_script_is_played_line_by_line_for_each_session(tmp_path: Path) -> None:
    model = RehearsalModel(
        "rehearsal",
        script(
            tmp_path,
            [{"reasoning": "hm"}, {"text": "one "}, {"text": "chunk"}],
            "",
            [
                {"tool": "shell", "arguments": {"command": "ls"}},
                {"tool": "read", "arguments": '{"path": "a"}'},
                {"usage": {"input_tokens": 7, "output_tokens": 3}},
            ],
            [{"text": "cut o"}, {"finish": "length"}],
            [],
        ),
    )

    first = await answer("whatever", model=model)
    other = await answer("whatever", model=model, session_id="other")
    second = await answer("whatever", model=model)
    third = await answer("whatever", model=model)
    fourth = await answer("whatever", model=model)

    assert first[:3] == [ReasoningDelta("hm"), TextDelta("one "), TextDelta("chunk")]
    assert first == other
    assert calls_in(second) == [("shell", {"command": "ls"}), ("read", {"path": "a"})]
    assert second[-2:] == [UsageReport(Usage(7, 3)), Finish("tool_calls")]
    assert (third[0], third[-1]) == (TextDelta("cut o"), Finish("length"))
    assert [type(event) for event in fourth] == [UsageReport, Finish]


async def test_arguments_that_are_no_json_are_sent_as_they_are(tmp_path: Path) -> None:
    model = RehearsalModel(script=script(tmp_path, [{"tool": "t", "arguments": "{oops"}]))

    events = await answer("x", model=model)

    fragments = [event.arguments for event in events if isinstance(event, ToolCallDelta)]
    assert "".join(fragments) == "{oops"
    assert len(fragments) in (2, 3)


async def test_a_script_that_has_ended_says_so(tmp_path: Path) -> None:
    model = RehearsalModel(script=script(tmp_path, [{"text": "only"}]))
    await answer("x", model=model)

    for _ in range(2):
        with pytest.raises(ModelError, match="has ended") as caught:
            await answer("x", model=model)
        assert caught.value.code == "PROTOCOL"
        assert not caught.value.is_retryable


async def test_an_empty_script_has_ended_from_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has ended"):
        await answer("x", model=RehearsalModel(script=script(tmp_path)))


async def test_a_scripted_error_is_raised_and_the_next_call_plays_the_next_line(
    tmp_path: Path,
) -> None:
    error = {"code": "RATE_LIMIT", "message": "slow down", "retry_after_s": 3}
    model = RehearsalModel(
        script=script(tmp_path, [{"text": "a"}, {"error": error}], [{"text": "b"}])
    )

    with pytest.raises(ModelError, match="slow down") as caught:
        await answer("x", model=model)

    assert (caught.value.code, caught.value.retry_after_s) == ("RATE_LIMIT", 3)
    assert text_in(await answer("x", model=model)) == "b"


@pytest.mark.requirement("R73")
async def test_a_step_that_ignores_the_cancel_is_waited_for(tmp_path: Path) -> None:
    controller = AbortController()
    model = RehearsalModel(script=script(tmp_path, [{"ignore_cancel_s": 0.05}, {"text": "late"}]))
    stream = model.stream(request_of([asked("x")], controller.signal))
    order: list[str] = []

    async def consume() -> None:
        async with aclosing(stream):
            with pytest.raises(TurnAborted):
                await anext(stream)
        order.append("given up")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            await anyio.wait_all_tasks_blocked()
            controller.abort("stop")
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            order.append("aborted, and still there")

    assert order == ["aborted, and still there", "given up"]


@pytest.mark.parametrize("step", [{"sleep_s": 3600}, {"stall": True}])
async def test_a_scripted_wait_ends_with_the_turn(tmp_path: Path, step: object) -> None:
    controller = AbortController()
    model = RehearsalModel(script=script(tmp_path, [step, {"text": "never"}]))
    stream = model.stream(request_of([asked("x")], controller.signal))

    async def consume() -> None:
        async with aclosing(stream):
            with pytest.raises(TurnAborted):
                await anext(stream)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            await anyio.wait_all_tasks_blocked()
            controller.abort("stop")


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"text": "not a list"}',
        '[{"text": "a", "reasoning": "b"}]',
        "[{}]",
        '[{"texte": "typo"}]',
        '[{"text": 1}]',
        '[{"arguments": {}}]',
        '[{"sleep_s": -1}]',
        '[{"finish": "whenever"}]',
        '[{"error": {"code": "RATE_LIMIT"}}]',
        '[{"usage": {"input_tokens": "many"}}]',
        '["text"]',
        "[" * 5000,
    ],
)
def test_a_bad_script_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = script(tmp_path, [{"text": "fine"}], "", line)

    with pytest.raises(ValueError, match=r"^line 3 of the rehearsal script is wrong: "):
        RehearsalModel(script=path)


def test_a_script_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        RehearsalModel(script=tmp_path / "missing.jsonl")


def test_the_model_goes_by_the_name_it_was_given() -> None:
    assert RehearsalModel().info.name == "rehearsal"
    assert RehearsalModel(ModelInfo("my-double")).info.name == "my-double"
