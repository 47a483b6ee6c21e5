from __future__ import annotations

import os
import subprocess
import sys

import dialects
import pytest
from model_rig import a_request, collect

from acp_server.config import (
    Config,
    ConfigError,
    ModelConfig,
    ProviderConfig,
    SubagentConfig,
    load_config,
)
from acp_server.models import (
    ModelMaker,
    hide_variables,
    library_of,
    make_models,
    model_problem,
)
from agent_core.models.adapter import Finish, ModelInfo, Price
from conformance.providers.server import Reply, provider_double

HERE = ProviderConfig(base_url="http://localhost:1/v1")


def configured(**options) -> Config:
    return Config(model="openai:gpt-5", **options)


# --- what is known of a model ----------------------------------------------------------------


def test_what_the_configuration_says_of_a_model_comes_before_what_is_known():
    price = Price(1, 2)
    mine = ModelConfig("openai:gpt-5", context_tokens=9_000, takes_images=False, price=price)

    info = ModelMaker(Config(models={"mine": mine})).info("mine")

    assert info == ModelInfo(
        "mine",
        context_tokens=9_000,
        max_output_tokens=128_000,
        takes_images=False,
        takes_files=True,
        efforts=("minimal", "low", "medium", "high"),
        effort="medium",
        price=price,
    )


@pytest.mark.parametrize(
    ("settings", "efforts", "effort"),
    [
        ({"effort": "high"}, ("minimal", "low", "medium", "high"), "high"),
        ({"efforts": ("low", "high")}, ("low", "high"), None),
        ({"efforts": ("low", "high"), "effort": "low"}, ("low", "high"), "low"),
        ({"efforts": ()}, (), None),
    ],
)
def test_a_default_effort_is_one_of_those_that_the_configuration_leaves(settings, efforts, effort):
    models = {"mine": ModelConfig("openai:gpt-5", **settings)}

    info = ModelMaker(Config(models=models)).info("mine")

    assert (info.efforts, info.effort) == (efforts, effort)


# --- what is spoken with it ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "base_url", "api"),
    [
        ("openai:gpt-5.5", None, "responses"),
        ("openai:gpt-5.5", "https://api.openai.com/v1/", "responses"),
        ("openai:gpt-5.5", "https://eu.api.openai.com/v1", "responses"),
        ("openai:gpt-5.5", "https://api.openai.com.evil.example/v1", "chat"),
        ("openai:gpt-5.5", "http://localhost:8000/v1", "chat"),
        ("openai:gpt-4o", None, "chat"),
        ("openai:gpt-77", None, "responses"),
        ("openrouter:openai/gpt-5.5", None, "chat"),
        ("ollama:qwen3", None, "chat"),
        ("anthropic:claude-opus-5", None, "anthropic"),
        ("anthropic:claude-opus-5", "http://gateway", "anthropic"),
    ],
)
def test_responses_are_spoken_with_openais_own_endpoint_where_the_model_wants_it(
    name, base_url, api
):
    provider = name.partition(":")[0]
    config = Config(model=name, providers={provider: ProviderConfig(base_url=base_url)})

    assert ModelMaker(config).api(name) == api


def test_what_is_spoken_is_what_the_model_says_else_its_provider():
    config = Config(
        model="work:a",
        providers={"work": ProviderConfig(api="anthropic", base_url="http://work")},
        models={"b": ModelConfig("work:b", api="responses"), "c": ModelConfig("openai:gpt-5")},
    )
    maker = ModelMaker(config)

    assert [maker.api(name) for name in ("work:a", "b", "c")] == [
        "anthropic",
        "responses",
        "responses",
    ]
    assert library_of(config) == "anthropic"
    assert library_of(configured()) == "openai"
    assert library_of(Config()) is None


# --- keys ------------------------------------------------------------------------------------


@pytest.mark.requirement("B160")
@pytest.mark.parametrize(
    ("model", "variable", "table"),
    [
        ("openai:gpt-5", "OPENAI_API_KEY", "[providers.openai]"),
        ("anthropic:claude-opus-5", "ANTHROPIC_API_KEY", "[providers.anthropic]"),
        ("deepseek:deepseek-v4-pro", "DEEPSEEK_API_KEY", "[providers.deepseek]"),
        ("openrouter:x/y", "OPENROUTER_API_KEY", "[providers.openrouter]"),
        ("my/own:x", "OWN_KEY", '[providers."my/own"]'),
    ],
)
def test_a_missing_key_is_named_with_its_variable_its_table_and_its_file(model, variable, table):
    own = ProviderConfig(base_url="http://own", key_variable="OWN_KEY")
    config = Config(model=model, providers={"my/own": own}, file="/etc/agent.toml")

    problem = model_problem(config)

    assert problem == (
        f"The model {model} needs a key: set {variable}, or key under {table} in /etc/agent.toml,"
        f" or run `acp-agent login {model.partition(':')[0]}`."
    )


