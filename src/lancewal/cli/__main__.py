"""``python -m lancewal.cli``, the same as ``lancewal``."""

from __future__ import annotations

from lancewal.cli.app import main

main()
