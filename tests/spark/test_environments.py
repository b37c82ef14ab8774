"""Clusters whose workers have Pythons of their own: what is missing is told, and an archive brings it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import lancewal
from tests.patience import PATIENCE
from tests.spark.conftest import ROOT
from tests.spark.processes import STANDALONE, running_cluster, spark_environment
from tests.spark.tables import content, named, new_table

#: What a task needs beside lancewal; PySpark itself comes with the executor.
_NEEDED = (
    *("lance", "pylance", "pyarrow", "numpy", "obstore", "crc32c", "pyroaring", "google", "protobuf"),
    *("datafusion", "faiss", "faiss_cpu", "pandas", "pytz", "dateutil", "tzdata", "six", "typing_extensions"),
)

_JOB = """
import json, sys
from lancewal.spark import doctor, flush, session, write
spark = session()
spark.sparkContext.setLogLevel("OFF")
rows = spark.createDataFrame([(i, f"name_{i}") for i in range(20)], "id long, name string")
found = doctor(spark, sys.argv[1])
if found.ok:
    rows.filter("id < 10").write.format("lancewal").mode("append").save(sys.argv[1])
    write(rows.filter("id >= 10"), sys.argv[1])
    flush(spark, sys.argv[1])
    assert spark.read.format("lancewal").load(sys.argv[1]).count() == 20
print(json.dumps({"problems": found.problems, "pythons": [each.executable for each in found.executors]}))
"""


def bare(place: Path) -> Path:
    """A Python without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    return place / "bin"


def packed(place: Path) -> Path:
    """An archive of an environment with lancewal, as ``venv-pack`` makes one."""
    packages = bare(place).parent / "lib" / Path(sysconfig.get_path("purelib")).parent.name / "site-packages"
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.split("-")[0].split(".")[0] in _NEEDED and not (packages / path.name).exists():
            # Links: the archive has the files.
            shutil.copytree(path, packages / path.name, copy_function=os.link) if path.is_dir() else os.link(
                path, packages / path.name
            )
    for name in ("lancewal", "pyspark_lancewal"):
        shutil.copytree(ROOT / "src" / name, packages / name)
    made = packages / f"lancewal-{lancewal.__version__}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: lancewal\nVersion: {lancewal.__version__}\n"
    )
    archive = place.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(place, ".")
    return archive


@contextmanager
def cluster(directory: Path, pythons: Sequence[Path]) -> Iterator[str]:
    """The address of one whose workers find these directories first, and nothing of this checkout."""
    own = [
        {"PATH": os.pathsep.join([str(each), os.environ["PATH"]]), "PYTHONPATH": "", "PYSPARK_PYTHON": ""}
        for each in pythons
    ]
    with running_cluster(STANDALONE, directory, own) as found:
        yield found.master


def submitted(directory: Path, master: str, uri: str, *arguments: str) -> dict[str, list[str]]:
    """What the job says, with this process's Python for the driver."""
    (directory / "job.py").write_text(_JOB)
    environment = spark_environment(directory)
    # Workers choose theirs.
    environment.pop("PYSPARK_PYTHON")
    # Without it the driver would be the Python of the tasks, which need not be on its machine.
    driver = f"spark.pyspark.driver.python={sys.executable}"
    wait_for_both = "spark.scheduler.minRegisteredResourcesRatio=1.0"
    local = ["spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1", "spark.ui.enabled=false"]
    conf = [word for each in (driver, wait_for_both, *local) for word in ("--conf", each)]
    ran = subprocess.run(
        [
            *(f"{environment['SPARK_HOME']}/bin/spark-submit", "--master", master, *conf, *arguments),
            *(str(directory / "job.py"), uri),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.soak
def test_workers_have_environments_of_their_own_and_the_doctor_names_the_one_that_lacks_lancewal(
    tmp_path: Path,
) -> None:
    table = new_table(tmp_path / "table")
    good, lacking = Path(sys.executable).parent, bare(tmp_path / "bare")
    use = ("--conf", "spark.pyspark.python=python3")
    with cluster(tmp_path, [good, lacking]) as master:
        found = submitted(tmp_path, master, table.uri, *use)
    assert len(found["pythons"]) == 2
    assert any("has no lancewal" in each for each in found["problems"])
    assert all(str(lacking) in each for each in found["problems"]), "the other one lacks nothing"
    assert content(table) == []
    (tmp_path / "mended").mkdir()
    with cluster(tmp_path / "mended", [good, good]) as master:
        found = submitted(tmp_path / "mended", master, table.uri, *use)
    assert found["problems"] == []
    assert content(table) == named(0, 20)


@pytest.mark.soak
def test_an_archive_brings_the_environment_to_workers_that_lack_it(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    lacking = bare(tmp_path / "bare")
    archive = packed(tmp_path / "environment")
    with cluster(tmp_path, [lacking, lacking]) as master:
        found = submitted(
            tmp_path,
            master,
            table.uri,
            *("--archives", f"{archive}#environment"),
            *("--conf", "spark.pyspark.python=./environment/bin/python"),
        )
    assert found["problems"] == []
    assert len(found["pythons"]) == 2
    assert all("environment/bin" in each for each in found["pythons"])
    assert content(table) == named(0, 20)
