"""The first words: versions, capabilities, who is who."""

from __future__ import annotations

from typing import Final

from conformance.agents import AUTH_REQUIRED
from conformance.client import Client
from conformance.editor import CAPABILITIES, Editor
from conformance.scenarios import scenario
from conformance.steps import (
    ask,
    error_code,
    introduction,
    is_error,
    offers,
    prompted,
    results,
    serves,
)
from conformance.trace import Message
from conformance.trial import Trial
from conformance.wire import Wire

UNSPOKEN: Final = 65535
MALFORMED_VERSIONS: Final[dict[str, Message]] = {
    "no protocolVersion": {},
    "protocolVersion null": {"protocolVersion": None},
    'protocolVersion "one"': {"protocolVersion": "one"},
    "protocolVersion -1": {"protocolVersion": -1},
    "protocolVersion 65536": {"protocolVersion": 65536},
}
LATER: Final[Message] = {
    "teleport": {},
    "hologram": {"depth": 3, "_meta": {"x": [1]}},
    "fs": {"readTextFile": False, "watch": True},
    "session": {"telepathy": {}},
    "_meta": {"example.org/anything": {"a": [None]}},
}
MALFORMED: Final[Message] = {
    "fs": {"readTextFile": "yes", "writeTextFile": 1},
    "terminal": {},
    "session": 5,
    "auth": ["terminal"],
    "elicitation": True,
}
EVERYTHING: Final[Message] = {
    **CAPABILITIES,
    "auth": {"terminal": True},
    "elicitation": {"form": {}, "url": {}},
    "session": {"configOptions": {"boolean": {}}},
    "plan": {},
}


def _hello(capabilities: object = None, version: object = 1) -> Message:
    return {
        "protocolVersion": version,
        "clientCapabilities": {} if capabilities is None else capabilities,
    }


@scenario("INI-06", "INI-01", "INI-09", "INI-13", is_quick=True)
async def initialize_is_answered(trial: Trial) -> None:
    """Initialize an agent with nothing but the version, behind a cancel that comes too early."""
    wire = await trial.wire()
    wire.notify("session/cancel", {"sessionId": "none"})
    request = wire.request("initialize", {"protocolVersion": 1})
    response: Message = {}
    with trial.expect("INI-06") as it:
        response = await wire.response(request, trial.target.timeout_s)
        it.that("result" in response, f"initialize was answered with {response.get('error')}")
    trial.brought_about(response, "it said nothing")
    with trial.expect("INI-13") as it:
        first = wire.received[0]
        it.that(first == response, f"it was answered with {first}")
    with trial.expect("INI-01") as it:
        result = response.get("result")
        trial.brought_about(isinstance(result, dict), "it was refused")
        assert isinstance(result, dict)
        version = result.get("protocolVersion")
        it.that(type(version) is int, f"the protocol version is {version!r}")
    with trial.expect("INI-09") as it:
        names = result.get("agentInfo") or {}
        it.that(names.get("name") and names.get("version"), f"agentInfo is {names}")


@scenario("INI-02", is_quick=True)
async def unspoken_version_is_answered_with_a_spoken_one(trial: Trial) -> None:
    """Ask for a protocol version that nobody speaks."""
    wire = await trial.wire()
    with trial.expect("INI-02") as it:
        response = await ask(trial, wire, "initialize", _hello(version=UNSPOKEN))
        it.that("result" in response, f"it was refused: {response.get('error')}")
        version = response["result"].get("protocolVersion")
        it.that(version != UNSPOKEN, f"{UNSPOKEN} was agreed to")
        it.that(type(version) is int and version >= 1, f"the answer was {version!r}")


@scenario("INI-03", "INI-04")
async def other_versions(trial: Trial) -> None:
    """Ask for the next protocol version, and for the one before the first."""
    with trial.expect("INI-03") as it:
        response = await ask(trial, await trial.wire(), "initialize", _hello(version=2))
        it.that("result" in response, f"it was refused: {response.get('error')}")
        agreed = response["result"].get("protocolVersion")
        it.that(agreed in (1, 2), f"the answer was {agreed!r}")
    response = await ask(trial, await trial.wire(), "initialize", _hello(version=0))
    told = response.get("error") or (response.get("result") or {}).get("protocolVersion")
    trial.see("INI-04", "recorded", f"with {told}")


