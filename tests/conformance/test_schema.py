from __future__ import annotations

import pytest

from conformance.schema import Schema

STABLE = Schema()
DRAFTS = Schema(is_unstable=True)


def update(kind: str, **members: object) -> dict[str, object]:
    return {"sessionId": "s", "update": {"sessionUpdate": kind, **members}}


def problems(params: object) -> list[str]:
    return STABLE.params_problems("client", "session/update", params)


# --- what there is --------------------------------------------------------------------------


def test_each_side_has_its_methods_and_the_drafts_have_more():
    assert {"initialize", "session/prompt", "session/cancel"} <= set(STABLE.methods("agent"))
    assert {"session/update", "fs/read_text_file"} <= set(STABLE.methods("client"))
    assert not set(STABLE.methods("agent")) & set(STABLE.methods("client"))
    assert "session/fork" not in STABLE.methods("agent")
    assert set(STABLE.methods("agent")) < set(DRAFTS.methods("agent"))


def test_a_method_is_a_request_or_a_notification_and_cancelling_is_open_to_both_sides():
    assert STABLE.is_notification("agent", "session/cancel")
    assert not STABLE.is_notification("agent", "session/prompt")
    assert not STABLE.is_notification("agent", "nope")
    for side in ("agent", "client"):
        assert STABLE.is_notification(side, "$/cancel_request")
        assert STABLE.params_problems(side, "$/cancel_request", {"requestId": 1}) == []


def test_every_request_has_a_result_and_no_notification_has_one():
    for schema in (STABLE, DRAFTS):
        for side in ("agent", "client"):
            for method in schema.methods(side):
                assert schema.params_name(side, method)
                if schema.is_notification(side, method):
                    with pytest.raises(KeyError):
                        schema.result_name(side, method)
                else:
                    assert schema.result_name(side, method)


@pytest.mark.parametrize("side", ["agent", "client"])
def test_a_method_that_is_not_there_is_a_key_error(side):
    with pytest.raises(KeyError):
        STABLE.params_problems(side, "nope", {})
    with pytest.raises(KeyError):
        STABLE.result_problems(side, "nope", {})


# --- what is wrong --------------------------------------------------------------------------


def test_what_is_valid_has_no_problem_and_unknown_members_are_none():
    params = {"cwd": "/", "mcpServers": [], "x": 1, "_meta": {"any": [1]}}

    assert STABLE.params_problems("agent", "session/new", params) == []
    assert STABLE.params_problems("agent", "session/list", None) == []
    assert STABLE.result_problems("agent", "session/prompt", {"stopReason": "end_turn"}) == []


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({}, "$: 'stopReason' is a required property"),
        (None, "$: None is not of type 'object'"),
        ({"stopReason": "done"}, "$.stopReason: 'done' was expected"),
        ({"stopReason": 5}, "$.stopReason"),
    ],
)
def test_a_problem_names_its_place(result, problem):
    (told,) = STABLE.result_problems("agent", "session/prompt", result)

    assert told.startswith(problem.partition(":")[0])


def test_what_receivers_are_lenient_with_is_a_problem_of_senders():
    block = {"type": "text", "text": "x", "annotations": {"priority": "high"}}

    assert problems(update("agent_message_chunk", content=block)) != []
    assert problems(update("plan", entries=[5])) != []


def test_of_alternatives_the_one_that_was_meant_is_told_about():
    bad_diff = {"type": "diff", "path": "/a"}
    bad_block = {"type": "content", "content": {"type": "image", "data": "AA=="}}

    assert problems(update("tool_call", toolCallId="c")) == [
        "$.update: 'title' is a required property"
    ]
    for content in (bad_diff, bad_block):
        (told,) = problems(update("tool_call_update", toolCallId="c", content=[content]))
        assert told.startswith("$.update.content[0]")
        assert "required property" in told


# --- what is nobody's -----------------------------------------------------------------------


def test_strangers_are_found_at_every_depth_and_through_every_alternative():
    content = [{"type": "diff", "path": "/a", "newText": "", "color": 1}]
    params = update("tool_call", toolCallId="c", title="t", content=content, mood=1) | {"x": 1}

    assert STABLE.strangers("SessionNotification", params) == [
        "$.update.content[0].color",
        "$.update.mood",
        "$.x",
    ]


def test_meta_and_what_has_no_shape_of_its_own_are_free():
    params = update(
        "tool_call", toolCallId="c", title="t", rawInput={"a": {"b": 1}}, _meta={"m": 1}
    )

    assert STABLE.strangers("SessionNotification", params) == []


def test_a_draft_is_a_stranger_to_the_stable_schema_only():
    result = {"protocolVersion": 1, "agentCapabilities": {"sessionCapabilities": {"fork": {}}}}

    assert STABLE.strangers("InitializeResponse", result) == [
        "$.agentCapabilities.sessionCapabilities.fork"
    ]
    assert DRAFTS.strangers("InitializeResponse", result) == []
