"""``acp-agent serve --listen HOST:PORT``: many clients on the network, until a signal comes.

Nothing listens before everything was checked: configuration, tokens, certificate, root folder,
store. The first SIGTERM or SIGINT lets nobody in any more, gives running turns some time, then
cancels them, and exits 0 when all is quiet; a second one ends the process. SIGHUP reads the tokens
again.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from msgspec import Struct

from acp_server.config import ConfigError
from acp_server.network.listener import bound, room_for
from acp_server.network.security import Gate, Tokens, is_loopback
from acp_server.serve import Grace, hear_signals
from agent_core.logs import get_logger

if TYPE_CHECKING:
    import uvicorn
    from anyio.abc import TaskGroup

    from acp_server.backend import Backend
    from acp_server.config import Config
    from acp_server.network.hub import Hub

__all__ = ["NetworkOptions", "parse_address", "serve_network"]

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
LAST_ANSWERS_S: Final = 1.0
"""How long the answers of turns that were cancelled at the end may take to leave."""
DRAIN_S: Final = 10.0
"""How long running turns may go on after the first signal, unless somebody says otherwise."""
BACKLOG: Final = 2048
UNLOAD_AFTER_S: Final = 1800.0
"""When sessions that nobody uses are unloaded, unless somebody says otherwise."""

# Of bad UTF-8 the peer is told by the close code, and who is refused has been answered.
_NO_ERRORS: Final = ("Invalid UTF-8", "ASGI callable returned without completing handshake")

log = get_logger(__name__)


class NetworkOptions(Struct, frozen=True):
    """What the command line says of ``--listen``.

    Attributes:
        host, port: Where to listen.
        token_file: See `acp_server.network.security.Tokens`.
        root: A folder that all sessions have to lie in.
        origins, hosts: Added to those of the configuration.
        keeps: Whether turns go on when their client is lost.
        tls_cert, tls_key: Files in PEM.
        drain_s: How long running turns may go on after the first signal.
    """

    host: str
    port: int
    token_file: str | None = None
    root: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    keeps: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_s: float = DRAIN_S


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``; an IPv6 address stands in brackets.

    A port alone is one that only this computer reaches; with a colon before it, everybody does.

    Raises:
        ValueError: It is none.
    """
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is not HOST:PORT; an IPv6 address stands in brackets")
    return host or "0.0.0.0", int(port)


def serve_network(
    configure: Callable[[], Config], options: NetworkOptions, *, grace_s: float
) -> int:
    """Serve until a signal comes.

    Args:
        configure: Raises `ConfigError`.
        options: Where, and for whom.
        grace_s: Seconds that what is running has to stop in, once it was told to.

    Returns:
        The exit code: 0, or 2 if something has to be changed first; standard error says what.
    """
    try:
        token = os.environ.get("ACP_AGENT_TOKEN")  # hidden with what models are shown
        config = configure()
        if config.unload_after_s is None:
            config = msgspec.structs.replace(config, unload_after_s=UNLOAD_AFTER_S)
        tokens = Tokens(token, options.token_file)
        if not tokens and not is_loopback(options.host):
            raise ConfigError(_NEEDS_TOKEN.format(options.host))
        root = _checked_root(options.root)
        _check_certificate(options)
        gate = _gate(config, options, tokens)
        anyio.run(_serve, config, options, gate, root, grace_s)
    except ConfigError as exc:
        sys.stderr.write(f"acp-agent: {exc}\n")
        return 2
    return 0


async def _serve(
    config: Config, options: NetworkOptions, gate: Gate, root: str | None, grace_s: float
) -> None:
    from acp_server.backend import open_backend
    from acp_server.network.app import App
    from acp_server.network.hub import Hub
    from acp_server.network.metrics import Metrics
    from agent_core.errors import StoreError

    over, grace = anyio.Event(), Grace(options.drain_s + grace_s)
    hear_signals(over.set, grace, (signal.SIGTERM, signal.SIGINT))
    async with open_backend(config) as backend:
        try:
            await backend.store.ping()
        except StoreError as exc:
            raise ConfigError(str(exc)) from None
        with bound(options.host, options.port) as listener:
            listener.is_plain = options.tls_cert is None
            listener.max_open = room_for(config.network.max_connections)
            async with anyio.create_task_group() as tasks:
                hub = Hub(backend, config.network, tasks, root=root, keeps=options.keeps)
                app = App(hub, gate, Metrics(hub, backend.provider_of).render)
                _settle_in(backend)
                with _hangups(hub, gate.tokens):
                    server = _server(app, config, options, lambda: _say_where(listener, options))
                    await _serve_until(over, server, listener, hub, tasks, options)
                tasks.cancel_scope.cancel()
    grace.cancel()


