"""Real clients, played by what `conformance.profiles` knows of them: a scenario for each."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

from conformance.client import Client
from conformance.commands import Sleeper
from conformance.editor import Editor
from conformance.moments import answer_of, asleep, first_chunk, question
from conformance.profiles import Profile, profiles, scenario_name
from conformance.scenarios import scenario
from conformance.steps import needs_entry, offers
from conformance.stopping import NATURAL
from conformance.trace import Message
from conformance.trial import Check, NotBroughtAbout, Trial
from conformance.wire import Body, Wire

NULL: Final = Body({"result": None})
WAYS_BACK: Final = ("session/resume", "session/load")


class _Player:
    """One client with its habits, on an agent that it starts."""

    def __init__(self, trial: Trial, profile: Profile, it: Check) -> None:
        self.trial: Final = trial
        self.profile: Final = profile
        self.it: Final = it
        self.session_id = ""
        self.client: Client
        self._n_asked = 0

    @property
    def wire(self) -> Wire:
        """The agent."""
        return self.client.wire

    async def start(self) -> None:
        """Start the agent and say the first words."""
        profile = self.profile
        self.client = Client(await self.trial.wire(is_bare=profile.is_bare), permission="allow")
        opened = await self.result("initialize", profile.initialize)
        version = opened.get("protocolVersion")
        self.it.that(version == 1, f"initialize was answered with the version {version!r}")
        methods: Any = opened.get("authMethods") or []
        wanted = self.trial.target.auth_method or (methods[0].get("id") if methods else "")
        if wanted and (profile.authenticates or self.trial.target.auth_method):
            await self.result("authenticate", {"methodId": wanted})

    async def open(self) -> None:
        """Open a session."""
        if self.profile.prompts_without_session:
            response = await self.answer(self.ask("session/prompt", _prompt(None, _text("hello"))))
            self.it.that("error" in response, "a prompt without a session succeeded")
        params = {"cwd": str(self.trial.folder), "mcpServers": []}
        if self.profile.ids == "number":
            self.session_id = await self.trial.open_session(self.client)
        else:
            await needs_entry(self.trial, self.wire)
            self.session_id = str((await self.result("session/new", params)).get("sessionId"))

    async def come_back(self) -> bool:
        """Take the session up in a new process; return whether the agent offers a way."""
        ways = [way for way in WAYS_BACK if offers(self.wire, way)]
        if not ways:
            return False
        params = {"sessionId": self.session_id, "cwd": str(self.trial.folder), "mcpServers": []}
        await self.result(ways[0], params)
        return True

    def adapt(self, editor: Editor) -> None:
        """Answer the agent's requests as this client does."""
        profile, table = self.profile, self.wire.answer
        offered = profile.initialize.get("clientCapabilities", {})
        files = offered.get("fs", {})
        lent = {
            "fs/read_text_file": bool(files.get("readTextFile")),
            "fs/write_text_file": bool(files.get("writeTextFile")),
        }
        for method in list(table):
            if lent.get(method, method.startswith("session/") or offered.get("terminal") is True):
                continue
            del table[method]
            if profile.unknown != "error":
                answer = NULL if profile.unknown == "null" else None
                table[method] = lambda _, answer=answer: answer  # type: ignore[misc]
        if profile.writes_null and "fs/write_text_file" in table:
            table["fs/write_text_file"] = _write_saying_null

    async def says_hello(self) -> None:
        """Prompt for a short answer."""
        blocks = [_text(self.trial.say("hello"))]
        if self.profile.attaches:
            note = self.trial.folder / "note.txt"
            note.write_text("heron\n")
            blocks.append({"type": "resource_link", "uri": note.as_uri(), "name": "note.txt"})
        turn = self.ask("session/prompt", _prompt(self.session_id, *blocks))
        self._ended(await answer_of(self.trial, self.client, turn), "a prompt")

    async def permits(self) -> None:
        """Have something run that needs permission."""
        command = f"echo ran > {self.trial.folder}/ran-{self._n_asked}"
        text = _known(self.trial, "permission", command=command)
        if text is None:
            return
        if not self.profile.answers_permission:
            self.client.permission = "never"
        turn = self.ask("session/prompt", _prompt(self.session_id, _text(text)))
        if self.profile.answers_permission:
            reason = await answer_of(self.trial, self.client, turn)
            return self._ended(reason, "a prompt that it permitted")
        await question(self.trial, self.wire, self.session_id, turn)
        await self.open()  # the tab is stuck, by the client's own fault; a new one must not be
        return await self.says_hello()

    async def stops(self) -> None:
        """Stop a long answer, and a question, each as this client does."""
        long = _known(self.trial, "long")
        if long is not None and self.profile.cancels:
            turn = self.ask("session/prompt", _prompt(self.session_id, _text(long)))
            await first_chunk(self.trial, self.wire, self.session_id, turn)
            self._cancel()
            await self._cancelled(turn, "an answer")
            blocks = [_text(self.trial.say("hello"))] * (2 if self.profile.repeats_text else 1)
            turn = self.ask("session/prompt", _prompt(self.session_id, *blocks))
            self._ended(await answer_of(self.trial, self.client, turn), "the prompt behind a stop")
        elif not self.profile.cancels:
            await self._prompts_on()
        ask = _known(self.trial, "permission", command="true")
        if ask is None or not (self.profile.cancels and self.profile.answers_permission):
            return
        self.client.permission = "hold" if self.profile.answers_at_cancel else "never"
        turn = self.ask("session/prompt", _prompt(self.session_id, _text(ask)))
        await question(self.trial, self.wire, self.session_id, turn)
        self._cancel()
        await self._cancelled(turn, "a question")
        self.client.permission = "allow"

    async def runs_on(self, sleeper: Sleeper) -> None:
        """Leave a command running, for the end to find."""
        offered = self.profile.initialize.get("clientCapabilities", {})
        lends_terminals = offered.get("terminal") is True
        if lends_terminals or not self.profile.answers_permission:
            return  # then it is the client's to end, or it would never be permitted
        text = _known(self.trial, "command", command=sleeper.command)
        if text is not None:
            turn = self.ask("session/prompt", _prompt(self.session_id, _text(text)))
            await asleep(self.trial, self.wire, turn, sleeper)

    async def ends(self) -> None:
        """End the agent as this client does."""
        if self.trial.target.transport != "stdio":
            return
        timeout_s = self.trial.target.timeout_s
        match self.profile.ends:
            case "eof":
                await self.wire.close_stdin(timeout_s)
            case "term":
                self.wire.terminate()
            case "kill":
                self.wire.kill()
        await self.wire.exited(timeout_s)

    def ask(self, method: str, params: object) -> Any:
        """Send a request with an id of this client's kind; return the id."""
        if self.profile.ids == "number":
            return self.wire.request(method, params)
        self._n_asked += 1
        request_id = f"6f1c0b52-{self._n_asked}"
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        self.wire.send(message)
        return request_id

    async def answer(self, request_id: int | str) -> Message:
        """Wait for a response."""
        return await self.wire.response(request_id, self.trial.target.timeout_s)

    async def result(self, method: str, params: object) -> Message:
        """Send a request and return its result."""
        response = await self.answer(self.ask(method, params))
        self.it.that("result" in response, f"{method} was answered with {response.get('error')}")
        result = response["result"]
        return result if isinstance(result, dict) else {}

    def _cancel(self) -> None:
        params = {"sessionId": self.session_id, **self.profile.cancel}
        self.client.cancel(self.session_id, params)

    async def _cancelled(self, turn: int | str, what: str) -> None:
        reason = await answer_of(self.trial, self.client, turn)
        self.it.that(
            reason == "cancelled" or (reason in NATURAL and what == "an answer"),
            f"when {what} was stopped, the prompt was answered with {reason}",
        )

    async def _prompts_on(self) -> None:
        """Prompt again while a turn runs, as clients do that only stop to listen."""
        turns = [
            self.ask("session/prompt", _prompt(self.session_id, _text(self.trial.say("hello"))))
            for _ in range(2)
        ]
        for turn in turns:
            await self.answer(turn)  # with an error, if that is how the agent refuses to queue
        await self.says_hello()

    def _ended(self, reason: str, what: str) -> None:
        self.it.that(reason in NATURAL, f"{what} was answered with {reason}")


