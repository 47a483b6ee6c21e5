"""How a mutant comes about: the sound agent's source with some words replaced, then imported."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conformance.selftest.mutants import Mutant

__all__ = ["command", "mutated", "run", "source_of"]

AGENT: Final = "conformance.selftest.agent"
HERE: Final = os.path.dirname(os.path.abspath(__file__))


def command(mutant: str | None = None, *flags: str) -> list[str]:
    """Return the command that serves as a mutant, or as the sound agent, from any folder.

    Args:
        mutant: Its name.
        flags: ``--auth``, ``--fork``.
    """
    start = [sys.executable, "-S", "-E", os.path.join(HERE, "__main__.py")]
    return [*start, *([mutant] if mutant else []), *flags]


def source_of(module: str) -> str:
    """Return the source of a module of the sound agent."""
    with open(os.path.join(HERE, "agent", f"{module}.py"), encoding="utf-8") as file:
        return file.read()


def mutated(mutant: Mutant) -> dict[str, str]:
    """Return the source of each module that the mutant changes.

    Raises:
        ValueError: A text to replace does not stand in its module exactly once, or nothing changes.
    """
    sources: dict[str, str] = {}
    for module, old, new in mutant.changes:
        source = sources.get(module) or source_of(module)
        if source.count(old) != 1 or old == new:
            raise ValueError(f"{mutant.name}: {source.count(old)} of {old!r} in {module}")
        sources[module] = source.replace(old, new)
    return sources


def run(arguments: list[str]) -> int:
    """Serve, or list the mutants; return the exit code."""
    flags = [each for each in arguments if each.startswith("--")]
    names = [each for each in arguments if not each.startswith("--")]
    unknown = set(flags) - {"--auth", "--fork", "--list"}
    if len(names) > 1 or unknown:
        return _refuse("usage: python -m conformance.selftest [MUTANT] [--auth] [--fork] [--list]")
    if names or "--list" in flags:
        from conformance.selftest.mutants import MUTANTS

        if "--list" in flags:
            print(*(f"{name}: {each.bug}" for name, each in MUTANTS.items()), sep="\n")  # noqa: T201
            return 0
        if names[0] not in MUTANTS:
            return _refuse(f"there is no mutant {names[0]}; --list prints them")
        mutant = MUTANTS[names[0]]
        sys.meta_path.insert(0, _Finder(mutated(mutant)))
        flags += mutant.flags
    from conformance.selftest.agent.methods import main

    return main(flags)


class _Finder:
    """Finds the changed modules of the agent in the place of the sound ones."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = {f"{AGENT}.{module}": source for module, source in sources.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = self._sources.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if source is not None else None
        if spec is not None and source is not None:
            spec.loader = _Loader(fullname, str(spec.origin), source)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def _refuse(problem: str) -> int:
    sys.stderr.write(f"{problem}\n")
    return 2
