"""A turn of two model calls and a tool, stopped or dropped at every place, in each dialect.

The served agent talks over HTTP to the provider double, whose gates hold the turn at one place
after the other. Wherever it is stopped: one answer, ``cancelled``, and nothing said behind it; the
provider's socket closed; every call closed; and the next request, the one after a reload too, is
what the provider takes. `serve_rig` judges the whole conversation besides.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from dialects import (
    APIS,
    Heard,
    call,
    call_read,
    configured,
    flags_for,
    last_words,
    without_end_limits,
    without_waits,
)
from serve_rig import (
    SERVE,
    ask_for_permission,
    chunk_of,
    served,
    served_here,
    settle_cancelled,
    tool_calls,
    tool_update,
)

from acp_server.backend import Backend
from agent_core.cancellation import AbortSignal
from agent_core.models.adapter import ModelEvent, ModelRequest
from agent_core.models.providers import Api
from conformance.client import Client
from conformance.providers.server import (
    Drop,
    Gate,
    ProviderDouble,
    Reply,
    Step,
    provider_double,
    status,
)
from conformance.wire import Message, Wire

CLOSED_WITHIN_S: Final = 1.0
"""50 ms are promised, and what is measured is a tenth of that; a busy machine has its own times."""
SLEEP: Final = json.dumps({"command": "echo ready; sleep 300"})
BUSY: Final = status(429, {"message": "slow down"}, headers={"Retry-After": "60"})
WALK: Final[tuple[Api, ...]] = (*APIS, "chat", "anthropic", "responses", "chat")
"""From each dialect to each other."""

Place = int | str
"""Where in an answer: ``unread``, when its request has not been read; ``unanswered``, before the
headers; otherwise behind so many of its events."""


def places(events: Sequence[bytes]) -> list[Place]:
    return ["unread", "unanswered", *range(len(events) + 1)]


def reply(events: Sequence[bytes], place: Place, *steps: Step) -> Reply:
    """Return an answer with `steps` at `place`."""
    if place == "unread":
        return Reply(events, unread=steps)
    if place == "unanswered":
        return Reply(events, before=steps)
    assert isinstance(place, int)
    return Reply([*events[:place], *steps, *events[place:]])


class Stage:
    """The agent in this process, the double, and what every scenario does with them."""

    def __init__(
        self, api: Api, folder: Path, client: Client, backend: Backend, double: ProviderDouble
    ) -> None:
        self.api: Final = api
        self.client: Final = client
        self.backend: Final = backend
        self.double: Final = double
        self.folder: Final = folder
        self.sessions: Final[list[str]] = []
        self._n_heard = 0  # events of the latest model call that the loop is done with
        self._changed = anyio.Event()
        backend.runtime.hooks.on("llm/stream", self._listen)

    async def begin(self, *script: Reply, said: str = "read the file") -> tuple[str, int]:
        """Send the prompt of a fresh session to a double that plays `script`."""
        assert self.double.script == []
        self.double.script += script
        session = await self.client.new_session(self.folder)
        self.sessions.append(session)
        return session, self.client.prompt(session, said)

    async def hear(self, heard: Heard) -> None:
        """Wait until the loop has taken so much of the latest model call."""
        while self._n_heard < len(heard.events):
            await self._changed.wait()

    async def go_on(self, client: Client, session: str) -> Message:
        """Prompt once more; check that all went well, and return what the provider was sent."""
        self.double.script.append(Reply(last_words(self.api)))
        before = len(client.text(session))
        assert await client.stop_reason(client.prompt(session, "go on")) == "end_turn"
        assert client.text(session)[before:] == Heard(self.api, last_words(self.api)).text
        assert self.double.violations == []
        assert self.double.script == []
        return self.double.requests[-1]

    async def _listen(
        self,
        _request: ModelRequest,
        next_: Callable[[], Awaitable[AsyncGenerator[ModelEvent, None]]],
    ) -> AsyncGenerator[ModelEvent, None]:
        self._n_heard = 0
        return self._counted(await next_())

    async def _counted(
        self, stream: AsyncGenerator[ModelEvent, None]
    ) -> AsyncGenerator[ModelEvent, None]:
        async with aclosing(stream):
            async for event in stream:
                yield event
                self._n_heard += 1
                self._changed.set()
                self._changed = anyio.Event()


@asynccontextmanager
async def stage(api: Api, folder: Path) -> AsyncIterator[Stage]:
    """Set the stage; at the end load every session anew, and see that it can go on."""
    (folder / "notes.txt").write_text("text of the notes")
    with anyio.fail_after(50):
        async with provider_double(()) as double:
            config = configured({api: double})
            async with served_here(config) as (client, backend):
                on = Stage(api, folder, client, backend, double)
                yield on
            async with served_here(config) as (client, _):
                for session in on.sessions:
                    await load(client, session, folder)
                    await on.go_on(client, session)
            await double.no_connection()


async def load(client: Client, session: str, folder: Path) -> None:
    params = {"sessionId": session, "cwd": str(folder), "mcpServers": []}
    await client.result(client.wire.request("session/load", params))


def statuses(client: Client, session: str) -> list[str]:
    return [call["status"] for call in tool_calls(client, session).values()]


# --- the answers ----------------------------------------------------------------------------


@pytest.mark.requirement("R34", "R73", "B029", "B061", "B122", "B147", "ACP-093", "ACP-099")
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("api", APIS)
async def test_a_turn_can_be_cancelled_between_any_two_events(
    api: Api, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_end_limits(monkeypatch)
    tool = call_read(api, "notes.txt")
    events = tool if step == 1 else last_words(api)
    async with stage(api, tmp_path) as on:
        for place in places(events):
            gate, n = Gate(), len(on.double.requests) + step - 1
            before = [] if step == 1 else [Reply(tool)]
            session, prompt = await on.begin(*before, reply(events, place, gate))
            heard = Heard(api, events[:place] if isinstance(place, int) else [])
            await gate.reached.wait()
            await on.hear(heard)

            on.client.cancel(session)

            if place == "unread":
                gate.opened.set()  # the provider reads what is left, and that it is left
            with anyio.fail_after(CLOSED_WITHIN_S):
                await on.double.disconnected(n)
            await settle_cancelled(on.client, session, prompt)
            assert on.client.text(session) == (step == 2) * Heard(api, tool).text + heard.text
            assert statuses(on.client, session) == ["completed"] * (step - 1)
            sent = json.dumps(await on.go_on(on.client, session))
            assert heard.text.strip() in sent
            assert ("text of the notes" in sent) == (step == 2)


@pytest.mark.race
@pytest.mark.requirement("R34", "B029", "B122", "ACP-096")
@pytest.mark.parametrize("api", APIS)
async def test_what_comes_at_the_very_moment_of_the_cancel_is_not_shown(
    api: Api, tmp_path: Path
) -> None:
    events = call_read(api, "notes.txt")
    async with stage(api, tmp_path) as on:
        for place in places(events)[1:-2]:
            gate, n = Gate(), len(on.double.requests)
            session, prompt = await on.begin(reply(events, place, gate))
            heard = Heard(api, events[:place] if isinstance(place, int) else [])
            await gate.reached.wait()
            await on.hear(heard)

            gate.opened.set()  # all the rest is on its way now
            on.client.cancel(session)

            with anyio.fail_after(CLOSED_WITHIN_S):
                await on.double.disconnected(n)
            await settle_cancelled(on.client, session, prompt)
            assert on.client.text(session) == heard.text
            assert statuses(on.client, session) == []
            await on.go_on(on.client, session)


# --- around the answers ---------------------------------------------------------------------


@pytest.mark.requirement("R73", "B018", "B035", "B061", "ACP-092", "ACP-099", "ACP-110")
@pytest.mark.parametrize("api", APIS)
async def test_a_turn_can_be_cancelled_while_its_tool_asks_or_runs(
    api: Api, tmp_path: Path
) -> None:
    async with stage(api, tmp_path) as on:
        on.client.permission = "never"
        session, prompt = await on.begin(Reply(call(api, "shell", SLEEP)))
        await ask_for_permission(on.client, session)

        on.client.cancel(session)

        await settle_cancelled(on.client, session, prompt)
        assert statuses(on.client, session) == ["failed"]
        assert "no effect" in json.dumps(await on.go_on(on.client, session))

        on.client.permission = "allow"
        session, prompt = await on.begin(Reply(call(api, "shell", SLEEP)))
        await tool_update(on.client, session, "ready")

        on.client.cancel(session)

        await settle_cancelled(on.client, session, prompt)
        assert statuses(on.client, session) == ["failed"]
        assert "ready" in json.dumps(await on.go_on(on.client, session))


@pytest.mark.requirement("R72", "B147", "ACP-093")
@pytest.mark.parametrize("api", APIS)
async def test_a_turn_can_be_cancelled_while_it_waits_to_call_again(
    api: Api, tmp_path: Path
) -> None:
    async with stage(api, tmp_path) as on:
        for before in ([], [Reply(call_read(api, "notes.txt"))]):
            n = len(on.double.requests) + len(before)
            session, prompt = await on.begin(*before, BUSY)
            await chunk_of(on.client, session, "Trying again in 60", is_thought=True)

            on.client.cancel(session)

            await settle_cancelled(on.client, session, prompt)
            assert len(on.double.requests) == n + 1
            assert statuses(on.client, session) == ["completed"] * len(before)
            await on.go_on(on.client, session)


@pytest.mark.requirement("R34", "R73", "ACP-099")
@pytest.mark.parametrize("api", APIS)
async def test_a_turn_can_be_cancelled_between_its_steps(api: Api, tmp_path: Path) -> None:
    async with stage(api, tmp_path) as on:
        between = anyio.Event()

        async def hold(*args: Any) -> None:
            step, signal = args[2], args[-1]
            assert isinstance(signal, AbortSignal)
            if step == 2:
                between.set()
                await signal.wait()

        on.backend.runtime.hooks.on("agent/pre-step", hold)
        session, prompt = await on.begin(Reply(call_read(api, "notes.txt")))
        await between.wait()

        on.client.cancel(session)

        await settle_cancelled(on.client, session, prompt)
        assert statuses(on.client, session) == ["completed"]
        assert "text of the notes" in json.dumps(await on.go_on(on.client, session))


@pytest.mark.requirement("R34", "B029", "B147", "ACP-093")
@pytest.mark.parametrize("api", ["chat", "anthropic"])  # one for each library
async def test_a_request_that_the_provider_does_not_read_can_be_cancelled(
    api: Api, tmp_path: Path
) -> None:
    large = "word " * 2_500_000  # more than the sockets' buffers hold
    async with stage(api, tmp_path) as on:
        gate = Gate()
        session, prompt = await on.begin(reply(last_words(api), "unread", gate), said=large)
        await gate.reached.wait()

        on.client.cancel(session)

        await settle_cancelled(on.client, session, prompt)
        gate.opened.set()
        with anyio.fail_after(CLOSED_WITHIN_S):
            await on.double.no_connection()
        assert on.double.requests == []  # its end was never sent
        await on.go_on(on.client, session)


# --- the provider goes away -----------------------------------------------------------------


@pytest.mark.requirement("B061", "B122", "B149", "B150")
@pytest.mark.parametrize("drop", [Drop(), Drop(reset=True)], ids=["closed", "reset"])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("api", APIS)
async def test_a_connection_may_break_between_any_two_events(
    api: Api, step: int, drop: Drop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unheard, it is called again; half heard, it is an error; heard to its end, it is well."""
    without_waits(monkeypatch)
    tool, last = call_read(api, "notes.txt"), last_words(api)
    events = tool if step == 1 else last
    async with stage(api, tmp_path) as on:
        for place in places(events):
            gate = Gate()
            heard = Heard(api, events[:place] if isinstance(place, int) else [])
            is_broken = heard.is_anything and not heard.has_ended
            before = [Reply(tool)] if step == 2 else []
            again = [] if heard.is_anything else [Reply(events)]
            behind = [Reply(last)] if step == 1 and not is_broken else []
            script = (*before, reply(events, place, gate, drop), *again, *behind)
            session, prompt = await on.begin(*script)
            await gate.reached.wait()
            await on.hear(heard)

            gate.opened.set()

            answer = await on.client.wire.response(prompt)
            if is_broken:
                said = (step == 2) * Heard(api, tool).text + heard.text
                assert answer["error"]["data"]["code"] == "TRANSPORT"
                assert "connection" in answer["error"]["message"]
                assert on.client.text(session) == said
            else:
                assert answer["result"]["stopReason"] == "end_turn"
                assert on.client.text(session) == Heard(api, tool).text + Heard(api, last).text
            assert set(statuses(on.client, session)) <= {"completed"}
            assert heard.text.strip() in json.dumps(await on.go_on(on.client, session))