@scenario("INI-05", "INI-22")
async def malformed_versions_are_refused(trial: Trial) -> None:
    """Ask for versions that are none, then properly."""
    wire = await trial.wire()
    with trial.expect("INI-05") as it:
        for what, params in MALFORMED_VERSIONS.items():
            response = await ask(trial, wire, "initialize", {"clientCapabilities": {}, **params})
            it.that(is_error(response), f"{what} was agreed to")
            code = error_code(response)
            it.that(code == -32602, f"{what} was answered with {code}")
    with trial.expect("INI-22") as it:
        wire = wire if wire.exit_code is None else await _refused(trial)
        response = await ask(trial, wire, "initialize", _hello())
        it.that("result" in response, f"it was answered with {response.get('error')}")


@scenario("INI-07", "INI-08")
async def strange_capabilities_are_passed_over(trial: Trial) -> None:
    """Initialize with capabilities of a later version, and with malformed ones."""
    for rule, capabilities in (("INI-07", LATER), ("INI-08", MALFORMED)):
        with trial.expect(rule) as it:
            # Every client can be asked for permission, whatever else it can do.
            wire = Client(await trial.wire(), permission="allow").wire
            response = await ask(trial, wire, "initialize", _hello(capabilities))
            it.that("result" in response, f"initialize was answered with {response.get('error')}")
            await _short_core(trial, wire, "read", path=str(trial.folder / "notes.txt"))
            asked = sorted({str(each["method"]) for each in wire.received if _is_lent(each)})
            it.that(not asked, f"it asked for {', '.join(asked)}")


@scenario("INI-23")
async def any_capabilities_will_do(trial: Trial) -> None:
    """Open a session and prompt, as a client that can do all there is."""
    wire = Client(await trial.wire(), permission="allow").wire
    with trial.expect("INI-23") as it:
        async with Editor.beside(wire):
            response = await ask(trial, wire, "initialize", _hello(EVERYTHING))
            it.that("result" in response, f"initialize was answered with {response.get('error')}")
            await _short_core(trial, wire)


@scenario("INI-11")
async def nothing_goes_before_initialize(trial: Trial) -> None:
    """Ask for sessions before initialize, and initialize then."""
    wire = await trial.wire()
    prompt = {"sessionId": "none", "prompt": [{"type": "text", "text": "hello"}]}
    early: dict[str, Message] = {
        "session/new": {"cwd": str(trial.folder), "mcpServers": []},
        "session/prompt": prompt,
    }
    with trial.expect("INI-11") as it:
        for method, params in early.items():
            response = await ask(trial, wire, method, params)
            it.that(is_error(response), f"{method} was served before initialize")
        response = await ask(trial, wire, "initialize", _hello())
        it.that("result" in response, f"initialize was refused then: {response.get('error')}")


@scenario("INI-12")
async def initialize_twice(trial: Trial) -> None:
    """Initialize again once there is a session, and prompt in the session."""
    client, session_id = await trial.session()
    with trial.expect("INI-12"):
        await ask(trial, client.wire, "initialize", _hello())
        hello = trial.say("hello")
        await prompted(trial, client.wire, session_id, hello)


@scenario("INI-14", "INI-15", "INI-16", "INI-19", is_quick=True)
async def ways_to_log_in(trial: Trial) -> None:
    """Look at the ways to log in, and try one that does not exist."""
    wire = (await trial.shared_client()).wire
    methods = _auth_methods(wire)
    with trial.expect("INI-14") as it:
        by_terminal = [each.get("id") for each in methods if each.get("type") == "terminal"]
        it.that(not by_terminal, f"{by_terminal} need a terminal, which the client does not have")
    with trial.expect("INI-15") as it:
        ids = [str(each.get("id")) for each in methods]
        it.that(len(set(ids)) == len(ids), f"the ids are {ids}")
    with trial.expect("INI-16") as it:
        response = await ask(trial, wire, "authenticate", {"methodId": "conformance-no-such"})
        it.that(is_error(response), "it succeeded")
    if offers(wire, "logout"):
        trial.see("INI-19", "skipped", "the agent advertises logout")
        return
    with trial.expect("INI-19") as it:
        response = await ask(trial, wire, "logout", {})
        it.that(error_code(response) == -32601, f"it was answered with {response}")


