from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from msgspec import Raw, Struct

from acp_server.errors import PeerClosed, RemoteError, RpcError
from acp_server.peer import InFlight, Method, Peer
from agent_core.cancellation import AbortController, TurnAborted


class Params(Struct):
    n: int = 0


class Lines:
    """An outbox that keeps what was sent."""

    is_congested = False

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._changed = anyio.Event()

    def send(self, message: bytes) -> None:
        assert b"\n" not in message
        self.sent.append(json.loads(message))
        self._changed.set()
        self._changed = anyio.Event()

    async def drained(self) -> None:
        pass

    async def until(self, n_messages: int) -> list[Any]:
        with anyio.fail_after(5):
            while len(self.sent) < n_messages:
                await self._changed.wait()
        return self.sent


class Fixture:
    """A peer with a few methods, on a list instead of a transport."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.lines = Lines()
        self.noticed: list[bytes | None] = []
        self.taken: list[int] = []
        self.gate = anyio.Event()
        self.peer = Peer(
            self.lines,
            tasks,
            {
                "echo": Method(Params, self.echo),
                "wait": Method(Params, self.wait),
                "take": Method(Params, self.take),
                "fail": Method(Params, self.fail),
                "break": Method(Params, self.break_at_once),
                "own": Method(Params, self.own),
            },
            {"note": self.noticed.append, "bad note": self.bad_note},
            self.admit,
        )

    def admit(self, method: str) -> None:
        if method == "forbidden":
            raise RpcError(-32600, "Not now")

    async def echo(self, params: Params, _in_flight: InFlight) -> object:
        self.peer.notify("said", {"n": params.n})
        return {"n": params.n}

    async def wait(self, _params: Params, _in_flight: InFlight) -> object:
        await self.gate.wait()
        return {}

    def take(self, params: Params, in_flight: InFlight) -> Any:
        self.taken.append(params.n)
        in_flight.after.append(lambda: self.peer.notify("after", {}))
        return self.wait(params, in_flight)

    async def fail(self, params: Params, _in_flight: InFlight) -> object:
        if params.n:
            raise RpcError(-32002, "No such thing", {"n": params.n})
        raise KeyError("a secret")

    def break_at_once(self, _params: Params, _in_flight: InFlight) -> Any:
        raise KeyError("a secret")

    def own(self, params: Params, in_flight: InFlight) -> Any:
        in_flight.cancel = self.gate.set
        return self.wait(params, in_flight)

    def bad_note(self, _params: bytes | None) -> None:
        raise KeyError("a secret")

    def ask(self, request_id: object, method: str, params: object = None) -> None:
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        self.peer.receive(json.dumps(message).encode())

    def note(self, method: str, params: object = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        self.peer.receive(json.dumps(message).encode())

    def answer(self, request_id: object, **body: object) -> None:
        self.peer.receive(json.dumps({"jsonrpc": "2.0", "id": request_id, **body}).encode())


def error(request_id: object, code: int, message: str, data: object = None) -> dict[str, Any]:
    body = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return {"jsonrpc": "2.0", "id": request_id, "error": body}


# --- requests we serve ----------------------------------------------------------------------


@pytest.mark.requirement("ACP-008", "ACP-010", "B122")
async def test_an_answer_comes_behind_everything_that_was_sent_before_it():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask("é", "echo", {"n": 3, "unknown": True})

        assert await at.lines.until(2) == [
            {"jsonrpc": "2.0", "method": "said", "params": {"n": 3}},
            {"jsonrpc": "2.0", "id": "é", "result": {"n": 3}},
        ]


async def test_a_plain_handler_takes_effect_before_the_next_line_is_read():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask(1, "take", {"n": 1})
        at.ask(2, "take", {"n": 2})

        assert at.taken == [1, 2]
        at.gate.set()


async def test_what_follows_an_answer_is_done_behind_it():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)
        at.gate.set()

        at.ask(1, "take")

        assert await at.lines.until(2) == [
            {"jsonrpc": "2.0", "id": 1, "result": {}},
            {"jsonrpc": "2.0", "method": "after", "params": {}},
        ]


@pytest.mark.requirement("ACP-014", "ACP-172")
async def test_an_unknown_method_is_named_in_the_answer():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask(1, "_ext/thing")

        expected = error(1, -32601, "Method not found", {"method": "_ext/thing"})
        assert await at.lines.until(1) == [expected]


@pytest.mark.requirement("ACP-015")
@pytest.mark.parametrize("params", [{"n": "x"}, [], "x", 5])
async def test_params_of_the_wrong_shape_are_refused_with_what_is_wrong(params):
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask(1, "echo", params)

        (answer,) = await at.lines.until(1)
        assert answer["error"]["code"] == -32602
        assert "Expected" in answer["error"]["data"]["reason"]


async def test_null_and_absent_params_are_empty_params():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask(1, "echo", None)
        at.peer.receive(b'{"jsonrpc":"2.0","id":2,"method":"echo"}')

        answers = [line for line in await at.lines.until(4) if "id" in line]
        assert [answer["result"] for answer in answers] == [{"n": 0}, {"n": 0}]


async def test_a_handlers_own_error_reaches_the_peer_as_it_is():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask(1, "fail", {"n": 7})

        assert await at.lines.until(1) == [error(1, -32002, "No such thing", {"n": 7})]


@pytest.mark.requirement("ACP-018", "B163")
@pytest.mark.parametrize("method", ["fail", "break"])
async def test_of_any_other_exception_the_peer_sees_a_reference_only(method):
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask(1, method)

        (answer,) = await at.lines.until(1)
        assert (answer["error"]["code"], answer["error"]["message"]) == (-32603, "Internal error")
        assert list(answer["error"]["data"]) == ["reference"]
        assert "secret" not in json.dumps(answer)


async def test_a_request_may_be_refused_before_it_is_looked_up():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask(1, "forbidden")

        assert await at.lines.until(1) == [error(1, -32600, "Not now")]


@pytest.mark.requirement("ACP-010", "B116")
async def test_a_second_request_with_an_open_id_is_refused_and_the_first_is_answered():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)
        at.ask(1, "wait")
        at.ask(1, "echo")
        at.ask("1", "wait")
        at.gate.set()

        answers = await at.lines.until(3)
        at.ask(1, "echo")

        reason = {"reason": "a request with this id is being served"}
        assert answers[0] == error(1, -32600, "Invalid request", reason)
        assert [(a["id"], a["result"]) for a in answers[1:]] == [(1, {}), ("1", {})]
        assert (await at.lines.until(5))[4]["result"] == {"n": 0}


async def test_a_line_that_was_too_long_gets_one_error_without_an_id():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.peer.receive(None)

        assert at.lines.sent == [error(None, -32600, "The message is too long")]


async def test_a_bad_line_is_answered_and_a_blank_one_is_not():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.peer.receive(b"{")
        at.peer.receive(b"")
        at.peer.receive(b'{"jsonrpc":"2.0","id":7,"method":5}')

        assert [(m["id"], m["error"]["code"]) for m in at.lines.sent] == [
            (None, -32700),
            (7, -32600),
        ]


# --- notifications --------------------------------------------------------------------------


@pytest.mark.requirement("ACP-009", "ACP-173")
async def test_notifications_take_effect_at_once_and_never_get_an_answer():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.note("note", {"a": 1})
        at.note("unknown")
        at.note("$/unknown")
        at.note("bad note")
        at.note("echo")
        at.note("note")

        assert at.noticed == [b'{"a": 1}', None]
        await anyio.lowlevel.checkpoint()
        assert at.lines.sent == []


# --- $/cancel_request -----------------------------------------------------------------------


@pytest.mark.requirement("ACP-106", "ACP-108")
async def test_a_cancelled_request_is_answered_with_the_code_for_that():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)
        at.ask(1, "wait")

        at.note("$/cancel_request", {"requestId": 1})

        assert await at.lines.until(1) == [error(1, -32800, "Request cancelled")]


async def test_a_handler_may_say_itself_what_cancelling_means():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)
        at.ask(1, "own")

        at.note("$/cancel_request", {"requestId": 1})

        assert await at.lines.until(1) == [{"jsonrpc": "2.0", "id": 1, "result": {}}]


@pytest.mark.requirement("ACP-109")
@pytest.mark.parametrize(
    "params",
    [{"requestId": "1"}, {"requestId": 1.0}, {"requestId": True}, {"requestId": 2}, {}, None, [1]],
)
async def test_a_cancel_that_names_no_open_request_is_ignored(params):
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)
        at.ask(1, "wait")

        at.note("$/cancel_request", params)
        at.gate.set()

        assert await at.lines.until(1) == [{"jsonrpc": "2.0", "id": 1, "result": {}}]


async def test_a_cancel_right_behind_its_request_finds_it():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.ask(1, "wait")
        at.note("$/cancel_request", {"requestId": 1})

        assert await at.lines.until(1) == [error(1, -32800, "Request cancelled")]


# --- requests we make -----------------------------------------------------------------------


async def test_a_response_settles_its_request_and_nothing_else():
    async with anyio.create_task_group() as tasks:
        at, results = Fixture(tasks), []
        signal = AbortController().signal

        async def call(n: int) -> None:
            results.append((n, await at.peer.call("ask", {"n": n}, signal=signal)))

        tasks.start_soon(call, 1)
        await at.lines.until(1)
        tasks.start_soon(call, 2)
        first, second = await at.lines.until(2)
        at.answer(str(first["id"]), result="not an integer")
        at.answer(None, result="nobody's")
        at.answer(99, result="unknown")
        at.answer(second["id"], result=[2])
        at.answer(second["id"], result="twice")
        at.answer(first["id"], result=None)

    assert results == [(2, b"[2]"), (1, b"null")]
    assert (first["method"], first["params"]) == ("ask", {"n": 1})
    assert len(at.lines.sent) == 2


async def test_an_error_response_is_raised():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        async def call() -> None:
            with pytest.raises(RemoteError, match="no") as caught:
                await at.peer.call("ask", {}, signal=AbortController().signal)
            assert caught.value.code == -99999

        tasks.start_soon(call)
        (sent,) = await at.lines.until(1)
        at.answer(sent["id"], error={"code": -99999, "message": "no"})


@pytest.mark.requirement("ACP-110")
async def test_an_abort_settles_a_call_by_itself_tells_the_peer_and_drops_its_late_answer():
    async with anyio.create_task_group() as tasks:
        at, controller = Fixture(tasks), AbortController()
        raised = anyio.Event()

        async def call() -> None:
            with pytest.raises(TurnAborted):
                await at.peer.call("ask", {}, signal=controller.signal)
            raised.set()

        tasks.start_soon(call)
        (sent,) = await at.lines.until(1)
        controller.abort({"kind": "user"})
        with anyio.fail_after(5):
            await raised.wait()
        at.answer(sent["id"], result={})

        assert at.lines.sent[1:] == [
            {"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": sent["id"]}}
        ]


async def test_a_call_with_a_signal_that_fired_is_never_sent():
    async with anyio.create_task_group() as tasks:
        at, controller = Fixture(tasks), AbortController()
        controller.abort({"kind": "user"})

        with pytest.raises(TurnAborted):
            await at.peer.call("ask", {}, signal=controller.signal)

        assert at.lines.sent == []


async def test_a_call_whose_task_is_cancelled_is_taken_back():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        async def call() -> None:
            await at.peer.call("ask", {}, signal=AbortController().signal)

        tasks.start_soon(call)
        await at.lines.until(1)
        tasks.cancel_scope.cancel()

    assert [message["method"] for message in at.lines.sent] == ["ask", "$/cancel_request"]


async def test_closing_wakes_whoever_waits_for_the_peer_and_nothing_more_is_sent():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        async def call() -> None:
            with pytest.raises(PeerClosed):
                await at.peer.call("ask", {}, signal=AbortController().signal)

        tasks.start_soon(call)
        await at.lines.until(1)
        at.peer.close()
        at.peer.close()
        at.peer.notify("late", {})

    with pytest.raises(PeerClosed):
        await at.peer.call("ask", {}, signal=AbortController().signal)
    assert len(at.lines.sent) == 1


# --- the rest -------------------------------------------------------------------------------


async def test_answered_waits_for_all_that_came():
    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)
        await at.peer.answered()
        at.ask(1, "wait")
        at.ask(2, "wait")
        tasks.start_soon(at.lines.until, 2)

        at.gate.set()
        with anyio.fail_after(5):
            await at.peer.answered()

        assert len(at.lines.sent) == 2


async def test_text_that_utf8_cannot_express_is_replaced_on_its_way_out():
    class Named(Struct):
        path: str
        raw: Raw

    async with anyio.create_task_group() as tasks:
        at = Fixture(tasks)

        at.peer.notify("said", Named("/tmp/\udcff", Raw(b'{"a":1}')))

        assert at.lines.sent[0]["params"] == {"path": "/tmp/�", "raw": {"a": 1}}
