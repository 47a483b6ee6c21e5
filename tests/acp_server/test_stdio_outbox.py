from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from anyio import wait_all_tasks_blocked

from acp_server.transports.stdio import HIGH_WATER_BYTES, FdOutbox, read_lines

MEGABYTE = b"x" * (2**20 - 1)


@contextmanager
def channel(kind: str):
    """Yield a descriptor to write to and one to read from; both closed behind."""
    if kind == "pipe":
        reads, writes = os.pipe()
    else:
        one, other = socket.socketpair()
        reads, writes = one.detach(), other.detach()
    fds = {reads, writes}
    try:
        yield writes, reads, fds.discard
    finally:
        for fd in fds:
            os.close(fd)


def read_all(fd: int, n_bytes: int) -> bytes:
    parts: list[bytes] = []
    while n_bytes > 0 and (part := os.read(fd, 2**20)):
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


both_kinds = pytest.mark.parametrize("kind", ["pipe", "socketpair"])


@both_kinds
@pytest.mark.requirement("ACP-002", "B105", "B126")
async def test_with_nobody_reading_nothing_blocks_and_with_a_late_reader_nothing_is_lost(kind):
    with channel(kind) as (writes, reads, _):
        outbox = FdOutbox(writes)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outbox.run, lambda: None)
            messages = [b"%d %s" % (n, MEGABYTE) for n in range(10)]
            for message in messages:
                outbox.send(message)

            # The writer task is waiting too, so the event loop goes on.
            await wait_all_tasks_blocked()
            assert outbox.is_congested

            expected = b"\n".join([*messages, b""])
            with anyio.fail_after(10):
                data = await anyio.to_thread.run_sync(read_all, reads, len(expected))
                await outbox.flushed()

            assert data == expected
            assert not outbox.is_congested
            tasks.cancel_scope.cancel()


@both_kinds
async def test_producers_are_let_go_when_the_reader_catches_up(kind):
    with channel(kind) as (writes, reads, _):
        outbox, released = FdOutbox(writes), anyio.Event()

        async def produce() -> None:
            await outbox.drained()
            released.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outbox.run, lambda: None)
            for _n in range(4):
                outbox.send(MEGABYTE)
            tasks.start_soon(produce)
            await wait_all_tasks_blocked()
            assert not released.is_set()

            with anyio.fail_after(10):
                await anyio.to_thread.run_sync(read_all, reads, 4 * 2**20)
                await released.wait()
            tasks.cancel_scope.cancel()


async def test_a_short_queue_holds_nobody_up():
    with channel("pipe") as (writes, _reads, _):
        outbox = FdOutbox(writes)
        outbox.send(b"x" * (HIGH_WATER_BYTES // 8))

        with anyio.fail_after(5):
            await outbox.drained()

        assert not outbox.is_congested


@both_kinds
async def test_a_line_after_silence_is_there_before_its_sender_lets_the_loop_go_on(kind):
    with channel(kind) as (writes, reads, _):
        os.set_blocking(reads, False)
        outbox = FdOutbox(writes)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outbox.run, lambda: None)
            for n in range(3):
                await wait_all_tasks_blocked()
                outbox.send(b"first %d" % n)
                outbox.send(b"second")

                assert os.read(reads, 100) == b"first %d\n" % n

                await wait_all_tasks_blocked()
                assert os.read(reads, 100) == b"second\n"
            tasks.cancel_scope.cancel()


@both_kinds
async def test_a_line_after_silence_that_is_too_long_to_be_written_at_once_comes_whole(kind):
    with channel(kind) as (writes, reads, _):
        outbox = FdOutbox(writes)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outbox.run, lambda: None)
            await wait_all_tasks_blocked()
            outbox.send(MEGABYTE)
            outbox.send(b"behind it")

            expected = MEGABYTE + b"\nbehind it\n"
            with anyio.fail_after(10):
                data = await anyio.to_thread.run_sync(read_all, reads, len(expected))
                await outbox.flushed()

            assert data == expected
            tasks.cancel_scope.cancel()


@both_kinds
async def test_a_reader_that_left_in_silence_is_noticed_with_the_next_line(kind):
    with channel(kind) as (writes, reads, closed):
        outbox, lost = FdOutbox(writes), anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outbox.run, lost.set)
            await wait_all_tasks_blocked()
            os.close(reads)
            closed(reads)
            outbox.send(b"{}")

            with anyio.fail_after(5):
                await lost.wait()
                await outbox.flushed()


@both_kinds
async def test_a_reader_that_leaves_is_noticed_and_frees_everybody(kind):
    with channel(kind) as (writes, reads, closed):
        outbox, lost = FdOutbox(writes), anyio.Event()
        async with anyio.create_task_group() as tasks:
            for _n in range(10):
                outbox.send(MEGABYTE)
            tasks.start_soon(outbox.run, lost.set)
            tasks.start_soon(outbox.drained)
            await wait_all_tasks_blocked()
            os.close(reads)
            closed(reads)

            with anyio.fail_after(5):
                await lost.wait()
                await outbox.drained()
                await outbox.flushed()

        outbox.send(MEGABYTE * 2)
        assert not outbox.is_congested


