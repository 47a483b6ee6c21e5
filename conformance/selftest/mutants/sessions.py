"""Mutants that break opening, listing and closing sessions, their modes and their options."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "takes-relative-cwd",
        "It opens a session in a folder that is not absolute.",
        "session-new errors",
        ("checks", 'if not path.startswith("/") or', "if"),
    ),
    mutant(
        "takes-broken-mcp-servers",
        "It takes an MCP server without a command.",
        "session-new mcp errors",
        (
            "checks",
            '    for key in ("name", "command"):\n        string(server, key, "mcpServers/")\n',
            "",
        ),
        (
            "mcp",
            "        for server in servers:\n",
            '        for server in (each for each in servers if "command" in each):\n',
        ),
    ),
    mutant(
        "starts-no-mcp-servers",
        "It takes MCP servers and never starts them.",
        "mcp",
        ("methods", "        if servers:\n", "        if not servers and servers is None:\n"),
    ),
    mutant(
        "fails-without-mcp-server",
        "It never answers session/new if an MCP server cannot be started.",
        "mcp session-new",
        (
            "mcp",
            "            except (OSError, ValueError):\n                continue\n",
            "            except (OSError, ValueError):\n                await loop.sleep(3600)\n                continue\n",
        ),
    ),
    mutant(
        "new-waits-for-turns",
        "It opens no session while a turn runs in another.",
        "session-new concurrency",
        (
            "methods",
            "        session = self._make(session_id, log, directories)\n        try:\n",
            "        session = self._make(session_id, log, directories)\n"
            "        while any(each._turns for each in self._sessions.values()):\n"
            "            await self.loop.sleep(0.05)\n        try:\n",
        ),
    ),
    mutant(
        "speaks-before-new",
        "It tells the commands of a session before the client knows the session.",
        "session-new updates order",
        ("methods", "        self._fresh = session\n", "        session.announce()\n"),
    ),
    mutant(
        "takes-unknown-sessions",
        "A prompt for an unknown session goes to another one.",
        "unknown-session errors",
        (
            "methods",
            "        session = self._sessions.get(session_id)\n        if session is None:\n            raise",
            "        session = self._sessions.get(session_id, *list(self._sessions.values())[-1:])\n"
            "        if session is None:\n            raise",
        ),
    ),
    mutant(
        "silent-on-unknown-sessions",
        "It does not answer a prompt for an unknown session.",
        "unknown-session errors",
        (
            "methods",
            "                return self._take_prompt(request)\n",
            '                if checks.fields(request.params).get("sessionId") in self._sessions:\n'
            "                    self._take_prompt(request)\n                return None\n",
        ),
    ),
    mutant(
        "unknown-session-is-internal",
        "The code for an unknown session is that of an internal error.",
        "unknown-session errors codes",
        ("methods", "NOT_FOUND: Final = -32002", "NOT_FOUND: Final = -32603"),
    ),
    mutant(
        "loads-unknown-sessions",
        "It loads a session that never was.",
        "load unknown-session errors",
        (
            "methods",
            "        log = self._store.open(session_id)\n",
            "        log = self._store.open(session_id)\n        if log is None:\n"
            '            log = self._store.create(params["cwd"], [], [])[1]\n',
        ),
    ),
    mutant(
        "same-folder-for-all",
        "Relative paths start from where it was started, not from the folder of the session.",
        "SES-07 session-new cwd",
        ("files", "os.path.join(self._roots[0], path)", "os.path.join(os.getcwd(), path)"),
        ("files", "for root in map(os.path.realpath, self._roots)", 'for root in ("/",)'),
        ("shell", "arguments, call.session.cwd)", 'arguments, ".")'),
    ),
    mutant(
        "load-tells-the-id",
        "Its answer to session/load has a session id, which is none of its members.",
        "load schema extensions",
        (
            "methods",
            '    return {key: value for key, value in result.items() if key != "sessionId"}',
            "    return result",
        ),
    ),
    # --- the list -------------------------------------------------------------------------------
    mutant(
        "list-ignores-filter",
        "Its list shows the sessions of all folders.",
        "list",
        ("listing", "if cwd is None or each.cwd == cwd]", "if each.cwd]"),
    ),
    mutant(
        "list-without-folders",
        "Its list does not say where a session works.",
        "list schema",
        (
            "listing",
            '{"sessionId": each.session_id, "cwd": each.cwd, ',
            '{"sessionId": each.session_id, ',
        ),
    ),
    mutant(
        "null-for-empty-list",
        "Its list is null if there is nothing to show.",
        "list schema",
        (
            "listing",
            '        return {"sessions": page}\n',
            '        return {"sessions": page or None}\n',
        ),
    ),
    mutant(
        "list-never-ends",
        "It ignores cursors, so that its list never ends.",
        "list cursor",
        ("listing", "    if last is not None:\n", "    if last is not None and not page_of:\n"),
    ),
    mutant(
        "list-shows-some-twice",
        "The last session of a page is the first of the next.",
        "list cursor",
        ("listing", "each.session_id) < last", "each.session_id) <= last"),
    ),
    mutant(
        "list-loses-some",
        "It drops a session between two pages.",
        "list cursor",
        (
            "listing",
            "    last_shown = found[PAGE_SESSIONS - 1]\n",
            "    last_shown = found[PAGE_SESSIONS]\n",
        ),
    ),
    mutant(
        "takes-any-cursor",
        "It takes a cursor that it did not give out for none.",
        "list cursor errors",
        (
            "listing",
            '    raise checks.invalid("cursor", "was not given out here")',
            '    return float("inf"), ""',
        ),
    ),
    mutant(
        "list-speaks",
        "Listing sessions makes it tell something about them.",
        "list side-effects",
        (
            "methods",
            "        return page_of(",
            "        for session in self._sessions.values():\n            session.announce()\n"
            "        return page_of(",
        ),
    ),
    # --- closing and deleting -------------------------------------------------------------------
    mutant(
        "close-leaves-the-turn",
        "After a close the turn runs on.",
        "close",
        (
            "methods",
            "            await session.close()\n            return {}\n",
            "            return {}\n",
        ),
    ),
    mutant(
        "close-forgets-the-prompt",
        "A prompt that runs when its session is closed is never answered.",
        "close answered-once",
        (
            "methods",
            "            await session.close()\n            return {}\n",
            "            for turn in session._turns:\n                turn.request.is_answered = True\n"
            "            await session.close()\n            return {}\n",
        ),
    ),
    mutant(
        "closed-sessions-live",
        "A closed session still takes prompts.",
        "close unknown-session",
        ("methods", "        del self._sessions[session.id]\n", ""),
        ("session", "        self.log.close()\n", ""),
    ),
    mutant(
        "deleted-sessions-stay",
        "A deleted session stays in the list.",
        "delete list",
        (
            "methods",
            "        self._store.delete(session_id)\n        session =",
            "        session =",
        ),
    ),
    mutant(
        "delete-knows-strangers",
        "To delete a session that is not there is an error.",
        "delete errors",
        (
            "methods",
            "return {} if session is None else self._close(session)",
            "return self._close(self._session(params))",
        ),
    ),
    # --- modes and options ----------------------------------------------------------------------
    mutant(
        "takes-unknown-modes",
        "It takes a mode that it did not offer.",
        "modes errors",
        ("methods", "        if mode not in MODES:\n", "        if not mode:\n"),
    ),
    mutant(
        "mode-outside-the-list",
        "The mode it is in is none of those it offers.",
        "modes",
        (
            "session",
            '{"currentModeId": self.permissions.mode, "avail',
            '{"currentModeId": "code", "avail',
        ),
    ),
    mutant(
        "mode-in-vain",
        "It answers a change of mode and stays in the old one.",
        "modes",
        ("methods", "        session.set_mode(mode)\n", ""),
    ),
    mutant(
        "mode-and-option-apart",
        "The option for the mode does not follow the mode.",
        "modes config sync",
        (
            "options",
            '                "currentValue": mode,\n',
            '                "currentValue": "ask",\n',
        ),
    ),
    mutant(
        "old-mode-key",
        "Its updates of the mode have an old name for it.",
        "modes schema",
        ("session", '"currentModeId": mode}', '"modeId": mode}'),
    ),
    mutant(
        "partial-options",
        "Its answer to a change of an option has that option alone.",
        "config",
        (
            "methods",
            'return {"configOptions": session.options.shown(session.permissions.mode)}',
            "options = session.options.shown(session.permissions.mode)\n"
            '        return {"configOptions": [each for each in options if each["id"] == key]}',
        ),
    ),
    mutant(
        "option-in-vain",
        "It answers a change of an option and keeps the old value.",
        "config",
        ("session", "            self.options.values[key] = value\n", ""),
    ),
    mutant(
        "takes-any-value",
        "It takes a value that is none of an option's choices.",
        "config errors",
        (
            "options",
            "if not isinstance(value, str) or value not in choices:",
            "if not isinstance(value, str):",
        ),
    ),
    mutant(
        "takes-unknown-options",
        "It takes an option that it did not offer.",
        "config errors",
        (
            "options",
            '            raise invalid("configId", "there is no such option")\n',
            "            return str(value)\n",
        ),
    ),
    mutant(
        "switch-uninvited",
        "It shows a switch to clients that take none.",
        "CFG-07 config capabilities",
        ("session", "has_booleans=isinstance(has_switches, dict)", "has_booleans=True"),
    ),
    mutant(
        "value-outside-the-choices",
        "The value of one of its options is none of the choices.",
        "config",
        ("options", '{"model": "selftest-small", "aloud"', '{"model": "selftest-tiny", "aloud"'),
    ),
    mutant(
        "plain-folders-only",
        "It opens no session in a folder with a space or a letter beyond ASCII in its name.",
        "SES-06 session-new cwd",
        (
            "checks",
            '    if not path.startswith("/") or "\\0" in path:\n',
            '    if not path.startswith("/") or not path.isascii() or " " in path:\n',
        ),
    ),
    mutant(
        "offers-folders-in-vain",
        "It offers to take more folders and refuses them.",
        "SES-12 session-new capabilities",
        (
            "checks",
            "    return [absolute({key: path}, key) for path in _items(value, key)]\n",
            '    if _items(value, key):\n        raise invalid(key, "one is enough")\n    return []\n',
        ),
    ),
    mutant(
        "meta-is-wrong",
        "It refuses params with _meta.",
        "SES-14 session-new extensions",
        (
            "methods",
            "            answer = method(checks.fields(params))\n",
            '            if "_meta" in checks.fields(params) and request.method != "initialize":\n'
            '                raise checks.invalid("_meta", "is unknown")\n'
            "            answer = method(checks.fields(params))\n",
        ),
    ),
    mutant(
        "mcp-servers-without-environment",
        "It starts MCP servers without the environment that the client gave for them.",
        "SES-37 mcp",
        (
            "mcp",
            'env = {each["name"]: each["value"] for each in server.get("env") or []}',
            "env: dict[str, str] = {}",
        ),
    ),
    mutant(
        "closes-busy-sessions-only",
        "It answers the close of a session that does nothing with an error.",
        "SES-29 close",
        (
            "methods",
            "        return self._close(self._session(params))\n",
            "        if not self._session(params)._turns:\n"
            '            raise RpcError(INVALID_REQUEST, "it does nothing")\n'
            "        return self._close(self._session(params))\n",
        ),
    ),
    mutant(
        "one-mode-in-vain",
        "One of the modes that it offers cannot be set.",
        "CFG-02 modes",
        (
            "methods",
            "        if mode not in MODES:\n",
            '        if mode not in MODES or mode == "read":\n',
        ),
    ),
    mutant(
        "empty-session-ids",
        "The answer to session/new has an empty id.",
        "SES-01 session-new",
        (
            "methods",
            'return {"sessionId": session.id, **session.state()}',
            'return {"sessionId": "", **session.state()}',
        ),
    ),
)
