"""Finds out what a session lacks for lancewal, on the driver and on each executor.

If a task fails with ``ModuleNotFoundError`` on one of twenty executors, that says little about the others.
:func:`doctor` asks all of them which Python they run, which versions they have, how much space they have
for temporary files, and whether they reach a table's storage.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

#: Packages that must have the same version as on the driver; pandas is needed in any version.
_SAME = ("lancewal", "pylance", "pyarrow", "pyspark")
_PRESENT = ("pandas",)
#: With less space a flush or a merge may fail to write its files.
_LEAST_ROOM = 1 << 30
#: Tasks for each slot, so that an executor with many slots does not take them all.
_TASKS_PER_SLOT = 4
_PAUSE_SECONDS = 0.1
#: How many rounds of tasks there are until all executors have answered.
_ROUNDS = 3

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """What the driver or an executor says about itself; a missing package has the version ``None``."""

    role: str
    host: str
    directory: str
    executable: str
    python: str
    versions: Mapping[str, str | None]
    temporary_bytes: int
    storage_error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.role} on {self.host} ({self.directory})"


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`doctor` found. Each of ``problems`` says what to do; ``ok`` is true if there are none."""

    driver: Machine
    executors: tuple[Machine, ...]
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [_line(each) for each in (self.driver, *self.executors)]
        found = [f"  - {problem}" for problem in self.problems]
        return "\n".join([*lines, "problems:", *found] if found else [*lines, "all is well"])


def doctor(
    spark: SparkSession, uri: str | None = None, *, storage_options: Mapping[str, str] | None = None
) -> Diagnosis:
    """Check what lancewal needs on the driver and on every executor that answers.

    With ``uri``, a table, each of them also lists the table's versions, and writes a small file that
    lancewal writes anyway, to test its permissions. The driver must reach the table too, because the
    functions of ``lancewal.spark`` use it there.

    .. code-block:: python

        diagnosis = doctor(spark, "s3://bucket/documents")
        print(diagnosis)
        assert diagnosis.ok
    """
    probe = _probe(uri, dict(storage_options or {}), (*_SAME, *_PRESENT), _PAUSE_SECONDS)
    driver = _machine("driver", next(iter(probe([]))))
    try:
        found = _asked(spark, probe)
    except Exception as error:
        # Any error that stops tasks is the finding.
        return Diagnosis(driver, (), (*_problems(driver, driver), _no_tasks(error)))
    executors = tuple(_machine("executor", facts) for facts in found)
    problems = [text for each in (driver, *executors) for text in _problems(each, driver)]
    registered = _registered(spark)
    if len(executors) < registered:
        problems.append(
            f"{registered - len(executors)} of {registered} executors did not answer, because others took "
            "all tasks: ask again while the session does nothing else"
        )
    return Diagnosis(driver, executors, tuple(dict.fromkeys(problems)))


def _asked(spark: SparkSession, probe: Callable[[Iterable[Any]], Iterator[Facts]]) -> list[Facts]:
    """The answers of the executors, each once."""
    try:
        context: Any = spark.sparkContext
    except Exception:  # over Spark Connect, where there is none
        rows = spark.range(0, 32, 1, 32).mapInArrow(_as_rows(probe), "facts string").collect()
        import json

        answers = [json.loads(row.facts) for row in rows]
    else:
        answers = []
        for _ in range(_ROUNDS):
            # Recomputed in each round, because executors may still be registering.
            tasks = max(2, context.defaultParallelism * _TASKS_PER_SLOT)
            answers += context.parallelize(range(tasks), tasks).mapPartitions(probe).collect()
            if len(_distinct(answers)) >= _registered(spark):
                break
    return _distinct(answers)


def _distinct(answers: Iterable[Facts]) -> list[Facts]:
    return list({(each["host"], each["directory"], each["executable"]): each for each in answers}.values())


def _registered(spark: SparkSession) -> int:
    """How many executors the session has; 0 if that is unknown, as over Spark Connect."""
    try:
        context: Any = spark.sparkContext
        known = len(context._jsc.sc().statusTracker().getExecutorInfos())
    except Exception:  # over Spark Connect, where there is none
        return 0
    # The driver is counted too. In local mode it is the executor.
    return (
        known if context.master.startswith(("local[", "local*")) or context.master == "local" else known - 1
    )


