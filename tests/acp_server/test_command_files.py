"""Command files: which ones are found, how they are read, and what they become."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from acp_server.command_files import MAX_BODY_BYTES, MAX_COMMANDS, CommandFiles, expanded
from agent_core.cancellation import AbortController, AbortSignal, TurnAborted
from agent_core.testing import abort_at_every_await, rehearsal_agent


def write(place: Path, name: str, text: str = "Do it.") -> Path:
    """Write a command file into a project's folder."""
    path = place / ".agents" / "commands" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def own(folder: Path, name: str, text: str = "Do it.") -> None:
    """Write a command file into the person's own folder."""
    (folder / "commands").mkdir(parents=True, exist_ok=True)
    (folder / "commands" / name).write_text(text)


async def found(
    cwd: Path, user: str = "/no/such", *, reserved: tuple[str, ...] = ()
) -> CommandFiles:
    files = CommandFiles(frozenset(reserved))
    await look(files, cwd, user)
    return files


async def look(files: CommandFiles, cwd: Path, user: str = "/no/such") -> bool:
    """Look into the folders once, and say whether that changed anything."""
    with anyio.fail_after(5):
        async with rehearsal_agent(str(cwd), user_folder=user) as agent:
            return await files.update((await agent.project_files.look(agent)).commands)


async def test_a_file_is_offered_with_what_its_head_says(tmp_path: Path) -> None:
    path = write(
        tmp_path, "review.md", '---\ndescription: "Look: closely"\nargument-hint: FILE\n---\nGo $1'
    )

    (command,) = (await found(tmp_path)).commands.values()

    assert command.path == str(path)
    assert command.body == "Go $1"
    assert command.offer.name == "review"
    assert command.offer.description == "Look: closely"
    assert command.offer.input.hint == "FILE"  # type: ignore[union-attr]


async def test_a_file_without_a_head_is_described_by_its_first_line(tmp_path: Path) -> None:
    write(tmp_path, "tidy.md", "\nTidy up.\nAll of it.")

    (command,) = (await found(tmp_path)).commands.values()

    assert command.description == "Tidy up."


async def test_the_nearer_wins_the_project_over_the_person_and_what_is_built_in_over_all(
    tmp_path: Path,
) -> None:
    here = tmp_path / "repo" / "sub"
    here.mkdir(parents=True)
    (tmp_path / "repo" / ".git").mkdir()
    user = tmp_path / "user"
    write(tmp_path, "above.md")
    for name in ("all.md", "project.md", "help.md"):
        write(tmp_path / "repo", name, "root")
    write(here, "all.md", "here")
    for name in ("all.md", "project.md", "mine.md", "help.md"):
        own(user, name, "mine")

    files = await found(here, str(user), reserved=("help",))

    bodies = {name: command.body for name, command in files.commands.items()}
    assert bodies == {"all": "here", "project": "root", "mine": "mine"}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("a b.md", "a-b"),
        ("UPPER_1.md", "UPPER_1"),
        ("a/b.md", None),  # folders are not entered
        ("naïve.md", "naïve"),
        ("..md", None),
        (".hidden.md", None),
        ("--.md", None),
        ("a\nb`c$(d).md", "a-b-c-d"),
        ("x.txt", None),
        ("x.MD", None),
        ("y" * 100 + ".md", "y" * 64),
    ],
)
async def test_names_are_what_can_be_typed_behind_a_slash(
    file: str, name: str | None, tmp_path: Path
) -> None:
    path = tmp_path / ".agents" / "commands" / file
    path.parent.mkdir(parents=True)
    path.write_text("Do it.")

    assert list((await found(tmp_path)).commands) == ([] if name is None else [name])


async def test_a_name_that_is_no_unicode_is_no_harm(tmp_path: Path) -> None:
    write(tmp_path, os.fsdecode(b"a\xff.md"))

    (command,) = (await found(tmp_path)).commands.values()

    assert command.name == "a"


