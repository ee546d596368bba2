"""Ranks that were told different things do not begin, whoever started them, and each difference is named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.config.schema import flag_name
from megatron.config.tree import SECTIONS, Config
from megatron.distributed import preflight
from megatron.distributed.preflight import check_ranks_match, code_digest, mismatch_message
from megatron.distributed.rank_text import format_ranks
from megatron.errors import ConfigError, PeerError, TrainerError
from megatron.inference.model_args import flags_to_compare, model_parser
from megatron.zero import initialize
from tests.distributed import run_ranks
from tests.megatron.launch.processes import ROOT, begin, environment, error_of, launched, python

FACTS = {"--lr": 0.001, "--zero-stage": 1, "torch": "2.13.0", "code": "abc"}


def compare(told: Sequence[Mapping[str, Any]], limit: float = 5.0, sizes: Sequence[int] = ()) -> list[str | None]:
    """What each rank is told to end with, where all begin at the same time; None: it may begin."""
    store, are_there = dist.HashStore(), threading.Barrier(len(told))

    def work(rank: int) -> str | None:
        are_there.wait()
        try:
            check_ranks_match(store, rank, sizes[rank] if sizes else len(told), told[rank], timedelta(seconds=limit))
        except TrainerError as error:
            return f"{type(error).__name__}: {error}"
        return None

    with ThreadPoolExecutor(len(told)) as pool:
        return [job.result(30) for job in [pool.submit(work, rank) for rank in range(len(told))]]


# ---- what is compared --------------------------------------------------------------------------------------------


def test_every_difference_is_named_with_its_values_and_their_ranks_on_every_rank() -> None:
    told = [FACTS, {**FACTS, "--lr": 0.002}, FACTS, FACTS, {**FACTS, "torch": "2.11.0", "--new": None}]
    found = compare(told)
    assert len(set(found)) == 1 and found[0] is not None and found[0].startswith("ConfigError: the ranks were started ")
    assert "--lr is 0.001 on ranks 0, 2-4, 0.002 on rank 1;" in found[0]
    assert "torch is 2.13.0 on ranks 0-3, 2.11.0 on rank 4;" in found[0]
    assert "--new is not there on ranks 0-3, null on rank 4." in found[0] and "zero-stage" not in found[0]


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LINGER_SECONDS", 0.2)
    began = time.monotonic()
    found = compare([FACTS] * 3, 0.5, [7] * 3)
    assert time.monotonic() - began < 30 and len(set(found)) == 1 and found[0] is not None
    assert found[0].startswith("PeerError: ranks 3-6 of 7 did not come within 0.5 s")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_given_twice_is_sent_away_and_the_others_begin(rank: int) -> None:
    store, limit = dist.HashStore(), timedelta(seconds=5)
    with ThreadPoolExecutor(4) as pool:
        ranks = [pool.submit(check_ranks_match, store, number, 3, FACTS, limit) for number in range(3)
                 if number != rank]
        first = pool.submit(check_ranks_match, store, rank, 3, FACTS, limit)
        first.result(10)
        second = pool.submit(check_ranks_match, store, rank, 3, FACTS, limit)
        here = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(ConfigError, match=f"^rank {rank} was given twice: to {here}, which came first, and to "):
            second.result(10)
        assert [job.result(10) for job in ranks] == [None, None]


def test_without_rank_0_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "REPORT_SLACK", timedelta(0))
    with pytest.raises(PeerError, match="rank 0 did not say within 0.3 s"):
        check_ranks_match(dist.HashStore(), 1, 2, FACTS, timedelta(seconds=0.3))


@pytest.mark.parametrize("sizes", [(2, 3), (4, 3, 3, 4)])
def test_ranks_of_jobs_of_different_sizes_are_told_at_once(sizes, monkeypatch):
    """Nobody waits for a rank that one of them knows nothing of."""
    monkeypatch.setattr(preflight, "LINGER_SECONDS", 0.5)
    began = time.monotonic()
    found = compare([FACTS] * len(sizes), 60, sizes)
    assert time.monotonic() - began < 30
    assert len({*found}) == 1 and found[0] is not None, found
    assert "ConfigError: the ranks were started differently: WORLD_SIZE is " in found[0]
    for size in set(sizes):
        who = [rank for rank, own in enumerate(sizes) if own == size]
        assert f"{size} on {format_ranks(who)}" in found[0]


def test_a_change_of_the_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest()
    assert before == code_digest()
    for package in preflight.COMPARED_PACKAGES:
        (tmp_path / package / "x").mkdir(parents=True)
        (tmp_path / package / "x" / "__init__.py").touch()
        (tmp_path / package / "x" / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(preflight, "__file__", str(tmp_path / "megatron" / "launch" / "alike.py"))
    seen = {before, code_digest()}
    for change in (lambda: (tmp_path / "mpu" / "x" / "a.py").write_text("a = 2\n"),
                   lambda: (tmp_path / "data" / "x" / "a.py").rename(tmp_path / "data" / "x" / "b.py"),
                   lambda: (tmp_path / "megatron" / "x" / "a.py").unlink()):
        change()
        assert code_digest() not in seen
        seen.add(code_digest())


PLACES = {"train_data", "valid_data", "test_data", "vocab_file", "merge_file", "tokenizer_path", "data_cache_path",
          "offload_optimizer_nvme_path", "offload_param_nvme_path", "flops_profiler_output_file",
          "profile_dir"}
"""May differ from node to node; whether they are given is compared, and what is found there later."""


def test_no_two_values_of_any_setting_are_taken_for_the_same() -> None:
    for section, name in ((section, item.name) for section, kind in SECTIONS.items() for item in fields(kind)):
        ours, theirs, elsewhere = Config(), Config(), Config()
        value = ours.settings()[name]
        others = [not value, value] if isinstance(value, bool) else (
            [value + 1, value + 2] if isinstance(value, (int, float)) else [(*value, "a"), (*value, "b")]
            if isinstance(value, tuple) else [f"{value}x", f"{value}y"])
        for config, other in zip((theirs, elsewhere), others, strict=True):
            object.__setattr__(getattr(config, section), name, other)  # unchecked
        found = mismatch_message([(ours.rank_invariant_settings(), [0]), (theirs.rank_invariant_settings(), [1])])
        assert f"{flag_name(name)} is " in found
        if name in PLACES:
            assert f"{flag_name(name)} is not given on rank 0, given on rank 1" in found
        same = theirs.rank_invariant_settings() == elsewhere.rank_invariant_settings()
        assert same == (name in PLACES)


# ---- real ranks --------------------------------------------------------------------------------------------------

TINY = ("--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --batch-size 2 "
        "--tokenizer-type ByteLevelTokenizer --mock-data --train-iters 3 --eval-interval 0").split()
WRAPPER = f"""
import os, runpy, sys
rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
sys.argv[1:] = sys.argv[1:-1] + (sys.argv[-1].split() if rank == "1" else [])
runpy.run_path(r"{ROOT}/pretrain_gpt2.py", run_name="__main__")
"""
"""The last argument is for rank 1 alone."""


STARTERS: dict[str, Callable[[Sequence[str], int], list[list[str]]]] = {
    "launcher": lambda command, port: [
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", *command[1:]]],
    "torchrun": lambda command, port: [[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                                        "--master-port", str(port), *command[1:]]],
    "slurm": lambda command, port: [["env", f"SLURM_PROCID={rank}", "SLURM_NTASKS=2", f"SLURM_LOCALID={rank}",
                                     "SLURM_NTASKS_PER_NODE=2", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}",
                                     *command] for rank in range(2)],
    "by hand": lambda command, port: [["env", f"RANK={rank}", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                                       f"MASTER_PORT={port}", *command] for rank in range(2)]}


def test_a_rank_by_hand_that_does_not_find_rank_0_says_so(port: int) -> None:
    """In one line, and no stack of torch's."""
    done = python("pretrain_gpt2.py", *TINY, "--startup-timeout-seconds", 2, MASTER_ADDR="localhost", MASTER_PORT=port,
                  RANK=1, WORLD_SIZE=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"rank 0 did not answer at localhost:{port} within 2 s (Connection refused)" in error_of(done, 5)


@pytest.mark.parametrize("starter", [pytest.param(one, marks=[] if one == "by hand" else pytest.mark.slow)
                                     for one in STARTERS])
def test_no_run_begins_whoever_started_it(starter: str, tmp_path: Path, port: int) -> None:
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER)
    command = [sys.executable, str(wrapper), *TINY, "--save", str(tmp_path / "run"), "--lr 0.5 --zero-stage 1"]
    running = [begin(line, env=environment(), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                     text=True) for line in STARTERS[starter](command, port)]
    said = "".join(process.communicate(timeout=90)[1] for process in running)
    codes = [process.returncode for process in running]
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert 0 not in codes and (starter == "torchrun" or set(codes) == {2}), said
    assert len(errors) == 1, said
    assert "--lr is 0.00015 on rank 0, 0.5 on rank 1; --zero-stage is 0 on rank 0" in errors[0]
    assert not [*(tmp_path / "run").glob("global_step*")]


