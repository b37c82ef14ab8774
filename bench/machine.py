"""What a measurement ran on, without anything that names the machine or its paths."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("lancewal", "pylance", "obstore", "pyarrow", "numpy", "faiss-cpu", "datafusion", "pyspark")


def machine_facts() -> dict[str, object]:
    """Cores, memory, what else they had to do, operating system, Python and the libraries that matter."""
    return {
        "cores": _usable_cores(),
        "memory_gb": _memory_gb(),
        # Of the last five minutes; beyond the number of cores something had to wait.
        "load": round(os.getloadavg()[1], 1),
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "libraries": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _usable_cores() -> int:
    # A container's share can be smaller than the machine.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gb() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
