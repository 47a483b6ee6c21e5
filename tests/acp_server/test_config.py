from __future__ import annotations

import os

import pytest

from acp_server.config import (
    Config,
    ConfigError,
    ModelConfig,
    SubagentConfig,
    load_config,
    state_dir,
    table_name,
)
from agent_core.models.adapter import Price


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


@pytest.fixture
def write(tmp_path):
    def write_config(text: str) -> None:
        folder = tmp_path / ".config" / "acp-agent"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(text, encoding="utf-8")

    return write_config


def test_with_nothing_configured_everything_has_a_default(environ):
    assert load_config({}, environ) == Config()


def test_flags_come_before_variables_before_the_file_before_defaults(environ, write):
    write('model = "openai:file"\nmode = "read-only"\nidle_limit_s = 7\n')
    environ |= {"ACP_AGENT_MODEL": "openai:variable", "ACP_AGENT_MODE": "accept-edits"}

    config = load_config({"model": "openai:flag", "mode": None}, environ)

    assert (config.model, config.mode, config.idle_limit_s) == ("openai:flag", "accept-edits", 7.0)


def test_it_is_known_where_every_value_came_from(environ, write):
    write('idle_limit_s = 7\n[providers.openai]\nkey = "file"\n[models."a/b:c"]\nmodel = "vllm:x"')
    environ |= {"ACP_AGENT_MODE": "bypass", "ANTHROPIC_API_KEY": "k"}

    config = load_config({"model": "a/b:c", "plugins": ["m:f"]}, environ)

    assert config.file == "~/.config/acp-agent/config.toml"
    assert config.sources["idle_limit_s"] == config.file
    assert config.sources["providers.openai.key"] == config.file
    assert config.sources['models."a/b:c".model'] == config.file
    assert config.sources["mode"] == "ACP_AGENT_MODE"
    assert config.sources["providers.anthropic.key"] == "ANTHROPIC_API_KEY"
    assert config.sources["model"] == "--model"
    assert config.sources["plugins"] == "--plugin"
    assert "max_steps" not in config.sources


def test_numbers_in_variables_are_read(environ):
    environ |= {
        "ACP_AGENT_IDLE_LIMIT_S": "0.5",
        "ACP_AGENT_MAX_STEPS": "4",
        "ACP_AGENT_UNLOAD_AFTER_S": "60",
    }

    config = load_config({}, environ)

    assert (config.idle_limit_s, config.max_steps, config.unload_after_s) == (0.5, 4, 60)


def test_a_limit_of_steps_comes_from_the_flag_the_variable_or_the_file(environ, write):
    assert load_config({}, environ).max_steps == 200
    write("max_steps = 3\n")
    assert load_config({}, environ).max_steps == 3
    environ["ACP_AGENT_MAX_STEPS"] = "4"
    assert load_config({}, environ).max_steps == 4
    assert load_config({"max_steps": 0}, environ).max_steps == 0


# --- providers -------------------------------------------------------------------------------


def test_the_sdks_own_variables_come_before_the_file(environ, write):
    write('[providers.openai]\nkey = "file"\nheaders = {X-Team = "red"}\n')
    environ |= {"OPENAI_API_KEY": "variable", "OPENAI_BASE_URL": "http://localhost/v1"}

    provider = load_config({}, environ).provider("openai")

    assert (provider.key, provider.base_url) == ("variable", "http://localhost/v1")
    assert provider.headers == {"X-Team": "red"}


def test_a_key_in_the_environment_comes_before_a_command_in_the_file(environ, write):
    write('[providers.anthropic]\nkey_command = ["pass", "show", "it"]\n')
    assert load_config({}, environ).provider("anthropic").key_command == ("pass", "show", "it")

    environ["ANTHROPIC_API_KEY"] = " k\n"

    provider = load_config({}, environ).provider("anthropic")
    assert (provider.key, provider.key_command) == ("k", None)


def test_a_key_may_come_from_a_variable_that_the_file_names(environ, write):
    write('[providers.work]\nbase_url = "http://work/v1"\nkey_variable = "WORK_KEY"\nkey = "f"')
    assert load_config({}, environ).provider("work").key == "f"

    environ["WORK_KEY"] = "k"

    assert load_config({}, environ).provider("work").key == "k"


