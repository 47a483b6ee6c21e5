"""Bytes on the pipe: pieces, ends of lines, what is no JSON, and pipes that are full."""

from __future__ import annotations

from typing import Final

import anyio
import msgspec

from conformance.client import Client
from conformance.scenarios import scenario
from conformance.steps import ask, harmless, needs_pipe, prompted, serves
from conformance.trial import NotBroughtAbout, Trial

MIB: Final = 2**20
STALL_S: Final = 0.3
"""How long a pipe stays unread; long enough for an agent to fill it."""
N_STALLED: Final = 3000
STEP: Final = 250
NESTING: Final = 20_000
N_STRAY: Final = 500
N_TURNS: Final = 4
STRAY_CHARS: Final = 300
PIECE_BYTES: Final = 7
GAP_S: Final = 0.01
"""Between pieces, so that the agent reads them one by one."""
CUT: Final = "ü日本🦊ü日本🦊ü日本🦊"

GARBAGE: Final[dict[str, bytes]] = {
    "text": b"hello, are you there?\n",
    "half an object": b'{"jsonrpc":"2.0","id":"g-1",\n',
    "a single quote": b"'\n",
    "a zero byte": b"\0\n",
    "bytes that are no UTF-8": b'{"jsonrpc":"2.0","id":"g-2","method":"\xff\xfe"}\n',
    "an end of an object": b"}\n",
}
ODD_JSON: Final[dict[str, bytes]] = {
    what: b'{"jsonrpc":"2.0","method":"_conformance/ping",' + rest + b"}\n"
    for what, rest in {
        "NaN": b'"id":"odd-1","params":{"a":NaN}',
        "Infinity": b'"id":"odd-2","params":{"a":Infinity}',
        "doubled keys": b'"id":"odd-3","id":"odd-4"',
        "a lone surrogate": b'"id":"odd-5","params":{"a":"\\ud800"}',
    }.items()
}


@scenario("FRM-01", "FRM-04", is_quick=True)
async def bytes_come_in_pieces(trial: Trial) -> None:
    """Look at the first line, then send a request that is cut within its characters."""
    needs_pipe(trial)
    wire = await trial.wire()
    hello = {"protocolVersion": 1, "clientCapabilities": {}}
    with trial.expect("FRM-01") as it:
        await ask(trial, wire, "initialize", hello)
        first = next(each for each in wire.trace if each.direction == "received")
        it.that(first.message is wire.received[0], f"the first line is {_shown(first.raw)}")
    await serves(trial, wire, "nothing")
    method, params = harmless(trial, wire)
    with trial.expect("FRM-04"):
        line = _request(CUT, method, params)
        for start in range(0, len(line), PIECE_BYTES):
            wire.send_bytes(line[start : start + PIECE_BYTES])
            await anyio.sleep(GAP_S)
        await wire.response(CUT, trial.target.timeout_s)


@scenario("FRM-06", "FRM-07", "FRM-08", is_quick=True)
async def lines_come_as_they_like(trial: Trial) -> None:
    """Send several messages in one write, ends of lines of another kind, and blank lines."""
    needs_pipe(trial)
    wire = (await trial.shared_client()).wire
    await serves(trial, wire, "nothing")
    method, params = harmless(trial, wire)
    with trial.expect("FRM-06"):
        ids = [f"one-write-{index}" for index in range(3)]
        wire.send_bytes(b"".join(_request(each, method, params) for each in ids))
        for each in ids:
            await wire.response(each, trial.target.timeout_s)
    with trial.expect("FRM-07"):
        wire.send_bytes(_request("crlf", method, params)[:-1] + b"\r\n")
        await wire.response("crlf", trial.target.timeout_s)
    with trial.expect("FRM-08") as it:
        n_before = len(wire.responses(None))
        wire.send_bytes(b"\n\n   \n\r\n\t\n")
        await serves(trial, wire, "blank lines")
        told = wire.responses(None)[n_before:]
        it.that(not told, f"they were answered with {told[:1]}")


@scenario("FRM-09", "FRM-10", is_quick=True)
async def lines_that_are_no_json(trial: Trial) -> None:
    """Send lines that are no JSON, and ask whether anybody is still there."""
    needs_pipe(trial)
    wire = (await trial.shared_client()).wire
    answers: dict[str, list[object]] = {}
    with trial.expect("FRM-10"):
        for what, raw in GARBAGE.items():
            n_before = len(wire.responses(None))
            wire.send_bytes(raw)
            await serves(trial, wire, what)
            answers[what] = [
                (message.get("error") or {}).get("code")
                for message in wire.responses(None)[n_before:]
            ]
    with trial.expect("FRM-09") as it:
        # One that is no UTF-8 may be read leniently, and then it is an unknown method.
        told = {what: codes for what, codes in answers.items() if "UTF-8" not in what}
        trial.brought_about(told, "it did not get that far")
        for what, codes in told.items():
            it.that(codes == [-32700], f"{what} was answered with {codes or 'nothing'}")


