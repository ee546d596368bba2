"""A function without one of its waits: what a test that must go red does to the program.

    for place in waits("megatron.zero.flat_buffers", {"join"}): ...
    with without(place): ...
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Place:
    """A statement `something.wait()`, by its number in the module."""

    module: str
    function: str
    number: int
    names: frozenset[str]

    def __str__(self) -> str:
        return f"{self.module.rpartition('.zero.')[2]}-{self.function}-{self.number}"


class _Finder(ast.NodeVisitor):
    """Calls without arguments of methods of some names whose result is not used, and the function each is in. (With a
    number of seconds a wait is a pause.)"""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._path: list[str] = []
        self.found: list[tuple[str, ast.Expr]] = []

    def visit_scope(self, node: Any) -> None:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()

    visit_FunctionDef = visit_ClassDef = visit_scope

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and not call.args and isinstance(call.func, ast.Attribute) and \
                call.func.attr in self._names:
            self.found.append((".".join(self._path), node))


def waits(module: str, names: Collection[str] = ("wait",)) -> Iterator[Place]:
    _, found = _parsed(module, names)
    for number, (function, _) in enumerate(found):
        yield Place(module, function, number, frozenset(names))


@contextmanager
def without(place: Place) -> Iterator[None]:
    """Inside, the function does what it does without that wait: `x.wait()` has become `x`."""
    tree, found = _parsed(place.module, place.names)
    node: Any = found[place.number][1]
    node.value = node.value.func.value
    function: Any = import_module(place.module)
    for name in place.function.split("."):
        function = getattr(function, name)
    function = getattr(function, "fget", None) or function  # of a property
    before = function.__code__
    compiled = compile(tree, place.module, "exec", dont_inherit=True)
    function.__code__ = next(code for code in _codes(compiled) if code.co_qualname == place.function)
    try:
        yield
    finally:
        function.__code__ = before


def _parsed(module: str, names: Collection[str]) -> tuple[ast.Module, list[tuple[str, ast.Expr]]]:
    tree = ast.parse(Path(str(import_module(module).__file__)).read_text())
    finder = _Finder(names)
    finder.visit(tree)
    return tree, finder.found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
