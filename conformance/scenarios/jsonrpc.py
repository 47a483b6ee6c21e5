"""Messages of JSON-RPC: ids, what is no message, what nobody knows, and many at once."""

from __future__ import annotations

from typing import Final

import msgspec

from conformance.scenarios import scenario
from conformance.steps import ask, error_code, harmless, is_error, needs_pipe, serves, speaks
from conformance.trace import Message, WireError
from conformance.trial import NotBroughtAbout, Trial
from conformance.wire import Wire

N_PIPELINED: Final = 64
EXACT_IDS: Final[tuple[object, ...]] = (
    0,
    -1,
    2**31,
    2**53 - 1,
    "",
    "0",
    "1e3",
    "ü-日本-🦊",
    "x" * 1000,
)
LARGE_IDS: Final = (2**53 + 1, 2**63 - 1)
ODD_IDS: Final[tuple[object, ...]] = (1.5, True, [], {}, ["a"])
SCALARS: Final[tuple[object, ...]] = (None, 42, "x", True)
STRANGE: Final[dict[str, Message]] = {
    "no jsonrpc": {"id": "strange-1", "method": "_conformance/ping", "params": {}},
    "jsonrpc 1.0": {"jsonrpc": "1.0", "id": "strange-2", "method": "_conformance/ping"},
    "a method that is a number": {"jsonrpc": "2.0", "id": "strange-3", "method": 5},
    "no method": {"jsonrpc": "2.0", "id": "strange-4"},
    "method and result": {"jsonrpc": "2.0", "id": "strange-5", "method": "_a/b", "result": {}},
}
NOTIFICATIONS: Final = ("conformance/unknown", "_conformance/unknown", "$/conformance")


@scenario("FRM-16")
async def ids_come_back_unchanged(trial: Trial) -> None:
    """Ask with numbers and texts of many kinds as ids."""
    # Alone: an agent that answers a notification may well do so with one of them, such as "".
    wire = (await trial.client()).wire
    await serves(trial, wire, "nothing")
    method, params = harmless(trial, wire)
    with trial.expect("FRM-16") as it:
        for each in EXACT_IDS:
            trial.brought_about(not _responses(wire, each), f"the id {each!r} was used before")
            wire.send({"jsonrpc": "2.0", "id": each, "method": method, "params": params})
            await serves(trial, wire, f"the id {_short(each)}")
            it.that(_responses(wire, each), f"nothing came back for the id {_short(each)}")


@scenario("FRM-17", "FRM-36")
async def ids_at_their_edges(trial: Trial) -> None:
    """Ask with ids of 64 bits, and with some that JSON-RPC does not allow."""
    needs_pipe(trial)
    wire = (await trial.shared_client()).wire
    await serves(trial, wire, "nothing")
    method, params = harmless(trial, wire)
    with trial.expect("FRM-17") as it:
        for large in LARGE_IDS:
            wire.send({"jsonrpc": "2.0", "id": large, "method": method, "params": params})
            await serves(trial, wire, f"the id {large}")
            it.that(wire.responses(large), f"nothing came back for the id {large}")
    n_noise = len(wire.noise)
    with trial.expect("FRM-36") as it:
        for each in ODD_IDS:
            wire.send({"jsonrpc": "2.0", "id": each, "method": method, "params": params})
            await serves(trial, wire, f"the id {each}")
        it.that(len(wire.noise) == n_noise, f"what came back is no JSON: {wire.noise[-1:]}")


@scenario("FRM-11", "FRM-35")
async def values_that_are_no_message(trial: Trial) -> None:
    """Send JSON that is no object, and look who is still there."""
    needs_pipe(trial)
    wire = (await trial.shared_client()).wire
    codes: dict[str, list[object]] = {}
    with trial.expect("FRM-35"):
        for each in (*SCALARS, []):
            shown = msgspec.json.encode(each).decode()
            codes[shown] = await _complaints(trial, wire, each, shown)
    with trial.expect("FRM-11") as it:
        trial.brought_about(codes, "it did not get that far")
        for shown, told in codes.items():
            if shown != "[]":
                it.that(told == [-32600], f"{shown} was answered with {told or 'nothing'}")


@scenario("FRM-12", "FRM-14")
async def lists_of_messages(trial: Trial) -> None:
    """Send batches, of which this protocol knows nothing."""
    needs_pipe(trial)
    wire = (await trial.shared_client()).wire
    await serves(trial, wire, "nothing")
    n_noise = len(wire.noise)
    with trial.expect("FRM-14") as it:
        notes: list[Message] = [
            {"jsonrpc": "2.0", "method": name, "params": {}} for name in NOTIFICATIONS[:2]
        ]
        await _complaints(trial, wire, notes, "a list of notifications")
        it.that(len(wire.noise) == n_noise, f"it was answered with {wire.noise[-1:]}")
    with trial.expect("FRM-12") as it:
        asked: list[Message] = [
            {"jsonrpc": "2.0", "id": name, "method": "_conformance/ping", "params": {}}
            for name in ("batch-1", "batch-2")
        ]
        codes = await _complaints(trial, wire, asked, "a list of requests")
        it.that(codes == [-32600], f"a list of requests was answered with {codes or 'no error'}")