@scenario("FRM-27")
async def json_at_its_edges(trial: Trial) -> None:
    """Send numbers that are none, doubled keys and half characters."""
    needs_pipe(trial)
    wire = (await trial.shared_client()).wire
    n_noise = len(wire.noise)
    with trial.expect("FRM-27") as it:
        for what, raw in ODD_JSON.items():
            wire.send_bytes(raw)
            await serves(trial, wire, what)
            it.that(len(wire.noise) == n_noise, f"{what} came back as {_shown(wire.noise[-1:])}")


@scenario("FRM-24")
async def line_of_a_mebibyte(trial: Trial) -> None:
    """Send one request of a MiB."""
    wire = (await trial.shared_client()).wire
    await serves(trial, wire, "nothing")
    method, params = harmless(trial, wire)
    with trial.expect("FRM-24"):
        await ask(trial, wire, method, {**params, "_meta": {"padding": "x" * MIB}})


@scenario("FRM-25")
async def lines_beyond_measure(trial: Trial) -> None:
    """Send eight MiB in a line, and then lists in lists in lists."""
    client, _ = await trial.session()
    wire = client.wire
    with trial.expect("FRM-25"):
        wire.notify("_conformance/padding", {"_meta": {"padding": "x" * 8 * MIB}})
        await serves(trial, wire, "a line of eight MiB")
        nested = b"[" * NESTING + b"]" * NESTING
        wire.send_bytes(
            b'{"jsonrpc":"2.0","method":"_conformance/nested","params":{"_meta":{"a":'
            + nested
            + b"}}}\n"
        )
        await serves(trial, wire, f"lists nested {NESTING} deep")


@scenario("FRM-32", "FRM-33", "FRM-26")
async def pipes_that_are_full(trial: Trial) -> None:
    """Leave the answers to thousands of requests unread, then the log, and stop within a line."""
    needs_pipe(trial)
    client = await trial.client()
    wire = client.wire
    await serves(trial, wire, "nothing")
    method, params = harmless(trial, wire)
    trial.brought_about(method != "session/new", "it answers too little")
    ids = [f"{'stalled-' * 25}{index}" for index in range(N_STALLED)]
    with trial.expect("FRM-32") as it:
        with wire.unread("stdout"):
            for each in ids:
                wire.send_bytes(_request(each, method, params))
            await anyio.sleep(STALL_S)
        for each in ids[STEP - 1 :: STEP]:  # the limit is for a step: machines may be slow
            await wire.response(each, trial.target.timeout_s)
        await serves(trial, wire, "a while without a reader")
        lost = sum(len(wire.responses(each)) != 1 for each in ids)
        it.that(not lost, f"{lost} of {N_STALLED} requests were not answered once")
        it.that(not wire.noise, f"a line was torn: {_shown(wire.noise[:1])}")
    trial.brought_about(wire.exit_code is None, "it had ended before")
    with trial.expect("FRM-33"), wire.unread("stderr"):
        for index in range(N_STRAY):
            stray = {"sessionId": f"{'x' * STRAY_CHARS}-{index}", "prompt": 5}
            wire.request("session/prompt", stray)
        wire.send_bytes(b"no JSON\n" * N_STRAY)
        await serves(trial, wire, "a log that nobody reads")
        await _have_turns(trial, client)
    with trial.expect("FRM-26") as it:
        wire.send_bytes(b'{"jsonrpc":"2.0","id":"torn","method":"session/new","params":{"cwd":"/')
        await wire.close_stdin(trial.target.timeout_s)
        code = await wire.exited(trial.target.timeout_s)
        it.that(code >= 0, f"it was ended by signal {-code}")


async def _have_turns(trial: Trial, client: Client) -> None:
    """Prompt for short answers, where somebody said how. Our own buffers hold one turn's log."""
    try:
        hello, session_id = trial.say("hello"), await trial.open_session(client)
    except NotBroughtAbout:
        return
    for _ in range(N_TURNS):
        await prompted(trial, client.wire, session_id, hello)


def _request(request_id: str, method: str, params: object) -> bytes:
    message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
    return msgspec.json.encode(message) + b"\n"


def _shown(raw: bytes | list[bytes]) -> str:
    text = raw if isinstance(raw, bytes) else b" ".join(raw)
    return repr(text[:120].decode("utf-8", "replace"))
