"""An MCP server on standard input and output that writes down how it was started and asked.

``python stub_mcp.py LOG ARGUMENT…``: each line of the file LOG is a JSON object with ``event`` and
what belongs to it. It has one tool, `marker`, that says the variable ``CONFORMANCE_MARKER``. Needs
the standard library only, since the agent starts it.
"""

from __future__ import annotations

import json
import os
import sys

MARKER = "CONFORMANCE_MARKER"
TOOL = {
    "name": "marker",
    "description": "Says the marker.",
    "inputSchema": {"type": "object", "properties": {}},
}


def _result(method: str, params: dict[str, object]) -> dict[str, object] | None:
    match method:
        case "initialize":
            return {
                "protocolVersion": params.get("protocolVersion", "2025-06-18"),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "conformance-stub", "version": "1"},
            }
        case "ping":
            return {}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": os.environ.get(MARKER, "")}]}
        case _:
            return None


def main() -> None:
    """Serve until the input ends. Blocks: for the next line."""
    with open(sys.argv[1], "a", encoding="utf-8") as log:

        def note(event: str, **members: object) -> None:
            print(json.dumps({"event": event, **members}), file=log, flush=True)

        note("start", args=sys.argv[2:], marker=os.environ.get(MARKER), pid=os.getpid())
        for line in sys.stdin:
            message = json.loads(line)
            method = str(message.get("method"))
            note("message", method=method)
            if "id" not in message:
                continue
            answer: dict[str, object] = {"jsonrpc": "2.0", "id": message["id"]}
            result = _result(method, message.get("params") or {})
            if result is None:
                answer["error"] = {"code": -32601, "message": "Method not found"}
            else:
                answer["result"] = result
            sys.stdout.write(f"{json.dumps(answer)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
