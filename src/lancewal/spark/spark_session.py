"""A Spark session that is set up for lancewal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lancewal.errors import InvalidInputError
from lancewal.spark.java import find_java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What lancewal wants of every session.
SESSION_CONF = {
    # Without it the option filterPushdown has no effect.
    "spark.sql.python.filterPushdown.enabled": "true",
    # A worker that lives on keeps its imports and its handles on SSTables.
    "spark.python.worker.reuse": "true",
}
_LOCAL_CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
}


def session(
    master: str | None = None,
    *,
    remote: str | None = None,
    app_name: str = "lancewal",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """The active Spark session, or a new one.

    ``master`` is Spark's (default: what the environment or ``spark-submit`` says, else
    ``local[*]``); ``remote`` connects to a Spark Connect server instead, where Java and the
    settings that only matter at start are the server's business. ``conf`` wins over ours.

    Java is looked for in JAVA_HOME, then on the PATH, then in the ``jre`` extra.

    .. code-block:: python

        spark = session("local[2]", conf={"spark.ui.enabled": "false"})
        spark = session(remote="sc://host:15002")
    """
    from pyspark.sql import SparkSession

    if master is not None and remote is not None:
        raise InvalidInputError("pass master for a session of this process, or remote for a server, not both")
    if remote is not None:
        if remote.startswith("local"):
            _prepare_process()
        builder = SparkSession.builder.remote(remote)
        settings = {**SESSION_CONF, **(conf or {})}
        del_static = {name: value for name, value in settings.items() if name.startswith("spark.sql.")}
        return _configured(builder, settings if remote.startswith("local") else del_static)
    _prepare_process()
    builder = SparkSession.builder.appName(app_name)
    settings = dict(SESSION_CONF)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if master is None and not submitted and "MASTER" not in os.environ:
        master = "local[*]"
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local"):
            settings = _LOCAL_CONF | settings
    return _configured(builder, {**settings, **(conf or {})})


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
