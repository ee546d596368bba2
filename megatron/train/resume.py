"""Save and resume a pretraining run: which settings must match the checkpoint, which may differ, and what is reported.

The engine saves and restores itself (megatron/zero/api). Its client state carries what is the run's: the loop's
`TrainState`, the learning rate schedule, and fingerprints of the data and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, asdict, astuple, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from data.indexed import TokenizerFacts, tokenizer_facts_of_state
from megatron.checkpoint.commit import (Keep, check_save_root_is_writable, clean_up_save_root, explain_disk_errors,
                                        lock_save_root)
from megatron.checkpoint.convert.external_checkpoint import ExternalCheckpoint
from megatron.checkpoint.convert.importers import open_huggingface
from megatron.checkpoint.file_formats import check_record, reraise_as_corrupt
from megatron.checkpoint.manifest import MANIFEST, tag_of_iteration
from megatron.checkpoint.reader import Checkpoint, open_checkpoint, recorded_precision
from megatron.checkpoint.tags import (TagChoice, choose_tag, dangling, find_tag_of_step, has_no_checkpoint,
                                      iterations_by_tag, parse_checkpoint_path)
from megatron.checkpoint.writer import SaveReport
from megatron.config.hf_config import read_model_fields
from megatron.config.optimizer_config import ONE_BIT_OPTIMIZERS
from megatron.config.tree import Config, ModelConfig, flag_name
from megatron.distributed.consistency import all_succeed_or_raise, on_rank_0
from megatron.errors import CheckpointError, ConfigError
from megatron.optim.schedulers import LRSchedule
from megatron.train.loop import TrainState, lr_scheduler_of
from megatron.zero.api.checkpoint_io import LoadOptions, check_shared_state, load_external_weights
from megatron.zero.api.engine import Engine
from mpu.groups import Groups

# on_saved(report, step, folder), called when a save is complete.
OnSaved = Callable[[SaveReport, int, str], None]


@dataclass
class RunCheckpoints:
    """Loads once at the start and saves on request. Created before the data, so that an unusable folder fails before
    text is tokenized."""

    config: Config
    groups: Groups
    tokenizer: TokenizerFacts
    notes: list[str] = field(default_factory=list)  # log lines: what was loaded, and what could not carry over

    def __post_init__(self) -> None:
        section, world = self.config.save, self.groups.world
        self._saved_steps: dict[str, int] = {}  # tags in --save -> their steps
        with ExitStack() as lock:
            if section.save is not None:
                root = Path(section.save)

                def prepare_save_root() -> dict[str, int]:
                    check_save_root_is_writable(root)
                    lock.enter_context(lock_save_root(root))
                    with explain_disk_errors(root, 0):  # after an interrupted save; slow deletions go on in background
                        clean_up_save_root(root)
                    return iterations_by_tag(root)

                self._saved_steps = on_rank_0(prepare_save_root, world)
            with explain_load_errors(section.load):
                source = None if section.load is None else on_rank_0(self._find_source, world)
            # (folder, tag) to load; None: the run starts at step 0
            self._source = None if source is None else (Path(source[0]), TagChoice(*source[1]))
            # released by `__exit__`, which does not run if --load is invalid: the `with` above unlocks then
            self._save_root_lock = lock.pop_all()

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        """Release the --save folder."""
        self._save_root_lock.close()

    # ---- loading ------------------------------------------------------------------------------------------------

    def _find_source(self) -> tuple[str, tuple[Any, ...]] | None:
        """(folder, fields of the TagChoice) to load. None: --load is the --save folder and still empty, as at the first
        start of a restartable command."""
        section = self.config.save
        assert section.load is not None
        same = section.load == section.save  # a colon is part of the name then, whether the folder exists or not
        root, tag = (Path(section.load), None) if same else parse_checkpoint_path(section.load)
        same = same or section.save is not None and root.resolve() == Path(section.save).resolve()
        if section.ckpt_step is not None:
            if tag is not None:
                raise ConfigError(f"--load {section.load} names a tag, and --ckpt-step {section.ckpt_step} another; "
                                  "give one of them")
            tag, note = find_tag_of_step(root, section.ckpt_step)
            self.notes += [f" {note}"] if note else []
        if same and tag is None and has_no_checkpoint(root):
            return None
        return str(root), astuple(choose_tag(root, tag))

    def resume(self, engine: Engine, data_fingerprint: str) -> TrainState:
        """The state this run starts from. `data_fingerprint` identifies the data it reads."""
        self._data_fingerprint = data_fingerprint
        if self._source is None:
            state = self._start_fresh(engine)
        else:
            with explain_load_errors(self.config.save.load):
                state = self._resume_from(engine, *self._source)
        # of a branch that this run leaves, or of another run
        if later := [tag for tag, step in self._saved_steps.items() if step > state.iteration]:
            more = f" and {len(later) - 3} more" if len(later) > 3 else ""
            self.notes.append(f" note: --save {self.config.save.save} holds {', '.join(later[:3])}{more}, later than "
                              f"iteration {state.iteration} where this run starts: a save of the same name replaces "
                              "it; after the first save `latest`, and so a resume, is of this run")
        return state

    def _resume_from(self, engine: Engine, root: Path, choice: TagChoice) -> TrainState:
        config, section, world = self.config, self.config.save, self.groups.world
        checkpoint = open_checkpoint(root, choice, world=world, fallback=section.resume_fallback)
        # ---- what must match
        with reraise_as_corrupt(f"tag {checkpoint.tag}: {MANIFEST}: config"):
            _check_model(config, checkpoint)
        all_succeed_or_raise(lambda: check_shared_state(checkpoint), world)
        saved: dict[str, Any] = checkpoint.shared_state["client_state"]
        tokenizer = tokenizer_facts_of_state(saved)
        # Another tokenizer gives the ids another meaning, even if the sizes agree.
        if tokenizer is not None and tokenizer != self.tokenizer:
            difference = (f"trained with {tokenizer.description}, and the tokenizer here is "
                          f"{self.tokenizer.description}")
            if not section.finetune:
                raise CheckpointError(f"{checkpoint.tag} of {section.load} was {difference}; give its own, "
                                      "--tokenizer-type and its files, or --finetune")
            self.notes.append(f" warning: the weights were {difference}: they know nothing of its ids")
        if not section.finetune and "schedule" not in saved:
            raise CheckpointError(f"{checkpoint.tag} of {section.load} was not saved by the trainer and states no "
                                  "position of a run: give --finetune to start from its weights")
        # ---- restore
        scheduler, optimizer = lr_scheduler_of(engine), not (section.finetune or section.no_load_optim)
        state, data_fingerprint = TrainState(), ""
        if not section.finetune:  # restoring sets the learning rate from the schedule, so choose that first
            state, scheduler.schedule, data_fingerprint = _read_loop_state(
                config, saved, scheduler.schedule, f"{checkpoint.shared_label}: field 'client_state'")
        same_precision = recorded_precision(checkpoint.config) == config.precision.name
        engine.restore(checkpoint, LoadOptions(optimizer, counters=not section.finetune, scheduler=not section.finetune,
                                               rng=not (section.finetune or section.no_load_rng),
                                               loss_scale=same_precision,
                                               hyper_parameters=False))  # hyper-parameters come from the flags
        # ---- what could not carry over
        what = "weights" if section.finetune else "weights and optimizer" if optimizer else "weights, without optimizer"
        self.notes.append(f" loaded {what} of {checkpoint.tag} from {section.load}")
        if section.finetune:
            return state
        rule = checkpoint.shared_state["engine"].get("rule", {}) if optimizer else {}
        self.notes += _change_notes(engine, checkpoint, config, rule)
        if engine.rng_note is not None:
            self.notes.append(engine.rng_note)
        if data_fingerprint != self._data_fingerprint:
            self.notes.append(f" warning: {_other_samples(checkpoint.config, config)}; the data position carries over")
        return state

    def _start_fresh(self, engine: Engine) -> TrainState:
        """Step 0: weights from --load-hf if given, else the initial ones."""
        folder, source = self.config.save.load, self.config.save.load_hf
        if folder is not None:
            self.notes.append(f" starting from scratch: {folder}, both --save and --load, holds no checkpoint "
                              f"yet{dangling(Path(folder))}")
        if source is not None:
            load_external_weights(engine.core, all_succeed_or_raise(
                lambda: _open_matching_huggingface(self.config, Path(source)), self.groups.world))
            self.notes.append(f" initial weights from the Hugging Face folder {source}")
        return TrainState()

    # ---- saving -------------------------------------------------------------------------------------------------

    def save_function(self, engine: Engine, on_saved: OnSaved) -> Callable[[TrainState], None] | None:
        return partial(self._save, engine, on_saved) if self.config.save.save is not None else None

    def _save(self, engine: Engine, on_saved: OnSaved, state: TrainState) -> None:
        section, step = self.config.save, state.iteration
        folder = section.save
        assert folder is not None
        counters = {key: value for key, value in asdict(state).items() if key != "owes_evaluation" or value}
        client_state = {**counters, "schedule": asdict(lr_scheduler_of(engine).schedule),
                        "data": self._data_fingerprint, "tokenizer": asdict(self.tokenizer)}
        engine.save_checkpoint(folder, client_state=client_state, save_optimizer_states=not section.no_save_optim,
                               save_rng_states=not section.no_save_rng,
                               keep=Keep(section.keep_last, section.keep_every), in_background=section.async_save,
                               on_complete=lambda report: on_saved(report, step, folder))

    def save_finished_run(self, engine: Engine, on_saved: OnSaved, state: TrainState) -> None:
        """Save a run that was already complete when loaded, if --save is not the --load folder."""
        root, source = self.config.save.save, self._source
        if root is not None and source is not None and not on_rank_0(
                lambda: Path(root).resolve() == source[0].resolve()
                or tag_of_iteration(state.iteration) in self._saved_steps, self.groups.world):
            self._save(engine, on_saved, state)
            engine.finish_save()


@contextmanager
def explain_load_errors(folder: str | None) -> Iterator[None]:
    """Prefix a CheckpointError in the block with the flag and folder that it concerns."""
    try:
        yield
    except CheckpointError as error:
        if folder is None or str(error).startswith("--load"):
            raise
        where = "--load" if folder in str(error) else f"--load {folder}"
        raise CheckpointError(f"{where}: {error}") from error


def _compare_models(saved: ModelConfig, present: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(flag, saved value, value of this run)."""
    now = present.architecture()
    return [(flag_name(key), was, now[key]) for key, was in saved.architecture().items()]


