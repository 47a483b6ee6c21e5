"""One session: its prompts, one turn at a time, and what the client is told of them."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from conformance.selftest.agent.files import Files
from conformance.selftest.agent.history import history_of
from conformance.selftest.agent.loop import Cancelled, Future, Loop, Task
from conformance.selftest.agent.options import Options
from conformance.selftest.agent.permissions import MODES, Permissions, TurnEnded
from conformance.selftest.agent.rpc import INTERNAL_ERROR, Connection, Message, Request, RpcError
from conformance.selftest.agent.store import Log, new_id
from conformance.selftest.agent.tools import make_call
from conformance.selftest.agent.words import Result, play

if TYPE_CHECKING:
    from conformance.selftest.agent.commands import Command
    from conformance.selftest.agent.model import Model

__all__ = ["COMMANDS", "Session", "Turn"]

CONTEXT_TOKENS: Final = 100_000
CHARS_PER_TOKEN: Final = 4
DOLLARS_PER_TOKEN: Final = 0.000001
TITLE_CHARS: Final = 60
COMMANDS: Final = (
    ("count", "Count to N, slowly if you say so", "N [slowly]"),
    ("plan", "Show a plan", "FIRST; SECOND; THIRD"),
    ("run", "Run a command", "COMMAND"),
)


class Turn:
    """A prompt on its way: waiting, running, and answered once."""

    def __init__(self, request: Request, blocks: list[Message]) -> None:
        self.request: Final = request
        self.blocks: Final = blocks
        self.is_cancelled = False
        self.task: Task | None = None

    @property
    def text(self) -> str:
        """What the prompt says."""
        return "\n".join(block["text"] for block in self.blocks if block["type"] == "text")

    def cancel(self) -> None:
        """Stop it; only the first call counts."""
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()


class Session:
    """A session that is active on this connection.

    Args:
        loop: What it runs on.
        connection: The client.
        capabilities: The client's.
        session_id: Its name.
        log: Its events so far.
        directories: More roots, beside the ``cwd`` in the log.
        model: Who answers; `None`: the words in the prompts say what to do.
    """

    def __init__(
        self,
        loop: Loop,
        connection: Connection,
        capabilities: Message,
        session_id: str,
        log: Log,
        directories: list[str],
        model: Model | None,
    ) -> None:
        self.id: Final = session_id
        self.loop: Final = loop
        self.connection: Final = connection
        self.cwd: Final[str] = log.events[0]["cwd"]
        self.has_terminals: Final = capabilities.get("terminal") is True
        self.can_elicit: Final = isinstance(_member(capabilities, "elicitation", "form"), dict)
        self._offered_files = capabilities.get("fs")
        self.use_roots(directories)
        self.permissions: Final = Permissions(connection, session_id)
        has_switches = _member(capabilities, "session", "configOptions", "boolean")
        self.options: Final = Options(has_booleans=isinstance(has_switches, dict))
        self.servers: list[Command] = []
        self.log: Final = log
        self._model = model
        self._turns: deque[Turn] = deque()
        self._idle: list[Future] = []
        self._message_id = ""
        self._message_kind = ""
        self._restore()

    def use_roots(self, directories: list[str]) -> None:
        """Let tools reach the session's folder and these, from the next call on."""
        roots = [self.cwd, *directories]
        self.files = Files(self.connection, self._offered_files, self.id, roots)

    # --- prompts --------------------------------------------------------------------------------

    def submit(self, turn: Turn) -> None:
        """Take a prompt; it runs when those before it have ended."""
        self._turns.append(turn)
        if len(self._turns) == 1:
            self._start()

    def cancel(self) -> None:
        """Stop all prompts that are here by now; each is answered ``cancelled`` in its order."""
        for turn in self._turns:
            turn.cancel()

    async def close(self) -> None:
        """Cancel and wait until all prompts are answered, and end what serves the session."""
        self.cancel()
        if self._turns:
            idle = Future()
            self._idle.append(idle)
            await idle
        for server in self.servers:
            await server.end()
        self.log.close()

    def _start(self) -> None:
        turn = self._turns[0]
        turn.task = self.loop.spawn(self._run(turn))

    async def _run(self, turn: Turn) -> None:
        error: RpcError | None = None
        reason = "cancelled"
        try:
            self.log.append({"prompt": turn.blocks, "messageId": new_id()})
            if not turn.is_cancelled:
                reason = await self._play(turn)
        except Cancelled:
            reason = "cancelled"
        except TurnEnded as end:
            reason = end.reason
        except RpcError as failure:
            error = failure
        except Exception:
            error = RpcError(INTERNAL_ERROR, "the turn failed inside the agent")
        with suppress(OSError):  # a full disk must not keep the answer back
            self.log.append({"end": reason if error is None else "error"})
        self._tell_usage()
        self._turns.popleft()
        if error is None:
            turn.request.answer({"stopReason": reason})
        else:
            turn.request.fail(error)
        if self._turns:
            self._start()
        else:
            idle, self._idle = self._idle, []
            for waiter in idle:
                waiter.set()

    async def _play(self, turn: Turn) -> str:
        self._message_kind = ""
        if not any("title" in event for event in self.log.events):
            title = " ".join(turn.text.split())[:TITLE_CHARS] or "Untitled"
            self.log.append({"title": title})
            self.update({"sessionUpdate": "session_info_update", "title": title}, is_kept=False)
        if self._model is not None:
            return await self._model.answer(self, turn.blocks)
        return await play(turn.text, self, self.call, self.loop)

    async def call(self, name: str, arguments: Message) -> Result:
        """Make a tool call of the running turn. May be cancelled.

        Raises:
            TurnEnded: The client said that the turn was cancelled.
        """
        return await make_call(self, name, arguments)

    # --- what the client is told ----------------------------------------------------------------

    def update(self, update: Message, *, is_kept: bool = True) -> None:
        """Tell the client, after it was written down if a replay is to tell it again."""
        if is_kept:
            self.log.append({"update": update})
        if update["sessionUpdate"] not in ("agent_message_chunk", "agent_thought_chunk"):
            self._message_kind = ""
        self._tell(update)

    async def say(self, text: str) -> None:
        """Say a part of an answer. May be cancelled."""
        await self._speak("agent_message_chunk", text)

    async def think(self, text: str) -> None:
        """Think aloud. May be cancelled."""
        await self._speak("agent_thought_chunk", text)

    def plan(self, entries: list[str], n_done: int) -> None:
        """Show the whole plan; so many of its entries are done, and the next one is under way."""
        statuses = ["completed"] * n_done + ["in_progress"] + ["pending"] * len(entries)
        shown = [
            {"content": content, "priority": "medium", "status": status}
            for content, status in zip(entries, statuses, strict=False)
        ]
        self.update({"sessionUpdate": "plan", "entries": shown})

    def announce(self) -> None:
        """Tell which commands there are."""
        commands = [
            {"name": name, "description": description, "input": {"hint": hint}}
            for name, description, hint in COMMANDS
        ]
        self.update(
            {"sessionUpdate": "available_commands_update", "availableCommands": commands},
            is_kept=False,
        )

    async def replay(self) -> None:
        """Tell the whole conversation again. May be cancelled."""
        for event in list(self.log.events):
            for block in event.get("prompt", ()):
                self._tell(
                    {
                        "sessionUpdate": "user_message_chunk",
                        "content": block,
                        "messageId": event["messageId"],
                    }
                )
            if "update" in event:
                self._tell(event["update"])
            await self.connection.drained()

    async def _speak(self, kind: str, text: str) -> None:
        if self._message_kind != kind:
            self._message_kind, self._message_id = kind, new_id()
        content = {"type": "text", "text": text}
        self.update({"sessionUpdate": kind, "content": content, "messageId": self._message_id})
        await self.connection.drained()

    def _tell(self, update: Message) -> None:
        self.connection.notify("session/update", {"sessionId": self.id, "update": update})

    def _tell_usage(self) -> None:
        used = sum(map(_chars, self.log.events)) // CHARS_PER_TOKEN + 1
        cost = {"amount": round(used * DOLLARS_PER_TOKEN, 6), "currency": "USD"}
        update = {
            "sessionUpdate": "usage_update",
            "used": min(used, CONTEXT_TOKENS),
            "size": CONTEXT_TOKENS,
            "cost": cost,
        }
        self.update(update, is_kept=False)

    # --- mode and options -----------------------------------------------------------------------

    def state(self) -> Message:
        """Return the modes and options, as answers to new, load and resume have them."""
        modes = [
            {"id": mode, "name": name, "description": description}
            for mode, (name, description) in MODES.items()
        ]
        return {
            "modes": {"currentModeId": self.permissions.mode, "availableModes": modes},
            "configOptions": self.options.shown(self.permissions.mode),
        }

    def set_mode(self, mode: str) -> None:
        """Change the mode, and tell that the option of that name follows."""
        self.log.append({"mode": mode})
        self.permissions.mode = mode
        options = self.options.shown(mode)
        self.update(
            {"sessionUpdate": "config_option_update", "configOptions": options}, is_kept=False
        )

    def set_option(self, key: str, value: str | bool) -> None:
        """Change an option; the mode is one of them, and then the client is told its mode."""
        if key == "mode":
            mode = str(value)
            self.log.append({"mode": mode})
            self.permissions.mode = mode
            self.update(
                {"sessionUpdate": "current_mode_update", "currentModeId": mode}, is_kept=False
            )
        else:
            self.log.append({"option": key, "value": value})
            self.options.values[key] = value

    # --- the model's history --------------------------------------------------------------------

    def remember(self, message: Message) -> None:
        """Keep a message of the conversation with the model."""
        self.log.append({"message": message})

    def forget_turn(self) -> None:
        """Take the last prompt and all after it out of what the model is told."""
        self.log.append({"forget": True})

    def history(self) -> list[Message]:
        """Return the conversation with the model."""
        return history_of(self.log.events)

    def _restore(self) -> None:
        """Take over what the log says; what was under way when its process died has failed."""
        is_running = False
        open_calls: dict[str, None] = {}
        for event in self.log.events:
            update = event.get("update", {})
            if "mode" in event:
                self.permissions.mode = event["mode"]
            elif "option" in event:
                self.options.values[event["option"]] = event["value"]
            elif "prompt" in event or "end" in event:
                is_running = "prompt" in event
            if update.get("status") in ("pending", "in_progress"):
                open_calls[update["toolCallId"]] = None
            elif update.get("status") in ("completed", "failed"):
                open_calls.pop(update["toolCallId"], None)
        for call_id in open_calls:
            ended = {"sessionUpdate": "tool_call_update", "toolCallId": call_id, "status": "failed"}
            self.log.append({"update": ended})
        if is_running:
            self.log.append({"end": "cancelled"})


def _chars(event: Message) -> int:
    blocks = list(event.get("prompt", ()))
    content = event.get("update", {}).get("content")
    if isinstance(content, dict):
        blocks.append(content)
    return sum(len(block.get("text", "")) for block in blocks)


def _member(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
