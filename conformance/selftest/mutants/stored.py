"""Mutants that break what is left of a session: loading, resuming, and what outlives a process."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "constant-session-id",
        "All its sessions have the same id.",
        "session-new ids",
        ("store", "        session_id = new_id()\n", '        session_id = "session1"\n'),
        (
            "store",
            '        with open(draft, "xb") as file:\n',
            '        with open(draft, "wb") as file:\n',
        ),
    ),
    mutant(
        "load-replays-nothing",
        "It loads a session and does not tell what was said.",
        "load replay",
        ("methods", "        await session.replay()\n", ""),
    ),
    mutant(
        "load-drops-user-messages",
        "Its replay leaves out what the user said.",
        "load replay",
        (
            "session",
            '            for block in event.get("prompt", ()):\n',
            "            for block in ():\n",
        ),
    ),
    mutant(
        "load-drops-tool-content",
        "Its replay leaves out what came of tool calls.",
        "load replay tool-calls",
        (
            "session",
            '                self._tell(event["update"])\n',
            '                update = dict(event["update"])\n'
            '                if "toolCallId" in update:\n'
            '                    update.pop("content", None)\n'
            "                self._tell(update)\n",
        ),
    ),
    mutant(
        "load-drops-tool-calls",
        "Its replay leaves out tool calls.",
        "load replay tool-calls",
        (
            "session",
            '            if "update" in event:\n',
            '            if "toolCallId" not in event.get("update", {"toolCallId": ""}):\n',
        ),
    ),
    mutant(
        "load-drops-the-last-turn",
        "Its replay leaves out the last turn.",
        "load replay",
        (
            "session",
            "        for event in list(self.log.events):\n",
            '        prompts = [n for n, each in enumerate(self.log.events) if "prompt" in each]\n'
            "        for event in self.log.events[: (prompts or [0])[-1]]:\n",
        ),
    ),
    mutant(
        "load-mixes-the-order",
        "Its replay tells all prompts first and all answers then.",
        "load replay order",
        (
            "session",
            "        for event in list(self.log.events):\n",
            '        for event in sorted(self.log.events, key=lambda each: "prompt" not in each):\n',
        ),
    ),
    mutant(
        "replay-after-the-answer",
        "It answers session/load and tells the conversation then.",
        "load replay order",
        (
            "methods",
            "        await session.replay()\n        return",
            "        self.loop.spawn(session.replay())\n        return",
        ),
    ),
    mutant(
        "resume-replays",
        "It tells the conversation again on session/resume.",
        "resume replay",
        (
            "methods",
            "        session, servers = self._open(params, is_required=False)\n",
            "        session, servers = self._open(params, is_required=False)\n"
            "        await session.replay()\n",
        ),
    ),
    mutant(
        "forgets-when-killed",
        "Its sessions end with its process.",
        "persistence",
        (
            "methods",
            "return os.path.abspath(folder)",
            'return f"{os.path.abspath(folder)}-{os.getpid()}"',
        ),
        (
            "methods",
            'f"acp-selftest-{os.getuid()}")',
            'f"acp-selftest-{os.getuid()}-{os.getpid()}")',
        ),
    ),
    mutant(
        "writes-at-the-end",
        "It writes a turn down when it has ended, not as it goes.",
        "persistence",
        (
            "store",
            "        os.write(self._fd, _line(event))\n",
            '        self._late = getattr(self, "_late", b"") + _line(event)\n'
            '        if "end" in event:\n'
            "            os.write(self._fd, self._late)\n"
            '            self._late = b""\n',
        ),
    ),
    mutant(
        "writes-at-exit",
        "It writes sessions down when it ends in peace.",
        "persistence",
        (
            "store",
            "        os.write(self._fd, _line(event))\n",
            '        self._late = getattr(self, "_late", b"") + _line(event)\n',
        ),
        (
            "store",
            "        os.close(self._fd)\n",
            '        os.write(self._fd, getattr(self, "_late", b""))\n        os.close(self._fd)\n',
        ),
    ),
    mutant(
        "spoilt-session-breaks-the-list",
        "A session that is spoilt makes the list fail.",
        "persistence list corrupt",
        ("store", "FileNotFoundError, ValueError):", "FileNotFoundError):"),
    ),
    mutant(
        "forgets-the-mode",
        "A session that is loaded is in the first mode again.",
        "persistence modes",
        (
            "session",
            '                self.permissions.mode = event["mode"]\n',
            "                pass\n",
        ),
    ),
    mutant(
        "open-calls-stay-open",
        "A tool call that ran when the process was killed is still running in the replay.",
        "persistence tool-calls replay",
        ("session", '            self.log.append({"update": ended})\n', "            pass\n"),
    ),
    mutant(
        "reads-any-file-as-session",
        "A session id can be a path to elsewhere.",
        "security load",
        (
            "store",
            "        if not session_id.isalnum():\n            return None\n",
            "",
        ),
    ),
    mutant(
        "loaded-sessions-take-nothing",
        "A session that was loaded takes no prompts.",
        "STO-12 load next-turn",
        (
            "methods",
            "        return _without_id(await self._activate(session, servers))\n\n    async def resume_session",
            "        result = _without_id(await self._activate(session, servers))\n"
            "        del self._sessions[session.id]\n"
            "        return result\n\n    async def resume_session",
        ),
    ),
    mutant(
        "resumed-sessions-take-nothing",
        "A session that was resumed takes no prompts.",
        "STO-15 resume next-turn",
        (
            "methods",
            "        return _without_id(await self._activate(session, servers))\n\n    async def fork_session",
            "        result = _without_id(await self._activate(session, servers))\n"
            "        del self._sessions[session.id]\n"
            "        return result\n\n    async def fork_session",
        ),
    ),
)
