"""Compile the planner's front against the JARs that PySpark ships: ``make jar``.

Users need neither this nor a Java compiler: the result is part of the package. It holds a digest of the
sources, by which a test tells whether it is up to date.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pyspark

ROOT = Path(__file__).parent
JAR = ROOT.parent / "src" / "lancewal" / "spark" / "front.jar"
DIGEST = "META-INF/sources.sha256"
#: The oldest Java on which Spark runs.
RELEASE = "17"


def sources() -> list[Path]:
    return sorted((ROOT / "lancewal").glob("*.java"))


def digest() -> str:
    found = hashlib.sha256()
    for source in sources():
        found.update(source.name.encode() + b"\0" + source.read_bytes())
    return found.hexdigest()


def compiled(into: Path) -> list[Path]:
    """The classes, in the order of their names."""
    jars = Path(pyspark.__file__).parent / "jars" / "*"
    command = ["javac", "--release", RELEASE, "-proc:none", "-cp", str(jars), "-d", str(into)]
    subprocess.run([*command, *map(str, sources())], check=True)
    return sorted(into.rglob("*.class"))


def main() -> int:
    with tempfile.TemporaryDirectory() as made, zipfile.ZipFile(JAR, "w", zipfile.ZIP_DEFLATED) as jar:
        parts = [(DIGEST, digest().encode())]
        parts += [(str(path.relative_to(made)), path.read_bytes()) for path in compiled(Path(made))]
        for name, data in parts:
            # Without the time of the build: the same sources give the same file.
            jar.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
