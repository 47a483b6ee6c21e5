from __future__ import annotations

import json
import os
from pathlib import Path

import anyio
import pytest

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.errors import ToolError
from agent_core.tools import process_table
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.roots import Roots
from agent_core.tools.search import Search
from agent_core.tools.tool import ToolContext


class Searching:
    """The tool on one directory."""

    def __init__(self, cwd: Path) -> None:
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

    async def find(self, pattern: str, **arguments: object) -> list[str]:
        search = Search()
        args = search.parse(json.dumps({"pattern": pattern, **arguments}))
        with anyio.fail_after(10):
            output = await search.run(args, self.context)
        assert not output.is_error
        return output.output.split("\n")


@pytest.fixture
def searching(tmp_path: Path) -> Searching:
    return Searching(tmp_path)


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def children() -> list[int]:
    table, _ = process_table.list_since(b"?", "?", 0)
    return [process.pid for process in table if process.parent == os.getpid()]


async def test_matches_come_with_path_and_line_sorted_by_path(
    searching: Searching, tmp_path: Path
) -> None:
    write(tmp_path / "b.txt", "one\ntwo needle\r\n")
    write(tmp_path / "a" / "é.txt", "needle é\nneedle again")
    write(tmp_path / "c.txt", "nothing")

    found = await searching.find("needle")

    assert found == ["b.txt:2: two needle", "a/é.txt:1: needle é", "a/é.txt:2: needle again"]


async def test_a_pattern_is_literal_unless_it_is_said_to_be_a_regex(
    searching: Searching, tmp_path: Path
) -> None:
    write(tmp_path / "a.txt", "a.c\nabc\n")

    assert await searching.find("a.c") == ["a.txt:1: a.c"]
    assert await searching.find("^a.c$", regex=True) == ["a.txt:1: a.c", "a.txt:2: abc"]


async def test_case_matters_unless_told_otherwise(searching: Searching, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "Straße\n")

    assert await searching.find("straße") == ["no matches"]
    assert await searching.find("straße", case_sensitive=False) == ["a.txt:1: Straße"]


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*.py", ["a.py", "src/b.py", "src/deep/c.py"]),
        ("src/*.py", ["src/b.py"]),
        ("src/**/*.py", ["src/b.py", "src/deep/c.py"]),
        ("**/c.*", ["src/deep/c.py", "src/deep/c.ts"]),
        ("*.{ts,md}", ["src/deep/c.ts"]),
        ("[!a].py", ["src/b.py", "src/deep/c.py"]),
        ("?.ts", ["src/deep/c.ts"]),
        ("./a.py", ["a.py"]),
        ("a.p", ["no matches"]),
    ],
)
async def test_a_glob_chooses_the_files(
    searching: Searching, tmp_path: Path, glob: str, names: list[str]
) -> None:
    for name in ("a.py", "src/b.py", "src/deep/c.py", "src/deep/c.ts"):
        write(tmp_path / name, "x")

    found = await searching.find("x", glob=glob)

    assert [line.partition(":")[0] for line in found] == names


