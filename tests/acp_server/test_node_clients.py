"""The clients that run on node: the official TypeScript SDK, and the command line client acpx."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest
from foreigners import ACPX, TYPESCRIPT_SDK, on_node
from serve_rig import SERVE

LIMIT_S = 60

# Prints one line of JSON about each thing that it does.
EDITOR = """
import { spawn } from "node:child_process";
import { Readable, Writable } from "node:stream";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [sdk, ...command] = process.argv.slice(2);
const require = createRequire(sdk + "/x.js");
const acp = await import(pathToFileURL(require.resolve("@agentclientprotocol/sdk")).href);
const tell = (what, value) => console.log(JSON.stringify([what, value]));
const agent = spawn(command[0], command.slice(1), { stdio: ["pipe", "pipe", "inherit"] });
const gone = new Promise((resolve) => agent.on("exit", resolve));
const stream = acp.ndJsonStream(Writable.toWeb(agent.stdin), Readable.toWeb(agent.stdout));
const { agent: theirs, client: ours } = acp.methods;
let said = "", asked = 0, begun, first = new Promise((resolve) => { begun = resolve; });

await acp.client({ name: "tests" })
  .onRequest(ours.session.requestPermission, ({ params }) => {
    asked += 1;
    const option = params.options.find(({ kind }) => kind === "allow_once");
    return { outcome: { outcome: "selected", optionId: option.optionId } };
  })
  .onNotification(ours.session.update, ({ params: { update } }) => {
    if (update.sessionUpdate === "agent_message_chunk") said += update.content.text;
    if (said.includes("1 2 3")) begun();
  })
  .connectWith(stream, async (context) => {
    const opening = { protocolVersion: acp.PROTOCOL_VERSION, clientCapabilities: {} };
    tell("version", (await context.request(theirs.initialize, opening)).protocolVersion);
    const place = { cwd: process.cwd(), mcpServers: [] };
    const { sessionId } = await context.request(theirs.session.new, place);
    const ask = async (text) => {
      said = "";
      const prompt = [{ type: "text", text }];
      const { stopReason } = await context.request(theirs.session.prompt, { sessionId, prompt });
      return [stopReason, said];
    };
    tell("hello", await ask("say hello"));
    tell("write", [...(await ask("write there.txt: new")), asked]);
    const slow = ask("count 100000 slowly");
    await first;
    await context.notify(theirs.session.cancel, { sessionId });
    tell("cancelled", (await slow)[0]);
    tell("after", await ask("say ok"));
    said = "";
    await context.request(theirs.session.load, { sessionId, ...place });
    tell("replayed", said.startsWith("hello") && said.endsWith("ok"));
    tell("listed", (await context.request(theirs.session.list, {})).sessions.length);
  });
agent.stdin.end();
tell("exit", await gone);
"""


async def ran(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command to its end; return its exit status and what it printed."""
    with anyio.fail_after(LIMIT_S):
        done = await anyio.run_process(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            check=False,
            stderr=subprocess.STDOUT,
        )
    return done.returncode, done.stdout.decode()


@pytest.mark.requirement("ACP-081", "ACP-084", "ACP-094", "ACP-062")
async def test_a_session_through_the_typescript_sdk(tmp_path: Path) -> None:
    sdk = on_node(TYPESCRIPT_SDK)
    (tmp_path / "editor.mjs").write_text(EDITOR)

    status, printed = await ran(["node", "editor.mjs", str(sdk), *SERVE], tmp_path)

    assert status == 0, printed
    told: dict[str, Any] = dict(
        json.loads(line) for line in printed.splitlines() if line.startswith("[")
    )
    assert told["version"] == 1
    assert told["hello"] == ["end_turn", "hello"]
    assert told["write"][0] == "end_turn"
    assert told["write"][2] == 1  # it asked
    assert (tmp_path / "there.txt").read_text() == "new"
    assert told["cancelled"] == "cancelled"
    assert told["after"] == ["end_turn", "ok"]
    assert told["replayed"] is True
    assert told["listed"] == 1
    assert told["exit"] == 0


class Acpx:
    """acpx in one folder, with a home of its own."""

    def __init__(self, cwd: Path) -> None:
        self._cli = on_node(ACPX) / "dist" / "cli.js"
        self._cwd = cwd
        (cwd / "home").mkdir()

    async def __call__(self, *arguments: str) -> tuple[int, str]:
        agent = ["--cwd", str(self._cwd), "--ttl", "60", "--agent", shlex.join(SERVE)]
        env = {"HOME": str(self._cwd / "home")}
        return await ran(["node", str(self._cli), *agent, *arguments], self._cwd, env)


async def test_acpx_runs_single_prompts_and_passes_its_verdict_on(tmp_path: Path) -> None:
    acpx = Acpx(tmp_path)

    status, printed = await acpx("--approve-all", "exec", "run echo allowed")
    assert (status, "allowed" in printed, "end_turn" in printed) == (0, True, True), printed

    status, printed = await acpx("--deny-all", "exec", "write never.txt: x")
    assert status == 5, printed  # which is how it says that something was denied
    assert not (tmp_path / "never.txt").exists()


async def test_acpx_finds_the_conversation_again_in_a_process_of_its_own(tmp_path: Path) -> None:
    acpx = Acpx(tmp_path)
    assert (await acpx("sessions", "new"))[0] == 0
    for prompt in ("say first", "say second"):
        status, printed = await acpx("--approve-all", "prompt", prompt)
        assert (status, "end_turn" in printed) == (0, True), printed
    assert (await acpx("sessions", "close"))[0] == 0

    status, printed = await acpx("sessions", "list")

    assert (status, "say first" in printed) == (0, True), printed  # its title
