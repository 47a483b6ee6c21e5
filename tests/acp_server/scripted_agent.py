"""An ACP agent without a model: the first word of a prompt says what it does.

A stand-alone script, for the tests of clients. Standard library only; starts fast.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

STUBBORN = "--stubborn" in sys.argv  # does not leave at the end of its input, nor for SIGTERM

OPTIONS = [
    {"optionId": "go", "name": "Allow", "kind": "allow_once"},
    {"optionId": "always", "name": "Always allow", "kind": "allow_always"},
    {"optionId": "no", "name": "Reject", "kind": "reject_once"},
]
MODES = [{"id": "ask", "name": "Ask"}, {"id": "auto", "name": "Auto"}]

write_lock = threading.Lock()
cancelled = threading.Event()
waiting: dict[int, queue.SimpleQueue] = {}
next_id = iter(range(1, 1_000_000))


def send(**message) -> None:
    line = json.dumps({"jsonrpc": "2.0", **message})
    with write_lock:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def update(kind: str, /, **fields) -> None:
    params = {"sessionId": "s1", "update": {"sessionUpdate": kind, **fields}}
    send(method="session/update", params=params)


def say(text: str, kind: str = "agent_message_chunk") -> None:
    update(kind, content={"type": "text", "text": text})


def start_request(method: str, params: dict) -> int:
    request_id = next(next_id)
    waiting[request_id] = queue.SimpleQueue()
    send(id=request_id, method=method, params=params)
    return request_id


def call(method: str, params: dict) -> dict:
    return waiting[start_request(method, params)].get()


def ask(title: str) -> dict:
    tool_call = {"toolCallId": "ask", "title": title, "kind": "execute"}
    return {"sessionId": "s1", "toolCall": tool_call, "options": OPTIONS}


def text_content(text: str) -> list[dict]:
    return [{"type": "content", "content": {"type": "text", "text": text}}]


def count(argument: str) -> None:
    for number in range(1, int(argument) + 1):
        say(f"{number} ")


def wait(argument: str) -> str:
    update("tool_call", toolCallId="w", title="Sleep", kind="execute", status="in_progress")
    say("waiting")
    cancelled.wait()
    update("tool_call_update", toolCallId="w", status="failed")
    return "cancelled"


def deaf(argument: str) -> None:
    update("tool_call", toolCallId="d", title="Ponder", kind="think", status="in_progress")
    while True:
        time.sleep(1)


def permission(argument: str) -> str | None:
    reply = call("session/request_permission", ask(argument or "Run: rm -rf build"))
    outcome = reply.get("result", {}).get("outcome", {})
    say(f"outcome {outcome.get('optionId', outcome.get('outcome'))}")
    return "cancelled" if outcome.get("outcome") == "cancelled" else None


def pair(argument: str) -> str:
    """Ask two questions at once."""
    ids = [start_request("session/request_permission", ask(title)) for title in ("one", "two")]
    outcomes = [waiting[request_id].get()["result"]["outcome"]["outcome"] for request_id in ids]
    say(f"outcomes {outcomes}")
    return "cancelled"


def gate(argument: str) -> str | None:
    """Ask once the file `argument` exists."""
    say("soon")
    while not os.path.exists(argument):
        time.sleep(0.01)
    return permission("")


def withdraw(argument: str) -> None:
    request_id = start_request("session/request_permission", ask("Never mind"))
    send(method="$/cancel_request", params={"requestId": request_id})
    say(f"withdrawn {waiting[request_id].get()['error']['code']}")


def tools(argument: str) -> None:
    path = os.path.join(os.getcwd(), "hello.py")
    diff = [{"type": "diff", "path": path, "oldText": "a\nb\n", "newText": "a\nc\n"}]
    update("tool_call", toolCallId="e", title="Edit hello.py", kind="edit", status="in_progress")
    update("tool_call_update", toolCallId="e", status="completed", content=diff)
    update("tool_call", toolCallId="r", title="Run tests", kind="execute", status="in_progress")
    lines = "".join(f"line {number}\n" for number in range(1, 31))
    update("tool_call_update", toolCallId="r", status="failed", content=text_content(lines))
    entries = [
        {"content": "look", "priority": "high", "status": "completed"},
        {"content": "edit", "priority": "high", "status": "in_progress"},
        {"content": "test", "priority": "low", "status": "pending"},
    ]
    update("plan", entries=entries)
    say("hm", "agent_thought_chunk")
    say("done")


def evil(argument: str) -> None:
    say("\x1b]0;owned\x07\x1b[2Jre\x9b31md\rsafe\u202etext")
    title = "bad\x1b[1A\nname"
    update("tool_call", toolCallId="x", title=title, kind="other", status="completed")


def fail(argument: str) -> None:
    raise RuntimeError("the model is on holiday")


def die(argument: str) -> None:
    sys.stderr.write("last words\n")
    sys.stderr.flush()
    os._exit(3)


def noise(argument: str) -> None:
    with write_lock:
        sys.stdout.write("hello from a print\n")
        sys.stdout.flush()
    say("sorry")


def big(argument: str) -> None:
    say("x" * int(argument))


def client_method(argument: str) -> None:
    reply = call(argument, {})
    say(f"code {reply.get('error', {}).get('code')}")


def orphan(argument: str) -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    say(str(child.pid))


def slash(argument: str) -> None:
    say("slash command")


COMMANDS = {
    "count": count,
    "wait": wait,
    "deaf": deaf,
    "ask": permission,
    "pair": pair,
    "gate": gate,
    "withdraw": withdraw,
    "tools": tools,
    "evil": evil,
    "fail": fail,
    "die": die,
    "noise": noise,
    "big": big,
    "call": client_method,
    "orphan": orphan,
    "/hi": slash,
}


def prompt(request_id: object, params: dict) -> None:
    cancelled.clear()
    first, _, rest = params["prompt"][0]["text"].partition(" ")
    try:
        reason = COMMANDS.get(first, slash)(rest)
    except RuntimeError as error:
        send(id=request_id, error={"code": -32603, "message": str(error)})
    else:
        send(id=request_id, result={"stopReason": reason or "end_turn"})


def initialize(params: dict) -> dict:
    return {
        "protocolVersion": 1,
        "agentCapabilities": {},
        "agentInfo": {"name": "scripted", "title": "Scripted agent", "version": "1.0"},
        "authMethods": [],
    }


def new_session(params: dict) -> dict:
    commands = [{"name": "hi", "description": "Say hi"}]
    update("available_commands_update", availableCommands=commands)
    return {"sessionId": "s1", "modes": {"currentModeId": "ask", "availableModes": MODES}}


def set_mode(params: dict) -> dict:
    if params["modeId"] not in [mode["id"] for mode in MODES]:
        raise ValueError("no such mode")
    return {}


METHODS = {
    "initialize": initialize,
    "session/new": new_session,
    "session/set_mode": set_mode,
}


def receive(message: dict) -> None:
    method, request_id = message.get("method"), message.get("id")
    if method is None:
        waiting[request_id].put(message)
    elif method == "session/prompt":
        arguments = (request_id, message["params"])
        threading.Thread(target=prompt, args=arguments, daemon=True).start()
    elif method == "session/cancel":
        cancelled.set()
    elif method in METHODS:
        try:
            send(id=request_id, result=METHODS[method](message["params"]))
        except ValueError as error:
            send(id=request_id, error={"code": -32602, "message": str(error)})
    elif request_id is not None:
        send(id=request_id, error={"code": -32601, "message": "Method not found"})


def main() -> None:
    if STUBBORN:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin:
        receive(json.loads(line))
    while STUBBORN:
        time.sleep(1)
    os._exit(0)  # turns may still run


if __name__ == "__main__":
    main()
