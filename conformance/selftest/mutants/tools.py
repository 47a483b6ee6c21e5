"""Mutants that break tool calls and permissions."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "unknown-call",
        "It updates tool calls that it never announced.",
        "tool-calls",
        (
            "tools",
            '        self.session.update({"sessionUpdate": "tool_call", **self.shown(locations)})\n',
            "",
        ),
    ),
    mutant(
        "announces-twice",
        "It announces a tool call again when it starts.",
        "tool-calls",
        (
            "tools",
            "        call.progress()\n",
            "        call.announce(locations)\n        call.progress()\n",
        ),
    ),
    mutant(
        "never-final",
        "Its tool calls never come to an end.",
        "tool-calls final-status",
        (
            "tools",
            '        status = "failed" if result.is_error else "completed"\n',
            '        status = "in_progress"\n',
        ),
    ),
    mutant(
        "no-end-at-all",
        "It never tells that a tool call has ended.",
        "tool-calls final-status",
        ("tools", '        self._change({"status": status, **changes})\n', ""),
    ),
    mutant(
        "backwards",
        "A tool call that has ended runs again.",
        "tool-calls status-order",
        (
            "tools",
            '        self._change({"status": status, **changes})\n',
            '        self._change({"status": status, **changes})\n'
            '        self._change({"status": "in_progress"})\n'
            '        self._change({"status": status})\n',
        ),
    ),
    mutant(
        "update-after-final",
        "It changes a tool call that has ended.",
        "tool-calls status-order",
        (
            "tools",
            '        self._change({"status": status, **changes})\n',
            '        self._change({"status": status, **changes})\n'
            '        self._change({"title": "Done"})\n',
        ),
    ),
    mutant(
        "ends-after-the-answer",
        "It tells the end of a tool call after the answer to the prompt.",
        "TUL-06 tool-calls final-status updates order",
        (
            "tools",
            '        self._change({"status": status, **changes})\n',
            "        loop = self.session.loop\n"
            "        later = loop.sleep(0.05)\n"
            '        later.watch(lambda: self._change({"status": status, **changes}))\n',
        ),
    ),
    mutant(
        "no-title",
        "Its tool calls have no title.",
        "tool-calls schema",
        (
            "tools",
            '            "title": " ".join(f"{self.name} {subject}".split())[:TITLE_CHARS],\n',
            "",
        ),
    ),
    mutant(
        "empty-title",
        "The title of its tool calls is empty.",
        "tool-calls title",
        (
            "tools",
            '"title": " ".join(f"{self.name} {subject}".split())[:TITLE_CHARS]',
            '"title": ""',
        ),
    ),
    mutant(
        "own-call-status",
        "Its tool calls end in a status that the protocol does not have.",
        "tool-calls schema",
        (
            "tools",
            '"failed" if result.is_error else "completed"',
            '"error" if result.is_error else "done"',
        ),
    ),
    mutant(
        "own-call-kind",
        "Its tool calls are of a kind that the protocol does not have.",
        "tool-calls schema",
        ("tools", '    "run": "execute",\n', '    "run": "shell",\n'),
    ),
    mutant(
        "same-call-id",
        "All its tool calls have the same id.",
        "tool-calls ids",
        ("tools", 'f"call-{new_id()}"', '"call-1"'),
    ),
    mutant(
        "relative-location",
        "The places of its tool calls are relative.",
        "tool-calls paths",
        ("tools", '[{"path": path, "line": 1}]', '[{"path": os.path.basename(path), "line": 1}]'),
    ),
    mutant(
        "line-zero",
        "It counts lines from 0.",
        "tool-calls paths lines",
        ("tools", '[{"path": path, "line": 1}]', '[{"path": path, "line": 0}]'),
    ),
    mutant(
        "relative-diff",
        "The path of its diffs is relative.",
        "tool-calls paths diff",
        (
            "tools",
            '{"type": "diff", "path": path, ',
            '{"type": "diff", "path": os.path.basename(path), ',
        ),
    ),
    mutant(
        "bare-content",
        "The content of its tool calls is not wrapped.",
        "tool-calls schema content",
        (
            "tools",
            '    return {"type": "content", "content": {"type": "text", "text": text}}',
            '    return {"type": "text", "text": text}',
        ),
    ),
    mutant(
        "skips-running",
        "It does not tell that a tool call runs.",
        "tool-calls status-order",
        ("tools", "        call.progress()\n", ""),
    ),
    mutant(
        "runs-before-it-may",
        "It tells that a tool call runs while it still asks for permission.",
        "tool-calls permissions status-order",
        (
            "tools",
            "        if name in _ASKED and not",
            "        call.progress()\n        if name in _ASKED and not",
        ),
    ),
    mutant(
        "tool-error-ends-the-session",
        "A tool that fails makes the prompt fail.",
        "tool-calls errors",
        (
            "tools",
            "    except ToolError as error:\n        result = Result(str(error), is_error=True)\n    except BaseException",
            "    except ToolError as error:\n"
            "        call.finish(Result(str(error), is_error=True))\n"
            '        raise RpcError(-32603, "a tool failed") from None\n    except BaseException',
        ),
    ),
    # --- permissions ----------------------------------------------------------------------------
    mutant(
        "never-asks",
        "It runs commands and writes files without asking.",
        "permissions security",
        ("tools", '_ASKED: Final = ("write", "edit", "run")', "_ASKED: Final = ()"),
    ),
    mutant(
        "commands-without-asking",
        "It runs commands without asking.",
        "permissions security",
        ("tools", '_ASKED: Final = ("write", "edit", "run")', '_ASKED: Final = ("write", "edit")'),
    ),
    mutant(
        "ignores-reject",
        "It goes on after a rejection.",
        "permissions",
        ("permissions", 'return kind in ("allow_once", "allow_always")', "return kind is not None"),
    ),
    mutant(
        "takes-unknown-option-for-yes",
        "An option that it did not offer is an approval.",
        "permissions hostile-client",
        ("permissions", "return KINDS.get(option_id)", 'return KINDS.get(option_id, "allow_once")'),
    ),
    mutant(
        "takes-nonsense-for-yes",
        "An answer that makes no sense is an approval.",
        "permissions hostile-client",
        (
            "permissions",
            "    if not isinstance(outcome, dict):\n        return None\n",
            '    if not isinstance(outcome, dict):\n        return "allow_once"\n',
        ),
        (
            "permissions",
            "not isinstance(option_id, str):\n        return None\n",
            'not isinstance(option_id, str):\n        return "allow_once"\n',
        ),
    ),
    mutant(
        "takes-error-for-yes",
        "An error in the place of an answer is an approval.",
        "permissions hostile-client",
        (
            "permissions",
            "        except RpcError:\n            return False\n",
            "        except RpcError:\n            return True\n",
        ),
    ),
    mutant(
        "takes-cancelled-for-yes",
        "It runs the tool if the question was answered as cancelled.",
        "permissions",
        ("permissions", '            raise TurnEnded("cancelled")\n', "            return True\n"),
    ),
    mutant(
        "acts-before-the-answer",
        "It writes files before it is allowed to.",
        "PER-10 permissions security",
        (
            "tools",
            "        if name in _ASKED and not",
            '        if name == "write" and session.permissions.mode == "ask":\n'
            '            await session.files.write(path or "", arguments["content"])\n'
            "        if name in _ASKED and not",
        ),
    ),
    mutant(
        "no-options",
        "Its questions have no options.",
        "permissions options",
        (
            "permissions",
            '[{"optionId": key, "name": name, "kind": kind} for key, name, kind in OPTIONS]',
            "[]",
        ),
    ),
    mutant(
        "same-option-twice",
        "Two options of its questions have the same id.",
        "permissions options ids",
        ("permissions", '    ("always", "Always allow"', '    ("allow", "Always allow"'),
    ),
    mutant(
        "own-option-kind",
        "An option of its questions is of a kind that the protocol does not have.",
        "permissions options schema",
        ("permissions", '"kind": kind} for', '"kind": kind.removesuffix("_once")} for'),
    ),
    mutant(
        "asks-about-another-call",
        "Its questions are about a tool call that it never announced.",
        "permissions tool-calls",
        ("permissions", '"toolCall": call, ', '"toolCall": {**call, "toolCallId": "call-x"}, '),
    ),
    mutant(
        "asks-in-another-session",
        "Its questions name a session that is not there.",
        "permissions isolation",
        (
            "permissions",
            'params = {"sessionId": self._session_id,',
            'params = {"sessionId": "another",',
        ),
    ),
    mutant(
        "forgets-always",
        "It asks again after it was always allowed.",
        "permissions",
        ("permissions", "        if subject in self._decided:\n", "        if subject in ():\n"),
    ),
    mutant(
        "once-is-always",
        "What was allowed once is always allowed.",
        "PER-16 permissions",
        (
            "permissions",
            'if kind in ("allow_always", "reject_always"):',
            'if kind in ("allow_once", "allow_always"):',
        ),
        (
            "permissions",
            'self._decided[subject] = kind == "allow_always"',
            "self._decided[subject] = True",
        ),
    ),
    mutant(
        "commands-start-elsewhere",
        "Its commands start where it was started, not in the folder of the session.",
        "ACT-01 tool-calls cwd",
        (
            "shell",
            "Command(call.session.loop, arguments, call.session.cwd)",
            'Command(call.session.loop, arguments, ".")',
        ),
    ),
)
