"""Queued work, steering, and what a cancel removes; the edges between turns."""

from __future__ import annotations

import contextvars
from typing import Any

import anyio
import pytest
from core_rig import (
    PARENT,
    USER,
    GatedStore,
    Hang,
    Held,
    Waiting,
    answer_ok,
    call,
    rig,
    say,
    settle,
    tool,
)

from agent_core.content import Text, text_of
from agent_core.errors import AgentDisposed, QueueFull
from agent_core.events import (
    Aborted,
    AssistantMessage,
    Completed,
    Disposed,
    SteeringMessage,
    StepEnd,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from agent_core.inbox import MAX_QUEUED, Inbox, Prompt


def prompts(r: Any) -> list[str]:
    return [text_of(message.content) for message in r.of(UserMessage)]


def outside(start: Any, *args: Any) -> None:
    """Start a task that is not the agent's own work although a listener of the agent starts it."""
    contextvars.Context().run(start, *args)


# --- before a turn takes it ---------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R42", "R85")
async def test_a_prompt_cancelled_in_the_same_tick_leaves_one_mark_without_a_cause() -> None:
    async with rig() as r:
        prompt = r.agent.send("A")
        r.agent.cancel(PARENT)
        loop = r.agent._loop
        marks = [loop._pre_run_cancelled]
        assert loop._holder is None
        assert await prompt.settled() is None
        await r.agent.when_idle()
        marks.append(loop._pre_run_cancelled)

        assert marks == [True, False]
        assert r.log == []
        assert r.record.statuses == []
        assert r.model.requests == []


@pytest.mark.race
@pytest.mark.requirement("R43")
async def test_a_cancel_removes_every_queued_prompt() -> None:
    async with rig() as r:
        queued = [r.agent.send(text) for text in "ABC"]
        r.agent.cancel()
        await r.agent.when_idle()

        assert [await prompt.settled() for prompt in queued] == [None, None, None]
        assert r.log == []


@pytest.mark.race
@pytest.mark.requirement("R43", "R19")
async def test_a_cancel_removes_what_is_queued_behind_the_running_turn() -> None:
    hang = Hang()
    async with rig(hang) as r:
        running = r.agent.send("A")
        queued = [r.agent.send(text) for text in "BC"]
        await hang.hanging.wait()
        r.agent.cancel()
        assert all(prompt.is_settled for prompt in queued)
        assert not running.is_settled
        await r.agent.when_idle()

        assert await running.settled() == Aborted()
        assert prompts(r) == ["A"]
        assert r.outcomes == [Aborted()]


@pytest.mark.race
@pytest.mark.requirement("R44")
async def test_a_cancel_removes_steering_and_does_not_run_it_later() -> None:
    hang = Hang()
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        steering = r.agent.steer("S")
        r.agent.cancel()
        await r.agent.when_idle()

        assert await steering.settled() is None
        assert len(r.of(TurnStart)) == 1
        assert r.of(SteeringMessage) == []
        assert r.agent.status == "idle"


@pytest.mark.race
@pytest.mark.requirement("R45", "R84")
async def test_an_idle_cancel_does_not_touch_the_next_prompt() -> None:
    async with rig() as r:
        r.agent.cancel()
        assert not r.agent._loop._pre_run_cancelled
        assert r.record.seen == []
        prompt = r.agent.send("A")

        assert await prompt.settled() == Completed()
        assert not r.model.requests[0].signal.aborted


@pytest.mark.race
@pytest.mark.requirement("R45", "R84")
async def test_of_send_cancel_send_in_one_tick_only_the_last_runs() -> None:
    async with rig() as r, anyio.create_task_group() as tasks:
        first = r.agent.send("A")
        idle = anyio.Event()
        at_idle: list[bool] = []

        async def wait() -> None:
            await r.agent.when_idle()
            at_idle.append(second.is_settled)
            idle.set()

        r.agent.cancel()
        second = r.agent.send("B")
        tasks.start_soon(wait)
        await idle.wait()

        assert at_idle == [True]
        assert await first.settled() is None
        assert await second.settled() == Completed()
        assert prompts(r) == ["B"]


@pytest.mark.race
@pytest.mark.requirement("R85", "R74")
async def test_a_waiter_for_idle_hears_of_a_cancel_before_the_turn() -> None:
    async with rig() as r:
        r.agent.send("A")
        waiting = r.agent.when_idle()
        waiting.send(None)  # it waits; nothing else has run since the prompt was sent
        r.agent.cancel()
        await r.agent.when_idle()
        with pytest.raises(StopIteration):
            waiting.send(None)

        assert r.record.statuses == []


@pytest.mark.race
@pytest.mark.requirement("R85", "R45", "R74")
async def test_a_waiter_registered_before_the_cancel_waits_for_the_replacement() -> None:
    async with rig() as r:
        r.agent.send("A")
        waiting = r.agent.when_idle()
        blocked_on: Any = waiting.send(None)
        r.agent.cancel()
        second = r.agent.send("B")
        was_released: list[bool] = []
        r.on_event(TurnEnd, lambda: was_released.append(blocked_on.done()))
        await r.agent.when_idle()

        assert was_released == [False]
        assert blocked_on.done()
        waiting.close()
        assert await second.settled() == Completed()
        assert prompts(r) == ["B"]


@pytest.mark.race
@pytest.mark.requirement("R46", "R86", "R16")
async def test_a_running_listener_may_cancel_and_send_a_replacement() -> None:
    async with rig() as r:
        sent: list[Prompt] = []

        def replace() -> None:
            r.agent.cancel(PARENT)
            sent.append(r.agent.send("B"))

        r.on_status("running", replace)
        old = r.agent.send("A")
        await r.agent.when_idle()

        assert await old.settled() is None
        assert await sent[0].settled() == Completed()
        assert prompts(r) == ["B"]
        assert len(r.of(TurnStart)) == 1
        signals = {signal for _name, signal in r.record.signals}
        assert len(signals) == 1
        assert signals.pop().reason is None
        assert r.record.statuses == ["running", "idle"]


@pytest.mark.race
@pytest.mark.requirement("R46", "R49", "R86")
async def test_a_replacement_can_be_cancelled_by_the_same_listener() -> None:
    async with rig() as r:
        sent: list[Prompt] = []

        def replace_twice() -> None:
            for text in "BC":
                r.agent.cancel()
                sent.append(r.agent.send(text))

        r.on_status("running", replace_twice)
        r.agent.send("A")
        await r.agent.when_idle()

        assert [await prompt.settled() for prompt in sent] == [None, Completed()]
        assert prompts(r) == ["C"]


@pytest.mark.race
@pytest.mark.requirement("R46", "R45")
async def test_steering_sent_by_a_running_listener_after_its_cancel_still_runs() -> None:
    async with rig() as r:
        sent: list[Prompt] = []

        def replace() -> None:
            r.agent.cancel()
            sent.append(r.agent.steer("S"))

        r.on_status("running", replace)
        r.agent.send("A")
        while not sent:
            await r.agent.when_idle()

        assert await sent[0].settled() == Completed()
        assert prompts(r) == ["S"]
        await r.agent.when_idle()
        assert r.record.statuses == ["running", "idle"]


@pytest.mark.race
async def test_a_prompt_withdrawn_by_a_running_listener_opens_no_turn() -> None:
    async with rig() as r:
        prompt = r.agent.send("A")
        r.on_status("running", lambda: r.agent.withdraw(prompt))
        await r.agent.when_idle()

        assert await prompt.settled() is None
        assert r.log == []
        assert r.record.statuses == ["running", "idle"]
        assert await r.agent.send("B").settled() == Completed()


@pytest.mark.race
@pytest.mark.requirement("R47")
async def test_a_running_listener_that_only_cancels_leads_back_to_idle() -> None:
    async with rig() as r:
        r.on_status("running", r.agent.cancel)
        prompt = r.agent.send("A")
        await r.agent.when_idle()

        assert await prompt.settled() is None
        assert r.record.statuses == ["running", "idle"]
        assert r.log == []


@pytest.mark.race
async def test_a_running_listener_that_disposes_opens_no_turn() -> None:
    async with rig() as r:
        r.on_status("running", r.agent.dispose)
        prompt = r.agent.send("A")
        await r.agent.when_idle()

        assert await prompt.settled() is None
        assert r.log == []
        assert r.agent.status == "disposed"
        assert r.record.statuses == ["running", "disposed"]


# --- after the first cancel ---------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R49", "R87")
async def test_a_second_cancel_clears_what_came_after_the_first() -> None:
    hang = Hang(is_slow=True)
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel()
        await hang.noticed.wait()
        second = r.agent.send("C")
        steering = r.agent.steer("S")
        r.agent.cancel()
        third = r.agent.send("D")
        hang.gate.set()
        await r.agent.when_idle()

        assert await second.settled() is None
        assert await steering.settled() is None
        assert await third.settled() == Completed()
        assert prompts(r) == ["A", "D"]
        assert r.outcomes == [Aborted(), Completed()]


@pytest.mark.race
@pytest.mark.requirement("R50")
@pytest.mark.parametrize("verb", ["send", "steer"])
async def test_work_sent_by_an_abort_listener_survives_the_cancel(verb: str) -> None:
    hang = Hang()
    async with rig(hang) as r:
        sent: list[Prompt] = []
        r.agent.send("A")
        cleared = r.agent.send("B")
        await hang.hanging.wait()
        signal = r.model.requests[0].signal

        def replace(_reason: object) -> None:
            assert cleared.is_settled
            sent.append(getattr(r.agent, verb)("replacement"))

        signal.on_abort(replace)
        r.agent.cancel()
        assert len(sent) == 1
        await r.agent.when_idle()

        assert await sent[0].settled() == Completed()
        assert len(r.model.requests) == 2
        assert r.outcomes == [Aborted(), Completed()]
        assert prompts(r) == ["A", "replacement"]


@pytest.mark.race
@pytest.mark.requirement("R45", "R50")
@pytest.mark.parametrize("moment", [AssistantMessage, UserMessage, StepEnd])
async def test_steering_sent_after_the_cancel_does_not_join_the_cancelled_turn(
    moment: type[Any],
) -> None:
    async with rig() as r:
        sent: list[Prompt] = []

        def replace() -> None:
            r.agent.cancel()
            sent.append(r.agent.steer("S"))

        r.on_event(moment, replace)
        r.agent.send("A")
        await r.agent.when_idle()

        assert r.of(SteeringMessage) == []
        assert r.outcomes == [Aborted(), Completed()]
        assert await sent[0].settled() == Completed()


@pytest.mark.race
@pytest.mark.requirement("R45")
async def test_a_prompt_sent_while_the_cancelled_turn_unwinds_runs_afterwards() -> None:
    hang = Hang(is_slow=True)
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel()
        await hang.noticed.wait()
        after = r.agent.send("B")
        await settle()
        assert len(r.of(TurnStart)) == 1
        hang.gate.set()

        assert await after.settled() == Completed()
        assert r.outcomes == [Aborted(), Completed()]


@pytest.mark.race
async def test_a_prompt_sent_and_withdrawn_while_the_turn_unwinds_opens_no_turn() -> None:
    hang = Hang(is_slow=True)
    async with rig(hang) as r:
        r.agent.send("A")
        await hang.hanging.wait()
        r.agent.cancel()
        await hang.noticed.wait()
        after = r.agent.send("B")
        assert r.agent.withdraw(after)
        assert not r.agent.withdraw(after)
        hang.gate.set()
        await r.agent.when_idle()

        assert await after.settled() is None
        assert len(r.of(TurnStart)) == 1


async def test_withdrawing_the_only_prompt_makes_the_agent_idle_again() -> None:
    async with rig() as r:
        prompt = r.agent.send("A")
        assert r.agent.withdraw(prompt)
        await r.agent.when_idle()

        assert await prompt.settled() is None
        assert r.log == []


# --- the idle edge ------------------------------------------------------------------------------


@pytest.mark.race
async def test_a_cancel_between_two_turns_leads_to_idle_and_leaves_steering_usable() -> None:
    async with rig() as r:
        tail = []

        def queue_and_cancel() -> None:
            tail.append(r.agent.send("tail"))
            r.agent.cancel()

        r.on_event(TurnEnd, queue_and_cancel)
        r.agent.send("A")
        await r.agent.when_idle()

        assert await tail[0].settled() is None
        assert r.agent.status == "idle"
        assert r.record.statuses == ["running", "idle"]
        assert await r.agent.steer("S").settled() == Completed()


@pytest.mark.race
@pytest.mark.requirement("R74")
async def test_a_waiter_of_an_idle_listener_waits_for_what_the_listener_sent() -> None:
    async with rig() as r:
        waits: list[Any] = []
        was_released: list[bool] = []

        def replace() -> None:
            r.agent.send("B")
            waiting = r.agent.when_idle()
            waits.append(waiting)
            outside(lambda: waits.append(waiting.send(None)))  # it waits from here on
            r.on_event(TurnEnd, lambda: was_released.append(waits[1].done()))

        r.on_status("idle", replace)
        r.agent.send("A")
        await r.agent.when_idle()  # the edge that the listener answers to
        await r.agent.when_idle()

        assert was_released == [False]
        assert waits[1].done()
        waits[0].close()
        assert prompts(r) == ["A", "B"]


@pytest.mark.race
async def test_an_idle_listener_may_send_and_cancel_without_a_trace() -> None:
    async with rig() as r, anyio.create_task_group() as tasks:
        over = anyio.Event()

        async def wait() -> None:
            await r.agent.when_idle()
            over.set()

        def send_and_cancel() -> None:
            r.agent.send("X")
            outside(tasks.start_soon, wait)
            r.agent.cancel()

        r.on_status("idle", send_and_cancel)
        r.agent.send("A")
        await over.wait()
        await settle()

        assert not r.agent._loop._pre_run_cancelled
        assert prompts(r) == ["A"]
        assert r.record.statuses == ["running", "idle"]
        assert await r.agent.send("B").settled() == Completed()


@pytest.mark.race
@pytest.mark.requirement("R45")
async def test_of_what_an_idle_listener_sends_around_its_cancel_only_the_rest_runs() -> None:
    async with rig() as r:
        sent: list[Prompt] = []

        def act() -> None:
            sent.append(r.agent.send("X"))
            r.agent.cancel()
            sent.append(r.agent.send("Y"))

        r.on_status("idle", act)
        await r.agent.send("A").settled()
        await r.agent.when_idle()

        assert [await prompt.settled() for prompt in sent] == [None, Completed()]
        assert prompts(r) == ["A", "Y"]


@pytest.mark.race
async def test_a_prompt_that_comes_as_the_driver_parks_is_not_lost() -> None:
    async with rig() as r, anyio.create_task_group() as tasks:
        waited: list[bool] = []

        async def send_when_idle() -> None:
            await r.agent.when_idle()  # resumes around the very moment the driver parks
            waited.append((await r.agent.send("B").settled()) == Completed())

        r.agent.send("A")
        tasks.start_soon(send_when_idle)
        while not waited:
            await anyio.lowlevel.checkpoint()

        assert waited == [True]


@pytest.mark.race
async def test_an_idle_cancel_is_announced_to_nobody() -> None:
    async with rig() as r:
        await r.agent.send("A").settled()
        await r.agent.when_idle()
        before = len(r.record.seen), len(r.log)
        r.agent.cancel()
        await settle()

        assert (len(r.record.seen), len(r.log)) == before


# --- disposal and the queue ---------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.requirement("R63", "R74")
async def test_work_that_comes_after_disposal_began_is_refused() -> None:
    hang = Hang(is_slow=True)
    async with rig(hang) as r:
        r.agent.send("A")
        queued = r.agent.send("B")
        await hang.hanging.wait()
        r.agent.dispose()
        assert queued.is_settled
        for verb in (r.agent.send, r.agent.steer):
            with pytest.raises(AgentDisposed):
                verb("late")
        hang.gate.set()
        await r.agent.when_idle()

        assert len(r.model.requests) == 1
        assert r.outcomes == [Disposed()]


async def test_every_prompt_is_settled_exactly_once_whatever_becomes_of_it() -> None:
    hang = Hang()
    async with rig(say("A"), call("probe"), hang, tools=[tool("probe", answer_ok)]) as r:
        sent = [r.agent.send("A"), r.agent.send("B")]
        await hang.hanging.wait()
        sent.append(r.agent.steer("C"))
        sent.append(r.agent.send("D"))
        r.agent.cancel()
        sent.append(r.agent.send("E"))
        await r.agent.when_idle()
        sent.append(r.agent.send("F"))
        r.agent.dispose()

        outcomes = [await prompt.settled() for prompt in sent]
        assert outcomes == [Completed(), Aborted(), None, None, Completed(), None]


# --- steering -----------------------------------------------------------------------------------


@pytest.mark.race
async def test_steering_joins_the_running_turn_at_its_next_step() -> None:
    waiting = Waiting()
    async with rig(call("wait"), tools=[tool("wait", waiting)]) as r:
        first = r.agent.send("A")
        await waiting.entered.wait()
        steering = r.agent.steer("S")
        assert r.of(SteeringMessage) == []
        waiting.gate.set()

        assert await steering.settled() == await first.settled() == Completed()
        assert len(r.of(TurnStart)) == 1
        assert [text_of(m.content) for m in r.of(SteeringMessage)] == ["S"]
        assert len(r.model.requests) == 2


@pytest.mark.race
async def test_steering_alone_makes_the_turn_go_on() -> None:
    async with rig(say("A"), say("B")) as r:
        held = Waiting()

        async def hold(*args: Any) -> Any:
            held.entered.set()
            await held.gate.wait()
            return await args[-1]()

        r.agent.hooks.on("agent/turn-continuation", hold)
        r.agent.send("A")
        await held.entered.wait()
        steering = r.agent.steer("S")
        held.gate.set()

        assert await steering.settled() == Completed()
        assert len(r.of(TurnStart)) == 1
        assert len(r.model.requests) == 2


@pytest.mark.requirement("B074")
async def test_steering_an_idle_agent_is_an_ordinary_prompt() -> None:
    async with rig() as r:
        assert await r.agent.steer("S").settled() == Completed()
        assert prompts(r) == ["S"]


@pytest.mark.race
async def test_a_terminal_stop_drops_steering_and_keeps_prompts() -> None:
    store = GatedStore()
    async with rig(store=store) as r:

        async def stop(*_args: Any) -> str:
            return "enough"

        off = r.agent.hooks.on("agent/turn-stop", stop)
        store.close_gate()
        first = r.agent.send("A")
        await store.flushing.wait()
        off()
        steering, queued = r.agent.steer("S"), r.agent.send("B")
        store.gate.set()

        assert await first.settled() == Completed()
        assert await steering.settled() is None
        assert await queued.settled() == Completed()
        assert prompts(r) == ["A", "B"]


@pytest.mark.race
async def test_steering_that_is_too_late_for_its_turn_runs_before_other_prompts() -> None:
    store = GatedStore()
    async with rig(store=store) as r:
        store.close_gate()
        r.agent.send("A")
        await store.flushing.wait()
        queued, steering = r.agent.send("B"), r.agent.steer("S")
        store.gate.set()

        assert await queued.settled() == await steering.settled() == Completed()
        assert prompts(r) == ["A", "S", "B"]


@pytest.mark.race
async def test_the_holder_is_there_when_the_queue_is_announced_in_a_turn() -> None:
    async with rig() as r:
        held = Held(r.agent, "agent/prompt-submit")
        r.agent.send("A")
        await held.reached.wait()
        stop = r.agent.hooks.on("agent/queued", lambda *_args: r.agent.cancel())
        second = r.agent.send("B")
        stop()

        assert second.is_settled
        assert held.signal is not None
        assert held.signal.reason == USER
        await r.agent.when_idle()
        assert r.outcomes == [Aborted()]


# --- the inbox itself ---------------------------------------------------------------------------


def prompt(text: str) -> Prompt:
    return Prompt((Text(text),), "user")


def test_an_inbox_is_first_in_first_out_and_a_clear_takes_all() -> None:
    inbox = Inbox()
    a, b, s = prompt("A"), prompt("B"), prompt("S")
    inbox.send(a)
    inbox.send(b)
    inbox.steer(s)

    assert inbox.claim() is a
    assert inbox.clear() == [s, b]
    assert not inbox.has_queued
    assert not inbox.has_steering


def test_an_inbox_that_is_full_refuses_before_anything_changes() -> None:
    inbox = Inbox()
    for number in range(MAX_QUEUED):
        (inbox.send if number % 2 else inbox.steer)(prompt(str(number)))
    for verb in (inbox.send, inbox.steer):
        with pytest.raises(QueueFull):
            verb(prompt("one too many"))

    assert len(inbox.clear()) == MAX_QUEUED


def test_a_settled_prompt_stays_as_it_is() -> None:
    one = prompt("A")
    one.settle(Completed())
    one.settle(Aborted())

    assert one.outcome == Completed()