@scenario("FRM-15")
async def messages_that_are_not_allowed(trial: Trial) -> None:
    """Send objects that are no messages of JSON-RPC 2.0, and record what comes back."""
    needs_pipe(trial)
    wire = (await trial.shared_client()).wire
    seen: list[str] = []
    for what, message in STRANGE.items():
        n_before = len(wire.responses(None))
        wire.send(message)
        await serves(trial, wire, what)
        responses = [*wire.responses(message["id"]), *wire.responses(None)[n_before:]]
        codes = [error_code(each) or "a result" for each in responses] or ["nothing"]
        seen.append(f"{what}: {codes[0]}")
    trial.see("FRM-15", "recorded", "; ".join(seen))


@scenario("FRM-18")
async def answers_that_nobody_waits_for(trial: Trial) -> None:
    """Answer requests that the agent never made."""
    wire = (await trial.shared_client()).wire
    await serves(trial, wire, "nothing")
    start = len(wire.received)
    with trial.expect("FRM-18") as it:
        wire.send({"jsonrpc": "2.0", "id": "never-asked", "result": {}})
        wire.send({"jsonrpc": "2.0", "id": 987654321, "error": {"code": -1, "message": "late"}})
        await serves(trial, wire, "answers to requests that it never made")
        told = [each for each in wire.received[start:] if is_error(each) and not each.get("id")]
        it.that(not told, f"it was answered with {told[:1]}")


@scenario("FRM-19", "FRM-20", "FRM-21", is_quick=True)
async def words_that_nobody_knows(trial: Trial) -> None:
    """Send requests and notifications that are not in the protocol."""
    wire = (await trial.shared_client()).wire
    with trial.expect("FRM-20"):
        await ask(trial, wire, "_conformance.example/unknown", {"a": 1})
    with trial.expect("FRM-19") as it:
        for method in ("conformance/unknown", "_conformance.example/unknown"):
            response = await ask(trial, wire, method, {})
            what = f"{method} was answered with {response.get('error', response)}"
            it.that(error_code(response) == -32601, what)
    with trial.expect("FRM-21") as it:
        start = len(wire.received)
        for method in NOTIFICATIONS:
            wire.notify(method, {"a": 1})
        await serves(trial, wire, "notifications that it does not know")
        answers = [each for each in wire.received[start:] if "method" not in each]
        told = [each for each in answers if each.get("id") is None]
        it.that(not told, f"it was answered with {told[:1]}")


@scenario("FRM-23", is_quick=True)
async def many_requests_at_once(trial: Trial) -> None:
    """Send 64 requests in one go, with notifications between them."""
    wire = (await trial.shared_client()).wire
    await serves(trial, wire, "nothing")
    method, params = harmless(trial, wire)
    with trial.expect("FRM-23") as it:
        start, ids = len(wire.received), [wire.new_id() for _ in range(N_PIPELINED)]
        between = {"jsonrpc": "2.0", "method": "_conformance/between", "params": {}}
        requests = [
            {"jsonrpc": "2.0", "id": each, "method": method, "params": params} for each in ids
        ]
        wire.send_together([message for each in requests for message in (each, between)])
        for each in ids:
            await wire.response(each, trial.target.timeout_s)
        await serves(trial, wire, "many requests at once")
        twice = [each for each in ids if len(wire.responses(each)) != 1]
        it.that(not twice, f"{len(twice)} of {len(ids)} requests have more than one answer")
        strays = [m for m in wire.received[start:] if "method" not in m and m.get("id") is None]
        it.that(not strays, f"a notification was answered with {strays[:1]}")


@scenario("FRM-28")
async def request_with_an_id_that_is_taken(trial: Trial) -> None:
    """While a prompt runs, send another request with its id."""
    client, session_id = await trial.shared_session()
    wire = client.wire
    turn = client.prompt(session_id, trial.say("long"))
    await speaks(trial, wire, session_id)
    with trial.expect("FRM-28") as it:
        wire.send({"jsonrpc": "2.0", "id": turn, "method": "_conformance/ping", "params": {}})
        await serves(trial, wire, "a second request with the same id")
        client.cancel(session_id)
        await wire.receive(
            lambda message: message.get("id") == turn and _stopped(message),
            trial.target.timeout_s,
        )
        it.that(wire.exit_code is None, f"it ended with {wire.exit_code}")


async def _complaints(trial: Trial, wire: Wire, value: object, what: str) -> list[object]:
    """Send something; return the codes of errors with the id null that came before a barrier."""
    try:
        await serves(trial, wire, "what was before")
    except WireError as exc:
        raise NotBroughtAbout(str(exc)) from None
    n_before = len(wire.responses(None))
    wire.send(value)
    await serves(trial, wire, what)
    return [error_code(each) for each in wire.responses(None)[n_before:]]


def _responses(wire: Wire, request_id: object) -> list[Message]:
    assert isinstance(request_id, int | str)
    return wire.responses(request_id)


def _stopped(message: Message) -> bool:
    result = message.get("result")
    return isinstance(result, dict) and "stopReason" in result


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:30]}… ({len(shown)} characters)"