def test_a_blank_variable_is_none(environ, write):
    write('[providers.openai]\nkey = "file"\n')
    environ |= {"OPENAI_API_KEY": " ", "OPENAI_BASE_URL": ""}

    provider = load_config({}, environ).provider("openai")

    assert (provider.key, provider.base_url) == ("file", None)


def test_an_anthropic_token_is_a_header_in_the_place_of_the_files_key(environ, write):
    write('[providers.anthropic]\nkey = "file"\nheaders = {authorization = "x", A = "b"}\n')
    environ["ANTHROPIC_AUTH_TOKEN"] = "token"

    config = load_config({}, environ)

    provider = config.provider("anthropic")
    assert provider.key is None
    assert provider.headers == {"A": "b", "Authorization": "Bearer token"}
    assert config.sources["providers.anthropic.headers"] == "ANTHROPIC_AUTH_TOKEN"
    environ["ANTHROPIC_API_KEY"] = "key"
    provider = load_config({}, environ).provider("anthropic")
    assert (provider.key, provider.headers) == ("key", {"authorization": "x", "A": "b"})


def test_the_sdks_variables_for_headers_are_headers_of_their_own_provider(environ):
    environ |= {
        "OPENAI_ORG_ID": "org",
        "OPENAI_PROJECT_ID": "project",
        "OPENAI_CUSTOM_HEADERS": "X-A: 1\nnonsense\nX-B: 2:3",
        "ANTHROPIC_CUSTOM_HEADERS": "X-C: 4",
    }

    config = load_config({}, environ)

    assert config.provider("openai").headers == {
        "OpenAI-Organization": "org",
        "OpenAI-Project": "project",
        "X-A": "1",
        "X-B": "2:3",
    }
    assert config.provider("anthropic").headers == {"X-C": "4"}
    assert config.provider("deepseek").headers == {}


# --- models ----------------------------------------------------------------------------------


def test_a_model_may_have_a_name_and_facts_of_its_own(environ, write):
    write("""
        model = "fast"
        [models.fast]
        model = "vllm:Qwen/Qwen3-32B"
        api = "chat"
        sampling = {temperature = 0.2}
        context_tokens = 32_768
        takes_images = false
        efforts = ["low", "high"]
        effort = "low"
        price = {input = 1, output = 2.5, cached = 0, currency = "EUR"}
    """)

    config = load_config({}, environ)

    assert config.models["fast"] == ModelConfig(
        "vllm:Qwen/Qwen3-32B",
        api="chat",
        sampling={"temperature": 0.2},
        context_tokens=32_768,
        takes_images=False,
        efforts=("low", "high"),
        effort="low",
        price=Price(1, 2.5, 0, None, "EUR"),
    )


@pytest.mark.parametrize(
    ("name", "provider", "id"),
    [
        ("openai:gpt-5.5", "openai", "gpt-5.5"),
        ("openai:ft:gpt-4.1:acme::x", "openai", "ft:gpt-4.1:acme::x"),
        ("openrouter:qwen/qwen3:free", "openrouter", "qwen/qwen3:free"),
        ("my/own:x", "my/own", "x"),
        ("a:b:x", "a:b", "x"),
        ("openai:mine", "vllm", "x"),
        ("a/b:c", "a:b", "y"),
    ],
)
def test_a_name_is_a_configured_model_or_a_provider_and_what_it_calls_it(
    environ, write, name, provider, id
):
    write("""
        [providers."my/own"]
        base_url = "http://a"
        [providers."a:b"]
        base_url = "http://b"
        [providers.a]
        base_url = "http://c"
        [models."openai:mine"]
        model = "vllm:x"
        [models."a/b:c"]
        model = "a:b:y"
    """)

    config = load_config({"model": name}, environ)

    assert config.target(name)[:2] == (provider, id)


def test_a_table_is_named_as_the_file_has_it():
    assert table_name("models", "fast-1") == "models.fast-1"
    assert table_name("models", 'a/b:"c"') == 'models."a/b:\\"c\\""'


# --- what cannot be used ---------------------------------------------------------------------

MODEL = "[models.m]\nmodel = 'openai:gpt-5'\n"


