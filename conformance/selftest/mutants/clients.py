"""Mutants that do wrong by what a client lends: files, terminals, forms; and by odd clients."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "reads-uninvited",
        "It reads files through clients that do not offer it.",
        "fs capabilities",
        ("files", 'self._can_read = offered.get("readTextFile") is True', "self._can_read = True"),
    ),
    mutant(
        "writes-uninvited",
        "It writes files through clients that offer to read them alone.",
        "fs capabilities",
        (
            "files",
            'self._can_write = offered.get("writeTextFile") is True',
            "self._can_write = self._can_read",
        ),
    ),
    mutant(
        "terminals-uninvited",
        "It makes terminals at clients that have none.",
        "terminals capabilities",
        (
            "session",
            'capabilities.get("terminal") is True',
            '"fs" in capabilities or not capabilities',
        ),
    ),
    mutant(
        "asks-uninvited",
        "It sends forms to clients that show none.",
        "elicitation capabilities",
        ("session", 'isinstance(_member(capabilities, "elicitation", "form"), dict)', "True"),
    ),
    mutant(
        "forms-for-the-empty-offer",
        "It takes an offer of no kind of question for one of forms.",
        "elicitation capabilities",
        (
            "session",
            '_member(capabilities, "elicitation", "form")',
            '_member(capabilities, "elicitation")',
        ),
    ),
    mutant(
        "takes-anything-for-an-offer",
        "It takes a capability that makes no sense for an offer.",
        "capabilities",
        (
            "files",
            'self._can_read = offered.get("readTextFile") is True',
            'self._can_read = bool(offered.get("readTextFile"))',
        ),
        (
            "session",
            'capabilities.get("terminal") is True',
            'capabilities.get("terminal") is not None',
        ),
    ),
    mutant(
        "relative-fs-path",
        "It asks the client for a relative path.",
        "fs paths",
        (
            "files",
            'params = {"sessionId": self._session_id, "path": path}\n',
            'params = {"sessionId": self._session_id, "path": os.path.basename(path)}\n',
        ),
    ),
    mutant(
        "fs-line-zero",
        "It asks the client for the file from line 0 on.",
        "fs lines",
        (
            "files",
            'params = {"sessionId": self._session_id, "path": path}\n',
            'params = {"sessionId": self._session_id, "path": path, "line": 0}\n',
        ),
    ),
    mutant(
        "fs-negative-limit",
        "It asks the client for a negative number of lines.",
        "fs schema",
        (
            "files",
            'params = {"sessionId": self._session_id, "path": path}\n',
            'params = {"sessionId": self._session_id, "path": path, "limit": -1}\n',
        ),
    ),
    mutant(
        "client-error-ends-the-turn",
        "A file that the client cannot read makes the prompt fail.",
        "fs errors",
        (
            "files",
            "            raise ToolError(_one_line(error.message)) from None\n",
            "            raise\n",
        ),
    ),
    mutant(
        "needs-a-write-result",
        "It takes null for a failed write.",
        "fs hostile-client",
        (
            "files",
            '        await self._ask("fs/write_text_file", params)\n',
            '        if not isinstance(await self._ask("fs/write_text_file", params), dict):\n'
            '            raise ToolError("the client did not write it")\n',
        ),
    ),
    mutant(
        "dies-on-null-file",
        "It ends if the client answers null for a file.",
        "fs hostile-client robustness",
        (
            "files",
            'content = result.get("content") if isinstance(result, dict) else None',
            'content = result.get("content") if isinstance(result, dict) else os._exit(1)',
        ),
    ),
    mutant(
        "dies-on-null-permission",
        "It ends if the client answers null for a permission.",
        "permissions hostile-client robustness",
        (
            "permissions",
            'outcome = answer.get("outcome") if isinstance(answer, dict) else None',
            'outcome = answer.get("outcome") if isinstance(answer, dict) else __import__("os")._exit(1)',
        ),
    ),
    mutant(
        "breaks-on-decline",
        "A form that is declined makes the prompt fail.",
        "ELI-04 elicitation",
        (
            "tools",
            '        return Result("no answer was given")\n',
            '        raise ValueError("no answer was given")\n',
        ),
    ),
    mutant(
        "waits-for-forms",
        "A form that is dismissed keeps the turn for ever.",
        "ELI-02 elicitation",
        (
            "tools",
            '    content = result.get("content") if isinstance(result, dict) else None\n    text = content',
            '    if isinstance(result, dict) and result.get("action") == "cancel":\n'
            "        await session.loop.sleep(3600)\n"
            '    content = result.get("content") if isinstance(result, dict) else None\n    text = content',
        ),
    ),
    # --- terminals ------------------------------------------------------------------------------
    mutant(
        "keeps-terminals",
        "It never releases terminals.",
        "TER-01 terminals",
        (
            "shell",
            '        released = self._request("terminal/release")\n        await',
            "        released = Future()\n        released.set()\n        await",
        ),
    ),
    mutant(
        "keeps-terminals-on-cancel",
        "It leaves the terminal alone when the turn is cancelled.",
        "ACT-15 terminals cancel",
        (
            "shell",
            "    finally:\n        await terminal.release()\n",
            "    finally:\n        if terminal.has_ended:\n            await terminal.release()\n",
        ),
    ),
    mutant(
        "keeps-late-terminals",
        "A terminal that is made while the turn is being cancelled stays.",
        "TER-04 terminals cancel hostile-client",
        ("shell", "            self._session.loop.spawn(self._release_later())\n", ""),
    ),
    mutant(
        "waits-for-late-terminals",
        "A cancelled turn waits for ever for a client that does not make the terminal.",
        "terminals cancel hostile-client",
        ("shell", "CLIENT_LIMIT_S: Final = 2.0", "CLIENT_LIMIT_S: Final = 3600.0"),
    ),
    mutant(
        "shows-dead-terminals",
        "It puts a terminal into a tool call after it was released.",
        "TER-03 terminals tool-calls",
        (
            "shell",
            '        call.progress(content=[{"type": "terminal", "terminalId": terminal.terminal_id}])\n',
            "",
        ),
        (
            "shell",
            'call.finish(Result("", result.is_error), rawOutput=result.text)',
            'call.finish(Result("", result.is_error), content=['
            '{"type": "terminal", "terminalId": terminal.terminal_id}])',
        ),
    ),
    mutant(
        "shows-unknown-terminals",
        "It puts a terminal into a tool call that was never made.",
        "terminals tool-calls",
        (
            "shell",
            'call.progress(content=[{"type": "terminal", "terminalId": terminal.terminal_id}])',
            'call.progress(content=[{"type": "terminal", "terminalId": "t-0"}])',
        ),
    ),
    mutant(
        "uses-released-terminals",
        "It asks for the output of a terminal that it released.",
        "TER-02 terminals",
        (
            "shell",
            "    finally:\n        await terminal.release()\n",
            '    finally:\n        await terminal.release()\n        terminal._request("terminal/output")\n',
        ),
    ),
    mutant(
        "releases-twice",
        "It releases terminals twice.",
        "terminals",
        (
            "shell",
            "    finally:\n        await terminal.release()\n",
            "    finally:\n        await terminal.release()\n        await terminal.release()\n",
        ),
    ),
    mutant(
        "relative-terminal-cwd",
        "The folder of its terminals is relative.",
        "terminals paths",
        ("shell", '            "cwd": self._session.cwd,\n', '            "cwd": ".",\n'),
    ),
    # --- odd clients ----------------------------------------------------------------------------
    mutant(
        "fails-on-unknown-members",
        "It refuses params with members that it does not know.",
        "robustness extensions",
        (
            "methods",
            "            answer = method(checks.fields(params))\n",
            '            for key in ("_meta", "_future"):\n'
            "                if isinstance(params, dict) and params.get(key) is not None:\n"
            '                    raise checks.invalid(key, "is unknown")\n'
            "            answer = method(checks.fields(params))\n",
        ),
    ),
    mutant(
        "custom-methods",
        "It calls a method of its own at clients that do not know it.",
        "extensions jsonrpc",
        (
            "session",
            "        if self._model is not None:\n",
            '        self.connection.request("session/ping", {"sessionId": self.id})\n'
            "        if self._model is not None:\n",
        ),
    ),
)
