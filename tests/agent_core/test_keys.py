from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from model_rig import HI, a_request, collect

from agent_core.cancellation import USER, AbortController, TurnAborted
from agent_core.content import Text
from agent_core.errors import ModelError
from agent_core.models import keys
from agent_core.models.adapter import Finish, ModelInfo, TextDelta, UserTurn
from agent_core.models.endpoint import Endpoint
from agent_core.models.endpoint_model import EndpointModel
from agent_core.models.keys import Key
from agent_core.models.providers import dialect_for
from conformance.providers.server import Reply, answer, provider_double, status, text

ADVICE = "look at key_command"


def key_from(script: str) -> Key:
    return Key(command=("sh", "-c", script), advice=ADVICE)


async def value_of(key: Key) -> str | None:
    with anyio.fail_after(10):
        return await key.value(AbortController().signal)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def number_in(path: Path) -> int | None:
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else None


async def gone(pid: int) -> None:
    with anyio.fail_after(5):
        while is_alive(pid):  # noqa: ASYNC110 - another process makes it true
            await anyio.sleep(0.01)


async def written(path: Path) -> int:
    with anyio.fail_after(5):
        while (number := number_in(path)) is None:  # noqa: ASYNC110 - so here
            await anyio.sleep(0.01)
    return number


# --- what it is -----------------------------------------------------------------------------


async def test_a_given_key_is_that_key_and_a_refusal_does_not_change_it() -> None:
    key = Key("k", advice=ADVICE)

    assert not key.refuse("k")
    assert await value_of(key) == "k"
    assert key.is_given


async def test_no_key_is_none() -> None:
    key = Key(advice=ADVICE)

    assert await value_of(key) is None
    assert not key.is_given


def test_a_key_does_not_show_itself() -> None:
    assert "hunter2" not in f"{Key('hunter2', advice=ADVICE)!r}{Key('hunter2', advice=ADVICE)}"


# --- the command ----------------------------------------------------------------------------


async def test_the_command_is_run_once_and_again_after_a_refusal_of_what_it_said(
    tmp_path: Path,
) -> None:
    key = key_from(f"echo run >> {tmp_path}/log; wc -l < {tmp_path}/log")

    first = [await value_of(key), await value_of(key)]
    assert key.refuse("1")
    second = [await value_of(key), await value_of(key)]
    assert key.refuse("1")  # by a call that began before the second run: not about this key
    third = await value_of(key)

    assert (first, second, third) == (["1", "1"], ["2", "2"], "2")


async def test_calls_at_the_same_time_run_the_command_once(tmp_path: Path) -> None:
    key = key_from(f"echo run >> {tmp_path}/log; wc -l < {tmp_path}/log")
    found: list[str | None] = []

    async def ask() -> None:
        found.append(await value_of(key))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(ask)

    assert found == ["1"] * 5


async def test_who_waits_for_another_ones_command_runs_it_when_that_one_is_aborted(
    tmp_path: Path,
) -> None:
    # The first run never ends, the second one does.
    key = key_from(f"test -e {tmp_path}/pid && echo late || (echo $$ > {tmp_path}/pid; sleep 1000)")
    controller = AbortController()
    found: list[object] = []

    async def ask(controller: AbortController) -> None:
        try:
            found.append(await key.value(controller.signal))
        except TurnAborted:
            found.append("aborted")

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, controller)
            await written(tmp_path / "pid")
            tasks.start_soon(ask, AbortController())
            await anyio.wait_all_tasks_blocked()
            controller.abort(USER)

    assert found == ["aborted", "late"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_an_abort_kills_the_command_and_what_it_started(tmp_path: Path) -> None:
    key = key_from(f"sleep 1000 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/pid; wait")
    controller = AbortController()

    async with anyio.create_task_group() as tasks:

        async def abort() -> None:
            await written(tmp_path / "pid")
            controller.abort(USER)

        tasks.start_soon(abort)
        with pytest.raises(TurnAborted):
            await key.value(controller.signal)

    await gone(await written(tmp_path / "pid"))
    await gone(await written(tmp_path / "child"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_a_command_that_takes_too_long_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "COMMAND_LIMIT_S", 0.3)
    key = key_from(f"sleep 1000 & echo $! > {tmp_path}/child; wait")

    with pytest.raises(ModelError, match="took over") as failed:
        await value_of(key)

    assert failed.value.code == "NOT_CONFIGURED"
    await gone(await written(tmp_path / "child"))


async def test_a_daemon_that_holds_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    key = key_from(f"sleep 1000 & echo $! > {tmp_path}/child; echo the-key")
    silent = key_from(f"sleep 1000 & echo $! > {tmp_path}/other")

    assert await value_of(key) == "the-key"
    with pytest.raises(ModelError, match="printed nothing"):
        await value_of(silent)

    for name in ("child", "other"):
        os.kill(await written(tmp_path / name), 9)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 3", "ended with status 3"),
        ("echo key; exit 3", "ended with status 3"),
        ("kill -9 $$", "ended with status -9"),
        ("true", "printed nothing"),
        ("echo '   '", "printed nothing"),
        ("echo two words", "no key"),
        ("echo two; echo lines", "no key"),
        ("printf 'a\\007b'", "no key"),
        ("printf 'ключ'", "no key"),
        ("printf '\\377\\376'", "no key"),
    ],
)
async def test_a_command_that_fails_says_how_and_what_to_look_at(script: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem) as failed:
        await value_of(key_from(script))

    assert failed.value.code == "NOT_CONFIGURED"
    assert ADVICE in failed.value.message
    assert "two" not in failed.value.message


