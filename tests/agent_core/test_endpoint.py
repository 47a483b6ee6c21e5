from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import model_rig
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.tls import TLSListener
from model_rig import HI, KEY, a_model, a_request, collect, served

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import Text
from agent_core.errors import ModelError
from agent_core.models import endpoint as endpoint_module
from agent_core.models import sdk
from agent_core.models.adapter import Finish, ModelInfo, TextDelta, UserTurn
from agent_core.models.choice import Models
from agent_core.models.endpoint import Endpoint
from agent_core.models.endpoint_model import EndpointModel
from agent_core.models.keys import Key
from agent_core.models.providers import Api, dialect_for
from conformance.providers.messages import last_words as messages_words
from conformance.providers.responses import last_words as responses_words
from conformance.providers.server import (
    DONE,
    Gate,
    ProviderDouble,
    Reply,
    Stall,
    answer,
    finish,
    provider_double,
    status,
    text,
)

APIS: tuple[Api, ...] = ("chat", "responses", "anthropic")
LIBRARIES = ("openai", "anthropic")
TLS = Path(__file__).with_name("tls")  # valid from 2020 to 2119, for localhost
CA_HASH = "b5f80711"  # what OpenSSL looks for the authority under, in a directory
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXY_VARIABLES, *map(str.lower, PROXY_VARIABLES)):
        monkeypatch.delenv(name, raising=False)


def words(api: Api, said: str = "ok") -> Reply:
    """An answer in each of the dialects."""
    if api == "chat":
        return answer(text(said))
    return Reply(responses_words() if api == "responses" else messages_words())


def models_at(double: ProviderDouble, n: int) -> list[EndpointModel]:
    """Models that share an endpoint."""
    endpoint = Endpoint("openai", library="openai", base_url=double.url, key=Key(KEY, advice=""))
    infos = [ModelInfo(f"openai:{n}") for n in range(n)]
    return [
        EndpointModel(
            info, id="any", endpoint=endpoint, dialect=dialect_for("chat", info, "any", double.url)
        )
        for info in infos
    ]


async def failure_at(base_url: str, **options: Any) -> ModelError:
    model = a_model(base_url, **options)
    with anyio.fail_after(10):
        _, error = await collect(model)
        await model.aclose()
    assert isinstance(error, ModelError)
    assert KEY not in str(error)
    return error


# --- connections ----------------------------------------------------------------------------


class CountedDouble(ProviderDouble):
    """A double that knows which connection carried what, in the order they were opened."""

    n_connections = 0

    async def serve(self, stream: SocketStream) -> None:
        self.n_connections += 1
        await super().serve(stream)


@asynccontextmanager
async def counted(script: Sequence[Reply]) -> AsyncIterator[CountedDouble]:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    double = CountedDouble(script, listener.extra(SocketAttribute.local_port))
    with anyio.fail_after(10):
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, double.serve)
            yield double
            tasks.cancel_scope.cancel()


async def test_models_of_one_endpoint_share_its_connections() -> None:
    async with counted([answer(text("a"))] * 6) as double:
        models = models_at(double, 3)
        for model in models * 2:
            assert (await collect(model))[1] is None
        await models[0].aclose()
        await double.no_connection()

    assert double.n_connections == 1


@pytest.mark.parametrize(
    "first",
    [
        answer(text("a")),
        answer(text("a"), finish("stop"), reason=None),
        answer(text("a"), finish("stop"), DONE, b": bye\n\n", reason=None),
        status(429, {"message": "slow"}),
        status(500, b"oops"),
    ],
)
async def test_a_connection_whose_response_is_whole_carries_the_next_request(first: Reply) -> None:
    async with counted([first, answer(text("b"))]) as double:
        (model,) = models_at(double, 1)
        await collect(model)
        await collect(model)
        await model.aclose()

    assert double.n_connections == 1


@pytest.mark.requirement("R34")
async def test_an_abort_closes_its_connection_at_once_and_the_next_request_has_another() -> None:
    gate, controller = Gate(), AbortController()
    async with counted([answer(text("a"), gate), answer(text("b"))]) as double:
        (model,) = models_at(double, 1)
        async with anyio.create_task_group() as tasks:

            async def abort() -> None:
                await gate.reached.wait()
                controller.abort(USER)
                await double.disconnected(0)
                gate.opened.set()

            tasks.start_soon(abort)
            _, error = await collect(model, a_request(controller=controller))
        await collect(model)
        await model.aclose()

    assert isinstance(error, TurnAborted)
    assert double.n_connections == 2


