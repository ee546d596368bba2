"""How a pretraining run is saved and resumed: what may differ from the run of its checkpoint, and what it reports.

The engine saves and restores itself (zero/api/saved.py); the loop's own state travels as its client state: where it is
in the data, which data that is, and the learning rate schedule it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from data.facts import TokenizerFacts, tokenizer_facts_of_state
from megatron.checkpoint.agree import agree, on_rank_0
from megatron.checkpoint.choice import candidates, dangling, is_empty, locate, tag_of_step
from megatron.checkpoint.commit import Keep, locked, probe, storing, sweep
from megatron.checkpoint.interchange.foreign import Foreign
from megatron.checkpoint.interchange.huggingface import open_folder
from megatron.checkpoint.manifest import MANIFEST, step_tag
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.strict import Record, sense_of
from megatron.checkpoint.tags import held, steps_of, tag_names
from megatron.checkpoint.trash import BehindTheRun
from megatron.checkpoint.writer import SaveReport
from megatron.config.hf_shape import shape_in
from megatron.config.optimizers import ONE_BIT
from megatron.config.tree import Config, flag_name
from megatron.errors import CheckpointError, ConfigError, StorageError
from megatron.optim.schedule import LRSchedule
from megatron.train.loop import TrainState
from megatron.zero.api.engine import Engine
from megatron.zero.api.saved import LoadOptions, load_external_weights
from megatron.zero.api.schedule import LRScheduleAdapter
from megatron.zero.api.shared import check_shared_state, shared_state_label
from mpu.groups import Groups

MUST_MATCH = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
    "layernorm_epsilon",
    "tile_factor",
)
"""Model fields a checkpoint must share with the run that loads it."""

Tell = Callable[[SaveReport, int, str], None]
"""That a save is complete: what it was, of which step, and in which folder."""


@dataclass
class Checkpoints:
    """Loads once at the start, saves whenever asked. Made before the data is: folders that cannot be used end a run
    before its text is tokenized."""

    config: Config
    groups: Groups
    tokenizer: TokenizerFacts
    notes: list[str] = field(default_factory=list)
    """What was loaded and what could not carry over, for the log."""

    def __post_init__(self) -> None:
        self._trash = BehindTheRun()
        self._loaded: Path | None = None
        with ExitStack() as held:
            if self.config.save.save is not None:
                root = Path(self.config.save.save)
                on_rank_0(lambda: self._claim(root, held), self.groups.world)
            with loaded_from(self.config.save.load):
                self._source = on_rank_0(self._find, self.groups.world) if self.config.save.load is not None \
                    else (None, None)
            self._held = held.pop_all()  # until `__exit__`; where --load names nothing, nobody would call that

    def _claim(self, root: Path, held: ExitStack) -> None:
        """Before the first step: the folder can be written, no other job saves into it, and what an interrupted save
        left is tidied up; what takes long of that goes on behind the run."""
        probe(root)
        held.enter_context(locked(root))
        with storing(root, 0):
            sweep(root, delete=self._trash.delete)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        """Let go of the --save folder."""
        self._held.close()

    # ---- loading ------------------------------------------------------------------------------------------------

    def resume(self, engine: Engine, data_fingerprint: str) -> TrainState:
        """Where this run starts; `data_fingerprint` says which data it reads."""
        self._data_fingerprint = data_fingerprint
        section = self.config.save
        if section.load is None:
            return self._start(engine)
        root, tag = self._source
        if root is None:
            self.notes.append(f" starting from scratch: {section.load}, both --save and --load, holds no checkpoint "
                              f"yet{dangling(Path(section.load))}")
            return self._start(engine)
        self._loaded = Path(root)
        with loaded_from(section.load):
            return self._go_on(engine, root, tag)

    def _go_on(self, engine: Engine, root: str, tag: str | None) -> TrainState:
        """From a checkpoint."""
        section = self.config.save
        found = open_checkpoint(root, tag, world=self.groups.world, fallback=section.resume_fallback)
        with sense_of(f"tag {found.tag}: {MANIFEST}: config"):
            _check_model(self.config, found)
        agree(lambda: check_shared_state(found), self.groups.world)
        optimizer = not (section.finetune or section.no_load_optim)
        saved: dict[str, Any] = found.shared_state["client_state"]
        self._check_tokenizer(found.tag, saved)
        if not section.finetune and "schedule" not in saved:
            raise CheckpointError(f"{found.tag} of {section.load} was not saved by the trainer and states no position "
                                  "of a run: give --finetune to start from its weights")
        scheduler = _follows(engine)
        position = None if section.finetune else position_in(saved,
                                                             f"{shared_state_label(found)}: field 'client_state'")
        if position is not None:  # the rate is set by the schedule in force: it has to be chosen before
            scheduler.schedule = _agreed_schedule(self.config, position.schedule, scheduler.schedule)
        same_precision = _precision(found.config) == self.config.precision.name
        engine.restore(found, LoadOptions(optimizer, counters=not section.finetune, scheduler=not section.finetune,
                                          rng=not (section.finetune or section.no_load_rng),
                                          loss_scale=same_precision,
                                          hyper_parameters=False))  # the flags' own
        what = "weights" if section.finetune else "weights and optimizer" if optimizer else "weights, without optimizer"
        self.notes.append(f" loaded {what} of {found.tag} from {section.load}")
        if position is None:
            return self._start_at(TrainState())
        self.notes += _relaid(engine, found, self.config.precision.name)
        rule = found.shared_state["engine"].get("rule", {}) if optimizer else {}
        self.notes += changed_methods(found.config, self.config, rule)
        if engine.rng_note is not None:
            self.notes.append(engine.rng_note)
        if position.data != self._data_fingerprint:
            self.notes.append(f" warning: {_other_samples(found.config, self.config)}; the data position carries over")
        return self._start_at(position.state)

    def _check_tokenizer(self, tag: str, saved: Mapping[str, Any]) -> None:
        """Ids mean something else under another tokenizer, even one of as many."""
        known = tokenizer_facts_of_state(saved)
        if known is None or known == self.tokenizer:
            return
        words = f"trained with {known.description}, and the tokenizer here is {self.tokenizer.description}"
        if not self.config.save.finetune:
            raise CheckpointError(f"{tag} of {self.config.save.load} was {words}; give its own, --tokenizer-type and "
                                  "its files, or --finetune")
        self.notes.append(f" warning: the weights were {words}: they know nothing of its ids")

    def _start_at(self, state: TrainState) -> TrainState:
        """`state`, with a line where --save holds later steps: of a branch that this run leaves, or of another run."""
        root = self.config.save.save
        held = {} if root is None else on_rank_0(lambda: _steps_in(Path(root)), self.groups.world)
        if later := [tag for tag, step in held.items() if step > state.iteration]:
            more = f" and {len(later) - 3} more" if len(later) > 3 else ""
            self.notes.append(f" note: --save {root} holds {', '.join(later[:3])}{more}, later than iteration "
                              f"{state.iteration} where this run starts: a save of the same name replaces it; "
                              "after the first save `latest`, and so a resume, is of this run")
        return state

    def _start(self, engine: Engine) -> TrainState:
        """Step 0: from weights of Hugging Face where asked for, else from those the model was built with."""
        source = self.config.save.load_hf
        if source is not None:
            load_external_weights(engine.core, agree(lambda: _open_hf(self.config, Path(source)), self.groups.world))
            self.notes.append(f" initial weights from the Hugging Face folder {source}")
        return self._start_at(TrainState())

    def _find(self) -> tuple[str | None, str | None]:
        """Folder and tag to load; no folder where --load is a --save that holds nothing yet: the first start of a
        command made to be run again. No tag: the one that `latest` names."""
        section = self.config.save
        assert section.load is not None
        same = section.load == section.save  # then a colon belongs to the name, whether the folder exists or not
        root, tag = (Path(section.load), None) if same else locate(section.load)
        same = same or section.save is not None and root.resolve() == Path(section.save).resolve()
        if section.ckpt_step is not None:
            if tag is not None:
                raise ConfigError(f"--load {section.load} names a tag, and --ckpt-step {section.ckpt_step} another; "
                                  "give one of them")
            tag, note = tag_of_step(root, section.ckpt_step)
            self.notes += [f" {note}"] if note else []
        if same and tag is None and is_empty(root):
            return None, None
        if tag is None:
            candidates(root)  # or why there are none
        else:
            held(root, tag)
        return str(root), tag

    # ---- saving -------------------------------------------------------------------------------------------------

    def saver(self, engine: Engine, tell: Tell) -> Callable[[TrainState], None] | None:
        return partial(self._save, engine, tell) if self.config.save.save is not None else None

    def _save(self, engine: Engine, tell: Tell, state: TrainState) -> None:
        section, step = self.config.save, state.iteration
        folder = section.save
        assert folder is not None
        place = {key: value for key, value in asdict(state).items() if key != "owes_evaluation" or value}
        position = {**place, "schedule": asdict(_follows(engine).schedule), "data": self._data_fingerprint,
                    "tokenizer": asdict(self.tokenizer)}
        engine.save_checkpoint(folder, client_state=position, save_optimizer_states=not section.no_save_optim,
                               save_rng_states=not section.no_save_rng,
                               keep=Keep(section.keep_last, section.keep_every), in_background=section.async_save,
                               on_complete=lambda report: tell(report, step, folder))

    def save_finished(self, engine: Engine, tell: Tell, state: TrainState) -> None:
        """A run that was complete when it was loaded: it is saved as well, if --save is another folder than --load."""
        root = self.config.save.save
        if root is None or self._loaded is None:
            return
        own = self._loaded
        if not on_rank_0(lambda: Path(root).resolve() == own.resolve()
                         or step_tag(state.iteration) in tag_names(Path(root)), self.groups.world):
            self._save(engine, tell, state)
            engine.finish_save()


@contextmanager
def loaded_from(folder: str | None) -> Iterator[None]:
    """An error of a checkpoint in the block says which flag named it, and which folder."""
    try:
        yield
    except CheckpointError as error:
        if folder is None or str(error).startswith("--load"):
            raise
        where = "--load" if folder in str(error) else f"--load {folder}"
        raise CheckpointError(f"{where}: {error}") from error


def _steps_in(root: Path) -> dict[str, int]:
    """Of the folder that is saved into."""
    try:
        return steps_of(root)
    except CheckpointError as error:
        raise StorageError(f"--save: {error}") from error


def _follows(engine: Engine) -> LRScheduleAdapter:
    scheduler = engine.lr_scheduler
    assert isinstance(scheduler, LRScheduleAdapter), "build.engine gives the engine the schedule of the flags"
    return scheduler


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
        if not config.save.load_precision_change:
            rows.append(("precision", _precision(saved), _precision(present)))
        length = saved["data"]["seq_length"] or saved["model"]["max_position_embeddings"]
        rows.append(("--seq-length", length, config.seq_length))
    differing = [f"{name} {was} in the checkpoint, {now} here" for name, was, now in rows if was != now]
    if differing:
        raise CheckpointError(
            f"{found.tag} of {config.save.load} is of another run: {'; '.join(differing)}; "
            "give the checkpoint's values, or "
            "another --load"
            + ("" if config.save.finetune else ", or --finetune where only precision or length differ, "
               "or --load-precision-change where only precision does")
        )


def _other_samples(saved: Mapping[str, Any], config: Config) -> str:
    """Why this run reads other samples: both the corpus and the seed, which orders it, decide that."""
    was, now, present = saved["train"]["seed"], config.train.seed, config.as_dict()["data"]
    if was == now:
        return "--train-data is another corpus than the checkpoint's"
    same = all(saved["data"].get(key) == present[key] for key in ("train_data", "valid_data", "test_data", "split"))
    return (f"--seed is {was} in the checkpoint, {now} here: the order of the samples is another"
            + ("" if same else ", and --train-data may be another corpus"))


def _precision(config: Mapping[str, Any]) -> str:
    """fp32, fp16 or bf16, of a saved configuration."""
    return next((name for name in ("bf16", "fp16") if config["precision"][name]), "fp32")


def _relaid(engine: Engine, found: Checkpoint, precision: str) -> list[str]:
    """What was resharded for this run, in one line; none where nothing was."""
    saved, present = {**found.layout, "precision": _precision(found.config)}, {**engine.layout, "precision": precision}
    changes = [f"{key} {saved.get(key)} -> {now}" for key, now in present.items() if saved.get(key) != now]
    if saved["precision"] != precision == "fp16":
        changes.append(f"the loss scale starts anew at {engine.cur_scale:g}")
    return [f" resharded: {', '.join(changes)}"] if changes else []


def _open_hf(config: Config, folder: Path) -> Foreign:
    """The weights, of exactly the model that the flags describe."""
    shape_in(str(folder))  # or what is wrong with the folder
    found = open_folder(folder)
    rows = [(flag_name(key), _model_field(asdict(found.model), key), _model_field(asdict(config.model), key))
            for key in MUST_MATCH]
    if differing := [f"{name} {theirs} there, {ours} here" for name, theirs, ours in rows if theirs != ours]:
        raise CheckpointError(f"--load-hf {folder} is another model: {'; '.join(differing)}; give its values")
    return found


def _agreed_schedule(config: Config, saved: LRSchedule, present: LRSchedule) -> LRSchedule:
    """The checkpoint's schedule and the flags' must agree unless a flag says which one wins."""
    if saved == present or config.schedule.override_lr_scheduler:
        return present
    if config.schedule.use_checkpoint_lr_scheduler or config.train.skip_train:
        return saved
    rows = "; ".join(f"{flag} {getattr(saved, field)} in the checkpoint, {getattr(present, field)} here"
                     for field, flag in SCHEDULE_FLAGS.items() if getattr(saved, field) != getattr(present, field))
    raise ConfigError(
        f"the learning rate schedule of {config.save.load} differs: {rows}; --override-lr-scheduler takes the flags', "
        "--use-checkpoint-lr-scheduler the checkpoint's"
    )


SCHEDULE_FLAGS = {"style": "--lr-decay-style", "peak": "--lr", "floor": "--min-lr", "warmup_steps": "--lr-warmup-iters",
                  "decay_steps": "--lr-decay-iters", "warmup_type": "--warmup-type", "tail": "--cycle-decay",
                  "wsd_style": "--lr-wsd-decay-style", "wsd_steps": "--lr-wsd-decay-iters",
                  "momentum_low": "--cycle-min-mom", "momentum_high": "--cycle-max-mom",
                  "momentum_tail": "--cycle-mom-growth"}
"""Field of a schedule -> the flag that sets it."""


OWN = ("iteration", "consumed_samples", "owes_evaluation", "schedule", "data")
"""Fields of the client state that are of it."""


@dataclass(frozen=True)
class Position:
    state: TrainState
    schedule: LRSchedule
    data: str
    """The fingerprint of the text."""


def position_in(saved: Mapping[str, Any], where: str) -> Position:
    record = Record({name: saved[name] for name in OWN if name in saved}, where)
    schedule = _schedule(Record(record.take("schedule", dict), f"{where}: schedule"))
    owes = record.take("owes_evaluation", bool) if "owes_evaluation" in record.fields else False
    state = TrainState(record.count("iteration"), record.count("consumed_samples"), owes)
    with sense_of(f"{where}: schedule"):
        schedule(state.iteration)
        schedule.betas(state.iteration)
    return Position(state, schedule, record.take("data", str))


def _schedule(said: Record) -> LRSchedule:
    """Fields of later versions may be missing; one that is not known would be ignored, and is refused."""
    values: dict[str, Any] = {}
    for item in fields(LRSchedule):
        if item.name not in said.fields:
            if item.default is MISSING:
                raise CheckpointError(f"{said.where}: field {item.name!r} is missing")
        elif item.type == "str":
            values[item.name] = said.take(item.name, str)
        elif item.type == "int":
            values[item.name] = said.count(item.name)
        elif said.fields[item.name] is None and item.default is None:
            del said.fields[item.name]
        else:
            values[item.name] = said.number(item.name)
    said.done()
    return LRSchedule(**values)


# ---- methods that change what is learnt (docs/methods.md) ----------------------------------------------------------

SWITCHES = {"layer_drop": "progressive_layer_drop", "quantize": "quantize_training"}
"""Section of a method -> its switch."""
Tree = Mapping[str, Mapping[str, Any]]


def changed_methods(saved: Tree, config: Config, rule: Mapping[str, Any]) -> list[str]:
    """One line on what a resumed run does otherwise than that of its checkpoint. `saved` is its configuration, `rule`
    what it says of its optimizer, where that is loaded. What must not differ is refused elsewhere."""
    present = config.as_dict()
    changes = [change for section, switch in SWITCHES.items() for change in _of_method(saved, present, section, switch)]
    changes += _of_warm_up(saved, present, rule)
    return [f" changed: {', '.join(changes)}"] if changes else []


def _of_method(saved: Tree, present: Tree, section: str, switch: str) -> Iterator[str]:
    before, now = saved.get(section, {}), present[section]
    was_on, is_on = bool(before.get(switch)), bool(now[switch])
    if was_on != is_on:
        yield f"{flag_name(switch)} {_word(was_on)} -> {_word(is_on)}"
    elif is_on:
        yield from (f"{flag_name(name)} {_word(before[name])} -> {_word(value)}" for name, value in now.items()
                    if name in before and before[name] != value)


def _of_warm_up(saved: Tree, present: Tree, rule: Mapping[str, Any]) -> Iterator[str]:
    before, now = saved.get("optim", {}), present["optim"]
    name, frozen_at = "onebit_freeze_step", rule.get("frozen_at")
    if now["optimizer"] in ONE_BIT and before.get("optimizer") == now["optimizer"] and before.get(name) != now[name]:
        kept = "" if frozen_at is None else f" (no effect: the variance has been frozen since step {frozen_at})"
        yield f"{flag_name(name)} {before.get(name)} -> {now[name]}{kept}"


def _word(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
