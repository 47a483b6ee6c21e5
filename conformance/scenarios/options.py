"""What the client can set, and what the agent can ask the person by a form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from conformance.scenarios import scenario
from conformance.steps import ask, is_error, prompted, results, speaks, updates
from conformance.trace import Message, WireError
from conformance.trial import Trial
from conformance.wire import Wire

NO_SUCH: Final = "conformance-no-such"
FORMS: Final[Message] = {"elicitation": {"form": {}}}
ANSWERS: Final[tuple[Message, ...]] = ({"action": "decline"}, {"action": "cancel"})
UNFIT: Final[tuple[Message, ...]] = (
    {"action": "accept", "content": {NO_SUCH: [1]}},
    {"action": "accept"},
    {"action": "dance"},
    {},
)


@scenario("CFG-01", "CFG-02", "CFG-03", "CFG-10", is_quick=True)
async def modes_are_set(trial: Trial) -> None:
    """Set each mode, then one that does not exist."""
    wire = (await trial.shared_client()).wire
    session_id, state = await _opened(trial, wire)
    modes = state.get("modes")
    params = {"sessionId": session_id}
    if not isinstance(modes, dict):
        with trial.expect("CFG-10") as it:
            response = await ask(trial, wire, "session/set_mode", {**params, "modeId": "ask"})
            it.that(is_error(response), "it succeeded")
    trial.needs(isinstance(modes, dict), "modes")
    assert isinstance(modes, dict)
    trial.see("CFG-10", "skipped", "the agent has modes")
    available = modes.get("availableModes")
    ids = [str(each["id"]) for each in available] if isinstance(available, list) else []
    with trial.expect("CFG-01") as it:
        current = modes.get("currentModeId")
        it.that(current in ids, f"the current mode is {current!r}, of {ids}")
        it.that(len(set(ids)) == len(ids), f"the modes are {ids}")
    with trial.expect("CFG-02") as it:
        for each in (*ids, str(current)):
            response = await ask(trial, wire, "session/set_mode", {**params, "modeId": each})
            it.that(not is_error(response), f"{each} was answered with {response.get('error')}")
    with trial.expect("CFG-03") as it:
        start = len(wire.trace)
        response = await ask(trial, wire, "session/set_mode", {**params, "modeId": NO_SUCH})
        it.that(is_error(response), "it succeeded")
        changes = [
            each
            for each in updates(wire, session_id, start)
            if "mode" in str(each.get("sessionUpdate"))
        ]
        it.that(not changes, f"it was followed by {changes[:1]}")


@scenario("CFG-04", "CFG-05", "CFG-06", "CFG-07", is_quick=True)
async def options_are_set(trial: Trial) -> None:
    """Set each value of each option, then options and values that do not exist."""
    wire = (await trial.shared_client()).wire
    session_id, state = await _opened(trial, wire)
    options = _options(state)
    with trial.expect("CFG-07") as it:
        booleans = [each.get("id") for each in options if each.get("type") == "boolean"]
        it.that(not booleans, f"{booleans} were offered")
    trial.needs(options, "options")
    with trial.expect("CFG-04") as it:
        ids = [each.get("id") for each in options]
        it.that(len(set(ids)) == len(ids), f"the options are {ids}")
        for each in options:
            if each.get("type") == "select":
                current, values = each.get("currentValue"), list(_values(each))
                it.that(current in values, f"{each.get('id')} is {current!r}, of {values}")
    selects = [each for each in options if each.get("type") == "select"]
    with trial.expect("CFG-05") as it:
        for each in selects:
            for value in (*_values(each), each["currentValue"]):
                told = await _set(trial, wire, session_id, str(each["id"]), value)
                listed = {one.get("id"): one.get("currentValue") for one in told}
                missing = [one for one in ids if one not in listed]
                # A change may take options away; once all is as it was, all of them are back.
                it.that(each["id"] in listed, f"{each['id']} is missing in the answer")
                it.that(listed[each["id"]] == value, f"{each['id']} is {listed[each['id']]!r} then")
                is_as_before = value == each["currentValue"]
                it.that(not (is_as_before and missing), f"{missing} are missing in the answer")
    with trial.expect("CFG-06") as it:
        first = selects[0]
        before = await _set(trial, wire, session_id, str(first["id"]), first["currentValue"])
        for config_id, wrong in ((NO_SUCH, first["currentValue"]), (first["id"], NO_SUCH)):
            params = {"sessionId": session_id, "configId": config_id, "value": wrong}
            response = await ask(trial, wire, "session/set_config_option", params)
            it.that(is_error(response), f"{config_id} = {wrong!r} succeeded")
        after = await _set(trial, wire, session_id, str(first["id"]), first["currentValue"])
        it.that(after == before, "the options are not what they were")


@scenario("CFG-08", "CFG-11")
async def mode_that_is_an_option_too(trial: Trial) -> None:
    """Change the mode as a mode and as an option, in one of two sessions."""
    wire = (await trial.shared_client()).wire
    session_id, state = await _opened(trial, wire)
    other_id, _ = await _opened(trial, wire)
    modes, option = state.get("modes"), _mode_option(state)
    trial.needs(isinstance(modes, dict) and option, "modes that are an option too")
    assert isinstance(modes, dict)
    assert option is not None
    current = str(modes["currentModeId"])
    another = next((each for each in _values(option) if each != current), None)
    trial.needs(another, "more than one mode")
    start = len(wire.trace)
    with trial.expect("CFG-08") as it:
        params = {"sessionId": session_id, "modeId": another}
        await results(trial, wire, "session/set_mode", params)
        # Whatever is set to what it is shows the values of all others.
        shown = await _shown(trial, wire, session_id, state, option)
        it.that(shown == another, f"the mode was set to {another!r}, the option is {shown!r}")
        await _set(trial, wire, session_id, str(option["id"]), current)
        told = [
            each.get("currentModeId")
            for each in updates(wire, session_id, start)
            if each.get("sessionUpdate") == "current_mode_update"
        ]
        it.that(current in told, f"the option was set to {current!r}, and no mode was told of")
    with trial.expect("CFG-11") as it:
        kinds = [str(each.get("sessionUpdate")) for each in updates(wire, other_id, start)]
        changed = [each for each in kinds if "mode" in each or "config" in each]
        it.that(not changed, f"the other session was told {changed[:1]}")


@scenario("CFG-09")
async def options_in_a_turn(trial: Trial) -> None:
    """Set a mode and an option in the middle of a long answer."""
    client = await trial.shared_client()
    wire = client.wire
    session_id, state = await _opened(trial, wire)
    options, modes = _options(state), state.get("modes")
    trial.needs(options or isinstance(modes, dict), "modes or options")
    turn = client.prompt(session_id, trial.say("long"))
    await speaks(trial, wire, session_id)
    with trial.expect("CFG-09") as it:
        if isinstance(modes, dict):
            params = {"sessionId": session_id, "modeId": modes["currentModeId"]}
            await ask(trial, wire, "session/set_mode", params)
        for each in options[:1]:
            await _set(trial, wire, session_id, str(each["id"]), each["currentValue"])
        trial.brought_about(not wire.responses(turn), "the turn ended before")
        client.cancel(session_id)
        await wire.response(turn, trial.target.timeout_s)
        it.that(wire.exit_code is None, f"it ended with {wire.exit_code}")


@scenario("ELI-01")
async def question_to_a_client_without_forms(trial: Trial) -> None:
    """Make the agent ask a client that says it has elicitation, and no kind of it."""
    client, session_id = await trial.session({"elicitation": {}})
    said = trial.say("question")
    with trial.expect("ELI-01") as it:
        await ask(trial, client.wire, "session/prompt", _text(session_id, said))
        asked = [m for m in client.wire.received if m.get("method") == "elicitation/create"]
        it.that(not asked, "it asked by elicitation/create")


@scenario("ELI-02", "ELI-03", "ELI-04")
async def questions_and_their_answers(trial: Trial) -> None:
    """Make the agent ask by a form; answer, decline, dismiss, fail, and answer nonsense."""
    client, session_id = await trial.session(FORMS)
    wire, said = client.wire, trial.say("question")
    asked: list[Message] = []

    def answer(reply: Message | None) -> None:
        def note(params: Message) -> Message:
            asked.append(params)
            return _accepted(params) if reply is None else reply

        wire.answer["elicitation/create"] = note

    with trial.expect("ELI-02"):
        answer(None)
        await prompted(trial, wire, session_id, said)
        trial.brought_about(asked, "it asked nothing")
        for reply in ANSWERS:
            answer(reply)
            response = await ask(trial, wire, "session/prompt", _text(session_id, said))
            with trial.expect("ELI-04") as its_end:
                its_end.that(not is_error(response), f"{reply} led to {response.get('error')}")
        del wire.answer["elicitation/create"]
        await ask(trial, wire, "session/prompt", _text(session_id, said))
    with trial.expect("ELI-03"):
        for unfit in UNFIT:
            answer(unfit)
            await ask(trial, wire, "session/prompt", _text(session_id, said))
        answer(None)
        await prompted(trial, wire, session_id, said)


async def _opened(trial: Trial, wire: Wire) -> tuple[str, Message]:
    new = await results(trial, wire, "session/new", {"cwd": str(trial.folder), "mcpServers": []})
    return str(new.get("sessionId")), new


async def _set(
    trial: Trial, wire: Wire, session_id: str, config_id: str, value: object
) -> list[Message]:
    params = {"sessionId": session_id, "configId": config_id, "value": value}
    return _options(await results(trial, wire, "session/set_config_option", params))


async def _shown(
    trial: Trial, wire: Wire, session_id: str, state: Message, option: Message
) -> object:
    """Return an option's value, asked for by setting another one to what it is."""
    others = [
        each
        for each in _options(state)
        if each["id"] != option["id"] and each.get("type") == "select"
    ]
    trial.brought_about(others, "there is no second option to see the first one by")
    told = await _set(trial, wire, session_id, str(others[0]["id"]), others[0]["currentValue"])
    for each in told:
        if each.get("id") == option["id"]:
            return each.get("currentValue")
    raise WireError(f"{option['id']} is missing in the answer")


def _options(state: Message) -> list[Message]:
    options = state.get("configOptions")
    return [each for each in options if isinstance(each, dict)] if isinstance(options, list) else []


def _mode_option(state: Message) -> Message | None:
    return next((each for each in _options(state) if each.get("category") == "mode"), None)


def _values(option: Message) -> Iterator[str]:
    """Yield the values of a select, in groups or not."""
    for each in option.get("options", ()):
        for one in each.get("options", ()) if "group" in each else (each,):
            yield str(one["value"])


def _accepted(params: Message) -> Message:
    """Fill a form in."""
    schema: dict[str, Any] = params.get("requestedSchema") or {}
    content = {name: _filled(field) for name, field in schema.get("properties", {}).items()}
    return {"action": "accept", "content": content}


def _filled(field: dict[str, Any]) -> object:
    if choices := field.get("enum") or [one["const"] for one in field.get("oneOf", ())]:
        return choices[0]
    match field.get("type"):
        case "boolean":
            return True
        case "integer" | "number":
            return field.get("minimum", 1)
        case "array":
            return []
        case _:
            return "something"


def _text(session_id: str, text: str) -> Message:
    return {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]}
