"""``acp-agent check``: what is configured, where it came from, and whether it works."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

__all__ = ["run_check"]


class Finding(Struct, frozen=True):
    """One thing that was looked at. `state` is ``ok``, ``warning`` or ``failed``."""

    name: str
    state: str
    text: str


def run_check(flags: Mapping[str, Any], *, as_json: bool) -> int:
    """Look at everything and print it.

    Args:
        flags: As for `load_config`.
        as_json: Print ``{"ok": …, "findings": [{"name", "state", "text"}, …]}``.

    Returns:
        0 if nothing failed, else 1.
    """
    import msgspec

    findings = _findings(flags)
    is_ok = all(finding.state != "failed" for finding in findings)
    if as_json:
        body = {"ok": is_ok, "findings": findings}
        sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    else:
        for finding in findings:
            mark = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}[finding.state]
            sys.stdout.write(f"{mark}  {finding.name}: {finding.text}\n")
    return 0 if is_ok else 1


def _findings(flags: Mapping[str, Any]) -> list[Finding]:
    from acp_server import __version__
    from acp_server.config import ConfigError, load_config

    python = ".".join(map(str, sys.version_info[:3]))
    findings = [Finding("version", "ok", f"acp-agent {__version__}, Python {python}")]
    try:
        config = load_config(flags)
    except ConfigError as exc:
        return [*findings, Finding("configuration", "failed", str(exc))]
    return [*findings, *_model(config), _store(config), _shell()]


def _model(config: Any) -> list[Finding]:
    import anyio

    from acp_server.backend import make_model, model_problem
    from acp_server.config import ConfigError

    findings = [Finding("mode", "ok", config.mode)]
    try:
        anyio.run(make_model(config).aclose)
    except ConfigError as exc:
        return [*findings, Finding("model", "failed", str(exc))]
    if (problem := model_problem(config)) is not None:
        return [*findings, Finding("model", "failed", problem)]
    if config.model == "rehearsal":
        text = "rehearsal: built in and offline; set --model openai:NAME for a real one"
        return [*findings, Finding("model", "warning", text)]
    endpoint = _without_secrets(config.openai.base_url or "https://api.openai.com/v1")
    key = "with a key" if config.openai.api_key else "without a key"
    return [*findings, Finding("model", "ok", f"{config.model} at {endpoint}, {key}")]


def _without_secrets(url: str) -> str:
    from urllib.parse import urlsplit, urlunsplit

    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _store(config: Any) -> Finding:
    import anyio

    from agent_core.errors import StoreError
    from agent_core.sessions.sqlite import SqliteStore

    async def ping() -> None:
        store = SqliteStore(config.sessions_path)
        try:
            await store.ping()
        finally:
            await store.aclose()

    try:
        anyio.run(ping)
    except StoreError as exc:
        return Finding("sessions", "failed", f"{config.sessions_path}: {exc}")
    return Finding("sessions", "ok", str(config.sessions_path))


def _shell() -> Finding:
    if not os.access("/bin/sh", os.X_OK):
        return Finding("shell", "failed", "/bin/sh cannot be run")
    return Finding("shell", "ok", "/bin/sh; commands run with your rights, without a sandbox")
