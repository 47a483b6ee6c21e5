"""Slash commands as a client meets them: offered, answered, told to the model, shown again."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from talking import Talk, said_by_agent, talk

import agent_core.project_files
from acp_server.backend import Backend
from acp_server.commands import COMMANDS, SessionCommands
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal, TurnAborted
from agent_core.content import Image, Link, Text, text_of
from agent_core.events import FileChanged, FilesRestored, RequestHeader, UserMessage
from agent_core.loop import Allow, Refuse
from agent_core.project_files import Look
from agent_core.testing import abort_at_every_await
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.roots import Roots

BUILT_IN = [command.name for command in COMMANDS]


class At:
    """A session in the directory `path`, and its client."""

    def __init__(self, client: Talk, backend: Backend, session_id: str, path: Path) -> None:
        self.client = client
        self.backend = backend
        self.session_id = session_id
        self.path = path

    @property
    def agent(self) -> Agent:
        return self.backend.runtime.agents[self.session_id]

    def of(self, kind: type[Any]) -> list[Any]:
        return [each.data for each in self.agent.session.events if isinstance(each.data, kind)]

    @property
    def offers(self) -> list[list[str]]:
        """The names of the commands of each offer, the built-in ones left out."""
        updates = self.client.lines.updates()
        offers = (u for u in updates if u["sessionUpdate"] == "available_commands_update")
        names = [[each["name"] for each in offer["availableCommands"]] for offer in offers]
        assert all(each[: len(BUILT_IN)] == BUILT_IN for each in names)
        return [each[len(BUILT_IN) :] for each in names]

    async def say(self, *blocks: str | dict[str, Any]) -> str:
        """Prompt, wait for the answer, and return what the agent said."""
        before = len(self.client.lines.updates())
        prompt = [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]
        request_id = self.client.say("session/prompt", sessionId=self.session_id, prompt=prompt)
        assert (await self.client.result(request_id))["stopReason"] == "end_turn"
        return said_by_agent(self.client.lines.updates()[before:])

    async def replayed(self) -> list[dict[str, Any]]:
        """Close the session, load it, and return what is shown."""
        await self.client.result(self.client.say("session/close", sessionId=self.session_id))
        before = len(self.client.lines.updates())
        params = {"sessionId": self.session_id, "cwd": str(self.path), "mcpServers": []}
        await self.client.result(self.client.say("session/load", **params))
        return self.client.lines.updates()[before:]


@asynccontextmanager
async def session(path: Path, **settings: Any) -> AsyncGenerator[At]:
    cwd = path / "project"
    cwd.mkdir(exist_ok=True)
    with anyio.fail_after(20):
        async with talk(path / "state", **{"mode": "bypass", **settings}) as (client, backend):
            params = {"cwd": str(cwd), "mcpServers": []}
            result = await client.result(client.say("session/new", **params))
            yield At(client, backend, result["sessionId"], cwd)


def command(path: Path, name: str, text: str) -> Path:
    file = path / "project" / ".agents" / "commands" / f"{name}.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def mine(name: str, text: str) -> None:
    """Put a file into the person's own folder."""
    file = Path(os.environ["XDG_CONFIG_HOME"]) / "acp-agent" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def user_text(updates: list[dict[str, Any]]) -> list[Any]:
    chunks = (u["content"] for u in updates if u["sessionUpdate"] == "user_message_chunk")
    return [chunk.get("text", chunk["type"]) for chunk in chunks]


# --- offers ---------------------------------------------------------------------------------


@pytest.mark.requirement("ACP-150", "B121")
async def test_commands_from_files_are_offered_behind_the_answer_to_new(tmp_path: Path) -> None:
    command(tmp_path, "review", "---\ndescription: Look\nargument-hint: FILE\n---\nsay $1")
    command(tmp_path, "help", "say mine")
    mine("commands/mine.md", "say mine")

    async with session(tmp_path) as at:
        await at.client.lines.until(lambda: at.offers)
        first, *_ = [m for m in at.client.lines.sent if m.get("method") == "session/update"]
        answer = at.client.lines.sent.index(at.client.lines.responses(2)[0])

        assert at.offers == [["review", "mine"]]
        assert at.client.lines.sent.index(first) > answer
        assert first["params"]["update"]["availableCommands"][len(BUILT_IN)] == {
            "name": "review",
            "description": "Look",
            "input": {"hint": "FILE"},
        }


async def test_changed_files_are_offered_at_the_next_prompt_and_only_then(tmp_path: Path) -> None:
    async with session(tmp_path) as at:
        await at.say("say one")
        file = command(tmp_path, "new", "say new")
        await at.say("say two")
        await at.say("say three")
        said = await at.say("/new")
        file.unlink()
        await at.say("say four")

        assert at.offers == [[], ["new"], []]
        assert said == "new"


