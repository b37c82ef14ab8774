"""Empty Python environments to try the built wheel in: what a user has, and nothing of this checkout."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

#: Bytes by package, of all that is installed.
_SIZES = """
import json
from importlib.metadata import distributions
from pathlib import Path
sizes = {}
for each in distributions():
    files = {Path(str(file.locate())) for file in each.files or () if not str(file).endswith(".pyc")}
    sizes[each.metadata["Name"]] = sum(file.stat().st_size for file in files if file.is_file())
print(json.dumps(sizes))
"""


@dataclass(frozen=True)
class Environment:
    """One virtual environment; its commands see no package of another one."""

    directory: Path

    @classmethod
    def create(cls, directory: Path, python: str = sys.executable) -> Environment:
        subprocess.run([python, "-m", "venv", directory], check=True, env=_plain())
        return cls(directory)

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    def install(self, *packages: str | Path) -> float:
        """Install with pip, as the machine has it set up; the seconds that it took."""
        began = time.perf_counter()
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([self.python, "-m", "pip", *quiet, "install", *packages], check=True, env=_plain())
        return time.perf_counter() - began

    def run(self, *command: str | Path, cwd: Path | None = None, check: bool = True) -> Result:
        """Run a command of the environment, in a directory of its own unless ``cwd`` is given."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        done = subprocess.run(
            [self.directory / "bin" / command[0], *command[1:]],
            cwd=cwd or self.directory,
            env=_plain(),
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Result(done.returncode, done.stdout, done.stderr, seconds, cpu)

    def sizes(self) -> dict[str, int]:
        """Bytes of every installed package, without pip."""
        found: dict[str, int] = json.loads(self.run("python", "-c", _SIZES).out)
        return {name: size for name, size in found.items() if name.lower() not in ("pip", "setuptools")}


@dataclass(frozen=True)
class Result:
    """What a command printed, and what it took."""

    code: int
    out: str
    err: str
    seconds: float
    cpu: float


def built_wheel(directory: Path) -> Path:
    """The wheel of this checkout."""
    _pip("wheel", "--no-deps", "--wheel-dir", directory, ROOT)
    (wheel,) = directory.glob("lancewal-*.whl")
    return wheel


def _pip(*arguments: str | Path) -> None:
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", *quiet, *arguments], check=True)


def _plain() -> dict[str, str]:
    """This process's environment without what points Python at this checkout."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    }


def write_between(page: Path, mark: str, text: str) -> None:
    """Replace what stands between ``<!-- mark -->`` and ``<!-- end of mark -->`` of a page."""
    head, begin, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- end of {mark} -->\n")
    if not begin or not end:
        raise ValueError(f"{page} has no place for {mark!r}")
    page.write_text(f"{head}{begin}{text}\n{end}{tail}")


def stored(path: Path, figures: dict[str, Any]) -> None:
    """Keep figures of a run as JSON."""
    path.write_text(json.dumps(figures, indent=1) + "\n")