async def test_a_single_file_can_be_searched(searching: Searching, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x")
    write(tmp_path / "b.txt", "x")

    assert await searching.find("x", path="b.txt") == ["b.txt:1: x"]


async def test_results_are_limited_and_the_cut_is_told(
    searching: Searching, tmp_path: Path
) -> None:
    write(tmp_path / "a.txt", "x\n" * 5)

    found = await searching.find("x", max_results=4)

    assert found[:4] == [f"a.txt:{n}: x" for n in range(1, 5)]
    assert found[4].startswith("[cut")
    assert len(await searching.find("x", max_results=5)) == 5


async def test_long_lines_are_cut_around_the_match(searching: Searching, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "needle" + "y" * 1000)
    write(tmp_path / "b.txt", "y" * 5000 + "needle" + "y" * 1000)

    first, second = await searching.find("needle")

    assert first == "a.txt:1: needle" + "y" * 294 + "…"
    assert second == "b.txt:1: …" + "y" * 50 + "needle" + "y" * 244 + "…"


async def test_binary_large_and_special_files_and_tool_folders_are_left_out(
    searching: Searching, tmp_path: Path
) -> None:
    write(tmp_path / "binary", b"needle\0")
    write(tmp_path / "large.txt", b"needle\n" * 800_000)
    for folder in (".git", "node_modules", ".venv"):
        write(tmp_path / "sub" / folder / "a.txt", "needle")
    os.mkfifo(tmp_path / "fifo")
    write(tmp_path / ".hidden", b"needle \xff")

    assert await searching.find("needle") == [
        ".hidden:1: needle \N{REPLACEMENT CHARACTER}",
        "[2 files were too large, or no text]",
    ]


async def test_no_link_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "outside" / "secret.txt", "needle")
    write(tmp_path / "root" / "a.txt", "needle")
    (tmp_path / "root" / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "file.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    searching = Searching(tmp_path / "root")

    assert await searching.find("needle") == ["a.txt:1: needle"]
    for path in ("folder", "file.txt", "../outside", str(tmp_path)):
        with pytest.raises(ToolError) as error:
            await searching.find("needle", path=path)
        assert error.value.code == "OUTSIDE_ROOTS"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "(", "regex": True}, "the pattern is wrong"),
        ({"pattern": "a\nb"}, "single lines"),
        ({"pattern": "a", "path": "missing"}, "does not exist"),
    ],
)
async def test_a_wrong_search_is_told_what_is_wrong(
    searching: Searching, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ToolError, match=message) as error:
        await searching.find(**arguments)  # type: ignore[arg-type]

    assert error.value.code == "BAD_ARGUMENTS"


@pytest.mark.requirement("R73", "R94", "B157")
async def test_an_abort_ends_a_regex_that_would_take_for_ever(
    searching: Searching, tmp_path: Path
) -> None:
    write(tmp_path / "a.txt", "a" * 200)
    before = set(children())

    async def search() -> None:
        with pytest.raises(TurnAborted):
            await searching.find("(a+)+$b", regex=True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(search)
        await is_using_cpu(before)
        searching.controller.abort(USER)

    assert set(children()) == before


async def is_using_cpu(before: set[int]) -> None:
    """Wait until a new child has worked longer than any start takes: it is in the regex."""
    with anyio.fail_after(10):
        while True:
            if any(user_ticks_of(pid) > 30 for pid in set(children()) - before):
                return
            await anyio.sleep(0.01)


def user_ticks_of(pid: int) -> int:
    """Return the time a process has computed, in units of 10 ms."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


async def test_when_time_runs_out_what_was_found_so_far_is_told(
    searching: Searching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_core.tools.search._LIMIT_S", 0.5)
    write(tmp_path / "a.txt", "aab\n" + "a" * 200)

    found = await searching.find("(a+)+b", regex=True)

    assert found == ["a.txt:1: aab", "[stopped after 0.5 s]"]


async def test_a_signal_that_fired_before_starts_nothing(searching: Searching) -> None:
    searching.controller.abort(USER)

    with pytest.raises(TurnAborted):
        await searching.find("x")


def test_a_search_is_announced_with_pattern_and_place() -> None:
    search = Search()
    roots = Roots("/home/me")

    assert search.view(search.parse('{"pattern": "x"}'), roots).title == "Search 'x'"
    view = search.view(search.parse('{"pattern": "x", "path": "src"}'), roots)
    assert view.title == "Search 'x' in src"
    assert view.locations[0].path == "/home/me/src"


@pytest.mark.parametrize(
    ("skipped", "said"),
    [(1, "[1 file was too large, or no text]"), (3, "[3 files were too large, or no text]")],
)
async def test_no_match_is_not_said_alone_when_files_were_skipped(
    skipped: int, said: str, searching: Searching, tmp_path: Path
) -> None:
    write(tmp_path / "a.txt", "hay")
    assert await searching.find("needle") == ["no matches"]
    for number in range(skipped):
        write(tmp_path / f"{number}.bin", b"needle\0")

    assert await searching.find("needle") == ["no matches", said]
    assert await searching.find("needle", glob="*.txt") == ["no matches"]
    assert await searching.find("hay") == ["a.txt:1: hay", said]
