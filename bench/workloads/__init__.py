"""One module per workload; each registers its function with ``bench.registry.workload``.

Modules must import without optional packages: a peer that is an extra is imported
where it is measured.
"""