async def test_what_stays_open_behind_the_end_of_a_stream_is_closed() -> None:
    reply = answer(text("a"), finish("stop"), DONE, Stall(), reason=None)
    async with served(reply, idle_limit_s=0) as (model, double):
        events, error = await collect(model)
        await double.disconnected(0)

    assert (events, error) == ([TextDelta("a"), Finish("stop")], None)


async def test_closing_twice_and_by_several_models_is_harmless() -> None:
    async with counted([answer(text("a"))]) as double:
        default, *others = models_at(double, 3)
        models = Models(default, *others)
        await collect(default)
        await models.aclose()
        await models.aclose()
        await double.no_connection()


@pytest.mark.parametrize("api", APIS)
async def test_a_model_that_was_never_called_can_be_closed(api: Api) -> None:
    await a_model("http://127.0.0.1:1", api=api).aclose()


# --- nothing but the request goes out -------------------------------------------------------

CANARY = "c4n4ry-c4n4ry"
OF_THE_SDKS = (
    *("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"),
    *("OPENAI_WEBHOOK_SECRET", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    *(
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_PROFILE",
        "ANTHROPIC_CONFIG_DIR",
        "ANTHROPIC_IDENTITY_TOKEN",
    ),
    *("ANTHROPIC_FEDERATION_RULE_ID", "ANTHROPIC_ORGANIZATION_ID", "ANTHROPIC_WORKSPACE_ID"),
    *("ANTHROPIC_SERVICE_ACCOUNT_ID", "ANTHROPIC_IDENTITY_TOKEN", "ANTHROPIC_WEBHOOK_SIGNING_KEY"),
)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("api_key", [KEY, None])
async def test_the_libraries_add_nothing_of_this_machine_or_its_environment(
    api: Api, api_key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OF_THE_SDKS:
        monkeypatch.setenv(name, CANARY)
    for name in ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS"):
        monkeypatch.setenv(
            name, f"X-Canary: {CANARY}\nAuthorization: {CANARY}\nX-Api-Key: {CANARY}"
        )

    async with served(words(api), api=api, api_key=api_key) as (model, double):
        _, error = await collect(model)

    assert error is None
    assert CANARY not in str(double.headers)
    shown = {"x-api-key": KEY} if api == "anthropic" else {"authorization": f"Bearer {KEY}"}
    headers = double.headers[0]
    assert ("anthropic-version" in headers) == (api == "anthropic")
    headers.pop("anthropic-version", None)
    assert headers.pop("user-agent").startswith("acp-agent")
    for name in ("host", "content-length", "accept-encoding", "connection"):
        assert headers.pop(name)
    assert headers == {
        "accept": "application/json",
        "content-type": "application/json",
        **({} if api_key is None else shown),
    }


@pytest.mark.parametrize("api", APIS)
async def test_configured_headers_outrank_what_would_be_sent(api: Api) -> None:
    headers = {
        "AUTHORIZATION": "Basic abc",
        "x-api-key": "mine",
        "user-agent": "me",
        "X-Title": "t",
    }
    async with served(words(api), api=api, headers=headers) as (model, double):
        await collect(model)

    sent = double.headers[0]
    assert [sent[name.lower()] for name in headers] == list(headers.values())


async def test_cookies_are_not_kept() -> None:
    cookie = {"Set-Cookie": "id=1; Path=/"}
    script = [Reply([text("a"), finish("stop")], headers=cookie), answer(text("b"))]
    async with served(*script) as (model, double):
        await collect(model)
        await collect(model)

    assert ["cookie" in headers for headers in double.headers] == [False, False]


@pytest.mark.parametrize("code", [301, 302, 307, 308])
@pytest.mark.parametrize("api", APIS)
async def test_a_redirect_is_not_followed_with_the_key(api: Api, code: int) -> None:
    async with provider_double([words(api)]) as elsewhere:
        moved = status(code, None, headers={"Location": f"{elsewhere.url}/x"})
        async with served(moved, api=api) as (model, _):
            _, error = await collect(model)

    assert elsewhere.requests == []
    assert isinstance(error, ModelError)
    assert error.code == "NOT_CONFIGURED"
    assert "sends calls elsewhere" in error.message


@pytest.mark.parametrize("api", APIS)
async def test_text_that_is_no_unicode_is_sent_as_far_as_it_is(api: Api) -> None:
    half = UserTurn((Text("half an emoji: \ud83e"),))
    async with served(words(api), api=api) as (model, double):
        _, error = await collect(model, a_request(half))

    assert error is None
    assert "half an emoji: \ufffd" in str(double.requests[0])


# --- the way there --------------------------------------------------------------------------


@pytest.mark.requirement("B150")
@pytest.mark.parametrize("api", APIS)
async def test_an_endpoint_that_is_not_there_is_said_to_be_not_there(api: Api) -> None:
    async with provider_double([]) as double:
        url = double.url

    failure = await failure_at(url, api=api)

    assert failure.code == "TRANSPORT"
    assert failure.message == f"nothing listens at {url.removeprefix('http://')[:-3]}"


@pytest.mark.parametrize("api", APIS)
async def test_a_host_that_nobody_knows_is_said_to_be_unknown(api: Api) -> None:
    failure = await failure_at("http://no-such-host.invalid:1/v1", api=api)

    assert failure.code == "NOT_CONFIGURED"  # a resolver that cannot tell says so otherwise
    assert failure.message.startswith("nobody knows a host no-such-host.invalid:1")


@asynccontextmanager
async def deaf_server() -> AsyncIterator[str]:
    """Where nobody accepts: one client fills the queue, the next one's SYN stays unanswered."""
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        stack.enter_context(socket.create_connection(address))
        yield f"http://127.0.0.1:{address[1]}"


@pytest.mark.parametrize("api", APIS)
async def test_a_connection_that_is_not_taken_is_given_up(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "CONNECT_LIMIT_S", 0.05)
    async with deaf_server() as url:
        failure = await failure_at(url, api=api, idle_limit_s=0)

    assert failure.code == "TRANSPORT"
    assert "did not take the connection in time" in failure.message


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"base_url": "nonsense"}, "the base URL nonsense of"),
        ({"base_url": "http://[::1"}, "a host"),
        ({"api_key": "ключ"}, "characters that cannot be sent"),
        ({"api_key": "two\nlines"}, "characters that cannot be sent"),
        ({"headers": {"x-title": "Büro ключ"}}, "characters that cannot be sent"),
    ],
)
async def test_nonsense_in_the_configuration_is_said_to_be_that(
    api: Api, options: dict[str, Any], expected: str
) -> None:
    async with provider_double([]) as double:
        failure = await failure_at(**({"base_url": double.url} | options), api=api)

    assert failure.code == "NOT_CONFIGURED"
    assert expected in failure.message
    assert options.get("api_key", KEY) not in failure.message


