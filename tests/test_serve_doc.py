"""docs/serve.md: its commands are run, its tables are those of the code, its files can be read."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
import yaml
from http_rig import JSON, HttpEditor, http_editor
from network_rig import LIMIT_S, TOKEN, Server, listening
from raw_rig import said_to
from websockets.asyncio.client import connect

from acp_server.cli import _parser
from acp_server.config import load_config
from acp_server.config_tables import NetworkConfig
from acp_server.network.security import MAX_GUESSES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
SECTIONS = dict(
    section.partition("\n")[::2] for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
)
ENGINES = ("docker ", "kubectl ")


def blocks(kind: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


# --- commands -------------------------------------------------------------------------------


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of the page, each with what it is said to print."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks("console", text):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def starts_a_server(command: str) -> bool:
    return command.startswith("acp-agent serve")


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]  # nobody else is given it meanwhile


class Shell:
    """Runs the page's commands, with places of its own in the stead of the page's."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        for name in ("etc", "srv/projects", "bin"):
            (folder / name).mkdir(parents=True)
        (folder / "bin/acp-agent").symlink_to(Path(sys.executable).parent / "acp-agent")
        self._environ = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self.servers: list[subprocess.Popen[str]] = []

    def placed(self, text: str) -> str:
        text = text.replace("/etc/acp-agent", str(self._folder / "etc"))
        text = text.replace("/srv/projects", str(self._folder / "srv/projects"))
        return text.replace("8080", str(self._port))

    def stop(self) -> None:
        """End what was started, which has to end well."""
        while self.servers:
            server = self.servers.pop()
            server.send_signal(signal.SIGTERM)
            assert server.wait(LIMIT_S) == 0
            assert server.stderr is not None
            server.stderr.close()

    def serve(self, command: str, said: list[str]) -> None:
        refuses = "Therefore a token is needed" in said[0]
        if refuses:
            done = subprocess.run(
                shlex.split(self.placed(command)), env=self._environ, **_CAPTURED, timeout=LIMIT_S
            )
            assert done.returncode == 2
            printed = done.stderr
        else:
            self.stop()
            server = subprocess.Popen(
                shlex.split(self.placed(command)),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.servers.append(server)
            assert server.stderr is not None
            printed = server.stderr.readline()
        assert is_said([self.placed(line) for line in said], printed), printed

    def run(self, command: str, said: list[str]) -> None:
        done = subprocess.run(
            ["bash", "-c", self.placed(command)], env=self._environ, **_CAPTURED, timeout=LIMIT_S
        )
        assert done.returncode == 0, (command, done.stderr)
        assert is_said([self.placed(line) for line in said], done.stdout), (command, done.stdout)


_CAPTURED: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "capture_output": True,
    "text": True,
    "check": False,
}


def is_said(lines: list[str], printed: str) -> bool:
    pattern = r"\s+".join(re.escape(line).replace("…", ".*") for line in lines)
    return re.search(pattern, printed, re.DOTALL) is not None


