from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.trace import Entry, decode
from conformance.traces import read_trace, to_line

REQUEST = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}
RESPONSE = {"jsonrpc": "2.0", "id": 1, "result": {"protocolVersion": 1}}
RAW = [json.dumps(REQUEST), json.dumps(RESPONSE)]
AGENT = [sys.executable, "-m", "conformance.selftest"]

FORMS = {
    "ours": [
        {"time_s": 0.1, "direction": "sent", "raw": RAW[0]},
        {"time_s": 0.2, "direction": "received", "raw": RAW[1]},
    ],
    "a recorder's": [
        {"t": 0.0, "dir": "meta", "raw": "spawn"},
        {"t": 0.1, "dir": "c2a", "raw": RAW[0], "msg": REQUEST},
        {"t": 0.15, "dir": "err", "raw": "hello"},
        {"t": 0.2, "dir": "a2c", "raw": RAW[1], "msg": RESPONSE},
    ],
    "an inspector's": [
        {"ts": "2026-01-15T10:00:00.000Z", "direction": "fromClient", "json": RAW[0]},
        {"ts": 1736935200000, "direction": "FromAgent", "json": RAW[1]},
    ],
    "a conductor's": [
        {"ts": 0.1, "type": "request", "protocol": "acp", "from": "client", "to": "proxy:0"}
        | {"id": 1, "method": "initialize", "session": None, "params": REQUEST["params"]},
        {"ts": 0.1, "type": "request", "protocol": "acp", "from": "proxy:0", "to": "agent"}
        | {"id": 7, "method": "initialize", "session": None, "params": {}},
        {"ts": 0.1, "type": "trace", "component": "agent", "level": "info", "message": "hi"},
        {"ts": 0.2, "type": "response", "from": "proxy:0", "to": "client", "id": 1}
        | {"is_error": False, "payload": RESPONSE["result"]},
    ],
}


@pytest.mark.parametrize("rows", FORMS.values(), ids=FORMS)
def test_traces_of_known_recorders_say_the_same(tmp_path: Path, rows: list[object]) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(json.dumps(row) for row in rows))

    entries = read_trace(path)

    assert [each.direction for each in entries] == ["sent", "received"]
    assert [each.message for each in entries] == [REQUEST, RESPONSE]


def test_text_with_arrows_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(f"   0.001 --> {RAW[0]}\n<-- {RAW[1]}\n")

    assert [each.message for each in read_trace(path)] == [REQUEST, RESPONSE]


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('hello\n{"a": 1}\n')

    with pytest.raises(ValueError, match=r"none of its 2 lines is in a known form \(ours, "):
        read_trace(path)


def test_a_trace_of_ours_is_read_as_it_was_written(tmp_path: Path) -> None:
    raw = '{"a":"é \N{GRINNING FACE}"}'.encode()
    entries = [Entry(0.25, "sent", raw, decode(raw)), Entry(0.5, "received", b"no JSON \xff", None)]
    path = tmp_path / "trace"

    path.write_bytes(b"".join(to_line(each) for each in entries))

    first, second = read_trace(path)
    assert first == entries[0]
    assert (second.raw, second.message) == (b"no JSON \\xff", None)


# The proxy


def proxied(*options: str) -> list[str]:
    return [sys.executable, "-m", "conformance", "proxy", *options, "--", *AGENT]


def test_the_proxy_changes_no_byte_and_keeps_what_was_said(tmp_path: Path) -> None:
    said = (RAW[0] + "\n" + '{"jsonrpc": "2.0", "id": "é", "method": "_x"}\n').encode()
    trace = tmp_path / "trace.jsonl"

    direct = subprocess.run(AGENT, input=said, capture_output=True, timeout=30, check=True)
    through = subprocess.run(
        proxied("--trace", str(trace)), input=said, capture_output=True, timeout=30, check=True
    )

    assert through.stdout == direct.stdout
    assert through.stderr == direct.stderr
    entries = read_trace(trace)
    assert b"".join(e.raw + b"\n" for e in entries if e.direction == "sent") == said
    assert b"".join(e.raw + b"\n" for e in entries if e.direction == "received") == direct.stdout


def test_what_the_proxy_kept_can_be_judged(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    subprocess.run(
        proxied("--trace", str(trace)), input=f"{RAW[0]}\n".encode(), timeout=30, check=True
    )

    lint = subprocess.run(
        [sys.executable, "-m", "conformance", "lint", str(trace)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert lint.returncode == 0, lint.stderr
    assert "acp-reference-agent" in lint.stdout
    assert "conformant" in lint.stdout


def test_the_proxy_passes_signals_on_and_ends_as_its_agent_does(tmp_path: Path) -> None:
    with subprocess.Popen(
        proxied("--json", str(tmp_path / "r.json")), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as proxy:
        assert proxy.stdin is not None
        assert proxy.stdout is not None
        proxy.stdin.write(f"{RAW[0]}\n".encode())
        proxy.stdin.flush()
        assert proxy.stdout.readline().startswith(b"{")
        proxy.send_signal(signal.SIGTERM)
        assert (
            proxy.wait(timeout=30)
            == subprocess.run(
                ["sh", "-c", f"{' '.join(AGENT)} </dev/null"], timeout=30, check=False
            ).returncode
        )
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["isJudged"] is True


def test_an_agent_that_cannot_be_started_is_said() -> None:
    proxy = subprocess.run(
        [sys.executable, "-m", "conformance", "proxy", "--", "/does/not/exist"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert proxy.returncode == 2
    assert "the agent cannot be started" in proxy.stderr
    assert proxy.stdout == ""
