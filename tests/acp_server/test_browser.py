"""A web page in a real browser: what a page of an origin that was allowed can do, and no other.

Needs Chromium (``apt-get install chromium``), or its path in CHROMIUM.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from network_rig import TOKEN, Server, listening

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
LIMIT_S = 50

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="NOT TRIED in a browser: there is no Chromium"),
]

PAGE = """<!doctype html><script>
const hello = JSON.stringify({jsonrpc: "2.0", id: 1, method: "initialize",
  params: {protocolVersion: 1}});
const token = btoa("TOKEN").replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

function byWebSocket() {
  return new Promise((resolve) => {
    const socket = new WebSocket("ws://ADDRESS/acp", ["acp", "acp.bearer." + token]);
    socket.onopen = () => socket.send(hello);
    socket.onmessage = (event) => resolve(JSON.parse(event.data).result.agentInfo.name);
    socket.onclose = (event) => resolve("closed " + event.code);
  });
}

async function byHttp() {
  try {
    const answer = await fetch("http://ADDRESS/acp", {method: "POST", body: hello,
      headers: {"content-type": "application/json", "authorization": "Bearer TOKEN"}});
    const name = (await answer.json()).result.agentInfo.name;
    return answer.headers.get("acp-connection-id") ? name : "no connection id";
  } catch (error) {
    return String(error.name);
  }
}

async function bySimplePost() {  // which needs no permission to be sent, only to be read
  try {
    return String((await fetch("http://ADDRESS/acp", {method: "POST", body: hello,
      headers: {"content-type": "text/plain"}})).status);
  } catch (error) {
    return String(error.name);
  }
}

(async () => {
  const found = {ws: await byWebSocket(), http: await byHttp(), simple: await bySimplePost()};
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class Site:
    """A site that serves one page, and is told by it what it found."""

    def __init__(self) -> None:
        self.page = ""
        self.found: dict[str, Any] = {}
        self.told = anyio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = head.partition("content-length:")[2].partition("\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            if head.startswith("post /found"):
                self.found = json.loads(body)
                self.told.set()
            page = self.page.encode() if head.startswith("get / ") else b""
            kind = b"content-type: text/html\r\nconnection: close\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (kind, page))
            await writer.drain()
        writer.close()


@asynccontextmanager
async def site() -> AsyncIterator[tuple[Site, str]]:
    """A site and its origin, on this computer and yet another origin than the agent's."""
    at = Site()
    listener = await asyncio.start_server(at.answer, "127.0.0.1", 0)
    async with listener:
        yield at, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def browse(tmp_path: Path, at: Site, origin: str, server: Server, name: str) -> None:
    """Show the site's page in a browser, until the page has told what it found."""
    address = f"{name}:{server.port}"
    at.page = PAGE.replace("ADDRESS", address).replace("TOKEN", TOKEN)
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-dev-shm-usage", "--no-proxy-server", f"--user-data-dir={tmp_path}/profile"),
        "--host-resolver-rules=MAP evil.example 127.0.0.1",
        origin,
    ]
    browser = await anyio.open_process(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(tmp_path)},
        start_new_session=True,
    )
    try:
        with anyio.fail_after(LIMIT_S):
            await at.told.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await browser.wait()


async def test_a_page_of_an_origin_that_was_allowed_can_use_the_agent(tmp_path: Path) -> None:
    async with site() as (at, origin):
        env = {"ACP_AGENT_TOKEN": TOKEN}
        async with listening(tmp_path, f"--origin={origin}", env=env) as server:
            await browse(tmp_path, at, origin, server, "127.0.0.1")

    # The last one shows no token.
    assert at.found == {"ws": "acp-agent", "http": "acp-agent", "simple": "401"}


@pytest.mark.parametrize("token", [TOKEN, ""], ids=["with tokens", "open to this computer"])
async def test_a_page_of_another_origin_is_refused_with_the_right_token_and_without_any(
    tmp_path: Path, token: str
) -> None:
    async with site() as (at, origin):
        flag = "--origin=https://editor.example"
        async with listening(tmp_path, flag, env={"ACP_AGENT_TOKEN": token}) as server:
            await browse(tmp_path, at, origin, server, "127.0.0.1")
            await server.until_said("foreign_origin_refused")

    assert at.found == {"ws": "closed 1006", "http": "TypeError", "simple": "TypeError"}


async def test_a_page_that_points_a_name_of_its_own_here_is_refused(tmp_path: Path) -> None:
    async with site() as (at, origin), listening(tmp_path, f"--origin={origin}") as server:
        await browse(tmp_path, at, origin, server, "evil.example")

    assert at.found["ws"] == "closed 1006"
    assert at.found["http"] == "TypeError"