@pytest.mark.requirement("B146")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("modell = 'openai:x'", "no key 'modell'; did you mean model.* There are model, mode, "),
        ("[openai]\napi_key = 'x'", "no key 'openai'; there are model, mode, .*providers"),
        ("file = 'x'", "no key 'file'; "),
        ("[network]\norgins = []", "network: .*'orgins'; did you mean origins[?] There are or"),
        ("model = 5", "model: expected"),
        ("mode = 'yolo'", "no permission mode 'yolo'; there are ask"),
        ("idle_limit_s = 'long'", "idle_limit_s: expected"),
        ("idle_limit_s = '7'", "idle_limit_s: expected"),
        ("idle_limit_s = -0.5", "idle_limit_s: expected .* >= 0"),
        ("idle_limit_s = nan", "idle_limit_s: expected .* >= 0"),
        ("unload_after_s = -1", "unload_after_s: expected .* >= 0"),
        ("max_steps = -1", "max_steps: expected .* >= 0"),
        ("max_steps = true", "max_steps: expected"),
        ("plugins = 'a:b'", "plugins: expected"),
        ("model = ", "cannot be read"),
        ("model = 'gpt-5'", "model: no model 'gpt-5'; write PROVIDER:NAME with one of anthropic"),
        ("model = 'openai:'", "model: no model 'openai:'"),
        ("model = 'claude:x'", "model: no model 'claude:x'"),
        ("providers = 'x'", "providers: expected"),
        ("providers.openai = 'x'", "providers.openai: expected"),
        ("[providers.openai]\napi_kee = 'x'", "providers.openai: .*'api_kee'; .*, key_command"),
        ("[providers.openai]\napi = 'grpc'", r"providers.openai.api: expected one of chat"),
        ("[providers.openai]\nbase_url = 'localhost:1'", "providers.openai.base_url: .*http"),
        ("[providers.openai]\nbase_url = ''", "providers.openai.base_url: .*http"),
        ("[providers.openai]\nbase_url = 'file:///etc/passwd'", "base_url: .*http"),
        ("[providers.own]", "providers.own: a provider of one's own needs a base_url"),
        ("[providers.openai]\nkey = ''", "providers.openai.key: is empty"),
        ("[providers.openai]\nkey_command = []", "key_command: expected .* length >= 1"),
        ("[providers.openai]\nkey_command = ['']", "key_command.*: expected .* length >= 1"),
        ("[providers.openai]\nkey_command = 'pass x'", "key_command: expected"),
        ("[providers.openai]\nkey = 'a'\nkey_command = ['b']", "providers.openai: .*not both"),
        ("[providers.openai]\nheaders = {X = 1}", "providers.openai.headers: expected"),
        ("[providers.openai]\nheaders = {'X Y' = 'z'}", "providers.openai.headers: .*name"),
        ("[providers.'']\nbase_url = 'http://x'", "providers: needs names"),
        ("[models.m]", "models.m: .*`model`"),
        ("[models.m]\nmodel = 'gpt-5'", "models.m.model: no model 'gpt-5'"),
        ("[models.m]\nmodel = 'nobody:x'", "models.m.model: no model 'nobody:x'"),
        (f"{MODEL}[models.n]\nmodel = 'm'", "models.n.model: 'm' is a name, too; .* openai:gpt-5"),
        ("[models.'a/b']\nmodel = 'x'", r'models\."a/b"\.model: no model'),
        ("[models.rehearsal]\nmodel = 'openai:x'", "models: needs names of its own"),
        (f"{MODEL}api = 'x'", "models.m.api: expected one of chat, responses, anthropic"),
        (f"{MODEL}context_tokens = -1", "models.m.context_tokens: expected .* >= 1"),
        (f"{MODEL}max_output_tokens = 0", "models.m.max_output_tokens: expected .* >= 1"),
        (f"{MODEL}effort = 'huge'", "models.m.effort: .*minimal, low, medium, high"),
        (f"{MODEL}efforts = []\neffort = 'low'", "models.m.effort: .*none, unless efforts says so"),
        (f"{MODEL}sampling = {{model = 'x'}}", "models.m.sampling: model"),
        (f"{MODEL}sampling = {{stream = false}}", "models.m.sampling: stream"),
        (f"{MODEL}sampling = {{tools = []}}", "models.m.sampling: tools"),
        (f"{MODEL}price = {{input = 1}}", "models.m.price: .*`output`"),
        (f"{MODEL}price = {{input = -1, output = 1}}", "models.m.price: input must be 0 or more"),
        (f"{MODEL}price = {{input = 1, output = 1.5, cached = nan}}", "price: cached must be 0"),
        (f"{MODEL}price = {{input = 1, output = 1, per = 2}}", "price: .*'per'.* input, output"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_place_and_its_file(environ, write, text, complaint):
    write(text)

    with pytest.raises(ConfigError, match=f"(?is){complaint}") as told:
        load_config({}, environ)

    assert "acp-agent/config.toml" in str(told.value)


@pytest.mark.requirement("B146")
@pytest.mark.parametrize(
    ("flags", "variables", "complaint"),
    [
        ({}, {"ACP_AGENT_MAX_STEPS": "many"}, r"max_steps: .*\(ACP_AGENT_MAX_STEPS\)"),
        ({"mode": "yolo"}, {}, r"mode: .*\(--mode\)"),
        ({"model": "x"}, {}, r"model: .*\(--model\)"),
        ({}, {"OPENAI_BASE_URL": "x"}, r"providers.openai.base_url: .*\(OPENAI_BASE_URL\)"),
        ({}, {"OPENAI_API_KEY": "a b"}, r"providers.openai.key: .*\(OPENAI_API_KEY\)"),
        ({}, {"ANTHROPIC_AUTH_TOKEN": "é"}, r"anthropic.headers: .*\(ANTHROPIC_AUTH_TOKEN\)"),
    ],
)
def test_what_did_not_come_from_the_file_is_said_with_where_it_did(
    environ, flags, variables, complaint
):
    with pytest.raises(ConfigError, match=complaint):
        load_config(flags, environ | variables)


@pytest.mark.requirement("B163")
@pytest.mark.parametrize(
    "text",
    [
        '[providers.openai]\nkey = ["SECRET"]',
        '[providers.openai]\nkey = "SECRET\\n"',
        "[providers.openai]\nkey = 'SECRET é'",
        "[providers.openai]\nkey = 'two SECRETs'",
        "[providers.openai]\napi = 'SECRET'",
        "[providers.openai]\nkey_variable = 'sk-SECRET'",
        "[providers.openai]\nkey_command = 'echo SECRET'",
        "[providers.openai]\nbase_url = 'ftp://me:SECRET@host'",
        "[providers.openai]\nheaders = {X = 'SECRET é'}",
        '[providers.openai]\nheaders = {X = "SECRET\\r\\nY: z"}',
        "[providers.openai]\nheaders = 'SECRET'",
        "[providers.openai]\nkey = 'SECRET",
        "[providers.openai]\nkey = SECRET",
    ],
)
def test_a_complaint_never_shows_what_may_be_a_secret(environ, write, text):
    write(text)

    with pytest.raises(ConfigError) as told:
        load_config({}, environ)

    assert "SECRET" not in str(told.value)


# --- files and folders -----------------------------------------------------------------------


def test_a_file_that_was_named_must_exist(environ, tmp_path):
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config({"config": str(tmp_path / "none.toml")}, environ)


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_another_file_may_be_named(environ, tmp_path, by):
    path = tmp_path / "other.toml"
    path.write_text('mode = "bypass"')
    flags = {"config": str(path)} if by == "flag" else {}
    environ |= {"ACP_AGENT_CONFIG": str(path)} if by == "variable" else {}

    config = load_config(flags, environ)

    assert (config.mode, config.file) == ("bypass", "~/other.toml")


def test_a_file_that_is_not_utf8_cannot_be_read(environ, tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(b'mode = "\xe9"')

    with pytest.raises(ConfigError, match="cannot be read"):
        load_config({"config": str(path)}, environ)


def test_sessions_are_kept_in_the_state_folder_unless_another_is_named(environ, tmp_path):
    named = load_config({"state_dir": str(tmp_path / "mine")}, environ)

    assert state_dir(environ) == str(tmp_path / ".local/state/acp-agent")
    assert named.sessions_path == tmp_path / "mine" / "sessions.sqlite3"
    assert Config().sessions_path.is_absolute()


def test_the_base_directories_are_followed_only_where_they_are_absolute(environ):
    assert state_dir(environ | {"XDG_STATE_HOME": "/x"}) == "/x/acp-agent"
    assert state_dir(environ | {"XDG_STATE_HOME": "x"}) == state_dir(environ)
    assert state_dir(environ | {"XDG_STATE_HOME": ""}) == state_dir(environ)


def test_without_home_there_is_still_an_absolute_place(monkeypatch):
    monkeypatch.delenv("HOME")

    assert os.path.isabs(state_dir({}))
    assert load_config({}, {}) is not None


def test_without_home_and_without_an_entry_for_the_user_there_still_is(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)

    assert state_dir({}) == f"/tmp/acp-agent-{os.getuid()}/.local/state/acp-agent"


# --- other agents ----------------------------------------------------------------------------


def test_other_agents_have_tables_of_their_own(environ, write):
    write(
        '[subagents.gemini]\ncommand = ["gemini", "--acp"]\ndescription = "D"\ncwd = "/tmp"\n'
        'env = {GEMINI_API_KEY = "k"}\npermissions = "reject"\n[subagents.plain]\ncommand = ["a"]'
    )

    config = load_config({}, environ)

    assert config.subagents == {
        "gemini": SubagentConfig(
            ("gemini", "--acp"), "D", {"GEMINI_API_KEY": "k"}, "/tmp", "reject"
        ),
        "plain": SubagentConfig(("a",)),
    }
    assert config.subagents["plain"].permissions == "ask"


def test_the_token_of_another_agent_comes_from_its_variable_first(environ, write):
    write(
        '[subagents.far]\nurl = "wss://host/acp"\ntoken = "written"\ntoken_variable = "FAR"\n'
        '[subagents.near]\nurl = "ws://host"\ntoken_command = ["pass"]\ntoken_variable = "NEAR"'
    )

    config = load_config({}, environ | {"FAR": " set \n"})

    far, near = config.subagents["far"], config.subagents["near"]
    assert (far.token, far.token_command, near.token) == ("set", None, None)
    assert near.token_command == ("pass",)
    assert config.sources["subagents.far.token"] == "FAR"


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("[subagents.a]", "subagents.a: give command or url, one of the two"),
        ('[subagents.a]\ncommand = ["a"]\nurl = "ws://h"', "subagents.a: give command or url, one"),
        ('[subagents.a]\nurl = "http://h"', "subagents.a.url: must begin with ws:// or wss://"),
        ('[subagents.a]\nurl = "wss://x:s3@h"', "subagents.a.url: must begin with ws:// or wss://"),
        (
            '[subagents.a]\nurl = "ws://h"\ntoken = "s3"\ntoken_command = ["x"]',
            "subagents.a: give token or token_command, not both",
        ),
        (
            '[subagents.a]\ncommand = ["a"]\ntoken = "s3"',
            "subagents.a.token: is of no use without url",
        ),
        (
            '[subagents.a]\nurl = "ws://h"\nenv = {A = "s3"}',
            "subagents.a.env: is of no use without command",
        ),
        ("[subagents.a]\ncommand = []", "subagents.a.command: expected"),
        ('[subagents.a]\ncommand = "a"', "subagents.a.command: expected"),
        ('[subagents.a]\ncommand = [""]', "subagents.a.command[0]: expected"),
        (
            '[subagents.a]\ncommand = ["a"]\npermissions = "yes"',
            "subagents.a.permissions: expected one of ask, reject, allow",
        ),
        (
            '[subagents.a]\ncommand = ["a"]\ncwd = "here"',
            "subagents.a.cwd: must be an absolute path",
        ),
        (
            '[subagents.a]\ncommand = ["a"]\nenv = {"a b" = "c"}',
            "subagents.a.env: is no name of an environment variable",
        ),
        ('[subagents.a]\ncommand = ["a"]\nsecret = "s3"', "subagents.a: there is no key 'secret'"),
        ('[subagents.spawn]\ncommand = ["a"]', "subagents: has a name that is taken"),
        ('[subagents."a b"]\ncommand = ["a"]', "subagents: has a name that is taken"),
        ("subagents = 3", "subagents: expected"),
    ],
)
def test_what_is_wrong_with_another_agent_is_said(environ, write, table, problem):
    write(table)

    with pytest.raises(ConfigError) as caught:
        load_config({}, environ)

    assert str(caught.value).lower().startswith(problem.lower())
    assert str(caught.value).endswith("(~/.config/acp-agent/config.toml).")
    assert "s3" not in str(caught.value)