@pytest.mark.parametrize("api", APIS)
async def test_without_a_key_the_variable_and_the_file_are_named(api: Api) -> None:
    failure = await failure_at("http://127.0.0.1:1", api=api, api_key=None, needs_key=True)

    name = "anthropic" if api == "anthropic" else "openai"
    assert failure.code == "NO_KEY"
    assert f"{name.upper()}_API_KEY" in failure.message
    assert f"[providers.{name}]" in failure.message


# --- certificates ---------------------------------------------------------------------------


@asynccontextmanager
async def tls_double(script: Sequence[Reply]) -> AsyncIterator[ProviderDouble]:
    """A double behind TLS, with a certificate for localhost by an authority of our own."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "server.pem")
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    double = ProviderDouble(script, port)
    double.url = f"https://localhost:{port}/v1"
    tls = TLSListener(listener, context, standard_compatible=False)
    with anyio.fail_after(10):
        async with tls, anyio.create_task_group() as tasks:
            tasks.start_soon(tls.serve, double.serve)
            yield double
            tasks.cancel_scope.cancel()


@pytest.fixture
def loads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are read once in the life of a process."""
    monkeypatch.setattr(sdk, "_loading", {})


def base_url(double: ProviderDouble, api: Api) -> str:
    return double.url.removesuffix("/v1") if api == "anthropic" else double.url


