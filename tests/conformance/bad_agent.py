"""A tiny agent that is bad in one way: ``bad_agent.py WAY TOKEN``. TOKEN marks what it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

WAY = sys.argv[1]
SLEEP = "import time; time.sleep(1000)"


def say(raw: bytes) -> None:
    os.write(1, raw + b"\n")


def answer(request: dict, result: object) -> None:
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode())


def flood(piece: bytes) -> None:
    while True:
        os.write(1, piece)


def begin() -> None:
    if WAY == "banner":
        say(b"Welcome!")
    elif WAY == "latin":
        say("Grüße".encode("latin-1"))
    elif WAY == "dies":
        sys.exit("there is no key")
    elif WAY == "hangs":
        time.sleep(1000)
    elif WAY == "floods":
        flood(b"la\n" * 20_000)
    elif WAY == "floods messages":
        flood(b'{"jsonrpc":"2.0","method":"_a/b"}\n' * 2000)
    elif WAY == "one endless line":
        flood(b"x" * 65536)
    elif WAY == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif WAY == "forks away":
        subprocess.Popen([sys.executable, "-c", SLEEP, sys.argv[2]], start_new_session=True)
    elif WAY == "forks away and leaves no mark" and not os.fork():
        os.setsid()
        if not os.fork():
            os.execve(sys.executable, [sys.executable, "-c", SLEEP, sys.argv[2]], {})
        os._exit(0)


begin()
for line in sys.stdin.buffer:
    try:
        request = json.loads(line)
    except ValueError:
        continue
    if WAY == "answers notifications" and isinstance(request, dict) and "method" in request:
        request.setdefault("id", "")
    if not isinstance(request, dict) or not {"id", "method"} <= request.keys():
        continue
    if request["method"] == WAY:
        continue
    if request.get("method") == "initialize":
        answer(request, {"protocolVersion": 1, "agentCapabilities": {}})
    elif request.get("method") == "session/new":
        answer(request, {"sessionId": os.urandom(8).hex()})
    elif request.get("method") == "session/prompt":
        answer(request, {"stopReason": "end_turn"})
    else:
        error = {"code": -32601, "message": "Method not found"}
        say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}).encode())
while WAY == "stays":
    time.sleep(1)
