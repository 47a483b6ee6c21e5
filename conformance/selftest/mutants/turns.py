"""Mutants that break turns: what is told, how they end, and what is taken in."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "says-nothing",
        "It never tells what it says.",
        "updates",
        (
            "session",
            '        self.update({"sessionUpdate": kind, "content": content, '
            '"messageId": self._message_id})\n',
            "",
        ),
    ),
    mutant(
        "own-stop-reason",
        "It ends turns for a reason that the protocol does not have.",
        "prompt stop-reason schema",
        (
            "words",
            '            break\n    return "end_turn"\n',
            '            break\n    return "done"\n',
        ),
    ),
    mutant(
        "no-stop-reason",
        "Its answer to a prompt has no stop reason.",
        "PRM-01 prompt stop-reason schema",
        ("session", 'answer({"stopReason": reason})', "answer({})"),
    ),
    mutant(
        "camel-case",
        "It names its updates in camel case.",
        "updates schema",
        (
            "session",
            'self._speak("agent_message_chunk", text)',
            'self._speak("agentMessageChunk", text)',
        ),
    ),
    mutant(
        "string-content",
        "The content of its messages is a string.",
        "updates schema content",
        (
            "session",
            '        content = {"type": "text", "text": text}\n',
            "        content = text\n",
        ),
        ("session", "        blocks.append(content)\n", "        pass\n"),
    ),
    mutant(
        "wrong-session",
        "What it says in the second session goes to the first.",
        "SES-15 updates isolation",
        (
            "session",
            '        self.connection.notify("session/update", {"sessionId": self.id, "update": update})\n',
            '        self.connection.first = getattr(self.connection, "first", self.id)\n'
            '        params = {"sessionId": self.connection.first, "update": update}\n'
            '        self.connection.notify("session/update", params)\n',
        ),
    ),
    mutant(
        "speaks-after-the-answer",
        "It says one thing more after the answer to the prompt.",
        "updates order",
        (
            "session",
            "        if self._turns:\n            self._start()\n",
            '        chunk = {"type": "text", "text": "Bye."}\n'
            '        self._tell({"sessionUpdate": "agent_message_chunk", "content": chunk})\n'
            "        if self._turns:\n            self._start()\n",
        ),
    ),
    mutant(
        "one-turn-for-all",
        "A prompt waits until the turns of other sessions have ended.",
        "concurrency isolation",
        (
            "session",
            "    async def _play(self, turn: Turn) -> str:\n",
            "    async def _play(self, turn: Turn) -> str:\n"
            "        key = new_id()\n"
            '        busy = self.connection.__dict__.setdefault("busy", [])\n'
            "        busy.append(key)\n"
            "        try:\n"
            "            while busy[0] != key:\n"
            "                await self.loop.sleep(0.01)\n"
            "            return await self._play_alone(turn)\n"
            "        finally:\n"
            "            busy.remove(key)\n\n"
            "    async def _play_alone(self, turn: Turn) -> str:\n",
        ),
    ),
    mutant(
        "drops-queued-prompts",
        "A prompt that comes while another runs is never answered.",
        "queue answered-once",
        (
            "session",
            "        self._turns.append(turn)\n",
            "        if self._turns:\n            return\n        self._turns.append(turn)\n",
        ),
    ),
    mutant(
        "dead-after-the-first-turn",
        "The second prompt of a session is never answered.",
        "PRM-10 prompt answered-once",
        ("session", "        self._turns.popleft()\n", "        self.is_used = True\n"),
        (
            "session",
            "        if self._turns:\n            self._start()\n        else:\n",
            "        if True:\n",
        ),
    ),
    mutant(
        "ends-with-an-error",
        "It answers a refusal with an error.",
        "MOD-04 model prompt stop-reason errors",
        ("model", '                return "refusal"\n', '                raise ValueError("no")\n'),
    ),
    mutant(
        "mangles-text",
        "Characters outside ASCII get lost in what it reads.",
        "content utf-8",
        (
            "session",
            "play(turn.text, self",
            'play(turn.text.encode("ascii", "replace").decode(), self',
        ),
    ),
    mutant(
        "cuts-long-prompts",
        "It never answers a prompt of more than 100000 characters.",
        "robustness long-prompt",
        (
            "session",
            "        if self._model is not None:\n",
            "        if len(turn.text) > 100_000:\n            await Future()\n"
            "        if self._model is not None:\n",
        ),
    ),
    mutant(
        "offers-images-in-vain",
        "It offers to take images and refuses them.",
        "content capabilities",
        ("checks", '_NEEDS: Final = {"image": "image",', '_NEEDS: Final = {"image": "audio",'),
    ),
    mutant(
        "offers-resources-in-vain",
        "It offers to take resources and refuses them.",
        "content capabilities",
        ("checks", '"resource": "embeddedContext"}', '"resource": "audio"}'),
    ),
    mutant(
        "refuses-links",
        "It refuses links to resources, which every agent must take.",
        "content",
        ("checks", '    "resource_link": ("uri", "name"),\n', ""),
    ),
    mutant(
        "takes-what-it-does-not-offer",
        "It takes audio, which it did not offer.",
        "content capabilities errors",
        (
            "checks",
            '        raise invalid(f"{path}type", "is a kind of content that was not offered")\n',
            "        pass\n",
        ),
    ),
    mutant(
        "takes-unknown-content",
        "It takes content of a kind that there is not.",
        "content errors",
        (
            "checks",
            "    if kind not in _BLOCKS:\n        raise",
            '    if kind not in _BLOCKS:\n        return {"type": "text", "text": ""}\n        raise',
        ),
    ),
    mutant(
        "new-id-for-each-chunk",
        "Each part of a message has another message id.",
        "updates message-id",
        ("session", "        if self._message_kind != kind:\n", "        if kind:\n"),
    ),
    mutant(
        "one-id-for-all-messages",
        "All messages of a session have the same id.",
        "updates message-id",
        (
            "session",
            "self._message_kind, self._message_id = kind, new_id()",
            'self._message_kind, self._message_id = kind, "message"',
        ),
    ),
    mutant(
        "partial-plans",
        "Its plan updates show the entry under way alone.",
        "plan",
        ("session", '"entries": shown})', '"entries": shown[n_done : n_done + 1]})'),
    ),
    mutant(
        "own-plan-status",
        "Its plans have a status that the protocol does not have.",
        "plan schema",
        ("session", '["completed"] * n_done', '["done"] * n_done'),
    ),
    mutant(
        "negative-usage",
        "It used less than nothing.",
        "usage schema",
        ("session", '"used": min(used, CONTEXT_TOKENS)', '"used": -used'),
    ),
    mutant(
        "cost-goes-down",
        "What a session cost gets less with each turn.",
        "usage",
        ("session", "round(used * DOLLARS_PER_TOKEN, 6)", "round(1 / used, 6)"),
    ),
    mutant(
        "slash-in-commands",
        "The names of its commands begin with a slash.",
        "commands",
        (
            "session",
            '{"name": name, "description": description, "input"',
            '{"name": f"/{name}", "description": description, "input"',
        ),
    ),
    mutant(
        "own-update",
        "It tells a kind of update that the protocol does not have.",
        "updates schema extensions",
        (
            "session",
            '"sessionUpdate": "session_info_update", "title"',
            '"sessionUpdate": "title_update", "title"',
        ),
    ),
    mutant(
        "own-members",
        "Its updates have a member that is none of the protocol's.",
        "updates extensions",
        (
            "session",
            '"messageId": self._message_id})\n',
            '"messageId": self._message_id, "agent": "me"})\n',
        ),
    ),
    mutant(
        "notices-uninvited",
        "It tells notices to clients that did not ask for them.",
        "updates capabilities",
        (
            "session",
            "        if self._model is not None:\n",
            '        self._tell({"sessionUpdate": "notice", "severity": "info", "title": "Hi"})\n'
            "        if self._model is not None:\n",
        ),
    ),
    mutant(
        "offers-sound-in-vain",
        "It offers to take sound and refuses it.",
        "PRM-04 content capabilities",
        ("checks", '"image": True, "audio": False,', '"image": True, "audio": True,'),
        ("checks", '"audio": "audio", "resource"', '"audio": "no", "resource"'),
        (
            "checks",
            "not PROMPT_CAPABILITIES[_NEEDS[kind]]",
            "not PROMPT_CAPABILITIES.get(_NEEDS[kind])",
        ),
    ),
    mutant(
        "plain-letters-only",
        "A prompt with characters beyond 16 bits makes it fail.",
        "PRM-14 content utf-8",
        (
            "checks",
            "        string(block, key, path)\n",
            '        if max(string(block, key, path), default="") > "\\uffff":\n'
            '            raise invalid(path + key, "has letters that nobody knows")\n',
        ),
    ),
    mutant(
        "meta-in-prompts-is-wrong",
        "It refuses content with _meta.",
        "PRM-17 content extensions",
        (
            "checks",
            "    if kind not in _BLOCKS:\n        raise",
            '    if kind not in _BLOCKS or "_meta" in block:\n        raise',
        ),
    ),
    mutant(
        "updates-for-nobody",
        "It tells the title of a session under another id.",
        "UPD-01 updates",
        (
            "session",
            '            self.update({"sessionUpdate": "session_info_update", "title": title}, is_kept=False)\n',
            '            shown = {"sessionUpdate": "session_info_update", "title": title}\n'
            '            params = {"sessionId": f"{self.id}-title", "update": shown}\n'
            '            self.connection.notify("session/update", params)\n',
        ),
    ),
)
