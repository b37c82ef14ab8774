"""The main job on real rows, end to end: ``make demo`` or ``lancewal demo``."""
