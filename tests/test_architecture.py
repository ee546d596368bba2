"""The architecture holds: which package imports which, no cycles of imports, and which names a module may use.

Only the text of the modules is read here (ast): nothing is imported, and lazy imports count like any other, but for the
test of cycles.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("megatron", "mpu", "data")

ORDER = ("data", "mpu", "megatron.errors", "megatron.package", "megatron.host_memory", "megatron.layer_drop",
         "megatron.bit_schedule", "megatron.config", "megatron.distributed", "megatron.commands", "megatron.launch",
         "megatron.model", "megatron.recompute", "megatron.optim", "megatron.checkpoint", "megatron.metrics",
         "megatron.zero", "megatron.profiler", "megatron.zero.api", "megatron.fsdp", "megatron.inference",
         "megatron.inference.api", "megatron.generate", "megatron.evaluate", "megatron.serve", "megatron.report",
         "megatron.trace", "megatron.train", "megatron.plan", "megatron.tune", "pretrain_gpt2")
"""Every package; a package imports only those before it."""

MOST_FILES = 25

TYPES_OF_DISTRIBUTED = {"ProcessGroup", "Work", "Store"}
QUERIES_OF_DISTRIBUTED = {"is_available", "is_initialized", "get_rank", "get_world_size", "get_backend", "group"}
NAMES_OF_DISTRIBUTED = {
    "mpu.groups": QUERIES_OF_DISTRIBUTED | {
        "new_group", "split_group", "get_process_group_ranks", "distributed_c10d"},
    "mpu.parallel_state": QUERIES_OF_DISTRIBUTED,
    "megatron.distributed.process_group": QUERIES_OF_DISTRIBUTED | {
        "init_process_group", "destroy_process_group", "FileStore", "HashStore", "TCPStore", "PrefixStore",
        "rendezvous"},
    "megatron.zero.utils": QUERIES_OF_DISTRIBUTED,  # for the log of a script
    "megatron.fsdp": {"fsdp", "checkpoint"}, "megatron.fsdp.fully_shard": {"fsdp"},  # torch's policies and options
    "megatron.fsdp.state_dict": {"checkpoint"},  # torch's StateDictOptions
    "megatron.fsdp.sharded_tensor": {"checkpoint"},  # the records of its protocol
}
"""What a module may use of torch.distributed, besides its types; two modules of mpu may use all of it."""

MAY_REGISTER_HOOKS = {"megatron.zero.hooks", "megatron.fsdp.hooks", "megatron.recompute",
                      "megatron.profiler.flop_recorder"}
MAY_READ_A_CLOCK = {"megatron.recompute.activation_checkpoint", "megatron.distributed.watchdog",
                    "megatron.zero.offload.nvme", "megatron.zero.offload.swap_drive"}
LIBRARY = ("mpu", "megatron.layer_drop", "megatron.bit_schedule", "megatron.config", "megatron.model",
           "megatron.recompute", "megatron.optim", "megatron.zero")
"""Packages that a script of one's own uses: what they do depends on their arguments alone."""
MAY_READ_THE_ENVIRONMENT = {"mpu.device"}  # one switch, for tests
MAY_READ_THE_STAGE = {"megatron.zero.engine", "megatron.zero.stages"}
"""Within the mechanism: megatron/zero without api/."""
MAY_PICKLE = {"data.webtext.engines"}  # tasks of an array job read what their own driver wrote
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the project by its dotted name."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(path): ast.parse(path.read_bytes(), str(path)) for path in [*files, ROOT / "pretrain_gpt2.py"]}


def source_text(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Dotted names that a module imports, with their lines; `from p import m` gives `p.m` where that is a module."""
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: write imports in full, not relative"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in sources() else str(node.module)), node.lineno


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression, or "" if it is something else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def full_names(module: str) -> Iterator[tuple[str, int]]:
    """Every dotted name that is used or imported, spelt out through the module's `import ... as` names."""
    aliases: dict[str, str] = {}
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Import):
            aliases.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Attribute | ast.Name) and (name := dotted(node)):
            first, dot, rest = name.partition(".")
            yield aliases.get(first, first) + dot + rest, node.lineno


def package_of(module: str) -> str:
    """The package of a module; `megatron.zero` and `megatron.inference` only pass on the names of their api."""
    if module in ("megatron.zero", "megatron.inference"):
        return f"{module}.api"
    return max((package for package in ORDER if f"{module}.".startswith(f"{package}.")), key=len)


def test_packages_import_only_those_before_them():
    for module in sources():
        for target, line in imports(module):
            if target in sources():
                here, there = package_of(module), package_of(target)
                assert ORDER.index(there) <= ORDER.index(here), (
                    f"{module}:{line} imports {target}: {there} comes after {here}")


def imported_at_once(module: str) -> set[str]:
    """The project's modules that importing `module` imports: not those of functions or of TYPE_CHECKING."""
    found: set[str] = set()
    waiting: list[ast.AST] = [sources()[module]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in sources() else str(node.module) for name in inner}
        elif isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            waiting.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return found & sources().keys() - {module}