def _probe(
    uri: str | None, storage_options: Mapping[str, str], distributions: tuple[str, ...], pause: float
) -> Callable[[Iterable[Any]], Iterator[Facts]]:
    """The probe, as a function that Spark sends by value, because an executor may not have lancewal."""

    def probe(rows: Iterable[Any]) -> Iterator[Facts]:
        import os
        import platform
        import shutil
        import socket
        import sys
        import tempfile
        import time
        from importlib.metadata import PackageNotFoundError, version

        for _ in rows:
            time.sleep(pause)
            break
        versions: dict[str, str | None] = {}
        for name in distributions:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                try:
                    module = __import__({"pylance": "lance"}.get(name, name))
                    versions[name] = getattr(module, "__version__", "of unknown version")
                except ImportError:
                    versions[name] = None
        error = None
        if uri is not None and versions.get("lancewal"):
            try:
                from lancewal.storage import ObjectStore, layout

                store = ObjectStore.from_uri(uri, storage_options)
                if not store.list("_versions"):
                    error = f"there is no table at {uri}"
                else:
                    store.put(layout.CLOCK_NOW, b"", durable=False)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        yield {
            "host": socket.gethostname(),
            "directory": os.getcwd(),
            "executable": sys.executable,
            "python": platform.python_version(),
            "versions": versions,
            "temporary_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
            "storage_error": error,
        }

    return probe


def _as_rows(probe: Callable[[Iterable[Any]], Iterator[Facts]]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """``probe`` for ``mapInArrow``; also sent by value."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import json

        import pyarrow as pa

        for facts in probe(batches):
            yield pa.RecordBatch.from_pydict({"facts": [json.dumps(facts)]})

    return rows


def _machine(role: str, facts: Facts) -> Machine:
    return Machine(role=role, **facts)


def _problems(each: Machine, driver: Machine) -> Iterator[str]:
    if _minor(each.python) != _minor(driver.python):
        yield (
            f"{each.name} runs Python {each.python} ({each.executable}), the driver {driver.python}: set "
            f"PYSPARK_PYTHON, before the session starts, to a Python {_minor(driver.python)} with lancewal"
        )
    for name in (*_SAME, *_PRESENT):
        have, wanted = each.versions.get(name), driver.versions.get(name)
        if have is None:
            yield (
                f"{each.name} has no {name}: install lancewal[spark] for {each.executable}, set "
                "PYSPARK_PYTHON to a Python that has it, or ship an environment with --archives"
            )
        elif name in _SAME and wanted is not None and have != wanted:
            yield f"{each.name} has {name} {have}, the driver {wanted}: install the same version on both"
    if each.temporary_bytes < _LEAST_ROOM:
        free = each.temporary_bytes >> 20
        yield f"{each.name} has {free} MB left for temporary files: set TMPDIR to a larger disk"
    if each.storage_error is not None:
        yield (
            f"{each.name} does not reach the table: {each.storage_error}. Pass storage_options, or set the "
            "credentials where it runs; local paths need one machine or a shared file system"
        )


def _no_tasks(error: Exception) -> str:
    text = " ".join(str(error).split())
    why = next((part for part in ("PYTHON_VERSION_MISMATCH", "ModuleNotFoundError") if part in text), None)
    hint = (
        f"set PYSPARK_PYTHON to {sys.executable} (Python {platform.python_version()}), or its like on the "
        "executors, before the session starts"
    )
    return f"no executor could run Python ({why or text[:300]}): {hint}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _line(each: Machine) -> str:
    versions = ", ".join(f"{name} {have or 'MISSING'}" for name, have in each.versions.items())
    room = f"{each.temporary_bytes / (1 << 30):.0f} GB for temporary files"
    storage = "" if each.storage_error is None else f"; storage: {each.storage_error}"
    return f"{each.name}: Python {each.python} at {each.executable}; {versions}; {room}{storage}"
