"""The rooms of the house and who imports whom, as a Mermaid diagram: `python scripts/draw_rooms.py [TREE]`.

A room is a package under `megatron/`, a single module there, `mpu`, `data`, or the entry point. The diagram
goes from the entry point down and leaves out every arrow that a longer way implies; two rooms that import each other
are named instead. docs/architecture.md holds the diagram of this tree, and a test compares the two.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = ("megatron", "mpu", "data")
Rooms = Mapping[str, frozenset[str]]


def room_of(module: str) -> str:
    """`megatron.zero.api.engine` -> `zero`; `mpu.layers` -> `mpu`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "megatron" and len(parts) > 1 else parts[0]


def modules(tree: Path) -> Iterator[tuple[str, Path]]:
    files = [path for package in PACKAGES for path in sorted((tree / package).rglob("*.py"))]
    for path in [*files, tree / "pretrain_gpt2.py"]:
        yield ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__"), path


def rooms(tree: Path) -> dict[str, frozenset[str]]:
    """Room -> the rooms it imports."""
    found: dict[str, set[str]] = {}
    for module, path in modules(tree):
        imported = found.setdefault(room_of(module), set())
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names = [prefix + alias.name for alias in node.names]
                imported |= {room_of(name) for name in names if name.partition(".")[0] in PACKAGES}
    return {room: frozenset(imported & found.keys() - {room}) for room, imported in found.items() if room != "megatron"}


def circles(house: Rooms) -> list[tuple[str, str]]:
    """Pairs of rooms each of which reaches the other."""
    reach = {room: below(house, room) for room in house}
    return [(a, b) for a in sorted(house) for b in sorted(house) if a < b and b in reach[a] and a in reach[b]]


def below(house: Rooms, room: str) -> set[str]:
    """Every room that this one reaches."""
    seen: set[str] = set()
    ahead = list(house[room])
    while ahead:
        found = ahead.pop()
        if found not in seen:
            seen.add(found)
            ahead.extend(house[found])
    return seen


def direct(house: Rooms) -> list[tuple[str, str]]:
    """The arrows that no longer way implies."""
    return [(room, target) for room in sorted(house) for target in sorted(house[room])
            if not any(target in below(house, other) for other in house[room] - {target})]


def mermaid(house: Rooms) -> str:
    return "\n".join(["flowchart TD", *(f"    {room} --> {target}" for room, target in direct(house))])


def main() -> None:
    house = rooms(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
    print(mermaid(house))
    pairs = circles(house)
    print(f"%% {len(house)} rooms, {sum(map(len, house.values()))} arrows, {len(pairs)} pairs of rooms that reach each "
          f"other{': ' if pairs else ''}{', '.join(f'{a} and {b}' for a, b in pairs)}")


if __name__ == "__main__":
    main()
