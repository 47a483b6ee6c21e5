"""Cases as data: scenarios in JSON files, so that nobody needs Python to add one.

A file has one case:

```json
{
  "case": "session_modes_are_kept",
  "says": "Set a mode and look at the answer.",
  "rules": ["CFG-02"],
  "needs": ["loadSession"],
  "steps": [
    {"request": "session/new", "params": {"cwd": "{folder}", "mcpServers": []}, "as": "new"},
    {"answer": "new", "is": {"result": {"sessionId": {"$type": "string"}}}},
    {"request": "session/prompt", "as": "turn", "params": {
      "sessionId": "{new.sessionId}", "prompt": [{"type": "text", "text": "{say hello}"}]}},
    {"message": {"method": "session/update"}},
    {"answer": "turn", "is": {"result": {"stopReason": {"$in": ["end_turn"]}}}, "rule": "CFG-02"}
  ]
}
```

Steps are ``request`` (``as`` names it), ``notify``, ``answer`` (wait for the answer to a named
request), ``message`` (wait for a message of the agent's), ``reply`` (answer the message that was
waited for last) and ``silence`` (nothing of that form comes before a barrier). A step with a
``rule`` holds the agent to it; a step without one that does not come true makes the case
inconclusive. ``initialize`` is done before the first step, with the case's ``capabilities``.

A pattern fits what has at least its members. ``{"$type": "string"}``, ``{"$in": […]}``,
``{"$match": "regular expression"}``, ``{"$absent": true}`` and ``{"$each": pattern}`` say more.

Texts may hold ``{folder}``, ``{say SITUATION}`` and ``{NAME.member}`` of a named answer's result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from conformance.agents import AUTH_REQUIRED, LOGIN_WANTED
from conformance.client import Client
from conformance.manifest import Rule, add_rules, manifest
from conformance.scenarios import SCENARIOS, Scenario
from conformance.steps import error_code
from conformance.trace import Message, WireError
from conformance.trial import NotBroughtAbout, Trial

__all__ = ["Case", "fits", "load_cases", "read_case"]

_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
_HOLE: Final = re.compile(r"\{([^{}]+)\}")


class Step(
    Struct, kw_only=True, forbid_unknown_fields=True, rename={"name": "as", "pattern": "is"}
):
    """One step; exactly one of the first six says which."""

    request: str | None = None
    notify: str | None = None
    answer: str | None = None
    message: dict[str, Any] | None = None
    reply: Any = msgspec.UNSET
    silence: dict[str, Any] | None = None
    params: Any = None
    name: str = ""
    pattern: Any = None
    rule: str = ""

    @property
    def kinds(self) -> list[str]:
        """Which of the first six it has."""
        names = ("request", "notify", "answer", "message", "reply", "silence")
        return [each for each in names if getattr(self, each) not in (None, msgspec.UNSET)]


class Case(Struct, kw_only=True, forbid_unknown_fields=True):
    """One case, as it stands in its file."""

    case: str
    says: str
    steps: list[Step]
    rules: list[str] = []
    """Rules of the suite's that its steps hold the agent to."""
    own_rules: list[Rule] = []
    """Rules that the case brings along."""
    needs: list[str] = []
    """Paths below ``agentCapabilities`` that must be there, and not be false."""
    capabilities: dict[str, Any] = {}
    """What the client offers."""
    is_quick: bool = False


def read_case(path: Path) -> Case:
    """Read a case from a JSON file.

    Raises:
        ValueError: It is none; says what is wrong.
        OSError: It cannot be read.
    """
    try:
        case = msgspec.json.decode(path.read_bytes(), type=Case)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"{path} is no case: {exc}") from None
    if not case.case.isidentifier():
        raise ValueError(f"{path}: {case.case!r} is no name; letters, digits and _ make one")
    known = {*manifest(), *(rule.id for rule in case.own_rules)}
    named: set[str] = set()
    for number, step in enumerate(case.steps, 1):
        if len(step.kinds) != 1:
            raise ValueError(f"{path}: step {number} does {' and '.join(step.kinds) or 'nothing'}")
        if step.rule and step.rule not in known:
            raise ValueError(f"{path}: step {number}: there is no rule {step.rule}")
        if step.request is not None:
            named.add(step.name or step.request)
        if step.answer is not None and step.answer not in named:
            raise ValueError(f"{path}: step {number}: no request before is named {step.answer}")
    return case


def load_cases(paths: Iterable[Path]) -> None:
    """Make scenarios of files, and of all ``.json`` files in folders.

    Raises:
        ValueError: One is no case, or is named as another scenario is.
        OSError: One cannot be read.
    """
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            case = read_case(file)
            if case.case in SCENARIOS:
                raise ValueError(f"{file}: there is a scenario {case.case} already")
            add_rules(
                msgspec.structs.replace(rule, area=rule.area or "Cases") for rule in case.own_rules
            )
            rules = dict.fromkeys([*case.rules, *(step.rule for step in case.steps if step.rule)])
            SCENARIOS[case.case] = Scenario(
                name=case.case,
                says=case.says,
                play=_Play(case),
                rules=tuple(rules),
                is_quick=case.is_quick,
                limit_s=None,
            )


