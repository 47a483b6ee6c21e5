"""The first words: versions, capabilities, who is who."""

from __future__ import annotations

from typing import Final

from conformance.scenarios import scenario
from conformance.trial import Trial

UNSPOKEN: Final = 65535


@scenario("INI-01", "INI-09", is_quick=True)
async def initialize_is_answered(trial: Trial) -> None:
    """Initialize an agent as every client does."""
    wire = await trial.wire()
    request = wire.request("initialize", {"protocolVersion": 1, "clientCapabilities": {}})
    with trial.expect("INI-01") as it:
        response = await wire.response(request, trial.target.timeout_s)
        it.that("result" in response, f"initialize was answered with {response.get('error')}")
        version = response["result"].get("protocolVersion")
        it.that(type(version) is int, f"the protocol version is {version!r}")
    with trial.expect("INI-09") as it:
        info = (await wire.response(request, trial.target.timeout_s)).get("result", {})
        names = info.get("agentInfo") or {}
        it.that(names.get("name") and names.get("version"), f"agentInfo is {names}")


@scenario("INI-02", is_quick=True)
async def unspoken_version_is_answered_with_a_spoken_one(trial: Trial) -> None:
    """Ask for a protocol version that nobody speaks."""
    wire = await trial.wire()
    params = {"protocolVersion": UNSPOKEN, "clientCapabilities": {}}
    with trial.expect("INI-02") as it:
        response = await wire.response(wire.request("initialize", params), trial.target.timeout_s)
        it.that("result" in response, f"it was refused: {response.get('error')}")
        version = response["result"].get("protocolVersion")
        it.that(version != UNSPOKEN, f"{UNSPOKEN} was agreed to")
        it.that(type(version) is int and version >= 1, f"the answer was {version!r}")
