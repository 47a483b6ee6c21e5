"""What an agent asks during a turn: a person answers it, or a flag does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Literal

import anyio

from acp_server.chat.forms import DISMISSED, Asked, read_form
from acp_server.chat.keyboard import Keyboard, Typed
from acp_server.chat.view import View
from acp_server.client import CANCELLED, Params, selected
from acp_server.errors import INVALID_PARAMS, RpcError
from acp_server.peer import InFlight
from agent_core.errors import ToolError
from agent_core.forms import Form

__all__ = ["Questions", "Turn"]

NOBODY_HERE: Final = (
    "rejected, like all that will be asked: nobody can be asked here; --yes or --mode allows it"
)


class Turn:
    """One prompt on its way."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.questions: set[anyio.CancelScope] = set()
        self.ended = anyio.Event()


class Questions:
    """Answers what is asked, one question at a time.

    Args:
        view: Where it is shown.
        keyboard: Where it is answered.
        permissions: What to answer to permission questions when nobody can be asked; "allow"
            answers so on a terminal too.
        turn: Returns the turn that goes on, `None` if there is none.
        interrupt: Called when a person typed Ctrl-C instead.
        lose_output: Called when nothing can be shown any more.
    """

    def __init__(
        self,
        view: View,
        keyboard: Keyboard,
        permissions: Literal["reject", "allow"],
        turn: Callable[[], Turn | None],
        interrupt: Callable[[], None],
        lose_output: Callable[[], None],
    ) -> None:
        self._view = view
        self._keyboard = keyboard
        self._permissions = permissions
        self._turn = turn
        self._interrupt = interrupt
        self._lose_output = lose_output
        self._asking = anyio.Lock()
        self._has_explained = False

    async def answer(self, params: Params, _in_flight: InFlight) -> Params:
        """Answer a ``session/request_permission``.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        try:
            return await self._decide_or_ask(params)
        except OSError:
            self._lose_output()
            return CANCELLED

    async def _decide_or_ask(self, params: Params) -> Params:
        turn = self._turn()
        if turn is None or turn.interrupts:
            return CANCELLED
        if self._permissions == "allow" or not self._keyboard.is_interactive:
            return self._decide(params)
        return await self._in_turn(turn, lambda: self._ask(params)) or CANCELLED

    async def _in_turn(self, turn: Turn, ask: Callable[[], Awaitable[Params]]) -> Params | None:
        """Return the answer to one question; `None` if the turn is stopped first."""
        with anyio.CancelScope() as question:
            turn.questions.add(question)
            try:
                async with self._asking:
                    return await ask()
            finally:
                turn.questions.discard(question)
        return None

    async def answer_form(self, params: Params, _in_flight: InFlight) -> Params:
        """Answer an ``elicitation/create``.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            RpcError: The form cannot be filled in here.
        """
        turn = self._turn()
        try:
            form = read_form(params)
        except ToolError as exc:
            raise RpcError(INVALID_PARAMS, exc.message) from None
        if turn is None or turn.interrupts:
            return DISMISSED
        try:
            return await self._in_turn(turn, lambda: self._fill(form)) or DISMISSED
        except OSError:
            self._lose_output()
            return DISMISSED

    async def _fill(self, form: Form) -> Params:
        self._keyboard.forget_typed()
        return await Asked(form, self._view.note, self._read_answer, self._interrupt).fill()

    def _decide(self, params: Params) -> Params:
        kinds = ("allow_once", "allow_always") if self._permissions == "allow" else ("reject_once",)
        option = self._view.decide(params, kinds)
        if self._permissions != "allow" and not self._has_explained:
            self._has_explained = True
            self._view.note(NOBODY_HERE)
        return CANCELLED if option is None else selected(option.option_id)

    async def _ask(self, params: Params) -> Params:
        options = self._view.ask(params)
        answers = {option.key: option for option in options}
        answers |= {str(number): option for number, option in enumerate(options, 1)}
        self._keyboard.forget_typed()
        while options:
            typed = await self._read_answer(f"  [{'/'.join(o.key for o in options)}]: ")
            if isinstance(typed, Typed):
                self._interrupt()
                break
            if typed.strip().lower() in answers:
                return selected(answers[typed.strip().lower()].option_id)
        return CANCELLED

    async def _read_answer(self, marker: str) -> str | Typed:
        self._view.hold()
        try:
            return await self._keyboard.read_line(marker)
        finally:
            self._view.release()
