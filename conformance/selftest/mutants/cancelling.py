"""Mutants that break the Stop button."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "ignores-cancel",
        "It does not know session/cancel.",
        "cancel",
        ("methods", 'if method == "session/cancel" and', 'if method == "session/stop" and'),
    ),
    mutant(
        "cancel-is-an-error",
        "A cancelled prompt is answered with an error.",
        "cancel stop-reason",
        (
            "session",
            '        except Cancelled:\n            reason = "cancelled"\n',
            '        except Cancelled:\n            error = RpcError(-32800, "cancelled")\n',
        ),
    ),
    mutant(
        "cancel-ends-well",
        "A cancelled prompt ends as if nothing was.",
        "CAN-01 cancel stop-reason",
        (
            "session",
            '        except Cancelled:\n            reason = "cancelled"\n',
            '        except Cancelled:\n            reason = "end_turn"\n',
        ),
    ),
    mutant(
        "cancel-is-a-refusal",
        "A cancelled prompt is answered as a refusal.",
        "cancel stop-reason",
        (
            "session",
            '        except Cancelled:\n            reason = "cancelled"\n',
            '        except Cancelled:\n            reason = "refusal"\n',
        ),
    ),
    mutant(
        "cancel-answers-twice",
        "A cancelled prompt is answered at once, and again when its turn has ended.",
        "cancel answered-once",
        (
            "session",
            "        for turn in self._turns:\n            turn.cancel()\n",
            "        for turn in self._turns:\n"
            '            turn.request.answer({"stopReason": "cancelled"})\n'
            "            turn.request.is_answered = False\n"
            "            turn.cancel()\n",
        ),
    ),
    mutant(
        "cancel-never-answers",
        "A cancelled prompt is never answered.",
        "cancel answered-once",
        (
            "session",
            '            turn.request.answer({"stopReason": reason})\n',
            '            if reason != "cancelled":\n                turn.request.answer({"stopReason": reason})\n',
        ),
    ),
    mutant(
        "answers-the-cancel",
        "It answers session/cancel.",
        "cancel notifications",
        (
            "methods",
            "                session.cancel()\n",
            "                session.cancel()\n"
            '                self.connection.send({"jsonrpc": "2.0", "id": None, "result": {}})\n',
        ),
    ),
    mutant(
        "complains-about-strangers",
        "It answers a cancel for a session that it does not know.",
        "cancel notifications unknown-session",
        (
            "methods",
            "            if session is not None:\n                session.cancel()\n",
            "            if session is not None:\n                session.cancel()\n"
            "            else:\n"
            '                error = RpcError(NOT_FOUND, "there is no such session").body()\n'
            '                self.connection.send({"jsonrpc": "2.0", "id": None, "error": error})\n',
        ),
    ),
    mutant(
        "speaks-after-the-cancel",
        "It says one thing more after a cancelled prompt was answered.",
        "cancel updates order",
        (
            "session",
            "        if self._turns:\n            self._start()\n",
            '        if reason == "cancelled":\n'
            '            chunk = {"type": "text", "text": "Stopped."}\n'
            '            self._tell({"sessionUpdate": "agent_message_chunk", "content": chunk})\n'
            "        if self._turns:\n            self._start()\n",
        ),
    ),
    mutant(
        "works-on-after-the-cancel",
        "It answers a cancelled prompt and says the rest of it.",
        "CAN-02 UPD-02 cancel updates order",
        (
            "session",
            "        return await play(turn.text, self, self.call, self.loop)\n",
            "        work = self.loop.spawn(play(turn.text, self, self.call, self.loop))\n"
            "        return str(await work)\n",
        ),
    ),
    mutant(
        "sticky-cancel",
        "A cancel also ends the next turn of the session.",
        "CAN-04 cancel next-turn",
        (
            "session",
            "            turn.cancel()\n\n    async def close",
            "            turn.cancel()\n        self._is_cancelled = True\n\n    async def close",
        ),
        (
            "session",
            "        if self._model is not None:\n",
            '        if getattr(self, "_is_cancelled", False):\n'
            "            self._is_cancelled = False\n"
            '            raise TurnEnded("cancelled")\n'
            "        if self._model is not None:\n",
        ),
    ),
    mutant(
        "idle-cancel-sticks",
        "A cancel that finds nothing to cancel ends the next turn.",
        "cancel next-turn idle",
        (
            "session",
            "            turn.cancel()\n\n    async def close",
            "            turn.cancel()\n        self._is_cancelled = not self._turns\n\n    async def close",
        ),
        (
            "session",
            "        if self._model is not None:\n",
            '        if getattr(self, "_is_cancelled", False):\n'
            "            self._is_cancelled = False\n"
            '            raise TurnEnded("cancelled")\n'
            "        if self._model is not None:\n",
        ),
    ),
    mutant(
        "cancels-all-sessions",
        "A cancel ends the turns of all sessions.",
        "CAN-09 cancel isolation",
        (
            "methods",
            "                session.cancel()\n",
            "                for each in self._sessions.values():\n                    each.cancel()\n",
        ),
    ),
    mutant(
        "cancel-kills-the-session",
        "After a cancel the session is gone.",
        "cancel next-turn",
        (
            "methods",
            "                session.cancel()\n",
            "                session.cancel()\n                del self._sessions[session.id]\n",
        ),
    ),
    mutant(
        "cancel-kills-the-process",
        "A cancel ends it.",
        "cancel robustness",
        (
            "methods",
            "                session.cancel()\n",
            "                session.cancel()\n                self.loop.soon(self.connection.end)\n",
        ),
    ),
    mutant(
        "second-cancel-breaks",
        "A second cancel breaks the clean-up that the first has begun.",
        "cancel twice processes",
        ("loop", "if self.is_done or self.is_cancelled:", "if self.is_done:"),
        (
            "commands",
            "            await self._loop.sleep(0.01)\n",
            "            await self._loop.sleep(0.2)\n",
        ),
        (
            "session",
            '        except Cancelled:\n            reason = "cancelled"\n',
            '        except Cancelled:\n            await self.loop.sleep(0.05)\n            reason = "cancelled"\n',
        ),
    ),
    mutant(
        "cancels-when-convenient",
        "It notices a cancel after the command has ended by itself.",
        "CAN-14 cancel processes latency",
        (
            "shell",
            "    try:\n        await command.run(show)\n    finally:\n",
            "    work = call.session.loop.spawn(command.run(show))\n    try:\n        await work\n"
            "    finally:\n        await work\n",
        ),
    ),
    mutant(
        "deaf-before-the-first-update",
        "A cancel in the first moments of a turn is lost.",
        "CAN-17 cancel early",
        (
            "session",
            "        if self.task is not None:\n            self.task.cancel()\n",
            "        if self.task is not None and self.task._awaited is not None:\n            self.task.cancel()\n",
        ),
        ("session", "        self.is_cancelled = True\n", ""),
    ),
    mutant(
        "deaf-while-it-asks",
        "A cancel while it asks for permission is lost until the question is answered.",
        "cancel permissions",
        (
            "permissions",
            "        except Cancelled:\n            self._connection.abandon(reply)\n            raise\n",
            "        except Cancelled:\n            answer = await reply\n",
        ),
    ),
    mutant(
        "waits-for-the-answer",
        "A cancelled turn waits until the client has answered the question.",
        "CAN-10 cancel permissions hostile-client",
        (
            "permissions",
            "        except Cancelled:\n            self._connection.abandon(reply)\n            raise\n",
            "        except Cancelled:\n            await reply\n            raise\n",
        ),
    ),
    mutant(
        "late-yes-counts",
        "It runs the command if it is allowed to after the cancel.",
        "CAN-11 cancel permissions security",
        (
            "permissions",
            "        except Cancelled:\n            self._connection.abandon(reply)\n            raise\n",
            "        except Cancelled:\n"
            "            import os\n"
            "            command = f'{subject[4:]} </dev/null >/dev/null 2>&1'\n"
            "            reply.watch(lambda: 'allow' in str(reply._value) and os.system(command))\n"
            "            raise\n",
        ),
    ),
    mutant(
        "asks-after-the-cancel",
        "It asks for permission after a cancel.",
        "cancel permissions",
        (
            "session",
            '        except Cancelled:\n            reason = "cancelled"\n',
            '        except Cancelled:\n            reason = "cancelled"\n'
            '            call = {"toolCallId": "undo", "title": "Undo?"}\n'
            '            self.update({"sessionUpdate": "tool_call", **call}, is_kept=False)\n'
            '            options = [{"optionId": "yes", "name": "Yes", "kind": "allow_once"}]\n'
            '            params = {"sessionId": self.id, "toolCall": call, "options": options}\n'
            '            self.connection.request("session/request_permission", params)\n',
        ),
    ),
    mutant(
        "open-calls-on-cancel",
        "Tool calls that run when the turn is cancelled never come to an end.",
        "cancel tool-calls final-status",
        (
            "tools",
            "        call.finish(Result(told, is_error=True))\n        raise\n",
            '        if told != "it was cancelled":\n'
            "            call.finish(Result(told, is_error=True))\n        raise\n",
        ),
    ),
    mutant(
        "completes-cancelled-calls",
        "Tool calls that a cancel has stopped are told as completed.",
        "CAN-28 cancel tool-calls final-status",
        (
            "tools",
            "        call.finish(Result(told, is_error=True))\n        raise\n",
            "        call.finish(Result(told))\n        raise\n",
        ),
    ),
    mutant(
        "deaf-in-the-queue",
        "A cancel reaches the running prompt alone; those that wait run on.",
        "cancel queue",
        (
            "session",
            "        for turn in self._turns:\n            turn.cancel()\n",
            "        for turn in list(self._turns)[:1]:\n            turn.cancel()\n",
        ),
    ),
    mutant(
        "queue-is-dropped",
        "Prompts that wait when a cancel comes are never answered.",
        "CAN-18 cancel queue answered-once",
        (
            "session",
            "            turn.cancel()\n\n    async def close",
            "            turn.cancel()\n        while len(self._turns) > 1:\n"
            "            self._turns.pop()\n\n    async def close",
        ),
    ),
    mutant(
        "cancels-later-prompts",
        "A prompt that comes right after the cancel is cancelled with the one before it.",
        "CAN-26 cancel queue next-turn",
        (
            "session",
            "        self._turns.append(turn)\n",
            "        self._turns.append(turn)\n"
            "        if self._turns[0].is_cancelled:\n            turn.cancel()\n",
        ),
    ),
    mutant(
        "loose-cancel-request",
        "$/cancel_request takes a string for the number that it looks like.",
        "cancel-request ids",
        (
            "methods",
            'key = (type(params["requestId"]), params["requestId"])',
            'text = str(params["requestId"])\n'
            "            key = (int, int(text) if text.isdecimal() else 0)",
        ),
    ),
    mutant(
        "cancel-request-never-answers",
        "A prompt that is cancelled by $/cancel_request is never answered.",
        "CAN-21 cancel-request answered-once",
        (
            "methods",
            "                self._turns[key].cancel()\n",
            "                self._turns[key].request.is_answered = True\n                self._turns[key].cancel()\n",
        ),
    ),
    mutant(
        "leaves-the-command",
        "A cancel leaves the command running.",
        "cancel processes",
        ("shell", "    finally:\n        await command.end()\n", "    finally:\n        pass\n"),
    ),
    mutant(
        "leaves-grandchildren",
        "A cancel kills the command and not what left its process group.",
        "cancel processes setsid",
        (
            "commands",
            "            if not self.kill():\n                break\n",
            "            with suppress(ProcessLookupError):\n"
            "                os.killpg(self._process.pid, signals.SIGKILL)\n"
            "            if self._process.poll() is not None:\n                break\n",
        ),
    ),
    mutant(
        "asks-politely",
        "It sends SIGTERM to a command and does not mind if it goes on.",
        "cancel processes",
        (
            "commands",
            "                os.kill(pid, signals.SIGKILL)\n",
            "                os.kill(pid, signals.SIGTERM)\n",
        ),
        (
            "commands",
            "            if not self.kill():\n                break\n",
            "            self.kill()\n            break\n",
        ),
    ),
    mutant(
        "early-cancel-is-an-error",
        "A prompt that is cancelled before it has begun is answered with an error.",
        "CAN-16 cancel stop-reason",
        (
            "session",
            "            if not turn.is_cancelled:\n                reason",
            "            if turn.is_cancelled:\n"
            '                raise RpcError(INTERNAL_ERROR, "it had not begun")\n'
            "            if not turn.is_cancelled:\n                reason",
        ),
    ),
    mutant(
        "silence-ends-well",
        "A turn that is cancelled before it has said anything ends as if nothing was.",
        "CAN-15 cancel early stop-reason",
        (
            "session",
            '        except Cancelled:\n            reason = "cancelled"\n',
            '        except Cancelled:\n            reason = "cancelled" if self._message_kind else "end_turn"\n',
        ),
    ),
)