@pytest.mark.parametrize(
    "settings",
    [
        HERE,
        ProviderConfig(key="k"),
        ProviderConfig(key_command=("pass", "x")),
        ProviderConfig(headers={"authorization": "Bearer x"}),
        ProviderConfig(headers={"X-Api-Key": "x"}),
    ],
)
def test_no_key_is_missing_where_another_address_a_command_or_a_header_stands_for_it(settings):
    assert model_problem(configured(providers={"openai": settings})) is None
    assert model_problem(configured(providers={"openai": ProviderConfig()})) is not None


@pytest.mark.parametrize("model", ["rehearsal", "ollama:x", "lmstudio:x", "vllm:x", "llamacpp:x"])
def test_what_runs_here_needs_no_key(model):
    assert model_problem(Config(model=model)) is None


def test_openais_own_address_needs_a_key_however_it_is_written():
    there = ProviderConfig(base_url="https://api.openai.com/v1/")

    assert model_problem(configured(providers={"openai": there})) is not None


@pytest.mark.requirement("B163")
def test_what_providers_are_shown_is_taken_out_of_the_environment():
    environ = {
        "OPENAI_API_KEY": "a",
        "OPENAI_ORG_ID": "b",
        "OPENAI_CUSTOM_HEADERS": "c",
        "OPENAI_ADMIN_KEY": "d",
        "ANTHROPIC_API_KEY": "e",
        "ANTHROPIC_AUTH_TOKEN": "f",
        "ANTHROPIC_CUSTOM_HEADERS": "g",
        "DEEPSEEK_API_KEY": "h",
        "WORK_KEY": "i",
        "FAR_TOKEN": "j",
        "PATH": "/bin",
        "HTTPS_PROXY": "http://proxy",
    }
    work = ProviderConfig(base_url="http://work", key_variable="WORK_KEY")

    far = SubagentConfig(url="wss://far", token_variable="FAR_TOKEN")
    hide_variables(Config(providers={"work": work}, subagents={"far": far}), environ)

    assert environ == {"PATH": "/bin", "HTTPS_PROXY": "http://proxy"}


# --- adapters --------------------------------------------------------------------------------


async def test_a_session_may_choose_the_configured_ones_and_any_that_makes_sense():
    models = make_models(
        Config(model="b", models={"a": ModelConfig("vllm:x"), "b": ModelConfig("vllm:y")})
    )

    assert [adapter.info.name for adapter in models.adapters] == ["b", "a"]
    assert models.default == "b"
    found = models.get("openai:gpt-5")
    assert found is not None
    assert found.info.context_tokens == 400_000
    assert models.get("openai:gpt-5") is found
    assert models.get("rehearsal") is not None
    assert models.get("nobody:x") is None
    assert models.get("gpt-5") is None
    await models.aclose()


def test_a_script_that_cannot_be_played_is_a_configuration_error():
    with pytest.raises(ConfigError, match="rehearsal script cannot be used"):
        make_models(Config(rehearsal_script="/nonexistent"))


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
async def test_the_file_leads_to_an_endpoint_that_is_shown_key_headers_and_sampling(
    api, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_ORG_ID", "not-for-others")
    path = tmp_path / "config.toml"
    async with provider_double([Reply(dialects.last_words(api))]) as double:
        path.write_text(f"""
            model = "mine"
            [providers.work]
            api = "{api}"
            base_url = "{dialects.base_url(api, double)}"
            key = "sk-work-0123456789"
            headers = {{X-Team = "red"}}
            [models.mine]
            model = "work:the-model"
            sampling = {{temperature = 0.5}}
        """)
        config = load_config({"config": str(path)})
        hide_variables(config)
        models = make_models(config)

        events, error = await collect(models.adapter("mine"), a_request(model="mine"))
        await models.aclose()

    assert error is None
    assert events[-1] == Finish("stop")
    assert double.violations == []
    assert double.requests[0]["model"] == "the-model"
    assert double.requests[0]["temperature"] == 0.5
    headers = double.headers[0]
    assert "sk-work-0123456789" in (headers.get("authorization", "") + headers.get("x-api-key", ""))
    assert headers["x-team"] == "red"
    assert "openai-organization" not in headers


async def test_an_anthropic_token_is_shown_as_one(monkeypatch):
    async with provider_double([Reply(dialects.last_words("anthropic"))]) as double:
        monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "token-0123456789")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", dialects.base_url("anthropic", double))
        config = load_config({"model": "anthropic:claude-opus-5"})
        hide_variables(config)
        models = make_models(config)

        _events, error = await collect(models.adapter(config.model), a_request())
        await models.aclose()

    assert error is None
    assert double.headers[0]["authorization"] == "Bearer token-0123456789"
    assert "x-api-key" not in double.headers[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_no_command_finds_a_key_where_the_system_keeps_what_we_were_started_with() -> None:
    program = """
import ctypes, os, subprocess
from acp_server.config import load_config
from acp_server.models import hide_variables
config = load_config({})
if os.getuid() == 0:  # root may read everything
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # which that has changed
hide_variables(config)
found = subprocess.run(["cat", f"/proc/{os.getpid()}/environ"], capture_output=True)
print(b"SECRET" in found.stdout, "OPENAI_API_KEY" in os.environ)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"OPENAI_API_KEY": "sk-SECRET", "PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert done.stdout.split() == ["False", "False"], done.stderr
