"""A reference model of an agent, written from the cancellation contract and not from the code.

It is a plain program without any concurrency. A turn is a generator that yields where it has to
wait; `Reference.drive` runs it on until nothing can go on. What it says about a history of verbs,
releases and listeners is what a real agent has to show for the same history.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

Fact = tuple[object, ...]
"""One entry of the log, without ids and times."""
Act = tuple[str, str]
"""A verb and its operand: the prompt's name, or who cancels."""
Waits = Generator["Wait", None, None]

SEAMS = (
    "agent/prompt-submit",
    "agent/pre-step",
    "agent/turn-continuation",
    "agent/turn-stop",
)
MOMENTS = (
    *("running", "idle", "abort", "turn/start", "step/start", "turn/end"),
    *("user/message", "assistant/message", "tool/result", "step/end"),
)
"""Where listeners may act from inside."""
PARALLEL = {"pair", "stubborn pair"}


class Interrupted(Exception):
    """A checkpoint met an aborted signal."""


class Broken(Exception):
    """The model failed."""


@dataclass
class Wait:
    """One thing a turn waits for. Who is stubborn ignores the signal."""

    at: str
    is_stubborn: bool
    release: str | None = None

    def is_over(self, cause: str | None) -> bool:
        return self.release is not None or (cause is not None and not self.is_stubborn)


@dataclass
class Holder:
    """The one owner of one prospective turn's cancellation."""

    cause: str | None = None
    is_heard: bool = False  # a listener of the turn has been handed the signal


@dataclass
class Turn:
    number: int
    prompts: list[str]
    holder: Holder
    step: int = 0
    is_stopped: bool = False
    waits: list[Wait] = field(default_factory=list)