def test_programs_that_use_a_model_compare_whether_their_places_are_given() -> None:
    parser = model_parser("python -m megatron.generate", "", "")
    plain = flags_to_compare(parser.parse_args(["--load", "run"]))
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-path"):
        one, two = (flags_to_compare(parser.parse_args(["--load", "run", flag, place])) for place in "ab")
        assert one == two and one[flag] == "given" and plain[flag] == "not given"


def no_engine(**arguments: Any) -> str:
    """What `zero.initialize` refuses this rank with; "": it does not."""
    try:
        initialize(**arguments)
    except ConfigError as error:
        return str(error)
    return ""


def other_objects(rank: int, kind: str) -> str:
    """Rank 1 differs in what is no plain number of the configuration."""
    is_other, trained, scheduler = rank == 1, True, None
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = (list(layer.parameters()) for layer in model)
    lr: Any = 0.01
    betas: Any = (0.9, 0.999)
    if kind == "tensor":
        lr = torch.tensor(1.0 if is_other else 0.01)
    elif kind == "array":
        lr = np.float32(1.0 if is_other else 0.01)
    elif kind == "list":
        betas = [0.5 if is_other else 0.9, 0.999]
    elif kind == "membership" and is_other:
        first, second = first[:1], [*second, first[1]]
    elif kind == "frozen":
        trained = not is_other
    first[0].requires_grad = trained
    groups = [{"params": first, "betas": betas}, {"params": second, "lr": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=lr)
    if kind == "schedule":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1 if is_other else 0.9)
    return no_engine(model=model, optimizer=optimizer, lr_scheduler=scheduler,
                     config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}})