@pytest.mark.requirement("B061", "B150")
@pytest.mark.parametrize("drop", [Drop(), Drop(reset=True)], ids=["closed", "reset"])
@pytest.mark.parametrize("api", APIS)
async def test_a_connection_may_break_while_a_tool_runs(
    api: Api, drop: Drop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_waits(monkeypatch)
    async with stage(api, tmp_path) as on:
        gate = Gate()
        on.client.permission = "never"
        answers = (
            Reply(call(api, "shell", '{"command": "echo ready"}'), after=[gate, drop]),
            Reply(last_words(api)),
        )
        session, prompt = await on.begin(*answers)
        question = await ask_for_permission(on.client, session)
        await gate.reached.wait()

        gate.opened.set()
        await on.double.no_connection()
        outcome = {"outcome": "selected", "optionId": "allow-once"}
        on.client.wire.reply(question["id"], {"outcome": outcome})

        assert await on.client.stop_reason(prompt) == "end_turn"
        assert statuses(on.client, session) == ["completed"]
        await on.go_on(on.client, session)


# --- over a real pipe -----------------------------------------------------------------------


@pytest.mark.requirement("R73", "B029", "B061", "B122", "B147", "ACP-093", "ACP-099")
@pytest.mark.parametrize("api", APIS)
async def test_the_real_command_can_be_cancelled_wherever_its_model_is(
    api: Api, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("text of the notes")
    tool, last = call_read(api, "notes.txt"), last_words(api)
    sweep = [*((1, place) for place in places(tool)[1::2])]
    sweep += [(2, place) for place in places(last)[1::2]]
    with anyio.fail_after(50):
        async with provider_double(()) as double:
            flags, env = flags_for(api, double, tmp_path)
            async with served(tmp_path, *flags, env=env) as client:
                for step, place in sweep:
                    gate, n = Gate(), len(double.requests) + step - 1
                    double.script += [Reply(tool)] * (step - 1)
                    double.script.append(reply(tool if step == 1 else last, place, gate))
                    session = await client.new_session(tmp_path)
                    prompt = client.prompt(session, "read the file")
                    await gate.reached.wait()
                    await client.wire.silence()

                    client.cancel(session)

                    with anyio.fail_after(CLOSED_WITHIN_S):
                        await double.disconnected(n)
                    await settle_cancelled(client, session, prompt)
                    double.script.append(Reply(last))
                    assert await client.stop_reason(client.prompt(session, "go on")) == "end_turn"
                    assert double.violations == []
                    assert double.script == []


# --- the process goes away ------------------------------------------------------------------


@pytest.mark.requirement("B061", "B090")
@pytest.mark.parametrize("api", APIS)
async def test_sessions_go_on_after_the_process_was_killed_wherever_its_models_were(
    api: Api, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("text of the notes")
    tool, last = call_read(api, "notes.txt"), last_words(api)
    tool_half, last_half = len(tool) - 4, len(last) // 2  # in the arguments; in the words
    scripts = (
        [reply(tool, "unanswered", Gate())],
        [reply(tool, tool_half, Gate())],
        [Reply(tool), reply(last, last_half, Gate())],
        [Reply(call(api, "shell", SLEEP))],
    )
    with anyio.fail_after(50):
        async with provider_double(()) as double:
            sessions: list[str] = []
            flags, env = flags_for(api, double, tmp_path)
            async with Wire.spawn([*SERVE, *flags], env={**os.environ, **env}) as wire:
                client = Client(wire, permission="allow")
                await client.initialize()
                for script in scripts:
                    double.script += script
                    sessions.append(await client.new_session(tmp_path))
                    client.prompt(sessions[-1], "read the file")
                    gates = [step for each in script for step in (*each.before, *each.body)]
                    for gate in (step for step in gates if isinstance(step, Gate)):
                        await gate.reached.wait()
                await tool_update(client, sessions[-1], "ready")
                await wire.silence()

                wire.kill()

                await wire.exited()
            await double.no_connection()
            async with served_here(configured({api: double})) as (client, _):
                for session in sessions:
                    await load(client, session, tmp_path)
                    assert set(statuses(client, session)) <= {"completed", "failed"}
                    double.script.append(Reply(last))
                    assert await client.stop_reason(client.prompt(session, "go on")) == "end_turn"
                    assert double.violations == []
                assert statuses(client, sessions[-1]) == ["failed"]
                assert "its outcome is unknown" in json.dumps(double.requests[-1])


# --- another model --------------------------------------------------------------------------


@pytest.mark.requirement("B061", "B062", "B065", "B066")
async def test_a_session_goes_on_with_a_model_of_any_other_dialect(tmp_path: Path) -> None:
    """Behind each of the things that may be in a history: the next model is sent what it takes."""
    (tmp_path / "notes.txt").write_text("text of the notes")
    with anyio.fail_after(50):
        async with (
            provider_double(()) as chat,
            provider_double(()) as responses,
            provider_double(()) as anthropic,
        ):
            doubles: dict[Api, ProviderDouble] = {
                "chat": chat,
                "responses": responses,
                "anthropic": anthropic,
            }
            config = configured(doubles)
            async with served_here(config) as (client, _):
                session = await client.new_session(tmp_path)
                for api in WALK:
                    params = {"sessionId": session, "configId": "model", "value": api}
                    await client.result(client.wire.request("session/set_config_option", params))
                    await a_bit_of_everything(api, doubles[api], client, session)
            async with served_here(config) as (client, _):
                await load(client, session, tmp_path)
                chat.script.append(Reply(last_words("chat")))
                assert await client.stop_reason(client.prompt(session, "go on")) == "end_turn"
            assert [double.violations for double in doubles.values()] == [[], [], []]


async def a_bit_of_everything(
    api: Api, double: ProviderDouble, client: Client, session: str
) -> None:
    """Have a turn with a tool, and turns cancelled in thinking, in a call, and as they ask."""
    tool = call_read(api, "notes.txt")
    double.script += [Reply(tool), Reply(last_words(api))]
    assert await client.stop_reason(client.prompt(session, "read the file")) == "end_turn"
    n_thinking = next(n for n in range(len(tool)) if Heard(api, tool[:n]).is_anything)
    for place in (n_thinking, len(tool) - 4):
        gate = Gate()
        double.script.append(reply(tool, place, gate))
        prompt = client.prompt(session, f"stop at {place}")
        await gate.reached.wait()
        client.cancel(session)
        await settle_cancelled(client, session, prompt)
    client.permission = "never"
    double.script.append(Reply(call(api, "shell", SLEEP)))
    prompt = client.prompt(session, "run it")
    await ask_for_permission(client, session)
    client.cancel(session)
    await settle_cancelled(client, session, prompt)
    client.permission = "allow"
    assert double.script == []
    assert double.violations == []
