"""The package's import graph, drawn from the source alone.

``python tests/architecture/graph.py [path to src]`` prints it as a table, of any checkout; with the paths of
two, before and after, it prints how the figures changed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "lancewal"

#: From the lowest to the highest: a module imports only from what stands before its own room.
#: What stands here and is no folder is a module that users import.
FLOORS = (
    "errors",
    "config",
    "storage",
    "format",
    "predicate",
    "base",
    "shard",
    "index",
    "memtable",
    "sstable",
    "writer",
    "reader",
    "publish",
    "maintenance",
    "service",
    "status",
    "upkeep",
    "table",
    "initialization",
    "metrics",
    "gateway",
    "ingest",
    "cost",
    "spark",
    "cli",
)


@dataclass(frozen=True, order=True)
class Edge:
    """One import: ``importer`` takes ``name`` from ``module``; ``name`` is "" for ``import module``."""

    importer: str
    module: str
    name: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Graph:
    """Modules with their line counts, the packages among them, and all imports of each other."""

    lines: dict[str, int]
    packages: frozenset[str]
    edges: frozenset[Edge]
    exports: dict[str, frozenset[str]]

    def imported_module(self, edge: Edge) -> str:
        """The module that an import loads: a submodule, or the one that the name is taken from."""
        return edge.target if edge.target in self.lines else edge.module

    def rooms(self) -> list[str]:
        """Folders right below the package."""
        return sorted(each for each in self.packages if each.count(".") == 1)

    def loose(self) -> list[str]:
        """Modules at the top that are no rooms."""
        top = (each for each in self.lines if each.count(".") == 1 and each not in self.packages)
        return sorted(each.removeprefix(f"{PACKAGE}.") for each in top)

    def past_doors(self) -> list[Edge]:
        """Imports from the inside of another room, or of a name that its door does not export."""
        found = []
        for edge in self.edges:
            own, other = room_of(edge.importer), room_of(edge.module)
            if own == other or edge.importer == PACKAGE:
                continue
            is_room = f"{PACKAGE}.{other}" in self.packages
            through_door = edge.module == f"{PACKAGE}.{other}" and edge.name in self.exports.get(
                edge.module, ()
            )
            if is_room and not through_door:
                found.append(edge)
        return sorted(found)

    def upward(self) -> list[Edge]:
        """Imports of something that stands higher."""
        found = []
        for edge in self.edges:
            own, other = room_of(edge.importer), room_of(self.imported_module(edge))
            if own and other and own != other and FLOORS.index(other) > FLOORS.index(own):
                found.append(edge)
        return sorted(found)

    def cycles(self) -> list[list[str]]:
        """Groups of modules that import each other, directly or not, for typing or at run time.

        A door is no module of its own here: whoever goes through it depends on the room, and
        rooms are kept in order by :meth:`upward`.
        """
        targets: dict[str, set[str]] = {module: set() for module in self.lines}
        for edge in self.edges:
            module = self.imported_module(edge)
            if edge.importer not in self.packages and module not in self.packages:
                targets[edge.importer].add(module)
        return [group for group in _strongly_connected(targets) if len(group) > 1]

    def neighbours(self) -> dict[str, list[str]]:
        """For each room and module at the top, those that it imports from."""
        found: dict[str, set[str]] = {}
        for edge in self.edges:
            own, other = room_of(edge.importer), room_of(self.imported_module(edge))
            if own and other and own != other:
                found.setdefault(own, set()).add(other)
        return {own: sorted(others) for own, others in sorted(found.items())}


def room_of(module: str) -> str:
    """The first part below the package: a room, or a module at the top; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def draw(source: Path) -> Graph:
    """The graph of the package below ``source``."""
    files = {_name(path, source): path for path in sorted((source / PACKAGE).rglob("*.py"))}
    trees = {module: ast.parse(path.read_text()) for module, path in files.items()}
    packages = frozenset(module for module, path in files.items() if path.name == "__init__.py")
    edges = {edge for module, tree in trees.items() for edge in _imports(module, tree)}
    lines = {module: len(path.read_text().splitlines()) for module, path in files.items()}
    return Graph(lines, packages, frozenset(edges), {each: _exports(trees[each]) for each in packages})


def _name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(module: str, tree: ast.Module) -> Iterator[Edge]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_own(node.module or ""):
            yield from (Edge(module, str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (Edge(module, alias.name, "") for alias in node.names if _is_own(alias.name))


def _is_own(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def _exports(tree: ast.Module) -> frozenset[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def _strongly_connected(targets: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in targets.get(node, ()):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            group: list[str] = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            groups.append(sorted(group))

    for node in targets:
        if node not in order:
            visit(node)
    return groups


def figures(graph: Graph) -> dict[str, int]:
    """What can be counted in the graph."""
    modules = [module for module in graph.lines if module not in graph.packages]
    importers: dict[str, set[str]] = {}
    for edge in graph.edges:
        importers.setdefault(graph.imported_module(edge), set()).add(edge.importer)
    return {
        "files": len(graph.lines),
        "modules": len(modules),
        "lines": sum(graph.lines.values()),
        "modules below 100 lines": sum(graph.lines[module] < 100 for module in modules),
        "modules above 500 lines": sum(graph.lines[module] > 500 for module in modules),
        "modules with one importer": sum(len(importers.get(module, ())) == 1 for module in modules),
        "rooms": len(graph.rooms()),
        "loose at the top": len(graph.loose()),
        "imports past a door": len(graph.past_doors()),
        "cycles": len(graph.cycles()),
    }


def without(graph: Graph, room: str) -> Graph:
    """The graph without a room, for a fair comparison where one has left the package."""
    below = f"{PACKAGE}.{room}"
    return Graph(
        {module: lines for module, lines in graph.lines.items() if room_of(module) != room},
        frozenset(module for module in graph.packages if room_of(module) != room),
        frozenset(edge for edge in graph.edges if room not in (room_of(edge.importer), room_of(edge.module))),
        {module: names for module, names in graph.exports.items() if not module.startswith(below)},
    )


def _print(*graphs: Graph) -> None:
    """One column for each graph; neighbours of a room are those that it imports from."""
    counted = [figures(graph) for graph in graphs]
    for name in counted[0]:
        print(f"{name:28} " + " → ".join(str(each[name]) for each in counted))
    print("\nneighbours")
    neighbours = [graph.neighbours() for graph in graphs]
    loose = [set(graph.loose()) for graph in graphs]
    known = {name: None for each in neighbours for name in each}
    for name in sorted(known, key=lambda name: (all(name in each for each in loose), name)):
        counts = [str(len(each[name])) if name in each else "-" for each in neighbours]
        print(f"  {name:26} {' → '.join(counts):8} {' '.join(neighbours[-1].get(name, ()))}")


if __name__ == "__main__":
    sources = [Path(each) for each in sys.argv[1:]] or [Path("src")]
    # The demo is no longer part of the package, nor of what is compared.
    _print(*(without(draw(source), "demo") for source in sources))
