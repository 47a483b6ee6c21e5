"""Mutants that break the conversation with a model. They need `OPENAI_BASE_URL`."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "call-without-result",
        "After a cancel the history has tool calls without a result.",
        "history cancel",
        ("history", "    return list(_with_results(messages))\n", "    return messages\n"),
    ),
    mutant(
        "empty-answer-in-history",
        "After a cancel the history has an answer with nothing in it.",
        "history cancel",
        (
            "model",
            '        return message if self.text or "tool_calls" in message else None\n',
            "        return message\n",
        ),
    ),
    mutant(
        "half-calls-in-history",
        "After a cancel the history has tool calls that broke off half way.",
        "history cancel",
        ("model", "        if is_whole and self.calls:\n", "        if self.calls:\n"),
    ),
    mutant(
        "prompt-twice-in-history",
        "The model is told each prompt twice.",
        "history",
        (
            "model",
            '        session.remember({"role": "user", "content": "\\n\\n".join(map(_told, blocks))})\n',
            '        session.remember({"role": "user", "content": "\\n\\n".join(map(_told, blocks))})\n'
            '        session.remember({"role": "user", "content": "\\n\\n".join(map(_told, blocks))})\n',
        ),
    ),
    mutant(
        "forgets-the-conversation",
        "The model is told the last prompt alone.",
        "history",
        (
            "model",
            "*session.history()]",
            "*session.history()[-1 - session.history()[::-1].index(next(each for each in "
            'session.history()[::-1] if each["role"] == "user")) :]]',
        ),
    ),
    mutant(
        "history-of-all-sessions",
        "The model is told what was said in other sessions.",
        "MOD-09 history isolation",
        (
            "session",
            '        self.log.append({"message": message})\n',
            '        self.log.append({"message": message})\n'
            '        self.connection.__dict__.setdefault("all", []).append({"message": message})\n',
        ),
        (
            "session",
            "        return history_of(self.log.events)\n",
            '        return history_of(self.connection.__dict__.get("all", []))\n',
        ),
    ),
    mutant(
        "wrong-call-id",
        "The results that the model is told bear another id than its calls.",
        "history tool-calls",
        (
            "history",
            '            missing.remove(message["tool_call_id"])\n',
            '            message = {**message, "tool_call_id": "x"}\n            missing.pop()\n',
        ),
    ),
    mutant(
        "results-in-one",
        "Of several calls in one answer it makes the first alone.",
        "history tool-calls",
        (
            "model",
            "            for call in reply.calls.values():\n                result",
            "            for call in list(reply.calls.values())[:1]:\n                result",
        ),
        ("history", "    yield from map(_interrupted, missing)\n\n\n", "\n\n"),
    ),
    mutant(
        "model-connection-stays-open",
        "A cancel leaves the connection to the model open.",
        "history cancel model-connection",
        ("http", "        self._connection.close()\n", "        _open.append(self._connection)\n"),
        ("http", "HEAD_LIMIT_BYTES: Final", "_open: list[object] = []\nHEAD_LIMIT_BYTES: Final"),
    ),
    mutant(
        "deaf-while-it-retries",
        "A cancel while it waits to ask the model again is lost.",
        "cancel retry",
        (
            "model",
            "                await self._loop.sleep(wait_s)\n",
            "                try:\n                    await self._loop.sleep(wait_s)\n"
            "                except BaseException:\n"
            "                    await self._loop.sleep(wait_s)\n                    raise\n",
        ),
    ),
    mutant(
        "asks-after-a-cancel",
        "It asks the model once more after a cancel.",
        "cancel model-connection",
        (
            "session",
            '        except Cancelled:\n            reason = "cancelled"\n',
            '        except Cancelled:\n            reason = "cancelled"\n'
            "            if self._model is not None:\n"
            "                self.loop.spawn(self._model._request(self))\n",
        ),
    ),
    mutant(
        "silent-model-failure",
        "A model that fails ends the turn as if nothing was.",
        "errors model",
        (
            "model",
            '        raise RpcError(INTERNAL_ERROR, "the model could not be reached, or broke off")\n',
            '        reply = _Reply()\n        reply.finish = "stop"\n        return reply\n',
        ),
    ),
    mutant(
        "dies-with-the-model",
        "A model that fails ends it.",
        "errors model robustness",
        (
            "model",
            '        raise RpcError(INTERNAL_ERROR, "the model could not be reached, or broke off")\n',
            "        os._exit(1)\n",
        ),
        (
            "model",
            'raise RpcError(INTERNAL_ERROR, f"the model refused: HTTP {response.status}")',
            "os._exit(1)",
        ),
    ),
    mutant(
        "key-in-errors",
        "Its errors show the key for the model.",
        "security errors model",
        (
            "model",
            'f"the model refused: HTTP {response.status}"',
            "f\"the model refused {os.environ.get('OPENAI_API_KEY')}: HTTP {response.status}\"",
        ),
        (
            "model",
            'raise RpcError(INTERNAL_ERROR, "the model could not be reached, or broke off")',
            'raise RpcError(INTERNAL_ERROR, "the key did not work: "'
            ' + os.environ.get("OPENAI_API_KEY", ""))',
        ),
    ),
    mutant(
        "cut-answer-is-whole",
        "An answer that broke off ends the turn as if it was whole.",
        "errors model",
        (
            "model",
            "            is_whole = reply.finish is not None\n",
            "            is_whole = True\n",
        ),
    ),
)