OTHER_OBJECTS = [
    ("", ""), ("tensor", "lr of param group 0 is 0.0"), ("array", "lr of param group 0 is 0.0"),
    ("list", r"betas of param group 0 is [0.9, 0.999] on rank 0, [0.5, 0.999] on rank 1"),
    ("membership", "param group 0 is 2 parameters"),
    ("frozen", "parameter 0 is 0.weight: float32 [2, 2] in unit root on rank 0, 0.weight: float32 [2, 2] (frozen)"),
    ("schedule", "gamma is 0.9 on rank 0, 0.1 on rank 1")]


def other_config(rank: int, changed: Mapping[str, Any], lr: float) -> str:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "Adam", "params": {"lr": 0.001}}} | (dict(changed) if rank == 1 else {})
    model, optimizer = torch.nn.Linear(2, 2), None
    if lr:
        del config["optimizer"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr * (rank + 1))
    return no_engine(model=model, optimizer=optimizer, config=config)


OTHER_CONFIGS: list[tuple[dict[str, Any], float, str]] = [
    ({}, 0.0, ""), ({"zero_optimization": {"stage": 2}}, 0.0, "zero_optimization.stage is 1 on rank 0, 2 on rank 1"),
    ({"gradient_clipping": 3.0}, 0.0, "gradient_clipping is 0.0 on rank 0, 3.0 on rank 1"),
    ({"bf16": {"enabled": True}}, 0.0, "bf16"), ({"gradient_accumulation_steps": 4}, 0.0, "is "),
    ({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}, 0.0, "lr is 0.001 on rank 0, 0.1 on rank 1"),
    ({"csv_monitor": {"enabled": True}}, 0.0, "csv_monitor.enabled is null on rank 0, runs/DeepSpeedJobName on rank 1"),
    ({}, 0.5, "lr of param group 0 is 0.5 on rank 0, 1.0 on rank 1")]


def every_difference(rank: int, world_size: int) -> list[str]:
    return [*(other_objects(rank, kind) for kind, _ in OTHER_OBJECTS),
            *(other_config(rank, changed, lr) for changed, lr, _ in OTHER_CONFIGS)]


def test_scripts_whose_ranks_differ_get_no_engine() -> None:
    expected = [words for *_, words in [*OTHER_OBJECTS, *OTHER_CONFIGS]]
    for words, first, second in zip(expected, *run_ranks(every_difference, 2), strict=True):
        assert first == second and words in first and bool(first) == bool(words), (words, first)


def test_ranks_that_find_other_text_under_the_same_name_do_not_train(tmp_path: Path) -> None:
    """Each node has its own copy."""
    for rank in range(2):
        (tmp_path / f"corpus{rank}.jsonl").write_text("".join(f'{{"text": "{word} and more text"}}\n'
                                                              for word in range(40 + rank)))
    flags = [flag for flag in TINY if flag != "--mock-data"]
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER)
    done = launched(2, wrapper, *flags, "--train-data", tmp_path / "corpus0.jsonl", "--data-cache-path",
                    tmp_path / "cache", f"--train-data {tmp_path}/corpus1.jsonl", cwd=tmp_path)
    assert "the training corpus is " in error_of(done, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("module", ["serve", "generate"])
def test_ranks_that_use_a_model_differently_do_not_begin(module: str, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER.partition("runpy.run_path")[0] +
                       f"runpy.run_module('megatron.{module}', run_name='__main__', alter_sys=True)\n")
    done = launched(2, wrapper, "--load", tmp_path, "--batch-size 3", cwd=tmp_path)
    assert "--batch-size is 8 on rank 0, 3 on rank 1" in error_of(done, 2)
