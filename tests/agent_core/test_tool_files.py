from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import Diff, Location, Text
from agent_core.errors import ToolError
from agent_core.tools.edit import Edit
from agent_core.tools.edit import _Args as EditArgs
from agent_core.tools.edit import _replace as replace
from agent_core.tools.list_files import ListFiles
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import MAX_FILE_BYTES, LocalFiles
from agent_core.tools.read import Read
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Tool, ToolContext, ToolOutput
from agent_core.tools.write import Write


class Desk:
    """Runs file tools on one directory."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.controller = AbortController()
        self.context = ToolContext(
            agent=None,  # type: ignore[arg-type]
            call_id="call_1",
            signal=self.controller.signal,
            roots=Roots(str(cwd)),
            files=LocalFiles(),
            commands=LocalCommands(),
            progress=lambda content: None,
        )

    async def run(self, tool: Tool, **arguments: object) -> ToolOutput:
        with anyio.fail_after(5):
            return await tool.run(tool.parse(json.dumps(arguments)), self.context)

    async def refused(self, tool: Tool, **arguments: object) -> ToolError:
        with pytest.raises(ToolError) as error:
            await self.run(tool, **arguments)
        return error.value

    def put(self, name: str, data: str | bytes) -> Path:
        path = self.cwd / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# --- read -----------------------------------------------------------------------------------


async def test_read_numbers_the_lines_for_the_model_and_not_for_people(desk: Desk) -> None:
    desk.put("a.txt", "one\r\n\ttwo\n\nfour é")

    output = await desk.run(Read(), path="a.txt")

    assert output == ToolOutput(
        "     1\tone\n     2\t\ttwo\n     3\t\n     4\tfour é",
        (Text("one\n\ttwo\n\nfour é"),),
    )


async def test_read_takes_a_part_and_says_that_it_is_one(desk: Desk) -> None:
    desk.put("a.txt", "".join(f"{n}\n" for n in range(1, 11)))

    part = await desk.run(Read(), path="a.txt", line=4, limit=2)
    rest = await desk.run(Read(), path="a.txt", line=9, limit=2)

    assert part.output == "     4\t4\n     5\t5\n[cut: lines 4-5 of 10; go on with line=6]"
    assert rest.output == "     9\t9\n    10\t10"


async def test_read_cuts_long_files_and_long_lines(desk: Desk) -> None:
    desk.put("many.txt", "x\n" * 3000)
    desk.put("wide.txt", "y" * 2500)
    desk.put("both.txt", ("z" * 1999 + "\n") * 1000)

    many = await desk.run(Read(), path="many.txt")
    wide = await desk.run(Read(), path="wide.txt")
    both = await desk.run(Read(), path="both.txt")

    assert many.output.endswith("\n[cut: lines 1-2000 of 3000; go on with line=2001]")
    assert wide.output == "     1\t" + "y" * 2000 + " [… 500 characters left out]"
    assert both.output.endswith("\n[cut: lines 1-100 of 1000; go on with line=101]")


async def test_read_says_that_a_file_is_empty_or_shorter(desk: Desk) -> None:
    desk.put("empty.txt", "")
    desk.put("short.txt", "a\nb\n")

    assert (await desk.run(Read(), path="empty.txt")).output == "(the file is empty)"
    assert (await desk.refused(Read(), path="short.txt", line=3)).message == (
        "short.txt has only 2 lines"
    )


async def test_read_does_not_show_a_byte_order_mark(desk: Desk) -> None:
    desk.put("a.txt", b"\xef\xbb\xbfhello")

    assert (await desk.run(Read(), path="a.txt")).output == "     1\thello"


async def test_what_is_no_text_file_is_refused_without_waiting(desk: Desk) -> None:
    os.mkfifo(desk.cwd / "fifo")
    desk.put("binary", b"a\0b")
    desk.put("latin", "é".encode("latin-1"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(desk.cwd / "socket"))
        messages = {
            name: (await desk.refused(Read(), path=name)).message
            for name in ("fifo", "socket", "binary", "latin", ".", "missing")
        }

    assert "not a regular file" in messages["fifo"]
    assert "cannot be read" in messages["socket"]
    assert "binary" in messages["binary"]
    assert "not UTF-8 text: byte 0" in messages["latin"]
    assert "is a directory; use list" in messages["."]
    assert "does not exist" in messages["missing"]


async def test_a_device_is_refused() -> None:
    with pytest.raises(ToolError, match="not a regular file"):
        await LocalFiles().read("/dev/zero", AbortController().signal)


async def test_a_link_put_in_place_of_a_checked_path_is_not_followed(desk: Desk) -> None:
    desk.put("real.txt", "secret")
    (desk.cwd / "link").symlink_to("real.txt")
    signal = desk.controller.signal

    with pytest.raises(ToolError):
        await LocalFiles().read(str(desk.cwd / "link"), signal)
    with pytest.raises(ToolError):
        await LocalFiles().write(str(desk.cwd / "link"), "x", signal)


async def test_a_file_may_have_10_mib_and_no_more(desk: Desk) -> None:
    path = desk.put("large.txt", b"x" * MAX_FILE_BYTES)
    text = await LocalFiles().read(str(path), desk.controller.signal)
    desk.put("large.txt", b"x" * (MAX_FILE_BYTES + 1))

    assert len(text) == MAX_FILE_BYTES
    assert (await desk.refused(Read(), path="large.txt")).code == "TOO_LARGE"


async def test_files_without_a_size_can_be_read() -> None:
    text = await LocalFiles().read(f"/proc/{os.getpid()}/status", AbortController().signal)

    assert "Name:" in text


@pytest.mark.parametrize("tool", [Read(), ListFiles()])
async def test_nothing_outside_the_roots_is_read(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "other")
    desk = Desk(tmp_path / "root")

    for path in ("..", "/etc/passwd", "link", "link/x"):
        assert (await desk.refused(tool, path=path)).code == "OUTSIDE_ROOTS"


# --- write ----------------------------------------------------------------------------------


async def test_write_creates_a_file_and_its_directories(desk: Desk) -> None:
    output = await desk.run(Write(), path="a/b/c.txt", content="é\r\n")

    path = desk.cwd / "a/b/c.txt"
    assert path.read_bytes() == "é\r\n".encode()
    assert output == ToolOutput("created a/b/c.txt (4 bytes)", (Diff(str(path), None, "é\r\n"),))


async def test_write_replaces_a_file_and_keeps_its_mode(desk: Desk) -> None:
    path = desk.put("run.sh", "old")
    path.chmod(0o750)

    output = await desk.run(Write(), path="run.sh", content="new")

    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert output.content == (Diff(str(path), "old", "new"),)
    assert os.listdir(desk.cwd) == ["run.sh"]


async def test_a_new_file_has_the_mode_the_umask_gives(desk: Desk) -> None:
    await desk.run(Write(), path="a.txt", content="")
    (desk.cwd / "b.txt").touch()

    assert (desk.cwd / "a.txt").stat().st_mode == (desk.cwd / "b.txt").stat().st_mode


async def test_a_reader_has_the_old_text_while_the_file_is_replaced(desk: Desk) -> None:
    path = desk.put("a.txt", "old")

    with path.open() as reader:
        await desk.run(Write(), path="a.txt", content="new")

        assert reader.read() == "old"


async def test_write_through_a_link_inside_keeps_the_link(desk: Desk) -> None:
    desk.put("real.txt", "old")
    (desk.cwd / "link.txt").symlink_to("real.txt")

    await desk.run(Write(), path="link.txt", content="new")

    assert (desk.cwd / "link.txt").is_symlink()
    assert (desk.cwd / "real.txt").read_text() == "new"


async def test_what_cannot_be_written_is_refused_and_nothing_is_left(desk: Desk) -> None:
    os.mkfifo(desk.cwd / "fifo")
    desk.put("file", "text")
    (desk.cwd / "folder").mkdir()

    assert "directory" in (await desk.refused(Write(), path="folder", content="")).message
    assert "regular" in (await desk.refused(Write(), path="fifo", content="")).message
    assert "is a file" in (await desk.refused(Write(), path="file/x", content="")).message
    assert "too long" in (await desk.refused(Write(), path="n" * 300, content="")).message
    assert sorted(os.listdir(desk.cwd)) == ["fifo", "file", "folder"]


async def test_a_binary_file_can_be_replaced(desk: Desk) -> None:
    path = desk.put("data", b"\0\xff")

    output = await desk.run(Write(), path="data", content="text")

    assert path.read_bytes() == b"text"
    (content,) = output.content
    assert isinstance(content, Text)
    assert "is replaced as a whole" in content.text
    assert "replaced" in output.output


async def test_a_very_large_change_is_not_drawn(desk: Desk) -> None:
    output = await desk.run(Write(), path="a.txt", content="x" * 2**20 + "x")

    (content,) = output.content
    assert isinstance(content, Text)


async def test_a_signal_that_fired_before_leaves_the_disk_alone(desk: Desk) -> None:
    desk.put("a.txt", "old")
    desk.controller.abort(USER)

    for tool, arguments in (
        (Write(), {"path": "a.txt", "content": "new"}),
        (Write(), {"path": "b.txt", "content": "new"}),
        (Edit(), {"path": "a.txt", "old_text": "old", "new_text": "new"}),
        (Read(), {"path": "a.txt"}),
        (ListFiles(), {}),
    ):
        with pytest.raises(TurnAborted):
            await desk.run(tool, **arguments)

    assert (desk.cwd / "a.txt").read_text() == "old"
    assert os.listdir(desk.cwd) == ["a.txt"]


# --- edit -----------------------------------------------------------------------------------


async def test_edit_replaces_the_one_place(desk: Desk) -> None:
    path = desk.put("a.py", "a = 1\nb = 2\nc = 3\n")

    output = await desk.run(Edit(), path="a.py", old_text="b = 2", new_text="b = 20\nd = 4")

    assert path.read_bytes() == b"a = 1\nb = 20\nd = 4\nc = 3\n"
    assert output == ToolOutput(
        "changed 1 place in a.py",
        (Diff(str(path), "a = 1\nb = 2\nc = 3\n", "a = 1\nb = 20\nd = 4\nc = 3\n"),),
        locations=(Location(str(path), 2),),
    )


@pytest.mark.requirement("B112")
@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        # CR LF, one line, several lines, more lines, fewer lines
        (b"a\r\nb\r\nc\r\n", "b", "x", b"a\r\nx\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "a\nb\n", "a\nx\n", b"a\r\nx\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "b\n", "x\ny\n", b"a\r\nx\r\ny\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "b\nc\n", "", b"a\r\n"),
        (b"a\r\nb\r\nc\r\n", "b", "b\nx", b"a\r\nb\r\nx\r\nc\r\n"),
        # what the model writes as CR LF is the same
        (b"a\r\nb\r\n", "a\r\nb", "a\r\nx", b"a\r\nx\r\n"),
        (b"a\nb\n", "a\r\nb", "a\r\nx\r\ny", b"a\nx\ny\n"),
        # mixed: only the line that differs is touched
        (b"a\r\nb\nc\r\n", "a\nb\nc", "a\nx\nc", b"a\r\nx\nc\r\n"),
        (b"a\nb\r\nc\n", "b", "x\ny", b"a\nx\r\ny\r\nc\n"),
        (b"a\r\nb\nc\n", "c", "x\ny", b"a\r\nb\nx\ny\n"),
        # no newline at the end
        (b"a\nb", "b", "x", b"a\nx"),
        (b"a\r\nb", "b", "x\ny", b"a\r\nx\r\ny"),
        (b"a", "a", "x\n", b"x\n"),
        # a byte order mark, and a lone CR that is no line ending
        (b"\xef\xbb\xbfa\r\nb\r\n", "a\n", "x\n", b"\xef\xbb\xbfx\r\nb\r\n"),
        (b"a\rb\r\r\nc\r\n", "c", "x", b"a\rb\r\r\nx\r\n"),
    ],
)
async def test_an_edit_changes_the_bytes_of_its_lines_only(
    desk: Desk, before: bytes, old: str, new: str, after: bytes
) -> None:
    path = desk.put("a.txt", before)

    await desk.run(Edit(), path="a.txt", old_text=old, new_text=new)

    assert path.read_bytes() == after


@pytest.mark.requirement("B112")
@given(
    lines=st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "é"]), st.sampled_from(["\n", "\r\n"]))
    ),
    last=st.sampled_from(["", "z"]),
    number=st.integers(0, 20),
)
def test_a_replaced_line_leaves_all_other_lines_their_endings(
    lines: list[tuple[str, str]], last: str, number: int
) -> None:
    number = min(number, len(lines))
    lines.insert(number, ("needle", "\r\n"))
    text = "".join(map("".join, lines)) + last
    asked = text.replace("\r\n", "\n")

    changed, _ = replace(text, EditArgs("f", asked, asked.replace("needle", "pin")))

    assert changed == text.replace("needle", "pin")


async def test_several_places_are_refused_unless_all_are_meant(desk: Desk) -> None:
    path = desk.put("a.txt", "x\r\ny\r\nx\r\n")

    error = await desk.refused(Edit(), path="a.txt", old_text="x", new_text="z")
    assert error.code == "SEVERAL_MATCHES"
    assert "occurs 2 times in a.txt (lines 1, 3)" in error.message
    assert path.read_bytes() == b"x\r\ny\r\nx\r\n"

    output = await desk.run(Edit(), path="a.txt", old_text="x", new_text="z\nw", replace_all=True)
    assert output.output == "changed 2 places in a.txt"
    assert path.read_bytes() == b"z\r\nw\r\ny\r\nz\r\nw\r\n"


@pytest.mark.parametrize(
    ("old", "hint"),
    [
        ("nothing", "read the file again"),
        ("if x:\n  return", "line 2 differs from it only in white space"),
        ("     2\tif x:", "leave out the line numbers"),
    ],
)
async def test_a_text_that_is_not_there_is_refused_with_a_hint(
    desk: Desk, old: str, hint: str
) -> None:
    desk.put("a.py", "\nif x:\n\treturn\n")

    error = await desk.refused(Edit(), path="a.py", old_text=old, new_text="")

    assert error.code == "NO_MATCH"
    assert hint in error.message


async def test_an_edit_that_changes_nothing_is_refused(desk: Desk) -> None:
    desk.put("a.txt", "a\n")

    for new in ("a\n", "a\r\n"):
        error = await desk.refused(Edit(), path="a.txt", old_text="a\n", new_text=new)
        assert "the same" in error.message


async def test_an_edit_needs_something_to_look_for(desk: Desk) -> None:
    error = await desk.refused(Edit(), path="a.txt", old_text="", new_text="x")

    assert error.code == "BAD_ARGUMENTS"


# --- list -----------------------------------------------------------------------------------


DEEPEST = [".git/", "a.txt", "b/", "b/inner/", "b/inner/deep/", "b/inner/y", "b/x", "c.txt", "link"]


@pytest.fixture
def tree(desk: Desk) -> Desk:
    for folder in ("b/inner/deep", ".git/objects"):
        (desk.cwd / folder).mkdir(parents=True)
    for name in ("c.txt", "a.txt", "b/x", "b/inner/y", "b/inner/deep/z"):
        desk.put(name, "")
    (desk.cwd / "link").symlink_to("b")
    return desk


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (1, [".git/", "a.txt", "b/", "c.txt", "link"]),
        (2, [".git/", "a.txt", "b/", "b/inner/", "b/x", "c.txt", "link"]),
        (3, DEEPEST),
    ],
)
async def test_list_goes_as_deep_as_told(tree: Desk, depth: int, names: list[str]) -> None:
    output = await tree.run(ListFiles(), depth=depth)

    assert output.output.split("\n") == names


async def test_list_is_capped_and_says_so(desk: Desk) -> None:
    for number in range(501):
        desk.put(f"{number:03}", "")

    full = (await desk.run(ListFiles())).output.split("\n")
    os.unlink(desk.cwd / "500")
    fits = (await desk.run(ListFiles())).output.split("\n")

    assert full[499:] == ["499", "[cut: only the first 500 entries are shown]"]
    assert fits[499:] == ["499"]


async def test_list_shows_names_that_are_no_text(desk: Desk) -> None:
    (desk.cwd / os.fsdecode(b"caf\xe9")).touch()

    assert (await desk.run(ListFiles())).output == "caf\N{REPLACEMENT CHARACTER}"


async def test_list_says_what_is_no_directory(desk: Desk) -> None:
    desk.put("a.txt", "")
    (desk.cwd / "empty").mkdir()

    assert (await desk.run(ListFiles(), path="empty")).output == "(the directory is empty)"
    assert "use read" in (await desk.refused(ListFiles(), path="a.txt")).message
    assert "does not exist" in (await desk.refused(ListFiles(), path="missing")).message
    assert (await desk.refused(ListFiles(), depth=4)).code == "BAD_ARGUMENTS"


# --- how they are announced -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "arguments", "title", "line"),
    [
        (Read(), {"path": "src/../a.py", "line": 7}, "Read a.py", 7),
        (Write(), {"path": "a.py", "content": ""}, "Write a.py", None),
        (Edit(), {"path": "/w/a.py", "old_text": "a", "new_text": "b"}, "Edit a.py", None),
        (ListFiles(), {"path": "a.py"}, "List a.py", None),
    ],
)
def test_a_call_names_its_file(
    tool: Tool, arguments: dict[str, object], title: str, line: int | None
) -> None:
    view = tool.view(tool.parse(json.dumps(arguments)), Roots("/w"))

    assert view.title == title
    assert view.locations == (Location("/w/a.py", line),)


def test_always_covers_all_edits_or_all_reads() -> None:
    tools: tuple[Tool, ...] = (Read(), ListFiles(), Write(), Edit())

    keys = {tool.name: tool.remember_key(None)[0] for tool in tools}

    assert keys == {"read": "read", "list": "read", "write": "edit", "edit": "edit"}
