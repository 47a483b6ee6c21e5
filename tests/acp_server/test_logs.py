from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest


def run(code: str, *, stderr: int = subprocess.PIPE, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        timeout=30,
        check=False,
        **options,
    )


def records(raw: bytes) -> list[dict]:
    return [json.loads(line) for line in raw.splitlines()]


LOG = """
import logging
from agent_core.logs import get_logger
from acp_server.logs import set_up_logs
set_up_logs({arguments})
log = get_logger("a.module")
log.debug("d_happened")
log.info("i_happened", n=1)
log.warning("w_happened", session_id="s", odd=object, text="\\n\\u2028é")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("e_happened")
logging.getLogger("library").warning("careful %d", 5)
logging.getLogger("library").info("chatter")
"""


def test_by_default_only_warnings_are_written_as_json_lines_to_stderr():
    done = run(LOG.format(arguments=""))

    warning, error, library = records(done.stderr)
    assert done.stdout == b""
    assert (warning["event"], warning["level"], warning["logger"], warning["session_id"]) == (
        "w_happened",
        "warning",
        "a.module",
        "s",
    )
    assert warning["text"] == "\n\u2028é"
    assert error["event"] == "e_happened"
    assert "ZeroDivisionError" in error["exception"]
    assert (library["logger"], library["event"]) == ("library", "careful 5")


def test_a_lower_level_shows_more_of_ours_but_not_of_libraries():
    done = run(LOG.format(arguments='"debug"'))

    assert [record["event"] for record in records(done.stderr)] == [
        "d_happened",
        "i_happened",
        "w_happened",
        "e_happened",
        "careful 5",
    ]


CHATTERBOX = """
import logging
from acp_server.logs import set_up_logs
set_up_logs("debug")
library = logging.getLogger("library")
library.setLevel(logging.DEBUG)
library.debug("X-Api-Key: sk-secret")
library.warning("careful")
"""


def test_a_library_that_wants_to_be_heard_is_not_and_keeps_its_secrets():
    done = run(CHATTERBOX)

    assert [record["event"] for record in records(done.stderr)] == ["careful"]


def test_a_log_file_is_appended_to_and_only_its_owner_may_read_it(tmp_path):
    path = tmp_path / "log"
    for _time in range(2):
        done = run(LOG.format(arguments=f'path="{path}"'))

    assert done.stderr == b""
    assert len(records(path.read_bytes())) == 6
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


FLOOD = """
import os, sys, traceback, warnings, logging
from acp_server.logs import quiet_streams, set_up_logs
from agent_core.logs import get_logger
quiet_streams()
set_up_logs({arguments})
for n in range(2000):
    get_logger("x").warning("flooded", text="x" * 1000)
print("x" * 1_000_000)
sys.stderr.write("x" * 1_000_000)
logging.getLogger("y").error("x" * 1_000_000)
warnings.warn("x" * 1_000_000)
sys.stderr.flush()
os._exit(7)
"""


@pytest.mark.requirement("ACP-004", "ACP-177")
def test_a_stderr_that_nobody_reads_never_blocks():
    reads, writes = os.pipe()
    done = run(FLOOD.format(arguments=""), stderr=writes)
    os.close(writes)
    os.close(reads)

    assert done.returncode == 7


def test_a_stderr_whose_reader_is_gone_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)
    done = run(FLOOD.format(arguments=""), stderr=writes)
    os.close(writes)

    assert done.returncode == 7


def test_a_log_file_on_a_full_disk_is_no_error():
    done = run(FLOOD.format(arguments='path="/dev/full"'), stderr=subprocess.DEVNULL)

    assert done.returncode == 7


def test_a_bad_record_of_a_library_is_not_its_callers_failure():
    code = """
import logging
from acp_server.logs import set_up_logs
set_up_logs()
logging.getLogger("library").warning("bad %d", "record")
logging.getLogger("library").log(35, "odd level")
"""
    assert run(code).returncode == 0


BEFORE = """
from agent_core.logs import before_first_record, get_logger
from acp_server.logs import set_up_logs
import sys
before_first_record(lambda: set_up_logs("warning"))
assert "structlog" not in sys.modules
get_logger("x").debug("ignored")
get_logger("x").warning("seen")
"""


def test_logs_are_set_up_before_the_first_record():
    done = run(BEFORE)

    assert [record["event"] for record in records(done.stderr)] == ["seen"]
    assert done.stdout == b""