@pytest.mark.usefixtures("loads_anew")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_an_authority_that_the_environment_names_is_trusted(
    api: Api, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(TLS / "ca.pem", tmp_path / f"{CA_HASH}.0")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv(
        variable, str(TLS / "ca.pem") if variable == "SSL_CERT_FILE" else str(tmp_path)
    )
    async with tls_double([words(api)]) as double:
        model = a_model(base_url(double, api), api=api)
        _, error = await collect(model)
        await model.aclose()

    assert error is None
    assert len(double.requests) == 1


@pytest.mark.parametrize("api", APIS)
async def test_an_authority_that_nobody_named_is_not_trusted_and_that_is_said(api: Api) -> None:
    async with tls_double([]) as double:
        failure = await failure_at(base_url(double, api), api=api)

    assert failure.code == "NOT_CONFIGURED"
    assert "certificate of localhost" in failure.message
    assert "is not trusted; set SSL_CERT_FILE" in failure.message
    assert double.requests == []


@pytest.mark.usefixtures("loads_anew")
async def test_a_certificate_for_another_host_is_said_to_be_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    async with tls_double([]) as double:
        failure = await failure_at(double.url.replace("localhost", "127.0.0.1"))

    assert "mismatch" in failure.message


@pytest.mark.usefixtures("loads_anew")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["missing", "nonsense"])
async def test_certificates_that_cannot_be_read_are_named_by_their_variable(
    api: Api, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nonsense").write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))

    failure = await failure_at("https://127.0.0.1:1", api=api)

    assert failure.code == "NOT_CONFIGURED"
    assert "look at SSL_CERT_FILE" in failure.message


async def test_a_server_that_does_not_speak_tls_is_said_to_be_one() -> None:
    async def serve(stream: SocketStream) -> None:
        async with stream:
            await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await stream.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        failure = await failure_at(f"https://127.0.0.1:{port}/v1")
        tasks.cancel_scope.cancel()

    assert failure.code == "NOT_CONFIGURED"
    assert "does not speak TLS" in failure.message


# --- proxies --------------------------------------------------------------------------------


class Proxy:
    """A forward proxy: tunnels and whole URLs. `asked` is what it was asked for."""

    def __init__(self, url: str, *, refuses: bool) -> None:
        self.url = url
        self.asked: list[str] = []
        self._refuses = refuses

    async def serve(self, client: SocketStream) -> None:
        async with client:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await client.receive()
            method, target, _ = head.decode().split(" ", 2)
            self.asked.append(f"{method} {target}")
            if self._refuses:
                await client.send(b"HTTP/1.1 407 Say Who\r\nContent-Length: 0\r\n\r\n")
            else:
                await self._forward(client, method, target, head)

    async def _forward(self, client: SocketStream, method: str, target: str, head: bytes) -> None:
        host, _, port = target.removeprefix("http://").partition("/")[0].rpartition(":")
        async with await anyio.connect_tcp(host, int(port)) as server:
            if method == "CONNECT":
                await client.send(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                await server.send(head)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._pump, client, server)
                await self._pump(server, client)
                tasks.cancel_scope.cancel()

    @staticmethod
    async def _pump(source: SocketStream, target: SocketStream) -> None:
        try:
            async for data in source:
                await target.send(data)
            await target.send_eof()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # the other side has hung up


@asynccontextmanager
async def forward_proxy(*, refuses: bool = False) -> AsyncIterator[Proxy]:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    proxy = Proxy(f"http://127.0.0.1:{port}", refuses=refuses)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, proxy.serve)
        yield proxy
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
async def test_a_proxy_that_the_environment_names_is_used(
    api: Api, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with forward_proxy() as proxy:
        monkeypatch.setenv(variable, proxy.url)
        async with served(words(api), api=api) as (model, double):
            _, error = await collect(model)

    assert error is None
    assert [asked.startswith(f"POST {base_url(double, api)}") for asked in proxy.asked] == [True]


@pytest.mark.usefixtures("loads_anew")
@pytest.mark.parametrize("api", APIS)
async def test_a_proxy_tunnels_tls_and_sees_no_key(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    async with forward_proxy() as proxy, tls_double([words(api)]) as double:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        model = a_model(base_url(double, api), api=api)
        _, error = await collect(model)
        await model.aclose()

    assert error is None
    assert proxy.asked == [f"CONNECT {double.url.removeprefix('https://')[:-3]}"]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("bypass", ["127.0.0.1", "*", "example.com,127.0.0.1"])
async def test_a_host_that_needs_no_proxy_gets_none(
    api: Api, bypass: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with forward_proxy() as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", bypass)
        async with served(words(api), api=api) as (model, _):
            _, error = await collect(model)

    assert error is None
    assert proxy.asked == []


async def test_a_proxy_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")

    failure = await failure_at("http://example.com")

    assert failure.code == "TRANSPORT"
    assert failure.message == (
        "nothing listens at example.com (or the proxy that the environment names)"
    )


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_refuses_is_said_to_refuse(
    api: Api, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with forward_proxy(refuses=True) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        failure = await failure_at(f"{scheme}://example.com:1", api=api)

    assert failure.code == "TRANSPORT"
    assert "the proxy before example.com:1 did not let the call through" in failure.message


async def test_a_proxy_that_cannot_be_spoken_to_is_said_to_need_a_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")

    failure = await failure_at("http://example.com")

    assert failure.code == "NOT_CONFIGURED"
    assert "SOCKS" in failure.message
    assert "pip install" in failure.message


# --- the libraries --------------------------------------------------------------------------


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"PYTHONPATH": os.path.dirname(model_rig.__file__)},
    )


BROKEN = {
    "is missing": "sys.modules[name] = None",
    "is broken": "sys.meta_path.insert(0, Broken())",
    "leaves": "Broken.error = SystemExit; sys.meta_path.insert(0, Broken())",
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("how", BROKEN)
def test_a_library_that_cannot_be_loaded_is_a_model_error(library: str, how: str) -> None:
    done = run(f"""
import sys, anyio
from model_rig import a_model, collect
from agent_core.models.sdk import prewarm

name = {library!r}

class Broken:
    error = SyntaxError

    def find_spec(self, fullname, path=None, target=None):
        if fullname == name:
            raise self.error("broken")

{BROKEN[how]}

async def main():
    model = a_model("http://127.0.0.1:1", api="anthropic" if name == "anthropic" else "chat")
    for _ in range(2):
        error = (await collect(model))[1]
        print(error.code, error.message)

prewarm(name)
anyio.run(main)
""")

    lines = [line for line in done.stdout.splitlines() if line.startswith("NOT_CONFIGURED")]
    assert len(lines) == 2, done.stderr
    assert all(library in line for line in lines)
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_missing_is_said_to_be_installed_how(library: str) -> None:
    done = run(f"""
import sys, anyio
from model_rig import a_model, collect

class Missing:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == {library!r}:
            raise ModuleNotFoundError("No module", name=fullname)

sys.meta_path.insert(0, Missing())

async def main():
    model = a_model("http://127.0.0.1:1", api="anthropic" if {library!r} == "anthropic" else "chat")
    print((await collect(model))[1].message)

anyio.run(main)
""")

    assert f"pip install {library}" in done.stdout, done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_loaded_by_prewarm_and_not_by_the_import(library: str) -> None:
    done = run(f"""
import sys
import agent_core.models.sdk as module
import agent_core.models.endpoint_model
assert not {{"openai", "anthropic", "httpx2"}} & set(sys.modules)
module.prewarm({library!r})
module._begin({library!r}).result(20)
assert {library!r} in sys.modules
""")

    assert done.returncode == 0, done.stderr


async def test_an_abort_while_the_library_is_loaded_ends_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdk, "_loading", {})
    monkeypatch.setattr(sdk, "_import", lambda library, loaded: None)  # it takes for ever
    controller = AbortController()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def abort() -> None:
                await anyio.wait_all_tasks_blocked()
                controller.abort(USER)

            tasks.start_soon(abort)
            _, error = await collect(
                a_model("http://127.0.0.1:1"), a_request(HI, controller=controller)
            )

    assert isinstance(error, TurnAborted)