def test_the_commands_print_what_the_page_says(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("curl") is None or shutil.which("openssl") is None:
        pytest.skip("there is no curl, or no openssl")
    monkeypatch.delenv("ACP_AGENT_TOKEN", raising=False)
    shell = Shell(tmp_path, port)
    n_run = 0
    try:
        for command, said in commands(PAGE):
            if starts_a_server(command):
                shell.serve(command, said)
            elif not any(engine in command for engine in ENGINES):
                shell.run(command, said)
            n_run += 1
        shell.stop()
    finally:
        for server in shell.servers:
            server.kill()
            server.wait()
    assert n_run > 12


@pytest.mark.parametrize("command", [c for c, _ in commands(PAGE) if "docker " in c])
def test_what_docker_is_told_is_there(command: str) -> None:
    words = shlex.split(command)
    words = words[words.index("docker") + 1 :]
    if words[0] == "run":
        at = words.index("acp-agent")
        if arguments := words[at + 1 :]:
            assert _parser().parse_args(arguments).listen is None
        else:
            assert {"--read-only", "--tmpfs", "ACP_AGENT_TOKEN"} <= set(words[:at])
    else:
        assert words in (["build", "-t", "acp-agent", "."], ["compose", "up"])
        assert (ROOT / ("compose.yaml" if words[0] == "compose" else "Dockerfile")).exists()


def test_what_kubectl_is_told_is_there() -> None:
    (folder,) = re.findall(r"kubectl apply -k (\S+)", PAGE)
    assert (ROOT / folder / "kustomization.yaml").exists()


# --- tables ---------------------------------------------------------------------------------


def limits_table() -> str:
    said = (NetworkConfig.__doc__ or "").partition("Attributes:\n")[2]
    rows = ["| setting | default | what it limits |", "|---|---|---|"]
    fields = {field.name: field.default for field in msgspec.structs.fields(NetworkConfig)}
    for names, text in re.findall(r"^ {8}([a-z][\w, ]*): (.*(?:\n {12}.*)*)", said, re.MULTILINE):
        own = names.split(", ")
        shown = [_shown(fields.pop(name)) for name in own]
        words = re.sub(r"\s+", " ", text).replace("``", "`")
        rows.append(f"| {', '.join(f'`{name}`' for name in own)} | {', '.join(shown)} | {words} |")
    assert not fields, "a setting without a word about it"
    return "\n".join(rows)


def _shown(default: object) -> str:
    if isinstance(default, int) and default >= 1024 * 1024:
        return f"{default // (1024 * 1024)} MiB"
    if isinstance(default, float):
        return f"{default:g}"
    return "none" if default == () else str(default)


def test_the_table_of_limits_is_the_one_the_code_has() -> None:
    assert limits_table() in PAGE


def test_the_times_to_stop_in_are_those_the_command_has() -> None:
    given = _parser().parse_args(["serve"])
    assert re.search(rf"`--drain` seconds \({given.drain:g} by default\)", PAGE)
    assert re.search(rf"seconds \({given.shutdown_grace:g} by default\)", PAGE)


def test_how_many_wrong_tokens_there_may_be_is_what_the_code_says() -> None:
    assert MAX_GUESSES == 20
    assert "Twenty wrong tokens a minute" in PAGE


def test_every_flag_of_the_network_is_on_the_page() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "acp_server", "serve", "--help"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    network = done.stdout.partition("network:")[2]
    flags = set(re.findall(r"^  (--[a-z-]+)", network, re.MULTILINE))
    assert len(flags) >= 9
    assert [flag for flag in sorted(flags) if flag not in PAGE] == []


async def test_the_table_of_metrics_is_the_one_the_server_has(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}) as server,
        httpx2.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http,
    ):
        text = (await http.get(f"{server.http}/metrics")).text
    assert metrics_table(text) in PAGE


def metrics_table(text: str) -> str:
    kinds = dict(re.findall(r"^# TYPE (acp_agent_\w+) (\w+)$", text, re.MULTILINE))
    rows = ["| metric | kind | what it says |", "|---|---|---|"]
    for name, words in re.findall(r"^# HELP (acp_agent_\w+) (.*)$", text, re.MULTILINE):
        if not name.endswith("_created"):
            rows.append(f"| `{name}` | {kinds[name]} | {words} |")
    assert len(rows) > 8
    return "\n".join(rows)


# --- HTTP, header by header -----------------------------------------------------------------

BODY = '{"jsonrpc":"2.0","id":90,"method":"session/list","params":{}}'
EVENTS = {"accept": "text/event-stream"}


def about(session: str) -> str:
    params = f'{{"sessionId":"{session}","prompt":[]}}'
    return f'{{"jsonrpc":"2.0","id":91,"method":"session/prompt","params":{params}}}'


