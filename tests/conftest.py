"""Shared set-up: nothing of the person's own configuration or sessions reaches a test."""

from __future__ import annotations

import os
import sys

import pytest
import transports
from hypothesis import settings
from transports import TRANSPORTS

from agent_core import logs

_FOREIGN = ("ACP_AGENT_", "ANTHROPIC_", "DEEPSEEK_", "OPENAI_", "OPENROUTER_")


def pytest_configure(config: pytest.Config) -> None:
    if (sdk := config.getoption("--python-sdk")) is not None:
        sys.path.insert(0, sdk)
    # The same examples each time, but for those who look for trouble.
    settings.register_profile("same", derandomize=config.getoption("--repeat") == 1)
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat", type=int, default=1, help="run each race test so many times")
    parser.addoption("--over", choices=TRANSPORTS[1:], help="run all black-box tests by that")
    parser.addoption("--python-sdk", help="the folder with the Python SDK to test with")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many as there are processors: more of them would make each other late."""
    return min(8, _n_processors())


def _n_processors() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    over = metafunc.definition.get_closest_marker("transports")
    if over is not None and metafunc.config.getoption("--over") is None:
        metafunc.parametrize("_transport", over.args or TRANSPORTS, indirect=True)
    times = metafunc.config.getoption("--repeat")
    if times > 1 and metafunc.definition.get_closest_marker("race"):
        metafunc.fixturenames.append("_repetition")
        metafunc.parametrize("_repetition", range(times))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--over`` keep the black-box tests that make sense there."""
    if (over := config.getoption("--over")) is None:
        return
    kept = [item for item in items if _can_be_over(over, item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    transports.current = over


def _can_be_over(transport: str, item: pytest.Item) -> bool:
    marks = [item.get_closest_marker(name) for name in ("transports", "only_over")]
    names = vars(item.module) if isinstance(item, pytest.Function) else {}
    starts = (getattr(names.get(name), "__module__", "") for name in ("serving", "served"))
    is_black_box = any(module in ("serving", "serve_rig") for module in starts)
    fits = (transport in (mark.args or TRANSPORTS) for mark in marks if mark is not None)
    return is_black_box and all(fits)


@pytest.fixture(autouse=True)  # or else a test that does not name it would not have it
def _transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "current", getattr(request, "param", transports.current))


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith(_FOREIGN)]:
        monkeypatch.delenv(variable)
    place = tmp_path_factory.mktemp("places")
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets up does not reach the next one."""
    monkeypatch.setattr(logs, "_threshold", logs._threshold)
    monkeypatch.setattr(logs, "_preparations", [])


@pytest.fixture
def every_record(_own_logs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that only a program with logs of its own would see are made in this test too."""
    monkeypatch.setattr(logs, "_threshold", 0)