@scenario("INI-17")
async def login_opens_sessions(trial: Trial) -> None:
    """Log in by the method that we were told of, and open a session."""
    trial.needs(trial.target.auth_method, "a login that we know of; see --auth-method")
    wire = (await trial.client()).wire
    with trial.expect("INI-17") as it:
        response = await ask(trial, wire, "session/new", _new(trial))
        it.that(error_code(response) != AUTH_REQUIRED, "a session was refused after the login")


@scenario("INI-18", "INI-24")
async def logout_where_it_may_be_tried(trial: Trial) -> None:
    """Log out, if whoever started the run allows it."""
    trial.needs(trial.target.may_log_out, "a logout that may be tried; see --allow-logout")
    stranger = await trial.wire()
    await ask(trial, stranger, "initialize", _hello())
    is_gated = error_code(await ask(trial, stranger, "session/new", _new(trial))) == AUTH_REQUIRED
    wire = (await trial.client()).wire
    trial.needs(offers(wire, "logout"), "logout")
    with trial.expect("INI-18"):
        await results(trial, wire, "logout", {})
        await serves(trial, wire, "the logout")
    trial.brought_about(is_gated, "it opens sessions without a login, or remembers one")
    with trial.expect("INI-24") as it:
        response = await ask(trial, wire, "session/new", _new(trial))
        it.that(error_code(response) == AUTH_REQUIRED, "a session was opened after the logout")


@scenario("INI-20")
async def no_login_where_there_is_none(trial: Trial) -> None:
    """Open a session with an agent that offers no way to log in."""
    wire = (await trial.shared_client()).wire
    trial.needs(not _auth_methods(wire), "to work without a login")
    with trial.expect("INI-20") as it:
        response = await ask(trial, wire, "session/new", _new(trial))
        it.that(error_code(response) != AUTH_REQUIRED, f"it was answered with {response}")


@scenario("INI-21")
async def registry_looks_at_the_agent(trial: Trial) -> None:
    """Start as the registry does: empty home, no terminal, hardly an environment."""
    trial.needs(trial.target.transport == "stdio", "standard input and output")
    wire = await trial.wire(is_bare=True)
    capabilities = {**CAPABILITIES, "_meta": {"terminal_output": True, "terminal-auth": True}}
    with trial.expect("INI-21") as it:
        result = await results(trial, wire, "initialize", _hello(capabilities))
        it.that(not wire.noise, f"stdout begins with {wire.noise[:1]}")
        methods = result.get("authMethods")
        it.that(isinstance(methods, list) and methods, "it offers no way to log in")


async def _short_core(trial: Trial, wire: Wire, *situation: str, **fill: object) -> None:
    """Open a session and, where it is known how, have a turn, and one for another situation."""
    new = await ask(trial, wire, "session/new", _new(trial))
    if error_code(new) == AUTH_REQUIRED:
        return
    session_id = str((new.get("result") or {}).get("sessionId"))
    await prompted(trial, wire, session_id, trial.say("hello"))
    for each in situation:
        await prompted(trial, wire, session_id, trial.say(each, **fill))


async def _refused(trial: Trial) -> Wire:
    """Start another agent and have its first initialize refused."""
    wire = await trial.wire()
    await ask(trial, wire, "initialize", {"clientCapabilities": {}})
    return wire


def _new(trial: Trial) -> Message:
    return {"cwd": str(trial.folder), "mcpServers": []}


def _is_lent(message: Message) -> bool:
    """Say whether the agent asks for something that only some clients have."""
    method = str(message.get("method"))
    return method.startswith(("fs/", "terminal/", "elicitation/"))


def _auth_methods(wire: Wire) -> list[Message]:
    methods = introduction(wire).get("authMethods")
    return [each for each in methods if isinstance(each, dict)] if isinstance(methods, list) else []
