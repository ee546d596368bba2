"""Draw the imports between packages as a Mermaid diagram: `python scripts/draw_packages.py [TREE]`.

A package is a package under `megatron/`, a single module there, `mpu`, `data`, or the entry point. The diagram
goes from the entry point down and leaves out every arrow that a longer way implies; two packages that import each other
are named instead. docs/architecture.md holds the diagram of this tree, and a test compares the two.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

TOP_LEVEL = ("megatron", "mpu", "data")
Graph = Mapping[str, frozenset[str]]


def package_of(module: str) -> str:
    """`megatron.zero.api.engine` -> `zero`; `mpu.layers` -> `mpu`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "megatron" and len(parts) > 1 else parts[0]


def modules(tree: Path) -> Iterator[tuple[str, Path]]:
    files = [path for package in TOP_LEVEL for path in sorted((tree / package).rglob("*.py"))]
    for path in [*files, tree / "pretrain_gpt2.py"]:
        yield ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__"), path


def imports_of(tree: Path) -> dict[str, frozenset[str]]:
    """Package -> the packages it imports."""
    found: dict[str, set[str]] = {}
    for module, path in modules(tree):
        imported = found.setdefault(package_of(module), set())
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names = [prefix + alias.name for alias in node.names]
                imported |= {package_of(name) for name in names if name.partition(".")[0] in TOP_LEVEL}
    for name in ("megatron", "commands"):  # the namespace itself; what a package starts itself with
        found.pop(name, None)
    return {package: frozenset(imported & found.keys() - {package}) for package, imported in found.items()}


def mutual(graph: Graph) -> list[tuple[str, str]]:
    """Pairs of packages each of which reaches the other."""
    reach = {package: below(graph, package) for package in graph}
    return [(a, b) for a in sorted(graph) for b in sorted(graph) if a < b and b in reach[a] and a in reach[b]]


def below(graph: Graph, package: str) -> set[str]:
    """Every package that this one reaches."""
    seen: set[str] = set()
    ahead = list(graph[package])
    while ahead:
        found = ahead.pop()
        if found not in seen:
            seen.add(found)
            ahead.extend(graph[found])
    return seen


def direct(graph: Graph) -> list[tuple[str, str]]:
    """The arrows that no longer way implies."""
    return [(package, target) for package in sorted(graph) for target in sorted(graph[package])
            if not any(target in below(graph, other) for other in graph[package] - {target})]


def mermaid(graph: Graph) -> str:
    return "\n".join(["flowchart TD", *(f"    {package} --> {target}" for package, target in direct(graph))])


def main() -> None:
    graph = imports_of(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
    print(mermaid(graph))
    pairs = mutual(graph)
    print(f"%% {len(graph)} packages, {sum(map(len, graph.values()))} arrows, {len(pairs)} pairs of packages that "
          f"reach each other{': ' if pairs else ''}{', '.join(f'{a} and {b}' for a, b in pairs)}")


if __name__ == "__main__":
    main()
