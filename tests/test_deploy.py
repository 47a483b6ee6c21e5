"""Dockerfile, compose.yaml and deploy/kubernetes agree with each other and with the program."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
import yaml
from network_rig import LIMIT_S, TOKEN, editor, listening

from acp_server.cli import _parser, main
from acp_server.network.serve import parse_address

ROOT = Path(__file__).parent.parent
KUBERNETES = ROOT / "deploy/kubernetes"
DOCKERFILE = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
STEPS = [
    (step.split(maxsplit=1)[0], step.split(maxsplit=1)[1])
    for step in re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    if step
]
LAST_STAGE = STEPS[max(at for at, (word, _) in enumerate(STEPS) if word == "FROM") :]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())


def last(word: str) -> str:
    (found,) = [rest for each, rest in LAST_STAGE if each == word]
    return found


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(last("ENV")))


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def deployment() -> dict[str, Any]:
    (found,) = manifests("deployment.yaml")
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (found,) = deployment()["containers"]
    return found


def options(arguments: list[str]) -> argparse.Namespace:
    """Arguments as the command takes them; what it does not know ends the test."""
    return _parser().parse_args(arguments)


def health_check() -> list[str]:
    command: list[str] = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    return command


# --- Dockerfile -----------------------------------------------------------------------------


def test_the_linter_has_nothing_to_say_of_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("there is no hadolint for this platform")
    done = subprocess.run(
        [hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_built_in_two_stages_on_a_base_of_one_version() -> None:
    bases = [rest for word, rest in STEPS if word == "FROM"]
    assert bases == ["${BASE} AS build", "${BASE}"]
    (base,) = [rest for word, rest in STEPS if word == "ARG"]
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+", base)


def test_what_ships_has_no_tools_to_build_or_install_with() -> None:
    done = " ".join(rest for word, rest in LAST_STAGE if word == "RUN")
    assert "install -d" in done
    assert not re.search(r"apt-get|pip install|gcc|make", done)
    assert "site-packages/pip" in done  # removed
    assert "--without-pip /opt/acp-agent" in DOCKERFILE


def test_the_image_runs_as_nobody_special_and_keeps_its_state_in_a_volume() -> None:
    uid, _, gid = last("USER").partition(":")
    assert int(uid) == int(gid) >= 1000
    assert f"--uid {uid}" in DOCKERFILE
    assert json.loads(last("VOLUME")) == [environment()["ACP_AGENT_STATE_DIR"]]


def test_what_the_image_starts_demands_a_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(last("ENTRYPOINT")) == ["acp-agent"]
    command = json.loads(last("CMD"))
    assert command == ["serve", "--listen", f"0.0.0.0:{last('EXPOSE')}"]
    monkeypatch.delenv("ACP_AGENT_TOKEN", raising=False)
    assert main(command) == 2
    assert "ACP_AGENT_TOKEN" in capsys.readouterr().err


def test_the_build_gets_all_that_it_copies_and_that_pyproject_names() -> None:
    let_in = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        name
        for word, rest in STEPS
        if word == "COPY" and not rest.startswith("--from")
        for name in rest.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text()
    (packages,) = re.findall(r"^packages = (\[.*\])$", project, re.MULTILINE)
    assert set(json.loads(packages)) <= copied


async def test_the_health_check_tells_a_server_from_none(tmp_path: Path) -> None:
    program, *rest = health_check()
    assert program == "python3"
    assert f":{last('EXPOSE')}/healthz" in rest[-1]

    async def checked(port: int) -> int:
        command = [sys.executable, *rest[:-1], rest[-1].replace(last("EXPOSE"), str(port))]
        with anyio.fail_after(LIMIT_S):
            return (await anyio.run_process(command, check=False)).returncode

    async with listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}) as server:
        assert await checked(server.port) == 0
    assert await checked(server.port) == 1


# --- compose.yaml ---------------------------------------------------------------------------


def test_compose_starts_what_the_command_takes_and_waits_for_it_to_stop() -> None:
    agent = COMPOSE["services"]["agent"]
    given = options(agent["command"])
    assert parse_address(given.listen) == ("0.0.0.0", int(last("EXPOSE")))
    grace_s = int(agent["stop_grace_period"].removesuffix("s"))
    assert grace_s > given.drain + given.shutdown_grace
    mounts = {mount.rpartition(":")[2] for mount in agent["volumes"]}
    assert mounts == {environment()["ACP_AGENT_STATE_DIR"], given.root}
    assert given.root == last("WORKDIR")


def test_compose_demands_a_token_and_is_reached_from_this_computer_only() -> None:
    agent = COMPOSE["services"]["agent"]
    assert agent["environment"]["ACP_AGENT_TOKEN"].startswith("${ACP_AGENT_TOKEN:?")
    assert all(port.startswith("127.0.0.1:") for port in agent["ports"])
    assert agent["read_only"]
    assert agent["cap_drop"] == ["ALL"]
    assert agent["security_opt"] == ["no-new-privileges:true"]


def test_the_local_model_server_is_an_option_of_a_version_of_its_own() -> None:
    models = COMPOSE["services"]["models"]
    assert models["profiles"] == ["local-model"]
    assert re.fullmatch(r"ollama/ollama:\d+\.\d+\.\d+", models["image"])
    assert "ports" not in models


async def test_variables_that_compose_leaves_empty_are_as_if_they_were_not_there(
    tmp_path: Path,
) -> None:
    given = COMPOSE["services"]["agent"]["environment"]
    empty = {
        name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
        for name, value in given.items()
        if name != "ACP_AGENT_TOKEN"
    }
    assert empty["OPENAI_BASE_URL"] == ""
    async with (
        listening(tmp_path, env={**empty, "ACP_AGENT_TOKEN": TOKEN}) as server,
        editor(server, token=TOKEN) as client,
        httpx2.AsyncClient() as http,
    ):
        assert (await http.get(f"{server.http}/readyz")).status_code == 200
        session = await client.new_session(tmp_path)
        assert await client.stop_reason(await client.prompt(session, "say up")) == "end_turn"


# --- deploy/kubernetes ----------------------------------------------------------------------


def test_the_pod_has_longer_to_stop_than_the_server_takes() -> None:
    given = options(container()["args"])
    sleep, wait_s = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    took_s = float(wait_s) + given.drain + given.shutdown_grace
    assert deployment()["terminationGracePeriodSeconds"] > took_s


def test_the_pod_is_as_bounded_as_the_image_allows() -> None:
    pod, of_container = deployment()["securityContext"], container()["securityContext"]
    uid = int(last("USER").partition(":")[0])
    assert (pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]) == (uid, uid, uid)
    assert pod["runAsNonRoot"]
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert of_container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert deployment()["automountServiceAccountToken"] is False
    assert deployment()["enableServiceLinks"] is False


def test_the_pods_places_are_those_that_the_server_is_told() -> None:
    given = options(container()["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert mounts["state"] == environment()["ACP_AGENT_STATE_DIR"]
    assert mounts["workspace"] == given.root
    assert Path(given.token_file).parent == Path(mounts["tokens"])
    assert set(mounts) == {volume["name"] for volume in deployment()["volumes"]}
    (port,) = container()["ports"]
    assert parse_address(given.listen) == ("0.0.0.0", port["containerPort"])


def test_the_manifests_name_each_other_rightly() -> None:
    (kustomization,) = manifests("kustomization.yaml")
    files = set(kustomization["resources"]) | {"kustomization.yaml", "secret.example.yaml"}
    assert files == {path.name for path in KUBERNETES.iterdir()}

    secrets = {secret["metadata"]["name"]: secret for secret in manifests("secret.example.yaml")}
    volumes = {volume["name"]: volume for volume in deployment()["volumes"]}
    tokens = volumes["tokens"]["secret"]
    assert secrets[tokens["secretName"]]["stringData"].keys() == {
        item["key"] for item in tokens["items"]
    }
    (variables,) = container()["envFrom"]
    models = secrets[variables["secretRef"]["name"]]
    assert "tokens" not in models["stringData"]  # variables are shown to every command

    claims = {claim["metadata"]["name"] for claim in manifests("storage.yaml")}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes.values()
        if "persistentVolumeClaim" in volume
    }
    assert used == claims

    (service,) = manifests("service.yaml")
    (whole,) = manifests("deployment.yaml")
    assert service["spec"]["selector"] == whole["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == whole["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == container()["ports"][0]["name"]
    assert (whole["spec"]["replicas"], whole["spec"]["strategy"]) == (1, {"type": "Recreate"})


async def test_the_probes_ask_for_what_the_server_has_and_need_no_token(tmp_path: Path) -> None:
    paths = {
        container()[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {"/healthz", "/readyz"}
    async with (
        listening(tmp_path, env={"ACP_AGENT_TOKEN": TOKEN}, listen="0.0.0.0:0") as server,
        httpx2.AsyncClient() as http,
    ):
        for path in paths:
            answer = await http.get(server.http + path, headers={"host": "10.1.2.3:8080"})
            assert answer.status_code == 200
