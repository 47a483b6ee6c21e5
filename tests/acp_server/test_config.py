from __future__ import annotations

import os

import pytest

from acp_server.backend import model_problem
from acp_server.config import Config, ConfigError, OpenAIConfig, load_config, state_dir


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


def test_the_sdks_own_variables_fill_the_endpoint(environ, write):
    write('[openai]\napi_key = "file"\nheaders = {X-Team = "é"}\n')
    environ |= {"OPENAI_API_KEY": "variable", "OPENAI_BASE_URL": "http://localhost/v1"}

    assert load_config({}, environ).openai == OpenAIConfig(
        "variable", "http://localhost/v1", {"X-Team": "é"}
    )


def test_a_key_may_come_from_the_file_alone(environ, write):
    write('model = "openai:gpt-5"\n[openai]\napi_key = "file"\n')

    config = load_config({}, environ)

    assert config.openai.api_key == "file"
    assert model_problem(config) is None


def test_numbers_in_variables_are_read(environ):
    environ["ACP_AGENT_IDLE_LIMIT_S"] = "0.5"

    assert load_config({}, environ).idle_limit_s == 0.5


@pytest.mark.requirement("B146")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("modell = 'openai:x'", "modell"),
        ("[openai]\napi_kee = 'x'", r"api_kee.*openai"),
        ("model = 5", r"\$\.model"),
        ("idle_limit_s = 'long'", r"\$\.idle_limit_s"),
        ("openai = 'x'", r"\$\.openai"),
        ("mode = 'yolo'", "no permission mode 'yolo'; there are ask"),
        ("model = 'gpt-5'", "No model 'gpt-5'; write openai:NAME"),
        ("model = 'openai:'", "No model 'openai:'"),
        ("model = 'claude:x'", "No model 'claude:x'"),
        ("model = ", "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_place(environ, write, text, complaint):
    write(text)

    with pytest.raises(ConfigError, match=f"(?is){complaint}"):
        load_config({}, environ)


@pytest.mark.requirement("B163")
def test_a_complaint_about_a_key_does_not_show_it(environ, write):
    write('[openai]\napi_key = ["secret-marker"]\n')

    with pytest.raises(ConfigError) as caught:
        load_config({}, environ)

    assert "api_key" in str(caught.value)
    assert "secret-marker" not in str(caught.value)


def test_a_file_that_was_named_must_exist(environ, tmp_path):
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config({"config": str(tmp_path / "none.toml")}, environ)


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_another_file_may_be_named(environ, tmp_path, by):
    path = tmp_path / "other.toml"
    path.write_text('mode = "bypass"')
    flags = {"config": str(path)} if by == "flag" else {}
    environ |= {"ACP_AGENT_CONFIG": str(path)} if by == "variable" else {}

    assert load_config(flags, environ).mode == "bypass"


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


@pytest.mark.requirement("B160")
def test_a_missing_key_is_named_with_its_variable_and_its_file():
    problem = model_problem(Config(model="openai:gpt-5"))

    assert "OPENAI_API_KEY" in (problem or "")
    assert "config.toml" in (problem or "")
    assert model_problem(Config()) is None
    local = OpenAIConfig(base_url="http://localhost:11434/v1")
    assert model_problem(Config(model="openai:llama", openai=local)) is None


def test_a_limit_of_steps_comes_from_the_flag_the_variable_or_the_file(environ, write):
    assert load_config({}, environ).max_steps == 200
    write("max_steps = 3\n")
    assert load_config({}, environ).max_steps == 3
    environ["ACP_AGENT_MAX_STEPS"] = "4"
    assert load_config({}, environ).max_steps == 4
    assert load_config({"max_steps": 0}, environ).max_steps == 0


@pytest.mark.requirement("B146")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_steps = -1", "negative"),
        ("max_steps = 'many'", r"\$\.max_steps"),
        ("idle_limit_s = -0.5", "negative"),
        ("[openai]\nbase_url = 'localhost:11434/v1'", "http"),
        ("[openai]\nbase_url = ''", "http"),
        ("[openai]\nbase_url = 'file:///etc/passwd'", "http"),
        ('[openai]\napi_key = "SECRET\\n"', "key"),
        ("[openai]\napi_key = 'SECRET é'", "key"),
        ("[openai]\napi_key = 'two SECRETs'", "key"),
    ],
)
def test_what_no_endpoint_could_be_reached_with_is_refused_without_showing_it(
    environ, write, text, complaint
):
    write(text)

    with pytest.raises(ConfigError, match=complaint) as told:
        load_config({}, environ)

    assert "SECRET" not in str(told.value)
