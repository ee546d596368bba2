"""A run's state <-> a checkpoint: what is saved, and what a resumed run may differ in. The files are checkpoint/'s
business.

    tensors    masters and moments, as pieces of parameters            (engine.state_runs / load_runs)
    shared     counters, loss scale, data position, learning rate schedule
    per rank   every random stream, restored where the layout is the same

On another layout the streams are derived anew from the seed and the iteration; everything else carries over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.agree import on_rank_0
from megatron.checkpoint.commit import probe, prune
from megatron.checkpoint.lock import locked
from megatron.checkpoint.manifest import step_tag
from megatron.checkpoint.piece import Piece
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.writer import save
from megatron.config import Config, flag_name
from megatron.errors import CheckpointError
from megatron.optim.schedule import Schedule
from megatron.training import TrainState
from megatron.zero.engine import ZeroEngine
from megatron.zero.layout import Slot
from mpu.collectives import all_gather_json
from mpu.groups import Groups
from mpu.random import capture_rng, model_parallel_cuda_manual_seed, restore_rng

MUST_MATCH = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
    "tile_factor",
)
"""Model fields a checkpoint must share with the run that loads it."""

Say = Callable[[str], None]


@dataclass
class Checkpoints:
    """Loads once at the start, saves whenever asked."""

    config: Config
    groups: Groups
    data_fingerprint: str
    notes: list[str] = field(default_factory=list)
    """What was loaded and what could not carry over, for the log."""

    def __post_init__(self) -> None:
        fresh = all_gather_json(secrets.token_hex(8), self.groups.world)
        self._run_id: str = fresh[0]
        self._held = ExitStack()
        if self.config.save.save is not None:
            root = Path(self.config.save.save)
            on_rank_0(lambda: self._claim(root), self.groups.world)

    def _claim(self, root: Path) -> None:
        """Before the first step: the folder can be written, and no other job saves into it."""
        probe(root)
        self._held.enter_context(locked(root))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        """Let go of the --save folder."""
        self._held.close()

    @property
    def _layout(self) -> dict[str, int]:
        return {"tp": self.groups.tp.size, "dp": self.groups.dp.size, "zero_stage": self.config.zero.zero_stage}

    # ---- loading ------------------------------------------------------------------------------------------------

    def resume(self, engine: ZeroEngine, schedule: Schedule) -> tuple[TrainState, Schedule]:
        """Where this run starts, and the schedule it follows."""
        section = self.config.save
        if section.load is None or self._starts_fresh(Path(section.load)):
            return TrainState(), schedule
        found = open_checkpoint(section.load, world=self.groups.world)
        _check_model(self.config, found)
        optimizer = not (section.finetune or section.no_load_optim) and self._has_optimizer(engine, found)
        kinds = ("weight", *(engine.state_kinds if optimizer else ()))
        engine.load_runs(kinds, partial(self._read, found))
        what = "weights" if section.finetune else "weights and optimizer" if optimizer else "weights, without optimizer"
        self.notes.append(f" loaded {what} of {found.tag} from {section.load}")
        if section.finetune:
            return TrainState(), schedule
        shared = found.shared_state
        engine.restore_counters(shared["engine"])
        if not optimizer:
            engine.adam_steps = 0
        self._run_id = shared["run_id"]
        state = TrainState(shared["iteration"], shared["consumed_samples"])
        self._restore_streams(found, state)
        if shared["data"] != self.data_fingerprint:
            self.notes.append(
                " warning: --train-data is another corpus than the checkpoint's; the data position carries over"
            )
        return state, _agreed_schedule(self.config, Schedule(**shared["schedule"]), schedule)

    def _starts_fresh(self, load: Path) -> bool:
        """--load of a --save folder that holds nothing yet: the first start of a command made to be run again."""
        same = self.config.save.save is not None and load.resolve() == Path(self.config.save.save).resolve()
        return same and bool(on_rank_0(lambda: not load.exists() or not tag_names(load), self.groups.world))

    def _has_optimizer(self, engine: ZeroEngine, found: Checkpoint) -> bool:
        missing = [kind for kind in engine.state_kinds if not found.has(kind)]
        if missing:
            raise CheckpointError(
                f"{found.tag} of {self.config.save.load} holds no optimizer state ({', '.join(missing)}): saved with "
                "--no-save-optim; give --no-load-optim or --finetune to go on without"
            )
        return True

    def _read(self, found: Checkpoint, kind: str, slot: Slot, offset: int, out: Tensor) -> None:
        found.read(
            kind,
            slot.name,
            shape=slot.shape,
            partition=slot.partition,
            tp_rank=self.groups.tp.rank,
            tp_size=self.groups.tp.size,
            offset=offset,
            out=out,
        )

    def _restore_streams(self, found: Checkpoint, state: TrainState) -> None:
        if self.config.save.no_load_rng:
            return
        saved = found.rank_state(self.groups.world.rank) if same_ranks(found.layout, self._layout) else None
        if saved:
            restore_rng(saved["rng"])
            return
        # Another layout has other streams: derive them from what both know.
        model_parallel_cuda_manual_seed(
            self.config.train.seed + 1_000_003 * state.iteration, self.groups, vary_over_dp=True
        )
        if self.config.save.no_save_rng or not found.rank_state(0):
            self.notes.append(" the checkpoint holds no random streams: they start anew")
        else:
            self.notes.append(f" random streams start anew: saved on {dict(found.layout)}, now {self._layout}")

    # ---- saving -------------------------------------------------------------------------------------------------

    def saver(self, engine: ZeroEngine, schedule: Schedule, say: Say) -> Callable[[TrainState], None] | None:
        return partial(self._save, engine, schedule, say) if self.config.save.save is not None else None

    def _save(self, engine: ZeroEngine, schedule: Schedule, say: Say, state: TrainState) -> None:
        section = self.config.save
        assert section.save is not None
        kinds = ("weight",) if section.no_save_optim else ("weight", *engine.state_kinds)
        tp = self.groups.tp
        pieces = [Piece(slot.name, kind, slot.shape, slot.partition, tp.rank, tp.size, offset, run)
                  for kind, slot, offset, run in engine.state_runs(kinds)]
        shared: dict[str, Any] = {
            "run_id": self._run_id,
            **asdict(state),
            "engine": engine.counters(),
            "schedule": asdict(schedule),
            "data": self.data_fingerprint,
        }
        rank_state = {} if section.no_save_rng else {"rng": capture_rng()}
        tag = step_tag(state.iteration)
        report = save(
            section.save,
            tag,
            pieces=pieces,
            rank_state=rank_state,
            shared_state=shared,
            config=self.config.as_dict(),
            layout=self._layout,
            world=self.groups.world,
            run_id=self._run_id,
            iteration=state.iteration,
        )
        if section.keep_last is not None:
            root, keep = Path(section.save), section.keep_last
            on_rank_0(lambda: prune(root, keep), self.groups.world)
        say(f" saved {tag} to {section.save} ({report.bytes / 1e6:.1f} MB in {report.seconds:.2f} s)")


def same_ranks(saved: Any, present: dict[str, int]) -> bool:
    """Rank k of both runs does the same work, so its random streams carry over."""
    return all(saved.get(axis) == present[axis] for axis in ("tp", "dp"))


def _model_field(model: dict[str, Any], key: str) -> Any:
    """The value in force: an MLP width that was not given is four times the hidden size, and without tiles their
    factor is nothing."""
    value = model.get(key)
    if key == "tile_factor" and not model.get("memory_centric_tiled_linear"):
        return None
    return 4 * model["hidden_size"] if key == "intermediate_size" and value is None else value


def _check_model(config: Config, found: Checkpoint) -> None:
    """Refuse another model, naming every field that differs."""
    present, saved = config.as_dict(), found.config
    rows = [(flag_name(key), _model_field(saved["model"], key), _model_field(present["model"], key))
            for key in MUST_MATCH]
    if not config.save.finetune:
        old, new = (
            "bf16" if p["bf16"] else "fp16" if p["fp16"] else "fp32" for p in (saved["precision"], present["precision"])
        )
        rows.append(("precision", old, new))
        length = saved["data"]["seq_length"] or saved["model"]["max_position_embeddings"]
        rows.append(("--seq-length", length, config.seq_length))
    differing = [f"{name} {was} in the checkpoint, {now} here" for name, was, now in rows if was != now]
    if differing:
        raise CheckpointError(
            f"{found.tag} of {config.save.load} is of another run: {'; '.join(differing)}; "
            "give the checkpoint's values, or "
            "another --load" + ("" if config.save.finetune else ", or --finetune where only precision or length differ")
        )


def _agreed_schedule(config: Config, saved: Schedule, present: Schedule) -> Schedule:
    """The checkpoint's schedule and the flags' must agree unless a flag says which one wins."""
    if saved == present or config.schedule.override_lr_scheduler:
        return present
    if config.schedule.use_checkpoint_lr_scheduler:
        return saved
    was, now = asdict(saved), asdict(present)
    rows = "; ".join(f"{key} {was[key]} in the checkpoint, {now[key]} here" for key in was if was[key] != now[key])
    raise CheckpointError(
        f"the learning rate schedule of {config.save.load} differs: {rows}; --override-lr-scheduler takes the flags', "
        "--use-checkpoint-lr-scheduler the checkpoint's"
    )