def test_no_module_imports_itself_by_way_of_others():
    try:
        TopologicalSorter({module: imported_at_once(module) for module in sources()}).prepare()
    except CycleError as error:
        pytest.fail("cycle of imports: " + " <- ".join(error.args[1]))


def test_no_package_has_too_many_files():
    sizes = Counter(module.rpartition(".")[0] for module in sources() if not (ROOT / module.replace(".", "/")).is_dir())
    assert {package: size for package, size in sizes.items() if size > MOST_FILES} == {}


def test_the_diagram_of_the_packages_is_the_one_in_the_docs():
    drawn = subprocess.run([sys.executable, ROOT / "scripts" / "draw_packages.py"], capture_output=True, text=True,
                           check=True).stdout
    diagram, _, summary = drawn.partition("%%")
    assert "0 pairs of packages that reach each other" in summary
    assert f"```mermaid\n{diagram}```" in (ROOT / "docs" / "architecture.md").read_text(), (
        "docs/architecture.md is out of date: paste the output of python scripts/draw_packages.py")


@pytest.mark.parametrize("lower, higher", [
    ("mpu", "megatron"), ("mpu", "data"), ("data", "megatron"), ("data", "mpu"),
    ("megatron.zero", "megatron.model"), ("megatron.model", "megatron.zero"), ("megatron.optim", "megatron.model"),
])
def test_packages_that_must_not_know_each_other(lower, higher):
    for module in sources():
        if f"{module}.".startswith(f"{lower}."):
            for target, line in imports(module):
                assert not f"{target}.".startswith(f"{higher}."), f"{module}:{line} imports {target}"


def test_only_collectives_name_operations_of_torch_distributed():
    for module in sources():
        if module in ("mpu.collectives", "mpu.store"):
            continue
        allowed = TYPES_OF_DISTRIBUTED | NAMES_OF_DISTRIBUTED.get(module, set())
        for name, line in full_names(module):
            used = re.match(r"torch\.distributed\.(\w+)", name)
            assert used is None or used[1] in allowed, (
                f"{module}:{line} uses {name}; operations belong to mpu/collectives.py, groups to mpu/groups.py")


def test_only_hooks_and_recompute_register_hooks():
    for module in sources():
        if module not in MAY_REGISTER_HOOKS:
            for node in ast.walk(sources()[module]):
                if isinstance(node, ast.Attribute) and re.fullmatch(r"register_(\w+_)?hook", node.attr):
                    pytest.fail(f"{module}:{node.lineno} registers a hook; only {sorted(MAY_REGISTER_HOOKS)} may")


def test_nothing_that_is_read_can_run_code():
    for module, tree in sources().items():
        for target, line in imports(module):
            assert target.partition(".")[0] not in PICKLES or module in MAY_PICKLE, f"{module}:{line} imports {target}"
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            keywords = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            assert not keywords.get("allow_pickle"), f"{module}:{node.lineno} allows pickles in arrays"
            if dotted(node.func) == "torch.load":
                assert keywords.get("weights_only") is True, f"{module}:{node.lineno}: torch.load without weights_only"


def test_no_bare_except_and_no_global():
    for module, tree in sources().items():
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), f"{module}:{node.lineno}: `global`; pass state instead"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{module}:{node.lineno}: bare `except:`; name what is expected"


def test_the_library_reads_no_argv_environment_or_clock():
    for module in sources():
        if package_of(module) in LIBRARY:
            for name, line in full_names(module):
                outside = re.match(r"(sys\.argv|os\.environ|os\.getenv)\b", name)
                assert outside is None or module in MAY_READ_THE_ENVIRONMENT, f"{module}:{line} reads {name}"
                clock = re.match(r"(time\.\w|datetime\.date)", name)
                assert clock is None or module in MAY_READ_A_CLOCK, f"{module}:{line} reads {name}"


def test_the_mechanism_asks_the_table_not_the_stage():
    for module, tree in sources().items():
        if module.startswith("megatron.zero.") and not module.startswith("megatron.zero.api"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr == "zero_stage":
                    assert module in MAY_READ_THE_STAGE, f"{module}:{node.lineno} reads the stage; ask stages.py"


def test_every_module_says_what_it_is():
    for module, tree in sources().items():
        assert ast.get_docstring(tree), f"{module} has no docstring"


@pytest.mark.parametrize("pattern, modules", [
    (r"fcntl\.flock\(", ["data.storage"]),
    # zero_to_fp32.py is copied into save folders, where it stands alone
    (r"class \w+\((argparse\.)?ArgumentParser\)", ["data.cli", "megatron.checkpoint.zero_to_fp32"]),
])
def test_one_module_does_this(pattern, modules):
    """One of each: a second implementation would have rules of its own."""
    assert sorted(name for name in sources() if re.search(pattern, source_text(name))) == modules