def _check_model(config: Config, checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError that names every differing field of the model."""
    saved = checkpoint.config
    rows = _compare_models(ModelConfig(**saved["model"]), config.model)
    remedies = "give the checkpoint's values, or another folder"
    if not config.save.finetune:
        if all(was == now for _, was, now in rows):
            remedies += ", or --finetune (weights only), or --load-precision-change where only precision differs"
        if not config.save.load_precision_change:
            rows.append(("precision", recorded_precision(saved), config.precision.name))
        length = saved["data"]["seq_length"] or saved["model"]["max_position_embeddings"]
        rows.append(("--seq-length", length, config.seq_length))
    differing = [f"{name} {was} in the checkpoint, {now} here" for name, was, now in rows if was != now]
    if differing:
        raise CheckpointError(
            f"{checkpoint.tag} of {config.save.load} is of another run: {'; '.join(differing)}; {remedies}")


def _other_samples(saved: Mapping[str, Any], config: Config) -> str:
    """Why this run reads other samples: the corpus differs, or the seed, which orders it."""
    was, now, present = saved["train"]["seed"], config.train.seed, config.as_dict()["data"]
    is_same = all(saved["data"].get(key) == present[key] for key in ("train_data", "valid_data", "test_data", "split"))
    if was == now:
        return ("--train-data is another corpus than the checkpoint's"
                + (", or the checkpoint's version of this program shuffled it otherwise" if is_same else ""))
    return (f"--seed is {was} in the checkpoint, {now} here: the order of the samples is another"
            + ("" if is_same else ", and --train-data may be another corpus"))


def _open_matching_huggingface(config: Config, folder: Path) -> ExternalCheckpoint:
    """The weights of --load-hf; CheckpointError if its model differs from the flags."""
    read_model_fields(str(folder))  # raises for an invalid folder
    weights = open_huggingface(folder)
    if differing := [f"{name} {theirs} there, {ours} here"
                     for name, theirs, ours in _compare_models(weights.model, config.model) if theirs != ours]:
        raise CheckpointError(f"--load-hf {folder} is another model: {'; '.join(differing)}; give its values")
    return weights


SCHEDULE_FLAGS = {"decay_steps": "--lr-decay-iters", "style": "--lr-decay-style", "peak": "--lr", "floor": "--min-lr",
                  "warmup_steps": "--lr-warmup-iters", "warmup_type": "--warmup-type", "tail": "--cycle-decay",
                  "wsd_style": "--lr-wsd-decay-style", "wsd_steps": "--lr-wsd-decay-iters",
                  "momentum_low": "--cycle-min-mom", "momentum_high": "--cycle-max-mom",
                  "momentum_tail": "--cycle-mom-growth"}


# ---- the loop's state: the client state of its checkpoints ---------------------------------------------------------

def _read_loop_state(config: Config, saved: Mapping[str, Any], present: LRSchedule, where: str
                     ) -> tuple[TrainState, LRSchedule, str]:
    """(state, schedule to use, fingerprint of the data). The saved schedule and that of the flags, `present`, must
    agree unless a flag chooses one. `tokenizer_facts_of_state` reads the tokenizer."""
    known = {"iteration": int, "consumed_samples": int, "schedule": dict, "data": str}
    record = check_record({name: saved[name] for name in (*known, "owes_evaluation") if name in saved}, where, known,
                          {"owes_evaluation": bool})
    kinds = get_type_hints(LRSchedule)
    required = {item.name: kinds[item.name] for item in fields(LRSchedule) if item.default is MISSING}
    schedule = LRSchedule(**check_record(record["schedule"], f"{where}: schedule", required, kinds))
    state = TrainState(record["iteration"], record["consumed_samples"], record.get("owes_evaluation", False))
    with reraise_as_corrupt(f"{where}: schedule"):
        # Values of which each is good may be senseless together.
        schedule(state.iteration)
        schedule.betas(state.iteration)
    if schedule == present or config.schedule.override_lr_scheduler:
        return state, present, record["data"]
    if config.schedule.use_checkpoint_lr_scheduler or config.train.skip_train:
        return state, schedule, record["data"]
    flags = SCHEDULE_FLAGS if config.schedule.lr_decay_iters else {**SCHEDULE_FLAGS, "decay_steps": "--train-iters"}
    rows = "; ".join(f"{flag} {getattr(schedule, name)} in the checkpoint, {getattr(present, name)} here"
                     for name, flag in flags.items() if getattr(schedule, name) != getattr(present, name))
    raise ConfigError(
        f"the learning rate schedule of {config.save.load} differs: {rows}; give the checkpoint's values, or "
        "--override-lr-scheduler to follow the flags, or --use-checkpoint-lr-scheduler to follow the checkpoint")


# ---- notes ---------------------------------------------------------------------------------------------------------

def _change_notes(engine: Engine, checkpoint: Checkpoint, config: Config, saved_rule: Mapping[str, Any]) -> list[str]:
    """Log lines on what was resharded, and on methods (docs/methods.md) that a resumed run applies differently.
    `saved_rule` is the optimizer state of the checkpoint, if loaded. Settings that must not differ are refused
    elsewhere."""
    saved, present, notes = checkpoint.config, config.as_dict(), []
    layout = {**checkpoint.layout, "precision": recorded_precision(saved)}
    resharded = [f"{key} {layout.get(key)} -> {now}"
                 for key, now in {**engine.layout, "precision": config.precision.name}.items()
                 if layout.get(key) != now]
    if layout["precision"] != config.precision.name == "fp16":
        resharded.append(f"the loss scale starts again at {engine.cur_scale:g}")
    if resharded:
        notes.append(f" resharded: {', '.join(resharded)}")
    train, batch = saved["train"], engine.train_batch_size()
    saved_batch = train["global_batch_size"] or train["batch_size"] * checkpoint.layout["dp"]
    if saved_batch != batch:
        notes.append(f" warning: the global batch is {saved_batch} in the checkpoint, {batch} here: "
                     f"--global-batch-size {saved_batch} keeps it")

    changes: list[tuple[str, Any, Any]] = []  # (field, in the checkpoint, here)
    ramps = [" ".join(section.get("rampup_batch_size", ())) or "off" for section in (train, present["train"])]
    if ramps[0] != ramps[1]:
        changes.append(("rampup_batch_size", ramps[0], ramps[1]))
    for section, switch in (("layer_drop", "progressive_layer_drop"), ("quantize", "quantize_training")):
        before, now = saved.get(section, {}), present[section]
        if bool(before.get(switch)) != now[switch]:
            changes.append((switch, bool(before.get(switch)), now[switch]))
        elif now[switch]:
            changes += [(name, before[name], value) for name, value in now.items() if before.get(name, value) != value]
    before, now, why = saved.get("optim", {}), present["optim"], ""
    name, frozen_at = "onebit_freeze_step", saved_rule.get("frozen_at")
    if now["optimizer"] in ONE_BIT_OPTIMIZERS and before.get("optimizer") == now["optimizer"] \
            and before.get(name) != now[name]:
        changes.append((name, before.get(name), now[name]))
        why = "" if frozen_at is None else f" (no effect: the variance has been frozen since step {frozen_at})"
    if changes:
        texts = [[("on" if value else "off") if isinstance(value, bool) else str(value) for value in (before, now)]
                 for _, before, now in changes]
        said = ", ".join(f"{flag_name(name)} {' -> '.join(text)}" for (name, _, _), text in zip(changes, texts))
        notes.append(f" changed: {said}{why}")
    return notes