class Reference:
    """What an agent does, by the contract."""

    def __init__(self) -> None:
        self.status = "idle"
        self.statuses: list[str] = []
        self.is_disposed = False
        self.is_quiet = False
        self.queued: deque[str] = deque()
        self.steering: deque[str] = deque()
        self.settled: dict[str, str | None] = {}
        self.unsaved: set[str] = set()  # prompts whose turn's end could not be flushed
        self.refused: set[str] = set()
        self.log: list[Fact] = []
        self.listeners: dict[str, deque[Sequence[Act]]] = defaultdict(deque)
        self.held: dict[str, bool] = {}  # seam -> stubborn
        self.model_is_stubborn = False
        self.refuses_next = self.votes_stop = False
        self.flush_is_blocked = self.flush_fails = False
        self.turn: Turn | None = None
        self._holder: Holder | None = None
        self._heard: list[Holder] = []  # whose signals listeners were handed
        self._pre_run_cancelled = False
        self._running: Waits | None = None

    # --- verbs, synchronous ---------------------------------------------------------------------

    def act(self, act: Act) -> None:
        verb, operand = act
        getattr(self, verb)(operand)

    def send(self, name: str) -> None:
        self._take(name, self.queued)

    def steer(self, name: str) -> None:
        self._take(name, self.steering if self.status == "running" else self.queued)

    def _take(self, name: str, queue: deque[str]) -> None:
        if self.is_disposed:
            self.refused.add(name)
        else:
            queue.append(name)

    def cancel(self, cause: str) -> None:
        if self.is_disposed:
            return
        cleared = self._clear()
        if self._holder is not None:
            self._abort(self._holder, cause)
        elif cleared:
            self._pre_run_cancelled = True

    def bad_cancel(self, _value: str) -> None:
        pass

    def withdraw(self, name: str) -> None:
        for queue in (self.queued, self.steering):
            if name in queue:
                queue.remove(name)
                self.settled[name] = None
                if self._holder is None and not self.queued:
                    self._pre_run_cancelled = True
                return
        if self.turn is not None and name in self.turn.prompts:
            self._abort(self.turn.holder, "user")

    def dispose(self, _operand: str = "") -> None:
        if self.is_disposed:
            return
        self.is_disposed = True
        self._clear()
        if self._holder is not None:
            self._abort(self._holder, "disposed")
        self._become("disposed")

    def _clear(self) -> bool:
        cleared = [*self.steering, *self.queued]
        self.steering.clear()
        self.queued.clear()
        self.settled.update(dict.fromkeys(cleared))
        return bool(cleared)

    def _abort(self, holder: Holder, cause: str) -> None:
        if holder.cause is None:  # the first cause stands
            holder.cause = cause
            if holder.is_heard:
                self._fire("abort")

    def _become(self, status: str) -> None:
        if self.status != status:
            self.status = status
            self.statuses.append(status)
            self._fire(status)

    def _fire(self, moment: str) -> None:
        if self.listeners[moment]:
            for act in self.listeners[moment].popleft():
                self.act(act)

    # --- the driver -----------------------------------------------------------------------------

    @property
    def is_parked(self) -> bool:
        """Idle, and nothing owed."""
        return self._running is None and self.status == "idle"

    def drive(self) -> None:
        """Go on until everything that is left waits for somebody."""
        while True:
            if self._running is not None:
                if not self._go_on():
                    return
            elif self.is_disposed:
                self.is_quiet = True
                return
            elif self._pre_run_cancelled:
                self._pre_run_cancelled = False
                if not self.queued:
                    self._become("idle")
            elif self.queued:
                self._claim()
            else:
                return

    def _go_on(self) -> bool:
        assert self.turn is not None
        assert self._running is not None
        if self.turn.waits and not any(w.is_over(self.turn.holder.cause) for w in self.turn.waits):
            return False
        try:
            next(self._running)
        except StopIteration:
            self._finish()
        return True

    def _claim(self) -> None:
        holder = self._new_holder()
        self._become("running")
        if holder.cause is not None:  # a listener cancelled: the replacement gets a new one
            holder = self._new_holder()
        if not self.queued:
            self._requeue_steering()
        if self.is_disposed or not self.queued:
            self._holder = None
            self._park()
            return
        number = sum(fact[0] == "turn/start" for fact in self.log) + 1
        self.turn = Turn(number, [self.queued.popleft()], holder)
        self._running = self._run_turn(self.turn)

    def _new_holder(self) -> Holder:
        self._holder = Holder()
        return self._holder

    def _finish(self) -> None:
        assert self.turn is not None
        turn, self.turn, self._running, self._holder = self.turn, None, None, None
        if turn.is_stopped:
            self.settled.update(dict.fromkeys(self.steering))
            self.steering.clear()
        else:
            self._requeue_steering()
        self.settled.update(dict.fromkeys(turn.prompts, str(self.log[-1][2])))
        self._park()

    def _requeue_steering(self) -> None:
        self.queued.extendleft(reversed(self.steering))
        self.steering.clear()

    def _park(self) -> None:
        if not self.is_disposed and not self.queued:
            self._become("idle")

    # --- one turn -------------------------------------------------------------------------------

    def _run_turn(self, turn: Turn) -> Waits:
        outcome = "error"
        self._note("turn/start", turn.number)
        try:
            outcome = yield from self._run_prompt(turn)
        except Interrupted:
            pass
        except Broken:
            pass
        if outcome == "error":
            if self.is_disposed:
                outcome = "disposed"
            elif turn.holder.cause is not None:
                outcome = "aborted"
        self._note("turn/end", turn.number, outcome)
        if self.flush_is_blocked:
            yield from self._wait(turn, "flush", is_stubborn=True)
        if self.flush_fails:
            self.flush_fails = False
            self.unsaved.update(turn.prompts)

    def _run_prompt(self, turn: Turn) -> Generator[Wait, None, str]:
        yield from self._seam(turn, "agent/prompt-submit")
        if self.refuses_next:
            self.refuses_next = False
            self._check(turn)
            self._note("prompt/blocked", turn.prompts[0])
            return "rejected"
        self._check(turn)
        self._note("user/message", turn.prompts[0])
        outcome = "completed"
        while True:
            finish, owes_more = yield from self._run_step(turn)
            if finish == "refusal":
                return "refused"
            if finish == "length":
                outcome = "max_tokens"
            yield from self._seam(turn, "agent/turn-continuation")
            self._check(turn)
            yield from self._seam(turn, "agent/turn-stop")
            stops, self.votes_stop = self.votes_stop, False
            self._check(turn)
            turn.is_stopped = stops
            if stops or not (owes_more or self.steering):
                return outcome

    def _run_step(self, turn: Turn) -> Generator[Wait, None, tuple[str, bool]]:
        turn.step += 1
        self._take_steering(turn)
        yield from self._seam(turn, "agent/pre-step")
        self._check(turn)
        self._note("step/start", turn.number, turn.step)
        try:
            self._check(turn)
            finish, text, calls = yield from self._listen_to_model(turn)
            if text or calls:
                self._note("assistant/message", text, tuple(calls), False)
            yield from self._run_calls(turn, calls)
            was_steered = self._take_steering(turn)
        finally:
            self._note("step/end", turn.number, turn.step)
        self._check(turn)
        return finish, bool(calls) or was_steered

    def _listen_to_model(self, turn: Turn) -> Generator[Wait, None, tuple[str, str, list[str]]]:
        text, is_stubborn = "", self.model_is_stubborn
        try:
            while True:
                heard = yield from self._wait(turn, "model", is_stubborn)
                self._check(turn)
                what, _, operand = (heard or "").partition(":")
                if what == "says":
                    text += operand
                elif what == "fails":
                    raise Broken
                elif what == "calls":
                    return "tool_calls", text, operand.split(",")
                else:
                    return operand, text, []
        except (Interrupted, Broken):
            if text:
                self._note("assistant/message", text, (), True)
            raise

    def _run_calls(self, turn: Turn, calls: list[str]) -> Waits:
        results: list[str | None] = [None] * len(calls)
        logged = 0
        try:
            for group in grouped(calls):
                self._check(turn)
                turn.waits = [Wait(f"tool {at}", calls[at].startswith("stubborn")) for at in group]
                while turn.waits:
                    yield turn.waits[0]
                    for wait in [w for w in turn.waits if w.is_over(turn.holder.cause)]:
                        turn.waits.remove(wait)
                        results[int(wait.at[5:])] = result_of(wait, turn.holder.cause)
                    while logged < len(results) and results[logged] is not None:
                        self._note("tool/result", results[logged])
                        logged += 1
                self._check(turn)
        finally:
            for _unrun in results[logged:]:
                self._note("tool/result", "ABORTED_BEFORE_DISPATCH")

    def _take_steering(self, turn: Turn) -> bool:
        self._check(turn)
        taken = list(self.steering)
        self.steering.clear()
        turn.prompts += taken
        for name in taken:
            self._note("steering/message", name)
        return bool(taken)

    def _seam(self, turn: Turn, name: str) -> Waits:
        self._check(turn)
        if not turn.holder.is_heard:
            turn.holder.is_heard = True
            self._heard.append(turn.holder)
        if name in self.held:
            is_stubborn = self.held.pop(name)
            yield from self._wait(turn, name, is_stubborn)
            if not is_stubborn:
                self._check(turn)

    def _wait(self, turn: Turn, at: str, is_stubborn: bool) -> Generator[Wait, None, str | None]:
        wait = Wait(at, is_stubborn)
        turn.waits = [wait]
        yield wait
        turn.waits = []
        return wait.release

    def _check(self, turn: Turn) -> None:
        if turn.holder.cause is not None:
            raise Interrupted

    def _note(self, *fact: object) -> None:
        self.log.append(fact)
        if fact[0] in MOMENTS:
            self._fire(str(fact[0]))

    # --- what may be released -------------------------------------------------------------------

    def waiting_at(self, is_meant: Callable[[str], bool]) -> list[str]:
        waits = self.turn.waits if self.turn is not None else []
        return [wait.at for wait in waits if is_meant(wait.at)]

    def release(self, at: str, how: str) -> None:
        assert self.turn is not None
        for wait in self.turn.waits:
            if wait.at == at:
                wait.release = how

    @property
    def reasons(self) -> list[str | None]:
        """Who aborted each signal that was handed out, in order."""
        return [holder.cause for holder in self._heard]


def grouped(calls: Sequence[str]) -> list[list[int]]:
    """Return which calls overlap: neighbours of tools that are parallel."""
    groups: list[list[int]] = []
    for at, name in enumerate(calls):
        if groups and name in PARALLEL and calls[at - 1] in PARALLEL:
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups


def result_of(wait: Wait, cause: str | None) -> str:
    """Return the code of a call that has ended."""
    if cause is not None and not wait.is_stubborn:
        return "ABORTED"  # whatever it would have done next, it gave up
    if wait.release == "fails":
        return "TOOL_FAILED"  # a specific failure beats the abort
    if cause is not None:
        return "ABORTED"
    return {"ends": "ok", "crashes": "TOOL_CRASHED", "gives up": "TOOL_CANCELLED"}[
        str(wait.release)
    ]
