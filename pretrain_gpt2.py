"""Pretrain a GPT-2: flags -> config -> groups -> model -> engine -> loop -> checkpoint. `--help` lists the flags."""

from __future__ import annotations

import sys

from megatron.distributed.signals import exit_on_stop_signal

if __name__ == "__main__":
    exit_on_stop_signal()  # before the slow imports below

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from signal import SIGHUP

from megatron.config.run_config import check_wandb
from megatron.distributed.exit_codes import exit_with_error, run, shows_tracebacks
from megatron.distributed.process_group import publish_status, read_environment
from megatron.distributed.rank_status import START_UP, STATUS
from megatron.distributed.signals import BEFORE_FIRST_STEP, StopListener
from megatron.package import check_package_shadowing


def program() -> int:
    """Run `main` with stop signals handled; returns the exit code of the process."""
    stop = StopListener(startup_reason=BEFORE_FIRST_STEP)
    try:
        return run(lambda: main(stop.listen(exit_with_error, dump_stacks=shows_tracebacks())), is_job=True)
    finally:
        stop.close()


def main(stop: StopListener | None = None) -> int:
    """One run. A process may call it several times: it restores all global state."""
    with StopListener().listening() if stop is None else nullcontext(stop) as listening:
        return _run(listening)


def _run(stop: StopListener) -> int:
    check_package_shadowing()
    from megatron.config.cli import is_dry_run, parse_args

    env = read_environment()
    world_size = env.world_size
    publish_status(env)
    if is_dry_run(sys.argv[1:]):
        from megatron.plan.cli import print_plan
        return print_plan(sys.argv[1:], world_size, env.local_world_size, summary=True) if env.rank == 0 else 0
    STATUS.set_activity(START_UP)
    config = parse_args(sys.argv[1:], world_size)
    if config.train.skip_train:
        config = replace(config, save=replace(config.save, save=None))
    config.check_world(world_size)  # wrong flags fail here, before torch is imported
    if env.rank == 0 and config.log.wandb_project is not None:
        with config.key_names.translate_errors():
            check_wandb("--wandb-project")
    from megatron.train.input_checks import check_inputs
    check_inputs(config.data)  # missing files fail here too

    from megatron.distributed import process_group
    from megatron.distributed.consistency import all_succeed_or_raise, on_rank_0
    from megatron.plan.alternatives import oom_hint
    from megatron.recompute import notes as recompute_notes
    from megatron.train import build
    from megatron.train.evaluation import generate_samples
    from megatron.train.loop import Trainer
    from megatron.train.processor import keep_freed_memory, precision_notes as processor_notes
    from megatron.train.resume import RunCheckpoints
    from megatron.train.run_log import RunLog, check_log_paths, closing_lines, header_lines, header_record
    from megatron.zero.stages import ineffective_on_gpu_notes
    from mpu import groups as mpu_groups

    process_group.register_stop_check(stop.is_stop_pending)
    process_group.init_process_group(env, config.parallel.distributed_backend, config.parallel.startup_limit,
                                     must_match=config.rank_invariant_settings())
    device = process_group.device_for(env, config.parallel.distributed_backend)
    if device.type == "cpu":
        keep_freed_memory(return_large_blocks="nvme" in (config.offload.offload_optimizer_device,
                                                         config.offload.offload_param_device))
    groups = mpu_groups.build(config.parallel.model_parallel_size, timedelta(seconds=config.parallel.startup_limit))
    tokenizer = all_succeed_or_raise(lambda: build.tokenizer(config), groups.world)
    config = build.with_vocab_size(config, tokenizer)
    with oom_hint(config, env.rank, world_size, "cuda" if device.type == "cuda" else "cpu"), \
            config.key_names.translate_errors(), ExitStack() as closing:
        on_rank_0(lambda: check_log_paths(config.log), groups.world)
        checkpoints = closing.enter_context(RunCheckpoints(config, groups, tokenizer.facts))
        datasets = build.datasets(config, tokenizer, groups)
        assert datasets.train is not None, "build.datasets refuses a run without training text"
        build.seed_everything(config.train, groups)
        closing.enter_context(build.deterministic_algorithms(config.train))
        recomputation = build.recomputation(config, groups)
        engine = build.engine(config, build.model(config, groups, recomputation), groups, device)
        state = checkpoints.resume(engine, datasets.fingerprint)
        log = closing.enter_context(RunLog(config.log, config.train.train_iters, state.iteration,
                                           writes=groups.world.rank == 0, extra_line=recomputation.report,
                                           survives_closed_stdout=config.save.save is not None))
        unused = (*(ineffective_on_gpu_notes(config.zero) if device.type == "cuda" else ()),
                  *recompute_notes(config.recompute, config.parallel, device),
                  *processor_notes(config.precision.name, device))
        log.start_run(config, header_record(config, groups, device), header_lines(config, groups, device, tokenizer))
        for line in (*engine.notes, *config.notes, *unused, *datasets.notes, *checkpoints.notes, *log.notes):
            log.print_line(config.key_names.translate(line))
        trainer = Trainer(config, engine, build.micro_batch_sampler(config, groups, tokenizer), device, log,
                          checkpoints.save_function(engine, log.saved), stop, build.token_bytes(config, tokenizer))
        is_evaluation = config.train.skip_train
        if state.iteration >= config.train.train_iters > 0 and not is_evaluation:
            log.print_line(f" nothing to do: {config.save.load} is at iteration {state.iteration} already, and "
                           f"--train-iters is {config.train.train_iters}")
            checkpoints.save_finished_run(engine, log.saved, state)
        elif is_evaluation or trainer.run(state, datasets.train, datasets.valid):
            is_complete = trainer.finish(state, datasets.valid, datasets.test)
            if is_complete and not config.data.mock_data:
                samples = generate_samples(engine, tokenizer, config) if config.log.sample_tokens else []
                for line in closing_lines(config, samples) if env.rank == 0 else ():
                    log.print_line(line)
        if stop.signal != SIGHUP:  # the terminal was closed
            log.check_console(f"saved step {state.iteration} in {config.save.save}")
    process_group.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(program())
