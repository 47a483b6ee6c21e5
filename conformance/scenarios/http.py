"""An agent by Streamable HTTP: statuses, headers, streams, and who may come in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio

from conformance.scenarios import scenario
from conformance.scenarios.websocket import FOREIGN, INITIALIZE, LOCAL
from conformance.trace import WireError
from conformance.trial import NotBroughtAbout, Trial

if TYPE_CHECKING:
    import httpx2

JSON: Final = {"Content-Type": "application/json"}
CONNECTION: Final = "Acp-Connection-Id"
SESSION: Final = "Acp-Session-Id"
EVENTS: Final = {"Accept": "text/event-stream"}


@scenario("NET-20", "NET-21", "NET-25", "NET-27", is_quick=True)
async def conversation_by_http(trial: Trial) -> None:
    """Open a session, prompt it before its stream is open, and delete the connection."""
    async with _client(trial) as http:
        url = trial.target.url
        with trial.expect("NET-20") as it:
            answer = await http.post(url, content=INITIALIZE, headers=JSON)
            it.that(answer.status_code == 200, f"the status was {answer.status_code}")
            it.that("result" in answer.json(), f"the answer was {answer.text[:200]}")
            it.that(answer.headers.get(CONNECTION), f"there is no {CONNECTION}")
        named = {CONNECTION: answer.headers.get(CONNECTION, "")}
        trial.brought_about(named[CONNECTION], "there is no connection to go on with")
        body = _body(2, "session/new", cwd=str(trial.folder), mcpServers=[])
        with trial.expect("NET-21") as it:
            answer = await http.post(url, content=body, headers=JSON | named)
            it.that(answer.status_code == 202, f"session/new had the status {answer.status_code}")
            it.that(not answer.content, f"its body was {answer.text[:80]!r}")
        opened = await _until(trial, http, named, lambda m: m.get("id") == 2)
        session_id = (opened[-1].get("result") or {}).get("sessionId")
        if not isinstance(session_id, str):
            raise NotBroughtAbout(f"session/new was answered with {opened[-1]}")
        both = {**named, SESSION: session_id}
        prompt = [{"type": "text", "text": _hello(trial)}]
        body = _body(3, "session/prompt", sessionId=session_id, prompt=prompt)
        await http.post(url, content=body, headers=JSON | both)
        with trial.expect("NET-25") as it:
            heard = await _until(trial, http, both, lambda m: m.get("id") == 3)
            it.that("result" in heard[-1], f"the prompt was answered with {heard[-1]}")
            it.that(len(heard) > 1, "the answer came, and no update before it")
        with trial.expect("NET-27") as it:
            gone = await http.delete(url, headers=named)
            it.that(gone.is_success, f"the status was {gone.status_code}")
            answer = await http.post(url, content=_body(4, "session/list"), headers=JSON | named)
            it.that(answer.status_code == 404, f"behind it, a request had {answer.status_code}")


@scenario("NET-22", "NET-23", "NET-24", "NET-26")
async def requests_that_do_not_fit(trial: Trial) -> None:
    """Send wrong types, no or unknown connections, streams nobody can read, and two messages."""
    async with _client(trial) as http:
        url = trial.target.url
        with trial.expect("NET-22") as it:
            answer = await http.post(
                url, content=INITIALIZE, headers={"Content-Type": "text/plain"}
            )
            it.that(answer.status_code == 415, f"the status was {answer.status_code}")
        with trial.expect("NET-23") as it:
            body = _body(2, "session/list")
            status = (await http.post(url, content=body, headers=JSON)).status_code
            it.that(status == 400, f"without an id the status was {status}")
            unknown = {CONNECTION: "never-was"}
            status = (await http.post(url, content=body, headers=JSON | unknown)).status_code
            it.that(status == 404, f"with an unknown id the status was {status}")
        answer = await http.post(url, content=INITIALIZE, headers=JSON)
        named = {CONNECTION: answer.headers.get(CONNECTION, "")}
        trial.brought_about(named[CONNECTION], "there is no connection to go on with")
        with trial.expect("NET-24") as it:
            status = (await http.get(url, headers=named | {"Accept": "image/png"})).status_code
            it.that(status == 406, f"the status was {status}")
        with trial.expect("NET-26") as it:
            both = f"[{_body(5, 'session/list')}, {_body(6, 'session/list')}]"
            status = (await http.post(url, content=both, headers=JSON | named)).status_code
            it.that(status in (400, 501), f"the status was {status}")
            again = await http.post(url, content=INITIALIZE, headers=JSON)
            it.that(again.status_code == 200, f"then initialize had {again.status_code}")


@scenario("NET-07", "NET-08", "NET-10", is_quick=True)
async def who_may_ask(trial: Trial) -> None:
    """Ask from a foreign page, with a foreign name of the host, and without the token."""
    async with _client(trial) as http:
        with trial.expect("NET-07") as it:
            status = await _status(trial, http, Origin=FOREIGN)
            it.that(status >= 400, f"a page of {FOREIGN} was let in")
        if any(f"//{each}:" in trial.target.url for each in LOCAL):
            with trial.expect("NET-10") as it:
                status = await _status(
                    trial, http, Host="evil.example", Origin="http://evil.example"
                )
                it.that(status >= 400, "evil.example was let in as a name of this computer")
        else:
            trial.see("NET-10", "skipped", "the agent is not on this computer's own address")
        trial.needs(trial.target.token, "a token, or none was given to us")
        with trial.expect("NET-08") as it:
            for what, token in (("none", ""), ("a wrong one", f"wrong-{trial.target.token[::-1]}")):
                header = {"Authorization": f"Bearer {token}"} if token else {"Authorization": ""}
                status = await _status(trial, http, **header)
                it.that(status in (401, 403), f"with {what} the status was {status}")


@asynccontextmanager
async def _client(trial: Trial) -> AsyncIterator[httpx2.AsyncClient]:
    import httpx2

    trial.needs(trial.target.transport == "http", "Streamable HTTP")
    token = trial.target.token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limit = httpx2.Timeout(trial.target.timeout_s)
    async with httpx2.AsyncClient(headers=headers, timeout=limit, trust_env=False) as http:
        try:
            yield http
        except (httpx2.HTTPError, ValueError) as exc:
            raise WireError(f"{type(exc).__name__}: {exc}") from exc


async def _status(trial: Trial, http: httpx2.AsyncClient, **headers: str) -> int:
    answer = await http.post(trial.target.url, content=INITIALIZE, headers=JSON | headers)
    status: int = answer.status_code
    return status


async def _until(
    trial: Trial, http: httpx2.AsyncClient, headers: dict[str, str], fits: Any
) -> list[dict[str, Any]]:
    """Read a stream until a message fits; return all that came.

    Raises:
        WireError: None did.
    """
    heard: list[dict[str, Any]] = []
    with anyio.move_on_after(trial.target.timeout_s):
        async with http.stream("GET", trial.target.url, headers=headers | EVENTS) as stream:
            if stream.status_code != 200:
                raise WireError(f"the stream had the status {stream.status_code}")
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    heard.append(json.loads(line[5:]))
                    if fits(heard[-1]):
                        return heard
    raise WireError("the stream did not bring what was waited for")


def _body(request_id: int, method: str, **params: object) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def _hello(trial: Trial) -> str:
    """Return a prompt for any answer; agents that act on words take it for one."""
    try:
        return trial.say("hello")
    except NotBroughtAbout:
        return "hello"
