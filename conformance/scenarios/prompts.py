"""Prompts: what they are made of, how they are answered, and one after another."""

from __future__ import annotations

import base64
from typing import Final

from conformance.client import Client
from conformance.scenarios import scenario
from conformance.steps import (
    ask,
    error_code,
    is_error,
    offers,
    prompted,
    results,
    serves,
    speaks,
    updates,
)
from conformance.trace import Message
from conformance.trial import Trial

INTERNAL_ERROR: Final = -32603
STOP_REASONS: Final = ("end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled")
PNG: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)
SILENCE: Final = base64.b64encode(
    b"RIFF\x2c\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x40\x1f\0\0\x01\0\x08\0"
    b"data\x08\0\0\0" + b"\x80" * 8
).decode()
BLOCKS: Final[dict[str, list[Message]]] = {
    "image": [{"type": "image", "data": PNG, "mimeType": "image/png"}],
    "audio": [{"type": "audio", "data": SILENCE, "mimeType": "audio/wav"}],
    "embeddedContext": [
        {
            "type": "resource",
            "resource": {"uri": "file:///notes.md", "text": "# notes", "mimeType": "text/markdown"},
        },
        {"type": "resource", "resource": {"uri": "file:///notes.bin", "blob": "AAECAw=="}},
    ],
}
RULES: Final = {"image": "PRM-03", "audio": "PRM-04", "embeddedContext": "PRM-05"}
MALFORMED: Final[dict[str, object]] = {
    "a block of an unknown type": {"type": "hologram", "data": ""},
    "a block without a type": {"text": "hello"},
    "a text block without text": {"type": "text"},
    "a text block with a number": {"type": "text", "text": 5},
    "a block that is a text": "hello",
}
LETTERS: Final = 'ä 日本語 עברית 🦊🏽‍🚀 \u2028 \\ " \t é é'
PROMPT_CHARS: Final = 200 * 1024


@scenario("PRM-01", "PRM-10", "PRM-12", is_quick=True)
async def prompts_one_after_another(trial: Trial) -> None:
    """Prompt three times in one session."""
    client, session_id = await trial.shared_session()
    hello = trial.say("hello")
    ids: list[set[str]] = []
    with trial.expect("PRM-10"):
        for _ in range(3):
            start = len(client.wire.trace)
            with trial.expect("PRM-01") as it:
                reason = await prompted(trial, client.wire, session_id, hello)
                it.that(reason in STOP_REASONS, f"the stop reason was {reason}")
            told = updates(client.wire, session_id, start)
            chunks = [each for each in told if each.get("sessionUpdate") == "agent_message_chunk"]
            ids.append(
                {each["messageId"] for each in chunks if isinstance(each.get("messageId"), str)}
            )
        await serves(trial, client.wire, "three prompts")
    with trial.expect("PRM-12") as it:
        trial.brought_about(all(ids), "its messages have no ids")
        twice = (ids[0] & ids[1]) | (ids[1] & ids[2])
        it.that(not twice, f"messages of two turns have the id {min(twice, default='')}")


@scenario("PRM-02", "PRM-14", "PRM-17", is_quick=True)
async def content_that_every_agent_takes(trial: Trial) -> None:
    """Prompt with text, with a link to a resource, with letters of many scripts and `_meta`."""
    client, session_id = await trial.shared_session()
    text = {"type": "text", "text": trial.say("hello")}
    (trial.folder / "notes.md").write_text("# notes\n", encoding="utf-8")
    link = {
        "type": "resource_link",
        "uri": (trial.folder / "notes.md").as_uri(),
        "name": "notes.md",
        "mimeType": "text/markdown",
    }
    meta = {"_meta": {"example.org/anything": {"deep": [None]}}}
    with trial.expect("PRM-02"):
        await _turn(trial, client, session_id, [text, link])
    with trial.expect("PRM-14"):
        await _turn(trial, client, session_id, [{**text, "text": f"{text['text']}\n{LETTERS}"}])
    with trial.expect("PRM-17"):
        params = {"sessionId": session_id, "prompt": [{**text, **meta}], **meta}
        await results(trial, client.wire, "session/prompt", params)