async def test_a_prompt_is_one_look_into_the_project_whoever_reads_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, places = agent_core.project_files._look, []

    def noted(user_folder: str, roots: Roots) -> Look:
        places.append(roots.cwd)
        return look(user_folder, roots)

    monkeypatch.setattr(agent_core.project_files, "_look", noted)

    async with session(tmp_path) as at:
        opening = len(places)
        command(tmp_path, "tidy", "say Tidy.")
        (at.path / "AGENTS.md").write_text("use tabs")
        await at.say("say hello")
        plain = len(places) - opening
        said = await at.say("/tidy")
        (header,) = at.of(RequestHeader)

    assert said == "Tidy."
    assert at.offers[-1] == ["tidy"]
    assert "use tabs" in header.system
    assert (opening, plain, len(places)) == (1, 1, 3)


async def test_files_are_looked_at_again_when_a_session_is_loaded(tmp_path: Path) -> None:
    async with session(tmp_path) as at:
        await at.say("say one")
        command(tmp_path, "new", "say new")
        await at.replayed()
        await at.client.lines.until(lambda: len(at.offers) == 2)

        assert at.offers == [[], ["new"]]


# --- commands from files --------------------------------------------------------------------


async def test_a_command_tells_the_model_its_prompt_and_people_see_what_was_typed(
    tmp_path: Path,
) -> None:
    command(tmp_path, "echo", "say $2 before $1")

    async with session(tmp_path) as at:
        said = await at.say("/echo one 'two three'")
        (message,) = at.of(UserMessage)
        title = at.agent.session.state.title
        updates = await at.replayed()

    assert said == "two three before one"
    assert message.content == (Text("say two three before one"),)
    assert message.shown == (Text("/echo one 'two three'"),)
    assert title == "/echo one 'two three'"
    assert user_text(updates) == ["/echo one 'two three'"]
    assert said_by_agent(updates) == said


async def test_what_else_is_in_the_prompt_stays_and_links_are_named_in_the_argument(
    tmp_path: Path,
) -> None:
    command(tmp_path, "look", "say ($ARGUMENTS)")
    image = {"type": "image", "data": "AA==", "mimeType": "image/png"}
    link = {"type": "resource_link", "uri": "file:///a.py", "name": "a.py"}

    async with session(tmp_path) as at:
        await at.say(image, "/look at ", link, " closely")
        (message,) = at.of(UserMessage)
        updates = await at.replayed()

    assert message.content == (
        Text("say (at [a.py](file:///a.py) closely)"),
        Image("AA==", "image/png"),
        Link("file:///a.py", "a.py"),
    )
    assert user_text(updates) == ["image", "/look at ", "resource_link", " closely"]


async def test_an_image_beside_a_built_in_command_is_shown_again_and_no_model_is_asked(
    tmp_path: Path,
) -> None:
    image = {"type": "image", "data": "AA==", "mimeType": "image/png"}

    async with session(tmp_path) as at:
        said = await at.say("/mode read-only", image)
        updates = await at.replayed()

    assert "`read-only` (now)" in said
    assert user_text(updates) == ["/mode read-only", "image"]


@pytest.mark.parametrize("said", ["/", "//help", "/ help", "/nothing", "/helpful", "say /help"])
async def test_what_is_no_command_goes_to_the_model(said: str, tmp_path: Path) -> None:
    async with session(tmp_path) as at:
        await at.say(said)

        assert [text_of(message.content) for message in at.of(UserMessage)] == [said]


@pytest.mark.parametrize("said", ["/help", "  /help", "/help\n", "/mode\tread-only"])
async def test_a_command_is_known_by_its_first_word_whatever_the_space(
    said: str, tmp_path: Path
) -> None:
    async with session(tmp_path) as at:
        await at.say(said)

        assert at.of(UserMessage) == []


async def test_listeners_behind_see_the_prompt_and_not_the_command(tmp_path: Path) -> None:
    command(tmp_path, "echo", "say $1")
    verdicts: list[Callable[[], Any]] = [
        lambda: Refuse("no"),
        lambda: Allow((Text("say better"),), (Text("context"),)),
        lambda: Allow(shown=(Text("/echo [hidden]"),)),
    ]
    seen: list[str] = []

    async def judge(
        _agent: Agent, content: Any, _source: str, _signal: AbortSignal, _next: Any
    ) -> Any:
        seen.append(text_of(content))
        return verdicts.pop(0)()

    async with session(tmp_path) as at:
        at.backend.runtime.hooks.on("agent/prompt-submit", judge)
        said = [await at.say("/echo secret") for _ in range(3)]
        better, hidden = at.of(UserMessage)

    assert seen == ["say secret"] * 3
    assert said == ["no", "better", "secret"]
    assert better.shown == (Text("/echo secret"),)
    assert hidden.shown == (Text("/echo [hidden]"),)