def fits(pattern: object, value: object) -> bool:
    """Say whether a value has what a pattern asks for."""
    match pattern:
        case {"$type": str(name)}:
            is_bool = isinstance(value, bool)
            return isinstance(value, _TYPES[name]) and (not is_bool or name == "boolean")
        case {"$in": list(values)}:
            return any(type(each) is type(value) and each == value for each in values)
        case {"$match": str(expression)}:
            return isinstance(value, str) and re.search(expression, value) is not None
        case {"$each": each}:
            return isinstance(value, list) and all(fits(each, item) for item in value)
        case dict():
            return isinstance(value, dict) and all(
                key not in value
                if each == {"$absent": True}
                else key in value and fits(each, value[key])
                for key, each in pattern.items()
            )
        case list():
            return (
                isinstance(value, list)
                and len(value) >= len(pattern)
                and all(fits(each, item) for each, item in zip(pattern, value, strict=False))
            )
    return type(pattern) is type(value) and pattern == value


class _Play:
    """Plays a case."""

    def __init__(self, case: Case) -> None:
        self._case = case

    async def __call__(self, trial: Trial) -> None:
        client = await trial.client(self._case.capabilities)
        for need in self._case.needs:
            trial.needs(_offered(client, need), need)
        requests: dict[str, int] = {}
        last: Message = {}
        for step in self._case.steps:
            if step.rule:
                with trial.expect(step.rule) as it:
                    found = await self._step(trial, client, step, requests, last)
                    it.that(not isinstance(found, str), str(found))
            else:
                try:
                    found = await self._step(trial, client, step, requests, last)
                except WireError as exc:
                    raise NotBroughtAbout(exc.reason) from None
                trial.brought_about(not isinstance(found, str), str(found))
            if isinstance(found, dict):
                last = found

    async def _step(
        self, trial: Trial, client: Client, step: Step, requests: dict[str, int], last: Message
    ) -> Message | str | None:
        """Do a step; return the message that came, what is wrong, or nothing."""
        wire, timeout_s = client.wire, trial.target.timeout_s
        params = _filled(step.params, trial, client, requests)
        if step.request is not None:
            requests[step.name or step.request] = wire.request(step.request, params)
        elif step.notify is not None:
            wire.notify(step.notify, params)
        elif step.answer is not None:
            answer = await wire.response(requests[step.answer], timeout_s)
            pattern = _filled(step.pattern, trial, client, requests)
            if pattern is None or fits(pattern, answer):
                return answer
            trial.brought_about(error_code(answer) != AUTH_REQUIRED, LOGIN_WANTED)
            return f"the answer is {answer}"
        elif step.message is not None:
            pattern = _filled(step.message, trial, client, requests)
            return await wire.receive(lambda message: fits(pattern, message), timeout_s)
        elif step.silence is not None:
            pattern = _filled(step.silence, trial, client, requests)
            heard = [
                each for each in await wire.silence(timeout_s=timeout_s) if fits(pattern, each)
            ]
            return f"this came: {heard[0]}" if heard else None
        else:
            wire.reply(last["id"], _filled(step.reply, trial, client, requests))
        return None


def _offered(client: Client, path: str) -> object:
    results: list[Any] = [m["result"] for m in client.wire.received if "result" in m]
    offered = results[0].get("agentCapabilities") if isinstance(results[0], dict) else None
    for part in path.split("."):
        offered = offered.get(part) if isinstance(offered, dict) else None
    return offered is not None and offered is not False


def _filled(value: Any, trial: Trial, client: Client, requests: dict[str, int]) -> Any:
    """Return a value with the holes in its texts filled."""
    match value:
        case dict():
            return {key: _filled(each, trial, client, requests) for key, each in value.items()}
        case list():
            return [_filled(each, trial, client, requests) for each in value]
        case str():
            return _HOLE.sub(lambda hole: _hole(hole[1], trial, client, requests), value)
    return value


def _hole(what: str, trial: Trial, client: Client, requests: dict[str, int]) -> str:
    if what == "folder":
        return str(trial.folder)
    if what.startswith("say "):
        return trial.say(
            what.removeprefix("say ").strip(), path=trial.folder / "file.txt", text="x"
        )
    name, *parts = what.split(".")
    if name not in requests:
        return f"{{{what}}}"
    found: Any = next(iter(client.wire.responses(requests[name])), {}).get("result")
    for part in parts:
        found = found.get(part) if isinstance(found, dict) else None
    return str(found)
