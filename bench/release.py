"""What is published: sdist, wheel and a list of all that an installation consists of, checked by using them.

``python -m bench.release`` builds into ``dist/``, installs the wheel alone into an empty environment, with
the versions of ``requirements.lock``, and does there what a user does first. ``docs/release.md`` is the
checklist around it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from bench.environments import ROOT, Environment

DIST = ROOT / "dist"
#: What an installation consists of; ``make lock`` writes it.
LOCK = ROOT / "requirements.lock"

_INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps([
    {
        "name": each.metadata["Name"],
        "version": each.version,
        "license": each.metadata.get("License-Expression") or each.metadata.get("License"),
        "requires": each.requires or [],
    }
    for each in distributions()
]))
"""

#: What a user does first.
_FIRST_USE = """
import lancewal
rows = [{"id": 1, "text": "a red fox", "v": [1.0, 0.0]}, {"id": 2, "text": "a dog", "v": [0.0, 1.0]}]
table = lancewal.create("t", rows, key="id")
with table.writer() as writer:
    writer.put({"id": 3, "text": "a fox cub", "v": [0.9, 0.1]})
    writer.delete(2)
assert table.lookup(3)["text"] == "a fox cub"
assert sorted(table.search("fox")["id"].to_pylist()) == [1, 3]
assert table.search([1.0, 0.0], k=1)["id"].to_pylist() == [1]
assert table.search("cub", vector=[1.0, 0.0], k=1)["id"].to_pylist() == [3]
assert table.count_rows("text LIKE '%fox%' AND id > 1") == 1
table.compact()
assert table.verify().ok
"""


def build() -> tuple[Path, Path]:
    """The sdist and the wheel, made from the sdist's own files by the same tool."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", DIST], cwd=ROOT, check=True)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """The wheel has the package with its types, its page and its JAR, and nothing of the checkout besides."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    needed = {"lancewal/__init__.py", "lancewal/py.typed", "lancewal/spark/front.jar"}
    top = {name.partition("/")[0] for name in names}
    info = next(name for name in top if name.endswith(".dist-info"))
    if missing := needed - names:
        raise SystemExit(f"the wheel lacks {', '.join(sorted(missing))}")
    if extra := top - {"lancewal", "pyspark_lancewal", info}:
        raise SystemExit(f"the wheel has {', '.join(sorted(extra))}")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    if missing := {"pyproject.toml", "LICENSE", "README.md", "src/lancewal/__init__.py"} - inside:
        raise SystemExit(f"the sdist lacks {', '.join(sorted(missing))}")


def check_use(environment: Environment, directory: Path) -> None:
    """The library and the command line work, with nothing installed but the wheel and what it asks for."""
    environment.run("python", "-m", "pip", "check")
    environment.run("python", "-c", _FIRST_USE, cwd=directory)
    (directory / "rows.jsonl").write_text('{"id": 7, "text": "a wolf"}\n')
    said = environment.run("lancewal", "--version", cwd=directory).out
    environment.run("lancewal", "ingest", "u", "rows.jsonl", "--create", "--key", "id", cwd=directory)
    row = json.loads(environment.run("lancewal", "get", "u", "7", "--json", cwd=directory).out)
    if row["text"] != "a wolf":
        raise SystemExit(f"the command line gave {row}")
    environment.run("lancewal", "verify", "u", cwd=directory)
    environment.run("lancewal", "doctor", "u", cwd=directory)
    print(f"works alone in an empty environment: {said.strip()}")


def bill_of_materials(environment: Environment) -> dict[str, Any]:
    """CycloneDX 1.6: every package of an installation with version, licence and what it needs."""
    packages = json.loads(environment.run("python", "-c", _INSTALLED).out)
    packages = [each for each in packages if _plain(each["name"]) not in ("pip", "setuptools")]
    versions = {_plain(each["name"]): each["version"] for each in packages}

    def reference(name: str) -> str:
        return f"pkg:pypi/{_plain(name)}@{versions[_plain(name)]}"

    def component(each: dict[str, Any]) -> dict[str, Any]:
        described = {
            "type": "library",
            "bom-ref": reference(each["name"]),
            "name": each["name"],
            "version": each["version"],
            "purl": reference(each["name"]),
        }
        # Some packages have the whole text of their licence in this place.
        if each["license"] and len(each["license"]) < 100:
            described["licenses"] = [{"license": {"name": each["license"]}}]
        return described

    def needs(each: dict[str, Any]) -> list[str]:
        named = {_plain(_name_of(text)) for text in each["requires"] if "extra ==" not in text}
        return sorted(reference(name) for name in named & versions.keys())

    (ours,) = [each for each in packages if _plain(each["name"]) == "lancewal"]
    others = sorted((each for each in packages if each is not ours), key=lambda each: _plain(each["name"]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": component(ours),
        },
        "components": [component(each) for each in others],
        "dependencies": [
            {"ref": reference(each["name"]), "dependsOn": needs(each)} for each in (ours, *others)
        ],
    }


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _name_of(requirement: str) -> str:
    """
    >>> _name_of("obstore<0.13,>=0.12"), _name_of("rich >= 14"), _name_of("a[b]; python_version > '3'")
    ('obstore', 'rich', 'a')
    """
    for place, character in enumerate(requirement):
        if not (character.isalnum() or character in "-_."):
            return requirement[:place]
    return requirement


def main() -> None:
    sdist, wheel = build()
    check_contents(sdist, wheel)
    with tempfile.TemporaryDirectory() as name:
        environment = Environment.create(Path(name) / "environment")
        environment.install("--require-hashes", "-r", LOCK)
        environment.install("--no-deps", wheel)
        check_use(environment, Path(name))
        bill = bill_of_materials(environment)
    made = DIST / f"{wheel.name.removesuffix('-py3-none-any.whl')}.cdx.json"
    made.write_text(json.dumps(bill, indent=1) + "\n")
    for path in (sdist, wheel, made):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