async def test_a_cancel_while_files_are_looked_at_lets_nothing_of_the_prompt_through(
    tmp_path: Path,
) -> None:
    command(tmp_path, "echo", "say $1")
    passed: list[AbortSignal] = []

    async with session(tmp_path) as at:

        def submit(signal: AbortSignal) -> Coroutine[Any, Any, object]:
            async def next_(*args: Any) -> Allow:
                passed.append(args[3])
                return Allow()

            commands = SessionCommands(lambda _offers: None)
            return commands.submit(at.agent, (Text("/echo x"),), "user", signal, next_)

        runs = await abort_at_every_await(submit)

    assert runs
    assert {type(run.error) for run in runs} == {TurnAborted}
    assert [signal.aborted for signal in passed] == [False]  # of the run that nobody aborted


# --- the built-in ones ----------------------------------------------------------------------


async def test_help_and_status_name_everything_there_is(tmp_path: Path) -> None:
    file = command(tmp_path, "echo", "---\ndescription: Say it\nargument-hint: TEXT\n---\nsay $1")
    (tmp_path / "project" / "AGENTS.md").write_text("use tabs")
    skill = tmp_path / "project" / ".agents" / "skills" / "release" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\ndescription: How to release\n---\n")
    mine("AGENTS.md", "call me Ada")

    async with session(tmp_path) as at:
        helped = await at.say("/help")
        status = await at.say("/status")

    assert all(f"- `/{name}" in helped for name in BUILT_IN)
    assert f"- `/echo TEXT`: Say it (`{file}`)" in helped
    assert f"{tmp_path}/project/AGENTS.md" in status
    assert "acp-agent/AGENTS.md" in status
    assert "- Skills: `release`" in status
    assert "- Commands from files: `/echo`" in status


async def test_instructions_of_the_project_and_the_person_reach_the_model(tmp_path: Path) -> None:
    mine("AGENTS.md", "call me Ada")

    async with session(tmp_path) as at:
        (at.path / "AGENTS.md").write_text("use tabs")
        await at.say("say hi")
        (header,) = at.of(RequestHeader)

    assert header.system.index("call me Ada") < header.system.index("use tabs")


async def test_the_plan_is_shown_as_a_list_to_tick_off(tmp_path: Path) -> None:
    async with session(tmp_path) as at:
        none = await at.say("/plan")
        await at.say("plan look around; make it")
        said = await at.say("/plan")

    assert "no plan yet" in none
    assert "- [ ] look around\n- [ ] make it" in said.replace("**", "")


async def test_a_plan_is_asked_for_without_any_change(tmp_path: Path) -> None:
    async with session(tmp_path) as at:
        await at.say("/plan make it faster")
        (message,) = at.of(UserMessage)

    told = text_of(message.content)
    assert told.endswith("\n\nmake it faster")
    assert "plan tool" in told
    assert "change nothing" in told
    assert message.shown == (Text("/plan make it faster"),)


async def test_braces_in_what_is_to_be_planned_are_just_braces(tmp_path: Path) -> None:
    async with session(tmp_path) as at:
        await at.say("/plan rename {x} to {0}")
        (message,) = at.of(UserMessage)

    assert text_of(message.content).endswith("\n\nrename {x} to {0}")


async def test_undo_takes_back_what_the_last_turn_wrote_and_says_so_again_in_replay(
    tmp_path: Path,
) -> None:
    async with session(tmp_path) as at:
        (at.path / "a.txt").write_text("old")
        await at.say("write a.txt: new then write b.txt: new")
        said = await at.say("/undo")
        updates = await at.replayed()
        then = await at.say("/undo")

        assert (at.path / "a.txt").read_text() == "old"
        assert not (at.path / "b.txt").exists()
        assert "- `a.txt`: restored" in said
        assert said in said_by_agent(updates)
        assert "nothing to undo" in then


async def test_an_undo_that_is_cancelled_says_live_and_in_replay_how_far_it_came(
    tmp_path: Path,
) -> None:
    class Stopping(LocalFiles):
        async def write(self, path: str, text: str, signal: AbortSignal) -> None:
            await super().write(path, text, signal)
            at.client.cancel(at.session_id)

    async with session(tmp_path) as at:
        for name in ("a", "b"):
            (at.path / name).write_text("old")
        await at.say("write a: 1 then write b: 2")
        at.agent.files = Stopping()
        before = len(at.client.lines.updates())
        result = await at.client.result(at.client.prompt(at.session_id, "/undo"))
        live = said_by_agent(at.client.lines.updates()[before:])
        replayed = said_by_agent(await at.replayed())

    assert result["stopReason"] == "cancelled"
    assert "`a`: restored" in live
    assert "1 file to go" in live
    assert live in replayed


async def test_a_forked_session_has_nothing_to_undo(tmp_path: Path) -> None:
    async with session(tmp_path) as at:
        await at.say("write a: 1")
        await at.say("write b: 1")
        await at.say("/undo")
        params = {"sessionId": at.session_id, "cwd": str(at.path), "mcpServers": []}
        forked = await at.client.result(at.client.say("session/fork", **params))
        fork = At(at.client, at.backend, forked["sessionId"], at.path)

        assert "nothing to undo" in await fork.say("/undo")
        assert fork.of(FileChanged) == []
        assert fork.of(FilesRestored) == []
        assert (at.path / "a").exists()