@scenario("PRM-03", "PRM-04", "PRM-05", "PRM-06")
async def content_that_some_agents_take(trial: Trial) -> None:
    """Prompt with images, sound and embedded resources: advertised or not."""
    client, session_id = await trial.shared_session()
    text = {"type": "text", "text": trial.say("hello")}
    refused = []
    for kind, blocks in BLOCKS.items():
        if not offers(client.wire, kind):
            trial.see(RULES[kind], "skipped", f"the agent does not advertise {kind}")
            refused.append(kind)
            continue
        with trial.expect(RULES[kind]):
            for block in blocks:
                await _turn(trial, client, session_id, [text, block])
    if not refused:
        trial.see("PRM-06", "skipped", "the agent takes content of all kinds")
        return
    with trial.expect("PRM-06") as it:
        for kind in refused:
            params = {"sessionId": session_id, "prompt": [text, BLOCKS[kind][0]]}
            response = await ask(trial, client.wire, "session/prompt", params)
            it.that(is_error(response), f"{kind} was answered with {response.get('result')}")


@scenario("PRM-07", "PRM-08", "PRM-09", "PRM-18", is_quick=True)
async def prompts_that_are_none(trial: Trial) -> None:
    """Prompt with malformed content, with none, and in a session that does not exist."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    with trial.expect("PRM-09") as it:
        for what, block in MALFORMED.items():
            params = {"sessionId": session_id, "prompt": [block]}
            response = await ask(trial, wire, "session/prompt", params)
            it.that(is_error(response), f"{what} was answered with {response.get('result')}")
        await serves(trial, wire, "malformed content")
    with trial.expect("PRM-08") as it:
        params = {"sessionId": "never-was", "prompt": [{"type": "text", "text": "hello"}]}
        response = await ask(trial, wire, "session/prompt", params)
        it.that(is_error(response), f"it was answered with {response.get('result')}")
        with trial.expect("PRM-18") as its_code:
            its_code.that(error_code(response) != INTERNAL_ERROR, f"it was {response['error']}")
    response = await ask(trial, wire, "session/prompt", {"sessionId": session_id, "prompt": []})
    code = error_code(response)
    told = (response.get("result") or {}).get("stopReason") if code is None else code
    trial.see("PRM-07", "recorded", f"with {told}")


@scenario("PRM-11", "PRM-13")
async def prompt_while_another_runs(trial: Trial) -> None:
    """Prompt again in the middle of a long answer, cancel, and prompt once more."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    turn = client.prompt(session_id, trial.say("long"))
    await speaks(trial, wire, session_id)
    second = client.prompt(session_id, trial.say("hello"))
    await serves(trial, wire, "a second prompt")
    at_once = wire.responses(second)
    told = "it waits, or both run"
    if at_once:
        code = error_code(at_once[0])
        told = f"it is refused with {code}" if code is not None else "it is answered at once"
    trial.see("PRM-13", "recorded", told)
    with trial.expect("PRM-11") as it:
        client.cancel(session_id)
        await wire.response(turn, trial.target.timeout_s)
        await wire.response(second, trial.target.timeout_s)
        reason = await prompted(trial, wire, session_id, trial.say("hello"))
        it.that(reason == "end_turn", f"the stop reason of the third was {reason}")
        answers = [len(wire.responses(each)) for each in (turn, second)]
        it.that(answers == [1, 1], f"they were answered {answers[0]} and {answers[1]} times")


@scenario("PRM-15")
async def letters_reach_the_file(trial: Trial) -> None:
    """Have letters of many scripts written to a file."""
    client, session_id = await trial.shared_session()
    text = "Grüße 日本語 🦊 é"
    said = trial.say("write", path="letters.txt", text=text)
    await prompted(trial, client.wire, session_id, said)
    file = trial.folder / "letters.txt"
    trial.brought_about(file.exists(), "it wrote no such file")
    with trial.expect("PRM-15") as it:
        wrote = file.read_bytes()
        it.that(wrote.rstrip(b"\n") == text.encode(), f"the file holds {wrote!r:.80}")


@scenario("PRM-16")
async def long_prompt(trial: Trial) -> None:
    """Prompt with 200 KiB of text."""
    client, session_id = await trial.shared_session()
    said = trial.say("hello") + "\nthe same line again and again" * (PROMPT_CHARS // 30)
    with trial.expect("PRM-16"):
        await prompted(trial, client.wire, session_id, said)


async def _turn(trial: Trial, client: Client, session_id: str, prompt: list[Message]) -> None:
    params = {"sessionId": session_id, "prompt": prompt}
    await results(trial, client.wire, "session/prompt", params)