def _settle_in(backend: Backend) -> None:
    """Load beside the rest what the first prompt will need, and have no look for garbage in it.

    What is loaded stays, and a full look through it would hold everybody up.
    """
    gc.enable()
    gc.freeze()
    if (library := backend.library) is not None:
        from agent_core.models.sdk import prewarm

        prewarm(library, gc.freeze)


async def _serve_until(
    over: anyio.Event,
    server: uvicorn.Server,
    listener: socket.socket,
    hub: Hub,
    tasks: TaskGroup,
    options: NetworkOptions,
) -> None:
    ended = anyio.Event()

    async def listen() -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            ended.set()
            over.set()

    listener.listen(BACKLOG)  # before it is said that it does
    tasks.start_soon(listen, name="listen")
    await over.wait()
    await _drain(hub, options.drain_s)
    server.should_exit = True
    await ended.wait()


async def _drain(hub: Hub, drain_s: float) -> None:
    """Take no new work, give what runs some time, then cancel it, and see its answers off.

    A turn that was cancelled has the time it needs: the launcher's grace is its only limit.
    """
    hub.draining.set()
    log.info("drain_began", running=hub.n_running, limit_s=drain_s)
    with anyio.move_on_after(drain_s):
        await hub.answered()
    if n_running := hub.n_running:
        log.warning("turns_cut_off", running=n_running, after_s=drain_s)
    hub.cancel_all()
    await hub.answered()
    with anyio.move_on_after(LAST_ANSWERS_S):
        await hub.flushed()
    hub.end_all("shutdown")


# --- what is checked before anybody is let in ------------------------------------------------


def _checked_root(root: str | None) -> str | None:
    if root is None:
        return None
    real = os.path.realpath(root)
    if not os.path.isdir(real):
        raise ConfigError(f"The root {root} is not a directory.")
    return real


def _check_certificate(options: NetworkOptions) -> None:
    if options.tls_cert is None:
        if options.tls_key is not None:
            raise ConfigError("--tls-key needs --tls-cert, the certificate that it is the key of.")
        return
    import ssl

    def no_password() -> str:
        raise ValueError("the key has a password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, no_password)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"The certificate or its key cannot be used: {exc}.") from None


def _gate(config: Config, options: NetworkOptions, tokens: Tokens) -> Gate:
    hosts: tuple[str, ...] | None = (*config.network.hosts, *options.hosts)
    if is_loopback(options.host):
        hosts = (*LOCAL_NAMES, options.host, *(hosts or ()))
    origins = (*config.network.origins, *options.origins)
    return Gate(tokens, origins=origins, hosts=hosts or None, proxies=config.network.proxies)


def _server(
    app: Any, config: Config, options: NetworkOptions, on_listening: Callable[[], None]
) -> uvicorn.Server:
    import uvicorn

    from acp_server.network.protocols import WebSocket, patient_http

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are heard already

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_listening()

    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not str(record.msg).startswith(_NO_ERRORS)
    )
    limits = config.network
    settings = uvicorn.Config(
        app,
        http=patient_http(limits.header_s),
        ws=WebSocket,
        ws_max_size=limits.max_message_bytes,
        ws_ping_interval=limits.ping_s,
        ws_ping_timeout=2 * limits.ping_s,
        ws_per_message_deflate=False,
        backlog=BACKLOG,
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    return Server(settings)


@contextmanager
def _hangups(hub: Hub, tokens: Tokens) -> Iterator[None]:
    """Within the block, SIGHUP reads the tokens again, and ends the connections of old ones."""
    import asyncio

    def reload() -> None:
        try:
            tokens.reload()
        except ConfigError as exc:
            log.error("tokens_not_reloaded", problem=str(exc))
            return
        log.warning("tokens_reloaded")
        if tokens:
            hub.end_revoked(tokens.has)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _say_where(listener: socket.socket, options: NetworkOptions) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    secure = "s" if options.tls_cert else ""
    sys.stderr.write(
        f"acp-agent: listening on http{secure}://{shown}:{port}/acp and ws{secure}://{shown}:{port}"
        "/acp\n"
    )
    sys.stderr.flush()


_NEEDS_TOKEN: Final = (
    "{0} can be reached from other computers, and whoever reaches this agent runs commands here."
    " Therefore a token is needed: set ACP_AGENT_TOKEN (`openssl rand -hex 32` makes one), or give"
    " --token-file FILE with one NAME:TOKEN a line; or listen on 127.0.0.1."
)