async def test_files_that_cannot_be_commands_are_skipped_and_logged(tmp_path: Path) -> None:
    here = tmp_path / "here"
    secret = tmp_path / "secret.md"
    secret.write_text("the password")
    write(here, "good.md")
    write(here, "empty.md", "---\ndescription: x\n---\n\n")
    write(here, "open.md", "---\ndescription: x\n")
    write(here, "large.md", "x" * (MAX_BODY_BYTES + 1))
    folder = here / ".agents" / "commands"
    (folder / "binary.md").write_bytes(b"a\0b")
    (folder / "latin.md").write_bytes(b"\xe9")
    (folder / "loop.md").symlink_to("loop.md")
    (folder / "out.md").symlink_to(secret)
    (folder / "gone.md").symlink_to("nothing.md")
    (folder / "directory.md").mkdir()
    os.mkfifo(folder / "fifo.md")

    with capture_logs() as records:
        files = await found(here)

    assert list(files.commands) == ["good"]
    skipped = {Path(each["path"]).stem for each in records}
    assert skipped == {
        *("empty", "open", "large", "binary", "latin", "loop", "out", "directory", "fifo")
    }


async def test_a_folder_that_is_a_loop_or_a_file_is_no_harm(tmp_path: Path) -> None:
    (tmp_path / ".agents").symlink_to(tmp_path)
    (tmp_path / "commands").symlink_to("commands")
    user = tmp_path / "user"
    user.write_text("a file")

    assert (await found(tmp_path, str(user))).commands == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_an_unreadable_folder_is_no_harm(tmp_path: Path) -> None:
    folder = write(tmp_path, "a.md").parent
    folder.chmod(0)

    assert (await found(tmp_path)).commands == {}


async def test_of_a_thousand_files_some_are_offered_and_the_log_says_so(tmp_path: Path) -> None:
    for number in range(1000):
        write(tmp_path, f"c{number:04}.md")

    with capture_logs() as records:
        files = await found(tmp_path)

    assert len(files.commands) == MAX_COMMANDS
    assert [each["event"] for each in records] == ["command_files_left_out"]


async def test_the_next_look_says_whether_anything_changed(tmp_path: Path) -> None:
    files = CommandFiles(frozenset())
    seen = [await look(files, tmp_path)]

    path = write(tmp_path, "a.md", "one")
    seen += [await look(files, tmp_path), await look(files, tmp_path)]
    path.write_text("another")
    seen += [await look(files, tmp_path)]
    os.utime(path, ns=(1, 1))  # touched, and the same as ever
    seen += [await look(files, tmp_path)]
    path.unlink()
    seen += [await look(files, tmp_path)]

    assert seen == [False, True, False, True, False, True]
    assert files.commands == {}


async def test_an_abort_stops_the_look_and_leaves_what_was_known(tmp_path: Path) -> None:
    write(tmp_path, "a.md", "one")
    files = await found(tmp_path)
    write(tmp_path, "b.md", "two")
    controller = AbortController()
    controller.abort({"kind": "user"})

    async with rehearsal_agent(str(tmp_path)) as agent:

        async def update(signal: AbortSignal) -> bool:
            looked = await agent.project_files.look(agent, signal)
            return await files.update(looked.commands, signal)

        with pytest.raises(TurnAborted):
            await update(controller.signal)
        assert list(files.commands) == ["a"]
        runs = await abort_at_every_await(update)

    assert {type(run.error) for run in runs} == {TurnAborted}
    assert list(files.commands) == ["a", "b"]  # of the last run, which nobody aborted


@pytest.mark.parametrize(
    ("body", "arguments", "text"),
    [
        ("Do $ARGUMENTS now", "a b", "Do a b now"),
        ("$1 and $2, not $3.", "a b", "a and b, not ."),
        ("$2 $1", "'a b' \"c d\"", "c d a b"),
        ("$1", "it's fine", "it's"),
        ("$1", "$2 $1 $ARGUMENTS", "$2"),
        ("$ARGUMENTS", "$1 \\1 \\g<0>", "$1 \\1 \\g<0>"),
        ("costs $10, $0 and $ARGUMENTSX $x", "", "costs $10, $0 and $ARGUMENTSX $x"),
        ("Look.", "", "Look."),
        ("Look.", "at a.py", "Look.\n\nat a.py"),
        ("Look $1.", "", "Look ."),
    ],
)
def test_what_was_typed_takes_its_places(body: str, arguments: str, text: str) -> None:
    assert expanded(body, arguments) == text
