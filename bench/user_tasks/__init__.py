"""Twenty things that users do, with lancewal and with its peers: how many lines does each take?

``python -m bench.user_tasks`` runs every task with every tool that is installed, checks what came out, counts
the lines that a user writes, and prints the table; ``--write`` stores it in ``docs/tasks.md``. A task is a
function of the tool's module here, and its lines are those of the function's body. Peers come from an
environment of their own: ``make tasks`` makes one.
"""
