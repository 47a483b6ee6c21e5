"""Mutants that do wrong by their processes, their environment, and by secrets."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "lives-on-after-eof",
        "It goes on when its input ends.",
        "processes eof",
        (
            "rpc",
            "            self._take_line()  # the last line may have no end\n            return self.end()\n",
            "            return self._loop.unwatch(0)\n",
        ),
    ),
    mutant(
        "lives-on-after-term",
        "It ignores SIGTERM.",
        "processes term",
        (
            "methods",
            "self.loop.on_signal(signals.SIGTERM, self.connection.end)",
            "self.loop.on_signal(signals.SIGTERM, lambda: None)",
        ),
    ),
    mutant(
        "waits-for-turns-at-eof",
        "It ends when its turns have, not when its input does.",
        "processes eof",
        (
            "session",
            "    async def close(self) -> None:\n",
            "    async def close(self, is_patient: bool = False) -> None:\n",
        ),
        (
            "session",
            "        self.cancel()\n        if self._turns:\n",
            "        if not is_patient:\n            self.cancel()\n        if self._turns:\n",
        ),
        ("methods", "self.loop.spawn(session.close())", "self.loop.spawn(session.close(True))"),
        ("methods", "END_LIMIT_S: Final = 1.0", "END_LIMIT_S: Final = 3600.0"),
    ),
    mutant(
        "orphans-at-the-end",
        "It leaves its commands running when it ends.",
        "processes orphans",
        ("methods", "            self.loop.run(self.loop.spawn(self._close_all()))\n", ""),
        ("methods", "            _end_commands()\n", "            pass\n"),
    ),
    mutant(
        "orphans-of-commands",
        "What a command leaves running in the background stays.",
        "processes orphans",
        (
            "commands",
            "            self._loop.unwatch(fd)\n        await self.end()\n",
            "            self._loop.unwatch(fd)\n        self._take()\n        _running.discard(self)\n",
        ),
    ),
    mutant(
        "bad-exit-code",
        "It ends with an error although nothing went wrong.",
        "processes exit-code",
        (
            "methods",
            "            _end_commands()\n        return 0\n",
            "            _end_commands()\n        return 3\n",
        ),
    ),
    mutant(
        "crash-at-eof",
        "It ends with a traceback when its input ends.",
        "processes eof stderr",
        (
            "methods",
            '    def stop(self) -> None:\n        """End `serve`."""\n',
            "    def stop(self) -> None:\n        raise EOFError\n",
        ),
    ),
    mutant(
        "mcp-servers-stay",
        "MCP servers outlive their session.",
        "mcp processes",
        ("session", "        for server in self.servers:\n            await server.end()\n", ""),
    ),
    mutant(
        "floods-stderr",
        "It writes 300 KB to stderr in each turn, and waits until they are read.",
        "FRM-33 stderr",
        (
            "session",
            "        if self._model is not None:\n",
            '        __import__("os").write(2, b"x" * 300_000)\n        if self._model is not None:\n',
        ),
    ),
    mutant(
        "needs-home",
        "It does not start without HOME.",
        "processes environment",
        (
            "methods",
            '    home = os.environ.get("XDG_STATE_HOME")\n',
            '    home = os.environ["HOME"]\n',
        ),
        (
            "methods",
            '    if folder := os.environ.get("ACP_SELFTEST_STATE"):\n',
            '    if folder := os.environ["HOME"] and os.environ.get("ACP_SELFTEST_STATE"):\n',
        ),
    ),
    mutant(
        "spins",
        "It uses all of a processor while it waits.",
        "processes idle",
        (
            "loop",
            "        if self._ready or until.is_done:\n",
            "        if self._ready or until is not None:\n",
        ),
    ),
    mutant(
        "leaks-memory",
        "It keeps two megabytes of each turn.",
        "processes leaks",
        (
            "session",
            "        if self._model is not None:\n",
            '        self.connection.__dict__.setdefault("kept", []).append(b"x" * 2_000_000)\n'
            "        if self._model is not None:\n",
        ),
    ),
    mutant(
        "leaks-files",
        "It opens a file in each turn and does not close it.",
        "processes leaks",
        (
            "session",
            "        if self._model is not None:\n",
            '        __import__("os").dup(2)\n        if self._model is not None:\n',
        ),
    ),
    mutant(
        "slower-with-each-turn",
        "Each turn waits longer than the one before.",
        "processes latency leaks",
        (
            "session",
            "        if self._model is not None:\n",
            '        await self.loop.sleep(0.05 * sum("prompt" in each for each in self.log.events))\n'
            "        if self._model is not None:\n",
        ),
    ),
    # --- secrets and places ---------------------------------------------------------------------
    mutant(
        "secrets-on-stderr",
        "It shows its environment on stderr.",
        "security secrets stderr",
        (
            "methods",
            "        self._store = Store(_state_folder())\n",
            '        self._store = Store(_state_folder())\n        os.write(2, f"{dict(os.environ)}\\n".encode())\n',
        ),
    ),
    mutant(
        "secrets-in-updates",
        "It tells the client its environment.",
        "security secrets",
        (
            "session",
            "        if self._model is not None:\n",
            '        await self.think(str(dict(__import__("os").environ)))\n'
            "        if self._model is not None:\n",
        ),
    ),
    mutant(
        "reads-outside",
        "It reads files outside the folders of the session.",
        "security roots",
        (
            "files",
            '        raise ToolError("the path is outside the folders of this session")\n',
            "        return full\n",
        ),
    ),
    mutant(
        "follows-links-outside",
        "It follows links to outside the folders of the session.",
        "security roots links",
        ("files", "        real = os.path.realpath(full)\n", "        real = full\n"),
        ("files", "map(os.path.realpath, self._roots)", "self._roots"),
    ),
    mutant(
        "compares-paths-as-text",
        "A folder whose name begins like that of the session is inside for it.",
        "security roots",
        (
            "files",
            "            if os.path.commonpath([root, real]) == root:\n",
            "            if real.startswith(root):\n",
        ),
    ),
    mutant(
        "foreign-path-in-errors",
        "Its errors show where it keeps sessions.",
        "security errors",
        (
            "methods",
            '            raise RpcError(NOT_FOUND, "there is no such session", {"sessionId": session_id})\n'
            "        return log\n",
            '            raise RpcError(NOT_FOUND, f"no file {self._store._path(session_id)}", '
            '{"sessionId": session_id})\n        return log\n',
        ),
    ),
)
