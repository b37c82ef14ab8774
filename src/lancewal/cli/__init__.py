"""The ``lancewal`` command. Heavy libraries are imported by the commands that need them."""

from __future__ import annotations

from lancewal.cli.app import app, main

__all__ = ["app", "main"]