async def test_a_command_that_is_not_there_says_so() -> None:
    with pytest.raises(ModelError, match="'no-such-program' failed, it cannot be run"):
        await value_of(Key(command=["no-such-program"], advice=ADVICE))


async def test_a_key_is_taken_without_the_space_around_it() -> None:
    assert await value_of(key_from("printf ' the-key \\r\\n'")) == "the-key"


async def test_what_the_command_says_besides_goes_nowhere(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert await value_of(key_from("echo hunter2 >&2; echo the-key; cat")) == "the-key"
    with pytest.raises(ModelError):
        await value_of(key_from("echo hunter2 >&2; exit 1"))

    shown = capfd.readouterr()
    assert "hunter2" not in shown.out + shown.err
    assert "the-key" not in shown.out + shown.err


async def test_commands_leave_no_file_open() -> None:
    await value_of(key_from("echo k"))
    before = len(os.listdir("/dev/fd"))

    for script in ("echo k", "exit 1", "true"):
        with suppress(ModelError):
            await value_of(key_from(script))

    assert len(os.listdir("/dev/fd")) == before


# --- before an endpoint ---------------------------------------------------------------------


def model_with(key: Key, url: str) -> EndpointModel:
    info = ModelInfo("openai:any")
    endpoint = Endpoint("openai", library="openai", base_url=url, key=key, needs_key=True)
    dialect = dialect_for("chat", info, "any", url)
    return EndpointModel(info, id="any", endpoint=endpoint, dialect=dialect)


REFUSED = status(401, {"message": "no"})


def said(*words: str) -> list[Reply]:
    return [answer(text(word)) for word in words]


async def test_a_key_that_has_run_out_is_asked_for_again_and_the_call_goes_on(
    tmp_path: Path,
) -> None:
    key = key_from(f"echo run >> {tmp_path}/log; wc -l < {tmp_path}/log")
    script = [*said("a"), REFUSED, *said("b", "c")]
    async with provider_double(script) as double:
        model = model_with(key, double.url)
        heard = [await collect(model, a_request(HI)) for _ in range(3)]
        await model.aclose()

    assert [events for events, _ in heard] == [[TextDelta(x), Finish("stop")] for x in "abc"]
    assert [headers["authorization"] for headers in double.headers] == [
        "Bearer 1",
        "Bearer 1",
        "Bearer 2",
        "Bearer 2",
    ]


async def test_a_key_that_is_refused_when_it_is_new_is_asked_for_again_by_the_next_call(
    tmp_path: Path,
) -> None:
    key = key_from(f"echo run >> {tmp_path}/log; wc -l < {tmp_path}/log")
    async with provider_double([REFUSED, *said("a"), REFUSED, REFUSED]) as double:
        model = model_with(key, double.url)
        heard = [await collect(model, a_request(UserTurn((Text("hi"),)))) for _ in range(3)]
        await model.aclose()

    codes = [error.code if isinstance(error, ModelError) else None for _, error in heard]
    assert codes == ["AUTH", None, "AUTH"]
    assert [headers["authorization"][-1] for headers in double.headers] == ["1", "2", "2", "3"]


async def test_a_given_key_that_is_refused_is_not_shown_twice() -> None:
    async with provider_double([REFUSED]) as double:
        model = model_with(Key("k", advice=ADVICE), double.url)
        _, error = await collect(model)
        await model.aclose()

    assert isinstance(error, ModelError)
    assert error.code == "AUTH"
    assert len(double.requests) == 1
