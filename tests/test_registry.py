"""What is handed to the ACP registry is what the registry takes, and says what the package says.

Source: the rules of https://github.com/agentclientprotocol/registry.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from acp_server import __version__

ROOT = Path(__file__).parent.parent
AGENT: dict[str, Any] = json.loads((ROOT / "registry/agent.json").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ICON = (ROOT / "registry/icon.svg").read_text()

REQUIRED = {"id", "name", "version", "description", "distribution"}
OPTIONAL = {"repository", "website", "authors", "license", "license_url"}


def test_the_entry_has_what_the_registry_needs_and_nothing_it_does_not_know() -> None:
    assert set(AGENT) >= REQUIRED
    assert set(AGENT) - REQUIRED <= OPTIONAL
    assert re.fullmatch(r"[a-z][a-z0-9-]*", AGENT["id"])
    assert set(AGENT["distribution"]) == {"uvx"}
    assert set(AGENT["distribution"]["uvx"]) <= {"package", "args", "env"}
    assert AGENT["license"] == PROJECT["license"]


def test_every_version_in_it_is_the_packages_own() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", AGENT["version"])
    assert AGENT["version"] == __version__
    assert AGENT["distribution"]["uvx"]["package"] == f"{PROJECT['name']}=={__version__}"


def test_the_package_has_a_program_of_its_own_name() -> None:
    scripts = PROJECT["scripts"]

    assert scripts[PROJECT["name"]] == scripts["acp-agent"]


def test_the_icon_is_square_small_and_in_the_colour_of_its_surroundings() -> None:
    root = ElementTree.fromstring(ICON)
    colours = {
        value
        for element in root.iter()
        for name, value in element.attrib.items()
        if name in ("fill", "stroke", "color", "stop-color")
    }

    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert (root.get("width"), root.get("height")) == ("16", "16")
    assert root.get("viewBox") == "0 0 16 16"
    assert "currentColor" in colours <= {"currentColor", "none", "inherit"}
    assert not re.search(r"<!--|style|#[0-9a-fA-F]{3}|url\(", ICON)