class Mistakes:
    """One method for each row of the table; what it returns are its statuses."""

    def __init__(self, server: Server, client: HttpEditor, session: str) -> None:
        self.server = server
        self.http, self.url = client.http, client.url
        self.own = client.headers()
        self.session = session

    async def ask(self, method: str, body: str = "", **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.http.request(method, self.url, content=body, headers=named)
        return answer.status_code

    async def statuses(self, wrong: str) -> list[int]:
        ask, own, session = self.ask, self.own, self.session
        unknown = {"acp-connection-id": "unknown"}
        match wrong:
            case "no token, or a wrong one":
                return [
                    await ask("POST", BODY, authorization=shown)
                    for shown in ("", "Bearer a-wrong-token-0123")
                ]
            case "a foreign `Origin`, or another `Host` than ours":
                return [
                    await ask("GET", origin="https://evil.example"),
                    await ask("GET", host="evil.example"),
                ]
            case "another path":
                return [(await self.http.get(f"{self.url}/other")).status_code]
            case "another method":
                return [await ask("PUT", BODY, **JSON)]
            case "not `Content-Type: application/json`":
                return [await ask("POST", BODY, content_type="text/plain", **own)]
            case "longer than `max_message_bytes`":
                return [await ask("POST", " " * 1001, **JSON, **own)]
            case "later than `body_s`":
                return [await self.late()]
            case "not one message of JSON-RPC":
                return [await ask("POST", body, **JSON, **own) for body in ("{", "", "1", "{}")]
            case "a batch":
                return [await ask("POST", f"[{BODY}]", **JSON, **own)]
            case "`initialize` with `Acp-Connection-Id`":
                begun = BODY.replace("session/list", "initialize")
                return [await ask("POST", begun, **JSON, **own)]
            case "no `Acp-Connection-Id`":
                return [
                    await ask("POST", BODY, **JSON),
                    await ask("GET", **EVENTS),
                    await ask("DELETE"),
                ]
            case "a connection that is unknown, over, or another's":
                return [
                    await ask("POST", BODY, **JSON, **unknown),
                    await ask("GET", **EVENTS, **unknown),
                    await ask("DELETE", **unknown),
                ]
            case "no `Acp-Session-Id`, or another than in `params`":
                return [
                    await ask("POST", about(session), **JSON, **own),
                    await ask("POST", about(session), **JSON, **own, acp_session_id="other"),
                ]
            case "a session that is not open here":
                named = {"acp-session-id": "sess_none"}
                return [await ask("POST", about("sess_none"), **JSON, **own, **named)]
            case "not `Accept: text/event-stream`":
                return [await ask("GET", accept="application/json", **own)]
            case "somebody reads the stream already":
                return [await ask("GET", **EVENTS, **own)]
            case "too many wrong ones from there":
                shown = "Bearer a-wrong-token-0123"
                return [await ask("POST", authorization=shown) for _ in range(MAX_GUESSES + 1)][-1:]
        raise AssertionError(f"nobody knows how to do this wrong: {wrong}")

    async def late(self) -> int:
        named = {**JSON, **self.own, "host": "localhost", "content-length": "100"}
        named["authorization"] = f"Bearer {TOKEN}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return (await said_to(self.server, f"POST /acp HTTP/1.1\r\n{lines}\r\n{{")).status


async def test_each_row_of_the_table_of_mistakes_has_its_status(tmp_path: Path) -> None:
    table = SECTIONS["HTTP, header by header"].partition("|---|---|---|\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \| (\d+) \|$", table, re.MULTILINE)
    assert len(rows) == len(table.splitlines()) == 17
    # Who guesses too often is not looked at any more, so that comes last.
    rows.sort(key=lambda row: "too many" in row[1])
    async with (
        listening(
            tmp_path,
            network="max_message_bytes = 1000\nbody_s = 0.5",
            env={"ACP_AGENT_TOKEN": TOKEN},
        ) as server,
        http_editor(server, token=TOKEN) as client,
    ):
        mistakes = Mistakes(server, client, await client.new_session(tmp_path))
        for _, wrong, status in rows:
            assert set(await mistakes.statuses(wrong)) == {int(status)}, wrong


# --- files ----------------------------------------------------------------------------------


def test_the_blocks_of_other_programs_can_be_read(tmp_path: Path) -> None:
    (toml,) = blocks("toml")
    (tmp_path / "config.toml").write_text(toml, encoding="utf-8")
    assert load_config({"config": str(tmp_path / "config.toml")}, {}).network.proxies

    (scrapes,) = blocks("yaml")
    (job,) = yaml.safe_load(scrapes)["scrape_configs"]
    assert job["authorization"]["credentials_file"]


def test_the_unit_of_systemd_starts_what_there_is_and_waits_for_it() -> None:
    (unit,) = blocks("ini")
    parsed = configparser.ConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[method-assign,assignment]
    parsed.read_string(unit)
    service = parsed["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "acp-agent"
    given = _parser().parse_args(arguments)
    assert int(service["TimeoutStopSec"]) > given.drain + given.shutdown_grace
    assert given.root == service["ReadWritePaths"]
    assert service["StateDirectory"] in service["Environment"]


@asynccontextmanager
async def nginx(folder: Path, port: int, agent: int) -> AsyncIterator[None]:
    """nginx as the page says, but for its places."""
    (block,) = blocks("nginx")
    for said, here in (
        ("/etc/ssl/agent.example.pem", str(folder / "cert")),
        ("/etc/ssl/agent.example.key", str(folder / "key")),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("127.0.0.1:8080", f"127.0.0.1:{agent}"),
    ):
        assert said in block
        block = block.replace(said, here)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off;\nuser root;\npid {folder}/pid;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{places}{block}}}\n"
    )
    command = ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    process = await anyio.open_process(command, stdin=subprocess.DEVNULL)
    try:
        with anyio.fail_after(LIMIT_S):
            while not (folder / "pid").exists():
                assert process.returncode is None
                await anyio.sleep(0.05)
        yield
    finally:
        process.terminate()
        with anyio.CancelScope(shield=True):
            await process.wait()
            await process.aclose()


async def test_behind_nginx_clients_have_http_2_streams_and_websockets(
    tmp_path: Path, port: int
) -> None:
    if shutil.which("nginx") is None or shutil.which("curl") is None:
        pytest.skip("there is no nginx, or no curl")
    import ssl

    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    make += ["-subj", "/CN=agent.example", "-addext", "subjectAltName=DNS:agent.example"]
    await anyio.run_process(make)
    context = ssl.create_default_context(cafile=str(tmp_path / "cert"))
    url = f"https://agent.example:{port}/acp"
    curl = ["curl", "-sN", "--http2", "--max-time", str(LIMIT_S), "--noproxy", "*"]
    curl += ["--resolve", f"agent.example:{port}:127.0.0.1", "--cacert", str(tmp_path / "cert")]
    curl += ["-H", f"Authorization: Bearer {TOKEN}"]
    post = [*curl, "-i", "-H", "Content-Type: application/json", url, "-d"]
    flags = ("--host", "agent.example")
    async with (
        listening(tmp_path, *flags, env={"ACP_AGENT_TOKEN": TOKEN}) as server,
        nginx(tmp_path, port, server.port),
    ):
        begin = '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}'
        begun = (await anyio.run_process([*post, begin])).stdout.decode()
        assert begun.startswith("HTTP/2 200")
        (connection,) = re.findall(r"^acp-connection-id: (\S+)", begun, re.MULTILINE)
        own = ["-H", f"Acp-Connection-Id: {connection}"]
        reading = [*curl, *own, "-H", "Accept: text/event-stream", url]
        async with await anyio.open_process(reading, stdin=subprocess.DEVNULL) as stream:
            assert stream.stdout is not None
            with anyio.fail_after(LIMIT_S):
                assert b"alive" in await stream.stdout.receive()
                taken = await anyio.run_process([*post, BODY, *own])
                assert taken.stdout.startswith(b"HTTP/2 202")
                assert b'"sessions":[]' in await stream.stdout.receive()
            stream.terminate()
        async with connect(
            url.replace("https", "wss"),
            host="127.0.0.1",
            port=port,
            ssl=context,
            proxy=None,
            additional_headers={"Authorization": f"Bearer {TOKEN}"},
        ) as socket_:
            await socket_.send(begin)
            with anyio.fail_after(LIMIT_S):
                assert '"protocolVersion":1' in str(await socket_.recv())
