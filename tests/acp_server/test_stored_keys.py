from __future__ import annotations

import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from acp_server.config import Config, ProviderConfig, config_dir, load_config
from acp_server.models import ModelMaker, model_problem
from acp_server.stored_keys import (
    KeysUnusable,
    forget_keys,
    keys_file,
    store_key,
    stored_key,
    stored_keys,
)
from agent_core.cancellation import AbortController


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_stored_key_is_read_again_and_only_its_owner_can_read_it() -> None:
    before = os.umask(0)
    try:
        store_key("openai", 'sk-"1\\')
        store_key("my own", "sk-2")
    finally:
        os.umask(before)

    assert stored_keys() == {"openai": 'sk-"1\\', "my own": "sk-2"}
    assert stored_key("openai") == 'sk-"1\\'
    assert (mode_of(keys_file()), mode_of(config_dir())) == (0o600, 0o700)
    assert os.listdir(config_dir()) == ["keys.toml"]


@pytest.mark.parametrize("name", ["é 東京", "\U0001f600", 'a"b\\', "tab\tand\x7f", "a\u2028b"])
def test_no_name_of_a_provider_breaks_the_file(name: str) -> None:
    store_key("openai", "sk-1")
    store_key(name, "sk-2")

    assert stored_keys() == {"openai": "sk-1", name: "sk-2"}


def test_a_folder_that_others_can_look_into_is_closed_to_them() -> None:
    config_dir().mkdir(parents=True)
    config_dir().chmod(0o755)

    store_key("openai", "sk-1")

    assert mode_of(config_dir()) == 0o700


def test_the_key_is_at_no_moment_in_a_file_that_others_can_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[int] = []
    real = os.fsync

    def fsync(file: int) -> None:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode):
            modes.append(stat.S_IMODE(status.st_mode))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)

    store_key("openai", "sk-1")

    assert modes == [0o600]


def test_a_link_in_the_files_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine\n")
    config_dir().mkdir(parents=True)
    keys_file().symlink_to(elsewhere)

    with pytest.raises(KeysUnusable):
        store_key("openai", "sk-1")
    assert stored_key("openai") is None
    forget_keys()
    store_key("openai", "sk-1")

    assert elsewhere.read_text() == "mine\n"
    assert not keys_file().is_symlink()
    assert stored_key("openai") == "sk-1"


def test_a_link_in_the_folders_place_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "dotfiles"
    elsewhere.mkdir()
    config_dir().parent.mkdir(parents=True)
    config_dir().symlink_to(elsewhere)

    with pytest.raises(KeysUnusable, match="cannot be used"):
        store_key("openai", "sk-1")

    assert stored_key("openai") is None
    assert os.listdir(elsewhere) == []


def make_others_readable() -> None:
    keys_file().chmod(0o640)


def make_broken() -> None:
    keys_file().write_text("openai = ")


def make_of_the_wrong_kind() -> None:
    keys_file().write_text("[openai]\nkey = 'sk-1'\n")


def make_a_pipe() -> None:
    keys_file().unlink()
    os.mkfifo(keys_file(), 0o600)


@pytest.mark.parametrize(
    "change", [make_others_readable, make_broken, make_of_the_wrong_kind, make_a_pipe]
)
@pytest.mark.requirement("B163")
def test_a_file_that_cannot_be_trusted_has_no_key_and_says_so_without_one(change: Any) -> None:
    store_key("openai", "sk-secret")
    change()

    assert stored_key("openai") is None
    for use in (stored_keys, lambda: store_key("x", "y"), lambda: forget_keys("openai")):
        with pytest.raises(KeysUnusable) as refused:
            use()
        assert str(keys_file()) in str(refused.value)
        assert "sk-secret" not in str(refused.value)
    forget_keys()
    assert stored_keys() == {}


def test_keys_are_forgotten_one_by_one_or_all_at_once() -> None:
    for provider in ("a", "b", "c"):
        store_key(provider, "k")

    assert forget_keys("b") == ["b"]
    assert forget_keys("b") == []
    assert stored_keys() == {"a": "k", "c": "k"}
    assert forget_keys() == ["a", "c"]
    assert forget_keys() == []
    assert not keys_file().exists()


def test_where_nothing_was_ever_stored_there_is_nothing_to_find_or_forget() -> None:
    assert stored_keys() == {}
    assert forget_keys() == []
    assert forget_keys("openai") == []
    assert not config_dir().exists()


def test_logins_at_the_same_time_lose_no_key() -> None:
    script = "import sys; from acp_server.stored_keys import store_key; store_key(sys.argv[1], 'k')"
    names = [f"provider-{number}" for number in range(8)]

    running = [subprocess.Popen([sys.executable, "-c", script, name]) for name in names]

    assert [process.wait(60) for process in running] == [0] * 8
    assert sorted(tomllib.loads(keys_file().read_text())) == names


# --- where the key that is used comes from ---------------------------------------------------


async def key_used(config: Config, provider: str = "openai") -> str | None:
    return await ModelMaker(config).key(provider).value(AbortController().signal)


async def test_a_variable_comes_first_then_the_file_then_what_is_stored(tmp_path: Path) -> None:
    store_key("openai", "stored")
    file = tmp_path / "config.toml"
    file.write_text('[providers.openai]\nkey = "written"\n')
    flags = {"config": str(file)}

    assert await key_used(load_config(flags, {"OPENAI_API_KEY": "variable"})) == "variable"
    assert await key_used(load_config(flags, {})) == "written"
    assert await key_used(load_config({}, {})) == "stored"
    assert await key_used(load_config({}, {}), "anthropic") is None


async def test_a_header_or_a_command_comes_before_what_is_stored() -> None:
    store_key("openai", "stored")
    header = ProviderConfig(headers={"Authorization": "Bearer x"})
    command = ProviderConfig(key_command=("echo", "printed"))

    assert await key_used(Config(providers={"openai": header})) is None
    assert await key_used(Config(providers={"openai": command})) == "printed"


@pytest.mark.requirement("B164")
async def test_a_login_counts_at_once_and_so_does_a_logout() -> None:
    config = Config(model="openai:gpt-5.5")
    key = ModelMaker(config).key("openai")
    signal = AbortController().signal
    assert (await key.value(signal), key.is_given) == (None, False)
    assert str(model_problem(config)).endswith(", or run `acp-agent login openai`.")

    store_key("openai", "first")
    assert (await key.value(signal), key.is_given, key.secret) == ("first", True, "first")
    assert model_problem(config) is None
    store_key("openai", "second")
    assert await key.value(signal) == "second"

    forget_keys()
    assert (await key.value(signal), key.is_given) == (None, False)
