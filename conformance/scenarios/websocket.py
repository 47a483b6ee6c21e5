"""An agent by WebSocket: frames, connections beside each other, and who may come in."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio

from conformance.scenarios import scenario
from conformance.trace import WireError
from conformance.trial import Trial

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

INITIALIZE: Final = json.dumps(
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"protocolVersion": 1, "clientCapabilities": {}},
    }
)
FOREIGN: Final = "https://evil.example"
NO_UTF8: Final = b'{"jsonrpc":"2.0","id":1,"method":"\xff\xfe"}'
LOCAL: Final = ("127.0.0.1", "localhost", "[::1]")


@scenario("NET-01", "NET-04", is_quick=True)
async def message_comes_in_fragments(trial: Trial) -> None:
    """Send initialize by WebSocket in fragments, with a ping between them."""
    async with _socket(trial) as socket:
        with trial.expect("NET-01") as it:
            headers = socket.response.headers if socket.response else {}
            it.that(headers.get("Acp-Connection-Id"), "there is no Acp-Connection-Id")
        with trial.expect("NET-04") as it:
            pongs: list[Any] = []

            async def parts() -> AsyncIterator[str]:
                for start in range(0, len(INITIALIZE), 20):
                    yield INITIALIZE[start : start + 20]
                    pongs.append(await socket.ping())

            await socket.send(parts())
            answer = await _message(trial, socket)
            it.that("result" in answer, f"the answer was {answer}")
            with anyio.move_on_after(trial.target.timeout_s) as scope:
                await pongs[0]
            it.that(not scope.cancelled_caught, "the ping was not answered")


@scenario("NET-02", "NET-03", "NET-05")
async def frames_that_are_no_messages(trial: Trial) -> None:
    """Begin with something else, send a binary frame, and send text that is not UTF-8."""
    new = '{"jsonrpc":"2.0","id":1,"method":"session/new","params":{"cwd":"/","mcpServers":[]}}'
    async with _socket(trial) as socket:
        await socket.send(new)
        with trial.expect("NET-02") as it:
            answer = await _message_or_end(trial, socket)
            it.that(answer is None or "error" in answer, f"the answer was {answer}")
    async with _socket(trial) as socket:
        await socket.send(INITIALIZE.encode())
        await socket.send(INITIALIZE.replace('"id": 1', '"id": 2'))
        with trial.expect("NET-03") as it:
            answer = await _message_or_end(trial, socket)
            it.that(answer is None or answer.get("id") != 1, "it was taken for a message")
    async with _socket(trial) as other, _socket(trial) as socket:
        await socket.send(INITIALIZE)
        await _message(trial, socket)
        socket.transport.write(_text_frame(NO_UTF8))
        with trial.expect("NET-05") as it:
            answer = await _message_or_end(trial, socket)
            it.that(answer is None, f"it was answered with {answer}")
            await other.send(INITIALIZE)
            it.that("result" in await _message(trial, other), "another connection suffered")


@scenario("NET-06", "NET-09")
async def connections_beside_each_other(trial: Trial) -> None:
    """Use the same ids on two connections, and break one of them in a turn."""
    trial.needs(trial.target.transport == "ws", "WebSocket")
    first, session_id = await trial.session()
    second, other_id = await trial.session()
    with trial.expect("NET-06") as it:
        it.that(session_id != other_id, "both connections were given one session")
        turns = [
            client.prompt(each, trial.say("hello"))
            for client, each in ((first, session_id), (second, other_id))
        ]
        for client, turn, each in ((first, turns[0], session_id), (second, turns[1], other_id)):
            await client.stop_reason(turn, trial.target.timeout_s)
            strange = {u["sessionId"] for u in _update_params(client)} - {each}
            it.that(not strange, f"updates of the other's session {strange}")
    async with _socket(trial) as socket:
        await socket.send(INITIALIZE)
        await _message(trial, socket)
        params = {"cwd": str(trial.folder), "mcpServers": []}
        await socket.send(_request(2, "session/new", params))
        session = (await _answer(trial, socket, 2))["result"]["sessionId"]
        prompt = [{"type": "text", "text": trial.say("long")}]
        await socket.send(_request(3, "session/prompt", {"sessionId": session, "prompt": prompt}))
        await _message(trial, socket)
        socket.transport.abort()
    with trial.expect("NET-09") as it:
        turn = second.prompt(other_id, trial.say("hello"))
        reason = await second.stop_reason(turn, trial.target.timeout_s)
        it.that(reason == "end_turn", f"another's prompt ended with {reason}")
        client = await trial.client()
        await trial.open_session(client)


@scenario("NET-07", "NET-08", "NET-10", is_quick=True)
async def who_may_connect(trial: Trial) -> None:
    """Connect from a foreign page, with a foreign name of the host, and without the token."""
    trial.needs(trial.target.transport == "ws", "WebSocket")
    with trial.expect("NET-07") as it:
        status = await _refused(trial, Origin=FOREIGN)
        it.that(status, f"a page of {FOREIGN} was let in")
    if any(f"//{each}:" in trial.target.url for each in LOCAL):
        with trial.expect("NET-10") as it:
            status = await _refused(trial, Host="evil.example:80", Origin="http://evil.example:80")
            it.that(status, "evil.example was let in as a name of this computer")
    else:
        trial.see("NET-10", "skipped", "the agent is not on this computer's own address")
    trial.needs(trial.target.token, "a token, or none was given to us")
    with trial.expect("NET-08") as it:
        for what, token in (("none", ""), ("a wrong one", "wrong-" + trial.target.token[::-1])):
            it.that(await _refused(trial, token=token), f"with {what} the agent let us in")


@asynccontextmanager
async def _socket(
    trial: Trial, *, token: str | None = None, **headers: str
) -> AsyncIterator[ClientConnection]:
    """Connect to the agent's address, and say nothing.

    Raises:
        WireError: It does not let us in.
    """
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake

    trial.needs(trial.target.transport == "ws", "WebSocket")
    token = trial.target.token if token is None else token
    sent = [(name, value) for name, value in headers.items() if name != "Host"]
    if token:
        sent.append(("Authorization", f"Bearer {token}"))
    host: dict[str, Any] = {}
    url = trial.target.url
    if "Host" in headers:  # the library names the host by the address; the place is given apart
        place = url.partition("://")[2].partition("/")[0]
        name, _, port = place.rpartition(":")
        host = {"host": name.strip("[]"), "port": int(port)}
        url = url.replace(place, headers["Host"])
    async with AsyncExitStack() as stack:
        try:
            socket = await stack.enter_async_context(
                connect(url, additional_headers=sent, compression=None, proxy=None, **host)
            )
        except (OSError, TimeoutError, InvalidHandshake) as exc:
            raise WireError(f"the connection was refused: {exc}") from exc
        yield socket


async def _refused(trial: Trial, *, token: str | None = None, **headers: str) -> bool:
    """Say whether the agent does not let somebody in, by its answer or by closing at once."""
    try:
        async with _socket(trial, token=token, **headers) as socket:
            await socket.send(INITIALIZE)
            return await _message_or_end(trial, socket) is None
    except WireError:
        return True


async def _message(trial: Trial, socket: ClientConnection) -> dict[str, Any]:
    """Wait for a message.

    Raises:
        WireError: The connection is closed, or none comes.
    """
    message = await _message_or_end(trial, socket)
    if message is None:
        raise WireError(f"the connection was closed with {socket.close_code}")
    return message


async def _answer(trial: Trial, socket: ClientConnection, request_id: int) -> dict[str, Any]:
    while True:
        message = await _message(trial, socket)
        if message.get("id") == request_id and "method" not in message:
            return message


async def _message_or_end(trial: Trial, socket: ClientConnection) -> dict[str, Any] | None:
    """Wait for a message, or for the end of the connection.

    Raises:
        WireError: Neither comes.
    """
    from websockets.exceptions import ConnectionClosed

    with anyio.move_on_after(trial.target.timeout_s):
        try:
            message = json.loads(await socket.recv())
        except ConnectionClosed:
            return None
        except ValueError as exc:
            raise WireError(f"what came is no JSON: {exc}") from None
        return message if isinstance(message, dict) else {"not": message}
    raise WireError(f"nothing came within {trial.target.timeout_s:g} s")


def _request(request_id: int, method: str, params: object) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def _text_frame(payload: bytes) -> bytes:
    """Return a text frame as clients send it: masked. For payloads below 126 bytes."""
    mask = os.urandom(4)
    masked = bytes(each ^ mask[index % 4] for index, each in enumerate(payload))
    return bytes((0x81, 0x80 | len(payload))) + mask + masked


def _update_params(client: Any) -> list[dict[str, Any]]:
    return [
        message["params"]
        for message in client.wire.received
        if message.get("method") == "session/update"
    ]
