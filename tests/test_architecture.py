"""The house keeps its shape: who may import whom, and which names a file may use.

A *floor* is a set of modules that may build on lower floors only; within a floor, a module may import those of its own
top-level package that are listed above it (on floor 0, of any package). The table below is the plan of
docs/architecture.md in full. Only the text of the modules is read here (ast): nothing is imported, and lazy imports
count like any other.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("megatron", "mpu", "data")

FLOORS: tuple[tuple[str, str], ...] = (
    ("0: arithmetic and records; no process group, argv or clock", """
        mpu.split
        data data.storage data.lock data.held data.pages data.identity data.format data.sampling
        megatron.errors megatron.ranges megatron.version megatron.neighbours megatron.whereabouts
        megatron.host_memory
        megatron.layer_drop megatron.quantize
        megatron.config.kinds megatron.config.setting megatron.config.words megatron.config.problems
        megatron.config.optimizers
        megatron.config.model megatron.config.data megatron.config.parallel megatron.config.optim
        megatron.config.schedule megatron.config.precision megatron.config.zero megatron.config.offload
        megatron.config.recompute megatron.config.layer_drop megatron.config.quantize megatron.config.train
        megatron.config.save megatron.config.log megatron.config.profile megatron.config.autotuning
        megatron.config.presets megatron.config.tree megatron.config.idle
        megatron.config.hf_shape megatron.config megatron.config.loose_json
        megatron.config.ds_keys megatron.config.ds_reader megatron.config.ds_together megatron.config.ds_file
        megatron.zero.layout megatron.zero.policy megatron.zero.homes megatron.zero.homes.parts
        megatron.optim megatron.optim.schedule megatron.optim.schedulers megatron.optim.loss_scale
        megatron.plan megatron.plan.activations megatron.plan.footprint megatron.plan.memory megatron.plan.ways
        megatron.plan.remedies megatron.plan.cheapest megatron.plan.rates megatron.plan.exchange
        megatron.plan.time megatron.plan.sighting megatron.plan.sizes megatron.plan.derived
    """),
    ("1: communication and storage", """
        mpu.device mpu.wire mpu.wire.waits mpu.groups mpu.wire.interface mpu.wire.native mpu.wire.gloo
        mpu.wire.functional mpu.wire.control mpu.wire.board mpu.wire.abort
        mpu.collectives mpu.partition mpu.draws mpu.sinks
        mpu.regions mpu.classic mpu.layers
        mpu.vocab_share mpu.loss_cpu mpu.loss_kernel mpu.loss_accelerator mpu.cross_entropy
        mpu.random mpu.norm_kernel mpu.grads mpu.one_bit mpu.data mpu
        data.facts data.indexed data.draft data.writer data.sample_index data.gpt2_dataset
        data.tokenizer_base data.bpe_engines data.fast_tokenizer data.gpt2_bpe data.sentencepiece_model data.tokenizer
        data.cli data.compressed data.chunks data.parallel data.recorded data.inputs data.jsonl data.plain_text
        data.preprocess data.default_corpus data.verify data.merge data.split_json data.importers data.cached
        data.sources data.corpora
        data.webtext data.webtext.document data.webtext.counts data.webtext.jsonarray data.webtext.inputs
        data.webtext.prescan data.webtext.legacy data.webtext.charset data.webtext.reading data.webtext.record
        data.webtext.folder data.webtext.shards data.webtext.runner
        data.webtext.external data.webtext.words data.webtext.minhash data.webtext.signatures data.webtext.near
        data.webtext.urls data.webtext.extract data.webtext.clean
        data.webtext.codes data.webtext.language data.webtext.dedup data.webtext.decontaminate
        data.webtext.shuffle data.webtext.split data.webtext.flags data.webtext.report data.webtext.pipeline
        data.webtext.sample data.webtext.__main__
    """),
    ("2: the model, and what is put on its blocks from outside", """
        megatron.model.init megatron.model.attention megatron.model.mlp megatron.model.block megatron.model.gpt2
        megatron.model
        megatron.recompute.keep megatron.recompute.replay megatron.recompute.deepspeed megatron.recompute
    """),
    ("3: the engine", """
        megatron.optim.grid megatron.optim.rule megatron.optim.adam_kernel megatron.optim.adam megatron.optim.lion
        megatron.optim.lamb megatron.optim.muon
        megatron.optim.one_bit megatron.optim.one_bit_lamb
        megatron.optim.cpu_adam megatron.optim.torch_rule megatron.optim.build
        megatron.zero.precision megatron.zero.verdict megatron.zero.settings megatron.zero.holders
        megatron.zero.placeholder megatron.zero.tiling
        megatron.zero.homes.ferry megatron.zero.homes.shelf megatron.zero.homes.here megatron.zero.homes.lanes
        megatron.zero.homes.words megatron.zero.homes.used megatron.zero.homes.swapfolder megatron.zero.homes.blockfile
        megatron.zero.homes.memory megatron.zero.homes.tilefile
        megatron.zero.homes.host megatron.zero.homes.streamed megatron.zero.homes.descent megatron.zero.homes.passing
        megatron.zero.homes.preflight megatron.zero.homes.room
        megatron.zero.homes.nvme megatron.zero.initial_params megatron.zero.exchanges megatron.zero.turns
        megatron.zero.gradients megatron.zero.edits megatron.zero.loan megatron.zero.bucket megatron.zero.buffers
        megatron.zero.rows megatron.zero.quantise megatron.zero.curvature megatron.zero.together megatron.zero.aside
        megatron.zero.norm megatron.zero.roster megatron.zero.nested megatron.zero.saved_weights megatron.zero.hooks
        megatron.zero.units megatron.zero.utils megatron.zero.hidden megatron.zero.residency megatron.zero.reductions
        megatron.zero.forwards megatron.zero.passes megatron.zero.state
        megatron.zero.own_exchange megatron.zero.renewal megatron.zero.wholes megatron.zero.update megatron.zero.step
        megatron.zero.engine
    """),
    ("4: the application", """
        megatron.config.help megatron.config.foreign megatron.config.flags
        megatron.launch megatron.launch.leaving megatron.launch.signals
        megatron.launch.folders megatron.launch.link megatron.launch.pulse megatron.launch.nodes
        megatron.launch.meeting megatron.launch.blame megatron.launch.supervise megatron.launch.alike
        megatron.launch.distributed megatron.launch.voice megatron.launch.exits megatron.launch.command
        megatron.checkpoint megatron.checkpoint.strict megatron.checkpoint.cut
        megatron.checkpoint.lineage megatron.checkpoint.manifest megatron.checkpoint.part megatron.checkpoint.int8
        megatron.checkpoint.header megatron.checkpoint.recognise megatron.checkpoint.strangers megatron.checkpoint.tags
        megatron.checkpoint.choice megatron.checkpoint.tensorfile
        megatron.checkpoint.state
        megatron.checkpoint.agree megatron.checkpoint.piece megatron.checkpoint.flock megatron.checkpoint.trash
        megatron.checkpoint.commit
        megatron.checkpoint.writer
        megatron.checkpoint.background megatron.checkpoint.reader megatron.checkpoint.export
        megatron.checkpoint.interchange megatron.checkpoint.interchange.zero_to_fp32
        megatron.checkpoint.interchange.fp32 megatron.checkpoint.interchange.names
        megatron.checkpoint.interchange.foreign megatron.checkpoint.interchange.recorded
        megatron.checkpoint.interchange.tokenizers
        megatron.checkpoint.interchange.huggingface megatron.checkpoint.interchange.nanogpt
        megatron.checkpoint.interchange.megatron_lm megatron.checkpoint.interchange.convert
        megatron.zero.estimate megatron.zero.accelerator megatron.zero.ops megatron.zero.ops.adam megatron.zero.watch
        megatron.profiler.formulas megatron.profiler.nodes megatron.profiler.clock megatron.profiler.calls
        megatron.profiler.counting megatron.profiler.recording megatron.profiler.profile megatron.profiler.numbers
        megatron.profiler.text megatron.profiler.page megatron.profiler.output megatron.profiler.profiler
        megatron.profiler.model_profile megatron.profiler
        megatron.zero.api megatron.zero.api.same megatron.zero.api.update megatron.zero.api.offload
        megatron.zero.api.init
        megatron.zero.api.curves megatron.zero.api.lines megatron.zero.api.wandb_run megatron.zero.api.monitor
        megatron.zero.api.batching
        megatron.zero.api.hyper megatron.zero.api.shared megatron.zero.api.owed megatron.zero.api.saved
        megatron.zero.api.layer_drop megatron.zero.api.eigenvalues megatron.zero.api.profiled
        megatron.zero.api.weights megatron.zero.api.schedule
        megatron.zero.api.status
        megatron.zero.api.names megatron.zero.api.engine
        megatron.zero.api.initialize megatron.zero.comm
        megatron.zero
        megatron.fsdp.settings megatron.fsdp.rectangles
        megatron.fsdp.shard megatron.fsdp.gradients
        megatron.fsdp.same megatron.fsdp.whole megatron.fsdp.agreement megatron.fsdp.root
        megatron.fsdp.sharding megatron.fsdp.fully_shard megatron.fsdp.clip
        megatron.fsdp.state_dict megatron.fsdp.optim_state megatron.fsdp.wrapper megatron.fsdp.wrap
        megatron.fsdp.checkpoint megatron.fsdp megatron.inference.source megatron.inference.former
        megatron.inference.request megatron.inference.prompts megatron.inference.recorded megatron.inference.decoder
        megatron.inference.sampling megatron.inference.generation megatron.inference.wording megatron.inference.int8
        megatron.inference.rounded
        megatron.inference.loading megatron.inference.live megatron.inference.answers megatron.inference.terminal
        megatron.inference.session megatron.inference.command
        megatron.inference.api megatron.inference.api.arguments megatron.inference.api.policy megatron.inference.api.cut
        megatron.inference.api.same megatron.inference.api.proof megatron.inference.api.quantise
        megatron.inference.api.weights megatron.inference.api.answer
        megatron.inference.api.engine megatron.inference.api.init_inference
        megatron.inference
        megatron.evaluate megatron.evaluate.request megatron.evaluate.pieces megatron.evaluate.scorer
        megatron.evaluate.reading megatron.evaluate.task
        megatron.evaluate.stream megatron.evaluate.wikitext megatron.evaluate.perplexity
        megatron.evaluate.lambada megatron.evaluate.hellaswag megatron.evaluate.tasks
        megatron.evaluate.report megatron.evaluate.parser megatron.evaluate.writer
        megatron.evaluate.setting megatron.evaluate.command megatron.evaluate.bridge megatron.evaluate.harness
        megatron.serve megatron.serve.limits megatron.serve.message megatron.serve.door megatron.serve.leader
        megatron.serve.asked megatron.serve.megatron_api megatron.serve.completions megatron.serve.metrics
        megatron.serve.desk megatron.serve.page megatron.serve.answers megatron.serve.front megatron.serve.command
        megatron.report megatron.report.read megatron.report.source megatron.report.history
        megatron.report.charts megatron.report.tables megatron.report.page megatron.report.command
        megatron.trace megatron.trace.stretches megatron.trace.recorder megatron.trace.events megatron.trace.shares
        megatron.trace.memory megatron.trace.tracks megatron.trace.page megatron.trace.files megatron.trace.window
        megatron.train megatron.train.inputs
        megatron.train.garbage megatron.train.allocator megatron.train.processor megatron.train.compiling
        megatron.train.flops megatron.train.batches
        megatron.train.evaluation megatron.train.rate megatron.train.metrics megatron.train.console megatron.train.board
        megatron.train.dashboard megatron.train.table megatron.train.log megatron.train.facts
        megatron.train.sample megatron.train.build megatron.train.loop
        megatron.train.resume
        megatron.plan.shortage megatron.plan.stopwatch megatron.plan.small_models
        megatron.plan.probe megatron.plan.gpus megatron.plan.kept_rates
        megatron.plan.report megatron.plan.table megatron.plan.needs megatron.plan.forecast
        megatron.plan.command
        megatron.tune megatron.tune.space megatron.tune.memory megatron.tune.model megatron.tune.search
        megatron.tune.words megatron.tune.patience megatron.tune.trial megatron.tune.subject megatron.tune.results
        megatron.tune.report megatron.tune.capacity megatron.tune.loop megatron.tune.command
    """),
    ("5: entry points", """
        megatron.checkpoint.command megatron.checkpoint.__main__
        megatron.launch.__main__
        megatron.plan.__main__
        megatron.report.__main__
        megatron.tune.__main__
        megatron.generate
        megatron.evaluate.__main__
        megatron.serve.__main__
        pretrain_gpt2
    """),
    ("6: the commands of an installation", """
        megatron.commands
    """),
)
PLACES = {module: (floor, place)
          for floor, (_, listed) in enumerate(FLOORS) for place, module in enumerate(listed.split())}
"""Module -> (floor, place on it)."""

ROOMS = ("data", "mpu", "megatron.errors", "megatron.ranges", "megatron.version", "megatron.neighbours",
         "megatron.whereabouts", "megatron.host_memory", "megatron.layer_drop", "megatron.quantize",
         "megatron.config", "megatron.launch", "megatron.model", "megatron.recompute", "megatron.optim",
         "megatron.checkpoint",
         "megatron.zero", "megatron.profiler", "megatron.zero.api", "megatron.fsdp",
         "megatron.inference", "megatron.inference.api", "megatron.generate",
         "megatron.evaluate", "megatron.serve", "megatron.report", "megatron.trace", "megatron.train", "megatron.plan",
         "megatron.tune",
         "pretrain_gpt2", "megatron.commands")
"""Every room of the house, from below; a room imports only rooms before it."""

TYPES_OF_DISTRIBUTED = {"ProcessGroup", "Work", "Store"}
QUERIES_OF_DISTRIBUTED = {"is_available", "is_initialized", "get_rank", "get_world_size", "get_backend", "group"}
NAMES_OF_DISTRIBUTED = {
    "mpu.groups": QUERIES_OF_DISTRIBUTED | {
        "new_group", "split_group", "get_process_group_ranks", "distributed_c10d"},
    "mpu.classic": QUERIES_OF_DISTRIBUTED,
    "megatron.launch.distributed": QUERIES_OF_DISTRIBUTED | {
        "init_process_group", "destroy_process_group", "FileStore", "HashStore", "TCPStore", "PrefixStore",
        "rendezvous"},
    "megatron.zero.utils": QUERIES_OF_DISTRIBUTED,  # for the log of a script
    "megatron.fsdp.rectangles": {"checkpoint"},  # the records of its protocol
}
"""What a module may use of torch.distributed, besides its types. mpu.wire alone names operations."""

MAY_REGISTER_HOOKS = {"megatron.zero.hooks", "megatron.recompute", "megatron.profiler.calls"}
MAY_READ_A_CLOCK = {"megatron.recompute.replay", "megatron.zero.homes.preflight", "megatron.zero.homes.nvme"}
MAY_READ_THE_ENVIRONMENT = {"mpu.device"}  # one switch, for tests
MAY_READ_THE_STAGE = {"megatron.zero.engine", "megatron.zero.policy"}
"""Within the mechanism: megatron/zero without api/."""
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the project by its dotted name."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(path): ast.parse(path.read_bytes(), str(path)) for path in [*files, ROOT / "pretrain_gpt2.py"]}


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


def test_every_module_has_its_place():
    for module in sources():
        assert module in PLACES, (
            f"{module} is on no floor: add it to FLOORS in tests/test_architecture.py, below all that it imports")


def test_the_plan_names_only_modules_that_exist():
    assert sorted(set(PLACES) - set(sources())) == []


def test_no_import_goes_up():
    for module in sources():
        for target, line in imports(module):
            if target in PLACES and module in PLACES and target != module:
                (floor, place), (target_floor, target_place) = PLACES[module], PLACES[target]
                same_package = module.partition(".")[0] == target.partition(".")[0]
                beside = target_floor == floor and target_place < place and (same_package or floor == 0)
                assert target_floor < floor or beside, (
                    f"{module}:{line} imports {target}: floor {floor} ({place}) to {target_floor} ({target_place}); "
                    "a module imports lower floors, and what is listed above it in its own package")


def room_of(module: str) -> str:
    """The room of a module; `megatron.zero` and `megatron.inference` only pass on the names of their api."""
    if module in ("megatron.zero", "megatron.inference"):
        return f"{module}.api"
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len)


def test_rooms_build_on_each_other_one_way():
    for module in sources():
        for target, line in imports(module):
            if target in sources():
                here, there = room_of(module), room_of(target)
                assert ROOMS.index(there) <= ROOMS.index(here), (
                    f"{module}:{line} imports {target}: the room {there} is above {here}")


def test_the_diagram_of_the_rooms_is_the_one_in_the_docs():
    drawn = subprocess.run([sys.executable, ROOT / "scripts" / "draw_rooms.py"], capture_output=True, text=True,
                           check=True).stdout
    diagram, _, summary = drawn.partition("%%")
    assert "0 pairs of rooms that reach each other" in summary
    assert f"```mermaid\n{diagram}```" in (ROOT / "docs" / "architecture.md").read_text(), (
        "docs/architecture.md is out of date: paste the output of python scripts/draw_rooms.py")


@pytest.mark.parametrize("lower, higher", [
    ("mpu", "megatron"), ("mpu", "data"), ("data", "megatron"), ("data", "mpu"),
    ("megatron.zero", "megatron.model"), ("megatron.model", "megatron.zero"), ("megatron.optim", "megatron.model"),
])
def test_packages_that_must_not_know_each_other(lower, higher):
    for module in sources():
        if f"{module}.".startswith(f"{lower}."):
            for target, line in imports(module):
                assert not f"{target}.".startswith(f"{higher}."), f"{module}:{line} imports {target}"


def test_only_the_wires_name_operations_of_torch_distributed():
    for module in sources():
        if module.startswith("mpu.wire."):
            continue
        allowed = TYPES_OF_DISTRIBUTED | NAMES_OF_DISTRIBUTED.get(module, set())
        for name, line in full_names(module):
            used = re.match(r"torch\.distributed\.(\w+)", name)
            assert used is None or used[1] in allowed, (
                f"{module}:{line} uses {name}; operations belong to mpu/wire, groups to mpu/groups.py")


def test_only_hooks_and_recompute_register_hooks():
    for module in sources():
        if module not in MAY_REGISTER_HOOKS:
            for node in ast.walk(sources()[module]):
                if isinstance(node, ast.Attribute) and re.fullmatch(r"register_(\w+_)?hook", node.attr):
                    pytest.fail(f"{module}:{node.lineno} registers a hook; only {sorted(MAY_REGISTER_HOOKS)} may")


def test_nothing_that_is_read_can_run_code():
    for module, tree in sources().items():
        for target, line in imports(module):
            assert target.partition(".")[0] not in PICKLES, f"{module}:{line} imports {target}"
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


def test_below_the_application_nobody_reads_argv_the_environment_or_a_clock():
    # data/ is used alone as well, and has an edge of its own: command lines, and WEBTEXT_PREFIX.
    for module in sources():
        if PLACES.get(module, (9, 0))[0] < 4 and not module.startswith("data"):
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
                    assert module in MAY_READ_THE_STAGE, f"{module}:{node.lineno} reads the stage; ask policy.py"


def test_every_module_says_what_it_is():
    for module, tree in sources().items():
        assert ast.get_docstring(tree), f"{module} has no docstring"


def test_the_init_of_a_package_names_every_file_of_it():
    for module in sources():
        package, _, name = module.rpartition(".")
        if package in sources() and name != "__main__" and not (ROOT / module.replace(".", "/")).is_dir():
            listed = ast.get_docstring(sources()[package]) or ""
            assert re.search(rf"\b{name}\.py\b", listed), f"the docstring of {package} does not name {name}.py"


def test_flags_are_checked_before_torch_is_imported():
    early = "megatron.config.flags, megatron.launch.distributed, megatron.launch.exits, megatron.launch.command"
    program = f"import sys, {early}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