async def _play(trial: Trial, profile: Profile) -> None:
    with trial.expect(profile.rule) as it, ExitStack() as stack:
        player = _Player(trial, profile, it)
        await player.start()
        if profile.is_stderr_unread and trial.target.transport == "stdio":
            stack.enter_context(player.wire.unread("stderr"))
        async with Editor.beside(player.wire) as editor:
            player.adapt(editor)
            await player.open()
            await player.says_hello()
            await player.permits()
            await player.stops()
            shown = player.wire.stderr.strip() if profile.is_stderr_shown else ""
            it.that(not shown, f"it logged {shown.partition(chr(10))[0]!r}")
            sleeper = stack.enter_context(Sleeper.asleep())
            if profile.ends != "kill":
                await player.runs_on(sleeper)
            await player.ends()
            if trial.target.transport == "stdio":
                is_gone = await sleeper.is_gone(trial.target.timeout_s)
                it.that(is_gone, "a command outlived the agent")
        if profile.is_new_each_time or profile.ends == "kill":
            await player.start()
            if await player.come_back():
                await player.says_hello()


def _register(name: str, profile: Profile) -> None:
    async def play(trial: Trial) -> None:
        await _play(trial, profile)

    play.__name__ = play.__qualname__ = scenario_name(name)
    play.__doc__ = f"Talk as {profile.title} does."
    scenario(profile.rule, is_on_demand=True)(play)


for _name, _profile in profiles().items():
    _register(_name, _profile)


def _known(trial: Trial, situation: str, **fill: object) -> str | None:
    """Return the prompt for a situation, if somebody knows it."""
    try:
        return trial.say(situation, **fill)
    except NotBroughtAbout:
        return None


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


def _prompt(session_id: str | None, *blocks: Message) -> Message:
    return {"sessionId": session_id, "prompt": list(blocks)}


def _write_saying_null(params: Message) -> Body:
    with open(params["path"], "w", encoding="utf-8") as file:
        file.write(params["content"])
    return NULL
