"""MCP servers as processes: one that does as it is told, also what none should, and the SDK's own.

Run as a script it is the server; imported it makes the values that start one. The first kind is
plain Python and starts at once; it writes every line it reads to its log, which the tests watch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PNG = "iVBORw0KGgo="


class Double:
    """A server of the first kind, as a test sees it from outside.

    Options: `delay_s` (before it answers the handshake), `hang_at` and `die_at` (`initialize`,
    `list` or `call`), `on_cancel` (`silent`, `answer`), `floods_stderr`, `noise` (lines on
    stdout), `tools` (a list to give as it is), `stays` (ignores TERM and the end of its input),
    `has_child`, `lingers_s` (after the end of its input), `notes_term`, `last_words` (on stderr).
    """

    def __init__(self, folder: Path, name: str = "double", **options: Any) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.options = {**options, "log": str(self.log)}

    @property
    def command(self) -> list[str]:
        return [sys.executable, __file__, "double", json.dumps(self.options)]

    def wire(self, **more: Any) -> dict[str, Any]:
        """The server as a client names it."""
        return {"name": self.name, "command": self.command[0], "args": self.command[1:], **more}

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What it has read, and what it noted besides, of all its processes."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().split("\n") if line]

    def got(self, method: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("method") == method]

    @property
    def pids(self) -> list[int]:
        return [line["pid"] for line in self.lines if "pid" in line]

    @property
    def alive(self) -> list[int]:
        return [pid for pid in self.pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def sdk_server(transport: str, port: int = 0) -> list[str]:
    """The command of a server made with the SDK: `stdio`, `streamable-http` or `sse`."""
    return [sys.executable, __file__, "sdk", transport, str(port)]


# --- what follows runs in the server's process ----------------------------------------------


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object"}, **fields}


TOOLS = [
    tool(
        "echo",
        title="Echo it",
        description="Says it again.",
        annotations={"readOnlyHint": True},
        inputSchema={"type": "object", "properties": {"text": {"type": "string"}}},
    ),
    tool("sleep"),
    tool("count"),
    tool("environ"),
    tool("progress"),
    tool("ask"),
    tool("roots"),
    tool("sample"),
    tool("change"),
    tool("die"),
    tool("blocks"),
    tool("structured"),
    tool("fail"),
    tool("refuse"),
]

BLOCKS = [
    {"type": "text", "text": "words"},
    {"type": "image", "data": PNG, "mimeType": "image/png"},
    {"type": "audio", "data": PNG, "mimeType": "audio/wav"},
    {"type": "resource_link", "uri": "file:///a", "name": "a"},
    {"type": "resource", "resource": {"uri": "file:///b", "text": "inside"}},
    {"type": "resource", "resource": {"uri": "file:///c", "blob": PNG}},
    {"type": "hologram"},
    "nothing at all",
]


class _Server:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.log = open(options["log"], "a", buffering=1)  # noqa: SIM115 - as long as the process
        self.counter = 0
        self.extra: list[dict[str, Any]] = []
        self.asked: dict[str, Any] = {}  # our request's id -> the call that waits for its answer

    def note(self, **fields: Any) -> None:
        self.log.write(json.dumps(fields) + "\n")

    def send(self, **message: Any) -> None:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()

    def answer(self, request: dict[str, Any], *content: Any, **more: Any) -> None:
        self.send(id=request["id"], result={"content": list(content), **more})

    def say(self, request: dict[str, Any], text: str) -> None:
        self.answer(request, {"type": "text", "text": text})

    def run(self) -> None:
        self.note(pid=os.getpid())
        options = self.options
        if options.get("stays"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if options.get("notes_term"):
            signal.signal(signal.SIGTERM, self.leave)
        if options.get("has_child"):
            child = subprocess.Popen(["sleep", "1000"])
            self.note(pid=child.pid)
        if text := options.get("last_words"):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        if options.get("floods_stderr"):
            sys.stderr.write("flood " * 500_000)
            sys.stderr.flush()
        for number in range(options.get("noise", 0)):
            sys.stdout.write(f"listening on {number}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            message = json.loads(line)
            self.log.write(line)
            self.handle(message)
        self.note(event="end of input")
        time.sleep(options.get("lingers_s", 0))
        while options.get("stays"):
            time.sleep(1)

    def leave(self, *_of_signal: object) -> None:
        self.note(event="term")
        os._exit(0)

    def handle(self, message: dict[str, Any]) -> None:
        method = message.get("method")
        if method is None:
            self.say(self.asked.pop(message["id"]), json.dumps(message.get("result") or message))
        elif method == "notifications/cancelled":
            if self.options.get("on_cancel") == "answer":
                self.say({"id": message["params"]["requestId"]}, "stopped halfway")
        elif method == "initialize":
            self.at("initialize")
            time.sleep(self.options.get("delay_s", 0))
            self.send(
                id=message["id"],
                result={
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": {"tools": {"listChanged": True}},
                    "serverInfo": {"name": "double", "version": "1"},
                },
            )
        elif method == "tools/list":
            self.at("list")
            tools = self.options.get("tools", TOOLS)
            self.send(id=message["id"], result={"tools": [*tools, *self.extra]})
        elif method == "tools/call":
            self.at("call")
            self.call(message)

    def at(self, stage: str) -> None:
        if self.options.get("die_at") == stage:
            os._exit(3)
        while self.options.get("hang_at") == stage:
            time.sleep(1)

    def call(self, request: dict[str, Any]) -> None:
        name, arguments = request["params"]["name"], request["params"]["arguments"]
        match name:
            case "echo":
                self.say(request, json.dumps(arguments))
            case "count":
                self.counter += 1
                self.say(request, f"{self.counter} by {os.getpid()}")
            case "environ":
                self.say(request, json.dumps(dict(os.environ)))
            case "progress":
                token = request["params"]["_meta"]["progressToken"]
                params = {"progressToken": token, "progress": 1, "total": 3, "message": "halfway"}
                self.send(method="notifications/progress", params=params)
                self.say(request, "done")
            case "ask":
                schema = {"type": "object", "properties": {"colour": {"type": "string"}}}
                params = {"mode": "form", "message": "Really?", "requestedSchema": schema}
                self.request(request, "elicitation/create", params)
            case "roots":
                self.request(request, "roots/list", {})
            case "sample":
                self.request(request, "sampling/createMessage", {"messages": [], "maxTokens": 1})
            case "change":
                self.extra.append(tool("new_one"))
                self.send(method="notifications/tools/list_changed")
                self.say(request, "changed")
            case "die":
                sys.stderr.write("I have lost my will to live\n")
                sys.stderr.flush()
                os._exit(7)
            case "blocks":
                self.answer(request, *BLOCKS)
            case "structured":
                self.answer(request, structuredContent={"answer": 42})
            case "fail":
                self.answer(request, {"type": "text", "text": "no luck"}, isError=True)
            case "refuse":
                self.send(id=request["id"], error={"code": -32602, "message": "not like this"})
            case _:
                pass  # "sleep": an answer never comes

    def request(self, call: dict[str, Any], method: str, params: dict[str, Any]) -> None:
        self.asked[f"q-{call['id']}"] = call
        self.send(id=f"q-{call['id']}", method=method, params=params)


def _run_sdk_server(transport: str, port: int) -> None:
    import anyio
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sdk")

    @server.tool()
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    async def wait(path: str) -> str:
        """Wait for ever, and leave a note when cancelled."""
        note = Path(path).write_text
        note("waiting")
        try:
            await anyio.sleep_forever()
        except BaseException:
            note("cancelled")
            raise

    run: Callable[..., None] = server.run
    if transport == "stdio":
        run("stdio")
    else:
        run(transport, host="127.0.0.1", port=port)


if __name__ == "__main__":
    if sys.argv[1] == "double":
        _Server(json.loads(sys.argv[2])).run()
    else:
        _run_sdk_server(sys.argv[2], int(sys.argv[3]))