async def test_a_full_disk_behind_the_output_is_noticed():
    fd = os.open("/dev/full", os.O_WRONLY)
    outbox, lost = FdOutbox(fd), anyio.Event()
    async with anyio.create_task_group() as tasks:
        outbox.send(b"{}")
        tasks.start_soon(outbox.run, lost.set)
        with anyio.fail_after(5):
            await lost.wait()
    os.close(fd)


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "dev-null"])
async def test_a_file_and_dev_null_take_everything(is_file, tmp_path):
    path = tmp_path / "out" if is_file else Path(os.devnull)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    outbox = FdOutbox(fd)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run, lambda: None)
        for n in range(3):
            outbox.send(b"%d %s" % (n, MEGABYTE))
        with anyio.fail_after(10):
            await outbox.flushed()
        tasks.cancel_scope.cancel()
    os.close(fd)
    if is_file:
        lines = path.read_bytes().split(b"\n")
        assert [line[:1] for line in lines] == [b"0", b"1", b"2", b""]


@both_kinds
async def test_what_others_share_stays_blocking_and_children_do_not_inherit_it(kind):
    with channel(kind) as (writes, _reads, _):
        shared = os.dup(writes)
        FdOutbox(writes)

        assert os.get_blocking(shared)
        assert not os.get_inheritable(writes)
        os.close(shared)


async def test_the_descriptors_of_an_outbox_are_not_multiplied():
    with channel("pipe") as (writes, _reads, _):
        before = len(os.listdir("/proc/self/fd"))
        FdOutbox(writes)

        assert len(os.listdir("/proc/self/fd")) == before


# --- reading --------------------------------------------------------------------------------


@both_kinds
@pytest.mark.requirement("B103", "B097")
async def test_lines_are_read_until_the_peer_closes_its_end(kind):
    with channel(kind) as (writes, reads, closed):
        lines: list[bytes | None] = []

        def write() -> None:
            for piece in (b"one\ntw", b"o\n", MEGABYTE + b"\n", b"half"):
                os.write(writes, piece) if len(piece) < 100 else write_all(writes, piece)
            os.close(writes)
            closed(writes)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, write)
            with anyio.fail_after(10):
                await read_lines(reads, lines.append)

        assert lines == [b"one", b"two", MEGABYTE, b"half"]


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


async def test_a_file_is_read_to_its_end(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"one\n\ntwo")
    fd = os.open(path, os.O_RDONLY)
    lines: list[bytes | None] = []
    with anyio.fail_after(5):
        await read_lines(fd, lines.append)
    os.close(fd)

    assert lines == [b"one", b"", b"two"]


async def test_a_connection_that_is_reset_has_ended():
    with channel("socketpair") as (writes, reads, closed):
        os.write(reads, b"never read")  # closing with unread data resets a socket pair
        lines: list[bytes | None] = []
        os.close(writes)
        closed(writes)

        with anyio.fail_after(5):
            await read_lines(reads, lines.append)

        assert lines == [b""]


# --- the process's own descriptors ----------------------------------------------------------

CLAIM = """
import os, subprocess, sys, warnings
from acp_server.logs import quiet_streams
from acp_server.transports.stdio import claim_stdio
reads, writes = claim_stdio()
quiet_streams()
print("print")
sys.stdout.write("write")
os.write(1, b"raw")
warnings.warn("warning")
subprocess.run(["sh", "-c", "echo child; cat; echo child >&2"], close_fds=False)
os.system(f"echo through the descriptor >&{writes}")
line = os.read(reads, 100)
os.write(writes, b'{"read":"%s"}' % line.strip())
assert not os.get_inheritable(reads) and not os.get_inheritable(writes)
"""


@pytest.mark.requirement("ACP-003", "B109", "B098")
def test_nothing_but_the_protocol_reaches_stdout_and_no_child_reads_stdin():
    done = subprocess.run(
        [sys.executable, "-c", CLAIM], input=b"ours\n", capture_output=True, timeout=30, check=True
    )

    assert done.stdout == b'{"read":"ours"}'
    assert b"child\nchild\n" in done.stderr


@pytest.mark.parametrize("missing", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_process_started_without_some_of_the_three_can_be_served(missing):
    code = "import os; from acp_server.transports.stdio import claim_stdio\n" + (
        "from acp_server.logs import quiet_streams; import sys, stat\n"
        "reads, writes = claim_stdio(); quiet_streams(); print('x')\n"
        "assert min(reads, writes) > 2; os.write(writes, b'{}'); os.read(reads, 10)\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {missing}', sys.executable, code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 0
    assert done.stdout == (b"" if "1>" in missing else b"{}")
