"""The workloads by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.comparison import Comparison
from bench.context import Context

Run = Callable[[Context], Sequence[Comparison]]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    description: str
    run: Run
    #: How many passes a full run makes; the runner's default unless it says so.
    repeats: int | None = None


class UnknownWorkloadError(LookupError):
    """A name that no workload has; the text lists those that exist."""


class Registry:
    """Workloads in the order of their names."""

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}

    def workload(self, name: str, description: str, *, repeats: int | None = None) -> Callable[[Run], Run]:
        """Register the decorated function under ``name``."""

        def register(run: Run) -> Run:
            if name in self._workloads:
                raise ValueError(f"two workloads are named {name!r}")
            self._workloads[name] = Workload(name, description, run, repeats)
            return run

        return register

    def all(self) -> list[Workload]:
        return [self._workloads[name] for name in sorted(self._workloads)]

    def select(self, names: Sequence[str]) -> list[Workload]:
        """The named workloads in the order given, each once; all of them without names.

        A name also stands for all workloads whose names begin with it and an underscore.
        """
        names = [each for name in names for each in self._group(name)]
        unknown = [name for name in names if name not in self._workloads]
        if unknown:
            known = ", ".join(each.name for each in self.all())
            raise UnknownWorkloadError(f"no workload is named {', '.join(unknown)}; there are: {known}")
        return [self._workloads[name] for name in dict.fromkeys(names)] if names else self.all()

    def _group(self, name: str) -> list[str]:
        if name in self._workloads:
            return [name]
        return [each.name for each in self.all() if each.name.startswith(f"{name}_")] or [name]


_registry = Registry()
workload = _registry.workload


def load_workloads() -> Registry:
    """Import every module of ``bench.workloads``, which registers what is in them."""
    package = importlib.import_module("bench.workloads")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return _registry
